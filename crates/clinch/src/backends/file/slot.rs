//! A claim of this process: how it enters a lock file, takes its steps, is looked after, and leaves.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::dir;
use super::layout::{self, META, Record};
use super::lock_file::{Live, LockFile, World, failed};
use super::store::File;
use super::waiting::RECHECK;
use super::watch::Watch;
use crate::backend::{Busy, Freed, Grant, Progress, Renewal};
use crate::claim::{Claim, ClaimId, Loss, LossKind, Mode};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::queue::{admits, agree_on_capacity};
use crate::sync::lock;
use crate::token::Token;

/// How old a file's last change must be to tell it from a later one: time stamps may be as coarse as 10 ms.
const STAMP_GRAIN: Duration = Duration::from_secs(1);

/// How long a live holder has to hear that an operator takes its claim away: its keeper looks every 4 s.
pub(super) const NOTICE: Duration = Duration::from_secs(5);

/// Times that a claim starts anew because somebody removed the lock file under it.
const RESTARTS: u32 = 16;

/// A claim of this process: its byte stays locked for as long as this lives.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) file: LockFile,
    name: LockName,
    pub(super) file_name: String,
    pub(super) hash: u128,
    pub(super) ticket: u64,
    pub(super) mode: Mode,
    granted: bool,
    granted_at: Instant,
    /// Whether other processes may hold the description too.
    pub(super) inherited: bool,
    /// Its close wakes the successor. A claim that was granted at once has none: its successor watches the lock file.
    pub(super) bell: Option<OwnedFd>,
    /// When to look again without an event.
    pub(super) recheck: Duration,
    /// The file's last change when the claim was last found to be in order.
    checked: Option<Duration>,
    /// The last watch of the wait. Ending one costs more than a hand-over, so it is left to the release.
    pub(super) watch: Option<Watch>,
}

impl Slot {
    fn new(
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
            inherited: false,
            bell,
            recheck: RECHECK,
            checked: None,
            watch: None,
        }
    }

    /// The claim's record, unless an operator is taking it away.
    pub(super) fn record(&self) -> Result<Option<Record>> {
        Ok(self.file.record(self.ticket)?.filter(|record| !record.leaving && !record.revoked))
    }

    /// The claims ahead that count.
    pub(super) fn ahead(&self) -> Result<Vec<Live>> {
        let mut ahead = self.file.live(self.ticket - 1)?;
        ahead.retain(Live::counts);
        Ok(ahead)
    }
}

/// A ticket and, for one that waits, its bell.
type Place = (u64, Option<OwnedFd>);

impl File {
    /// The first step of a claim.
    pub(super) fn enter(&self, claim: &Claim) -> Result<Progress> {
        for _ in 0..RESTARTS {
            let world = self.world(&claim.name);
            let Some(file) = self.dir.open_lock(&world.file, true)?.map(LockFile::new) else { continue };
            if let Some(ticket) = enter_alone(claim, &world, &file)? {
                self.keep(Slot::new(file, claim, world, ticket, true, None, self.env.now()), claim.id);
                return Ok(granted(ticket));
            }
            if let Some((progress, place)) = self.enter_behind(claim, &world, &file)? {
                if let Some((ticket, bell)) = place {
                    let grants = matches!(progress, Progress::Granted(_));
                    self.keep(Slot::new(file, claim, world, ticket, grants, bell, self.env.now()), claim.id);
                }
                return Ok(progress);
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "somebody keeps removing the lock file"))
    }

    /// The first step where others are: takes a place behind them, or none. `None`: somebody removed the file.
    fn enter_behind(
        &self,
        claim: &Claim,
        world: &World<'_>,
        file: &LockFile,
    ) -> Result<Option<(Progress, Option<Place>)>> {
        let Some(held) = file.hold(world)? else {
            // Whoever has the header is about to be ahead of this claim. Without a place in the queue, ask again.
            let busy = Busy::default();
            return Ok(Some((
                if claim.enqueue { Progress::Queued(busy) } else { Progress::Busy(busy) },
                None,
            )));
        };
        if !self.dir.leads_to(&world.file, file.descriptor()).map_err(failed)? {
            return Ok(None);
        }
        let locked = in_the_way(claim, file, held.header.last)?;
        let counted = || locked.iter().filter(|live| live.counts());
        agree_on_capacity(counted().map(Live::mode), claim.mode)?;
        let grants = !held.header.closed_at(world.wall) && admits(counted().map(Live::mode), claim.mode);
        let busy = self.busy(counted());
        if !grants && !claim.enqueue {
            return Ok(Some((Progress::Busy(busy), None)));
        }
        let bell = |ticket| match grants {
            true => Ok(None),
            false => self.dir.open_bell(dir::bell(world.hash, ticket)).map(Some),
        };
        let record = |ticket| Record::new(claim, ticket, grants, world.wall);
        let (ticket, bell) = held.claim_behind(&locked, record, bell)?;
        Ok(Some((if grants { granted(ticket) } else { Progress::Queued(busy) }, Some((ticket, bell)))))
    }

    fn keep(&self, slot: Slot, id: ClaimId) {
        lock(&self.slots).insert(id, Arc::new(Mutex::new(slot)));
    }

    /// A further step of a claim that has a place.
    pub(super) fn step(&self, claim: &Claim, slot: &Mutex<Slot>) -> Result<Progress> {
        let mut slot = lock(slot);
        if slot.granted {
            return Ok(granted(slot.ticket));
        }
        let ahead = slot.ahead()?;
        let closed = slot.file.header()?.is_some_and(|header| header.closed_at(self.env.clock().wall()));
        if closed || !admits(ahead.iter().map(Live::mode), slot.mode) {
            return Ok(Progress::Queued(self.busy(ahead.iter())));
        }
        if self.unlinked(&slot)? {
            // The file is gone, and with it the queue: start again in the new one.
            drop(slot);
            lock(&self.slots).remove(&claim.id);
            return self.enter(claim);
        }
        let Some(mut record) = slot.record()? else {
            drop(slot);
            lock(&self.slots).remove(&claim.id);
            return Err(Error::lost(&claim.name, evicted()));
        };
        record.set_granted(self.env.clock().wall());
        slot.file.rewrite(&record)?;
        (slot.granted, slot.granted_at) = (true, self.env.now());
        if slot.mode != Mode::Exclusive {
            // The successor may be let in at the same time. An exclusive claim's successor is not, and keeps its watch.
            slot.bell = None;
        }
        Ok(granted(slot.ticket))
    }

    /// Why a claim of this process does not count any more, if so.
    pub(super) fn lost(&self, slot: &Slot) -> Result<Option<Loss>> {
        if self.unlinked(slot)? {
            return Ok(Some(Loss::new(LossKind::Deleted, "somebody removed the lock file")));
        }
        Ok(slot.record()?.is_none().then(evicted))
    }

    /// Looks whether a claim of this process still counts; with one call where its file was not touched since.
    pub(super) fn check(&self, slot: &mut Slot) -> Result<Renewal> {
        let (links, changed) = slot.file.change_stamp()?;
        if links == 1 && slot.checked == Some(changed) {
            return Ok(Renewal::Renewed(None));
        }
        if let Some(loss) = self.lost(slot)? {
            return Ok(Renewal::Lost(loss));
        }
        let now = Duration::from_millis(layout::millis(self.env.clock().wall()));
        slot.checked = (changed + STAMP_GRAIN < now).then_some(changed);
        Ok(Renewal::Renewed(None))
    }

    /// Whether somebody removed the lock file: newcomers then meet in another one.
    fn unlinked(&self, slot: &Slot) -> Result<bool> {
        Ok(!self.dir.leads_to(&slot.file_name, slot.file.descriptor()).map_err(failed)?)
    }

    /// Ends a claim of this process.
    pub(super) fn free(&self, slot: &Mutex<Slot>, linger: Duration) -> Result<Freed> {
        let slot = lock(slot);
        // A forked child's copy of a guard must not unlock what it shares with its parent.
        if std::process::id() != self.process {
            return Ok(Freed::Absent);
        }
        if !linger.is_zero() {
            let world = self.world(&slot.name);
            slot.file.hold_or_fail(&world)?.close_until(world.wall + linger)?;
        }
        // A younger claim cannot have been taken away yet, so an ordinary release need not look.
        let old = self.env.now().since(slot.granted_at) >= NOTICE;
        let revoked = old && slot.file.record(slot.ticket)?.is_some_and(|record| record.revoked);
        // Not left to the close, since a forked child may have a copy of the descriptor.
        slot.file.unlock_all()?;
        if slot.inherited {
            self.ring(&slot.file_name)?;
        }
        Ok(if revoked { Freed::Absent } else { Freed::Removed })
    }

    fn busy<'a>(&self, live: impl Iterator<Item = &'a Live> + Clone) -> Busy {
        let ahead = u32::try_from(live.clone().count()).unwrap_or(u32::MAX);
        let holder = live.filter_map(|live| live.record.as_ref()).next();
        Busy {
            ahead,
            holder: holder.map(|record| record.state(self.env.now())),
            place_ttl: None,
            detail: None,
        }
    }
}

/// The claims that a newcomer has to know of: all, but for an exclusive one, to which the first is one too many.
fn in_the_way(claim: &Claim, file: &LockFile, last_ticket: u64) -> Result<Vec<Live>> {
    if claim.mode == Mode::Exclusive
        && let Some(first) = file.first_live()?
        && first.counts()
        && last_ticket - first.ticket.min(last_ticket) < layout::RECORDS - 1
    {
        // Nobody is so old that the newcomer's record would take its place.
        return Ok(vec![first]);
    }
    file.live(META - 1)
}

/// The first step where nobody else is and nothing keeps the lock closed.
fn enter_alone(claim: &Claim, world: &World<'_>, file: &LockFile) -> Result<Option<u64>> {
    match file.hold_alone(world)? {
        Some(held) if !held.header.closed_at(world.wall) => {
            held.claim_alone(|ticket| Record::new(claim, ticket, true, world.wall)).map(Some)
        }
        _ => Ok(None),
    }
}

fn granted(ticket: u64) -> Progress {
    match Token::new(ticket) {
        Some(token) => Progress::Granted(Grant { token, ttl: None, from: None }),
        // Tickets are checked against this bound when they are taken.
        None => Progress::Busy(Busy::default()),
    }
}

fn evicted() -> Loss {
    Loss::new(LossKind::Deleted, "an operator took the lock away")
}
