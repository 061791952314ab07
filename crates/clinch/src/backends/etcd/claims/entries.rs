//! The table of claims: by id, and by the leases that they may hang on.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;

use super::Known;
use crate::backends::etcd::session::Session;
use crate::backends::etcd::step::Step;
use crate::backends::etcd::view::View;
use crate::backends::etcd::watch::KeyGuard;
use crate::claim::{ByClaim, ClaimId};
use crate::clock::Instant;

/// The least of all ids, and the greatest.
const FIRST: ClaimId = ClaimId::from_bits(u128::MIN);
const LAST: ClaimId = ClaimId::from_bits(u128::MAX);

/// All claims. What concerns a lease looks at no others than its own. All ways to find them are changed here alone, and together.
#[derive(Default)]
pub(super) struct Entries {
    by_id: ByClaim<Row>,
    by_lease: ByLease,
}

/// Which claims may hang on which lease.
#[derive(Default)]
struct ByLease {
    all: BTreeSet<(i64, ClaimId)>,
    /// Those that are [busy](Entry::is_busy). Most are held, and a renewal is not to look at thousands of them for the few that are not.
    busy: BTreeSet<(i64, ClaimId)>,
}

impl ByLease {
    fn add(&mut self, id: ClaimId, entry: &Entry) {
        self.all.extend(entry.known.leases().map(|lease| (lease, id)));
        if entry.is_busy() {
            self.busy.extend(entry.known.leases().map(|lease| (lease, id)));
        }
    }

    fn remove(&mut self, id: ClaimId, leases: impl Iterator<Item = i64>) {
        for lease in leases {
            self.all.remove(&(lease, id));
            self.busy.remove(&(lease, id));
        }
    }
}

/// What the table itself has of a claim; the rest lies elsewhere, since a table keeps room for many more than it has.
struct Row {
    /// What its key hangs on,
    carrier: Arc<Session>,
    /// for sure, and the claim is not lost: then that is all that a renewal looks at.
    is_at_rest: bool,
    entry: Box<Entry>,
}

impl Row {
    fn of(entry: Box<Entry>) -> Row {
        Row { carrier: entry.known.carrier().clone(), is_at_rest: entry.known.is_at_rest(), entry }
    }
}

/// One claim.
pub(super) struct Entry {
    pub(super) known: Known,
    /// Tells of the key's end.
    pub(super) guard: Option<KeyGuard>,
    pub(super) view: Option<Arc<View>>,
    /// A release of it failed: from when on its key shall be gone, whoever sees to that.
    pub(super) leaving: Option<Instant>,
    /// Somebody waits for the answer to a release of it.
    pub(super) asked: bool,
    /// The last step of its waiter, unless that has ended well.
    pub(super) step: Option<Arc<Step>>,
    /// Whether its waiter was given the lock.
    pub(super) taken: bool,
    /// The last revision at which its key was read and was as it should be.
    pub(super) seen: i64,
    /// Which of the looks at claims whose waiters are silent was the last at this one.
    pub(super) looked_at: u64,
}

impl Entry {
    /// Whether a renewal of its lease may have something to do for it: it is not held, or its release failed.
    fn is_busy(&self) -> bool {
        !self.taken || self.leaving.is_some()
    }
}

impl Entries {
    pub(super) fn get(&self, id: ClaimId) -> Option<&Entry> {
        self.by_id.get(&id).map(|row| &*row.entry)
    }

    /// The session whose lease a claim's key hangs on, as far as is known.
    pub(super) fn carrier(&self, id: ClaimId) -> Option<&Arc<Session>> {
        self.by_id.get(&id).map(|row| &row.carrier)
    }

    /// Whether a claim's key hangs on this lease for sure, and the claim is not lost.
    pub(super) fn rests_on(&self, id: ClaimId, session: &Arc<Session>) -> bool {
        self.by_id.get(&id).is_some_and(|row| row.is_at_rest && Arc::ptr_eq(&row.carrier, session))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Entry> {
        self.by_id.values().map(|row| &*row.entry)
    }

    /// The claims that may hang on a lease.
    pub(super) fn on(&self, lease: i64) -> impl Iterator<Item = (ClaimId, &Entry)> + Clone {
        self.found(lease, self.by_lease.all.range((lease, FIRST)..=(lease, LAST)))
    }

    /// The same in another order: those that follow this one, then those up to it.
    pub(super) fn on_after(&self, lease: i64, id: ClaimId) -> impl Iterator<Item = (ClaimId, &Entry)> {
        let follow = (Bound::Excluded((lease, id)), Bound::Included((lease, LAST)));
        let others = self.by_lease.all.range((lease, FIRST)..=(lease, id));
        self.found(lease, self.by_lease.all.range(follow).chain(others))
    }

    /// Those of them that are [busy](Entry::is_busy).
    pub(super) fn busy_on(&self, lease: i64) -> impl Iterator<Item = (ClaimId, &Entry)> {
        self.found(lease, self.by_lease.busy.range((lease, FIRST)..=(lease, LAST)))
    }

    fn found<'a>(
        &'a self,
        lease: i64,
        named: impl Iterator<Item = &'a (i64, ClaimId)> + Clone,
    ) -> impl Iterator<Item = (ClaimId, &'a Entry)> + Clone {
        let named = named.filter_map(|(_, id)| Some((*id, self.get(*id)?)));
        // A lease that it was to be moved to may be over.
        named.filter(move |(_, entry)| entry.known.may_hang_on(lease))
    }

    /// Takes in a claim that is not there.
    pub(super) fn insert(&mut self, id: ClaimId, entry: Entry) {
        self.by_lease.add(id, &entry);
        self.by_id.insert(id, Row::of(Box::new(entry)));
    }

    pub(super) fn change<T>(&mut self, id: ClaimId, change: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        let Row { carrier, is_at_rest, entry } = self.by_id.get_mut(&id)?;
        let (before, was_busy) = (entry.known.leases().collect::<Vec<i64>>(), entry.is_busy());
        let changed = change(entry);
        if !Arc::ptr_eq(carrier, entry.known.carrier()) {
            *carrier = entry.known.carrier().clone();
        }
        *is_at_rest = entry.known.is_at_rest();
        if was_busy != entry.is_busy() || !entry.known.leases().eq(before.iter().copied()) {
            self.by_lease.remove(id, before.into_iter());
            self.by_lease.add(id, entry);
        }
        Some(changed)
    }

    pub(super) fn remove(&mut self, id: ClaimId) -> Option<Entry> {
        let entry = *self.by_id.remove(&id)?.entry;
        self.by_lease.remove(id, entry.known.leases());
        Some(entry)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty() && self.by_lease.all.is_empty() && self.by_lease.busy.is_empty()
    }
}
