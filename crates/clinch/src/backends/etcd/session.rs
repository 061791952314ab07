//! Sessions: a lease of etcd, and the claims that hang on it.
//!
//! By default one lease carries all claims of a client with the same TTL, so that one keepalive serves any number of
//! locks; one that ends for itself, or outlives its client, has a lease of its own.
//!
//! With each lease goes a key, `<prefix>%session/<lease>`, which does four things. It is watched, so that the end of
//! the lease is told at once. It is read linearizably with every renewal, since a keepalive that was answered proves
//! little: a leader that was stalled and deposed answers it and revokes the lease a moment later. It is written by whoever
//! evicts a claim that hangs on the lease, so that one read tells, of any number of claims, that none was evicted. And it is the
//! *fence* of claims whose answer never came: every claim is made on condition that the session's key was not written since;
//! writing it therefore makes sure that no older claim comes late, without leaving anything behind per claim.

mod fence;
mod keep;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use self::fence::Fence;
pub(super) use self::fence::Raise;
use super::claims::Claims;
use super::client::Client;
use super::closing::Closings;
use super::flight::Flights;
use super::keys;
use super::watch::{KeyGuard, Watcher};
use super::wire::{self, PutRequest, TxnRequest};
use crate::claim::ClaimId;
use crate::clock::Instant;
use crate::drift::Drift;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;

/// After how many of its TTLs without an answer a lease counts as unheard.
const UNHEARD: u32 = 2;

/// A lease, as far as it is known here.
pub(super) struct Session {
    pub(super) lease: i64,
    /// How long the server keeps it.
    pub(super) ttl: Duration,
    pub(super) isolated: bool,
    /// The key that lives as long as the lease.
    pub(super) key: Vec<u8>,
    /// What stands in that.
    value: Vec<u8>,
    pub(super) fence: Fence,
    state: Mutex<State>,
    /// Keepalives under way.
    renewals: Flights<(), bool>,
    /// Looks at silent claims under way.
    looks: Flights<(), ()>,
    ended: Notify,
}

struct State {
    /// When the last keepalive that was answered was sent.
    confirmed: Instant,
    /// At which revision the session's key was made.
    made: i64,
    /// Keepalives since the last read of claims' keys.
    unread: u32,
    /// The last of the claims whose keys were read.
    read_to: ClaimId,
    ended: bool,
    /// Tells of the key's end.
    guard: Option<KeyGuard>,
}

impl Session {
    /// One that was granted at this moment at the earliest, and whose key is not made yet.
    fn new(
        lease: i64,
        ttl: Duration,
        isolated: bool,
        key: Vec<u8>,
        value: Vec<u8>,
        granted: Instant,
    ) -> Session {
        let state = State {
            confirmed: granted,
            made: 0,
            unread: 0,
            read_to: ClaimId::from_bits(0),
            ended: false,
            guard: None,
        };
        Session {
            lease,
            ttl,
            isolated,
            key,
            value,
            fence: Fence::new(),
            state: Mutex::new(state),
            renewals: Flights::default(),
            looks: Flights::default(),
            ended: Notify::new(),
        }
    }

    /// Since when the server surely counts.
    pub(super) fn confirmed(&self) -> Instant {
        lock(&self.state).confirmed
    }

    pub(super) fn is_over(&self) -> bool {
        lock(&self.state).ended
    }

    /// Whether nothing was heard of it for so long that no lock of it can be held any more.
    fn is_unheard(&self, now: Instant) -> bool {
        now.since(self.confirmed()) > UNHEARD * self.ttl
    }

    /// Waits until the lease is gone.
    pub(super) async fn over(&self) {
        loop {
            let mut ended = std::pin::pin!(self.ended.notified());
            ended.as_mut().enable();
            if self.is_over() {
                return;
            }
            ended.await;
        }
    }

    /// What writes the session's key, and so makes sure that no claim of before comes after.
    pub(super) fn put(&self) -> PutRequest {
        let (key, value) = (self.key.clone(), self.value.clone());
        PutRequest { key, value, lease: self.lease, ..PutRequest::default() }
    }

    /// How much of it is left at this moment, for whoever takes the drift off that time alone.
    pub(super) fn left(&self, now: Instant, drift: Drift) -> Duration {
        left(self.ttl, now.since(self.confirmed()), drift)
    }

    /// A moment such that a lease of `ttl` from then on ends before this one does, by a clock that runs that much off.
    pub(super) fn dates(&self, ttl: Duration, sent: Instant, drift: Drift) -> Instant {
        let slack = self.ttl.saturating_sub(ttl);
        sent.min(self.confirmed() + slack.saturating_sub(drift.over(slack)))
    }
}

#[cfg(test)]
impl Session {
    /// One that no server knows.
    pub(super) fn of_lease(lease: i64, ttl: Duration, isolated: bool) -> Arc<Session> {
        let granted = Instant::from_nanos(0);
        Arc::new(Session::new(lease, ttl, isolated, keys::session("", lease), Vec::new(), granted))
    }

    pub(super) fn run_out(&self) {
        lock(&self.state).ended = true;
    }
}

/// The sessions of one client.
pub(super) struct Sessions {
    pub(super) client: Arc<Client>,
    watcher: Arc<Watcher>,
    claims: Arc<Claims>,
    /// The shared ones, by TTL in seconds.
    shared: Mutex<HashMap<u64, Arc<Session>>>,
    /// Those that are being made.
    opening: Flights<u64, Arc<Session>>,
    pub(super) closings: Closings,
    host: String,
}

/// What stands in a session's key: for people, and for other clients that end or renew the claim of a lease that has one alone.
#[derive(Serialize, Deserialize)]
struct Record {
    host: String,
    pid: u32,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    isolated: bool,
    /// The leases that the claim had for itself before, and that others may watch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    former: Vec<i64>,
}

impl Sessions {
    pub(super) fn new(client: Arc<Client>, watcher: Arc<Watcher>, claims: Arc<Claims>) -> Arc<Sessions> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let (shared, opening, closings) = (Mutex::default(), Flights::default(), Closings::default());
        let sessions = Arc::new(Sessions { client, watcher, claims, shared, opening, closings, host });
        let all = Arc::downgrade(&sessions);
        sessions.client.history.when_turned_back(move || {
            if let Some(sessions) = all.upgrade() {
                sessions.end_all();
            }
        });
        sessions
    }

    /// A session for a claim with this TTL, most of which is left.
    pub(super) async fn open(self: &Arc<Sessions>, ttl: Duration, isolated: bool) -> Result<Arc<Session>> {
        let seconds = seconds(ttl);
        if isolated {
            return self.make(seconds, true, Vec::new()).await;
        }
        if let Some(session) = self.fresh(ttl, 3) {
            return Ok(session);
        }
        let sessions = self.clone();
        let env = &self.client.env;
        self.opening.join(env, seconds, move || async move { sessions.open_shared(seconds).await }).await
    }

    /// A session for a claim that another client made, and that had these leases for itself before.
    pub(super) async fn open_after(
        self: &Arc<Sessions>,
        ttl: Duration,
        former: Vec<i64>,
    ) -> Result<Arc<Session>> {
        self.make(seconds(ttl), true, former).await
    }

    async fn open_shared(self: Arc<Sessions>, seconds: u64) -> Result<Arc<Session>> {
        let known = lock(&self.shared).get(&seconds).cloned();
        if let Some(session) = known
            && self.keep(&session, session.ttl / 3).await?.is_some()
        {
            return Ok(session);
        }
        let session = self.make(seconds, false, Vec::new()).await?;
        let (over, kept) = {
            let mut shared = lock(&self.shared);
            let over: Vec<_> = shared.extract_if(|_, old| old.is_over()).collect();
            // Of two runtimes that made one at once, the first is shared.
            (over, shared.entry(seconds).or_insert_with(|| session.clone()).clone())
        };
        // Ends their watches, which takes other locks.
        drop(over);
        if !Arc::ptr_eq(&kept, &session) {
            self.revoke(&session).await;
        }
        Ok(kept)
    }

    /// The shared session of this TTL if it was renewed no longer ago than this part of it.
    pub(super) fn fresh(&self, ttl: Duration, part: u32) -> Option<Arc<Session>> {
        let seconds = seconds(ttl);
        let session = lock(&self.shared).get(&seconds)?.clone();
        let now = self.client.env.now();
        (!session.is_over() && now <= session.confirmed() + session.ttl / part).then_some(session)
    }

    async fn make(
        self: &Arc<Sessions>,
        seconds: u64,
        isolated: bool,
        former: Vec<i64>,
    ) -> Result<Arc<Session>> {
        let sent = self.client.env.now();
        // Nothing but its own key can hang on it, until this is done.
        let mut granted = self.grant(Duration::from_secs(seconds)).await?;
        let record = Record { host: self.host.clone(), pid: std::process::id(), isolated, former };
        let value = serde_json::to_vec(&record)
            .map_err(|error| Error::invalid("the host's name cannot be written").with_source(error))?;
        let key = keys::session(&self.client.settings.prefix, granted.id);
        let session = Arc::new(Session::new(granted.id, granted.ttl, isolated, key, value, sent));
        let put = TxnRequest { success: vec![session.put().into()], ..TxnRequest::default() };
        let answer = self.client.txn(put).await?;
        let answer = answer
            .ok_or_else(|| Error::new(ErrorKind::Unavailable, "a lease ended as soon as it was granted"))?;
        lock(&session.state).made = answer.revision();
        session.fence.seen(answer.revision());
        let (weak, claims) = (Arc::downgrade(&session), Arc::downgrade(&self.claims));
        let guard = self.watcher.guard(session.key.as_slice().into(), answer.revision(), move || {
            if let (Some(session), Some(claims)) = (weak.upgrade(), claims.upgrade()) {
                end(&session, &claims);
            }
        })?;
        lock(&session.state).guard = Some(guard);
        granted.keep();
        Ok(session)
    }

    /// Notes that the lease is gone: all its claims are lost.
    pub(super) fn end(&self, session: &Session) {
        end(session, &self.claims);
    }

    /// Ends all there are: what the server knows of them is not what it knew.
    fn end_all(&self) {
        let mut all: Vec<Arc<Session>> = lock(&self.shared).values().cloned().collect();
        all.extend(self.claims.sessions());
        all.iter().for_each(|session| self.end(session));
    }

    /// Gives the leases back that carry nothing any more.
    pub(super) async fn close(&self) {
        let idle = {
            let mut shared = lock(&self.shared);
            let idle = |_: &u64, session: &mut Arc<Session>| !self.claims.hang_on(session.lease);
            shared.extract_if(idle).map(|(_, session)| session).collect::<Vec<_>>()
        };
        futures_util::future::join_all(idle.iter().map(|session| self.revoke(session))).await;
    }

    /// Gives a lease back that has no more claims. If that fails, it runs out.
    pub(super) async fn revoke(&self, session: &Session) {
        let guard = lock(&session.state).guard.take();
        // Ends a watch, which takes other locks.
        drop(guard);
        self.revoke_lease(session.lease).await;
        self.end(session);
    }

    /// The same, in the background.
    fn revoke_later(self: &Arc<Sessions>, session: Arc<Session>) {
        let sessions = self.clone();
        let _ = self.client.env.lane().spawn(async move { sessions.revoke(&session).await });
    }

    /// Gives back, in the background, those of these leases that were made for one claim alone, which does not hang on them.
    pub(super) fn give_back(self: &Arc<Sessions>, sessions: impl IntoIterator<Item = Arc<Session>>) {
        let unused = sessions.into_iter().filter(|session| session.isolated && !session.is_over());
        unused.for_each(|session| self.revoke_later(session));
    }

    /// Gives back the leases that other clients made for one claim alone, which is gone, of which this was the last; no other.
    pub(super) async fn give_back_theirs(&self, lease: i64) {
        let leases = self.isolated(lease).await.ok().flatten().unwrap_or_default();
        futures_util::future::join_all(leases.into_iter().map(|lease| self.revoke_lease(lease))).await;
    }

    /// If some client made a lease for one claim alone, all that this has had for itself up to now.
    pub(super) async fn isolated(&self, lease: i64) -> Result<Option<Vec<i64>>> {
        let key = keys::session(&self.client.settings.prefix, lease);
        let found = self.client.read(vec![wire::get(&key)]).await?;
        let own = found.ranges.first().and_then(|range| range.kvs.first());
        let record = own.and_then(|kv| serde_json::from_slice::<Record>(&kv.value).ok());
        let record = record.filter(|record| record.isolated);
        Ok(record.map(|record| record.former.into_iter().chain([lease]).collect()))
    }

    pub(super) async fn revoke_lease(&self, lease: i64) {
        let _ = self.client.revoke(lease).await;
    }
}

/// How much is left of a lease that began this long ago. Whoever takes the drift off that has not taken it off the age.
fn left(ttl: Duration, age: Duration, drift: Drift) -> Duration {
    ttl.saturating_sub(age).saturating_sub(drift.over(age))
}

/// What etcd counts leases in.
fn seconds(ttl: Duration) -> u64 {
    ttl.as_nanos().div_ceil(1_000_000_000).try_into().unwrap_or(u64::MAX)
}

fn end(session: &Session, claims: &Claims) {
    let mut state = lock(&session.state);
    if !state.ended {
        state.ended = true;
        let guard = state.guard.take();
        drop(state);
        // Ends a watch, which takes other locks.
        drop(guard);
        session.ended.notify_waiters();
        claims.session_ended(session.lease);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease;

    #[test]
    fn what_is_left_of_an_old_lease_ends_before_it_does_on_a_server_that_is_fast() {
        let begun = Instant::from_nanos(0);
        for percent in 1..=25 {
            let drift = Drift::percent(percent).unwrap();
            for (ttl, part) in [2, 10, 600].into_iter().flat_map(|ttl| (0..=100).map(move |part| (ttl, part)))
            {
                let ttl = Duration::from_secs(ttl);
                let (age, ends) = (ttl * part / 100, begun + ttl * 100 / (100 + percent));
                let deadline = lease::deadline(begun + age, left(ttl, age, drift), drift);
                assert!(deadline <= ends.max(begun + age), "{percent} %, {ttl:?}, {age:?} old: {deadline:?}");
            }
        }
    }
}
