//! Locks on a Redis server of the bench's own. The floors speak the protocol themselves; rslock, the fastest of the other
//! libraries, runs beside where it can do what is measured.

pub(super) mod contention;
pub(crate) mod held;
pub(super) mod kill;
pub(super) mod pair;
pub(crate) mod throughput;

use std::time::Duration;

use rslock::LockManager;

use crate::raw_redis::Raw;
use crate::redis_server::Calls;
use crate::report::Metric;
use crate::{Error, Result};

/// The lease of locks that are not held for long, where it has to be said: as with the other libraries' defaults.
pub(super) const LEASE: Duration = Duration::from_secs(10);

/// Commands that clients sent for one acquisition and its release.
pub(super) const COMMANDS: Metric = Metric::new("commands", "per acquisition");

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Raw,
    Clinch,
    /// Ours without queue and fencing token, which is what the others have.
    Lean,
    Rslock,
}

impl Who {
    const ALL: [Who; 4] = [Who::Raw, Who::Clinch, Who::Lean, Who::Rslock];

    const fn name(self) -> &'static str {
        match self {
            Who::Raw => "raw",
            Who::Clinch => "clinch",
            Who::Lean => "clinch, lean=on",
            Who::Rslock => "rslock",
        }
    }

    /// How a worker process is told.
    const fn word(self) -> &'static str {
        match self {
            Who::Lean => "lean",
            other => other.name(),
        }
    }

    fn from_word(word: &str) -> Result<Who> {
        let found = Who::ALL.into_iter().find(|who| who.word() == word);
        found.ok_or_else(|| format!("nobody is measured as \"{word}\"").into())
    }

    /// The URL by which our library locks like this.
    fn url(self, server: &str) -> String {
        match self {
            Who::Lean => format!("{server}?lean=on"),
            _ => server.to_owned(),
        }
    }

    /// The commands on data that it sends itself. All others come from its scripts.
    const fn direct(self) -> &'static [&'static str] {
        match self {
            Who::Raw | Who::Lean | Who::Rslock => &["set"],
            Who::Clinch => &[],
        }
    }
}

/// What was called on the server while something ran.
fn counted<T>(url: &str, body: impl FnOnce() -> Result<T>) -> Result<(T, Calls)> {
    counted_on(&[url.to_owned()], body)
}

/// What was called on all these servers while something ran.
pub(super) fn counted_on<T>(urls: &[String], body: impl FnOnce() -> Result<T>) -> Result<(T, Calls)> {
    let mut looks = Vec::new();
    for url in urls {
        let mut raw = Raw::connect(url)?;
        let before = Calls::look(&mut raw)?;
        looks.push((raw, before));
    }
    let done = body()?;
    let calls = looks.iter_mut().map(|(raw, before)| Ok(Calls::look(raw)?.since(before)));
    Ok((done, Calls::sum(calls.collect::<Result<Vec<_>>>()?)))
}

/// Locks and releases with rslock.
async fn rslock_pair(manager: &LockManager, name: &str) -> Result<()> {
    // Its error is none that can be shared between threads.
    let guard = manager.acquire(name, LEASE).await.map_err(|error| Error::from(error.to_string()))?;
    guard.release().await;
    Ok(())
}
