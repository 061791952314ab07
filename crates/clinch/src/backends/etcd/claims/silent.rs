//! Claims whose waiters are silent: their turn goes on to the next, unless they take it first.

use std::sync::Arc;

use super::{Claims, Entry};
use crate::backends::etcd::slots::Deleting;
use crate::backends::etcd::step::Step;
use crate::claim::ClaimId;
use crate::clock::Instant;
use crate::sync::lock;

impl Claims {
    /// Notes that a claim's waiter begins a step, or is done with it.
    pub(in crate::backends::etcd) fn steps(&self, id: ClaimId, step: Option<&Arc<Step>>) {
        lock(&self.table).entries.change(id, |entry| {
            entry.step = step.cloned();
            // One that is asked for again was not used.
            entry.taken &= step.is_none();
        });
    }

    /// Claims on this lease that have not taken in since `before` what they were told, as far as that can be seen: their
    /// steps could go on, or events wait for them. Others each time, if there are more; those first that came first.
    pub(in crate::backends::etcd) fn unheard(
        &self,
        lease: i64,
        before: Instant,
        count: usize,
    ) -> Vec<ClaimId> {
        let mut table = lock(&self.table);
        // The answer that tells on which it hangs may be the one that was not heard.
        let unheard = table.entries.busy_on(lease).filter(|(_, entry)| entry.is_unheard(before));
        let mut unheard: Vec<_> =
            unheard.map(|(id, entry)| (entry.looked_at, entry.known.created, id)).collect();
        unheard.sort_unstable();
        unheard.truncate(count);
        table.looks += 1;
        let looked_at = table.looks;
        for (.., id) in &unheard {
            table.entries.change(*id, |entry| entry.looked_at = looked_at);
        }
        unheard.into_iter().map(|(.., id)| id).collect()
    }

    /// Gives the lock to a claim's waiter, unless the claim is lost, or its turn went on to the next.
    pub(in crate::backends::etcd) fn take_grant(&self, id: ClaimId) -> bool {
        let taken = lock(&self.table).entries.change(id, |entry| {
            entry.taken |= entry.known.is_good();
            entry.known.is_good()
        });
        taken.unwrap_or(false)
    }

    /// Has the turn of a claim go on to the next by a delete of this key of it, unless its waiter has taken it, or was there since
    /// `before`.
    pub(in crate::backends::etcd) fn pass_on(
        self: &Arc<Claims>,
        id: ClaimId,
        key: &[u8],
        before: Instant,
    ) -> Option<Deleting> {
        let mut table = lock(&self.table);
        table.entries.get(id).filter(|entry| entry.is_unheard(before) && entry.known.key[..] == *key)?;
        table.deleting(self, id)
    }
}

impl Entry {
    /// Whether its waiter has not taken in since `before` what it was told. One whose step is on its way has nothing else to take in.
    fn is_unheard(&self, before: Instant) -> bool {
        let since = match &self.step {
            Some(step) => step.unheard_since(),
            None => self.view.as_ref().and_then(|view| view.unread_since()),
        };
        !self.taken && since.is_some_and(|since| since <= before)
    }
}
