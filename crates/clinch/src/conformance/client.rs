//! What the properties are written with: clients, unique names, waiting for a state, futures polled a few times.

use std::future::{IntoFuture, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, SystemTime};

use super::Fixture;
use super::faults::Faulty;
use crate::backend::{Capabilities, ClaimState};
use crate::claim::{Claim, ClaimId, Mode, Owner};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::guard::{Guard, Released};
use crate::lane::Lane;
use crate::locks::{Locks, Renew};
use crate::name::LockName;

/// How long a state may take to come about before it counts as never.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// A TTL that nobody lives to see the end of: what is free within [`PATIENCE`] was not freed by expiry.
pub(super) const LONG_TTL: Duration = Duration::from_secs(120);

/// Between two looks at a state.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A client of the store under test, with faults to be switched on.
pub(super) struct Client {
    pub(super) locks: Locks,
    pub(super) faults: Arc<Faulty>,
    pub(super) env: Env,
}

impl Client {
    /// A new client whose leases are [long](LONG_TTL).
    pub(super) async fn new(fixture: &dyn Fixture) -> Client {
        Client::on(Lane::thread(), fixture).await
    }

    /// As [`Client::new`], with this background lane.
    pub(super) async fn on(lane: Lane, fixture: &dyn Fixture) -> Client {
        let env = Env::host(lane);
        let faults = Faulty::new(fixture.connect(&env).await, env.clock());
        let locks = Locks::new(faults.clone(), env.clone()).ttl(LONG_TTL).unwrap();
        Client { locks, faults, env }
    }

    pub(super) fn now(&self) -> Instant {
        self.env.now()
    }

    pub(super) fn capabilities(&self) -> Capabilities {
        self.locks.capabilities()
    }

    /// The same client's locks with this TTL.
    pub(super) fn with_ttl(&self, ttl: Duration) -> Locks {
        self.locks.clone().ttl(ttl).unwrap()
    }

    /// The same client's locks with this TTL and no renewals.
    pub(super) fn unrenewed(&self, ttl: Duration) -> Locks {
        self.with_ttl(ttl).renew(Renew::Never)
    }

    /// Waits for a mutex and panics when it does not come.
    pub(super) async fn lock(&self, name: &str) -> Guard {
        lock(&self.locks, name).await
    }

    /// Whether the lock could be taken at this moment; it is freed again at once.
    pub(super) async fn could_lock(&self, name: &str) -> bool {
        let mutex = self.locks.mutex(name).unwrap();
        match answered(async || mutex.try_lock().await).await.unwrap() {
            Some(guard) => {
                guard.release().await.unwrap();
                true
            }
            None => false,
        }
    }

    /// The live claims on a lock, first in the queue first.
    pub(super) async fn claims(&self, name: &str) -> Vec<ClaimState> {
        let state = answered(async || self.locks.state(name).await).await.unwrap();
        state.map(|state| state.claims).unwrap_or_default()
    }

    /// Waits until a lock has so many live claims, held and queued ones together.
    pub(super) async fn sees_claims(&self, name: &str, count: usize) {
        let what = format!("lock \"{name}\" has {count} claims");
        eventually(&what, async || (self.claims(name).await.len() == count).then_some(())).await;
    }

    /// Waits until so many claims of this client wait for a lock: in the store's queue, or, where there is none, unseen.
    pub(super) async fn waits(&self, name: &str, count: usize) -> Vec<ClaimId> {
        let queue = self.capabilities().queue;
        eventually(&format!("{count} claims wait for lock \"{name}\""), async || {
            let waiting = self.faults.waiting(name);
            let shown = self.claims(name).await;
            let in_queue = |id: &ClaimId| shown.iter().any(|claim| claim.id == *id && !claim.granted);
            (waiting.len() == count && waiting.iter().all(|id| in_queue(id) == queue)).then_some(waiting)
        })
        .await
    }

    /// Checks that nothing of anybody is left: this client gets the lock, and after it the store lists nothing.
    pub(super) async fn expect_unused(&self, name: &str) {
        let guard = self.lock(name).await;
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        self.sees_claims(name, 0).await;
    }

    /// A claim for steps of the bare backend.
    pub(super) fn claim(&self, name: &str, mode: Mode, ttl: Duration, enqueue: bool) -> Claim {
        let owner = Owner { host: "conformance".into(), pid: 1, user: "nobody".into(), label: String::new() };
        let id = self.env.random().claim_id().unwrap();
        Claim {
            id,
            name: LockName::new(name).unwrap(),
            mode,
            ttl,
            enqueue,
            place: false,
            isolated: false,
            owner: Arc::new(owner),
        }
    }
}

/// Waits for a mutex and panics when it does not come.
pub(super) async fn lock(locks: &Locks, name: &str) -> Guard {
    let mutex = locks.mutex(name).unwrap();
    within(&format!("lock \"{name}\" is granted"), mutex.lock()).await.unwrap()
}

/// Waits for a mutex in a task of its own.
pub(super) fn queue(locks: &Locks, name: &str) -> tokio::task::JoinHandle<Guard> {
    let (locks, name) = (locks.clone(), name.to_owned());
    tokio::spawn(async move { lock(&locks, &name).await })
}

/// Waits for a task.
pub(super) async fn join<T>(what: &str, task: tokio::task::JoinHandle<T>) -> T {
    within(what, task).await.expect(what)
}

/// A lock name that no other property and no earlier run uses.
pub(super) fn unique(hazard: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("conformance/{hazard}/{now:x}.{:x}.{count:x}", std::process::id())
}

/// A small runtime of one thread.
pub(super) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Awaits a future that must complete.
pub(super) async fn within<F: IntoFuture>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("not within {PATIENCE:?}: {what}"),
    }
}

/// Looks until there is something to see.
pub(super) async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let end = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(seen) = look().await {
            return seen;
        }
        assert!(tokio::time::Instant::now() < end, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Asks again while nobody answers: a host that is busy may not have the time for one answer, let alone a quorum's. Needs no
/// runtime.
pub(super) async fn answered<T>(mut ask: impl AsyncFnMut() -> Result<T>) -> Result<T> {
    let start = std::time::Instant::now();
    loop {
        match ask().await {
            Err(error) if error.is_transient() && start.elapsed() < PATIENCE => {
                tokio::task::yield_now().await;
            }
            answer => return answer,
        }
    }
}

/// Waits for a mutex that is held, for so long that the store can say so, and returns what it says. Needs no runtime.
pub(super) async fn lock_in_vain(locks: &Locks, name: &str) -> Error {
    let mutex = locks.mutex(name).unwrap();
    let mut patience = Duration::from_millis(50);
    let wait = async || {
        patience *= 2;
        mutex.lock().timeout(patience).await
    };
    answered(wait).await.expect_err("two hold one lock")
}

/// Waits until the clock of a client has passed a moment.
pub(super) async fn until_past(client: &Client, moment: Instant) {
    client.env.sleep_until(moment + Duration::from_nanos(1)).await;
    assert!(client.now() > moment);
}

/// Checks that a task is still waiting, after everybody had the chance to move.
pub(super) async fn expect_waiting<T>(what: &str, task: &tokio::task::JoinHandle<T>) {
    for _ in 0..5 {
        tokio::time::sleep(LOOK_EVERY).await;
        assert!(!task.is_finished(), "granted too early: {what}");
    }
}

/// A future that is polled only so many times.
pub(super) struct Polled<'a, T>(Pin<Box<dyn Future<Output = T> + 'a>>);

impl<'a, T> Polled<'a, T> {
    pub(super) fn new(future: impl IntoFuture<Output = T, IntoFuture: 'a>) -> Polled<'a, T> {
        Polled(Box::pin(future.into_future()))
    }

    /// Polls once. `Some`: it completed.
    pub(super) async fn once(&mut self) -> Option<T> {
        match poll_fn(|context| Poll::Ready(self.0.as_mut().poll(context))).await {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    /// Polls at most so many times, with time for others in between. `Some`: it completed.
    pub(super) async fn poll(&mut self, times: usize) -> Option<T> {
        for _ in 0..times {
            if let Some(value) = self.once().await {
                return Some(value);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        None
    }
}

/// Polls a future so many times, then drops it. `Some`: it completed before.
pub(super) async fn poll_then_drop<T>(future: impl IntoFuture<Output = T>, times: usize) -> Option<T> {
    Polled::new(future).poll(times).await
}
