//! The life of a connection: how it ends, and the watch that ends it when the server does not answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::FusedFuture;
use tokio::sync::Notify;

use crate::backends::times::LOOK_EVERY;
use crate::env::Env;

/// How often a connection that was left is looked at, whether anything is under way on it.
const LEFT_EVERY: Duration = Duration::from_millis(20);

/// How much is asked and answered on a connection.
#[derive(Default)]
pub(super) struct Traffic {
    /// Commands whose answer somebody waits for.
    waiting: AtomicU64,
    /// Whether anything was asked since the last answer. Stays when nobody waits any more: whoever gives up sooner than
    /// the server is known to hang would else never learn it, however often it asks.
    unanswered: AtomicBool,
    /// Parts of answers that came.
    heard: AtomicU64,
}

impl Traffic {
    /// Notes that somebody waits for an answer.
    pub(super) fn waiting(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.unanswered.store(true, Ordering::Relaxed);
        Waiting(self)
    }

    /// Notes that a part of an answer came, however large the rest is.
    pub(super) fn hear(&self) {
        self.heard.fetch_add(1, Ordering::Relaxed);
    }

    /// How much was heard.
    pub(super) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    /// Whether the server owes an answer.
    fn is_asked(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed) || self.is_waited_for()
    }

    fn is_waited_for(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

/// Whether a connection still lives, and how to end it.
#[derive(Default)]
pub(super) struct Life {
    /// It takes no new requests.
    left: AtomicBool,
    over: AtomicBool,
    ends: Notify,
    gone: Notify,
}

impl Life {
    /// Whether it takes new requests.
    pub(super) fn is_open(&self) -> bool {
        !self.left.load(Ordering::Acquire)
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Has new requests take another connection. Those under way are answered still, unless it is broken.
    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::Release);
        self.ends.notify_one();
    }

    /// Ends the connection; whoever waits for an answer is told that it broke.
    pub(super) fn close(&self) {
        self.over.store(true, Ordering::Release);
        self.leave();
        self.gone.notify_waiters();
    }

    /// Waits until somebody leaves or closes the connection. For its driver alone.
    async fn ending(&self) {
        self.ends.notified().await;
    }

    /// Waits until the connection is gone.
    pub(super) async fn gone(&self) {
        loop {
            let mut gone = std::pin::pin!(self.gone.notified());
            gone.as_mut().enable();
            if self.is_over() {
                return;
            }
            gone.await;
        }
    }
}

/// Says that a connection is gone when its driver is, also when that is because its runtime ended.
pub(super) struct Gone(pub(super) Arc<Life>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Somebody waits for an answer.
pub(super) struct Waiting<'a>(&'a Traffic);

impl Waiting<'_> {
    /// The answer came.
    pub(super) fn answered(self) {
        self.0.hear();
        self.0.unanswered.store(false, Ordering::Relaxed);
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Drives a connection until it breaks, is closed, or stops answering, or was left and has answered all. `probe` asks the server for something cheap: where
/// nobody waits any more for what was asked, it may be that a healthy server was told so and will never answer that. `silent` is called when it answers nothing.
pub(super) async fn drive<P: Future<Output = ()>>(
    driver: impl Future<Output = ()>,
    probe: impl Fn() -> P,
    silent: impl Fn(),
    env: Env,
    traffic: Arc<Traffic>,
    gone: Gone,
) {
    let mut driver = std::pin::pin!(driver.fuse());
    let mut probing = std::pin::pin!(None);
    let mut unanswered = None;
    'open: loop {
        let mut look = env.sleep_until(env.now() + LOOK_EVERY);
        loop {
            tokio::select! {
                biased;
                () = &mut driver => break 'open,
                () = gone.0.ending() => break 'open,
                () = probed(probing.as_mut()) => probing.set(None),
                () = &mut look => break,
            }
        }
        let (heard, asked) = (traffic.heard(), traffic.is_asked());
        if asked && unanswered == Some(heard) && traffic.is_waited_for() {
            silent();
            return;
        }
        if asked && !traffic.is_waited_for() {
            probing.set(Some(probe()));
        }
        unanswered = asked.then_some(heard);
    }
    // A server that stops in good order takes no more requests and answers those that it has; so may one that was left since it was slow for
    // somebody. What streams beside them goes on elsewhere after that.
    gone.0.leave();
    probing.set(None);
    let mut last = (traffic.heard(), env.now());
    while traffic.is_waited_for() && !gone.0.is_over() {
        tokio::select! {
            biased;
            () = gone.0.ending() => {}
            () = &mut driver, if !driver.is_terminated() => {}
            () = env.sleep_until(env.now() + LEFT_EVERY) => {}
        }
        let (heard, now) = (traffic.heard(), env.now());
        if heard != last.0 {
            last = (heard, now);
        } else if now.since(last.1) > 2 * LOOK_EVERY {
            silent();
            return;
        }
    }
}

/// Waits for the answer to a probe, for ever if there is none.
async fn probed<P: Future<Output = ()>>(probe: std::pin::Pin<&mut Option<P>>) {
    match probe.as_pin_mut() {
        Some(probe) => probe.await,
        None => std::future::pending().await,
    }
}
