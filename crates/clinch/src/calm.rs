//! Callers' wakers, which are not ours.
//!
//! One may panic; and one may drop the task that it is to wake, with the guards and requests in it, since the executor of that
//! task has ended. No lock, channel, timer or connection here is made for that. So none of them ever has one: whatever a caller
//! polls goes through [`calm`], and keeps wakers that call the caller's with nothing locked, and whose panics are caught.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Wake, Waker};

use crate::sync::{Holding, apart, unlocked};

thread_local! {
    /// Who polls on this thread, and the address of what is lent to the poll in its waker's place.
    static CALLER: Cell<Option<(Caller, *const ())>> = const { Cell::new(None) };
}

/// Tells one who polls from others, by the waker that it polls with; for as long as that lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller(*const (), *const RawWakerVTable);

impl Caller {
    fn of(waker: &Waker) -> Caller {
        Caller(waker.data(), waker.vtable())
    }

    /// Who polls what this is called in, where that is a caller.
    fn here() -> Option<Caller> {
        CALLER.get().map(|(caller, _)| caller)
    }
}

/// Who polls what this is called in, where that is a caller that can be told from others: many wakers that wake nobody are one.
#[cfg(any(feature = "etcd", feature = "redis"))]
pub(crate) fn caller() -> Option<Caller> {
    Caller::here().filter(|caller| !caller.0.is_null())
}

/// A caller polls for as long as this lives; it has who polled before.
struct Polls(Option<(Caller, *const ())>);

impl Polls {
    /// What is lent within another such future is that one's caller's.
    fn begin(waker: &Waker, lends: *const ()) -> Polls {
        let before = CALLER.get();
        let outer = before.filter(|(_, lent)| *lent == waker.data());
        CALLER.set(Some((outer.map_or_else(|| Caller::of(waker), |(caller, _)| caller), lends)));
        Polls(before)
    }
}

impl Drop for Polls {
    fn drop(&mut self) {
        CALLER.set(self.0);
    }
}

/// A future for callers to poll.
pub(crate) fn calm<F: Future>(future: F) -> Calm<F> {
    Calm { future: ManuallyDrop::new(future), kept: Weak::new() }
}

/// See [`calm`].
pub(crate) struct Calm<F> {
    future: ManuallyDrop<F>,
    /// What was kept of the caller's waker, for as long as somebody keeps it: all that is kept is one. Not kept here: the waker of a
    /// task may be all that it lives by, and this be in it.
    kept: Weak<Kept>,
}

impl<F: Future> Future for Calm<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        // SAFETY: the future is pinned whenever this is: nothing moves it out of here, it is dropped in its place, and this is `Unpin`
        // only if the future is.
        let (future, kept) = unsafe {
            let calm = self.get_unchecked_mut();
            (Pin::new_unchecked(&mut *calm.future), &mut calm.kept)
        };
        // What is polled may have something locked where it drops the waker that it had.
        let _holding = Holding::begin();
        let caller = context.waker();
        if let Some(kept) = kept.upgrade().filter(|kept| kept.is_of(caller)) {
            let _polls = Polls::begin(caller, Arc::as_ptr(&kept).cast());
            return future.poll(&mut Context::from_waker(&Waker::from(kept)));
        }
        let lent = Lent { caller, kept: OnceLock::new() };
        let _polls = Polls::begin(caller, (&raw const lent).cast());
        // SAFETY: the functions of `BORROWED` take what points to a `Lent` that lives for as long as their waker does. This one ends
        // with this call, and is only lent out until then; what is cloned of it is no such waker.
        let waker = unsafe { Waker::new((&raw const lent).cast(), &BORROWED) };
        let polled = future.poll(&mut Context::from_waker(&waker));
        *kept = lent.kept.get().map_or_else(Weak::new, Arc::downgrade);
        polled
    }
}

impl<F> Drop for Calm<F> {
    fn drop(&mut self) {
        // As in `poll`.
        let _holding = Holding::begin();
        // SAFETY: dropped once, here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.future) }
    }
}

/// A caller's waker for the time of one poll, which costs nothing unless it is kept.
struct Lent<'a> {
    caller: &'a Waker,
    kept: OnceLock<Arc<Kept>>,
}

static BORROWED: RawWakerVTable = RawWakerVTable::new(
    |lent| {
        // SAFETY: here and below, see where it is made.
        let Lent { caller, kept } = unsafe { &*lent.cast::<Lent<'_>>() };
        RawWaker::from(kept.get_or_init(|| Arc::new(Kept(Some((*caller).clone())))).clone())
    },
    |lent| wake(unsafe { &*lent.cast::<Lent<'_>>() }.caller),
    |lent| wake(unsafe { &*lent.cast::<Lent<'_>>() }.caller),
    |_| (),
);

/// A caller's waker. `None` when it is dropped.
struct Kept(Option<Waker>);

impl Kept {
    /// Whether it wakes what this waker does.
    fn is_of(&self, caller: &Waker) -> bool {
        self.0.as_ref().is_some_and(|kept| kept.will_wake(caller))
    }
}

impl Wake for Kept {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.iter().for_each(wake);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        match self.0.take() {
            // Not the last of its kind: one is lent to the poll that this is in.
            Some(caller) if Caller::here() == Some(Caller::of(&caller)) => apart(|| drop(caller)),
            // It may be all that was left of a task.
            Some(caller) => unlocked(move || drop(caller)),
            None => {}
        }
    }
}

fn wake(caller: &Waker) {
    // Its clone is not ours either.
    let mut cloned = None;
    apart(|| cloned = Some(caller.clone()));
    if let Some(caller) = cloned {
        unlocked(move || caller.wake());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::pin::pin;
    use std::sync::Mutex;

    use tokio::sync::Notify;

    use super::*;
    use crate::sync::lock;

    /// Panics, or notes that it was called.
    struct Calls(Option<Arc<Mutex<u32>>>);

    impl Wake for Calls {
        fn wake(self: Arc<Self>) {
            match &self.0 {
                Some(calls) => *lock(calls) += 1,
                None => panic!("the executor is gone"),
            }
        }
    }

    #[test]
    fn a_waker_that_panics_keeps_nobody_asleep() {
        let (notify, calls) = (Notify::new(), Arc::new(Mutex::new(0)));
        let wait = |waker: &Waker| {
            let mut wait = Box::pin(calm(notify.notified()));
            assert!(wait.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
            wait
        };
        let bad = Waker::from(Arc::new(Calls(None)));
        let good = Waker::from(Arc::new(Calls(Some(calls.clone()))));
        let waits = [wait(&bad), wait(&good), wait(&bad), wait(&good)];
        notify.notify_waiters();
        assert_eq!(*lock(&calls), 2);
        drop(waits);
    }

    #[test]
    fn of_a_waker_one_is_kept_and_no_longer_than_it_is_needed() {
        let calls = Arc::new(Mutex::new(0));
        let [caller, another] = [(); 2].map(|()| Arc::new(Calls(Some(calls.clone()))));
        let kept = RefCell::new(Vec::new());
        let mut waits = pin!(calm(std::future::poll_fn(|context| {
            kept.borrow_mut().extend([(); 2].map(|()| context.waker().clone()));
            Poll::<()>::Pending
        })));
        let mut poll = |caller: &Arc<Calls>| {
            let waker = Waker::from(caller.clone());
            assert!(waits.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        };
        (0..3).for_each(|_| poll(&caller));
        assert_eq!((kept.borrow().len(), Arc::strong_count(&caller)), (6, 2));
        poll(&another);
        assert_eq!((Arc::strong_count(&caller), Arc::strong_count(&another)), (2, 2));
        kept.borrow().iter().for_each(Waker::wake_by_ref);
        assert_eq!(*lock(&calls), 8);
        kept.borrow_mut().clear();
        assert_eq!((Arc::strong_count(&caller), Arc::strong_count(&another)), (1, 1));
        poll(&caller);
        assert_eq!(Arc::strong_count(&caller), 2);
    }

    /// It may drop wakers while it has something locked that is none of ours, as connections do.
    #[test]
    fn a_future_that_is_dropped_drops_no_caller_while_it_has_something_locked() {
        type Slot = Arc<Mutex<Option<Waker>>>;
        struct Connection(Slot);
        impl Future for Connection {
            type Output = ();
            fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
                *self.0.lock().unwrap() = Some(context.waker().clone());
                Poll::Pending
            }
        }
        impl Drop for Connection {
            fn drop(&mut self) {
                *self.0.lock().unwrap() = None;
            }
        }
        struct Task(Slot, Arc<Mutex<Option<bool>>>);
        impl Wake for Task {
            fn wake(self: Arc<Self>) {}
        }
        impl Drop for Task {
            fn drop(&mut self) {
                *lock(&self.1) = Some(self.0.try_lock().is_ok());
            }
        }
        let (slot, unlocked) = (Slot::default(), Arc::default());
        let waker = Waker::from(Arc::new(Task(slot.clone(), Arc::clone(&unlocked))));
        let mut future = Box::pin(calm(Connection(slot)));
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        drop(future);
        assert_eq!(*lock(&unlocked), Some(true));
    }

    /// Not even where whoever wakes has something locked.
    #[test]
    fn a_waker_may_drop_the_task_that_it_wakes() {
        struct Task(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);
        impl Wake for Task {
            fn wake(self: Arc<Self>) {}
        }
        struct Locks(Arc<Mutex<bool>>);
        impl Drop for Locks {
            fn drop(&mut self) {
                *lock(&self.0) = true;
            }
        }
        let (notify, dropped) = (Arc::new(Notify::new()), Arc::new(Mutex::new(false)));
        let (waits, locks) = (notify.clone(), Locks(dropped.clone()));
        let task = Arc::new(Task(Mutex::default()));
        let mut future: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(calm(async move {
            let _locks = locks;
            waits.notified().await;
        }));
        let waker = Waker::from(task.clone());
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        *task.0.lock().unwrap() = Some(future);
        drop(task);
        let held = lock(&dropped);
        notify.notify_one();
        assert!(!*held);
        drop(held);
        assert!(*lock(&dropped), "the task lives");
        let mut ready = pin!(calm(std::future::ready(1)));
        assert_eq!(ready.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(1));
    }
}
