//! What is known of the locks that are held: which are watched, which are to be read, and which were not found.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
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
    /// Something is to be looked at earlier than was known, or was missed.
    pub(super) news: Notify,
}

#[derive(Default)]
struct State {
    /// What was granted last, by the lock, for the server tells of locks.
    leases: HashMap<LockName, Lease>,
    /// Those that are to be read, by when. So no step looks through all.
    due: BTreeSet<(Instant, LockName)>,
    /// How many are watched.
    watched: usize,
    /// Claims that were not found, or whose lock was granted again.
    missed: BTreeSet<Watch>,
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
    /// About to be read.
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
        let before = state.put(claim.id, &claim.name, at).filter(|before| *before != claim.id);
        state.missed.extend(before.map(|before| (before, claim.name.clone())));
        if state.arm(at) || before.is_some() {
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

    /// The database was emptied.
    pub(in super::super) fn all_changed(&self) {
        lock(&self.state).look_again(|_| true);
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
        let mut due = Vec::new();
        // What is due soon comes along.
        while let Some(watch) = state.take_due(now + YOUNG / 4) {
            due.push(watch);
        }
        state.looking = !due.is_empty();
        // One look for all that grow up meanwhile.
        state.next = state.earliest().map(|at| at.max(now + YOUNG));
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

    /// Notes which of those that were read on an inbox were still held. What was told meanwhile stays.
    pub(super) fn read(&self, watches: &[Watch], on: u64, held: &[bool]) {
        let mut state = lock(&self.state);
        for ((id, name), held) in watches.iter().zip(held) {
            if !held {
                state.miss(*id, name);
                self.news.notify_one();
            } else if let Some(lease) = state.leases.get_mut(name)
                && let Lease { id: known, sight: Sight::Watched { inbox, sure } } = lease
                && (*known, *inbox) == (*id, on)
            {
                *sure = true;
            }
        }
    }

    /// Notes that these could not be read.
    pub(super) fn unread<'a>(&self, claims: impl Iterator<Item = (ClaimId, &'a LockName)>, again: Instant) {
        let mut state = lock(&self.state);
        for (id, name) in claims {
            // Of one whose lock was granted again the next renewal tells.
            if state.missed.remove(&(id, name.clone())) && !state.leases.contains_key(name) {
                state.put(id, name, again);
            } else {
                state.set(id, name, Sight::Due(again));
            }
        }
        if state.arm(again) {
            self.news.notify_one();
        }
    }

    pub(super) fn done(&self) {
        let mut state = lock(&self.state);
        state.looking = false;
        state.next = state.earliest();
        self.news.notify_one();
    }

    /// The server cannot tell of these. Another may: the next that is held is looked at again.
    pub(super) fn untold(&self, watches: &[Watch]) {
        let mut state = lock(&self.state);
        for (id, name) in watches {
            state.remove(*id, name);
        }
    }

    /// Some that were not found, and which are wanted.
    pub(super) fn missed(&self, mut wanted: impl FnMut(ClaimId) -> bool) -> Vec<Watch> {
        lock(&self.state).missed.iter().filter(|(id, _)| wanted(*id)).take(BATCH).cloned().collect()
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
            let mut state = lock(&self.held.state);
            let gone = claims.iter().zip(held).filter(|(_, held)| !**held);
            gone.for_each(|(claim, _)| state.miss(claim.id, &claim.name));
            self.held.news.notify_one();
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
    /// Has the lock of a claim be read at this time; says which claim had it before.
    fn put(&mut self, id: ClaimId, name: &LockName, at: Instant) -> Option<ClaimId> {
        let before = self.leases.insert(name.clone(), Lease { id, sight: Sight::Due(at) });
        if let Some(before) = &before {
            self.out_of_sight(name, &before.sight);
        }
        self.due.insert((at, name.clone()));
        before.map(|before| before.id)
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
        if !self.take(id, name) && !self.missed.is_empty() {
            self.missed.remove(&(id, name.clone()));
        }
    }

    /// Notes that a claim was not found.
    fn miss(&mut self, id: ClaimId, name: &LockName) {
        if self.take(id, name) {
            self.missed.insert((id, name.clone()));
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

    /// Has leases be read at once.
    fn look_again(&mut self, which: impl Fn(&Sight) -> bool) {
        let leases = self.leases.iter().filter(|(_, lease)| which(lease.sight.look()));
        let watches: Vec<Watch> = leases.map(|(name, lease)| (lease.id, name.clone())).collect();
        for (id, name) in watches {
            self.set(id, &name, Sight::Due(AT_ONCE));
            self.next = Some(AT_ONCE);
        }
    }

    /// The first, if it is due by then.
    fn take_due(&mut self, by: Instant) -> Option<Watch> {
        let first = self.due.first().filter(|(at, _)| *at <= by)?.1.clone();
        let id = self.leases.get(&first)?.id;
        self.set(id, &first, Sight::Looked);
        Some((id, first))
    }

    fn earliest(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests;
