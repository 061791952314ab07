//! The backend: what is asked of it, and what it says and does about claims of other processes.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;

use super::dir::Dir;
use super::layout::{self, Header, Moment, Record};
use super::lock_file::{Live, LockFile, World, in_file, kept_busy};
use super::slot::{GIVES_ENDS, Glance, Slot, not_held};
use super::times::{RECHECK_UNWATCHED, SOME_TIME, TRY_FOR, TRY_FOR_A_LOOK};
use super::watch::Watcher;
use crate::backend::{Backend, Capabilities, ClaimState, Freed, LockState, NOTICE, Progress, Renewal, Wake};
use crate::check::Check;
use crate::claim::{ByClaim, Claim, ClaimId, Loss, LossKind};
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

    fn slot(&self, id: ClaimId) -> Option<Arc<Mutex<Slot>>> {
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

    /// Ends a claim of another process: it does not count from now on.
    fn revoke(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
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

    /// Wakes the successor of a claim that was ended: if it waited, that one watches its bell; the lock file rings when who
    /// ended it closes it. Where that fails, the successor looks from time to time.
    fn ring_for(&self, world: &World<'_>, record: &Record) {
        if record.is_waiting() {
            let _ = self.bell(world.hash, record.ticket);
        }
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
    async fn insist<T>(&self, step: impl Fn() -> Result<T>) -> Result<T> {
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

    /// Moves the time at which another process lets go of its claim: it looks at what its record says.
    fn prolong(&self, claim: &Claim) -> Result<Renewal> {
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
    fn end_soon(&self, world: &World<'_>, file: &LockFile, claim: ClaimId) -> Result<Option<Record>> {
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
    fn end_in_time(&self, world: &World<'_>, file: &LockFile, begun: &Record, claim: ClaimId) -> Result<()> {
        if begun.is_waiting() {
            return Ok(());
        }
        let held = file.hold_or_fail(world)?;
        let end = self.env.now() + NOTICE;
        held.change(world.name, |record| record.is(claim), |record| record.end(end)).map(drop)
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
        let mut states = Vec::new();
        self.dir.check_place(self.env.now())?;
        for file in self.dir.lock_files()? {
            match self.state_in(&file, prefix, None) {
                Ok(state) => states.extend(state),
                // Others' files in a shared directory, and damaged ones in which nobody is, are no locks of ours; nor may they hide these.
                Err(error) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::Unsupported) => {}
                Err(error) => return Err(error),
            }
        }
        states.sort_by(|one: &LockState, other| one.name.cmp(&other.name));
        Ok(states)
    }

    async fn state(&self, name: &LockName) -> Result<Option<LockState>> {
        self.dir.check_place(self.env.now())?;
        // Not by the list: what is amiss with another's file is no matter here, where there can be any.
        match self.state_in(&layout::file_name(name), name.as_str(), Some(name)) {
            Err(error) if error.kind() == ErrorKind::Refused && self.dir.is_of_many() => Ok(None),
            state => Ok(state?.filter(|state| state.name == *name)),
        }
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

fn gone() -> Renewal {
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
mod tests {
    use std::cell::{Cell, RefCell};
    use std::path::Path;

    use super::super::dir::Options;
    use super::*;
    use crate::clock::{Clock, Instant};
    use crate::lane::Lane;
    use crate::locks::Locks;
    use crate::net::Tcp;
    use crate::random::Random;

    const TTL: Duration = Duration::from_secs(60);

    fn store(dir: &Path, clock: Clock) -> Arc<File> {
        let lane = Lane::thread();
        let tcp = Arc::new(Tcp::new(Clock::host(), lane.clone()));
        File::new(Dir::open(dir, Options::default()).unwrap(), Env::new(clock, Random::system(), lane, tcp))
            .unwrap()
    }

    fn locks(store: &Arc<File>) -> Locks {
        Locks::new(store.clone(), store.env.clone())
    }

    thread_local! {
        static AT_NEXT_LOOK: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
        static AHEAD: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    /// Does something at this look at the clock from now on.
    fn at_look(number: u32, then: Box<dyn FnOnce()>) {
        AT_NEXT_LOOK.set(Some(match number {
            1 => then,
            more => Box::new(move || at_look(more - 1, then)),
        }));
    }

    fn clock() -> Instant {
        let first = AT_NEXT_LOOK.take();
        first.into_iter().for_each(|first| first());
        Clock::host().now() + AHEAD.get()
    }

    /// Who looks whether its lease is over reads the old end, is stopped, and goes by a clock that has passed it: it lets go of what
    /// was renewed meanwhile.
    #[tokio::test]
    async fn a_lease_that_is_renewed_while_it_is_looked_at_is_not_over() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (store(dir.path(), Clock::told(clock)), store(dir.path(), Clock::host()));
        let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
        let (outside, id) = (locks(&other), guard.claim_id());
        outside.renew_detached("job", id, TTL).await.unwrap();
        let claim = {
            let state = outside.state("job").await.unwrap().unwrap().claims.remove(0);
            let (name, mode, owner) = (guard.name().clone(), state.mode, Arc::new(state.owner));
            Claim { id, name, mode, ttl: TTL, enqueue: false, place: false, isolated: true, owner }
        };
        let slot = ours.slot(id).unwrap();
        let own = || ours.own_state(&lock(&slot)).unwrap().unwrap();
        let by_path = || ours.state_in("job.lock", "", None).unwrap().unwrap().claims.remove(0);
        let looks: [(u32, &dyn Fn() -> crate::backend::ClaimState); 2] = [(2, &own), (4, &by_path)];
        for (ahead, look) in looks {
            let (other, claim) = (other.clone(), Claim { ttl: TTL * (ahead + 1), ..claim.clone() });
            AHEAD.set(Duration::ZERO);
            AT_NEXT_LOOK.set(Some(Box::new(move || {
                assert!(matches!(other.prolong(&claim).unwrap(), Renewal::Renewed(_)));
                AHEAD.set(TTL * ahead);
            })));
            assert!(look().expires_in.unwrap() > Duration::ZERO, "it was renewed in time");
        }
    }

    /// Who evicts may be stopped before it writes, for longer than the notice: the claim would be over as soon as its holder can hear.
    #[tokio::test]
    async fn a_notice_counts_from_when_it_can_be_heard() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (store(dir.path(), Clock::host()), store(dir.path(), Clock::told(clock)));
        let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
        let file = other.open("job.lock", false).unwrap().unwrap();
        let world = other.world(guard.name());
        // The first look tells the time as it is.
        at_look(2, Box::new(|| AHEAD.set(2 * NOTICE)));
        let begun = other.end_soon(&world, &file, guard.claim_id()).unwrap().unwrap();
        other.end_in_time(&world, &file, &begun, guard.claim_id()).unwrap();
        let record = file.record(begun.ticket).unwrap().unwrap();
        AHEAD.set(2 * NOTICE);
        assert!(record.is_ending() && !record.has_ended(clock()), "over before anybody could hear of it");
        AHEAD.set(4 * NOTICE);
        assert!(record.has_ended(clock()), "it is over in time");
    }

    /// A record is busy between the two writes of an eviction, and its holder is told meanwhile: the eviction says that there was nothing to
    /// evict, and what it has begun goes on for ten minutes.
    #[tokio::test]
    async fn an_eviction_ends_what_it_has_begun() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (store(dir.path(), Clock::host()), store(dir.path(), Clock::told(clock)));
        let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
        let slot = ours.slot(guard.claim_id()).unwrap();
        let (ticket, busy) = (lock(&slot).ticket, Arc::new(Mutex::new(None)));
        let record = || lock(&slot).file.record(ticket).unwrap().unwrap();
        let keep_busy = {
            let (ours, slot, busy) = (ours.clone(), slot.clone(), busy.clone());
            move || {
                assert!(
                    matches!(ours.check(&mut lock(&slot), &ours.glance()).unwrap(), Renewal::Lost(_)),
                    "it has begun"
                );
                let file = ours.open("job.lock", false).unwrap().unwrap();
                std::mem::forget(file.hold_record(ticket).unwrap().expect("nobody has it"));
                *lock(&busy) = Some(file);
            }
        };
        // It looks once for the directory, once for how long it may take, and once for the first write.
        at_look(4, Box::new(keep_busy));
        let evicted = other.evict(guard.name(), guard.claim_id());
        let (evicted, ()) = tokio::join!(evicted, async {
            while !record().was_told() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            lock(&busy).take().expect("it was busy");
        });
        assert_eq!(evicted.unwrap(), Freed::Removed);
        assert!(record().has_ended(Clock::host().now() + NOTICE), "it has not said when it is over");
    }

    /// A shell works on under a claim whose holder, which only keeps it, has heard of its eviction: another gets in beside it.
    #[tokio::test]
    async fn who_works_under_a_lease_is_not_told_through_its_keeper() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (store(dir.path(), Clock::host()), store(dir.path(), Clock::host()));
        let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
        let (outside, id) = (locks(&other), guard.claim_id());
        outside.renew_detached("job", id, TTL).await.unwrap();
        let evictor = tokio::spawn({
            let outside = outside.clone();
            async move { outside.evict("job", id).await }
        });
        let slot = ours.slot(id).unwrap();
        while !matches!(ours.check(&mut lock(&slot), &ours.glance()).unwrap(), Renewal::Lost(_)) {
            tokio::task::yield_now().await;
        }
        let record = {
            let slot = lock(&slot);
            slot.file.record(slot.ticket).unwrap().unwrap()
        };
        assert!(!record.was_told(), "the evictor takes the lock for free");
        assert!(outside.mutex("job").unwrap().try_lock().await.unwrap().is_none());
        // Who works says that it is done.
        let released = outside.release_detached("job", id).await.unwrap();
        assert!(matches!(released, crate::Released::AlreadyLost(_)));
        assert!(outside.mutex("job").unwrap().try_lock().await.unwrap().is_some());
        assert_eq!(evictor.await.unwrap().unwrap(), Freed::Removed);
    }

    /// Who sees to the end of a process closes its lock too soon, or for good; or a stranger closes it under that process.
    #[tokio::test]
    async fn a_lock_is_closed_behind_its_holder_by_who_acts_for_that() {
        const LINGER: Duration = Duration::from_secs(3600);
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (store(dir.path(), Clock::host()), store(dir.path(), Clock::host()));
        let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
        let (outside, id) = (locks(&other), guard.claim_id());
        let stranger = outside.clone().on_behalf_of(std::process::id() + 1);
        let error = stranger.release_detached_closed("job", id, LINGER).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let error = outside.release_detached("job", id).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let state = async || outside.state("job").await.unwrap().unwrap();
        assert!(state().await.closed_until.is_none());
        outside.release_detached_closed("job", id, LINGER).await.unwrap();
        assert!(guard.verify().await.is_ok() && state().await.claims.len() == 1, "it is held yet");
        drop(guard);
        assert!(state().await.claims.is_empty() && state().await.closed_until.is_some());
        assert!(outside.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    }

    /// A claim that was found to be in order long after its file was last touched is not looked at more closely, nor by its whole path:
    /// whatever makes newcomers meet elsewhere must show all the same.
    #[tokio::test]
    async fn a_holder_whose_file_was_long_untouched_is_told() {
        let top = tempfile::tempdir().unwrap();
        let (path, job, other) = (top.path().join("locks"), "job.lock", "other.lock");
        let rename = |from: &Path, to: &Path| std::fs::rename(from, to).unwrap();
        let ways: [(&str, &dyn Fn()); 6] = [
            ("its file was removed", &|| std::fs::remove_file(path.join(job)).unwrap()),
            ("its file was moved within the directory", &|| rename(&path.join(job), &path.join("moved"))),
            ("its file was moved out of the directory", &|| {
                rename(&path.join(job), &top.path().join("moved"))
            }),
            ("another file came in its place", &|| rename(&path.join(other), &path.join(job))),
            ("its directory was moved", &|| rename(&path, &top.path().join("moved"))),
            ("a link to another directory came in its place", &|| {
                rename(&path, &top.path().join("moved"));
                std::os::unix::fs::symlink(top.path(), &path).unwrap();
            }),
        ];
        for (what, change) in ways {
            let ours = store(&path, Clock::host());
            let (guard, _other) = (lock_at(&ours, "job").await, lock_at(&ours, "other").await);
            let slot = ours.slot(guard.claim_id()).unwrap();
            let check = || {
                let glance = ours.glance();
                let later = Glance { now: glance.now + Duration::from_secs(3600), ..glance };
                ours.check(&mut lock(&slot), &later).unwrap()
            };
            assert!(matches!((check(), check()), (Renewal::Renewed(_), Renewal::Renewed(_))));
            assert!(lock(&slot).checked.is_some(), "it goes by what it saw");
            change();
            assert!(matches!(check(), Renewal::Lost(_)), "not told that {what}");
            for left in [path.clone(), top.path().join("moved")] {
                let _ = std::fs::remove_dir_all(&left).or_else(|_| std::fs::remove_file(&left));
            }
        }
    }

    async fn lock_at(store: &Arc<File>, name: &str) -> crate::Guard {
        locks(store).mutex(name).unwrap().lock().await.unwrap()
    }
}
