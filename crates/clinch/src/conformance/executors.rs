//! Callers that run no tokio, and runtimes that are of no use.

use std::future::IntoFuture;
use std::pin::{Pin, pin};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use super::Fixture;
use super::client::{Client, PATIENCE, lock_in_vain, runtime, unique};
use crate::claim::LossKind;
use crate::error::ErrorKind;
use crate::guard::Released;
use crate::lane::Lane;

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

/// P8: a runtime whose context is entered, but which nobody drives any more, neither connects nor keeps anything; nor does it
/// hang whoever is polled in it by another executor.
pub async fn runtime_stands_still(fixture: &dyn Fixture) {
    thread::scope(|scope| {
        let scene = scope.spawn(|| {
            let still = runtime();
            // What it drove when it ran stands still with it.
            let clients = async { (Client::new(fixture).await, Client::new(fixture).await) };
            let (one, other) = still.block_on(clients);
            still.block_on(one.could_lock(&unique("still")));
            let _entered = still.enter();
            block_on(contend(&one, &other));
        });
        scene.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Two take turns at a lock, in a future that nobody but this thread's executor polls.
async fn contend(one: &Client, other: &Client) {
    let name = unique("contended");
    let (mutex, others) = (one.locks.mutex(&name).unwrap(), other.locks.mutex(&name).unwrap());
    let guard = mutex.lock().timeout(PATIENCE).await.unwrap();
    assert!(others.try_lock().await.unwrap().is_none(), "two hold one lock");
    let error = lock_in_vain(&other.locks, &name).await;
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    let mut waiter = pin!(others.lock().timeout(PATIENCE).into_future());
    until_waiting(other, &name, waiter.as_mut()).await;
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    drop(waiter.await.unwrap());
    // Freed in the background.
    drop(mutex.lock().timeout(PATIENCE).await.unwrap());
    one.locks.close(PATIENCE).await.unwrap();
    other.locks.close(PATIENCE).await.unwrap();
}

/// Polls a waiter until its client waits.
async fn until_waiting<T>(client: &Client, name: &str, waiter: Pin<&mut (impl Future<Output = T> + ?Sized)>) {
    let waits = async {
        while client.faults.waiting(name).is_empty() {
            client.env.sleep_until(client.now() + Duration::from_millis(2)).await;
        }
    };
    tokio::select! {
        biased;
        _ = waiter => panic!("granted too early"),
        () = waits => {}
    }
}

/// P5, P7, P8: when the runtime that a client was made in ends, its leases are told lost; whoever waits goes on, and what comes
/// after that works as before.
pub async fn lane_ends(fixture: &dyn Fixture) {
    let rival = Client::new(fixture).await;
    let (tell, told) = tokio::sync::oneshot::channel();
    let (send, made) = mpsc::channel();
    thread::scope(|scope| {
        let lane = scope.spawn(|| {
            runtime().block_on(async {
                send.send(Client::on(Lane::here().unwrap(), fixture).await).ok().unwrap();
                drop(told.await);
            });
        });
        let client = made.recv().unwrap();
        // Not the thread of the property's own runtime, which would stand still meanwhile.
        let scene = scope.spawn(move || {
            block_on(async move {
                let (kept, awaited) = (unique("kept"), unique("awaited"));
                let guard = client.locks.mutex(&kept).unwrap().lock().timeout(PATIENCE).await.unwrap();
                let held = rival.locks.mutex(&awaited).unwrap().lock().timeout(PATIENCE).await.unwrap();
                let mutex = client.with_ttl(fixture.ttl()).mutex(&awaited).unwrap();
                let mut waiter = pin!(mutex.lock().timeout(PATIENCE).into_future());
                until_waiting(&client, &awaited, waiter.as_mut()).await;
                // The keeper has begun.
                client.env.sleep_until(client.now() + Duration::from_millis(20)).await;
                tell.send(()).unwrap();
                lane.join().unwrap();
                assert_eq!(guard.lost().await.kind, LossKind::Unverifiable);
                drop(guard);
                drop(rival.locks.mutex(&kept).unwrap().lock().timeout(PATIENCE).await.unwrap());
                let error = lock_in_vain(&client.locks, &awaited).await;
                assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
                assert_eq!(held.release().await.unwrap(), Released::Released);
                let guard = waiter.await.unwrap();
                client.env.sleep_until(client.now() + fixture.ttl() * 2).await;
                assert!(guard.is_held(), "nobody renewed the lease");
                drop(guard);
                drop(rival.locks.mutex(&awaited).unwrap().lock().timeout(PATIENCE).await.unwrap());
                client.locks.close(PATIENCE).await.unwrap();
            })
        });
        scene.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
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
