//! The turn of `--once-per`: whose run counts, until when, and what becomes of it where somebody dies or the store is away.

#![allow(clippy::indexing_slicing, clippy::unwrap_used, reason = "test code")]

mod common;

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use clinch_testkit::{Proxy, Redis};
use common::{Running, World, eventually, filtered, on_all, runs, said, shown};
use rustix::process::Signal;

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
        assert_eq!(world.code(again), 0, "its turn ends later than its lock, and is waited for");
        assert!(!world.path("ran").exists());
    });
}

/// The same where the run that is gone had others beside it, who may have it run on: the turn stays taken with that, for longer than its time; and
/// whoever has that ended before its end is noted has the next one run at once.
#[test]
fn a_run_whose_wrapper_is_killed_as_it_begins_counts_while_its_job_runs() {
    for share in [&["--shared"][..], &[]] {
        let world = World::new();
        let once =
            ["--once-per", "1h", "x", "-c", "echo $$ > job.pid; while [ ! -e stop ]; do sleep 0.02; done"];
        let peek = u32::try_from(libc::MSG_PEEK).unwrap();
        let words: Vec<&str> = share.iter().chain(&once).copied().collect();
        let mut run = killed_at(&world, libc::SYS_recvfrom, 3, peek, &words);
        assert_eq!(run.wait().signal(), Some(libc::SIGSYS), "it is killed");
        let job = world.pid("job.pid");
        eventually("the run counts", || shown(&world, "x")["once_per_until"].is_string());
        eventually("nobody has its turn", || !world.held("x/once-per"));
        assert!(runs(job) && world.held("x"), "it runs");
        if !share.is_empty() {
            let (code, _, why) = said(&world, &["run", "--shared", "-n", "--once-per", "1h", "x", "true"]);
            assert!(code == Some(75) && why.contains("ran a short time ago"), "{why}");
        }
        let claim = world.claims("x", "held")[0]["claim"].as_str().unwrap().to_owned();
        world.output(["break", "--yes", "--claim", &claim, "x"]);
        eventually("the job is dead", || !runs(job));
        eventually("nobody has the lock", || !world.held("x"));
        assert!(shown(&world, "x")["once_per_until"].is_string(), "it ran");
    }
}

/// Lets so much time go by: for what a store must not be away too long.
fn for_at_least(time: Duration) {
    let since = Instant::now();
    eventually("the time goes by", || since.elapsed() > time);
}

fn until_stopped(code: &str) -> String {
    format!("touch began; while [ ! -e stop ]; do sleep 0.02; done; exit {code}")
}

/// Of a store behind a proxy.
fn far(proxy: &Proxy, ttl: &str) -> String {
    format!("redis://{}?ttl={ttl}", proxy.addr())
}

fn away(proxy: &Proxy) {
    proxy.refuse(true);
    proxy.cut_all();
}

/// What was to be noted of it took longer than the lease.
#[test]
fn a_job_that_held_its_lock_to_the_end_keeps_its_code() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    let (url, job) = (far(&proxy, "3s"), until_stopped("3"));
    let options = ["--once-per", "1h", "--retry-failed", "--events", "events"];
    let run = ["run", "-u", &url].into_iter().chain(options).chain(["x", "-c", &job]);
    let mut run = world.start(run);
    eventually("it counts", || shown(&world, "x")["once_per_until"].is_string());
    away(&proxy);
    world.write("stop", "");
    eventually("the job has failed", || world.read("events").contains("exited"));
    for_at_least(Duration::from_secs(4));
    proxy.refuse(false);
    assert_eq!(run.code(), 3);
}

/// A store that is away for a moment when a job fails keeps that from running again until its time.
#[test]
fn a_turn_is_given_back_when_the_store_is_there_again() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    let (url, job) = (far(&proxy, "10m"), until_stopped("3"));
    let fails_while_away = |events: &str| {
        let _ = std::fs::remove_file(world.path("stop"));
        let options = ["--once-per", "1h", "--retry-failed", "--events", events];
        let run = ["run", "-u", &url].into_iter().chain(options).chain(["x", "-c", &job]);
        let run = world.start(run);
        eventually("it counts", || shown(&world, "x")["once_per_until"].is_string());
        away(&proxy);
        world.write("stop", "");
        eventually("the job has failed", || world.read(events).contains("exited"));
        run
    };
    let mut run = fails_while_away("events");
    for_at_least(Duration::from_secs(3));
    proxy.refuse(false);
    assert_eq!(run.code(), 3);
    assert!(shown(&world, "x")["once_per_until"].is_null(), "it failed, and counts");
    let mut run = fails_while_away("again");
    run.signal(Signal::TERM);
    assert_eq!(run.code(), 3, "it is asked to end meanwhile");
}

/// One that says on a file what it has to say.
fn start_saying(world: &World, url: &str, words: &[&str]) -> Running {
    let mut command = world.clinch(words.iter().copied());
    command.env("CLINCH_URL", url).stderr(File::create(world.path("said")).unwrap());
    command.spawn().map(Running).unwrap()
}

fn asks_again(world: &World, run: &mut Running) {
    eventually("it asks again", || {
        world.read("said").contains("asking again") || run.0.try_wait().unwrap().is_some()
    });
}

/// A run that crashed has the turn longer than the lock: whoever comes next gives up, or even says that all is done.
#[test]
fn a_turn_that_is_held_is_waited_for() {
    on_all(|world| {
        let _ = std::fs::remove_file(world.path("stop"));
        let mut crashed = world.start(["run", "x/once-per", "-c", &until_stopped("0")]);
        eventually("it has the turn", || world.held("x/once-per"));
        for patience in [&["-n"][..], &["--skip"]] {
            let words = [&["run"], patience, &["--once-per", "1h", "x", "touch", "ran"]].concat();
            let (code, _, why) = said(world, &words);
            assert!(code == Some(75) && why.contains("x/once-per"), "{patience:?}: {code:?}, {why}");
        }
        // Nothing but a sign that it was run is written.
        let mut next =
            start_saying(world, &world.url(), &["run", "-w", "30s", "--once-per", "1h", "x", "touch", "ran"]);
        asks_again(world, &mut next);
        assert!(!world.path("ran").exists());
        world.write("stop", "");
        assert_eq!((next.code(), crashed.code()), (0, 0));
        assert!(world.path("ran").exists() && shown(world, "x")["once_per_until"].is_string());
        let mut crashed =
            world.start(["run", "y/once-per", "-c", "while [ ! -e stop2 ]; do sleep 0.02; done"]);
        eventually("it has the turn", || world.held("y/once-per"));
        let mut next =
            start_saying(world, &world.url(), &["run", "-w", "2s", "--once-per", "1h", "y", "true"]);
        assert_eq!(next.code(), 75);
        // Nor is one deaf meanwhile.
        let mut next = start_saying(world, &world.url(), &["run", "--once-per", "1h", "y", "true"]);
        asks_again(world, &mut next);
        next.signal(Signal::TERM);
        assert_eq!(next.wait().signal(), Some(15));
        world.write("stop2", "");
        assert_eq!(crashed.code(), 0);
    });
}

/// Of two that may have the lock together one has the turn, and is about to run: the other has nothing to complain of.
#[test]
fn whose_turn_is_another_s_that_shares_the_lock_skips_in_silence() {
    on_all(|world| {
        let start =
            || world.start(["run", "--shared", "--skip", "--once-per", "1h", "x", "-c", "echo ran >> ran"]);
        let mut runs: Vec<_> = (0..8).map(|_| start()).collect();
        let codes: Vec<i32> = runs.iter_mut().map(Running::code).collect();
        assert_eq!((codes, world.lines("ran")), (vec![0; 8], 1));
        assert_eq!(world.code(["break", "--yes", "x"]), 0);
        std::fs::remove_file(world.path("ran")).unwrap();
    });
}

/// The lock is granted, and just then the store is away for a moment: `-w` is over at once.
#[test]
fn a_turn_is_asked_for_again_when_the_store_is_there_again() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    let mut holder = world.start(["run", "x", "-c", &until_stopped("0")]);
    eventually("the lock is held", || world.held("x"));
    let url = far(&proxy, "10m");
    let words = ["run", "-w", "30s", "--once-per", "1h", "--events", "events", "x", "touch", "ran"];
    let mut next = start_saying(&world, &url, &words);
    eventually("it waits", || !world.claims("x", "waiting").is_empty());
    // So that there is time to be away.
    proxy.delay(Duration::from_millis(300));
    world.write("stop", "");
    eventually("it is granted", || world.read("events").contains("acquired"));
    away(&proxy);
    asks_again(&world, &mut next);
    proxy.delay(Duration::ZERO);
    proxy.refuse(false);
    assert_eq!((next.code(), holder.code()), (0, 0), "{}", world.read("said"));
    assert!(world.path("ran").exists());
}

/// Whoever asks the wrapper to end after its job, while the store is away, has the next one run before its time, and hears no word of it.
#[test]
fn what_was_not_closed_in_time_is_closed_when_the_store_is_there_again() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    let (url, job) = (far(&proxy, "10m"), until_stopped("0"));
    // The lock, when its turn was noted; and both.
    for name in ["x", "y"] {
        for file in ["stop", "began"] {
            let _ = std::fs::remove_file(world.path(file));
        }
        let words = ["run", "--min-hold", "1h", "--once-per", "1h", "--events", name, name, "-c", &job];
        if name == "y" {
            // So that there is time to be away before it is noted.
            proxy.delay(Duration::from_millis(300));
        }
        let mut run = start_saying(&world, &url, &words);
        eventually("it runs", || world.path("began").exists());
        if name == "x" {
            eventually("it counts", || shown(&world, name)["once_per_until"].is_string());
        }
        away(&proxy);
        proxy.delay(Duration::ZERO);
        world.write("stop", "");
        eventually("the job has ended", || world.read(name).contains("exited"));
        run.signal(Signal::TERM);
        assert_eq!(run.code(), 0);
        let said = world.read("said");
        assert!(said.contains(&format!("could not close lock \"{name}\" yet")), "{said}");
        proxy.refuse(false);
        eventually("it counts", || shown(&world, name)["once_per_until"].is_string());
        eventually("the lock is closed", || {
            shown(&world, name)["closed_until"].is_string() && !world.held(name)
        });
    }
}

/// A run that failed, and was asked to end before it was noted that it began, is noted behind its back.
#[test]
fn a_failed_run_that_is_to_be_retried_is_not_noted_later() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    let url = far(&proxy, "10m");
    // There has to be time to be away before it is noted; more on a busy host.
    let was_unnoted = [300, 1000, 3000].into_iter().any(|delay| {
        for file in ["stop", "began", "events"] {
            let _ = std::fs::remove_file(world.path(file));
        }
        proxy.refuse(false);
        proxy.delay(Duration::from_millis(delay));
        let (name, job) = (format!("x{delay}"), until_stopped("3"));
        let words = ["run", "--once-per", "1h", "--retry-failed", "--events", "events", &name, "-c", &job];
        let mut run = start_saying(&world, &url, &words);
        eventually("it runs", || world.path("began").exists());
        away(&proxy);
        proxy.delay(Duration::ZERO);
        let was_unnoted = shown(&world, &name)["once_per_until"].is_null();
        world.write("stop", "");
        eventually("the job has failed", || world.read("events").contains("exited"));
        run.signal(Signal::TERM);
        assert_eq!(run.code(), 3);
        let said = world.read("said");
        assert!(said.contains(&format!("could not note that \"{name}\" failed")), "{said}");
        assert!(!said.contains("ran;"), "{said}");
        was_unnoted
    });
    assert!(was_unnoted);
}
