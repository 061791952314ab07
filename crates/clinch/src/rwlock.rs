//! The read-write lock: many readers or one writer.

use crate::acquire::{Acquire, Target};
use crate::claim::Mode;
use crate::error::Result;
use crate::guard::{Guard, WriteGuard};

/// A lock that any number of readers or one writer hold.
///
/// First come, first served where the backend is [`fifo`](crate::Capabilities::fifo): readers in a row share, a reader
/// behind a waiting writer waits, so writers do not starve. There is no upgrade: two readers that both wanted one would
/// wait for each other for ever.
#[derive(Clone, Debug)]
pub struct RwLock {
    target: Target,
}

impl RwLock {
    pub(crate) fn new(target: Target) -> RwLock {
        RwLock { target }
    }

    /// Asks to share the lock with other readers.
    pub fn read(&self) -> Acquire<'_> {
        self.target.acquire(Mode::Shared)
    }

    /// Asks for the lock alone.
    pub fn write(&self) -> Acquire<'_, WriteGuard> {
        self.target.acquire(Mode::Exclusive)
    }

    /// Shares the lock if that needs no waiting; `None` otherwise.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the claim in the background.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) or [`ErrorKind::Unknown`](crate::ErrorKind::Unknown)
    /// when the store did not answer, or nobody could say whether the lock is taken.
    pub async fn try_read(&self) -> Result<Option<Guard>> {
        self.target.try_acquire(Mode::Shared).await
    }

    /// Takes the lock alone if that needs no waiting; `None` otherwise.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the claim in the background.
    ///
    /// # Errors
    ///
    /// As [`RwLock::try_read`].
    pub async fn try_write(&self) -> Result<Option<WriteGuard>> {
        Ok(self.target.try_acquire(Mode::Exclusive).await?.map(WriteGuard::from))
    }
}
