//! Turns that nobody takes. A waiter whose future is kept but not polled would block everybody behind it: its process lives,
//! so its byte stays locked, and there is no lease that could run out.
//!
//! Each client looks after its own waiters, on the lane: in memory only, as long as they look every now and then. Where one
//! is silent and its turn has come, the turn goes on to the next after [`TAKE_WITHIN`]; a waiter that is
//! polled later takes a new place, at the end.

use std::sync::{Arc, Mutex, Weak};

use super::slot::Slot;
use super::store::File;
use super::times::{LOOK_AT_SILENT, SILENT};
use crate::backend::TAKE_WITHIN;
use crate::claim::ByClaim;
use crate::clock::Instant;
use crate::error::Result;
use crate::sync::{lock, try_lock};

/// Claims of one client.
type Slots = ByClaim<Arc<Mutex<Slot>>>;

impl File {
    /// Has somebody look after the turns of these claims from now on. The slots are locked.
    pub(super) fn mind_turns(&self, _slots: &Slots) {
        if let Some(minding) = lock(&self.minded).begin() {
            // Without a background thread nobody does.
            let this = self.this.clone();
            let _ = self.env.lane().run(move || mind(this.clone(), minding.clone()));
        }
    }

    /// Looks after all turns; says when to look again, unless nobody waits.
    fn review_turns(&self) -> Option<Instant> {
        let now = self.env.now();
        let (mut silent, mut next) = (Vec::new(), None);
        {
            let slots = lock(&self.slots);
            for slot in slots.values() {
                // One that is locked at this moment is taking a step.
                let looked = match try_lock(slot) {
                    Some(slot) if slot.granted || slot.left => continue,
                    Some(slot) => slot.looked,
                    None => now,
                };
                let mut look = looked + SILENT;
                if look <= now {
                    silent.push(slot.clone());
                    look = now + LOOK_AT_SILENT;
                }
                next = Some(next.map_or(look, |next: Instant| next.min(look)));
            }
            if next.is_none() {
                lock(&self.minded).end();
            }
        }
        for slot in silent {
            // Where the file cannot be read, the waiter will say so.
            let _ = self.pass_on(&mut lock(&slot), now);
        }
        next
    }

    /// Gives up the place of a silent waiter whose turn came long ago.
    fn pass_on(&self, slot: &mut Slot, now: Instant) -> Result<()> {
        if slot.granted || slot.left || slot.looked + SILENT > now {
            return Ok(());
        }
        if self.awaited(slot)?.is_some() {
            slot.turn = None;
            return Ok(());
        }
        let since = *slot.turn.get_or_insert(now);
        if now.since(since) >= TAKE_WITHIN { slot.leave() } else { Ok(()) }
    }
}

/// Looks after turns until nobody waits.
async fn mind(file: Weak<File>, _minding: Arc<()>) {
    while let Some(file) = file.upgrade()
        && let Some(next) = file.review_turns()
    {
        let sleep = file.env.sleep_until(next);
        drop(file);
        sleep.await;
    }
}
