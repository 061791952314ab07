//! The semaphore: up to N permits at a time.

use std::num::NonZeroU32;

use crate::acquire::{Acquire, Target};
use crate::claim::Mode;
use crate::error::{Error, Result};
use crate::guard::Guard;

/// A lock of `capacity` permits, of which a guard holds one or more.
///
/// All clients must agree about the capacity: a claim that disagrees with a live one is refused with both numbers.
/// First come, first served where the backend is [`fifo`](crate::Capabilities::fifo): a claim for many permits is not
/// passed by later claims for few.
#[derive(Clone, Debug)]
pub struct Semaphore {
    target: Target,
    capacity: NonZeroU32,
}

impl Semaphore {
    pub(crate) fn new(target: Target, capacity: u32) -> Result<Semaphore> {
        let capacity = NonZeroU32::new(capacity)
            .ok_or_else(|| Error::invalid("a semaphore must have at least 1 permit; this one has 0"))?;
        Ok(Semaphore { target, capacity })
    }

    /// How many permits there are.
    pub fn capacity(&self) -> u32 {
        self.capacity.get()
    }

    /// Asks for `count` permits, from 1 to the capacity.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) for a count that could never be granted.
    pub fn acquire(&self, count: u32) -> Result<Acquire<'_>> {
        Ok(self.target.acquire(self.mode(count)?))
    }

    /// Takes `count` permits if that needs no waiting; `None` otherwise.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the claim in the background.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) for a count that could never be granted, and when live claims
    /// disagree about the capacity; [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) or
    /// [`ErrorKind::Unknown`](crate::ErrorKind::Unknown) when the store did not answer, or nobody could say whether they are free.
    pub async fn try_acquire(&self, count: u32) -> Result<Option<Guard>> {
        self.target.try_acquire(self.mode(count)?).await
    }

    fn mode(&self, count: u32) -> Result<Mode> {
        match NonZeroU32::new(count) {
            Some(count) if count <= self.capacity => Ok(Mode::Permits { count, capacity: self.capacity }),
            _ => {
                Err(Error::invalid(format!("asked for {count} permits of a semaphore of {}", self.capacity)))
            }
        }
    }
}
