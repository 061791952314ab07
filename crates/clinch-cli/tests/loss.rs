//! A job whose lock is lost is dead before another can have it.

mod common;

use std::fs::{Permissions, set_permissions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::process::{Command, Stdio};
use std::time::Duration;

use clinch_testkit::Redis;
use common::{MANY, Running, World, end_large_job, eventually, filtered, kill, large_job, runs};
use rustix::process::Signal;

/// The number of that call, everywhere.
const PIDFD_OPEN: u32 = 434;

const STUBBORN: &str = "trap 'echo TERM >> log' TERM; echo $$ > job.pid; while :; do sleep 0.02; done";

/// A job that ignores TERM works on beside the next holder.
#[test]
fn a_job_that_holds_too_long_is_dead_before_the_next_starts() {
    let world = World::new();
    let mut run = world.start([
        "run",
        "--max-hold",
        "1s",
        "--grace",
        "400ms",
        "--events",
        "events",
        "x",
        "-c",
        STUBBORN,
    ]);
    let job = world.pid("job.pid");
    let next = world.output(["run", "x", "-c", &format!("! grep -q '^State:.[^Z]' /proc/{job}/status")]);
    assert!(next.status.success(), "the job is dead when the next one starts: {next:?}");
    assert_eq!(run.code(), 79);
    assert!(world.read("log").starts_with("TERM"));
    let events = world.events("events");
    let names: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["acquired", "stopping", "stopping", "exited", "released"],
        "never lost: stopped in time"
    );
    assert_eq!((&events[1]["signal"], &events[2]["signal"]), (&"term".into(), &"kill".into()));
}

/// The laptop slept past the end: the next one works beside a job that still has its grace.
#[test]
fn a_job_whose_time_passed_unseen_is_dead_before_the_next_starts() {
    let world = World::new();
    let mut run = world.start(["run", "--max-hold", "2s", "--grace", "1s", "x", "-c", STUBBORN]);
    let (start, job) = (std::time::Instant::now(), world.pid("job.pid"));
    run.signal(Signal::STOP);
    let check = format!("! grep -q '^State:.[^Z]' /proc/{job}/status");
    let mut next = world.start(["run", "x", "-c", &check]);
    eventually("its time has passed", || start.elapsed().as_millis() > 2100);
    run.signal(Signal::CONT);
    assert_eq!(next.code(), 0, "the job is dead when the next one starts");
    assert_eq!(run.code(), 79);
}

/// The children of a job that has to stop go on without the lock.
#[test]
fn the_children_of_a_job_that_has_to_stop_die_with_it() {
    let world = World::new();
    let script =
        "(trap '' TERM; echo hi; sleep 60) > /dev/null 2>&1 & echo $! > child.pid; echo $$ > job.pid; wait";
    let mut run = world.start(["run", "--max-hold", "500ms", "-q", "x", "-c", script]);
    let child = world.pid("child.pid");
    assert_eq!(run.code(), 79);
    eventually("the child is dead", || !runs(child));
}

/// What has a process group of its own goes on without the lock: a part under `timeout`, or the job of a run inside the job; or what has a name
/// that is no text.
#[test]
fn the_parts_of_a_job_that_has_to_stop_die_with_it() {
    const PART: &str = "trap '' TERM; echo $$ > part.pid; while :; do sleep 0.02; done";
    const NAMED: &str = r#"$0 = "\xff"; $SIG{TERM} = "IGNORE"; open F, ">part.pid"; print F "$$\n"; close F; sleep 1 while 1"#;
    for around in [
        &["timeout", "60", "sh", "-c", PART][..],
        &[env!("CARGO_BIN_EXE_clinch"), "run", "y", "-c", PART],
        &["perl", "-e", NAMED],
    ] {
        let world = World::new();
        let job = [&["run", "--max-hold", "1s", "-q", "x", "--", "sh", "-c", r#""$@"; true"#, "sh"], around]
            .concat();
        let mut run = world.start(job);
        let part = world.pid("part.pid");
        assert_eq!(run.code(), 79);
        eventually("the part is dead", || !runs(part));
    }
}

/// A part goes on without the lock: there are more than descriptors, or it was started when the job had to stop and has lost its
/// parents.
#[test]
fn all_parts_of_a_job_that_has_to_stop_die_with_it() {
    const PARTS: usize = 60;
    let world = World::new();
    world.write("part", "trap '' TERM; echo $$ >> parts; exec sleep 60");
    let job = format!(
        "trap 'until [ \"$(wc -l < parts)\" -gt {PARTS} ]; do (setsid sh part &); sleep 0.2; done; exit 1' TERM
        for i in $(seq {PARTS}); do setsid sh part & done; while :; do sleep 0.02; done"
    );
    let mut limited = std::process::Command::new("sh");
    limited
        .args(["-c", r#"ulimit -n 32; exec "$CLINCH" run -q x -c "$0""#, &job])
        .current_dir(world.path("."));
    limited
        .env("CLINCH", env!("CARGO_BIN_EXE_clinch"))
        .env("CLINCH_URL", world.url())
        .env_remove("CLINCH_HELD");
    let mut run = Running(limited.spawn().unwrap());
    eventually("all parts run", || world.lines("parts") == PARTS);
    assert_eq!((world.code(["break", "--yes", "x"]), run.code()), (0, 79));
    let parts = world.read("parts");
    let left: Vec<_> = parts.lines().map(|part| part.parse().unwrap()).filter(|part| runs(*part)).collect();
    left.iter().for_each(|part| _ = kill(*part, Signal::KILL));
    // One that is started while others are told may be told itself, and end before it ignores that; as may what counts them.
    assert!(parts.lines().count() > PARTS, "none was started when the job had to stop");
    assert_eq!(left.len(), 0, "they work on without the lock");
}

/// Takes a while to end, and says when it is done with that.
const WORKER: &str = "trap 'for i in 1 2 3 4 5; do sleep 0.05; done; echo cleaned >> log; exit' TERM
    echo $$ > worker.pid; while :; do sleep 0.02; done";

/// Takes the lock away under a shell that dies of TERM at once, and a worker of it that does not.
fn a_worker_ends_in_time(world: &World, words: &[&str], take_away: impl FnOnce()) {
    world.write("worker", WORKER);
    let mut run =
        world.start([&["run", "--events", "events"], words, &["x", "-c", "sh ./worker; true"]].concat());
    world.pid("worker.pid");
    take_away();
    assert_eq!(run.code(), 79);
    assert_eq!(world.read("log"), "cleaned\n", "it was killed in its time: {words:?}");
    let is_stopping = |event: &serde_json::Value| event["event"] == "stopping";
    let stopped = world.events("events").into_iter().filter(is_stopping).count();
    assert_eq!(stopped, 1, "nobody is waited for who has ended: {words:?}");
}

/// The first process ends at once, and the others are killed while they clean up.
#[test]
fn a_part_has_its_time_to_end_after_its_parent() {
    a_worker_ends_in_time(&World::new(), &["--max-hold", "6s", "--grace", "3s"], || ());
    let world = World::new();
    a_worker_ends_in_time(&world, &[], || assert_eq!(world.code(["break", "--yes", "x"]), 0));
    let redis = Redis::start();
    a_worker_ends_in_time(&World::on(redis.url()), &["--ttl", "6s", "--grace", "1s"], || {
        redis.call(&["DEL", "clinch:x"]);
    });
}

/// The wrapper is killed when only parts are left that have yet to end, and they run on without the lock.
#[test]
fn a_part_that_has_its_time_to_end_ends_with_a_killed_wrapper() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    world.write("worker", &WORKER.replace("exit'", "'"));
    let words = ["run", "--max-hold", "8s", "--grace", "4s", "--events", "events", "x", "-c"];
    let run = world.start(words.into_iter().chain(["sh ./worker; true"]));
    let worker = world.pid("worker.pid");
    eventually("the first process has ended", || world.read("events").contains("exited"));
    assert!(runs(worker), "it has its time");
    run.signal(Signal::KILL);
    run.kill();
    eventually("the worker is dead", || !runs(worker));
}

/// An operator takes the lock away, and the job goes on.
#[test]
fn a_broken_lock_stops_its_job() {
    let world = World::new();
    let mut run = world.start(["run", "--events", "events", "x", "-c", STUBBORN]);
    let job = world.pid("job.pid");
    assert_eq!(world.code(["break", "x"]), 64, "nobody is there to be asked");
    let broken = world.output(["break", "--yes", "--json", "x"]);
    let results: serde_json::Value = serde_json::from_slice(&broken.stdout).unwrap();
    assert_eq!(results["results"][0]["result"], "evicted");
    assert_eq!(run.code(), 79);
    assert!(!runs(job));
    let lost = world.events("events").into_iter().find(|event| event["event"] == "lost").unwrap();
    assert_eq!(lost["kind"], "deleted");
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
    assert_eq!(world.code(["break", "--yes", "x"]), 1, "nobody holds it");
}

/// The next one works beside a job that is still dying.
#[test]
fn a_job_whose_lock_was_broken_is_dead_before_the_next_starts() {
    let world = World::new();
    let mut run = world.start(["run", "x", "-c", STUBBORN]);
    let job = world.pid("job.pid");
    let check = format!("! grep -q '^State:.[^Z]' /proc/{job}/status");
    let mut next = world.start(["run", "x", "-c", &check]);
    eventually("it waits", || world.claims("x", "waiting").len() == 1);
    assert_eq!(world.code(["break", "--yes", "x"]), 0);
    assert_eq!(next.code(), 0, "the job is dead when the next one starts");
    assert_eq!(run.code(), 79);
}

/// A job that may not be stopped is stopped, or its loss is not told.
#[test]
fn a_loss_can_be_ignored_but_is_told() {
    let world = World::new();
    let args = ["run", "--max-hold", "200ms", "--on-lost", "ignore", "--events", "events", "x", "-c"];
    let job = "while ! grep -q lost events; do sleep 0.02; done; exit 5";
    assert_eq!(world.code(args.into_iter().chain([job])), 5);
}

/// On a store whose leases end, the job is stopped although nothing was wrong.
#[test]
fn a_renewed_lease_keeps_its_job() {
    let world = World::new();
    let redis = Redis::start();
    let url = redis.url();
    let args = ["run", "-u", &url, "--ttl", "1200ms", "--grace", "300ms", "x", "sleep", "3"];
    assert_eq!(world.code(args), 0);
    assert_eq!(world.code(["run", "-u", &format!("{url}?ttl=300ms"), "--grace", "80ms", "x", "true"]), 64);
}

/// What the job starts in groups of its own cannot be found, and works on without the lock.
#[test]
fn no_job_is_started_where_nobody_could_end_its_parts() {
    let world = World::new();
    // As before Linux 5.3, which has no such call.
    let output =
        filtered(&world, PIDFD_OPEN, "0x06,0,0,0x50026", &[env!("CARGO_BIN_EXE_clinch"), "run", "x", "true"])
            .output()
            .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(70), "{said}");
    assert!(said.contains("cannot look after a job"), "{said}");
    assert!(world.list().is_empty(), "it has left something");
}

/// Before Linux 5.10 descriptors of processes have no flags: no job is started, nor a lock taken for a script.
#[test]
fn descriptors_of_processes_need_no_flags() {
    let world = World::new();
    let verbs = r#""$CLINCH" run x true && "$CLINCH" acquire --for $$ y > /dev/null"#;
    let output = filtered(
        &world,
        PIDFD_OPEN,
        "0x20,0,0,24, 0x15,0,1,0, 0x06,0,0,0x7fff0000, 0x06,0,0,0x50016",
        &["sh", "-c", verbs],
    )
    .output()
    .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// What runs as another user, by sudo, can be sent no signal; that it goes on without the lock is said to nobody.
#[test]
fn a_part_that_cannot_be_stopped_is_named() {
    let world = World::new();
    world.install("/usr/bin/setpriv", "as-root");
    set_permissions(world.path("as-root"), Permissions::from_mode(0o4755)).unwrap();
    world.install(env!("CARGO_BIN_EXE_clinch"), "clinch");
    chown(world.path("."), Some(65_534), Some(65_534)).unwrap();
    let job = "./as-root --reuid=0 sh -c 'echo $$ > part; exec sleep 60' & while [ ! -s part ]; do sleep 0.02; done; wait";
    let mut run = Command::new("setpriv");
    run.args(["--reuid=65534", "--regid=65534", "--clear-groups", "./clinch", "run"]);
    run.args(["--max-hold", "2s", "--grace", "0.3s", "x", "-c", job]).current_dir(world.path("."));
    let url = format!("file://{}", world.path("theirs").display());
    let output = run.env("CLINCH_URL", url).env_remove("CLINCH_HELD").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let part = world.pid("part");
    kill(part, Signal::KILL);
    assert_eq!(output.status.code(), Some(79), "needs root: {said}");
    assert_eq!(said.matches(&format!("process {part} of the job is another user's")).count(), 1, "{said}");
}

/// Who starts one process after another there has a line written for each.
#[test]
fn of_parts_that_cannot_be_stopped_the_topmost_is_named() {
    let world = World::new();
    world.install("/usr/bin/setpriv", "as-root");
    set_permissions(world.path("as-root"), Permissions::from_mode(0o4755)).unwrap();
    world.install(env!("CARGO_BIN_EXE_clinch"), "clinch");
    chown(world.path("."), Some(65_534), Some(65_534)).unwrap();
    let job = "while [ ! -e stop ]; do /bin/sleep 0.01; done";
    let mut run = Command::new("setpriv");
    run.args(["--reuid=65534", "--regid=65534", "--clear-groups", "./clinch", "run", "--max-hold", "1s"]);
    run.args(["--grace", "0.1s", "x", "./as-root", "--reuid=0", "sh", "-c", job]);
    run.current_dir(world.path(".")).stderr(Stdio::piped());
    let url = format!("file://{}", world.path("theirs").display());
    let mut run = Running(run.env("CLINCH_URL", url).env_remove("CLINCH_HELD").spawn().unwrap());
    let mut said = BufReader::new(run.0.stderr.take().unwrap()).lines();
    let mut named = said.by_ref().map(Result::unwrap).filter(|line| line.contains("another user's"));
    assert!(named.next().is_some());
    // It goes on for some hundred more.
    std::thread::sleep(Duration::from_secs(3));
    world.write("stop", "");
    run.wait();
    // One may have been orphaned right then.
    assert!(named.count() < 4, "each is named");
}

/// Some are told to end and have their time, of many the others are killed unasked.
#[test]
fn all_of_a_large_job_are_told_to_end() {
    let world = World::new();
    let job = large_job("signal.signal(signal.SIGTERM,signal.SIG_IGN)");
    let mut run =
        world.start(["run", "--max-hold", "24s", "--grace", "12s", "-q", "x", "python3", "-c", &job]);
    eventually("all run", || world.lines("begun") == MANY);
    eventually("all are told", || world.lines("told") == MANY || run.0.try_wait().unwrap().is_some());
    let told = world.lines("told");
    // Whoever was not is killed unasked.
    let _ = kill(run.pid(), Signal::KILL);
    kill(world.pid("job.pid"), Signal::KILL);
    end_large_job(&world);
    assert_eq!(told, MANY);
}
