//! Claims that meet: each has a part of the votes, all withdraw, and one has to come first the next time. Pure.

use std::time::Duration;

/// How often in a row claims that meet ask again after a pause alone.
pub(super) const MEETINGS: u32 = 6;

/// The longest pause: four round trips, between these.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// How long it takes until a quorum has answered, by how long each server takes that answers.
pub(super) fn trip_to(quorum: usize, trips: impl Iterator<Item = Duration>) -> Duration {
    let mut trips: Vec<Duration> = trips.collect();
    trips.sort_unstable();
    trips.into_iter().take(quorum).next_back().unwrap_or_default()
}

/// The pause before the next attempt after a split vote: longer with every one, and random, so that one comes first. Of two
/// that each have one server at hand, one is first only if it has reached the other's before that one asks there.
pub(super) fn split_pause(round_trip: Duration, splits: u32, jitter: f64) -> Duration {
    let (least, most) = PAUSE;
    let longest = (round_trip * 4).clamp(least, most);
    let pause = (round_trip * 2 + Duration::from_millis(1)).saturating_mul(1 << splits.min(6));
    pause.min(longest).mul_f64(jitter.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::super::timing::Patience;
    use super::*;

    #[test]
    fn split_votes_part_ever_further() {
        let trip = Duration::from_millis(1);
        assert_eq!(split_pause(trip, 0, 1.0), Duration::from_millis(3));
        assert_eq!(split_pause(trip, 2, 0.5), Duration::from_millis(6));
        assert_eq!(split_pause(trip, 1000, 1.0), Duration::from_millis(100));
        assert_eq!(split_pause(trip, 5, 0.0), Duration::ZERO);
    }

    #[test]
    fn who_is_far_away_pauses_for_longer_than_its_claim_takes_to_arrive() {
        let millis = Duration::from_millis;
        let trip = trip_to(2, [millis(200), millis(1), millis(900)].into_iter());
        assert_eq!(trip, millis(200), "that of the last that a quorum needs");
        assert_eq!(trip_to(2, [millis(7)].into_iter()), millis(7));
        assert_eq!(split_pause(trip, 0, 1.0), millis(401));
        assert_eq!(split_pause(trip, 9, 1.0), millis(800));
        assert_eq!(split_pause(millis(900), 9, 1.0), millis(1000), "but no longer than this");
    }

    /// It may never have answered, and what it would take is a guess.
    #[test]
    fn a_server_that_hangs_says_nothing_of_how_far_away_the_others_are() {
        let mut near = Patience::new(Duration::from_millis(1));
        assert_eq!(near.trip(), Some(Duration::from_millis(1)));
        near.struck();
        assert_eq!(near.trip(), None);
        near.answered(Duration::from_millis(1));
        assert_eq!(near.trip(), Some(Duration::from_millis(1)));
    }
}
