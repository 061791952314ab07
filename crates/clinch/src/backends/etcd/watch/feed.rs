//! What the readers of one watch are told: all waiters of this client who wait for the same.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use crate::backends::etcd::record::Place;
use crate::backends::etcd::wire::{DELETED, Event};
use crate::clock::Instant;
use crate::error::Error;
use crate::sync::lock;

/// Events that wait for their reader. Whoever falls further behind reads anew.
const MAX_EVENTS: usize = 1024;

/// How far a watch is, and who reads it.
#[derive(Default)]
pub(super) struct Feed(Mutex<State>);

#[derive(Default)]
struct State {
    /// How often the watch was opened.
    opened: u64,
    /// What came later than this revision will be told to whoever joins.
    since: i64,
    last: u64,
    readers: BTreeMap<u64, Arc<Reader>>,
}

/// One who reads a watch.
pub(super) struct Reader {
    news: Mutex<News>,
    told: Notify,
}

/// What a watch has told one reader.
#[derive(Debug, Default)]
pub(in crate::backends::etcd) struct News {
    /// How often it was opened; events may have been missed before each time.
    pub(in crate::backends::etcd) opened: u64,
    /// The store's revision when it was opened last: all that came later is told.
    pub(in crate::backends::etcd) since: i64,
    pub(in crate::backends::etcd) changes: Vec<Arc<Change>>,
    /// Why it cannot be opened.
    pub(in crate::backends::etcd) refused: Option<Error>,
    /// Since when somebody could have taken this.
    unread_since: Option<Instant>,
}

/// A key was written or deleted.
#[derive(Debug)]
pub(in crate::backends::etcd) struct Change {
    /// As it stands now; of one that was deleted, the key alone.
    pub(in crate::backends::etcd) place: Place,
    pub(in crate::backends::etcd) deleted: bool,
}

impl Reader {
    /// Takes what was told since the last call.
    pub(super) fn news(&self) -> News {
        let mut news = lock(&self.news);
        let (changes, refused) = (std::mem::take(&mut news.changes), news.refused.take());
        news.unread_since = None;
        News { opened: news.opened, since: news.since, changes, refused, unread_since: None }
    }

    /// Since when nobody has taken what was told.
    pub(super) fn unread_since(&self) -> Option<Instant> {
        lock(&self.news).unread_since
    }

    /// Waits for something to be told.
    pub(super) async fn told(&self) {
        self.told.notified().await;
    }
}

impl Feed {
    /// One more who reads, and the number to leave with.
    pub(super) fn join(&self) -> (u64, Arc<Reader>) {
        let mut state = lock(&self.0);
        state.last += 1;
        let news = News { opened: state.opened, since: state.since, ..News::default() };
        let (number, reader) = (state.last, Arc::new(Reader { news: Mutex::new(news), told: Notify::new() }));
        state.readers.insert(number, reader.clone());
        (number, reader)
    }

    /// One reader less; says whether that was the last.
    pub(super) fn leave(&self, number: u64) -> bool {
        let mut state = lock(&self.0);
        state.readers.remove(&number);
        state.readers.is_empty()
    }

    /// How often the watch was opened.
    pub(super) fn times_opened(&self) -> u64 {
        lock(&self.0).opened
    }

    /// Notes that the watch was opened, at this revision.
    pub(super) fn opened(&self, revision: i64, now: Instant) {
        {
            let mut state = lock(&self.0);
            (state.opened, state.since) = (state.opened + 1, revision);
        }
        self.tell_all(now, |news| (news.opened, news.since) = (news.opened + 1, revision));
    }

    /// Tells what has happened.
    pub(super) fn tell(&self, events: Vec<Event>, now: Instant) {
        let changed = |event: Event| {
            let deleted = event.kind == DELETED;
            event.kv.map(|kv| (kv.mod_revision, Arc::new(Change { place: Place::read(&kv), deleted })))
        };
        let (revisions, changes): (Vec<i64>, Vec<_>) = events.into_iter().filter_map(changed).unzip();
        {
            // Whoever joins has to read what was told before.
            let mut state = lock(&self.0);
            state.since = revisions.into_iter().fold(state.since, i64::max);
        }
        self.tell_all(now, |news| {
            if news.changes.len() + changes.len() > MAX_EVENTS {
                news.changes.clear();
                // As if it had been opened anew at a later revision: the reader looks for itself.
                news.opened += 1;
                news.since = i64::MAX;
            } else {
                news.changes.extend(changes.iter().cloned());
            }
        });
    }

    /// Tells why the watch cannot be opened.
    pub(super) fn refuse(&self, error: &Error, now: Instant) {
        self.tell_all(now, |news| news.refused = Some(error.again()));
    }

    fn tell_all(&self, now: Instant, tell: impl Fn(&mut News)) {
        let readers: Vec<_> = lock(&self.0).readers.values().cloned().collect();
        for reader in readers {
            {
                let mut news = lock(&reader.news);
                tell(&mut news);
                news.unread_since.get_or_insert(now);
            }
            reader.told.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::etcd::wire::KeyValue;

    #[test]
    fn who_joins_a_watch_knows_what_was_told_before() {
        let (feed, now) = (Feed::default(), Instant::from_nanos(0));
        let event = |mod_revision| {
            let kv = KeyValue { key: b"q/1f-0".to_vec(), mod_revision, ..KeyValue::default() };
            Event { kind: DELETED, kv: Some(kv) }
        };
        let of = |reader: &Reader| {
            let news = lock(&reader.news);
            (news.opened, news.since, news.changes.len())
        };
        let (_, first) = feed.join();
        assert_eq!(of(&first), (0, 0, 0));
        feed.opened(5, now);
        feed.tell(vec![event(7), event(9)], now);
        let (_, second) = feed.join();
        feed.tell(vec![event(11)], now);
        assert_eq!(of(&first), (1, 5, 3));
        // What it read before the ninth revision has to be read again.
        assert_eq!(of(&second), (1, 9, 1));
        // Each counts openings for itself: one that missed events, those as well.
        feed.tell((0..=MAX_EVENTS as i64).map(event).collect(), now);
        let before = of(&first).0;
        feed.opened(99, now);
        assert_eq!(of(&first), (before + 1, 99, 0));
    }
}
