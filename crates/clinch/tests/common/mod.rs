//! What the tests of several stores do alike.

#![allow(dead_code, reason = "no test executable needs all of it")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clinch::{Guard, Locks, Released};
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

pub(crate) async fn release(guard: Guard) {
    assert_eq!(guard.release().await.unwrap(), Released::Released);
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
