//! The steps of claims on lock files.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use super::dir::{self, Dir};
use super::layout::{self, Header, META, Record};
use super::lock_file::{Live, LockFile, World, failed};
use super::watch::Watcher;
use crate::backend::{Backend, Busy, Capabilities, Freed, Grant, LockState, Progress, Renewal, Wake};
use crate::claim::{Claim, ClaimId, Loss, LossKind, Mode};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::queue::{admits, agree_on_capacity};
use crate::sync::lock;
use crate::token::Token;

/// How often a waiter looks although nothing woke it: when an event was lost, or a wait ends by the wall clock.
const RECHECK: Duration = Duration::from_secs(1);

/// How soon a waiter looks again after an event that did not let it in: the event comes just before the lock is free.
const RECHECK_AFTER_EVENT: Duration = Duration::from_millis(1);

/// How old a file's last change must be to tell it from a later one: time stamps may be as coarse as 10 ms.
const STAMP_GRAIN: Duration = Duration::from_secs(1);

/// How often a waiter looks where nothing can wake it: the kernel has no watch left, or it has no place to wait at.
const RECHECK_UNWATCHED: Duration = Duration::from_millis(20);

/// How long a live holder has to hear that an operator takes its claim away: its keeper looks every 2 s.
const NOTICE: Duration = Duration::from_secs(3);

/// Times that a claim starts anew because somebody removed the lock file under it.
const RESTARTS: u32 = 16;

/// The backend of `file://`.
#[derive(Debug)]
pub(super) struct File {
    dir: Dir,
    env: Env,
    boot: u128,
    /// The process that made this: a forked child must not unlock what it shares with its parent.
    process: u32,
    slots: Mutex<HashMap<ClaimId, Arc<Mutex<Slot>>>>,
    watcher: Watcher,
}

/// A claim of this process: its byte stays locked for as long as this lives.
#[derive(Debug)]
struct Slot {
    file: LockFile,
    name: LockName,
    file_name: String,
    hash: u128,
    ticket: u64,
    mode: Mode,
    granted: bool,
    granted_at: Instant,
    /// Whether other processes may hold the description too.
    inherited: bool,
    /// Its close wakes the successor. A claim that was granted at once has none: its successor watches the lock file.
    bell: Option<OwnedFd>,
    /// When to look again without an event.
    recheck: Duration,
    /// The file's last change when the claim was last found to be in order.
    checked: Option<Duration>,
}

/// A ticket and, for one that waits, its bell.
type Place = (u64, Option<OwnedFd>);

/// What a waiter waits for.
#[derive(Debug, PartialEq, Eq)]
enum Await {
    /// The lock is kept closed until this moment of the wall clock.
    Opening(SystemTime),
    /// This file's close.
    Close(PathBuf),
}

impl File {
    pub(super) fn new(dir: Dir, env: Env) -> Result<File> {
        let boot = boot_id(&env)?;
        Ok(File {
            dir,
            env,
            boot,
            process: std::process::id(),
            slots: Mutex::default(),
            watcher: Watcher::default(),
        })
    }

    fn world<'a>(&'a self, name: &'a LockName) -> World<'a> {
        let (file, hash) = (layout::file_name(name), layout::hash(name));
        World { dir: &self.dir, name, file, hash, boot: self.boot, wall: self.env.clock().wall() }
    }

    fn slot(&self, id: ClaimId) -> Option<Arc<Mutex<Slot>>> {
        lock(&self.slots).get(&id).cloned()
    }

    /// The first step of a claim.
    fn enter(&self, claim: &Claim) -> Result<Progress> {
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
        let locked = file.live(META - 1)?;
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
    fn step(&self, claim: &Claim, slot: &Mutex<Slot>) -> Result<Progress> {
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
    fn lost(&self, slot: &Slot) -> Result<Option<Loss>> {
        if self.unlinked(slot)? {
            return Ok(Some(Loss::new(LossKind::Deleted, "somebody removed the lock file")));
        }
        Ok(slot.record()?.is_none().then(evicted))
    }

    /// Looks whether a claim of this process still counts; with one call where its file was not touched since.
    fn check(&self, slot: &mut Slot) -> Result<Renewal> {
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

    fn busy<'a>(&self, live: impl Iterator<Item = &'a Live> + Clone) -> Busy {
        let ahead = u32::try_from(live.clone().count()).unwrap_or(u32::MAX);
        let holder = live.filter_map(|live| live.record.as_ref()).next();
        Busy { ahead, holder: holder.map(|record| record.state(self.env.now())), place_ttl: None }
    }

    /// What a queued claim has to wait for; `None` when it can be granted.
    fn awaited(&self, slot: &Slot) -> Result<Option<Await>> {
        let ahead = slot.ahead()?;
        let mut modes: Vec<Mode> = ahead.iter().map(Live::mode).collect();
        if admits(modes.iter().copied(), slot.mode) {
            let header = slot.file.header()?.filter(|header| header.closed_at(self.env.clock().wall()));
            return Ok(header.map(|header| Await::Opening(header.closed_until())));
        }
        let (Some(before), Some(mode)) = (ahead.last(), modes.pop()) else { return Ok(None) };
        // A holder's release closes the lock file; a waiter's end closes its bell, and so does its later release. Were
        // all waiters to watch the lock file, each release would wake them all.
        Ok(Some(Await::Close(if admits(modes, mode) {
            self.dir.lock_path(&slot.file_name)
        } else {
            self.dir.bell_path(dir::bell(slot.hash, before.ticket))
        })))
    }

    /// Waits for what `awaited` says, or for the next look.
    async fn wait_in(&self, slot: &Mutex<Slot>) -> Result<()> {
        let Some(awaited) = self.awaited(&lock(slot))? else { return Ok(()) };
        let now = self.env.now();
        let path = match &awaited {
            Await::Opening(at) => {
                let left = at.duration_since(self.env.clock().wall()).unwrap_or_default();
                self.env.sleep_until(now + left.min(RECHECK)).await;
                return Ok(());
            }
            Await::Close(path) => path,
        };
        let Ok(watch) = self.watcher.watch(path, self.env.lane()) else {
            self.env.sleep_until(now + RECHECK_UNWATCHED).await;
            return Ok(());
        };
        // What happened before the watch began raised no event.
        if self.awaited(&lock(slot))? != Some(awaited) {
            return Ok(());
        }
        let recheck = lock(slot).recheck;
        let recheck = tokio::select! {
            () = watch.closed() => RECHECK_AFTER_EVENT,
            () = self.env.sleep_until(now + recheck) => (recheck * 2).min(RECHECK),
        };
        lock(slot).recheck = recheck;
        Ok(())
    }

    /// Ends a claim of this process.
    fn free(&self, slot: &Mutex<Slot>, linger: Duration) -> Result<Freed> {
        let slot = lock(slot);
        if !linger.is_zero() {
            let world = self.world(&slot.name);
            slot.file.hold_or_fail(&world)?.close_until(world.wall + linger)?;
        }
        // A younger claim cannot have been taken away yet, so an ordinary release need not look.
        let old = self.env.now().since(slot.granted_at) >= NOTICE;
        let revoked = old && slot.file.record(slot.ticket)?.is_some_and(|record| record.revoked);
        // Not left to the close, since a forked child may have a copy of the descriptor; but that child's copy of the
        // guard must not unlock either.
        if std::process::id() != self.process {
            return Ok(Freed::Absent);
        }
        slot.file.unlock_all()?;
        if slot.inherited {
            self.ring(&slot.file_name)?;
        }
        Ok(if revoked { Freed::Absent } else { Freed::Removed })
    }

    /// Wakes whoever watches the lock file, where closing our own descriptor would not: others may have copies.
    fn ring(&self, file_name: &str) -> Result<()> {
        self.dir.open_lock(file_name, false).map(drop)
    }

    /// Ends a claim of another process: it does not count from now on.
    fn revoke(&self, name: &LockName, id: ClaimId, linger: Duration) -> Result<Freed> {
        let world = self.world(name);
        let Some(file) = self.dir.open_lock(&world.file, false)?.map(LockFile::new) else {
            return Ok(Freed::Absent);
        };
        let mut held = file.hold_or_fail(&world)?;
        let Some(record) = held.change(id, |record| record.revoked = true)? else { return Ok(Freed::Absent) };
        if !linger.is_zero() {
            held.close_until(world.wall + linger)?;
        }
        // If it waited, its successor watches its bell; the lock file rings with the close at the end.
        self.dir.open_bell(dir::bell(world.hash, record.ticket))?;
        Ok(Freed::Removed)
    }

    fn renew_one(&self, claim: &Claim) -> Result<Renewal> {
        if let Some(slot) = self.slot(claim.id) {
            return self.check(&mut lock(&slot));
        }
        // Another process's, which lets go at the time that its record says.
        let until = (self.env.now() + claim.ttl).as_nanos();
        let world = self.world(&claim.name);
        let Some(file) = self.dir.open_lock(&world.file, false)?.map(LockFile::new) else {
            return Ok(gone());
        };
        let held = file.hold_or_fail(&world)?;
        let changed = held.change(claim.id, |record| record.until = Some(until))?;
        Ok(changed.map_or_else(gone, |_| Renewal::Renewed(Some(claim.ttl))))
    }

    /// The state of one lock file; `None` when nobody is in it and it is open.
    fn state(&self, file_name: &str, prefix: &str) -> Result<Option<LockState>> {
        let plain = layout::name_of_file(file_name);
        if plain.as_ref().is_some_and(|name| !name.as_str().starts_with(prefix)) {
            return Ok(None);
        }
        let Some(file) = self.dir.open_for_reading(file_name)?.map(LockFile::new) else { return Ok(None) };
        let closed = |header: &Header| header.closed_at(self.env.clock().wall());
        let closed_until = file.header()?.filter(closed).map(|header| header.closed_until());
        let live = file.live(META - 1)?;
        let live: Vec<&Live> = live.iter().filter(|live| live.counts()).collect();
        let name = if plain.is_some() { plain } else { file.stored_name()? };
        let Some(name) = name.filter(|name| name.as_str().starts_with(prefix)) else { return Ok(None) };
        let states =
            live.iter().filter_map(|live| live.record.as_ref()).map(|record| record.state(self.env.now()));
        let claims: Vec<_> = states.collect();
        Ok((!claims.is_empty() || closed_until.is_some()).then_some(LockState { name, claims, closed_until }))
    }
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
        }
    }

    /// The claim's record, unless an operator is taking it away.
    fn record(&self) -> Result<Option<Record>> {
        Ok(self.file.record(self.ticket)?.filter(|record| !record.leaving && !record.revoked))
    }

    /// The claims ahead that count.
    fn ahead(&self) -> Result<Vec<Live>> {
        let mut ahead = self.file.live(self.ticket - 1)?;
        ahead.retain(Live::counts);
        Ok(ahead)
    }
}

#[async_trait]
impl Backend for File {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fencing: true,
            fifo: true,
            shared: true,
            permits: true,
            push: true,
            crash_release: true,
            processes: true,
            restart: true,
            inline: true,
            ..Capabilities::default()
        }
    }

    async fn claim(&self, claim: &Claim) -> Result<Progress> {
        match self.slot(claim.id) {
            Some(slot) => self.step(claim, &slot),
            None => self.enter(claim),
        }
    }

    async fn wait(&self, claim: &Claim) -> Result<Wake> {
        match self.slot(claim.id) {
            Some(slot) => self.wait_in(&slot).await?,
            None => self.env.sleep_until(self.env.now() + RECHECK_UNWATCHED).await,
        }
        Ok(Wake::Step)
    }

    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        claims.iter().map(|claim| self.renew_one(claim).unwrap_or_else(Renewal::Failed)).collect()
    }

    async fn verify(&self, claim: &Claim) -> Result<Renewal> {
        match self.slot(claim.id) {
            Some(slot) => Ok(self.lost(&lock(&slot))?.map_or(Renewal::Renewed(None), Renewal::Lost)),
            None => Ok(gone()),
        }
    }

    async fn downgrade(&self, claim: &Claim) -> Result<()> {
        let gone = || Error::lost(&claim.name, Loss::new(LossKind::Deleted, "the claim is not held"));
        let slot = self.slot(claim.id).ok_or_else(gone)?;
        let mut slot = lock(&slot);
        let mut record = slot.record()?.ok_or_else(gone)?;
        record.set_mode(Mode::Shared);
        slot.file.rewrite(&record)?;
        slot.mode = Mode::Shared;
        slot.bell = None;
        self.ring(&slot.file_name)
    }

    async fn release(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        let Some(slot) = self.slot(claim.id) else { return self.revoke(&claim.name, claim.id, linger) };
        let freed = self.free(&slot, linger)?;
        // Closes the file and the bell, which wakes the next.
        lock(&self.slots).remove(&claim.id);
        Ok(freed)
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        let mut states = Vec::new();
        for file in self.dir.lock_files()? {
            states.extend(self.state(&file, prefix)?);
        }
        states.sort_by(|one: &LockState, other| one.name.cmp(&other.name));
        Ok(states)
    }

    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed> {
        let world = self.world(name);
        let Some(file) = self.dir.open_lock(&world.file, false)?.map(LockFile::new) else {
            return Ok(Freed::Absent);
        };
        let leaving = {
            let mut held = file.hold_or_fail(&world)?;
            if held.header.closed_at(world.wall) {
                held.open_now()?;
            }
            held.change(claim, |record| record.leaving = true)?
        };
        let Some(record) = leaving else { return Ok(Freed::Absent) };
        let locked = file.live(record.ticket)?;
        let ahead = locked.iter().filter(|live| live.ticket < record.ticket && live.counts());
        if admits(ahead.map(Live::mode), record.mode()) {
            // A holder that runs is told by its keeper and lets go; one that does not, loses its claim nevertheless.
            let end = self.env.now() + NOTICE;
            while self.env.now() < end
                && file.live(record.ticket)?.iter().any(|live| live.ticket == record.ticket)
            {
                self.env.sleep_until(self.env.now() + RECHECK_UNWATCHED).await;
            }
        }
        self.revoke(name, claim, Duration::ZERO)?;
        Ok(Freed::Removed)
    }

    fn descriptor(&self, claim: ClaimId) -> Option<OwnedFd> {
        let slot = self.slot(claim)?;
        let mut slot = lock(&slot);
        let copy = slot.file.descriptor().try_clone().ok()?;
        slot.inherited = true;
        Some(copy)
    }
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

fn gone() -> Renewal {
    Renewal::Lost(Loss::new(LossKind::Deleted, "nobody has such a claim"))
}

/// What tells this boot from others. Where the kernel does not say, every client takes itself for a new boot, which
/// costs tickets and fsyncs but nothing else.
fn boot_id(env: &Env) -> Result<u128> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    match u128::from_str_radix(&id.trim().replace('-', ""), 16) {
        Ok(id) => Ok(id),
        Err(_) => Ok(env.random().claim_id()?.bits()),
    }
}
