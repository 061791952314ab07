//! Byte-range locks that belong to an open file description: `F_OFD_SETLK` and friends.
//!
//! Not POSIX `F_SETLK`, which a process drops when it closes *any* descriptor of the file, and not `flock`, which has
//! no ranges. rustix has no OFD commands, so this calls `fcntl` itself.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// A locked range, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: u64,
    pub(super) last: u64,
}

/// Locks a range for writing if no other description holds any of it.
pub(super) fn try_lock(file: impl AsFd, range: Range) -> io::Result<bool> {
    match fcntl(&file, libc::F_OFD_SETLK, &mut request(libc::F_WRLCK, range)?) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Unlocks a range; what of it is not locked stays so.
pub(super) fn unlock(file: impl AsFd, range: Range) -> io::Result<()> {
    fcntl(&file, libc::F_OFD_SETLK, &mut request(libc::F_UNLCK, range)?)
}

/// Finds one range that another description holds and that touches this one.
pub(super) fn find(file: impl AsFd, range: Range) -> io::Result<Option<Range>> {
    let mut lock = request(libc::F_WRLCK, range)?;
    fcntl(&file, libc::F_OFD_GETLK, &mut lock)?;
    if i32::from(lock.l_type) == libc::F_UNLCK {
        return Ok(None);
    }
    let first = u64::try_from(lock.l_start).unwrap_or(0);
    // A length of 0 reaches to the end of all files.
    let last = match u64::try_from(lock.l_len) {
        Ok(0) | Err(_) => u64::MAX,
        Ok(len) => first.saturating_add(len - 1),
    };
    Ok(Some(Range { first, last }))
}

fn request(kind: i32, range: Range) -> io::Result<libc::flock> {
    let number = |number: u64| i64::try_from(number).map_err(io::Error::other);
    Ok(libc::flock {
        l_type: i16::try_from(kind).map_err(io::Error::other)?,
        l_whence: libc::SEEK_SET as i16,
        l_start: number(range.first)?,
        l_len: number(range.last.saturating_sub(range.first).saturating_add(1))?,
        // Must be 0 for OFD locks.
        l_pid: 0,
    })
}

fn fcntl(file: &impl AsFd, command: i32, lock: &mut libc::flock) -> io::Result<()> {
    loop {
        // SAFETY: the descriptor is open for as long as `file` is borrowed, and `lock` is a valid `struct flock`, which
        // is what these three commands read and, for F_OFD_GETLK, write.
        let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, std::ptr::from_mut(lock)) };
        if result != -1 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn descriptions_of_one_process_exclude_each_other_and_a_close_frees() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("l");
        let open =
            || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let (one, two) = (open(), open());
        let range = Range { first: 1 << 50, last: (1 << 50) + 4 };
        assert!(try_lock(&one, range).unwrap());
        assert!(!try_lock(&two, Range { first: 1, last: 1 << 50 }).unwrap());
        assert_eq!(find(&two, Range { first: 1, last: 1 << 54 }).unwrap(), Some(range));
        assert_eq!(find(&one, Range { first: 1, last: 1 << 54 }).unwrap(), None, "one's own do not count");
        let copy = one.try_clone().unwrap();
        drop(one);
        assert!(!try_lock(&two, range).unwrap(), "a copy keeps the lock");
        unlock(&copy, range).unwrap();
        assert!(try_lock(&two, range).unwrap(), "an unlock frees it for all copies");
    }
}
