//! Benchmarks of Clinch, each beside a floor: raw system calls, or raw commands to a server, that no library on the same
//! store can beat.
//!
//! ```text
//! cargo build --release -p clinch-cli -p clinch-bench
//! target/release/clinch-bench                        # everything, some twenty minutes
//! target/release/clinch-bench file-pair --rounds 9   # one scenario
//! target/release/clinch-bench --json > figures.json  # with the value of every round
//! ```
//!
//! # How to read it
//!
//! A cell is the median over the rounds and, in brackets, the smallest and the largest. The last column is the median of
//! the ratios to the floor *within* each round: floor and ours run in turn, in an order that rotates, so what slows the
//! machine for a second slows both. Read the ratio; the absolute figures belong to the machine named at the top. Where
//! the range of a ratio is wide, something else was running: look at the load and repeat.
//!
//! # How to repeat it
//!
//! A quiet machine, a release build, a local file system (`--dir` chooses one; the default is the directory for temporary
//! files). `file-pair`, `redis-pair` and `etcd-pair` pin themselves (and the server) to one CPU, which makes their ratios
//! repeatable to some per cent; with `--no-pin`, or where processes have to meet on several CPUs, expect a third up or
//! down. To put a whole run on one CPU, use `taskset -c 1 clinch-bench ...`. Nothing here needs root. The scenarios on
//! Redis need a `redis-server` on the path; each starts one on a free port, without persistence, and stops it. Those on
//! etcd need `etcd` and `etcdctl`; each starts one member in `/tmp`, which syncs its log: whether `/tmp` is a disk or
//! memory changes the figures, and the report says which it is. Some also need Go and its library for etcd. Those of Redlock
//! start five servers. On one CPU five servers take turns, so `redlock-pair` is measured both ways: not pinned it compares
//! what is waited for, as on five hosts; pinned it compares the work of all.
//!
//! # What a hand-off is
//!
//! A program that releases a lock made of `flock(2)` and asks again at once often wins it against those that wait, so
//! acquisitions per second say little about how long *others* wait. `file-contention` therefore counts hand-offs to
//! another waiter. Its floor is what `flock` can do when the releaser does not compete: every waiter blocks in the system
//! call, and whoever has released rests for half a hold before it asks again, by when the kernel has given the lock to a
//! waiter that was blocked. Ours does not rest: it asks again at once and has to queue, and that work, on the CPU that
//! the next holder is woken on, is part of the figure. A further row has ours rest too. On Redis the floor is a list with
//! one element that BLPOP takes and LPUSH gives to whoever has waited longest: fair, and nobody rests. On etcd, ours is
//! compared with etcd's own locks, which are fair too.
//!
//! # Who else is measured
//!
//! rslock, the fastest library of those that lock on Redis from Rust, runs in the same rounds: as fast as others get, with
//! neither queue nor token. Where it has to wait it polls, so it takes no part in contests. On etcd it is Go's
//! `concurrency.Mutex`, compiled when first needed, and the Lock API of the server, which `etcd-client` and the libraries
//! of other languages call.

mod args;
mod contend;
mod contest;
mod etcd_server;
mod figures;
mod go_mutex;
mod harness;
mod history;
mod machine;
mod raw_etcd;
mod raw_redis;
mod raw_redlock;
mod redis_server;
mod report;
mod scenarios;
mod stopwatch;
mod worker;

use std::io::Write;
use std::process::ExitCode;

use args::{Args, Command, Settings};
use machine::Machine;
use report::{Report, Target};
use scenarios::{SCENARIOS, Scenario};

/// Nobody handles these errors; they are shown.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Exit code of `--gate` when a target was missed.
const MISSED: u8 = 2;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Some(("worker", rest)) = args.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return finish(worker::run(rest).map(|()| ExitCode::SUCCESS));
    }
    finish(args::parse(args).and_then(|command| match command {
        Command::Help => {
            print!("{}", args::help());
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench(args) => bench(&args),
    }))
}

fn finish(result: Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("clinch-bench: {error}");
        ExitCode::FAILURE
    })
}

fn bench(args: &Args) -> Result<ExitCode> {
    let chosen: Vec<&Scenario> = SCENARIOS.iter().filter(|scenario| args.wants(scenario.name)).collect();
    let machine = Machine::look(&args.settings.dir);
    if cfg!(debug_assertions) {
        eprintln!("clinch-bench: this is a debug build; its figures mean nothing");
    }
    let mut out = std::io::stdout();
    if !args.json {
        writeln!(out, "{}\n", machine.markdown())?;
    }
    let mut reports = Vec::new();
    for scenario in chosen {
        let report = measure(scenario, &args.settings);
        if !args.json {
            writeln!(out, "{}", report.markdown())?;
            out.flush()?;
        }
        reports.push(report);
    }
    if args.json {
        let scenarios: Vec<_> = reports.iter().map(Report::json).collect();
        writeln!(out, "{:#}", serde_json::json!({ "machine": machine.json(), "scenarios": scenarios }))?;
    } else {
        writeln!(out, "Load after {}", machine::load())?;
    }
    Ok(verdict(&reports, args.gate))
}

/// Runs one scenario. One that cannot run does not keep the others from it.
fn measure(scenario: &Scenario, settings: &Settings) -> Report {
    let mut report = match (scenario.run)(settings) {
        Ok(report) => report,
        Err(error) => Report { error: Some(error.to_string()), ..Report::default() },
    };
    report.scenario = scenario.name;
    report
}

/// A missed target is a result, not a failure, unless asked for.
fn verdict(reports: &[Report], gate: bool) -> ExitCode {
    if reports.iter().any(|report| report.error.is_some()) {
        return ExitCode::FAILURE;
    }
    let missed = reports.iter().flat_map(|report| &report.targets).any(|target: &Target| !target.met());
    if gate && missed { ExitCode::from(MISSED) } else { ExitCode::SUCCESS }
}
