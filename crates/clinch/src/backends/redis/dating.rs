//! Our clock and the server's: durations as it counts them, and moments of the one on the other.

use std::time::Duration;

use crate::clock::Instant;
use crate::drift::Drift;

/// A duration in whole milliseconds, rounded up: the server must not count less than we do.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// A moment of our clock that surely lies before the server's clock read `at`, which was no earlier than it read
/// `then`: a request sent at `sent` was answered with `then` on it.
///
/// From `then` to `at` at least `at - then` passed, less a millisecond for rounding and the drift; and `then` was read
/// after the request was sent.
pub(super) fn not_after(sent: Instant, then: u64, at: u64, now: Instant, drift: Drift) -> Instant {
    let passed = Duration::from_millis(at.saturating_sub(then).saturating_sub(1));
    (sent + passed.saturating_sub(drift.over(passed))).min(now)
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
            bound in 1u32..=25,
            part in -0.99f64..0.99,
        ) {
            // Server time runs faster or slower than ours, by less than the bound; all in nanoseconds of our clock.
            let rate = 1.0 + part * f64::from(bound) / 100.0;
            let server = |ours: u64| offset + (ours as f64 * rate) as u64;
            let (answered, granted) = (sent + there, sent + there + later);
            let origin = sent;
            let then = server(answered - origin) / 1_000_000;
            let at = server(granted - origin) / 1_000_000;
            let (sent, now) = (Instant::from_nanos(sent), Instant::from_nanos(granted + back));
            let from = not_after(sent, then, at, now, Drift::percent(bound).unwrap());
            prop_assert!(from <= Instant::from_nanos(granted));
        }
    }

    #[test]
    fn milliseconds_round_up() {
        assert_eq!([1, 1_000_000, 1_000_001].map(|n| millis(Duration::from_nanos(n))), [1, 1, 2]);
    }
}
