//! Who looks after us while we are stopped with our job: should that go on without us, nobody would renew its lock.
//!
//! A CONT that comes just before we stop is lost, for the kernel takes it away with the stop; and whoever has the job go on need not know of us. No
//! look of ours can close that gap, so a copy of us that is not stopped sees to it, and has us go on, too.
//!
//! It is made as the watch is (`watch.rs`): a copy with nothing open, in a session of its own, that hears no signal and makes system calls alone.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use rustix::process::{Pid, Signal, getpid, getppid, kill_process, setsid};

/// How often it looks. A job that goes on is seen twice in a row before we are woken.
const LOOKS_EVERY: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Ends when dropped.
#[derive(Debug)]
pub(crate) struct StandIn(Pid);

impl StandIn {
    /// Before we are stopped. `job`: whose going on is to be seen.
    pub(crate) fn start(job: Pid) -> io::Result<StandIn> {
        let us = getpid();
        let path = |pid: Pid| CString::new(format!("/proc/{}/stat", pid.as_raw_nonzero()));
        let (ours, theirs) = (path(us)?, path(job)?);
        let mut saved = MaybeUninit::uninit();
        // SAFETY: the sets are initialised before they are read. The call without flags and stack is `fork`, but that no signal tells of the
        // end. The copy has one thread, makes system calls only, and ends.
        let pid = unsafe {
            let mut all = MaybeUninit::uninit();
            libc::sigfillset(all.as_mut_ptr());
            libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), saved.as_mut_ptr());
            let pid = libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0);
            if pid == 0 {
                look(us, &ours, &theirs);
                libc::_exit(0);
            }
            libc::sigprocmask(libc::SIG_SETMASK, saved.as_ptr(), null_mut());
            pid
        };
        let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw);
        pid.map(StandIn).ok_or_else(io::Error::last_os_error)
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        // Nobody else waits for it, so the id is its own.
        let _ = kill_process(self.0, Signal::KILL);
        // SAFETY: no status is asked for.
        unsafe { libc::waitpid(self.0.as_raw_nonzero().get(), null_mut(), libc::__WALL) };
    }
}

/// The life of the copy. Allocates nothing.
fn look(us: Pid, ours: &CString, theirs: &CString) {
    let _ = setsid();
    // SAFETY: nothing in this copy uses any descriptor of these.
    unsafe { libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0) };
    let mut seen = 0;
    while getppid() == Some(us) {
        // SAFETY: the time is a constant, and none that is left is asked for.
        unsafe { libc::nanosleep(&LOOKS_EVERY, null_mut()) };
        let goes_on = state(ours) == Some(b'T') && matches!(state(theirs), Some(b'R' | b'S' | b'D'));
        seen = if goes_on { seen + 1 } else { 0 };
        if seen >= 2 {
            let _ = kill_process(us, Signal::CONT);
            seen = 0;
        }
    }
}

/// The letter for what a process does.
fn state(path: &CString) -> Option<u8> {
    let mut text = [0_u8; 512];
    // SAFETY: the path ends with a zero; the kernel writes no more than there is room for; the descriptor is closed here.
    let len = unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return None;
        }
        let len = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        usize::try_from(len).ok()?
    };
    let text = text.get(..len)?;
    // The name before it is in parentheses and may hold anything.
    let end = text.iter().rposition(|byte| *byte == b')')?;
    text.get(end + 2).copied()
}
