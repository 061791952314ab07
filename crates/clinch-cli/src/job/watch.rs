//! The watch over a job: a small process that sees to it where we cannot. It is a copy of us (`watcher.rs`).
//!
//! | when | it |
//! | --- | --- |
//! | we were killed, and the kernel frees the lock with its last descriptor | keeps one until the job has ended, and harms nobody (`keep.rs`), unless the lock is taken away. The job has one, too, but may close it, as ssh does with all that it inherits |
//! | we were killed, and the lock is freed for whoever is gone | ends the job |
//! | the lease is over that we told it of last: we are stopped, or hang | ends the job, and has us go on |
//! | we are stopped with the job, and some of that goes on | has us go on, who renew the lock |
//!
//! To end a job it stops the first process of it, as it is, and becomes `end.rs`, which kills all of it. The kernel could kill our child with us; but
//! then all that the child has started loses its parent, and nobody can tell it from others.

use std::future::pending;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use clinch::{Guard, Instant};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, getpid, kill_process};

use super::end::Closing;
use super::fork::Image;
use super::kin::is_named;
use super::namespace;
use super::spawn::forget_jobs;
use super::stat::Stat;
use super::sys::ProcessEnd;
use super::watcher::{self, Word};
use crate::args::{Orphans, Store};

/// The verb that it becomes.
pub(crate) const VERB: &str = "end-job";

/// How long it may take to tell it of all that is stopped with us. Nobody renews the lock meanwhile.
const TOLD_WITHIN: Duration = Duration::from_millis(500);

/// What it is to do when we are killed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Orders<'a> {
    pub(crate) store: &'a Store,
    pub(crate) orphans: Orphans,
    /// Until when the lock is to be closed then.
    pub(crate) closed_until: Option<Instant>,
    /// The lock of the job's turn, and until when that is to be closed, if the job has begun: we may not live to do so.
    pub(crate) turn: Option<(&'a Guard, Instant)>,
    /// For how long the store keeps what nobody renews, where that has an end.
    pub(crate) ttl: Duration,
    /// How long the job has to end when a lock is taken away that is kept for it; `None`: it goes on.
    pub(crate) grace: Option<Duration>,
}

/// The watch of one job, until dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    pid: Pid,
    /// None: this was seen.
    end: Option<ProcessEnd>,
    tell: OwnedFd,
    /// Kept open, so that a word to a watch that was killed is no error.
    _hear: OwnedFd,
    image: Image,
    /// Whether it keeps the lock when we are killed.
    keeps: bool,
    /// Until when it was told that the lock lasts.
    until: Option<Instant>,
}

impl Watch {
    /// Starts it, before the job: over one that ends with us, or over one whose lock is kept by a descriptor, which stays open on exec. Must be called
    /// inside a tokio runtime. `turn`: the descriptor of that lock, which the watch has open until it has closed the lock.
    pub(crate) fn start(
        guard: &Guard,
        lock: Option<&OwnedFd>,
        turn: Option<&OwnedFd>,
        orders: Orders<'_>,
    ) -> io::Result<Watch> {
        Watch::become_one(Image::of(&verb(guard, lock.is_some(), orders))?, None, lock, turn)
    }

    /// `job`: the first process, if it runs. It is told before the watch is there, since we may be killed as soon as it is.
    fn become_one(
        image: Image,
        job: Option<Pid>,
        lock: Option<&OwnedFd>,
        turn: Option<&OwnedFd>,
    ) -> io::Result<Watch> {
        // Nobody waits for one that is stopped and hears nothing.
        let (hear, tell) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        if job.is_some() {
            rustix::io::write(&tell, &Word::Job(job).bytes())?;
        }
        let keeps = lock.is_some();
        let open = [Some(&hear), lock, turn].map(|one| one.unwrap_or(&hear).as_raw_fd());
        let pid = watcher::fork(open, keeps, &image, namespace::is_the_job())?;
        let end = ProcessEnd::of(pid).inspect_err(|_| watcher::reap(pid))?;
        Ok(Watch { pid, end: Some(end), tell, _hear: hear, image, keeps, until: None })
    }

    /// Starts another in the place of one that was killed. `job`: the first process, until that has ended. Its turn was noted long ago, mostly.
    pub(crate) fn replace(&mut self, job: Option<Pid>, lock: Option<&OwnedFd>) -> io::Result<()> {
        let next = Watch::become_one(self.image.clone(), job, lock, None)?;
        // The one before is reaped.
        drop(std::mem::replace(self, next));
        Ok(())
    }

    /// The process that watches. Like all children it ends up in lists of ours, but those who wait for any do not find it.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Completes once, when it has ended: somebody has killed it.
    pub(crate) async fn ended(&mut self) {
        match &self.end {
            Some(end) => end.ended().await,
            None => pending().await,
        }
        self.end = None;
    }

    /// Whether it ends the job, or has, since it had no word in time that the lock lasts longer. Its id is its own until it is dropped.
    pub(crate) fn has_fired(&self) -> bool {
        // Not yet while its program is read, but again before it kills anybody.
        is_named(self.pid, watcher::ENDS)
    }

    /// Has a child of ours say that it becomes the command, since we may not live to do so. It lets go of the pipe, by which the watch would take
    /// us for alive until its program is read. Allocates nothing.
    pub(crate) fn is_over_us(&self) -> rustix::io::Result<()> {
        let written = rustix::io::write(self.tell.as_fd(), &Word::Job(Some(getpid())).bytes());
        watcher::let_go(self.tell.as_raw_fd());
        written.map(drop)
    }

    /// The command has ended. Its id may be another's from now on.
    pub(crate) fn forget(&self) {
        self.tell(Word::Job(None));
    }

    /// Until when the lock lasts: if we say nothing else by then, the job is to end.
    pub(crate) fn lasts_until(&mut self, until: Option<Instant>) {
        if until != self.until {
            self.until = until;
            self.tell(Word::Until(until.map_or(u64::MAX, Instant::as_nanos)));
        }
    }

    /// We are about to be stopped with all of the job, of which some are stopped already; if a part of it goes on, we are to go on, too. Says how many
    /// parts stay stopped if we are killed then.
    pub(crate) fn stands_in(
        &self,
        stopped: impl Iterator<Item = Pid>,
        others: impl Iterator<Item = Pid>,
    ) -> usize {
        let words = stopped.map(|part| Word::Stopped(Some(part)));
        let words = words.chain(others.map(|part| Word::Stopping(Some(part))));
        let (until, mut count) = (std::time::Instant::now() + TOLD_WITHIN, 0);
        let untold = words.filter(|word| {
            let is_told = count < watcher::KNOWS && self.tell_until(*word, until);
            count += usize::from(is_told);
            !is_told
        });
        let untold = untold.count();
        // Where the lock does not outlive us, all of the job is killed.
        if self.keeps { untold } else { 0 }
    }

    /// We go on.
    pub(crate) fn stands_back(&self) {
        self.tell(Word::Stopped(None));
    }

    /// Has it go on if somebody has stopped it.
    pub(crate) fn wake(&self) {
        if Stat::of(self.pid).is_some_and(|stat| stat.is_stopped) {
            let _ = kill_process(self.pid, Signal::CONT);
        }
    }

    /// As below, and waits for it to hear what was told before, of which the pipe holds some thousand words.
    fn tell_until(&self, word: Word, until: std::time::Instant) -> bool {
        loop {
            let written = rustix::io::write(self.tell.as_fd(), &word.bytes());
            let left = until.saturating_duration_since(std::time::Instant::now());
            if written != Err(Errno::AGAIN) || left.is_zero() {
                return written.is_ok();
            }
            let left = Timespec::try_from(left).unwrap_or_default();
            let _ = poll(&mut [PollFd::new(&self.tell, PollFlags::OUT)], Some(&left));
        }
    }

    fn tell(&self, word: Word) {
        let _ = rustix::io::write(self.tell.as_fd(), &word.bytes());
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // As if we had been killed: the job runs, and what unwinds next would release its lock.
            std::process::abort();
        }
        watcher::reap(self.pid);
    }
}

/// What it becomes. It is told of no claim but ours, not to be taken for a part of a job around us.
fn verb(guard: &Guard, keeps: bool, orders: Orders<'_>) -> Command {
    let mut verb = Command::new("clinch");
    verb.args([VERB, &guard.claim_id().to_string()]);
    verb.args(namespace::is_the_job().then_some("--ended"));
    verb.args((orders.orphans == Orphans::Wait).then_some("--all"));
    forget_jobs(&mut verb);
    if keeps || orders.closed_until.is_some() || orders.turn.is_some() {
        // It may have a password, which everybody would see in its words.
        verb.env("CLINCH_URL", &orders.store.url);
    }
    if keeps {
        verb.arg(format!("--keep={}", guard.name()));
        verb.args(orders.grace.map(|grace| format!("--grace={}", grace.as_millis())));
    }
    let closing = |guard: &Guard, until| Closing {
        until,
        claim: guard.claim_id(),
        name: guard.name().as_str().to_owned(),
    };
    verb.args(orders.closed_until.map(|until| format!("--close={}", closing(guard, until))));
    verb.args(orders.turn.map(|(turn, until)| format!("--count={}", closing(turn, until))));
    verb.arg(format!("--of={}", std::process::id()));
    verb.arg(format!("--ttl={}", orders.ttl.as_millis()));
    verb
}
