//! What a caller holds: a guard over one lease, released when dropped.

use std::fmt;
use std::future::poll_fn;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::backend::{ClaimState, Freed};
use crate::claim::{ClaimId, Loss};
use crate::claimed::Claimed;
use crate::clock::Instant;
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::keeper::Kept;
use crate::lease;
use crate::name::LockName;
use crate::tenure::{Standing, Tenure};
use crate::token::Token;

/// A held lock. Dropping it releases the lock in the background, inside or outside a runtime.
///
/// # Guarantees
///
/// From the moment the guard was returned until [`Guard::deadline`], nobody else holds a conflicting guard, whatever
/// happens to this process or its network, as long as the store keeps what it acknowledged. The deadline is counted
/// from before the request was sent, on a clock that goes on in suspend, so it passes before the store can grant to
/// another, and [`Guard::lost`] fires by then even if the store never answers. What no lock service can prevent is a
/// pause between your last check and your write: give [`Guard::token`] to the store that you guard.
///
/// A child that was forked and runs on without `exec` has neither the lock nor its client: its copy of the guard says that the lock
/// is lost, what it asks of the store fails as [`ErrorKind::Closed`], and dropping its copy of a guard frees nothing. On `file://` its copies of the descriptors keep the lock
/// taken, should its parent die, until it ends too.
///
/// # Examples
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let locks = clinch::connect("memory://").await?;
/// let guard = locks.mutex("reports/daily")?.lock().await?;
/// assert!(guard.is_held());
/// println!("token {}", guard.token());
/// assert_eq!(guard.release().await?, clinch::Released::Released);
/// # Ok::<_, clinch::Error>(()) }).unwrap();
/// ```
#[must_use = "the lock is released when the guard is dropped"]
pub struct Guard {
    kept: Kept,
    claimed: Claimed,
    token: Token,
}

/// What a release found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Released {
    /// The lease was already lost, for this reason. Nobody else's lock was touched.
    AlreadyLost(Loss),
    /// The lock was held until now and is free.
    Released,
}

/// A lease that outlives its guard and even this process: whoever knows name and id can renew and release it.
#[derive(Clone, Debug)]
pub struct Detached {
    /// The lock.
    pub name: LockName,
    /// The claim.
    pub claim: ClaimId,
    /// Its fencing token.
    pub token: Token,
}

impl Guard {
    /// For how long [`Guard::release_closed`] keeps a lock closed at most: ten years.
    pub const MAX_LINGER: Duration = lease::MAX_LINGER;

    pub(crate) fn new(mut claimed: Claimed, kept: Kept, token: Token) -> Guard {
        claimed.tenure = Some(kept.tenure.clone());
        Guard { kept, claimed, token }
    }

    /// The fencing token: larger than that of every earlier holder of this lock. 0 on stores without
    /// [`fencing`](crate::Capabilities::fencing).
    pub fn token(&self) -> Token {
        self.token
    }

    /// The lock's name.
    pub fn name(&self) -> &LockName {
        &self.claimed.claim.name
    }

    /// The id of the claim behind this guard.
    pub fn claim_id(&self) -> ClaimId {
        self.claimed.claim.id
    }

    /// When this guard stops claiming to hold, unless renewed before; `None` where a lease has no end. Always before
    /// the store can grant the lock to another.
    pub fn deadline(&self) -> Option<Instant> {
        self.tenure().deadline()
    }

    /// The time left until [`Guard::deadline`]; zero when lost, `None` where a lease has no end.
    pub fn remaining(&self) -> Option<Duration> {
        let now = self.engine().env.now();
        match self.tenure().standing(now) {
            Standing::Lost(_) => Some(Duration::ZERO),
            Standing::Held | Standing::Jeopardy => self.deadline().map(|deadline| deadline.since(now)),
        }
    }

    /// Whether the lock is held at this moment. Reads a clock, asks nobody, never blocks; once `false`, always `false`.
    pub fn is_held(&self) -> bool {
        !matches!(self.standing(), Standing::Lost(_))
    }

    /// How the lease stands at this moment, from what is known here.
    pub fn standing(&self) -> Standing {
        self.tenure().standing(self.engine().env.now())
    }

    /// Waits until the lease is lost, and says why. Pending for ever while it is held.
    ///
    /// # Cancel safety
    ///
    /// Safe; a loss is remembered.
    pub async fn lost(&self) -> Loss {
        loop {
            if let Standing::Lost(loss) = self.told(|now| !matches!(now, Standing::Lost(_))).await {
                return loss;
            }
        }
    }

    /// Waits until the lease stands otherwise than `standing`: from held to in jeopardy, back, or to lost.
    ///
    /// # Cancel safety
    ///
    /// Safe; nothing is missed between two calls but a change that was undone.
    pub async fn changed(&self, standing: &Standing) -> Standing {
        self.told(|now| now == standing).await
    }

    /// Asks the store whether the lock is still held, with its strongest read.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Lost`] when it is not; [`ErrorKind::Unavailable`] or [`ErrorKind::Unknown`] when the store did not
    /// say, in which case the guard stands as it did.
    pub async fn verify(&self) -> Result<()> {
        self.engine().here(self.engine().keeper.confirm(self.tenure(), None)).await
    }

    /// The claim as the store shows it to everybody, with the end that others may have given it; `None` when it does not count any more. On
    /// stores but `file://` that is as soon as it is evicted.
    ///
    /// For who keeps a lease under which another process works. On `file://` this reads the claim's record by a descriptor that is open,
    /// wherever the file is by now; [`Locks::state`](crate::Locks::state) goes by the path.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    ///
    /// # Errors
    ///
    /// As [`Locks::list`](crate::Locks::list).
    pub async fn state(&self) -> Result<Option<ClaimState>> {
        self.engine().here(self.engine().backend.own_state(&self.claimed.claim)).await
    }

    /// Renews the lease now, so that it lasts `ttl` from this moment, and renews with that TTL from here on. A shorter TTL
    /// ends this guard sooner; the store may keep the lock for the time that it had promised before.
    ///
    /// `ttl` is between 100 ms and 24 h. Where a lease has no end, this checks that it is still held.
    ///
    /// # Cancel safety
    ///
    /// Safe; the lease may have been extended nevertheless.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Lost`] when the lease is lost. After [`ErrorKind::Unavailable`] or [`ErrorKind::Unknown`] the
    /// earlier deadline still stands; a shorter TTL counts from this call on all the same, since it may have arrived.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        lease::check_ttl(ttl, self.engine().backend.longest_ttl())?;
        self.engine().here(self.engine().keeper.confirm(self.tenure(), Some(ttl))).await
    }

    /// Releases the lock and says whether it was still held.
    ///
    /// A lost answer is asked for again until the lease has run out, and after that now and then in the background, as long
    /// as the client lives.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases in the background.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] or [`ErrorKind::Unknown`] when the store did not answer before the lease ran out by
    /// itself.
    pub async fn release(self) -> Result<Released> {
        self.release_closed(Duration::ZERO).await
    }

    /// Releases the lock, but keeps it closed: nobody is granted it for `linger` from now.
    ///
    /// For work that must not run twice in a row on hosts whose clocks differ. Otherwise as [`Guard::release`].
    ///
    /// # Errors
    ///
    /// As [`Guard::release`], and [`ErrorKind::Unsupported`] on stores without
    /// [`linger`](crate::Capabilities::linger), [`ErrorKind::Invalid`] for more than [`Guard::MAX_LINGER`]; the lock is then released in the
    /// background. Ask for that property before the work is done, with `require=linger` in the URL for one.
    pub async fn release_closed(self, linger: Duration) -> Result<Released> {
        lease::check_linger(linger)?;
        let Guard { kept, mut claimed, .. } = self;
        let engine = claimed.engine.clone();
        engine.check_process()?;
        // From here on nobody renews the lease: this future may be kept without being polled.
        let tenure = kept.tenure.clone();
        kept.end();
        // Before the look at the lease, so that the keeper does not free it at the same time.
        let ends = tenure.runs_out();
        claimed.under_way = engine.releases.begin(claimed.claim.id, ends);
        if let Standing::Lost(loss) = tenure.standing_here(engine.env.now()) {
            return Ok(Released::AlreadyLost(loss));
        }
        let claim = claimed.leaving();
        let until = engine.releases.until(&claim, ends);
        match engine.here(engine.releases.free(&claim, linger, until, tenure.may_end_at())).await? {
            Freed::Removed => {
                claimed.settle();
                Ok(Released::Released)
            }
            Freed::Absent => Ok(Released::AlreadyLost(match tenure.standing(engine.env.now()) {
                Standing::Lost(loss) => loss,
                Standing::Held | Standing::Jeopardy => {
                    Loss::new(crate::LossKind::Deleted, "the store no longer had the claim")
                }
            })),
        }
    }

    /// Ends the guard but not the lease: it lasts its TTL from this moment, or up to a tenth less where it was granted just before,
    /// unless it is renewed by
    /// [`Locks::renew_detached`](crate::Locks::renew_detached) or released by
    /// [`Locks::release_detached`](crate::Locks::release_detached).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases the lock in the background.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] on stores whose leases end with their process, and those of [`Guard::extend`]; the lock
    /// is then released.
    pub async fn detach(self) -> Result<Detached> {
        self.engine().check_process()?;
        if !self.engine().backend.capabilities().detached {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "on this store a lease ends with the process that holds it",
            ));
        }
        // One that was handed over may be short until its first renewal, and nobody will renew it now.
        self.tenure().isolate();
        self.engine().here(self.lengthen(self.claimed.claim.ttl)).await?;
        let detached = Detached { name: self.name().clone(), claim: self.claim_id(), token: self.token };
        self.engine().backend.forget(&self.claimed.claim);
        self.claimed.settle();
        Ok(detached)
    }

    /// Sees to it that the lease lasts `ttl` for itself: asks until its own end if the store does not answer.
    async fn lengthen(&self, ttl: Duration) -> Result<()> {
        let env = &self.engine().env;
        if let Standing::Lost(loss) = self.standing() {
            return Err(Error::lost(self.name(), loss));
        }
        if self.tenure().is_new(env.now()) {
            return Ok(());
        }
        let (mut failure, mut attempt) = (None, 0);
        loop {
            match self.engine().keeper.confirm(self.tenure(), Some(ttl)).await {
                Ok(()) => return Ok(()),
                Err(error) if error.is_transient() => failure = Some(error),
                // Why it could not be extended says more than that it was lost then.
                Err(error) => return Err(failure.unwrap_or(error)),
            }
            env.sleep_until(env.now() + lease::backoff(attempt, env.random().jitter())).await;
            attempt += 1;
        }
    }

    /// A descriptor that keeps the lock held in every process that inherits it, on stores where the kernel frees a lock
    /// with its last descriptor; `None` elsewhere, or where the file of the lock cannot be opened any more. Close-on-exec is set.
    /// [`Guard::release`] frees the lock nevertheless.
    pub fn descriptor(&self) -> Option<OwnedFd> {
        self.engine().check_process().ok()?;
        self.engine().backend.descriptor(self.claim_id())
    }

    /// The key that stands for this lease in the store, on stores where your own transactions can be made conditional on
    /// it; `None` elsewhere. See [`fence`](crate::fence).
    pub fn store_key(&self) -> Option<String> {
        self.engine().check_process().ok()?;
        self.engine().backend.key(self.claim_id())
    }

    /// Waits until the lease stands otherwise than `than`. Whoever is polled after a passed deadline sees it, though the keeper, of a
    /// process that was stopped until then, may not have come to say so.
    async fn told(&self, than: impl Fn(&Standing) -> bool) -> Standing {
        let mut told = std::pin::pin!(self.engine().here(async { Ok(self.tenure().changed(&than).await) }));
        poll_fn(|cx| {
            let now = self.standing();
            if than(&now) { told.as_mut().poll(cx).map(|told| told.unwrap_or(now)) } else { Poll::Ready(now) }
        })
        .await
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.claimed.engine
    }

    fn tenure(&self) -> &Arc<Tenure> {
        &self.kept.tenure
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("name", &self.name().as_str())
            .field("mode", &self.claimed.claim.mode)
            .field("token", &self.token.get())
            .field("standing", &self.standing())
            .finish_non_exhaustive()
    }
}

/// An exclusive guard of a read-write lock, which can become a shared one.
#[derive(Debug)]
#[must_use = "the lock is released when the guard is dropped"]
pub struct WriteGuard(Guard);

impl WriteGuard {
    /// Becomes a reader without letting a writer in between, keeps the token, and lets waiting readers in.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases the lock in the background.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Lost`] when the lease is lost; [`ErrorKind::Unavailable`] or [`ErrorKind::Unknown`] when the store
    /// did not say. The lock is then released.
    pub async fn downgrade(self) -> Result<Guard> {
        let Guard { kept, claimed, token } = self.0;
        let engine = claimed.engine.clone();
        engine.check_process()?;
        if let Standing::Lost(loss) = kept.tenure.standing(engine.env.now()) {
            return Err(Error::lost(&claimed.claim.name, loss));
        }
        // Idempotent: an answer that was lost is asked for again.
        let downgrade = async {
            let mut attempt = 0;
            while let Err(error) = engine.backend.downgrade(&claimed.claim).await {
                if !engine.worth_repeating(&error, &mut attempt).await {
                    return Err(error);
                }
            }
            Ok(())
        };
        engine.here(downgrade).await?;
        Ok(Guard { kept, claimed, token })
    }

    /// Releases the lock and says whether it was still held; see [`Guard::release`].
    ///
    /// # Errors
    ///
    /// As [`Guard::release`].
    pub async fn release(self) -> Result<Released> {
        self.0.release().await
    }
}

impl Deref for WriteGuard {
    type Target = Guard;

    fn deref(&self) -> &Guard {
        &self.0
    }
}

impl From<Guard> for WriteGuard {
    fn from(guard: Guard) -> WriteGuard {
        WriteGuard(guard)
    }
}
