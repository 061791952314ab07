//! Random work and random faults on real servers. What that takes is a program of its own, so that this one stays small.

use std::process::Command;

use crate::needs;
use crate::shell::{Result, cargo, run as sh, target};

pub(crate) fn run(words: &[String]) -> Result {
    needs::provide()?;
    // Together, so that both are made of the same libraries; what wraps jobs lies beside what starts it.
    sh(&mut cargo(&["build", "--package", "clinch-torture", "--package", "clinch-cli"]))?;
    sh(Command::new(target().join("debug/clinch-torture")).args(words))
}
