//! What the tests need besides a Rust toolchain: installed when root on Debian, else named exactly.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;

use crate::shell::{Result, run};

/// Commands that tests call, and the Debian packages that bring them.
const NEEDS: [(&str, &str); 19] = [
    ("cc", "gcc"),
    ("etcd", "etcd-server"),
    ("etcdctl", "etcd-client"),
    ("fish", "fish"),
    ("flock", "util-linux"),
    ("git", "git"),
    ("go", "golang-go"),
    ("mount", "mount"),
    ("node", "nodejs"),
    ("npm", "npm"),
    ("openssl", "openssl"),
    ("python3", "python3"),
    ("redis-cli", "redis-tools"),
    ("redis-sentinel", "redis-sentinel"),
    ("redis-server", "redis-server"),
    ("strace", "strace"),
    ("timeout", "coreutils"),
    ("unshare", "util-linux"),
    ("zsh", "zsh"),
];

/// What no command's name tells: a command that succeeds where the package is there.
const PROBES: [(&[&str], &str); 3] = [
    (&["python3", "-c", "import ensurepip, venv"], "python3-venv"),
    (&["test", "-e", "/usr/share/bash-completion/bash_completion"], "bash-completion"),
    (&["test", "-d", "/usr/share/gocode/src/go.etcd.io/etcd/clientv3"], "golang-etcd-server-dev"),
];

/// Where Debian's packages ask whether they may start a service.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Forbids packages to start services, unless this host has rules of its own; until dropped.
struct NoServices(bool);

impl NoServices {
    fn enforce() -> Result<NoServices> {
        let made = OpenOptions::new().write(true).create_new(true).mode(0o755).open(POLICY);
        match made.and_then(|mut file| file.write_all(b"#!/bin/sh\nexit 101\n")) {
            Ok(()) => Ok(NoServices(true)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(NoServices(false)),
            Err(error) => Err(format!("{POLICY}: {error}")),
        }
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.0 {
            let _ = std::fs::remove_file(POLICY);
        }
    }
}

pub(crate) fn provide() -> Result {
    let commands = NEEDS.iter().filter(|(command, _)| !on_path(command)).map(|(_, package)| *package);
    let probes = PROBES.iter().filter(|(probe, _)| !succeeds(probe)).map(|(_, package)| *package);
    let mut packages: Vec<&str> = commands.chain(probes).collect();
    packages.sort_unstable();
    packages.dedup();
    if packages.is_empty() {
        return Ok(());
    }
    let list = packages.join(" ");
    if !on_path("apt-get") || !is_root() {
        return Err(format!(
            "the tests need these packages of Debian's: {list}\n  apt-get install --yes {list}"
        ));
    }
    let apt = |args: &[&str]| {
        let mut apt = Command::new("apt-get");
        apt.args(args).env("DEBIAN_FRONTEND", "noninteractive");
        run(&mut apt)
    };
    apt(&["update", "--quiet"])?;
    let install = ["install", "--yes", "--quiet", "--no-install-recommends"];
    // The tests start servers of their own; the packages' services would only listen where nobody asked them to.
    let _no_services = NoServices::enforce()?;
    apt(&[&install[..], &packages].concat())
}

fn succeeds(probe: &[&str]) -> bool {
    let mut words = probe.iter();
    words.next().is_some_and(|command| {
        Command::new(command).args(words).output().is_ok_and(|output| output.status.success())
    })
}

fn on_path(command: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .any(|dir| dir.join(command).is_file())
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n")
}
