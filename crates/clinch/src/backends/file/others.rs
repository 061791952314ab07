//! What is done about claims of other processes: they are renewed, ended, and evicted.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::held::{World, kept_busy};
use super::lock_file::LockFile;
use super::record::Record;
use super::slot::GIVES_ENDS;
use super::store::File;
use super::times::SOME_TIME;
use crate::backend::{Freed, NOTICE, Renewal};
use crate::claim::{Claim, ClaimId, Loss, LossKind};
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;

impl File {
    /// Ends a claim of another process: it does not count from now on.
    pub(super) fn revoke(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        let world = self.world(&claim.name);
        let Some(file) = self.open(&world.file, false)? else { return Ok(Freed::Absent) };
        let mut held = file.hold_or_fail(&world)?;
        // One that is being evicted is ended at once, as who works under it says that it is done.
        let is_it =
            |record: &Record| record.is(claim.id) && !(record.is_ending() && record.kept_by().is_some());
        let Some(Record { ticket, .. }) = held.find(is_it)? else { return Ok(Freed::Absent) };
        let changing = file.hold_record(ticket)?.ok_or_else(|| kept_busy(&claim.name))?;
        let Some(mut record) = changing.read()?.filter(is_it) else { return Ok(Freed::Absent) };
        if let Some(pid) = record.kept_by() {
            // Nobody would tell that process, which would go on beside the next.
            if linger.is_zero() || record.is_kept_otherwise(claim).is_some() {
                return Err(kept_by(&claim.name, &record, pid));
            }
            // It ends with the last copy of its descriptor, which may be in other hands.
            held.close_for(linger, &world.moment())?;
            return Ok(Freed::Removed);
        }
        // Before its end, after which the next in line could come in; and not before it is sure that it ends.
        let was_ending = record.is_ending();
        if !linger.is_zero() && !was_ending {
            held.close_for(linger, &world.moment())?;
        }
        record.end(self.env.now());
        changing.rewrite(&record)?;
        self.ring_for(&world, &record);
        Ok(if was_ending { Freed::Absent } else { Freed::Removed })
    }

    /// Wakes the successor of a claim that was ended: if that came while this one waited, it watches its bell; the lock file rings when who
    /// ended it closes it. Where that fails, the successor looks from time to time.
    pub(super) fn ring_for(&self, world: &World<'_>, record: &Record) {
        let _ = self.bell(world.hash, record.ticket);
    }

    /// Moves the time at which another process lets go of its claim: it looks at what its record says.
    pub(super) fn prolong(&self, claim: &Claim) -> Result<Renewal> {
        let world = self.world(&claim.name);
        let Some(file) = self.open(&world.file, false)? else { return Ok(gone()) };
        let held = file.hold_or_fail(&world)?;
        let (mut old, mut refused) = (None, None);
        let is_it = |record: &Record| record.is_of(claim.id);
        let changed = held.change(&claim.name, is_it, |record| {
            old = record.until;
            let now = self.env.now();
            // A holder whose process has given its claim no end looks at none.
            refused = record.is_kept_otherwise(claim).map(|pid| kept_by(&claim.name, record, pid));
            // Once that time has passed it is never moved: its holder may be letting go.
            if refused.is_none() && !record.has_run_out(now) {
                GIVES_ENDS.store(true, Ordering::Release);
                // An older request may arrive after one that asked for more.
                record.until = record.until.max(Some((now + claim.ttl).as_nanos()));
            }
        })?;
        if let Some(error) = refused {
            return Err(error);
        }
        // The holder may have looked before the new time was written, but not before the old one had passed.
        let in_time = old.is_none_or(|old| self.env.now().as_nanos() < old);
        if changed.is_some() && !in_time {
            held.change(&claim.name, is_it, |record| record.until = old)?;
        }
        Ok(if changed.is_some() && in_time { Renewal::Renewed(Some(claim.ttl)) } else { gone() })
    }

    /// Begins an eviction: from now on the claim ends. `None`: there is none.
    pub(super) fn end_soon(
        &self,
        world: &World<'_>,
        file: &LockFile,
        claim: ClaimId,
    ) -> Result<Option<Record>> {
        let now = self.env.now();
        let mut held = file.hold_or_fail(world)?;
        // A holder hears of it from its keeper, stops, and then releases; one that does not, loses its claim nevertheless. It hears of
        // it from this write on.
        let at = |record: &Record| if record.is_waiting() { now } else { now + SOME_TIME };
        // What another evictor has begun is waited for until its holder is told.
        let is_it = |record: &Record| record.is(claim) && !record.was_told() && !record.has_ended(now);
        let ended = held.change(world.name, is_it, |record| record.end(at(record)))?;
        // Not before a waiter is out, which could come in.
        if self.closed_for(&held.header).is_some() {
            held.open_now()?;
        }
        Ok(ended)
    }

    /// Says when an eviction that has begun is over, whether its holder was told meanwhile or not. The notice counts from after the first
    /// write: this process may be stopped before any of its writes.
    pub(super) fn end_in_time(
        &self,
        world: &World<'_>,
        file: &LockFile,
        begun: &Record,
        claim: ClaimId,
    ) -> Result<()> {
        if begun.is_waiting() {
            return Ok(());
        }
        let held = file.hold_or_fail(world)?;
        let end = self.env.now() + NOTICE;
        held.change(world.name, |record| record.is(claim), |record| record.end(end)).map(drop)
    }
}

pub(super) fn gone() -> Renewal {
    Renewal::Lost(Loss::new(LossKind::Deleted, "nobody has such a claim"))
}

/// A claim that was given no end is its process's alone.
fn kept_by(name: &LockName, record: &Record, pid: u32) -> Error {
    let message = match record.is_waiting() {
        true => format!(
            "the claim only waits for lock \"{name}\", for as long as process {pid} does; `clinch break --claim` ends that"
        ),
        false => format!(
            "lock \"{name}\" is held for as long as process {pid} holds it, which would go on beside the next; `clinch break` takes it away"
        ),
    };
    Error::new(ErrorKind::Unsupported, message)
}
