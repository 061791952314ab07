//! `kill`: how long a lock stays taken after its holder was killed with SIGKILL, while somebody waits for it.

use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::Result;
use crate::args::Settings;
use crate::contend::Kind;
use crate::harness::{Case, Sample, interleave};
use crate::machine::nanos;
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::worker::{Worker, url, wait};

/// The figure to reach, for the slowest of all kills.
const TARGET_MS: f64 = 10.0;

/// Kills of each case.
const KILLS: usize = 20;

/// From when the waiter has asked until the kill: long enough to surely wait. It is checked that it did.
const SETTLE: Duration = Duration::from_millis(50);

const TIME: Metric = Metric::new("kill to grant", "ms");

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let dir = settings.fresh_dir()?;
    let case = |kind: Kind| {
        let path = dir.path();
        Case::new(kind.name(), move || measure(kind, path))
    };
    let rows = interleave(settings.amount(KILLS, 2), vec![case(Kind::Flock), case(Kind::Clinch)])?;
    let table = Table {
        title: "from the kill of the holder to the grant of the waiter".to_owned(),
        floor: Some(("flock", TIME.name)),
        rows,
    };
    let target = Target {
        what: "kill: slowest grant after a kill -9, ms".to_owned(),
        limit: Limit::AtMost(TARGET_MS),
        measured: table.max("clinch", TIME.name),
    };
    Ok(Report { tables: vec![table], targets: vec![target], ..Report::default() })
}

fn measure(kind: Kind, dir: &Path) -> Result<Sample> {
    let dir = dir.join(kind.word());
    std::fs::create_dir_all(&dir)?;
    let url = url(&dir);
    let mut holder = Worker::start("hold", kind, &url)?;
    let (killed, got) = while_waiting(kind, &url, SETTLE, || holder.kill())?;
    if got < killed {
        return Err("the lock was granted while its holder lived".into());
    }
    Ok(vec![(TIME, (got - killed) as f64 / 1e6)])
}

/// Kills a holder, in a process of its own, for whom somebody waits here. Says how long after the end of the holder's
/// lease the lock was granted to the waiter, in milliseconds, and what came of `meanwhile`, which is called after the kill
/// with the moment at which the lease ends.
pub(super) fn killed_holder<T>(
    kind: Kind,
    url: &str,
    lease: Duration,
    settle: Duration,
    meanwhile: impl FnOnce(u64) -> Result<T>,
) -> Result<(T, f64)> {
    let mut holder = Worker::start("hold", kind, url)?;
    let (asked, taken) = holder.taken()?;
    let (done, got) = while_waiting(kind, url, settle, || {
        holder.kill()?;
        meanwhile(asked + nanos(lease))
    })?;
    if got < asked + nanos(lease) {
        return Err("the lock was granted before the lease had ended".into());
    }
    Ok((done, late(taken, lease, got)))
}

/// How long after the end of the lease of a lock that was `taken` it was granted to another, in milliseconds.
pub(super) fn late(taken: u64, lease: Duration, got: u64) -> f64 {
    (got as f64 - (taken + nanos(lease)) as f64) / 1e6
}

/// Lets a waiter ask for the lock, does something after this time, and says what came of it and when the lock was
/// granted to the waiter.
pub(super) fn while_waiting<T>(
    kind: Kind,
    url: &str,
    settle: Duration,
    meanwhile: impl FnOnce() -> Result<T>,
) -> Result<(T, u64)> {
    let (asked, asking) = channel();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(move || wait(kind, url, move || Ok(asked.send(())?)));
        // When the waiter failed before it asked, this fails too, and the waiter's own error is the better one.
        if asking.recv().is_ok() {
            std::thread::sleep(settle);
        }
        let done = meanwhile();
        let got = waiter.join().map_err(|_| "the waiter panicked")??;
        Ok((done?, got))
    })
}
