//! Verbs that look: `ls`, `show`, `completions`, `man`.

mod common;

use common::{World, eventually};

/// An operator cannot see who holds a lock and who waits for it.
#[test]
fn ls_shows_holder_and_waiters_in_their_order() {
    let world = World::new();
    let holder = world.start(["run", "a/b", "-c", "echo $$ > job.pid; exec sleep 60"]);
    eventually("the lock is held", || world.held("a/b"));
    let waiters = [(); 2].map(|()| {
        let before = world.claims("a/b", "waiting").len();
        let waiter = world.start(["run", "a/b", "true"]);
        eventually("it waits", || world.claims("a/b", "waiting").len() > before);
        waiter
    });
    let locks = world.list();
    let claims = locks[0]["claims"].as_array().unwrap();
    let pids: Vec<i64> = claims.iter().map(|claim| claim["pid"].as_i64().unwrap()).collect();
    assert_eq!(pids, [holder.pid(), waiters[0].pid(), waiters[1].pid()].map(i64::from));
    assert_eq!((&claims[0]["state"], &claims[0]["mode"]), (&"held".into(), &"exclusive".into()));
    assert!(claims[0]["token"].is_u64() && claims[1]["token"].is_null());
    assert!(claims[0]["expires_in_ms"].is_null() && claims[0]["since"].as_str().unwrap().ends_with('Z'));
    let table = String::from_utf8(world.output(["ls", "a/"]).stdout).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("NAME") && lines.len() == 4, "{table}");
    assert!(lines[1].contains("held") && lines[1].contains(&format!("pid {}", holder.pid())), "{table}");
    assert_eq!(world.output(["ls", "--json", "b"]).stdout, b"[]\n");
    assert!(world.output(["ls", "b"]).stdout.is_empty());
}

/// A script cannot ask whether a lock is held.
#[test]
fn show_answers_by_its_exit_code() {
    let world = World::new();
    assert_eq!(world.code(["show", "x"]), 1);
    assert_eq!(world.output(["show", "--json", "x"]).stdout, b"null\n");
    let script = r#""$CLINCH" show x && "$CLINCH" show --json x | grep -q $CLINCH_CLAIM && "$CLINCH" show x | grep held"#;
    assert_eq!(world.code(["run", "x", "-c", script]), 0);
}

/// A lock's name or label moves the cursor of the operator's terminal.
#[test]
fn what_others_wrote_cannot_steer_a_terminal() {
    let world = World::new();
    let script = r#""$CLINCH" ls; "$CLINCH" show "$CLINCH_NAME""#;
    let output = world.output(["run", "a\u{1b}[2Jb", "-c", script]);
    assert!(output.status.success() && !output.stdout.contains(&0x1b));
}

/// Generated pages fail, or offer what is hidden.
#[test]
fn completions_and_manual_are_there() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish"] {
        let output = world.output(["completions", shell]);
        assert!(output.status.success() && output.stdout.len() > 1000);
    }
    for page in [&["man"][..], &["man", "run"]] {
        let output = world.output(page.iter().copied());
        assert!(String::from_utf8(output.stdout).unwrap().starts_with(".ie"), "{page:?}");
    }
    assert_eq!(world.code(["man", "hold"]), 64);
}

/// An operator who works in another zone reads wrong times.
#[test]
fn times_are_in_the_zone_of_tz() {
    let world = World::new();
    let _holder = world.start(["run", "x", "sleep", "60"]);
    eventually("the lock is held", || world.held("x"));
    if !std::path::Path::new("/usr/share/zoneinfo/Asia/Kolkata").exists() {
        return;
    }
    let since = |zone: &str| {
        let output = world.clinch(["show", "x"]).env("TZ", zone).output().unwrap();
        String::from_utf8(output.stdout).unwrap().lines().next().unwrap().to_owned()
    };
    assert_ne!(since("UTC"), since("Asia/Kolkata"));
}
