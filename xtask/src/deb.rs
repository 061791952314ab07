//! The Debian package, in `target/debian`. Its manual pages and completions are what the built command prints.

use std::path::Path;
use std::process::Command;

use crate::shell::{Result, cargo, root, run as sh, target};

/// How what is packaged is built.
const PROFILE: &str = "dist";

/// Scripts of shells, by what they are called in `crates/clinch-cli/Cargo.toml`.
const COMPLETIONS: [(&str, &str); 3] = [("bash", "clinch"), ("zsh", "_clinch"), ("fish", "clinch.fish")];

pub(crate) fn run() -> Result {
    if !cargo(&["deb", "--version"]).output().is_ok_and(|output| output.status.success()) {
        return Err("this needs cargo-deb: cargo install --locked cargo-deb".to_owned());
    }
    sh(&mut cargo(&["build", "--profile", PROFILE, "--package", "clinch-cli"]))?;
    // Where the package's list of files says. What is in the directory of builds counts as built, and pages of that are not compressed.
    let files = root().join("target/deb");
    let _ = std::fs::remove_dir_all(&files);
    let page = print(&["man"], &files.join("man/clinch.1"))?;
    for verb in verbs(&page) {
        print(&["man", verb], &files.join(format!("man/clinch-{verb}.1")))?;
    }
    for (shell, file) in COMPLETIONS {
        print(&["completions", shell], &files.join(shell).join(file))?;
    }
    // It would warn that nobody builds those.
    sh(&mut cargo(&["deb", "--quiet", "--package", "clinch-cli", "--profile", PROFILE, "--no-build"]))
}

/// The verbs that the page of all lists. `help` has none.
fn verbs(page: &str) -> impl Iterator<Item = &str> {
    let names = page.lines().filter_map(|line| line.strip_prefix("clinch\\-")?.strip_suffix("(1)"));
    names.filter(|verb| *verb != "help")
}

/// Writes what the built command prints to a file, and returns it.
fn print(args: &[&str], to: &Path) -> Result<String> {
    let failed = |what: &dyn std::fmt::Display| format!("{}: {what}", to.display());
    let clinch = target().join(PROFILE).join("clinch");
    let output = Command::new(&clinch).args(args).output().map_err(|error| failed(&error))?;
    let text = String::from_utf8(output.stdout).map_err(|error| failed(&error))?;
    if !output.status.success() || text.is_empty() {
        return Err(failed(&format!("{} {}: {}", clinch.display(), args.join(" "), output.status)));
    }
    std::fs::create_dir_all(to.parent().unwrap_or(to)).map_err(|error| failed(&error))?;
    std::fs::write(to, &text).map_err(|error| failed(&error))?;
    Ok(text)
}
