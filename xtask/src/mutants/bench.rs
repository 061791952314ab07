//! Where mutants are planted: copies of the tree, so that they touch nobody's work.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::mutant::Mutant;
use crate::shell::{Result, cargo, line, root, run as sh, target};

/// How long one test may take: a mutant may well make it spin.
const TEST_SECONDS: &str = "300";

/// How long one build may take, also on a busy host.
const BUILD_SECONDS: &str = "1800";

/// A copy of the tree and what is built from it.
pub(crate) struct Bench {
    pub(crate) tree: PathBuf,
    pub(crate) target: PathBuf,
}

impl Bench {
    pub(super) fn at(number: usize) -> Result<Bench> {
        let dir = root().join("target/mutants").join(number.to_string());
        let bench = Bench { tree: dir.join("tree"), target: dir.join("target") };
        bench.copy()?;
        bench.take_dependencies()?;
        Ok(bench)
    }

    /// Copies what git tracks. Files that are as they were keep their times, so that only what a mutant changes is built
    /// again.
    fn copy(&self) -> Result {
        let files = Command::new("git")
            .current_dir(root())
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .output();
        let files = files.map_err(|error| format!("git: {error}"))?.stdout;
        for file in String::from_utf8_lossy(&files).split('\0').filter(|file| !file.is_empty()) {
            let Ok(new) = std::fs::read(root().join(file)) else { continue };
            if std::fs::read(self.tree.join(file)).is_ok_and(|old| old == new) {
                continue;
            }
            self.write(file, &new)?;
        }
        Ok(())
    }

    /// Writes a file of the copy.
    pub(super) fn write(&self, file: &str, text: &[u8]) -> Result {
        let to = self.tree.join(file);
        let failed = |error: std::io::Error| format!("{}: {error}", to.display());
        std::fs::create_dir_all(to.parent().unwrap_or(&self.tree)).map_err(failed)?;
        std::fs::write(&to, text).map_err(failed)
    }

    /// Takes what the suite has built of others' crates, so that it is not built for each bench again.
    fn take_dependencies(&self) -> Result {
        let (built, here) = (target().join("debug"), self.target.join("debug"));
        let Ok(deps) = std::fs::read_dir(built.join("deps")) else { return Ok(()) };
        if here.exists() {
            return Ok(());
        }
        std::fs::create_dir_all(here.join("deps")).map_err(|error| format!("{}: {error}", here.display()))?;
        // Not the tests' executables, which are most of it.
        let libraries = deps.filter_map(|entry| entry.ok().map(|entry| entry.path())).filter(|path| {
            path.extension()
                .is_some_and(|extension| ["rlib", "rmeta", "so", "d"].iter().any(|of| *of == extension))
        });
        // With their times, by which cargo tells what is fresh.
        let archive = |to: &Path| {
            let mut copy = Command::new("cp");
            copy.args(["--archive", "--target-directory"]).arg(to);
            copy
        };
        sh(archive(&here).arg(built.join("build")).arg(built.join(".fingerprint")))?;
        let copied = archive(&here.join("deps")).args(libraries).status();
        match copied {
            Ok(status) if status.success() => Ok(()),
            other => Err(format!("cp to {}: {other:?}", here.display())),
        }
    }

    /// Builds all programs.
    pub(crate) fn build_bins(&self) -> Result {
        let mut cargo = cargo(&["build", "--workspace", "--bins"]);
        sh(cargo.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target))
    }

    /// Runs the test that catches the mutant, if it can be built. It is chosen from the whole workspace, as the suite is: a
    /// package alone has other features, and so other dependencies.
    pub(super) fn test(&self, mutant: &Mutant) -> Result<Output> {
        let built = self.cargo(mutant, &["--no-run"], BUILD_SECONDS)?;
        if built.status.success() { self.cargo(mutant, &[], TEST_SECONDS) } else { Ok(built) }
    }

    fn cargo(&self, mutant: &Mutant, args: &[&str], seconds: &str) -> Result<Output> {
        let mut cargo = Command::new("timeout");
        cargo
            .args(["--kill-after=5", seconds])
            .arg(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target);
        cargo.args(["test", "--quiet", "--workspace", "--all-features"]).args(&mutant.target).args(args);
        cargo.args(["--", "--exact", &mutant.test]);
        eprintln!("+ {}", line(&cargo));
        cargo.output().map_err(|error| format!("cargo: {error}"))
    }
}
