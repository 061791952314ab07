//! What a contest for one lock looked like, judged from the time stamps that every waiter took.
//!
//! All stamps are CLOCK_MONOTONIC of one host, so those of different threads and processes can be compared.

use std::str::FromStr;

use hdrhistogram::Histogram;

use crate::figures::jain;
use crate::{Error, Result};

/// One hold, in nanoseconds since boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    /// When it was asked for.
    pub(crate) want: u64,
    /// When the request had returned.
    pub(crate) got: u64,
    /// When the release was called. Until then nobody else may hold it.
    pub(crate) release: u64,
}

impl Hold {
    /// The line that a worker process writes.
    pub(crate) fn line(&self) -> String {
        format!("{} {} {}", self.want, self.got, self.release)
    }
}

impl FromStr for Hold {
    type Err = Error;

    fn from_str(line: &str) -> Result<Hold> {
        let numbers: Vec<u64> = line.split(' ').map(str::parse).collect::<std::result::Result<_, _>>()?;
        match *numbers.as_slice() {
            [want, got, release] => Ok(Hold { want, got, release }),
            _ => Err(format!("a worker wrote \"{line}\", which is no hold").into()),
        }
    }
}

/// The span of time that counts: from when everybody runs until the first stops.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl Window {
    fn has(&self, moment: u64) -> bool {
        (self.from..self.to).contains(&moment)
    }

    fn seconds(&self) -> f64 {
        self.to.saturating_sub(self.from) as f64 / 1e9
    }
}

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Verdict {
    /// Times per second that the next holder was not the previous one.
    pub(crate) handoffs: f64,
    /// Acquisitions per second, those by the previous holder included.
    pub(crate) acquisitions: f64,
    /// Acquisitions in the window, for costs per acquisition.
    pub(crate) count: u64,
    /// Fairness between waiters.
    pub(crate) jain: f64,
    /// The longest wait.
    pub(crate) max_wait_ms: f64,
    /// From the call of a release to the return of the next holder's request, where that is another.
    pub(crate) gap_p50_us: f64,
    pub(crate) gap_p99_us: f64,
    /// Holds that began before an earlier one was released.
    pub(crate) violations: u64,
    /// Waiters who got nothing within the window.
    pub(crate) starved: u64,
}

/// Judges the holds of each waiter.
pub(crate) fn judge(waiters: &[Vec<Hold>], window: Window) -> Result<Verdict> {
    let mut all: Vec<(usize, Hold)> = Vec::new();
    for (waiter, holds) in waiters.iter().enumerate() {
        all.extend(holds.iter().map(|hold| (waiter, *hold)));
    }
    all.sort_by_key(|(_, hold)| hold.got);

    let mut gaps = Histogram::<u64>::new(3)?;
    let (mut handoffs, mut violations, mut max_wait) = (0u64, 0u64, 0u64);
    let mut before: Option<(usize, Hold)> = None;
    let mut held_until = 0;
    for (waiter, hold) in &all {
        violations += u64::from(hold.got < held_until);
        held_until = held_until.max(hold.release);
        if hold.got >= window.from {
            max_wait = max_wait.max(hold.got.saturating_sub(hold.want));
        }
        if let Some((last, held)) = before
            && last != *waiter
            && window.has(hold.got)
        {
            handoffs += 1;
            gaps.record(hold.got.saturating_sub(held.release))?;
        }
        before = Some((*waiter, *hold));
    }
    let counted = |holds: &Vec<Hold>| holds.iter().filter(|hold| window.has(hold.got)).count() as u64;
    let counts: Vec<u64> = waiters.iter().map(counted).collect();
    let count: u64 = counts.iter().sum();
    Ok(Verdict {
        handoffs: handoffs as f64 / window.seconds(),
        acquisitions: count as f64 / window.seconds(),
        count,
        jain: jain(&counts),
        max_wait_ms: max_wait as f64 / 1e6,
        gap_p50_us: gaps.value_at_quantile(0.5) as f64 / 1e3,
        gap_p99_us: gaps.value_at_quantile(0.99) as f64 / 1e3,
        violations,
        starved: counts.iter().filter(|count| **count == 0).count() as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Window = Window { from: 0, to: 1_000_000_000 };

    fn hold(want: u64, got: u64, release: u64) -> Hold {
        Hold { want, got, release }
    }

    #[test]
    fn only_a_change_of_holder_is_a_hand_off() {
        // In order: 0, 0, 1, 0.
        let waiters = [vec![hold(0, 10, 20), hold(21, 22, 30), hold(41, 52, 60)], vec![hold(5, 35, 50)]];
        let verdict = judge(&waiters, SECOND).unwrap();
        assert_eq!((verdict.handoffs, verdict.acquisitions, verdict.count), (2.0, 4.0, 4));
        assert_eq!((verdict.violations, verdict.starved), (0, 0));
        assert_eq!(verdict.max_wait_ms, 30e-6);
        assert_eq!(verdict.gap_p50_us, 2e-3, "the gaps of the two changes are 5 and 2 ns");
    }

    #[test]
    fn a_hold_inside_another_is_a_violation_even_if_a_third_came_between() {
        let waiters = [vec![hold(0, 10, 100)], vec![hold(0, 20, 30)], vec![hold(0, 40, 50)]];
        assert_eq!(judge(&waiters, SECOND).unwrap().violations, 2);
    }

    #[test]
    fn who_got_nothing_in_the_window_starved_though_it_was_served_later() {
        let window = Window { from: 0, to: 50 };
        let waiters = [vec![hold(0, 1, 5)], vec![hold(0, 60, 70)], vec![]];
        let verdict = judge(&waiters, window).unwrap();
        assert_eq!((verdict.starved, verdict.count, verdict.handoffs), (2, 1, 0.0));
        assert_eq!(verdict.max_wait_ms, 60e-6, "the wait counts although it ended late");
    }

    #[test]
    fn a_hold_reads_back_from_its_line() {
        let one = hold(1, 2, 3);
        assert_eq!(one.line().parse::<Hold>().unwrap(), one);
        assert!("1 2".parse::<Hold>().is_err() && "a b c".parse::<Hold>().is_err());
    }
}
