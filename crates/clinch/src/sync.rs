//! Locking a `std` mutex without the poison question, and calling what is not ours with nothing locked.
//!
//! No critical section of this crate leaves its data half-changed when it panics, so a poisoned mutex holds good data.
//!
//! A caller's waker may drop a task, with guards and requests that lock what is locked here. So whoever calls one need not know
//! what its own callers have locked: this counts it, and the call waits until it is nothing.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(any(feature = "file", feature = "redis"))]
use std::sync::TryLockError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

thread_local! {
    /// How much this thread has locked, in steps of [`ONE`], and whether something [waits](WAITS) until that is nothing: each lock
    /// goes through here twice.
    static HELD: Cell<usize> = const { Cell::new(0) };
    /// What waits.
    static LATER: RefCell<Vec<Box<dyn FnOnce()>>> = const { RefCell::new(Vec::new()) };
}

const ONE: usize = 2;
const WAITS: usize = 1;

/// Locks, also after another thread panicked while it held the mutex.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Locked<'_, T> {
    Locked { value: mutex.lock().unwrap_or_else(PoisonError::into_inner), _holding: Holding::begin() }
}

/// As [`lock`]; `None`: somebody has it locked.
#[cfg(any(feature = "file", feature = "redis"))]
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<Locked<'_, T>> {
    let value = match mutex.try_lock() {
        Ok(value) => value,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    Some(Locked { value, _holding: Holding::begin() })
}

/// What is locked for as long as this lives.
pub(crate) struct Locked<'a, T> {
    value: MutexGuard<'a, T>,
    // After the value, which is unlocked first.
    _holding: Holding,
}

impl<T> Deref for Locked<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Locked<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// Something is locked by this thread for as long as this lives, also what is not locked by [`lock`].
pub(crate) struct Holding(PhantomData<*const ()>);

impl Holding {
    pub(crate) fn begin() -> Holding {
        HELD.set(HELD.get() + ONE);
        Holding(PhantomData)
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let held = HELD.get() - ONE;
        HELD.set(held);
        if held == WAITS {
            call_later();
        }
    }
}

#[cold]
fn call_later() {
    HELD.set(0);
    let later = LATER.try_with(RefCell::take).unwrap_or_default();
    later.into_iter().for_each(apart);
}

/// Calls what is not ours once this thread has nothing locked: at once, or when the last is unlocked.
pub(crate) fn unlocked(call: impl FnOnce() + 'static) {
    if HELD.get() < ONE {
        return apart(call);
    }
    let mut call: Option<Box<dyn FnOnce()>> = Some(Box::new(call));
    // Fails at the very end of a thread.
    if LATER.try_with(|later| later.borrow_mut().extend(call.take())).is_ok() {
        HELD.set(HELD.get() | WAITS);
    }
    call.into_iter().for_each(apart);
}

/// Calls what is not ours: its panic, which the panic hook has said, must not end what serves others. To be called with nothing locked, unless
/// it can end nothing.
pub(crate) fn apart(call: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(call));
}

/// Whether a task is at something that one alone is to do. It ends with the task, however that ends, also if it was never begun.
#[derive(Debug, Default)]
pub(crate) struct AtWork(Weak<()>);

impl AtWork {
    /// What the task is to own; `None`: there is one.
    pub(crate) fn begin(&mut self) -> Option<Arc<()>> {
        let work = (self.0.strong_count() == 0).then(Arc::default)?;
        self.0 = Arc::downgrade(&work);
        Some(work)
    }

    /// The task is about to end: whatever comes from now on is for another.
    #[cfg(any(test, feature = "file", feature = "redis", feature = "etcd"))]
    pub(crate) fn end(&mut self) {
        self.0 = Weak::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_at_work_until_its_end() {
        let mut at_work = AtWork::default();
        let first = at_work.begin().unwrap();
        assert!(at_work.begin().is_none());
        at_work.end();
        let second = at_work.begin().unwrap();
        drop(first);
        assert!(at_work.begin().is_none(), "the one before ended it");
        drop(second);
        assert!(at_work.begin().is_some());
    }

    #[test]
    fn what_is_not_ours_is_called_when_the_last_is_unlocked() {
        let (outer, inner) = (Mutex::new(()), Mutex::new(()));
        let calls = Arc::new(Mutex::new(0));
        let call = |count: i32| {
            let calls = calls.clone();
            unlocked(move || *lock(&calls) += count);
        };
        call(1);
        assert_eq!(*lock(&calls), 1);
        let first = lock(&outer);
        let second = lock(&inner);
        call(10);
        unlocked(|| panic!("it is not ours"));
        call(100);
        drop(first);
        assert_eq!(*calls.lock().unwrap(), 1, "something is locked");
        drop(second);
        assert_eq!(*lock(&calls), 111);
    }
}
