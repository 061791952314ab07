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
    Clinch,
    /// Blocking flock, by waiters that rest for half a hold after each release, so that another gets the lock.
    Flock,
    /// Blocking flock, by waiters that ask again at once, and mostly win against those that wait.
    Greedy,
}

impl Kind {
    pub(crate) const ALL: [Kind; 3] = [Kind::Flock, Kind::Clinch, Kind::Greedy];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Kind::Clinch => "clinch",
            Kind::Flock => "flock",
            Kind::Greedy => "flock, asking again at once",
        }
    }

    /// How a worker process is told.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Kind::Clinch => "clinch",
            Kind::Flock => "flock",
            Kind::Greedy => "greedy",
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
pub(crate) async fn by_mutex(mutex: Mutex, plan: Plan) -> Result<Vec<Hold>> {
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
        std::thread::sleep(rest);
    }
}

/// How long the waiters of this kind rest after a release.
pub(crate) fn rest(kind: Kind, hold: Duration) -> Duration {
    if kind == Kind::Flock { hold / 2 } else { Duration::ZERO }
}

/// Opens the file that flock is called on, as `flock(1)` does.
pub(crate) fn open(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?)
}
