//! Our side of what every property does, whatever servers there are.

use std::time::Duration;

use clinch::{Guard, Locks, Released};
use clinch_testkit::{Redis, Reply};
use tokio::task::JoinHandle;

/// The lock, and its key.
pub(crate) const NAME: &str = "job";

/// How long a state may take to come about before the test counts as failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How long it may take until somebody notices who was told or who polls. Shorter than the 30 s after which a waiter
/// looks without being told; but the engine renews a place every 5 s, which finds out, too.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A lease that nobody lives to see the end of.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// What the future gives; panics with `what` when that takes longer than `time`.
#[track_caller]
pub(crate) fn within<F: Future>(time: Duration, what: &str, future: F) -> impl Future<Output = F::Output> {
    let place = std::panic::Location::caller();
    async move {
        let result = tokio::time::timeout(time, future).await;
        result.unwrap_or_else(|_| panic!("{place}: waited {time:?} in vain: {what}"))
    }
}

/// What a task gives that should be done soon.
#[track_caller]
pub(crate) fn soon<T>(what: &str, task: JoinHandle<T>) -> impl Future<Output = T> {
    let result = within(SOON, what, task);
    async { result.await.unwrap() }
}

/// Waits for the lock in a task.
pub(crate) fn lock_in_background(locks: &Locks) -> JoinHandle<Guard> {
    let lock = locks.mutex(NAME).unwrap();
    tokio::spawn(async move { lock.lock().await.unwrap() })
}

/// Whether we could take the lock at this moment; it is freed again at once.
pub(crate) async fn we_could_lock(locks: &Locks) -> bool {
    match locks.mutex(NAME).unwrap().try_lock().await.unwrap() {
        Some(guard) => {
            assert_eq!(guard.release().await.unwrap(), Released::Released);
            true
        }
        None => false,
    }
}

/// What the lock's key holds on each server.
pub(crate) fn values(servers: &[Redis]) -> Vec<Reply> {
    servers.iter().map(|server| server.call(&["GET", NAME])).collect()
}
