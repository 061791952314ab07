//! The options of `clinch run`.

mod common;

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use clinch_testkit::{Proxy, Redis};
use common::{CLOSE, World, eventually, locks};

const JOB: &str = "echo $$ > $CLINCH_CLAIM.pid; while [ ! -e stop ]; do sleep 0.02; done";

/// Readers exclude each other, or let a writer in.
#[test]
fn shared_locks_are_shared_and_exclusive_ones_are_not() {
    let world = World::new();
    let mut readers =
        [world.start(["run", "-s", "x", "-c", JOB]), world.start(["run", "-s", "x", "-c", JOB])];
    eventually("both read", || world.claims("x", "held").len() == 2);
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75);
    assert_eq!(world.code(["run", "-n", "-s", "-x", "x", "true"]), 75, "the last of -s and -x counts");
    assert_eq!(world.code(["run", "-n", "-x", "-s", "x", "true"]), 0);
    world.write("stop", "");
    for reader in &mut readers {
        assert_eq!(reader.code(), 0);
    }
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
}

/// More run than there are permits, or a disagreement about their number goes unnoticed.
#[test]
fn permits_are_counted() {
    let world = World::new();
    let permits = |n| ["run", "-n", "--permits", n, "--of", "3", "x"];
    let mut two = world.start(permits("2").into_iter().chain(["-c", JOB]));
    eventually("two are held", || world.held("x"));
    assert_eq!(world.code(permits("2").into_iter().chain(["true"])), 75);
    assert_eq!(world.code(permits("1").into_iter().chain(["true"])), 0);
    assert_eq!(world.code(permits("4").into_iter().chain(["true"])), 64);
    let output = world.output(["run", "-n", "--permits", "1", "--of", "5", "x", "true"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(64));
    assert!(message.contains('3') && message.contains('5'), "{message}");
    world.write("stop", "");
    assert_eq!(two.code(), 0);
}

/// A short cron job runs twice on hosts whose clocks differ.
#[test]
fn min_hold_keeps_the_lock_closed_after_a_short_job() {
    let world = World::new();
    assert_eq!(world.code(["run", "--min-hold", "1h", "x", "false"]), 1);
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75);
    assert!(world.list()[0]["closed_until"].is_string() && !world.held("x"));
    assert_eq!(world.code(["run", "--min-hold", "1ms", "y", "sleep", "0.01"]), 0);
    assert_eq!(world.code(["run", "-n", "y", "true"]), 0);
    assert_eq!(world.code(["run", "--min-hold", "1h", "z", "no-such-command"]), 127);
    assert_eq!(world.code(["run", "-n", "z", "true"]), 0, "a job that never began");
}

/// What cannot be done is refused after the job has waited, or has run.
#[test]
fn what_a_lock_kept_closed_cannot_do_is_refused_at_once() {
    let world = World::new();
    let long = "x".repeat(504);
    let _holder = world.start(["run", &long, "sleep", "60"]);
    eventually("it is held", || world.held(&long));
    for (args, why) in [
        (&["--once-per", "11y", "x"][..], "ten years at most"),
        (&["--min-hold", "11y", "x"], "ten years at most"),
        (&["--once-per", "1h", "-n", &long], "503 bytes"),
        (
            &["--once-per", "1h", "--retry-failed", "-s", "x"],
            "'--retry-failed' cannot be used with '--shared'",
        ),
        (&["--once-per", "1h", "--retry-failed", "--permits", "1", "--of", "2", "x"], "'--permits"),
    ] {
        let output = world.output(["run"].iter().chain(args).chain(&["touch", "ran"]).copied());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(64) && said.contains(why), "{args:?}: {said}");
    }
    assert!(!world.path("ran").exists());
    assert_eq!(world.code(["run", "--once-per", "10y", "--retry-failed", "-s", "-x", "x", "true"]), 0);
}

/// A FIFO that nobody reads keeps the job waiting before anything is locked, or for ever.
#[test]
fn events_wait_for_no_reader() {
    let world = World::new();
    let made = Command::new("mkfifo").arg(world.path("events")).status().unwrap();
    assert!(made.success());
    let mut unread = world.start(["run", "--events", "events", "x", "touch", "ran"]);
    assert_eq!(unread.code(), 64);
    let mut said = String::new();
    unread.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("cannot write events to events: nobody reads this FIFO"), "{said}");
    assert!(!world.path("ran").exists());
    // Both ends, so that this waits for nobody either.
    let mut reader = std::fs::File::options().read(true).write(true).open(world.path("events")).unwrap();
    assert_eq!(world.code(["run", "--events", "events", "x", "true"]), 0);
    let mut heard = [0; 4096];
    let len = reader.read(&mut heard).unwrap();
    assert!(String::from_utf8_lossy(&heard[..len]).contains(r#""event":"released""#));
}

/// A job runs again within its period: after a failure, or because nobody lived to note that it ran.
#[test]
fn once_per_counts_every_run_that_began() {
    let world = World::new();
    assert_eq!(
        world.code(["run", "--once-per", "1h", "x", "no-such-command"]),
        127,
        "this one did not begin"
    );
    let job = r#"until "$CLINCH" ls x/ | grep -q closed; do sleep 0.02; done; kill -9 $PPID; exit 3"#;
    assert_eq!(world.output(["run", "--once-per", "1h", "x", "-c", job]).status.signal(), Some(9));
    eventually("the job has ended", || !world.held("x"));
    let again = world.output(["run", "--once-per", "1h", "x", "true"]);
    assert_eq!(again.status.code(), Some(75));
    assert!(String::from_utf8_lossy(&again.stderr).contains("ran a short time ago, and is closed until"));
    assert_eq!(world.code(["run", "--once-per", "1h", "-E", "0", "x", "false"]), 0);
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0, "the lock itself is free");
}

/// A job that never ran is said to have run.
#[test]
fn a_turn_that_is_held_is_no_run() {
    let world = World::new();
    let mut other = world.start(["run", "x/once-per", "-c", JOB]);
    eventually("it is held", || world.held("x/once-per"));
    let run = world.output(["run", "-n", "--once-per", "1h", "x", "true"]);
    assert_eq!(run.status.code(), Some(75));
    assert!(!String::from_utf8_lossy(&run.stderr).contains("ran"));
    world.write("stop", "");
    assert_eq!(other.code(), 0);
}

/// What is to keep a job from running again is lost, and nobody hears of it.
#[test]
fn a_run_that_does_not_count_is_told() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    let url = format!("redis://{}?prefix=", proxy.addr());
    // There has to be time between the start of the job and the note that it ran; more on a busy host.
    let is_told = [100, 400, 1600].into_iter().any(|delay| {
        let name = format!("x{delay}");
        proxy.delay(Duration::from_millis(delay));
        let job = format!("echo >> {name}");
        let mut run = world.start(["-u", &url, "run", "--once-per", "1h", &name, "-c", &job]);
        eventually("it runs", || world.lines(&name) == 1);
        redis.call(&["DEL", &format!("{name}/once-per")]);
        assert_eq!(run.code(), 0);
        let mut said = String::new();
        run.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        said.contains("may run again before its time")
    });
    assert!(is_told);
}

/// A program that reads events misses one, or cannot tell what happened.
#[test]
fn events_tell_what_happened() {
    let world = World::new();
    let mut holder = world.start(["run", "x", "-c", JOB]);
    eventually("the lock is held", || world.held("x"));
    let mut run = world.start(["run", "--events", "events", "x", "-c", "exit 7"]);
    eventually("it waits", || world.lines("events") == 1);
    world.write("stop", "");
    assert_eq!((holder.code(), run.code()), (0, 7));
    let events = world.events("events");
    let names: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["waiting", "acquired", "exited", "released"]);
    assert_eq!(events[0]["holder"]["pid"], holder.pid());
    assert!(events[1]["token"].as_u64().is_some() && events[1]["claim"].as_str().is_some());
    assert_eq!(events[2]["code"], 7);
    assert!(
        events.iter().all(|event| event["name"] == "x" && event["time"].as_str().unwrap().ends_with('Z'))
    );
}

/// The job keeps the pipe of events open, and its reader waits for ever.
#[test]
fn events_go_to_a_descriptor_that_the_job_does_not_get() {
    let world = World::new();
    let script = r#""$CLINCH" run --events fd:7 x -c 'ls /proc/$$/fd' 7> events"#;
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).current_dir(world.path("."));
    command.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).env("CLINCH_URL", world.url());
    let output = command.output().unwrap();
    assert!(output.status.success());
    assert!(!String::from_utf8(output.stdout).unwrap().lines().any(|fd| fd == "7"));
    assert_eq!(world.lines("events"), 3);
}

/// They go into the inside of clinch, which then hangs, or nowhere: to what clinch opens itself, or has `/dev/null` in place of.
#[test]
fn events_go_to_no_descriptor_that_was_closed() {
    let world = World::new();
    for closed in (0..40).chain([77]) {
        let script =
            format!(r#"{CLOSE} exec {closed}>&-; exec "$CLINCH" run --events fd:{closed} x touch ran"#);
        let mut command = Command::new("bash");
        command.args(["-c", &script]).current_dir(world.path("."));
        command.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).env("CLINCH_URL", world.url());
        let refused = command.output().unwrap();
        assert_eq!(refused.status.code(), Some(64), "{closed}: {refused:?}");
        assert!(!world.path("ran").exists(), "{closed}");
    }
    assert_eq!(world.code(["run", "--events", "no/such/dir", "x", "true"]), 64);
}

/// Nobody knows what a lock is held for.
#[test]
fn a_label_says_what_a_lock_is_for() {
    let world = World::new();
    let label = |args: &[&str]| {
        let output = world.output(args.iter().copied());
        assert!(output.status.success(), "{output:?}");
        locks(&output.stdout)[0]["claims"][0]["label"].as_str().unwrap().to_owned()
    };
    let clinch = env!("CARGO_BIN_EXE_clinch");
    assert_eq!(label(&["run", "--label", "nightly report", "x", clinch, "ls", "--json"]), "nightly report");
    // Arguments may be secrets.
    assert_eq!(label(&["run", "x", clinch, "ls", "--json"]), "clinch");
    assert_eq!(label(&["run", "x", "-c", &format!("{clinch} ls --json # hunter2")]), "sh");
}

/// A line that flock ran by the shell of a crontab means something else here.
#[test]
fn a_line_is_run_by_the_shell_of_the_environment() {
    let world = World::new();
    let with = |shell: Option<&str>| {
        let mut command = world.clinch(["run", "x", "-c", "echo $0 $CLINCH_NAME"]);
        if let Some(shell) = shell {
            command.env("SHELL", shell);
        }
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    assert_eq!(with(Some("/bin/echo")), "-c echo $0 $CLINCH_NAME\n");
    assert_eq!(with(Some("/bin/bash")), "/bin/bash x\n");
    assert_eq!([with(Some("")), with(None)], ["/bin/sh x\n"; 2]);
}

/// A look that never comes again is no panic, and a lock that is to be kept closed for no time is a mistake.
#[test]
fn a_time_that_makes_no_sense_is_refused() {
    let world = World::new();
    for line in [
        &["ls", "--watch=18446744073709551615"][..],
        &["ls", "--watch=25h"],
        &["run", "--min-hold", "0", "x", "touch", "ran"],
        &["run", "--once-per", "0s", "x", "touch", "ran"],
    ] {
        let output = world.clinch(line.iter().copied()).stdin(std::process::Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(64), "{line:?}: {output:?}");
    }
    assert!(!world.path("ran").exists());
}

/// Who means five minutes waits for five months.
#[test]
fn a_big_m_is_neither_minutes_nor_months() {
    let world = World::new();
    for line in
        [&["run", "-w", "5M", "x", "true"][..], &["run", "--ttl", "5M", "x", "true"], &["ls", "--watch=5M"]]
    {
        let output = world.output(line.iter().copied());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code() == Some(64) && said.contains("5m") && said.contains("5months"),
            "{line:?}: {said}"
        );
    }
    let url = format!("{}?ttl=5M", world.url());
    assert_eq!(world.code(["-u", &url, "ls"]), 64);
    assert_eq!(world.code(["run", "-w", "5months", "x", "true"]), 0);
}

/// A script whose variable is not set locks the directory of its host, not the store that all hosts share.
#[test]
fn an_empty_url_after_u_is_refused() {
    let world = World::new();
    // One that is empty is none.
    for variable in [Some(world.url()), None, Some(String::new())] {
        let mut command = world.clinch(["-u", "", "run", "x", "touch", "ran"]);
        match &variable {
            Some(url) => command.env("CLINCH_URL", url),
            None => command.env_remove("CLINCH_URL"),
        };
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(64) && said.contains("-u is empty"), "{said}");
    }
    // Also where it stands behind the verb.
    let mut command = world.clinch(["ls", "--url="]);
    assert_eq!(command.env("CLINCH_URL", "").output().unwrap().status.code(), Some(64));
    assert!(!world.path("ran").exists());
}

/// Who reads events waits for ever for word of a job that never began.
#[test]
fn events_tell_of_what_is_refused_before_anything_is_locked() {
    let world = World::new();
    for line in [
        &["-u", "redis://127.0.0.1:1", "run", "-n", "--events", "events", "x", "true"][..],
        &["run", "--ttl", "5s", "--grace", "9s", "--max-hold", "2s", "--events", "events", "x", "true"],
    ] {
        assert_ne!(world.code(line.iter().copied()), 0);
        assert_eq!(world.events("events").last().unwrap()["event"], "refused", "{line:?}");
        std::fs::remove_file(world.path("events")).unwrap();
    }
}

/// An answer that nobody gets is told as one.
#[test]
fn a_closed_stdout_is_no_success() {
    let world = World::new();
    for line in [&["ls", "--json"][..], &["doctor"]] {
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$@\" >&-", "sh", env!("CARGO_BIN_EXE_clinch")]).args(line);
        let output = command.env("CLINCH_URL", world.url()).output().unwrap();
        assert_eq!(output.status.code(), Some(74), "{line:?}: {output:?}");
    }
}
