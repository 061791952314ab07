//! A claim of this process: how it enters a lock file, takes its steps, is looked after, and leaves.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::dir::{self, Stamp};
use super::layout::{self, Header, META, Record};
use super::lock_file::{Live, LockFile, World, in_file, kept_busy};
use super::store::File;
use super::times::{RECHECK, RECHECK_UNWATCHED, RESTARTS, STAMP_GRAIN};
use super::watch::Watch;
use crate::backend::{Busy, ClaimState, Freed, Grant, NOTICE, Progress, Renewal};
use crate::claim::{Claim, ClaimId, Loss, LossKind, Mode};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::queue::{admits, agree_on_capacity};
use crate::sync::{Locked, lock};
use crate::token::Token;

/// Whether this process has given a claim an end, as it may do with its own: another may end that claim, too.
pub(super) static GIVES_ENDS: AtomicBool = AtomicBool::new(false);

/// A claim of this process: its byte stays locked for as long as this lives.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) file: LockFile,
    name: LockName,
    pub(super) file_name: String,
    pub(super) hash: u128,
    pub(super) ticket: u64,
    pub(super) mode: Mode,
    pub(super) granted: bool,
    granted_at: Instant,
    /// Whether others were in the file when it came, so that its record has a place of its own.
    placed: bool,
    /// Whether the holder was told that an operator ends its claim.
    told: bool,
    /// Since when its record cannot be read.
    unreadable: Option<Instant>,
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
    fn guards(&self) -> &LockFile {
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
    fn leads_to(&self, file_name: &str, file: &LockFile) -> Result<bool> {
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

    fn busy<'a>(&self, live: impl Iterator<Item = &'a Live> + Clone) -> Busy {
        let ahead = u32::try_from(live.clone().count()).unwrap_or(u32::MAX);
        // Who waits, too, is in the way, but holds nothing.
        let holder = live.filter_map(|live| live.record.as_ref()).find(|record| !record.is_waiting());
        Busy { ahead, holder: holder.map(|record| record.state(self.env.now())), ..Busy::default() }
    }
}

/// A look at the directory, and the time before it.
pub(super) struct Glance {
    pub(super) now: Duration,
    /// Whether the path leads to it.
    pub(super) in_place: bool,
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

fn unreadable() -> Error {
    Error::new(ErrorKind::Unavailable, "the claim's record cannot be read")
}

pub(super) fn not_held() -> Loss {
    Loss::new(LossKind::Deleted, "the claim is not held")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::dir::{Dir, Options};
    use super::super::ofd;
    use super::*;
    use crate::claim::Owner;
    use crate::env::Env;
    use crate::lane::Lane;
    use crate::locks::Locks;

    fn store(dir: &Path) -> Arc<File> {
        File::new(Dir::open(dir, Options::default()).unwrap(), Env::host(Lane::thread())).unwrap()
    }

    fn locks(store: &Arc<File>) -> Locks {
        Locks::new(store.clone(), store.env.clone())
    }

    /// A disk that fails: the description of the lock file cannot be read any more.
    #[tokio::test]
    async fn a_release_frees_what_it_cannot_read() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (store(dir.path()), store(dir.path()));
        let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
        {
            let slot = ours.slots.lock().unwrap().get(&guard.claim_id()).unwrap().clone();
            let mut slot = lock(&slot);
            slot.file.unlock_all().unwrap();
            let deaf = std::fs::File::options().write(true).open(dir.path().join("job.lock")).unwrap();
            let byte = ofd::Range { first: slot.ticket, last: slot.ticket };
            assert!(ofd::try_lock(&deaf, byte).unwrap());
            slot.file = LockFile::new(deaf.into());
            slot.granted_at = Instant::from_nanos(0);
        }
        assert!(locks(&other).mutex("job").unwrap().try_lock().await.unwrap().is_none());
        let released = guard.release().await.unwrap();
        assert!(matches!(released, crate::Released::AlreadyLost(_)), "nobody knows whether it was held");
        assert!(locks(&other).mutex("job").unwrap().try_lock().await.unwrap().is_some(), "a ghost");
    }

    /// Until its slot is made, a process may be stopped for so long that its claim is evicted and over.
    #[test]
    fn a_grant_is_dated_from_before_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let asked = Instant::from_nanos(1);
        // The second is not alone.
        for number in [1, 2] {
            let claim = Claim {
                id: ClaimId::from_bits(number),
                name: LockName::new("job").unwrap(),
                mode: Mode::Shared,
                ttl: Duration::from_secs(1),
                enqueue: true,
                place: false,
                isolated: false,
                owner: Arc::new(Owner {
                    host: String::new(),
                    pid: 1,
                    user: String::new(),
                    label: String::new(),
                }),
            };
            assert!(matches!(store.enter(&claim, asked).unwrap(), Progress::Granted(_)));
            let slot = lock(&store.slots).get(&claim.id).unwrap().clone();
            assert_eq!(lock(&slot).granted_at, asked);
        }
    }

    /// An operator is told that somebody is stopped, or a holder is not renewed.
    #[tokio::test]
    async fn outsiders_wait_for_another_claims_fsync() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (store(dir.path()), store(dir.path()));
        let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
        let (id, file) = (guard.claim_id(), other.open("job.lock", false).unwrap().unwrap());
        let fsync = async || {
            assert!(ofd::try_lock(&file, ofd::Range { first: META, last: META }).unwrap());
            tokio::time::sleep(Duration::from_millis(50)).await;
            file.unlock_all().unwrap();
        };
        let outside = locks(&other);
        let ((), renewed) = tokio::join!(fsync(), outside.renew_detached("job", id, Duration::from_secs(60)));
        renewed.unwrap();
        // Its guard is dropped then: it was given an end, so who evicts it does not hear that it was told.
        let let_go = async move {
            guard.lost().await;
        };
        let ((), evicted, ()) = tokio::join!(fsync(), outside.evict("job", id), let_go);
        assert_eq!(evicted.unwrap(), Freed::Removed);
    }

    /// One that takes a ticket has the header for as long as its fsync takes.
    #[tokio::test]
    async fn a_try_is_not_refused_by_another_claims_fsync() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let semaphore = locks(&store).semaphore("job", 2).unwrap();
        let held = semaphore.acquire(1).unwrap().await.unwrap();
        let file = store.open("job.lock", false).unwrap().unwrap();
        let meta = ofd::Range { first: META, last: META };
        assert!(ofd::try_lock(&file, meta).unwrap());
        let fsync = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            file.unlock_all().unwrap();
        };
        let (permit, ()) = tokio::join!(semaphore.try_acquire(1), fsync);
        drop((permit.unwrap().expect("a permit is free"), held));
    }
}
