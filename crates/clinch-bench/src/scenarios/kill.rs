//! `kill`: how long a lock stays taken after its holder was killed with SIGKILL, while somebody waits for it.

use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use rustix::fs::FlockOperation;

use crate::Result;
use crate::args::Settings;
use crate::contend::{self, Kind, NAME};
use crate::harness::{Case, Sample, interleave};
use crate::machine::now;
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::worker::{Worker, runtime, url};

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
    let dir_name = dir.to_string_lossy();
    let mut holder = Worker::start(&["hold", kind.word(), &dir_name])?;
    let (asked, asking) = channel();
    let (killed, got) = std::thread::scope(|scope| -> Result<(u64, u64)> {
        let waiter = scope.spawn(|| wait(kind, &dir, asked));
        // When the waiter failed before it asked, this fails too, and the waiter's own error is the better one.
        if asking.recv().is_ok() {
            std::thread::sleep(SETTLE);
        }
        let killed = holder.kill()?;
        let got = waiter.join().map_err(|_| "the waiter panicked")??;
        Ok((killed, got))
    })?;
    if got < killed {
        return Err("the lock was granted while its holder lived".into());
    }
    Ok(vec![(TIME, (got - killed) as f64 / 1e6)])
}

/// Waits for the lock and says when it was granted.
fn wait(kind: Kind, dir: &Path, asked: Sender<()>) -> Result<u64> {
    match kind {
        Kind::Clinch | Kind::Resting => runtime()?.block_on(async {
            let locks = clinch::connect(&url(dir)).await?;
            let mutex = locks.mutex(NAME)?;
            asked.send(())?;
            let guard = mutex.lock().await?;
            let got = now();
            guard.release().await?;
            Ok(got)
        }),
        Kind::Flock | Kind::Greedy => {
            let file = contend::open(&dir.join(NAME))?;
            asked.send(())?;
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
            Ok(now())
        }
    }
}
