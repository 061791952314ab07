//! Random work and random faults on real servers. What that takes is a program of its own, so that this one stays small.

use std::process::Command;

use crate::needs;
use crate::shell::{Result, cargo, run as sh, target};

pub(crate) fn run(words: &[String]) -> Result {
    needs::provide()?;
    // Together, so that all are made of the same libraries; what wraps jobs lies beside what starts it.
    sh(&mut cargo(&["build", "--workspace", "--bins"]))?;
    sh(Command::new(target().join("debug/clinch-torture")).args(words))
}

/// A minute on each store, side by side: as much work as two processors can do then.
pub(crate) fn run_a_minute() -> Result {
    run(&["--for", "1m", "--workers", "2", "--tasks", "8"].map(str::to_owned))
}
