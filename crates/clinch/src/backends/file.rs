//! `file://`: locks of one host with no server: byte-range locks on files, owned by open file descriptions.
//!
//! One never-unlinked file per lock name. A claim's ticket is the byte that it keeps locked; the kernel frees it with
//! the last descriptor, so a killed holder or waiter is gone at once and no lease is needed. The ticket orders the queue
//! and is the fencing token. Waiters sleep on inotify events of the one file whose close concerns them.
//!
//! | file | is for |
//! | --- | --- |
//! | `dir.rs` | the directory: where it is, and whether it still is there |
//! | `examine.rs` | what its promises rest on, for people |
//! | `opening.rs` | how files in it are opened and made |
//! | `access.rs` | who may use a directory, and a file in it |
//! | `home.rs` | the directory of a user who names none |
//! | `users.rs` | users and groups of this host |
//! | `network.rs` | file systems on which no directory may lie |
//! | `ofd.rs` | the byte-range locks themselves |
//! | `layout.rs` | what stands in a lock file, and where |
//! | `header.rs` | its header: the last ticket, and until when it is closed |
//! | `record.rs` | the record of a claim in it |
//! | `lock_file.rs` | one open lock file: who is live in it |
//! | `held.rs` | one that is held: taking a ticket, closing, changing records |
//! | `enter.rs` | a claim of this process: its steps until it is granted |
//! | `slot.rs` | a claim of this process: what is looked after, and its end |
//! | `waiting.rs` | what a queued claim waits for |
//! | `others.rs` | claims of other processes: renewing and ending them |
//! | `store.rs` | the backend |
//! | `watch.rs` | inotify: waking the one waiter that an event concerns |
//! | `turns.rs` | turns of waiters that nobody polls |
//! | `times.rs` | all waits and windows |
//!
//! # Who shares a directory
//!
//! `file:///dir` is one user's: files have mode 0600, and a directory is made with mode 0700. `file://` alone is `~/.local/state/clinch`, and
//! `/var/lib/clinch` for root, by the database of users and not by the environment. Processes of other users have other directories, and
//! so do not exclude these. Root may look (`list`, `state`) into the directory of any user, not take locks there.
//!
//! `file:///var/lib/clinch-group?share=group` is for root and all members of the directory's group, which root makes first: `install -d -g
//! GROUP -m 3770 /var/lib/clinch-group`. It must be writable by its group and no others, sticky, and root's or setgid; nothing above it may be
//! writable by others, unless it is sticky and what leads on from it is root's or one's own. Files are the group's, with mode
//! 0660 whatever the umask. A file with another group, mode, or a second name is refused, as are links and whatever is no plain file. A member
//! can hold, renew and evict any lock, write anything into the files, and remove those that it made, which splits a lock until its
//! holder is told.
//!
//! The mode of a directory decides, and a URL that says otherwise is refused with the one to use.
//!
//! # What to know
//!
//! A child that was forked without `exec` has copies of its parent's descriptors: if the parent dies while it lives, what the
//! parent held or waited for stays taken, in the parent's name, until the child ends too. A program that is executed has none.
//!
//! Ends of leases and of evictions are moments of `CLOCK_BOOTTIME`. Processes in time namespaces whose clocks differ must not share a
//! directory: an end that one writes may be past, or far away, for another.
//!
//! A directory in memory, as `/run` and on some hosts `/tmp`, is empty after a reboot: tokens go on from the wall clock then, and what was to
//! stay closed is open.
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
mod access;
#[cfg(target_os = "linux")]
mod dir;
#[cfg(target_os = "linux")]
mod enter;
#[cfg(target_os = "linux")]
mod examine;
#[cfg(target_os = "linux")]
mod header;
#[cfg(target_os = "linux")]
mod held;
#[cfg(target_os = "linux")]
mod home;
#[cfg(target_os = "linux")]
mod layout;
#[cfg(target_os = "linux")]
mod lock_file;
#[cfg(target_os = "linux")]
mod making;
#[cfg(target_os = "linux")]
mod network;
#[cfg(target_os = "linux")]
mod ofd;
#[cfg(target_os = "linux")]
mod opening;
#[cfg(target_os = "linux")]
mod others;
#[cfg(target_os = "linux")]
mod record;
#[cfg(target_os = "linux")]
mod slot;
#[cfg(target_os = "linux")]
mod store;
#[cfg(target_os = "linux")]
mod times;
#[cfg(target_os = "linux")]
mod turns;
#[cfg(target_os = "linux")]
mod users;
#[cfg(target_os = "linux")]
mod waiting;
#[cfg(target_os = "linux")]
mod watch;
#[cfg(target_os = "linux")]
mod way;

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
    open_on(dir, env, Asked::default())
}

/// The directory that `file://` alone means: `~/.local/state/clinch`, and `/var/lib/clinch` for root. The home is the one that the
/// database of users says, not `$HOME`, unless there is no such user or directory.
///
/// # Errors
///
/// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) when the user has no home.
#[cfg(target_os = "linux")]
pub fn default_dir() -> Result<std::path::PathBuf> {
    home::default_path(&users::Me::now())
}

/// The directory that a URL of `file://` names, which may not be there yet; `None` for what is no such URL.
#[cfg(target_os = "linux")]
pub fn dir_of(url: &str) -> Option<std::path::PathBuf> {
    let url = StoreUrl::parse(url).ok().filter(|url| url.scheme == "file")?;
    if url.path.is_empty() { default_dir().ok() } else { Some(url.path.into()) }
}

/// There is none, as there is nothing of `file://`.
#[cfg(not(target_os = "linux"))]
pub fn dir_of(_url: &str) -> Option<std::path::PathBuf> {
    None
}

/// Refuses, as everything of `file://` does elsewhere.
#[cfg(not(target_os = "linux"))]
pub fn default_dir() -> Result<std::path::PathBuf> {
    Err(unsupported())
}

/// Opens the store of a URL: `file:///dir[?network-fs=allow][&share=group]`, or `file://` for the user's default directory.
pub(crate) fn open_url(url: &mut StoreUrl, env: &Env) -> Result<Arc<dyn Backend>> {
    let asked = asked(url)?;
    open_on(Path::new(&url.path), env.clone(), asked)
}

/// Whether to open the directory of a URL would make it.
#[cfg(target_os = "linux")]
pub(crate) fn is_unmade(url: &mut StoreUrl) -> Result<bool> {
    let asked = asked(url)?;
    making::is_unmade(Path::new(&url.path), asked.into())
}

/// None is made, as nothing of `file://` is.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_unmade(_url: &mut StoreUrl) -> Result<bool> {
    Ok(false)
}

/// Looks at the directory of a URL, also at one that is refused.
#[cfg(target_os = "linux")]
pub(crate) fn examine_url(url: &mut StoreUrl, _env: &Env) -> Result<Vec<Check>> {
    let asked = asked(url)?;
    url.finish()?;
    Ok(examine::examine(Path::new(&url.path), asked.into()))
}

/// Refuses, as everything of `file://` does elsewhere.
#[cfg(not(target_os = "linux"))]
pub(crate) fn examine_url(_url: &mut StoreUrl, _env: &Env) -> Result<Vec<Check>> {
    Err(unsupported())
}

/// What a URL says of its directory.
#[derive(Clone, Copy, Default)]
struct Asked {
    network_allowed: bool,
    shared: bool,
}

#[cfg(target_os = "linux")]
impl From<Asked> for dir::Options {
    fn from(asked: Asked) -> dir::Options {
        let share = if asked.shared { access::Share::Group } else { access::Share::No };
        dir::Options { network_allowed: asked.network_allowed, share }
    }
}

/// Takes it; refuses a URL that is not for this host.
fn asked(url: &mut StoreUrl) -> Result<Asked> {
    let network_allowed = take_word(url, "network-fs", "allow")?;
    let shared = take_word(url, "share", "group")?;
    if !matches!(url.authority.as_str(), "" | "localhost") {
        return Err(crate::Error::invalid(
            "file:// is for this host: write file:///DIRECTORY, with an absolute path",
        ));
    }
    if shared && url.path.is_empty() {
        return Err(crate::Error::invalid(
            "share=group needs a directory that is not one user's: file:///var/lib/clinch-group?share=group",
        ));
    }
    Ok(Asked { network_allowed, shared })
}

/// Takes a key that has one value; says whether it is there.
fn take_word(url: &mut StoreUrl, key: &'static str, word: &str) -> Result<bool> {
    match url.take(key)?.as_deref() {
        None => Ok(false),
        Some(value) if value == word => Ok(true),
        Some(other) => {
            let other = url.shown(other);
            Err(crate::Error::invalid(format!("{key}= takes only \"{word}\"; \"{other}\" is not it")))
        }
    }
}

#[cfg(target_os = "linux")]
fn open_on(dir: &Path, env: Env, asked: Asked) -> Result<Arc<dyn Backend>> {
    let dir = dir::Dir::open(dir, asked.into())?;
    let file = store::File::new(dir, env)?;
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn open_on(_dir: &Path, _env: Env, _asked: Asked) -> Result<Arc<dyn Backend>> {
    Err(unsupported())
}

#[cfg(not(target_os = "linux"))]
fn unsupported() -> crate::Error {
    crate::Error::new(
        crate::ErrorKind::Unsupported,
        "file:// is not supported yet on this system; it needs Linux",
    )
}
