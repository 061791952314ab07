//! `redlock-stopped`: what servers that stand still cost those that lock: nothing as long as a quorum runs, no more than
//! the deadline after that, and nothing is left when they go on.

use std::time::{Duration, Instant};

use clinch::{ErrorKind, Locks};
use clinch_testkit::{Redis, vouch};
use tokio::runtime::Runtime;

use super::{QUORUM, Servers};
use crate::args::Settings;
use crate::harness::{Case, Sample, interleave};
use crate::machine::{now, resident};
use crate::raw_redis::{Raw, Reply};
use crate::redis_server;
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::stopwatch::{FREE_P50, Stopwatch, TAKE_P50, timed, warm_up};
use crate::worker::{Worker, ready_for_a_line, runtime};
use crate::{Error, Result};

/// The figures to reach: halves of a pair over those with all servers up, and how much later than its deadline a lock may
/// fail or than with all servers a process may end.
const TARGET_RATIO: f64 = 1.3;
const TARGET_LATE_MS: f64 = 50.0;

/// Pairs per case and round: at least for as long as a connection that answers nothing is kept.
const PAIRS: u64 = 10_000;

/// How long a lock may take that cannot be had.
const DEADLINE: Duration = Duration::from_secs(1);

/// For how long keys are looked for: far shorter than the leases, which would remove them too.
const LOOK: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The servers keep what they acknowledged, and clients have come for long; all else is as it is without a word.
const DEFAULTS: &str = "durable=on";

const ALL_UP: &str = "all up";

const GROWTH: Metric = Metric::new("memory growth", "KiB");
const SEEN: Metric = Metric::new("a key last seen after", "ms");
const LEFT: Metric = Metric::new("keys left", "");
const FAILED: Metric = Metric::new("failed after", "ms");
const LIVING: Metric = Metric::new("a key last seen on the others", "ms later");
const LEFT_LIVING: Metric = Metric::new("keys left on the others", "");
const READY: Metric = Metric::new("start and connect", "ms");
const DONE: Metric = Metric::new("lock, release and exit", "ms");

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    let servers = Servers::start(redis_server::start_logging)?;
    vouch(&servers.url(DEFAULTS), &servers.all);
    let pairs = settings.amount(PAIRS, 50);
    let case = |stopped: usize| {
        let servers = &servers;
        Case::new(name(stopped), move || pairs_with(servers, stopped, pairs))
    };
    let few = Table {
        title: "lock and release while servers stand still".to_owned(),
        floor: Some((ALL_UP, TAKE_P50.name)),
        rows: interleave(settings.rounds, (0..QUORUM).map(case).collect())?,
    };
    let without = |case: &'static str, driven: bool| {
        let servers = &servers;
        Case::new(case, move || no_quorum(servers, driven))
    };
    let many = Table {
        title: format!("a lock with a deadline of {DEADLINE:?} and no quorum"),
        floor: None,
        rows: interleave(settings.rounds, vec![without(name(QUORUM), true), without(IDLE, false)])?,
    };
    let whole = |when: &'static str, before: usize, after: usize| {
        let servers = &servers;
        Case::new(when, move || process(servers, before, after))
    };
    let cases = vec![whole(ALL_UP, 0, 0), whole(AFTERWARDS, 0, 1), whole(BEFORE, 1, 0)];
    let ends = Table {
        title: "a process that locks and releases once".to_owned(),
        floor: Some((ALL_UP, DONE.name)),
        rows: interleave(settings.rounds, cases)?,
    };
    let targets = targets(&few, &many, &ends);
    let notes = vec![
        "Keys are looked for from when the servers go on, or, on those that never stopped, from when the lock failed; 0 ms when \
         none was seen."
            .to_owned(),
    ];
    Ok(Report { tables: vec![few, many, ends], targets, notes, ..Report::default() })
}

/// What is left to do is left to the library's own thread: nobody polls the runtime that asked.
const IDLE: &str = "3 stopped, then an idle runtime";

const AFTERWARDS: &str = "1 stopped after it connected";
const BEFORE: &str = "1 stopped before it connects";

const fn name(stopped: usize) -> &'static str {
    match stopped {
        0 => ALL_UP,
        1 => "1 stopped",
        2 => "2 stopped",
        _ => "3 stopped",
    }
}

fn targets(few: &Table, many: &Table, ends: &Table) -> Vec<Target> {
    let target = |what: String, limit, measured| Target {
        what: format!("redlock-stopped: {what}"),
        limit: Limit::AtMost(limit),
        measured,
    };
    let mut targets = Vec::new();
    for stopped in [name(1), name(2)] {
        for half in [TAKE_P50, FREE_P50] {
            let what = format!("{stopped}, {} × {ALL_UP}", half.name);
            targets.push(target(what, TARGET_RATIO, few.ratio_to(ALL_UP, stopped, half.name)));
        }
        targets.push(target(format!("{stopped}, keys left, worst round"), 0.0, few.max(stopped, LEFT.name)));
    }
    let without = name(QUORUM);
    let late = many.max(without, FAILED.name).map(|failed| failed - DEADLINE.as_secs_f64() * 1e3);
    targets.push(target(
        format!("{without}, later than the deadline, worst round, ms"),
        TARGET_LATE_MS,
        late,
    ));
    for case in [without, IDLE] {
        for left in [LEFT_LIVING, LEFT] {
            let what = format!("{case}, {}, worst round", left.name);
            targets.push(target(what, 0.0, many.max(case, left.name)));
        }
    }
    let end = |case: &str| ends.median(case, DONE.name);
    for case in [AFTERWARDS, BEFORE] {
        let longer = end(case).zip(end(ALL_UP)).map(|(stopped, up)| stopped - up);
        targets.push(target(format!("{case}, later exit, ms"), TARGET_LATE_MS, longer));
        targets.push(target(format!("{case}, keys left, worst round"), 0.0, ends.max(case, LEFT.name)));
    }
    targets
}

/// Servers that stand still until this is dropped.
struct Stopped<'a>(&'a [Redis]);

impl<'a> Stopped<'a> {
    fn first(servers: &'a Servers, count: usize) -> Stopped<'a> {
        let (stopped, _) = servers.all.split_at(count.min(servers.all.len()));
        stopped.iter().for_each(Redis::pause);
        Stopped(stopped)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(Redis::resume);
    }
}

/// A client that was connected before the servers were stopped.
fn pairs_with(servers: &Servers, stopped: usize, pairs: u64) -> Result<Sample> {
    let runtime = runtime()?;
    let locks = runtime.block_on(clinch::connect(&servers.url(DEFAULTS)))?;
    warm_up(pairs, |time| runtime.block_on(lock_each(&locks, time)))?;
    let stopped = Stopped::first(servers, stopped);
    let before = resident()?;
    let mut sample = timed(pairs, |time| runtime.block_on(lock_each(&locks, time)))?;
    let growth = resident()? as f64 - before as f64;
    drop(stopped);
    let (seen, left) = driving(&runtime, || keys(&servers.urls))?;
    sample.extend([(GROWTH, growth / 1024.0), (SEEN, seen), (LEFT, left)]);
    Ok(sample)
}

async fn lock_each(locks: &Locks, time: &mut Stopwatch) -> Result<()> {
    for number in 0..time.count {
        let start = now();
        let guard = locks.mutex(&format!("stopped/{number:012}"))?.lock().await?;
        let taken = now();
        guard.release().await?;
        time.halves(start, taken)?;
    }
    Ok(())
}

/// Does something while tasks of a runtime go on.
fn driving<T: Send>(runtime: &Runtime, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let (tell, told) = tokio::sync::oneshot::channel();
        scope.spawn(move || tell.send(body()));
        runtime.block_on(told)?
    })
}

/// A lock that cannot be had: it has to fail in time, and leave nothing, whether its runtime goes on or not.
fn no_quorum(servers: &Servers, driven: bool) -> Result<Sample> {
    let runtime = runtime()?;
    let locks = runtime.block_on(clinch::connect(&servers.url(DEFAULTS)))?;
    runtime.block_on(async { locks.mutex("stopped/warm")?.lock().await?.release().await })?;
    let stopped = Stopped::first(servers, QUORUM);
    let start = Instant::now();
    let tried = runtime.block_on(async { locks.mutex("stopped/never")?.lock().timeout(DEADLINE).await });
    let failed = start.elapsed();
    match tried {
        Ok(_) => return Err("a lock was granted without a quorum".into()),
        // Anything else would say that the lock is somebody's, or that there is no hope.
        Err(error) if ![ErrorKind::TimedOut, ErrorKind::Unavailable].contains(&error.kind()) => {
            return Err(error.into());
        }
        Err(_) => {}
    }
    let (_, living) = servers.urls.split_at(QUORUM);
    let look = |urls: &[String]| if driven { driving(&runtime, || keys(urls)) } else { keys(urls) };
    let (seen, left) = look(living)?;
    drop(stopped);
    let (seen_after, left_after) = look(&servers.urls)?;
    let failed = failed.as_secs_f64() * 1e3;
    Ok(vec![(FAILED, failed), (LIVING, seen), (LEFT_LIVING, left), (SEEN, seen_after), (LEFT, left_after)])
}

/// Looks for keys of locks: after how many milliseconds there was one for the last time, and how many there are at the end.
fn keys(urls: &[String]) -> Result<(f64, f64)> {
    let mut servers = urls.iter().map(|url| Raw::connect(url)).collect::<Result<Vec<_>>>()?;
    let start = Instant::now();
    let mut seen = Duration::ZERO;
    loop {
        let mut count = 0;
        for server in &mut servers {
            match server.call(&["KEYS", "clinch:stopped/*"])? {
                Reply::Array(keys) => count += keys.len(),
                other => return Err(format!("keys were expected of the server, not {other:?}").into()),
            }
        }
        if count > 0 {
            seen = start.elapsed();
        }
        if start.elapsed() > LOOK {
            return Ok((seen.as_secs_f64() * 1e3, count as f64));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// A whole process, while so many servers stand still before it connects, and so many more after that.
fn process(servers: &Servers, before: usize, after: usize) -> Result<Sample> {
    let millis = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
    let url = servers.url(DEFAULTS);
    let stopped = Stopped::first(servers, before);
    let start = Instant::now();
    let mut worker = Worker::spawn(&["redlock-once", &url])?;
    worker.ready()?;
    let ready = millis(start);
    let stopped_too = Stopped::first(servers, after);
    let start = Instant::now();
    worker.tell("go")?;
    worker.output()?;
    let done = millis(start);
    drop((stopped, stopped_too));
    let (seen, left) = keys(&servers.urls)?;
    Ok(vec![(READY, ready), (DONE, done), (SEEN, seen), (LEFT, left)])
}

/// The worker: connects, waits for a word, locks, releases and ends.
pub(crate) fn once(url: &str) -> Result<()> {
    runtime()?.block_on(async {
        let locks = clinch::connect(url).await?;
        ready_for_a_line()?;
        locks.mutex("stopped/once")?.lock().await?.release().await?;
        Ok::<_, Error>(())
    })
}
