//! Renewals of leases, and what goes along with each: proof that its claims are there, releases that failed, waiters that are silent.

use std::sync::Arc;
use std::time::Duration;

use super::{Session, Sessions};
use crate::backend;
use crate::backends::etcd::claims::{Known, Made, Sweeping};
use crate::backends::etcd::free::Stand;
use crate::backends::etcd::record::Place;
use crate::backends::etcd::turn::pass_on;
use crate::backends::etcd::wire::{
    self, Compare, KeyValue, LeaseRequest, RangeResponse, RequestOp, TxnRequest,
};
use crate::claim::ClaimId;
use crate::clock::Instant;
use crate::error::Result;
use crate::sync::lock;

/// Every how many keepalives some of its claims' keys are read: somebody may have deleted them by hand.
const READ_EVERY: u32 = 3;

/// Claims' keys that are read along with the session's; etcd takes 128 operations in a transaction.
const READ_BATCH: usize = 100;

/// Failed releases that are made good with one keepalive; for the same reason.
const SWEEP_BATCH: usize = 100;

impl Sessions {
    /// Renews the lease unless that was done at most `age` ago, and says when it was last renewed; `None`: it is gone.
    pub(in crate::backends::etcd) async fn keep(
        self: &Arc<Sessions>,
        session: &Arc<Session>,
        age: Duration,
    ) -> Result<Option<Instant>> {
        let asked = self.client.env.now();
        loop {
            if session.is_over() {
                return Ok(None);
            }
            let confirmed = session.confirmed();
            if asked <= confirmed + age {
                return Ok(Some(confirmed));
            }
            let (sessions, renewed) = (self.clone(), session.clone());
            let renew = move || async move { sessions.renew(&renewed).await };
            session.renewals.join(&self.client.env, (), renew).await?;
        }
    }

    /// Renews the lease; false when it is gone.
    async fn renew(self: &Arc<Sessions>, session: &Arc<Session>) -> Result<bool> {
        // First by what keeps nothing: a place that is kept, but never hears of its turn, is in everybody's way. Who is deaf lets it run out.
        if session.is_unheard(self.client.env.now()) && !self.is_there(session).await? {
            return Ok(false);
        }
        let sent = self.client.env.now();
        let request = LeaseRequest { id: session.lease };
        // Whoever hangs is left while there is time to ask another; both at once, so that only one attempt is lost.
        let keepalive = self.client.keep_alive(&request, self.patience(session));
        let (answer, is_there) = tokio::join!(keepalive, self.is_there(session));
        if answer?.ttl <= 0 {
            self.end(session);
            return Ok(false);
        }
        if !is_there? {
            return Ok(false);
        }
        {
            let mut state = lock(&session.state);
            state.confirmed = state.confirmed.max(sent);
        }
        if !self.leaving(session).is_empty() {
            self.client.env.process().spawn(self.clone().sweep(session.clone()));
        }
        self.look_after_silent(session);
        Ok(true)
    }

    /// How long one attempt to keep a lease waits for a member. No lock ends with a place: where no other member can be asked, who is
    /// far may take longer than a sixth, and would never be heard else. Nor does one end any more with a lease that was not heard of for long.
    fn patience(&self, session: &Session) -> Duration {
        if session.is_unheard(self.client.env.now()) {
            return backend::MAX_ATTEMPT;
        }
        match self.client.has_others() || !self.claims.are_places(session.lease) {
            true => backend::attempt(session.ttl),
            false => session.ttl / 2,
        }
    }

    /// Lets turns go on that nobody takes, and that this lease would keep, in the background.
    fn look_after_silent(&self, session: &Session) {
        let (client, claims, lease) = (self.client.clone(), self.claims.clone(), session.lease);
        let look = move || async move {
            pass_on(&client, &claims, lease).await;
            Ok(())
        };
        // What fails is tried again with the next keepalive.
        let _ = session.looks.start(&self.client.env, (), look);
    }

    /// Claims whose release failed, and which this lease would keep alive.
    fn leaving(&self, session: &Session) -> Vec<(ClaimId, Known)> {
        self.claims.leaving(session.lease, self.client.env.now(), SWEEP_BATCH)
    }

    /// Makes good the releases that failed. What fails again is tried with the next keepalive.
    async fn sweep(self: Arc<Sessions>, session: Arc<Session>) {
        let leaving = self.leaving(&session);
        // Those that stand behind the fence of another session are left to that.
        let fences = |known: &Known| known.doubts.iter().any(|doubted| Arc::ptr_eq(doubted, &session));
        if leaving.iter().any(|(_, known)| fences(known)) {
            let put = TxnRequest { success: vec![session.put().into()], ..TxnRequest::default() };
            let sent = self.client.env.now();
            match self.client.txn(put).await {
                Ok(Some(answer)) => {
                    session.fence.raised(answer.revision(), sent, self.client.env.now());
                    let fenced = leaving.iter().filter(|(_, known)| fences(known)).map(|(id, _)| *id);
                    self.claims.fenced(fenced, &session);
                }
                Ok(None) => return self.end(&session),
                // Those in doubt stay until it works; what is there of them can go.
                Err(_) => {}
            }
        }
        // Those that were released meanwhile are left out: their keys may be others' by now.
        let sweeping = self.claims.sweeping(session.lease, self.client.env.now(), SWEEP_BATCH);
        let swept = self.delete_swept(&sweeping).await;
        let ids: Vec<ClaimId> = sweeping.iter().map(|sweeping| sweeping.id).collect();
        sweeping.into_iter().for_each(|Sweeping { deleting, .. }| deleting.came_to(&swept));
        if let Ok(Some(())) = swept {
            self.give_back(self.claims.swept(ids.iter().copied()));
            for id in ids {
                self.settle_closings(id, |_| false).await;
            }
        }
    }

    /// Deletes of these claims what stands and is their own, by one transaction.
    async fn delete_swept(&self, sweeping: &[Sweeping]) -> Result<Option<()>> {
        let reads = sweeping.iter().map(|sweeping| wire::get(sweeping.deleting.key())).collect();
        let found = self.client.read(reads).await?;
        let places = found.ranges.iter().map(|range| range.kvs.first().map(Place::read));
        let own = sweeping.iter().zip(places);
        let own =
            own.filter_map(|(sweeping, place)| Some((sweeping.id, place.filter(|it| sweeping.owns(it))?)));
        let own: Vec<(ClaimId, Place)> = own.collect();
        let are_released = own.iter().filter(|(id, place)| !place.is_evicted(*id));
        self.claims.sweeps(are_released.map(|(id, _)| *id));
        let deletes = own.iter().map(|(_, place)| {
            let compare = vec![Compare::created(&place.key, place.created)];
            TxnRequest { compare, success: vec![wire::delete(&place.key)], failure: Vec::new() }.into()
        });
        let deletes: Vec<RequestOp> = deletes.collect();
        if deletes.is_empty() {
            return Ok(Some(()));
        }
        let answer = self.client.txn(TxnRequest { success: deletes, ..TxnRequest::default() }).await?;
        if answer.is_some() {
            self.give_back_closed(own.iter().map(|(_, place)| place)).await;
        }
        Ok(answer.map(drop))
    }

    /// Reads the session's key linearizably, and with every third renewal some of its claims'. Where the session's was written,
    /// perhaps by who has evicted one, all those that were not read since.
    async fn is_there(self: &Arc<Sessions>, session: &Session) -> Result<bool> {
        let (made, is_due, read_to) = {
            let state = lock(&session.state);
            (state.made, state.unread + 1 >= READ_EVERY, state.read_to)
        };
        let claims = match is_due {
            true => self.claims.some_of(session.lease, READ_BATCH, read_to),
            false => Vec::new(),
        };
        // Others the next time, whatever comes of these.
        if let Some((id, ..)) = claims.last() {
            lock(&session.state).read_to = *id;
        }
        let found = self.prove(session, &claims).await?;
        let Some(own) = found.first().and_then(|own| own.kvs.first()) else {
            self.end(session);
            return Ok(false);
        };
        if own.mod_revision != made {
            let unread = self.claims.unread(session.lease, own.mod_revision);
            let reads = unread.chunks(READ_BATCH).map(|claims| self.prove(session, claims));
            futures_util::future::try_join_all(reads).await?;
        }
        let mut state = lock(&session.state);
        state.unread = if is_due { 0 } else { state.unread + 1 };
        Ok(true)
    }

    /// Reads the keys of a session and of these claims, and notes which of the claims are there, and on which lease.
    async fn prove(self: &Arc<Sessions>, session: &Session, claims: &[Made]) -> Result<Vec<RangeResponse>> {
        let mut reads = vec![wire::get(&session.key)];
        reads.extend(claims.iter().map(|(_, key, _)| wire::get(key)));
        let found = self.client.prove(reads, self.patience(session)).await?;
        for ((id, _, created), range) in claims.iter().zip(found.ranges.iter().skip(1)) {
            let is_there = |kv: &&KeyValue| kv.create_revision == *created && !Place::read(kv).is_closed();
            match range.kvs.first().filter(is_there) {
                Some(kv) => {
                    self.claims.was_there(*id, *created, found.revision);
                    let stand = Stand { created: *created, lease: kv.lease };
                    self.give_back(self.claims.seen_on(*id, stand, found.revision));
                }
                None => self.claims.deleted(*id, *created),
            }
        }
        Ok(found.ranges)
    }
}
