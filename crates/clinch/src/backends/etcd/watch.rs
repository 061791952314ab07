//! Watches: one stream for all of a client's, on the background lane.
//!
//! Every watch begins at the present, since etcd serves one that begins in the past from a loop every 100 ms; what
//! happened before is read by whoever cares, once the watch is known to be open. That is also how a stream that broke,
//! or a past that was compacted, is survived: open again, then read.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tonic::Streaming;

use super::client::Client;
use super::link::Link;
use super::record::{Place, Standing};
use super::wire::{
    self, DELETED, Event, KeyValue, WatchCancel, WatchCreate, WatchOrder, WatchRequest, WatchResponse,
};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::lane::caught;
use crate::sync::lock;

/// Pause before a stream that broke is opened again, doubling from the first to the second.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Events that wait for their reader. Whoever falls further behind reads anew.
const MAX_EVENTS: usize = 1024;

/// Keys that are read at once after a stream was opened again; etcd takes 128 operations in a transaction.
const READ_BATCH: usize = 100;

/// All watches of one client.
pub(super) struct Watcher {
    client: Arc<Client>,
    state: Mutex<State>,
    kick: Arc<Notify>,
}

#[derive(Default)]
struct State {
    last_id: i64,
    subs: HashMap<i64, Arc<Sub>>,
    /// Those that more readers can join, by key, and by whether they are of all that begins like that.
    read: HashMap<(Arc<[u8]>, bool), Arc<Sub>>,
    /// Leads into the open stream.
    orders: Option<mpsc::UnboundedSender<WatchRequest>>,
    /// Whether a watch was refused, and none opened since.
    denied: bool,
    /// Ends the stream's task when dropped.
    alive: Option<watch::Sender<()>>,
}

/// One watch.
struct Sub {
    id: i64,
    key: Arc<[u8]>,
    /// Whether all keys are watched that begin like that.
    range: bool,
    /// From which revision on it is opened first; 0: from the present.
    start: i64,
    purpose: Purpose,
    readers: Mutex<Readers>,
}

enum Purpose {
    /// Somebody reads the events: all waiters of this client who wait for the same.
    Read,
    /// The key is there, and this is called once it is not, or says that its claim was evicted.
    Guard(Box<dyn Fn() + Send + Sync>),
}

/// How far a watch is, and who reads it.
#[derive(Default)]
struct Readers {
    /// How often it was opened.
    opened: u64,
    /// What came later than this revision will be told to whoever joins.
    since: i64,
    last: u64,
    all: BTreeMap<u64, Arc<Reader>>,
}

impl Readers {
    fn join(&mut self) -> (u64, Arc<Reader>) {
        self.last += 1;
        let news = News { opened: self.opened, since: self.since, ..News::default() };
        let reader = Arc::new(Reader { news: Mutex::new(news), told: Notify::new() });
        self.all.insert(self.last, reader.clone());
        (self.last, reader)
    }
}

/// One who reads a watch.
struct Reader {
    news: Mutex<News>,
    told: Notify,
}

/// What a watch has told one reader.
#[derive(Debug, Default)]
pub(super) struct News {
    /// How often it was opened; events may have been missed before each time.
    pub(super) opened: u64,
    /// The store's revision when it was opened last: all that came later is told.
    pub(super) since: i64,
    pub(super) changes: Vec<Arc<Change>>,
    /// Why it cannot be opened.
    pub(super) refused: Option<Error>,
    /// Since when somebody could have taken this.
    unread_since: Option<Instant>,
}

/// A key was written or deleted.
#[derive(Debug)]
pub(super) struct Change {
    /// As it stands now; of one that was deleted, the key alone.
    pub(super) place: Place,
    pub(super) deleted: bool,
}

/// A watch that is open for as long as this lives.
pub(super) struct Subscription {
    watcher: Weak<Watcher>,
    sub: Arc<Sub>,
    number: u64,
    reader: Arc<Reader>,
}

/// A key whose end is told, for as long as this lives.
pub(super) struct KeyGuard {
    watcher: Weak<Watcher>,
    sub: Arc<Sub>,
}

impl Drop for KeyGuard {
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher.upgrade() {
            lock(&watcher.state).end(&self.sub);
        }
    }
}

impl Subscription {
    /// Takes what was told since the last call.
    pub(super) fn news(&self) -> News {
        let mut news = lock(&self.reader.news);
        let (changes, refused) = (std::mem::take(&mut news.changes), news.refused.take());
        news.unread_since = None;
        News { opened: news.opened, since: news.since, changes, refused, unread_since: None }
    }

    /// Since when nobody has taken what was told.
    pub(super) fn unread_since(&self) -> Option<Instant> {
        lock(&self.reader.news).unread_since
    }

    /// Waits for something to be told.
    pub(super) async fn told(&self) {
        self.reader.told.notified().await;
    }

    /// The key that is watched, or where the range begins.
    pub(super) fn key(&self) -> &[u8] {
        &self.sub.key
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher.upgrade() {
            watcher.leave(&self.sub, self.number);
        }
    }
}

impl Watcher {
    pub(super) fn new(client: Arc<Client>) -> Arc<Watcher> {
        Arc::new(Watcher { client, state: Mutex::default(), kick: Arc::default() })
    }

    /// Watches one key, or with `range` all that begin with it, once for all who do.
    pub(super) fn read(self: &Arc<Watcher>, key: &[u8], range: bool) -> Result<Subscription> {
        let mut state = lock(&self.state);
        let shared = (key.into(), range);
        if let Some(sub) = state.read.get(&shared).cloned() {
            return Ok(self.join(sub));
        }
        let sub = self.begin(&mut state, shared.0.clone(), range, 0, Purpose::Read)?;
        state.read.insert(shared, sub.clone());
        Ok(self.join(sub))
    }

    /// Calls `gone` once when a key that was last seen at this revision is not there any more.
    pub(super) fn guard(
        self: &Arc<Watcher>,
        key: Arc<[u8]>,
        seen: i64,
        gone: impl Fn() + Send + Sync + 'static,
    ) -> Result<KeyGuard> {
        let purpose = Purpose::Guard(Box::new(gone));
        let sub = self.begin(&mut lock(&self.state), key, false, seen.saturating_add(1), purpose)?;
        Ok(KeyGuard { watcher: Arc::downgrade(self), sub })
    }

    /// Opens a watch.
    fn begin(
        self: &Arc<Watcher>,
        state: &mut State,
        key: Arc<[u8]>,
        range: bool,
        start: i64,
        purpose: Purpose,
    ) -> Result<Arc<Sub>> {
        // A task that has ended, however it did, has dropped its end.
        if state.alive.as_ref().is_none_or(watch::Sender::is_closed) {
            state.alive = Some(self.follow_all()?);
        }
        state.last_id += 1;
        let sub = Arc::new(Sub { id: state.last_id, key, range, start, purpose, readers: Mutex::default() });
        state.subs.insert(sub.id, sub.clone());
        match &state.orders {
            Some(orders) => drop(orders.send(sub.create(start))),
            None => self.kick.notify_one(),
        }
        Ok(sub)
    }

    /// Starts the task of the stream, which ends with what this gives.
    fn follow_all(self: &Arc<Watcher>) -> Result<watch::Sender<()>> {
        let (alive, dead) = watch::channel(());
        let (watcher, client, kick) = (Arc::downgrade(self), self.client.clone(), self.kick.clone());
        self.client.env.lane().run(move || {
            let mut dead = dead.clone();
            let run = run(watcher.clone(), client.clone(), kick.clone());
            async move {
                tokio::select! {
                    biased;
                    _ = dead.changed() => {}
                    () = run => {}
                }
            }
        })?;
        Ok(alive)
    }

    /// One more who reads a watch; with the state locked, so that nobody ends it meanwhile.
    fn join(self: &Arc<Watcher>, sub: Arc<Sub>) -> Subscription {
        let (number, reader) = lock(&sub.readers).join();
        Subscription { watcher: Arc::downgrade(self), sub, number, reader }
    }

    /// Ends a watch with its last reader.
    fn leave(&self, sub: &Arc<Sub>, number: u64) {
        let mut state = lock(&self.state);
        {
            let mut readers = lock(&sub.readers);
            readers.all.remove(&number);
            if !readers.all.is_empty() {
                return;
            }
        }
        state.unshare(sub);
        state.end(sub);
    }

    /// Takes in what the stream said; gives the key that is to be read, if one is.
    ///
    /// # Errors
    ///
    /// The stream is of no use any more.
    fn take(&self, answer: WatchResponse) -> Result<Option<Arc<Sub>>, Stale> {
        if answer.canceled && answer.created && !answer.cancel_reason.contains("compacted") {
            return self.denied(&answer.cancel_reason).map(|()| None);
        }
        let Some(sub) = lock(&self.state).subs.get(&answer.watch_id).cloned() else { return Ok(None) };
        if answer.canceled {
            self.canceled(&sub);
            return Ok(None);
        }
        if answer.created {
            let again = sub.opened(wire::revision(answer.header.as_ref()), self.client.env.now()) > 1;
            let again = again || sub.start == 0;
            lock(&self.state).denied = false;
            return Ok((again && matches!(sub.purpose, Purpose::Guard(_))).then_some(sub));
        }
        match &sub.purpose {
            Purpose::Guard(gone) => {
                let ends = |event: &Event| event.kind == DELETED || event.kv.as_ref().is_some_and(is_evicted);
                if answer.events.iter().any(ends) {
                    gone();
                }
            }
            Purpose::Read => sub.tell(answer.events, self.client.env.now()),
        }
        Ok(None)
    }

    /// The server opens no watch for us: because the login has run out with which the stream was opened, or because we
    /// may not watch at all. Not every version says which watch it means.
    fn denied(&self, reason: &str) -> Result<(), Stale> {
        let mut state = lock(&self.state);
        state.denied = !state.denied;
        if state.denied {
            return Err(Stale);
        }
        let unopened: Vec<_> =
            state.subs.values().filter(|sub| lock(&sub.readers).opened == 0).cloned().collect();
        for sub in unopened {
            // Who comes later asks anew.
            state.unshare(&sub);
            sub.tell_all(self.client.env.now(), |news| {
                news.refused = Some(Error::new(
                    ErrorKind::Refused,
                    format!(
                        "etcd does not let this user watch the lock: {reason}; see the documentation of the etcd store"
                    ),
                ));
            });
        }
        Ok(())
    }

    /// The server gave a watch up, for its past was compacted. Opened again from the present, it counts as opened anew,
    /// and is read.
    fn canceled(&self, sub: &Arc<Sub>) {
        lock(&sub.readers).opened += 1;
        if let Some(orders) = &lock(&self.state).orders {
            let _ = orders.send(sub.create(0));
        }
    }
}

impl State {
    fn end(&mut self, sub: &Sub) {
        if self.subs.remove(&sub.id).is_some()
            && let Some(orders) = &self.orders
        {
            let order = WatchOrder::Cancel(WatchCancel { watch_id: sub.id });
            let _ = orders.send(WatchRequest { order: Some(order) });
        }
    }

    /// Has nobody join a watch any more.
    fn unshare(&mut self, sub: &Arc<Sub>) {
        let key = (sub.key.clone(), sub.range);
        if self.read.get(&key).is_some_and(|shared| Arc::ptr_eq(shared, sub)) {
            self.read.remove(&key);
        }
    }
}

/// A stream that takes no more watches.
struct Stale;

impl Sub {
    fn create(&self, start: i64) -> WatchRequest {
        let create = WatchCreate {
            key: self.key.to_vec(),
            range_end: if self.range { wire::end_of(&self.key) } else { Vec::new() },
            start_revision: start,
            watch_id: self.id,
        };
        WatchRequest { order: Some(WatchOrder::Create(create)) }
    }

    /// Notes that it was opened at this revision, and says how often it was.
    fn opened(&self, revision: i64, now: Instant) -> u64 {
        let opened = {
            let mut readers = lock(&self.readers);
            (readers.opened, readers.since) = (readers.opened + 1, revision);
            readers.opened
        };
        self.tell_all(now, |news| (news.opened, news.since) = (news.opened + 1, revision));
        opened
    }

    fn tell(&self, events: Vec<Event>, now: Instant) {
        let changed = |event: Event| {
            let deleted = event.kind == DELETED;
            event.kv.map(|kv| (kv.mod_revision, Arc::new(Change { place: Place::read(&kv), deleted })))
        };
        let (revisions, changes): (Vec<i64>, Vec<_>) = events.into_iter().filter_map(changed).unzip();
        {
            // Whoever joins has to read what was told before.
            let mut readers = lock(&self.readers);
            readers.since = revisions.into_iter().fold(readers.since, i64::max);
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

    /// Tells all readers.
    fn tell_all(&self, now: Instant, tell: impl Fn(&mut News)) {
        let readers: Vec<_> = lock(&self.readers).all.values().cloned().collect();
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

/// Whether an eviction has closed the lock in the place of the claim whose key this is.
fn is_evicted(kv: &KeyValue) -> bool {
    matches!(Place::read(kv).standing, Standing::Closed { evicted: Some(_), .. })
}

/// Keeps the stream open while anybody watches.
async fn run(watcher: Weak<Watcher>, client: Arc<Client>, kick: Arc<Notify>) {
    let mut pause = BACKOFF.0;
    loop {
        let Some(orders) = watcher.upgrade().map(|watcher| watcher.orders()) else { return };
        let Some(mut orders) = orders else {
            kick.notified().await;
            continue;
        };
        let requests = futures_util::stream::poll_fn(move |context| orders.poll_recv(context));
        if let Ok((link, answers)) = client.watch(requests).await {
            let opened = client.env.now();
            // What panics there ends one stream.
            let _ = caught(follow(&watcher, &client, &link, answers)).await;
            if client.env.now().since(opened) > BACKOFF.1 {
                pause = BACKOFF.0;
            }
        }
        let Some(watcher) = watcher.upgrade() else { return };
        lock(&watcher.state).orders = None;
        drop(watcher);
        client.env.sleep_until(client.env.now() + pause).await;
        pause = (pause * 2).min(BACKOFF.1);
    }
}

impl Watcher {
    /// The orders for a new stream, with all that is watched; `None` when nothing is.
    fn orders(&self) -> Option<mpsc::UnboundedReceiver<WatchRequest>> {
        let mut state = lock(&self.state);
        if state.subs.is_empty() {
            return None;
        }
        let (sender, orders) = mpsc::unbounded_channel();
        for sub in state.subs.values() {
            let start = if lock(&sub.readers).opened == 0 { sub.start } else { 0 };
            let _ = sender.send(sub.create(start));
        }
        state.orders = Some(sender);
        Some(orders)
    }
}

/// Takes in what an open stream says, until it breaks.
async fn follow(
    watcher: &Weak<Watcher>,
    client: &Arc<Client>,
    link: &Arc<Link>,
    mut answers: Streaming<WatchResponse>,
) {
    let mut unread: Vec<Arc<Sub>> = Vec::new();
    loop {
        let answer = tokio::select! {
            biased;
            answer = answers.message() => answer,
            () = link.life().gone() => return,
            // Nothing more has come for now, so that what is to be read is read at once, not one by one.
            () = std::future::ready(()), if !unread.is_empty() => {
                let batch = unread.drain(..unread.len().min(READ_BATCH)).collect();
                let read = read_guarded(watcher.clone(), client.clone(), link.clone(), batch);
                client.env.process().spawn(read);
                continue;
            }
        };
        match answer {
            Ok(Some(answer)) => {
                let Some(watcher) = watcher.upgrade() else { return };
                match watcher.take(answer) {
                    Ok(read) => unread.extend(read),
                    Err(Stale) => return client.log_in_again(),
                }
            }
            Ok(None) => return,
            Err(status) => {
                let _ = client.watch_broke(link, status);
                return;
            }
        }
    }
}

/// Reads guarded keys whose watch was closed for a while, until that is done or the stream has broken again.
async fn read_guarded(watcher: Weak<Watcher>, client: Arc<Client>, link: Arc<Link>, batch: Vec<Arc<Sub>>) {
    let mut pause = BACKOFF.0;
    while link.life().is_open() && watcher.strong_count() > 0 {
        let reads = batch.iter().map(|sub| wire::get(&sub.key)).collect();
        if let Ok(answer) = client.read(reads).await {
            for (sub, found) in batch.iter().zip(answer.ranges) {
                let is_gone = found.kvs.first().is_none_or(is_evicted);
                if let (true, Purpose::Guard(gone)) = (is_gone, &sub.purpose) {
                    gone();
                }
            }
            return;
        }
        client.env.sleep_until(client.env.now() + pause).await;
        pause = (pause * 2).min(BACKOFF.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_joins_a_watch_knows_what_was_told_before() {
        let sub = Sub {
            id: 1,
            key: b"q/"[..].into(),
            range: true,
            start: 0,
            purpose: Purpose::Read,
            readers: Mutex::default(),
        };
        let now = Instant::from_nanos(0);
        let event = |mod_revision| {
            let kv = KeyValue { key: b"q/1f-0".to_vec(), mod_revision, ..KeyValue::default() };
            Event { kind: DELETED, kv: Some(kv) }
        };
        let join = || lock(&sub.readers).join().1;
        let of = |reader: &Reader| {
            let news = lock(&reader.news);
            (news.opened, news.since, news.changes.len())
        };
        let first = join();
        assert_eq!(of(&first), (0, 0, 0));
        sub.opened(5, now);
        sub.tell(vec![event(7), event(9)], now);
        let second = join();
        sub.tell(vec![event(11)], now);
        assert_eq!(of(&first), (1, 5, 3));
        // What it read before the ninth revision has to be read again.
        assert_eq!(of(&second), (1, 9, 1));
        // Each counts openings for itself: one that missed events, those as well.
        sub.tell((0..=MAX_EVENTS as i64).map(event).collect(), now);
        let before = of(&first).0;
        sub.opened(99, now);
        assert_eq!(of(&first), (before + 1, 99, 0));
    }
}
