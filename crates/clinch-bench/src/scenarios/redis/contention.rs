//! `redis-contention`: how fast a lock on Redis goes from one waiter to another, whether everybody gets their turn, and how
//! much the server is asked for that.

use std::time::Duration;

use super::{COMMANDS, counted};
use crate::Result;
use crate::args::Settings;
use crate::contend::Kind;
use crate::contest::{self, Contest, HANDOFFS, LENGTH, MAX_WAIT, Place};
use crate::harness::{Case, Sample, interleave};
use crate::machine::raise_descriptors;
use crate::redis_server;
use crate::report::{Limit, Report, Table, Target};

const HOLD: Duration = Duration::from_millis(1);

/// Those that have to reach the targets. Without a hold, a release and a claim are all there is to a hand-off.
const JUDGED: [Contest; 5] = [
    Contest { place: Place::Tasks, waiters: 2, hold: HOLD, length: LENGTH },
    Contest { place: Place::Tasks, waiters: 16, hold: HOLD, length: LENGTH },
    Contest { place: Place::Tasks, waiters: 64, hold: HOLD, length: LENGTH },
    Contest { place: Place::Processes, waiters: 8, hold: HOLD, length: LENGTH },
    Contest { place: Place::Tasks, waiters: 16, hold: Duration::ZERO, length: LENGTH },
];

/// Those that show what does not grow with the crowd.
const CROWDS: [Contest; 2] = [
    Contest { place: Place::Tasks, waiters: 500, hold: HOLD, length: LENGTH },
    Contest { place: Place::Tasks, waiters: 1000, hold: HOLD, length: LENGTH },
];

/// The figures to reach: hand-offs over those of the floor with and without a hold, commands (three, and what connecting
/// takes: some thirty commands among some two thousand acquisitions), the longest wait over the floor's, and fairness.
const TARGET_HELD: f64 = 0.9;
const TARGET_AT_ONCE: f64 = 0.5;
const TARGET_COMMANDS: f64 = 3.05;
const TARGET_WAIT: f64 = 2.0;
const TARGET_JAIN: f64 = 0.99;

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    raise_descriptors();
    let server = redis_server::start()?;
    let url = server.url();
    let mut report = Report::default();
    let quick = [JUDGED[3], JUDGED[4]];
    for contest in settings.amount(&JUDGED[..], &quick) {
        let table = compare(contest, &url, settings.rounds, settings)?;
        report.targets.extend(targets(contest, &table));
        report.tables.push(table);
    }
    for contest in settings.amount(&CROWDS[..], &[]) {
        // Once: it is for information.
        report.tables.push(compare(contest, &url, 1, settings)?);
    }
    report.notes.push(
        "Commands are what clients sent from before they connected until they were done, over all acquisitions: scripts \
         count once, whatever they call. With few acquisitions the commands of connecting show."
            .to_owned(),
    );
    Ok(report)
}

fn compare(contest: &Contest, url: &str, rounds: usize, settings: &Settings) -> Result<Table> {
    let case = |kind: Kind| Case::new(kind.name(), move || compete(contest, kind, url, settings));
    let rows = interleave(rounds, [Kind::Blpop, Kind::Clinch].map(case).into())?;
    Ok(Table { title: contest.to_string(), floor: Some((Kind::Blpop.name(), HANDOFFS.name)), rows })
}

fn compete(contest: &Contest, kind: Kind, url: &str, settings: &Settings) -> Result<Sample> {
    let (outcome, calls) = counted(url, || contest.run(kind, url, settings))?;
    // BLPOP itself is counted in any case: scripts cannot wait.
    let direct: &[&str] = if kind.is_ours() { &[] } else { &["lpush"] };
    let mut sample = outcome.sample();
    sample.push((COMMANDS, calls.sent(direct) as f64 / outcome.acquisitions.max(1) as f64));
    Ok(sample)
}

fn targets(contest: &Contest, table: &Table) -> Vec<Target> {
    let (ours, floor) = (Kind::Clinch.name(), Kind::Blpop.name());
    let target =
        |what: &str, limit, measured| Target { what: format!("{}: {what}", table.title), limit, measured };
    let ratio = if contest.hold.is_zero() { TARGET_AT_ONCE } else { TARGET_HELD };
    let mut targets = vec![
        target("hand-offs × BLPOP + LPUSH", Limit::AtLeast(ratio), table.ratio(ours)),
        target(
            "commands per acquisition, worst round",
            Limit::AtMost(TARGET_COMMANDS),
            table.max(ours, COMMANDS.name),
        ),
        target(
            "max wait × BLPOP + LPUSH",
            Limit::AtMost(TARGET_WAIT),
            table.ratio_to(floor, ours, MAX_WAIT.name),
        ),
    ];
    targets.extend(contest::targets(table, TARGET_JAIN));
    targets
}
