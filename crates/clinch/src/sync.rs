//! Locking a `std` mutex without the poison question.
//!
//! No critical section of this crate leaves its data half-changed when it panics, so a poisoned mutex holds good data.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after another thread panicked while it held the mutex.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
