//! The directory of lock files: where it is, whose it is, what it lies on, and how files in it are opened.

use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;

use super::access::{self, Share, Sharing};
use super::layout::{LONGEST, RECORDS_AT};
use super::making::{make, whole_path};
use super::network::check_file_system;
use super::times::LOOK_AT_DIRECTORY;
use super::users::{self, Me};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};

/// Files that waiters ring, so that each wakes only its successor. More than that many waiters in one directory share.
const BELLS: u64 = 256;

/// What tells one file of this host from all others, for as long as somebody has it open.
pub(super) type Identity = (u64, u64);

/// Which file a name leads to, and when anything about that file last changed: a name of it, what stands in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) identity: Identity,
    pub(super) changed: Duration,
}

impl From<Stat> for Stamp {
    fn from(stat: Stat) -> Stamp {
        let seconds = u64::try_from(stat.st_ctime).unwrap_or(0);
        let changed = Duration::new(seconds, u32::try_from(stat.st_ctime_nsec).unwrap_or(0));
        Stamp { identity: (stat.st_dev, stat.st_ino), changed }
    }
}

/// How a directory is to be used, as its URL says.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Options {
    /// Whether it may lie on a network file system.
    pub(super) network_allowed: bool,
    pub(super) share: Share,
}

/// An open directory of lock files.
pub(super) struct Dir {
    pub(super) path: PathBuf,
    pub(super) descriptor: OwnedFd,
    identity: Identity,
    /// When the path was last seen to lead here: nanoseconds after boot.
    seen: AtomicU64,
    pub(super) sharing: Sharing,
    pub(super) me: Me,
    /// The limit on the size of this process's files, if a lock file can reach it: the write that does kills who has not taken care of it.
    limit: Option<u64>,
}

impl Dir {
    /// Opens the directory, making it with mode 0700 if it is not there. An empty path is the user's default.
    pub(super) fn open(path: &Path, options: Options) -> Result<Dir> {
        let me = Me::now();
        let path = whole_path(path, &me)?;
        make(&path, options.share, &me)?;
        let failed = |error: io::Error| {
            let hint = match kind(&error) {
                ErrorKind::Refused => access::hint(&path, options.share),
                _ => String::new(),
            };
            Error::new(kind(&error), format!("cannot open the lock directory {}{hint}", path.display()))
                .with_source(error)
        };
        let link = std::fs::symlink_metadata(&path).map_err(failed)?;
        if link.is_symlink() && !me.trusts(link.uid()) {
            return Err(Error::new(
                ErrorKind::Refused,
                format!(
                    "{} is a symbolic link that {} made; name the directory itself",
                    path.display(),
                    users::user(link.uid())
                ),
            ));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptor =
            rustix::fs::open(&path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
        let stat = rustix::fs::fstat(&descriptor).map_err(|error| failed(error.into()))?;
        let sharing = Sharing::of(&path, &stat, options.share, &me)?;
        if let Sharing::Group(_) = sharing {
            access::check_list(&path, &descriptor)?;
        }
        if !options.network_allowed {
            let system = rustix::fs::fstatfs(&descriptor).map_err(|error| failed(error.into()))?;
            check_file_system(&path, system.f_type as u32)?;
        }
        let identity = Stamp::from(stat).identity;
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        let limit = limit.filter(|limit| *limit < LONGEST);
        Ok(Dir { path, descriptor, identity, seen: AtomicU64::new(0), sharing, me, limit })
    }

    /// Whether this process may change locks here.
    pub(super) fn check_for_writing(&self) -> Result<()> {
        self.sharing.check_for_writing(&self.path)
    }

    /// Whether this process may take a new place in a lock file, which then may become as long as any.
    pub(super) fn check_room(&self) -> Result<()> {
        self.check_limit(LONGEST)
    }

    /// Whether it may rewrite what is in this one; an emptied one gets its first part anew.
    pub(super) fn check_room_in(&self, file: impl AsFd) -> Result<()> {
        if self.limit.is_none() {
            return Ok(());
        }
        let stat = rustix::fs::fstat(file).map_err(|error| self.failed(".", error))?;
        self.check_limit(u64::try_from(stat.st_size).unwrap_or(0).max(RECORDS_AT))
    }

    fn check_limit(&self, length: u64) -> Result<()> {
        let Some(limit) = self.limit.filter(|limit| *limit < length) else { return Ok(()) };
        Err(Error::new(
            ErrorKind::Exhausted,
            format!(
                "this process may write files of {limit} bytes at most, and a lock file may have {length}"
            ),
        )
        .with_remedy("raise that limit, with ulimit -f or LimitFSIZE="))
    }

    /// Whether all users of the directory share all files.
    pub(super) fn is_of_a_group(&self) -> bool {
        matches!(self.sharing, Sharing::Group(_))
    }

    /// Whose it is, and what others may do in it.
    pub(super) fn metadata(&self) -> Result<Metadata> {
        std::fs::metadata(&self.path)
            .map_err(|error| self.failed(".", Errno::from_io_error(&error).unwrap_or(Errno::IO)))
    }

    /// How it is used; what it lies on was looked at when it was opened.
    pub(super) fn options(&self) -> Options {
        let share = if self.is_of_a_group() { Share::Group } else { Share::No };
        Options { network_allowed: true, share }
    }

    /// Where it was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the creation of a file durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.descriptor)?)
    }

    /// The path of a lock file.
    pub(super) fn lock_path(&self, file: &str) -> PathBuf {
        self.path.join(file)
    }

    /// The file that newcomers find under this name; `None` when they would make a new one. By the whole path, as they
    /// come: the directory may have been moved.
    pub(super) fn stamp(&self, file: &str) -> io::Result<Option<Stamp>> {
        found(rustix::fs::CWD, &self.lock_path(file), AtFlags::SYMLINK_NOFOLLOW)
    }

    /// The file that this name leads to in this directory, which newcomers find if the path still leads here.
    pub(super) fn stamp_here(&self, file: &str) -> io::Result<Option<Stamp>> {
        found(&self.descriptor, Path::new(file), AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Whether the path leads here, and by the same mount: another may have other files mounted in it. No where the kernel does not say.
    pub(super) fn is_in_place(&self) -> bool {
        self.place().is_ok_and(|at| at.is_some_and(|at| at.identity == self.identity))
            && mount(rustix::fs::CWD, &self.path, AtFlags::empty())
                .is_some_and(|by| mount(&self.descriptor, Path::new(""), AtFlags::EMPTY_PATH) == Some(by))
    }

    /// What stands where this directory was opened.
    fn place(&self) -> io::Result<Option<Stamp>> {
        found(rustix::fs::CWD, &self.path, AtFlags::empty())
    }

    /// Refuses new claims where the path leads elsewhere by now: they would not meet those of other processes. Looks from
    /// time to time only.
    pub(super) fn check_place(&self, now: Instant) -> Result<()> {
        let seen = Instant::from_nanos(self.seen.load(Ordering::Relaxed));
        if now.since(seen) < LOOK_AT_DIRECTORY {
            return Ok(());
        }
        // Where the path may not be looked at any more, nothing is known.
        if self.place().is_ok_and(|at| at.is_none_or(|at| at.identity != self.identity)) {
            // Not to be asked again: it stays so for this client.
            return Err(Error::new(
                ErrorKind::Closed,
                format!(
                    "the lock directory {} was moved, replaced or removed; connect again",
                    self.path.display()
                ),
            ));
        }
        self.seen.store(now.as_nanos(), Ordering::Relaxed);
        Ok(())
    }

    /// Has the next claim look where the path leads.
    pub(super) fn mistrust_place(&self) {
        self.seen.store(0, Ordering::Relaxed);
    }

    /// The path of a waiter's bell.
    pub(super) fn bell_path(&self, bell: u64) -> PathBuf {
        self.path.join(self.bell_file(bell))
    }

    /// Where all users have their own files, each has bells of its own, too: another's could not be opened.
    pub(super) fn bell_file(&self, bell: u64) -> String {
        match self.sharing {
            Sharing::Beside => format!(".bell-{}-{bell:02x}", self.me.id),
            _ => format!(".bell-{bell:02x}"),
        }
    }

    /// Whether a name is one of a plain file, as those of all lock files are, or of one about which nothing can be told.
    pub(super) fn may_be_a_lock(&self, file: &str) -> bool {
        match rustix::fs::statat(&self.descriptor, file, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => FileType::from_raw_mode(stat.st_mode).is_file(),
            Err(error) => error != Errno::NOENT,
        }
    }

    /// The names of all lock files, in order.
    pub(super) fn lock_files(&self) -> Result<Vec<String>> {
        let failed = |error: io::Error| {
            Error::new(kind(&error), format!("cannot list {}", self.path.display())).with_source(error)
        };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            if let Ok(file) = entry.map_err(failed)?.file_name().into_string()
                && file.ends_with(".lock")
            {
                files.push(file);
            }
        }
        files.sort_unstable();
        Ok(files)
    }
}

impl fmt::Debug for Dir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file://{}", self.path.display())
    }
}

/// What an I/O error lets a caller conclude.
pub(super) fn kind(error: &io::Error) -> ErrorKind {
    match error.kind() {
        io::ErrorKind::PermissionDenied
        | io::ErrorKind::ReadOnlyFilesystem
        | io::ErrorKind::IsADirectory
        // A pipe in place of the file.
        | io::ErrorKind::NotSeekable => ErrorKind::Refused,
        // Nor will it ever do: nobody may wait for that.
        _ if is_unsupported(error) => ErrorKind::Refused,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            ErrorKind::Exhausted
        }
        _ if error.raw_os_error() == Some(libc::ENOLCK) => ErrorKind::Exhausted,
        io::ErrorKind::NotADirectory | io::ErrorKind::InvalidFilename => ErrorKind::Invalid,
        _ => ErrorKind::Unavailable,
    }
}

/// Whether a file system does not know what was asked of it.
pub(super) fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput)
}

/// What stands at this path from a directory; `None` when nothing does.
fn found(from: impl AsFd, path: &Path, flags: AtFlags) -> io::Result<Option<Stamp>> {
    match rustix::fs::statat(from, path, flags) {
        Ok(stat) => Ok(Some(Stamp::from(stat))),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The mount by which a directory is found.
fn mount(from: impl AsFd, path: &Path, flags: AtFlags) -> Option<u64> {
    let found = rustix::fs::statx(from, path, flags, StatxFlags::MNT_ID).ok()?;
    (found.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(found.stx_mnt_id)
}

/// Which bell the waiter with this ticket rings. Neighbours in a queue never share one.
pub(super) fn bell(name_hash: u128, ticket: u64) -> u64 {
    (name_hash as u64).wrapping_add(ticket) % BELLS
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_new_directory_and_its_files_are_private() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("state/clinch");
        let dir = Dir::open(&path, Options::default()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        dir.open_lock("n.lock", true).unwrap().unwrap();
        dir.open_bell(3).unwrap();
        for path in [dir.lock_path("n.lock"), dir.bell_path(3)] {
            assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn a_symbolic_link_planted_for_a_lock_file_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let dir = Dir::open(parent.path(), Options::default()).unwrap();
        std::fs::write(parent.path().join("victim"), "precious").unwrap();
        std::os::unix::fs::symlink("victim", parent.path().join("n.lock")).unwrap();
        let error = dir.open_lock("n.lock", true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert_eq!(std::fs::read_to_string(parent.path().join("victim")).unwrap(), "precious");
    }

    #[test]
    fn a_file_planted_in_a_shared_directory_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let shared = parent.path().join("shared");
        std::fs::create_dir(&shared).unwrap();
        std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(0o1777)).unwrap();
        let dir = Dir::open(&shared, Options::default()).unwrap();
        std::fs::write(shared.join("n.lock"), "").unwrap();
        std::fs::set_permissions(shared.join("n.lock"), std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(dir.open_lock("n.lock", true).unwrap_err().kind(), ErrorKind::Refused);
        std::fs::remove_file(shared.join("n.lock")).unwrap();
        assert!(dir.open_lock("n.lock", true).unwrap().is_some(), "our own is fine");
        std::fs::hard_link(shared.join("n.lock"), shared.join("m.lock")).unwrap();
        assert!(dir.open_lock("n.lock", true).is_err(), "a hard link could be a way in");
    }
}
