//! How a claim of this process enters a lock file, and takes its steps until it is granted.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use super::dir;
use super::held::{World, kept_busy};
use super::layout::{self, META};
use super::lock_file::{Live, LockFile};
use super::record::Record;
use super::slot::Slot;
use super::store::File;
use super::times::RESTARTS;
use crate::backend::{Busy, Grant, Progress};
use crate::claim::{Claim, ClaimId, Mode};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::queue::{admits, agree_on_capacity};
use crate::sync::{Locked, lock};
use crate::token::Token;

/// A ticket and, for one that waits, its bell.
type Place = (u64, Option<OwnedFd>);

impl File {
    /// The first step of a claim, which was asked for at this moment. A grant is dated from then: the process may be stopped once it
    /// has written it, for so long that an eviction is over.
    pub(super) fn enter(&self, claim: &Claim, asked: Instant) -> Result<Progress> {
        for _ in 0..RESTARTS {
            let world = self.world(&claim.name);
            let no_room = |error: Error| match error.kind() {
                ErrorKind::Exhausted => error.at(self.dir.lock_path(&world.file).display()),
                _ => error,
            };
            let Some(file) = self.open(&world.file, true)? else { continue };
            if let Some(ticket) = self.enter_alone(claim, &world, &file).map_err(no_room)? {
                self.keep(Slot::new(file, claim, world, ticket, true, None, asked), claim.id);
                return Ok(granted(ticket));
            }
            if let Some((progress, place)) = self.enter_behind(claim, &world, &file).map_err(no_room)? {
                if let Some((ticket, bell)) = place {
                    let grants = matches!(progress, Progress::Granted(_));
                    let slot = Slot::new(file, claim, world, ticket, grants, bell, asked);
                    self.keep(Slot { placed: true, ..slot }, claim.id);
                }
                return Ok(progress);
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "somebody keeps removing the lock file"))
    }

    /// The first step where nobody else is and nothing keeps the lock closed.
    fn enter_alone(&self, claim: &Claim, world: &World<'_>, file: &LockFile) -> Result<Option<u64>> {
        match file.hold_alone(world)? {
            Some(held) if self.closed_for(&held.header).is_none() => {
                held.claim_alone(|ticket| Record::new(claim, ticket, true, world.wall)).map(Some)
            }
            _ => Ok(None),
        }
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
            let busy = self.seen(claim, file)?;
            let waits = claim.enqueue || busy.undecided;
            return Ok(Some((if waits { Progress::Queued(busy) } else { Progress::Busy(busy) }, None)));
        };
        if !self.leads_to(&world.file, file)? {
            return Ok(None);
        }
        let now = self.env.now();
        let locked = in_the_way(claim, file, held.header.last, now)?;
        let counted = || locked.iter().filter(|live| live.counts(now));
        agree_on_capacity(counted().map(Live::mode), claim.mode)?;
        let grants = self.closed_for(&held.header).is_none() && admits(counted().map(Live::mode), claim.mode);
        let busy = self.busy(counted());
        if !grants && !claim.enqueue {
            return Ok(Some((Progress::Busy(busy), None)));
        }
        let bell = |ticket| match grants {
            true => Ok(None),
            false => self.bell(world.hash, ticket),
        };
        let record = |ticket| Record::new(claim, ticket, grants, world.wall);
        let (ticket, bell) = held.claim_behind(&locked, record, bell)?;
        Ok(Some((if grants { granted(ticket) } else { Progress::Queued(busy) }, Some((ticket, bell)))))
    }

    /// What can be said of a lock whose header is kept busy: who holds it stands in bytes and records, which can be read all the same.
    fn seen(&self, claim: &Claim, file: &LockFile) -> Result<Busy> {
        let now = self.env.now();
        let live = match claim.mode {
            Mode::Exclusive => file.first_live()?.filter(|first| first.counts(now)).map(|first| vec![first]),
            _ => None,
        };
        let live = live.map_or_else(|| file.live(META - 1), Ok)?;
        let holds = |live: &Live| live.record.as_ref().is_some_and(|record| !record.is_waiting());
        let holders = || live.iter().filter(|live| live.counts(now) && holds(live));
        let is_closed = || {
            let header = file.header().ok().flatten();
            header.is_some_and(|header| self.closed_for(&header).is_some())
        };
        match admits(holders().map(Live::mode), claim.mode) && !is_closed() {
            true => Ok(cannot_say(&claim.name)),
            false => Ok(self.busy(holders())),
        }
    }

    /// What a waiter rings when it ends. Where somebody planted something in its place, the next looks from time to time.
    pub(super) fn bell(&self, hash: u128, ticket: u64) -> Result<Option<OwnedFd>> {
        match self.dir.open_bell(dir::bell(hash, ticket)) {
            Err(error) if error.kind() == ErrorKind::Refused => Ok(None),
            bell => bell.map(Some),
        }
    }

    fn keep(&self, slot: Slot, id: ClaimId) {
        let waits = !slot.granted;
        let mut slots = lock(&self.slots);
        slots.insert(id, Arc::new(Mutex::new(slot)));
        if waits {
            self.mind_turns(&slots);
        }
    }

    /// A further step of a claim that has a place.
    pub(super) fn step(&self, claim: &Claim, slot: &Mutex<Slot>) -> Result<Progress> {
        let mut slot = lock(slot);
        if slot.granted {
            return Ok(granted(slot.ticket));
        }
        let now = self.env.now();
        (slot.looked, slot.turn, slot.hindered) = (now, None, false);
        if slot.left || slot.file.record(slot.ticket)?.is_some_and(|record| record.is_ending()) {
            return self.start_again(claim, slot);
        }
        let before = slot.before(now)?;
        let closed = self.header(&slot)?.is_some_and(|header| self.closed_for(&header).is_some());
        if closed || !admits(before.iter().map(Live::mode), slot.mode) {
            slot.behind = before.len();
            return Ok(Progress::Queued(self.busy(before.iter())));
        }
        if !self.leads_to(&slot.file_name, &slot.file)? {
            // The file is gone, and with it the queue.
            return self.start_again(claim, slot);
        }
        let Some(held) = slot.guards().hold_record(slot.ticket)? else {
            slot.hindered = true;
            return Ok(Progress::Queued(cannot_say(&claim.name)));
        };
        let wall = self.env.clock().wall();
        // Whoever damaged the record has not taken the place: its byte is still locked.
        let mut record = held.read()?.unwrap_or_else(|| Record::new(claim, slot.ticket, false, wall));
        if record.is_ending() {
            drop(held);
            return self.start_again(claim, slot);
        }
        record.set_granted(wall);
        held.rewrite(&record)?;
        drop(held);
        (slot.granted, slot.granted_at) = (true, now);
        if slot.mode != Mode::Exclusive {
            // The successor may be let in at the same time. An exclusive claim's successor is not, and keeps its watch.
            slot.bell = None;
        }
        Ok(granted(slot.ticket))
    }

    /// A waiter that has lost its place takes a new one, at the end.
    fn start_again(&self, claim: &Claim, mut slot: Locked<'_, Slot>) -> Result<Progress> {
        slot.leave()?;
        drop(slot);
        lock(&self.slots).remove(&claim.id);
        self.enter(claim, self.env.now())
    }

    fn busy<'a>(&self, live: impl Iterator<Item = &'a Live> + Clone) -> Busy {
        let ahead = u32::try_from(live.clone().count()).unwrap_or(u32::MAX);
        // Who waits, too, is in the way, but holds nothing.
        let holder = live.filter_map(|live| live.record.as_ref()).find(|record| !record.is_waiting());
        Busy { ahead, holder: holder.map(|record| record.state(self.env.now())), ..Busy::default() }
    }
}

/// The claims that a newcomer has to know of: all, but for an exclusive one, to which the first is one too many.
fn in_the_way(claim: &Claim, file: &LockFile, last_ticket: u64, now: Instant) -> Result<Vec<Live>> {
    if claim.mode == Mode::Exclusive
        && let Some(first) = file.first_live()?
        && first.counts(now)
        && last_ticket - first.ticket.min(last_ticket) < layout::RECORDS - 1
    {
        // Nobody is so old that the newcomer's record would take its place.
        return Ok(vec![first]);
    }
    file.live(META - 1)
}

/// What is said of a lock whose file cannot be read now.
fn cannot_say(name: &LockName) -> Busy {
    Busy { undecided: true, detail: Some(kept_busy(name).to_string().into()), ..Busy::default() }
}

fn granted(ticket: u64) -> Progress {
    match Token::new(ticket) {
        Some(token) => Progress::Granted(Grant { token, ttl: None, from: None }),
        // Tickets are checked against this bound when they are taken.
        None => Progress::Busy(Busy::default()),
    }
}
