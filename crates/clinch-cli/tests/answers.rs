//! Answers that cannot be written: what was done all the same, and what was taken in vain.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clinch_testkit::Redis;
use common::{Running, World, eventually, us};
use rustix::process::Signal;

/// Something that was to be written could not be.
const UNWRITTEN: i32 = 74;

/// On a disk that is full, to a reader that has gone.
fn deaf() -> [Stdio; 2] {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (_, unread) = rustix::pipe::pipe().unwrap();
    [full.into(), unread.into()]
}

/// A pipe that nobody reads, and that has no room left.
fn full_pipe() -> (OwnedFd, OwnedFd) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let blocking = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, blocking | rustix::fs::OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&writer, &[b'x'; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&writer, blocking).unwrap();
    (reader, writer)
}

/// Nobody knows the claim, and the lock stays taken for its whole TTL.
fn what_nobody_heard_of_is_released(world: &World) {
    let us = us();
    let acquire = ["acquire", "--for", &us, "--ttl", "24h", "x"];
    for (at, stdout) in deaf().into_iter().enumerate() {
        let failed = world.clinch(acquire).stdout(stdout).stderr(Stdio::piped()).output().unwrap();
        let words = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(
            failed.status.code() == Some(UNWRITTEN) && words.contains("was released"),
            "{at}: {failed:?}"
        );
        assert!(!world.held("x"), "{at}: it is held in vain");
    }
    let mut closed = Command::new("sh");
    closed.args(["-c", r#""$CLINCH" acquire --for $$ --ttl 24h x >&-"#]).stderr(Stdio::null());
    closed.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).env("CLINCH_URL", world.url());
    assert_eq!(closed.status().unwrap().code(), Some(UNWRITTEN));
    assert!(!world.held("x"), "a closed stdout was written to");
    // Until somebody reads it, or loses patience.
    let (_reader, writer) = full_pipe();
    let mut stuck = Running(world.clinch(acquire).stdout(writer).spawn().unwrap());
    eventually("it is taken", || world.held("x"));
    stuck.signal(Signal::TERM);
    assert_eq!(stuck.wait().signal(), Some(15));
    assert!(!world.held("x"), "it is held in vain");
}

#[test]
fn what_nobody_heard_of_is_released_on_redis() {
    let redis = Redis::start();
    what_nobody_heard_of_is_released(&World::on(redis.url()));
}

#[test]
fn what_nobody_heard_of_is_released_on_files() {
    what_nobody_heard_of_is_released(&World::new());
}

/// Somebody reads the claim, and it is given back for a signal that came meanwhile.
#[test]
fn what_was_heard_of_is_kept() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let (reader, writer) = full_pipe();
    let mut asker = Running(world.clinch(["acquire", "x"]).stdout(writer).spawn().unwrap());
    let moment = || {
        let since = Instant::now();
        eventually("a moment passes", || since.elapsed() > Duration::from_millis(150));
    };
    eventually("it is taken", || world.held("x"));
    moment();
    // What it does at the signal takes as long as somebody takes to read.
    redis.pause();
    asker.signal(Signal::TERM);
    moment();
    let mut reader = File::from(reader);
    let unread = rustix::io::ioctl_fionread(&reader).unwrap();
    reader.read_exact(&mut vec![0; unread as usize]).unwrap();
    moment();
    redis.resume();
    let ended = asker.wait();
    let mut answer = String::new();
    reader.read_to_string(&mut answer).unwrap();
    assert_eq!(answer.contains("claim="), ended.success(), "{ended}: {answer}");
    eventually("it is held by who heard of it", || world.held("x") == ended.success());
}

/// A lock of which nobody was told stays taken for its whole TTL.
#[test]
fn what_nobody_heard_of_is_released_when_the_asker_is_killed() {
    let world = World::new();
    let (_reader, writer) = full_pipe();
    let mut asker = Running(
        world.clinch(["acquire", "--for", &us(), "--ttl", "24h", "x"]).stdout(writer).spawn().unwrap(),
    );
    eventually("it is taken", || world.held("x"));
    asker.signal(Signal::KILL);
    asker.wait();
    eventually("it is free", || !world.held("x"));
}

/// A pipe that nobody reads keeps what was acquired for ever.
#[test]
fn an_answer_that_nobody_takes_is_given_up() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let (_reader, writer) = full_pipe();
    let mut stuck = Running(world.clinch(["acquire", "--ttl", "24h", "x"]).stdout(writer).spawn().unwrap());
    assert_eq!(stuck.code(), UNWRITTEN);
    assert!(!world.held("x"));
}

/// Whoever is refused waits for somebody to read that.
#[test]
fn a_refusal_that_nobody_reads_ends_all_the_same() {
    let world = World::new();
    let _holder = world.start(["run", "x", "sleep", "60"]);
    eventually("the lock is held", || world.held("x"));
    let (_reader, writer) = full_pipe();
    let mut refused =
        Running(world.clinch(["acquire", "-n", "--for", &us(), "x"]).stdout(writer).spawn().unwrap());
    assert_eq!(refused.code(), 75);
}

/// A look whose reader has seen enough is no failure; one that could not be written is.
#[test]
fn whoever_looks_may_look_away() {
    let world = World::new();
    let _holder = world.start(["run", "x", "sleep", "60"]);
    eventually("the lock is held", || world.held("x"));
    for verb in [&["ls"][..], &["show", "x"], &["show", "--json", "x"]] {
        let codes = deaf().map(|stdout| {
            world.clinch(verb.iter().copied()).stdout(stdout).stderr(Stdio::null()).status().unwrap().code()
        });
        assert_eq!(codes, [Some(UNWRITTEN), Some(0)], "{verb:?}");
    }
}

/// What cannot be told is done, all of it; and then it is told that it could not be told.
#[test]
fn a_break_that_nobody_hears_of_evicts_all() {
    let world = World::new();
    for stdout in deaf() {
        let mut told = world.start(["run", "-s", "x", "sleep", "60"]);
        eventually("one holds it", || world.claims("x", "held").len() == 1);
        let mut stopped = world.start(["run", "-s", "x", "sleep", "60"]);
        eventually("both hold it", || world.claims("x", "held").len() == 2);
        stopped.signal(Signal::STOP);
        let mut command = world.clinch(["break", "--yes", "x"]);
        let mut breaking = Running(command.stdout(stdout).stderr(Stdio::piped()).spawn().unwrap());
        assert_eq!(told.code(), 79);
        // The other has not heard of it yet.
        let since = Instant::now();
        eventually("a moment passes", || since.elapsed() > Duration::from_millis(300));
        let left_it = breaking.0.try_wait().unwrap();
        stopped.signal(Signal::CONT);
        assert_eq!(left_it, None, "it ended before all had been told");
        assert_eq!(stopped.code(), 79);
        assert_eq!(breaking.code(), UNWRITTEN);
        let mut words = String::new();
        breaking.0.stderr.take().unwrap().read_to_string(&mut words).unwrap();
        assert!(words.contains("evicted"), "{words}");
    }
}

/// A message that does not fit into what has room for its beginning is waited for, for ever.
#[test]
fn a_message_that_nobody_reads_to_its_end_keeps_nobody() {
    let world = World::new();
    // Longer than the pipes of the test.
    let program = format!("./{}", "x".repeat(100_000));
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    let mut command = world.clinch(["run", "--events", "fd:1", "x", &program]);
    let mut run = Running(command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap());
    assert_eq!(run.code(), 126);
    assert!(!world.held("x"));
    let output = world.output(["run", "-v", "--events", "events", "x", &program]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.lines().count() == 3 && said.len() > program.len(),
        "all of it is said where it is read: {said}"
    );
    assert_eq!(world.events("events").last().unwrap()["event"], "refused");
}

/// Help that nobody got is told as an answer.
#[test]
fn help_that_cannot_be_written_is_a_failure() {
    let world = World::new();
    for args in
        [&["--help"][..], &["--version"], &["help", "run"], &["run", "--help"], &["run", "-h"], &["help"]]
    {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = world.clinch(args.iter().copied()).stdout(full).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(UNWRITTEN), "{args:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write the answer"), "{output:?}");
        let mut closed = Command::new("sh");
        closed.args(["-c", r#"exec "$CLINCH" "$@" >&-"#, "sh"]).args(args).stderr(Stdio::null());
        closed.env("CLINCH", env!("CARGO_BIN_EXE_clinch"));
        assert_eq!(closed.status().unwrap().code(), Some(UNWRITTEN), "{args:?}");
        // As `clinch --help | head`.
        let (_, unread) = rustix::pipe::pipe().unwrap();
        assert_eq!(
            world.clinch(args.iter().copied()).stdout(unread).status().unwrap().code(),
            Some(0),
            "{args:?}"
        );
    }
}

/// In zsh a word that begins with = is the path of a command.
#[test]
fn the_answer_of_acquire_is_read_back_by_each_shell() {
    let world = World::new();
    for shell in ["sh", "bash", "zsh"] {
        for name in ["=ls", "a:=ls", "a:~root", "a=b", "-x"] {
            let script = r#"lock=$("$CLINCH" acquire --for $$ -- "$N") || exit; eval "$lock"; "$CLINCH" release -- "$name" "$claim" && printf %s "$name""#;
            let mut command = Command::new(shell);
            command.args(["-c", script]).env("N", name).env("CLINCH_URL", world.url());
            let output = command.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout), name, "{shell}: {output:?}");
        }
    }
}
