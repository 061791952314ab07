//! Callers that run no tokio, and runtimes that are of no use.

use std::future::IntoFuture;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use super::Fixture;
use super::client::{Client, PATIENCE, eventually, join, lock_in_vain, queue, runtime, unique, within};
use crate::claim::LossKind;
use crate::error::ErrorKind;
use crate::guard::Released;
use crate::lane::Lane;
use crate::sync::lock;

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

/// P7, P8: nobody hangs whose executor is none of the runtime that stands around it, or whose thread that runtime would need.
pub async fn runtime_drives_nothing(fixture: &dyn Fixture) {
    let mut scenes = Vec::new();
    for (what, scene) in STILL {
        let client = Client::new(fixture).await;
        let (tell, told) = mpsc::channel();
        // Not joined: one that hangs is told.
        thread::spawn(move || {
            scene(Box::pin(alone(client)));
            let _ = tell.send(());
        });
        scenes.push((what, told));
    }
    for (what, told) in scenes {
        told.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what}: it hangs or fails"));
    }
}

/// Has a future polled.
type Scene = fn(Task);

/// Where nothing that is spawned on the current runtime is ever run, or not until the future is done.
const STILL: [(&str, Scene); 6] = [
    ("on a thread for what blocks, of a runtime that nobody drives", |task| {
        let still = runtime();
        runtime().block_on(still.spawn_blocking(move || block_on(task))).unwrap();
    }),
    ("on such a thread, of a runtime that was driven", |task| {
        let still = runtime();
        still.block_on(async { tokio::spawn(async {}).await }).unwrap();
        runtime().block_on(still.spawn_blocking(move || block_on(task))).unwrap();
    }),
    ("in a task, in the context of another runtime", |task| {
        let (still, driven) = (runtime(), runtime());
        let other = still.handle().clone();
        let blocked = async move {
            let _entered = other.enter();
            block_on(task);
        };
        driven.block_on(driven.spawn(blocked)).unwrap();
    }),
    ("polled by one runtime, in the context of another", |task| {
        let (still, driven) = (runtime(), runtime());
        driven.block_on(async {
            let _entered = still.enter();
            task.await;
        });
    }),
    ("in a local set that no runtime polls", |task| {
        let still = runtime();
        let _entered = still.enter();
        block_on(tokio::task::LocalSet::new().run_until(async { tokio::task::spawn_local(task).await }))
            .unwrap();
    }),
    ("blocking the one thread of its runtime", |task| {
        runtime().block_on(async { tokio::spawn(async { block_on(task) }).await }).unwrap();
    }),
];

/// Takes, fails to take and releases a lock.
async fn alone(client: Client) {
    let name = unique("still");
    let mutex = client.locks.mutex(&name).unwrap();
    let guard = mutex.lock().timeout(PATIENCE).await.unwrap();
    assert!(mutex.try_lock().await.unwrap().is_none(), "two hold one lock");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    drop(mutex.lock().timeout(PATIENCE).await.unwrap());
    client.locks.close(PATIENCE).await.unwrap();
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

/// P5, P8: a caller's waker that panics ends nothing of its client, and keeps nobody else asleep.
pub async fn waker_panics(fixture: &dyn Fixture) {
    let (one, rival) = (Client::new(fixture).await, Client::new(fixture).await);
    let [kept, first, second] = ["kept", "first", "second"].map(unique);
    let held = rival.lock(&first).await;
    let other = rival.lock(&second).await;
    // What is renewed soon is soon told by every store that it is lost.
    let guard = super::client::lock(&one.with_ttl(fixture.ttl() * 4), &kept).await;
    let bad = Waker::from(Arc::new(Panics));
    // Of those that wait for one thing, the first and the last.
    let mut lost = [(); 3].map(|()| Box::pin(guard.lost()));
    let mutex = one.locks.mutex(&first).unwrap();
    let mut waiter = mutex.lock().timeout(PATIENCE).into_future();
    until_waiting(&one, &first, waiter.as_mut()).await;
    let next = queue(&one.locks, &second);
    one.waits(&second, 1).await;
    // What is young is not watched on every store.
    one.env.sleep_until(one.now() + GROWN).await;
    let [before, told, after] = &mut lost;
    poll(before.as_mut(), &bad);
    let told = async { tokio::join!(told, async { poll(after.as_mut(), &bad) }).0 };
    let evict = async { rival.locks.evict(&kept, guard.claim_id()).await.unwrap() };
    poll(waiter.as_mut(), &bad);
    held.release().await.unwrap();
    let (loss, _) =
        within("a loss is told beside a waker that panics", async { tokio::join!(told, evict) }).await;
    assert_eq!(loss.kind, LossKind::Deleted);
    drop(lost);
    drop(guard);
    other.release().await.unwrap();
    let next = join("a waiter is woken after one whose waker has panicked", next).await;
    next.release().await.unwrap();
    waiter.await.unwrap().release().await.unwrap();
    one.expect_unused(&kept).await;
}

/// P5, P7: the task that a waker is to wake may be dropped by it, as of an executor that has ended, with a guard and a request of the
/// same client. They are freed, and nothing hangs.
pub async fn waker_drops_its_task(fixture: &dyn Fixture) {
    let (one, rival) = (Client::new(fixture).await, Client::new(fixture).await);
    let queue = one.capabilities().queue;
    for evicted in [false, true] {
        let [awaited, kept] = ["awaited", "kept"].map(unique);
        let held = rival.lock(&awaited).await;
        let (guard, mutex) = (one.lock(&kept).await, one.locks.mutex(&awaited).unwrap());
        let mut task: Task = Box::pin(async move { drop((mutex.lock().await, guard)) });
        until_waiting(&one, &awaited, task.as_mut()).await;
        one.env.sleep_until(one.now() + GROWN).await;
        let waiting = one.faults.waiting(&awaited);
        orphan(task);
        match waiting[..] {
            [claim] if evicted && queue => drop(rival.locks.evict(&awaited, claim).await.unwrap()),
            _ => drop(held.release().await.unwrap()),
        }
        eventually("the task is dropped with its guard", async || {
            rival.could_lock(&kept).await.then_some(())
        })
        .await;
        rival.expect_unused(&kept).await;
    }
    let [kept, lost] = ["kept", "lost"].map(unique);
    let guard = one.lock(&kept).await;
    let losing = super::client::lock(&one.with_ttl(fixture.ttl() * 4), &lost).await;
    let claim = losing.claim_id();
    one.env.sleep_until(one.now() + GROWN).await;
    orphan(Box::pin(async move { drop((losing.lost().await, guard)) }));
    rival.locks.evict(&lost, claim).await.unwrap();
    eventually("the loser is dropped with its guard", async || rival.could_lock(&kept).await.then_some(()))
        .await;
    rival.expect_unused(&lost).await;
}

/// How old a claim is that every store watches that can.
const GROWN: Duration = Duration::from_millis(300);

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Leaves a task to an executor that has ended: what wakes it drops it.
fn orphan(mut task: Task) {
    struct Orphan(Mutex<Option<Task>>);
    impl Wake for Orphan {
        fn wake(self: Arc<Self>) {
            let task = lock(&self.0).take();
            drop(task);
        }
    }
    let orphan = Arc::new(Orphan(Mutex::default()));
    let waker = Waker::from(orphan.clone());
    poll(task.as_mut(), &waker);
    *lock(&orphan.0) = Some(task);
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        // Without a word: it is expected.
        std::panic::resume_unwind(Box::new("a caller's waker panics"));
    }
}

/// Polls what is not ready with this waker.
fn poll<T>(future: Pin<&mut (impl Future<Output = T> + ?Sized)>, waker: &Waker) {
    assert!(future.poll(&mut Context::from_waker(waker)).is_pending(), "it waits for nothing");
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
