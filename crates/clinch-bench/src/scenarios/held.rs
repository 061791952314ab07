//! `held`: what it costs to keep many leases.

use std::path::Path;
use std::time::Duration;

use clinch::Guard;
use rustix::fs::FlockOperation;
use serde_json::{Map, Value, json};

use crate::Result;
use crate::args::Settings;
use crate::contend;
use crate::harness::{Case, Sample, interleave};
use crate::machine::{cpu_time, now, raise_descriptors, resident, thread_cpu_time};
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::worker::{Worker, runtime, url};

/// How many leases are kept, and for how long the keeper is watched.
const LEASES: u64 = 10_000;
const SECONDS: u64 = 20;

/// Descriptors that are needed for other things than leases.
const SPARE: u64 = 64;

/// How often the floor looks at each file: as often as the keeper has to, to notice that somebody removed one.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The figures to reach: CPU of the keeper in per cent of one core, bytes of memory per lease.
const TARGET_CPU: f64 = 1.0;
const TARGET_BYTES: f64 = 2048.0;

/// The name of the thread that the library keeps leases on.
pub(super) const KEEPER: &str = "clinch";

const FLOCK: &str = "flock + fstat every 2 s";
const OURS: [&str; 2] = ["file://", "memory://, TTL 9 s"];

const COUNT: Metric = Metric::new("leases", "");
const UP: Metric = Metric::new("taken in", "ms");
const KEEPER_CPU: Metric = Metric::new("keeper CPU", "% of a core");
const CPU: Metric = Metric::new("CPU of the process", "% of a core");
const BYTES: Metric = Metric::new("memory per lease", "bytes");
const LOST: Metric = Metric::new("lost", "");

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let dir = settings.fresh_dir()?;
    let path = dir.path();
    let case = |name: &'static str, store: &'static str| {
        Case::new(name, move || {
            let dir = path.join(store);
            std::fs::create_dir_all(&dir)?;
            let count = settings.amount(LEASES, 100).to_string();
            let seconds = settings.amount(SECONDS, 0).to_string();
            let worker = Worker::spawn(&["held", store, &dir.to_string_lossy(), &count, &seconds])?;
            sample(&serde_json::from_str(&worker.output()?)?)
        })
    };
    let cases = vec![case(FLOCK, "flock"), case(OURS[0], "file"), case(OURS[1], "memory")];
    // Once: the figures are sums over 20 s already.
    let rows = interleave(1, cases)?;
    let title = format!("held leases, watched for {} s", settings.amount(SECONDS, 0));
    let table = Table { title, floor: None, rows };
    let mut report = Report::default();
    for store in OURS {
        let target = |what: &str, limit, metric: Metric| Target {
            what: format!("{store}: {what}"),
            limit: Limit::AtMost(limit),
            measured: table.max(store, metric.name),
        };
        report.targets.push(target("keeper CPU, % of a core", TARGET_CPU, KEEPER_CPU));
        report.targets.push(target("bytes per lease", TARGET_BYTES, BYTES));
        report.targets.push(target("lost", 0.0, LOST));
    }
    let got = table.min(OURS[0], COUNT.name).unwrap_or(0.0);
    let wanted = settings.amount(LEASES, 100);
    if got < wanted as f64 {
        report.notes.push(format!(
            "Only {got} leases on file://, not {wanted}: each needs a descriptor, and the hard limit (ulimit -Hn) \
             allows no more."
        ));
    }
    report.notes.push(
        "Each row is a process of its own. Memory is what became resident from before the connect, divided by leases."
            .to_owned(),
    );
    report.tables.push(table);
    Ok(report)
}

fn sample(found: &Value) -> Result<Sample> {
    let mut sample = Sample::new();
    for metric in [COUNT, UP, KEEPER_CPU, CPU, BYTES, LOST] {
        // A store without a keeper has no figure for it.
        if let Some(value) = found.get(metric.name).and_then(Value::as_f64) {
            sample.push((metric, value));
        }
    }
    if sample.is_empty() { Err(format!("a worker found nothing: {found}").into()) } else { Ok(sample) }
}

/// The worker: takes leases, watches for some seconds what keeping them costs, and tells.
pub(crate) fn keep(store: &str, dir: &Path, count: u64, seconds: u64) -> Result<Value> {
    let allowed = raise_descriptors().saturating_sub(SPARE);
    let watched = Duration::from_secs(seconds);
    match store {
        "flock" => keep_bare(dir, count.min(allowed), watched),
        "file" => keep_leases(&url(dir), count.min(allowed), watched),
        "memory" => keep_leases("memory://?ttl=9s", count, watched),
        other => Err(format!("no store \"{other}\"").into()),
    }
}

fn keep_leases(url: &str, count: u64, watched: Duration) -> Result<Value> {
    let empty = resident()?;
    let start = now();
    let runtime = runtime()?;
    let guards = runtime.block_on(take_leases(url, count))?;
    let up = now() - start;
    let keeper = thread_cpu_time(KEEPER)?;
    let cost = watch(|| std::thread::sleep(watched));
    let keeper = thread_cpu_time(KEEPER)? - keeper;
    let lost = guards.iter().filter(|guard| !guard.is_held()).count();
    let keeper = keeper / watched.as_secs_f64().max(1e-3) * 100.0;
    let mut all = found(count, up, cost, bytes(empty, count)?);
    all.extend([(LOST.name.to_owned(), json!(lost)), (KEEPER_CPU.name.to_owned(), json!(keeper))]);
    Ok(all.into())
}

/// Takes as many locks as asked for.
pub(super) async fn take_leases(url: &str, count: u64) -> Result<Vec<Guard>> {
    let locks = clinch::connect(url).await?;
    let mut guards = Vec::new();
    for lease in 0..count {
        guards.push(locks.mutex(&format!("held/{lease}"))?.lock().await?);
    }
    Ok(guards)
}

/// The floor: as many files that are open and locked, and one look at each as often as a keeper has to look.
fn keep_bare(dir: &Path, count: u64, watched: Duration) -> Result<Value> {
    let empty = resident()?;
    let start = now();
    let mut files = Vec::new();
    for lease in 0..count {
        let file = contend::open(&dir.join(lease.to_string()))?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
        files.push(file);
    }
    let up = now() - start;
    let cost = watch(|| {
        let end = std::time::Instant::now() + watched;
        while std::time::Instant::now() < end {
            std::thread::sleep(LOOK_EVERY.min(watched));
            // What it says does not matter here.
            files.iter().for_each(|file| _ = rustix::fs::fstat(file));
        }
    });
    Ok(found(count, up, cost, bytes(empty, count)?).into())
}

/// CPU time over wall time of something.
pub(super) fn watch(body: impl FnOnce()) -> f64 {
    let (start, used) = (now(), cpu_time());
    body();
    (cpu_time() - used) as f64 / (now() - start).max(1) as f64
}

pub(super) fn bytes(empty: u64, count: u64) -> Result<f64> {
    Ok(resident()?.saturating_sub(empty) as f64 / count.max(1) as f64)
}

fn found(count: u64, up: u64, cost: f64, bytes: f64) -> Map<String, Value> {
    let all = [
        (COUNT, json!(count)),
        (UP, json!(up as f64 / 1e6)),
        (CPU, json!(cost * 100.0)),
        (BYTES, json!(bytes)),
    ];
    all.into_iter().map(|(metric, value)| (metric.name.to_owned(), value)).collect()
}
