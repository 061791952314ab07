//! Reaping: the child itself, and orphans that fall to us as process 1 or as their subreaper.

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, WaitOptions, kill_process, kill_process_group, wait,
    waitid,
};

use super::kin::Kin;
use crate::exit::SIGNAL_BASE;

/// The child, in a process group of its own.
#[derive(Debug)]
pub(crate) struct Child {
    pid: Pid,
    exit: Option<Exit>,
    reaped: bool,
    /// What it has started in other groups, as far as it was to stop.
    kin: Kin,
}

/// How the child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Code(u8),
    Signal(i32),
}

impl Exit {
    /// The exit code that a shell would see.
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Code(code) => code,
            Exit::Signal(signal) => SIGNAL_BASE.saturating_add(u8::try_from(signal).unwrap_or(0)),
        }
    }
}

/// What happened to the child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It ended and was not reaped yet: its process group cannot be anybody else's.
    Ended(Exit),
    /// It was stopped by this signal.
    Stopped(Signal),
}

impl Child {
    pub(crate) fn new(pid: Pid) -> Child {
        Child { pid, exit: None, reaped: false, kin: Kin::default() }
    }

    /// The child's process group.
    pub(crate) fn group(&self) -> Pid {
        self.pid
    }

    /// Looks whether the child has ended or stopped since the last look.
    pub(crate) fn look(&mut self) -> Option<Change> {
        if self.exit.is_some() {
            return None;
        }
        let look = WaitIdOptions::NOHANG | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        if let Some(exit) = self.wait(look).and_then(|status| exit(&status)) {
            self.exit = Some(exit);
            return Some(Change::Ended(exit));
        }
        let stopped = self.wait(WaitIdOptions::NOHANG | WaitIdOptions::STOPPED)?.stopping_signal()?;
        Signal::from_named_raw(stopped).map(Change::Stopped)
    }

    /// Takes the ended child off the process table.
    pub(crate) fn reap(&mut self) {
        self.wait(WaitIdOptions::NOHANG | WaitIdOptions::EXITED);
        self.reaped = true;
    }

    /// Sends a signal to the process group. Once the child is reaped, the group's id may be somebody else's.
    pub(crate) fn signal(&self, signal: Signal) {
        if !self.reaped {
            // Fails when all have ended meanwhile.
            let _ = kill_process_group(self.pid, signal);
        }
    }

    /// Sends a signal that is to end it to all of the job: also to parts that made process groups of their own, as `timeout` and
    /// nested runs do.
    pub(crate) fn end(&mut self, signal: Signal) {
        // First, since whoever loses its parent is found no more.
        self.kin.find(self.pid);
        self.signal(signal);
        self.kin.signal(signal);
    }

    /// Reaps every child that has ended, and tells of the main one if it is among them.
    pub(crate) fn reap_all(&mut self) -> Reaped {
        let mut ended = None;
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.pid => {
                    let code = status.exit_status().map(code);
                    ended = code.or_else(|| status.terminating_signal().map(Exit::Signal));
                    (self.exit, self.reaped) = (ended, true);
                }
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return Reaped { ended, left: true },
                Err(_) => return Reaped { ended, left: false },
            }
        }
    }

    fn wait(&self, options: WaitIdOptions) -> Option<WaitIdStatus> {
        waitid(WaitId::Pid(self.pid), options).ok().flatten()
    }
}

/// What reaping all children found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reaped {
    /// The main child ended between the last look and now.
    pub(crate) ended: Option<Exit>,
    /// Whether any child is left.
    pub(crate) left: bool,
}

fn exit(status: &WaitIdStatus) -> Option<Exit> {
    status.exit_status().map(code).or_else(|| status.terminating_signal().map(Exit::Signal))
}

fn code(code: i32) -> Exit {
    Exit::Code(u8::try_from(code & 0xff).unwrap_or(u8::MAX))
}

/// Sends a signal to every child that is left. They are ours alone to reap, so no id can be anybody else's.
pub(crate) fn signal_orphans(signal: Signal) {
    let children = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    for pid in children.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)) {
        let _ = kill_process(pid, signal);
    }
}
