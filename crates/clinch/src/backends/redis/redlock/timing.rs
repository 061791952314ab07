//! The arithmetic of a quorum's time: how long to wait for a server, whose clock has jumped, who may not vote yet. Pure.

use std::time::Duration;

use crate::clock::Instant;

/// The shortest and the longest time for which a server's answer is waited for, unless opening its connection took longer.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(50));

/// For how long the answers of a majority are waited for, at least and at most. If so many are late, it is more likely that
/// this host has no time than that they all hang; and nobody could do anything without them.
const SILENCE: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(200));

/// How far a server's clock may stray from ours at once before that is a jump.
const TOLERANCE: Duration = Duration::from_millis(10);

/// Our clock and a server's may run apart by one part in so many.
const DRIFT_DIVISOR: u32 = 100;

/// How long a server's answers take, as TCP estimates it (RFC 6298).
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    smooth: Duration,
    varies: Duration,
    /// Doubles with every answer that did not come, until one does.
    strikes: u32,
    /// What opening the connection took.
    opening: Duration,
}

impl Patience {
    /// Before anything is known of a server but how long opening the connection took.
    pub(super) fn new(opening: Duration) -> Patience {
        Patience { smooth: opening, varies: opening / 2, strikes: 0, opening }
    }

    /// An answer took this long.
    pub(super) fn answered(&mut self, after: Duration) {
        let off = self.smooth.abs_diff(after);
        self.varies = (self.varies * 3 + off) / 4;
        self.smooth = (self.smooth * 7 + after) / 8;
        self.strikes = 0;
    }

    /// No answer came in time.
    pub(super) fn struck(&mut self) {
        self.strikes = (self.strikes + 1).min(8);
    }

    /// For how long an answer is waited for, on leases of `ttl`: never for a large part of them.
    pub(super) fn wait(&self, ttl: Duration) -> Duration {
        let (least, most) = PATIENCE;
        let usual = (self.smooth + self.varies * 4).saturating_mul(1 << self.strikes);
        usual.clamp(least, most.max(self.opening * 3)).min(ttl / 10)
    }

    /// For how long an answer is waited for that still decides a vote. Of a server whose last one came it is more likely
    /// that this host has no time than that it hangs.
    pub(super) fn wait_for_vote(&self, ttl: Duration) -> Duration {
        let least = if self.strikes == 0 { silence(ttl) } else { Duration::ZERO };
        self.wait(ttl).max(least)
    }
}

/// For how long a majority may be silent, on leases of `ttl`.
pub(super) fn silence(ttl: Duration) -> Duration {
    let (least, most) = SILENCE;
    (ttl / 10).clamp(least, most)
}

/// What is known of a server's clock: how far it is ahead of ours, as bounds, at a moment of ours. In nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offset {
    least: i128,
    most: i128,
    at: Instant,
}

impl Offset {
    /// A request sent at `sent` and answered at `received` was answered with `server_us` of the server's clock.
    pub(super) fn read(server_us: u64, sent: Instant, received: Instant) -> Offset {
        let server = i128::from(server_us) * 1000;
        // The server drops what is less than a microsecond.
        Offset {
            least: server - i128::from(received.as_nanos()),
            most: server + 1000 - i128::from(sent.as_nanos()),
            at: received,
        }
    }

    /// The bounds at a later moment.
    fn later(self, at: Instant) -> Offset {
        let drift = at.since(self.at) / DRIFT_DIVISOR;
        let drift = i128::try_from(drift.as_nanos()).unwrap_or(i128::MAX);
        Offset { least: self.least - drift, most: self.most + drift, at }
    }

    /// Takes in a newer reading. Tells by how much the clock has jumped since the older one, if it surely has, and by
    /// more than is tolerated.
    pub(super) fn then(self, newer: Offset) -> (Offset, Option<Duration>) {
        let older = self.later(newer.at);
        let gap = (newer.least - older.most).max(older.least - newer.most);
        if gap > 0 {
            let gap = Duration::from_nanos(u64::try_from(gap).unwrap_or(u64::MAX));
            return (newer, (gap > TOLERANCE).then_some(gap));
        }
        let (least, most) = (older.least.max(newer.least), older.most.min(newer.most));
        (Offset { least, most, at: newer.at }, None)
    }

    /// What the server's clock will at most read at a moment of ours, in microseconds.
    pub(super) fn latest_us(self, at: Instant) -> u64 {
        let server = self.later(at.max(self.at)).most + i128::from(at.as_nanos());
        u64::try_from(server / 1000).unwrap_or(0)
    }
}

/// Until when a server that said it has run for `uptime` whole seconds must not vote: locks that it forgot when it started
/// may live for `max_ttl` from then. `None`: it has run for long enough.
pub(super) fn votes_from(now: Instant, uptime: u64, max_ttl: Duration) -> Option<Instant> {
    // Both ends of what it counts are cut to whole seconds.
    let surely = Duration::from_secs(uptime.saturating_sub(1));
    let left = max_ttl.saturating_sub(surely);
    (!left.is_zero()).then_some(now + left)
}

/// Whether a server that says it has run for `uptime` seconds at `now` already ran at `seen`, when another answered in its
/// place. It is then no restart of that one, but stands in for it, and knows nothing of its locks.
pub(super) fn stands_in(now: Instant, uptime: u64, seen: Instant) -> bool {
    now.since(seen) < Duration::from_secs(uptime.saturating_sub(1))
}

/// The pause before the next attempt after a split vote: longer with every one, and random, so that one comes first.
pub(super) fn split_pause(round_trip: Duration, splits: u32, jitter: f64) -> Duration {
    let most = (round_trip * 2 + Duration::from_millis(1)).saturating_mul(1 << splits.min(6));
    most.min(Duration::from_millis(100)).mul_f64(jitter.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    proptest! {
        /// No false alarm: however slow the answers and whatever the drift, a clock that did not jump is not said to have.
        #[test]
        fn a_steady_clock_has_not_jumped(
            offset in 0u64..1 << 60,
            drift in -0.0099f64..0.0099,
            flights in prop::collection::vec((0u64..20 * SECOND, 0u64..SECOND, 0u64..SECOND), 2..12),
        ) {
            let server = |ours: u64| (i128::from(offset) + i128::from(ours) + (ours as f64 * drift) as i128) as u64 / 1000;
            let mut now = 0;
            let mut known: Option<Offset> = None;
            for (pause, there, back) in flights {
                let (sent, answered, received) = (now + pause, now + pause + there, now + pause + there + back);
                let at = Instant::from_nanos;
                let read = Offset::read(server(answered), at(sent), at(received));
                prop_assert!(read.latest_us(at(received)) >= server(received) - received / 90_000);
                let (next, jumped) = known.map_or((read, None), |known| known.then(read));
                prop_assert_eq!(jumped, None);
                (known, now) = (Some(next), received);
            }
        }

        #[test]
        fn patience_stays_between_its_bounds(answers in prop::collection::vec(0u64..SECOND, 0..20), strikes in 0u32..40) {
            let mut patience = Patience::new(Duration::from_millis(1));
            answers.iter().for_each(|nanos| patience.answered(Duration::from_nanos(*nanos)));
            (0..strikes).for_each(|_| patience.struck());
            let (least, most) = PATIENCE;
            prop_assert!((least..=most).contains(&patience.wait(Duration::from_secs(30))));
            prop_assert_eq!(patience.wait(Duration::from_millis(20)).min(Duration::from_millis(2)), patience.wait(Duration::from_millis(20)));
        }
    }

    #[test]
    fn a_vote_that_decides_is_given_up_at_once_only_where_the_last_answer_did_not_come() {
        let ttl = Duration::from_secs(30);
        let mut patience = Patience::new(Duration::from_millis(1));
        patience.answered(Duration::from_micros(100));
        assert_eq!(patience.wait_for_vote(ttl), silence(ttl));
        patience.struck();
        assert_eq!(patience.wait_for_vote(ttl), patience.wait(ttl));
        assert!(patience.wait(ttl) < silence(ttl));
        patience.answered(Duration::from_millis(30));
        assert_eq!(patience.wait_for_vote(ttl), silence(ttl));
    }

    #[test]
    fn a_jump_is_told_in_both_directions_and_once() {
        let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let read = |server_ms: u64, ms: u64| Offset::read(server_ms * 1000, at(ms), at(ms + 1));
        let known = read(50_000, 1000);
        for (server_ms, jump) in [(51_500, 480), (50_500, 480), (51_000, 0), (51_012, 0)] {
            let (next, jumped) = known.then(read(server_ms, 2000));
            match jump {
                0 => assert_eq!(jumped, None, "{server_ms}"),
                least => assert!(jumped.unwrap() >= Duration::from_millis(least), "{server_ms}: {jumped:?}"),
            }
            assert_eq!(next.then(read(server_ms + 1000, 3000)).1, None, "told twice");
        }
    }

    #[test]
    fn a_restarted_server_votes_when_all_it_may_have_forgotten_is_over() {
        let now = Instant::from_nanos(100 * SECOND);
        let max_ttl = Duration::from_secs(30);
        assert_eq!(votes_from(now, 0, max_ttl), Some(now + max_ttl));
        assert_eq!(votes_from(now, 11, max_ttl), Some(now + Duration::from_secs(20)));
        assert_eq!(votes_from(now, 31, max_ttl), None);
        let seen = Instant::from_nanos(90 * SECOND);
        assert!(stands_in(now, 3600, seen) && stands_in(now, 12, seen));
        assert!(!stands_in(now, 11, seen) && !stands_in(now, 0, seen));
    }

    #[test]
    fn split_votes_part_ever_further() {
        let trip = Duration::from_millis(1);
        assert_eq!(split_pause(trip, 0, 1.0), Duration::from_millis(3));
        assert_eq!(split_pause(trip, 2, 0.5), Duration::from_millis(6));
        assert_eq!(split_pause(trip, 1000, 1.0), Duration::from_millis(100));
        assert_eq!(split_pause(trip, 5, 0.0), Duration::ZERO);
    }
}
