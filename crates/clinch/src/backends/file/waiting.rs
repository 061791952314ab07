//! How a queued claim waits: for the one event that concerns it, and from time to time for none.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use super::dir;
use super::lock_file::Live;
use super::record::Record;
use super::slot::Slot;
use super::store::File;
use super::times::{READ_PER_LOOK, RECHECK, RECHECK_AFTER_EVENT, RECHECK_UNWATCHED};
use crate::claim::Mode;
use crate::error::Result;
use crate::queue::admits;
use crate::sync::lock;

/// What a waiter waits for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Await {
    /// The lock is kept closed for so long.
    Opening(Duration),
    /// This file's close.
    Close(PathBuf),
}

impl File {
    /// What a queued claim has to wait for; `None` when it can be granted.
    pub(super) fn awaited(&self, slot: &Slot) -> Result<Option<Await>> {
        // Behind one that waits, and an exclusive claim behind any: it waits for that, and need not know more.
        if let Some(before) = slot.file.live_at(slot.ticket - 1)?
            && let Some(record) = before.record.as_ref().filter(|_| before.counts(self.env.now()))
            && (slot.mode == Mode::Exclusive || record.is_waiting())
        {
            return Ok(Some(self.close_of(slot, before.ticket, record.is_waiting())));
        }
        let ahead = slot.before(self.env.now())?;
        let blocked = !admits(ahead.iter().map(Live::mode), slot.mode);
        if let (true, Some(before)) = (blocked, ahead.last()) {
            let is_waiting = before.record.as_ref().is_some_and(Record::is_waiting);
            return Ok(Some(self.close_of(slot, before.ticket, is_waiting)));
        }
        Ok(self.header(slot)?.and_then(|header| self.closed_for(&header)).map(Await::Opening))
    }

    /// The file whose close tells of the end of the claim before this one. A holder's release closes the lock file; a
    /// waiter's end closes its bell, and so does its later release. Were all waiters to watch the lock file, each release
    /// would wake them all.
    fn close_of(&self, slot: &Slot, before: u64, is_waiting: bool) -> Await {
        Await::Close(if is_waiting {
            self.dir.bell_path(dir::bell(slot.hash, before))
        } else {
            self.dir.lock_path(&slot.file_name)
        })
    }

    /// Waits for what `awaited` says, or for the next look.
    pub(super) async fn wait_in(&self, slot: &Mutex<Slot>) -> Result<()> {
        let Some(awaited) = self.awaited(&lock(slot))? else {
            if lock(slot).hindered {
                self.pause(RECHECK_UNWATCHED).await;
            }
            return Ok(());
        };
        let path = match &awaited {
            Await::Opening(left) => {
                self.pause((*left).min(RECHECK)).await;
                return Ok(());
            }
            Await::Close(path) => path,
        };
        let Ok(watch) = self.watcher.watch(path, self.env.lane()) else {
            let pause = unwatched(&lock(slot))?;
            self.pause(pause).await;
            return Ok(());
        };
        // What happened before the watch began raised no event.
        if self.awaited(&lock(slot))? != Some(awaited) {
            return Ok(());
        }
        let (recheck, mut looks) = {
            let slot = lock(slot);
            (slot.recheck, slot.behind / READ_PER_LOOK)
        };
        let recheck = loop {
            tokio::select! {
                () = watch.closed() => break RECHECK_AFTER_EVENT,
                () = self.env.sleep_until(self.env.now() + recheck) => {}
            }
            if looks == 0 {
                break (recheck * 2).min(RECHECK);
            }
            // Far back in the queue a look costs much and finds nothing: that somebody polls is enough to show.
            looks -= 1;
            lock(slot).looked = self.env.now();
        };
        let mut slot = lock(slot);
        slot.recheck = recheck;
        slot.watch = Some(watch);
        Ok(())
    }

    /// Sleeps from now on: a look may itself take longer than the pause. Whoever polls gets its turn in any case, to see signals and
    /// time-outs.
    async fn pause(&self, pause: Duration) {
        let until = self.env.now() + pause;
        tokio::task::yield_now().await;
        self.env.sleep_until(until).await;
    }
}

/// How long to wait for the next look where nothing can wake the waiter: the longer, the more are ahead of it. Were all of a thousand to
/// look as often as the next in line, they would have time for nothing else.
fn unwatched(slot: &Slot) -> Result<Duration> {
    let first = slot.file.first_live()?.map_or(slot.ticket, |first| first.ticket);
    let ahead = u32::try_from(slot.ticket.saturating_sub(first)).unwrap_or(u32::MAX);
    Ok(RECHECK_UNWATCHED.saturating_mul(ahead.max(1)).min(RECHECK))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Waker};

    use super::super::dir::{Dir, Options};
    use super::*;
    use crate::clock::{Clock, Instant};
    use crate::env::Env;
    use crate::lane::Lane;
    use crate::locks::Locks;
    use crate::net::Tcp;
    use crate::random::Random;

    thread_local! {
        static AHEAD: Cell<Duration> = const { Cell::new(Duration::ZERO) };
        static STEP: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    /// A clock on which each look takes as long as `STEP`.
    fn clock() -> Instant {
        AHEAD.set(AHEAD.get() + STEP.get());
        Clock::host().now() + AHEAD.get()
    }

    /// Far back in a queue a look takes longer than the pause after it, and neither signals nor time-outs are seen any more.
    #[tokio::test]
    async fn a_waiter_whose_looks_take_long_lets_others_run() {
        let dir = tempfile::tempdir().unwrap();
        let lane = Lane::thread();
        let tcp = Arc::new(Tcp::new(Clock::host(), lane.clone()));
        let env = Env::new(Clock::told(clock), Random::system(), lane, tcp);
        let file = File::new(Dir::open(dir.path(), Options::default()).unwrap(), env).unwrap();
        let locks = Locks::new(file.clone(), file.env.clone());
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        let slot = file.slots.lock().unwrap().get(&guard.claim_id()).unwrap().clone();
        lock(&slot).hindered = true;
        STEP.set(Duration::from_secs(2));
        let polled = pin!(file.wait_in(&slot)).poll(&mut Context::from_waker(Waker::noop()));
        STEP.set(Duration::ZERO);
        assert!(polled.is_pending());
    }
}
