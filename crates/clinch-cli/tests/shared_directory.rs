//! Several users of one host: a directory that their group shares, what may be planted in it, and the directories of each alone.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

mod common;

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use common::{Running, World, eventually, kill};
use rustix::process::Signal;

/// Users and a group that are in no database of this host.
const ALICE: u32 = 71_001;
const BOB: u32 = 71_002;
const ROOT: u32 = 0;
const LOCKERS: u32 = 71_100;

/// A host with a directory that a group shares, and a binary that all may execute.
struct Host(World);

impl Host {
    /// With a directory of root's and of this mode.
    fn with(mode: u32) -> Host {
        assert!(rustix::process::geteuid().is_root(), "these tests act as several users, which needs root");
        let host = Host(World::new());
        std::fs::set_permissions(host.0.path("."), Permissions::from_mode(0o755)).unwrap();
        host.0.install(env!("CARGO_BIN_EXE_clinch"), "clinch");
        host.make("store", ROOT, mode);
        host.0.write("log", "");
        std::fs::set_permissions(host.0.path("log"), Permissions::from_mode(0o666)).unwrap();
        host
    }

    fn new() -> Host {
        Host::with(0o3770)
    }

    fn make(&self, name: &str, owner: u32, mode: u32) -> PathBuf {
        let path = self.0.path(name);
        std::fs::create_dir(&path).unwrap();
        chown(&path, Some(owner), Some(LOCKERS)).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }

    fn url(&self) -> String {
        format!("{}?share=group", self.0.url())
    }

    /// `clinch` on a URL, as a user whose groups are `groups` besides its own. As cron starts it: with next to no environment, and here with
    /// the strictest umask.
    fn clinch_in(&self, groups: &[u32], user: u32, url: &str, args: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={user}"), format!("--regid={user}")]);
        let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
        match groups.is_empty() {
            true => command.arg("--clear-groups"),
            false => command.arg(format!("--groups={}", groups.join(","))),
        };
        let clean = "umask 077; exec env --default-signal \"$@\"";
        command.args(["sh", "-c", clean, "sh"]).arg(self.0.path("clinch")).args(args);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("CLINCH_URL", url);
        command.current_dir(self.0.path(".")).stdin(Stdio::null());
        command
    }

    /// As a member of the group; root is none.
    fn clinch(&self, user: u32, args: &[&str]) -> Command {
        let groups: &[u32] = if user == ROOT { &[] } else { &[LOCKERS] };
        self.clinch_in(groups, user, &self.url(), args)
    }

    fn start(&self, user: u32, args: &[&str]) -> Running {
        Running(self.clinch(user, args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    fn run(&self, user: u32, args: &[&str]) -> Output {
        self.clinch(user, args).output().unwrap()
    }

    fn code(&self, user: u32, args: &[&str]) -> i32 {
        self.run(user, args).status.code().expect("ended by a signal")
    }

    /// How many claims in this state root sees on a lock.
    fn claims(&self, name: &str, state: &str) -> usize {
        let output = self.run(ROOT, &["show", "--json", name]);
        let lock: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let claims = lock["claims"].as_array().cloned().unwrap_or_default();
        claims.iter().filter(|claim| claim["state"] == state).count()
    }

    /// Starts a job that holds `x` until it is dropped.
    fn hold(&self, user: u32) -> Running {
        let holder = self.start(user, &["run", "x", "sleep", "60"]);
        eventually(&format!("user {user} holds it"), || self.claims("x", "held") == 1);
        holder
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path(&format!("store/{name}"))
    }
}

/// What must be refused, and in what words.
fn assert_refused(output: &Output, words: &str) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(77), "{message}");
    assert!(message.contains(words), "\"{words}\" is not in: {message}");
}

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

/// Two processes take one directory for different things and do not exclude each other.
#[test]
fn who_names_a_directory_otherwise_is_told_the_url() {
    let host = Host::new();
    for user in [ROOT, ALICE] {
        let output =
            host.clinch_in(&[LOCKERS], user, &host.0.url(), &["run", "-n", "x", "true"]).output().unwrap();
        assert_refused(&output, &format!("{}?share=group", host.0.url()));
    }
    let stranger = host.clinch_in(&[], BOB, &host.url(), &["run", "-n", "x", "true"]).output().unwrap();
    assert_refused(&stranger, "group 71100");
    let own = host.make("own", ALICE, 0o700);
    let url = format!("file://{}", own.display());
    let shared = format!("{url}?share=group");
    assert_refused(&host.clinch_in(&[LOCKERS], ALICE, &shared, &["ls"]).output().unwrap(), &url);
    assert_refused(&host.clinch_in(&[LOCKERS], BOB, &url, &["ls"]).output().unwrap(), "?share=group");
    let missing = format!("file://{}/none?share=group", host.0.path("").display());
    assert_refused(
        &host.clinch_in(&[], ROOT, &missing, &["ls"]).output().unwrap(),
        "install -d -g GROUP -m 3770",
    );
    let misspelt = format!("{}?share=all", host.0.url());
    assert_eq!(host.clinch_in(&[], ROOT, &misspelt, &["ls"]).status().unwrap().code(), Some(64));
}

/// Somebody puts a directory of its own where the shared one was, or makes it first.
#[test]
fn a_directory_that_others_could_replace_is_refused() {
    let host = Host::with(0o3777);
    assert_refused(&host.run(ROOT, &["ls"]), "chmod o-w");
    for mode in [0o2770, 0o770] {
        std::fs::set_permissions(host.0.path("store"), Permissions::from_mode(mode)).unwrap();
        assert_refused(&host.run(ALICE, &["ls"]), "chmod +t");
    }
    for (parent, owner, works) in
        [(0o755, ALICE, true), (0o777, ROOT, false), (0o1777, ROOT, true), (0o1777, ALICE, false)]
    {
        let above = host.make(&format!("above-{parent:o}-{owner}"), ROOT, parent);
        let url = above.join("store");
        let inside = url.strip_prefix(host.0.path("")).unwrap().to_str().unwrap();
        host.make(inside, owner, 0o3770);
        let url = format!("file://{}?share=group", url.display());
        let output = host.clinch_in(&[LOCKERS], BOB, &url, &["run", "-n", "x", "true"]).output().unwrap();
        match works {
            true => assert!(output.status.success(), "{output:?}"),
            false => assert_refused(&output, "others can put something else in place of"),
        }
    }
    host.make("neither", ALICE, 0o1770);
    let url = format!("file://{}?share=group", host.0.path("neither").display());
    assert_refused(&host.clinch_in(&[LOCKERS], ALICE, &url, &["ls"]).output().unwrap(), "chmod g+s");
}

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

/// Runs a script as a user of this host's database, whose home is `home`, with these variables.
fn at_home(host: &Host, script: &str, variables: &[(&str, &str)]) -> Output {
    let home = host.0.path("home");
    host.0.write(
        "passwd",
        &format!("root:x:0:0::/root:/bin/sh\nalice:x:{ALICE}:{ALICE}::{}:/bin/sh\n", home.display()),
    );
    let passwd = host.0.path("passwd");
    std::fs::set_permissions(&passwd, Permissions::from_mode(0o644)).unwrap();
    let script = format!(
        "mount --bind {} /etc/passwd && exec setpriv --reuid={ALICE} --regid={ALICE} --clear-groups sh -c '{script}'",
        passwd.display()
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]).env_clear().env("PATH", std::env::var_os("PATH").unwrap());
    command.env("CLINCH", host.0.path("clinch")).envs(variables.iter().copied());
    command.current_dir(host.0.path(".")).output().unwrap()
}

/// A user's cron and its desktop session keep their locks in two places.
#[test]
fn the_default_directory_is_the_same_with_and_without_an_environment() {
    let host = Host::new();
    let home = host.make("home", ALICE, 0o700);
    let state = host.make("home/state", ALICE, 0o700);
    let session = [("XDG_STATE_HOME", state.to_str().unwrap()), ("HOME", "/somewhere/else")];
    for variables in [&[][..], &session] {
        let output = at_home(&host, "\"$CLINCH\" run -n x true", variables);
        assert!(output.status.success(), "{output:?}");
    }
    assert!(home.join(".local/state/clinch/x.lock").exists() && !state.join("clinch").exists());
}

/// After an upgrade, who still uses the old directory and who uses the new one do not exclude each other.
#[test]
fn locks_of_earlier_versions_elsewhere_are_told_of() {
    let host = Host::new();
    host.make("home", ALICE, 0o700);
    let state = host.make("home/state", ALICE, 0o700);
    let variables = [("XDG_STATE_HOME", state.to_str().unwrap())];
    let earlier = host.make("home/state/clinch", ALICE, 0o700);
    let run = || at_home(&host, "\"$CLINCH\" run -n x true", &variables);
    assert!(run().status.success(), "an empty one is nobody's");
    std::fs::write(earlier.join("x.lock"), "").unwrap();
    assert_refused(&run(), &format!("CLINCH_URL=file://{}", earlier.display()));
    std::fs::remove_file(earlier.join("x.lock")).unwrap();
    assert!(run().status.success());
}

/// A stranger re-points a link in the middle of a chain, and one URL leads to two directories.
#[test]
fn a_chain_of_links_through_a_strangers_directory_is_refused() {
    let host = Host::new();
    let (ours, theirs) = (host.make("ours", ROOT, 0o755), host.make("theirs", BOB, 0o755));
    symlink(host.0.path("store"), theirs.join("current")).unwrap();
    symlink(host.0.path(""), theirs.join("above")).unwrap();
    symlink("../theirs/current", ours.join("relative")).unwrap();
    symlink(theirs.join("current"), host.0.path("direct")).unwrap();
    symlink(theirs.join("above"), host.0.path("middle")).unwrap();
    // Of trusted users alone, however long.
    symlink("../store", ours.join("safe")).unwrap();
    symlink(ours.join("safe"), host.0.path("chain")).unwrap();
    symlink("ours/..", host.0.path("around")).unwrap();
    let run = |name: &str| {
        let url = format!("file://{}?share=group", host.0.path(name).display());
        host.clinch_in(&[LOCKERS], ALICE, &url, &["run", "-n", "x", "true"]).output().unwrap()
    };
    for name in ["direct", "ours/relative", "middle/store"] {
        assert_refused(&run(name), "others can put something else in place of");
    }
    for name in ["chain", "around/store", "around/chain", "ours/../chain/"] {
        assert!(run(name).status.success(), "{name}: {:?}", run(name));
    }
}

/// Somebody who is not in the group fills its directory, which no mode tells of.
#[test]
fn a_directory_with_an_access_control_list_is_refused() {
    const STRANGER: u32 = 71_666;
    let host = Host::new();
    // The tag, the permissions and whose they are: the owner, a stranger, the group, the mask, all others.
    let entries =
        [(1, 7, u32::MAX), (2, 7, STRANGER), (4, 7, u32::MAX), (16, 7, u32::MAX), (32, 0, u32::MAX)];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, allowed, whose) in entries {
        list.extend([u16::to_le_bytes(tag), u16::to_le_bytes(allowed)].concat());
        list.extend(whose.to_le_bytes());
    }
    for kind in ["system.posix_acl_access", "system.posix_acl_default"] {
        let host = if kind.ends_with("access") { &host } else { &Host::new() };
        rustix::fs::setxattr(host.0.path("store"), kind, &list, rustix::fs::XattrFlags::empty()).unwrap();
        assert_eq!(std::fs::metadata(host.0.path("store")).unwrap().mode() & 0o7777, 0o3770);
        for user in [ROOT, ALICE] {
            assert_refused(&host.run(user, &["run", "-n", "x", "true"]), "setfacl -b");
        }
    }
}

/// Another renames a user's directory, whose next run makes it anew.
#[test]
fn a_users_directory_that_others_could_replace_is_refused() {
    let host = Host::new();
    for (parent, owner, works) in [
        (0o777, ROOT, false),
        (0o775, ROOT, false),
        (0o1777, BOB, false),
        (0o755, BOB, false),
        (0o1777, ROOT, true),
        (0o755, ROOT, true),
        (0o700, ALICE, true),
    ] {
        let above = format!("above-{parent:o}-{owner}");
        host.make(&above, owner, parent);
        let own = host.make(&format!("{above}/own"), ALICE, 0o700);
        let run = |user, args: &[&str]| {
            host.clinch_in(&[], user, &format!("file://{}", own.display()), args).output().unwrap()
        };
        match run(ALICE, &["run", "-n", "x", "true"]) {
            output if works => assert!(output.status.success(), "{above}: {output:?}"),
            output => assert_refused(&output, "others can put something else in place of"),
        }
        assert!(run(ROOT, &["ls"]).status.success(), "root looks");
    }
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

/// The URL that a message names leads elsewhere.
#[test]
fn a_url_that_is_named_can_be_used() {
    let host = Host::new();
    let odd = host.make("50% of #1?", ROOT, 0o3770);
    let escaped = format!("file://{}/50%25%20of%20%231%3F", odd.parent().unwrap().display());
    let run =
        |url: &str| host.clinch_in(&[LOCKERS], ALICE, url, &["run", "-n", "x", "true"]).output().unwrap();
    let named = format!("{escaped}?share=group");
    assert_refused(&run(&escaped), &named);
    assert!(run(&named).status.success());
}

/// Users of services have homes that are not there, and no locks by default.
#[test]
fn a_user_whose_home_is_not_there_has_the_one_of_the_environment() {
    let world = World::new();
    std::fs::set_permissions(world.path("."), Permissions::from_mode(0o755)).unwrap();
    world.install(env!("CARGO_BIN_EXE_clinch"), "clinch");
    std::fs::create_dir(world.path("home")).unwrap();
    chown(world.path("home"), Some(65534), Some(65534)).unwrap();
    let mut nobody = Command::new("setpriv");
    nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    nobody.arg(world.path("clinch")).args(["run", "x", "true"]);
    nobody.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", world.path("home"));
    let output = nobody.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(world.path("home/.local/state/clinch").is_dir());
}

/// Root would make directories wherever somebody's link leads.
#[test]
fn root_makes_no_directory_where_a_planted_link_leads() {
    let host = Host::new();
    let (open, target) = (host.make("open", ROOT, 0o1777), host.make("target", ROOT, 0o755));
    symlink(&target, open.join("link")).unwrap();
    std::os::unix::fs::lchown(open.join("link"), Some(ALICE), None).unwrap();
    let at = |way: &str| {
        let url = format!("file://{}/{way}", open.display());
        host.clinch_in(&[], ROOT, &url, &["run", "x", "true"]).output().unwrap()
    };
    for way in ["link", "link/a", "link/a/b"] {
        assert_refused(&at(way), "");
        assert_eq!(std::fs::read_dir(&target).unwrap().count(), 0, "{way}");
    }
    assert!(at("new/a/b").status.success());
    assert_eq!(std::fs::metadata(open.join("new/a/b")).unwrap().mode() & 0o7777, 0o700);
    // A link of root's own is as good as what it leads to.
    symlink(&target, open.join("own")).unwrap();
    assert!(at("own/a/b").status.success());
}

/// Between a look and what is done after it, anybody may put a link there.
#[test]
fn root_makes_no_directory_behind_a_link_that_comes_meanwhile() {
    let host = Host::new();
    let (open, target) = (host.make("open", ROOT, 0o1777), host.make("target", ROOT, 0o755));
    symlink(&target, open.join("link")).unwrap();
    std::os::unix::fs::lchown(open.join("link"), Some(ALICE), None).unwrap();
    let mut strace = Command::new("strace");
    strace.args([
        "-f",
        "-qq",
        "-e",
        "trace=?mkdir,mkdirat",
        "-e",
        "inject=?mkdir,mkdirat:delay_enter=1000000:when=1",
    ]);
    strace.arg("-o").arg(host.0.path("strace")).args([env!("CARGO_BIN_EXE_clinch"), "run", "x", "true"]);
    strace.env("CLINCH_URL", format!("file://{}/new/a/b", open.display())).stderr(Stdio::piped());
    let mut clinch = Running(strace.spawn().expect("this test needs strace"));
    eventually("it makes a directory", || host.0.read("strace").contains("mkdir"));
    // Where this comes too late, there is nothing to see.
    let planted = std::fs::rename(open.join("link"), open.join("new")).is_ok();
    assert_eq!(clinch.code(), if planted { 77 } else { 0 });
    assert_eq!(std::fs::read_dir(&target).unwrap().count(), 0);
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

/// In a user namespace all who have no number there look alike, this user among them.
#[test]
fn strangers_of_a_user_namespace_are_not_taken_for_this_user() {
    let host = Host::new();
    let theirs = host.make("theirs", ALICE, 0o755);
    let script =
        format!("exec unshare --user {} -u file://{} ls", host.0.path("clinch").display(), theirs.display());
    let mut command = Command::new("setpriv");
    command.args([
        &format!("--reuid={BOB}"),
        &format!("--regid={BOB}"),
        "--clear-groups",
        "sh",
        "-c",
        &script,
    ]);
    let output = command.current_dir(host.0.path(".")).stdin(Stdio::null()).output().unwrap();
    assert_refused(&output, "no number in this user namespace");
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
