//! `clinch run --no-fork`: the command in place of clinch.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod common;

use std::os::unix::process::ExitStatusExt;

use clinch_testkit::Redis;
use common::{World, eventually, kill};
use rustix::process::Signal;

const JOB: &str = "echo $$ > job.pid; while [ ! -e stop ]; do sleep 0.02; done; exit 3";

/// A wrapper stays, or the lock does not.
#[test]
fn the_command_takes_the_place_of_clinch_and_has_its_lock() {
    let world = World::new();
    let mut run = world.start(["run", "-F", "x", "-c", JOB]);
    assert_eq!(world.pid("job.pid"), run.pid());
    assert_eq!(world.claims("x", "held")[0]["pid"], run.pid());
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75);
    let mut next = world.start(["run", "-F", "-w", "60s", "x", "true"]);
    eventually("it waits", || !world.claims("x", "waiting").is_empty());
    world.write("stop", "");
    assert_eq!((run.code(), next.code()), (3, 0));
    assert!(!world.held("x"));
}

/// It waits for itself, without end.
#[test]
fn a_run_that_the_command_itself_becomes_is_refused() {
    let world = World::new();
    let run = world.output(["run", "-F", "x", "-c", r#"exec "$CLINCH" run -w 20s x true"#]);
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.code() == Some(75) && said.contains("can let nobody in"), "{said}");
}

/// What the job left behind works on beside the next holder; or a job that was killed keeps its lock.
#[test]
fn the_lock_lasts_until_the_last_copy_of_its_descriptor_is_closed() {
    let world = World::new();
    let job = r#"sleep 1000 & echo $! > left.pid; kill -9 $$"#;
    let mut run = world.start(["run", "-F", "x", "-c", job]);
    run.wait();
    let left = world.pid("left.pid");
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75);
    assert!(kill(left, Signal::KILL));
    eventually("it is free", || world.code(["run", "-n", "x", "true"]) == 0);
}

/// Who is let through runs on when another has its lock; or an option is taken and forgotten.
#[test]
fn what_needs_somebody_beside_the_command_is_refused() {
    let redis = Redis::start();
    let output = World::on(redis.url()).output(["run", "--no-fork", "x", "touch", "ran"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(64), "{said}");
    assert!(said.contains("nobody to renew"), "{said}");
    let world = World::new();
    for option in [
        "--max-hold=1h",
        "--grace=1s",
        "--on-lost=term",
        "--min-hold=1s",
        "--once-per=1s",
        "--retry-failed",
        "--orphans=leave",
        "--events=e",
    ] {
        let output = world.output(["run", option, "-F", "x", "touch", "ran"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{option}");
        assert!(said.contains("leaves no clinch beside"), "{option}: {said}");
    }
    assert!(!world.path("ran").exists());
}

/// It waits for itself.
#[test]
fn a_run_of_the_same_lock_inside_is_refused() {
    let world = World::new();
    let output = world.output(["run", "-F", "x", "-c", r#""$CLINCH" run x touch ran"#]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(75), "{said}");
    assert!(said.contains("(-F)"), "{said}");
    assert_eq!(world.code(["run", "-F", "x", "-c", r#""$CLINCH" run y touch ran"#]), 0, "another lock");
    // What is left of the job when that has ended.
    let job =
        r#"(while kill -0 $$; do sleep 0.02; done; "$CLINCH" run x true; echo $? > code) > out 2> said &"#;
    assert_eq!(world.code(["run", "-F", "x", "-c", job]), 0);
    eventually("it has ended", || world.read("code").ends_with('\n'));
    assert_eq!(world.read("code"), "75\n", "{}", world.read("said"));
}

/// A lock stays taken for a command that never was.
#[test]
fn a_command_that_cannot_be_executed_holds_nothing() {
    let world = World::new();
    assert_eq!(world.code(["run", "-F", "x", "no-such-command"]), 127);
    assert_eq!(world.code(["run", "-F", "x", "/"]), 126);
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
}

/// The command ignores what clinch had caught, or hears nothing.
#[test]
fn signals_are_the_commands_own() {
    let world = World::new();
    let mut run = world.start(["run", "-F", "x", "sleep", "60"]);
    let of_it = |file: &str| std::fs::read_to_string(format!("/proc/{}/{file}", run.pid())).unwrap();
    eventually("it is the command", || of_it("comm") == "sleep\n");
    let status = of_it("status");
    let set = |of: &str| {
        let hex = status.lines().find_map(|line| line.strip_prefix(of)).unwrap().trim();
        // Those above are of the C library.
        u64::from_str_radix(hex, 16).unwrap() as u32 & !(1 << 31)
    };
    assert_eq!([set("SigBlk:"), set("SigIgn:")], [0, 0]);
    run.signal(Signal::TERM);
    assert_eq!(run.wait().signal(), Some(15));
    assert!(!world.held("x"));
}
