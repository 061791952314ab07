//! Which runtime may drive a connection.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use tokio::runtime::{Handle, RuntimeFlavor};

/// The runtime that polls this, which may drive a connection. Not one whose context was merely entered while another executor
/// polls: nothing would ever be read there. One of several threads drives itself.
pub(crate) fn driven() -> Option<Handle> {
    let runtime = Handle::try_current().ok()?;
    let alone = runtime.runtime_flavor() == RuntimeFlavor::CurrentThread;
    (!alone || tokio::task::try_id().is_some() || is_polled_by_tokio()).then_some(runtime)
}

/// Whether this thread is inside a runtime's `block_on`. There tokio keeps the waker of whoever yields; elsewhere it wakes at once.
fn is_polled_by_tokio() -> bool {
    struct Woken(AtomicBool);
    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let woken = Arc::new(Woken(AtomicBool::new(false)));
    let waker = Waker::from(woken.clone());
    let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&waker));
    !woken.0.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_that_is_only_entered_drives_nothing() {
        let alone = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let many = tokio::runtime::Runtime::new().unwrap();
        assert!(driven().is_none());
        assert!(alone.block_on(async { driven() }).is_some());
        assert!(alone.block_on(async { tokio::spawn(async { driven() }).await.unwrap() }).is_some());
        let entered = alone.enter();
        assert!(driven().is_none());
        drop(entered);
        let _entered = many.enter();
        assert!(driven().is_some());
    }
}
