//! Locking a `std` mutex without the poison question, and calling what is not ours.
//!
//! No critical section of this crate leaves its data half-changed when it panics, so a poisoned mutex holds good data.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after another thread panicked while it held the mutex.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls what is not ours, as a waker is: its panic, which the panic hook has said, must not end what serves others. To be called
/// with nothing locked: a waker may drop a task with all that it has.
pub(crate) fn apart(call: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(call));
}
