//! Callers that run no tokio.

use std::future::IntoFuture;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use super::Fixture;
use super::client::{Client, PATIENCE, lock_in_vain, unique};
use crate::error::ErrorKind;
use crate::guard::Released;

/// Threads that contend.
const THREADS: usize = 3;

/// Turns of each.
const TURNS: usize = 3;

/// P7, P8: connecting, locking, waiting, time-outs, renewals and releases need nothing of the caller but to be polled.
pub async fn no_runtime(fixture: &dyn Fixture) {
    // The property itself runs in a runtime; a new thread has none.
    thread::scope(|scope| {
        let scene = scope.spawn(|| block_on(scene(fixture)));
        scene.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

async fn scene(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("no-runtime");
    let (mutex, others) = (one.locks.mutex(&name).unwrap(), other.locks.mutex(&name).unwrap());
    let guard = mutex.lock().await.unwrap();
    guard.verify().await.unwrap();
    assert!(!other.could_lock(&name).await, "two hold one lock");
    let error = lock_in_vain(&other.locks, &name).await;
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let mutex = [&mutex, &others][thread % 2];
            scope.spawn(move || {
                for turn in 0..TURNS {
                    let guard = block_on(mutex.lock().timeout(PATIENCE).into_future()).unwrap();
                    match turn % 2 {
                        0 => drop(guard),
                        _ => assert_eq!(block_on(guard.release()).unwrap(), Released::Released),
                    }
                }
            });
        }
        // Dropped outside any executor, while they wait.
        drop(guard);
    });
    let short = one.with_ttl(fixture.ttl()).mutex(&name).unwrap();
    let guard = short.lock().timeout(PATIENCE).await.unwrap();
    one.env.sleep_until(one.now() + fixture.ttl() * 2).await;
    assert!(guard.is_held(), "nobody renewed the lease");
    drop(guard);
    one.locks.close(PATIENCE).await.unwrap();
    other.locks.close(PATIENCE).await.unwrap();
    assert!(one.locks.state(&name).await.unwrap().is_none(), "something was left");
}

/// An executor of nothing but a thread.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}
