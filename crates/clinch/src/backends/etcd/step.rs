//! Whether whoever takes a step is still there for it.
//!
//! A step takes as long as the server does, and others look after the lock meanwhile. A waiter that waits for an answer is told
//! from one that nobody polls: the second was woken and has not gone on.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use futures_util::task::AtomicWaker;

use crate::clock::{Clock, Instant};
use crate::sync::lock;

/// One step of a claim.
pub(super) struct Step {
    clock: Clock,
    /// Since when it could go on.
    woken: Mutex<Option<Instant>>,
    waiter: AtomicWaker,
}

impl Step {
    pub(super) fn new(clock: Clock) -> Arc<Step> {
        Arc::new(Step { clock, woken: Mutex::default(), waiter: AtomicWaker::new() })
    }

    /// Since when it could go on, or failed or was dropped, and nobody came for it.
    pub(super) fn unheard_since(&self) -> Option<Instant> {
        *lock(&self.woken)
    }

    /// Takes the step.
    pub(super) async fn take<T>(self: &Arc<Step>, step: impl Future<Output = T>) -> T {
        let _end = End(self);
        let waker = Waker::from(self.clone());
        let mut step = pin!(step);
        std::future::poll_fn(|context| {
            // In this order, so that what wakes it meanwhile wakes the waiter, too.
            self.waiter.register(context.waker());
            *lock(&self.woken) = None;
            step.as_mut().poll(&mut Context::from_waker(&waker))
        })
        .await
    }

    fn could_go_on(&self) {
        let now = self.clock.now();
        lock(&self.woken).get_or_insert(now);
    }
}

impl Wake for Step {
    fn wake(self: Arc<Step>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Step>) {
        self.could_go_on();
        self.waiter.wake();
    }
}

/// The end of a step, however it ends.
struct End<'a>(&'a Step);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.could_go_on();
        // It keeps nobody's waker any longer than that.
        drop(self.0.waiter.take());
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[test]
    fn a_step_is_unheard_from_when_it_could_go_on_until_it_is_polled() {
        let step = Step::new(Clock::host());
        let is_unheard = || step.unheard_since().is_some();
        let mut context = Context::from_waker(Waker::noop());
        let ((first, one), (second, two)) = (oneshot::channel(), oneshot::channel());
        let mut taken = Box::pin(step.take(async { (one.await, two.await) }));
        assert!(taken.as_mut().poll(&mut context).is_pending() && !is_unheard());
        first.send(()).unwrap();
        assert!(is_unheard());
        let since = step.unheard_since();
        assert!(taken.as_mut().poll(&mut context).is_pending() && !is_unheard());
        second.send(()).unwrap();
        assert!(step.unheard_since() > since);
        drop(taken);
        assert!(is_unheard());
    }

    #[test]
    fn a_step_that_is_dropped_is_unheard() {
        let step = Step::new(Clock::host());
        let mut taken = Box::pin(step.take(std::future::pending::<()>()));
        assert!(taken.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(step.unheard_since(), None);
        drop(taken);
        assert!(step.unheard_since().is_some());
    }
}
