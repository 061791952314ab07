//! Random work and random faults on real servers. What that takes is a program of its own, so that this one stays small.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use crate::shell::{Result, cargo, run as sh, target};
use crate::{mutants, needs};

/// `torture [--plant MUTANT] ...`.
pub(crate) fn task(words: &[String]) -> Result {
    match words {
        [flag, mutant, words @ ..] if flag == "--plant" => find(mutant, words),
        words => run(words),
    }
}

fn run(words: &[String]) -> Result {
    needs::provide()?;
    // Together, so that all are made of the same libraries; what wraps jobs lies beside what starts it.
    sh(&mut cargo(&["build", "--workspace", "--bins"]))?;
    sh(Command::new(built()).args(words))
}

fn built() -> PathBuf {
    target().join("debug/clinch-torture")
}

/// Tortures a copy of the tree with a mutant planted, which is to find something.
fn find(mutant: &str, words: &[String]) -> Result {
    needs::provide()?;
    mutants::with_planted(mutant, |bench| {
        bench.build_bins()?;
        let start = Instant::now();
        let mut torture = Command::new(bench.target.join("debug/clinch-torture"));
        torture.current_dir(&bench.tree).env("CARGO_TARGET_DIR", &bench.target).args(words);
        match sh(&mut torture) {
            Ok(()) => Err(format!("mutant {mutant} lives: torture has not found it")),
            Err(_) => {
                println!("mutant {mutant}: found within {} s", start.elapsed().as_secs());
                Ok(())
            }
        }
    })
}
