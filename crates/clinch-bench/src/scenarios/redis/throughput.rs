//! `redis-throughput`: how many locks one process takes and frees in a second, by 64 tasks with a lock each.
//!
//! Each case is a process of its own, so that CPU time and memory are its alone.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rslock::LockManager;
use serde_json::Value;

use super::{Who, rslock_pair};
use crate::args::Settings;
use crate::harness::{Case, interleave};
use crate::machine::{cpu_time, now, resident};
use crate::raw_redis::{FREED, Plain, Raw, TAKEN};
use crate::redis_server;
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::worker::{Worker, tell, told};
use crate::{Error, Result};

/// Who wants locks at the same time.
const TASKS: usize = 64;

/// How long is watched, and how long before nothing is, until connections and memory are warm.
const TIME: Duration = Duration::from_secs(10);
const WARM_UP: Duration = Duration::from_secs(1);

/// The figures to reach: ours over the floor, lean over rslock, CPU over rslock's, and growth of memory. A leak of eight
/// bytes for each pair would be ten times that growth.
const TARGET_RATIO: f64 = 0.5;
const TARGET_LEAN: f64 = 1.0;
const TARGET_CPU: f64 = 1.0;
const TARGET_GROWTH_KIB: f64 = 512.0;

const PAIRS: Metric = Metric::new("pairs", "/s");
const CPU: Metric = Metric::new("client CPU", "s per 10,000 pairs");
const GROWTH: Metric = Metric::new("memory growth", "KiB");

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    let server = redis_server::start()?;
    let url = server.url();
    let case = |who: Who| {
        let url = &url;
        let millis = settings.amount(TIME, Duration::from_millis(200)).as_millis().to_string();
        Case::new(who.name(), move || {
            let worker = Worker::spawn(&["redis-throughput", who.word(), url, &millis])?;
            told(&worker.output()?, &[PAIRS, CPU, GROWTH])
        })
    };
    let rows = interleave(settings.rounds, Who::ALL.map(case).into())?;
    let title = format!("lock and release by {TASKS} tasks of one process, a lock each");
    let table = Table { title, floor: Some((Who::Raw.name(), PAIRS.name)), rows };
    let notes = vec![
        "\"raw\" is one connection and one thread: all answers that one read brings are answered by one write. Memory is \
         what became resident while the case ran, after a second of warming up."
            .to_owned(),
    ];
    Ok(Report { targets: targets(&table), tables: vec![table], notes, ..Report::default() })
}

fn targets(table: &Table) -> Vec<Target> {
    let (ours, lean, rslock) = (Who::Clinch.name(), Who::Lean.name(), Who::Rslock.name());
    let target =
        |what: &str, limit, measured| Target { what: format!("redis-throughput: {what}"), limit, measured };
    vec![
        target("pairs × raw", Limit::AtLeast(TARGET_RATIO), table.ratio(ours)),
        target("lean: pairs × rslock", Limit::AtLeast(TARGET_LEAN), table.ratio_to(rslock, lean, PAIRS.name)),
        target("client CPU × rslock", Limit::AtMost(TARGET_CPU), table.ratio_to(rslock, ours, CPU.name)),
        target(
            "memory growth, worst round, KiB",
            Limit::AtMost(TARGET_GROWTH_KIB),
            table.max(ours, GROWTH.name),
        ),
    ]
}

/// The worker: locks and releases for some time, and tells what that cost.
pub(crate) fn work(who: &str, url: &str, time: Duration) -> Result<Value> {
    let who = Who::from_word(who)?;
    let progress = Arc::new(Progress::default());
    if who == Who::Raw {
        return std::thread::scope(|scope| {
            let floor = scope.spawn(|| pipelined(url, &progress));
            let found = watch(&progress, time);
            floor.join().map_err(|_| "the floor panicked")??;
            found
        });
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let tasks = runtime.block_on(start(who, url, &progress))?;
    let found = watch(&progress, time);
    runtime.block_on(async {
        for task in tasks {
            task.await??;
        }
        found
    })
}

type Task = tokio::task::JoinHandle<Result<()>>;

/// Starts the tasks.
async fn start(who: Who, url: &str, progress: &Arc<Progress>) -> Result<Vec<Task>> {
    let name = |task: usize| format!("throughput/{task}");
    let mut tasks: Vec<Task> = Vec::new();
    if who == Who::Rslock {
        let manager = LockManager::new(vec![url.to_owned()]);
        for task in 0..TASKS {
            let (manager, name, progress) = (manager.clone(), name(task), progress.clone());
            tasks.push(tokio::spawn(async move {
                while progress.goes_on() {
                    rslock_pair(&manager, &name).await?;
                    progress.add(1);
                }
                Ok(())
            }));
        }
        return Ok(tasks);
    }
    let locks = clinch::connect(&who.url(url)).await?;
    for task in 0..TASKS {
        let (mutex, progress) = (locks.mutex(&name(task))?, progress.clone());
        tasks.push(tokio::spawn(async move {
            while progress.goes_on() {
                mutex.lock().await?.release().await?;
                progress.add(1);
            }
            Ok(())
        }));
    }
    Ok(tasks)
}

/// How many pairs are done, and whether it is enough.
#[derive(Debug, Default)]
struct Progress {
    pairs: AtomicU64,
    enough: AtomicBool,
}

impl Progress {
    fn goes_on(&self) -> bool {
        !self.enough.load(Ordering::Relaxed)
    }

    fn add(&self, pairs: u64) {
        self.pairs.fetch_add(pairs, Ordering::Relaxed);
    }
}

/// Sees what is done within this time and what it costs, and ends it.
fn watch(progress: &Progress, time: Duration) -> Result<Value> {
    let look = || Ok::<_, Error>((now(), progress.pairs.load(Ordering::Relaxed), cpu_time(), resident()?));
    std::thread::sleep(WARM_UP.min(time));
    let before = look()?;
    std::thread::sleep(time);
    let after = look()?;
    progress.enough.store(true, Ordering::Relaxed);
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let pairs = (after.1 - before.1) as f64;
    if pairs == 0.0 {
        return Err("not one pair was done".into());
    }
    Ok(tell(&[
        (PAIRS, pairs / seconds(after.0 - before.0)),
        (CPU, seconds(after.2 - before.2) / pairs * 10_000.0),
        (GROWTH, (after.3 as f64 - before.3 as f64) / 1024.0),
    ]))
}

/// The floor: each lock is a machine of two states, and answers come in the order of the commands.
fn pipelined(url: &str, progress: &Progress) -> Result<()> {
    let mut raw = Raw::connect(url)?;
    let script = raw.load_release()?;
    let mut locks = Vec::new();
    for lock in 0..TASKS {
        locks.push(Plain::new("raw:throughput/", lock as u64, &script)?);
    }
    let mut batch: Vec<u8> = Vec::new();
    let mut waiting = VecDeque::new();
    for lock in &locks {
        batch.extend_from_slice(&lock.take);
        waiting.push_back((lock, TAKEN));
    }
    while !waiting.is_empty() {
        raw.send(&batch)?;
        batch.clear();
        let mut done = 0;
        // What one read brought. The first answer waits for it.
        while let Some((lock, answer)) = waiting.pop_front() {
            raw.expect(answer)?;
            let next = if answer == TAKEN { (&lock.free, FREED) } else { (&lock.take, TAKEN) };
            done += u64::from(answer == FREED);
            if answer == TAKEN || progress.goes_on() {
                batch.extend_from_slice(next.0);
                waiting.push_back((lock, next.1));
            }
            if !raw.has_more() {
                break;
            }
        }
        progress.add(done);
    }
    Ok(())
}
