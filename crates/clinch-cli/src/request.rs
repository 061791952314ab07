//! Asking for a lock in the mode that the command line names.

use std::time::Duration;

use clinch::{Guard, Locks, Mutex, RwLock, Semaphore};

use crate::args::{LeaseArgs, Share};

/// One lock in one mode.
pub(crate) enum Request {
    Exclusive(Mutex),
    Shared(RwLock),
    Permits(Semaphore, u32),
}

impl Request {
    pub(crate) fn new(locks: &Locks, name: &str, share: &Share) -> clinch::Result<Request> {
        Ok(match (share.permits, share.of) {
            (Some(count), Some(capacity)) => Request::Permits(locks.semaphore(name, capacity)?, count),
            _ if share.shared => Request::Shared(locks.rwlock(name)?),
            _ => Request::Exclusive(locks.mutex(name)?),
        })
    }

    /// Waits at most this long; `None`: for as long as it takes.
    pub(crate) async fn acquire(&self, limit: Option<Duration>) -> clinch::Result<Guard> {
        let acquire = match self {
            Request::Exclusive(mutex) => mutex.lock(),
            Request::Shared(lock) => lock.read(),
            Request::Permits(semaphore, count) => semaphore.acquire(*count)?,
        };
        match limit {
            Some(limit) => acquire.timeout(limit).await,
            None => acquire.await,
        }
    }
}

/// The locks with the leases that the command line asks for.
pub(crate) fn with_lease(mut locks: Locks, lease: &LeaseArgs, label: &str) -> clinch::Result<Locks> {
    if let Some(ttl) = lease.ttl {
        locks = locks.ttl(ttl)?;
    }
    locks.label(lease.label.as_deref().unwrap_or(label))
}
