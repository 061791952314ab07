//! The suite: every test executable, several at a time, since most of their time they wait for a server to start or a lease
//! to end.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::shell::{Result, cargo, line};

/// How many executables run at a time. Of each run as many tests as there are processors.
const AT_ONCE: usize = 3;

/// A test executable, as cargo has built it.
struct Executable {
    /// What it was built from, within its package.
    source: String,
    /// Where cargo would run it: its package.
    package: PathBuf,
    path: PathBuf,
    tests: usize,
}

/// Builds and runs all of them. One that fails stops no other.
pub(crate) fn run() -> Result {
    let mut executables = build()?;
    // The longest first, as far as their number of tests tells, so that none of them is alone at the end.
    executables.sort_by_key(|executable| std::cmp::Reverse(executable.tests));
    let left = Mutex::new(executables.iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(executable) = next() {
                    if let Err(error) = executable.run() {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push(error);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("suite: {} executables, {} failed", executables.len(), failed.len());
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

/// Builds all test executables, and lists their tests.
fn build() -> Result<Vec<Executable>> {
    let mut build = cargo(&["test", "--workspace", "--all-features", "--all-targets", "--no-run"]);
    build.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    eprintln!("+ {}", line(&build));
    let built = build.output().map_err(|error| format!("{}: {error}", line(&build)))?;
    if !built.status.success() {
        return Err(format!("{} failed: {}", line(&build), built.status));
    }
    let messages = String::from_utf8_lossy(&built.stdout);
    messages.lines().filter_map(Executable::parse).map(Executable::list).collect()
}

impl Executable {
    /// What one of cargo's messages says, if it is about a test executable.
    fn parse(message: &str) -> Option<Executable> {
        let message: Value = serde_json::from_str(message).ok()?;
        let path = |pointer: &str| message.pointer(pointer)?.as_str().map(PathBuf::from);
        message.pointer("/profile/test")?.as_bool().filter(|is_test| *is_test)?;
        let (package, source) = (path("/manifest_path")?.parent()?.to_path_buf(), path("/target/src_path")?);
        let source = source.strip_prefix(package.parent()?).unwrap_or(&source).display().to_string();
        Some(Executable { source, package, path: path("/executable")?, tests: 0 })
    }

    fn list(self) -> Result<Executable> {
        let listed = self.command().arg("--list").output();
        let listed = listed.map_err(|error| format!("{}: {error}", self.path.display()))?;
        let tests =
            String::from_utf8_lossy(&listed.stdout).lines().filter(|line| line.ends_with(": test")).count();
        Ok(Executable { tests, ..self })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.package).env("CARGO_MANIFEST_DIR", &self.package).stdin(Stdio::null());
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        command.env("RUST_TEST_THREADS", processors.to_string());
        command
    }

    /// Runs it, and shows what it said once it has ended, so that two do not talk at once.
    fn run(&self) -> Result {
        let output = self.command().output().map_err(|error| format!("{}: {error}", self.path.display()))?;
        let said = [output.stdout, output.stderr].concat();
        println!(
            "     Running {} ({})\n{}",
            self.source,
            self.path.display(),
            String::from_utf8_lossy(&said)
        );
        match output.status.success() {
            true => Ok(()),
            false => {
                Err(format!("{} failed: {}; again: {}", self.source, output.status, self.path.display()))
            }
        }
    }
}
