//! Verbs that look: `ls`, `show`, `completions`, `man`.

mod common;

use common::{World, eventually, locks};

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
    assert!(common::locks(&world.output(["ls", "--json", "b"]).stdout).is_empty());
    let none = world.output(["ls", "b"]);
    assert!(none.status.success() && none.stdout.is_empty());
    assert!(String::from_utf8(none.stderr).unwrap().contains("begins with \"b\""));
}

/// Who looks for one state, or one kind of lock, has to read through all others.
#[test]
fn ls_shows_what_was_asked_for() {
    let world = World::new();
    let _holders = ["db/a", "db/b", "web/a"].map(|name| {
        let holder = world.start(["run", name, "sleep", "60"]);
        eventually("the lock is held", || world.held(name));
        holder
    });
    let _waiter = world.start(["run", "db/a", "true"]);
    eventually("it waits", || !world.claims("db/a", "waiting").is_empty());
    assert_eq!(world.code(["run", "--min-hold", "1h", "db/closed", "true"]), 0);
    let names = |args: &[&str]| {
        let output = world.output(["ls", "--json"].into_iter().chain(args.iter().copied()));
        let locks = locks(&output.stdout);
        let claims = |lock: &serde_json::Value| lock["claims"].as_array().unwrap().len();
        let named = |lock: &serde_json::Value| format!("{} {}", lock["name"].as_str().unwrap(), claims(lock));
        locks.iter().map(named).collect::<Vec<_>>()
    };
    assert_eq!(names(&["--held"]), ["db/a 1", "db/b 1", "web/a 1"]);
    assert_eq!(names(&["--waiting"]), ["db/a 1"]);
    assert_eq!(names(&["--held", "--waiting", "db/"]), ["db/a 2", "db/b 1"]);
    assert_eq!(names(&["*/a"]), ["db/a 2", "web/a 1"]);
    assert_eq!(names(&["d?/[bc]*"]), ["db/b 1", "db/closed 0"]);
    assert_eq!(names(&["**/a"]), ["db/a 2", "web/a 1"]);
    assert_eq!(world.code(["run", "--min-hold", "1h", "gpu[0]", "true"]), 0);
    assert_eq!(
        (names(&["gpu[0]"]), names(&["gpu["])),
        (vec!["gpu[0] 0".to_owned()], vec!["gpu[0] 0".to_owned()])
    );
}

/// Who waits in etcd's own queue and hangs cannot be taken out of it.
#[test]
fn what_is_not_ours_can_be_named_where_the_store_has_a_name_for_it() {
    let etcd = clinch_testkit::Etcd::start();
    let world = World::on(etcd.url());
    etcd.ctl(&["put", "/clinch/x/1", "theirs"]);
    let claim = world.claims("x", "held")[0].clone();
    assert_eq!((&claim["foreign"], &claim["since"]), (&true.into(), &serde_json::Value::Null));
    let id = claim["claim"].as_str().unwrap();
    let shown = String::from_utf8(world.output(["show", "x"]).stdout).unwrap();
    assert!(shown.contains(id), "{shown}");
    assert_eq!(world.code(["break", "x", "--claim", id, "--yes"]), 0);
    assert_eq!(world.code(["show", "x"]), 1);
}

/// A program takes zeros and 1970 for what is known of a client that is not ours.
#[test]
fn what_is_not_known_of_others_is_null() {
    let redis = clinch_testkit::Redis::start();
    let world = World::on(redis.url());
    redis.call(&["SET", "clinch:x", "theirs", "PX", "600000"]);
    let claim = &world.claims("x", "held")[0];
    assert_eq!(claim["foreign"], true);
    for unknown in ["claim", "since", "host", "pid", "user", "label", "token"] {
        assert!(claim[unknown].is_null(), "{unknown}: {claim}");
    }
    // What an operator believes to be free is still held.
    for json in [&[][..], &["--json"]] {
        let broken = world.output(["break", "x", "--yes"].iter().chain(json).copied());
        let (text, why) =
            (String::from_utf8(broken.stdout).unwrap(), String::from_utf8(broken.stderr).unwrap());
        assert!(
            broken.status.code() == Some(75) && text.contains("failed") && !text.contains("gone"),
            "{text}"
        );
        assert!(
            why.contains("still held by another program") && why.contains("delete the lock's key"),
            "{why}"
        );
    }
    assert!(world.held("x"));
    let _ours = world.start(["run", "y", "sleep", "60"]);
    eventually("ours is held", || world.held("y"));
    assert_eq!(world.claims("y", "held")[0]["foreign"], false);
    let table = String::from_utf8(world.output(["ls"]).stdout).unwrap();
    assert!(!table.contains("1970-") && !table.contains("pid 0"), "{table}");
    let shown = String::from_utf8(world.output(["show", "x"]).stdout).unwrap();
    assert!(shown.contains("another program") && !shown.contains("0000"), "{shown}");
    let refused = String::from_utf8(world.output(["run", "-n", "x", "true"]).stderr).unwrap();
    assert_eq!(refused, "clinch: lock \"x\" is held by another program\n", "nobody waited");
}

/// A script cannot ask whether a lock is held.
#[test]
fn show_answers_by_its_exit_code() {
    let world = World::new();
    assert_eq!(world.code(["show", "x"]), 1);
    let shown: serde_json::Value =
        serde_json::from_slice(&world.output(["show", "--json", "x"]).stdout).unwrap();
    assert_eq!(
        (&shown["claims"], &shown["closed_until"]),
        (&serde_json::json!([]), &serde_json::Value::Null)
    );
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
    // An example that is wrapped or filled cannot be copied.
    for (verb, examples) in [("run", 6), ("acquire", 3)] {
        let page = String::from_utf8(world.output(["man", verb]).stdout).unwrap();
        let as_it_is = page.split("\n.nf\n").nth(1).and_then(|rest| rest.split("\n.fi").next()).unwrap();
        let lines: Vec<String> =
            as_it_is.lines().map(|line| line.replace("\\-", "-").replace("\\*(Aq", "'")).collect();
        assert!(lines.len() == examples && lines.iter().all(|line| line.len() <= 73), "{lines:#?}");
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

/// A URL that is misspelt is a directory from then on, and a monitor never hears that it asks the wrong one.
#[test]
fn who_takes_no_lock_makes_no_directory_and_says_that_there_is_none() {
    let world = World::new();
    let claim = "0123456789abcdef0123456789abcdef";
    for (args, code) in [
        (&["ls"][..], 0),
        (&["ls", "--json"], 0),
        (&["renew", "x", claim], 79),
        (&["release", "x", claim], 79),
        (&["release", "--json", "x", claim], 79),
        (&["show", "x"], 1),
        (&["show", "--json", "x"], 1),
        (&["break", "--yes", "x"], 1),
    ] {
        let output = world.output(args.iter().copied());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains("there is no directory") && said.contains("/store"), "{args:?}: {said}");
        assert!(!world.path("store").exists(), "{args:?}");
    }
    assert_eq!(world.code(["run", "x", "true"]), 0);
    let output = world.output(["show", "x"]);
    assert_eq!((output.status.code(), output.stderr.len()), (Some(1), 0), "it is there");
}

/// Help names what does not work, or a default that there is not.
#[test]
fn help_is_true() {
    let world = World::new();
    let help = |verb| {
        let words = String::from_utf8(world.output([verb, "--help"]).stdout).unwrap();
        words.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert!(help("ls").contains("--watch=5"), "with a blank, 5 is a name");
    assert!(!help("acquire").contains("[default: the program]"));
    assert!(
        !String::from_utf8(world.output(["man"]).stdout).unwrap().contains("help(1)"),
        "there is no such page"
    );
}
