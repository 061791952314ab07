//! Which directory of lock files is meant, and how it is made where it is not there.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::access::{self, Share};
use super::dir::{Options, kind};
use super::home;
use super::users::{self, Me};
use super::way;
use crate::error::{Error, ErrorKind, Result};

/// The directory that is meant by a path, which may be empty.
pub(super) fn whole_path(path: &Path, me: &Me) -> Result<PathBuf> {
    let path = match path.as_os_str().is_empty() {
        true => default_path(me)?,
        false => path.to_path_buf(),
    };
    std::path::absolute(&path).map_err(|error| {
        Error::new(kind(&error), format!("cannot tell where {} is", path.display())).with_source(error)
    })
}

/// Whether to open the directory would make it.
pub(super) fn is_unmade(path: &Path, options: Options) -> Result<bool> {
    Ok(is_missing(&whole_path(path, &Me::now())?) && options.share != Share::Group)
}

fn is_missing(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Makes the directory if it is not there, and those above it.
pub(super) fn make(path: &Path, share: Share, me: &Me) -> Result<()> {
    if !is_missing(path) {
        return Ok(());
    }
    if share == Share::Group {
        return Err(access::not_made(path));
    }
    let above = path.ancestors().find(|above| !above.as_os_str().is_empty() && !is_missing(above));
    let owner = above.and_then(|above| above.metadata().ok()).map_or(0, |above| above.uid());
    if me.is_root() && owner != 0 {
        let (path, owner) = (path.display(), users::user(owner));
        return Err(Error::new(
            ErrorKind::Refused,
            format!(
                "there is no {path}, and root makes none in a directory of {owner}, who could not use it; make it first"
            ),
        ));
    }
    above.map_or(Ok(()), |above| way::check(above, me.id, me))?;
    // One by one, each looked at before anything is made in it: somebody may plant a link meanwhile.
    let missing: Vec<_> = path.ancestors().take_while(|dir| Some(*dir) != above).collect();
    for dir in missing.into_iter().rev() {
        let made = std::fs::DirBuilder::new().mode(0o700).create(dir);
        if let Err(error) = made.or_else(|error| match error.kind() {
            // Another was quicker.
            io::ErrorKind::AlreadyExists => Ok(()),
            _ => Err(error),
        }) {
            let message = format!("cannot make the lock directory {}", dir.display());
            return Err(Error::new(kind(&error), message).with_source(error));
        }
        way::check(dir, me.id, me)?;
    }
    Ok(())
}

/// The directory that an empty path means.
fn default_path(me: &Me) -> Result<PathBuf> {
    let path = home::default_path(me)?;
    home::check_earlier(&path, me)?;
    Ok(path)
}
