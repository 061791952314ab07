//! The arithmetic of leases: deadlines, renewal instants, retries. Pure: it owns no clock and does no I/O.
//!
//! All of it rests on one inequality: the store starts to count a TTL when a request *arrives*, so a deadline counted
//! from before the request was *sent* is always the earlier of the two, whatever the network did in between.

use std::time::Duration;

use crate::clock::Instant;
use crate::drift::Drift;
use crate::error::{Error, Result};

/// The shortest TTL: below it, scheduling noise alone would lose leases.
pub(crate) const MIN_TTL: Duration = Duration::from_millis(100);

/// The longest TTL. A holder that crashed blocks its lock for this long, so a longer one is surely a mistake.
pub(crate) const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest time for which a lock is kept closed: it can be added to any clock's time.
pub(crate) const MAX_LINGER: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// Time between our deadline and the earliest moment at which the store may grant to another: timers fire late by some
/// milliseconds, and whoever is told of a loss needs a moment to stop.
const MARGIN: Duration = Duration::from_millis(5);

/// A further part of the TTL that is kept as margin, for the same reason on longer leases.
const MARGIN_DIVISOR: u32 = 100;

/// Time, and a part of the TTL as above up to a limit, between a loss that is told and the moment at which the keeper itself
/// frees the lock. The holder's release opens it sooner.
const TIME_TO_STOP: Duration = Duration::from_millis(250);
const MAX_TIME_TO_STOP: Duration = Duration::from_secs(5);

/// Longest pause between two attempts at a step that failed.
pub(crate) const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// Longest time between two renewals: where the store tells nothing of its own accord, they alone tell of an eviction, and that
/// within the [notice](crate::backend::NOTICE), also if one of them hangs.
pub(crate) const MAX_RENEWAL: Duration = Duration::from_secs(5);

/// Checks a TTL on a store that keeps its promises up to `longest`.
pub(crate) fn check_ttl(ttl: Duration, longest: Duration) -> Result<()> {
    if (MIN_TTL..=longest).contains(&ttl) {
        return Ok(());
    }
    let longest = humantime::format_duration(longest);
    Err(Error::invalid(format!("a TTL must be between {MIN_TTL:?} and {longest} here; {ttl:?} is not")))
}

/// Checks for how long a lock shall stay closed.
pub(crate) fn check_linger(time: Duration) -> Result<()> {
    if time <= MAX_LINGER {
        return Ok(());
    }
    Err(Error::invalid(format!("a lock can be kept closed for ten years at most; {time:?} is more")))
}

/// When the holder must stop claiming to hold: `ttl` after the request was *sent*, less drift and margin.
///
/// The store starts counting when the request *arrives*, which is later, so this is always the earlier of the two.
pub(crate) fn deadline(sent: Instant, ttl: Duration, drift: Drift) -> Instant {
    sent + ttl.saturating_sub(drift.over(ttl)).saturating_sub(ttl / MARGIN_DIVISOR).saturating_sub(MARGIN)
}

/// How long a holder that was told that its time is up has to stop before its claim is freed for it.
pub(crate) fn stop_within(ttl: Duration) -> Duration {
    (TIME_TO_STOP + ttl / MARGIN_DIVISOR).min(MAX_TIME_TO_STOP)
}

/// When to renew a lease that was last confirmed by a request sent at `sent`: a third of the TTL later, five seconds at most, up to
/// a tenth of that earlier by `jitter` (0 to 1), so that leases taken together do not renew together for ever.
pub(crate) fn renewal(sent: Instant, ttl: Duration, jitter: f64) -> Instant {
    let third = (ttl / 3).min(MAX_RENEWAL);
    sent + third - third.mul_f64(0.1 * jitter.clamp(0.0, 1.0))
}

/// How much earlier than due a renewal may go out to share a trip with others.
pub(crate) fn coalesce(ttl: Duration) -> Duration {
    (ttl / 32).min(Duration::from_millis(250))
}

/// From when on a lease whose renewals do not come through is in jeopardy: two thirds of the TTL after `sent`.
pub(crate) fn jeopardy(sent: Instant, ttl: Duration) -> Instant {
    sent + ttl / 3 * 2
}

/// The pause before attempt `attempt` (0 for the first retry) at a step that failed: from 10 ms on, doubling to a
/// second, and of that a random part (`jitter`, 0 to 1) between half and all.
pub(crate) fn backoff(attempt: u32, jitter: f64) -> Duration {
    let full = Duration::from_millis(10).saturating_mul(1 << attempt.min(16)).min(MAX_BACKOFF);
    full.mul_f64(0.5 + 0.5 * jitter.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backend::{NOTICE, attempt};

    fn instant() -> impl Strategy<Value = Instant> {
        (0u64..1 << 60).prop_map(Instant::from_nanos)
    }

    fn ttl() -> impl Strategy<Value = Duration> {
        (MIN_TTL.as_micros() as u64..=MAX_TTL.as_micros() as u64).prop_map(Duration::from_micros)
    }

    fn drift() -> impl Strategy<Value = Drift> {
        (1u32..=25).prop_map(|percent| Drift::percent(percent).unwrap())
    }

    proptest! {
        /// P2: with clocks that run apart by less than the drift, we stop before a store that counts from the arrival.
        #[test]
        fn the_deadline_passes_before_the_store_can_grant(
            sent in instant(), ttl in ttl(), flight in 0u64..10_000_000_000, bound in drift(), part in 0.0f64..0.99,
        ) {
            let arrived = sent + Duration::from_nanos(flight);
            // The store's clock runs faster than ours, by less than the bound.
            let store_expiry = arrived + ttl.div_f64(1.0 + part * bound.over(Duration::from_secs(1)).as_secs_f64());
            prop_assert!(deadline(sent, ttl, bound) + MARGIN + ttl / MARGIN_DIVISOR <= store_expiry);
        }

        #[test]
        fn a_lease_is_usable_and_its_instants_are_in_order(
            sent in instant(), ttl in ttl(), jitter in 0.0f64..=1.0, drift in drift(),
        ) {
            let (renew, worry, end) = (renewal(sent, ttl, jitter), jeopardy(sent, ttl), deadline(sent, ttl, drift));
            prop_assert!(sent < renew && renew < worry && worry < end && end < sent + ttl);
            prop_assert!(renew + attempt(ttl) < worry, "one attempt fits before anybody worries");
            prop_assert!(coalesce(ttl) < renew - sent, "coalescing never renews at once");
        }

        #[test]
        fn renewals_spread_over_a_tenth_before_they_are_due(
            sent in instant(), ttl in ttl(), jitter in 0.01f64..=1.0,
        ) {
            let (due, early) = (renewal(sent, ttl, 0.0), renewal(sent, ttl, jitter));
            prop_assert!(due == sent + (ttl / 3).min(MAX_RENEWAL));
            prop_assert!(early < due && early >= renewal(sent, ttl, 1.0));
            prop_assert!(due - renewal(sent, ttl, 1.0) <= (due - sent) / 10 + Duration::from_nanos(1));
        }

        #[test]
        fn backoff_stays_between_its_bounds(attempt in 0u32..1000, jitter in -1.0f64..2.0) {
            let pause = backoff(attempt, jitter);
            prop_assert!(pause >= Duration::from_millis(5) && pause <= MAX_BACKOFF);
        }

        #[test]
        fn arithmetic_saturates_at_the_end_of_time(ttl in ttl()) {
            let end = Instant::from_nanos(u64::MAX);
            prop_assert_eq!(deadline(end, ttl, Drift::DEFAULT), end);
        }
    }

    /// P2: whoever only hears of its eviction by a renewal hears of it before the lock is another's, with time to stop.
    #[test]
    fn a_renewal_and_a_second_one_fit_well_into_the_notice_of_an_eviction() {
        let sent = Instant::from_nanos(0);
        for ttl in [MIN_TTL, Duration::from_secs(30), Duration::from_secs(600), MAX_TTL] {
            let tried = renewal(sent, ttl, 0.0) + 2 * attempt(ttl);
            assert!(tried - sent + Duration::from_secs(4) <= NOTICE, "{ttl:?}");
        }
    }

    #[test]
    fn whoever_is_told_has_a_moment_to_stop() {
        assert_eq!(stop_within(MIN_TTL), Duration::from_millis(251));
        assert_eq!(stop_within(Duration::from_secs(30)), Duration::from_millis(550));
        assert_eq!(stop_within(MAX_TTL), Duration::from_secs(5));
    }

    #[test]
    fn pauses_double_up_to_a_second() {
        let pauses = [0, 1, 2, 6, 7, 40].map(|attempt| backoff(attempt, 1.0).as_millis());
        assert_eq!(pauses, [10, 20, 40, 640, 1000, 1000]);
        assert_eq!(backoff(2, 0.0).as_millis(), 20);
    }

    #[test]
    fn a_lock_lingers_for_ten_years_at_most() {
        assert!(check_linger(MAX_LINGER).is_ok());
        assert!(check_linger(MAX_LINGER + Duration::from_nanos(1)).is_err());
    }

    #[test]
    fn odd_ttls_are_refused() {
        for bad in [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(500), Duration::MAX] {
            assert!(check_ttl(bad, MAX_TTL).is_err(), "{bad:?}");
        }
        assert!(check_ttl(MIN_TTL, MAX_TTL).is_ok() && check_ttl(MAX_TTL, MAX_TTL).is_ok());
        assert!(check_ttl(MIN_TTL * 3, MIN_TTL * 2).unwrap_err().to_string().contains("200ms"));
    }
}
