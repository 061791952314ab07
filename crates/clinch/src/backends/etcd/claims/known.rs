//! What is known of one claim.

use std::sync::Arc;
use std::time::Duration;

use crate::backends::etcd::free::Stand;
use crate::backends::etcd::moves::Moves;
use crate::backends::etcd::session::Session;
use crate::claim::Loss;
use crate::clock::Instant;
use crate::drift::Drift;

/// What is known of a claim.
#[derive(Clone)]
pub(in crate::backends::etcd) struct Known {
    /// The session whose lease carries it once it is granted, and whose fence its steps stand behind.
    pub(in crate::backends::etcd) session: Arc<Session>,
    /// The session whose lease carries it while it waits, if that is another.
    pub(in crate::backends::etcd) place: Option<Arc<Session>>,
    pub(in crate::backends::etcd) key: Arc<[u8]>,
    /// At which revision its key was created: its place in the queue, and its token.
    pub(in crate::backends::etcd) created: Option<i64>,
    /// The sessions of steps that were sent and whose answers did not come: such a step may still reach the server, as long
    /// as the lease lives that it hangs the key on, and the one whose fence it stands behind, and that is not raised.
    pub(in crate::backends::etcd) doubts: Vec<Arc<Session>>,
    /// When all of these had been sent.
    pub(in crate::backends::etcd) doubted: Instant,
    pub(in crate::backends::etcd) moves: Moves,
    pub(in crate::backends::etcd) lost: Option<Loss>,
    /// Whether a delete of its key was sent: its turn goes on to the next, and its next step makes it anew.
    pub(in crate::backends::etcd) given_up: bool,
}

impl Known {
    /// Whether it can still be granted. What has no key yet cannot get one without the lease that it is named after.
    pub(in crate::backends::etcd) fn is_good(&self) -> bool {
        let can_be_made = self.created.is_some() || !self.session.is_over();
        self.lost.is_none() && !self.given_up && !self.carrier().is_over() && can_be_made
    }

    /// The session whose lease its key hangs on, as far as is known.
    pub(in crate::backends::etcd) fn carrier(&self) -> &Arc<Session> {
        #[cfg(test)]
        super::looks::count();
        self.place.as_ref().unwrap_or(&self.session)
    }

    /// The sessions whose leases its key is to hang on, or may have been moved to.
    pub(in crate::backends::etcd) fn carriers(&self) -> impl Iterator<Item = &Arc<Session>> {
        [&self.session, self.carrier()].into_iter().chain(self.moves.targets())
    }

    /// How its key was last seen to stand.
    pub(in crate::backends::etcd) fn stand(&self) -> Option<Stand> {
        let lease = self.moves.astray().unwrap_or(self.carrier().lease);
        self.created.map(|created| Stand { created, lease })
    }

    /// How much is surely left of the lease that its key hangs on, whichever of those it may hang on that is.
    pub(in crate::backends::etcd) fn left(&self, now: Instant, drift: Drift) -> Duration {
        let left = self.moves.targets().map(|to| to.left(now, drift));
        left.fold(self.carrier().left(now, drift), Duration::min)
    }

    /// The leases that were made for this claim alone.
    pub(in crate::backends::etcd) fn own_leases(&self) -> impl Iterator<Item = &Arc<Session>> {
        [&self.session].into_iter().chain(self.moves.targets()).filter(|session| session.isolated)
    }

    /// Takes in on which lease its key was seen; gives those that it has left.
    pub(in crate::backends::etcd) fn seen_on(&mut self, lease: i64, revision: i64) -> Vec<Arc<Session>> {
        let ours = self.carriers().find(|session| session.lease == lease).cloned();
        let Some(mut left) = self.moves.see(lease, revision, ours.is_some()) else { return Vec::new() };
        if let Some(ours) = ours.filter(|ours| ours.lease != self.carrier().lease) {
            left.push(std::mem::replace(&mut self.session, ours));
            self.place = None;
        }
        left.retain(|session| session.isolated && !self.may_hang_on(session.lease));
        left
    }

    /// Whether its key hangs on its carrier for sure, and it is not lost.
    pub(super) fn is_at_rest(&self) -> bool {
        self.lost.is_none() && self.moves.are_settled()
    }

    /// Whether a step of it may still reach the server.
    pub(in crate::backends::etcd) fn in_doubt(&self) -> bool {
        !self.doubts.iter().all(|session| session.is_over())
    }

    /// Notes that a step may still come that rests on this session.
    pub(in crate::backends::etcd) fn doubt(&mut self, session: Arc<Session>, now: Instant) {
        self.doubted = self.doubted.max(now);
        if !self.doubts.iter().any(|known| Arc::ptr_eq(known, &session)) {
            self.doubts.push(session);
        }
    }

    /// Whether its key may hang on this lease: a step whose answer did not come may have moved it.
    pub(in crate::backends::etcd) fn may_hang_on(&self, lease: i64) -> bool {
        self.carriers().chain(&self.doubts).any(|session| session.lease == lease)
    }

    /// All leases that it names, whether they are over or not.
    pub(super) fn leases(&self) -> impl Iterator<Item = i64> {
        let sessions = [&self.session, self.carrier()].into_iter().chain(&self.doubts);
        sessions.map(|session| session.lease).chain(self.moves.leases())
    }

    /// Whether no lease is left that its key could hang on.
    pub(in crate::backends::etcd) fn is_over(&self) -> bool {
        let is_over = self.session.is_over() && self.carrier().is_over() && !self.in_doubt();
        is_over && self.moves.targets().next().is_none()
    }
}
