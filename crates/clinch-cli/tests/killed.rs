//! Wrappers that are killed, on `file://`, and leave something behind that has the descriptor of their lock: also while they change its file.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use common::{CLOSE, Running, World, eventually, kill, runs, state};
use rustix::process::Signal;
use serde_json::Value;

/// Runs a program, and kills it at its first call of a number. Goes with what becomes of the program.
const KILL_AT: &str = "import ctypes,os,signal,sys
ptrace=ctypes.CDLL(None,use_errno=True).ptrace
ptrace.argtypes=[ctypes.c_long,ctypes.c_long,ctypes.c_void_p,ctypes.c_void_p]
TRACEME,SYSCALL,SETOPTIONS,GET_SYSCALL_INFO=0,24,0x4200,0x420e
TRACESYSGOOD,EXITKILL,AT_CALL=1,1<<20,signal.SIGTRAP|0x80
pid=os.fork()
if pid==0:
    ptrace(TRACEME,0,None,None)
    os.execvp(sys.argv[2],sys.argv[2:])
os.waitpid(pid,0)
assert ptrace(SETOPTIONS,pid,None,TRACESYSGOOD|EXITKILL)==0
info,passed=(ctypes.c_uint64*16)(),0
while True:
    ptrace(SYSCALL,pid,None,passed)
    _,status=os.waitpid(pid,0)
    if not os.WIFSTOPPED(status): sys.exit('it ended')
    stop,passed=os.WSTOPSIG(status),0
    if stop==AT_CALL:
        assert ptrace(GET_SYSCALL_INFO,pid,128,ctypes.addressof(info))>0
        if info[0]&0xff==1 and info[3]==int(sys.argv[1]):
            os.kill(pid,signal.SIGKILL)
            os.waitpid(pid,0)
            sys.exit(0)
    elif stop!=signal.SIGTRAP: passed=stop";

/// Starts `clinch`, which is killed at its first call of this number.
fn killed_at<'a>(world: &World, call: i64, args: impl IntoIterator<Item = &'a str>) -> Running {
    let clinch = world.clinch(args);
    let mut command = std::process::Command::new("python3");
    command.args(["-c", KILL_AT, &call.to_string()]).arg(clinch.get_program()).args(clinch.get_args());
    for (name, value) in clinch.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.current_dir(clinch.get_current_dir().unwrap()).stdin(std::process::Stdio::null());
    command.spawn().map(Running).unwrap()
}

/// A job that leaves something behind, which has the descriptor of the lock.
const DAEMON: &str = "sleep 600 > /dev/null 2>&1 & echo $! > daemon.pid";

/// The job hears nothing of it, and goes on beside the next holder.
#[test]
fn a_lock_that_is_taken_from_the_job_of_a_killed_wrapper_is_free_when_that_has_ended() {
    let part = "(echo $(exec sh -c 'echo $PPID') > part.pid; while :; do sleep 0.02; done) &";
    let tells = "trap 'echo > told; exit' TERM;";
    for (shell, begin) in [("sh", tells), ("sh", "trap '' TERM;"), ("bash", &format!("{CLOSE} {tells}"))] {
        let world = World::new();
        let job = format!("{begin} {part} echo $$ > job.pid; while :; do sleep 0.02; done");
        let run = world.start(["run", "x", shell, "-c", &job]);
        let parts = ["job.pid", "part.pid"].map(|name| world.pid(name));
        run.signal(Signal::KILL);
        let is_there = "grep -q '^State:.[^ZX]' /proc/$pid/status 2> /dev/null";
        let next = format!("for pid in $(cat job.pid part.pid); do {is_there} && echo $pid >> two; done; :");
        let mut next = world.start(["run", "x", "sh", "-c", &next]);
        eventually("the next one waits", || world.claims("x", "waiting").len() == 1);
        assert!(parts.into_iter().all(runs) && world.held("x"), "{begin}: it was ended by that");
        assert_eq!(world.code(["break", "--yes", "x"]), 0, "{begin}");
        assert_eq!((next.code(), world.read("two")), (0, String::new()), "{begin}: two at once");
        assert!(!parts.into_iter().any(runs), "{begin}");
        assert_eq!(world.path("told").exists(), begin.contains(tells), "{begin}");
    }
}

/// A part of a job that its environment does not tell, since that was cleared.
fn cleared(begin: &str) -> String {
    format!("env -i /bin/sh -c '{begin} echo $$ >> parts; while [ -e parts ]; do /bin/sleep 0.2; done'")
}

/// Takes the lock from a job whose wrapper was killed, once it has so many parts; says how many there were in the end, and how many beside the next holder.
fn take_from_the_job_of_a_killed_wrapper(job: &str, parts: usize) -> (usize, usize) {
    let world = World::new();
    world.write("job", job);
    let run = world.start(["run", "x", "sh", "./job"]);
    eventually("all parts run", || world.lines("parts") == parts);
    run.signal(Signal::KILL);
    let is_there = "grep -q '^State:.[^ZX]' /proc/$pid/status 2> /dev/null";
    let next = format!("for pid in $(cat parts); do {is_there} && echo $pid >> two; done; :");
    let mut next = world.start(["run", "x", "sh", "-c", &next]);
    eventually("the next one waits", || world.claims("x", "waiting").len() == 1);
    assert_eq!((world.code(["break", "--yes", "x"]), next.code()), (0, 0));
    (world.lines("parts"), world.lines("two"))
}

/// Their parent dies of what asks the job to end, and they are found by nothing else.
#[test]
fn no_part_of_the_job_of_a_killed_wrapper_runs_on_that_resists() {
    let job = format!("{} & {} & wait", cleared("trap : TERM;"), cleared(""));
    assert_eq!(take_from_the_job_of_a_killed_wrapper(&job, 2), (2, 0), "two at once");
}

/// Their parent is gone before its children are asked.
#[test]
fn no_part_of_the_job_of_a_killed_wrapper_goes_unasked() {
    let job = format!("for i in $(seq 80); do {} & done; wait", cleared(""));
    assert_eq!(take_from_the_job_of_a_killed_wrapper(&job, 80), (80, 0), "two at once");
}

/// What a part starts to clean up outlives that.
#[test]
fn no_part_of_the_job_of_a_killed_wrapper_runs_on_that_was_started_at_the_end() {
    let late = format!("{} & /bin/sleep 0.6; exit", cleared("trap : TERM;"));
    // Quoted once more.
    let late = late.replace('\'', "'\\''");
    let job = format!("trap '{late}' TERM; echo $$ >> parts; while [ -e parts ]; do /bin/sleep 0.02; done");
    assert_eq!(take_from_the_job_of_a_killed_wrapper(&job, 1), (2, 0), "two at once");
}

/// The watch over the job of a killed wrapper: who has the descriptor of its lock and shows this.
fn watch_over(job: i32) -> i32 {
    let is_watch = |pid: &i32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<_> = words.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        words.iter().any(|word| word == "end-job") && words.iter().any(|word| *word == job.to_string())
    };
    let mut found = None;
    eventually("the watch keeps the lock", || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        found = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_watch);
        found.is_some()
    });
    found.unwrap()
}

/// Whoever looks only after the notice does not find the claim any more: the job goes on beside the next holder, without end.
#[test]
fn the_job_of_a_killed_wrapper_ends_though_its_watch_was_stopped_over_the_notice() {
    for is_job_stopped in [true, false] {
        let world = World::new();
        let run = world.start(["run", "x", "sh", "-c", "echo $$ > job.pid; while :; do sleep 0.02; done"]);
        let job = world.pid("job.pid");
        run.signal(Signal::KILL);
        let watch = watch_over(job);
        assert!(kill(watch, Signal::STOP) && (!is_job_stopped || kill(job, Signal::STOP)));
        eventually("the watch is stopped", || state(watch) == Some('T'));
        assert_eq!(world.code(["break", "--yes", "x"]), 0);
        assert_eq!(world.code(["run", "x", "true"]), 0, "the next one gets it");
        for pid in [job, watch] {
            kill(pid, Signal::CONT);
        }
        eventually("the job has ended", || !runs(job));
    }
}

/// One that looks in the last moments of the notice gives the job more time than is left of it: the next holder comes meanwhile.
#[test]
fn the_job_of_a_killed_wrapper_has_no_more_time_than_is_left_of_the_notice() {
    let world = World::new();
    let run = world.start([
        "run",
        "x",
        "sh",
        "-c",
        "trap '' TERM; echo $$ > job.pid; while :; do sleep 0.02; done",
    ]);
    let job = world.pid("job.pid");
    run.signal(Signal::KILL);
    let watch = watch_over(job);
    assert!(kill(watch, Signal::STOP));
    eventually("the watch is stopped", || state(watch) == Some('T'));
    let is_there = "grep -q '^State:.[^ZX]' /proc/$(cat job.pid)/status 2> /dev/null";
    let mut next = world.start(["run", "x", "sh", "-c", &format!("{is_there} && echo two > two; :")]);
    eventually("the next one waits", || world.claims("x", "waiting").len() == 1);
    let mut eviction = world.start(["break", "--yes", "x"]);
    let left = || world.claims("x", "held").first().and_then(|claim| claim["expires_in_ms"].as_u64());
    eventually("the notice is nearly over", || left().is_some_and(|left| left < 900));
    kill(watch, Signal::CONT);
    assert_eq!((next.code(), world.read("two")), (0, String::new()), "two at once");
    assert_eq!(eviction.code(), 0);
}

/// What is the job's to end is spent on the search for its parts, on a host of many processes: it is killed unasked, though most of the notice is
/// left.
#[test]
fn the_job_of_a_killed_wrapper_is_asked_to_end_though_it_was_looked_for_for_long() {
    let world = World::new();
    let job = "trap 'echo > told; exit' TERM; echo $$ > job.pid; while :; do sleep 0.02; done";
    let run = world.start(["run", "x", "sh", "-c", job]);
    let job = world.pid("job.pid");
    run.signal(Signal::KILL);
    let watch = watch_over(job);
    let mut eviction = world.start(["break", "--yes", "x"]);
    // It takes a while where it is stopped meanwhile.
    let start = std::time::Instant::now();
    while state(job) != Some('T') && runs(job) {
        assert!(start.elapsed().as_secs() < 30, "nobody looks for it");
    }
    assert!(kill(watch, Signal::STOP));
    std::thread::sleep(std::time::Duration::from_millis(1500));
    kill(watch, Signal::CONT);
    assert_eq!(eviction.code(), 0);
    assert!(!runs(job) && world.path("told").exists(), "it was killed unasked");
}

/// A newcomer holds the lock beside the job, which nobody tells.
#[test]
fn the_job_of_a_killed_wrapper_ends_when_the_file_of_its_lock_or_its_directory_is_removed() {
    for is_directory in [false, true] {
        let world = World::new();
        let run = world.start(["run", "x", "sh", "-c", "echo $$ > job.pid; while :; do sleep 0.02; done"]);
        let job = world.pid("job.pid");
        run.signal(Signal::KILL);
        watch_over(job);
        if is_directory {
            std::fs::rename(world.path("store"), world.path("moved")).unwrap();
        } else {
            std::fs::remove_file(world.path("store/x.lock")).unwrap();
        }
        assert_eq!(world.code(["run", "x", "true"]), 0);
        eventually("the job has ended", || !runs(job));
    }
}

/// The watch makes the directory anew, where it finds nothing, and takes the lock for lost.
#[test]
fn the_watch_over_the_job_of_a_killed_wrapper_makes_no_directory() {
    let world = World::new();
    let run = world.start(["run", "x", "sh", "-c", "echo $$ > job.pid; while :; do sleep 0.02; done"]);
    let job = world.pid("job.pid");
    std::fs::rename(world.path("store"), world.path("moved")).unwrap();
    run.signal(Signal::KILL);
    watch_over(job);
    // Two looks: that something does not come is seen by waiting alone.
    std::thread::sleep(std::time::Duration::from_secs(4));
    assert!(runs(job) && !world.path("store").exists());
    kill(job, Signal::KILL);
}

fn is_closed(world: &World) -> bool {
    let shown = world.output(["show", "--json", "x"]).stdout;
    let shown: Value = serde_json::from_slice(&shown).unwrap();
    shown["closed_until"].is_string()
}

/// Who is killed there leaves the header of the file locked: nobody can break the lock, or queue, and the watch over the job waits for what it
/// has itself.
#[test]
fn a_wrapper_that_is_killed_while_it_closes_the_lock_keeps_nobody_from_it() {
    for job in ["true", DAEMON] {
        let world = World::new();
        assert_eq!(world.code(["run", "x", "true"]), 0);
        let run = ["run", "--min-hold", "1h", "x", "-c", job];
        assert_eq!(killed_at(&world, libc::SYS_fsync, run).code(), 0, "it is killed");
        eventually("the lock is closed", || is_closed(&world));
        if job == DAEMON {
            assert!(runs(world.pid("daemon.pid")) && world.held("x"));
        } else {
            eventually("nobody has it", || !world.held("x"));
        }
        assert_eq!(world.code(["break", "--yes", "x"]), 0, "{job}");
        assert_eq!(world.code(["run", "-n", "x", "true"]), 0, "{job}");
    }
}

/// Who is killed there leaves all of the file locked: the lock is said to be free, and nobody can have it.
#[test]
fn a_wrapper_that_is_killed_while_it_gives_back_room_keeps_nobody_from_the_lock() {
    let world = World::new();
    let holder = "while [ ! -e stop ]; do sleep 0.02; done";
    let mut first = world.start(["run", "x", "-c", holder]);
    eventually("it holds the lock", || world.held("x"));
    let mut run = killed_at(&world, libc::SYS_ftruncate, ["run", "x", "-c", DAEMON]);
    eventually("it waits", || !world.claims("x", "waiting").is_empty());
    world.write("stop", "");
    assert_eq!((first.code(), run.code()), (0, 0), "it is killed");
    assert!(runs(world.pid("daemon.pid")) && world.list().is_empty());
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
}
