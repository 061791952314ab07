//! One waiter of a contest for one lock: asks, holds, releases, asks again, and notes when.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use clinch::{Guard, Locks, Mutex};
use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::Result;
use crate::history::Hold;
use crate::machine::now;
use crate::raw_etcd::{self, Http};
use crate::raw_redis::{Raw, encode};

/// The name of the lock.
pub(crate) const NAME: &str = "contest";

/// The list of the floor on Redis. Whoever has its one element has the lock.
const LIST: &str = "bench:contest";

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
    /// A token in a list of a Redis server: BLPOP takes it, LPUSH gives it to whoever has waited longest.
    Blpop,
    /// etcd's own lock for Go programs, in a program of its own.
    GoMutex,
    /// The lock that an etcd server offers by itself, which `etcd-client` and clients in other languages call.
    LockApi,
}

impl Kind {
    const ALL: [Kind; 7] =
        [Kind::Flock, Kind::Clinch, Kind::Resting, Kind::Greedy, Kind::Blpop, Kind::GoMutex, Kind::LockApi];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Kind::Flock => "flock",
            Kind::Clinch => "clinch",
            Kind::Resting => "clinch, resting too",
            Kind::Greedy => "flock, asking again at once",
            Kind::Blpop => "BLPOP + LPUSH",
            Kind::GoMutex => "Go's concurrency.Mutex",
            Kind::LockApi => "etcd's Lock API",
        }
    }

    /// How a worker process is told.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Kind::Flock => "flock",
            Kind::Clinch => "clinch",
            Kind::Resting => "resting",
            Kind::Greedy => "greedy",
            Kind::Blpop => "blpop",
            Kind::GoMutex => "go-mutex",
            Kind::LockApi => "lock-api",
        }
    }

    /// Whether it competes with the library.
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Kind::Clinch | Kind::Resting)
    }

    /// How long a waiter rests after a release.
    pub(crate) fn rest(self, hold: Duration) -> Duration {
        match self {
            Kind::Flock | Kind::Resting => hold / 2,
            Kind::Clinch | Kind::Greedy | Kind::Blpop | Kind::GoMutex | Kind::LockApi => Duration::ZERO,
        }
    }

    /// Makes a lock that nobody has, where that takes more than a name.
    pub(crate) fn prepare(self, url: &str) -> Result<()> {
        if self == Kind::Blpop {
            let mut raw = Raw::connect(url)?;
            raw.call(&["DEL", LIST])?;
            raw.call(&["LPUSH", LIST, "t"])?;
        }
        Ok(())
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

/// What the tasks of one process share.
pub(crate) enum Client {
    Ours(Locks),
    /// With the name of the lock.
    LockApi(raw_etcd::Raw<Http>, String),
}

impl Client {
    pub(crate) async fn connect(kind: Kind, url: &str) -> Result<Client> {
        Ok(match kind {
            Kind::LockApi => Client::LockApi(raw_etcd::Raw::connect(url).await?, raw_etcd::lock_key(url)),
            _ => Client::Ours(clinch::connect(url).await?),
        })
    }

    pub(crate) async fn waiter(&self) -> Result<Waiter> {
        Ok(match self {
            Client::Ours(locks) => Waiter::Ours(locks.mutex(NAME)?),
            Client::LockApi(raw, name) => {
                let mut raw = raw.clone();
                // Longer than any contest, since nobody renews it.
                let lease = raw.grant(60).await?;
                Waiter::LockApi { raw, name: name.clone(), lease }
            }
        })
    }
}

/// A waiter that is a task.
pub(crate) enum Waiter {
    Ours(Mutex),
    /// With a lease of its own, which is what owns a lock there.
    LockApi {
        raw: raw_etcd::Raw<Http>,
        name: String,
        lease: i64,
    },
}

/// A lock that is held.
enum Held {
    Ours(Guard),
    LockApi(Vec<u8>),
}

impl Waiter {
    async fn lock(&mut self) -> Result<Held> {
        Ok(match self {
            Waiter::Ours(mutex) => Held::Ours(mutex.lock().await?),
            Waiter::LockApi { raw, name, lease } => Held::LockApi(raw.lock(name, *lease).await?),
        })
    }

    async fn unlock(&mut self, held: Held) -> Result<()> {
        match (held, self) {
            (Held::LockApi(key), Waiter::LockApi { raw, .. }) => raw.unlock(key).await?,
            (Held::Ours(guard), _) => drop(guard.release().await?),
            (Held::LockApi(_), Waiter::Ours(_)) => return Err("a lock that was taken by another".into()),
        }
        Ok(())
    }

    /// Competes until the contest ends.
    pub(crate) async fn compete(mut self, plan: Plan, rest: Duration) -> Result<Vec<Hold>> {
        let mut holds = Vec::new();
        loop {
            let want = now();
            if want >= plan.end {
                return Ok(holds);
            }
            let held = self.lock().await?;
            let got = now();
            // Sleeps as the floor does. A timer of the runtime would be late by up to a millisecond.
            pause(plan.hold);
            let release = now();
            self.unlock(held).await?;
            holds.push(Hold { want, got, release });
            pause(rest);
        }
    }
}

/// A waiter of a floor: blocking calls on a description or connection of its own.
#[derive(Debug)]
pub(crate) enum Bare {
    Flock(OwnedFd),
    Blpop { raw: Raw, take: Vec<u8>, taken: Vec<u8>, give: Vec<u8> },
}

impl Bare {
    pub(crate) fn new(kind: Kind, url: &str) -> Result<Bare> {
        if kind == Kind::Blpop {
            let raw = Raw::connect(url)?;
            raw.wait_forever()?;
            let (take, give) = (encode(&["BLPOP", LIST, "0"]), encode(&["LPUSH", LIST, "t"]));
            return Ok(Bare::Blpop { raw, take, taken: encode(&[LIST, "t"]), give });
        }
        let dir = url.strip_prefix("file://").ok_or_else(|| format!("{url} is no file:// URL"))?;
        Ok(Bare::Flock(open(&Path::new(dir).join(NAME))?))
    }

    pub(crate) fn lock(&mut self) -> Result<()> {
        match self {
            Bare::Flock(file) => Ok(rustix::fs::flock(file, FlockOperation::LockExclusive)?),
            Bare::Blpop { raw, take, taken, .. } => raw.exchange(take, taken),
        }
    }

    pub(crate) fn unlock(&mut self) -> Result<()> {
        match self {
            Bare::Flock(file) => Ok(rustix::fs::flock(file, FlockOperation::Unlock)?),
            // The answer is the length of the list: 1, also when the element went on to a waiter at once.
            Bare::Blpop { raw, give, .. } => raw.exchange(give, b":1\r\n"),
        }
    }

    /// Competes until the contest ends.
    pub(crate) fn compete(mut self, plan: Plan, rest: Duration) -> Result<Vec<Hold>> {
        let mut holds = Vec::new();
        loop {
            let want = now();
            if want >= plan.end {
                return Ok(holds);
            }
            self.lock()?;
            let got = now();
            pause(plan.hold);
            let release = now();
            self.unlock()?;
            holds.push(Hold { want, got, release });
            pause(rest);
        }
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
