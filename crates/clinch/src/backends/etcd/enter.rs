//! One step of a claim: a transaction that makes its key and finds what is ahead, or a read once it has a place.

use std::sync::Arc;
use std::time::Duration;

use super::claims::{Claims, Known};
use super::client::Found;
use super::free::Stand;
use super::record::{self, Place};
use super::session::Session;
use super::step::Step;
use super::store::Store;
use super::turn::{PLACE_TTL, Turn};
use super::view::View;
use super::wire::{self, Compare, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse};
use crate::backend::{Busy, Grant, Progress};
use crate::claim::{Claim, ClaimId, Mode};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::queue::{admits, agree_on_capacity};
use crate::token::Token;

/// How often a try among readers or permits reads again because others came and went meanwhile, before it takes a place to find out.
const TRIES: usize = 2;

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
    session: &'a Arc<Session>,
    env: &'a Env,
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        self.claims.doubt(self.id, self.session, self.env.now());
    }
}

impl Store {
    /// Takes one step of a claim.
    pub(super) async fn enter(&self, claim: &Claim, step: &Arc<Step>) -> Result<Entered> {
        let sent = self.now();
        let known = match self.claims.get(claim.id).filter(Known::is_good) {
            Some(known) => known,
            None => self.begin(claim, step).await?,
        };
        if let Some(created) = known.created {
            return self.look(claim, &known, created, sent).await;
        }
        // An earlier step may have kept it long ago.
        if self.sessions.keep(&known.session, known.session.ttl / 3).await?.is_none() {
            return Ok(Entered::Again);
        }
        match claim.enqueue {
            true => self.enqueue(claim, &known, sent).await,
            false => self.try_now(claim, &known, sent).await,
        }
    }

    /// Takes in a claim that is new, or whose former key was lost or given up; what may stand of that is ended first.
    async fn begin(&self, claim: &Claim, step: &Arc<Step>) -> Result<Known> {
        let queue = self.queue(&claim.name);
        let former = self.claims.get(claim.id);
        // On the same lease, a step of it that came through unheard is found.
        let session = self.carrier_to_be(claim, former.as_ref()).await?;
        if let Some(known) = self.claims.begin(claim.id, session.clone(), &queue, step, false, self.now()) {
            return Ok(known);
        }
        let is_doubted = match former {
            Some(former) => self.end_own(claim, &former, Duration::ZERO).await?.1,
            None => false,
        };
        let known = self.claims.begin(claim.id, session, &queue, step, !is_doubted, self.now());
        known.ok_or_else(may_still_come)
    }

    /// Makes the claim's key: on the lease of its TTL if nobody else is there, for then it is granted; else on that of the
    /// places, and finds what is ahead of it.
    async fn enqueue(&self, claim: &Claim, known: &Known, sent: Instant) -> Result<Entered> {
        let queue = self.queue(&claim.name);
        let session = &known.session;
        // Without a session for places this is a try, which tells whether one is needed.
        let place = match session.ttl <= PLACE_TTL {
            true => Some(session.clone()),
            false => self.sessions.fresh(PLACE_TTL, 2),
        };
        let failure = match &place {
            Some(place) => {
                let reads = ahead(&queue, claim.mode, 0).map(RequestOp::from);
                let success = [self.put(claim, known, place.lease)?].into_iter().chain(reads).collect();
                let behind = TxnRequest { compare: conditions(known), success, failure: stands(known) };
                vec![behind.into()]
            }
            None => stands(known),
        };
        if let Some(place) = &place {
            // From now on it may hang on either.
            self.claims.placed(claim.id, place.clone());
        }
        let compare = conditions(known).into_iter().chain([Compare::empty(&queue)]).collect();
        let success = vec![self.put(claim, known, session.lease)?];
        let Some(answer) = self.make(claim, known, TxnRequest { compare, success, failure }).await? else {
            if let Some(place) = &place {
                self.sessions.keep(place, Duration::ZERO).await?;
            }
            return Ok(Entered::Again);
        };
        let created = answer.revision();
        if answer.succeeded {
            self.made(claim, created)?;
            self.seen(claim.id, Stand { created, lease: session.lease }, created);
            return self.granted(claim, session, created, sent).await;
        }
        let Some(inner) = answer.inner() else {
            if self.stands_as_expected(claim, known, &answer).await? {
                self.sessions.open(PLACE_TTL, false).await?;
            }
            return Ok(Entered::Again);
        };
        if !inner.succeeded {
            self.stands_as_expected(claim, known, inner).await?;
            return Ok(Entered::Again);
        }
        self.made(claim, created)?;
        let found = inner.ranges().cloned().collect();
        match self.claims.get(claim.id) {
            Some(known) => {
                self.judge(claim, &known, created, Found { revision: created, ranges: found }, sent).await
            }
            None => Ok(Entered::Again),
        }
    }

    /// Makes the claim's key only if that is a grant, where few come and go.
    async fn try_now(&self, claim: &Claim, known: &Known, sent: Instant) -> Result<Entered> {
        let queue = self.queue(&claim.name);
        let mut condition = Compare::empty(&queue);
        for _ in 0..TRIES {
            let limit = i64::from(claim.mode == Mode::Exclusive);
            let look = RangeRequest { limit, ..wire::scan(&queue) };
            let compare = conditions(known).into_iter().chain([condition]).collect();
            let success = vec![self.put(claim, known, known.session.lease)?];
            let failure = [look.into()].into_iter().chain(stands(known)).collect();
            let Some(answer) = self.make(claim, known, TxnRequest { compare, success, failure }).await?
            else {
                return Ok(Entered::Again);
            };
            if answer.succeeded {
                let (created, session) = (answer.revision(), &known.session);
                self.made(claim, created)?;
                self.seen(claim.id, Stand { created, lease: session.lease }, created);
                return self.granted(claim, session, created, sent).await;
            }
            if !self.stands_as_expected(claim, known, &answer).await? {
                return Ok(Entered::Again);
            }
            let places = places(answer.ranges().next().map_or(&[], |range| &range.kvs));
            let modes = || places.iter().map(Place::mode);
            agree(&places, claim.mode)?;
            if !admits(modes(), claim.mode) {
                if self.open_overdue(&places).await? {
                    return Ok(Entered::Again);
                }
                if self.claims.with(claim.id, Known::in_doubt) == Some(true) {
                    // Nobody releases what was refused, so an earlier step of it must not come any more. Where that cannot be
                    // made sure at once, it is with the next keepalive.
                    self.free(claim, Duration::ZERO).await?;
                } else {
                    self.claims.forget(claim.id);
                    if known.session.isolated {
                        self.sessions.revoke(&known.session).await;
                    }
                }
                return Ok(Entered::Done(Progress::Busy(busy(&places))));
            }
            condition = Compare::unchanged_since(&queue, answer.revision());
        }
        // Of a herd, one gets in so in each round. With a place, nobody's coming and going is in the way.
        if known.session.ttl > PLACE_TTL && self.sessions.fresh(PLACE_TTL, 2).is_none() {
            self.sessions.open(PLACE_TTL, false).await?;
        }
        self.enqueue(claim, known, sent).await
    }

    /// Reads what is ahead of a claim that has its place, and that it still has it: etcd's own recipes once granted
    /// locks to waiters whose lease had ended (etcd#11456).
    async fn look(&self, claim: &Claim, known: &Known, created: i64, sent: Instant) -> Result<Entered> {
        let queue = self.queue(&claim.name);
        let stand = Stand { created, lease: known.carrier().lease };
        let is_clear = self.claims.view(claim.id).is_none_or(|view| view.is_clear());
        // Mostly it is the first by now, or nearly; and etcd goes through the whole queue for every range.
        let few = RangeRequest { max_create_revision: created, limit: FEW, ..wire::scan(&queue) };
        let mut found = None;
        // Once the predecessor is gone, nobody else is ahead, mostly; then one request does all.
        if known.place.is_some() && claim.mode == Mode::Exclusive && is_clear {
            match self.take_turn(claim, known, stand, Some(few.clone()), sent).await? {
                Turn::Taken(entered) => return Ok(entered),
                Turn::NotYet(read) => found = read,
                Turn::Full(_) => {}
            }
        }
        let mut found = match found {
            Some(found) => found,
            None => self.client.read(vec![few]).await?,
        };
        let last = found.ranges.first().and_then(|range| range.kvs.get(FEW as usize - 1));
        if last.is_some_and(|last| last.create_revision < created) {
            found = self.client.read(ahead(&queue, claim.mode, created).collect()).await?;
        }
        self.judge(claim, known, created, found, sent).await
    }

    /// Grants or queues a claim, by what was read of its queue.
    async fn judge(
        &self,
        claim: &Claim,
        known: &Known,
        created: i64,
        found: Found,
        sent: Instant,
    ) -> Result<Entered> {
        let revision = found.revision;
        let mut found = found.ranges.iter();
        let mut kvs: Vec<&KeyValue> =
            found.next().map(|range| range.kvs.iter().collect()).unwrap_or_default();
        let first = found.next().and_then(|range| range.kvs.first());
        kvs.sort_unstable_by_key(|kv| kv.create_revision);
        let own = kvs.pop().filter(|own| own.key[..] == *known.key && own.create_revision == created);
        let own = own.map(Place::read);
        let Some(own) = own.as_ref().filter(|own| !own.is_evicted(claim.id)) else {
            if let Some(evicted) = &own {
                // Evicted as a holder, for its turn had come unheard; it held nothing, and would queue behind that.
                self.client.delete_as_seen(evicted).await?;
            }
            self.claims.deleted(claim.id, created);
            return Ok(Entered::Again);
        };
        // Perhaps it was moved by a step whose answer did not come: what was known before tells nothing of its lease.
        let stand = Stand { created, lease: own.lease };
        self.seen(claim.id, stand, revision);
        let Some(known) = self.claims.get(claim.id).filter(|known| known.stand() == Some(stand)) else {
            return Ok(Entered::Again);
        };
        let ahead: Vec<Place> = kvs.into_iter().map(Place::read).collect();
        if let Err(error) = agree(&ahead, claim.mode) {
            self.free(claim, Duration::ZERO).await?;
            return Err(error);
        }
        if admits(ahead.iter().map(Place::mode), claim.mode) {
            return self.take_or_keep(claim, &known, stand, sent).await;
        }
        let first = first.map(|first| vec![Place::read(first)]);
        if self.open_overdue(first.as_ref().unwrap_or(&ahead)).await? {
            return Ok(Entered::Again);
        }
        let carrier = known.carrier();
        let place_ttl = Some(claim.ttl.min(carrier.left(sent, self.client.env.drift())));
        let busy = Busy { place_ttl, ..busy(first.as_ref().unwrap_or(&ahead)) };
        let mut view = View::new(claim.mode, self.now(), revision, ahead);
        let drift = self.client.env.drift();
        if let Some(before) = self.claims.view(claim.id) {
            view.date_closing(Some(&before), drift);
            let queue = self.queue(&claim.name);
            let key =
                if view.watches_all() { Some(&queue) } else { view.ahead.last().map(|place| &place.key) };
            if let Some(key) = key {
                view.inherit(&before, key);
            }
        } else {
            view.date_closing(None, drift);
        }
        self.claims.set_view(claim.id, Some(Arc::new(view)));
        Ok(Entered::Done(Progress::Queued(busy)))
    }

    /// Grants a claim that has nobody in its way, and whose key is known to stand like that.
    async fn take_or_keep(
        &self,
        claim: &Claim,
        known: &Known,
        stand: Stand,
        sent: Instant,
    ) -> Result<Entered> {
        if stand.lease == known.session.lease {
            return self.granted(claim, &known.session, stand.created, sent).await;
        }
        match self.take_turn(claim, known, stand, None, sent).await? {
            Turn::Taken(entered) => Ok(entered),
            Turn::NotYet(_) => Ok(Entered::Again),
            // Whoever renews its lease may have it for as long as the place lives, which is then renewed as often.
            Turn::Full(_) if !claim.isolated && known.moves.astray().is_none() => {
                self.granted(claim, known.carrier(), stand.created, sent).await
            }
            Turn::Full(error) => Err(error),
        }
    }

    /// Grants a claim that has nobody in its way, and whose key hangs on this lease; unless most of its time has passed since
    /// that was renewed: then that is done first, and its place read once more.
    pub(super) async fn granted(
        &self,
        claim: &Claim,
        carrier: &Arc<Session>,
        created: i64,
        sent: Instant,
    ) -> Result<Entered> {
        // A move that is unheard of may still come.
        let known = self.claims.get(claim.id);
        let targets = known.iter().flat_map(|known| known.moves.targets());
        let carriers: Vec<_> = targets.chain([carrier]).collect();
        let ttl = carriers.iter().map(|carrier| carrier.ttl).fold(claim.ttl, Duration::min);
        let dates = carriers.iter().map(|carrier| carrier.dates(ttl, sent, self.client.env.drift()));
        let from = dates.fold(sent, Instant::min);
        if from < sent && self.now() > from + ttl / 2 {
            for carrier in carriers {
                self.sessions.keep(carrier, carrier.ttl / 4).await?;
            }
            return Ok(Entered::Again);
        }
        self.claims.set_view(claim.id, None);
        if !self.claims.take_grant(claim.id) {
            return Ok(Entered::Again);
        }
        let token = u64::try_from(created).ok().and_then(Token::new);
        let token = token.ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "etcd's revision is beyond 2^53, where tokens end")
        })?;
        Ok(Entered::Done(Progress::Granted(Grant { token, ttl: Some(ttl), from: Some(from) })))
    }

    pub(super) fn put(&self, claim: &Claim, known: &Known, lease: i64) -> Result<RequestOp> {
        let value = record::of(claim, claim.mode, self.client.env.clock().wall())?;
        Ok(PutRequest { key: known.key.to_vec(), value, lease, ..PutRequest::default() }.into())
    }

    /// Sends a transaction that may make a claim's key; `None` when a lease that it names is gone.
    async fn make(&self, claim: &Claim, known: &Known, txn: TxnRequest) -> Result<Option<TxnResponse>> {
        let doubt =
            Doubt { claims: &self.claims, id: claim.id, session: &known.session, env: &self.client.env };
        let answer = self.client.txn(txn).await;
        if !matches!(&answer, Err(error) if error.kind() == ErrorKind::Unknown) {
            std::mem::forget(doubt);
        }
        let answer = answer?;
        if answer.is_none() {
            // It may name two.
            self.sessions.keep(&known.session, Duration::ZERO).await?;
        }
        Ok(answer)
    }

    /// Takes in how key and session stand, by an answer that ends with what was read of them; false: not as expected, so
    /// that another turn has to be taken.
    async fn stands_as_expected(&self, claim: &Claim, known: &Known, answer: &TxnResponse) -> Result<bool> {
        let session = &known.session;
        let fence = session.fence.revision();
        let mut ends = answer.ranges().collect::<Vec<_>>().into_iter().rev();
        let (fenced, own) = (ends.next().and_then(|range| range.kvs.first()), ends.next());
        match fenced {
            // The session's key ends with its lease.
            None => self.sessions.end(session),
            Some(kv) => session.fence.seen(kv.mod_revision),
        }
        if let Some(kv) = own.and_then(|range| range.kvs.first()) {
            if Place::read(kv).is(claim.id) {
                // An earlier step had come through after all.
                self.made(claim, kv.create_revision)?;
            } else {
                self.move_over(claim, known).await?;
            }
            return Ok(false);
        }
        Ok(fenced.is_some_and(|kv| kv.mod_revision == fence))
    }

    /// Has a claim take another key, for something that is not its own stands under this one. No step of it may still come then: it
    /// would make the first one after all, and nobody would release that.
    async fn move_over(&self, claim: &Claim, known: &Known) -> Result<()> {
        let known = self.claims.get(claim.id).unwrap_or_else(|| known.clone());
        if known.in_doubt() {
            let mut doubted = self.unfenced(&known).await;
            self.end_key(claim, &known.key, None, &mut doubted, Duration::ZERO).await?;
            if !doubted.is_empty() {
                return Err(may_still_come());
            }
        }
        self.claims.move_over(claim.id, &self.queue(&claim.name), self.now());
        Ok(())
    }

    fn made(&self, claim: &Claim, created: i64) -> Result<()> {
        self.claims.made(claim.id, created);
        self.claims.watch_later(claim.id, &self.client.env, &self.watcher)
    }
}

/// What must hold for a claim's key to be made: it is not there, and the session's fence was not raised.
fn conditions(known: &Known) -> Vec<Compare> {
    let session = &known.session;
    vec![Compare::created(&known.key, 0), Compare::modified(&session.key, session.fence.revision())]
}

/// Reads how that stands.
fn stands(known: &Known) -> Vec<RequestOp> {
    vec![wire::get(&known.key).into(), wire::get(&known.session.key).into()]
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

fn may_still_come() -> Error {
    Error::new(ErrorKind::Unavailable, "an earlier step of the claim may still come")
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
