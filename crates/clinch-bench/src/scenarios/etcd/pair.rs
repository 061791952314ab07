//! `etcd-pair`: what a lock on etcd costs when nobody else wants it. A fresh name each time.

use tokio::runtime::Runtime;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::transport::Channel;

use super::REQUESTS;
use crate::args::Settings;
use crate::etcd_server::{self, counted};
use crate::harness::{Case, Sample, interleave};
use crate::machine::{Pinned, cpu_time_of};
use crate::raw_etcd::{Http, Raw};
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::stopwatch::{CPU, P50, Stopwatch, timed, warm_up};
use crate::worker::runtime;
use crate::{Error, Result};

/// The figures to reach: p50 over that of the floor, CPU over that of the channel, requests and rounds of Raft.
const TARGET_P50: f64 = 1.05;
const TARGET_CPU: f64 = 1.0;
/// A lease that is kept alive adds two requests every ten seconds.
const TARGET_REQUESTS: f64 = 2.01;
const TARGET_ROUNDS: f64 = 2.01;

/// Pairs per case and round.
const PAIRS: u64 = 2_000;

/// The lease of the floors, which nobody renews.
const LEASE_SECONDS: i64 = 3600;

const SERVER_CPU: Metric = Metric::new("server CPU", "µs per pair");
const ROUNDS: Metric = Metric::new("Raft rounds", "per pair");

/// Each keeps the client's lease alive, and reads its key. They come with time, not with pairs.
const RENEWALS: Metric = Metric::new("renewals", "requests in all");

const RAW: &str = "raw";
const CHANNEL: &str = "raw on tonic's channel";
const OURS: &str = "clinch";

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    let (free, note) = compare(settings, "not pinned")?;
    let mut report =
        Report { targets: targets(&free), tables: vec![free], notes: vec![note], ..Report::default() };
    if settings.pin {
        // Also the server and the library's background thread, which inherit it.
        let _pinned = Pinned::to_one_cpu()?;
        report.tables.push(compare(settings, "all on one CPU")?.0);
    }
    report.notes.push(
        "On one CPU the client's work counts in full, and the server cannot begin its next round meanwhile; the targets are for \
         a client that is not on the server's CPU. Tonic's channel with its balancer is what the crate etcd-client is built \
         on. That crate does not compile without protoc, so the channel with our messages stands for it: etcd-client adds an \
         interceptor and copies to that."
            .to_owned(),
    );
    Ok(report)
}

/// The comparison on a server of its own, and what is to be known of that.
fn compare(settings: &Settings, place: &str) -> Result<(Table, String)> {
    let server = etcd_server::start()?;
    let url = server.url();
    let pairs = settings.amount(PAIRS, 50);
    let mut cases = Vec::new();
    for name in [RAW, CHANNEL, OURS] {
        let (url, mut pairer) = (&url, Pairer::new(name, &url)?);
        let pid = server.pid();
        cases.push(Case::new(name, move || measure(&mut pairer, url, pid, pairs)));
    }
    let rows = interleave(settings.rounds, cases)?;
    let table = Table { title: format!("lock and release, {place}"), floor: Some((RAW, P50.name)), rows };
    Ok((table, etcd_server::note(&server)))
}

fn targets(table: &Table) -> Vec<Target> {
    let target = |what: &str, limit, measured| Target {
        what: format!("etcd-pair: {what}"),
        limit: Limit::AtMost(limit),
        measured,
    };
    vec![
        target("p50 × raw", TARGET_P50, table.ratio(OURS)),
        target("client CPU × tonic's channel", TARGET_CPU, table.ratio_to(CHANNEL, OURS, CPU.name)),
        target("requests per pair, worst round", TARGET_REQUESTS, table.max(OURS, REQUESTS.name)),
        target("Raft rounds per pair, worst round", TARGET_ROUNDS, table.max(OURS, ROUNDS.name)),
    ]
}

fn measure(pairer: &mut Pairer, url: &str, server: u32, pairs: u64) -> Result<Sample> {
    warm_up(pairs, |time| pairer.pairs(time))?;
    let (mut sample, calls) = counted(url, || {
        let used = cpu_time_of(server)?;
        let mut sample = timed(pairs, |time| pairer.pairs(time))?;
        sample.push((SERVER_CPU, (cpu_time_of(server)? - used) * 1e6 / pairs as f64));
        Ok(sample)
    })?;
    sample.push((REQUESTS, calls.requests() / pairs as f64));
    sample.push((ROUNDS, calls.rounds() / pairs as f64));
    sample.push((RENEWALS, calls.requests_of("LeaseKeepAlive") + calls.requests_of("Range")));
    Ok(sample)
}

/// Somebody who locks and releases.
struct Pairer {
    runtime: Runtime,
    client: Client,
    /// The number in the next name.
    next: u64,
}

enum Client {
    /// With a lease.
    Raw(Raw<Http>, i64),
    Channel(Raw<Channel>, i64),
    Ours(clinch::Locks),
}

impl Pairer {
    fn new(name: &str, url: &str) -> Result<Pairer> {
        let runtime = runtime()?;
        let client = runtime.block_on(async {
            Ok::<_, Error>(match name {
                RAW => {
                    let mut raw = Raw::connect(url).await?;
                    let lease = raw.grant(LEASE_SECONDS).await?;
                    Client::Raw(raw, lease)
                }
                CHANNEL => {
                    let mut raw = Raw::balanced(url).await?;
                    let lease = raw.grant(LEASE_SECONDS).await?;
                    Client::Channel(raw, lease)
                }
                _ => Client::Ours(clinch::connect(url).await?),
            })
        })?;
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
            Client::Raw(raw, lease) => runtime.block_on(raw_pairs(raw, *lease, "raw", number, time)),
            Client::Channel(raw, lease) => runtime.block_on(raw_pairs(raw, *lease, "channel", number, time)),
            Client::Ours(locks) => runtime.block_on(time.each_async(async || {
                let mutex = locks.mutex(&format!("pair/{:012}", number()))?;
                mutex.lock().await?.release().await?;
                Ok(())
            })),
        }
    }
}

async fn raw_pairs<T>(
    raw: &mut Raw<T>,
    lease: i64,
    prefix: &str,
    mut number: impl FnMut() -> u64,
    time: &mut Stopwatch,
) -> Result<()>
where
    T: GrpcService<Body>,
    T::ResponseBody: Send + 'static,
    <T::ResponseBody as hyper::body::Body>::Error: Into<Error>,
{
    time.each_async(async || {
        let key = format!("{prefix}:pair/{:012}", number());
        raw.take(&key, lease).await?;
        raw.free(&key).await
    })
    .await
}
