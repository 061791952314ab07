//! `redlock-pair`: what a lock on five servers costs when nobody else wants it. A fresh name each time.

use rslock::LockManager;

use super::{QUORUM, SERVERS, SHORT, Servers};
use crate::args::Settings;
use crate::harness::{Case, Sample, interleave};
use crate::machine::{Pinned, now};
use crate::raw_redlock::RawQuorum;
use crate::report::{Limit, Report, Table, Target};
use crate::scenarios::redis::{COMMANDS, LEASE, counted_on};
use crate::stopwatch::{P50, Stopwatch, timed, warm_up};
use crate::worker::runtime;
use crate::{Error, Result};

/// The figures to reach: p50 over that of the floor without tokens, and with tokens, where the servers have to agree on one,
/// over that of three rounds instead of two.
const TARGET_P50: f64 = 1.25;
const ROUNDS_WITH_TOKENS: f64 = 3.0;

/// Pairs per case and round.
const PAIRS: u64 = 10_000;

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    /// The floor: waits for all answers.
    All,
    /// The floor of those who go on when a quorum has answered.
    First,
    Tokens,
    NoTokens,
    Rslock,
}

impl Who {
    const ALL: [Who; 5] = [Who::All, Who::First, Who::NoTokens, Who::Tokens, Who::Rslock];

    const fn name(self) -> &'static str {
        match self {
            Who::All => "raw, all five",
            Who::First => "raw, first three",
            Who::Tokens => "clinch",
            Who::NoTokens => "clinch, fencing=off",
            Who::Rslock => "rslock",
        }
    }

    /// The commands on data that it sends itself. All others come from its scripts.
    const fn direct(self) -> &'static [&'static str] {
        match self {
            Who::All | Who::First | Who::Rslock => &["set"],
            Who::Tokens | Who::NoTokens => &[],
        }
    }
}

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    let free = compare(settings)?;
    let targets = targets(&free);
    let mut report = Report { targets, ..Report::default() };
    for (who, other) in
        [Who::NoTokens, Who::Tokens].into_iter().flat_map(|who| [(who, Who::First), (who, Who::Rslock)])
    {
        let ratio = free.ratio_to(other.name(), who.name(), P50.name).unwrap_or(f64::NAN);
        report.notes.push(format!("{}, p50 × {}, {FREE}: {ratio:.2}.", who.name(), other.name()));
    }
    report.tables.push(free);
    if settings.pin {
        // Also the servers and the library's background thread, which inherit it.
        let _pinned = Pinned::to_one_cpu()?;
        report.tables.push(Table { title: title("all on one CPU"), ..compare(settings)? });
    }
    report.notes.push(
        "A pair of the floor is two rounds of requests. With tokens a third one is needed where the servers do not give the \
         same one: five more commands. On one CPU the servers take turns, so that the work of all five counts, also of \
         those that nobody waits for; the targets are for servers that work at the same time."
            .to_owned(),
    );
    Ok(report)
}

const FREE: &str = "not pinned";

fn title(place: &str) -> String {
    format!("lock and release on {SERVERS} servers, {place}")
}

fn compare(settings: &Settings) -> Result<Table> {
    let servers = Servers::voting()?;
    let pairs = settings.amount(PAIRS, 50);
    let mut cases = Vec::new();
    for who in Who::ALL {
        let (mut pairer, urls) = (Pairer::new(who, &servers)?, &servers.urls);
        cases.push(Case::new(who.name(), move || measure(who, &mut pairer, urls, pairs)));
    }
    let rows = interleave(settings.rounds, cases)?;
    Ok(Table { title: title(FREE), floor: Some((Who::All.name(), P50.name)), rows })
}

fn targets(table: &Table) -> Vec<Target> {
    let target = |what: &str, measured| Target {
        what: format!("redlock-pair: {what}"),
        limit: Limit::AtMost(TARGET_P50),
        measured,
    };
    let with_tokens = table.ratio(Who::Tokens.name()).map(|ratio| ratio * 2.0 / ROUNDS_WITH_TOKENS);
    vec![
        target("fencing=off, p50 × two raw rounds", table.ratio(Who::NoTokens.name())),
        target("p50 × three raw rounds", with_tokens),
    ]
}

fn measure(who: Who, pairer: &mut Pairer, urls: &[String], pairs: u64) -> Result<Sample> {
    warm_up(pairs, |time| pairer.pairs(time))?;
    let (mut sample, calls) = counted_on(urls, || timed(pairs, |time| pairer.pairs(time)))?;
    sample.push((COMMANDS, calls.sent(who.direct()) as f64 / pairs as f64));
    Ok(sample)
}

/// Somebody who locks and releases.
struct Pairer {
    runtime: tokio::runtime::Runtime,
    client: Client,
    /// The number in the next name. Each client starts from a prefix of its own.
    next: u64,
}

enum Client {
    Raw(RawQuorum),
    Clinch(&'static str, clinch::Locks),
    Rslock(LockManager),
}

impl Pairer {
    fn new(who: Who, servers: &Servers) -> Result<Pairer> {
        let runtime = runtime()?;
        let ours = |name, query: &str| {
            let locks = runtime.block_on(clinch::connect(&servers.url(query)))?;
            Ok::<_, Error>(Client::Clinch(name, locks))
        };
        let client = match who {
            Who::All => Client::Raw(RawQuorum::connect(&servers.urls, "raw:all/", SERVERS)?),
            Who::First => Client::Raw(RawQuorum::connect(&servers.urls, "raw:first/", QUORUM)?),
            Who::Tokens => ours("tokens", SHORT)?,
            Who::NoTokens => ours("none", &format!("{SHORT}&fencing=off"))?,
            Who::Rslock => Client::Rslock(LockManager::new(servers.urls.clone())),
        };
        Ok(Pairer { runtime, client, next: 0 })
    }

    /// As many pairs as the stopwatch wants. The name is made within the time, as in programs that need this.
    fn pairs(&mut self, time: &mut Stopwatch) -> Result<()> {
        let Pairer { runtime, client, next } = self;
        let numbers = *next..*next + time.count;
        *next = numbers.end;
        match client {
            Client::Raw(raw) => {
                for number in numbers {
                    let start = now();
                    raw.take(number)?;
                    let taken = now();
                    raw.free()?;
                    time.halves(start, taken)?;
                }
                raw.settle()
            }
            Client::Clinch(name, locks) => runtime.block_on(async {
                for number in numbers {
                    let start = now();
                    let guard = locks.mutex(&format!("{name}/{number:012}"))?.lock().await?;
                    let taken = now();
                    guard.release().await?;
                    time.halves(start, taken)?;
                }
                Ok(())
            }),
            Client::Rslock(manager) => runtime.block_on(async {
                for number in numbers {
                    let start = now();
                    let guard = manager.acquire(format!("rslock:pair/{number:012}").as_str(), LEASE).await;
                    // Its error is none that can be shared between threads.
                    let guard = guard.map_err(|error| Error::from(error.to_string()))?;
                    let taken = now();
                    guard.release().await;
                    time.halves(start, taken)?;
                }
                Ok(())
            }),
        }
    }
}
