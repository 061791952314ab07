//! The terminal: the job gets the foreground if we have it, and stops and goes on with us as a shell's job does.

use rustix::process::{Pid, Signal};

use super::sys;

/// The controlling terminal on stdin.
#[derive(Debug)]
pub(crate) struct Terminal {
    ours: Pid,
}

impl Terminal {
    /// `None`: stdin is not our controlling terminal, and there is no job control to take part in.
    pub(crate) fn on_stdin() -> Option<Terminal> {
        rustix::termios::tcgetpgrp(rustix::stdio::stdin()).ok()?;
        Some(Terminal { ours: rustix::process::getpgrp() })
    }

    /// Whether we have the foreground.
    pub(crate) fn is_ours(&self) -> bool {
        self.foreground() == Some(self.ours)
    }

    /// Gives the foreground to the job if we have it.
    pub(crate) fn give(&self, group: Pid) {
        if self.is_ours() {
            // Fails when the terminal was hung up, which nobody can mend.
            let _ = sys::set_foreground(rustix::stdio::stdin(), group);
        }
    }

    /// Takes the foreground back from the job, if nobody else has it meanwhile.
    pub(crate) fn take_back(&self, group: Pid) {
        if self.foreground() == Some(group) {
            let _ = sys::set_foreground(rustix::stdio::stdin(), self.ours);
        }
    }

    /// Stops us as the job was stopped; comes back when the shell continues us, or at once where there is none.
    pub(crate) fn stop_too(&self, group: Pid, signal: Signal) {
        // A shell says nothing to a running job that it brings to the foreground, so the job may want the terminal that
        // we have and it has not.
        let wants_what_we_have = matches!(signal, Signal::TTIN | Signal::TTOU) && self.is_ours();
        if !wants_what_we_have {
            self.take_back(group);
            sys::stop_group(signal);
        }
        self.give(group);
    }

    fn foreground(&self) -> Option<Pid> {
        rustix::termios::tcgetpgrp(rustix::stdio::stdin()).ok()
    }
}
