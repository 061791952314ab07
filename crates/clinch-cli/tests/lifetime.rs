//! How long the lock is held: as long as the job, whoever dies.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use clinch_testkit::Redis;
use common::{CLOSE, Running, World, eventually, kill, program, runs, state};
use rustix::process::{Pid, Signal, getpid, kill_process_group, set_child_subreaper};

const JOB: &str = "echo $$ > job.pid; while [ ! -e stop ]; do sleep 0.02; done; exit 4";

/// The wrapper is killed, the job goes on, and a second job starts beside it.
#[test]
fn a_killed_wrapper_leaves_the_lock_with_its_job() {
    let daemon = "setsid sleep 60 > /dev/null 2>&1 & echo $! > daemon.pid;";
    for job in [JOB.to_owned(), format!("{CLOSE} {daemon} {JOB}")] {
        let world = World::new();
        let run = world.start(["run", "x", "bash", "-c", &job]);
        let job = world.pid("job.pid");
        run.signal(Signal::KILL);
        run.kill();
        assert!(runs(job) && world.held("x"), "it runs without its lock");
        assert_eq!(world.code(["run", "-n", "x", "true"]), 75);
        let mut next = world.start(["run", "x", "true"]);
        eventually("the next one waits", || world.claims("x", "waiting").len() == 1);
        world.write("stop", "");
        assert_eq!(next.code(), 0);
        assert!(!runs(job));
    }
}

/// The wrapper was killed, and what its job starts then enters its lock, which nobody keeps for it once the job has ended; or waits for
/// it, and so for itself.
#[test]
fn an_inner_run_neither_enters_nor_awaits_the_lock_of_a_killed_wrapper() {
    for is_reaped in [true, false] {
        let world = World::new();
        let job = r#"echo $$ > job.pid; while [ ! -e stop ]; do sleep 0.02; done; "$CLINCH" run x true 2> said; echo $? > code"#;
        let run = world.start(["run", "x", "-c", job]);
        world.pid("job.pid");
        run.signal(Signal::KILL);
        if is_reaped {
            run.kill();
        } else {
            eventually("the wrapper is dead", || !runs(run.pid()));
        }
        world.write("stop", "");
        eventually("the inner run has ended", || world.read("code").ends_with('\n'));
        assert_eq!(world.read("code"), "75\n");
        assert!(world.read("said").contains("is gone"), "{}", world.read("said"));
    }
}

/// As above, where another process has the wrapper's id by then.
#[test]
fn an_inner_run_does_not_await_a_lock_whose_holder_has_the_id_of_a_killed_wrapper() {
    let world = World::new();
    let job = r#"echo > begun; while [ ! -e stop ]; do sleep 0.1; done; "$CLINCH" run -w 20 x true 2> said; echo $? > code"#;
    // Ids are nobody else's in a namespace. What begins later than the claim does so by more than clocks differ.
    let script = r#""$CLINCH" run x sh -c "$JOB" & id=$!
        while [ ! -e begun ]; do sleep 0.02; done; kill -9 $id; wait $id; sleep 1.5
        until [ "$last" = $id ]; do
            echo $((id - 1)) > /proc/sys/kernel/ns_last_pid || exit 9
            sleep 1000 & last=$!
        done
        echo > stop; while [ ! -s code ]; do sleep 0.02; done"#;
    let map: &[&str] =
        if rustix::process::geteuid().is_root() { &[] } else { &["--user", "--map-root-user"] };
    let mut command = std::process::Command::new("unshare");
    command.args(map).args(["--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script]);
    command.current_dir(world.path(".")).env("CLINCH_URL", world.url()).env("JOB", job);
    command.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).env_remove("CLINCH_HELD").env_remove("SHELL");
    assert_eq!(Running(command.spawn().unwrap()).code(), 0);
    assert_eq!(world.read("code"), "75\n");
    assert!(world.read("said").contains("is gone"), "{}", world.read("said"));
}

/// On a store that frees the lock of a dead wrapper, its job or what that has started goes on without it.
#[test]
fn a_killed_wrapper_takes_all_of_its_job_along_where_the_job_cannot_keep_the_lock() {
    let redis = Redis::start();
    let leased = redis.url();
    let world = World::new();
    // One that does nothing else, one in a group of its own that is deaf and not told of the lock, one below it, and one that has lost its
    // parent.
    let part = "echo $$ > PID.pid; while :; do sleep 0.02; done";
    let job = format!(
        "({}) & timeout 60 env -i \"PATH=$PATH\" sh -c \"trap '' TERM; sh ./part & {}\" & (sh ./left &); {JOB}",
        part.replace("PID", "first").replace("$$", "$(exec sh -c 'echo $PPID')"),
        part.replace("PID", "second").replace('$', "\\$"),
    );
    world.write("part", &part.replace("PID", "third"));
    world.write("left", &part.replace("PID", "fourth"));
    let run = world.start(["run", "-u", &leased, "x", "-c", &job]);
    let parts = ["job.pid", "first.pid", "second.pid", "third.pid", "fourth.pid"].map(|name| world.pid(name));
    run.signal(Signal::KILL);
    for part in parts {
        eventually("all of the job is dead", || !runs(part));
    }
}

/// A process whose first thread has ended has no environment by which it is found, and goes on.
#[test]
fn a_killed_wrapper_takes_a_part_along_whose_first_thread_has_ended() {
    let redis = Redis::start();
    let leased = redis.url();
    let world = World::new();
    let part = "import ctypes, os, threading, time\n\
        def run():\n    while ') Z' not in open('/proc/self/stat').read(): time.sleep(0.01)\n\
        \x20   print(os.getpid(), file=open('part.pid', 'w'), flush=True)\n    time.sleep(60)\n\
        threading.Thread(target=run).start()\nctypes.CDLL(None).pthread_exit(None)\n";
    world.write("part.py", part);
    let job = "(setsid python3 part.py > /dev/null 2>&1 &); sleep 60";
    let run = world.start(["run", "-u", &leased, "x", "-c", job]);
    let part = world.pid("part.pid");
    run.signal(Signal::KILL);
    let threads = || std::fs::read_dir(format!("/proc/{part}/task")).map_or(0, Iterator::count);
    eventually("the part is dead", || threads() <= 1);
}

/// The kernel finds the job stopped when it gives it away, in a group of its own, and hangs it up: its leader dies before the others are found.
#[test]
fn a_killed_wrapper_hangs_nobody_up() {
    let redis = Redis::start();
    let leased = redis.url();
    const TRIES: usize = 32;
    let worlds: Vec<World> = (0..TRIES).map(|_| World::new()).collect();
    for world in &worlds {
        // To close the last copy of a file that is gone takes a while, after the pipe to the watch and before the job is given away.
        let script = "head -c 6M /dev/zero > large; exec 200<> large; rm large; \
                      exec \"$CLINCH\" run -u $LEASED $$ perl -e 'setpgrp; exec @ARGV' bash -c \"$0\"";
        let job = "exec 200<&-; trap 'echo hup > hup' HUP; echo $PPID > run.pid; echo $$ > job.pid; sleep 60 & wait";
        let mut shell = Command::new("env");
        shell.args(["--default-signal", "setsid", "bash", "-c", script, job]).current_dir(world.path("."));
        shell.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).env("LEASED", &leased).env_remove("CLINCH_HELD");
        let mut run = Running(shell.spawn().unwrap());
        world.pid("job.pid");
        kill(world.pid("run.pid"), Signal::KILL);
        run.wait();
    }
    for world in &worlds {
        eventually("the job is dead", || !runs(world.pid("job.pid")));
        assert_eq!(world.read("hup"), "", "it was hung up first");
    }
}

/// A job that has moved itself to another group is stopped for ever.
#[test]
fn a_killed_wrapper_takes_a_job_along_that_has_left_its_group() {
    let redis = Redis::start();
    let leased = redis.url();
    let world = World::new();
    let job = r#"$|=1; my $part = fork // die; if (!$part) { sleep 60; exit } setpgrp($part, $part); setpgrp(0, $part);
        open F, ">job.pid"; print F "$$\n"; close F; sleep 60"#;
    let run = world.start(["run", "-u", &leased, "x", "perl", "-e", job]);
    let job = world.pid("job.pid");
    run.signal(Signal::KILL);
    eventually("the job is dead", || !runs(job));
}

/// The wrapper is killed while it waits for orphans, and they go on without its lock.
#[test]
fn a_killed_wrapper_takes_the_orphans_along_that_it_waited_for() {
    let redis = Redis::start();
    let leased = redis.url();
    let world = World::new();
    let script = "setsid sh -c 'echo $$ > daemon.pid; exec sleep 60' > /dev/null 2>&1 & \
                  while [ ! -s daemon.pid ]; do sleep 0.02; done";
    let args = ["run", "-u", &leased, "--orphans", "wait", "--events", "events", "x", "-c", script];
    let run = world.start(args);
    eventually("the job has ended", || world.read("events").contains("exited"));
    run.signal(Signal::KILL);
    eventually("the orphan is dead", || !runs(world.pid("daemon.pid")));
}

/// Children of the caller hear what is meant for the job, or are waited for as if it had left them behind.
#[test]
fn who_was_there_before_the_job_is_none_of_what_it_leaves_behind() {
    let world = World::new();
    let script = "(sleep 60 & echo $! > below.pid; while [ ! -e job.pid ]; do sleep .02; done) & sleep 60 & echo $! > before.pid
        exec \"$CLINCH\" run --orphans wait x -c 'echo $$ > job.pid; exec sleep 60'";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).current_dir(world.path("."));
    shell
        .env("CLINCH", env!("CARGO_BIN_EXE_clinch"))
        .env("CLINCH_URL", world.url())
        .env_remove("CLINCH_HELD");
    let mut run = Running(shell.spawn().unwrap());
    world.pid("job.pid");
    let all = ["before.pid", "below.pid"].map(|file| world.pid(file));
    let parent = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let fallen = format!("PPid:\t{}\n", run.pid());
    eventually("all have fallen to it", || all.iter().all(|pid| parent(*pid).contains(&fallen)));
    run.signal(Signal::TERM);
    assert_eq!(run.code(), 128 + 15);
    for pid in all {
        assert!(runs(pid), "it was ended with the job");
        kill(pid, Signal::KILL);
    }
}

/// What watches over a job outlives it, keeps its caller's pipe open, or ends with it by the same name.
#[test]
fn the_watch_over_a_job_is_seen_by_nobody() {
    let redis = Redis::start();
    let leased = redis.url();
    let world = World::new();
    // Whatever the wrapper leaves to others falls to us, and stays.
    set_child_subreaper(Some(getpid())).unwrap();
    // Its pipe, the wrapper and the job; and the lock, where that can be held, or a timer.
    for url in [leased.clone(), world.url()] {
        let mut run = world.start(["run", "-u", &url, "x", "-c", JOB]);
        world.pid("job.pid");
        let children = || std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.pid())).unwrap();
        let name = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let mut watch = None;
        eventually("there is a watch", || {
            let children = children();
            let mut pids = children.split_whitespace().map(|pid| pid.parse().unwrap());
            watch = pids.find(|pid| name(*pid) == "job-watch\n");
            watch.is_some()
        });
        let watch = watch.unwrap();
        let open = || std::fs::read_dir(format!("/proc/{watch}/fd")).unwrap().count();
        eventually("it has nothing else open", || open() == 4);
        let words = std::fs::read_to_string(format!("/proc/{watch}/cmdline")).unwrap();
        assert_eq!(words.trim_end_matches('\0'), "job-watch", "`pkill -f 'clinch run'` kills it too");
        for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::TSTP] {
            assert!(kill(watch, signal));
        }
        world.write("stop", "");
        assert_eq!(run.code(), 4);
        assert_eq!(state(watch), None, "it is reaped");
        ["stop", "job.pid"].iter().for_each(|name| std::fs::remove_file(world.path(name)).unwrap());
    }
    let output = world.output([
        "run",
        "-u",
        &leased,
        "x",
        "sh",
        "-c",
        "sleep 60 > /dev/null 2>&1 & echo $! > job.pid",
    ]);
    assert!(
        output.status.success(),
        "what the job has left behind goes on, and a pipe ends with the wrapper"
    );
    assert!(runs(world.pid("job.pid")));
}

/// A daemon that the job starts keeps the lock for ever.
#[test]
fn a_daemon_of_the_job_does_not_keep_the_lock() {
    let world = World::new();
    let script = "setsid sh -c 'echo $$ > daemon.pid; exec sleep 60' > /dev/null 2>&1 & \
                  while [ ! -s daemon.pid ]; do sleep 0.02; done";
    assert_eq!(world.code(["run", "x", "-c", script]), 0);
    assert!(runs(world.pid("daemon.pid")));
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
}

/// What the job left behind works on without the lock, although that was asked for.
#[test]
fn orphans_are_waited_for_on_request() {
    let world = World::new();
    let script = "setsid sh -c 'echo $$ > daemon.pid; while [ ! -e stop ]; do sleep 0.02; done' > /dev/null 2>&1 & \
                  while [ ! -s daemon.pid ]; do sleep 0.02; done; touch ended; exit 6";
    let mut run = world.start(["run", "--orphans", "wait", "--events", "events", "x", "-c", script]);
    eventually("the job has ended", || world.read("events").contains("exited"));
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75);
    world.write("stop", "");
    assert_eq!(run.code(), 6);
    assert!(!runs(world.pid("daemon.pid")));
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
}

/// Nobody can end a wait for orphans.
#[test]
fn a_signal_reaches_orphans_that_are_waited_for() {
    let world = World::new();
    let script = "setsid sh -c 'echo $$ > daemon.pid; exec sleep 60' > /dev/null 2>&1 & \
                  while [ ! -s daemon.pid ]; do sleep 0.02; done";
    let mut run = world.start(["run", "--orphans", "wait", "--events", "events", "x", "-c", script]);
    eventually("the job has ended", || world.read("events").contains("exited"));
    run.signal(Signal::TERM);
    assert_eq!(run.code(), 0);
    assert!(!runs(world.pid("daemon.pid")));
}

/// A job that is killed leaves the lock taken.
#[test]
fn a_killed_job_frees_the_lock() {
    let world = World::new();
    let mut run = world.start(["run", "x", "-c", JOB]);
    kill(world.pid("job.pid"), Signal::KILL);
    assert_eq!(run.code(), 128 + 9);
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
}

/// The watch over the job of a run.
fn watch_of(run: &Running) -> Option<i32> {
    let children = format!("/proc/{pid}/task/{pid}/children", pid = run.pid());
    let children = std::fs::read_to_string(children).unwrap_or_default();
    let is_watch = |pid: &&str| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "job-watch\n")
    };
    children.split_whitespace().filter(is_watch).filter_map(|pid| pid.parse().ok()).find(|pid| runs(*pid))
}

/// The lease of a wrapper that is stopped, or hangs, runs out, and its job runs on beside the next one's.
#[test]
fn a_job_ends_with_its_lease_although_its_wrapper_is_stopped() {
    let redis = Redis::start();
    let leased = redis.url();
    let world = World::new();
    let job = "setsid sh -c 'echo $$ > part.pid; exec sleep 60' & echo $$ > job.pid; exec sleep 60";
    let mut run = world.start(["run", "-u", &leased, "--ttl", "1s", "x", "-c", job]);
    let parts = ["job.pid", "part.pid"].map(|name| world.pid(name));
    run.signal(Signal::STOP);
    for part in parts {
        eventually("all of the job is dead", || !runs(part));
    }
    assert_eq!(run.code(), 79, "nobody is left stopped");
}

/// The watch is killed or stopped before the wrapper is, and the job runs on without its lock.
#[test]
fn a_job_ends_with_its_wrapper_whatever_became_of_its_watch() {
    let redis = Redis::start();
    let leased = redis.url();
    let world = World::new();
    // The lock of a killed one outlives it for a while.
    let started = |name: &str| {
        let _ = std::fs::remove_file(world.path("job.pid"));
        let run = world.start(["run", "-u", &leased, name, "-c", "echo $$ > job.pid; exec sleep 60"]);
        let job = world.pid("job.pid");
        eventually("there is a watch", || watch_of(&run).is_some());
        let watch = watch_of(&run).unwrap();
        (run, job, watch)
    };
    let (run, job, watch) = started("x");
    assert!(kill(watch, Signal::KILL));
    eventually("there is another watch", || watch_of(&run).is_some_and(|other| other != watch));
    run.signal(Signal::KILL);
    eventually("the job is dead", || !runs(job));

    let (run, job, watch) = started("y");
    run.signal(Signal::STOP);
    assert!(kill(watch, Signal::STOP));
    eventually("both are stopped", || [run.pid(), watch].iter().all(|pid| state(*pid) == Some('T')));
    run.signal(Signal::KILL);
    eventually("the job is dead", || !runs(job));

    let (run, _, watch) = started("z");
    assert!(kill(watch, Signal::STOP));
    eventually("its watch goes on", || state(watch) == Some('S'));
    drop(run);
}

/// Who is stopped with the wrapper, and left so by a kill of both, keeps the lock for ever.
#[test]
fn a_kill_while_all_is_stopped_leaves_nothing_stopped() {
    let world = World::new();
    // Without a program in the foreground: a shell that waits for that to begin is not stopped.
    let job = "setsid sh -c 'echo $$ > part; exec sleep 3' & while [ ! -s part ]; do :; done; wait";
    let mut command = world.clinch(["run", "x", "-c", job]);
    // A group of its own, as a shell gives each job, since only such a one is stopped.
    let run = Running(command.process_group(0).spawn().unwrap());
    let part = world.pid("part");
    assert!(kill_group(run.pid(), Signal::TSTP));
    eventually("all is stopped", || state(part) == Some('T') && state(run.pid()) == Some('T'));
    assert!(kill_group(run.pid(), Signal::KILL));
    eventually("the part goes on and ends", || !runs(part));
    eventually("the lock is free", || !world.held("x"));
}

/// A run, with few descriptors, of a job with so many parts, each in a group of its own; and these, and the first process last.
fn start_large_job(world: &World, parts: usize) -> (Running, Vec<i32>) {
    // Each in a file that has the world kill it in the end.
    world.write("part", "echo $$ > $$.pid; echo $$ >> parts; exec sleep 600");
    let job = format!("for i in $(seq {parts}); do setsid sh ./part & done; echo $$ > job.pid; wait");
    let mut command = program(world, &["sh", "-c", r#"ulimit -n 48; exec "$CLINCH" run x sh -c "$0""#, &job]);
    // A group of its own, as a shell gives each job, since only such a one is stopped.
    let run = Running(command.process_group(0).spawn().unwrap());
    let job = world.pid("job.pid");
    eventually("all parts run", || world.lines("parts") == parts);
    let parts = world.read("parts").lines().map(|part| part.parse().unwrap()).chain([job]).collect();
    (run, parts)
}

fn stopped(processes: &[i32]) -> usize {
    processes.iter().filter(|process| state(**process) == Some('T')).count()
}

/// Of many parts the last ones stay stopped, and keep the lock for ever.
#[test]
fn a_kill_while_all_of_a_large_job_is_stopped_leaves_nothing_stopped() {
    let world = World::new();
    let (run, job) = start_large_job(&world, 100);
    assert!(kill_group(run.pid(), Signal::TSTP));
    eventually("all is stopped", || state(run.pid()) == Some('T') && stopped(&job) == job.len());
    run.signal(Signal::KILL);
    eventually("all goes on", || stopped(&job) == 0);
    // But for the first process, which the kernel hangs up with the group that it has stopped.
    assert!(world.held("x") && job[..job.len() - 1].iter().all(|part| runs(*part)));
}

/// Of more parts than there are descriptors some go on while the wrapper is stopped, or stay stopped when it goes on.
#[test]
fn all_of_a_large_job_is_stopped_and_goes_on() {
    let world = World::new();
    let (run, job) = start_large_job(&world, 100);
    for _ in 0..2 {
        assert!(kill_group(run.pid(), Signal::TSTP));
        eventually("all is stopped", || state(run.pid()) == Some('T') && stopped(&job) == job.len());
        assert!(kill_group(run.pid(), Signal::CONT));
        eventually("all goes on", || state(run.pid()) != Some('T') && stopped(&job) == 0);
    }
}

/// While the wrapper is busy, a CONT and a stop have come: the last one counts, as for the kernel, or Ctrl-Z right after `fg` is lost.
#[test]
fn a_stop_that_comes_after_a_continue_counts() {
    let world = World::new();
    let (run, job) = start_large_job(&world, 200);
    for _ in 0..5 {
        for signal in [Signal::WINCH, Signal::CONT, Signal::TSTP] {
            run.signal(signal);
            // Else the kernel takes one for the other.
            std::thread::sleep(Duration::from_millis(5));
        }
        eventually("all is stopped", || state(run.pid()) == Some('T') && stopped(&job) == job.len());
        assert!(kill_group(run.pid(), Signal::CONT));
        eventually("all goes on", || state(run.pid()) != Some('T') && stopped(&job) == 0);
    }
}

fn kill_group(leader: i32, signal: Signal) -> bool {
    Pid::from_raw(leader).is_some_and(|leader| kill_process_group(leader, signal).is_ok())
}
