//! The statistics of a comparison: medians, spreads, ratios, fairness. Pure arithmetic on plain numbers.

/// The middle of some values and how far they reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// Median and reach of the values that are numbers; `None` when there are none.
pub(crate) fn spread(values: &[f64]) -> Option<Spread> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let (min, max) = (*sorted.first()?, *sorted.last()?);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    let median = match sorted.len() % 2 {
        0 => (sorted.get(middle - 1)? + upper) / 2.0,
        _ => upper,
    };
    Some(Spread { median, min, max })
}

/// Ours over the floor, round by round. What both shared in a round (another program, a hot CPU) cancels out, which a
/// ratio of two medians would keep.
pub(crate) fn ratios(ours: &[f64], floor: &[f64]) -> Vec<f64> {
    ours.iter().zip(floor).map(|(ours, floor)| ours / floor).collect()
}

/// Jain's index of fairness: 1 when all have the same share, 1/n when one has everything, 0 when nobody has anything.
pub(crate) fn jain(shares: &[u64]) -> f64 {
    let sum: f64 = shares.iter().map(|share| *share as f64).sum();
    let squares: f64 = shares.iter().map(|share| (*share as f64).powi(2)).sum();
    if squares == 0.0 { 0.0 } else { sum * sum / (squares * shares.len() as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_value_or_halfway_between_two() {
        let of = |values: &[f64]| spread(values).map(|spread| spread.median);
        assert_eq!(of(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(of(&[7.0]), Some(7.0));
        assert_eq!(of(&[]), None);
        assert_eq!(spread(&[5.0, f64::NAN, 1.0]), Some(Spread { median: 3.0, min: 1.0, max: 5.0 }));
    }

    #[test]
    fn a_ratio_is_taken_within_each_round() {
        // The second round ran at half speed; the ratio does not see it.
        let all = ratios(&[2.0, 4.0, 2.2], &[1.0, 2.0, 1.0]);
        assert_eq!(all, [2.0, 2.0, 2.2]);
        assert_eq!(spread(&all).map(|spread| spread.median), Some(2.0));
        assert_eq!(spread(&ratios(&[1.0], &[0.0])), None, "a floor of nothing gives no ratio");
    }

    #[test]
    fn jain_is_one_for_equals_and_one_nth_for_a_monopoly() {
        assert_eq!(jain(&[5, 5, 5, 5]), 1.0);
        assert_eq!(jain(&[8, 0, 0, 0]), 0.25);
        assert_eq!(jain(&[0, 0]), 0.0);
        assert_eq!(jain(&[]), 0.0);
        assert!(jain(&[28, 29, 28, 29]) > 0.999);
    }
}
