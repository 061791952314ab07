//! Locks that are kept closed: `--min-hold`, `--once-per`.

#![allow(clippy::indexing_slicing, clippy::unwrap_used, reason = "test code")]

mod common;

use clinch_testkit::{Etcd, Redis};
use common::pty::Screen;
use common::{World, eventually, on_all, runs, said, shown, us};
use rustix::process::Signal;
use serde_json::Value;

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
