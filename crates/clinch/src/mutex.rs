//! The mutex: one holder at a time.

use crate::acquire::{Acquire, Target};
use crate::claim::Mode;
use crate::error::Result;
use crate::guard::Guard;

/// A lock that one guard holds at a time, over all processes that use its store.
///
/// Made by [`Locks::mutex`](crate::Locks::mutex); cheap to clone and to make again. Not reentrant: a second request
/// waits for the first guard, also in the same task.
#[derive(Clone, Debug)]
pub struct Mutex {
    target: Target,
}

impl Mutex {
    pub(crate) fn new(target: Target) -> Mutex {
        Mutex { target }
    }

    /// Asks for the lock: await it to wait for its turn, or give it a [`timeout`](Acquire::timeout) first.
    pub fn lock(&self) -> Acquire<'_> {
        self.target.acquire(Mode::Exclusive)
    }

    /// Takes the lock if nobody holds it or waits for it; `None` otherwise. No place in the
    /// queue. One step on the store; a few where nobody can say whether it is taken, as where claims on a quorum meet.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the claim in the background.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) or [`ErrorKind::Unknown`](crate::ErrorKind::Unknown)
    /// when the store did not answer, or nobody could say whether the lock is taken.
    pub async fn try_lock(&self) -> Result<Option<Guard>> {
        self.target.try_acquire(Mode::Exclusive).await
    }
}
