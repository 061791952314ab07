//! Ends of claims: release, eviction, a closed lock.
//!
//! A request that comes late changes nothing. Most are conditional on the revision that created the claim's key and on
//! the lease that it hangs on: a key that was released is gone or somebody else's, one that was moved or closed hangs on
//! another lease. The usual release is not, for a transaction, which reads before it writes, costs etcd a tenth more; but then no
//! other claim ever gets that key, unless the release was answered.

use std::time::Duration;

use super::claims::{Claims, Known};
use super::keys;
use super::moves::{hang, touch};
use super::record::{self, Place, Standing};
use super::session::Raise;
use super::slots::STANDS_FOR;
use super::store::Store;
use super::wire::{self, Compare, PutRequest, RequestOp, TxnRequest, TxnResponse};
use crate::backend::{Freed, NOTICE};
use crate::claim::{Claim, ClaimId, Mode};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::queue::admits;

/// How often a write is begun anew because the key had been moved to another lease.
const TURNS: u32 = 4;

/// How many other keys a transaction that evicts a claim may concern in one way; etcd takes 128 conditions, and as many operations.
const OTHERS: usize = 120;

/// How long a release that was begun may take before whoever keeps the lease sees to it: its future may be kept, and not polled.
const POLLED_WITHIN: Duration = Duration::from_secs(3);

/// For how long an operator's client tries again what an eviction still needs, which nobody else does.
const PERSISTS_FOR: Duration = Duration::from_secs(10);

/// How often, at least half of it apart.
const PERSISTS_EVERY: Duration = Duration::from_millis(300);

/// A claim that is being released. Dropped before it is: whoever keeps its lease alive has to see to it.
struct Leaving<'a> {
    claims: &'a Claims,
    id: ClaimId,
    from: Instant,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.claims.leave(self.id, self.from);
    }
}

impl Store {
    /// Releases or withdraws a claim for good; with a `linger` the lock stays closed for that long.
    pub(super) async fn free_for_good(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        let from = self.now() + linger;
        self.claims.leaves(claim.id, from + POLLED_WITHIN);
        let leaving = Leaving { claims: &self.claims, id: claim.id, from };
        let freed = self.free(claim, linger).await?;
        std::mem::forget(leaving);
        // A sweep may have made good what an earlier attempt did not.
        Ok(if self.claims.answered(claim.id) { Freed::Removed } else { freed })
    }

    /// Frees a claim; with a `linger` the lock stays closed for that long.
    pub(super) async fn free(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        let Some(known) = self.claims.get(claim.id) else {
            let places = self.places(&claim.name).await?;
            if !places.iter().any(|place| place.is(claim.id)) {
                let closes = |lease| places.iter().any(|place| place.lease == lease);
                self.sessions.settle_closings(claim.id, closes).await;
            }
            return match places.iter().find(|place| place.is(claim.id) || place.is_evicted(claim.id)) {
                Some(place) if place.is_evicted(claim.id) => {
                    self.client.delete_as_seen(place).await?;
                    Ok(Freed::Absent)
                }
                Some(Place { key, created, lease, .. }) => {
                    let stand = Some(Stand { created: *created, lease: *lease });
                    self.end_detached(claim, key, *lease, stand, linger).await
                }
                None => Ok(Freed::Absent),
            };
        };
        let (freed, is_doubted) = if known.created.is_some() && !known.in_doubt() && linger.is_zero() {
            (self.delete_own(claim.id).await?, false)
        } else {
            self.end_own(claim, &known, linger).await?
        };
        // It may have been moved meanwhile.
        let known = self.claims.get(claim.id).unwrap_or(known);
        let now = self.now();
        match is_doubted {
            false if linger.is_zero() => self.claims.forget(claim.id),
            false => self.claims.forget_standing(claim.id, now + linger.min(STANDS_FOR) + POLLED_WITHIN),
            // A step of it may still come, which a keepalive sees to, once the lock is open.
            true => self.claims.leave(claim.id, now + linger),
        }
        let left = known.own_leases().map(|session| self.sessions.revoke(session));
        futures_util::future::join_all(left).await;
        Ok(freed)
    }

    /// Ends the key of a claim that another client made, and gives back the lease that it had for itself.
    async fn end_detached(
        &self,
        claim: &Claim,
        key: &[u8],
        lease: i64,
        stand: Option<Stand>,
        linger: Duration,
    ) -> Result<Freed> {
        let freed = self.end_key(claim, key, stand, &mut Vec::new(), linger).await?;
        self.sessions.give_back_theirs(lease).await;
        Ok(freed)
    }

    /// Deletes the key of a claim of this client.
    async fn delete_own(&self, id: ClaimId) -> Result<Freed> {
        let Some(deleting) = self.claims.deleting(id) else { return Ok(Freed::Absent) };
        let answer = self.client.delete(deleting.key()).await;
        deleting.came_to(&answer);
        let found = answer?.prev_kvs.first().map(Place::read);
        self.sessions.give_back_closed(&found).await;
        self.sessions.settle_closings(id, |_| false).await;
        // One that was evicted has only kept the lock closed.
        Ok(if found.is_some_and(|place| !place.is_evicted(id)) { Freed::Removed } else { Freed::Absent })
    }

    /// Ends the key of a claim of this client, wherever it stands, and says whether a step of it may still come.
    pub(super) async fn end_own(
        &self,
        claim: &Claim,
        known: &Known,
        linger: Duration,
    ) -> Result<(Freed, bool)> {
        let mut doubted = self.unfenced(known).await;
        let deleting = self.claims.deleting(claim.id);
        let freed = self.end_key(claim, &known.key, known.stand(), &mut doubted, linger).await;
        if let Some(deleting) = deleting {
            deleting.came_to(&freed);
        }
        Ok((freed?, !doubted.is_empty()))
    }

    /// The fences behind which a step of a claim may still come, for this caller to raise.
    pub(super) async fn unfenced(&self, known: &Known) -> Vec<Raise> {
        let mut doubted = Vec::with_capacity(known.doubts.len());
        for session in &known.doubts {
            doubted.extend(Raise::of(session, &self.client.env, known.doubted).await);
        }
        doubted
    }

    /// Deletes or closes a claim's key; for a claim in doubt, raises the fences of those sessions, and takes them out of
    /// `doubted`. Without `stand` it is read first whether the key is there.
    pub(super) async fn end_key(
        &self,
        claim: &Claim,
        key: &[u8],
        mut stand: Option<Stand>,
        doubted: &mut Vec<Raise>,
        linger: Duration,
    ) -> Result<Freed> {
        let (end, mut closing) = match linger.is_zero() {
            true => (wire::delete(key), None),
            false => self.close(claim, key, linger).await.map(|(put, lease)| (put, Some(lease)))?,
        };
        let (mut is_full, mut maybe_freed) = (false, false);
        for _ in 0..TURNS {
            doubted.retain(|raise| !raise.session().is_over());
            let raised = doubted.iter().filter(|_| !is_full);
            let fences = raised.map(|raise| RequestOp::from(raise.session().put()));
            let fences: Vec<RequestOp> = fences.collect();
            let txn = TxnRequest {
                compare: Stand::compare(stand, key),
                success: [end.clone()].into_iter().chain(fences.clone()).collect(),
                failure: [wire::get(key).into()].into_iter().chain(fences).collect(),
            };
            if let Some(lease) = &mut closing {
                self.sessions.closings.begin(claim.id, lease.keep());
            }
            let sent = self.now();
            let answer = match self.client.txn(txn).await {
                // On a full server the fence cannot be raised, but the key can be deleted.
                Err(error) if error.kind() == ErrorKind::Exhausted && !doubted.is_empty() && !is_full => {
                    is_full = true;
                    doubted.iter_mut().for_each(Raise::let_go);
                    // What it was asked for when it became full it refuses, and does.
                    maybe_freed = stand.is_some();
                    continue;
                }
                Ok(answer) => answer,
                Err(error) => {
                    let may_be_done = matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Exhausted);
                    if let Some(lease) = closing.as_mut().filter(|_| !may_be_done && !maybe_freed) {
                        lease.let_go();
                        self.sessions.closings.fail(claim.id, lease.id);
                    }
                    return Err(error);
                }
            };
            let Some(answer) = answer else {
                // Whatever was still to come is gone with the lease that is gone.
                for raise in doubted.iter() {
                    self.sessions.keep(raise.session(), Duration::ZERO).await?;
                }
                continue;
            };
            if !is_full {
                let (revision, now) = (answer.revision(), self.now());
                doubted.drain(..).for_each(|raise| raise.raised(revision, sent, now));
            }
            if answer.succeeded {
                let closes = |lease| closing.as_ref().is_some_and(|closing| closing.id == lease);
                self.sessions.settle_closings(claim.id, closes).await;
                return Ok(Freed::Removed);
            }
            match Stand::found(&answer, claim.id) {
                Some(found) => stand = Some(found),
                None => {
                    let place = answer.ranges().next().and_then(|range| range.kvs.first()).map(Place::read);
                    // An attempt of before may have closed it unheard, or the server has done what it refused.
                    let closes = |lease| place.as_ref().is_some_and(|place| place.lease == lease);
                    self.sessions.settle_closings(claim.id, closes).await;
                    let is_freed = maybe_freed && place.is_none();
                    if let Some(place) = place.filter(|place| place.is_evicted(claim.id)) {
                        self.client.delete_as_seen(&place).await?;
                    }
                    return Ok(if is_freed { Freed::Removed } else { Freed::Absent });
                }
            }
        }
        Err(Error::new(ErrorKind::Unknown, "the claim was moved from lease to lease while it was released"))
    }

    /// An operator's release; opens a lock that lingers closed as well.
    pub(super) async fn evict_claim(&self, name: &LockName, id: ClaimId) -> Result<Freed> {
        for turn in 1..=TURNS {
            let places = self.places(name).await?;
            let lingers = |place: &&Place| matches!(place.standing, Standing::Closed { evicted: None, .. });
            let lingering: Vec<Place> = places.iter().filter(lingers).cloned().collect();
            let open = |place: &Place| !matches!(place.standing, Standing::Closed { .. });
            let at = places.iter().position(|place| open(place) && place.id() == id);
            let Some((ahead, [place, ..])) = at.and_then(|at| places.split_at_checked(at)) else {
                for closed in &lingering {
                    self.client.delete_as_seen(closed).await?;
                }
                if let Some(evicted) = places.iter().find(|place| place.is_evicted(id)) {
                    self.end_eviction(evicted).await?;
                }
                return Ok(Freed::Absent);
            };
            // It may have held the lock beside one who has closed it since, unless it is exclusive.
            let counts = |ahead: &&Place| place.mode() == Mode::Exclusive || !lingers(ahead);
            let ahead: Vec<Place> = ahead.iter().filter(counts).cloned().collect();
            let freed = match in_the_way(&ahead, place) {
                Some(few) if few.len() <= OTHERS => self.evict_waiter(place, few, &lingering).await?,
                few => {
                    let freed = self.evict_holder(place, &lingering, turn).await?;
                    if few.is_some() && freed == Freed::Removed {
                        // If this fails, time opens what it closes.
                        let _ = self.open_if_it_waits(name, place).await;
                    }
                    freed
                }
            };
            if freed == Freed::Removed {
                return Ok(freed);
            }
        }
        Err(Error::new(ErrorKind::Unknown, "the claim was moved from lease to lease while it was evicted"))
    }

    /// Puts a waiter out of the queue if all who were in its way still are: else it may hold the lock by now, and has to be
    /// told before another does. Its own key may stand as it did, where its TTL is as short as a place's.
    async fn evict_waiter(&self, place: &Place, in_the_way: &[Place], lingering: &[Place]) -> Result<Freed> {
        let unchanged = in_the_way.iter().map(|other| Compare::modified(&other.key, other.modified));
        let stand = Stand { created: place.created, lease: place.lease };
        let compare = Stand::compare(Some(stand), &place.key).into_iter().chain(unchanged).collect();
        let success = [wire::delete(&place.key)].into_iter().chain(opens(lingering)).collect();
        let txn = TxnRequest { compare, success, failure: Vec::new() };
        let deleted = self.client.txn(txn).await?.is_some_and(|answer| answer.succeeded);
        if deleted {
            self.sessions.give_back_closed(opened(lingering)).await;
        }
        Ok(if deleted { Freed::Removed } else { Freed::Absent })
    }

    /// Opens what the eviction of a waiter has closed. Who is in its way now was so when it was evicted, for nobody gets ahead of
    /// anybody: so it held nothing.
    async fn open_if_it_waits(&self, name: &LockName, evicted: &Place) -> Result<()> {
        let places = self.places(name).await?;
        let at = places.iter().position(|place| place.created == evicted.created);
        if let Some((ahead, [place, ..])) = at.and_then(|at| places.split_at_checked(at))
            && in_the_way(ahead, place).is_some()
        {
            self.client.delete_as_seen(place).await?;
        }
        Ok(())
    }

    /// Takes the lock from its holder, but keeps it closed until the holder has heard of that and released it, until its lease
    /// would have run out, or [`NOTICE`] has passed. Another program's holder has nothing that would open it again.
    async fn evict_holder(&self, place: &Place, lingering: &[Place], turn: u32) -> Result<Freed> {
        // It may renew its lease before this is written, so what is left of that now says nothing.
        let (granted, unrenewed) = self.granted_for(place.lease).await?.unwrap_or((NOTICE, NOTICE));
        let time = granted.min(NOTICE);
        let Some(value) = record::evicted(place, time, self.client.env.clock().wall())? else {
            return self.client.delete_as_seen(place).await;
        };
        let ticket = self.ticket(turn).await?;
        // A server that stood still does this before it looks which leases are over, the ticket's and this one among them. Unless
        // what the holder had is over by then as well, its notice is not.
        let lease = self.sessions.grant(granted + time + ticket.slack()).await?.keep();
        let stand = Stand { created: place.created, lease: place.lease };
        let put = PutRequest { key: place.key.clone(), value, lease, ..PutRequest::default() };
        let compare = Stand::compare(Some(stand), &place.key);
        let put = [put.into(), touch(keys::session(self.prefix(), place.lease))];
        let success = put.into_iter().chain(opens(lingering)).collect();
        let txn = TxnRequest { compare, success, failure: Vec::new() };
        let is_evicted = match self.write_in_time(&ticket, txn).await {
            // It may be done: what nobody answered, and what a full server refuses.
            Err(error) if matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Exhausted) => {
                match self.persist(|| self.settled(&ticket, &place.key)).await {
                    Ok(Some(own)) if own.is_evicted(place.id()) => true,
                    Ok(None) => false,
                    settled => {
                        if settled.is_ok() {
                            self.sessions.revoke_lease(lease).await;
                        }
                        return Err(error);
                    }
                }
            }
            written => written?,
        };
        if !is_evicted {
            self.sessions.revoke_lease(lease).await;
            return Ok(Freed::Absent);
        }
        // If this fails, it stays closed for longer to who does not wait for it, unless it is evicted again.
        let _ = self.persist(|| self.shorten(Stand { lease, ..stand }, &place.key, time)).await;
        self.sessions.give_back_closed(opened(lingering)).await;
        // A holder that lives renews its own and gives it back, and is not to hear that it ended. Of a shell's, nobody would.
        if unrenewed >= NOTICE {
            self.sessions.give_back_theirs(place.lease).await;
        }
        Ok(Freed::Removed)
    }

    /// Shortens what an earlier eviction left: its evictor may have had no time for that.
    async fn end_eviction(&self, evicted: &Place) -> Result<()> {
        let Place { key, created, lease, standing: Standing::Closed { time, .. }, .. } = evicted else {
            return Ok(());
        };
        let time = (*time).min(NOTICE);
        if self.left(*lease).await?.is_some_and(|left| left > time) {
            self.persist(|| self.shorten(Stand { created: *created, lease: *lease }, key, time)).await?;
        }
        Ok(())
    }

    /// Tries again what fails for a moment.
    async fn persist<T, F: Future<Output = Result<T>>>(&self, attempt: impl Fn() -> F) -> Result<T> {
        let (env, until) = (&self.client.env, self.now() + PERSISTS_FOR);
        loop {
            let answer = attempt().await;
            let again = self.now() + PERSISTS_EVERY.mul_f64(0.5 + 0.5 * env.random().jitter());
            if again > until || !answer.as_ref().is_err_and(Error::is_transient) {
                return answer;
            }
            env.sleep_until(again).await;
        }
    }

    /// Has what an eviction closed open when its time is up, by a lease that was granted after it was closed. However late or
    /// often that is done, it is not open sooner.
    async fn shorten(&self, stand: Stand, key: &[u8], time: Duration) -> Result<()> {
        let short = self.sessions.grant(time).await?.keep();
        let success = vec![hang(key, short)];
        let txn = TxnRequest { compare: Stand::compare(Some(stand), key), success, failure: Vec::new() };
        let answer = self.client.txn(txn).await?;
        let answer = answer.ok_or_else(|| Error::new(ErrorKind::Unavailable, "a lease ended too soon"))?;
        self.sessions.revoke_lease(stand.lease).await;
        if !answer.succeeded {
            self.sessions.revoke_lease(short).await;
        }
        Ok(())
    }

    /// The claim of this id, wherever it was made.
    pub(super) async fn find(&self, name: &LockName, id: ClaimId) -> Result<Option<Place>> {
        Ok(self.places(name).await?.into_iter().find(|place| place.is(id)))
    }

    /// Writes a claim's record anew; false when the claim is gone.
    pub(super) async fn rewrite(&self, claim: &Claim, known: &Known, value: Vec<u8>) -> Result<bool> {
        let put = PutRequest { key: known.key.to_vec(), value, ignore_lease: true, ..PutRequest::default() };
        let mut stand = known.stand();
        for _ in 0..TURNS {
            let txn = TxnRequest {
                compare: Stand::compare(stand, &known.key),
                success: vec![put.clone().into()],
                failure: vec![wire::get(&known.key).into()],
            };
            let Some(answer) = self.client.txn(txn).await? else { return Ok(false) };
            if answer.succeeded {
                return Ok(true);
            }
            match Stand::found(&answer, claim.id) {
                Some(found) => stand = Some(found),
                None => return Ok(false),
            }
        }
        Err(Error::new(ErrorKind::Unknown, "the claim was moved from lease to lease"))
    }
}

/// Opens a lock that lingers closed, as far as it still does. Along with the eviction: else it goes to the evicted claim first.
fn opens(lingering: &[Place]) -> impl Iterator<Item = RequestOp> {
    opened(lingering).map(|closed| {
        let compare = vec![Compare::created(&closed.key, closed.created)];
        TxnRequest { compare, success: vec![wire::delete(&closed.key)], failure: Vec::new() }.into()
    })
}

/// Those of them that are opened so.
fn opened(lingering: &[Place]) -> impl Iterator<Item = &Place> {
    lingering.iter().take(OTHERS)
}

/// Those of all ahead who alone keep a claim waiting; `None` when it holds the lock.
fn in_the_way<'a>(ahead: &'a [Place], place: &Place) -> Option<&'a [Place]> {
    let keep = |few: &[Place]| !admits(few.iter().map(Place::mode), place.mode());
    let mut each = ahead.iter().map(std::slice::from_ref);
    each.find(|one| keep(one)).or_else(|| {
        let counts: Vec<usize> = (0..=ahead.len()).collect();
        // More ahead let nobody in whom fewer keep waiting.
        let enough = counts.partition_point(|count| !ahead.get(..*count).is_some_and(keep));
        ahead.get(..enough)
    })
}

/// How a claim's key stood when it was last seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stand {
    pub(super) created: i64,
    pub(super) lease: i64,
}

impl Stand {
    /// What holds of a key that still stands like that; of no key, where it was not seen yet.
    pub(super) fn compare(stand: Option<Stand>, key: &[u8]) -> Vec<Compare> {
        match stand {
            Some(Stand { created, lease }) => {
                vec![Compare::created(key, created), Compare::lease(key, lease)]
            }
            None => vec![Compare::created(key, -1)],
        }
    }

    /// How the key stands that was read because it did not stand as expected; `None` when the claim is gone.
    pub(super) fn found(answer: &TxnResponse, id: ClaimId) -> Option<Stand> {
        let kv = answer.ranges().next()?.kvs.first()?;
        let stand = Stand { created: kv.create_revision, lease: kv.lease };
        Place::read(kv).is(id).then_some(stand)
    }
}
