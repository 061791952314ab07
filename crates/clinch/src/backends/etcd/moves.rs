//! Moves: how a claim's key comes to hang on another lease, and how it is known on which one it does.
//!
//! Several may be under way at once, of an `extend` and of a renewal, and any answer may come late or never. So each is
//! conditional on the lease that the key hangs on, leads to one that does not end sooner, and is noted before it is sent; as long as
//! one is not answered, a renewal proves nothing before the key was seen. What an answer tells counts if it is newer than
//! what is known. No key comes back to a lease that it has left: so what was sent on condition of another lease than the one
//! that the key was seen on comes to nothing, and a lease of its own that no open move leads to can be given back.

use std::sync::Arc;
use std::time::Duration;

use super::claims::{Known, session_ended};
use super::free::Stand;
use super::keys;
use super::record::Place;
use super::session::Session;
use super::store::{Store, deleted};
use super::wire::{self, LeaseKeepAliveResponse, LeaseRequest, PutRequest, RequestOp, TxnRequest};
use crate::backend::{self, Renewal};
use crate::claim::{Claim, ClaimId};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};

/// How often a move is begun anew because the key had been moved to another lease, or leases end under it.
const TURNS: u32 = 8;

/// What is known of the moves of one claim's key.
#[derive(Clone, Default)]
pub(super) struct Moves {
    /// Those that were sent, and of which it is not known what came of them.
    open: Vec<Move>,
    /// The revision at which was last seen on which lease the key hangs.
    seen: i64,
    /// That lease, if it is none of ours: another client has moved it.
    astray: Option<i64>,
}

#[derive(Clone)]
struct Move {
    from: i64,
    to: Arc<Session>,
    /// Requests for it that were not answered.
    requests: usize,
}

impl Moves {
    /// Whether the key hangs on the claim's carrier for sure.
    pub(super) fn are_settled(&self) -> bool {
        self.open.is_empty() && self.astray.is_none()
    }

    /// The lease that the key was seen on, if another client has moved it there.
    pub(super) fn astray(&self) -> Option<i64> {
        self.astray
    }

    /// Where it may have been moved to, as far as that is not over.
    pub(super) fn targets(&self) -> impl Iterator<Item = &Arc<Session>> {
        self.open.iter().map(|open| &open.to).filter(|to| !to.is_over())
    }

    /// The leases of all that are open.
    pub(super) fn leases(&self) -> impl Iterator<Item = i64> {
        self.open.iter().map(|open| open.to.lease)
    }

    /// Notes that a move is about to be sent.
    pub(super) fn begin(&mut self, from: i64, to: &Arc<Session>) {
        match self.open.iter_mut().find(|open| open.from == from && open.to.lease == to.lease) {
            Some(open) => open.requests += 1,
            None => self.open.push(Move { from, to: to.clone(), requests: 1 }),
        }
    }

    /// Notes that one that was sent has come to nothing.
    pub(super) fn fail(&mut self, from: i64, to: &Session) {
        for open in self.open.iter_mut().filter(|open| open.from == from && open.to.lease == to.lease) {
            open.requests = open.requests.saturating_sub(1);
        }
        self.open.retain(|open| open.requests > 0);
    }

    /// Notes on which lease the key was seen; gives the targets that it cannot come to any more, or nothing where something
    /// newer is known.
    pub(super) fn see(&mut self, lease: i64, revision: i64, is_ours: bool) -> Option<Vec<Arc<Session>>> {
        if revision <= self.seen {
            return None;
        }
        self.seen = revision;
        self.astray = (!is_ours).then_some(lease);
        let over = self.open.extract_if(.., |open| open.from != lease || open.to.is_over());
        Some(over.map(|open| open.to).collect())
    }
}

impl Session {
    /// Whether its lease is as a claim asks for.
    pub(super) fn suffices(&self, claim: &Claim) -> bool {
        claim.ttl <= self.ttl && (self.isolated || !claim.isolated)
    }
}

impl Store {
    /// Notes on which lease a claim's key was seen, and gives leases back that it has left.
    pub(super) fn seen(&self, id: ClaimId, stand: Stand, revision: i64) {
        self.sessions.give_back(self.claims.seen_on(id, stand, revision));
    }

    /// Sees to it that a claim's key hangs on a lease that is as the claim asks for, wherever it hangs now.
    pub(super) async fn settle_on_lease(&self, claim: &Claim, now: Instant) -> Renewal {
        let mut spare = None;
        let moved = self.try_move(claim, now, &mut spare).await;
        // It was not needed after all.
        self.sessions.give_back(spare);
        match moved {
            Ok(renewal) => renewal,
            // As it was granted, for there is no room for more.
            Err(error) if error.kind() == ErrorKind::Exhausted => match self.as_it_was(claim, now).await {
                Some(renewal) => renewal,
                None => Renewal::Failed(error),
            },
            Err(error) => Renewal::Failed(error),
        }
    }

    /// What a claim has that cannot be moved. Where it may have been all the same, every lease that it may hang on is kept.
    async fn as_it_was(&self, claim: &Claim, now: Instant) -> Option<Renewal> {
        let known = self.claims.get(claim.id)?;
        let mut kept = vec![known.carrier().lease];
        if !known.moves.are_settled() {
            for session in [known.carrier()].into_iter().chain(known.moves.targets()) {
                self.keep_lately(session).await.ok()??;
                kept.push(session.lease);
            }
        }
        let known = self.claims.get(claim.id)?;
        if let Some(loss) = known.lost {
            return Some(Renewal::Lost(loss));
        }
        let is_kept = |session: &Arc<Session>| kept.contains(&session.lease);
        let are_kept = is_kept(known.carrier()) && known.moves.targets().all(is_kept);
        let is_as_asked = known.carrier().isolated || !claim.isolated;
        (are_kept && is_as_asked && known.moves.astray().is_none())
            .then(|| Renewal::Renewed(Some(self.left_of(claim, &known, now))))
    }

    /// What was surely left of a claim at this moment.
    pub(super) fn left_of(&self, claim: &Claim, known: &Known, now: Instant) -> Duration {
        claim.ttl.min(known.left(now, self.client.env.drift()))
    }

    async fn try_move(
        &self,
        claim: &Claim,
        now: Instant,
        spare: &mut Option<Arc<Session>>,
    ) -> Result<Renewal> {
        for _ in 0..TURNS {
            let Some(known) = self.claims.get(claim.id) else { return Ok(Renewal::Lost(deleted())) };
            if let Some(loss) = known.lost {
                return Ok(Renewal::Lost(loss));
            }
            let carrier = known.carrier();
            let is_enough = carrier.suffices(claim);
            if known.moves.are_settled() && is_enough {
                let is_kept = self.keep_lately(carrier).await?.is_some();
                // It may have been moved meanwhile, to a lease that was kept before.
                let is_there = |there: &Known| there.moves.are_settled() && there.stand() == known.stand();
                match self.claims.get(claim.id).filter(is_there) {
                    Some(known) if is_kept => {
                        return Ok(Renewal::Renewed(Some(self.left_of(claim, &known, now))));
                    }
                    _ => continue,
                }
            }
            let Some(stand) = known.stand() else {
                return Err(Error::new(ErrorKind::Unknown, "the claim was just made anew"));
            };
            let to = match known.moves.targets().find(|to| to.suffices(claim)) {
                Some(open) => Some(open.clone()),
                // Only to see that it is still there.
                None if is_enough
                    && known.moves.astray().is_none()
                    && known.moves.targets().next().is_none() =>
                {
                    None
                }
                None => {
                    let astray = known.moves.astray();
                    // No key is moved to the lease that it hangs on, or back to one that it has left.
                    let is_own = claim.isolated || carrier.isolated || is_enough || astray.is_some();
                    // Whoever moved it was promised that.
                    let promised = match astray {
                        Some(lease) => self.granted_for(lease).await?.map(|(granted, _)| granted),
                        None => None,
                    };
                    let ttl = promised.map_or(claim.ttl, |promised| promised.max(claim.ttl));
                    if spare.as_ref().is_none_or(|spare| spare.ttl < ttl || is_own && !spare.isolated) {
                        let unfit = spare.replace(self.sessions.open(ttl, is_own).await?);
                        self.sessions.give_back(unfit);
                    }
                    spare.clone()
                }
            };
            if let Some(to) = &to {
                // What the holder was promised ends no later than its carrier; what another was that has moved it, nobody knows.
                let age = match known.moves.astray() {
                    Some(_) => Duration::ZERO,
                    None => self.now().since(carrier.confirmed()),
                };
                if self.sessions.keep(to, age).await?.is_none() {
                    spare.take_if(|spare| spare.is_over());
                    continue;
                }
                if !self.claims.moving(claim.id, stand, to) {
                    continue;
                }
                // From now on it is given back when the key was seen elsewhere.
                spare.take_if(|spare| spare.lease == to.lease);
            }
            if !self.change_lease(claim.id, &known.key, stand, to.as_ref()).await? {
                let is_over = known.carrier().is_over();
                return Ok(Renewal::Lost(if is_over { session_ended() } else { deleted() }));
            }
        }
        Err(Error::new(ErrorKind::Unknown, "the claim was moved from lease to lease"))
    }

    /// Hangs a claim's key on another lease if it stands like that, and takes in where it does; false: it is gone.
    async fn change_lease(
        &self,
        id: ClaimId,
        key: &[u8],
        stand: Stand,
        to: Option<&Arc<Session>>,
    ) -> Result<bool> {
        let change = to.map_or_else(|| wire::get(key).into(), |to| hang(key, to.lease));
        let txn = TxnRequest {
            compare: Stand::compare(Some(stand), key),
            success: vec![change],
            failure: vec![wire::get(key).into()],
        };
        let answer = self.client.txn(txn).await;
        match answer {
            Ok(Some(answer)) => {
                let seen = match answer.succeeded {
                    true => Some(Stand { lease: to.map_or(stand.lease, |to| to.lease), ..stand }),
                    false => Stand::found(&answer, id).filter(|found| found.created == stand.created),
                };
                if let Some(seen) = seen {
                    self.seen(id, seen, answer.revision());
                }
                Ok(seen.is_some())
            }
            Ok(None) => {
                if let Some(to) = to {
                    self.sessions.give_back(self.claims.not_moved(id, stand.lease, to));
                    self.sessions.end(to);
                }
                Ok(true)
            }
            Err(error) => match to {
                Some(to) if self.is_moved_yet(id, key, stand, to, &error).await? => Ok(true),
                _ => Err(error),
            },
        }
    }

    /// Takes in what came of a move that failed like this: whether the key is where it was to go all the same. A full server
    /// refuses what it is asked for, and also what it had under way when it became full and has made; what it did is done when it
    /// says so.
    pub(super) async fn is_moved_yet(
        &self,
        id: ClaimId,
        key: &[u8],
        stand: Stand,
        to: &Arc<Session>,
        error: &Error,
    ) -> Result<bool> {
        let own = match error.kind() {
            // It may still come.
            ErrorKind::Unknown => return Ok(false),
            ErrorKind::Exhausted => {
                let found = self.client.read(vec![wire::get(key)]).await?;
                let own = found.ranges.first().and_then(|range| range.kvs.first()).map(Place::read);
                let own = own.filter(|own| own.is(id) && own.created == stand.created);
                own.map(|own| (own.lease, found.revision))
            }
            _ => None,
        };
        let is_moved = own.is_some_and(|(lease, _)| lease == to.lease);
        if !is_moved {
            self.sessions.give_back(self.claims.not_moved(id, stand.lease, to));
        }
        match own {
            Some((lease, revision)) => self.seen(id, Stand { lease, ..stand }, revision),
            None if error.kind() == ErrorKind::Exhausted => self.claims.deleted(id, stand.created),
            None => {}
        }
        Ok(is_moved)
    }

    /// Renews a claim that another client, or this one in another life, made: on its own lease if that is long enough, else
    /// on a new one. What others have on the lease that it is on is none of our business.
    pub(super) async fn renew_detached(&self, claim: &Claim) -> Result<Renewal> {
        for turn in 1..=TURNS {
            let Some(place) = self.find(&claim.name, claim.id).await? else {
                return Ok(Renewal::Lost(deleted()));
            };
            let former = self.sessions.isolated(place.lease).await?;
            let mut ttl = claim.ttl;
            if former.is_some() {
                let request = LeaseRequest { id: place.lease };
                // Nobody's deadline hangs on this.
                let answer: LeaseKeepAliveResponse =
                    self.client.keep_alive(&request, backend::MAX_ATTEMPT).await?;
                if answer.ttl <= 0 {
                    return Ok(Renewal::Lost(deleted()));
                }
                if Duration::from_secs(u64::try_from(answer.ttl).unwrap_or(0)) >= claim.ttl {
                    return Ok(Renewal::Renewed(Some(claim.ttl)));
                }
            } else if let Some((granted, _)) = self.granted_for(place.lease).await? {
                // Its holder may count on that.
                ttl = ttl.max(granted);
            }
            // Its holder may live, and watch the one that it had for itself: whoever ends the claim gives that back.
            // It may renew until the move arrives, so what it has is to end no later than the lease that its key comes to hang on.
            let former = former.unwrap_or_default();
            let ticket = self.ticket(turn).await?;
            let session = self.sessions.open_after(ttl + ticket.slack(), former).await?;
            let stand = Stand { created: place.created, lease: place.lease };
            let txn = TxnRequest {
                compare: Stand::compare(Some(stand), &place.key),
                // Whoever keeps the lease that it was on looks where it is now.
                success: vec![
                    hang(&place.key, session.lease),
                    touch(keys::session(self.prefix(), place.lease)),
                ],
                failure: Vec::new(),
            };
            let moved = match self.write_in_time(&ticket, txn).await {
                Ok(moved) => moved,
                // Where it may hang on it, the lease runs out by itself.
                Err(error) if error.kind() == ErrorKind::Unknown => return Err(error),
                // A full server may have made what it refuses.
                Err(error) => {
                    let is_there = |place: Place| place.lease == session.lease;
                    let is_full = error.kind() == ErrorKind::Exhausted;
                    if !is_full || !self.find(&claim.name, claim.id).await?.is_some_and(is_there) {
                        self.sessions.give_back([session]);
                        return Err(error);
                    }
                    true
                }
            };
            if moved {
                return Ok(Renewal::Renewed(Some(claim.ttl)));
            }
            self.sessions.revoke(&session).await;
        }
        Err(Error::new(ErrorKind::Unknown, "the claim was moved from lease to lease"))
    }
}

/// Has a key hang on another lease, and leaves it as it is otherwise.
pub(super) fn hang(key: &[u8], lease: i64) -> RequestOp {
    PutRequest { key: key.to_vec(), lease, ignore_value: true, ..PutRequest::default() }.into()
}

/// Writes a session's key as it is, if it is there: whoever renews that lease then looks at all claims that hang on it.
pub(super) fn touch(key: Vec<u8>) -> RequestOp {
    let compare = vec![wire::Compare::created(&key, 0)];
    let put = PutRequest { key, ignore_value: true, ignore_lease: true, ..PutRequest::default() };
    TxnRequest { compare, success: Vec::new(), failure: vec![put.into()] }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_open_is_settled_by_where_the_key_was_seen_last() {
        let [one, two, three] = [1, 2, 3].map(|lease| Session::of_lease(lease, Duration::from_secs(9), true));
        let leases = |sessions: Option<Vec<Arc<Session>>>| {
            sessions.map(|all| all.iter().map(|session| session.lease).collect::<Vec<_>>())
        };
        let mut moves = Moves::default();
        moves.begin(1, &two);
        moves.begin(1, &two);
        moves.begin(1, &three);
        moves.fail(1, &two);
        assert_eq!(moves.targets().count(), 2, "one of two requests may still come");
        // It is where it was, so all may still come.
        assert_eq!(leases(moves.see(1, 10, true)), Some(vec![]));
        assert_eq!(leases(moves.see(2, 11, true)), Some(vec![2, 3]));
        assert!(moves.are_settled());
        moves.begin(2, &three);
        assert_eq!(leases(moves.see(1, 10, true)), None, "an older answer tells nothing");
        assert!(moves.targets().all(|to| Arc::ptr_eq(to, &three)));
        // Another client has moved it.
        assert_eq!(leases(moves.see(7, 12, false)), Some(vec![3]));
        assert_eq!((moves.astray(), moves.are_settled()), (Some(7), false));
        moves.begin(7, &one);
        assert_eq!(leases(moves.see(1, 13, true)), Some(vec![1]));
        assert!(moves.are_settled());
    }
}
