//! Processes that a user may not see, where `/proc` is mounted with `hidepid`.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::{ALICE, Host, LOCKERS, ROOT};
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

/// The watch takes it for ended, and the next holder comes at once, though it runs. As `sudo` is another user's, so is a program that its own may
/// execute only.
#[test]
fn the_job_of_a_killed_wrapper_is_waited_for_though_its_first_process_is_hidden() {
    let host = Host::new();
    host.0.install("/bin/bash", "hidden");
    std::fs::set_permissions(host.0.path("hidden"), Permissions::from_mode(0o711)).unwrap();
    // It closes all that it inherits, as sudo does.
    let job = "for ((fd = 3; fd < 100; fd++)); do eval \"exec $fd>&-\"; done; trap '' TERM; echo $$ > job; while [ ! -e stop ]; do sleep 0.02; done";
    host.0.write("job", "");
    std::fs::set_permissions(host.0.path("job"), Permissions::from_mode(0o666)).unwrap();
    let hidden = host.0.path("hidden");
    let run = host.clinch(ALICE, &["run", "x", hidden.to_str().unwrap(), "-c", job]);
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", "mount -t proc -o hidepid=2 proc /proc && exec \"$@\"", "sh"]);
    command.arg(run.get_program()).args(run.get_args()).env_clear();
    command.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let run = Running(command.current_dir(host.0.path(".")).stdin(Stdio::null()).spawn().unwrap());
    eventually("the job runs", || host.0.read("job").ends_with('\n'));
    let job: i32 = host.0.read("job").trim().parse().unwrap();
    let watch = watch_of(run.pid());
    run.signal(Signal::KILL);
    let is_there = "grep -q '^State:.[^ZX]' /proc/$(cat job)/status 2> /dev/null";
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

/// The server of `ssh host clinch acquire x` is root's: what it has open, and which program it runs, nobody else may see.
#[test]
fn whose_lock_it_is_has_to_be_said_where_a_hidden_server_sends_the_answer_to_another_host() {
    let serve = "import os,subprocess,sys
open('/proc/self/comm','w').write('sshd')
process=subprocess.Popen(sys.argv[1:],stdout=subprocess.PIPE)
said=process.communicate()[0]
os.write(1,said)
sys.exit(process.returncode)";
    let host = Host::new();
    let run = |way: &str| {
        let as_alice = ["setpriv", &format!("--reuid={ALICE}"), &format!("--regid={ALICE}")];
        let script = format!("./clinch acquire x {way}; exit");
        let mut server = Command::new("python3");
        server.args(["-c", serve]).args(as_alice).args([&format!("--groups={LOCKERS}"), "sh", "-c", &script]);
        server.env("CLINCH_URL", host.url()).env_remove("CLINCH_HELD").current_dir(host.0.path("."));
        server.stdin(Stdio::null()).output().unwrap()
    };
    for (way, is_refused) in [("", true), ("| cat", true), ("> /dev/null", false)] {
        let output = run(way);
        let why = String::from_utf8_lossy(&output.stderr);
        assert_eq!(why.contains("--for"), is_refused, "{way}: {output:?}");
    }
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
