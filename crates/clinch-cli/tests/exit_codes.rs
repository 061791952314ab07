//! What the exit code says.

mod common;

use common::{Running, World, eventually};
use rustix::process::Signal;

/// A caller that looks at the exit code takes one failure for another.
#[test]
fn every_outcome_has_its_code() {
    let world = World::new();
    world.write("not-executable", "");
    let cases: [(i32, &[&str]); 22] = [
        (0, &["run", "x", "true"]),
        (0, &["run", "x", "--", "true"]),
        (1, &["run", "x", "false"]),
        (75, &["run", "x", "--", "sh", "-c", "exit 75"]),
        (255, &["run", "x", "-c", "exit 255"]),
        (128 + 9, &["run", "x", "-c", "kill -9 $$"]),
        (128 + 15, &["run", "x", "-c", "kill $$"]),
        (126, &["run", "x", "./not-executable"]),
        (126, &["run", "x", "/"]),
        (127, &["run", "x", "no-such-command"]),
        (64, &["run"]),
        (64, &["run", "x"]),
        (64, &["run", "", "true"]),
        (64, &["run", "--no-wiat", "x", "true"]),
        (64, &["run", "-n", "-w", "1", "x", "true"]),
        (64, &["run", "--permits", "1", "x", "true"]),
        (64, &["run", "-u", "nonsense", "x", "true"]),
        (64, &["run", "-u", "fiel:///tmp", "x", "true"]),
        (64, &["run", "--max-hold", "1s", "--grace", "2s", "x", "true"]),
        (64, &["frobnicate"]),
        (0, &["--help"]),
        (0, &["--version"]),
    ];
    for (code, args) in cases {
        assert_eq!(world.code(args.iter().copied()), code, "{args:?}");
    }
    assert!(world.list().is_empty(), "nothing stays held");
}

/// Where descriptors are lacking, it ends in a panic, or with a job that nobody looks after.
#[test]
fn whatever_descriptors_are_lacking_is_told() {
    let world = World::new();
    let run = |limit: u32| {
        let script = format!("ulimit -n {limit}; exec \"$CLINCH\" run x true");
        let mut shell = std::process::Command::new("bash");
        shell.args(["-c", &script]).env_remove("CLINCH_HELD");
        shell.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).env("CLINCH_URL", world.url());
        let output = shell.output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = run(4);
    assert!(code == 70 && said.starts_with("clinch: cannot start: Too many open files"), "{said}");
    for limit in 5..30 {
        let (code, said) = run(limit);
        let is_told = said.contains("Too many open files") && said.lines().count() == 1;
        assert!(if code == 0 { said.is_empty() } else { is_told }, "{limit}: {code}: {said}");
    }
    assert_eq!(run(64), (0, String::new()));
    assert!(world.list().is_empty(), "nothing stays held");
}

/// An error shows verbs that no person calls, or demands what the environment has said.
#[test]
fn usage_is_what_a_person_may_type() {
    let world = World::new();
    let said = |args: &[&str]| {
        let output = world.output(args.iter().copied());
        assert_eq!(output.status.code(), Some(64), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let none = said(&[]);
    assert!(none.contains("schema, help]"), "{none}");
    let usage = said(&["renew", "x"]);
    assert!(usage.contains("Usage: clinch renew [OPTIONS] <NAME> <CLAIM>\n"), "{usage}");
}

/// What never began is told as a job that ended, or waits for what it cannot have left behind.
#[test]
fn a_command_that_is_not_found_is_no_job() {
    let world = World::new();
    let script = r#"sleep 60 > /dev/null 2>&1 & echo $! > sleep.pid
        exec "$CLINCH" run --orphans wait --events events x no-such-command"#;
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", script]).current_dir(world.path(".")).env_remove("CLINCH_HELD");
    shell.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).env("CLINCH_URL", world.url());
    assert_eq!(Running(shell.spawn().unwrap()).code(), 127);
    let events = world.events("events");
    let names: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["acquired", "released", "refused"]);
}

/// A misspelt option is found by the user, not by support.
#[test]
fn a_misspelt_option_names_the_nearest() {
    let output = World::new().output(["run", "--no-wiat", "x", "true"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("--no-wait"));
}

/// A URL that is nearly right sends its user to the manual.
#[test]
fn a_url_that_is_nearly_right_is_answered_with_the_right_one() {
    let world = World::new();
    for (url, meant) in [
        ("redsi://localhost", "redis://"),
        ("valkey://localhost", "redis://"),
        ("/tmp/locks", "file:///tmp/locks"),
        ("localhost:6379", "redis://localhost:6379"),
    ] {
        let output = world.output(["-u", url, "run", "x", "true"]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(64), "{message}");
        assert!(message.contains(&format!("did you mean {meant}?")), "{message}");
    }
}

/// Cron mails each time that a job still runs, or hears nothing of one that failed.
#[test]
fn a_skipped_run_says_nothing_and_succeeds() {
    let world = World::new();
    let skip = |args: &[&str]| world.output(["run", "--skip"].into_iter().chain(args.iter().copied()));
    let mut holder = world.start(["run", "x", "-c", "echo $$ > job.pid; exec sleep 60"]);
    eventually("the lock is held", || world.held("x"));
    assert_eq!(world.code(["run", "--once-per", "1h", "y", "true"]), 0);
    for args in [&["x", "false"][..], &["--once-per", "1h", "y", "false"]] {
        let output = skip(args);
        assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{output:?}");
    }
    assert_eq!(skip(&["z", "sh", "-c", "exit 3"]).status.code(), Some(3));
    let lost = skip(&["--max-hold", "200ms", "z", "sleep", "60"]);
    assert_eq!(lost.status.code(), Some(79));
    assert!(!lost.stderr.is_empty(), "cron mails what is said, not codes");
    let unreachable = skip(&["-u", "redis://127.0.0.1:1", "x", "true"]);
    assert_eq!(unreachable.status.code(), Some(69));
    assert!(!unreachable.stderr.is_empty());
    drop(world);
    assert_eq!(holder.code(), 128 + 9);
}

/// The job is done by nobody, and cron hears nothing of it.
#[test]
fn a_skipped_run_tells_when_the_job_around_it_lets_nobody_in() {
    let world = World::new();
    let script = "kill -STOP $PPID; \"$CLINCH\" run --skip -w 300ms x true; echo $? > code; kill -CONT $PPID";
    let output = world.output(["run", "x", "-c", script]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(world.read("code").trim(), "75", "{message}");
    assert!(message.contains("lets nobody in"), "{message}");
}

/// Nobody does the job for as long as who waits first is stopped, and cron says nothing.
#[test]
fn a_skipped_run_tells_when_nobody_has_the_lock() {
    let world = World::new();
    world.write("wait", "");
    let mut holder = world.start(["run", "x", "-c", "while [ -e wait ]; do sleep 0.02; done"]);
    eventually("it is held", || world.held("x"));
    let waiter = world.start(["run", "x", "true"]);
    eventually("one waits", || world.claims("x", "waiting").len() == 1);
    assert_eq!(world.code(["run", "--skip", "x", "true"]), 0, "another has it");
    waiter.signal(Signal::STOP);
    eventually("it is stopped", || common::state(waiter.pid()) == Some('T'));
    std::fs::remove_file(world.path("wait")).unwrap();
    assert_eq!(holder.code(), 0);
    let output = world.output(["run", "--skip", "x", "true"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(75), "{said}");
    assert!(said.contains(&format!("pid {}", waiter.pid())), "{said}");
}

/// Nobody knows whether another does the work.
#[test]
fn a_skipped_run_tells_when_nobody_can_say_whether_the_lock_is_taken() {
    let world = World::new();
    assert_eq!(world.code(["run", "x", "true"]), 0);
    // The byte of the header.
    let busy = common::keep_busy(&world, "x", 1 << 54, 1);
    for wait in ["0", "500ms"] {
        let output = world.output(["run", "--skip", "-w", wait, "x", "true"]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(69), "{message}");
        assert!(message.contains("busy"), "{message}");
    }
    busy.kill();
    assert_eq!(world.code(["run", "--skip", "x", "true"]), 0);
}

/// Who is refused cannot tell why, or waits although told not to.
#[test]
fn a_taken_lock_is_refused_with_the_holders_name() {
    let world = World::new();
    let mut holder = world.start(["run", "x", "-c", "echo $$ > job.pid; exec sleep 60"]);
    eventually("the lock is held", || world.held("x"));
    for args in [&["run", "-n"][..], &["run", "-w", "0"], &["run", "-w", "0.05"], &["run", "--wait", "50ms"]]
    {
        let output = world.output(args.iter().copied().chain(["x", "true"]));
        assert_eq!(output.status.code(), Some(75), "{args:?}");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.contains(&format!("pid {}", holder.pid())), "{message}");
    }
    assert_eq!(world.code(["run", "-n", "-E", "9", "x", "true"]), 9);
    assert_eq!(world.code(["run", "-n", "-E", "0", "x", "false"]), 0);
    let quiet = world.output(["run", "-q", "-n", "x", "true"]);
    assert_eq!((quiet.status.code(), quiet.stderr.len()), (Some(75), 0));
    drop(world);
    assert_eq!(holder.code(), 128 + 9);
}

/// A store that refuses access looks like one that is down, or like a lock that is taken.
#[test]
fn a_refused_store_has_its_own_code() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::new();
    std::fs::create_dir(world.path("store")).unwrap();
    std::fs::set_permissions(world.path("store"), std::fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(world.code(["run", "x", "true"]), 77);
}

/// A look without descriptors says that the store is out of reach.
#[test]
fn a_look_without_descriptors_fails_by_this_host() {
    let world = World::new();
    assert_eq!(world.code(["run", "x", "true"]), 0);
    let redis = clinch_testkit::Redis::start();
    for url in [world.url(), redis.url()] {
        for verb in ["ls", "show x"] {
            let mut codes = Vec::new();
            for limit in 4..16 {
                let script = format!("ulimit -n {limit}; exec \"$CLINCH\" {verb}");
                let mut shell = std::process::Command::new("bash");
                shell
                    .args(["-c", &script])
                    .env("CLINCH", env!("CARGO_BIN_EXE_clinch"))
                    .env("CLINCH_URL", &url);
                let output = shell.output().unwrap();
                let said = String::from_utf8_lossy(&output.stderr);
                if said.contains("Too many open files") {
                    codes.push((limit, output.status.code()));
                }
            }
            assert!(codes.len() > 3, "{verb}: {codes:?}");
            assert!(codes.iter().all(|(_, code)| *code == Some(70)), "{url} {verb}: {codes:?}");
        }
    }
}

/// The words are blamed on the command line, or on nothing that a user knows.
#[test]
fn what_is_amiss_in_the_url_is_named() {
    use std::os::unix::ffi::OsStrExt;
    let world = World::new();
    let odd = std::ffi::OsStr::from_bytes(b"file:///tmp/\xff");
    let output = world.clinch(["ls"]).env("CLINCH_URL", odd).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(64) && said.contains("CLINCH_URL"), "{said}");
    // What speaks, but is no etcd.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("etcd://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = std::io::Write::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n");
            let _ = std::io::Read::read(&mut stream, &mut [0; 100]);
        }
    });
    let output = world.output(["-u", &url, "ls"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.code() == Some(69) && !said.contains("hyper::") && !said.contains("source:"),
        "{said}"
    );
    for url in
        ["redis://h#x", "redis://h:1#x", "redis://h/0#x", "redis://me:pw@[::1", "redis://[::1", "etcd://h#x"]
    {
        let output = world.output(["-u", url, "ls"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(64), "{url}: {said}");
        assert!(!said.contains("[[") && !said.contains("pw"), "{url}: {said}");
        assert!(!url.contains('#') || said.contains('#'), "{url}: {said}");
    }
}
