//! How files of the directory are opened and made: nothing planted there may be believed, changed, or hang us.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Gid, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::access::Sharing;
use super::dir::{self, Dir, kind};
use crate::error::{Error, ErrorKind, Result};

/// Times that a file is looked for, and made where there is none, while others make and remove it.
const TRIES_TO_MAKE: u32 = 16;

/// Stands for the EINVAL of `fchown`, which tells something else than that of the other calls. None of them returns this one.
const NO_SUCH_GROUP: Errno = Errno::IDRM;

impl Dir {
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
            opened => opened.map_err(|error| self.unopened(file, error))?,
        };
        let stat = rustix::fs::fstat(&opened).map_err(|error| self.failed(file, error))?;
        self.sharing.check_for_reading(&self.path.join(file), &stat, &self.me)?;
        Ok(Some(opened))
    }

    /// The bell of a waiter: open for writing, its close wakes whoever watches it.
    pub(super) fn open_bell(&self, bell: u64) -> Result<OwnedFd> {
        let file = self.bell_file(bell);
        self.check_file(&file, self.open_to_change(&file, OFlags::WRONLY, true))
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
            _ => {
                let made = self.open_file(file, flags | OFlags::CREATE | OFlags::EXCL)?;
                let mode = Mode::RUSR | Mode::WUSR;
                // The umask may have taken even what its user needs. Where it has not, nothing is asked of file systems without modes.
                if !Mode::from_raw_mode(rustix::fs::fstat(&made)?.st_mode).contains(mode) {
                    rustix::fs::fchmod(&made, mode)?;
                }
                Ok(made)
            }
        }
    }

    /// The file gets its name when its group may use it, whatever the umask: others that find it must be able to open it.
    fn make_for_group(&self, file: &str, flags: OFlags, group: u32) -> Result<OwnedFd, Errno> {
        // Nobody can have planted what only a random number names.
        let mut number = [0; 16];
        getrandom::fill(&mut number).map_err(|_| Errno::IO)?;
        let new = format!(".new-{:032x}", u128::from_ne_bytes(number));
        let opened = self.open_file(&new, flags | OFlags::CREATE | OFlags::EXCL)?;
        let mode = Mode::from_raw_mode(0o660);
        let made = self
            .give_to_group(&opened, group)
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

    /// A setgid directory has done that already, also where the group has no number in our user namespace. Without setgid such a number, which
    /// all groups have that are unknown there, says nothing.
    fn give_to_group(&self, file: &OwnedFd, group: u32) -> Result<(), Errno> {
        let directory = Mode::from_raw_mode(rustix::fs::fstat(&self.descriptor)?.st_mode);
        if directory.contains(Mode::SGID) && rustix::fs::fstat(file)?.st_gid == group {
            return Ok(());
        }
        rustix::fs::fchown(file, None, Some(Gid::from_raw(group))).map_err(|error| match error {
            Errno::INVAL => NO_SUCH_GROUP,
            error => error,
        })
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
        let opened = opened.map_err(|error| self.unopened(file, error))?;
        if self.sharing.needs_a_look() {
            let stat = rustix::fs::fstat(&opened).map_err(|error| self.failed(file, error))?;
            self.sharing.check_file(&self.path.join(file), &stat, &self.me)?;
        }
        Ok(opened)
    }

    /// Why a file could not be opened: if it may not be, whose and of what mode it is tells more than the kernel.
    fn unopened(&self, file: &str, error: Errno) -> Error {
        let stat = match error {
            Errno::ACCESS => rustix::fs::statat(&self.descriptor, file, AtFlags::SYMLINK_NOFOLLOW).ok(),
            _ => None,
        };
        let amiss =
            stat.and_then(|stat| self.sharing.check_file(&self.path.join(file), &stat, &self.me).err());
        amiss.unwrap_or_else(|| self.failed(file, error))
    }

    pub(super) fn failed(&self, file: &str, error: Errno) -> Error {
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
        if error == NO_SUCH_GROUP {
            let message = format!(
                "the group of the directory has no number in this user namespace, so {} cannot be made for it",
                path.display()
            );
            let remedy =
                "map the group into the namespace, or have the directory give it to new files (chmod g+s)";
            return Error::new(ErrorKind::Refused, message).with_remedy(remedy);
        }
        if dir::is_unsupported(&error.into()) {
            let message = format!(
                "the file system of {} cannot make a file under its name without replacing another",
                path.display()
            );
            return Error::new(ErrorKind::Refused, message)
                .with_remedy("use a directory on another file system, as ext4, XFS or btrfs")
                .with_source(io::Error::from(error));
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

/// Raises the soft limit of descriptors to the hard one; says whether that gained any.
fn raise_descriptor_limit() -> bool {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    limit.current != limit.maximum
        && setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).is_ok()
}
