//! Locks that are kept closed: `--min-hold`, `--once-per`.

#![allow(clippy::indexing_slicing, clippy::unwrap_used, reason = "test code")]

mod common;

use std::os::unix::process::ExitStatusExt;

use clinch_testkit::{Etcd, Proxy, Redis};
use common::pty::Screen;
use common::{Running, World, eventually, filtered, runs, us};
use rustix::process::Signal;
use serde_json::Value;

fn said(world: &World, args: &[&str]) -> (Option<i32>, String, String) {
    let output = world.output(args.iter().copied());
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn shown(world: &World, name: &str) -> Value {
    serde_json::from_str(&said(world, &["show", "--json", name]).1).unwrap()
}

fn on_all(test: impl Fn(&World)) {
    test(&World::new());
    let redis = Redis::start();
    test(&World::on(redis.url()));
    drop(redis);
    let etcd = Etcd::start();
    test(&World::on(etcd.url()));
}

/// A lock that nobody can have is said to be free, or cannot be opened.
#[test]
fn what_keeps_a_lock_closed_is_shown_and_opened() {
    on_all(|world| {
        assert_eq!(world.code(["run", "--min-hold", "1h", "--once-per", "2h", "x", "true"]), 0);
        let (code, text, _) = said(world, &["show", "x"]);
        assert_eq!(code, Some(1), "nobody holds it");
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("closed until ") && lines[0].contains(" (in 59m"), "{text}");
        assert!(
            lines[1].starts_with("to --once-per closed until ") && lines[1].contains(" (in 1h 59m)"),
            "{text}"
        );
        let json = shown(world, "x");
        assert!(json["closed_until"].is_string() && json["once_per_until"].is_string(), "{json}");
        for verb in [&["run", "-n", "x", "true"][..], &["acquire", "-n", "--for", &us(), "x"]] {
            let (code, _, why) = said(world, verb);
            assert_eq!(code, Some(75));
            assert!(
                why.starts_with("clinch: lock \"x\" is closed until ") && why.contains(" (in 59m"),
                "{why}"
            );
        }
        let (code, text, _) = said(world, &["break", "x", "--yes"]);
        assert_eq!(code, Some(0));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("opened: x, closed until "), "{text}");
        assert!(lines[1].starts_with("opened: x/once-per, closed until "), "{text}");
        assert_eq!(shown(world, "x")["once_per_until"], Value::Null);
        assert_eq!(world.code(["run", "-n", "--once-per", "2h", "x", "true"]), 0);
        let (code, _, why) = said(world, &["run", "-n", "--once-per", "2h", "x", "true"]);
        assert_eq!(code, Some(75));
        assert!(
            why.contains("ran a short time ago, and is closed until ") && why.contains("(in 1h 59m)"),
            "{why}"
        );
        let (code, text, _) = said(world, &["break", "--json", "x", "--yes"]);
        let broken: Value = serde_json::from_str(&text).unwrap();
        let one = &broken["results"][0];
        assert_eq!((code, &one["name"], &one["result"]), (Some(0), &"x/once-per".into(), &"opened".into()));
        assert_eq!(world.code(["break", "x", "--yes"]), 1, "there is nothing to break");
    });
}

/// A job is not tried again before its time although it failed; or is run again although it did its work.
#[test]
fn a_failed_run_gives_its_turn_back_if_it_is_asked_to() {
    on_all(|world| {
        let run = |job: &str| world.code(["run", "-n", "--once-per", "1h", "--retry-failed", "x", "-c", job]);
        assert_eq!(run("exit 3"), 3);
        assert_eq!(run("kill -9 $$"), 137);
        assert_eq!(run("exit 0"), 0);
        assert_eq!(run("exit 0"), 75);
        assert_eq!(world.code(["run", "-n", "--once-per", "1h", "y", "false"]), 1);
        assert_eq!(world.code(["run", "-n", "--once-per", "1h", "y", "true"]), 75, "nobody asked for it");
    });
    assert_eq!(World::new().code(["run", "--retry-failed", "x", "true"]), 64);
}

/// The store hears late that a job has failed, when the lock is another's, whose turn is opened: a third runs in its time.
#[test]
fn a_turn_is_not_given_back_after_the_lock_was_lost() {
    // One that is ended since its lock is about to be lost, and one that fails just then.
    for on_lost in ["term", "ignore"] {
        let redis = Redis::start();
        let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
        let far = format!("redis://{}", proxy.addr());
        let job = "while [ ! -e stop ]; do sleep 0.02; done; exit 1";
        // Longer than its turn is closed.
        let once = ["--ttl", "2s", "--once-per", "1s", "--retry-failed", "--on-lost", on_lost];
        let once = once.into_iter().chain(["--events", "events", "x", "-c", job]);
        let mut run = world.start(["run", "-u", &far].into_iter().chain(once));
        eventually("it runs", || world.held("x"));
        let mut next = world.start(["run", "--once-per", "1h", "x", "true"]);
        eventually("the next waits", || !world.claims("x", "waiting").is_empty());
        eventually("its turn is over", || shown(&world, "x")["once_per_until"].is_null());
        proxy.black_hole(true);
        eventually("it is in danger", || world.read("events").contains("jeopardy"));
        if on_lost == "ignore" {
            world.write("stop", "");
        }
        assert_eq!(next.code(), 0);
        proxy.black_hole(false);
        assert_ne!(run.code(), 0);
        eventually("all is delivered", || proxy.connections() == 0);
        assert!(shown(&world, "x")["once_per_until"].is_string(), "it opened another's");
    }
}

/// Each start of a job that fails, or is broken, leaves something on the server until the job's next turn would have come, and for ever where
/// elections begin its time anew.
#[test]
fn what_was_closed_and_is_opened_leaves_no_lease_behind() {
    let etcd = Etcd::start();
    let world = World::on(etcd.url());
    for _ in 0..3 {
        assert_eq!(world.code(["run", "-n", "--once-per", "30days", "--retry-failed", "x", "false"]), 1);
    }
    assert_eq!(world.code(["run", "--min-hold", "1h", "--once-per", "30days", "y", "true"]), 0);
    assert_eq!(etcd.leases().len(), 2, "y is closed, and its turn is");
    assert_eq!(world.code(["break", "y", "--yes"]), 0);
    eventually("nothing is left", || etcd.leases().is_empty());
}

/// A job that ended well keeps others out for longer than it asked for, or one that never began does at all.
#[test]
fn what_is_kept_closed_opens_in_time() {
    on_all(|world| {
        assert_eq!(world.code(["run", "--ttl", "2s", "--min-hold", "3s", "x", "sleep", "3.1"]), 0);
        assert_eq!(world.code(["run", "-n", "x", "true"]), 0, "its time was over with the job");
        assert_eq!(world.code(["run", "--ttl", "2s", "--min-hold", "1h", "y", "no-such-command"]), 127);
        assert_eq!(world.code(["run", "-n", "y", "true"]), 0, "a job that never began");
        assert_eq!(world.code(["run", "--ttl", "2s", "--min-hold", "1h", "z", "true"]), 0);
        assert!(shown(world, "z")["closed_until"].is_string());
    });
}

fn is_closed(world: &World, name: &str) -> bool {
    !world.held(name) && shown(world, name)["closed_until"].is_string()
}

/// The wrapper is killed, and with it goes what was to keep the lock closed: another runs before its time.
#[test]
fn a_killed_wrapper_leaves_the_lock_closed() {
    let job = "echo $$ > $CLINCH_NAME.pid; while [ ! -e stop ]; do sleep 0.02; done";
    on_all(|world| {
        for (name, share) in
            [("x", &[][..]), ("shared", &["--shared"]), ("parts", &["--permits", "1", "--of", "2"])]
        {
            let run = ["run", "--min-hold", "1h"].iter().chain(share).copied().chain([name, "-c", job]);
            let run = world.start(run);
            let job = world.pid(&format!("{name}.pid"));
            run.signal(Signal::KILL);
            run.kill();
            if world.url().starts_with("file") {
                assert!(runs(job) && world.held(name), "it runs without its lock");
                world.write("stop", "");
            }
            eventually("the lock is closed", || is_closed(world, name));
            assert!(!runs(job));
            assert_eq!(world.code(["run", "-n", name, "true"]), 75);
            let _ = std::fs::remove_file(world.path("stop"));
        }
    });
}

/// Kills whoever asks for a flag or two of a call: in its first argument (of the calls below), or its fourth.
fn killed_at(world: &World, call: i64, argument: u32, flags: u32, words: &[&str]) -> Running {
    let at = 16 + 8 * argument;
    let steps = format!("0x20,0,0,{at}, 0x45,0,1,{flags}, 0x06,0,0,0x80000000, 0x06,0,0,0x7fff0000");
    let words: Vec<&str> = [env!("CARGO_BIN_EXE_clinch"), "run"].iter().chain(words).copied().collect();
    let call = u32::try_from(call).unwrap();
    filtered(world, call, &steps, &words).spawn().map(Running).unwrap()
}

/// The wrapper is killed when it has heard that the command began, and before that was noted: the command runs again before its time.
#[test]
fn a_run_counts_whose_wrapper_is_killed_as_it_begins() {
    let job = "echo $$ > job.pid; while [ ! -e stop ]; do sleep 0.02; done";
    on_all(|world| {
        for (name, job) in [("x", job), ("y", "echo $$ > job.pid")] {
            let once = ["--ttl", "2s", "--once-per", "1h", name, "-c", job];
            let peek = u32::try_from(libc::MSG_PEEK).unwrap();
            let mut run = killed_at(world, libc::SYS_recvfrom, 3, peek, &once);
            assert_eq!(run.wait().signal(), Some(libc::SIGSYS), "it is killed");
            if world.url().starts_with("file") {
                eventually("the job ends", || {
                    world.write("stop", "");
                    !world.held(name)
                });
            }
            eventually("the run counts", || shown(world, name)["once_per_until"].is_string());
            eventually("nobody has the lock", || !world.held(name));
            let (code, _, why) = said(world, &["run", "-n", "--once-per", "1h", name, "true"]);
            assert!(code == Some(75) && why.contains("ran a short time ago"), "{why}");
            assert_eq!(world.code(["break", "--yes", name]), 0);
            assert_eq!(world.code(["run", "-n", "--once-per", "1h", name, "true"]), 0, "it was opened");
        }
    });
}

/// As above, before there was a command: it does not run in its time.
#[test]
fn a_run_whose_wrapper_is_killed_before_it_begins_does_not_count() {
    on_all(|world| {
        let once = ["--ttl", "2s", "--once-per", "1h", "x", "touch", "ran"];
        // Of the watch over the job the flags are none.
        let mut run = killed_at(world, libc::SYS_clone, 0, u32::MAX, &once);
        assert_eq!(run.wait().signal(), Some(libc::SIGSYS), "it is killed");
        let again = ["run", "--ttl", "2s", "-w", "30s", "--once-per", "1h", "x", "true"];
        eventually("it runs", || world.code(again) == 0);
        assert!(!world.path("ran").exists());
    });
}

/// A job that was killed at the end of its time, not before, is followed by the next one before that is to be.
#[test]
fn a_lock_that_was_held_too_long_is_closed_all_the_same() {
    on_all(|world| {
        let run = ["run", "--ttl", "600s", "--max-hold", "1s", "--grace", "0ms", "--min-hold", "1h", "x"];
        assert_eq!(world.code(run.into_iter().chain(["sleep", "60"])), 79);
        assert_eq!(world.code(["run", "-n", "x", "true"]), 75);
    });
}

/// As above, after the job, while the store does not answer.
#[test]
fn a_wrapper_that_is_killed_at_its_release_leaves_the_lock_closed() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let job = "while [ ! -e stop ]; do sleep 0.02; done";
    let run = world.start(["run", "--min-hold", "1h", "--events", "events", "x", "-c", job]);
    eventually("it runs", || world.held("x"));
    redis.pause();
    world.write("stop", "");
    eventually("the job has ended", || world.read("events").contains("exited"));
    run.kill();
    redis.resume();
    eventually("the lock is closed", || is_closed(&world, "x"));
}

/// The end of a job takes along what watches over a run inside it, and nobody sees to the lock of that.
#[test]
fn the_watch_over_an_inner_run_outlives_the_job_around_it() {
    let world = World::new();
    // From a file of its own, as after an upgrade.
    let job = r#"mkdir -p new; cp -f "$CLINCH" new/clinch; exec new/clinch run --min-hold 1h y sh -c 'echo $$ > inner.pid; exec sleep 60'"#;
    let redis = Redis::start();
    let url = redis.url();
    let outer = |name| ["run", "-u", &*url, "--on-lost", "kill", name, "-c", job];
    let open = || {
        assert_eq!(world.code(["break", "--yes", "y"]), 0);
        std::fs::remove_file(world.path("inner.pid")).unwrap();
    };
    // By the watch over the outer one, and by its wrapper: not before the copy is made, on a busy host as well.
    let mut run = world.start(outer("x"));
    let inner = world.pid("inner.pid");
    run.signal(Signal::KILL);
    run.wait();
    eventually("the inner job is dead", || !runs(inner));
    eventually("its lock is closed", || is_closed(&world, "y"));
    open();
    let mut run = world.start(["run", "--max-hold", "5s"].into_iter().chain(outer("z")[1..].iter().copied()));
    let inner = world.pid("inner.pid");
    assert_eq!(run.code(), 79);
    assert!(!runs(inner));
    eventually("its lock is closed", || is_closed(&world, "y"));
}

/// What takes one waiter away lets all others in before their time.
#[test]
fn who_is_taken_out_of_the_queue_of_a_closed_lock_opens_nothing() {
    on_all(|world| {
        assert_eq!(world.code(["run", "--min-hold", "1h", "x", "true"]), 0);
        let waiter = world.start(["run", "x", "touch", "ran"]);
        let mut waiting = Vec::new();
        eventually("it waits", || {
            waiting = world.claims("x", "waiting");
            !waiting.is_empty()
        });
        let claim = waiting[0]["claim"].as_str().unwrap();
        let (code, _, why) = said(world, &["break", "--yes", "--claim", claim, "x"]);
        assert!(code == Some(64) && why.contains("closed until"), "{why}");
        assert!(shown(world, "x")["closed_until"].is_string());
        assert!(runs(waiter.pid()) && !world.path("ran").exists());
    });
}

/// Who breaks a lock again, since its job has not stopped yet, is told to end that, or to delete a key in the store of a server.
#[test]
fn a_second_break_tells_when_the_lock_opens() {
    let world = World::new();
    let job = "while [ ! -e stop ]; do sleep 0.02; done";
    let mut run = world.start(["run", "--on-lost", "ignore", "x", "-c", job]);
    eventually("it runs", || world.held("x"));
    assert_eq!(world.code(["break", "--yes", "x"]), 0);
    let (code, _, why) = said(&world, &["break", "--yes", "x"]);
    assert!(code == Some(75) && why.contains("was told already") && why.contains("it opens in "), "{why}");
    world.write("stop", "");
    run.wait();
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
}

/// While a person reads until when it is closed, another closes it for longer, which nobody was asked about.
#[test]
fn what_was_closed_meanwhile_is_asked_about_again() {
    let world = World::new();
    let close = |name: &str, time: &str| assert_eq!(world.code(["run", "--min-hold", time, name, "true"]), 0);
    let mut screen = Screen::start(&world, 20, 120);
    close("x", "1h");
    screen.type_in("\"$CLINCH\" break x; echo code=$?.\n");
    screen.shows("(in 59m");
    screen.shows("Open it? [y/N]");
    assert_eq!(world.code(["break", "--yes", "x"]), 0);
    close("x", "3h");
    screen.type_in("y\n");
    screen.shows("(in 2h 59m)");
    screen.shows("has changed");
    screen.type_in("n\n");
    screen.shows("code=1.");
    assert!(shown(&world, "x")["closed_until"].is_string());
    screen.type_in("\"$CLINCH\" break x; echo again=$?.\n");
    screen.type_in("y\n");
    screen.shows("again=0.");
    assert!(shown(&world, "x")["closed_until"].is_null());
    // Nor is a lock opened that was held, and is kept closed by who has left it.
    let mut holder =
        world.start(["run", "--min-hold", "5h", "x", "-c", "while [ ! -e stop ]; do sleep 0.02; done"]);
    eventually("it is held", || world.held("x"));
    screen.type_in("clear; \"$CLINCH\" break x; echo last=$?.\n");
    screen.shows("Take it away?");
    world.write("stop", "");
    assert_eq!(holder.code(), 0);
    screen.type_in("y\n");
    screen.shows("Open it? [y/N]");
    screen.type_in("n\n");
    screen.shows("last=1.");
    assert!(shown(&world, "x")["closed_until"].is_string());
}
