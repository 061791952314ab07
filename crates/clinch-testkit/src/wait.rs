//! Waiting for a state: polled, under one generous deadline.

use std::time::{Duration, Instant};

/// How long a state may take to come about before the test counts as failed.
pub const PATIENCE: Duration = Duration::from_secs(150);

/// Pause between two looks at a state.
pub(crate) const POLL: Duration = Duration::from_millis(10);

/// Waits until `state` is true; panics with `what` when that takes longer than [`PATIENCE`].
#[track_caller]
pub fn until(what: &str, mut state: impl FnMut() -> bool) {
    until_some(what, || state().then_some(()));
}

/// Waits until `state` has a value; panics with `what` when that takes longer than [`PATIENCE`].
#[track_caller]
pub fn until_some<T>(what: &str, mut state: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = state() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain: {what}");
        std::thread::sleep(POLL);
    }
}
