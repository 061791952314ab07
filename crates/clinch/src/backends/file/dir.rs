//! The directory of lock files: where it is, whose it is, what it lies on, and how files in it are opened.

use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;

use super::times::LOOK_AT_DIRECTORY;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};

/// Files that waiters ring, so that each wakes only its successor. More than that many waiters in one directory share.
const BELLS: u64 = 256;

/// File systems whose locks or change events do not reach other hosts, by the magic number of `statfs(2)`.
const NETWORK_FILE_SYSTEMS: [(u32, &str); 19] = [
    (0x0000_6969, "NFS"),
    (0x0000_517b, "SMB"),
    (0xfe53_4d42, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x0bd0_0bd0, "Lustre"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x2003_0528, "OrangeFS"),
    (0x7375_7245, "Coda"),
    (0x786f_4256, "VirtualBox's shared folder"),
    (0xbacb_acbc, "VMware's shared folder"),
    (0x0000_564c, "NCP"),
];

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

/// An open directory of lock files.
pub(super) struct Dir {
    path: PathBuf,
    descriptor: OwnedFd,
    identity: Identity,
    /// When the path was last seen to lead here: nanoseconds after boot.
    seen: AtomicU64,
    /// Whether others can put files into it: what is opened is then checked.
    shared: bool,
    user: u32,
}

impl Dir {
    /// Opens the directory, making it with mode 0700 if it is not there. An empty path is the user's default.
    pub(super) fn open(path: &Path, network_allowed: bool) -> Result<Dir> {
        let path = if path.as_os_str().is_empty() { default_path()? } else { path.to_path_buf() };
        let user = rustix::process::geteuid().as_raw();
        if let Err(error) = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path) {
            return Err(Error::new(
                kind(&error),
                format!("cannot make the lock directory {}", path.display()),
            )
            .with_source(error));
        }
        let failed = |error: io::Error| {
            Error::new(kind(&error), format!("cannot open the lock directory {}", path.display()))
                .with_source(error)
        };
        let link = std::fs::symlink_metadata(&path).map_err(failed)?;
        if link.is_symlink() && !trusted(link.uid(), user) {
            return Err(Error::new(
                ErrorKind::Refused,
                format!("{} is a symbolic link that user {} made", path.display(), link.uid()),
            )
            .with_remedy("name the directory itself"));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptor =
            rustix::fs::open(&path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
        let stat = rustix::fs::fstat(&descriptor).map_err(|error| failed(error.into()))?;
        let shared = check_owner(&path, stat.st_uid, stat.st_mode, user)?;
        if !network_allowed {
            let system = rustix::fs::fstatfs(&descriptor).map_err(|error| failed(error.into()))?;
            check_file_system(&path, system.f_type as u32)?;
        }
        let path = std::path::absolute(&path).map_err(failed)?;
        Ok(Dir {
            path,
            descriptor,
            identity: Stamp::from(stat).identity,
            seen: AtomicU64::new(0),
            shared,
            user,
        })
    }

    /// Opens the file of a lock for claiming; makes an empty one if asked.
    pub(super) fn open_lock(&self, file: &str, create: bool) -> Result<Option<OwnedFd>> {
        let opened = match self.open_file(file, OFlags::RDWR) {
            Err(Errno::NOENT) if !create => return Ok(None),
            Err(Errno::NOENT) => self.open_file(file, OFlags::RDWR | OFlags::CREATE),
            opened => opened,
        };
        self.check_file(file, opened.map_err(|error| self.failed(file, error))?).map(Some)
    }

    /// Opens a lock file for reading only, so that nobody is woken by its close.
    pub(super) fn open_for_reading(&self, file: &str) -> Result<Option<OwnedFd>> {
        match self.open_file(file, OFlags::RDONLY) {
            Ok(opened) => self.check_stat(file, opened).map(Some),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(self.failed(file, error)),
        }
    }

    /// Whose it is, and what others may do in it.
    pub(super) fn metadata(&self) -> Result<Metadata> {
        std::fs::metadata(&self.path)
            .map_err(|error| self.failed(".", Errno::from_io_error(&error).unwrap_or(Errno::IO)))
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

    /// The bell of a waiter: open for writing, its close wakes whoever watches it.
    pub(super) fn open_bell(&self, bell: u64) -> Result<OwnedFd> {
        let file = self.bell_file(bell);
        let opened = match self.open_file(&file, OFlags::WRONLY) {
            Err(Errno::NOENT) => self.open_file(&file, OFlags::WRONLY | OFlags::CREATE),
            opened => opened,
        };
        self.check_file(&file, opened.map_err(|error| self.failed(&file, error))?)
    }

    /// The path of a waiter's bell.
    pub(super) fn bell_path(&self, bell: u64) -> PathBuf {
        self.path.join(self.bell_file(bell))
    }

    /// In a shared directory each user has bells of its own: another's could not be opened.
    fn bell_file(&self, bell: u64) -> String {
        match self.shared {
            true => format!(".bell-{}-{bell:02x}", self.user),
            false => format!(".bell-{bell:02x}"),
        }
    }

    /// The names of all lock files.
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
        Ok(files)
    }

    fn open_file(&self, file: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let mode = Mode::RUSR | Mode::WUSR;
        // Nothing planted here may hang us: opening a pipe waits for its other end.
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(&self.descriptor, file, flags, mode);
        match open() {
            Err(Errno::MFILE) if raise_descriptor_limit() => open(),
            result => result,
        }
    }

    /// In a directory that others can write to, takes only files that nobody else can have planted or can change.
    fn check_file(&self, file: &str, opened: OwnedFd) -> Result<OwnedFd> {
        if self.shared { self.check_stat(file, opened) } else { Ok(opened) }
    }

    /// In any directory, takes regular files only.
    fn check_stat(&self, file: &str, opened: OwnedFd) -> Result<OwnedFd> {
        let stat = rustix::fs::fstat(&opened).map_err(|error| self.failed(file, error))?;
        let regular = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        let planted = !trusted(stat.st_uid, self.user) || stat.st_nlink > 1 || stat.st_mode & 0o022 != 0;
        if !regular || self.shared && planted {
            return Err(Error::new(
                ErrorKind::Refused,
                format!(
                    "{} was put there by user {}, can be written by others or is no plain file; use a directory of your own (mode 0700)",
                    self.path.join(file).display(),
                    stat.st_uid
                ),
            ));
        }
        Ok(opened)
    }

    fn failed(&self, file: &str, error: Errno) -> Error {
        let path = self.path.join(file);
        if error == Errno::MFILE || error == Errno::NFILE {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
            let limit = limit.map_or("no".to_owned(), |limit| limit.to_string());
            let message = format!(
                "no descriptor left to open {}: each held or awaited lock needs one or two, and this process may have \
                 {limit} (raise it with ulimit -Hn or LimitNOFILE=)",
                path.display()
            );
            return Error::new(ErrorKind::Exhausted, message).with_source(io::Error::from(error));
        }
        let odd = match error {
            Errno::LOOP => Some("a symbolic link"),
            // Opened by force only: whoever may do so has a lease on it (`F_SETLEASE`).
            Errno::AGAIN => Some("under another program's lease"),
            // A pipe that nobody reads, a socket, a device that is not there.
            Errno::NXIO | Errno::NODEV => Some("no regular file"),
            _ => None,
        };
        if let Some(odd) = odd {
            let message = format!("{} is {odd}; lock files never are", path.display());
            return Error::new(ErrorKind::Refused, message);
        }
        let error = io::Error::from(error);
        Error::new(kind(&error), format!("cannot open {}", path.display())).with_source(error)
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
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Exhausted,
        _ if error.raw_os_error() == Some(libc::ENOLCK) => ErrorKind::Exhausted,
        io::ErrorKind::NotADirectory | io::ErrorKind::InvalidFilename => ErrorKind::Invalid,
        _ => ErrorKind::Unavailable,
    }
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

/// The default directory of root.
pub(super) const ROOT_DIR: &str = "/var/lib/clinch";

/// The default directory of this user.
pub(super) fn default_path() -> Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from(ROOT_DIR));
    }
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    state.map(|state| state.join("clinch")).ok_or_else(|| {
        Error::invalid("neither XDG_STATE_HOME nor HOME is set; name the lock directory, as in file:///path")
    })
}

/// A directory that a variable names, which counts only as a whole path.
pub(super) fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Whether files of this user cannot harm us.
fn trusted(owner: u32, user: u32) -> bool {
    owner == user || owner == 0
}

/// Refuses a directory in which others can replace files; says whether they can add some.
fn check_owner(path: &Path, owner: u32, mode: u32, user: u32) -> Result<bool> {
    const STICKY: u32 = 0o1000;
    if !trusted(owner, user) {
        return Err(Error::new(
            ErrorKind::Refused,
            format!("{} belongs to user {owner}, who could swap lock files", path.display()),
        )
        .with_remedy("use a directory of your own"));
    }
    let writable = mode & 0o022 != 0;
    if writable && mode & STICKY == 0 {
        return Err(Error::new(
            ErrorKind::Refused,
            format!("others can replace files in {} (mode {:o})", path.display(), mode & 0o7777),
        )
        .with_remedy("run chmod go-w on it"));
    }
    Ok(writable)
}

pub(super) fn check_file_system(path: &Path, magic: u32) -> Result<()> {
    match NETWORK_FILE_SYSTEMS.iter().find(|(known, _)| *known == magic) {
        None => Ok(()),
        Some((_, system)) => Err(Error::new(
            ErrorKind::Refused,
            format!(
                "{} is on {system}, where byte-range locks do not reliably reach other hosts and a change wakes nobody",
                path.display()
            ),
        )
        .with_remedy("use a local directory, or ?network-fs=allow if only this host uses it")),
    }
}

/// Raises the soft limit of descriptors to the hard one; says whether that gained any.
fn raise_descriptor_limit() -> bool {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    limit.current != limit.maximum
        && setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn network_file_systems_are_refused_by_name() {
        let error = check_file_system(Path::new("/mnt"), 0x6969).unwrap_err();
        assert!(error.to_string().contains("NFS") && error.kind() == ErrorKind::Refused);
        assert!(check_file_system(Path::new("/mnt"), 0xef53).is_ok());
    }

    #[test]
    fn a_directory_that_others_can_rewrite_is_refused() {
        assert!(check_owner(Path::new("/d"), 1000, 0o40777, 1000).is_err());
        assert!(check_owner(Path::new("/d"), 1001, 0o40700, 1000).is_err());
        assert!(check_owner(Path::new("/tmp"), 0, 0o41777, 1000).unwrap(), "files in it are then checked");
        assert!(!check_owner(Path::new("/d"), 1000, 0o40755, 1000).unwrap());
    }

    #[test]
    fn a_new_directory_and_its_files_are_private() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("state/clinch");
        let dir = Dir::open(&path, false).unwrap();
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
        let dir = Dir::open(parent.path(), false).unwrap();
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
        let dir = Dir::open(&shared, false).unwrap();
        std::fs::write(shared.join("n.lock"), "").unwrap();
        std::fs::set_permissions(shared.join("n.lock"), std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(dir.open_lock("n.lock", true).unwrap_err().kind(), ErrorKind::Refused);
        std::fs::remove_file(shared.join("n.lock")).unwrap();
        assert!(dir.open_lock("n.lock", true).unwrap().is_some(), "our own is fine");
        std::fs::hard_link(shared.join("n.lock"), shared.join("m.lock")).unwrap();
        assert!(dir.open_lock("n.lock", true).is_err(), "a hard link could be a way in");
    }
}
