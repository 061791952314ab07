//! `file-contention`: how fast a lock goes from one waiter to another, and whether everybody gets their turn.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use crate::args::Settings;
use crate::contend::{self, Kind, NAME, Plan};
use crate::harness::{Case, Sample, interleave};
use crate::history::{Hold, Window, judge};
use crate::machine::{cpu_time, now, sleep_until};
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::worker::{Worker, parse_contender, plan_line, url};
use crate::{Error, Result};

/// How many compete.
const WAITERS: [usize; 3] = [2, 16, 64];

/// From this many waiters on, the hand-off target counts. With two, the floor's releaser is the next waiter itself.
const TARGET_FROM: usize = 16;

/// The figures to reach: hand-offs over those of the floor, and fairness.
const TARGET_RATIO: f64 = 0.9;
const TARGET_JAIN: f64 = 0.99;

/// How long the lock is held each time.
const HOLD: Duration = Duration::from_millis(1);

/// How long a contest takes, and how much of that is not counted: by then everybody waits.
const CONTEST: Duration = Duration::from_millis(2200);
const WARM_UP: Duration = Duration::from_millis(200);

/// From when everybody is ready until the start.
const LEAD: Duration = Duration::from_millis(50);

const HANDOFFS: Metric = Metric::new("hand-offs to another waiter", "/s");
const ACQUISITIONS: Metric = Metric::new("acquisitions", "/s");
const GAP_P50: Metric = Metric::new("release→next p50", "µs");
const GAP_P99: Metric = Metric::new("release→next p99", "µs");
const MAX_WAIT: Metric = Metric::new("max wait", "ms");
const JAIN: Metric = Metric::new("Jain", "");
const STARVED: Metric = Metric::new("starved", "");
const CPU: Metric = Metric::new("CPU", "µs per acquisition");
const VIOLATIONS: Metric = Metric::new("violations", "");

/// What the waiters are.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// Tasks of one process, on a runtime with two threads; for the floor, threads of one process.
    Tasks,
    /// Processes of one thread.
    Processes,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::Tasks => "tasks",
            Place::Processes => "processes",
        })
    }
}

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::default();
    for place in [Place::Tasks, Place::Processes] {
        for waiters in WAITERS.into_iter().take(settings.amount(WAITERS.len(), 1)) {
            let dir = settings.fresh_dir()?;
            let path = dir.path();
            let case =
                |kind: Kind| Case::new(kind.name(), move || compete(kind, place, waiters, path, settings));
            let rows = interleave(settings.rounds, Kind::ALL.map(case).into())?;
            let table = Table {
                title: format!("{waiters} {place}, hold {HOLD:?}"),
                floor: Some((Kind::Flock.name(), HANDOFFS.name)),
                rows,
            };
            report.targets.extend(targets(&table, waiters));
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

fn targets(table: &Table, waiters: usize) -> Vec<Target> {
    let ours = Kind::Clinch.name();
    let target =
        |what: &str, limit, measured| Target { what: format!("{}: {what}", table.title), limit, measured };
    let ratio = target("hand-offs × flock", Limit::AtLeast(TARGET_RATIO), table.ratio(ours));
    let mut targets = vec![
        target("Jain, worst round", Limit::AtLeast(TARGET_JAIN), table.min(ours, JAIN.name)),
        target("starved, worst round", Limit::AtMost(0.0), table.max(ours, STARVED.name)),
        target("violations, worst round", Limit::AtMost(0.0), table.max(ours, VIOLATIONS.name)),
    ];
    if waiters >= TARGET_FROM {
        targets.insert(0, ratio);
    }
    targets
}

/// One contest.
fn compete(kind: Kind, place: Place, waiters: usize, dir: &Path, settings: &Settings) -> Result<Sample> {
    let dir = dir.join(kind.word());
    std::fs::create_dir_all(&dir)?;
    let length = settings.amount(CONTEST, Duration::from_millis(100));
    let warm_up = settings.amount(WARM_UP, Duration::from_millis(20));
    let plan = || {
        let start = now() + nanos(LEAD);
        Plan { start, end: start + nanos(length), hold: HOLD }
    };
    let (plan, holds, cpu) = match (place, kind) {
        (Place::Processes, _) => processes(kind, waiters, &dir, plan)?,
        (Place::Tasks, Kind::Clinch | Kind::Resting) => tasks(kind, waiters, &dir, plan)?,
        (Place::Tasks, Kind::Flock | Kind::Greedy) => threads(kind, waiters, &dir, plan)?,
    };
    let verdict = judge(&holds, Window { from: plan.start + nanos(warm_up), to: plan.end })?;
    let all: usize = holds.iter().map(Vec::len).sum();
    Ok(vec![
        (HANDOFFS, verdict.handoffs),
        (ACQUISITIONS, verdict.acquisitions),
        (GAP_P50, verdict.gap_p50_us),
        (GAP_P99, verdict.gap_p99_us),
        (MAX_WAIT, verdict.max_wait_ms),
        (JAIN, verdict.jain),
        (STARVED, verdict.starved as f64),
        (VIOLATIONS, verdict.violations as f64),
        (CPU, cpu as f64 / 1e3 / all.max(1) as f64),
    ])
}

/// A plan that was carried out, the holds of each waiter, and the CPU time that all of them used, in nanoseconds.
type Contest = (Plan, Vec<Vec<Hold>>, u64);

fn tasks(kind: Kind, waiters: usize, dir: &Path, plan: impl Fn() -> Plan) -> Result<Contest> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let locks = clinch::connect(&url(dir)).await?;
        let plan = plan();
        sleep_until(plan.start);
        let used = cpu_time();
        let mut tasks = Vec::new();
        for _ in 0..waiters {
            tasks.push(tokio::spawn(contend::by_mutex(locks.mutex(NAME)?, plan, kind.rest(plan.hold))));
        }
        let mut holds = Vec::new();
        for task in tasks {
            holds.push(task.await??);
        }
        Ok((plan, holds, cpu_time() - used))
    })
}

fn threads(kind: Kind, waiters: usize, dir: &Path, plan: impl Fn() -> Plan) -> Result<Contest> {
    let path = dir.join(NAME);
    let plan = plan();
    let used = cpu_time();
    let holds = std::thread::scope(|scope| -> Result<Vec<Vec<Hold>>> {
        let waiter = || {
            sleep_until(plan.start);
            contend::by_flock(&path, plan, kind.rest(plan.hold))
        };
        let threads: Vec<_> = (0..waiters).map(|_| scope.spawn(waiter)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Vec<Hold>>>| {
            thread.join().unwrap_or_else(|_| Err(Error::from("a waiter panicked")))
        };
        threads.into_iter().map(join).collect()
    })?;
    Ok((plan, holds, cpu_time() - used))
}

fn processes(kind: Kind, waiters: usize, dir: &Path, plan: impl Fn() -> Plan) -> Result<Contest> {
    let dir = dir.to_string_lossy();
    let mut workers = Vec::new();
    for _ in 0..waiters {
        workers.push(Worker::spawn(&["contend", kind.word(), &dir])?);
    }
    workers.iter_mut().try_for_each(Worker::ready)?;
    let plan = plan();
    let line = plan_line(plan);
    workers.iter_mut().try_for_each(|worker| worker.tell(&line))?;
    let (mut all, mut cpu) = (Vec::new(), 0);
    for worker in workers {
        let (holds, used) = parse_contender(&worker.output()?)?;
        all.push(holds);
        cpu += used;
    }
    Ok((plan, all, cpu))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
