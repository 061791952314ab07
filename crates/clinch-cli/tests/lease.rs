//! `acquire`, `renew`, `release`: a lock held by a shell script across commands.

#![allow(clippy::indexing_slicing, clippy::unwrap_used, reason = "test code")]

mod common;

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clinch::backend::NOTICE;
use common::{Running, World, eventually, runs, us};
use rustix::process::{Resource, Rlimit, Signal, prlimit};

/// A shell that runs a script with `$CLINCH` and the store, in the directory.
fn shell(world: &World, script: &str) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("echo $$ > shell.pid\n{script}")).current_dir(world.path("."));
    command.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).env("CLINCH_URL", world.url());
    command.env_remove("CLINCH_HELD").stdin(Stdio::null());
    command
}

const ACQUIRE: &str =
    r#"lock=$("$CLINCH" acquire "it's x" --for $$ --ttl 60s) || exit; eval "$lock"; echo "$claim" > claim;"#;

/// Takes a lease that is bound to this process; its claim, and the process that holds it.
fn acquire(world: &World, ttl: &str) -> (String, i32) {
    let output = world.output(["acquire", "--json", "--for", &us(), "--ttl", ttl, "x"]);
    let lease: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    (lease["claim"].as_str().unwrap().to_owned(), keeper(world).unwrap())
}

/// The process that keeps the claim of an `acquire` on this store.
fn keeper(world: &World) -> Option<i32> {
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut files = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        words.split(|byte| *byte == 0).any(|word| word == b"hold")
            && files.any(|file| file.starts_with(world.path("store")))
    })
}

/// A script that was killed waits on through its `acquire`, whose place keeps readers from readers.
#[test]
fn a_waiting_acquire_ends_with_its_shell() {
    let world = World::new();
    let _holder = world.start(["run", "-s", "x", "sleep", "60"]);
    eventually("the lock is held", || world.held("x"));
    let mut script =
        Running(shell(&world, r#"lock=$("$CLINCH" acquire x --for $$); sleep 60"#).spawn().unwrap());
    eventually("it waits", || !world.claims("x", "waiting").is_empty());
    script.signal(Signal::KILL);
    script.wait();
    eventually("it waits no more", || world.claims("x", "waiting").is_empty());
    assert_eq!(world.code(["run", "-n", "-s", "x", "true"]), 0);
}

/// What `acquire` took is not held, or cannot be renewed or released; or a renewal that asks for less makes it shorter.
#[test]
fn a_script_holds_a_lock_across_commands() {
    let world = World::new();
    let script = format!(
        r#"{ACQUIRE}
        "$CLINCH" run -n "$name" true; [ $? = 75 ] || exit 11
        "$CLINCH" renew "$name" "$claim" --ttl 1h || exit 12
        "$CLINCH" renew "$name" "$claim" || exit 16
        "$CLINCH" show --json "$name" > show
        [ "$token" -gt 0 ] || exit 13
        "$CLINCH" release "$name" "$claim" || exit 14
        "$CLINCH" run -n "$name" true || exit 15"#
    );
    assert_eq!(shell(&world, &script).status().unwrap().code(), Some(0));
    let show: serde_json::Value = serde_json::from_str(&world.read("show")).unwrap();
    assert!(show["claims"][0]["expires_in_ms"].as_u64().unwrap() > 3_000_000);
    assert_eq!(show["claims"][0]["pid"], world.pid("shell.pid"), "it is the shell's");
    eventually("the holder ends", || keeper(&world).is_none());
    let claim = world.read("claim");
    assert_eq!(world.code(["release", "it's x", claim.trim()]), 79);
    assert_eq!(world.code(["renew", "it's x", claim.trim()]), 79);
    assert_eq!(world.code(["renew", "x", "no-claim"]), 64);
}

/// The shell dies, and its lock stays taken until the TTL has run out, or for ever.
#[test]
fn a_lock_ends_with_the_shell_that_took_it() {
    let world = World::new();
    let script = format!("{ACQUIRE} touch acquired; while :; do sleep 0.02; done");
    let mut script = Running(shell(&world, &script).spawn().unwrap());
    eventually("it is acquired", || world.path("acquired").exists());
    assert!(world.held("it's x"));
    script.signal(Signal::KILL);
    script.wait();
    eventually("it is free", || !world.held("it's x"));
}

/// The caller's pipe never ends, since what holds the lock has inherited it.
#[test]
fn what_holds_a_lock_keeps_no_descriptor_of_its_caller() {
    let world = World::new();
    let script = r#"exec 7> pipe; lock=$("$CLINCH" acquire x --for $$) || exit; exec 7>&-; sleep 60"#;
    let made = Command::new("mkfifo").arg(world.path("pipe")).status().unwrap();
    assert!(made.success());
    let _script = Running(shell(&world, script).spawn().unwrap());
    assert_eq!(std::fs::read(world.path("pipe")).unwrap(), b"");
    assert!(world.held("x"));
}

/// A script that hangs keeps its lock for ever.
#[test]
fn a_lock_ends_with_its_ttl_unless_renewed() {
    let world = World::new();
    let script = r#"lock=$("$CLINCH" acquire x --for $$ --ttl 1s) || exit; touch acquired; while :; do sleep 0.02; done"#;
    let _script = Running(shell(&world, script).spawn().unwrap());
    eventually("it is acquired", || world.path("acquired").exists());
    eventually("it is free", || !world.held("x"));
}

/// A renewal is not heard by the holder, who lets go in the middle.
#[test]
fn a_renewed_lock_outlives_its_first_ttl() {
    let world = World::new();
    let script = r#"lock=$("$CLINCH" acquire x --for $$ --ttl 1s) || exit; eval "$lock"
        for i in 1 2 3 4 5 6 7 8; do sleep 0.3; "$CLINCH" renew x "$claim" --ttl 1s || exit 11; done
        "$CLINCH" show x > show || exit 12"#;
    assert_eq!(shell(&world, script).status().unwrap().code(), Some(0));
}

/// A script that is refused goes on as if it had the lock; or a holder is left behind that takes it later.
#[test]
fn a_refused_or_interrupted_acquire_leaves_nothing() {
    let world = World::new();
    let _holder = world.start(["run", "x", "-c", "echo $$ > job.pid; exec sleep 60"]);
    eventually("the lock is held", || world.held("x"));
    let refused = world.output(["acquire", "-n", "--for", &us(), "x"]);
    assert!(
        refused.status.code() == Some(75) && refused.stdout == b"(exit 75)\n",
        "an eval of it fails, too"
    );
    let script = r#"set -e; eval "$("$CLINCH" acquire -n x --for $$ 2>&-)"; echo went on"#;
    let evaluated = shell(&world, script).output().unwrap();
    assert!(evaluated.status.code() == Some(75) && evaluated.stdout.is_empty(), "{evaluated:?}");
    assert!(world.output(["acquire", "--json", "-n", "--for", &us(), "x"]).stdout.is_empty());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is held by"));
    assert_eq!(world.code(["acquire", "-w", "50ms", "-E", "9", "--for", &us(), "x"]), 9);
    // Which is also the code of an answer that cannot be written.
    let called = world.output(["acquire", "-n", "-E", "74", "--for", &us(), "x"]);
    assert_eq!((called.status.code(), &*called.stdout), (Some(74), &b"(exit 74)\n"[..]));
    // A script that asks for the exit code would go on by `-E 0`.
    let no_failure = &["acquire", "-n", "-E", "0", "--for", "1", "x"];
    for wrong in [&["acquire", "x", "--ttl", "0"][..], &["acquire", "x", "-w", ""], &["acquire"], no_failure]
    {
        let output = world.output(wrong.iter().copied());
        assert!(output.status.code() == Some(64) && output.stdout == b"(exit 64)\n", "{wrong:?}: {output:?}");
    }
    assert!(world.output(["acquire", "--json", "-w", ""]).stdout.is_empty());
    let cannot_start = shell(&world, r#"ulimit -n 7; "$CLINCH" acquire x --for $$"#).output().unwrap();
    assert_eq!((cannot_start.status.code(), &*cannot_start.stdout), (Some(70), &b"(exit 70)\n"[..]));
    let mut waiting = world.start(["acquire", "--for", &us(), "x"]);
    eventually("it waits", || world.claims("x", "waiting").len() == 1);
    waiting.signal(Signal::INT);
    assert_eq!(waiting.wait().signal(), Some(2));
    let mut words = String::new();
    waiting.0.stdout.take().unwrap().read_to_string(&mut words).unwrap();
    assert_eq!(words, "(exit 130)\n", "an eval of it fails, too");
    eventually("its holder withdraws", || world.claims("x", "waiting").is_empty());
}

/// An `acquire` that is stopped leaves a lock that nobody knows of, or tells of one that is over.
#[test]
fn a_stopped_acquire_keeps_no_lock_and_tells_of_none_that_is_over() {
    for (ttl, is_killed) in [("1s", false), ("60s", true)] {
        let world = World::new();
        let mut holder = world.start(["run", "x", "-c", "while [ ! -e stop ]; do sleep 0.02; done"]);
        eventually("the lock is held", || world.held("x"));
        let mut acquire = world.start(["acquire", "--for", &us(), "x", "--ttl", ttl]);
        eventually("it waits", || world.claims("x", "waiting").len() == 1);
        let owner = keeper(&world).unwrap();
        acquire.signal(Signal::STOP);
        world.write("stop", "");
        assert_eq!(holder.code(), 0);
        if is_killed {
            eventually("it is granted", || world.held("x"));
            common::kill(owner, Signal::KILL);
        }
        eventually("it is free", || !runs(owner) && !world.held("x"));
        acquire.signal(Signal::CONT);
        assert_eq!(acquire.code(), 79, "{ttl}");
        let mut words = String::new();
        acquire.0.stdout.take().unwrap().read_to_string(&mut words).unwrap();
        assert_eq!(words, "(exit 79)\n", "an eval of it fails, too: {ttl}");
    }
}

/// An `acquire` that was stopped tells of a lock that an operator has taken away meanwhile.
#[test]
fn an_acquire_tells_of_no_lock_that_was_taken_away() {
    let world = World::new();
    let mut holder = world.start(["run", "x", "-c", "while [ ! -e stop ]; do sleep 0.02; done"]);
    eventually("the lock is held", || world.held("x"));
    let mut acquire = world.start(["acquire", "--for", &us(), "x", "--ttl", "60s"]);
    eventually("it waits", || world.claims("x", "waiting").len() == 1);
    acquire.signal(Signal::STOP);
    world.write("stop", "");
    assert_eq!(holder.code(), 0);
    let left = || world.claims("x", "held").first().and_then(|claim| claim["expires_in_ms"].as_u64());
    eventually("it is granted", || left().is_some());
    let _evictor = world.start(["break", "--yes", "x"]);
    eventually("it is being taken away", || left() <= Some(NOTICE.as_millis() as u64));
    acquire.signal(Signal::CONT);
    assert_eq!(acquire.code(), 79);
    eventually("what nobody knows of is free", || !world.held("x"));
}

/// A renewal fails since another takes its time with a record, and who waits for its lease is told of a holder that is none.
#[test]
fn a_renewal_waits_for_who_keeps_its_record_busy() {
    let world = World::new();
    let (claim, _) = acquire(&world, "60s");
    let keep = common::keep_busy(&world, "x", (1 << 54) + 1, 8192);
    let mut renew = world.start(["renew", "x", &claim]);
    // For longer than the store itself repeats it.
    std::thread::sleep(Duration::from_millis(1500));
    keep.kill();
    assert_eq!(renew.code(), 0);
}

/// A shell works on under a lock that was taken away, and is held by another: it hears of that when it renews, and has its notice until then.
#[test]
fn a_shell_whose_lock_is_taken_away_has_time_to_stop() {
    let world = World::new();
    let (claim, _) = acquire(&world, "60s");
    let mut evictor = world.start(["break", "--yes", "x"]);
    eventually("it is being taken away", || world.code(["renew", "x", &claim]) == 79);
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75);
    assert_eq!(world.code(["release", "x", &claim]), 79);
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0, "who works under it has said that it is done");
    assert_eq!(evictor.code(), 0);
    // Longer than it takes its holder to hear of that, and shorter than the notice.
    let (since, ttl) = (Instant::now(), Duration::from_secs(6));
    let (claim, _) = acquire(&world, "6s");
    assert_eq!(world.code(["break", "--yes", "x"]), 0);
    assert!(since.elapsed() >= ttl, "its lease had not ended");
    assert_eq!(world.code(["renew", "x", &claim]), 79);
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
}

/// Its holder hears that nothing says any more whose lock it is; who works under it does not.
#[test]
fn a_shell_whose_lock_file_was_emptied_has_time_to_stop() {
    let world = World::new();
    acquire(&world, "60s");
    std::fs::File::options().write(true).truncate(true).open(world.path("store/x.lock")).unwrap();
    assert_eq!(world.code(["run", "-w", "8s", "x", "true"]), 75, "another was let in at once");
    assert_eq!(world.code(["run", "-w", "60s", "x", "true"]), 0);
}

/// Holders outlive what they held, for as long as the notice of an eviction, and fill the lock's queue.
#[test]
fn a_holder_ends_with_the_release_of_its_lease() {
    let world = World::new();
    let (claim, holder) = acquire(&world, "60s");
    assert_eq!(world.code(["release", "x", &claim]), 0);
    let released = Instant::now();
    eventually("the holder ends", || !runs(holder));
    assert!(released.elapsed() < NOTICE, "as if its lease had been taken away");
}

/// Has a process open no more files.
fn limit_descriptors(pid: i32) {
    let none = Rlimit { current: Some(3), maximum: Some(3) };
    prlimit(rustix::process::Pid::from_raw(pid), Resource::Nofile, none).unwrap();
}

/// A holder that can open no file frees what was renewed, or keeps what is over.
#[test]
fn a_holder_without_descriptors_keeps_to_the_end_of_its_lease() {
    let (world, renewed) = (World::new(), Duration::from_secs(4));
    let (claim, holder) = acquire(&world, "2s");
    limit_descriptors(holder);
    let since = Instant::now();
    assert_eq!(world.code(["renew", "x", &claim, "--ttl", "4s"]), 0);
    eventually("it is free", || !world.held("x"));
    assert!(since.elapsed() >= renewed, "what was renewed was freed after {:?}", since.elapsed());
    assert!(since.elapsed() < NOTICE, "its end was not seen");
}

/// A holder that comes to have the lock when it can open nothing more tells of it, and lets go at once.
#[test]
fn a_holder_that_cannot_begin_says_why() {
    let world = World::new();
    let mut before = world.start(["run", "x", "-c", "while [ ! -e stop ]; do sleep 0.02; done"]);
    eventually("the lock is held", || world.held("x"));
    let mut acquire = world.start(["acquire", "-w", "2s", "--for", &us(), "x"]);
    eventually("it waits", || world.claims("x", "waiting").len() == 1);
    limit_descriptors(keeper(&world).unwrap());
    world.write("stop", "");
    assert_eq!((before.code(), acquire.code()), (0, 70), "this host has failed");
    eventually("it is free", || !world.held("x"));
}

/// A holder that was stopped takes what ended meanwhile for its own.
#[test]
fn a_holder_that_was_stopped_lets_go_of_what_is_over() {
    let world = World::new();
    let (claim, holder) = acquire(&world, "1s");
    assert!(common::kill(holder, Signal::STOP));
    eventually("its lease is over", || world.claims("x", "held")[0]["expires_in_ms"] == 0);
    assert_eq!(world.code(["renew", "x", &claim]), 79);
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75, "it may still be at it");
    common::kill(holder, Signal::CONT);
    eventually("it is free", || !world.held("x") && !runs(holder));
}

/// A process that is stopped while it changes a record ends an `acquire` that has time to wait.
#[test]
fn an_acquire_waits_for_who_keeps_its_record_busy() {
    let world = World::new();
    assert_eq!(world.code(["run", "x", "true"]), 0, "now there is a lock file");
    let keep = common::keep_busy(&world, "x", (1 << 54) + 1, 8192);
    let mut acquire = world.start(["acquire", "-w", "60s", "--for", &us(), "x"]);
    eventually("it is granted", || world.held("x"));
    // For longer than the store itself repeats it.
    std::thread::sleep(Duration::from_millis(1500));
    keep.kill();
    assert_eq!(acquire.code(), 0);
}

/// A time that cannot be told in nanoseconds is refused to the holder, which ends without a word.
#[test]
fn an_acquire_may_wait_for_a_thousand_years() {
    assert_eq!(World::new().code(["acquire", "-w", "1000y", "--for", &us(), "x"]), 0);
}

/// A lock of a store that ends with the process is said to be held when it is not.
#[test]
fn a_store_that_cannot_keep_a_lock_says_so() {
    let world = World::new();
    let output = world.output(["acquire", "-u", "memory://", "x"]);
    assert!(output.status.code() == Some(64) && output.stdout == b"(exit 64)\n");
}

/// Programs cannot read what `acquire` answers.
#[test]
fn acquire_answers_programs_in_json() {
    let world = World::new();
    let output =
        world.output(["acquire", "--json", "--for", &us(), "--ttl", "2m", "--label", "by hand", "x"]);
    let lease: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&lease["name"], &lease["ttl_ms"]), (&"x".into(), &120_000.into()));
    assert_eq!(world.claims("x", "held")[0]["label"], "by hand");
    let released = world.output(["release", "--json", "x", lease["claim"].as_str().unwrap()]);
    let released: serde_json::Value = serde_json::from_slice(&released.stdout).unwrap();
    assert_eq!(released["result"], "released");
}

/// The lease of a job that its wrapper keeps is given an end that means nothing, or its lock to another beside it.
#[test]
fn what_a_run_holds_is_renewed_and_released_by_nobody_else() {
    let world = World::new();
    let script = r#""$CLINCH" renew x "$CLINCH_CLAIM" --ttl 1h; echo $? > codes; "$CLINCH" show --json x > show
        "$CLINCH" release x "$CLINCH_CLAIM" 2> why; echo $? >> codes; env -u CLINCH_HELD "$CLINCH" run -n x true; echo $? >> codes"#;
    assert_eq!(world.code(["run", "x", "-c", script]), 0);
    let show: serde_json::Value = serde_json::from_str(&world.read("show")).unwrap();
    assert_eq!(world.read("codes").split_whitespace().collect::<Vec<_>>(), ["64", "64", "75"]);
    assert_eq!(show["claims"][0]["expires_in_ms"], serde_json::Value::Null);
    assert!(world.read("why").contains("clinch break"), "{}", world.read("why"));
}

/// A script cannot tell whose end frees its lock, or binds it to another than it names.
#[test]
fn an_acquire_says_to_whom_its_lock_is_bound() {
    let world = World::new();
    let output =
        shell(&world, r#"eval "$("$CLINCH" acquire x --for $$)"; echo $for_pid $$"#).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let pids: Vec<&str> = said.split_whitespace().collect();
    assert!(pids.len() == 2 && pids[0] == pids[1], "{said}");
    let mut other = Running(Command::new("sleep").arg("60").spawn().unwrap());
    let output = world.output(["acquire", "--json", "--for", &other.pid().to_string(), "y"]);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["for_pid"], other.pid());
    other.signal(Signal::KILL);
    other.wait();
    eventually("it is free", || !world.held("y"));
}
