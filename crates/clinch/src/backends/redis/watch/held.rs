//! What is known of the locks that are held: which are watched, which are to be read, and which were not found.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::Notify;

use crate::claim::{Claim, ClaimId, Mode};
use crate::clock::Instant;
use crate::name::LockName;
use crate::sync::lock;

/// How long a lock is held before it is watched.
const YOUNG: Duration = Duration::from_millis(500);

/// For how long changes are gathered: the server tells of each key by itself, also where one command has renewed many.
const GATHER: Duration = Duration::from_millis(5);

/// How soon it is tried again where a server did not answer.
pub(super) const AGAIN: Duration = Duration::from_secs(1);

/// How long a server that could not tell is left alone.
pub(super) const PAUSE: Duration = Duration::from_secs(5);

/// When to read what may have changed.
const AT_ONCE: Instant = Instant::from_nanos(0);

/// Keys per command; as many as a batch of renewals has at most.
pub(super) const BATCH: usize = 256;

/// A claim and its lock.
pub(in super::super) type Watch = (ClaimId, LockName);

/// The exclusive locks that this client holds.
#[derive(Default)]
pub(in super::super) struct Held {
    state: Mutex<State>,
    /// Something is to be looked at earlier than was known, or is gone.
    pub(super) news: Notify,
}

#[derive(Default)]
struct State {
    /// What was granted lately, and when it is old enough to be watched; by the lock, which is here or among the leases. Most are released
    /// before that.
    young: HashMap<LockName, (ClaimId, Instant)>,
    /// When the first of these may be old enough.
    grown: Option<Instant>,
    /// What is older, by the lock, for the server tells of locks.
    leases: HashMap<LockName, Lease>,
    /// Those that are to be read, by when. So no step looks through all.
    due: BTreeSet<(Instant, LockName)>,
    /// How many are watched.
    watched: usize,
    /// Claims whose lock was granted to another of ours. Most likely they are gone, but their holders may not know it yet, and the later grant
    /// may be the older one. To be read from then on; `None`: about to be.
    displaced: BTreeMap<Watch, Option<Instant>>,
    /// Claims that are gone, of which the holders are to be told.
    gone: Vec<ClaimId>,
    /// When to look for leases that are not watched; `None`: when there is one again.
    next: Option<Instant>,
    looking: bool,
}

struct Lease {
    id: ClaimId,
    sight: Sight,
}

#[derive(Clone, Copy)]
enum Sight {
    /// To be read from then on.
    Due(Instant),
    /// About to be read, or not found and asked for.
    Looked,
    /// Read on this inbox, and not changed since; `sure` once the answer has come.
    Watched { inbox: u64, sure: bool },
}

impl Sight {
    fn look(&self) -> &Sight {
        #[cfg(test)]
        tests::LOOKED.set(tests::LOOKED.get() + 1);
        self
    }
}

impl Held {
    /// Notes that a claim was granted. Another of ours that had the lock before is gone, though its holder may not know it yet.
    pub(in super::super) fn hold(&self, claim: &Claim, now: Instant) {
        if claim.mode != Mode::Exclusive {
            return;
        }
        let at = now + YOUNG;
        let mut state = lock(&self.state);
        if !state.displaced.is_empty() {
            state.displaced.remove(&(claim.id, claim.name.clone()));
        }
        let at = if state.put(claim.id, &claim.name, at, AT_ONCE) { AT_ONCE } else { at };
        if state.arm(at) {
            self.news.notify_one();
        }
    }

    /// Notes that a claim is released, or no longer the sole holder's.
    pub(in super::super) fn let_go(&self, id: ClaimId, name: &LockName) {
        lock(&self.state).remove(id, name);
    }

    /// Whether nothing is watched.
    pub(in super::super) fn is_idle(&self) -> bool {
        lock(&self.state).watched == 0
    }

    /// The server told of this lock.
    pub(in super::super) fn changed(&self, name: &str, now: Instant) {
        let mut state = lock(&self.state);
        let Some((name, Lease { id, sight: Sight::Watched { .. } })) = state.leases.get_key_value(name)
        else {
            return;
        };
        let (id, name) = (*id, name.clone());
        state.set(id, &name, Sight::Due(now + GATHER));
        if state.arm(now + GATHER) {
            self.news.notify_one();
        }
    }

    /// The database was emptied. What is about to be read or asked for is so later than that.
    pub(in super::super) fn all_changed(&self) {
        let mut state = lock(&self.state);
        state.look_again(|sight| !matches!(sight, Sight::Looked));
        if !state.young.is_empty() {
            state.young.values_mut().for_each(|(_, at)| *at = AT_ONCE);
            (state.grown, state.next) = (Some(AT_ONCE), Some(AT_ONCE));
        }
        self.news.notify_one();
    }

    /// This inbox tells nothing any more.
    pub(in super::super) fn closed(&self, gone: u64) {
        lock(&self.state).look_again(|sight| matches!(sight, Sight::Watched { inbox, .. } if *inbox == gone));
        self.news.notify_one();
    }

    /// What is to be read at this moment, by whoever gets it; nothing while somebody is at it.
    pub(super) fn begin(&self, now: Instant) -> Option<Vec<Watch>> {
        let mut state = lock(&self.state);
        if state.looking || state.next.is_none_or(|next| next > now) {
            return None;
        }
        // What is due soon comes along.
        let soon = now + YOUNG / 4;
        let mut due = state.take_grown(soon);
        while let Some(watch) = state.take_due(soon) {
            due.push(watch);
        }
        for (watch, at) in &mut state.displaced {
            if at.take_if(|at| *at <= soon).is_some() {
                due.push(watch.clone());
            }
        }
        state.looking = !due.is_empty();
        state.next = state.earliest();
        state.looking.then_some(due)
    }

    /// Notes that these are read on an inbox from now on: what it tells from here on counts.
    pub(super) fn reading(&self, watches: &[Watch], inbox: u64) {
        let mut state = lock(&self.state);
        for (id, name) in watches {
            state.set(*id, name, Sight::Watched { inbox, sure: false });
        }
    }

    /// A read that comes with the renewal of locks that are watched. It says nothing of those that are still held: that they are watched
    /// is known, and a change that was told meanwhile stays. What was not [read](Unanswered::read), since the renewal was given up, is
    /// read at once: the server may have forgotten whom to tell.
    pub(super) fn renewing<'a>(&'a self, claims: &'a [&'a Claim]) -> Unanswered<'a> {
        Unanswered { claims, held: self }
    }

    /// The inbox that is known to tell of the first of these claims of which one does. A renewal there reads the others as well, which does
    /// no harm, so that the rest need not be looked for.
    pub(super) fn watched_on(&self, claims: &[&Claim]) -> Option<u64> {
        let state = lock(&self.state);
        claims.iter().find_map(|claim| match state.leases.get(&claim.name)? {
            Lease { id, sight: Sight::Watched { inbox, sure: true } } if *id == claim.id => Some(*inbox),
            _ => None,
        })
    }

    /// Notes which of those that were read on an inbox were still held; what was told meanwhile stays. Says which are to be asked for: those
    /// that were not found, and those of whose locks it is not known which claim was granted last.
    pub(super) fn read(&self, watches: &[Watch], on: u64, held: &[bool]) -> Vec<Watch> {
        let mut state = lock(&self.state);
        let mut missed = Vec::new();
        for (watch, held) in watches.iter().zip(held) {
            let known = state.leases.get_mut(&watch.1).filter(|lease| lease.id == watch.0);
            let is_open = match known.map(|lease| &mut lease.sight) {
                Some(Sight::Watched { inbox, sure }) if *held => {
                    *sure |= *inbox == on;
                    false
                }
                Some(_) => !held,
                None => state.displaced.contains_key(watch),
            };
            if is_open {
                state.set(watch.0, &watch.1, Sight::Looked);
                missed.push(watch.clone());
            }
        }
        missed
    }

    /// Notes which of those that were asked for are there. What was granted or told meanwhile is read anew.
    pub(super) fn answered(&self, asked: &[Watch], are_there: &[bool], now: Instant) {
        let mut state = lock(&self.state);
        for (watch, is_there) in asked.iter().zip(are_there) {
            let known = state.leases.get(&watch.1).filter(|lease| lease.id == watch.0);
            match (known.map(|lease| lease.sight), is_there) {
                (Some(Sight::Looked), true) => state.set(watch.0, &watch.1, Sight::Due(now + PAUSE)),
                (Some(Sight::Looked), false) => {
                    state.take(watch.0, &watch.1);
                    state.gone.push(watch.0);
                }
                (Some(_), _) => {}
                (None, is_there) if state.displaced.remove(watch).is_some() => match is_there {
                    // It was the other grant that came late.
                    true => drop(state.put(watch.0, &watch.1, now + YOUNG, now + YOUNG)),
                    false => state.gone.push(watch.0),
                },
                (None, _) => {}
            }
        }
        if state.arm_earliest() || !state.gone.is_empty() {
            self.news.notify_one();
        }
    }

    /// Notes that these could not be read.
    pub(super) fn unread<'a>(&self, claims: impl Iterator<Item = (ClaimId, &'a LockName)>, again: Instant) {
        let mut state = lock(&self.state);
        for (id, name) in claims {
            // What was told meanwhile stays.
            let at = match state.leases.get(name) {
                Some(Lease { id: known, sight: Sight::Due(at) }) if *known == id => again.min(*at),
                _ => again,
            };
            state.set(id, name, Sight::Due(at));
            if !state.displaced.is_empty()
                && let Some(at) = state.displaced.get_mut(&(id, name.clone()))
            {
                *at = Some(again);
            }
        }
        if state.arm_earliest() {
            self.news.notify_one();
        }
    }

    pub(super) fn done(&self) {
        let mut state = lock(&self.state);
        state.looking = false;
        state.next = state.earliest();
        self.news.notify_one();
    }

    /// The server cannot tell of these. Another may: the next that is held is looked at again. Says which are to be asked for all the same.
    pub(super) fn untold(&self, watches: &[Watch]) -> Vec<Watch> {
        let mut state = lock(&self.state);
        for (id, name) in watches {
            state.take(*id, name);
        }
        watches.iter().filter(|watch| state.displaced.contains_key(watch)).cloned().collect()
    }

    /// Those that are gone and of which nobody was told.
    pub(super) fn gone(&self) -> Vec<ClaimId> {
        std::mem::take(&mut lock(&self.state).gone)
    }

    pub(super) fn next(&self) -> Option<Instant> {
        let state = lock(&self.state);
        state.next.filter(|_| !state.looking)
    }
}

/// A read whose answer has not come.
pub(super) struct Unanswered<'a> {
    claims: &'a [&'a Claim],
    held: &'a Held,
}

impl Unanswered<'_> {
    /// Notes which of them were still held.
    pub(super) fn read(mut self, held: &[bool]) {
        let claims = std::mem::take(&mut self.claims);
        if held.contains(&false) {
            let gone = claims.iter().zip(held).filter(|(_, held)| !**held);
            self.held.unread(gone.map(|(claim, _)| (claim.id, &claim.name)), AT_ONCE);
        }
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if !self.claims.is_empty() {
            self.held.unread(self.claims.iter().map(|claim| (claim.id, &claim.name)), AT_ONCE);
        }
    }
}

impl State {
    /// Has the lock of a claim be read at this time, and another claim that had it before at that time; says whether there was one.
    fn put(&mut self, id: ClaimId, name: &LockName, at: Instant, before_at: Instant) -> bool {
        let before = match self.young.insert(name.clone(), (id, at)) {
            Some((before, _)) => Some(before),
            None => self.leases.get(name).map(|lease| lease.id),
        };
        if let Some(before) = before {
            self.take(before, name);
        }
        self.grown = Some(self.grown.map_or(at, |grown| grown.min(at)));
        let displaced = before.filter(|before| *before != id);
        self.displaced.extend(displaced.map(|before| ((before, name.clone()), Some(before_at))));
        displaced.is_some()
    }

    /// Takes a claim out; says whether it had its lock.
    fn take(&mut self, id: ClaimId, name: &LockName) -> bool {
        let Entry::Occupied(lease) = self.leases.entry(name.clone()) else { return false };
        if lease.get().id != id {
            return false;
        }
        let was = lease.remove().sight;
        self.out_of_sight(name, &was);
        true
    }

    fn remove(&mut self, id: ClaimId, name: &LockName) {
        if self.young.get(name).is_some_and(|(young, _)| *young == id) {
            self.young.remove(name);
        } else if !self.take(id, name) && !self.displaced.is_empty() {
            self.displaced.remove(&(id, name.clone()));
        }
    }

    fn set(&mut self, id: ClaimId, name: &LockName, sight: Sight) {
        let Some(lease) = self.leases.get_mut(name).filter(|lease| lease.id == id) else { return };
        let before = std::mem::replace(&mut lease.sight, sight);
        self.out_of_sight(name, &before);
        match sight {
            Sight::Due(at) => drop(self.due.insert((at, name.clone()))),
            Sight::Watched { .. } => self.watched += 1,
            Sight::Looked => {}
        }
    }

    /// Takes a claim from where it stood by what was known of it.
    fn out_of_sight(&mut self, name: &LockName, was: &Sight) {
        match was.look() {
            Sight::Due(at) => drop(self.due.remove(&(*at, name.clone()))),
            Sight::Watched { .. } => self.watched -= 1,
            Sight::Looked => {}
        }
    }

    /// Has somebody look at this moment; says whether that is sooner than was known.
    fn arm(&mut self, at: Instant) -> bool {
        let sooner = self.next.is_none_or(|next| at < next);
        if sooner {
            self.next = Some(at);
        }
        sooner
    }

    fn arm_earliest(&mut self) -> bool {
        self.earliest().is_some_and(|at| self.arm(at))
    }

    /// Has leases be read at once.
    fn look_again(&mut self, which: impl Fn(&Sight) -> bool) {
        let leases = self.leases.iter().filter(|(_, lease)| which(lease.sight.look()));
        let watches: Vec<Watch> = leases.map(|(name, lease)| (lease.id, name.clone())).collect();
        for (id, name) in watches {
            self.set(id, &name, Sight::Due(AT_ONCE));
            self.next = Some(AT_ONCE);
        }
    }

    /// Those that are old enough by then, which are leases from now on.
    fn take_grown(&mut self, by: Instant) -> Vec<Watch> {
        if self.grown.is_none_or(|grown| grown > by) {
            return Vec::new();
        }
        let grown: Vec<Watch> =
            self.young.extract_if(|_, (_, at)| *at <= by).map(|(name, (id, _))| (id, name)).collect();
        let leases = grown.iter().map(|(id, name)| (name.clone(), Lease { id: *id, sight: Sight::Looked }));
        self.leases.extend(leases);
        self.young.shrink_to(2 * self.young.len().max(32));
        self.grown = self.young.values().map(|(_, at)| *at).min();
        grown
    }

    /// The first, if it is due by then.
    fn take_due(&mut self, by: Instant) -> Option<Watch> {
        let first = self.due.first().filter(|(at, _)| *at <= by)?.1.clone();
        let id = self.leases.get(&first)?.id;
        self.set(id, &first, Sight::Looked);
        Some((id, first))
    }

    fn earliest(&self) -> Option<Instant> {
        let displaced = self.displaced.values().flatten();
        self.due.first().map(|(at, _)| at).into_iter().chain(displaced).chain(&self.grown).min().copied()
    }
}

#[cfg(test)]
mod tests;
