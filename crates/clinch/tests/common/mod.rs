//! What the tests of several stores do alike.

#![allow(dead_code, reason = "no test executable needs all of it")]

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clinch::backend::{Backend, Freed, Progress, TAKE_WITHIN, Wake};
use clinch::{Claim, ClaimId, Error, ErrorKind, Guard, LockName, Locks, Mode, Owner, Released};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// How long a state may take to come about before the test counts as failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) async fn lock(locks: &Locks, name: &str) -> Guard {
    locks.mutex(name).unwrap().lock().timeout(PATIENCE).await.unwrap()
}

/// Waits for the lock in a task of its own.
pub(crate) fn queue(locks: &Locks, name: &str) -> JoinHandle<Guard> {
    let (locks, name) = (locks.clone(), name.to_owned());
    tokio::spawn(async move { lock(&locks, &name).await })
}

/// Waits for the lock step by step, with a place that nobody renews: once this returns, it gets in by what the store tells it, or not
/// for long. What holds it then.
pub(crate) async fn queue_unkept(backend: Arc<dyn Backend>, name: &str) -> JoinHandle<Unkept> {
    let claim = Claim {
        id: ClaimId::from_bits(u128::MAX),
        name: LockName::new(name).unwrap(),
        mode: Mode::Exclusive,
        ttl: Duration::from_secs(120),
        enqueue: true,
        place: false,
        isolated: false,
        owner: Arc::new(Owner { host: "h".into(), pid: 1, user: "u".into(), label: String::new() }),
    };
    let came = tokio::time::Instant::now();
    // Who has just come looks once more by itself.
    while came.elapsed() < TAKE_WITHIN {
        let step = backend.claim(&claim).await.unwrap();
        assert!(matches!(step, Progress::Queued(_)), "{name} was free: {step:?}");
        assert!(matches!(backend.wait(&claim).await.unwrap(), Wake::Step), "{name} was free");
    }
    tokio::spawn(async move {
        while !matches!(backend.claim(&claim).await.unwrap(), Progress::Granted(_))
            && !matches!(backend.wait(&claim).await.unwrap(), Wake::Granted(_))
        {}
        Unkept(backend, claim)
    })
}

/// A claim that holds a lock, without an engine.
pub(crate) struct Unkept(Arc<dyn Backend>, Claim);

impl Unkept {
    pub(crate) async fn release(self) {
        assert_eq!(self.0.release(&self.1, Duration::ZERO).await.unwrap(), Freed::Removed);
    }
}

pub(crate) async fn release(guard: Guard) {
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

/// What answers in the place of a Redis that is away, in words of its own, and how often it was asked.
pub(crate) async fn stand_in() -> (SocketAddr, Arc<AtomicU64>) {
    let (listener, asked) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), Arc::new(AtomicU64::new(0)));
    let (addr, count) = (listener.local_addr().unwrap(), asked.clone());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let count = count.clone();
            tokio::spawn(async move {
                while client.read(&mut [0; 1024]).await.is_ok_and(|bytes| bytes > 0) {
                    count.fetch_add(1, Ordering::Relaxed);
                    if client.write_all(b"-ERR upstream failure\r\n").await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (addr, asked)
}

/// A lock name that no other test uses.
pub(crate) fn unique(hazard: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{hazard}/{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Looks until there is something to see.
pub(crate) async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let end = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(seen) = look().await {
            return seen;
        }
        assert!(tokio::time::Instant::now() < end, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits for what is held, for so long that the store can say so, and returns what it says: how long that takes depends on
/// how busy the host is.
pub(crate) async fn in_vain<G: Debug>(mut wait: impl AsyncFnMut(Duration) -> Result<G, Error>) -> Error {
    let mut patience = Duration::from_millis(50);
    loop {
        let error = wait(patience).await.expect_err("two hold one lock");
        if error.kind() != ErrorKind::Unavailable || patience > PATIENCE {
            return error;
        }
        patience *= 2;
    }
}

/// Runs a future with nothing around it but this thread: no runtime, no reactor, no timers.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

/// Contends for a lock from two threads, with nothing but [`block_on`] around each future.
pub(crate) fn contend_without_a_runtime(url: &str) {
    let name = unique("bare");
    let locks = block_on(clinch::connect(url)).unwrap();
    let guard = block_on(lock(&locks, &name));
    let (met, meets) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn({
        let (url, name) = (url.to_owned(), name.clone());
        move || {
            let locks = block_on(clinch::connect(&url)).unwrap();
            let mutex = locks.mutex(&name).unwrap();
            met.send(block_on(mutex.try_lock()).unwrap().is_none()).unwrap();
            block_on(release(block_on(lock(&locks, &name))));
        }
    });
    assert!(meets.recv_timeout(PATIENCE).unwrap(), "two hold it");
    // Where waiters can be seen, one is seen first.
    let queue = locks.capabilities().queue;
    while queue && block_on(locks.state(&name)).unwrap().is_none_or(|state| state.claims.len() < 2) {
        std::thread::yield_now();
    }
    block_on(guard.verify()).unwrap();
    block_on(release(guard));
    waiter.join().unwrap();
    block_on(locks.close(PATIENCE)).unwrap();
}

/// As [`contend_without_a_runtime`], in the context of a runtime that has ended.
pub(crate) fn contend_where_the_runtime_is_gone(url: &str) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _gone = runtime.handle().clone();
    let _entered = _gone.enter();
    runtime.shutdown_background();
    contend_without_a_runtime(url);
}
