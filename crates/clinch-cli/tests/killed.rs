//! Wrappers that are killed, on `file://`, and leave something behind that has the descriptor of their lock: also while they change its file.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use common::{CLOSE, Running, World, eventually, runs};
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
