//! How long the lock is held: as long as the job, whoever dies.

mod common;

use common::{World, eventually, kill, runs};
use rustix::process::Signal;

const JOB: &str = "echo $$ > job.pid; while [ ! -e stop ]; do sleep 0.02; done; exit 4";

/// The wrapper is killed, the job goes on, and a second job starts beside it.
#[test]
fn a_killed_wrapper_leaves_the_lock_with_its_job() {
    let world = World::new();
    let run = world.start(["run", "x", "-c", JOB]);
    let job = world.pid("job.pid");
    run.signal(Signal::KILL);
    drop(run);
    assert!(runs(job) && world.held("x"));
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75);
    let mut next = world.start(["run", "x", "true"]);
    eventually("the next one waits", || world.claims("x", "waiting").len() == 1);
    world.write("stop", "");
    assert_eq!(next.code(), 0);
    assert!(!runs(job));
}

/// On a store that frees the lock of a dead wrapper, its job goes on without it.
#[test]
fn a_killed_wrapper_takes_its_job_along_where_the_job_cannot_keep_the_lock() {
    let world = World::new();
    let run = world.start(["run", "-u", "memory://", "x", "-c", JOB]);
    let job = world.pid("job.pid");
    run.signal(Signal::KILL);
    eventually("the job is dead", || !runs(job));
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
