//! Watches: one stream for all of a client's, on the background lane.
//!
//! Every watch begins at the present, since etcd serves one that begins in the past from a loop every 100 ms; what
//! happened before is read by whoever cares, once the watch is known to be open. That is also how a stream that broke,
//! or a past that was compacted, is survived: open again, then read.

mod feed;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
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

pub(super) use feed::{Change, News};
use feed::{Feed, Reader};

/// Pause before a stream that broke is opened again, doubling from the first to the second.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// How long a server is left alone that does not keep to the numbers of watches: each of all that are held would be asked for anew.
const LEFT_ALONE: Duration = Duration::from_secs(60);

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
    read: HashMap<(Arc<[u8]>, bool), ReadBy>,
    /// Leads into the open stream.
    orders: Option<mpsc::UnboundedSender<WatchRequest>>,
    /// Whether a watch was refused, and none opened since.
    denied: bool,
    /// Why nobody can watch here, until a stream is opened that is of use.
    useless: Option<Error>,
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
}

/// What a watch is for. Each held lock has one that guards, so that is to be small.
enum Purpose {
    /// Somebody reads the events.
    Read(Arc<Feed>),
    /// The key is there, and `gone` is called once it is not, or says that its claim was evicted.
    Guard {
        gone: Box<dyn Fn() + Send + Sync>,
        /// How often it was opened.
        opened: AtomicU64,
    },
}

/// A watch, and what its readers are told.
type ReadBy = (Arc<Sub>, Arc<Feed>);

/// A watch that is open for as long as this lives.
pub(super) struct Subscription {
    watcher: Weak<Watcher>,
    sub: Arc<Sub>,
    feed: Arc<Feed>,
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
        self.reader.news()
    }

    /// Since when nobody has taken what was told.
    pub(super) fn unread_since(&self) -> Option<Instant> {
        self.reader.unread_since()
    }

    /// Waits for something to be told.
    pub(super) async fn told(&self) {
        self.reader.told().await;
    }

    /// The key that is watched, or where the range begins.
    pub(super) fn key(&self) -> &[u8] {
        &self.sub.key
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher.upgrade() {
            watcher.leave(self);
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
        let (sub, feed) = match state.read.get(&shared).cloned() {
            Some(open) => open,
            None => {
                if let Some(error) = &state.useless {
                    return Err(error.again());
                }
                let feed = Arc::<Feed>::default();
                let purpose = Purpose::Read(feed.clone());
                let sub = self.begin(&mut state, shared.0.clone(), range, 0, purpose)?;
                state.read.insert(shared, (sub.clone(), feed.clone()));
                (sub, feed)
            }
        };
        // With the state locked, so that nobody ends it meanwhile.
        let (number, reader) = feed.join();
        Ok(Subscription { watcher: Arc::downgrade(self), sub, feed, number, reader })
    }

    /// Calls `gone` once when a key that was last seen at this revision is not there any more.
    pub(super) fn guard(
        self: &Arc<Watcher>,
        key: Arc<[u8]>,
        seen: i64,
        gone: impl Fn() + Send + Sync + 'static,
    ) -> Result<KeyGuard> {
        let purpose = Purpose::Guard { gone: Box::new(gone), opened: AtomicU64::new(0) };
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
        let sub = Arc::new(Sub { id: state.last_id, key, range, start, purpose });
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

    /// Ends a watch with its last reader.
    fn leave(&self, subscription: &Subscription) {
        let mut state = lock(&self.state);
        if subscription.feed.leave(subscription.number) {
            state.unshare(&subscription.sub);
            state.end(&subscription.sub);
        }
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
        if answer.created && answer.watch_id == 0 {
            return Err(self.renumbered());
        }
        let Some(sub) = lock(&self.state).subs.get(&answer.watch_id).cloned() else { return Ok(None) };
        if answer.canceled {
            self.canceled(&sub);
            return Ok(None);
        }
        if answer.created {
            let mut state = lock(&self.state);
            (state.denied, state.useless) = (false, None);
            drop(state);
            let again = match &sub.purpose {
                Purpose::Guard { opened, .. } => opened.fetch_add(1, Ordering::Relaxed) > 0 || sub.start == 0,
                Purpose::Read(feed) => {
                    feed.opened(wire::revision(answer.header.as_ref()), self.client.env.now());
                    false
                }
            };
            return Ok(again.then_some(sub));
        }
        match &sub.purpose {
            Purpose::Guard { gone, .. } => {
                let ends = |event: &Event| event.kind == DELETED || event.kv.as_ref().is_some_and(is_evicted);
                if answer.events.iter().any(ends) {
                    gone();
                }
            }
            Purpose::Read(feed) => feed.tell(answer.events, self.client.env.now()),
        }
        Ok(None)
    }

    /// The server opens no watch for us: because the login has run out with which the stream was opened, or because we
    /// may not watch at all. Not every version says which watch it means.
    fn denied(&self, reason: &str) -> Result<(), Stale> {
        let mut state = lock(&self.state);
        state.denied = !state.denied;
        if state.denied {
            return Err(Stale::LoggedIn);
        }
        let refused = Error::new(
            ErrorKind::Refused,
            format!(
                "etcd does not let this user watch the lock: {reason}; see the documentation of the etcd store"
            ),
        );
        // Who comes later asks anew.
        self.refuse(&mut state, &refused);
        Ok(())
    }

    /// Whoever answers gives watches numbers of its own, and ours begin with 1: nobody knows what its news are of.
    fn renumbered(&self) -> Stale {
        let error = Error::new(
            ErrorKind::Unsupported,
            "what answers is no etcd itself: it gives watches numbers of its own, as etcd's grpc-proxy does, so that nobody knows which lock \
             was released; name the members of etcd in the URL",
        );
        let mut state = lock(&self.state);
        // Those for whom it was open before hear nothing any more, either.
        for (_, (_, feed)) in state.read.drain() {
            feed.refuse(&error, self.client.env.now());
        }
        state.useless = Some(error).filter(|_| !self.client.has_others());
        Stale::Renumbered
    }

    /// Tells those who wait for a watch to be opened that it is not.
    fn refuse(&self, state: &mut State, why: &Error) {
        for (_, (_, feed)) in state.read.extract_if(|_, (_, feed)| feed.times_opened() == 0) {
            feed.refuse(why, self.client.env.now());
        }
    }

    /// The server gave a watch up, for its past was compacted. Opened again from the present, it counts as opened anew,
    /// and is read.
    fn canceled(&self, sub: &Arc<Sub>) {
        if let Purpose::Guard { opened, .. } = &sub.purpose {
            opened.fetch_add(1, Ordering::Relaxed);
        }
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
        if self.read.get(&key).is_some_and(|(shared, _)| Arc::ptr_eq(shared, sub)) {
            self.read.remove(&key);
        }
    }
}

/// Why a stream is of no use.
enum Stale {
    /// The login with which it was opened takes no more watches.
    LoggedIn,
    /// The server does not keep to our numbers.
    Renumbered,
}

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

    /// How often it was opened.
    fn times_opened(&self) -> u64 {
        match &self.purpose {
            Purpose::Read(feed) => feed.times_opened(),
            Purpose::Guard { opened, .. } => opened.load(Ordering::Relaxed),
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
        let is_useless = {
            let mut state = lock(&watcher.state);
            state.orders = None;
            state.useless.is_some()
        };
        drop(watcher);
        let pause_now = if is_useless { LEFT_ALONE } else { pause };
        client.env.sleep_until(client.env.now() + pause_now).await;
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
            let start = if sub.times_opened() == 0 { sub.start } else { 0 };
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
                    Err(Stale::LoggedIn) => return client.log_in_again(),
                    Err(Stale::Renumbered) => return client.leave(link),
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
                if let (true, Purpose::Guard { gone, .. }) = (is_gone, &sub.purpose) {
                    gone();
                }
            }
            return;
        }
        client.env.sleep_until(client.env.now() + pause).await;
        pause = (pause * 2).min(BACKOFF.1);
    }
}
