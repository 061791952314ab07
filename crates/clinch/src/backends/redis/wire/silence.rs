//! Whether the server is silent: the looks at a connection, and what its driver has to say to them.
//!
//! The looks are the lane's, and the reading is the driver's, on a runtime that may stand still for a while. So it is no silence that
//! nothing was read, but that there was nothing to read.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use super::{HELD_BACK, Wire};
use crate::backends::times::LOOK_EVERY;
use crate::env::Env;
use crate::sync::lock;

/// How long before a look the driver is asked, where nothing was heard until then.
const READ_WITHIN: Duration = Duration::from_millis(100);

/// Ends a connection from which not a byte comes, so that a long answer may take its time; later, if nobody drives it and perhaps nobody read what it answered.
pub(super) async fn watch(wire: Weak<Wire>, env: Env) {
    let open = || wire.upgrade().filter(|wire| wire.is_open());
    let (mut waited, mut still) = (false, Duration::ZERO);
    loop {
        env.sleep_until(env.now() + (LOOK_EVERY - READ_WITHIN)).await;
        let Some(wire) = open() else { return };
        if waited && !wire.heard.load(Ordering::Relaxed) {
            wire.looks.asked.fetch_add(1, Ordering::Relaxed);
            let driver = lock(&wire.state).driver.clone();
            driver.iter().for_each(Waker::wake_by_ref);
        }
        drop(wire);
        env.sleep_until(env.now() + READ_WITHIN).await;
        let Some(wire) = open() else { return };
        // This first: what it read before, it has noted.
        let driven = wire.looks.are_answered();
        let heard = wire.heard.swap(false, Ordering::Relaxed);
        let waits = !lock(&wire.state).waiting.is_empty();
        if !waits || !waited || heard {
            still = Duration::ZERO;
        } else if driven {
            return wire.end("the server did not answer");
        } else if still >= HELD_BACK {
            return wire.end("nobody drives it");
        } else {
            still += LOOK_EVERY;
        }
        waited = waits;
    }
}

/// What the looks ask the driver: whether there is nothing to read. Both are numbers of looks.
#[derive(Default)]
pub(super) struct Looks {
    asked: AtomicU32,
    answered: AtomicU32,
}

impl Looks {
    fn are_answered(&self) -> bool {
        self.answered.load(Ordering::Acquire) == self.asked.load(Ordering::Relaxed)
    }
}

/// What the driver knows of its runtime: the turn that it waits for.
#[derive(Default)]
pub(super) struct Turns(Option<Arc<Turn>>);

/// A turn of the runtime since a look, over when it has looked what came. Until then a socket may not show what has come.
struct Turn {
    look: u32,
    driver: Waker,
    over: AtomicBool,
}

impl Turns {
    /// Notes that there was nothing to read; once that is sure, it is told to the last look.
    pub(super) fn read_in_vain(&mut self, looks: &Looks, cx: &Context<'_>) {
        if looks.are_answered() {
            return;
        }
        let look = looks.asked.load(Ordering::Relaxed);
        match self.0.take().filter(|turn| turn.look == look) {
            None => {
                let turn = Arc::new(Turn { look, driver: cx.waker().clone(), over: AtomicBool::new(false) });
                self.0 = Some(turn.clone());
                // Tokio wakes whoever yields after it has looked.
                let waker = Waker::from(turn);
                let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&waker));
            }
            Some(turn) if turn.over.load(Ordering::Acquire) => looks.answered.store(look, Ordering::Release),
            waits => self.0 = waits,
        }
    }
}

impl Wake for Turn {
    fn wake(self: Arc<Self>) {
        self.over.store(true, Ordering::Release);
        self.driver.wake_by_ref();
    }
}
