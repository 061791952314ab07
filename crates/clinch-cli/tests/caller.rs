//! To which process the lock of an `acquire` is bound on `file://`, and what ends its holder.

#![allow(clippy::indexing_slicing, clippy::expect_used, clippy::unwrap_used, reason = "test code")]

mod common;

use std::process::{Command, Stdio};

use clinch_testkit::Redis;
use common::{Running, World, eventually, filtered, program, runs, shells};
use rustix::process::Signal;

/// The process that keeps a lock for another.
fn holder(of: i32) -> Option<i32> {
    let words = format!("\0--for-pid\0{of}\0");
    let mut pids = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.windows(words.len()).any(|part| part == words.as_bytes())
    })
}

/// The lock is bound to whoever happens to have called, who may end next, and a script goes on without it; or a directory is made in vain.
#[test]
fn nothing_is_taken_where_nobody_says_whose_lock_it_is() {
    let world = World::new();
    for shell in shells() {
        let script = r#"set -e; eval "$("$CLINCH" acquire x)"; echo went on"#;
        let output = program(&world, &[shell, "-c", script]).output().unwrap();
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(64) && output.stdout.is_empty(), "{shell}: {output:?}");
        assert!(why.lines().count() == 1 && why.contains("`--for $$`"), "{shell}: {why}");
    }
    let output = world.output(["acquire", "x"]);
    assert!(output.status.code() == Some(64) && output.stdout == b"(exit 64)\n", "{output:?}");
    let output = world.output(["acquire", "--json", "x"]);
    let told: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(told["code"] == 64 && output.stdout.is_empty(), "{output:?}");
    assert!(!world.path("store").exists(), "a directory was made");
}

/// It is bound to a part of `$( )`, or to a command that only runs us, and is lost when that ends: at once.
#[test]
fn a_lock_is_bound_to_who_is_named_by_whatever_way_its_answer_goes() {
    let forms = [
        r#"lock=$("$CLINCH" acquire x --for $$)"#,
        r#"lock=$( ( ("$CLINCH" acquire x --for $$; :); :); : )"#,
        r#"lock=$("$CLINCH" acquire x --for $$ | tee log)"#,
        r#"lock=$(timeout 60 nice env A=b "$CLINCH" acquire x --for $$)"#,
        r#"export script=$$; lock=$(sh -c '"$CLINCH" acquire x --for $script; exit')"#,
        r#"("$CLINCH" acquire x --for $$ > f); lock=$(cat f)"#,
        r#"sh -c '"$CLINCH" acquire x --for "$1" > f' sh $$ & wait $!; lock=$(cat f)"#,
    ];
    for shell in shells() {
        for form in forms {
            let world = World::new();
            let script = format!(
                r#"{form} || exit; eval "$lock"; [ "$for_pid" = $$ ] || exit 11; "$CLINCH" show x > show || exit 12"#
            );
            let output = program(&world, &[shell, "-c", &script]).output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{shell}: {form}: {output:?}");
            eventually("it ends with its shell", || !world.held("x"));
        }
    }
}

/// The script ends, and the lock is another's while its background task works under it; or that is killed, and its lock stays.
#[test]
fn a_background_task_has_a_lock_of_its_own() {
    // Within `$( )` both name what ends with that.
    let bash = "me=$BASHPID";
    let each = "me=$(exec sh -c 'echo $PPID')";
    let ways = shells().into_iter().map(|shell| (shell, each)).chain([("bash", bash)]);
    for (shell, me) in ways {
        let script = format!(
            r#"( {me}; lock=$("$CLINCH" acquire x --for "$me" --ttl 1h) || exit; eval "$lock"; echo "$for_pid" > task.pid
            while [ ! -e stop ]; do sleep 0.02; done ) > /dev/null 2>&1 &
            while [ ! -s task.pid ]; do sleep 0.02; done; echo $! > job"#
        );
        let world = World::new();
        assert!(program(&world, &[shell, "-c", &script]).status().unwrap().success(), "{shell}");
        let task = world.pid("task.pid");
        assert_eq!(world.read("job"), world.read("task.pid"), "{shell}: it is bound to another");
        assert!(runs(task) && world.held("x"), "{shell}");
        common::kill(task, Signal::KILL);
        eventually("it is free", || !world.held("x"));
    }
}

/// As above, for a worker that a program has forked.
#[test]
fn a_forked_worker_has_a_lock_of_its_own() {
    let script = r#"
import os, subprocess, time
if os.fork() == 0:
    said = subprocess.run([os.environ["CLINCH"], "acquire", "x", "--for", str(os.getpid()), "--ttl", "1h"], stdout=subprocess.PIPE).stdout
    open("said", "wb").write(said)
    open("worker.pid", "w").write(f"{os.getpid()}\n")
    time.sleep(60)
    os._exit(0)
while not os.path.exists("worker.pid"): time.sleep(0.02)
"#;
    let world = World::new();
    let mut master = program(&world, &["python3", "-c", script]);
    assert!(master.stdout(Stdio::null()).status().unwrap().success());
    let worker = world.pid("worker.pid");
    assert!(world.read("said").ends_with(&format!(" for_pid={worker}\n")), "{}", world.read("said"));
    assert!(world.held("x"));
    common::kill(worker, Signal::KILL);
    eventually("it is free", || !world.held("x"));
}

/// A lock is bound to nobody, or to this command itself, as by bash's `$(clinch acquire x --for $BASHPID)`, and is free at once.
#[test]
fn a_process_that_does_not_work_under_a_lock_is_refused() {
    let redis = Redis::start();
    let over = Running(Command::new("true").spawn().unwrap());
    eventually("it has ended", || !runs(over.pid()));
    for world in [World::new(), World::on(redis.url())] {
        for wrong in ["0", "-1", "2147483647", "4294967297", "me", "", &over.pid().to_string(), "itself"] {
            let output = match wrong {
                "itself" => {
                    program(&world, &["sh", "-c", r#"exec "$CLINCH" acquire x --for $$"#]).output().unwrap()
                }
                _ => world.output(["acquire", "x", &format!("--for={wrong}")]),
            };
            assert!(
                output.status.code() == Some(64) && output.stdout == b"(exit 64)\n",
                "{wrong}: {output:?}"
            );
            assert!(!world.held("x"), "{wrong}");
        }
    }
}

/// As above, by the id of a thread, which some languages call the process's.
#[test]
fn a_thread_is_no_process() {
    let redis = Redis::start();
    // This test has a thread of its own.
    let thread = std::fs::read_link("/proc/thread-self").unwrap();
    let thread = thread.file_name().unwrap().to_str().unwrap();
    for world in [World::new(), World::on(redis.url())] {
        let output = world.output(["acquire", "x", "--for", thread]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains("thread") && said.contains(&format!("--for {}", std::process::id())), "{said}");
        assert!(!world.held("x"));
    }
}

/// The end of a pipe that a script has open is never seen while its lock is held.
#[test]
fn a_holder_has_nothing_of_its_caller_open_whatever_the_kernel_can() {
    let world = World::new();
    let script =
        r#"lock=$( { "$CLINCH" acquire x --for $$ --ttl 20s; } 3>&1 ) || exit; "$CLINCH" show x > show"#;
    // As before Linux 5.11: `close_range` takes no flags.
    let output = filtered(&world, 436, "0x06,0,0,0x50016", &["sh", "-c", script]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "it has read until the lease was over: {output:?}");
}

/// A service manager asks all of a service to end, and the next has the lock while its script cleans up.
#[test]
fn a_holder_is_deaf_to_what_asks_its_shell_to_end() {
    let world = World::new();
    let script = r#"lock=$("$CLINCH" acquire x --for $$ --ttl 1h) || exit; eval "$lock"; echo $$ > shell.pid; exec sleep 60"#;
    let mut shell = Running(program(&world, &["sh", "-c", script]).spawn().unwrap());
    let holder = holder(world.pid("shell.pid")).unwrap();
    let asks =
        [Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR1, Signal::ALARM, Signal::TSTP];
    // By ABRT systemd ends a service whose watchdog it has missed.
    for signal in asks.into_iter().chain([Signal::ABORT, Signal::SEGV]) {
        assert!(common::kill(holder, signal));
    }
    // It has heard of all that, since it lives and answers.
    let claims = world.claims("x", "held");
    let claim = claims.first().expect("it was ended")["claim"].as_str().unwrap();
    assert_eq!(world.code(["renew", "x", claim, "--ttl", "2h"]), 0, "it was ended");
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75, "it was ended");
    assert!(runs(holder), "it was ended");
    shell.signal(Signal::KILL);
    shell.wait();
    eventually("it ends with its shell", || !runs(holder) && !world.held("x"));
}

/// It holds the lock of a process that is none of the job, and was killed with that.
#[test]
fn a_holder_is_no_part_of_the_job_around_it() {
    let (redis, here) = (Redis::start(), World::new());
    let world = World::on(redis.url());
    let acquire = format!(
        r#""$CLINCH" acquire -u '{}' x --ttl 1h --for {} > lease; echo $$ > job.pid; exec sleep 60"#,
        here.url(),
        std::process::id()
    );
    let run = world.start(["run", "--ttl", "3s", "--grace", "500ms", "outer", "-c", &acquire]);
    let job = world.pid("job.pid");
    run.signal(Signal::KILL);
    run.kill();
    eventually("the job is ended", || !runs(job));
    assert_eq!(here.code(["run", "-n", "x", "true"]), 75, "it was ended with the job");
    assert_eq!(here.code(["break", "--yes", "x"]), 0);
    let acquire = acquire.replace("; exec sleep 60", "");
    let waits = ["run", "--orphans", "wait", "outer", "-c", &acquire];
    assert_eq!(world.code(waits), 0, "it is waited for");
    assert_eq!(here.code(["run", "-n", "x", "true"]), 75, "it was ended with the job");
    let mut lost = world.start([
        "run",
        "--orphans",
        "wait",
        "--max-hold",
        "2s",
        "outer",
        "-c",
        &acquire.replace('x', "y").replace("echo", "sleep 60 & echo"),
    ]);
    assert_eq!(lost.code(), 79);
}

/// The next in line waits for the end of a claim that waited itself, and is not told where another process ends that.
#[test]
fn a_release_by_another_process_wakes_the_next() {
    // As many looks would take a minute.
    let script =
        "for turn in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30; do
        lock=$(\"$CLINCH\" acquire x --for $$) || exit 1; eval \"$lock\"
        echo >> turns; \"$CLINCH\" release x \"$claim\" || exit 1; done";
    let world = World::new();
    let scripts = [(); 4].map(|()| {
        let mut shell = Command::new("bash");
        shell.args(["-c", script]).current_dir(world.path("."));
        shell
            .env("CLINCH", env!("CARGO_BIN_EXE_clinch"))
            .env("CLINCH_URL", world.url())
            .env_remove("CLINCH_HELD");
        Running(shell.spawn().unwrap())
    });
    eventually("all have had their turns", || world.lines("turns") == 120);
    for mut script in scripts {
        assert_eq!(script.code(), 0);
    }
}
