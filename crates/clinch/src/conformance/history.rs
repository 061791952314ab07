//! Contention on one lock, recorded and judged by the checker.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{Read, Seek, Write};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use clinch_verify::{Call, ClaimRecorder, History, Recorder, Rules, Verdict, check};

use super::Fixture;
use super::client::{Client, PATIENCE, answered, poll_then_drop, runtime, unique, within};
use crate::claim::Mode;
use crate::clock::Clock;
use crate::error::Result;
use crate::guard::{Guard, Released};
use crate::locks::{Locks, Renew};
use crate::sync::lock;

/// How a claim of a workload asks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ask {
    Exclusive,
    Shared,
    Permits(u32, u32),
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ask::Exclusive => f.write_str("exclusive"),
            Ask::Shared => f.write_str("shared"),
            Ask::Permits(n, of) => write!(f, "{n} of {of}"),
        }
    }
}

impl From<Mode> for Ask {
    fn from(mode: Mode) -> Ask {
        match mode {
            Mode::Exclusive => Ask::Exclusive,
            Mode::Shared => Ask::Shared,
            Mode::Permits { count, capacity } => Ask::Permits(count.get(), capacity.get()),
        }
    }
}

impl Ask {
    pub(super) fn mode(self) -> clinch_verify::Mode {
        match self {
            Ask::Exclusive => clinch_verify::Mode::Exclusive,
            Ask::Shared => clinch_verify::Mode::Shared,
            Ask::Permits(n, of) => clinch_verify::Mode::Permits { n: n.into(), of: of.into() },
        }
    }

    pub(super) async fn acquire(self, locks: &Locks, name: &str) -> Result<Guard> {
        match self {
            Ask::Exclusive => locks.mutex(name)?.lock().await,
            Ask::Shared => locks.rwlock(name)?.read().await,
            Ask::Permits(n, of) => locks.semaphore(name, of)?.acquire(n)?.await,
        }
    }

    /// Asks without a pause, and so finds a lock that is free for a moment only. In vain where others have a place.
    async fn pounce(self, locks: &Locks, name: &str) -> Result<Guard> {
        loop {
            let attempt = async || match self {
                Ask::Exclusive => locks.mutex(name)?.try_lock().await,
                Ask::Shared => locks.rwlock(name)?.try_read().await,
                Ask::Permits(n, of) => locks.semaphore(name, of)?.try_acquire(n).await,
            };
            match answered(attempt).await? {
                Some(guard) => return Ok(guard),
                None => tokio::task::yield_now().await,
            }
        }
    }
}

/// A store that refuses writes with older tokens than it has seen.
enum Fenced {
    /// For the clients of one process.
    Memory(Mutex<u64>),
    /// For the clients of several: a file that holds the highest token, with a lock of the kernel around each write.
    File(PathBuf),
}

/// What happened, and the fenced store that it happened to.
pub(super) struct Record {
    pub(super) recorder: Recorder,
    clock: Clock,
    store: Fenced,
}

impl Record {
    /// A record of one process.
    pub(super) fn memory(clock: Clock) -> Record {
        Record { recorder: Recorder::memory(), clock, store: Fenced::Memory(Mutex::new(0)) }
    }

    /// A record that several processes add to, with the fenced store that they share.
    pub(super) fn files(clock: Clock, history: PathBuf, store: PathBuf) -> Record {
        Record { recorder: Recorder::file(history).unwrap(), clock, store: Fenced::File(store) }
    }

    pub(super) fn now(&self) -> u64 {
        self.clock.now().as_nanos()
    }

    /// Offers a write to the fenced store, where grants have a token to show it. Without a claim it is nobody's: one that
    /// comes when it must not, to see what the store does.
    fn write(&self, name: &str, claim: Option<&str>, token: Option<u64>) {
        let Some(token) = token else { return };
        let decide = |highest: u64| {
            let accepted = token >= highest;
            self.recorder.store_write(name, claim, token, accepted, self.now());
            highest.max(token)
        };
        match &self.store {
            Fenced::Memory(highest) => {
                let mut highest = lock(highest);
                *highest = decide(*highest);
            }
            Fenced::File(path) => {
                let mut file = OpenOptions::new()
                    .create(true)
                    .truncate(false)
                    .read(true)
                    .write(true)
                    .open(path)
                    .unwrap();
                file.lock().unwrap();
                let mut text = String::new();
                file.read_to_string(&mut text).unwrap();
                let highest = decide(text.trim().parse().unwrap_or(0));
                file.rewind().unwrap();
                // Tokens never get shorter here, so a cut-off write cannot leave a larger number behind.
                file.write_all(format!("{highest:020}").as_bytes()).unwrap();
            }
        }
    }
}

/// How often and how one client asks.
#[derive(Clone, Copy)]
pub(super) struct Workload<'a> {
    pub(super) name: &'a str,
    pub(super) turns: usize,
    pub(super) ttl: Duration,
    pub(super) asks: &'a [Ask],
    /// Now and then hold without renewals until the lease is lost.
    pub(super) overstay: bool,
}

/// One client's share of the contention: takes and leaves the lock in every way that there is.
pub(super) async fn take_turns(
    record: &Record,
    locks: &Locks,
    process: &str,
    load: Workload<'_>,
    mut told: impl FnMut(usize),
) {
    for turn in 0..load.turns {
        let ask = load.asks[turn % load.asks.len()];
        match turn % 8 {
            2 => give_up(record, locks, process, turn, load, ask).await,
            5 if load.overstay => {
                let locks = locks.clone().renew(Renew::Never);
                hold(record, &locks, process, turn, load, ask, true).await;
            }
            _ => hold(record, locks, process, turn, load, ask, false).await,
        }
        told(turn);
    }
}

/// One hold; `overstay` waits until it is lost.
async fn hold(
    record: &Record,
    locks: &Locks,
    process: &str,
    turn: usize,
    load: Workload<'_>,
    ask: Ask,
    overstay: bool,
) {
    let id = format!("{process}-{turn}");
    let claim = record.recorder.claim(process, load.name, &id, ask.mode()).ttl_ms(ttl_ms(load.ttl));
    let call = claim.acquire(record.now());
    // Where waiters have no place, they ask too seldom to meet a holder whose lock was freed by somebody else.
    let pounces = !locks.capabilities().queue && turn % 8 != 7;
    let granted = async {
        if pounces {
            return ask.pounce(locks, load.name).await;
        }
        // A busy host may hear of a grant when its lease is over.
        answered(async || ask.acquire(locks, load.name).await).await
    };
    let guard = within("a claim under contention is granted", granted).await.unwrap();
    let token = token(locks, &guard);
    call.granted(record.now(), token, guard.deadline().map(|deadline| deadline.as_nanos()));
    if matches!(ask, Ask::Exclusive) {
        record.write(load.name, Some(&id), token);
    }
    tokio::time::sleep(Duration::from_micros(300)).await;
    if overstay {
        within("an unrenewed lease is lost", watch(record, &guard, &claim)).await;
        record.write(load.name, None, token);
    }
    let end = let_go(record, &guard, &claim, overstay);
    if turn % 8 == 3 {
        return drop(guard);
    }
    release(record, guard, end).await;
}

/// Takes a lock for as long as it is wanted, and records that.
pub(super) async fn take(
    record: &Record,
    locks: &Locks,
    process: &str,
    name: &str,
    ask: Ask,
) -> (Guard, ClaimRecorder) {
    let claim = record.recorder.claim(process, name, process, ask.mode());
    // Where nothing else ends a lease, the end of its process does.
    let claim = match locks.capabilities().crash_release {
        true => claim,
        false => claim.ttl_ms(ttl_ms(locks.lease_ttl())),
    };
    let call = claim.acquire(record.now());
    let granted = answered(async || ask.acquire(locks, name).await);
    let guard = within("a claim is granted", granted).await.unwrap();
    call.granted(record.now(), token(locks, &guard), guard.deadline().map(|deadline| deadline.as_nanos()));
    (guard, claim)
}

/// Lets go of what [`take`] took, and records that.
pub(super) async fn leave(record: &Record, guard: Guard, claim: &ClaimRecorder) {
    let end = let_go(record, &guard, claim, false);
    release(record, guard, end).await;
}

/// Releases, and records what came of it.
async fn release(record: &Record, guard: Guard, end: Call) {
    match guard.release().await {
        Ok(Released::Released) => end.ok(record.now()),
        Ok(Released::AlreadyLost(_)) => end.fail(record.now()),
        // Of a short lease a busy host may hear nothing in time.
        Err(error) if error.is_transient() => end.unknown(record.now()),
        Err(error) => panic!("{error}"),
    }
}

/// Waits until the holder is told of its loss, and records between which times that was.
async fn watch(record: &Record, guard: &Guard, claim: &ClaimRecorder) {
    const LOOK: Duration = Duration::from_millis(2);
    // The guard says so from its deadline on, whenever it is asked.
    let mut held = record.now().min(guard.deadline().map_or(u64::MAX, |deadline| deadline.as_nanos()));
    loop {
        let before = record.now();
        if tokio::time::timeout(LOOK, guard.lost()).await.is_ok() {
            return claim.lost_since(held, record.now());
        }
        // The last look, however late it was polled, was not before this.
        held = before;
    }
}

/// Records that a holder lets go. A host that stands still may find that the lease has run out meanwhile, of which the
/// guard tells from its deadline on.
fn let_go(record: &Record, guard: &Guard, claim: &ClaimRecorder, told: bool) -> Call {
    let now = record.now();
    if !told && !guard.is_held() {
        let deadline = guard.deadline().map_or(now, |deadline| deadline.as_nanos());
        claim.lost_since(deadline, now);
    }
    claim.release(now)
}

/// The token of a grant, where tokens mean anything; elsewhere only times tell whether holds overlap.
pub(super) fn token(locks: &Locks, guard: &Guard) -> Option<u64> {
    locks.capabilities().fencing.then(|| guard.token().get())
}

/// Asks, and drops the request after some polls.
async fn give_up(record: &Record, locks: &Locks, process: &str, turn: usize, load: Workload<'_>, ask: Ask) {
    let id = format!("{process}-{turn}");
    let claim = record.recorder.claim(process, load.name, &id, ask.mode()).ttl_ms(ttl_ms(load.ttl));
    let call = claim.acquire(record.now());
    drop(poll_then_drop(ask.acquire(locks, load.name), turn % 3).await);
    call.unknown(record.now());
}

fn ttl_ms(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap()
}

/// Clients on threads of their own, two tasks each, all at one lock; judged when all are done.
pub(super) fn contend(fixture: &dyn Fixture, ttl: Duration, asks: &[Ask], overstay: bool) {
    const CLIENTS: usize = 3;
    // Whoever overstays waits for a whole TTL, so fewer of them do.
    let turns = if overstay { 8 } else { 24 };
    let record = Record::memory(Clock::host());
    let name = unique("contention");
    let load = Workload { name: &name, turns, ttl, asks, overstay };
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let record = &record;
            scope.spawn(move || {
                runtime().block_on(async {
                    let client = Client::new(fixture).await;
                    let locks = client.with_ttl(ttl);
                    let (one, other) = (format!("c{number}a"), format!("c{number}b"));
                    tokio::join!(
                        take_turns(record, &locks, &one, load, |_| ()),
                        take_turns(record, &locks, &other, load, |_| ()),
                    );
                    client.locks.close(PATIENCE).await.unwrap();
                });
            });
        }
    });
    judge(&record.recorder.history(), Rules { lateness: LATENESS, ..Rules::default() });
}

/// How late a thread of a busy host may come to record its loss, in nanoseconds.
const LATENESS: u64 = 2_000_000_000;

/// How long a host whose processor or disk is busy may stand still while a lock is free, in nanoseconds. A ghost with a long TTL lasts longer,
/// and one with a short TTL is gone before either way.
const SLACK: u64 = 15_000_000_000;

/// Panics with what the checker found unless the history is valid.
pub(super) fn judge(history: &History, rules: Rules) {
    let report = check(history, &Rules { slack: SLACK, ..rules });
    let mut text = format!("the history is {}: {:?}", report.verdict, report.counts);
    for violation in report.violations.iter().take(3) {
        text += &format!("\n{}: {}", violation.property, violation.explanation);
        for evidence in &violation.witness {
            text += &format!("\n    {}", serde_json::to_string(&evidence.event).unwrap());
        }
    }
    for doubt in &report.doubts {
        text += &format!("\n{}: unknown: {}", doubt.property, doubt.reason);
    }
    for note in &report.notes {
        text += &format!("\nnote: {note}");
    }
    assert_eq!(report.verdict, Verdict::Valid, "{text}");
}
