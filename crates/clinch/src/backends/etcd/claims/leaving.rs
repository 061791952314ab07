//! Claims whose release failed: whoever keeps their lease sees to them.

use std::sync::Arc;

use super::{Claims, Entry, Known, Table};
use crate::backends::etcd::record::Place;
use crate::backends::etcd::session::Session;
use crate::backends::etcd::slots::Deleting;
use crate::claim::ClaimId;
use crate::clock::Instant;
use crate::sync::lock;

/// A claim whose release failed, and whose key is deleted now.
pub(in crate::backends::etcd) struct Sweeping {
    pub(in crate::backends::etcd) id: ClaimId,
    created: Option<i64>,
    pub(in crate::backends::etcd) deleting: Deleting,
}

impl Sweeping {
    /// Whether what stands under its key is its own: a claim that never came to have one may have met another's there.
    pub(in crate::backends::etcd) fn owns(&self, place: &Place) -> bool {
        self.created == Some(place.created) || place.is(self.id) || place.is_evicted(self.id)
    }
}

impl Claims {
    /// Notes that a release has begun, and that the claim's key shall be gone from this moment on, if that release does not end.
    pub(in crate::backends::etcd) fn leaves(&self, id: ClaimId, from: Instant) {
        lock(&self.table).entries.change(id, |entry| {
            entry.leaving = Some(from);
            entry.asked = true;
        });
    }

    /// Notes that a release is answered; says whether a sweep has deleted the claim's key meanwhile.
    pub(in crate::backends::etcd) fn answered(&self, id: ClaimId) -> bool {
        let mut table = lock(&self.table);
        table.entries.change(id, |entry| entry.asked = false);
        table.swept.remove(&id)
    }

    /// Notes that the keys of these claims are deleted for those who have asked for their release, and will ask again.
    pub(in crate::backends::etcd) fn sweeps(&self, ids: impl Iterator<Item = ClaimId>) {
        let mut table = lock(&self.table);
        for id in ids {
            if table.entries.get(id).is_some_and(|entry| entry.asked) {
                table.swept.insert(id);
            }
        }
    }

    /// Notes that a release failed, and that the claim's key shall be gone from this moment on.
    pub(in crate::backends::etcd) fn leave(&self, id: ClaimId, from: Instant) {
        let mut table = lock(&self.table);
        let is_over = table.entries.change(id, |entry| {
            entry.leaving = Some(from);
            entry.known.is_over()
        });
        // Then it is gone with its lease.
        let gone = is_over.filter(|is_over| *is_over).and_then(|_| table.take(id));
        drop(table);
        drop(gone);
    }

    /// Claims on a lease whose release failed and that shall be gone by now.
    pub(in crate::backends::etcd) fn leaving(
        &self,
        lease: i64,
        now: Instant,
        count: usize,
    ) -> Vec<(ClaimId, Known)> {
        lock(&self.table).leaving(lease, now, count)
    }

    /// The same, of which deletes go out now.
    pub(in crate::backends::etcd) fn sweeping(
        self: &Arc<Claims>,
        lease: i64,
        now: Instant,
        count: usize,
    ) -> Vec<Sweeping> {
        let mut table = lock(&self.table);
        let leaving = table.leaving(lease, now, count).into_iter();
        let sweeping = leaving.filter_map(|(id, known)| {
            let deleting = table.deleting(self, id)?;
            Some(Sweeping { id, created: known.created, deleting })
        });
        sweeping.collect()
    }

    /// Forgets claims whose keys were deleted, unless a step of them may still come; gives the leases that they had for themselves.
    #[must_use]
    pub(in crate::backends::etcd) fn swept(&self, ids: impl Iterator<Item = ClaimId>) -> Vec<Arc<Session>> {
        let mut table = lock(&self.table);
        let mut gone = Vec::new();
        for id in ids {
            if table.entries.get(id).is_some_and(|entry| !entry.known.in_doubt()) {
                gone.extend(table.take(id));
            }
        }
        drop(table);
        let own = gone.iter().flat_map(|entry| entry.known.own_leases()).cloned().collect();
        // Ends watches, which takes other locks.
        drop(gone);
        own
    }

    /// Notes that no step of these claims can come any more that rests on this session.
    pub(in crate::backends::etcd) fn fenced(
        &self,
        ids: impl Iterator<Item = ClaimId>,
        session: &Arc<Session>,
    ) {
        let mut table = lock(&self.table);
        for id in ids {
            table.entries.change(id, |entry| {
                entry.known.doubts.retain(|doubted| !Arc::ptr_eq(doubted, session));
            });
        }
    }
}

impl Table {
    fn leaving(&self, lease: i64, now: Instant, count: usize) -> Vec<(ClaimId, Known)> {
        let is_due = |entry: &Entry| entry.leaving.is_some_and(|from| from <= now);
        let leaving = self.entries.busy_on(lease).filter(|(_, entry)| is_due(entry));
        leaving.map(|(id, entry)| (id, entry.known.clone())).take(count).collect()
    }
}
