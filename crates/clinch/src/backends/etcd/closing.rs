//! Closed locks, and the leases that keep them closed.
//!
//! Each is made for one write that closes a lock, also by an eviction, and nothing else ever hangs on it. It lasts as long as the lock is to stay closed, perhaps
//! for years. So it is given back when the lock is opened before that, and when it is known that its write never came to be done.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::client::Client;
use super::grant::Granted;
use super::record::{self, Place};
use super::session::Sessions;
use super::store::Store;
use super::view::View;
use super::wire::{self, Compare, PutRequest, RequestOp, TxnRequest};
use crate::backend::Freed;
use crate::claim::{Claim, ClaimId};
use crate::error::{ErrorKind, Result};
use crate::sync::lock;

impl Store {
    /// What closes a lock: the claim's key stays, and with it its place, ahead of everybody; but it hangs on a lease
    /// that ends when the lock opens, and says that nobody holds it. So it closes the lock to every program.
    pub(super) async fn close(
        &self,
        claim: &Claim,
        key: &[u8],
        linger: Duration,
    ) -> Result<(RequestOp, Granted)> {
        // Before it is read in which term that is.
        let lease = self.sessions.grant(linger).await?;
        let (term, wall) = (self.client.history.term(), self.client.env.clock().wall());
        let value = record::closed(claim, linger, term, wall)?;
        let put = PutRequest { key: key.to_vec(), value, lease: lease.id, ..PutRequest::default() };
        Ok((put.into(), lease))
    }

    /// Opens a lock whose time is up: leases count whole seconds, and two at least.
    pub(super) async fn open_again(&self, view: &View) -> Result<()> {
        let up = view.closed_until.is_some_and(|open| open <= self.now());
        if let Some(place) = view.ahead.last().filter(|_| up) {
            self.client.delete_as_seen(place).await?;
        }
        Ok(())
    }

    /// Opens a lock that was released closed, if that is over by now whatever its lease says; tells whether there was such.
    pub(super) async fn open_overdue(&self, places: &[Place]) -> Result<bool> {
        let (term, wall) = (self.client.history.term(), self.client.env.clock().wall());
        let is_overdue = |place: &&Place| place.overdue_from(term).is_some_and(|from| from <= wall);
        let overdue: Vec<&Place> = places.iter().filter(is_overdue).collect();
        for place in &overdue {
            self.client.delete_as_seen(place).await?;
        }
        Ok(!overdue.is_empty())
    }
}

impl Client {
    /// Deletes a key if it is still the one that was seen. With what keeps a lock closed goes the lease of that.
    pub(super) async fn delete_as_seen(self: &Arc<Client>, place: &Place) -> Result<Freed> {
        let mut compare = vec![Compare::created(&place.key, place.created)];
        // What keeps a lock closed does nothing else any more, whichever lease that is on.
        if !place.is_closed() {
            compare.push(Compare::lease(&place.key, place.lease));
        }
        let txn = TxnRequest { compare, success: vec![wire::delete(&place.key)], failure: Vec::new() };
        let deleted = match self.txn(txn).await {
            // With its lease the key goes too, whether or not it was deleted. Nobody would find that lease again.
            Err(error) if place.is_closed() && error.kind() == ErrorKind::Unknown => {
                return self.revoke(place.lease).await.map(|_| Freed::Removed).map_err(|_| error);
            }
            answer => answer?.is_some_and(|answer| answer.succeeded),
        };
        if deleted && place.is_closed() {
            // If this fails, it runs out.
            let _ = self.revoke(place.lease).await;
        }
        Ok(if deleted { Freed::Removed } else { Freed::Absent })
    }
}

/// The leases of writes that were sent to close a lock, and of which nobody has heard what came of them.
#[derive(Default)]
pub(super) struct Closings(Mutex<HashMap<ClaimId, Vec<i64>>>);

impl Closings {
    /// Notes that such a write is about to be sent.
    pub(super) fn begin(&self, id: ClaimId, lease: i64) {
        let mut all = lock(&self.0);
        let leases = all.entry(id).or_default();
        if !leases.contains(&lease) {
            leases.push(lease);
        }
    }

    /// Notes that it was surely not done.
    pub(super) fn fail(&self, id: ClaimId, lease: i64) {
        let mut all = lock(&self.0);
        if let Some(leases) = all.get_mut(&id) {
            leases.retain(|begun| *begun != lease);
        }
        all.retain(|_, leases| !leases.is_empty());
    }

    /// What is known of a claim's can go.
    pub(super) fn forget(&self, id: ClaimId) {
        lock(&self.0).remove(&id);
    }

    fn get(&self, id: ClaimId) -> Vec<i64> {
        lock(&self.0).get(&id).cloned().unwrap_or_default()
    }
}

impl Sessions {
    /// Gives back what was to keep a claim's lock closed, but for what does, once its key stands so that no write of before can hang it on
    /// anything. Dropped before that is done, it is done the next time.
    pub(super) async fn settle_closings(&self, id: ClaimId, closes: impl Fn(i64) -> bool) {
        let leases = self.closings.get(id);
        if leases.is_empty() {
            return;
        }
        let over = leases.into_iter().filter(|lease| !closes(*lease));
        futures_util::future::join_all(over.map(|lease| self.revoke_lease(lease))).await;
        self.closings.forget(id);
    }

    /// Gives back the leases of locks that were closed, and that are open now.
    pub(super) async fn give_back_closed<'a>(&self, opened: impl IntoIterator<Item = &'a Place>) {
        let closed = opened.into_iter().filter(|place| place.is_closed());
        futures_util::future::join_all(closed.map(|place| self.revoke_lease(place.lease))).await;
    }
}
