//! The table of claims: by id, and by the leases that they may hang on.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Known;
use crate::backends::etcd::session::Session;
use crate::backends::etcd::step::Step;
use crate::backends::etcd::view::View;
use crate::backends::etcd::watch::KeyGuard;
use crate::claim::{ByClaim, ClaimId};
use crate::clock::Instant;

/// All claims. A lease has few of them, or one: so what concerns a lease looks at no others. Both ways to find them are changed
/// here alone, and together.
#[derive(Default)]
pub(super) struct Entries {
    by_id: ByClaim<Row>,
    by_lease: BTreeSet<(i64, ClaimId)>,
}

/// What the table itself has of a claim; the rest lies elsewhere, since a table keeps room for many more than it has.
struct Row {
    /// What its key hangs on, which is all that most of a renewal looks at.
    carrier: Arc<Session>,
    entry: Box<Entry>,
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

impl Entries {
    pub(super) fn get(&self, id: ClaimId) -> Option<&Entry> {
        self.by_id.get(&id).map(|row| &*row.entry)
    }

    /// The session whose lease a claim's key hangs on, as far as is known.
    pub(super) fn carrier(&self, id: ClaimId) -> Option<&Arc<Session>> {
        self.by_id.get(&id).map(|row| &row.carrier)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Entry> {
        self.by_id.values().map(|row| &*row.entry)
    }

    /// The claims that may hang on a lease.
    pub(super) fn on(&self, lease: i64) -> impl Iterator<Item = (ClaimId, &Entry)> + Clone {
        let (first, last) = (ClaimId::from_bits(u128::MIN), ClaimId::from_bits(u128::MAX));
        let named = self.by_lease.range((lease, first)..=(lease, last));
        let named = named.filter_map(|(_, id)| Some((*id, self.get(*id)?)));
        // A lease that it was to be moved to may be over.
        named.filter(move |(_, entry)| entry.known.may_hang_on(lease))
    }

    /// Takes in a claim that is not there.
    pub(super) fn insert(&mut self, id: ClaimId, entry: Entry) {
        self.by_lease.extend(entry.known.leases().map(|lease| (lease, id)));
        let carrier = entry.known.carrier().clone();
        self.by_id.insert(id, Row { carrier, entry: Box::new(entry) });
    }

    pub(super) fn change<T>(&mut self, id: ClaimId, change: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        let Row { carrier, entry } = self.by_id.get_mut(&id)?;
        let before: Vec<i64> = entry.known.leases().collect();
        let changed = change(entry);
        if !Arc::ptr_eq(carrier, entry.known.carrier()) {
            *carrier = entry.known.carrier().clone();
        }
        if !entry.known.leases().eq(before.iter().copied()) {
            for lease in before {
                self.by_lease.remove(&(lease, id));
            }
            self.by_lease.extend(entry.known.leases().map(|lease| (lease, id)));
        }
        Some(changed)
    }

    pub(super) fn remove(&mut self, id: ClaimId) -> Option<Entry> {
        let entry = *self.by_id.remove(&id)?.entry;
        for lease in entry.known.leases() {
            self.by_lease.remove(&(lease, id));
        }
        Some(entry)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty() && self.by_lease.is_empty()
    }
}
