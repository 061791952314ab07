//! How often locks change hands, as far as it is seen by looking now and then.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use clinch::backend::LockState;
use clinch::{ClaimId, Token};

/// For how long one counts.
const WINDOW: Duration = Duration::from_secs(60);

/// A holder, and by which grant. Another program's claim may have no id, and a lock may be granted to one claim once only.
type Grant = (ClaimId, Option<Token>);

#[derive(Debug, Default)]
pub(crate) struct Handoffs {
    /// Who held what at the last look; `None` before the first.
    held: Option<HashMap<String, HashSet<Grant>>>,
    /// Those of the last minute, the oldest first.
    seen: VecDeque<(Instant, String)>,
    /// How many of these each lock has.
    counts: HashMap<String, usize>,
}

impl Handoffs {
    /// Counts who holds now and did not at the last look.
    pub(crate) fn note(&mut self, locks: &[LockState], now: Instant) {
        let grants = |lock: &LockState| {
            let held = lock.claims.iter().filter(|claim| claim.granted);
            (lock.name.as_str().to_owned(), held.map(|claim| (claim.id, claim.token)).collect())
        };
        let held: HashMap<String, HashSet<Grant>> = locks.iter().map(grants).collect();
        if let Some(before) = self.held.replace(held) {
            for (name, grants) in self.held.iter().flatten() {
                let old = before.get(name);
                let new = grants.iter().filter(|grant| !old.is_some_and(|old| old.contains(grant))).count();
                self.seen.extend(std::iter::repeat_n((now, name.clone()), new));
                if new > 0 {
                    *self.counts.entry(name.clone()).or_default() += new;
                }
            }
        }
        self.forget(now);
    }

    /// Those of the last minute, of all locks.
    pub(crate) fn all(&self) -> usize {
        self.seen.len()
    }

    /// Those of the last minute, of one lock.
    pub(crate) fn of(&self, name: &str) -> usize {
        self.counts.get(name).copied().unwrap_or(0)
    }

    fn forget(&mut self, now: Instant) {
        while let Some((_, name)) =
            self.seen.pop_front_if(|(seen, _)| now.saturating_duration_since(*seen) > WINDOW)
        {
            if let Some(count) = self.counts.get_mut(&name) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&name);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::model::tests::{claim, lock};

    #[test]
    fn who_holds_anew_is_counted_for_a_minute() {
        let (mut handoffs, start) = (Handoffs::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let first = [lock("x", &[claim(1, true), claim(2, false)]), lock("y", &[claim(9, true)])];
        handoffs.note(&first, at(0));
        assert_eq!(handoffs.all(), 0, "nobody knows since when they hold");
        handoffs.note(&first, at(1));
        assert_eq!(handoffs.all(), 0);
        handoffs.note(&[lock("x", &[claim(2, true)])], at(2));
        assert_eq!((handoffs.of("x"), handoffs.of("y"), handoffs.all()), (1, 0, 1));
        handoffs.note(&[], at(3));
        handoffs.note(&[lock("x", &[claim(3, true), claim(4, true)])], at(10));
        assert_eq!((handoffs.of("x"), handoffs.all()), (3, 3), "of those that share it each one counts");
        handoffs.note(&[], at(62));
        assert_eq!((handoffs.of("x"), handoffs.all()), (3, 3));
        handoffs.note(&[], at(63));
        assert_eq!((handoffs.of("x"), handoffs.all()), (2, 2));
        handoffs.note(&[], at(600));
        assert_eq!((handoffs.of("x"), handoffs.all(), handoffs.counts.len()), (0, 0, 0));
    }

    #[test]
    fn a_new_token_of_the_same_claim_is_another_holder() {
        let (mut handoffs, now) = (Handoffs::default(), Instant::now());
        let mut locks = [lock("x", &[claim(0, true)])];
        handoffs.note(&locks, now);
        locks[0].claims[0].token = Token::new(1_000_000);
        handoffs.note(&locks, now);
        assert_eq!(handoffs.of("x"), 1);
    }
}
