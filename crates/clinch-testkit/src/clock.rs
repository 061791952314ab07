//! Servers whose wall clock can be stepped, by a library that is loaded before libc.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Nanoseconds to add, as a number of 8 bytes. The server maps it.
fn file(dir: &Path) -> PathBuf {
    dir.join("clock-step")
}

/// The words of a command line before those of the server.
pub(crate) fn preload(dir: &Path) -> Vec<OsString> {
    step(dir, 0);
    let (source, library) = (dir.join("clock.c"), dir.join("clock.so"));
    std::fs::write(&source, include_str!("clock.c")).expect("the directory can be written");
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).status();
    assert!(built.is_ok_and(|built| built.success()), "cc does not compile clock.c");
    let set = |name: &str, path: PathBuf| {
        let mut word = OsString::from(name);
        word.push(path);
        word
    };
    vec!["env".into(), set("LD_PRELOAD=", library), set("CLINCH_KIT_CLOCK=", file(dir))]
}

/// Sets by how many nanoseconds the clock of the server in this directory is off.
pub(crate) fn step(dir: &Path, nanos: i64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().write(true).create(true).truncate(false).open(file(dir));
    let file = file.expect("the directory can be written");
    // In place, and in one write: the server reads it through its mapping.
    file.write_all_at(&nanos.to_ne_bytes(), 0).expect("the step can be written");
}
