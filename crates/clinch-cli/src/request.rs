//! Asking for a lock in the mode that the command line names.

use std::time::Duration;

use clinch::{ClaimId, Guard, Instant, Locks, LossKind, Mutex, RwLock, Semaphore};

use crate::args::{LeaseArgs, Share};
use crate::connect::{Limits, TRY_AGAIN, is_transient};
use crate::exit::Failure;
use crate::output::{closed_until, describe, say};

/// One lock in one mode.
pub(crate) struct Request {
    lock: Lock,
    ttl: Duration,
}

enum Lock {
    Exclusive(Mutex),
    Shared(RwLock),
    Permits(Semaphore, u32),
}

impl Request {
    pub(crate) fn new(locks: &Locks, name: &str, share: &Share) -> clinch::Result<Request> {
        let lock = match (share.permits, share.of) {
            (Some(count), Some(capacity)) => Lock::Permits(locks.semaphore(name, capacity)?, count),
            _ if share.shared => Lock::Shared(locks.rwlock(name)?),
            _ => Lock::Exclusive(locks.mutex(name)?),
        };
        Ok(Request { lock, ttl: locks.lease_ttl() })
    }

    /// Waits within these limits, whatever happens to the store meanwhile. `tell`: to whom the id of each claim that waits is told.
    pub(crate) async fn acquire(&self, limits: &Limits, tell: impl Fn(ClaimId)) -> clinch::Result<Guard> {
        limits.keep(self.wait(limits, tell)).await
    }

    async fn wait(&self, limits: &Limits, tell: impl Fn(ClaimId)) -> clinch::Result<Guard> {
        let mut told = false;
        loop {
            let error = match self.attempt(limits.until, &tell).await {
                Err(error) if passes(&error) && limits.go_on() => error,
                ended => return ended,
            };
            if !std::mem::replace(&mut told, true) {
                say(format_args!("{error}; asking again"));
            }
            tokio::time::sleep(TRY_AGAIN).await;
        }
    }

    async fn attempt(&self, until: Option<Instant>, tell: impl Fn(ClaimId)) -> clinch::Result<Guard> {
        let mut acquire = match &self.lock {
            Lock::Exclusive(mutex) => mutex.lock(),
            Lock::Shared(lock) => lock.read(),
            Lock::Permits(semaphore, count) => semaphore.acquire(*count)?,
        };
        tell(acquire.claim_id()?);
        let guard = match until {
            Some(until) => acquire.deadline(until).await?,
            None => acquire.await?,
        };
        // A lock that was handed over has a short lease until its first renewal; a job is to be stopped a grace before
        // the end, so it needs all of it.
        if guard.remaining().is_some_and(|left| left < self.ttl / 2) {
            self.lengthen(&guard).await?;
        }
        Ok(guard)
    }

    /// Extends a lease, until its own end if the store does not answer.
    async fn lengthen(&self, guard: &Guard) -> clinch::Result<()> {
        let mut failure = None;
        loop {
            match guard.extend(self.ttl).await {
                Ok(()) => return Ok(()),
                Err(error) if is_transient(&error) => failure = Some(error),
                // Why it could not be extended says more than that its time was over then.
                Err(error) if has_run_out(&error) => return Err(failure.unwrap_or(error)),
                Err(error) => return Err(error),
            }
            tokio::time::sleep(TRY_AGAIN).await;
        }
    }
}

/// Whether a lock may still be had by asking for it again: nobody used it yet.
fn passes(error: &clinch::Error) -> bool {
    is_transient(error) || has_run_out(error)
}

fn has_run_out(error: &clinch::Error) -> bool {
    error.loss().is_some_and(|loss| loss.kind == LossKind::Expired)
}

/// Why a lock was not to be had: where nobody has it, it is kept closed, or who waits first does not take it.
pub(crate) async fn why_taken(locks: &Locks, limits: &Limits, name: &str, failure: Failure) -> Failure {
    if !failure.is_taken {
        return failure;
    }
    // Not knowing it is no other failure.
    let Ok(Some(state)) = limits.keep(locks.state(name)).await else { return failure };
    if state.claims.iter().any(|claim| claim.granted) {
        return failure;
    }
    match (state.closed_until, state.claims.first()) {
        (Some(until), _) => {
            Failure { message: format!("lock \"{name}\" is {}", closed_until(until)).into(), ..failure }
        }
        // Nobody does the job for as long as that one is stopped, say.
        (None, Some(waiter)) => {
            let why = "is not free, but nobody has it; who is first does not take it:";
            let message = format!("lock \"{name}\" {why} {}", describe(waiter)).into();
            Failure { is_taken: false, message, ..failure }
        }
        (None, None) => failure,
    }
}

/// The locks with the leases that the command line asks for.
pub(crate) fn with_lease(mut locks: Locks, lease: &LeaseArgs, label: &str) -> clinch::Result<Locks> {
    if let Some(ttl) = lease.ttl {
        locks = locks.ttl(ttl)?;
    }
    locks.label(lease.label.as_deref().unwrap_or(label))
}
