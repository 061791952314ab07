//! Freeing claims for sure: the one loop that repeats a release until the store has answered it, and what becomes of claims
//! whose release nobody answered for long.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{Backend, Freed};
use crate::claim::{Claim, ClaimId};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{ErrorKind, Result};
use crate::lane::caught;
use crate::lease;
use crate::sync::lock;

/// How long a release is repeated by a task of its own, and how long by a caller when the lease itself has no end.
const RELEASE_FOR: Duration = Duration::from_secs(30);

/// How long a release that nobody answered is tried again now and then, if the claim's TTL is not longer. A server that was
/// stopped may grant when it goes on what has long been given up, and the claim would then hold the lock for its TTL.
const LEFT_FOR: Duration = Duration::from_secs(3600);

/// How many of those are remembered; a store that is away for long must not cost memory for each attempt.
const MOST_LEFT: usize = 4096;

/// How often one of those is tried while the store does not answer.
const TRY_LEFT_EVERY: Duration = Duration::from_secs(5);

/// The releases of one client.
#[derive(Debug)]
pub(crate) struct Releases {
    backend: Arc<dyn Backend>,
    env: Env,
    state: Mutex<State>,
    /// Tells that one is over.
    done: Notify,
}

#[derive(Debug, Default)]
struct State {
    under_way: HashSet<ClaimId>,
    /// What nobody has answered yet, each with the time until which it is tried.
    left: VecDeque<(Arc<Claim>, Instant)>,
    sweeping: bool,
}

impl Releases {
    pub(crate) fn new(backend: Arc<dyn Backend>, env: Env) -> Arc<Releases> {
        Arc::new(Releases { backend, env, state: Mutex::default(), done: Notify::new() })
    }

    /// Marks the release of a claim as under way, so that nobody else begins it; `None`: somebody did.
    pub(crate) fn begin(self: &Arc<Releases>, id: ClaimId) -> Option<UnderWay> {
        lock(&self.state).under_way.insert(id).then(|| UnderWay(self.clone(), id))
    }

    /// Until when a caller's release is worth repeating: when the lease has surely run out, there is nothing left to free.
    pub(crate) fn until(&self, claim: &Claim) -> Instant {
        let lease = if self.backend.capabilities().expiry { claim.ttl } else { RELEASE_FOR };
        self.env.now() + lease
    }

    /// Frees a claim, repeating what failed until `until`.
    ///
    /// When an attempt's answer was lost, it may have been applied, so a later "absent" then counts as removed.
    pub(crate) async fn free(&self, claim: &Claim, linger: Duration, until: Instant) -> Result<Freed> {
        let mut maybe_applied = false;
        let mut attempt = 0;
        loop {
            let error = match self.backend.release(claim, linger).await {
                Ok(Freed::Absent) if maybe_applied => return Ok(Freed::Removed),
                Ok(freed) => return Ok(freed),
                Err(error) if !error.is_transient() => return Err(error),
                Err(error) => error,
            };
            maybe_applied |= error.kind() == ErrorKind::Unknown;
            let retry = self.env.now() + lease::backoff(attempt, self.env.random().jitter());
            if retry >= until {
                return Err(error);
            }
            self.env.sleep_until(retry).await;
            attempt += 1;
        }
    }

    /// Frees a claim in the background, or at once where the store needs no waiting. Works anywhere, also in a drop outside
    /// any runtime. Does nothing while a release of this claim is under way.
    pub(crate) fn free_in_background(self: &Arc<Releases>, claim: Arc<Claim>) {
        let Some(under_way) = self.begin(claim.id) else { return };
        let mut release = Box::pin(async move {
            let releases = &under_way.0;
            let until = releases.env.now() + RELEASE_FOR;
            let freed = caught(releases.free(&claim, Duration::ZERO, until)).await;
            if !releases.is_over(&claim, freed) {
                releases.leave(claim);
            }
        });
        if self.backend.capabilities().inline
            && release.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
        {
            return;
        }
        // Without a background thread the claim is left to its lease.
        let _ = self.env.lane().spawn(release);
    }

    /// Whether a release is over: the store has answered it, or no repetition changes what it said.
    fn is_over(&self, claim: &Claim, freed: Option<Result<Freed>>) -> bool {
        match freed {
            Some(Ok(_)) => true,
            Some(Err(error)) if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported) => {
                self.backend.forget(claim);
                true
            }
            Some(Err(_)) | None => false,
        }
    }

    /// Waits until nothing is under way; says how many still were at `until`, or were refused or given no answer for so long
    /// that they are only tried now and then: nobody waits for those.
    pub(crate) async fn finish(&self, until: Instant) -> Result<(), usize> {
        let mut end = std::pin::pin!(self.env.sleep_until(until));
        loop {
            let mut done = std::pin::pin!(self.done.notified());
            done.as_mut().enable();
            let (under_way, left) = {
                let state = lock(&self.state);
                (state.under_way.len(), state.left.len())
            };
            match (under_way, left) {
                (0, 0) => return Ok(()),
                (0, left) => return Err(left),
                _ => {}
            }
            tokio::select! {
                biased;
                () = done => {}
                () = &mut end => return Err(under_way + left),
            }
        }
    }

    /// Keeps a claim whose release nobody answered to be tried again.
    fn leave(self: &Arc<Releases>, claim: Arc<Claim>) {
        let until = self.env.now() + claim.ttl.max(LEFT_FOR);
        let (sweeping, given_up) = {
            let mut state = lock(&self.state);
            state.left.push_back((claim, until));
            let given_up = if state.left.len() > MOST_LEFT { state.left.pop_front() } else { None };
            (std::mem::replace(&mut state.sweeping, true), given_up)
        };
        if let Some((claim, _)) = given_up {
            self.backend.forget(&claim);
        }
        if !sweeping && self.env.lane().spawn(sweep(Arc::downgrade(self))).is_err() {
            lock(&self.state).sweeping = false;
        }
    }

    /// The next that nobody has answered yet; `None` ends the sweep.
    fn next_left(self: &Arc<Releases>) -> Option<(Option<UnderWay>, Arc<Claim>, Instant)> {
        let (claim, until) = {
            let mut state = lock(&self.state);
            let next = state.left.pop_front();
            state.sweeping = next.is_some();
            next?
        };
        Some((self.begin(claim.id), claim, until))
    }
}

/// A release under way, until this is dropped.
pub(crate) struct UnderWay(Arc<Releases>, ClaimId);

impl Drop for UnderWay {
    fn drop(&mut self) {
        lock(&self.0.state).under_way.remove(&self.1);
        self.0.done.notify_waiters();
    }
}

/// Tries what is left, one after another while the store answers, else one now and then, for as long as the client lives.
async fn sweep(releases: Weak<Releases>) {
    while let Some(releases) = releases.upgrade() {
        let Some((under_way, claim, until)) = releases.next_left() else { return };
        // Whoever releases it now leaves it here again if nobody answers.
        let Some(under_way) = under_way else { continue };
        let freed = caught(releases.backend.release(&claim, Duration::ZERO)).await;
        if releases.is_over(&claim, freed) {
            continue;
        }
        let now = releases.env.now();
        if now < until {
            lock(&releases.state).left.push_back((claim, until));
        } else {
            releases.backend.forget(&claim);
        }
        drop(under_way);
        let pause = TRY_LEFT_EVERY.mul_f64(0.5 + 0.5 * releases.env.random().jitter());
        let pause = releases.env.sleep_until(now + pause);
        // The client may end meanwhile.
        drop(releases);
        pause.await;
    }
}
