//! The watch over a job: a small process that sees to it when we have been killed, which nobody can catch.
//!
//! Where the kernel frees a lock with its last descriptor, the watch keeps one until the job has ended, and harms nobody. The job has
//! one too, but may close it, as ssh does with all that it inherits.
//!
//! Where the lock is freed for whoever is gone, it ends the job. The kernel could kill our child with us; but then all that the child has
//! started loses its parent, and nobody can tell it from others. So the watch stops the child first, as it is, and becomes
//! `end.rs`, which kills all of it.
//!
//! It is a copy of us that sleeps in one call: it has nothing open but the end of a pipe, us, the job and its lock, no terminal, no part in
//! anybody's process group, and hears no signal. Its name and words are not ours, so that whoever kills us by those does not kill it.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::process::Command;
use std::ptr::{null, null_mut};

use clinch::{Guard, Instant};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, PidfdFlags, Signal, getpid, getppid, kill_process, pidfd_open, pidfd_send_signal, setsid,
};

use super::fork::Image;
use super::sys;
use crate::args::{Orphans, Store};

/// What `ps` shows for it.
pub(crate) const NAME: &CStr = c"job-watch";

/// The verb that it becomes.
pub(crate) const VERB: &str = "end-job";

/// Until when the lock is to be closed although we are killed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Closing<'a> {
    pub(crate) store: &'a Store,
    pub(crate) until: Instant,
}

/// The watch of one job, until dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    pid: Pid,
    tell: OwnedFd,
    /// Kept open, so that a word to a watch that was killed is no error.
    _hear: OwnedFd,
}

impl Watch {
    /// Starts it, before the job: over one that ends with us, or over one whose lock is kept by a descriptor, which stays open on exec.
    pub(crate) fn start(
        guard: &Guard,
        orphans: Orphans,
        lock: Option<&OwnedFd>,
        closing: Option<Closing<'_>>,
    ) -> io::Result<Watch> {
        let (hear, tell) = pipe_with(PipeFlags::CLOEXEC)?;
        let image = Image::of(&verb(guard, orphans, lock.is_some(), closing))?;
        let pid = fork(hear.as_raw_fd(), lock.map(AsRawFd::as_raw_fd), &image)?;
        Ok(Watch { pid, tell, _hear: hear })
    }

    /// The process that watches. Like all children it ends up in lists of ours, but those who wait for any do not find it.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Has a child of ours say that it becomes the command, since we may not live to do so. It lets go of the pipe, by which the watch would take
    /// us for alive until its program is read. Allocates nothing.
    pub(crate) fn is_over_us(&self) -> rustix::io::Result<()> {
        let written = rustix::io::write(self.tell.as_fd(), &getpid().as_raw_nonzero().get().to_ne_bytes());
        // SAFETY: this child becomes another process, or ends, and uses it no more.
        unsafe { libc::close(self.tell.as_raw_fd()) };
        written.map(drop)
    }

    /// The command has ended. Its id may be another's from now on.
    pub(crate) fn forget(&self) {
        // A write of this size to a pipe that is as good as empty waits for nobody.
        let _ = rustix::io::write(self.tell.as_fd(), &0_i32.to_ne_bytes());
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // As if we had been killed: the job runs, and what unwinds next would release its lock.
            std::process::abort();
        }
        // Nobody else waits for it, so the id is its own.
        let _ = kill_process(self.pid, Signal::KILL);
        // Until it has closed the lock's file, whose file system may be unmounted after us.
        // SAFETY: no status is asked for.
        unsafe { libc::waitpid(self.pid.as_raw_nonzero().get(), null_mut(), libc::__WALL) };
    }
}

/// What it becomes. It is told of no claim but ours, not to be taken for a part of a job around us.
fn verb(guard: &Guard, orphans: Orphans, keeps: bool, closing: Option<Closing<'_>>) -> Command {
    let mut verb = Command::new("clinch");
    verb.args([VERB, &guard.claim_id().to_string()]);
    verb.args((orphans == Orphans::Wait).then_some("--all")).args(keeps.then_some("--keep"));
    let held = std::env::vars_os().map(|(name, _)| name);
    for name in held.filter(|name| name.as_encoded_bytes().starts_with(b"CLINCH_")) {
        verb.env_remove(name);
    }
    if let Some(Closing { store, until }) = closing {
        // It may have a password, which everybody would see in its words.
        verb.env("CLINCH_URL", &store.url);
        verb.arg(format!("--close={}", guard.name())).arg(format!("--until={}", until.as_nanos()));
        verb.arg(format!("--of={}", std::process::id()));
    }
    verb
}

/// Starts a copy of this process that watches. Its end is told to nobody.
fn fork(hear: RawFd, lock: Option<RawFd>, image: &Image) -> io::Result<Pid> {
    let (mut arguments, environment) = (image.words(), image.environment());
    // For the id, which comes later.
    let place = arguments.len() - 1;
    arguments.push(null());
    let (wrapper, seen) = (getpid(), sys::words());
    let mut saved = MaybeUninit::uninit();
    // SAFETY: the sets are initialised before they are read. The call without flags and stack is `fork`, but that no signal tells the
    // parent of the end. The copy has one thread; it only makes system calls, formats a number on its stack, and ends.
    let pid = unsafe {
        let mut all = MaybeUninit::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), saved.as_mut_ptr());
        let pid = libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0);
        if pid == 0 {
            watch(wrapper, seen, hear, lock, (&mut arguments, &environment), place);
            libc::_exit(0);
        }
        libc::sigprocmask(libc::SIG_SETMASK, saved.as_ptr(), null_mut());
        pid
    };
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw);
    pid.ok_or_else(io::Error::last_os_error)
}

/// The life of the copy. Allocates nothing.
fn watch(
    wrapper: Pid,
    seen: Range<usize>,
    hear: RawFd,
    lock: Option<RawFd>,
    (arguments, environment): (&mut [*const c_char], &[*const c_char]),
    place: usize,
) {
    let _ = setsid();
    sys::set_name(NAME);
    sys::set_words(NAME, seen);
    close_all_but(hear, lock.unwrap_or(hear));
    // Once that has gone over to another, there is nothing to wait for.
    let wrapper = pidfd_open(wrapper, PidfdFlags::empty()).ok().filter(|_| getppid() == Some(wrapper));
    // SAFETY: was left open.
    let hear = unsafe { BorrowedFd::borrow_raw(hear) };
    let (mut job, mut held) = (None, None);
    let mut word = [0; 4];
    loop {
        match rustix::io::read(hear, &mut word) {
            Ok(4) => {
                job = Pid::from_raw(i32::from_ne_bytes(word));
                held = job.and_then(|job| pidfd_open(job, PidfdFlags::empty()).ok());
            }
            Err(Errno::INTR) => {}
            _ => break,
        }
    }
    // We were killed. The pipe ends before the kernel has given our children away: whom it then finds stopped it hangs up.
    wait_for(&wrapper);
    if lock.is_some() {
        wait_for(&held);
        become_the_verb(arguments, environment);
        return;
    }
    let tell = |signal| held.as_ref().map(|held| pidfd_send_signal(held, signal));
    // A job that has ended may have left parts behind, but its id may be another's. Another user's stays as it is, but not all of its parts.
    let left = job.filter(|_| tell(Signal::STOP) != Some(Err(Errno::SRCH)));
    let mut word = [0; 16];
    let written = match left {
        Some(job) => write!(&mut word[..], "{}\0", job.as_raw_nonzero()),
        None => write!(&mut word[..], "--all\0"),
    };
    if job.is_some()
        && written.is_ok()
        && let Some(argument) = arguments.get_mut(place)
    {
        *argument = word.as_ptr().cast();
    }
    become_the_verb(arguments, environment);
    let _ = tell(Signal::KILL);
}

fn wait_for(process: &Option<OwnedFd>) {
    if let Some(process) = process {
        let _ = retry_on_intr(|| poll(&mut [PollFd::new(process, PollFlags::IN)], None));
    }
}

/// Comes back if that fails.
fn become_the_verb(arguments: &[*const c_char], environment: &[*const c_char]) {
    // SAFETY: the lists end with a null, and what they point to outlives the call.
    unsafe { libc::execve(c"/proc/self/exe".as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
}

/// Closes what it has from us: pipes of our caller would not end, and the store would take us for alive.
fn close_all_but(one: RawFd, other: RawFd) {
    let (low, high) = (one.min(other), one.max(other));
    let close = |first: RawFd, last: RawFd| {
        // SAFETY: nothing in this process uses any of them again.
        first > last || unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) == 0 }
    };
    let closed = close(0, low - 1) && close(low + 1, high - 1) && close(high + 1, RawFd::MAX);
    if !closed {
        // A kernel before 5.9.
        for descriptor in (0..4096).filter(|descriptor| ![low, high].contains(descriptor)) {
            // SAFETY: as above.
            unsafe { libc::close(descriptor) };
        }
    }
}
