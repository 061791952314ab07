//! What users are told of locks that are others'.

use super::*;

/// Root cannot see who holds a user's lock, or leaves files there that the user cannot open.
#[test]
fn root_looks_at_a_users_locks_and_leaves_nothing() {
    let host = Host::new();
    let home = host.make("home", ALICE, 0o700);
    let own = format!("file://{}/locks", home.display());
    let root = |args: &[&str]| host.clinch_in(&[], ROOT, &own, args).output().unwrap();
    assert_refused(&root(&["run", "-n", "x", "true"]), "root makes none");
    assert!(root(&["ls"]).status.success(), "there is none");
    assert!(!home.join("locks").exists());
    let mut holder = host.clinch_in(&[], ALICE, &own, &["run", "x", "sleep", "60"]);
    let _holder = Running(holder.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    eventually("root sees it", || String::from_utf8_lossy(&root(&["ls"]).stdout).contains("held"));
    assert!(String::from_utf8_lossy(&root(&["show", "x"]).stdout).contains("held"));
    for args in [&["run", "-n", "x", "true"][..], &["run", "-n", "new", "true"], &["break", "x", "--yes"]] {
        assert_refused(&root(args), "root may look at its locks");
    }
    let files = std::fs::read_dir(home.join("locks")).unwrap();
    let files: Vec<_> = files.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(files, ["x.lock"]);
}

/// Starts a job of a user that holds a lock of this URL until it is dropped.
fn hold_at(host: &Host, user: u32, url: &str, name: &str) -> Running {
    let mut holder = host.clinch_in(&[], user, url, &["run", name, "sleep", "60"]);
    let holder = Running(holder.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let is_held = || host.clinch_in(&[], user, url, &["show", name]).output().unwrap().status.success();
    eventually(&format!("user {user} holds {name}"), is_held);
    holder
}

/// Whoever may not look is told that nobody holds a lock, and a monitor believes it.
#[test]
fn a_lock_that_may_not_be_looked_at_is_not_told_as_free() {
    for mode in [0o755, 0o1777] {
        let host = Host::with(mode);
        let url = host.0.url();
        let alice = |args: &[&str]| host.clinch_in(&[], ALICE, &url, args).output().unwrap();
        let _holder = hold_at(&host, ROOT, &url, "nightly");
        let _second = hold_at(&host, ROOT, &url, "other");
        for args in [&["show", "nightly"][..], &["show", "--json", "nightly"], &["break", "nightly", "--yes"]]
        {
            assert_refused(&alice(args), "nightly.lock");
        }
        for args in [&["ls"][..], &["ls", "--json"]] {
            let output = alice(args);
            assert_refused(&output, "2 lock files");
            assert!(!String::from_utf8_lossy(&output.stderr).contains("no lock is"), "{output:?}");
        }
        assert_refused(&alice(&["ls", "night"]), "nightly.lock");
        assert_eq!(alice(&["show", "free"]).status.code(), Some(1), "it has no file");
        assert_eq!(alice(&["ls", "free"]).status.code(), Some(0), "nor has any of such a name");
    }
}

/// What others put into a directory of many hides a user's own locks, from looks, from those that go on, or from completion.
#[test]
fn what_can_be_looked_at_is_shown_beside_what_cannot() {
    let host = Host::with(0o1777);
    let url = host.0.url();
    let as_user = |user, args: &[&str]| host.clinch_in(&[], user, &url, args).output().unwrap();
    let own = hold_at(&host, ALICE, &url, "own");
    let plant = |line: &str| {
        let mut stranger = Command::new("setpriv");
        stranger.args([
            &format!("--reuid={BOB}"),
            &format!("--regid={BOB}"),
            "--clear-groups",
            "sh",
            "-c",
            line,
        ]);
        assert!(stranger.current_dir(host.0.path("store")).status().unwrap().success());
    };
    // No lock file is one of these.
    plant("mkfifo fifo.lock; mkdir dir.lock; ln -s /etc/passwd link.lock");
    let shown = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(as_user(ALICE, &["ls"]).status.code(), Some(0), "what is no lock is not told of");
    plant("umask 077; : > own%2Fonce-per.lock; : > some.lock");
    for args in [&["ls"][..], &["ls", "--json"], &["show", "own"], &["show", "--json", "own"]] {
        let output = as_user(ALICE, args);
        assert_refused(&output, "own%2Fonce-per.lock");
        assert!(shown(&output).contains(&own.pid().to_string()), "{args:?}: {output:?}");
    }
    let completed = as_user(ALICE, &["complete", "--", "clinch", "show", ""]);
    assert!(shown(&completed).contains("own\t"), "{completed:?}");
    let mut watch = host.clinch_in(&[], ALICE, &url, &["ls", "--json", "--watch=0.1"]);
    let out = |name| std::fs::File::create(host.0.path(name)).unwrap();
    let _watch = Running(watch.stdout(out("watched")).stderr(out("said")).spawn().unwrap());
    eventually("its own is shown", || host.0.read("watched").contains(&own.pid().to_string()));
    eventually("it says what is not", || host.0.read("said").contains("own%2Fonce-per.lock"));
    drop(own);
    eventually("it goes on", || host.0.lines("watched") == 2);
    assert_eq!(host.0.lines("said"), 1, "{}", host.0.read("said"));
}

/// `doctor` finds nothing amiss where a user can take no lock, and says that it excludes others there.
#[test]
fn doctor_tells_whose_directory_and_whose_files_these_are() {
    for (mode, words) in [(0o755, "only jobs of user root exclude each other here"), (0o1777, "nightly.lock")]
    {
        let host = Host::with(mode);
        let url = host.0.url();
        assert!(host.clinch_in(&[], ROOT, &url, &["run", "nightly", "true"]).status().unwrap().success());
        let output = host.clinch_in(&[], ALICE, &url, &["doctor"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().find(|line| line.contains(words)).unwrap_or_default();
        assert!(line.contains("warn"), "{words}: {text}");
        assert!(!text.contains("exclude each other here; other users are refused"), "{text}");
    }
}
