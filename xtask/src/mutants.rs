//! Planted mutants: known ways to get a lock wrong, each of which a named test must catch.
//!
//! A mutant is a patch in `mutants/`. Its first lines say which test must fail on it and with which words:
//!
//! ```text
//! caught-by: --package clinch --test memory held_lock_excludes
//! with: overlapping holds
//! ```
//!
//! The source itself has no branch for mutants. A patch that no longer applies, does not compile, or is not caught fails
//! the run; so does a test that fails without the patch.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use crate::shell::{Result, line, root, run as sh, target};

/// How long one build or test may take.
const TEST_SECONDS: &str = "300";

/// How many mutants are planted at a time, each in a copy of its own.
const BENCHES: usize = 3;

struct Mutant {
    name: String,
    patch: PathBuf,
    /// What chooses the test in the workspace.
    caught_by: Vec<String>,
    with: String,
}

/// Plants all mutants, or only these. Where the whole suite has just passed, nobody needs to see their tests pass again.
pub(crate) fn run(only: &[String], suite_passed: bool) -> Result {
    let mutants = read()?;
    let chosen: Vec<&Mutant> =
        mutants.iter().filter(|mutant| only.is_empty() || only.contains(&mutant.name)).collect();
    if chosen.is_empty() {
        return Err("no mutant to plant".to_owned());
    }
    // Most of a mutant's time goes into building one crate, which keeps no second processor busy, and into waiting.
    let benches: Vec<Bench> = (0..BENCHES.min(chosen.len())).map(Bench::at).collect::<Result<_>>()?;
    if let (false, Some(bench)) = (suite_passed, benches.first()) {
        // All of these first: nothing is built again between them.
        for mutant in &chosen {
            passes_without(mutant, bench)?;
        }
    }
    let left = Mutex::new(chosen.iter());
    let next = || left.lock().map(|mut left| left.next()).unwrap_or_default();
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for bench in &benches {
            scope.spawn(|| {
                while let Some(mutant) = next() {
                    match catch(mutant, bench) {
                        Ok(words) => println!("mutant {}: caught: {words}", mutant.name),
                        Err(failure) => {
                            println!("{failure}");
                            failures
                                .lock()
                                .unwrap_or_else(PoisonError::into_inner)
                                .push(mutant.name.as_str());
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("mutants: {} planted, {} caught", chosen.len(), chosen.len() - failures.len());
    if failures.is_empty() { Ok(()) } else { Err(format!("not caught: {}", failures.join(", "))) }
}

/// A copy of the tree and what is built from it.
struct Bench {
    tree: PathBuf,
    target: PathBuf,
}

impl Bench {
    fn at(number: usize) -> Result<Bench> {
        let dir = root().join("target/mutants").join(number.to_string());
        let bench = Bench { tree: dir.join("tree"), target: dir.join("target") };
        copy(&bench.tree)?;
        bench.take_dependencies()?;
        Ok(bench)
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
}

/// A test that fails anyway would catch anything.
fn passes_without(mutant: &Mutant, bench: &Bench) -> Result {
    let sound = test(mutant, bench, false)?;
    if sound.status.success() && String::from_utf8_lossy(&sound.stdout).contains("1 passed") {
        return Ok(());
    }
    Err(format!(
        "mutant {}: its test must be one test that passes without it:\n{}",
        mutant.name,
        said(&sound)
    ))
}

/// All that a test printed.
fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn read() -> Result<Vec<Mutant>> {
    let dir = root().join("mutants");
    let entries = std::fs::read_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let mut mutants = Vec::new();
    for entry in entries {
        let patch = entry.map_err(|error| error.to_string())?.path();
        if patch.extension().is_some_and(|extension| extension == "patch") {
            mutants.push(parse(patch)?);
        }
    }
    mutants.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(mutants)
}

fn parse(patch: PathBuf) -> Result<Mutant> {
    let text = std::fs::read_to_string(&patch).map_err(|error| format!("{}: {error}", patch.display()))?;
    let field = |key: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(key));
        value.map(str::trim).ok_or_else(|| format!("{} has no line \"{key} ...\"", patch.display()))
    };
    let mut caught_by: Vec<String> = field("caught-by:")?.split_whitespace().map(str::to_owned).collect();
    // Chosen from the whole workspace, as the suite is: a package alone has other features, and so other dependencies.
    let package = caught_by.drain(..2.min(caught_by.len())).next();
    if package.as_deref() != Some("--package") {
        return Err(format!("{}: \"caught-by:\" begins with the test's package", patch.display()));
    }
    let with = field("with:")?.to_owned();
    let name = patch.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Mutant { name, caught_by, with, patch })
}

/// Copies what git tracks, so that patches touch nobody's work. Files that are as they were keep their times, so that
/// only what a mutant changes is built again.
fn copy(tree: &Path) -> Result {
    let files = Command::new("git")
        .current_dir(root())
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output();
    let files = files.map_err(|error| format!("git: {error}"))?.stdout;
    for file in String::from_utf8_lossy(&files).split('\0').filter(|file| !file.is_empty()) {
        let (from, to) = (root().join(file), tree.join(file));
        let failed = |error: std::io::Error| format!("{}: {error}", to.display());
        let Ok(new) = std::fs::read(&from) else { continue };
        if std::fs::read(&to).is_ok_and(|old| old == new) {
            continue;
        }
        std::fs::create_dir_all(to.parent().unwrap_or(tree)).map_err(failed)?;
        std::fs::write(&to, new).map_err(failed)?;
    }
    Ok(())
}

/// Plants one mutant, checks that its test fails, and takes it out again. Returns the test's own words. That the test
/// passes without the mutant has been seen before: to look again here would build everything twice more.
fn catch(mutant: &Mutant, bench: &Bench) -> Result<String> {
    apply(mutant, &bench.tree, false)?;
    let built = test(mutant, bench, true);
    let result =
        built.and_then(|built| if built.status.success() { test(mutant, bench, false) } else { Ok(built) });
    apply(mutant, &bench.tree, true)?;
    let result = result?;
    let output = said(&result);
    if result.status.success() {
        return Err(format!("mutant {} lives: {} passes with it", mutant.name, mutant.caught_by.join(" ")));
    }
    if !output.contains(&mutant.with) {
        return Err(format!(
            "mutant {} was caught, but not with \"{}\":\n{output}",
            mutant.name, mutant.with
        ));
    }
    // The words follow the line that says where the panic was.
    let words = output.lines().skip_while(|line| !line.contains("panicked at")).nth(1);
    Ok(words.unwrap_or_default().trim().to_owned())
}

fn apply(mutant: &Mutant, tree: &Path, reverse: bool) -> Result {
    // Outside a repository of its own, git apply works on plain files.
    let mut apply = Command::new("git");
    apply.current_dir(tree).env("GIT_CEILING_DIRECTORIES", tree.parent().unwrap_or(tree)).arg("apply");
    if reverse {
        apply.arg("--reverse");
    }
    sh(apply.arg(&mutant.patch))
}

fn test(mutant: &Mutant, bench: &Bench, build_only: bool) -> Result<Output> {
    // A mutant may well make its test spin.
    let mut cargo = Command::new("timeout");
    cargo
        .args(["--kill-after=5", TEST_SECONDS])
        .arg(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(&bench.tree).env("CARGO_TARGET_DIR", &bench.target);
    cargo.args(["test", "--quiet", "--workspace", "--all-features"]);
    if build_only {
        cargo.arg("--no-run");
    }
    cargo.args(&mutant.caught_by);
    eprintln!("+ {}", line(&cargo));
    cargo.output().map_err(|error| format!("cargo: {error}"))
}
