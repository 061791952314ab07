//! The few system calls that the type system cannot vouch for. All unsafe code of the command line is here, in `fork.rs` and `watcher.rs`.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::process::{DumpableBehavior, Pid, Signal, set_dumpable_behavior};
use rustix::time::{ClockId, clock_gettime};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::stat::Stat;
use crate::output::AT_ONCE;
use crate::writer::WRITER;

/// A process that can be awaited. Must be made inside a tokio runtime.
#[derive(Debug)]
pub(crate) struct ProcessEnd(AsyncFd<OwnedFd>);

impl ProcessEnd {
    /// Fails when there is no such process.
    pub(crate) fn of(pid: Pid) -> io::Result<ProcessEnd> {
        // No flags, which there are since Linux 5.10 only: it is waited for, not read.
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
        // SAFETY: the `OwnedFd` is open and moves into the registration's private field, which nothing takes it out of or
        // replaces, so it stays open and the same file until the registration ends.
        let registered = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
        Ok(ProcessEnd(registered.map_err(io::Error::from)?))
    }

    /// Whether the process has ended by now, though nobody may have asked how.
    pub(crate) fn is_over(&self) -> bool {
        let mut fds = [PollFd::new(self.0.get_ref(), PollFlags::IN)];
        retry_on_intr(|| poll(&mut fds, Some(&AT_ONCE))) == Ok(1)
    }

    /// Completes when the process has ended.
    pub(crate) async fn ended(&self) {
        // Fails only when the runtime shuts down.
        let _ = self.0.readable().await;
    }
}

/// Also while the machine sleeps.
pub(crate) fn since_boot() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or(Duration::MAX)
}

/// Names this thread; the name of the first one is that of the process.
pub(crate) fn set_name(name: &CStr) {
    // SAFETY: the text ends with a zero, and only the name is changed.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// Where the words of our command line are that others see.
pub(crate) fn words() -> Range<usize> {
    // Not by our id, which may be a stranger's in the `/proc` of another namespace.
    Stat::own().map_or(0..0, |stat| stat.words)
}

/// Writes over them, in a copy of this process that reads them no more. Allocates nothing.
pub(crate) fn set_words(name: &CStr, words: Range<usize>) {
    let name = name.to_bytes().iter().copied().chain(std::iter::repeat(0));
    // The last byte stays zero, by which the kernel knows where they end.
    for (address, byte) in words.rev().skip(1).rev().zip(name) {
        // SAFETY: the kernel says that the words of this process are there, on its own stack, and nobody in this copy reads them again.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address).write_volatile(byte) };
    }
}

/// Lets a signal through that our caller had blocked.
pub(crate) fn unblock(signal: Signal) {
    // SAFETY: the set is initialised before it is read, and the mask is this thread's alone.
    unsafe {
        let mut set = MaybeUninit::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal.as_raw());
        libc::sigprocmask(libc::SIG_UNBLOCK, set.as_ptr(), null_mut());
    }
}

/// Ignores all signals but KILL and STOP; the kernel ends it for its own faults all the same. To ignore is for the whole process, whatever threads there are.
pub(crate) fn be_deaf() {
    // Where CHLD is ignored, children leave nothing to wait for.
    for signal in (1..=libc::SIGRTMAX()).filter(|signal| *signal != libc::SIGCHLD) {
        // SAFETY: to ignore is no function of ours; what cannot be ignored is refused.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Whether stdout was open when this process began.
pub(crate) fn has_stdout() -> bool {
    was_open(libc::STDOUT_FILENO)
}

/// Whether a standard descriptor was open when this process began, as all others are that are open now.
fn was_open(descriptor: RawFd) -> bool {
    let standard = usize::try_from(descriptor).ok().and_then(|index| WERE_OPEN.get(index));
    standard.is_none_or(|was_open| was_open.load(Ordering::Relaxed))
}

static WERE_OPEN: [AtomicBool; 3] = [const { AtomicBool::new(true) }; 3];

/// What this process ignores, and its caller did not: PIPE, by the runtime of Rust, and XFSZ, which would end us where a file may not grow.
pub(crate) fn ignored_here() -> impl Iterator<Item = Signal> {
    let both = [(Signal::PIPE, &IGNORED_PIPE), (Signal::XFSZ, &IGNORED_XFSZ)];
    both.into_iter().filter(|(_, ignored)| !ignored.load(Ordering::Relaxed)).map(|(signal, _)| signal)
}

/// Whether it was ignored when this process began.
static IGNORED_PIPE: AtomicBool = AtomicBool::new(false);
static IGNORED_XFSZ: AtomicBool = AtomicBool::new(false);

/// Looks before `main`: the standard library opens `/dev/null` in place of what is closed, where an answer would vanish, and ignores PIPE.
// SAFETY: the section holds functions that the loader calls once, without arguments that this one needs.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = {
    extern "C" fn look() {
        for (descriptor, was_open) in (0..).zip(&WERE_OPEN) {
            // SAFETY: asks for a descriptor's flags, which changes nothing.
            let is_open = unsafe { libc::fcntl(descriptor, libc::F_GETFD) } != -1;
            was_open.store(is_open, Ordering::Relaxed);
        }
        IGNORED_PIPE.store(is_ignored(Signal::PIPE), Ordering::Relaxed);
        IGNORED_XFSZ.store(is_ignored(Signal::XFSZ), Ordering::Relaxed);
        // SAFETY: to ignore is no function of ours.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
    look
};

/// Has no program that we start inherit a descriptor but the standard ones, whatever our caller left open.
pub(crate) fn bequeath_no_descriptors() {
    // SAFETY: changes descriptors' flags only.
    let marked =
        unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) == 0 };
    if marked {
        return;
    }
    // A kernel before 5.11. Where it lists none, those of which there may be some.
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let open = fs::read_dir("/proc/self/fd").map(|open| open.flatten().filter_map(number).collect());
    let open: Vec<RawFd> = open.unwrap_or_else(|_| (0..4096).collect());
    for descriptor in open.into_iter().filter(|descriptor| *descriptor > libc::STDERR_FILENO) {
        // SAFETY: as above; one that is not open is refused.
        unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// Our process group; zero where it is of another PID namespace.
pub(crate) fn group() -> i32 {
    // SAFETY: asks the kernel, which changes nothing.
    unsafe { libc::getpgrp() }
}

/// The process group of a process, as above; also of one that `/proc` hides.
pub(crate) fn group_of(process: Pid) -> Option<i32> {
    // SAFETY: as above.
    let group = unsafe { libc::getpgid(process.as_raw_nonzero().get()) };
    (group >= 0).then_some(group)
}

/// Whether a process is in our process group.
pub(crate) fn is_in_our_group(process: Pid) -> bool {
    group_of(process) == Some(group())
}

/// Sends a signal to all whom this process can see and signal, but itself and the first of its pid namespace.
pub(crate) fn kill_everybody(signal: Signal) {
    // SAFETY: sends signals.
    unsafe { libc::kill(-1, signal.as_raw()) };
}

/// A child that has ended and was not reaped yet, if there is one. Fails where there are no children.
pub(crate) fn next_ended() -> io::Result<Option<Pid>> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let look = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: all zeros are a value of it, which the call overwrites or leaves; the id is a part of what it writes.
    let pid = unsafe {
        if libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), look) != 0 {
            return Err(io::Error::last_os_error());
        }
        info.assume_init().si_pid()
    };
    Ok(Pid::from_raw(pid))
}

/// Whether a process catches or ignores a signal, or blocks it if that counts, or is stopped, as far as is known.
pub(crate) fn cares_for(pid: Pid, signal: Signal, or_blocks: bool) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    let is_in = |set: &str| {
        u64::from_str_radix(set.trim(), 16).is_ok_and(|set| set >> (signal.as_raw() - 1) & 1 == 1)
    };
    status.lines().filter_map(|line| line.split_once(':')).any(|(what, is)| match what {
        "SigBlk" => or_blocks && is_in(is),
        "SigIgn" | "SigCgt" => is_in(is),
        "State" => is.trim_start().starts_with(['T', 't']),
        _ => false,
    })
}

/// An id that is given right now, and nobody has any more: those of threads and processes are given one after the other.
pub(crate) fn new_id() -> Option<Pid> {
    let thread = std::thread::Builder::new().stack_size(1 << 14).spawn(rustix::thread::gettid);
    thread.ok()?.join().ok()
}

/// Whether we lead a session.
pub(crate) fn leads_session() -> bool {
    // SAFETY: as above.
    unsafe { libc::getsid(0) == libc::getpid() }
}

/// That a process sent a signal, and nobody asked since.
const SENT: u8 = 1;
/// That the kernel did, for the terminal, and nobody asked since.
const KERNEL: u8 = 2;
/// That it ever did.
const KEYED: u8 = 4;

/// Who sent each signal.
static SENDERS: [AtomicU8; 32] = [const { AtomicU8::new(0) }; 32];

fn noted(signal: Signal) -> Option<&'static AtomicU8> {
    SENDERS.get(usize::try_from(signal.as_raw()).ok()?)
}

/// Notes from now on who sends this signal, which takes the place of those, as a CONT does of a stop.
pub(crate) fn note_senders(signal: Signal, instead_of: &'static [Signal]) -> io::Result<()> {
    let Some(is_noted) = noted(signal) else { return Ok(()) };
    let note = move |info: &libc::siginfo_t| {
        let sender = if info.si_code == libc::SI_KERNEL { KERNEL | KEYED } else { SENT };
        is_noted.fetch_or(sender, Ordering::Relaxed);
        for other in instead_of.iter().filter_map(|other| noted(*other)) {
            other.fetch_and(KEYED, Ordering::Relaxed);
        }
    };
    // SAFETY: the action does nothing but set and clear bits, which is async-signal-safe.
    unsafe { signal_hook_registry::register_sigaction(signal.as_raw(), note)? };
    Ok(())
}

/// Whether a process sent this signal since the last call.
pub(crate) fn was_sent(signal: Signal) -> bool {
    noted(signal).is_none_or(|noted| noted.fetch_and(KEYED, Ordering::Relaxed) & SENT != 0)
}

/// Whether this signal came since it was last asked who sent it.
pub(crate) fn has_come(signal: Signal) -> bool {
    noted(signal).is_some_and(|noted| noted.load(Ordering::Relaxed) & (KERNEL | SENT) != 0)
}

/// Whether this signal is blocked and has come meanwhile.
pub(crate) fn is_pending(signal: Signal) -> bool {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the set is written before it is read.
    unsafe {
        libc::sigpending(set.as_mut_ptr()) == 0 && libc::sigismember(set.as_ptr(), signal.as_raw()) == 1
    }
}

/// Whether the terminal has sent this signal since it is noted. The kernel tells all of a group before it tells of the end of one, so who hears
/// of that end can rely on it.
pub(crate) fn was_keyed(signal: Signal) -> bool {
    noted(signal).is_some_and(|noted| noted.load(Ordering::Relaxed) & KEYED != 0)
}

/// Whether the signal was ignored when this process began, as `nohup` does with HUP and shells with INT and QUIT of their
/// background jobs: such a signal stays ignored.
pub(crate) fn is_ignored(signal: Signal) -> bool {
    let mut old = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: with no new action, sigaction only writes the current one to the place that `old` has for it.
    unsafe {
        libc::sigaction(signal.as_raw(), std::ptr::null(), old.as_mut_ptr()) == 0
            && old.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// Dies by a signal, as who did not catch it does, but leaves no core. Returns where the kernel does not let it: as process 1.
pub(crate) fn die_by(signal: Signal) {
    WRITER.finish();
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    // SAFETY: the default action is no function of ours.
    unsafe { libc::signal(signal.as_raw(), libc::SIG_DFL) };
    unblock(signal);
    // SAFETY: sends a signal to this thread.
    unsafe { libc::raise(signal.as_raw()) };
}

/// Stops this process by a signal with its default action, as the terminal would have done, and comes back when
/// it is continued, with the CONT consumed. `false`: the kernel ignored the stop, since no shell is there to undo it.
pub(crate) fn stop(signal: Signal) -> bool {
    // SAFETY: sends a signal to this thread.
    stop_by(signal, || unsafe { libc::raise(signal.as_raw()) })
}

/// As [`stop`], all of this process's group, of which nobody else was told.
pub(crate) fn stop_group(signal: Signal) -> bool {
    // SAFETY: sends a signal.
    stop_by(signal, || unsafe { libc::kill(0, signal.as_raw()) })
}

fn stop_by(signal: Signal, send: impl FnOnce() -> libc::c_int) -> bool {
    with_blocked(Some(libc::SIGCONT), || {
        // SAFETY: all pointers are to locals that outlive the calls; the saved action is restored unchanged. A blocked
        // CONT still continues the process and stays pending, so that `sigtimedwait` can tell whether it came.
        unsafe {
            let mut saved = MaybeUninit::<libc::sigaction>::uninit();
            let mut default: libc::sigaction = std::mem::zeroed();
            default.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(signal.as_raw(), &default, saved.as_mut_ptr());
            send();
            libc::sigaction(signal.as_raw(), saved.as_ptr(), null_mut());
            let mut set = MaybeUninit::uninit();
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGCONT);
            let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            libc::sigtimedwait(set.as_ptr(), null_mut(), &at_once) == libc::SIGCONT
        }
    })
}

/// Runs `body` while these signals do what they do by default, except those that are ignored.
pub(crate) fn with_default<T>(signals: &[Signal], body: impl FnOnce() -> T) -> T {
    let caught = signals.iter().filter(|signal| !is_ignored(**signal));
    let saved: Vec<_> = caught
        .map(|signal| {
            let mut saved = MaybeUninit::<libc::sigaction>::uninit();
            // SAFETY: both actions are locals that outlive the call; the default one runs no code of ours.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal.as_raw(), &default, saved.as_mut_ptr());
            }
            (signal, saved)
        })
        .collect();
    let result = body();
    for (signal, saved) in saved {
        // SAFETY: the call above filled it in, and it is restored unchanged.
        unsafe { libc::sigaction(signal.as_raw(), saved.as_ptr(), null_mut()) };
    }
    result
}

/// A copy of a descriptor that the caller of this process left open for it: to be asked for before this has opened any. The original is closed on exec from now on, so
/// that the job does not keep it open.
pub(crate) fn adopt(descriptor: RawFd) -> io::Result<OwnedFd> {
    if !was_open(descriptor) {
        return Err(rustix::io::Errno::BADF.into());
    }
    // SAFETY: if nothing is open there, the calls fail with EBADF; what is open stays open, since the borrow closes
    // nothing.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let copy = borrowed.try_clone_to_owned()?;
    // The job keeps its own standard ones.
    if descriptor > libc::STDERR_FILENO {
        rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::CLOEXEC)?;
    }
    Ok(copy)
}

/// Starts a thread that no signal finds: they are for the one that waits for them.
pub(crate) fn start_deaf(body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    with_blocked(None, || std::thread::Builder::new().spawn(body).map(drop))
}

/// Runs `body` with one signal blocked in this thread, or all of them.
pub(super) fn with_blocked<T>(signal: Option<libc::c_int>, body: impl FnOnce() -> T) -> T {
    let mut saved = MaybeUninit::uninit();
    // SAFETY: the sets are initialised before they are read, and the saved mask is what this thread had.
    unsafe {
        let mut set = MaybeUninit::uninit();
        match signal {
            Some(signal) => {
                libc::sigemptyset(set.as_mut_ptr());
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            None => {
                libc::sigfillset(set.as_mut_ptr());
            }
        }
        libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), saved.as_mut_ptr());
    }
    let result = body();
    // SAFETY: as above.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, saved.as_ptr(), null_mut()) };
    result
}
