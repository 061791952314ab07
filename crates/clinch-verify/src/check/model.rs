//! The history seen as claims: what each asked for, when it held, and how that ended.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::event::{Event, Kind, Mode, Op};

/// Faults of a history that are noted; the first already settle that it cannot be called valid.
const FAULTS_SHOWN: usize = 100;

/// An event with its place in the history.
#[derive(Debug, Clone, Copy)]
pub(super) struct At<'h> {
    pub(super) index: usize,
    pub(super) event: &'h Event,
}

impl At<'_> {
    /// Events are ordered by time; of those at one instant, the one recorded first comes first.
    pub(super) fn order(&self) -> (u64, usize) {
        (self.event.time, self.index)
    }

    pub(super) fn earliest(&self) -> u64 {
        self.event.earliest()
    }

    pub(super) fn latest(&self) -> u64 {
        self.event.latest()
    }

    /// Whether this surely happened before the other.
    pub(super) fn precedes(&self, other: &At<'_>) -> bool {
        self.latest() < other.earliest()
    }
}

/// All that is known of a history, ordered by time.
#[derive(Default)]
pub(super) struct Model<'h> {
    pub(super) locks: BTreeMap<&'h str, Lock<'h>>,
    /// The last event that each process recorded itself.
    pub(super) last_of: HashMap<&'h str, At<'h>>,
    /// The last event of all.
    pub(super) last: Option<At<'h>>,
    /// Why the history cannot be called valid even when nothing is violated.
    pub(super) faults: Vec<String>,
}

/// What happened to one lock.
#[derive(Default)]
pub(super) struct Lock<'h> {
    /// By process and id; more than one where an id was used again.
    claims: HashMap<(&'h str, &'h str), Vec<Claim<'h>>>,
    /// The decisions of its fenced store, by time.
    pub(super) writes: Vec<At<'h>>,
}

/// One claim of one process. The process is part of the key, so that a process that adopts another's claim is seen
/// as a second holder.
pub(super) struct Claim<'h> {
    pub(super) process: &'h str,
    pub(super) id: &'h str,
    first: At<'h>,
    last: At<'h>,
    pub(super) enqueue: Option<At<'h>>,
    pub(super) enqueued: Option<At<'h>>,
    pub(super) acquire: Option<At<'h>>,
    pub(super) granted: Option<At<'h>>,
    /// The same call's further reports of the grant.
    pub(super) regranted: Vec<At<'h>>,
    pub(super) failed: Option<At<'h>>,
    /// The call to be queued failed; the claim may still be granted without a queue.
    pub(super) unqueued: Option<At<'h>>,
    pub(super) unknown: Option<At<'h>>,
    /// The calls that asked for a renewal, and the successful answers.
    renewals: Vec<At<'h>>,
    pub(super) renewed: Vec<At<'h>>,
    pub(super) downgrade: Option<At<'h>>,
    pub(super) downgraded: Option<At<'h>>,
    pub(super) releases: Vec<Release<'h>>,
    pub(super) lost: Option<At<'h>>,
    pub(super) crash: Option<At<'h>>,
    /// The event with which its id was used again.
    again: Option<At<'h>>,
    /// The last event of its process before the crash: where the crash does not say when it came at the earliest, the
    /// last sign of life.
    pub(super) sign: Option<At<'h>>,
    /// The longest time to live that it asked for.
    ttl_ms: u64,
}

/// One release call.
pub(super) struct Release<'h> {
    id: Option<u64>,
    /// The invocation, or the outcome where no invocation was recorded.
    pub(super) begun: At<'h>,
    pub(super) ended: Option<At<'h>>,
}

impl Release<'_> {
    /// Whether it was answered in this way.
    pub(super) fn is_answered(&self, kind: Kind) -> bool {
        self.ended.is_some_and(|ended| ended.event.kind == kind)
    }

    /// For how many nanoseconds after it the lock stays closed.
    pub(super) fn linger(&self) -> u64 {
        self.begun.event.linger_ms.unwrap_or(0).saturating_mul(1_000_000)
    }
}

impl<'h> Model<'h> {
    pub(super) fn of(events: &'h [Event]) -> Self {
        let mut order: Vec<At<'h>> =
            events.iter().enumerate().map(|(index, event)| At { index, event }).collect();
        order.sort_by_key(At::order);
        let mut model = Model { last: order.last().copied(), ..Model::default() };
        let mut crashes: HashMap<&str, Vec<At<'h>>> = HashMap::new();
        for at in order {
            if let Some(problem) = at.event.problem() {
                model.fault(format!("event {} cannot be judged: {problem}", at.index));
                continue;
            }
            match (at.event.kind, &at.event.process) {
                (Kind::Crash, Some(process)) => crashes.entry(process).or_default().push(at),
                (Kind::Store, _) => model.lock(at).writes.push(at),
                (Kind::Note, _) => {}
                _ => model.absorb(at),
            }
        }
        model.judge_crashes(&crashes);
        for claim in model.locks.values_mut().flat_map(|lock| lock.claims.values_mut()).flatten() {
            let times = crashes.get(claim.process).map_or(&[][..], Vec::as_slice);
            // A claim that goes on was not ended by the crash, whatever was recorded.
            let ends = |crash: &&At<'h>| crash.order() > claim.first.order() && !crash.precedes(&claim.last);
            claim.crash = times.iter().find(ends).copied();
            claim.sign = model.last_of.get(claim.process).copied();
        }
        model
    }

    pub(super) fn grants(&self) -> u64 {
        self.locks.values().map(|lock| lock.grants().count() as u64).sum()
    }

    /// Nobody does anything after being killed: if a process seems to, its name was used again or times are wrong.
    fn judge_crashes(&mut self, crashes: &HashMap<&str, Vec<At<'h>>>) {
        let first = crashes.iter().filter_map(|(process, times)| Some((*process, times.first()?)));
        let mut risen: Vec<_> = first
            .filter_map(|(process, crash)| {
                let last = self.last_of.get(process).filter(|last| crash.precedes(last))?;
                Some(format!(
                    "event {} of {process} comes after it was killed (event {})",
                    last.index, crash.index
                ))
            })
            .collect();
        risen.sort();
        risen.into_iter().for_each(|fault| self.fault(fault));
    }

    fn fault(&mut self, fault: String) {
        if self.faults.len() < FAULTS_SHOWN {
            self.faults.push(fault);
        }
    }

    fn lock(&mut self, at: At<'h>) -> &mut Lock<'h> {
        self.locks.entry(at.event.lock.as_deref().unwrap_or_default()).or_default()
    }

    fn absorb(&mut self, at: At<'h>) {
        let process = at.event.process.as_deref().unwrap_or_default();
        self.last_of.insert(process, at);
        let Some(id) = at.event.claim.as_deref() else { return };
        let claims = self.lock(at).claims.entry((process, id)).or_default();
        match claims.last_mut() {
            Some(claim) if !claim.is_over_for(&at) => claim.absorb(at),
            before => {
                let again = before.is_some();
                if let Some(before) = before {
                    before.again = Some(at);
                }
                let mut claim = Claim::new(process, id, at);
                claim.absorb(at);
                claims.push(claim);
                if again {
                    self.fault(format!(
                        "claim {id} of {process} was granted and is asked for again (event {}); a claim's id is never \
                         used for a second attempt",
                        at.index
                    ));
                }
            }
        }
    }
}

impl<'h> Lock<'h> {
    /// The claims, in the order in which they first appeared.
    pub(super) fn claims(&self) -> Vec<&Claim<'h>> {
        let mut claims: Vec<_> = self.claims.values().flatten().collect();
        claims.sort_by_key(|claim| claim.first.order());
        claims
    }

    fn grants(&self) -> impl Iterator<Item = &Claim<'h>> {
        self.claims.values().flatten().filter(|claim| claim.granted.is_some())
    }
}

impl<'h> Claim<'h> {
    fn new(process: &'h str, id: &'h str, first: At<'h>) -> Self {
        Claim {
            process,
            id,
            first,
            last: first,
            enqueue: None,
            enqueued: None,
            acquire: None,
            granted: None,
            regranted: Vec::new(),
            failed: None,
            unqueued: None,
            unknown: None,
            renewals: Vec::new(),
            renewed: Vec::new(),
            downgrade: None,
            downgraded: None,
            releases: Vec::new(),
            lost: None,
            crash: None,
            again: None,
            sign: None,
            ttl_ms: 0,
        }
    }

    /// Whether an event asks for a granted claim once more, or reports another grant than the one that was asked for.
    fn is_over_for(&self, at: &At<'_>) -> bool {
        let asks = matches!(
            (at.event.kind, at.event.op),
            (Kind::Invoke, Some(Op::Acquire | Op::Enqueue)) | (Kind::Ok, Some(Op::Acquire))
        );
        asks && self.granted.is_some_and(|granted| granted.event.id != at.event.id)
    }

    /// Takes in the next event by time; of repeated ones the first counts.
    fn absorb(&mut self, at: At<'h>) {
        self.last = at;
        self.ttl_ms = self.ttl_ms.max(at.event.ttl_ms.unwrap_or(0));
        let slot = match (at.event.kind, at.event.op) {
            (Kind::Lost, _) => &mut self.lost,
            (Kind::Invoke, Some(Op::Acquire)) => &mut self.acquire,
            (Kind::Invoke, Some(Op::Enqueue)) => &mut self.enqueue,
            (Kind::Invoke, Some(Op::Downgrade)) => &mut self.downgrade,
            (Kind::Ok | Kind::Fail, Some(Op::Downgrade)) => &mut self.downgraded,
            (Kind::Ok, Some(Op::Enqueue)) => &mut self.enqueued,
            (Kind::Fail, Some(Op::Acquire)) => &mut self.failed,
            (Kind::Fail, Some(Op::Enqueue)) => &mut self.unqueued,
            (Kind::Unknown, Some(Op::Acquire | Op::Enqueue)) => &mut self.unknown,
            (Kind::Ok, Some(Op::Acquire)) if self.granted.is_some() => return self.regranted.push(at),
            (Kind::Ok, Some(Op::Acquire)) => &mut self.granted,
            (Kind::Invoke, Some(Op::Renew)) => return self.renewals.push(at),
            (Kind::Ok, Some(Op::Renew)) => return self.renewed.push(at),
            (kind, Some(Op::Release)) => return self.release(kind, at),
            _ => return,
        };
        slot.get_or_insert(at);
    }

    fn release(&mut self, kind: Kind, at: At<'h>) {
        let ended = (kind != Kind::Invoke).then_some(at);
        match self.releases.iter_mut().find(|release| release.id == at.event.id) {
            Some(release) => release.ended = release.ended.or(ended),
            None => self.releases.push(Release { id: at.event.id, begun: at, ended }),
        }
    }

    /// The mode that was asked for, which is what the holder goes by.
    pub(super) fn mode(&self) -> Mode {
        let asked = [self.acquire, self.granted, self.enqueue];
        asked.iter().flatten().find_map(|at| at.event.mode).unwrap_or(Mode::Exclusive)
    }

    pub(super) fn token(&self) -> Option<u64> {
        self.granted.and_then(|granted| granted.event.token)
    }

    /// The first time that it asked for anything.
    pub(super) fn asked(&self) -> Option<At<'h>> {
        [self.acquire, self.enqueue].into_iter().flatten().min_by_key(At::order)
    }

    /// The call that a renewal answers.
    pub(super) fn call_of(&self, renewed: &At<'_>) -> Option<At<'h>> {
        self.renewals.iter().find(|call| call.event.id == renewed.event.id).copied()
    }

    /// The time to live in nanoseconds; 0 for a claim that ends with its process.
    pub(super) fn ttl(&self) -> u64 {
        self.ttl_ms.saturating_mul(1_000_000)
    }

    /// The first event that ended the hold by the holder's own doing: letting go, being told, being killed, or
    /// asking anew.
    pub(super) fn ended(&self) -> Option<At<'h>> {
        let release = self.releases.first().map(|release| release.begun);
        [release, self.lost, self.crash, self.again].into_iter().flatten().min_by_key(At::order)
    }
}

/// `claim 9f3a of c1 (exclusive, token 41)`: how explanations name a claim.
impl fmt::Display for Claim<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "claim {} of {} (", self.id, self.process)?;
        match self.mode() {
            Mode::Exclusive => f.write_str("exclusive")?,
            Mode::Shared => f.write_str("shared")?,
            Mode::Permits { n, of } => write!(f, "{n} of {of} permits")?,
        }
        if let Some(token) = self.token() {
            write!(f, ", token {token}")?;
        }
        f.write_str(")")
    }
}

/// A length of time for people: `3.250 ms`.
pub(super) fn span(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{}.{:03} µs", ns / 1_000, ns % 1_000),
        1_000_000..1_000_000_000 => format!("{}.{:03} ms", ns / 1_000_000, ns / 1_000 % 1_000),
        _ => format!("{}.{:03} s", ns / 1_000_000_000, ns / 1_000_000 % 1_000),
    }
}
