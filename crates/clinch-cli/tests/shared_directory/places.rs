//! Which directories are used, which are refused, and which are made.

use super::*;

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

/// Makes a directory for everybody, in which somebody's link leads to one of root's: gives both.
fn plant_a_link(host: &Host) -> (PathBuf, PathBuf) {
    let (open, target) = (host.make("open", ROOT, 0o1777), host.make("target", ROOT, 0o755));
    symlink(&target, open.join("link")).unwrap();
    std::os::unix::fs::lchown(open.join("link"), Some(ALICE), None).unwrap();
    (open, target)
}

/// Root would make directories wherever somebody's link leads.
#[test]
fn root_makes_no_directory_where_a_planted_link_leads() {
    let host = Host::new();
    let (open, target) = plant_a_link(&host);
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
    let (open, target) = plant_a_link(&host);
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
