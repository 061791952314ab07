//! Torture: random work and random faults on real servers and processes, judged by the checker.
//!
//! ```text
//! cargo xtask torture redis --for 10m
//! ```
//!
//! Worker processes lock, try, give up, share, extend, downgrade, detach and drop at random; beside them a nemesis kills and stops
//! them, an operator takes claims away, and servers and the ways to them are harmed as far as the store's promises allow. What
//! all saw is one history for each round, which [`clinch_verify`] judges; after each round everything is let go, and nothing
//! may be left in the store. Whatever fault never met some step is told as well, since a fault that meets nothing proves nothing.
//!
//! The same seed throws the same dice. It does not replay a run: real servers and processes are not to be replayed.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a torture that cannot go on has failed"
)]

mod args;
mod cells;
mod crew;
mod dice;
mod harm;
mod job;
mod judge;
mod life;
mod log;
mod operator;
mod round;
mod say;
mod stage;
mod total;
mod turn;
mod worker;
mod wrappers;

use std::process::ExitCode;

use total::Total;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Some(job) = words.strip_prefix(&["worker".to_owned()]).and_then(worker::Job::read) {
        worker::run(&job);
        return ExitCode::SUCCESS;
    }
    if let Some(task) = words.strip_prefix(&["job".to_owned()]).and_then(job::Task::read) {
        job::run(&task);
        return ExitCode::SUCCESS;
    }
    if words.iter().any(|word| matches!(word.as_str(), "-h" | "--help")) {
        println!("{}", args::USAGE);
        return ExitCode::SUCCESS;
    }
    let args = match args::parse(&words, say::now()) {
        Ok(args) => args,
        Err(error) => {
            eprintln!("clinch-torture: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("seed {}", args.seed);
    let total = std::thread::scope(|scope| {
        let runs: Vec<_> = args.stores.iter().map(|store| scope.spawn(|| round::run(store, &args))).collect();
        let ended = runs.into_iter().map(|run| run.join().unwrap_or_else(|_| Total::broken()));
        ended.fold(Total::default(), Total::and)
    });
    println!("{total}");
    if total.is_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
