//! The way to a directory of lock files: who could make its path lead elsewhere would split each lock in two.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::io::Errno;

use super::access::refused;
use super::dir::kind;
use super::users::{self, Me};
use crate::error::{Error, Result};

const STICKY: u32 = 0o1000;

/// Links that the kernel follows in one path.
const MOST_LINKS: u32 = 40;

/// A step from one directory to the next.
enum Step {
    ToRoot,
    Up,
    To(OsString),
}

/// Refuses a path that others could make lead elsewhere. Goes as the kernel does: whoever may replace a link in the middle of a chain
/// chooses where the rest begins. `owner`: whose the directory at its end is.
pub(super) fn check(path: &Path, owner: u32, me: &Me) -> Result<()> {
    let unseen = |error: io::Error| {
        Error::new(kind(&error), format!("cannot look at what is above {}", path.display()))
            .with_source(error)
    };
    // Whoever has the root directory can replace everything.
    let of_root = Path::new("/").metadata().map_err(unseen)?.uid();
    let (known, overflow) = (Some(owner).filter(|owner| Some(*owner) != me.stranger), users::overflow());
    let mut at = PathBuf::from("/");
    let mut steps = steps(path);
    let mut links = 0;
    while let Some(step) = steps.pop_front() {
        let name = match step {
            Step::ToRoot => {
                at = PathBuf::from("/");
                continue;
            }
            Step::Up => {
                at.pop();
                continue;
            }
            Step::To(name) => name,
        };
        let next = at.join(name);
        let (above, entry) = (at.metadata().map_err(unseen)?, next.symlink_metadata().map_err(unseen)?);
        let has_root = has_root((of_root, overflow), &at);
        let trusted = |user| me.trusts(user) || Some(user) == known || user == of_root && has_root;
        let private = is_private(&above, trusted) && !has_list(&at);
        if !is_safe((above.uid(), above.mode()), private, me.trusts(entry.uid()), trusted) {
            return refused(
                format!(
                    "others can put something else in place of {}, since they may write to {} (of {}, mode {:o})",
                    next.display(),
                    at.display(),
                    users::user(above.uid()),
                    above.mode() & 0o7777
                ),
                "use a directory that has only safe ones above it, and above each link on the way to it: of root or its own user, and not to \
                 be written by others",
            );
        }
        if !entry.is_symlink() {
            at = next;
            continue;
        }
        links += 1;
        if links > MOST_LINKS {
            return Err(unseen(rustix::io::Errno::LOOP.into()));
        }
        for step in self::steps(&next.read_link().map_err(unseen)?).into_iter().rev() {
            steps.push_front(step);
        }
    }
    Ok(())
}

/// Whether a directory that belongs to whom the root directory belongs to is as safe as that. In a user namespace these are strangers, of
/// whom nobody knows which is which; but what stands in the root directory itself was put there by its owner.
fn has_root((of_root, overflow): (u32, u32), dir: &Path) -> bool {
    of_root != overflow || dir.components().count() <= 2
}

fn steps(path: &Path) -> VecDeque<Step> {
    let step = |component| match component {
        Component::RootDir => Some(Step::ToRoot),
        Component::ParentDir => Some(Step::Up),
        Component::Normal(name) => Some(Step::To(name.to_owned())),
        Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(step).collect()
}

/// Whether the group of a directory is nobody but its trusted owner: many systems give each user such a group, and let it write.
fn is_private(above: &std::fs::Metadata, trusted: impl Fn(u32) -> bool) -> bool {
    above.mode() & 0o020 != 0 && trusted(above.uid()) && users::is_alone_in(above.uid(), above.gid())
}

/// Whether a directory has an access control list, with which the bits of its group say what others may do at most.
fn has_list(dir: &Path) -> bool {
    let found = rustix::fs::getxattr(dir, "system.posix_acl_access", &mut [0_u8; 0]);
    !matches!(found, Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS))
}

/// Whether nobody but root, this user and the directory's owner can have put its way there. `private`: its group is its owner's alone.
/// `kept`: what leads on from here is of a user whom the sticky bit may protect.
fn is_safe((above, mode): (u32, u32), private: bool, kept: bool, trusted: impl Fn(u32) -> bool) -> bool {
    let others = if private { 0o002 } else { 0o022 };
    (mode & others == 0 || mode & STICKY != 0 && kept) && trusted(above)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn whoever_could_replace_an_entry_makes_its_directory_unsafe() {
        let me = Me { id: 1000, groups: vec![50], stranger: None };
        let safe = |above, mode, entry, owner| {
            is_safe((above, mode), false, me.trusts(entry), |user| me.trusts(user) || user == owner)
        };
        assert!(safe(0, 0o755, 7, 7) && safe(7, 0o755, 7, 7) && safe(1000, 0o700, 1000, 1000));
        assert!(safe(0, 0o1777, 0, 0) && safe(0, 0o1777, 1000, 1000));
        assert!(!safe(0, 0o1777, 7, 7), "anybody may have come first in a directory as /tmp");
        assert!(!safe(0, 0o775, 0, 0) && !safe(0, 0o777, 0, 0) && !safe(8, 0o755, 7, 7));
        let private = |mode| is_safe((1000, mode), true, true, |user| me.trusts(user));
        assert!(private(0o775) && !private(0o777), "a user's own group may write");
    }

    #[test]
    fn a_strangers_home_is_not_roots() {
        let trusted = |dir: &str| has_root((65_534, 65_534), Path::new(dir));
        assert!(trusted("/") && trusted("/home") && !trusted("/home/mallory"));
        assert!(has_root((0, 65_534), Path::new("/home/ann/locks")));
    }

    #[test]
    fn links_that_lead_to_each_other_end() {
        let parent = tempfile::tempdir().unwrap();
        symlink("b", parent.path().join("a")).unwrap();
        symlink("a", parent.path().join("b")).unwrap();
        assert!(check(&parent.path().join("a"), 0, &Me::now()).is_err());
    }
}
