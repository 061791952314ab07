//! Claims whose release failed: whoever keeps their lease sees to them.

use std::sync::Arc;

use super::{Claims, Entry, Known, Table};
use crate::backends::etcd::session::Session;
use crate::backends::etcd::slots::Deleting;
use crate::claim::ClaimId;
use crate::clock::Instant;
use crate::sync::lock;

impl Claims {
    /// Notes that a release has begun, and that the claim's key shall be gone from this moment on, if that release does not end.
    pub(in crate::backends::etcd) fn leaves(&self, id: ClaimId, from: Instant) {
        lock(&self.table).entries.change(id, |entry| entry.leaving = Some(from));
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
    ) -> Vec<(ClaimId, Deleting)> {
        let mut table = lock(&self.table);
        let leaving = table.leaving(lease, now, count);
        leaving.into_iter().filter_map(|(id, _)| Some((id, table.deleting(self, id)?))).collect()
    }

    /// Forgets claims whose keys were deleted, unless a step of them may still come.
    pub(in crate::backends::etcd) fn swept(&self, ids: impl Iterator<Item = ClaimId>) {
        let mut table = lock(&self.table);
        let mut gone = Vec::new();
        for id in ids {
            if table.entries.get(id).is_some_and(|entry| !entry.known.in_doubt()) {
                gone.extend(table.take(id));
            }
        }
        drop(table);
        // Ends watches, which takes other locks.
        drop(gone);
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
        let leaving = self.entries.on(lease).filter(|(_, entry)| is_due(entry));
        leaving.map(|(id, entry)| (id, entry.known.clone())).take(count).collect()
    }
}
