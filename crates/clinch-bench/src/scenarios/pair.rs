//! `file-pair`: what a lock costs when nobody else wants it.

use std::os::fd::OwnedFd;
use std::path::Path;

use hdrhistogram::Histogram;
use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::Result;
use crate::args::Settings;
use crate::harness::{Case, Sample, interleave};
use crate::machine::{Pinned, cpu_time, now};
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::worker::{runtime, url};

/// The figure to reach: p50 of ours over p50 of the floor.
const TARGET: f64 = 3.0;

/// Pairs per case and round, and before it, so that caches and branch predictors are warm.
const PAIRS: u64 = 20_000;
const WARM_UP: u64 = 1_000;

const P50: Metric = Metric::new("p50", "µs");
const P99: Metric = Metric::new("p99", "µs");
const CPU: Metric = Metric::new("CPU", "µs per pair");

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let dir = settings.fresh_dir()?;
    // Also for the background thread, which is started by the first lock.
    let _pinned = if settings.pin { Some(Pinned::to_one_cpu()?) } else { None };
    let pairs = settings.amount(PAIRS, 50);

    let bare = Bare::new(dir.path())?;
    let runtime = runtime()?;
    let locks = runtime.block_on(clinch::connect(&url(&dir.path().join("locks"))))?;
    let mutex = locks.mutex("pair")?;

    let floor = Case::new("open + flock + close", || measure(pairs, |time| time.each(|| bare.pair())));
    let ours = Case::new("clinch", || {
        measure(pairs, |time| {
            // The runtime is entered once, as in a program that runs in it.
            runtime.block_on(async {
                for _ in 0..time.count {
                    let start = now();
                    mutex.lock().await?.release().await?;
                    time.record(start)?;
                }
                Ok(())
            })
        })
    });
    let rows = interleave(settings.rounds, vec![floor, ours])?;
    let title = if settings.pin { "lock and release, on one CPU" } else { "lock and release, not pinned" };
    let table = Table { title: title.to_owned(), floor: Some(("open + flock + close", "p50")), rows };
    let target = Target {
        what: "file-pair: p50 × open + flock + close".to_owned(),
        limit: Limit::AtMost(TARGET),
        measured: table.ratio("clinch"),
    };
    Ok(Report { tables: vec![table], targets: vec![target], ..Report::default() })
}

/// The floor: the file is there already, and is opened relative to an open directory, as ours does it.
struct Bare {
    dir: OwnedFd,
}

impl Bare {
    fn new(dir: &Path) -> Result<Bare> {
        std::fs::write(dir.join("bare"), "")?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Bare { dir: rustix::fs::open(dir, flags, Mode::empty())? })
    }

    fn pair(&self) -> Result<()> {
        let file = rustix::fs::openat(&self.dir, "bare", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
        // Closing unlocks.
        drop(file);
        Ok(())
    }
}

/// Takes the times of a number of pairs.
struct Stopwatch {
    count: u64,
    times: Histogram<u64>,
}

impl Stopwatch {
    fn new(count: u64) -> Result<Stopwatch> {
        Ok(Stopwatch { count, times: Histogram::new(3)? })
    }

    fn each(&mut self, mut pair: impl FnMut() -> Result<()>) -> Result<()> {
        for _ in 0..self.count {
            let start = now();
            pair()?;
            self.record(start)?;
        }
        Ok(())
    }

    fn record(&mut self, start: u64) -> Result<()> {
        Ok(self.times.record(now().saturating_sub(start))?)
    }
}

fn measure(pairs: u64, mut body: impl FnMut(&mut Stopwatch) -> Result<()>) -> Result<Sample> {
    body(&mut Stopwatch::new(WARM_UP.min(pairs))?)?;
    let mut time = Stopwatch::new(pairs)?;
    let used = cpu_time();
    body(&mut time)?;
    let used = cpu_time() - used;
    let micros = |nanos: u64| nanos as f64 / 1e3;
    Ok(vec![
        (P50, micros(time.times.value_at_quantile(0.5))),
        (P99, micros(time.times.value_at_quantile(0.99))),
        (CPU, micros(used) / pairs as f64),
    ])
}
