//! `redis-held`: what it costs to keep many leases on Redis.
//!
//! Each case is a process of its own with a server of its own.

use std::time::Duration;

use clinch::Guard;
use rslock::LockManager;
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::{Who, counted};
use crate::Result;
use crate::args::Settings;
use crate::harness::{Case, Sample, interleave};
use crate::machine::{nanos, now, resident, sleep_until};
use crate::raw_redis::{OWNER, Raw, TAKEN, encode};
use crate::redis_server;
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::scenarios::held::{bytes, take_leases, watch};
use crate::worker::{Worker, runtime, tell, told};

/// How many leases are kept. The other library keeps only the smaller number: it has no way to keep more cheaply.
const LEASES: [u64; 2] = [10_000, 100_000];

/// How long keeping them is watched.
const SECONDS: u64 = 30;

/// A lease, and how often the floor renews it.
const TTL: Duration = Duration::from_secs(9);
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// How many leases the floor renews with one command.
const BATCH: usize = 256;

/// The script by which the floor renews: a lease whose value is still the owner's.
const RENEW: &str = "local kept = 0 for i = 1, #KEYS do if redis.call('GET', KEYS[i]) == ARGV[1] then \
    kept = kept + redis.call('PEXPIRE', KEYS[i], ARGV[2]) end end return kept";

/// The figures to reach: leases renewed by one command, CPU over rslock's, bytes of memory for a lease.
const TARGET_BATCH: f64 = 50.0;
const TARGET_CPU: f64 = 0.25;
const TARGET_BYTES: f64 = 2048.0;

const COUNT: Metric = Metric::new("leases", "");
const UP: Metric = Metric::new("taken in", "ms");
const RENEWALS: Metric = Metric::new("renewals", "/s");
const PER_COMMAND: Metric = Metric::new("renewed by a command", "leases");
const CPU: Metric = Metric::new("client CPU", "s per 30 s");
const BYTES: Metric = Metric::new("memory per lease", "bytes");
const LOST: Metric = Metric::new("lost", "");
const ALIVE: Metric = Metric::new("keys at the end", "");

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::default();
    for (at, count) in settings.amount(&LEASES[..], &[100]).iter().copied().enumerate() {
        let mut all = vec![Who::Raw, Who::Clinch];
        if at == 0 {
            all.push(Who::Rslock);
        }
        let seconds = settings.amount(SECONDS, 4);
        let case = |who: Who| Case::new(who.name(), move || measure(who, count, seconds));
        // Once: the figures are sums over many seconds already.
        let rows = interleave(1, all.iter().map(|who| case(*who)).collect())?;
        let title = format!("{count} held leases of {TTL:?}, watched for {seconds} s");
        let table = Table { title, floor: Some((Who::Raw.name(), CPU.name)), rows };
        report.targets.extend(targets(&table, count));
        if at == 0 {
            report.targets.push(Target {
                what: format!("{count} leases: client CPU × rslock"),
                limit: Limit::AtMost(TARGET_CPU),
                measured: table.ratio_to(Who::Rslock.name(), Who::Clinch.name(), CPU.name),
            });
        }
        report.tables.push(table);
    }
    report.notes.push(
        "Renewals are leases that the server made longer; commands are the scripts that did it. Memory is what became \
         resident from before the connect, divided by leases; for \"raw\" there is nothing to keep per lease but its name."
            .to_owned(),
    );
    Ok(report)
}

fn targets(table: &Table, count: u64) -> Vec<Target> {
    let ours = Who::Clinch.name();
    let target =
        |what: &str, limit, measured| Target { what: format!("{count} leases: {what}"), limit, measured };
    vec![
        target("renewals per command", Limit::AtLeast(TARGET_BATCH), table.min(ours, PER_COMMAND.name)),
        target("bytes per lease", Limit::AtMost(TARGET_BYTES), table.max(ours, BYTES.name)),
        target("lost", Limit::AtMost(0.0), table.max(ours, LOST.name)),
        target("keys at the end", Limit::AtLeast(count as f64), table.min(ours, ALIVE.name)),
    ]
}

fn measure(who: Who, count: u64, seconds: u64) -> Result<Sample> {
    let server = redis_server::start()?;
    let args = ["redis-held", who.word(), &server.url(), &count.to_string(), &seconds.to_string()];
    let metrics = [COUNT, UP, RENEWALS, PER_COMMAND, CPU, BYTES, LOST, ALIVE];
    told(&Worker::spawn(&args)?.output()?, &metrics)
}

/// The worker: takes leases, watches for some seconds what keeping them costs, and tells.
pub(crate) fn keep(who: &str, url: &str, count: u64, seconds: u64) -> Result<Value> {
    let who = Who::from_word(who)?;
    let time = Duration::from_secs(seconds);
    let (empty, start) = (resident()?, now());
    let mut leases = Leases::take(who, url, count)?;
    let up = now() - start;
    let (cost, calls) = counted(url, || {
        let mut kept = Ok(());
        let cost = watch(|| kept = leases.keep(time));
        kept.map(|()| cost)
    })?;
    // Ours and the floor renew by PEXPIRE, rslock by SET.
    let renewals = calls.of(if who == Who::Rslock { "set" } else { "pexpire" });
    let figures = [
        (COUNT, count as f64),
        (UP, up as f64 / 1e6),
        (RENEWALS, renewals as f64 / time.as_secs_f64()),
        (PER_COMMAND, renewals as f64 / calls.of("evalsha").max(1) as f64),
        (CPU, cost * SECONDS as f64),
        (BYTES, bytes(empty, count)?),
        (LOST, leases.lost() as f64),
        (ALIVE, alive(who, url, count)? as f64),
    ];
    Ok(tell(&figures))
}

/// Leases that are kept.
enum Leases {
    Raw { raw: Raw, script: String, names: Vec<String>, lost: u64 },
    Ours { guards: Vec<Guard>, _runtime: Runtime },
    Rslock { tasks: Vec<JoinHandle<()>>, _runtime: Runtime },
}

impl Leases {
    fn take(who: Who, url: &str, count: u64) -> Result<Leases> {
        match who {
            Who::Raw => Leases::take_raw(url, count),
            Who::Rslock => Leases::take_rslock(url, count),
            Who::Clinch | Who::Lean => {
                let runtime = runtime()?;
                let guards = runtime.block_on(take_leases(&format!("{url}?ttl={TTL:?}"), count))?;
                Ok(Leases::Ours { guards, _runtime: runtime })
            }
        }
    }

    /// The floor: names in an array.
    fn take_raw(url: &str, count: u64) -> Result<Leases> {
        let mut raw = Raw::connect(url)?;
        let script = raw.load(RENEW)?;
        let names: Vec<String> = (0..count).map(raw_name).collect();
        for name in &names {
            raw.exchange(&encode(&["SET", name, OWNER, "NX", "PX", &millis(TTL)]), TAKEN)?;
        }
        Ok(Leases::Raw { raw, script, names, lost: 0 })
    }

    /// rslock keeps a lock for as long as a future runs, and returns early when it could not.
    fn take_rslock(url: &str, count: u64) -> Result<Leases> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let manager = LockManager::new(vec![url.to_owned()]);
        let (taken, mut all_taken) = tokio::sync::mpsc::unbounded_channel();
        let lease = |lease| {
            let (manager, taken) = (manager.clone(), taken.clone());
            runtime.spawn(async move {
                let held = async || {
                    // Fails only when nobody counts any more.
                    let _ = taken.send(());
                    std::future::pending::<()>().await;
                };
                // That it has ended says enough.
                let _ = manager.using(rslock_name(lease).as_bytes(), TTL, held).await;
            })
        };
        let tasks = (0..count).map(lease).collect();
        runtime.block_on(async {
            for _ in 0..count {
                all_taken.recv().await;
            }
        });
        Ok(Leases::Rslock { tasks, _runtime: runtime })
    }

    /// Keeps them for this long.
    fn keep(&mut self, time: Duration) -> Result<()> {
        let Leases::Raw { raw, script, names, lost } = self else {
            std::thread::sleep(time);
            return Ok(());
        };
        // The floor: one script for many of them at a time, spread evenly.
        let (mut next, end) = (now(), now() + nanos(time));
        let step = nanos(RENEW_EVERY) / names.len().div_ceil(BATCH).max(1) as u64;
        for batch in names.chunks(BATCH).cycle() {
            next += step;
            if next >= end {
                break;
            }
            sleep_until(next);
            let (size, ttl) = (batch.len().to_string(), millis(TTL));
            let mut words = vec!["EVALSHA", script, &size];
            words.extend(batch.iter().map(String::as_str));
            words.extend([OWNER, &ttl]);
            let kept = raw.call(&words)?.int()?;
            *lost += (batch.len() as u64).saturating_sub(kept.unsigned_abs());
        }
        sleep_until(end);
        Ok(())
    }

    /// How many their owner knows to be lost.
    fn lost(&self) -> u64 {
        match self {
            Leases::Raw { lost, .. } => *lost,
            Leases::Ours { guards, .. } => guards.iter().filter(|guard| !guard.is_held()).count() as u64,
            Leases::Rslock { tasks, .. } => tasks.iter().filter(|task| task.is_finished()).count() as u64,
        }
    }
}

/// How many keys there are of those that were taken.
fn alive(who: Who, url: &str, count: u64) -> Result<i64> {
    let name = |lease| match who {
        Who::Raw => raw_name(lease),
        Who::Rslock => rslock_name(lease),
        Who::Clinch | Who::Lean => format!("clinch:held/{lease}"),
    };
    let mut raw = Raw::connect(url)?;
    let names: Vec<String> = (0..count).map(name).collect();
    let count = |batch: &[String]| {
        let words: Vec<&str> = ["EXISTS"].into_iter().chain(batch.iter().map(String::as_str)).collect();
        raw.call(&words)?.int()
    };
    names.chunks(1000).map(count).sum()
}

fn raw_name(lease: u64) -> String {
    format!("raw:held/{lease}")
}

fn rslock_name(lease: u64) -> String {
    format!("rslock:held/{lease}")
}

fn millis(time: Duration) -> String {
    time.as_millis().to_string()
}
