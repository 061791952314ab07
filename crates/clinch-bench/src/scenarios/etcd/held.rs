//! `etcd-held`: what it costs to keep many leases on etcd.
//!
//! Each case is a process of its own with a server of its own.

use std::time::Duration;

use clinch::Guard;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::Result;
use crate::args::Settings;
use crate::etcd_server::{self, counted};
use crate::harness::{Case, Sample, interleave};
use crate::machine::{nanos, now, resident, sleep_until, thread_cpu_time};
use crate::raw_etcd::{Http, Raw};
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::scenarios::held::{KEEPER, bytes, take_leases, watch};
use crate::worker::{Worker, runtime, tell, told};

/// How many leases are kept, and how long keeping them is watched.
const LEASES: u64 = 10_000;
const SECONDS: u64 = 30;

/// A lease, and how often the floor renews it.
const TTL: Duration = Duration::from_secs(9);
const THIRD: Duration = Duration::from_secs(3);

/// The figures to reach: keepalives for all leases together (one each time, which is up to a tenth earlier than due),
/// CPU of the keeper in per cent of a core, bytes for a lease.
const TARGET_KEEPALIVES: f64 = 1.2;
const TARGET_CPU: f64 = 1.0;
const TARGET_BYTES: f64 = 2048.0;

const RAW: &str = "raw";
const OURS: &str = "clinch";

const COUNT: Metric = Metric::new("leases", "");
const UP: Metric = Metric::new("taken in", "ms");
const KEEPALIVES: Metric = Metric::new("keepalives", "per third of the TTL");
const REQUESTS: Metric = Metric::new("requests", "per third of the TTL");
const KEEPER_CPU: Metric = Metric::new("keeper CPU", "% of a core");
const CPU: Metric = Metric::new("CPU of the process", "% of a core");
const BYTES: Metric = Metric::new("memory per lease", "bytes");
const LOST: Metric = Metric::new("lost", "");
const ALIVE: Metric = Metric::new("keys at the end", "");

const METRICS: [Metric; 9] = [COUNT, UP, KEEPALIVES, REQUESTS, KEEPER_CPU, CPU, BYTES, LOST, ALIVE];

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    let (count, seconds) = settings.amount((LEASES, SECONDS), (100, 4));
    let case = |who: &'static str| Case::new(who, move || measure(who, count, seconds));
    // Once: the figures are sums over many seconds already.
    let rows = interleave(1, vec![case(RAW), case(OURS)])?;
    let title = format!("{count} held leases of {TTL:?}, watched for {seconds} s");
    let table = Table { title, floor: None, rows };
    let notes = vec![
        "\"raw\" are keys on one lease, with one keepalive for each third of its time. Requests are all that were sent \
         while leases were only kept. Memory is what became resident from before the connect, divided by leases."
            .to_owned(),
    ];
    Ok(Report { targets: targets(&table, count), tables: vec![table], notes, ..Report::default() })
}

fn targets(table: &Table, count: u64) -> Vec<Target> {
    let target =
        |what: &str, limit, measured| Target { what: format!("{count} leases: {what}"), limit, measured };
    let most = |what, limit, metric: Metric| target(what, Limit::AtMost(limit), table.max(OURS, metric.name));
    vec![
        most("keepalives per third of the TTL", TARGET_KEEPALIVES, KEEPALIVES),
        most("keeper CPU, % of a core", TARGET_CPU, KEEPER_CPU),
        most("bytes per lease", TARGET_BYTES, BYTES),
        most("lost", 0.0, LOST),
        target("keys at the end", Limit::AtLeast(count as f64), table.min(OURS, ALIVE.name)),
    ]
}

fn measure(who: &str, count: u64, seconds: u64) -> Result<Sample> {
    let server = etcd_server::start()?;
    let args = ["etcd-held", who, &server.url(), &count.to_string(), &seconds.to_string()];
    told(&Worker::spawn(&args)?.output()?, &METRICS)
}

/// The worker: takes leases, watches for some seconds what keeping them costs, and tells.
pub(crate) fn keep(who: &str, url: &str, count: u64, seconds: u64) -> Result<Value> {
    let time = Duration::from_secs(seconds);
    let (empty, start) = (resident()?, now());
    let runtime = runtime()?;
    let mut leases = Leases::take(who, &runtime, url, count)?;
    let up = now() - start;
    let keeper = thread_cpu_time(KEEPER)?;
    let (cost, calls) = counted(url, || {
        let mut kept = Ok(());
        let cost = watch(|| kept = leases.keep(&runtime, time));
        kept.map(|()| cost)
    })?;
    let keeper = thread_cpu_time(KEEPER)? - keeper;
    let thirds = time.as_secs_f64() / THIRD.as_secs_f64();
    Ok(tell(&[
        (COUNT, count as f64),
        (UP, up as f64 / 1e6),
        (KEEPALIVES, calls.of("LeaseKeepAlive") / thirds),
        (REQUESTS, calls.requests() / thirds),
        (KEEPER_CPU, keeper / time.as_secs_f64() * 100.0),
        (CPU, cost * 100.0),
        (BYTES, bytes(empty, count)?),
        (LOST, leases.lost() as f64),
        (ALIVE, alive(who, &runtime, url)? as f64),
    ]))
}

/// Leases that are kept.
enum Leases {
    Raw { raw: Raw<Http>, lease: i64, lost: u64 },
    Ours(Vec<Guard>),
}

impl Leases {
    fn take(who: &str, runtime: &Runtime, url: &str, count: u64) -> Result<Leases> {
        runtime.block_on(async {
            if who == OURS {
                return Ok(Leases::Ours(take_leases(&format!("{url}?ttl={TTL:?}"), count).await?));
            }
            let mut raw = Raw::connect(url).await?;
            let lease = raw.grant(TTL.as_secs().try_into()?).await?;
            let mut renewed = now();
            for key in 0..count {
                if now() > renewed + nanos(THIRD) {
                    (renewed, _) = (now(), raw.keep_alive(lease).await?);
                }
                raw.take(&format!("{}{key}", prefix(who)), lease).await?;
            }
            Ok(Leases::Raw { raw, lease, lost: 0 })
        })
    }

    /// Keeps them for this long.
    fn keep(&mut self, runtime: &Runtime, time: Duration) -> Result<()> {
        let end = now() + nanos(time);
        if let Leases::Raw { raw, lease, lost } = self {
            while now() < end {
                let next = (now() + nanos(THIRD)).min(end);
                *lost += u64::from(runtime.block_on(raw.keep_alive(*lease))? <= 0);
                sleep_until(next);
            }
        }
        sleep_until(end);
        Ok(())
    }

    /// How many their owner knows to be lost.
    fn lost(&self) -> u64 {
        match self {
            Leases::Raw { lost, .. } => *lost,
            Leases::Ours(guards) => guards.iter().filter(|guard| !guard.is_held()).count() as u64,
        }
    }
}

/// How many keys there are of those that were taken.
fn alive(who: &str, runtime: &Runtime, url: &str) -> Result<i64> {
    runtime.block_on(async { Raw::connect(url).await?.count(prefix(who)).await })
}

/// What the keys of these leases begin with.
fn prefix(who: &str) -> &'static str {
    if who == OURS { "/clinch/held" } else { "raw:held/" }
}
