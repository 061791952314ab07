//! Sessions: a lease of etcd, and the claims that hang on it.
//!
//! By default one lease carries all claims of a client with the same TTL, so that one keepalive serves any number of
//! locks; one that ends for itself, or outlives its client, has a lease of its own.
//!
//! With each lease goes a key, `<prefix>%session/<lease>`, which does three things. It is watched, so that the end of
//! the lease is told at once. It is read linearizably every few renewals, since a keepalive that was answered proves
//! little: a leader that was stalled and deposed answers it and revokes the lease a moment later. And it is the *fence*
//! of claims whose answer never came: every claim is made on condition that the session's key was not written since;
//! writing it therefore makes sure that no older claim comes late, without leaving anything behind per claim.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::claims::Claims;
use super::client::Client;
use super::keys;
use super::watch::{Subscription, Watcher};
use super::wire::{
    self, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveResponse, LeaseRequest, LeaseRevokeResponse,
    PutRequest, TxnRequest,
};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;

/// Every how many keepalives the session's key, and some of its claims', are read.
const READ_EVERY: u32 = 3;

/// Claims' keys that are read along with the session's; etcd takes 128 operations in a transaction.
const READ_BATCH: usize = 100;

/// A lease, as far as it is known here.
pub(super) struct Session {
    pub(super) lease: i64,
    /// How long the server keeps it.
    pub(super) ttl: Duration,
    pub(super) isolated: bool,
    /// The key that lives as long as the lease.
    pub(super) key: Vec<u8>,
    state: Mutex<State>,
    /// Held while a keepalive is under way.
    renewing: tokio::sync::Mutex<()>,
    ended: Notify,
}

struct State {
    /// When the last keepalive that was answered was sent.
    confirmed: Instant,
    /// At which revision the session's key was last written.
    fence: i64,
    /// Keepalives since the last read.
    unread: u32,
    reads: usize,
    ended: bool,
    /// Tells of the key's end.
    guard: Option<Subscription>,
}

impl Session {
    /// Since when the server surely counts.
    pub(super) fn confirmed(&self) -> Instant {
        lock(&self.state).confirmed
    }

    pub(super) fn fence(&self) -> i64 {
        lock(&self.state).fence
    }

    /// Notes at which revision the session's key was written.
    pub(super) fn raise_fence(&self, revision: i64) {
        let mut state = lock(&self.state);
        state.fence = state.fence.max(revision);
    }

    pub(super) fn is_over(&self) -> bool {
        lock(&self.state).ended
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
    pub(super) fn put(&self, value: &[u8]) -> PutRequest {
        let (key, value) = (self.key.clone(), value.to_vec());
        PutRequest { key, value, lease: self.lease, ..PutRequest::default() }
    }

    /// A moment such that a lease of `ttl` from then on ends before this one does, by a clock that runs up to 1 % off.
    pub(super) fn dates(&self, ttl: Duration, sent: Instant) -> Instant {
        let slack = self.ttl.saturating_sub(ttl);
        sent.min(self.confirmed() + slack.saturating_sub(slack / 100))
    }
}

/// The sessions of one client.
pub(super) struct Sessions {
    client: Arc<Client>,
    watcher: Arc<Watcher>,
    claims: Arc<Claims>,
    /// The shared ones, by TTL in seconds.
    shared: Mutex<HashMap<u64, Arc<Session>>>,
    opening: tokio::sync::Mutex<()>,
    /// What stands in a session's key, for people.
    value: Vec<u8>,
}

impl Sessions {
    pub(super) fn new(client: Arc<Client>, watcher: Arc<Watcher>, claims: Arc<Claims>) -> Sessions {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let value = serde_json::json!({ "host": host, "pid": std::process::id() }).to_string().into_bytes();
        Sessions { client, watcher, claims, shared: Mutex::default(), opening: Default::default(), value }
    }

    /// What stands in a session's key.
    pub(super) fn value(&self) -> &[u8] {
        &self.value
    }

    /// A session for a claim with this TTL, most of which is left.
    pub(super) async fn open(&self, ttl: Duration, isolated: bool) -> Result<Arc<Session>> {
        let seconds = ttl.as_nanos().div_ceil(1_000_000_000).try_into().unwrap_or(u64::MAX);
        if isolated {
            return self.make(seconds, true).await;
        }
        if let Some(session) = self.fresh(seconds) {
            return Ok(session);
        }
        let _once = self.opening.lock().await;
        let known = lock(&self.shared).get(&seconds).cloned();
        if let Some(session) = known
            && self.keep(&session, session.ttl / 3).await?.is_some()
        {
            return Ok(session);
        }
        let session = self.make(seconds, false).await?;
        let old = {
            let mut shared = lock(&self.shared);
            let over: Vec<u64> =
                shared.iter().filter(|(_, old)| old.is_over()).map(|(seconds, _)| *seconds).collect();
            let old: Vec<_> = over.iter().filter_map(|seconds| shared.remove(seconds)).collect();
            shared.insert(seconds, session.clone());
            old
        };
        // Ends their watches, which takes other locks.
        drop(old);
        Ok(session)
    }

    /// The shared session of this TTL if it was renewed a short while ago.
    fn fresh(&self, seconds: u64) -> Option<Arc<Session>> {
        let session = lock(&self.shared).get(&seconds)?.clone();
        let now = self.client.env.now();
        (!session.is_over() && now <= session.confirmed() + session.ttl / 3).then_some(session)
    }

    async fn make(&self, seconds: u64, isolated: bool) -> Result<Arc<Session>> {
        let sent = self.client.env.now();
        let request = LeaseGrantRequest { ttl: i64::try_from(seconds).unwrap_or(i64::MAX) };
        let granted: LeaseGrantResponse = self.client.call(wire::LEASE_GRANT, &request).await?;
        let session = Arc::new(Session {
            lease: granted.id,
            ttl: Duration::from_secs(u64::try_from(granted.ttl).unwrap_or(0)),
            isolated,
            key: keys::session(&self.client.settings.prefix, granted.id),
            state: Mutex::new(State {
                confirmed: sent,
                fence: 0,
                unread: 0,
                reads: 0,
                ended: false,
                guard: None,
            }),
            renewing: tokio::sync::Mutex::default(),
            ended: Notify::new(),
        });
        let put = TxnRequest { success: vec![session.put(&self.value).into()], ..TxnRequest::default() };
        let Some(answer) = self.client.txn(put).await? else {
            return Err(Error::new(ErrorKind::Unavailable, "a lease ended as soon as it was granted"));
        };
        session.raise_fence(answer.revision());
        let (weak, claims) = (Arc::downgrade(&session), Arc::downgrade(&self.claims));
        let guard = self.watcher.guard(session.key.as_slice().into(), answer.revision(), move || {
            if let (Some(session), Some(claims)) = (weak.upgrade(), claims.upgrade()) {
                end(&session, &claims);
            }
        })?;
        lock(&session.state).guard = Some(guard);
        Ok(session)
    }

    /// Notes that the lease is gone: all its claims are lost.
    pub(super) fn end(&self, session: &Session) {
        end(session, &self.claims);
    }

    /// Renews the lease unless that was done at most `age` ago, and says when it was last renewed; `None`: it is gone.
    pub(super) async fn keep(&self, session: &Session, age: Duration) -> Result<Option<Instant>> {
        let asked = self.client.env.now();
        let _turn = session.renewing.lock().await;
        if session.is_over() {
            return Ok(None);
        }
        let confirmed = session.confirmed();
        if asked <= confirmed + age {
            return Ok(Some(confirmed));
        }
        let sent = self.client.env.now();
        let request = LeaseRequest { id: session.lease };
        let answer: LeaseKeepAliveResponse = self.client.call_once(wire::LEASE_KEEP_ALIVE, &request).await?;
        if answer.ttl <= 0 {
            self.end(session);
            return Ok(None);
        }
        let unread = lock(&session.state).unread;
        if unread + 1 >= READ_EVERY && !self.is_there(session).await? {
            return Ok(None);
        }
        let mut state = lock(&session.state);
        state.unread = (unread + 1) % READ_EVERY;
        state.confirmed = sent;
        Ok(Some(sent))
    }

    /// Reads the session's key and some of its claims', linearizably.
    async fn is_there(&self, session: &Session) -> Result<bool> {
        let round = {
            let mut state = lock(&session.state);
            state.reads = state.reads.wrapping_add(1);
            state.reads
        };
        let claims = self.claims.some_of(session.lease, READ_BATCH, round);
        let mut reads = vec![wire::get(&session.key).into()];
        reads.extend(claims.iter().map(|(_, key, _)| wire::get(key).into()));
        let txn = TxnRequest { success: reads, ..TxnRequest::default() };
        let Some(answer) = self.client.txn(txn).await? else { return Ok(false) };
        let mut found = answer.ranges();
        if found.next().is_none_or(|own| own.kvs.is_empty()) {
            self.end(session);
            return Ok(false);
        }
        for ((id, _, created), found) in claims.iter().zip(found) {
            if found.kvs.first().is_none_or(|kv| kv.create_revision != *created) {
                self.claims.deleted(*id, *created);
            }
        }
        Ok(true)
    }

    /// Gives a lease back that has no more claims. If that fails, it runs out.
    pub(super) async fn revoke(&self, session: &Session) {
        lock(&session.state).guard = None;
        let request = LeaseRequest { id: session.lease };
        let _: Result<LeaseRevokeResponse> = self.client.call(wire::LEASE_REVOKE, &request).await;
    }
}

fn end(session: &Session, claims: &Claims) {
    let mut state = lock(&session.state);
    if !state.ended {
        state.ended = true;
        drop(state);
        session.ended.notify_waiters();
        claims.session_ended(session.lease);
    }
}
