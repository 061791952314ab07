//! Turns: how a place in the queue becomes a grant, and what becomes of one that nobody takes.
//!
//! A waiter's key hangs on a lease of a few seconds, however long its TTL, so that a waiter that died is soon out of the
//! way. When its turn has come, the key moves to the lease of its TTL: no grant rests on a short one. A put keeps the
//! revision that created the key, and with it its place and its token.

use std::sync::Arc;
use std::time::Duration;

use super::claims::{Claims, Known};
use super::client::{Client, Found};
use super::enter::Entered;
use super::free::Stand;
use super::record::Place;
use super::session::Session;
use super::store::Store;
use super::wire::{self, Compare, RangeRequest, TxnRequest};
use crate::backend::{Freed, TAKE_WITHIN};
use crate::claim::{Claim, ClaimId, Mode};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::queue::admits;

/// How long a place in the queue lives without a renewal.
pub(super) const PLACE_TTL: Duration = Duration::from_secs(3);

/// Claims that are looked at with one renewal.
const AT_ONCE: usize = 16;

/// What came of a claim's try to take its turn.
#[allow(clippy::large_enum_variant, reason = "moved once, on its way to the caller")]
pub(super) enum Turn {
    Taken(Entered),
    /// Its key is not as it was, or others are ahead: what was read instead, if something was to be.
    NotYet(Option<Found>),
    /// The server takes no more writes.
    Full(Error),
}

impl Store {
    /// Grants a claim whose key stands like that, by hanging it on the lease of its TTL; with `if_first` on condition that
    /// nobody is ahead, else that is read.
    pub(super) async fn take_turn(
        &self,
        claim: &Claim,
        known: &Known,
        stand: Stand,
        if_first: Option<RangeRequest>,
        sent: Instant,
    ) -> Result<Turn> {
        let full = |error: Error| match error.kind() {
            ErrorKind::Exhausted => Ok(Turn::Full(error)),
            _ => Err(error),
        };
        let session = match self.carrier_to_be(claim, Some(known)).await {
            Ok(session) => session,
            Err(error) => return full(error),
        };
        if !self.claims.moving(claim.id, stand, &session) {
            // One that was made for it anew goes unused.
            let spare = (session.lease != known.session.lease).then_some(session);
            self.sessions.give_back(spare);
            return Ok(Turn::NotYet(None));
        }
        let mut compare = Stand::compare(Some(stand), &known.key);
        if if_first.is_some() {
            compare.push(Compare::none_before(&self.queue(&claim.name), stand.created));
        }
        let failure = if_first.into_iter().map(Into::into).collect();
        // Anew, for it says since when the claim holds. Whoever takes it away moves it.
        let success = vec![self.put(claim, known, session.lease)?];
        let answer = self.client.txn(TxnRequest { compare, success, failure }).await;
        let fail = || self.sessions.give_back(self.claims.not_moved(claim.id, stand.lease, &session));
        match answer {
            Ok(Some(answer)) if answer.succeeded => {
                self.seen(claim.id, Stand { lease: session.lease, ..stand }, answer.revision());
                self.granted(claim, &session, stand.created, sent).await.map(Turn::Taken)
            }
            Ok(Some(answer)) => {
                fail();
                let found = Found::from(answer);
                Ok(Turn::NotYet((!found.ranges.is_empty()).then_some(found)))
            }
            Ok(None) => {
                fail();
                self.sessions.end(&session);
                Ok(Turn::NotYet(None))
            }
            Err(error) => match self.is_moved_yet(claim.id, &known.key, stand, &session, &error).await? {
                true => Ok(Turn::NotYet(None)),
                false => full(error),
            },
        }
    }

    /// The session whose lease is to carry a claim that is granted, with most of its time left.
    pub(super) async fn carrier_to_be(&self, claim: &Claim, known: Option<&Known>) -> Result<Arc<Session>> {
        if let Some(Known { session, .. }) = known
            && self.sessions.keep(session, session.ttl / 3).await?.is_some()
        {
            return Ok(session.clone());
        }
        self.sessions.open(claim.ttl, claim.isolated).await
    }
}

/// Lets locks go on to the next whose turn has come for a claim on this lease, but whose waiter has not taken it for
/// [`TAKE_WITHIN`]: one whose future is kept but not polled never does, and others may keep the lease.
pub(super) async fn pass_on(client: &Arc<Client>, claims: &Arc<Claims>, lease: i64) {
    let before = client.env.now() - TAKE_WITHIN;
    let unheard = claims.unheard(lease, before, AT_ONCE);
    // What fails is tried again with the next keepalive.
    let passed =
        unheard.into_iter().map(|id| async move { drop(pass_on_one(client, claims, id, before).await) });
    futures_util::future::join_all(passed).await;
}

async fn pass_on_one(client: &Arc<Client>, claims: &Arc<Claims>, id: ClaimId, before: Instant) -> Result<()> {
    let Some(known) = claims.get(id) else { return Ok(()) };
    let found = client.read(vec![wire::get(&known.key)]).await?;
    let own = found.ranges.first().and_then(|range| range.kvs.first()).map(Place::read);
    // One that is not there may still come; its waiter then does not take it.
    let Some(own) = own.filter(|own| own.is(id)) else { return Ok(()) };
    let queue = known.key.iter().rposition(|byte| *byte == b'/').and_then(|end| known.key.get(..=end));
    let ahead =
        RangeRequest { max_create_revision: own.created - 1, ..wire::scan(queue.unwrap_or(&known.key)) };
    // An exclusive claim waits for anybody.
    let ahead = RangeRequest { limit: i64::from(own.mode() == Mode::Exclusive), ..ahead };
    let found = client.read(vec![ahead]).await?;
    let ahead = found.ranges.iter().flat_map(|range| &range.kvs).map(|kv| Place::read(kv).mode());
    if !admits(ahead, own.mode()) {
        return Ok(());
    }
    let Some(deleting) = claims.pass_on(id, &known.key, before) else { return Ok(()) };
    let deleted = client.delete_as_seen(&own).await;
    deleting.came_to(&deleted);
    if deleted? == Freed::Removed {
        claims.deleted(id, own.created);
    }
    Ok(())
}
