//! One waiter of a contest for one lock: asks, holds, releases, asks again, and notes when.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use clinch::Mutex;
use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::Result;
use crate::history::Hold;
use crate::machine::now;

/// The name of the lock.
pub(crate) const NAME: &str = "contest";

/// Who competes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Blocking flock, by waiters that rest for half a hold after each release, so that another gets the lock.
    Flock,
    /// Ours, by waiters that ask again at once.
    Clinch,
    /// Ours, by waiters that rest like those of the floor.
    Resting,
    /// Blocking flock, by waiters that ask again at once, and often win against those that wait.
    Greedy,
}

impl Kind {
    pub(crate) const ALL: [Kind; 4] = [Kind::Flock, Kind::Clinch, Kind::Resting, Kind::Greedy];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Kind::Flock => "flock",
            Kind::Clinch => "clinch",
            Kind::Resting => "clinch, resting too",
            Kind::Greedy => "flock, asking again at once",
        }
    }

    /// How a worker process is told.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Kind::Flock => "flock",
            Kind::Clinch => "clinch",
            Kind::Resting => "resting",
            Kind::Greedy => "greedy",
        }
    }

    /// How long a waiter rests after a release.
    pub(crate) fn rest(self, hold: Duration) -> Duration {
        match self {
            Kind::Flock | Kind::Resting => hold / 2,
            Kind::Clinch | Kind::Greedy => Duration::ZERO,
        }
    }

    pub(crate) fn from_word(word: &str) -> Result<Kind> {
        let found = Kind::ALL.into_iter().find(|kind| kind.word() == word);
        found.ok_or_else(|| format!("nobody competes by \"{word}\"").into())
    }
}

/// When a contest takes place and how long each hold is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) hold: Duration,
}

/// Competes with a mutex until the contest ends.
pub(crate) async fn by_mutex(mutex: Mutex, plan: Plan, rest: Duration) -> Result<Vec<Hold>> {
    let mut holds = Vec::new();
    loop {
        let want = now();
        if want >= plan.end {
            return Ok(holds);
        }
        let guard = mutex.lock().await?;
        let got = now();
        // Sleeps as the floor does. A timer of the runtime would be late by up to a millisecond.
        std::thread::sleep(plan.hold);
        let release = now();
        guard.release().await?;
        holds.push(Hold { want, got, release });
        pause(rest);
    }
}

/// Competes with blocking flock on a description of its own until the contest ends.
pub(crate) fn by_flock(path: &Path, plan: Plan, rest: Duration) -> Result<Vec<Hold>> {
    let file = open(path)?;
    let mut holds = Vec::new();
    loop {
        let want = now();
        if want >= plan.end {
            return Ok(holds);
        }
        rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
        let got = now();
        std::thread::sleep(plan.hold);
        let release = now();
        rustix::fs::flock(&file, FlockOperation::Unlock)?;
        holds.push(Hold { want, got, release });
        pause(rest);
    }
}

/// Sleeps, if at all: also a sleep of nothing is a system call.
fn pause(time: Duration) {
    if !time.is_zero() {
        std::thread::sleep(time);
    }
}

/// Opens the file that flock is called on, as `flock(1)` does.
pub(crate) fn open(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?)
}
