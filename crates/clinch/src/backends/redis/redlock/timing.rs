//! The arithmetic of a quorum's time: how long to wait for a server, whose clock has jumped, who may not vote yet. Pure.

use std::time::Duration;

use crate::clock::Instant;
use crate::drift::Drift;

/// The shortest and the longest time for which a server's answer is waited for, unless opening its connection took longer.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(50));

/// For how long the answers of a majority are waited for, at least and at most. If so many are late, it is more likely that
/// this host has no time than that they all hang; and nobody could do anything without them.
const SILENCE: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(200));

/// How far ahead of the servers' clocks the least token lies that a claim asks for, in microseconds: if it reaches all of
/// them before that, they give the same one, and none needs to be written back.
const AHEAD_US: u64 = 5000;

/// How far a server's clock may stray from ours at once before that is a jump.
const TOLERANCE: Duration = Duration::from_millis(10);

/// For how long a claim may be on its way: it is given up long before. One that a server finds later, since it stood still, is
/// refused there.
pub(super) const USEFUL: Duration = Duration::from_secs(3);

/// For how long an answer is waited for that says nothing: then its connection is closed.
const SLOWEST: Duration = Duration::from_secs(2);

/// For how long a reading of a server's clock is of use.
const LATELY: Duration = Duration::from_secs(10);

/// How evenly clocks are taken to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evenness {
    pub(super) drift: Drift,
    /// The longest TTL.
    pub(super) max_ttl: Duration,
}

impl Evenness {
    /// By how much two clocks may come apart in this time. Over more than the longest TTL no more than over that: what is
    /// beyond may have come at once and just now, and have ended leases early.
    pub(super) fn over(self, time: Duration) -> Duration {
        self.drift.over(time.min(self.max_ttl))
    }

    /// The time that has surely passed on any clock when this has on one.
    pub(super) fn surely(self, time: Duration) -> Duration {
        time + self.drift.over(time)
    }

    /// The time after which every lease is over that was given before, by whatever clock it is counted.
    pub(super) fn longest_lease(self) -> Duration {
        self.surely(self.max_ttl)
    }
}

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

    /// How long an answer takes; `None`: the last one did not come.
    pub(super) fn trip(&self) -> Option<Duration> {
        (self.strikes == 0).then_some(self.smooth)
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
    pub(super) fn read(server_us: u64, sent: Instant, received: Instant, evenness: Evenness) -> Offset {
        let server = i128::from(server_us) * 1000;
        // The server drops what is less than a microsecond.
        let read = Offset {
            least: server - i128::from(received.as_nanos()),
            most: server + 1000 - i128::from(sent.as_nanos()),
            at: sent,
        };
        read.at(received, evenness)
    }

    /// The bounds at a later moment, when the clocks may have come apart by so much.
    fn later(self, at: Instant, apart: Duration) -> Offset {
        let apart = nanos(apart);
        Offset { least: self.least - apart, most: self.most + apart, at: at.max(self.at) }
    }

    /// The bounds at a later moment.
    fn at(self, at: Instant, evenness: Evenness) -> Offset {
        self.later(at, evenness.drift.over(at.since(self.at)))
    }

    /// Takes in a newer reading. Tells by how much the clock has jumped since the older ones, if it surely has, and by
    /// more than is tolerated. Less than that is kept against it: many small jumps are a large one.
    pub(super) fn then(self, newer: Offset, evenness: Evenness) -> (Offset, Option<Duration>) {
        let older = self.later(newer.at, evenness.over(newer.at.since(self.at)));
        let gap = (newer.least - older.most).max(older.least - newer.most);
        if gap > nanos(TOLERANCE) {
            return (newer, Some(Duration::from_nanos(u64::try_from(gap).unwrap_or(u64::MAX))));
        }
        if gap > 0 {
            return (older, None);
        }
        let (least, most) = (older.least.max(newer.least), older.most.min(newer.most));
        (Offset { least, most, at: newer.at }, None)
    }

    /// Whether the clock was read lately.
    pub(super) fn is_fresh(self, now: Instant) -> bool {
        now.since(self.at) <= LATELY
    }

    /// What the server's clock will at most read at a moment of ours, in microseconds.
    pub(super) fn latest_us(self, at: Instant, evenness: Evenness) -> u64 {
        micros(self.at(at, evenness).most + i128::from(at.as_nanos()))
    }

    /// What it will at most read, unless it was not read lately and has strayed since.
    pub(super) fn likely_latest_us(self, at: Instant, evenness: Evenness) -> u64 {
        let apart = evenness.drift.over(at.since(self.at).min(LATELY));
        micros(self.later(at, apart).most + i128::from(at.as_nanos()))
    }

    /// What it will at least read.
    pub(super) fn earliest_us(self, at: Instant, evenness: Evenness) -> u64 {
        micros(self.at(at, evenness).least + i128::from(at.as_nanos()))
    }

    /// How far it is ahead of another server's clock.
    pub(super) fn ahead_of(self, other: Offset, at: Instant, evenness: Evenness) -> Lead {
        let (ours, theirs) = (self.at(at, evenness), other.at(at, evenness));
        let whole = |nanos: i128| i64::try_from(nanos.div_euclid(1000)).unwrap_or(i64::MAX);
        Lead {
            least: whole(ours.least - theirs.most),
            most: whole(ours.most - theirs.least).saturating_add(1),
        }
    }
}

fn nanos(time: Duration) -> i128 {
    i128::try_from(time.as_nanos()).unwrap_or(i128::MAX)
}

fn micros(nanos: i128) -> u64 {
    u64::try_from(nanos / 1000).unwrap_or(0)
}

/// How far one server's clock is ahead of another's, as bounds, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lead {
    pub(super) least: i64,
    pub(super) most: i64,
}

impl Lead {
    /// Whether two clocks have run as evenly as leases need since this was measured; `None`: the bounds are too wide to
    /// tell. `elapsed`: the time since then.
    pub(super) fn is_kept(self, now: Lead, elapsed: Duration, evenness: Evenness) -> Option<bool> {
        let tolerated =
            |time| i64::try_from((TOLERANCE + evenness.over(time)).as_micros()).unwrap_or(i64::MAX);
        let least = now.least.saturating_sub(self.most).max(self.least.saturating_sub(now.most));
        let most = now.most.saturating_sub(self.least).max(self.most.saturating_sub(now.least));
        match () {
            () if least > tolerated(elapsed) => Some(false),
            () if most <= tolerated(evenness.max_ttl) => Some(true),
            () => None,
        }
    }

    /// Whether it is known well enough for a later reading to be compared with it.
    pub(super) fn is_close(self, evenness: Evenness) -> bool {
        let width = u64::try_from(self.most.saturating_sub(self.least)).unwrap_or(u64::MAX);
        Duration::from_micros(width) <= (TOLERANCE + evenness.over(evenness.max_ttl)) / 2
    }
}

/// For how long a claim may come to stand on a server that was sent before now: for as long as it is useful, by a clock that is
/// known no better than [`Offset::likely_latest_us`] and an answer that was slow can tell.
pub(super) fn on_its_way(evenness: Evenness) -> Duration {
    evenness.surely(USEFUL + evenness.drift.over(LATELY) + SLOWEST)
}

/// For how long something of a claim may come to stand on a server, or stand there, that was sent before now.
pub(super) fn haunts(ttl: Duration, evenness: Evenness) -> Duration {
    on_its_way(evenness) + evenness.surely(ttl)
}

/// The least token that a claim asks for, so that a quorum gives the same one: what the clocks of a quorum will at most read, if
/// not more, and a little ahead of that. Where too few were read lately, what they read at least by now. Of a quorum's clocks
/// the earliest counts: one that is ahead would pull the tokens along. 0: too few are known.
pub(super) fn least_token(
    clocks: impl Iterator<Item = Offset>,
    now: Instant,
    quorum: usize,
    evenness: Evenness,
) -> u64 {
    let (lately, before): (Vec<Offset>, Vec<Offset>) =
        clocks.partition(|clock| clock.is_fresh(now) && now.since(clock.at) <= evenness.max_ttl);
    let mut us: Vec<u64> =
        lately.iter().map(|clock| clock.latest_us(now, evenness).saturating_add(AHEAD_US)).collect();
    if us.len() < quorum {
        us = lately.iter().chain(&before).map(|clock| clock.earliest_us(now, evenness)).collect();
    }
    us.sort_unstable();
    us.len().checked_sub(quorum).and_then(|at| us.get(at).copied()).unwrap_or(0)
}

/// Whether a server that says it has run for `uptime` seconds at `now` already ran at `seen`, when another answered in its
/// place. It is then no restart of that one, but stands in for it, and knows nothing of its locks.
pub(super) fn stands_in(now: Instant, uptime: u64, seen: Instant) -> bool {
    now.since(seen) < Duration::from_secs(uptime.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    const EVEN: Evenness = Evenness { drift: Drift::DEFAULT, max_ttl: Duration::from_secs(30) };

    proptest! {
        /// No false alarm: however slow the answers, a clock that runs within the bound has not jumped.
        #[test]
        fn a_steady_clock_has_not_jumped(
            offset in 0u64..1 << 60,
            bound in 1u32..=25,
            part in -1.0f64..=1.0,
            flights in prop::collection::vec((0u64..20 * SECOND, 0u64..SECOND, 0u64..SECOND), 2..12),
        ) {
            let evenness = Evenness { drift: Drift::percent(bound).unwrap(), ..EVEN };
            let drift = part * f64::from(bound) / 100.0;
            let server = |ours: u64| (i128::from(offset) + i128::from(ours) + (ours as f64 * drift) as i128) as u64 / 1000;
            let mut now = 0;
            let mut known: Option<Offset> = None;
            for (pause, there, back) in flights {
                let (sent, answered, received) = (now + pause, now + pause + there, now + pause + there + back);
                let at = Instant::from_nanos;
                let read = Offset::read(server(answered), at(sent), at(received), evenness);
                let (next, jumped) = known.map_or((read, None), |known| known.then(read, evenness));
                prop_assert_eq!(jumped, None);
                let later = received + SECOND;
                prop_assert!(next.latest_us(at(later), evenness) >= server(later) - 1);
                prop_assert!(next.earliest_us(at(later), evenness) <= server(later) + 1);
                (known, now) = (Some(next), received);
            }
        }

        /// A clock at twice the speed is found out, however often it is read.
        #[test]
        fn a_clock_that_runs_too_fast_is_found_out(
            speed in 1.5f64..10.0, every in 100_000u64..SECOND, trip in 0u64..SECOND / 100,
        ) {
            let at = Instant::from_nanos;
            let reading = |sent: u64| {
                let server = SECOND as f64 + (sent + trip / 2) as f64 * speed;
                Offset::read(server as u64 / 1000, at(sent), at(sent + trip), EVEN)
            };
            // With the bounds of two readings it must be ahead by more than is tolerated.
            let end = SECOND / 10 + 2 * every + 10 * trip;
            let mut known = reading(SECOND);
            let found = (SECOND..SECOND + end).step_by(usize::try_from(every).unwrap()).any(|sent| {
                let (next, jumped) = known.then(reading(sent), EVEN);
                known = next;
                jumped.is_some()
            });
            prop_assert!(found, "not within {}ms", end / 1_000_000);
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
        let read = |server_ms: u64, ms: u64| Offset::read(server_ms * 1000, at(ms), at(ms + 1), EVEN);
        let known = read(50_000, 1000);
        for (server_ms, jump) in [(51_500, 380), (50_500, 380), (51_000, 0), (51_102, 0)] {
            let (next, jumped) = known.then(read(server_ms, 2000), EVEN);
            match jump {
                0 => assert_eq!(jumped, None, "{server_ms}"),
                least => assert!(jumped.unwrap() >= Duration::from_millis(least), "{server_ms}: {jumped:?}"),
            }
            assert_eq!(next.then(read(server_ms + 1000, 3000), EVEN).1, None, "told twice");
        }
        let day = 24 * 3_600_000;
        assert_eq!(known.then(read(50_000 + day + 2000, 1000 + day), EVEN).1, None);
        assert!(
            known.then(read(50_000 + day + 4000, 1000 + day), EVEN).1.is_some(),
            "it may have come just now"
        );
    }

    #[test]
    fn who_does_not_vote_outlives_leases_that_run_slowly() {
        assert_eq!(EVEN.longest_lease(), Duration::from_secs(33));
    }

    #[test]
    fn small_jumps_add_up() {
        let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let mut known = Offset::read(50_000_000, at(0), at(0), EVEN);
        let mut jumps = (1..20).map(|step| {
            let (next, jumped) =
                known.then(Offset::read(50_000_000 + step * 7000, at(step * 5), at(step * 5), EVEN), EVEN);
            known = next;
            jumped
        });
        assert!(jumps.any(|jumped| jumped.is_some()));
    }

    #[test]
    fn no_token_is_asked_for_that_is_far_ahead_of_the_clocks() {
        let (now, hour) = (Instant::from_nanos(100_000 * SECOND), 3600 * SECOND);
        let clock = |us: u64, at: Instant| Offset::read(us, at, at, EVEN);
        let least = |clocks: &[Offset]| least_token(clocks.iter().copied(), now, 2, EVEN);
        let (near, far) = (clock(1_000_000, now), clock(hour, now));
        assert_eq!(least(&[near, far, near]), 1_005_001, "a clock that is ahead is no quorum");
        let yesterday = clock(1_000_000, Instant::from_nanos(10_000 * SECOND));
        assert_eq!(least(&[near, yesterday, near]), 1_005_001, "nor is one that was read long ago");
        assert_eq!(least(&[near, far]), 1_005_001, "nor is one of two");
        assert!(
            (1..100_000_000_000).contains(&least(&[near, yesterday, yesterday])),
            "no more than it reads by now"
        );
        assert_eq!(least(&[near]), 0);
        let short = Evenness { max_ttl: Duration::from_millis(500), ..EVEN };
        let before = clock(1_000_000, now - Duration::from_secs(1));
        assert!(least_token([before; 3].into_iter(), now, 2, short) < 2_000_000);
    }

    #[test]
    fn clocks_of_two_servers_are_compared_by_what_their_bounds_allow() {
        let (at, later) = (Instant::from_nanos(SECOND), Instant::from_nanos(2 * SECOND));
        let read =
            |us: u64, at: Instant, trip: u64| Offset::read(us, at, at + Duration::from_millis(trip), EVEN);
        let lead = |ahead: u64, at, trip| {
            read(5_000_000 + ahead, at, trip).ahead_of(read(5_000_000, at, trip), at, EVEN)
        };
        let (then, second) = (lead(70_000, at, 1), Duration::from_secs(1));
        assert!(then.least <= 70_000 && then.most >= 70_000 && then.most - then.least < 4100, "{then:?}");
        assert!(then.is_close(EVEN) && !lead(0, at, 1000).is_close(EVEN));
        for (ahead, trip, kept) in [
            (70_000, 1, Some(true)),
            (160_000, 1, Some(true)),
            (200_000, 1, Some(false)),
            // It may be more than one second allows, but no more than a lease does.
            (200_000, 100, Some(true)),
            (3_600_000_000, 100, Some(false)),
            (70_000, 4000, None),
        ] {
            assert_eq!(then.is_kept(lead(ahead, later, trip), second, EVEN), kept, "{ahead} {trip}");
        }
    }

    #[test]
    fn who_ran_before_another_was_seen_stands_in_for_it() {
        let now = Instant::from_nanos(100 * SECOND);
        let seen = Instant::from_nanos(90 * SECOND);
        assert!(stands_in(now, 3600, seen) && stands_in(now, 12, seen));
        assert!(!stands_in(now, 11, seen) && !stands_in(now, 0, seen));
    }
}
