//! `file-pair`: what a lock costs when nobody else wants it.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::Result;
use crate::args::Settings;
use crate::harness::{Case, interleave};
use crate::machine::Pinned;
use crate::report::{Limit, Report, Table, Target};
use crate::stopwatch::measure;
use crate::worker::{runtime, url};

/// The figure to reach: p50 of ours over p50 of the floor.
const TARGET: f64 = 3.0;

/// Pairs per case and round.
const PAIRS: u64 = 20_000;

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
            runtime.block_on(time.each_async(async || {
                mutex.lock().await?.release().await?;
                Ok(())
            }))
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
