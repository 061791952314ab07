//! The directory of lock files: where it is, whose it is, what it lies on, and how files in it are opened.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, Gid, Mode, OFlags, RenameFlags, Stat, StatxFlags};
use rustix::io::Errno;

use super::access::{self, Share, Sharing};
use super::home;
use super::network::check_file_system;
use super::times::LOOK_AT_DIRECTORY;
use super::users::{self, Me};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};

/// Files that waiters ring, so that each wakes only its successor. More than that many waiters in one directory share.
const BELLS: u64 = 256;

/// Times that a file is looked for, and made where there is none, while others make and remove it.
const TRIES_TO_MAKE: u32 = 16;

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
    path: PathBuf,
    descriptor: OwnedFd,
    identity: Identity,
    /// When the path was last seen to lead here: nanoseconds after boot.
    seen: AtomicU64,
    sharing: Sharing,
    me: Me,
}

impl Dir {
    /// Opens the directory, making it with mode 0700 if it is not there. An empty path is the user's default.
    pub(super) fn open(path: &Path, options: Options) -> Result<Dir> {
        let me = Me::now();
        let path = match path.as_os_str().is_empty() {
            true => default_path(&me)?,
            false => path.to_path_buf(),
        };
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
        let path = std::path::absolute(&path).map_err(failed)?;
        let sharing = Sharing::of(&path, &stat, options.share, &me)?;
        if !options.network_allowed {
            let system = rustix::fs::fstatfs(&descriptor).map_err(|error| failed(error.into()))?;
            check_file_system(&path, system.f_type as u32)?;
        }
        let identity = Stamp::from(stat).identity;
        Ok(Dir { path, descriptor, identity, seen: AtomicU64::new(0), sharing, me })
    }

    /// Opens the file of a lock for claiming; makes an empty one if asked.
    pub(super) fn open_lock(&self, file: &str, create: bool) -> Result<Option<OwnedFd>> {
        match self.open_to_change(file, OFlags::RDWR, create) {
            Err(Errno::NOENT) if !create => Ok(None),
            opened => self.check_file(file, opened).map(Some),
        }
    }

    /// Opens a lock file for reading only, so that nobody is woken by its close.
    pub(super) fn open_for_reading(&self, file: &str) -> Result<Option<OwnedFd>> {
        let opened = match self.open_file(file, OFlags::RDONLY) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened.map_err(|error| self.failed(file, error))?,
        };
        let stat = rustix::fs::fstat(&opened).map_err(|error| self.failed(file, error))?;
        self.sharing.check_for_reading(&self.path.join(file), &stat, &self.me)?;
        Ok(Some(opened))
    }

    /// Whether this process may take locks here.
    pub(super) fn check_for_writing(&self) -> Result<()> {
        self.sharing.check_for_writing(&self.path)
    }

    /// Whether all users of the directory share all files.
    pub(super) fn is_of_a_group(&self) -> bool {
        matches!(self.sharing, Sharing::Group(_))
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
        self.check_file(&file, self.open_to_change(&file, OFlags::WRONLY, true))
    }

    /// The path of a waiter's bell.
    pub(super) fn bell_path(&self, bell: u64) -> PathBuf {
        self.path.join(self.bell_file(bell))
    }

    /// Where all users have their own files, each has bells of its own, too: another's could not be opened.
    fn bell_file(&self, bell: u64) -> String {
        match self.sharing {
            Sharing::Beside => format!(".bell-{}-{bell:02x}", self.me.id),
            _ => format!(".bell-{bell:02x}"),
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

    /// Opens a file to change it, and makes an empty one if asked and there is none.
    fn open_to_change(&self, file: &str, flags: OFlags, create: bool) -> Result<OwnedFd, Errno> {
        for _ in 0..TRIES_TO_MAKE {
            match self.open_file(file, flags) {
                Err(Errno::NOENT) if create => {}
                opened => return opened,
            }
            match self.make_file(file, flags) {
                // Another was quicker.
                Err(Errno::EXIST) => {}
                made => return made,
            }
        }
        Err(Errno::NOENT)
    }

    fn make_file(&self, file: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        match self.sharing {
            Sharing::Group(group) => self.make_for_group(file, flags, group),
            _ => self.open_file(file, flags | OFlags::CREATE),
        }
    }

    /// The file gets its name when its group may use it, whatever the umask: others that find it must be able to open it.
    fn make_for_group(&self, file: &str, flags: OFlags, group: u32) -> Result<OwnedFd, Errno> {
        // Nobody can have planted what only a random number names.
        let mut number = [0; 16];
        getrandom::fill(&mut number).map_err(|_| Errno::IO)?;
        let new = format!(".new-{:032x}", u128::from_ne_bytes(number));
        let opened = self.open_file(&new, flags | OFlags::CREATE | OFlags::EXCL)?;
        let (mode, group) = (Mode::from_raw_mode(0o660), Some(Gid::from_raw(group)));
        let made = rustix::fs::fchown(&opened, None, group)
            .and_then(|()| rustix::fs::fchmod(&opened, mode))
            .and_then(|()| {
                let here = &self.descriptor;
                rustix::fs::renameat_with(here, &new, here, file, RenameFlags::NOREPLACE)
            });
        if made.is_err() {
            let _ = rustix::fs::unlinkat(&self.descriptor, &new, AtFlags::empty());
        }
        made.map(|()| opened)
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

    /// Where others can write, takes only files that they cannot have planted.
    fn check_file(&self, file: &str, opened: Result<OwnedFd, Errno>) -> Result<OwnedFd> {
        let path = self.path.join(file);
        let opened = opened.map_err(|error| {
            // Why it may not be opened is told by whose it is.
            let stat = rustix::fs::statat(&self.descriptor, file, AtFlags::SYMLINK_NOFOLLOW);
            let amiss = stat.ok().filter(|_| error == Errno::ACCESS);
            let amiss = amiss.and_then(|stat| self.sharing.check_file(&path, &stat, &self.me).err());
            amiss.unwrap_or_else(|| self.failed(file, error))
        })?;
        if self.sharing.needs_a_look() {
            let stat = rustix::fs::fstat(&opened).map_err(|error| self.failed(file, error))?;
            self.sharing.check_file(&path, &stat, &self.me)?;
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

/// The directory that an empty path means.
fn default_path(me: &Me) -> Result<PathBuf> {
    let path = home::default_path(me)?;
    home::check_earlier(&path, me)?;
    Ok(path)
}

/// Makes the directory if it is not there.
fn make(path: &Path, share: Share, me: &Me) -> Result<()> {
    let is_missing =
        |path: &Path| path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
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
            format!("there is no {path}, and root makes none in a directory of {owner}, who could not use it; make it first"),
        ));
    }
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|error| {
        Error::new(kind(&error), format!("cannot make the lock directory {}", path.display())).with_source(error)
    })
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
