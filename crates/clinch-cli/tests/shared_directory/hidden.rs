//! Processes that a user may not see, where `/proc` is mounted with `hidepid`.

use std::fs::Permissions;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::{ALICE, Host, ROOT};
use crate::common::{Running, eventually, kill, runs};
use rustix::process::Signal;

/// The watch over a run: whose parent that is.
fn watch_of(run: i32) -> i32 {
    let children = || std::fs::read_to_string(format!("/proc/{run}/task/{run}/children")).unwrap_or_default();
    let is_watch = |pid: &i32| name(*pid) == "job-watch\n";
    let watch = || children().split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_watch);
    eventually("there is a watch", || watch().is_some());
    watch().unwrap()
}

fn name(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default()
}

/// Starts `clinch` as alice where `/proc` hides what she may not look into, with all that she may execute only beside it.
fn start_hidden(host: &Host, args: &[&str]) -> Running {
    host.0.install("/bin/bash", "hidden");
    std::fs::set_permissions(host.0.path("hidden"), Permissions::from_mode(0o711)).unwrap();
    host.0.install("/usr/bin/setpriv", "as-root");
    std::fs::set_permissions(host.0.path("as-root"), Permissions::from_mode(0o4755)).unwrap();
    for name in ["job.pid", "child.pid", "part.pid", "told"] {
        host.0.write(name, "");
        std::fs::set_permissions(host.0.path(name), Permissions::from_mode(0o666)).unwrap();
    }
    let run = host.clinch(ALICE, args);
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", "mount -t proc -o hidepid=2 proc /proc && exec \"$@\"", "sh"]);
    command.arg(run.get_program()).args(run.get_args()).env_clear();
    command.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(host.0.path(".")).stdin(Stdio::null()).stderr(Stdio::piped());
    Running(command.spawn().unwrap())
}

/// A process that closes all that it inherits, as sudo does.
const CLOSE: &str = "for ((fd = 3; fd < 100; fd++)); do eval \"exec $fd>&-\"; done;";

/// A process that waits, and a child of it, hidden as it is, that hears nothing of TERM; and another below it that all may see.
const DEAF: &str = "(trap '' TERM; echo $BASHPID > child.pid; while :; do sleep 0.02; done) & \
     sh -c \"trap '' TERM; echo \\$\\$ > part.pid; while :; do sleep 0.02; done\" & echo $$ > job.pid; \
     trap 'echo told > told; exit' TERM; while :; do sleep 0.02; done";

/// Who begins now says which of these run.
const WHO_RUNS: &str = "for one in job child part; do \
     grep -q '^State:.[^ZX]' /proc/$(cat $one.pid)/status 2> /dev/null && echo $one >> two; done; :";

/// One that its own user may execute only is neither asked to end nor killed, nor is what it starts, and works on beside the next holder.
#[test]
fn a_hidden_job_that_has_to_stop_is_told_and_dead_before_the_next_starts() {
    let host = Host::new();
    let hidden = host.0.path("hidden");
    let mut run = start_hidden(
        &host,
        &["run", "--max-hold", "6s", "--grace", "2s", "x", hidden.to_str().unwrap(), "-c", DEAF],
    );
    let parts = ["job.pid", "child.pid", "part.pid"].map(|name| host.0.pid(name));
    assert_eq!(host.code(ROOT, &["run", "x", "sh", "-c", WHO_RUNS]), 0);
    let left = host.0.read("two");
    let code = (left.is_empty()).then(|| run.code());
    parts.iter().for_each(|part| _ = kill(*part, Signal::KILL));
    assert_eq!(
        (left, host.0.read("told"), code),
        (String::new(), "told\n".to_owned(), Some(79)),
        "two at once"
    );
}

/// A signal that is sent to the wrapper does not reach it.
#[test]
fn a_hidden_job_hears_what_its_wrapper_is_sent() {
    let host = Host::new();
    let hidden = host.0.path("hidden");
    let job = "trap 'echo told > told; exit 5' TERM; echo $$ > job.pid; while :; do sleep 0.02; done";
    let mut run = start_hidden(&host, &["run", "x", hidden.to_str().unwrap(), "-c", job]);
    host.0.pid("job.pid");
    run.signal(Signal::TERM);
    assert_eq!((run.code(), host.0.read("told")), (5, "told\n".to_owned()));
}

/// It is stopped for good, and continued goes on without the lock.
#[test]
fn a_hidden_job_ends_with_a_killed_wrapper_where_it_cannot_keep_the_lock() {
    let redis = clinch_testkit::Redis::start();
    let host = Host::new();
    let hidden = host.0.path("hidden");
    let job = "sh -c 'echo $$ > part.pid; while :; do sleep 0.02; done' & echo $$ > job.pid; while :; do sleep 0.02; done";
    let run = start_hidden(&host, &["run", "-u", &redis.url(), "x", hidden.to_str().unwrap(), "-c", job]);
    let parts = ["job.pid", "part.pid"].map(|name| host.0.pid(name));
    run.signal(Signal::KILL);
    for part in parts {
        eventually("all of the job is dead", || !runs(part));
    }
}

/// What another user owns is not named where it is hidden.
#[test]
fn a_hidden_part_that_cannot_be_stopped_is_named() {
    let host = Host::new();
    let job = "./as-root --reuid=0 sh -c 'echo $$ > part.pid; exec sleep 60' & while [ ! -s part.pid ]; do sleep 0.02; done; wait";
    let mut run = start_hidden(&host, &["run", "--max-hold", "4s", "--grace", "0.3s", "x", "sh", "-c", job]);
    let part = host.0.pid("part.pid");
    let code = run.code();
    kill(part, Signal::KILL);
    let mut said = String::new();
    run.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(
        (code, said.matches(&format!("process {part} of the job is another user's")).count()),
        (79, 1),
        "{said}"
    );
}

/// Nobody can end it there, but its own: the lock that is taken from the job of a killed wrapper is free while it works.
#[test]
fn a_hidden_job_of_a_killed_wrapper_ends_when_its_lock_is_taken() {
    let host = Host::new();
    let hidden = host.0.path("hidden");
    let run = start_hidden(&host, &["run", "x", hidden.to_str().unwrap(), "-c", &format!("{CLOSE} {DEAF}")]);
    let [job, _, part] = ["job.pid", "child.pid", "part.pid"].map(|name| host.0.pid(name));
    watch_of(run.pid());
    run.signal(Signal::KILL);
    let mut next = host.start(ROOT, &["run", "x", "sh", "-c", WHO_RUNS]);
    eventually("the next one waits", || host.claims("x", "waiting") == 1);
    assert_eq!((host.code(ROOT, &["break", "--yes", "x"]), next.code()), (0, 0));
    let left = host.0.read("two");
    [job, part, host.0.pid("child.pid")].iter().for_each(|part| _ = kill(*part, Signal::KILL));
    assert!(!left.contains("job") && !left.contains("part"), "two at once: {left}");
    assert_eq!(host.0.read("told"), "told\n");
}

/// The watch takes it for ended, and the next holder comes at once, though it runs: nobody else may end what is another user's, as `sudo` is.
#[test]
fn the_job_of_a_killed_wrapper_is_waited_for_though_its_first_process_is_hidden() {
    let host = Host::new();
    let job = format!("{CLOSE} trap '' TERM; echo $$ > job.pid; while [ ! -e stop ]; do sleep 0.02; done");
    let run = start_hidden(&host, &["run", "x", "./as-root", "--reuid=0", "bash", "-c", &job]);
    let job = host.0.pid("job.pid");
    let watch = watch_of(run.pid());
    run.signal(Signal::KILL);
    let is_there = "grep -q '^State:.[^ZX]' /proc/$(cat job.pid)/status 2> /dev/null";
    let mut next = host.start(ROOT, &["run", "x", "sh", "-c", &format!("{is_there} && echo two > two; :")]);
    eventually("the next one waits", || host.claims("x", "waiting") == 1);
    let mut eviction = host.start(ROOT, &["break", "--yes", "x"]);
    eventually("the watch has seen it", || !runs(watch) || name(watch) == "job-end\n");
    // That something does not come is seen by waiting alone.
    std::thread::sleep(Duration::from_secs(1));
    assert!(runs(job));
    host.0.write("stop", "");
    assert_eq!((next.code(), host.0.read("two")), (0, String::new()), "two at once");
    assert_eq!(eviction.code(), 0);
    kill(job, Signal::KILL);
}

/// One that may not be stopped starts parts of the job anew, in each round in which all are to be stopped, or killed: its watch never ends.
#[test]
fn the_watch_over_the_job_of_a_killed_wrapper_ends_though_parts_of_it_are_started_without_end() {
    let start = "import os,subprocess,sys,threading
threading.Thread(target=lambda: (sys.stdin.read(),os._exit(0)),daemon=True).start()
nothing=os.open('/dev/null',os.O_RDWR)
while True: subprocess.Popen(['sleep','30'],user=int(sys.argv[1]),group=int(sys.argv[1]),stdin=nothing,close_fds=False)";
    let host = Host::new();
    for name in ["job.pid", "held", "told"] {
        host.0.write(name, "");
        std::fs::set_permissions(host.0.path(name), Permissions::from_mode(0o666)).unwrap();
    }
    let job = "trap 'echo told > told; exit' TERM; echo $CLINCH_HELD > held; echo $$ > job.pid; while :; do sleep 0.02; done";
    let run = host.start(ALICE, &["run", "x", "sh", "-c", job]);
    let job = host.0.pid("job.pid");
    let watch = watch_of(run.pid());
    run.signal(Signal::KILL);
    let mut starter = Command::new("python3");
    starter.args(["-c", start, &ALICE.to_string()]).env("CLINCH_HELD", host.0.read("held").trim());
    let starter = Running(starter.current_dir("/").stdin(Stdio::piped()).spawn().unwrap());
    let mut eviction = host.start(ROOT, &["break", "--yes", "x"]);
    eventually("the watch has ended", || !runs(watch));
    assert!(!runs(job) && host.0.read("told") == "told\n", "it was killed unasked");
    starter.kill();
    assert_eq!(eviction.code(), 0);
}
