//! `run`: what a lock costs a shell script, whole processes from spawn to exit.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hdrhistogram::Histogram;

use crate::Result;
use crate::args::Settings;
use crate::harness::{Case, Sample, interleave};
use crate::machine::now;
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::worker::url;

/// The figure to reach: p50 of ours over p50 of `flock -n`.
const TARGET: f64 = 1.3;

/// Processes per case and round.
const PROCESSES: u64 = 200;

const P50: Metric = Metric::new("p50", "ms");
const P99: Metric = Metric::new("p99", "ms");
const MIN: Metric = Metric::new("min", "ms");

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let clinch = binary(settings)?;
    let dir = settings.fresh_dir()?;
    let processes = settings.amount(PROCESSES, 2);

    let mut bare = Command::new("true");
    let mut flock = Command::new("flock");
    flock.arg("-n").arg(dir.path().join("flock")).arg("true");
    let mut ours = Command::new(&clinch);
    ours.args(["run", "-n", "x", "--", "true"]).env("CLINCH_URL", url(&dir.path().join("locks")));
    for command in [&mut bare, &mut flock, &mut ours] {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        once(command)?;
    }

    let cases = vec![
        Case::new("flock -n f true", || measure(&mut flock, processes)),
        Case::new("clinch run -n x -- true", || measure(&mut ours, processes)),
        Case::new("true", || measure(&mut bare, processes)),
    ];
    let rows = interleave(settings.rounds, cases)?;
    let title = format!("wall time of whole processes, {processes} per round");
    let table = Table { title, floor: Some(("flock -n f true", "p50")), rows };
    let target = Target {
        what: "run: p50 × flock -n f true".to_owned(),
        limit: Limit::AtMost(TARGET),
        measured: table.ratio("clinch run -n x -- true"),
    };
    Ok(Report { tables: vec![table], targets: vec![target], ..Report::default() })
}

/// The command that is measured: the one asked for, or the one that was built into the same directory.
fn binary(settings: &Settings) -> Result<PathBuf> {
    let path = match &settings.clinch {
        Some(path) => std::path::absolute(path)?,
        None => std::env::current_exe()?.parent().unwrap_or(Path::new("")).join("clinch"),
    };
    if path.is_file() {
        return Ok(path);
    }
    let path = path.display();
    Err(format!(
        "there is no {path}; build it with `cargo build --release -p clinch-cli`, or say --clinch PATH"
    )
    .into())
}

fn measure(command: &mut Command, processes: u64) -> Result<Sample> {
    let mut times = Histogram::<u64>::new(3)?;
    for _ in 0..processes {
        times.record(once(command)?)?;
    }
    let millis = |nanos: u64| nanos as f64 / 1e6;
    Ok(vec![
        (P50, millis(times.value_at_quantile(0.5))),
        (P99, millis(times.value_at_quantile(0.99))),
        (MIN, millis(times.min())),
    ])
}

/// Starts a process (by posix_spawn, which the standard library takes where it can) and waits for its end.
fn once(command: &mut Command) -> Result<u64> {
    let start = now();
    let status = command.status().map_err(|error| format!("{:?}: {error}", command.get_program()))?;
    let time = now() - start;
    if status.success() { Ok(time) } else { Err(format!("{command:?} failed: {status}").into()) }
}
