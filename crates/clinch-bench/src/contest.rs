//! A contest for one lock, whoever competes and wherever the lock is: how fast it goes from one waiter to another, and
//! whether everybody gets their turn.

use std::fmt;
use std::time::Duration;

use crate::args::Settings;
use crate::contend::{Bare, Client, Kind, Plan, Waiter};
use crate::harness::Sample;
use crate::history::{Hold, Verdict, Window, judge};
use crate::machine::{cpu_time, nanos, now, sleep_until};
use crate::report::{Limit, Metric, Table, Target};
use crate::worker::{Worker, parse_contenders, plan_line};
use crate::{Error, Result};

/// How long a contest takes, unless its waiters are too slow for that, and how much is not counted: by then all wait.
pub(crate) const LENGTH: Duration = Duration::from_millis(2200);
const WARM_UP: Duration = Duration::from_millis(200);

/// From when everybody is ready until the start.
const LEAD: Duration = Duration::from_millis(50);

pub(crate) const HANDOFFS: Metric = Metric::new("hand-offs to another waiter", "/s");
pub(crate) const MAX_WAIT: Metric = Metric::new("max wait", "ms");
const ACQUISITIONS: Metric = Metric::new("acquisitions", "/s");
pub(crate) const GAP_P50: Metric = Metric::new("release→next p50", "µs");
pub(crate) const GAP_P99: Metric = Metric::new("release→next p99", "µs");
const JAIN: Metric = Metric::new("Jain", "");
const STARVED: Metric = Metric::new("starved", "");
const CPU: Metric = Metric::new("CPU", "µs per acquisition");
const VIOLATIONS: Metric = Metric::new("violations", "");

/// What the waiters are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
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

/// Who competes for what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contest {
    pub(crate) place: Place,
    pub(crate) waiters: usize,
    /// How long the lock is held each time.
    pub(crate) hold: Duration,
    pub(crate) length: Duration,
}

impl fmt::Display for Contest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}, ", self.waiters, self.place)?;
        if self.hold.is_zero() { f.write_str("no hold") } else { write!(f, "hold {:?}", self.hold) }
    }
}

/// What came of a contest.
#[derive(Debug)]
pub(crate) struct Outcome {
    verdict: Verdict,
    /// All acquisitions, those outside the window included.
    pub(crate) acquisitions: usize,
    /// CPU time of all waiters, in nanoseconds.
    cpu: u64,
}

impl Outcome {
    pub(crate) fn sample(&self) -> Sample {
        let Outcome { verdict, acquisitions, cpu } = self;
        vec![
            (HANDOFFS, verdict.handoffs),
            (ACQUISITIONS, verdict.acquisitions),
            (GAP_P50, verdict.gap_p50_us),
            (GAP_P99, verdict.gap_p99_us),
            (MAX_WAIT, verdict.max_wait_ms),
            (JAIN, verdict.jain),
            (STARVED, verdict.starved as f64),
            (VIOLATIONS, verdict.violations as f64),
            (CPU, *cpu as f64 / 1e3 / (*acquisitions).max(1) as f64),
        ]
    }
}

/// What every contest of ours has to reach where there is a queue: this much fairness, and exclusion, in the worst round.
pub(crate) fn targets(table: &Table, jain: f64) -> Vec<Target> {
    let fair = Target {
        what: format!("{}: Jain, worst round", table.title),
        limit: Limit::AtLeast(jain),
        measured: table.min(Kind::Clinch.name(), JAIN.name),
    };
    [fair].into_iter().chain(exclusion(table)).collect()
}

/// What every contest of ours has to reach.
pub(crate) fn exclusion(table: &Table) -> [Target; 2] {
    [STARVED, VIOLATIONS].map(|metric| Target {
        what: format!("{}: {}, worst round", table.title, metric.name),
        limit: Limit::AtMost(0.0),
        measured: table.max(Kind::Clinch.name(), metric.name),
    })
}

/// A plan that was carried out, the holds of each waiter, and the CPU time that all of them used, in nanoseconds.
type Carried = (Plan, Vec<Vec<Hold>>, u64);

impl Contest {
    /// Carries it out.
    pub(crate) fn run(&self, kind: Kind, url: &str, settings: &Settings) -> Result<Outcome> {
        kind.prepare(url)?;
        let length = settings.amount(self.length, self.length / 10);
        let warm_up = settings.amount(WARM_UP, Duration::from_millis(20));
        let plan = || {
            let start = now() + nanos(LEAD);
            Plan { start, end: start + nanos(length), hold: self.hold }
        };
        let (plan, holds, cpu) = match (self.place, kind) {
            (Place::Processes, _) => processes(kind, url, self.waiters, 1, plan)?,
            (Place::Tasks, Kind::GoMutex) => processes(kind, url, 1, self.waiters, plan)?,
            (Place::Tasks, Kind::Clinch | Kind::Resting | Kind::LockApi) => self.tasks(kind, url, plan)?,
            (Place::Tasks, Kind::Flock | Kind::Greedy | Kind::Blpop) => self.threads(kind, url, plan)?,
        };
        let verdict = judge(&holds, Window { from: plan.start + nanos(warm_up), to: plan.end })?;
        Ok(Outcome { verdict, acquisitions: holds.iter().map(Vec::len).sum(), cpu })
    }

    fn tasks(&self, kind: Kind, url: &str, plan: impl Fn() -> Plan) -> Result<Carried> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(async {
            let client = Client::connect(kind, url).await?;
            let mut waiters = Vec::new();
            for _ in 0..self.waiters {
                waiters.push(client.waiter().await?);
            }
            let plan = plan();
            sleep_until(plan.start);
            let used = cpu_time();
            let compete = |waiter: Waiter| tokio::spawn(waiter.compete(plan, kind.rest(plan.hold)));
            let tasks: Vec<_> = waiters.into_iter().map(compete).collect();
            let mut holds = Vec::new();
            for task in tasks {
                holds.push(task.await??);
            }
            Ok((plan, holds, cpu_time() - used))
        })
    }

    fn threads(&self, kind: Kind, url: &str, plan: impl Fn() -> Plan) -> Result<Carried> {
        let mut waiters = Vec::new();
        for _ in 0..self.waiters {
            waiters.push(Bare::new(kind, url)?);
        }
        let plan = plan();
        let used = cpu_time();
        let holds = std::thread::scope(|scope| -> Result<Vec<Vec<Hold>>> {
            let compete = |waiter: Bare| {
                sleep_until(plan.start);
                waiter.compete(plan, kind.rest(plan.hold))
            };
            let threads: Vec<_> =
                waiters.into_iter().map(|waiter| scope.spawn(move || compete(waiter))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Vec<Hold>>>| {
                thread.join().unwrap_or_else(|_| Err(Error::from("a waiter panicked")))
            };
            threads.into_iter().map(join).collect()
        })?;
        Ok((plan, holds, cpu_time() - used))
    }
}

/// A contest of so many processes with so many waiters each.
fn processes(
    kind: Kind,
    url: &str,
    count: usize,
    waiters: usize,
    plan: impl Fn() -> Plan,
) -> Result<Carried> {
    let mut workers = Vec::new();
    for _ in 0..count {
        workers.push(Worker::of("contend", kind, url, waiters)?);
    }
    workers.iter_mut().try_for_each(Worker::ready)?;
    let plan = plan();
    let line = plan_line(plan);
    workers.iter_mut().try_for_each(|worker| worker.tell(&line))?;
    let (mut all, mut cpu) = (Vec::new(), 0);
    for worker in workers {
        let (holds, used) = parse_contenders(&worker.output()?)?;
        all.extend(holds);
        cpu += used;
    }
    Ok((plan, all, cpu))
}
