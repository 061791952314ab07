//! What a waiting claim has ahead of it, as the last read showed it and events have changed it since.

use std::sync::Mutex;

use tokio::sync::Notify;

use super::record::{Place, Standing};
use super::watch::{Change, Subscription};
use crate::claim::Mode;
use crate::clock::Instant;
use crate::drift::Drift;
use crate::queue::admits;
use crate::sync::lock;

/// The claims that must go before one is granted, and the watch that tells of them.
///
/// A claim watches no more than it must. An exclusive one watches its predecessor: nobody's turn comes before that one
/// is gone. A reader watches the last ahead that is no reader. Permits may come free anywhere ahead, and a claim for
/// some counts along what is deleted; it reads again only when that makes room for it.
pub(super) struct View {
    mode: Mode,
    /// When it was made.
    made: Instant,
    /// The revision at which it was read.
    pub(super) revision: i64,
    /// Whoever stands in the way.
    pub(super) ahead: Vec<Place>,
    /// Until when the one in the way keeps the lock closed.
    pub(super) closed_until: Option<Instant>,
    pub(super) progress: Mutex<Progress>,
    /// Told when the claim itself is lost.
    pub(super) woken: Notify,
}

/// How far the events have been followed.
#[derive(Default)]
pub(super) struct Progress {
    pub(super) subscription: Option<std::sync::Arc<Subscription>>,
    /// The opening of the watch that this view has taken into account.
    pub(super) opened: u64,
    /// Positions in `ahead` that are gone.
    gone: Vec<bool>,
}

impl View {
    /// What is in the way of a claim, of all that is ahead of it.
    pub(super) fn new(mode: Mode, now: Instant, revision: i64, ahead: Vec<Place>) -> View {
        let in_the_way = match mode {
            Mode::Exclusive => ahead.into_iter().next_back().into_iter().collect(),
            Mode::Shared => {
                ahead.into_iter().rfind(|place| place.mode() != Mode::Shared).into_iter().collect()
            }
            Mode::Permits { .. } => ahead,
        };
        let progress = Progress { gone: vec![false; in_the_way.len()], ..Progress::default() };
        View {
            mode,
            made: now,
            revision,
            ahead: in_the_way,
            closed_until: None,
            progress: Mutex::new(progress),
            woken: Notify::new(),
        }
    }

    /// Notes when the lock opens that the last in the way keeps closed, counted from now unless `before` knows better.
    pub(super) fn date_closing(&mut self, before: Option<&View>, drift: Drift) {
        let Some(Place { standing: Standing::Closed { time, .. }, created, .. }) = self.ahead.last() else {
            return;
        };
        let known =
            before.filter(|before| before.ahead.last().is_some_and(|place| place.created == *created));
        let known = known.and_then(|before| before.closed_until);
        // Our clock may run faster than that of whoever closed it.
        self.closed_until = Some(known.unwrap_or(self.made + *time + drift.over(*time)));
    }

    /// Since when something waits to be taken in by whoever follows.
    pub(super) fn unread_since(&self) -> Option<Instant> {
        match &lock(&self.progress).subscription {
            Some(subscription) => subscription.unread_since(),
            None => Some(self.made),
        }
    }

    /// Whether all that stood in the way is gone, as far as the events tell.
    pub(super) fn is_clear(&self) -> bool {
        lock(&self.progress).gone.iter().all(|gone| *gone)
    }

    /// What is to be watched: one key, or all keys of the queue.
    pub(super) fn watches_all(&self) -> bool {
        matches!(self.mode, Mode::Permits { .. })
    }

    /// Goes on with the watch of an earlier view, if it is the same.
    pub(super) fn inherit(&self, before: &View, key: &[u8]) {
        let mut theirs = lock(&before.progress);
        if let Some(subscription) = theirs.subscription.take_if(|subscription| subscription.key() == key) {
            let mut ours = lock(&self.progress);
            (ours.subscription, ours.opened) = (Some(subscription), theirs.opened);
        }
    }

    /// Takes events in. True: another read is worth taking.
    pub(super) fn follow<'a>(&self, changes: impl IntoIterator<Item = &'a Change>) -> bool {
        let mut progress = lock(&self.progress);
        for change in changes {
            let mut ahead = self.ahead.iter().enumerate();
            let Some((at, place)) = ahead.find(|(_, place)| place.key == change.place.key) else { continue };
            let Some(gone) = progress.gone.get_mut(at) else { continue };
            if !change.deleted && !*gone {
                // One that was granted has only moved to another lease; else it was downgraded or closed.
                if change.place.is_same_claim(place) {
                    continue;
                }
                return true;
            }
            // What is written under the key of one that is gone is a claim behind this one.
            *gone = true;
        }
        let left = self.ahead.iter().zip(&progress.gone).filter(|(_, gone)| !**gone);
        admits(left.map(|(place, _)| place.mode()), self.mode)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::backends::etcd::wire::KeyValue;

    fn place(key: &str) -> Place {
        Place::read(&KeyValue { key: key.as_bytes().to_vec(), ..KeyValue::default() })
    }

    fn deleted(key: &str) -> Change {
        Change { place: place(key), deleted: true }
    }

    const NOW: Instant = Instant::from_nanos(0);

    #[test]
    fn an_exclusive_claim_waits_for_its_predecessor_alone() {
        let view = View::new(Mode::Exclusive, NOW, 1, vec![place("q/a"), place("q/b")]);
        assert!(!view.follow(&[deleted("q/a"), deleted("q/c")]));
        assert!(view.follow(&[deleted("q/b")]));
    }

    #[test]
    fn permits_wait_until_enough_is_gone_and_a_write_that_changes_a_claim_is_worth_a_look() {
        let mode = "1 of 2".parse().unwrap();
        let view = View::new(mode, NOW, 1, vec![place("q/a"), place("q/b")]);
        assert!(view.watches_all() && !view.follow(&[deleted("q/a")]));
        assert!(view.follow(&[deleted("q/b")]));
        let (time, since) = (Duration::ZERO, SystemTime::UNIX_EPOCH);
        let closed = Standing::Closed { evicted: None, time, since, term: None };
        for (standing, is_worth_a_look) in [(Standing::Foreign, false), (closed, true)] {
            let place = Place { lease: 9, standing, ..place("q/a") };
            let change = Change { place, deleted: false };
            let view = View::new(mode, NOW, 1, vec![self::place("q/a")]);
            assert_eq!(view.follow(&[change]), is_worth_a_look);
        }
    }
}
