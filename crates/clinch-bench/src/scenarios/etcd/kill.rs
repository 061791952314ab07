//! `etcd-kill`: what a holder that was killed with SIGKILL costs those who wait. Its lease has to run out.

use std::time::Duration;

use super::fresh;
use crate::Result;
use crate::args::Settings;
use crate::contend::Kind;
use crate::etcd_server;
use crate::go_mutex;
use crate::harness::{Case, Sample, interleave};
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::scenarios::kill::killed_holder;

/// The figure to reach, for the slowest of all kills: the server looks for leases that have ended twice a second, and
/// what follows is a write, an event and a read.
const TARGET_LATE_MS: f64 = 550.0;

/// How often the server looks.
const LOOKS_EVERY: Duration = Duration::from_millis(500);

/// Kills of each case.
const KILLS: usize = 10;

/// The holder's lease.
const LEASE: Duration = Duration::from_secs(4);

/// From when somebody has asked until the kill: long enough to surely wait, and before anybody renews a lease.
const SETTLE: Duration = Duration::from_millis(300);

const LATE: Metric = Metric::new("grant after the end of the lease", "ms");

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    // Compiles it before anything is timed.
    go_mutex::program()?;
    let server = etcd_server::start()?;
    let url = server.url();
    let kills = settings.amount(KILLS, 1);
    let case = |kind: Kind| {
        let (url, mut pause) = (&url, Duration::ZERO);
        Case::new(kind.name(), move || {
            // A grant comes right after a look of the server, and so would the next lease, every time.
            std::thread::sleep(pause);
            pause += LOOKS_EVERY / u32::try_from(kills)?;
            measure(kind, url)
        })
    };
    let (go, ours) = (Kind::GoMutex.name(), Kind::Clinch.name());
    let rows = interleave(kills, [Kind::GoMutex, Kind::Clinch].map(case).into())?;
    let title = format!("the holder is killed, lease {LEASE:?}");
    let table = Table { title, floor: Some((go, LATE.name)), rows };
    let target = Target {
        what: "etcd-kill: slowest grant after the end of the lease, ms".to_owned(),
        limit: Limit::AtMost(TARGET_LATE_MS),
        measured: table.max(ours, LATE.name),
    };
    let note = "The end of a lease is counted from when the lock was taken, for both.".to_owned();
    Ok(Report { tables: vec![table], targets: vec![target], notes: vec![note], ..Report::default() })
}

fn measure(kind: Kind, url: &str) -> Result<Sample> {
    let url = format!("{}&ttl={}s", fresh(url), LEASE.as_secs());
    let ((), late) = killed_holder(kind, &url, LEASE, SETTLE, |_| Ok(()))?;
    Ok(vec![(LATE, late)])
}
