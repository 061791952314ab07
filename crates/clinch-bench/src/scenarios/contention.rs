//! `file-contention`: how fast a lock of files goes from one waiter to another, and whether everybody gets their turn.

use std::time::Duration;

use crate::Result;
use crate::args::Settings;
use crate::contend::Kind;
use crate::contest::{self, Contest, HANDOFFS, LENGTH, Place};
use crate::harness::{Case, interleave};
use crate::report::{Limit, Report, Table, Target};
use crate::worker::url;

/// How many compete.
const WAITERS: [usize; 3] = [2, 16, 64];

/// From this many waiters on, the hand-off target counts. With two, the floor's releaser is the next waiter itself.
const TARGET_FROM: usize = 16;

/// The figure to reach: hand-offs over those of the floor.
const TARGET_RATIO: f64 = 0.9;

/// Fairness, in the worst round.
const TARGET_JAIN: f64 = 0.99;

/// How long the lock is held each time.
const HOLD: Duration = Duration::from_millis(1);

const KINDS: [Kind; 4] = [Kind::Flock, Kind::Clinch, Kind::Resting, Kind::Greedy];

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::default();
    for place in [Place::Tasks, Place::Processes] {
        for waiters in WAITERS.into_iter().take(settings.amount(WAITERS.len(), 1)) {
            let dir = settings.fresh_dir()?;
            let contest = Contest { place, waiters, hold: HOLD, length: LENGTH };
            let case = |kind: Kind| {
                let dir = dir.path().join(kind.word());
                Case::new(kind.name(), move || {
                    std::fs::create_dir_all(&dir)?;
                    Ok(contest.run(kind, &url(&dir), settings)?.sample())
                })
            };
            let rows = interleave(settings.rounds, KINDS.map(case).into())?;
            let table =
                Table { title: contest.to_string(), floor: Some((Kind::Flock.name(), HANDOFFS.name)), rows };
            if waiters >= TARGET_FROM {
                report.targets.push(Target {
                    what: format!("{}: hand-offs × flock", table.title),
                    limit: Limit::AtLeast(TARGET_RATIO),
                    measured: table.ratio(Kind::Clinch.name()),
                });
            }
            report.targets.extend(contest::targets(&table, TARGET_JAIN));
            report.tables.push(table);
        }
    }
    report.notes.push(
        "\"flock\" is blocking flock among waiters that rest for half a hold after each release, so that the lock goes \
         to one that was blocked. \"clinch\", by which the targets are judged, asks again at once: queueing again \
         delays the next holder where both run on one CPU. \"clinch, resting too\" shows the hand-off alone."
            .to_owned(),
    );
    Ok(report)
}
