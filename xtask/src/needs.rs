//! What the tests need besides a Rust toolchain: installed when root on Debian, else named exactly.

use std::path::PathBuf;
use std::process::Command;

use crate::shell::{Result, run};

/// Commands that tests call, and the Debian packages that bring them.
const NEEDS: [(&str, &str); 8] = [
    ("cc", "gcc"),
    ("flock", "util-linux"),
    ("git", "git"),
    ("mount", "mount"),
    ("python3", "python3"),
    ("strace", "strace"),
    ("timeout", "coreutils"),
    ("unshare", "util-linux"),
];

pub(crate) fn provide() -> Result {
    let mut packages: Vec<&str> =
        NEEDS.iter().filter(|(command, _)| !on_path(command)).map(|(_, package)| *package).collect();
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
    apt(&[&install[..], &packages].concat())
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
