//! What the watch does when the wrapper of a job was killed whose lock outlives that: it keeps the lock until the job has ended, and then until the runs
//! have that are inside; and ends them all when the lock is taken away, of which nobody else would hear.

use std::time::Duration;

use clinch::backend::NOTICE;
use clinch::{ClaimId, Env, Lane, Locks};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use tokio::time::{Instant, sleep, timeout};

use super::end::{all_of, end, told_of, tree};
use super::kin::Found;
use super::supervise::LEFT_BEHIND;
use super::sys::{self, ProcessEnd};
use super::watcher;
use crate::args::Store;
use crate::connect::{Limits, block_on, connect};
use crate::exit::Failure;

/// How often it looks whether the lock was taken away. Two looks, of which the first hangs, and the end of the job have room in the notice.
const LOOKS_EVERY: Duration = Duration::from_secs(3);

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
    /// Comes back when the job has ended, of which this is the first process, if that runs.
    pub(super) fn until_it_ends(&self, job: Option<Pid>) -> Ending {
        loop {
            // Whatever fails: we have the lock's descriptor.
            match block_on(self.watch(job)) {
                Ok(ending) => return ending,
                Err(_) => std::thread::sleep(LEFT_BEHIND),
            }
        }
    }

    async fn watch(&self, job: Option<Pid>) -> Result<Ending, Failure> {
        let mut looks = Looks { kept: self, locks: None, last: Instant::now() };
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
                while timeout(LOOKS_EVERY, running.ended()).await.is_err() {
                    if looks.has_lost().await {
                        self.end(Some((job, &running))).await;
                        return Ok(Ending::TakenAway);
                    }
                }
            }
        }
        let is_of_it = told_of(self.claim, self.all);
        while let Some(one) = all_of(&is_of_it).next() {
            while is_of_it(one) == Some(true) {
                if looks.is_due() && looks.has_lost().await {
                    self.end(None).await;
                    return Ok(Ending::TakenAway);
                }
                sleep(LEFT_BEHIND).await;
            }
        }
        Ok(Ending::ByItself)
    }

    /// Ends all of it, as the wrapper would: what is asked to end, and has not in time, is killed. Nobody else has the lock before all are gone, or the
    /// notice is over.
    async fn end(&self, job: Option<(Pid, &ProcessEnd)>) {
        sys::set_name(watcher::ENDS);
        let (since, grace) = (Instant::now(), self.grace.unwrap_or_default());
        let is_of_it = told_of(self.claim, self.all || job.is_some());
        let first = async || match job {
            Some((pid, running)) => timeout(Duration::ZERO, running.ended()).await.is_err().then_some(pid),
            None => None,
        };
        let is_anybody_left = async || first().await.is_some() || all_of(&is_of_it).next().is_some();
        if !grace.is_zero() {
            let roots = first().await.into_iter().chain(all_of(&is_of_it));
            for found in tree(roots.map(|pid| Found { pid, parent: None })) {
                found.send(Signal::TERM);
                // Who is stopped does not hear it.
                found.send(Signal::CONT);
            }
        }
        while since.elapsed() < grace && is_anybody_left().await {
            sleep(LEFT_BEHIND).await;
        }
        end(first().await, &is_of_it);
        while since.elapsed() < NOTICE && is_anybody_left().await {
            sleep(LEFT_BEHIND).await;
        }
    }
}

/// Looks at what the store says of it.
struct Looks<'a> {
    kept: &'a Kept<'a>,
    /// One connection: another would make a directory anew that was removed.
    locks: Option<Locks>,
    last: Instant,
}

impl Looks<'_> {
    fn is_due(&self) -> bool {
        self.last.elapsed() >= LOOKS_EVERY
    }

    /// Whether it was taken away. A claim that a process holds has an end only then.
    async fn has_lost(&mut self) -> bool {
        self.last = Instant::now();
        if self.kept.grace.is_none() {
            return false;
        }
        if self.locks.is_none() {
            self.locks = connect(self.kept.store).await.ok();
        }
        let (Some(locks), Ok(lane)) = (&self.locks, Lane::here()) else { return false };
        let state = Limits::of_a_question(&Env::host(lane)).keep(locks.state(self.kept.name)).await;
        let claims = state.ok().flatten().map(|state| state.claims).unwrap_or_default();
        claims.iter().any(|one| one.id == self.kept.claim && one.granted && one.expires_in.is_some())
    }
}
