//! Our clock and the server's: durations as it counts them, and moments of the one on the other.

use std::time::Duration;

use crate::clock::Instant;

/// Our clock and the server's may run apart by one part in so many.
const DRIFT_DIVISOR: u32 = 100;

/// A duration in whole milliseconds, rounded up: the server must not count less than we do.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// A moment of our clock that surely lies before the server's clock read `at`, which was no earlier than it read
/// `then`: a request sent at `sent` was answered with `then` on it.
///
/// From `then` to `at` at least `at - then` passed, less a millisecond for rounding and the drift; and `then` was read
/// after the request was sent.
pub(super) fn not_after(sent: Instant, then: u64, at: u64, now: Instant) -> Instant {
    let passed = Duration::from_millis(at.saturating_sub(then).saturating_sub(1));
    (sent + passed.saturating_sub(passed / DRIFT_DIVISOR)).min(now)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// P2: a pushed grant is dated no later than the server made it, with any flight times and drift.
        #[test]
        fn a_pushed_grant_is_dated_before_it_was_made(
            sent in 0u64..1 << 50,
            there in 0u64..5_000_000_000,
            later in 0u64..100_000_000_000,
            back in 0u64..5_000_000_000,
            offset in 0u64..1 << 40,
            drift in -0.0099f64..0.0099,
        ) {
            // Server time runs by 1 + drift; all in nanoseconds of our clock.
            let server = |ours: u64| offset + (ours as f64 * (1.0 + drift)) as u64;
            let (answered, granted) = (sent + there, sent + there + later);
            let origin = sent;
            let then = server(answered - origin) / 1_000_000;
            let at = server(granted - origin) / 1_000_000;
            let from = not_after(Instant::from_nanos(sent), then, at, Instant::from_nanos(granted + back));
            prop_assert!(from <= Instant::from_nanos(granted));
        }
    }

    #[test]
    fn milliseconds_round_up() {
        assert_eq!([1, 1_000_000, 1_000_001].map(|n| millis(Duration::from_nanos(n))), [1, 1, 2]);
    }
}
