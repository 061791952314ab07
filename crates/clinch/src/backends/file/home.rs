//! The directory of a user who names none.
//!
//! It must be the same for all that one user starts, by cron and by sudo too, so it rests on the database of users and not on the
//! environment.

use std::path::{Path, PathBuf};

use super::access;
use super::users::{self, Me};
use crate::error::{Error, ErrorKind, Result};

/// Below the home of a user.
pub(super) const BELOW_HOME: &str = ".local/state/clinch";

/// The default directory of root.
pub(super) const OF_ROOT: &str = "/var/lib/clinch";

/// The default directory of this user.
pub(super) fn default_path(me: &Me) -> Result<PathBuf> {
    if me.is_root() {
        return Ok(PathBuf::from(OF_ROOT));
    }
    let home = users::home(me.id).filter(|home| home.is_absolute() && home.is_dir());
    // In a container the user may be a mere number; users of services have homes that are not there.
    let home = home.or_else(|| variable("HOME")).ok_or_else(|| {
        Error::invalid(format!("{} has no home directory", users::user(me.id)))
            .with_remedy("name the lock directory, as in file:///path")
    })?;
    Ok(home.join(BELOW_HOME))
}

/// Refuses to go on beside the lock files of earlier versions, which went by the environment: who still uses those and who uses
/// the ones in `path` would not exclude each other.
pub(super) fn check_earlier(path: &Path, me: &Me) -> Result<()> {
    if me.is_root() {
        return Ok(());
    }
    let by_state = variable("XDG_STATE_HOME").map(|state| state.join("clinch"));
    let Some(earlier) = by_state.or_else(|| Some(variable("HOME")?.join(BELOW_HOME))) else { return Ok(()) };
    let place = |path: &Path| path.canonicalize().ok();
    let Some(found) = place(&earlier).filter(|found| Some(found) != place(path).as_ref() && has_locks(found))
    else {
        return Ok(());
    };
    let (found, url, path) = (found.display(), access::url(&found), path.display());
    Err(Error::new(
        ErrorKind::Refused,
        format!(
            "file:// is {path}, but {found}, where earlier versions went by XDG_STATE_HOME and HOME, has lock \
             files: locks in the two do not exclude each other"
        ),
    )
    .with_remedy(format!(
        "when clinch -u {url} ls shows none, remove that directory; or go on with it by CLINCH_URL={url}, \
         which cron then needs too"
    )))
}

/// A directory that a variable names, which counts only as a whole path.
pub(super) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
}

fn has_locks(dir: &Path) -> bool {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.path().extension().is_some_and(|extension| extension == "lock"))
}
