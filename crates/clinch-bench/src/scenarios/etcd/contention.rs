//! `etcd-contention`: how fast a lock on etcd goes from one waiter to another, whether everybody gets their turn, and how
//! much the server is asked for that.

use std::time::Duration;

use super::{REQUESTS, fresh};
use crate::Result;
use crate::args::Settings;
use crate::contend::Kind;
use crate::contest::{self, Contest, GAP_P50, GAP_P99, HANDOFFS, Place};
use crate::etcd_server::{self, counted};
use crate::go_mutex;
use crate::harness::{Case, Sample, interleave};
use crate::report::{Limit, Metric, Report, Table, Target};

const HOLD: Duration = Duration::from_millis(1);

/// Long enough that each of 64 waiters has some twenty turns: with fewer, one turn more or less looks unfair.
const LENGTH: Duration = Duration::from_millis(4200);

const KINDS: [Kind; 3] = [Kind::GoMutex, Kind::LockApi, Kind::Clinch];

/// What contests are judged by: for each number of waiters, hand-offs over those of whom.
const JUDGED: [(usize, Kind, f64); 4] =
    [(2, Kind::GoMutex, 12.0), (16, Kind::GoMutex, 2.0), (64, Kind::GoMutex, 1.0), (64, Kind::LockApi, 1.0)];

/// The other figures to reach: from a release to the next holder, requests, and fairness.
const TARGET_P50_US: f64 = 1_200.0;
const TARGET_P99_US: f64 = 15_000.0;
const TARGET_REQUESTS: f64 = 4.0;
const TARGET_JAIN: f64 = 0.999;

const MESSAGES: Metric = Metric::new("messages", "per acquisition");

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    // Compiles it before anything is timed.
    go_mutex::program()?;
    let server = etcd_server::start()?;
    let url = server.url();
    let mut report = Report::default();
    for hold in [HOLD, Duration::ZERO] {
        for waiters in settings.amount(&[2, 16, 64][..], &[2]) {
            let contest = Contest { place: Place::Tasks, waiters: *waiters, hold, length: LENGTH };
            let table = compare(&contest, &url, settings)?;
            report.targets.extend(targets(&contest, &table));
            report.tables.push(table);
        }
    }
    report.notes.push(etcd_server::note(&server));
    report.notes.push(
        "Requests are what clients sent from before they connected until they were done, over all acquisitions; the one \
         stream on which a client watches counts once. Messages are requests and what went over streams, such as the \
         order to watch a key. Go's waiters are goroutines of one process with one client and a session each; those of \
         the Lock API are tasks with one connection and a lease each."
            .to_owned(),
    );
    Ok(report)
}

fn compare(contest: &Contest, url: &str, settings: &Settings) -> Result<Table> {
    let case = |kind: Kind| Case::new(kind.name(), move || compete(contest, kind, url, settings));
    let rows = interleave(settings.rounds, KINDS.map(case).into())?;
    Ok(Table { title: contest.to_string(), floor: Some((Kind::GoMutex.name(), HANDOFFS.name)), rows })
}

fn compete(contest: &Contest, kind: Kind, url: &str, settings: &Settings) -> Result<Sample> {
    let (outcome, calls) = counted(url, || contest.run(kind, &fresh(url), settings))?;
    let per_acquisition = |count: f64| count / outcome.acquisitions.max(1) as f64;
    let mut sample = outcome.sample();
    sample.push((REQUESTS, per_acquisition(calls.requests())));
    sample.push((MESSAGES, per_acquisition(calls.messages())));
    Ok(sample)
}

fn targets(contest: &Contest, table: &Table) -> Vec<Target> {
    let ours = Kind::Clinch.name();
    let target =
        |what: &str, limit, measured| Target { what: format!("{}: {what}", table.title), limit, measured };
    let mut targets = Vec::new();
    if !contest.hold.is_zero() {
        for (_, kind, ratio) in JUDGED.iter().filter(|(waiters, ..)| *waiters == contest.waiters) {
            let what = format!("hand-offs × {}", kind.name());
            let measured = table.ratio_to(kind.name(), ours, HANDOFFS.name);
            targets.push(target(&what, Limit::AtLeast(*ratio), measured));
        }
        let most =
            |what, limit, metric: Metric| target(what, Limit::AtMost(limit), table.median(ours, metric.name));
        targets.push(most("release→next p50, µs", TARGET_P50_US, GAP_P50));
        targets.push(most("release→next p99, µs", TARGET_P99_US, GAP_P99));
    }
    targets.push(target(
        "requests per acquisition, worst round",
        Limit::AtMost(TARGET_REQUESTS),
        table.max(ours, REQUESTS.name),
    ));
    targets.extend(contest::targets(table, TARGET_JAIN));
    targets
}
