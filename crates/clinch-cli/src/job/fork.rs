//! A child that becomes the command, for which nobody waits: that takes as long as the storage takes on which the program lies, and who waited
//! would meanwhile hear no signal, renew no lock, and not see its loss. So the child is the job from its first moment on, which can be told
//! to end, and killed. It tells if it could not become the command.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, OsString, c_char};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream as Stream;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::time::Duration;

use rustix::process::{Pid, kill_process};
use tokio::net::UnixStream;

use super::namespace::can_reach_all;
use super::signals::{asked_by, caught};
use super::sys;
use super::watch::Watch;

/// What is done in the child before it becomes the command.
#[derive(Debug)]
pub(crate) struct Before<'a> {
    /// Who is told of it.
    pub(crate) watch: &'a Watch,
    /// Until when this has to be done, in time since boot: we may be stopped until it is too late.
    pub(crate) until: Option<Duration>,
}

/// Tells whether the child has become the command. Its other end is closed by that.
#[derive(Debug)]
pub(crate) struct Start(UnixStream);

/// Why the child did not become the command.
#[derive(Debug)]
pub(crate) enum NotBegun {
    TooLate,
    Failed(io::Error),
}

impl Start {
    /// Completes when the child is the command, or never will be; says which. Who was killed first counts as if it was.
    pub(crate) async fn has_begun(&self) -> bool {
        // Fails only when the runtime shuts down.
        let _ = self.0.readable().await;
        self.failure().is_none()
    }

    /// Whether the child may have yet to become the command.
    pub(crate) fn is_under_way(&self) -> bool {
        self.look().0 < 0
    }

    /// Why the child did not become the command, once it has told that.
    pub(crate) fn failure(&self) -> Option<NotBegun> {
        let (read, word) = self.look();
        match i32::from_ne_bytes(word) {
            _ if usize::try_from(read) != Ok(word.len()) => None,
            TOO_LATE => Some(NotBegun::TooLate),
            error => Some(NotBegun::Failed(io::Error::from_raw_os_error(error))),
        }
    }

    /// What was told, and how much that is. Less than nothing: neither that nor the end.
    fn look(&self) -> (isize, [u8; 4]) {
        let mut word = [0; 4];
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: the kernel writes into the word, no more than that has room for.
        let read = unsafe { libc::recv(self.0.as_raw_fd(), word.as_mut_ptr().cast(), word.len(), flags) };
        (read, word)
    }
}

/// What the child tells in place of an error, of which none has this number.
const TOO_LATE: i32 = 0;

/// Starts the child. Must be called inside a tokio runtime.
pub(crate) fn fork(command: &Command, before: &Before<'_>) -> io::Result<(Pid, Start)> {
    let image = Image::of(command)?;
    let (words, environment) = (image.words(), image.environment());
    let (hear, tell) = Stream::pair()?;
    hear.set_nonblocking(true)?;
    let start = Start(UnixStream::from_std(hear)?);
    // Now that all is open that is to be.
    can_reach_all()?;
    let mut mask = MaybeUninit::uninit();
    // SAFETY: the sets are initialised before they are read. The child has one thread; it makes system calls only, all of which are
    // async-signal-safe, allocates nothing, and ends. The lists end with a null, and what they point to outlives the calls.
    let pid = unsafe {
        // Our handlers would take what is sent to the child.
        let mut all = MaybeUninit::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), mask.as_mut_ptr());
        let pid = libc::fork();
        if pid == 0 {
            let told = match prepare(before) {
                Ok(true) => {
                    forget_handlers();
                    libc::sigprocmask(libc::SIG_SETMASK, mask.as_ptr(), null_mut());
                    libc::execvpe(*words.as_ptr(), words.as_ptr(), environment.as_ptr());
                    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
                }
                Ok(false) => TOO_LATE,
                Err(error) => error.raw_os_error(),
            };
            let _ = rustix::io::write(&tell, &told.to_ne_bytes());
            libc::_exit(1);
        }
        pid
    };
    let pid = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw).ok_or_else(io::Error::last_os_error);
    if let Ok(pid) = pid {
        // What was meant for all of our group before there was a child. One that it got, too, is one with this: it has yet to hear any.
        for signal in asked_by() {
            let _ = kill_process(pid, signal);
        }
    }
    // SAFETY: was initialised above.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, mask.as_ptr(), null_mut()) };
    Ok((pid?, start))
}

/// In the child; says whether it is in time.
fn prepare(before: &Before<'_>) -> rustix::io::Result<bool> {
    before.watch.is_over_us()?;
    Ok(before.until.is_none_or(|until| sys::since_boot() < until))
}

/// Before an exec: what we catch ends us again, as it would end the command, which may not be there for long.
pub(super) fn forget_handlers() {
    for signal in caught().chain(sys::ignored_here()).map(|signal| signal.as_raw()) {
        // SAFETY: the default action is no function of ours.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Becomes the command, which ignores what our caller has ignored, and that alone: the standard library has it heed PIPE. Comes back only if that fails.
pub(crate) fn exec(command: &Command) -> io::Error {
    let image = match Image::of(command) {
        Ok(image) => image,
        Err(error) => return error,
    };
    let (words, environment) = (image.words(), image.environment());
    forget_handlers();
    // SAFETY: the lists end with a null, and what they point to outlives the call.
    unsafe { libc::execvpe(*words.as_ptr(), words.as_ptr(), environment.as_ptr()) };
    let error = io::Error::last_os_error();
    for signal in sys::ignored_here() {
        // SAFETY: to ignore is no function of ours.
        unsafe { libc::signal(signal.as_raw(), libc::SIG_IGN) };
    }
    error
}

/// A command as the kernel takes it: lists that are there before a copy of this process is, which must allocate nothing.
#[derive(Clone, Debug)]
pub(super) struct Image {
    words: Vec<CString>,
    environment: Vec<CString>,
}

impl Image {
    pub(super) fn of(command: &Command) -> io::Result<Image> {
        let words = [command.get_program()].into_iter().chain(command.get_args());
        let words = words.map(|word| CString::new(word.as_bytes())).collect::<Result<Vec<_>, _>>()?;
        Ok(Image { words, environment: environment(command)? })
    }

    pub(super) fn words(&self) -> Vec<*const c_char> {
        pointers(&self.words)
    }

    pub(super) fn environment(&self) -> Vec<*const c_char> {
        pointers(&self.environment)
    }
}

/// Ours, with the command's changes.
fn environment(command: &Command) -> io::Result<Vec<CString>> {
    let mut variables: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => _ = variables.insert(name.into(), value.into()),
            None => _ = variables.remove(name),
        }
    }
    let entries = variables.into_iter().map(|(mut entry, value)| {
        entry.push("=");
        entry.push(value);
        CString::new(entry.into_vec())
    });
    Ok(entries.collect::<Result<_, _>>()?)
}

fn pointers(list: &[CString]) -> Vec<*const c_char> {
    list.iter().map(|one| one.as_ptr()).chain([null()]).collect()
}
