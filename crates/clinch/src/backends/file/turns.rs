//! Turns that nobody takes. A waiter whose future is kept but not polled would block everybody behind it: its process lives,
//! so its byte stays locked, and there is no lease that could run out.
//!
//! Each client looks after its own waiters, on the lane: in memory only, as long as they look every now and then. Where one
//! is silent and its turn has come, the turn goes on to the next after [`TAKE_WITHIN`]; a waiter that is
//! polled later takes a new place, at the end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use super::lock_file::Live;
use super::slot::Slot;
use super::store::File;
use super::times::{LOOK_AT_SILENT, SILENT};
use crate::backend::TAKE_WITHIN;
use crate::claim::ByClaim;
use crate::clock::Instant;
use crate::error::Result;
use crate::queue::admits;
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

    /// Those who have not looked for long, and when to look again, unless nobody waits. `is_late`: nobody could be woken, so all have just looked.
    fn silent(&self, is_late: bool) -> (Vec<Arc<Mutex<Slot>>>, Option<Instant>) {
        let now = self.env.now();
        let (mut silent, mut next) = (Vec::new(), None);
        let slots = lock(&self.slots);
        for slot in slots.values() {
            // One that is locked at this moment is taking a step.
            let looked = match try_lock(slot) {
                Some(slot) if slot.granted || slot.left => continue,
                Some(mut slot) => {
                    if is_late {
                        slot.looked = now;
                    }
                    slot.looked
                }
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
        (silent, next)
    }

    /// Gives up the places of silent waiters of one lock whose turns came long ago. They are in their order, and the file is read once for all.
    fn pass_on(&self, silent: &[(u64, Arc<Mutex<Slot>>)]) -> Result<()> {
        let Some((last, slot)) = silent.last() else { return Ok(()) };
        let now = self.env.now();
        let (claims, is_closed) = {
            let slot = lock(slot);
            let mut claims = slot.file.live(last - 1)?;
            claims.retain(|claim| claim.counts(now));
            (claims, self.header(&slot)?.is_some_and(|header| self.closed_for(&header).is_some()))
        };
        for (ticket, slot) in silent {
            let mut slot = lock(slot);
            if slot.granted || slot.left || slot.looked + SILENT > now {
                continue;
            }
            let ahead = claims.iter().take_while(|claim| claim.ticket < *ticket);
            if is_closed || !admits(ahead.map(Live::mode), slot.mode) {
                slot.turn = None;
            } else if now.since(*slot.turn.get_or_insert(now)) >= TAKE_WITHIN {
                slot.leave()?;
            }
        }
        Ok(())
    }
}

/// Waiters by their files, and in their order.
fn by_file(waiters: Vec<Arc<Mutex<Slot>>>) -> impl Iterator<Item = Vec<(u64, Arc<Mutex<Slot>>)>> {
    let mut files: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for waiter in waiters {
        let (stamp, ticket) = {
            let slot = lock(&waiter);
            (slot.file.stamp(), slot.ticket)
        };
        // Where the file cannot be read, the waiter will say so.
        if let Ok(stamp) = stamp {
            files.entry(stamp.identity).or_default().push((ticket, waiter));
        }
    }
    files.into_values().map(|mut waiters| {
        waiters.sort_unstable_by_key(|(ticket, _)| *ticket);
        waiters
    })
}

/// Looks after turns until nobody waits.
async fn mind(file: Weak<File>, _minding: Arc<()>) {
    let mut is_late = false;
    while let Some(file) = file.upgrade() {
        let (silent, next) = file.silent(is_late);
        let Some(next) = next else { return };
        for waiters in by_file(silent) {
            // As above.
            let _ = file.pass_on(&waiters);
            // All of this client is woken and renewed here.
            tokio::task::yield_now().await;
        }
        let (sleep, env) = (file.env.sleep_until(next), file.env.clone());
        drop(file);
        sleep.await;
        is_late = env.now().since(next) > LOOK_AT_SILENT;
    }
}
