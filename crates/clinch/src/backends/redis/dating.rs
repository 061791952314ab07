//! Our clock and the server's: durations as it counts them, and moments of the one on the other.

use std::time::Duration;

use crate::clock::Instant;
use crate::drift::Drift;

/// A duration in whole milliseconds, rounded up: the server must not count less than we do.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// A moment of our clock that surely lies before the server's clock read `at`, which was no earlier than it read
/// `then`: a request sent at `sent` was answered with `then` on it, and a message with `at` was `heard`.
///
/// From `then` to `at` at least `at - then` passed, less a millisecond for rounding and the drift; and `then` was read
/// after the request was sent. `None`: then the message would come from the future, so the server's clock was set forward
/// in between, and proves nothing.
pub(super) fn not_after(sent: Instant, then: u64, at: u64, heard: Instant, drift: Drift) -> Option<Instant> {
    let passed = Duration::from_millis(at.saturating_sub(then).saturating_sub(1));
    Some(sent + passed.saturating_sub(drift.over(passed))).filter(|from| *from <= heard)
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
            let (sent, heard) = (Instant::from_nanos(sent), Instant::from_nanos(granted + back));
            let from = not_after(sent, then, at, heard, Drift::percent(bound).unwrap());
            prop_assert!(from.is_some_and(|from| from <= Instant::from_nanos(granted)));
        }

        /// P2: and by no more than its message was under way, however far the server's clock was set meanwhile.
        #[test]
        fn a_step_of_the_servers_clock_makes_no_grant_newer_than_its_message(
            sent in 1u64 << 42..1 << 50,
            then in 1u64 << 42..1 << 50,
            step in -1_000_000i64..1_000_000,
            later in 0u64..100_000,
            back in 0u64..5_000,
        ) {
            let millis = |ms| Duration::from_millis(ms);
            let sent = Instant::from_nanos(sent);
            let heard = sent + millis(later + back);
            let at = (then + later).saturating_add_signed(step);
            if let Some(from) = not_after(sent, then, at, heard, Drift::DEFAULT) {
                prop_assert!(sent <= from && from <= heard);
            } else {
                prop_assert!(step > 0, "what is honest was refused");
            }
        }
    }

    #[test]
    fn milliseconds_round_up() {
        assert_eq!([1, 1_000_000, 1_000_001].map(|n| millis(Duration::from_nanos(n))), [1, 1, 2]);
    }
}
