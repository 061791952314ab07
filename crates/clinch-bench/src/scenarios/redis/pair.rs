//! `redis-pair`: what a lock on Redis costs when nobody else wants it. A fresh name each time.

use rslock::LockManager;

use super::{COMMANDS, Who, counted, rslock_pair};
use crate::Result;
use crate::args::Settings;
use crate::harness::{Case, Sample, interleave};
use crate::machine::Pinned;
use crate::raw_redis::{FREED, Plain, Raw, TAKEN};
use crate::redis_server::{self, monitored};
use crate::report::{Limit, Report, Table, Target};
use crate::stopwatch::{P50, P99, Stopwatch, timed, warm_up};
use crate::worker::runtime;

/// The figures to reach: p50 and p99 over those of the floor, and commands that are sent.
const TARGET_P50: f64 = 1.3;
const TARGET_P99: f64 = 1.4;
const TARGET_COMMANDS: f64 = 2.0;

/// Pairs per case and round.
const PAIRS: u64 = 10_000;

/// Pairs that are watched by MONITOR, once, before the rounds.
const WATCHED: u64 = 100;

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    // Also for the server and for the library's background thread, which inherit it.
    let _pinned = if settings.pin { Some(Pinned::to_one_cpu()?) } else { None };
    let server = redis_server::start()?;
    let url = server.url();
    let pairs = settings.amount(PAIRS, 50);

    let mut pairers = Vec::new();
    for who in Who::ALL {
        pairers.push((who, Pairer::new(who, &url)?));
    }
    let mut notes = Vec::new();
    for (who, pairer) in &mut pairers {
        warm_up(WATCHED, |time| pairer.pairs(time))?;
        let sent = monitored(&url, || warm_up(WATCHED, |time| pairer.pairs(time)))?;
        let sent: Vec<String> = sent.iter().map(|(command, count)| format!("{count} {command}")).collect();
        notes.push(format!("MONITOR saw {} send {} for {WATCHED} pairs.", who.name(), sent.join(", ")));
    }
    let case = |(who, mut pairer): (Who, Pairer)| {
        let url = &url;
        Case::new(who.name(), move || measure(who, &mut pairer, url, pairs))
    };
    let rows = interleave(settings.rounds, pairers.into_iter().map(case).collect())?;
    let title =
        if settings.pin { "lock and release, all on one CPU" } else { "lock and release, not pinned" };
    let table = Table { title: title.to_owned(), floor: Some((Who::Raw.name(), P50.name)), rows };
    Ok(Report { targets: targets(&table), tables: vec![table], notes, ..Report::default() })
}

fn targets(table: &Table) -> Vec<Target> {
    let ours = Who::Clinch.name();
    let ratio = |metric: &str| table.ratio_to(Who::Raw.name(), ours, metric);
    let target = |what: &str, limit, measured| Target {
        what: format!("redis-pair: {what}"),
        limit: Limit::AtMost(limit),
        measured,
    };
    vec![
        target("p50 × raw", TARGET_P50, ratio(P50.name)),
        target("p99 × raw", TARGET_P99, ratio(P99.name)),
        target("commands per pair, worst round", TARGET_COMMANDS, table.max(ours, COMMANDS.name)),
    ]
}

fn measure(who: Who, pairer: &mut Pairer, url: &str, pairs: u64) -> Result<Sample> {
    warm_up(pairs, |time| pairer.pairs(time))?;
    let (mut sample, calls) = counted(url, || timed(pairs, |time| pairer.pairs(time)))?;
    sample.push((COMMANDS, calls.sent(who.direct()) as f64 / pairs as f64));
    Ok(sample)
}

/// Somebody who locks and releases.
struct Pairer {
    runtime: tokio::runtime::Runtime,
    client: Client,
    /// The number in the next name. All that use a server start from their own prefix.
    next: u64,
}

enum Client {
    Raw(Raw, Plain),
    Clinch(&'static str, clinch::Locks),
    Rslock(LockManager),
}

impl Pairer {
    fn new(who: Who, url: &str) -> Result<Pairer> {
        let runtime = runtime()?;
        let client = match who {
            Who::Raw => {
                let mut raw = Raw::connect(url)?;
                let script = raw.load_release()?;
                Client::Raw(raw, Plain::new("raw:pair/", 0, &script)?)
            }
            Who::Clinch | Who::Lean => {
                Client::Clinch(who.word(), runtime.block_on(clinch::connect(&who.url(url)))?)
            }
            Who::Rslock => Client::Rslock(LockManager::new(vec![url.to_owned()])),
        };
        Ok(Pairer { runtime, client, next: 0 })
    }

    /// As many pairs as the stopwatch wants. The name is made within the time, as in programs that need this.
    fn pairs(&mut self, time: &mut Stopwatch) -> Result<()> {
        let Pairer { runtime, client, next } = self;
        let mut number = || {
            *next += 1;
            *next
        };
        match client {
            Client::Raw(raw, plain) => time.each(|| {
                plain.renumber(number());
                raw.exchange(&plain.take, TAKEN)?;
                raw.exchange(&plain.free, FREED)
            }),
            Client::Clinch(word, locks) => runtime.block_on(time.each_async(async || {
                let mutex = locks.mutex(&format!("{word}/{:012}", number()))?;
                mutex.lock().await?.release().await?;
                Ok(())
            })),
            Client::Rslock(manager) => {
                runtime.block_on(time.each_async(async || {
                    rslock_pair(manager, &format!("rslock:pair/{:012}", number())).await
                }))
            }
        }
    }
}
