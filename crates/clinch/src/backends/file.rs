//! `file://`: locks of one host with no server: byte-range locks on files, owned by open file descriptions.
//!
//! One never-unlinked file per lock name. A claim's ticket is the byte that it keeps locked; the kernel frees it with
//! the last descriptor, so a killed holder or waiter is gone at once and no lease is needed. The ticket orders the queue
//! and is the fencing token. Waiters sleep on inotify events of the one file whose close concerns them.
//!
//! | file | is for |
//! | --- | --- |
//! | `dir.rs` | the directory: where, whose, on what file system; names to file names |
//! | `examine.rs` | what its promises rest on, for people |
//! | `ofd.rs` | the byte-range locks themselves |
//! | `layout.rs` | what stands in a lock file, and where |
//! | `lock_file.rs` | one open lock file: who is live in it, taking a ticket |
//! | `slot.rs` | a claim of this process: its steps |
//! | `waiting.rs` | what a queued claim waits for |
//! | `store.rs` | the backend, and claims of other processes |
//! | `watch.rs` | inotify: waking the one waiter that an event concerns |
//! | `turns.rs` | turns of waiters that nobody polls |
//! | `times.rs` | all waits and windows |
//!
//! A child that was forked without `exec` has copies of its parent's descriptors: if the parent dies while it lives, what the
//! parent held or waited for stays taken, in the parent's name, until the child ends too. A program that is executed has none.
//!
//! Ends of leases and of evictions are moments of `CLOCK_BOOTTIME`. Processes in time namespaces whose clocks differ must not share a
//! directory: an end that one writes may be past, or far away, for another.
//!
//! The directory must stay where it is. A lock is held wherever its file is, but newcomers go by the path: when the file, the
//! directory or one above it is moved or removed, or the process changes its root, they take the lock in a new file. Its
//! holder is told within 4 s, a client that makes new claims in the old one gets an error a second later, and nothing can
//! keep the two apart until then. Whoever may not look at the path any more, since it gave up its privileges, is not told: its
//! renewals and `verify` fail, but it hears of an eviction.
//!
//! A process knows its own claims by host name and process id. Those in several PID namespaces that share a directory need host
//! names of their own, as containers have: else one may give the claim of another an end, after which that can be freed under it.

#[cfg(target_os = "linux")]
mod dir;
#[cfg(target_os = "linux")]
mod examine;
#[cfg(target_os = "linux")]
mod layout;
#[cfg(target_os = "linux")]
mod lock_file;
#[cfg(target_os = "linux")]
mod ofd;
#[cfg(target_os = "linux")]
mod slot;
#[cfg(target_os = "linux")]
mod store;
#[cfg(target_os = "linux")]
mod times;
#[cfg(target_os = "linux")]
mod turns;
#[cfg(target_os = "linux")]
mod waiting;
#[cfg(target_os = "linux")]
mod watch;

use std::path::Path;
use std::sync::Arc;

use crate::backend::Backend;
use crate::check::Check;
use crate::env::Env;
use crate::error::Result;
use crate::url::StoreUrl;

/// The store of the lock files in this directory, which is made with mode 0700 if it is not there.
///
/// What `file:///dir` connects to. An empty path is the user's default directory.
///
/// # Errors
///
/// [`ErrorKind::Refused`](crate::ErrorKind::Refused) for a network file system and for a directory that others could
/// change; [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) on systems other than Linux, whose open file
/// description locks this needs.
pub fn open(dir: &Path, env: Env) -> Result<Arc<dyn Backend>> {
    open_on(dir, env, false)
}

/// The directory that `file://` alone means: `$XDG_STATE_HOME/clinch`, else `~/.local/state/clinch`, and
/// `/var/lib/clinch` for root.
///
/// # Errors
///
/// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) when neither variable is set.
#[cfg(target_os = "linux")]
pub fn default_dir() -> Result<std::path::PathBuf> {
    dir::default_path()
}

/// Refuses, as everything of `file://` does elsewhere.
#[cfg(not(target_os = "linux"))]
pub fn default_dir() -> Result<std::path::PathBuf> {
    Err(unsupported())
}

/// Opens the store of a URL: `file:///dir[?network-fs=allow]`, or `file://` for the user's default directory.
pub(crate) fn open_url(url: &mut StoreUrl, env: &Env) -> Result<Arc<dyn Backend>> {
    let network_allowed = network_allowed(url)?;
    open_on(Path::new(&url.path), env.clone(), network_allowed)
}

/// Looks at the directory of a URL, also at one that is refused.
#[cfg(target_os = "linux")]
pub(crate) fn examine_url(url: &mut StoreUrl, _env: &Env) -> Result<Vec<Check>> {
    let network_allowed = network_allowed(url)?;
    url.finish()?;
    examine::examine(Path::new(&url.path), network_allowed)
}

/// Refuses, as everything of `file://` does elsewhere.
#[cfg(not(target_os = "linux"))]
pub(crate) fn examine_url(_url: &mut StoreUrl, _env: &Env) -> Result<Vec<Check>> {
    Err(unsupported())
}

/// Whether a URL says that a network file system may be used; refuses one that is not for this host.
fn network_allowed(url: &mut StoreUrl) -> Result<bool> {
    let network_allowed = match url.take("network-fs")?.as_deref() {
        None => false,
        Some("allow") => true,
        Some(other) => {
            return Err(crate::Error::invalid(format!(
                "network-fs= takes only \"allow\"; \"{}\" is not it",
                url.shown(other)
            )));
        }
    };
    if !matches!(url.authority.as_str(), "" | "localhost") {
        return Err(crate::Error::invalid(
            "file:// is for this host: write file:///DIRECTORY, with an absolute path",
        ));
    }
    Ok(network_allowed)
}

#[cfg(target_os = "linux")]
fn open_on(dir: &Path, env: Env, network_allowed: bool) -> Result<Arc<dyn Backend>> {
    let file = store::File::new(dir::Dir::open(dir, network_allowed)?, env)?;
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn open_on(_dir: &Path, _env: Env, _network_allowed: bool) -> Result<Arc<dyn Backend>> {
    Err(unsupported())
}

#[cfg(not(target_os = "linux"))]
fn unsupported() -> crate::Error {
    crate::Error::new(
        crate::ErrorKind::Unsupported,
        "file:// is not supported yet on this system; it needs Linux",
    )
}
