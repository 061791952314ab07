//! Several users of one host: a directory that their group shares, what may be planted in it, and the directories of each alone.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

mod common;
#[path = "shared_directory/files.rs"]
mod files;
#[path = "shared_directory/hidden.rs"]
mod hidden;
#[path = "shared_directory/looks.rs"]
mod looks;
#[path = "shared_directory/places.rs"]
mod places;

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
