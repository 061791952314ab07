//! Asking several servers at once, and what goes on when nobody waits for it any more.

use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, Stream, StreamExt};
use tokio::sync::Notify;

use super::node::in_millis;
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtWork, apart, lock};

/// How often what goes on in the background is looked at, so that handing it over costs no wake.
const SWEEP_EVERY: Duration = Duration::from_millis(100);

type Asked<T> = Pin<Box<dyn Future<Output = (usize, Result<T>)> + Send>>;

/// One request to several servers. Each has a time-out of its own, after which it counts as one that failed; the request
/// goes on until the round is dropped.
pub(super) struct Round<'a, T> {
    env: &'a Env,
    begun: Instant,
    pending: FuturesUnordered<Asked<T>>,
    /// By when each server must have answered; `None`: it has, or was not asked.
    due: Vec<Option<Instant>>,
    /// Until when nobody is late for as long as fewer than so many servers have answered.
    lenient: Option<(Instant, usize)>,
}

impl<'a, T: Send + 'static> Round<'a, T> {
    /// A round among so many servers, which begins now.
    pub(super) fn new(env: &'a Env, nodes: usize) -> Round<'a, T> {
        let (begun, pending) = (env.now(), FuturesUnordered::new());
        Round { env, begun, pending, due: vec![None; nodes], lenient: None }
    }

    /// Lets nobody be late before `silence` has passed or this many servers have answered.
    pub(super) fn lenient(mut self, silence: Duration, quorum: usize) -> Round<'a, T> {
        self.lenient = Some((self.begun + silence, quorum));
        self
    }

    /// When somebody is late, if nobody answers before; `None`: nobody is waited for.
    fn next_due(&self) -> Option<Instant> {
        let next = self.due.iter().flatten().min().copied()?;
        Some(self.lenient.map_or(next, |(until, _)| next.max(until)))
    }

    /// Asks a server. Nothing is sent before [`Round::answers`].
    pub(super) fn ask(
        &mut self,
        node: usize,
        patience: Duration,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) {
        if let Some(due) = self.due.get_mut(node) {
            *due = Some(self.begun + patience);
            // An async block would have room for the request twice.
            self.pending.push(Box::pin(request.map(move |answer| (node, answer))));
        }
    }

    /// Gives one answer of each server to `take`, as they come, until it says that it is enough.
    ///
    /// # Cancel safety
    ///
    /// What was sent may be applied.
    pub(super) async fn answers(&mut self, mut take: impl FnMut(usize, Result<T>) -> bool) {
        while let Some(next) = self.next_due() {
            let mut overdue = pin!(self.env.sleep_until(next));
            loop {
                tokio::select! {
                    biased;
                    Some((node, answer)) = self.pending.next() => {
                        // One that is overdue was told already.
                        let Some(Some(_)) = self.due.get_mut(node).map(Option::take) else { continue };
                        if take(node, answer) {
                            return;
                        }
                        if self.due.iter().all(Option::is_none) {
                            return;
                        }
                        if let Some((_, missing)) = &mut self.lenient {
                            *missing = missing.saturating_sub(1);
                            if *missing == 0 {
                                self.lenient = None;
                                break;
                            }
                        }
                    }
                    () = &mut overdue => break,
                }
            }
            let now = self.env.now();
            self.lenient.take_if(|(until, _)| *until <= now);
            if self.lenient.is_some() {
                continue;
            }
            for node in 0..self.due.len() {
                let late = self.due.get_mut(node).and_then(|due| due.take_if(|due| *due <= now));
                if late.is_some() && take(node, Err(unanswered(now.since(self.begun)))) {
                    return;
                }
            }
        }
    }

    /// Whether a server was asked and may still answer in time.
    pub(super) fn is_asking(&self, node: usize) -> bool {
        self.due.get(node).is_some_and(Option::is_some)
    }

    /// What is still under way: the answers of servers, as they come.
    pub(super) fn late(self) -> impl Stream<Item = (usize, Result<T>)> + Send + use<T> {
        self.pending
    }

    /// What is still under way, if anything is.
    pub(super) fn rest(self) -> Option<impl Future<Output = ()> + Send + use<T>> {
        (!self.pending.is_empty()).then(|| self.late().for_each(|_| std::future::ready(())))
    }
}

fn unanswered(time: Duration) -> Error {
    let time = humantime::format_duration(in_millis(time));
    Error::new(ErrorKind::Unknown, format!("did not answer within {time}"))
}

/// What is to be brought to an end although nobody waits for it: answers to releases that a quorum did not need.
pub(super) struct Background {
    env: Env,
    state: Mutex<Arrived>,
    /// Somebody waits for it after all.
    hurry: Notify,
    /// Tells that nothing is left.
    done: Notify,
}

#[derive(Default)]
struct Arrived {
    rests: Vec<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// How many have not come to their end, those that are no longer in `rests` included.
    left: usize,
    /// Whether a task brings them to their end.
    running: AtWork,
}

impl Background {
    pub(super) fn new(env: Env) -> Arc<Background> {
        Arc::new(Background { env, state: Mutex::default(), hurry: Notify::new(), done: Notify::new() })
    }

    /// Takes over. What has been sent is sent; that the rest is looked at may take a moment.
    pub(super) fn take_over(self: &Arc<Background>, rest: impl Future<Output = ()> + Send + 'static) {
        let left = Rest(Arc::downgrade(self));
        let running = {
            let mut state = lock(&self.state);
            state.left += 1;
            state.rests.push(Box::pin(async move {
                let _left = left;
                rest.await;
            }));
            state.running.begin()
        };
        if let Some(running) = running {
            // Without a background thread the leases run out by themselves.
            let background = self.clone();
            let _ = self.env.lane().run(move || background.clone().sweep(running.clone()));
        }
    }

    /// Waits until nothing is left.
    pub(super) async fn finish(&self) {
        loop {
            let mut done = pin!(self.done.notified());
            done.as_mut().enable();
            if lock(&self.state).left == 0 {
                return;
            }
            apart(|| self.hurry.notify_one());
            done.await;
        }
    }

    /// Runs until there is nothing left.
    async fn sweep(self: Arc<Background>, _running: Arc<()>) {
        let mut under_way = FuturesUnordered::new();
        loop {
            {
                let mut state = lock(&self.state);
                under_way.extend(state.rests.drain(..));
                if under_way.is_empty() {
                    state.running.end();
                    return;
                }
            }
            let mut end = pin!(self.env.sleep_until(self.env.now() + SWEEP_EVERY));
            loop {
                tokio::select! {
                    biased;
                    () = &mut end => break,
                    () = self.hurry.notified() => break,
                    Some(()) = under_way.next() => {}
                }
            }
        }
    }
}

/// What is left to do, for as long as this lives.
struct Rest(Weak<Background>);

impl Drop for Rest {
    fn drop(&mut self) {
        // In a forked child it may be locked for ever.
        let Some(background) = self.0.upgrade().filter(|background| !background.env.process().is_left())
        else {
            return;
        };
        let left = {
            let mut state = lock(&background.state);
            state.left -= 1;
            state.left
        };
        if left == 0 {
            apart(|| background.done.notify_waiters());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::Lane;

    /// What ends in a panic takes along what goes on beside it, but nothing that comes later.
    #[test]
    fn what_goes_on_in_the_background_goes_on_after_a_panic() {
        let background = Background::new(Env::host(Lane::thread()));
        let (tell, told) = std::sync::mpsc::channel();
        let end = std::time::Instant::now() + Duration::from_secs(30);
        background.take_over(async { std::panic::resume_unwind(Box::new("a request panics")) });
        loop {
            let tell = tell.clone();
            background.take_over(async move { tell.send(()).unwrap() });
            if told.recv_timeout(SWEEP_EVERY).is_ok() {
                return;
            }
            assert!(std::time::Instant::now() < end, "nothing goes on any more");
        }
    }
}
