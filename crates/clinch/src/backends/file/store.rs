//! The backend: what is asked of it, and what it says and does about claims of other processes.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;

use super::dir::Dir;
use super::header::{Header, Moment};
use super::held::{World, kept_busy};
use super::layout;
use super::lock_file::{Live, LockFile, in_file};
use super::others::gone;
use super::slot::{Glance, Slot, not_held};
use super::times::{RECHECK_UNWATCHED, TRY_FOR, TRY_FOR_A_LOOK};
use super::watch::Watcher;
use crate::backend::{Backend, Capabilities, ClaimState, Freed, LockState, Progress, Renewal, Survey, Wake};
use crate::check::Check;
use crate::claim::{ByClaim, Claim, ClaimId};
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::sync::{AtWork, lock};

/// The backend of `file://`.
#[derive(Debug)]
pub(super) struct File {
    pub(super) dir: Dir,
    pub(super) env: Env,
    boot: u128,
    pub(super) slots: Mutex<ByClaim<Arc<Mutex<Slot>>>>,
    pub(super) watcher: Watcher,
    /// Whether somebody looks after turns that nobody takes; changed only while `slots` is locked.
    pub(super) minded: Mutex<AtWork>,
    /// For whoever looks after them.
    pub(super) this: Weak<File>,
}

impl File {
    pub(super) fn new(dir: Dir, env: Env) -> Result<Arc<File>> {
        let boot = boot_id(&env)?;
        Ok(Arc::new_cyclic(|this| File {
            dir,
            env,
            boot,
            slots: Mutex::default(),
            watcher: Watcher::default(),
            minded: Mutex::default(),
            this: this.clone(),
        }))
    }

    pub(super) fn world<'a>(&'a self, name: &'a LockName) -> World<'a> {
        let (file, hash) = (layout::file_name(name), layout::hash(name));
        World {
            dir: &self.dir,
            name,
            file,
            hash,
            boot: self.boot,
            env: &self.env,
            wall: self.env.clock().wall(),
        }
    }

    /// For how long a lock is kept closed yet.
    pub(super) fn closed_for(&self, header: &Header) -> Option<Duration> {
        (header.closed > 0).then(|| header.closed_for(&Moment::now(&self.env, self.boot)))?
    }

    pub(super) fn slot(&self, id: ClaimId) -> Option<Arc<Mutex<Slot>>> {
        lock(&self.slots).get(&id).cloned()
    }

    /// Opens a lock file for a new claim, and makes an empty one if there is none; else to change what is in it.
    pub(super) fn open(&self, file_name: &str, create: bool) -> Result<Option<LockFile>> {
        self.dir.check_for_writing()?;
        if create {
            self.dir.check_room()?;
        }
        self.dir.check_place(self.env.now())?;
        let Some(file) = self.dir.open_lock(file_name, create)? else { return Ok(None) };
        if !create {
            self.dir.check_room_in(&file)?;
        }
        Ok(Some(LockFile::new(file)))
    }

    /// Wakes whoever watches the lock file, where closing our own descriptor would not: others may have copies. Where that
    /// fails, they look from time to time.
    pub(super) fn ring(&self, file_name: &str) {
        let _ = self.dir.open_lock(file_name, false);
    }

    /// Renews a claim. `glance`: what the batch that it is of has seen of the directory.
    async fn renew_one(&self, claim: &Claim, glance: &mut Option<Glance>) -> Result<Renewal> {
        match self.slot(claim.id) {
            Some(slot) => self.check(&mut lock(&slot), glance.get_or_insert_with(|| self.glance())),
            None => {
                // It may take a while, in which the directory is changed.
                *glance = None;
                self.insist(|| self.prolong(claim)).await
            }
        }
    }

    /// Repeats for a while what failed since others have the header or a record: they may be in an fsync, or be many.
    pub(super) async fn insist<T>(&self, step: impl Fn() -> Result<T>) -> Result<T> {
        let end = self.env.now() + TRY_FOR;
        loop {
            match step() {
                Err(error) if error.kind() == ErrorKind::Unavailable && self.env.now() < end => {
                    self.env.sleep_until(self.env.now() + RECHECK_UNWATCHED).await;
                }
                done => return done,
            }
        }
    }

    /// The state of one lock file; `None` when nobody is in it and it is open. `asked`: the lock that is looked for, whose name a damaged file
    /// may not tell.
    fn state_in(&self, file_name: &str, prefix: &str, asked: Option<&LockName>) -> Result<Option<LockState>> {
        // Before anything is read: what a record says that was read later has been true at this moment or since. Who goes by it that a
        // claim has run out must not have missed that it was renewed.
        let now = self.env.now();
        let plain = layout::name_of_file(file_name);
        if plain.as_ref().is_some_and(|name| !name.as_str().starts_with(prefix)) {
            return Ok(None);
        }
        let Some(file) = self.dir.open_for_reading(file_name)?.map(LockFile::new) else { return Ok(None) };
        let header = file.header();
        let mut live = file.live_for_people()?;
        live.retain(|live| live.counts(now));
        let header = match header {
            // It is held all the same.
            Err(error) if error.kind() == ErrorKind::Unsupported && !live.is_empty() => None,
            header => header.map_err(|error| in_file(&self.dir, file_name, error))?,
        };
        let closed = header.filter(|header| header.closed > 0);
        let closed_until = closed.and_then(|header| header.closed_until(&Moment::now(&self.env, self.boot)));
        let name = if plain.is_some() { plain } else { file.stored_name()?.or_else(|| asked.cloned()) };
        let Some(name) = name.filter(|name| name.as_str().starts_with(prefix)) else { return Ok(None) };
        let claims: Vec<_> = live.iter().map(|live| live.state(now)).collect();
        Ok((!claims.is_empty() || closed_until.is_some()).then_some(LockState { name, claims, closed_until }))
    }
}

#[async_trait]
impl Backend for File {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fencing: true,
            fifo: true,
            queue: true,
            shared: true,
            permits: true,
            linger: true,
            push: true,
            crash_release: true,
            processes: true,
            restart: true,
            inline: true,
            ..Capabilities::default()
        }
    }

    async fn examine(&self) -> Vec<Check> {
        // What the URL allowed is not known any more, and was checked when it was opened.
        super::examine::examine(self.dir.path(), self.dir.options())
    }

    async fn claim(&self, claim: &Claim) -> Result<Progress> {
        let end = self.env.now() + TRY_FOR_A_LOOK;
        loop {
            let progress = match self.slot(claim.id) {
                Some(slot) => self.step(claim, &slot)?,
                None => self.enter(claim, self.env.now())?,
            };
            match progress {
                // Somebody takes a ticket, which says neither that this one cannot have its own, nor that it can.
                Progress::Queued(_) if !claim.enqueue && self.env.now() < end => {
                    self.env.sleep_until(self.env.now() + RECHECK_UNWATCHED).await;
                }
                Progress::Queued(_) if !claim.enqueue => return Err(kept_busy(&claim.name)),
                progress => return Ok(progress),
            }
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
        let (mut answers, mut glance) = (Vec::with_capacity(claims.len()), None);
        for claim in claims {
            answers.push(self.renew_one(claim, &mut glance).await.unwrap_or_else(Renewal::Failed));
        }
        answers
    }

    async fn verify(&self, claim: &Claim) -> Result<Renewal> {
        match self.slot(claim.id) {
            Some(slot) => Ok(self.lost(&mut lock(&slot))?.map_or(Renewal::Renewed(None), Renewal::Lost)),
            None => Ok(gone()),
        }
    }

    async fn downgrade(&self, claim: &Claim) -> Result<()> {
        let slot = self.slot(claim.id).ok_or_else(|| Error::lost(&claim.name, not_held()))?;
        self.insist(|| self.share(&mut lock(&slot))).await
    }

    async fn release(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        let Some(slot) = self.slot(claim.id) else {
            // Who waits knows its own: this one never had a place.
            let nothing = claim.enqueue && linger.is_zero();
            return if nothing { Ok(Freed::Absent) } else { self.revoke(claim, linger) };
        };
        let freed = self.free(&slot, linger)?;
        // Closes the file and the bell, which wakes the next.
        lock(&self.slots).remove(&claim.id);
        Ok(freed)
    }

    fn forget(&self, claim: &Claim) {
        let slot = lock(&self.slots).remove(&claim.id);
        if let Some(slot) = slot {
            let _ = lock(&slot).leave();
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        let Survey { locks, unread } = self.survey(prefix).await?;
        unread.map_or(Ok(locks), Err)
    }

    async fn survey(&self, prefix: &str) -> Result<Survey> {
        let (mut locks, mut refused) = (Vec::new(), Vec::new());
        self.dir.check_place(self.env.now())?;
        for file in self.dir.lock_files()? {
            match self.state_in(&file, prefix, None) {
                Ok(state) => locks.extend(state),
                // What is no plain file, and a damaged one in which nobody is, are no locks; nor may they hide any.
                Err(error) if error.kind() == ErrorKind::Unsupported => {}
                Err(error) if error.kind() == ErrorKind::Refused => {
                    refused.extend(self.dir.may_be_a_lock(&file).then_some(error));
                }
                Err(error) => return Err(error),
            }
        }
        locks.sort_by(|one: &LockState, other| one.name.cmp(&other.name));
        Ok(Survey { locks, unread: unread(refused) })
    }

    async fn state(&self, name: &LockName) -> Result<Option<LockState>> {
        self.dir.check_place(self.env.now())?;
        // Not by the list: what is amiss with another file is no matter here.
        let state = self.state_in(&layout::file_name(name), name.as_str(), Some(name))?;
        Ok(state.filter(|state| state.name == *name))
    }

    async fn own_state(&self, claim: &Claim) -> Result<Option<ClaimState>> {
        self.slot(claim.id).map_or(Ok(None), |slot| self.own_state(&lock(&slot)))
    }

    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed> {
        let world = self.world(name);
        let Some(file) = self.open(&world.file, false)? else { return Ok(Freed::Absent) };
        let ended = self.insist(|| self.end_soon(&world, &file, claim)).await?;
        let Some(record) = ended else { return Ok(Freed::Absent) };
        self.insist(|| self.end_in_time(&world, &file, &record, claim)).await?;
        self.ring_for(&world, &record);
        let told = |live: Live| live.record.is_some_and(|record| record.was_told());
        while file.live_at(record.ticket)?.is_some_and(|live| live.counts(self.env.now()) && !told(live)) {
            self.env.sleep_until(self.env.now() + RECHECK_UNWATCHED).await;
        }
        Ok(Freed::Removed)
    }

    fn descriptor(&self, claim: ClaimId) -> Option<OwnedFd> {
        let slot = self.slot(claim)?;
        let mut slot = lock(&slot);
        let copy = slot.file.descriptor().try_clone().ok()?;
        // Opened now, while its name leads to it, and there are the rights to. Its close wakes the successor, which that of a description
        // of which others have copies does not. Where it cannot be had, those guard as before: a job needs its lock more.
        let own = self.dir.open_lock(&slot.file_name, false).ok().flatten().map(LockFile::new);
        let is_same = |own: &LockFile| Some(own.stamp().ok()?.identity == slot.file.stamp().ok()?.identity);
        slot.own = own.filter(|own| is_same(own) == Some(true));
        Some(copy)
    }
}

/// That files may not be looked at, in one error.
fn unread(refused: Vec<Error>) -> Option<Error> {
    let (files, locks) = match refused.len() {
        1 => ("1 lock file".to_owned(), "its lock"),
        more => (format!("{more} lock files"), "their locks"),
    };
    let first = refused.into_iter().next()?;
    let message =
        format!("{files} may not be looked at, so whether anybody holds {locks} is not known from here");
    Some(Error::new(ErrorKind::Refused, message).with_source(first))
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

#[cfg(test)]
mod tests;
