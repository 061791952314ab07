//! What goes wrong around a lock: full and read-only file systems; and what must not go on while many wait.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

mod common;

use std::process::{Command, Output};

use common::{World, eventually};

/// Runs a script with mounts of its own, in which `$S` is a small file system of its own for locks.
fn with_small_store(world: &World, script: &str) -> Output {
    let store = world.path("store");
    std::fs::create_dir(&store).unwrap();
    let mount = "mount -t tmpfs -o size=64k,mode=700 none \"$S\" || exit 99";
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--mount", "bash", "-c", &format!("{mount}\n{script}")]);
    command.env("S", &store).env("CLINCH_URL", world.url()).env("CLINCH", env!("CARGO_BIN_EXE_clinch"));
    let output = command.current_dir(world.path("")).output().expect("these tests need unshare");
    assert_ne!(output.status.code(), Some(99), "these tests need to mount a tmpfs: {output:?}");
    output
}

#[test]
fn a_full_disk_gives_a_clear_error_and_never_two_holders() {
    let world = World::new();
    let script = r#"
        mkfifo go held
        # The lock file exists and is held when the disk fills up.
        "$CLINCH" run a -c 'echo > held; read -r _ < go' & holder=$!
        read -r _ < held
        dd if=/dev/zero of="$S/fill" bs=1k 2> /dev/null
        "$CLINCH" run -n a -- true; echo "busy $?"
        "$CLINCH" run -n new -- echo "RAN WITHOUT A LOCK"; echo "new $?"
        "$CLINCH" run -w 10 a -- echo "RAN BESIDE THE HOLDER"; echo "waiter $?"
        echo > go; wait "$holder"; echo "holder $?"
        rm "$S/fill"
        "$CLINCH" run -n new -- true; echo "room again $?"
    "#;
    let output = with_small_store(&world, script);
    let (answers, words) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let answers: Vec<&str> = answers.lines().collect();
    assert_eq!(answers, ["busy 75", "new 69", "waiter 69", "holder 0", "room again 0"], "{words}");
    assert!(words.contains("free some disk space"), "{words}");
    assert!(["new", "a"].iter().all(|name| words.contains(&format!("/store/{name}.lock: "))), "{words}");
}

/// Each waiter leaves its record in the lock's file: more than there is room for may pass all the same.
#[test]
fn a_small_disk_is_not_filled_by_those_who_have_passed() {
    let world = World::new();
    let script = r#"
        mkfifo go held
        "$CLINCH" run --permits 1 --of 2 a -c 'echo > held; read -r _ < go' & holder=$!
        read -r _ < held
        # Never alone, so each has a place of its own.
        for _ in {1..80}; do "$CLINCH" run --permits 1 --of 2 a -- true || echo "refused $?"; done
        echo > go; wait "$holder"; echo "holder $?"
    "#;
    let output = with_small_store(&world, script);
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "holder 0\n", "{words}");
}

/// By default such a write kills.
#[test]
fn a_limit_on_the_size_of_files_is_told_and_is_the_jobs() {
    let world = World::new();
    world.write("small", "");
    let script = r#"
        (ulimit -f 0; exec "$CLINCH" run -n new -- echo "RAN WITHOUT A LOCK"); echo "new $?"
        "$CLINCH" run -n new -- sh -c 'ulimit -f 0; echo > small'; echo "job $?"
        "$CLINCH" run -F -n new -- sh -c 'ulimit -f 0; echo > small'; echo "in place $?"
    "#;
    let output = with_small_store(&world, script);
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "new 69\njob 153\nin place 153\n", "{words}");
    assert!(words.contains("ulimit -f"), "{words}");
}

#[test]
fn a_read_only_store_is_refused_with_its_reason() {
    let world = World::new();
    let script = r#"
        "$CLINCH" run -n a -- true; echo "before $?"
        mount -o remount,ro "$S" || exit 99
        "$CLINCH" run -n a -- echo "RAN WITHOUT A LOCK"; echo "old $?"
        "$CLINCH" run -n b -- echo "RAN WITHOUT A LOCK"; echo "new $?"
        "$CLINCH" ls; echo "ls $?"
    "#;
    let output = with_small_store(&world, script);
    let (answers, words) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(answers.lines().collect::<Vec<_>>(), ["before 0", "old 77", "new 77", "ls 0"], "{words}");
    assert!(words.contains("Read-only file system"), "{words}");
}

/// Newcomers go by the path, which leads elsewhere although neither the file nor its directory has changed.
#[test]
fn a_holder_whose_lock_file_is_mounted_over_is_told() {
    // Also where that is seen only by the path: the holder has the directory open below the mount of its own that it gets.
    for before in ["", r#"mount --bind "$S" "$S" || exit 99"#] {
        let world = World::new();
        // What was touched within seconds is looked at more closely.
        let script = format!(
            r#"
            mkfifo held
            "$CLINCH" run x -c 'echo > held; exec sleep 40' & holder=$!
            read -r _ < held
            sleep 9
            {before}
            : > other; mount --bind other "$S/x.lock" || exit 99
            wait "$holder"; echo "holder $?"
        "#
        );
        let output = with_small_store(&world, &script);
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "holder 79\n", "{words}");
    }
}

/// Who waits in a directory that was moved waits for ever, beside a lock that is free.
#[test]
fn who_waits_in_a_directory_that_was_moved_ends() {
    let world = World::new();
    let _holder = world.start(["run", "x", "sleep", "60"]);
    eventually("the lock is held", || world.held("x"));
    let mut waiters =
        [world.start(["run", "x", "true"]), world.start(["acquire", "--for", &common::us(), "x"])];
    eventually("they wait", || world.claims("x", "waiting").len() == 2);
    std::fs::rename(world.path("store"), world.path("moved")).unwrap();
    assert_eq!(waiters.each_mut().map(common::Running::code), [69, 69]);
    assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
}

#[test]
fn waiters_without_a_kernel_watch_still_get_their_turn() {
    let world = World::new();
    // The limit is one of the user namespace, so it is nobody else's.
    let script = r#"
        echo 0 > /proc/sys/user/max_inotify_instances || exit 99
        mkfifo go held
        "$CLINCH" run a -c 'echo > held; read -r _ < go' & holder=$!
        read -r _ < held
        "$CLINCH" run -w 30 a -- echo granted & first=$!
        "$CLINCH" run -w 30 a -- echo granted & second=$!
        until test "$("$CLINCH" ls | grep -c waiting)" = 2; do :; done
        echo > go; wait "$holder" "$first" && wait "$second"; echo "all $?"
    "#;
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "bash", "-c", script]).current_dir(world.path(""));
    command.env("CLINCH_URL", world.url()).env("CLINCH", env!("CARGO_BIN_EXE_clinch"));
    let output = command.output().expect("this test needs unshare");
    let answers = String::from_utf8_lossy(&output.stdout);
    assert_eq!(answers, "granted\ngranted\nall 0\n", "{}", String::from_utf8_lossy(&output.stderr));
}

/// How often a process gave up the processor by itself: every wake-up ends with one.
fn sleeps(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

#[test]
fn a_release_wakes_the_next_waiter_and_no_other() {
    const QUICK: usize = 20;
    let world = World::new();
    let start = |command| {
        let running = world.start(["run", "a", "-c", command]);
        let before = world.claims("a", "waiting").len() + world.claims("a", "held").len();
        eventually("it is in the queue", || {
            world.claims("a", "waiting").len() + world.claims("a", "held").len() > before.saturating_sub(1)
                && world.list()[0]["claims"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|claim| claim["pid"] == running.pid())
        });
        running
    };
    world.write("first", "");
    let mut holder = start("while test -e first; do sleep 0.01; done");
    let mut quick: Vec<_> = (0..QUICK).map(|_| start("true")).collect();
    let mut slow = start("echo > slow; while test -e first || test ! -e over; do sleep 0.01; done");
    let mut last = start("true");
    let (pid, began) = (last.pid(), std::time::Instant::now());
    let before = sleeps(pid);
    std::fs::remove_file(world.path("first")).unwrap();
    eventually("the slow one holds it", || world.path("slow").exists());
    let (woken, seconds) = (sleeps(pid) - before, began.elapsed().as_secs());
    world.write("over", "");
    assert_eq!(holder.code(), 0);
    assert!(quick.iter_mut().all(|quick| quick.code() == 0));
    assert_eq!((slow.code(), last.code()), (0, 0));
    // It looks once a second without being woken.
    assert!(woken <= 3 + 2 * seconds, "{QUICK} hand-offs to others woke the last waiter {woken} times");
}

#[test]
fn a_waiter_needs_no_second_thread() {
    let world = World::new();
    let _holder = world.start(["run", "a", "--", "sleep", "60"]);
    eventually("it is held", || world.held("a"));
    let waiter = world.start(["run", "a", "--", "true"]);
    eventually("it waits", || world.claims("a", "waiting").len() == 1);
    let threads = std::fs::read_dir(format!("/proc/{}/task", waiter.pid())).unwrap().count();
    assert_eq!(threads, 1);
}
