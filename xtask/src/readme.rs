//! The README is true: every command in it runs, as it stands there, in a fresh home.

use std::process::Command;

use crate::shell::{Result, root, run as sh};

/// The command that runs these tests; it is not run by itself.
const THIS: &str = "cargo xtask";

pub(crate) fn run() -> Result {
    let readme =
        std::fs::read_to_string(root().join("README.md")).map_err(|error| format!("README.md: {error}"))?;
    let lines = readme.lines().count();
    if lines > 200 {
        return Err(format!("README.md has {lines} lines; 200 are the most"));
    }
    let commands = commands(&readme);
    if commands.is_empty() {
        return Err("README.md has no commands".to_owned());
    }
    let home = root().join("target/readme-home");
    let _ = std::fs::remove_dir_all(&home);
    std::fs::create_dir_all(&home).map_err(|error| format!("{}: {error}", home.display()))?;
    for block in commands.iter().filter(|block| !block.contains(THIS)) {
        let mut shell = Command::new("bash");
        // The default directory of locks is root's own; the README's commands shall not meet real locks.
        let url = format!("file://{}/locks", home.display());
        let path =
            format!("{}/target/release:{}", root().display(), std::env::var("PATH").unwrap_or_default());
        shell.args(["-euo", "pipefail", "-c", block]).current_dir(root());
        shell.env("CLINCH_URL", url).env("PATH", path);
        sh(&mut shell)?;
    }
    Ok(())
}

/// The blocks between "```sh" and "```".
fn commands(readme: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut block: Option<Vec<&str>> = None;
    for line in readme.lines() {
        match (&mut block, line) {
            (None, "```sh") => block = Some(Vec::new()),
            (Some(lines), "```") => {
                blocks.push(lines.join("\n"));
                block = None;
            }
            (Some(lines), line) => lines.push(line),
            (None, _) => {}
        }
    }
    blocks
}
