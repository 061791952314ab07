//! Locks on an etcd server of the bench's own. The floors call the server themselves; Go's `concurrency.Mutex`, which is
//! etcd's own lock, and the lock that the server offers to other languages run beside.

pub(super) mod contention;
pub(crate) mod held;
pub(super) mod kill;
pub(super) mod pair;

use std::sync::atomic::{AtomicU64, Ordering};

use crate::report::Metric;

/// Requests that clients sent for one acquisition and its release.
const REQUESTS: Metric = Metric::new("requests", "per acquisition");

/// The URL of a part of the server's keys that nobody used before: etcd remembers every key that ever was until it is
/// compacted, and looks at a lock read past them, so that a later round would be slower than an earlier one.
fn fresh(url: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{url}?prefix=/bench/{}/", NEXT.fetch_add(1, Ordering::Relaxed))
}
