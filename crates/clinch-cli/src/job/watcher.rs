//! What the watch over a job does, in a copy of us that sleeps in one call: it has nothing open but the end of a pipe, a timer, us, the job and its
//! locks, no terminal, no part in anybody's process group, and hears no signal. Its name and words are not ours, so that whoever kills us by those
//! does not kill it.
//!
//! The copy has one thread, whatever we have: it makes system calls alone, and allocates nothing.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::{null, null_mut};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{
    Pid, PidfdFlags, Signal, getpid, getppid, kill_process, pidfd_open, pidfd_send_signal, setsid,
};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::fork::Image;
use super::{stat, sys};

/// What `ps` shows for it.
pub(crate) const NAME: &CStr = c"job-watch";

/// As above, once it ends the job.
pub(crate) const ENDS: &CStr = c"job-end";

/// As above, while it becomes the verb: the kernel's word for `/proc/self/exe`.
pub(crate) const BECOMES: &CStr = c"exe";

/// How often it looks at a job that is stopped with us. One that goes on is seen twice in a row before we are woken.
const LOOKS_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// How many parts of a job it looks at, the first ones.
const LOOKS_AT: usize = 64;

/// How many it knows of that are stopped with us, for which there is room before it begins: more than most hosts have processes.
pub(super) const KNOWS: usize = 1 << 16;

/// What it is told.
#[derive(Clone, Copy, Debug)]
pub(super) enum Word {
    /// The first process of the job; `None`: that has ended.
    Job(Option<Pid>),
    /// Until when the lock lasts, in nanoseconds after boot.
    Until(u64),
    /// We are about to be stopped with this part of the job, which is stopped already; `None`: we go on.
    Stopped(Option<Pid>),
    /// As well with this one, which has yet to hear of its stop.
    Stopping(Option<Pid>),
}

/// Of one word.
const SIZE: usize = 16;

impl Word {
    pub(super) fn bytes(self) -> [u8; SIZE] {
        let id = |pid: Option<Pid>| pid.map_or(0, |pid| u64::from(pid.as_raw_nonzero().get().unsigned_abs()));
        let (kind, what) = match self {
            Word::Job(pid) => (0, id(pid)),
            Word::Until(until) => (1, until),
            Word::Stopped(pid) => (2, id(pid)),
            Word::Stopping(pid) => (3, id(pid)),
        };
        ((u128::from(what) << 64) | kind).to_ne_bytes()
    }

    fn of(bytes: [u8; SIZE]) -> Word {
        let both = u128::from_ne_bytes(bytes);
        let what = u64::try_from(both >> 64).unwrap_or(0);
        let pid = || Pid::from_raw(i32::try_from(what).unwrap_or(0));
        match both & 3 {
            0 => Word::Job(pid()),
            1 => Word::Until(what),
            2 => Word::Stopped(pid()),
            _ => Word::Stopping(pid()),
        }
    }
}

/// Starts the copy. Its end is told to nobody. `open`: what it has open, first of all what it hears by.
pub(super) fn fork(open: [RawFd; 3], keeps: bool, image: &Image, is_namespace: bool) -> io::Result<Pid> {
    let (mut arguments, environment) = (image.words(), image.environment());
    // That of the turn, if there is one: it is to be closed before all else.
    let [hear, _, turn] = open;
    let turn = CString::new(format!("--turn={turn}")).ok().filter(|_| turn != hear);
    if let Some(turn) = &turn {
        arguments.insert(arguments.len() - 1, turn.as_ptr());
    }
    // For what is known later.
    let place = arguments.len() - 1;
    arguments.extend([null(); 2]);
    let (wrapper, seen) = (getpid(), sys::words());
    // What is not used of it takes no memory.
    let mut parts = Vec::new();
    parts.try_reserve_exact(KNOWS).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let pid = sys::with_blocked(None, || {
        // SAFETY: the call without flags and stack is `fork`, but that no signal tells the parent of the end. The copy has one thread; it only
        // makes system calls, formats numbers on its stack, and ends.
        unsafe {
            let pid = libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0);
            if pid == 0 {
                hide(seen);
                close_all_but(open);
                let watcher = Watcher::new(wrapper, open[0], keeps, parts);
                let mut watcher = Watcher { is_namespace, ..watcher };
                watcher.watch(&mut arguments, place, &environment);
                libc::_exit(0);
            }
            pid
        }
    });
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw);
    pid.ok_or_else(io::Error::last_os_error)
}

/// Ends the copy, and comes back when it has let go of all: of the lock's file, whose file system may be unmounted after us.
pub(super) fn reap(watch: Pid) {
    // Nobody else waits for it, so the id is its own.
    let _ = kill_process(watch, Signal::KILL);
    // SAFETY: no status is asked for.
    unsafe { libc::waitpid(watch.as_raw_nonzero().get(), null_mut(), libc::__WALL) };
}

/// Closes a descriptor: the pipe in a child that is about to become another process, or to end; or that of a turn which was noted.
pub(super) fn let_go(descriptor: RawFd) {
    // SAFETY: this process uses it no more.
    unsafe { libc::close(descriptor) };
}

fn hide(words: Range<usize>) {
    let _ = setsid();
    sys::set_name(NAME);
    sys::set_words(NAME, words);
    // Should somebody have stopped it, it goes on when we end.
    // SAFETY: asks for a signal, which changes no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCONT) };
}

/// What the copy knows.
struct Watcher<'a> {
    wrapper: Pid,
    /// None: has gone over to another, so there is nothing to wait for.
    wrapper_held: Option<OwnedFd>,
    hear: BorrowedFd<'a>,
    /// Where the lock does not last as long as somebody has its descriptor.
    timer: Option<OwnedFd>,
    keeps: bool,
    /// Whether the job is all of this pid namespace (`namespace.rs`).
    is_namespace: bool,
    job: Option<Pid>,
    job_held: Option<OwnedFd>,
    /// Whether there was ever a job.
    began: bool,
    /// Those that are stopped with us, and whether they were seen to be: on a busy host it takes a while until a process hears of that.
    parts: Vec<(Pid, bool)>,
    /// How often in a row one was seen to go on.
    seen: u8,
}

/// Why the copy is to act.
enum Why {
    /// We are gone.
    Gone,
    /// Nobody told in time that the lock lasts longer.
    Overdue,
}

impl Watcher<'_> {
    fn new(wrapper: Pid, hear: RawFd, keeps: bool, parts: Vec<(Pid, bool)>) -> Watcher<'static> {
        let held = pidfd_open(wrapper, PidfdFlags::empty()).ok();
        let timer = || timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::empty()).ok();
        Watcher {
            wrapper,
            wrapper_held: held.filter(|_| getppid() == Some(wrapper)),
            // SAFETY: was left open, and is closed by the end of this process.
            hear: unsafe { BorrowedFd::borrow_raw(hear) },
            timer: (!keeps).then(timer).flatten(),
            keeps,
            is_namespace: false,
            job: None,
            job_held: None,
            began: false,
            parts,
            seen: 0,
        }
    }

    /// Its life. Comes back only if it cannot become the verb.
    fn watch(&mut self, arguments: &mut [*const c_char], mut place: usize, environment: &[*const c_char]) {
        let why = self.wait();
        let keeps = self.keeps && matches!(why, Why::Gone);
        if matches!(why, Why::Gone) {
            // The pipe ends before the kernel has given our children away: whom it then finds stopped it hangs up.
            wait_for(self.wrapper_held.as_ref());
        }
        if keeps {
            // What was stopped with us nobody else would have go on: it has the lock's descriptor, and no terminal.
            self.wake_parts();
        }
        // A job that has ended may have left parts behind, but its id may be another's. Another user's stays as it is, but not all of its parts.
        let left = self.job.filter(|_| match keeps {
            true => !self.job_has_ended(),
            false => self.tell(Signal::STOP) != Some(Err(Errno::SRCH)),
        });
        if matches!(why, Why::Overdue) {
            // Before the job can end by it: for us, who may have renewed the lock.
            sys::set_name(ENDS);
            // It says what has become of its lock, and ends.
            self.wake();
            if self.is_namespace {
                sys::kill_everybody(Signal::KILL);
            }
        }
        let mut word = [0; 16];
        let written = match left {
            Some(job) => write!(&mut word[..], "{}\0", job.as_raw_nonzero()),
            None => write!(&mut word[..], "--all\0"),
        };
        if self.began
            && let Some(argument) = arguments.get_mut(place)
        {
            *argument = c"--began".as_ptr();
            place += 1;
        }
        let is_to_say = if keeps { left.is_some() } else { self.job.is_some() };
        if is_to_say
            && written.is_ok()
            && let Some(argument) = arguments.get_mut(place)
        {
            *argument = word.as_ptr().cast();
        }
        become_the_verb(arguments, environment);
        match keeps {
            true => wait_for(self.job_held.as_ref()),
            false => drop(self.tell(Signal::KILL)),
        }
    }

    fn job_has_ended(&self) -> bool {
        self.job_held.as_ref().is_none_or(|job| {
            matches!(poll(&mut [PollFd::new(job, PollFlags::IN)], Some(&Timespec::default())), Ok(ended) if ended > 0)
        })
    }

    /// Waits until it is to act.
    fn wait(&mut self) -> Why {
        loop {
            let pause = self.stands_in().then_some(&LOOKS_EVERY);
            let timer = self.timer.as_ref().map_or(self.hear, AsFd::as_fd);
            let mut ready = [PollFd::new(&self.hear, PollFlags::IN), PollFd::new(&timer, PollFlags::IN)];
            let polled = poll(&mut ready, pause);
            let [heard, over] = ready.map(|one| !one.revents().is_empty());
            match polled {
                Ok(0) => self.look(),
                Err(Errno::INTR) => {}
                // What was told comes first: it may be that the lock lasts longer.
                Ok(_) if heard => {
                    let mut bytes = [0; SIZE];
                    match rustix::io::read(self.hear, &mut bytes) {
                        Ok(SIZE) => self.hear(Word::of(bytes)),
                        Err(Errno::INTR | Errno::AGAIN) => {}
                        _ => return Why::Gone,
                    }
                }
                Ok(_) if over => return Why::Overdue,
                _ => return Why::Gone,
            }
        }
    }

    fn hear(&mut self, word: Word) {
        match word {
            Word::Job(job) => {
                self.job = job;
                self.began |= job.is_some();
                self.job_held = job.and_then(|job| pidfd_open(job, PidfdFlags::empty()).ok());
            }
            Word::Until(until) => {
                let Some(timer) = &self.timer else { return };
                let at = time(until);
                let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: at };
                let _ = timerfd_settime(timer, TimerfdTimerFlags::ABSTIME, &once);
            }
            Word::Stopped(None) => self.parts.clear(),
            Word::Stopped(part) => self.knows(part, true),
            Word::Stopping(part) => self.knows(part, false),
        }
    }

    fn knows(&mut self, part: Option<Pid>, is_stopped: bool) {
        // It gets no more memory.
        if self.parts.len() < self.parts.capacity() {
            self.parts.extend(part.map(|part| (part, is_stopped)));
        }
    }

    fn stands_in(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Has us go on if a part of the job goes on without us: a CONT that comes just before we stop is lost, for the kernel takes it away with the
    /// stop; and whoever has the job go on need not know of us.
    fn look(&mut self) {
        let mut goes_on = false;
        for (part, was_stopped) in self.parts.iter_mut().take(LOOKS_AT) {
            match stat::letter(*part) {
                Some(b'T') => *was_stopped = true,
                Some(b'R' | b'S' | b'D') => goes_on |= *was_stopped,
                _ => {}
            }
        }
        let goes_on = goes_on && stat::letter(self.wrapper) == Some(b'T');
        self.seen = if goes_on { self.seen + 1 } else { 0 };
        if self.seen >= 2 {
            self.wake();
            self.seen = 0;
        }
    }

    fn wake(&self) {
        if let Some(wrapper) = &self.wrapper_held {
            let _ = pidfd_send_signal(wrapper, Signal::CONT);
        }
    }

    /// Has the parts go on that were stopped with us.
    fn wake_parts(&self) {
        for (part, _) in &self.parts {
            match stat::letter(*part) {
                // Nor does one stop by that which has yet to hear of its stop.
                Some(letter) if !matches!(letter, b'Z' | b'X') => _ = kill_process(*part, Signal::CONT),
                // It is hidden, or gone.
                None if Some(*part) == self.job => _ = self.tell(Signal::CONT),
                _ => {}
            }
        }
    }

    /// Tells the job's first process.
    fn tell(&self, signal: Signal) -> Option<rustix::io::Result<()>> {
        self.job_held.as_ref().map(|job| pidfd_send_signal(job, signal))
    }
}

fn time(nanos: u64) -> Timespec {
    const SECOND: u64 = 1_000_000_000;
    let part = |nanos| i64::try_from(nanos).unwrap_or(0);
    Timespec { tv_sec: part(nanos / SECOND), tv_nsec: part(nanos % SECOND) }
}

fn wait_for(process: Option<&OwnedFd>) {
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
fn close_all_but(mut kept: [RawFd; 3]) {
    kept.sort_unstable();
    let [low, middle, high] = kept;
    let close = |first: RawFd, last: RawFd| {
        // SAFETY: nothing in this process uses any of them again.
        first > last || unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) == 0 }
    };
    let closed = close(0, low - 1)
        && close(low + 1, middle - 1)
        && close(middle + 1, high - 1)
        && close(high + 1, RawFd::MAX);
    if !closed {
        // A kernel before 5.9.
        for descriptor in (0..4096).filter(|descriptor| !kept.contains(descriptor)) {
            // SAFETY: as above.
            unsafe { libc::close(descriptor) };
        }
    }
}
