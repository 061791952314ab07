//! Locks in a directory of many: who excludes whom, and what a member or an odd umask makes of the files.

use super::*;

/// Root's cron and an admin's shell run the same job at once.
#[test]
fn users_of_a_host_exclude_each_other() {
    for mode in [0o3770, 0o1770] {
        let host = Host::with(mode);
        for holds in [ALICE, ROOT, BOB] {
            let holder = host.hold(holds);
            for tries in [ROOT, ALICE, BOB] {
                assert_eq!(
                    host.code(tries, &["run", "-n", "x", "true"]),
                    75,
                    "user {tries} beside user {holds}"
                );
            }
            drop(holder);
            eventually("it is free", || host.claims("x", "held") == 0);
        }
        // Whoever made them, under whatever umask, with whatever group of its own.
        for entry in std::fs::read_dir(host.0.path("store")).unwrap() {
            let found = entry.unwrap().metadata().unwrap();
            assert_eq!((found.mode() & 0o7777, found.gid()), (0o660, LOCKERS), "{mode:o}");
        }
    }
}

/// Waiters of other users are overtaken, or sleep on.
#[test]
fn users_wait_in_the_order_in_which_they_came() {
    let host = Host::new();
    let holder = host.hold(ALICE);
    let users = [ROOT, BOB, ALICE, BOB, ROOT];
    let mut waiters = Vec::new();
    for (place, user) in users.into_iter().enumerate() {
        let job = format!("echo {place} >> log");
        waiters.push(host.start(user, &["run", "x", "-c", &job]));
        eventually("it waits", || host.claims("x", "waiting") == place + 1);
    }
    drop(holder);
    assert!(waiters.iter_mut().all(|waiter| waiter.code() == 0));
    assert_eq!(host.0.read("log"), "0\n1\n2\n3\n4\n");
}

/// What a dead user's wrapper held stays taken for others.
#[test]
fn a_killed_users_lock_is_free_for_others_when_its_job_has_ended() {
    let host = Host::new();
    let holder = host.start(ALICE, &["run", "x", "-c", "echo $$ >> log; exec sleep 60"]);
    eventually("the job runs", || host.0.read("log").ends_with('\n'));
    let job = host.0.read("log").trim().parse().unwrap();
    holder.kill();
    assert_eq!(host.code(ROOT, &["run", "-n", "x", "true"]), 75, "its job still runs");
    let mut waiter = host.start(ROOT, &["run", "x", "true"]);
    eventually("root waits", || host.claims("x", "waiting") == 1);
    assert!(kill(job, Signal::KILL));
    assert_eq!(waiter.code(), 0);
}

/// A member makes root write to, hang on, or believe what it has put there.
#[test]
fn what_a_member_plants_harms_nobody() {
    let host = Host::new();
    host.0.write("victim", "precious");
    // But for its second name it is as a lock file.
    chown(host.0.path("victim"), None, Some(LOCKERS)).unwrap();
    std::fs::set_permissions(host.0.path("victim"), Permissions::from_mode(0o660)).unwrap();
    symlink(host.0.path("victim"), host.file("link.lock")).unwrap();
    std::fs::hard_link(host.0.path("victim"), host.file("hard.lock")).unwrap();
    let plant = "mkfifo -m 660 fifo.lock; umask 077; : > own.lock; (umask 0; : > all.lock); umask 007; : > group.lock";
    let mut member = Command::new("setpriv");
    member.args([format!("--reuid={ALICE}"), format!("--regid={ALICE}"), format!("--groups={LOCKERS}")]);
    assert!(member.args(["sh", "-c", plant]).current_dir(host.0.path("store")).status().unwrap().success());
    chown(host.file("group.lock"), None, Some(ALICE)).unwrap();
    for user in [ROOT, BOB] {
        for (name, words) in [
            ("link", "is a symbolic link"),
            ("hard", "with one name"),
            ("fifo", "is no plain file"),
            ("own", "mode 600) is not as share=group makes it"),
            ("all", "mode 666) is not as share=group makes it"),
            ("group", "is not as share=group makes it"),
        ] {
            assert_refused(&host.run(user, &["run", "-n", name, "true"]), words);
        }
        assert_eq!(host.code(user, &["run", "-n", "x", "true"]), 0, "other locks are as ever");
        assert_eq!(host.run(user, &["ls"]).stdout, b"", "nobody holds any");
    }
    assert_refused(&host.run(BOB, &["show", "own"]), "is not as share=group makes it");
    assert_eq!(host.0.read("victim"), "precious");
    // Nor can it take away what others made: the sticky bit.
    let mut member = Command::new("setpriv");
    member.args([format!("--reuid={BOB}"), format!("--regid={BOB}"), format!("--groups={LOCKERS}")]);
    assert!(!member.args(["rm", "-f"]).arg(host.file("x.lock")).output().unwrap().status.success());
}

/// Bells that cannot be rung hang the waiters, or those who wait for them.
#[test]
fn planted_bells_keep_nobody_waiting() {
    let host = Host::new();
    for bell in 0..256 {
        let fifo = rustix::fs::FileType::Fifo;
        let bell = host.file(&format!(".bell-{bell:02x}"));
        rustix::fs::mknodat(rustix::fs::CWD, bell, fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    }
    let holder = host.hold(ALICE);
    let mut waiters = [BOB, ROOT].map(|user| host.start(user, &["run", "x", "true"]));
    eventually("both wait", || host.claims("x", "waiting") == 2);
    drop(holder);
    assert!(waiters.iter_mut().all(|waiter| waiter.code() == 0));
}

/// One run under an odd umask locks its user out of its own directory.
#[test]
fn a_users_files_are_its_own_whatever_the_umask() {
    let host = Host::new();
    let own = host.make("own", ALICE, 0o700);
    for umask in ["0777", "0"] {
        let script = format!("umask {umask}; exec \"$CLINCH\" run -n {umask} true");
        for _ in 0..2 {
            let mut command = Command::new("setpriv");
            command.args([format!("--reuid={ALICE}"), format!("--regid={ALICE}")]);
            command.args(["--clear-groups", "sh", "-c", &script]).env("CLINCH", host.0.path("clinch"));
            command.env("CLINCH_URL", format!("file://{}", own.display())).current_dir(host.0.path("."));
            let output = command.output().unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        let found = std::fs::metadata(own.join(format!("{umask}.lock"))).unwrap();
        assert_eq!(found.mode() & 0o7777, 0o600);
    }
}

/// Without that, one that comes late would put its file in place of the one that others hold.
#[test]
fn a_file_system_that_cannot_name_a_file_without_replacing_is_told() {
    let host = Host::new();
    let mut strace = Command::new("strace");
    strace.args([
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=renameat2",
        "-e",
        "inject=renameat2:error=EINVAL",
    ]);
    strace.args([env!("CARGO_BIN_EXE_clinch"), "run", "x", "true"]).env("CLINCH_URL", host.url());
    let output = strace.output().expect("this test needs strace");
    assert_refused(&output, "another file system");
    let files: Vec<_> = std::fs::read_dir(host.0.path("store")).unwrap().collect();
    assert!(files.is_empty(), "{files:?}");
}

/// In a user namespace the group may have no number. A setgid directory gives it to new files nevertheless.
#[test]
fn root_in_a_user_namespace_makes_lock_files_or_hears_why_not() {
    for (mode, code) in [(0o3770, 0), (0o1770, 77)] {
        let host = Host::with(mode);
        let mut unshare = Command::new("unshare");
        unshare.args(["-Ur", "./clinch", "run", "new", "true"]).env("CLINCH_URL", host.url());
        let output = unshare.env_remove("CLINCH_HELD").current_dir(host.0.path(".")).output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{mode:o}: {words}");
        assert!(words.contains("user namespace") == (code != 0) && !words.contains("file system"), "{words}");
        assert_eq!(host.code(BOB, &["run", "-n", "new", "true"]), 0, "what was made is the group's");
    }
}
