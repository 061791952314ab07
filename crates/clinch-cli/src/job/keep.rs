//! What the watch does when the wrapper of a job was killed whose lock outlives that: it keeps the lock until the job has ended, and then until the runs
//! have that are inside; and ends them all when the lock is taken away, of which nobody else would hear.

use std::time::Duration;

use clinch::backend::NOTICE;
use clinch::{ClaimId, Env, Lane, Locks};
use rustix::io::Errno;
use rustix::process::Pid;
use tokio::time::{Instant, sleep, timeout};

use super::parts::{Part, Parts, all_of, told_of};
use super::supervise::LEFT_BEHIND;
use super::sys::{self, ProcessEnd};
use super::watcher;
use crate::args::Store;
use crate::connect::{Limits, block_on, connect};
use crate::exit::Outcome;

/// How often it looks whether the lock was taken away. Two looks, of which the first hangs, and the end of the job have room in the notice.
const LOOKS_EVERY: Duration = Duration::from_secs(3);

/// The pause before it looks again for a claim that is not listed: that may be just being rewritten.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// How soon it looks again at parts that are to end: what one starts, and leaves behind, between two looks is not found.
const ROUND: Duration = Duration::from_millis(20);

/// How long it may take to kill all of a job, also on a busy host. So much of the notice is left for that.
const KILLED_IN: Duration = Duration::from_millis(500);

/// The lock of a job.
pub(super) struct Kept<'a> {
    pub(super) store: &'a Store,
    pub(super) name: &'a str,
    pub(super) claim: ClaimId,
    /// Whether what the job leaves behind is of it.
    pub(super) all: bool,
    /// How long it has to end when the lock is taken away; `None`: it goes on.
    pub(super) grace: Option<Duration>,
}

/// How the time of a lock ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    ByItself,
    TakenAway,
}

impl Kept<'_> {
    /// Comes back when the job has ended, of which this is the first process, if that runs; and when what is to be done beside that is done, too.
    pub(super) fn until_it_ends(
        &self,
        job: Option<Pid>,
        beside: impl AsyncFn() -> Outcome,
    ) -> (Ending, Outcome) {
        loop {
            // Whatever fails: we have the lock's descriptor.
            match block_on(async { Ok(tokio::join!(self.watch(job), beside())) }) {
                Ok(both) => return both,
                Err(_) => std::thread::sleep(LEFT_BEHIND),
            }
        }
    }

    async fn watch(&self, job: Option<Pid>) -> Ending {
        let mut looks = Looks { kept: self, locks: None, last: None };
        if let Some(job) = job {
            let running = loop {
                match ProcessEnd::of(job) {
                    Err(error) if Errno::from_io_error(&error) != Some(Errno::SRCH) => {
                        sleep(LEFT_BEHIND).await
                    }
                    running => break running.ok(),
                }
            };
            if let Some(running) = running {
                let first = Part::who_has(job);
                // The first look at once: the lock may be gone since before this began to keep it.
                let mut pause = Duration::ZERO;
                while timeout(pause, running.ended()).await.is_err() {
                    if let Some(time) = looks.lost().await {
                        self.end(first.clone(), Some(&running), time).await;
                        return Ending::TakenAway;
                    }
                    pause = LOOKS_EVERY;
                }
            }
        }
        let is_of_it = told_of(self.claim, self.all);
        while let Some(one) = all_of(&is_of_it).next() {
            while is_of_it(one.pid()) == Some(true) {
                if looks.is_due()
                    && let Some(time) = looks.lost().await
                {
                    self.end(None, None, time).await;
                    return Ending::TakenAway;
                }
                sleep(LEFT_BEHIND).await;
            }
        }
        Ending::ByItself
    }

    /// Ends all of it, as the wrapper would: what is asked to end, and has not in time, is killed. Nobody else has the lock before all are gone, or the
    /// notice is over. Of its first process nothing may be told but that it runs: where there are no descriptors to spare.
    async fn end(&self, first: Option<Part>, running: Option<&ProcessEnd>, time: Time) {
        sys::set_name(watcher::ENDS);
        let since = Instant::now();
        let mut parts = Parts::new(first, told_of(self.claim, self.all || running.is_some()));
        // To find them may take a while. What they have begins when they hear of it.
        if Instant::now() < time.until && parts.ask_to_end(time.until.into_std()) {
            let until = time.until.min(Instant::now() + time.grace);
            while Instant::now() < until && (parts.are_left() || runs(running).await) {
                sleep(ROUND).await;
            }
        }
        let until = since + NOTICE;
        loop {
            parts.kill(until.into_std());
            if Instant::now() > until || !(parts.are_left() || runs(running).await) {
                return;
            }
            sleep(ROUND).await;
        }
    }
}

async fn runs(process: Option<&ProcessEnd>) -> bool {
    match process {
        Some(process) => timeout(Duration::ZERO, process.ended()).await.is_err(),
        None => false,
    }
}

/// Looks at what the store says of it.
struct Looks<'a> {
    kept: &'a Kept<'a>,
    locks: Option<Locks>,
    last: Option<Instant>,
}

/// What a job has to end when the lock was taken away.
#[derive(Clone, Copy, Debug)]
struct Time {
    /// For so long, from when it is asked.
    grace: Duration,
    /// But no longer than until then.
    until: Instant,
}

/// What a look has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Held,
    /// Evicted: it is ours until the notice is over, which has so much left.
    Ending(Duration),
    /// Another may hold it: the notice is over, or the lock's file was removed.
    Gone,
}

impl Looks<'_> {
    fn is_due(&self) -> bool {
        self.last.is_none_or(|last| last.elapsed() >= LOOKS_EVERY)
    }

    /// The time that the job has to end, if the lock was taken away.
    async fn lost(&mut self) -> Option<Time> {
        self.last = Some(Instant::now());
        let grace = self.kept.grace?;
        // What a look says is left was so before it.
        let mut begun = Instant::now();
        let mut seen = self.look().await?;
        if seen == Seen::Gone {
            sleep(LOOK_AGAIN).await;
            begun = Instant::now();
            seen = self.look().await?;
        }
        match seen {
            Seen::Held => None,
            Seen::Ending(left) if !grace.is_zero() => {
                Some(Time { grace, until: begun + left.saturating_sub(KILLED_IN) })
            }
            Seen::Ending(_) | Seen::Gone => Some(Time { grace, until: begun }),
        }
    }

    /// `None`: nothing can be seen.
    async fn look(&mut self) -> Option<Seen> {
        let env = Env::host(Lane::here().ok()?);
        let locks = match self.locks.take() {
            Some(locks) => locks,
            // To connect makes a directory anew that was moved.
            None if Locks::is_unmade(&self.kept.store.url, env.clone()).ok()? => return None,
            None => connect(self.kept.store).await.ok()?,
        };
        let state = Limits::of_a_question(&env).keep(locks.state(self.kept.name)).await.ok()?;
        // Not after an error: there may be another directory in the place of the one before.
        self.locks = Some(locks);
        let claims = state.map(|state| state.claims).unwrap_or_default();
        match claims.iter().find(|one| one.id == self.kept.claim && one.granted) {
            // A claim that a process holds has an end only when it was evicted.
            Some(ours) => Some(ours.expires_in.map_or(Seen::Held, Seen::Ending)),
            // One whose record cannot be read may be ours.
            None if claims.iter().any(|one| one.id == ClaimId::from_bits(0)) => None,
            None => Some(Seen::Gone),
        }
    }
}
