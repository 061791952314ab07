//! One step of a claim: a transaction that makes its key and finds what is ahead, or a read once it has a place.

use std::sync::Arc;
use std::time::Duration;

use super::claims::{Claims, Known};
use super::record::{self, Place};
use super::store::Store;
use super::view::View;
use super::wire::{self, Compare, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse};
use crate::backend::{Busy, Grant, Progress};
use crate::claim::{Claim, ClaimId, Mode};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::queue::{admits, agree_on_capacity};
use crate::token::Token;

/// How often a try among readers or permits reads again because others came and went meanwhile.
const TRIES: usize = 16;

/// How many keys, from the first on, a claim reads that looks for its turn.
const FEW: i64 = 16;

/// What a step came to.
#[allow(clippy::large_enum_variant, reason = "moved once, on its way to the caller")]
pub(super) enum Entered {
    Done(Progress),
    /// What it rested on has changed.
    Again,
}

/// A step whose answer has not come. Dropped before it does, or after it failed to: the step may still reach the server.
struct Doubt<'a> {
    claims: &'a Claims,
    id: ClaimId,
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        self.claims.doubt(self.id);
    }
}

impl Store {
    /// Takes one step of a claim.
    pub(super) async fn enter(&self, claim: &Claim) -> Result<Entered> {
        let sent = self.now();
        let known = match self.claims.get(claim.id).filter(Known::is_good) {
            Some(known) => known,
            None => {
                let session = self.sessions.open(claim.ttl, claim.isolated).await?;
                self.claims.begin(claim.id, session, &self.queue(&claim.name))
            }
        };
        match known.created {
            Some(created) => self.look(claim, &known, created, sent).await,
            None if claim.enqueue => self.enqueue(claim, &known, sent).await,
            None => self.try_now(claim, &known, sent).await,
        }
    }

    /// Makes the claim's key wherever the queue ends, and finds what is ahead of it.
    async fn enqueue(&self, claim: &Claim, known: &Known, sent: Instant) -> Result<Entered> {
        let mut success = vec![self.put(claim, known)?];
        success.extend(ahead(&self.queue(&claim.name), claim.mode, 0).map(RequestOp::from));
        let compare = vec![Compare::created(&known.key, 0)];
        let answer = self.make(claim, known, compare, success, Vec::new()).await?;
        let Some(answer) = answer.filter(|answer| answer.succeeded) else { return Ok(Entered::Again) };
        self.made(claim, answer.revision())?;
        self.judge(claim, known, answer.revision(), &answer, sent).await
    }

    /// Makes the claim's key only if that is a grant.
    async fn try_now(&self, claim: &Claim, known: &Known, sent: Instant) -> Result<Entered> {
        let queue = self.queue(&claim.name);
        let mut condition = Compare::empty(&queue);
        for _ in 0..TRIES {
            let limit = i64::from(claim.mode == Mode::Exclusive);
            let look = RangeRequest { limit, ..wire::scan(&queue) };
            let compare = vec![condition, Compare::created(&known.key, 0)];
            let success = vec![self.put(claim, known)?];
            let answer = match self.make(claim, known, compare, success, vec![look.into()]).await? {
                Some(answer) if answer.succeeded => {
                    self.made(claim, answer.revision())?;
                    return self.granted(claim, known, answer.revision(), sent).await;
                }
                Some(answer) => answer,
                None => return Ok(Entered::Again),
            };
            let places = places(answer.ranges().next().map_or(&[], |range| &range.kvs));
            let modes = || places.iter().map(Place::mode);
            agree(&places, claim.mode)?;
            if !admits(modes(), claim.mode) {
                if self.claims.get(claim.id).is_some_and(|known| known.in_doubt) {
                    // Nobody releases what was refused, so an earlier step of it must not come any more.
                    self.free(claim, Duration::ZERO).await?;
                }
                self.claims.forget(claim.id);
                if known.session.isolated {
                    self.sessions.revoke(&known.session).await;
                }
                return Ok(Entered::Done(Progress::Busy(busy(&places))));
            }
            condition = Compare::unchanged_since(&queue, answer.revision());
        }
        Err(Error::new(ErrorKind::Unavailable, "others came and went faster than this claim could look"))
    }

    /// Reads what is ahead of a claim that has its place, and that it still has it: etcd's own recipes once granted
    /// locks to waiters whose lease had ended (etcd#11456).
    async fn look(&self, claim: &Claim, known: &Known, created: i64, sent: Instant) -> Result<Entered> {
        let queue = self.queue(&claim.name);
        // Mostly it is the first by now, or nearly; and etcd goes through the whole queue for every range.
        let few = RangeRequest { max_create_revision: created, limit: FEW, ..wire::scan(&queue) };
        let reads = TxnRequest { success: vec![few.into()], ..TxnRequest::default() };
        let Some(mut answer) = self.client.txn(reads).await? else { return Ok(Entered::Again) };
        let last = answer.ranges().next().and_then(|range| range.kvs.get(FEW as usize - 1));
        if last.is_some_and(|last| last.create_revision < created) {
            let reads = ahead(&queue, claim.mode, created).map(RequestOp::from);
            let reads = TxnRequest { success: reads.collect(), ..TxnRequest::default() };
            let Some(again) = self.client.txn(reads).await? else { return Ok(Entered::Again) };
            answer = again;
        }
        self.judge(claim, known, created, &answer, sent).await
    }

    /// Grants or queues a claim, by what was read of its queue.
    async fn judge(
        &self,
        claim: &Claim,
        known: &Known,
        created: i64,
        answer: &TxnResponse,
        sent: Instant,
    ) -> Result<Entered> {
        let mut found = answer.ranges();
        let mut kvs: Vec<&KeyValue> =
            found.next().map(|range| range.kvs.iter().collect()).unwrap_or_default();
        let first = found.next().and_then(|range| range.kvs.first());
        kvs.sort_unstable_by_key(|kv| kv.create_revision);
        let own = kvs.pop();
        if own.is_none_or(|own| own.key[..] != *known.key || own.create_revision != created) {
            self.claims.deleted(claim.id, created);
            self.settle(claim.id);
            return Ok(Entered::Again);
        }
        let ahead: Vec<Place> = kvs.into_iter().map(Place::read).collect();
        if let Err(error) = agree(&ahead, claim.mode) {
            self.free(claim, Duration::ZERO).await?;
            return Err(error);
        }
        if admits(ahead.iter().map(Place::mode), claim.mode) {
            return self.granted(claim, known, created, sent).await;
        }
        let place_ttl = Some(claim.ttl.min((known.session.confirmed() + known.session.ttl).since(sent)));
        let busy = Busy { place_ttl, ..busy(&first.map_or(ahead.clone(), |first| vec![Place::read(first)])) };
        let mut view = View::new(claim.mode, answer.revision(), ahead);
        let drift = self.client.env.drift();
        if let Some(before) = self.claims.view(claim.id) {
            view.date_closing(Some(&before), self.now(), drift);
            let queue = self.queue(&claim.name);
            let key =
                if view.watches_all() { Some(&queue) } else { view.ahead.last().map(|place| &place.key) };
            if let Some(key) = key {
                view.inherit(&before, key);
            }
        } else {
            view.date_closing(None, self.now(), drift);
        }
        self.claims.set_view(claim.id, Some(Arc::new(view)));
        Ok(Entered::Done(Progress::Queued(busy)))
    }

    /// Grants a claim, unless most of its time has passed since its lease was renewed: then that is done first, and its
    /// place read once more.
    async fn granted(&self, claim: &Claim, known: &Known, created: i64, sent: Instant) -> Result<Entered> {
        let from = known.session.dates(claim.ttl, sent, self.client.env.drift());
        if from < sent && self.now() > from + claim.ttl / 2 {
            self.sessions.keep(&known.session, known.session.ttl / 4).await?;
            return Ok(Entered::Again);
        }
        self.claims.set_view(claim.id, None);
        if self.claims.get(claim.id).is_some_and(|known| !known.is_good()) {
            return Ok(Entered::Again);
        }
        let token = u64::try_from(created).ok().and_then(Token::new);
        let token = token.ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "etcd's revision is beyond 2^53, where tokens end")
        })?;
        let ttl = Some(claim.ttl.min(known.session.ttl));
        Ok(Entered::Done(Progress::Granted(Grant { token, ttl, from: Some(from) })))
    }

    fn put(&self, claim: &Claim, known: &Known) -> Result<RequestOp> {
        let value = record::of(claim, claim.mode, self.client.env.clock().wall())?;
        let (key, lease) = (known.key.to_vec(), known.session.lease);
        Ok(PutRequest { key, value, lease, ..PutRequest::default() }.into())
    }

    /// Sends a transaction that makes a claim's key. `None`: another turn has to be taken, for the lease is gone, the
    /// fence was raised, or the key is there already.
    async fn make(
        &self,
        claim: &Claim,
        known: &Known,
        mut compare: Vec<Compare>,
        success: Vec<RequestOp>,
        failure: Vec<RequestOp>,
    ) -> Result<Option<TxnResponse>> {
        let session = &known.session;
        let fence = session.fence();
        compare.push(Compare::modified(&session.key, fence));
        let own = [wire::get(&known.key).into(), wire::get(&session.key).into()];
        let failure: Vec<RequestOp> = failure.into_iter().chain(own).collect();
        let doubt = Doubt { claims: &self.claims, id: claim.id };
        let answer = self.client.txn(TxnRequest { compare, success, failure }).await;
        if !matches!(&answer, Err(error) if error.kind() == ErrorKind::Unknown) {
            std::mem::forget(doubt);
        }
        let Some(answer) = answer? else {
            self.sessions.end(session);
            return Ok(None);
        };
        if answer.succeeded {
            return Ok(Some(answer));
        }
        let mut ends = answer.ranges().collect::<Vec<_>>().into_iter().rev();
        let (fenced, own) = (ends.next().and_then(|range| range.kvs.first()), ends.next());
        match fenced {
            // The session's key ends with its lease.
            None => self.sessions.end(session),
            Some(kv) => session.raise_fence(kv.mod_revision),
        }
        if let Some(kv) = own.and_then(|range| range.kvs.first()) {
            if Place::read(kv).is(claim.id) {
                // An earlier step had come through after all.
                self.made(claim, kv.create_revision)?;
            } else {
                self.claims.move_over(claim.id, &self.queue(&claim.name));
            }
            return Ok(None);
        }
        let same = fenced.is_some_and(|kv| kv.mod_revision == fence);
        Ok(same.then_some(answer))
    }

    fn made(&self, claim: &Claim, created: i64) -> Result<()> {
        self.claims.made(claim.id, created);
        self.claims.watch_later(claim.id, &self.client.env, &self.watcher)
    }

    /// Forgets a place in the queue that is gone, unless a step of it may still reach the server.
    fn settle(&self, id: ClaimId) {
        if self.claims.get(id).is_some_and(|known| !known.in_doubt) {
            self.claims.forget(id);
        }
    }
}

/// Reads what a claim must know: for an exclusive one its predecessor and the first in line, else all that is ahead; the
/// claim itself included. `created` is where it stands; 0: at the end.
fn ahead(queue: &[u8], mode: Mode, created: i64) -> impl Iterator<Item = RangeRequest> + use<> {
    let all = RangeRequest { max_create_revision: created, ..wire::scan(queue) };
    let (last, first) = match mode {
        Mode::Exclusive => {
            let last = RangeRequest { sort_order: wire::DESCEND, limit: 2, ..all.clone() };
            (last, Some(RangeRequest { limit: 1, ..all }))
        }
        Mode::Shared | Mode::Permits { .. } => (all, None),
    };
    [Some(last), first].into_iter().flatten()
}

fn places(kvs: &[KeyValue]) -> Vec<Place> {
    kvs.iter().map(Place::read).collect()
}

/// Refuses a claim that disagrees about the capacity with the first ahead that has one: whoever came after that and
/// disagrees is about to be refused as well.
fn agree(ahead: &[Place], mode: Mode) -> Result<()> {
    let first = ahead.iter().map(Place::mode).find(|mode| matches!(mode, Mode::Permits { .. }));
    agree_on_capacity(first, mode)
}

fn busy(places: &[Place]) -> Busy {
    let holder = places.first().and_then(|first| first.state(true, None));
    let ahead = places.iter().filter(|place| place.state(false, None).is_some()).count();
    Busy { ahead: u32::try_from(ahead).unwrap_or(u32::MAX), holder, ..Busy::default() }
}
