//! A claim of this process: how it is looked after, and leaves.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::dir::{self, Stamp};
use super::header::Header;
use super::held::{World, kept_busy};
use super::layout;
use super::lock_file::{Live, LockFile, in_file};
use super::store::File;
use super::times::{RECHECK, RECHECK_UNWATCHED, STAMP_GRAIN};
use super::watch::Watch;
use crate::backend::{ClaimState, Freed, NOTICE, Renewal};
use crate::claim::{Claim, Loss, LossKind, Mode};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::queue::admits;
use crate::sync::lock;

/// Whether this process has given a claim an end, as it may do with its own: another may end that claim, too.
pub(super) static GIVES_ENDS: AtomicBool = AtomicBool::new(false);

/// A claim of this process: its byte stays locked for as long as this lives.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) file: LockFile,
    pub(super) name: LockName,
    pub(super) file_name: String,
    pub(super) hash: u128,
    pub(super) ticket: u64,
    pub(super) mode: Mode,
    pub(super) granted: bool,
    pub(super) granted_at: Instant,
    /// Whether others were in the file when it came, so that its record has a place of its own.
    pub(super) placed: bool,
    /// Whether the holder was told that an operator ends its claim.
    pub(super) told: bool,
    /// Since when its record cannot be read.
    pub(super) unreadable: Option<Instant>,
    /// How many claims it had to read to know that it has to wait.
    pub(super) behind: usize,
    /// When its waiter last looked.
    pub(super) looked: Instant,
    /// Since when its turn has come and nobody has taken it.
    pub(super) turn: Option<Instant>,
    /// Whether its place went on to the next.
    pub(super) left: bool,
    /// Whether it could not take its turn since a process that is stopped has its record.
    pub(super) hindered: bool,
    /// What guards its changes once other processes may have the description of `file` too: a byte that is locked there when this
    /// process is killed stays locked for as long as any of them lives.
    pub(super) own: Option<LockFile>,
    /// Its close wakes the successor. A claim that was granted at once has none: its successor watches the lock file.
    pub(super) bell: Option<OwnedFd>,
    /// When to look again without an event.
    pub(super) recheck: Duration,
    /// What the file's name led to when the claim was last found to be in order.
    pub(super) checked: Option<Stamp>,
    /// The last watch of the wait. Ending one costs more than a hand-over, so it is left to the release.
    pub(super) watch: Option<Watch>,
}

impl Slot {
    pub(super) fn new(
        file: LockFile,
        claim: &Claim,
        world: World<'_>,
        ticket: u64,
        granted: bool,
        bell: Option<OwnedFd>,
        now: Instant,
    ) -> Slot {
        let (name, mode) = (claim.name.clone(), claim.mode);
        let World { file: file_name, hash, .. } = world;
        Slot {
            file,
            name,
            file_name,
            hash,
            ticket,
            mode,
            granted,
            granted_at: now,
            placed: false,
            told: false,
            unreadable: None,
            behind: 0,
            looked: now,
            turn: None,
            left: false,
            hindered: false,
            own: None,
            bell,
            recheck: RECHECK,
            checked: None,
            watch: None,
        }
    }

    /// The claims ahead that it has to know of, in order; the last is the nearest. The first and the one right before mostly
    /// tell that it has to wait; all would be a thousand, for each of a thousand waiters that look.
    pub(super) fn before(&self, now: Instant) -> Result<Vec<Live>> {
        let blocks = |live: &Live| !admits([live.mode()], self.mode);
        if let Some(near) = self.file.live_at(self.ticket - 1)?.filter(|near| near.counts(now)) {
            let first = self.file.first_live()?;
            let first = first.filter(|first| first.ticket < near.ticket && first.counts(now));
            if blocks(&near) || first.as_ref().is_some_and(blocks) {
                return Ok(first.into_iter().chain([near]).collect());
            }
        }
        let mut ahead = self.file.live(self.ticket - 1)?;
        ahead.retain(|live| live.counts(now));
        Ok(ahead)
    }

    /// The file, in a description that nobody else has: for bytes that guard a short change.
    pub(super) fn guards(&self) -> &LockFile {
        self.own.as_ref().unwrap_or(&self.file)
    }

    /// Gives up the place of a claim that waits.
    pub(super) fn leave(&mut self) -> Result<()> {
        self.left = true;
        self.file.unlock_all()?;
        // Its close wakes the next.
        self.bell = None;
        Ok(())
    }
}

impl File {
    /// Why a claim of this process does not count any more, if so. Whoever evicts it learns that it was told.
    pub(super) fn lost(&self, slot: &mut Slot) -> Result<Option<Loss>> {
        let lost = |why: &'static str| Ok(Some(Loss::new(LossKind::Deleted, why)));
        // Whoever gave up its privileges may not look any more, but has the file.
        let leads = self.leads_to(&slot.file_name, &slot.file);
        if matches!(leads, Ok(false)) {
            return lost("somebody moved or removed the lock file or its directory");
        }
        let Some(record) = slot.file.record(slot.ticket)? else {
            // Whoever rewrites it may have been stopped in the middle.
            let since = *slot.unreadable.get_or_insert(self.env.now());
            if self.env.now().since(since) >= RECHECK_UNWATCHED {
                return lost("somebody damaged the lock file: the claim's record is gone");
            }
            return Err(unreadable());
        };
        slot.unreadable = None;
        if !record.is_ending() {
            return leads.map(|_| None);
        }
        if !slot.told {
            slot.told = true;
            // Who works under a claim that was given an end may be another, who was not told. Without the word, as where it fails, the
            // evictor waits for the end that it wrote.
            if record.kept_by().is_some() {
                let _ = self.say_told(slot);
            }
        }
        lost("an operator took the lock away")
    }

    /// What its record says of a claim of this process. Needs nothing but the descriptor that it has: neither path nor rights, and
    /// it costs the same however many claims there are.
    pub(super) fn own_state(&self, slot: &Slot) -> Result<Option<ClaimState>> {
        // Before the record, as in `state_in`.
        let now = self.env.now();
        let record = slot.file.record(slot.ticket)?.ok_or_else(unreadable)?;
        Ok((!record.has_ended(now)).then(|| record.state(now)))
    }

    fn say_told(&self, slot: &Slot) -> Result<()> {
        // If a process that is stopped has the record, the evictor need not know.
        if let Some(held) = slot.guards().hold_record(slot.ticket)?
            && let Some(mut record) = held.read()?
        {
            record.set_told();
            held.rewrite(&record)?;
        }
        Ok(())
    }

    /// What [`File::check`] needs to know of the directory, for any number of claims that are looked at without a pause.
    pub(super) fn glance(&self) -> Glance {
        // Before the stamps: later, it would make a change that came meanwhile look old.
        let now = Duration::from_millis(layout::millis(self.env.clock().wall()));
        Glance { now, in_place: self.dir.is_in_place() }
    }

    /// Looks whether a claim of this process still counts; with one call where its file was not touched since.
    pub(super) fn check(&self, slot: &mut Slot, glance: &Glance) -> Result<Renewal> {
        // By its name, as newcomers come, but not by the whole path where that leads to the directory.
        let stamp = match glance.in_place {
            true => self.dir.stamp_here(&slot.file_name),
            false => self.dir.stamp(&slot.file_name),
        };
        let stamp = stamp.ok().flatten();
        if (stamp.is_none() || slot.checked != stamp)
            && let Some(loss) = self.lost(slot)?
        {
            return Ok(Renewal::Lost(loss));
        }
        slot.checked = stamp.filter(|stamp| stamp.changed + STAMP_GRAIN < glance.now);
        Ok(Renewal::Renewed(None))
    }

    /// Whether newcomers meet in this file: nobody has moved or removed it, or the directory.
    pub(super) fn leads_to(&self, file_name: &str, file: &LockFile) -> Result<bool> {
        let open = file.stamp()?.identity;
        let found = self.dir.stamp(file_name).map_err(|error| {
            let path = self.dir.lock_path(file_name);
            let message = format!("cannot see whether {} still is the lock file", path.display());
            Error::new(dir::kind(&error), message).with_source(error)
        })?;
        let leads = found.is_some_and(|found| found.identity == open);
        if !leads {
            self.dir.mistrust_place();
        }
        Ok(leads)
    }

    /// The header of a file that was sound when the claim came.
    pub(super) fn header(&self, slot: &Slot) -> Result<Option<Header>> {
        slot.file.header().map_err(|error| in_file(&self.dir, &slot.file_name, error))
    }

    /// Turns an exclusive claim into a shared one.
    pub(super) fn share(&self, slot: &mut Slot) -> Result<()> {
        let held = slot.guards().hold_record(slot.ticket)?.ok_or_else(|| kept_busy(&slot.name))?;
        let record = held.read()?.filter(|record| !record.is_ending());
        let mut record = record.ok_or_else(|| Error::lost(&slot.name, not_held()))?;
        record.set_mode(Mode::Shared);
        held.rewrite(&record)?;
        drop(held);
        (slot.mode, slot.bell) = (Mode::Shared, None);
        self.ring(&slot.file_name);
        Ok(())
    }

    /// Ends a claim of this process.
    pub(super) fn free(&self, slot: &Mutex<Slot>, linger: Duration) -> Result<Freed> {
        let slot = lock(slot);
        let mut closing = None;
        if !linger.is_zero() {
            let world = self.world(&slot.name);
            closing = Some((slot.guards().hold_or_fail(&world)?, world.moment()));
        }
        // A younger claim that was evicted and not told has not ended yet, and nobody else ends one that was given no end: so an
        // ordinary release need not look.
        let old = self.env.now().since(slot.granted_at) >= NOTICE;
        let look = old || closing.is_some() || GIVES_ENDS.load(Ordering::Acquire);
        // Where it cannot be read, nobody may say that it was held; freed it is all the same.
        let is_ending =
            || slot.file.record(slot.ticket).map(|record| record.is_some_and(|record| record.is_ending()));
        let ended = slot.told || look && is_ending().unwrap_or(true);
        // Else the lock may be another's.
        if let Some((mut held, from)) = closing.filter(|_| !ended) {
            held.close_for(linger, &from)?;
        }
        // Not left to the close, since a forked child may have a copy of the descriptor.
        if slot.own.is_some() || !slot.placed {
            slot.file.unlock_all()?;
        }
        if slot.placed {
            slot.guards().leave_place()?;
        }
        Ok(if ended { Freed::Absent } else { Freed::Removed })
    }
}

/// A look at the directory, and the time before it.
pub(super) struct Glance {
    pub(super) now: Duration,
    /// Whether the path leads to it.
    pub(super) in_place: bool,
}

fn unreadable() -> Error {
    Error::new(ErrorKind::Unavailable, "the claim's record cannot be read")
}

pub(super) fn not_held() -> Loss {
    Loss::new(LossKind::Deleted, "the claim is not held")
}

#[cfg(test)]
mod tests;
