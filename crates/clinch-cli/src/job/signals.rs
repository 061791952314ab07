//! Which signals are caught, when, and who sent them.
//!
//! While the lock is awaited, the four that ask a process to end withdraw the claim. Once there is a child, those that a
//! job may want are passed on to it. What was ignored when this process began stays ignored, for the child too.
//!
//! The job is in our process group, so what the terminal sends has reached it as well, and is not passed on.

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, Waker};

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

use super::sys;

/// Ask a process to end.
const ENDING: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];

/// Further ones that concern a job. Those that stop us would leave nobody to renew the lock of a job that goes on.
const PASSED_ON: [Signal; 7] =
    [Signal::USR1, Signal::USR2, Signal::WINCH, Signal::TSTP, Signal::TTIN, Signal::TTOU, Signal::CONT];

/// What one that draws on a terminal hears of besides. Not of TTIN and TTOU: in the background those stop it, as anybody.
const DRAWING: [Signal; 5] = [Signal::USR1, Signal::USR2, Signal::WINCH, Signal::TSTP, Signal::CONT];

/// Those that are caught once there is a child.
pub(crate) fn caught() -> impl Iterator<Item = Signal> {
    ENDING.into_iter().chain(PASSED_ON).filter(|signal| !sys::is_ignored(*signal))
}

/// Whether a signal asks a process to end.
pub(crate) fn asks_to_end(signal: Signal) -> bool {
    ENDING.contains(&signal)
}

/// Runs `body` such that what asks to end does so at once.
pub(crate) fn ended_at_once<T>(body: impl FnOnce() -> T) -> T {
    sys::with_default(&ENDING, body)
}

/// Whether a signal is one by which the terminal stops a process.
pub(crate) fn asks_to_stop(signal: Signal) -> bool {
    STOPPING.contains(&signal)
}

/// Whether one of them has come, and was not taken by [`Signals::next`].
pub(crate) fn a_stop_has_come() -> bool {
    STOPPING.into_iter().any(sys::has_come)
}

/// Which ones come to nothing when this one comes, as for the kernel.
fn instead_of(signal: Signal) -> &'static [Signal] {
    match signal {
        Signal::CONT => &STOPPING,
        _ if asks_to_stop(signal) => &[Signal::CONT],
        _ => &[],
    }
}

const STOPPING: [Signal; 3] = [Signal::TSTP, Signal::TTIN, Signal::TTOU];

/// What has asked us to end and was not taken by [`Signals::next`], though nobody may have been told yet.
pub(crate) fn which_asked_to_end() -> Option<Signal> {
    ENDING.into_iter().find(|signal| sys::has_come(*signal))
}

/// What has asked us to end that nobody has taken yet, where all signals are blocked.
pub(crate) fn asked_by() -> impl Iterator<Item = Signal> {
    ENDING.into_iter().filter(|signal| sys::has_come(*signal) || sys::is_pending(*signal))
}

/// A signal that came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caught {
    pub(crate) signal: Signal,
    /// Whether a process did, and not the terminal alone.
    was_sent: bool,
}

impl Caught {
    /// Whether our process group has it, too, and nobody but the terminal sent it.
    pub(crate) fn reached_the_group(self) -> bool {
        // A hang-up, and the CONT that comes with it, are for who leads the session; the others hear of it when that ends.
        let is_ours_alone = [Signal::HUP, Signal::CONT].contains(&self.signal) && sys::leads_session();
        // One that nobody sent was told together with the one before.
        !self.was_sent && !is_ours_alone
    }
}

/// The caught signals.
#[derive(Debug)]
pub(crate) struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    /// Catches those that ask to end.
    pub(crate) fn ending() -> io::Result<Signals> {
        let mut signals = Signals(Vec::with_capacity(ENDING.len() + PASSED_ON.len()));
        signals.catch(&ENDING)?;
        Ok(signals)
    }

    /// Catches those that concern what is drawn on a terminal.
    pub(crate) fn drawing() -> io::Result<Signals> {
        let mut signals = Signals::ending()?;
        signals.catch(&DRAWING)?;
        Ok(signals)
    }

    /// Catches those too that only a child can make use of.
    pub(crate) fn pass_on(&mut self) -> io::Result<()> {
        self.catch(&PASSED_ON)
    }

    fn catch(&mut self, signals: &[Signal]) -> io::Result<()> {
        for signal in signals {
            if !sys::is_ignored(*signal) {
                // First, so that the sender is known once the signal is.
                sys::note_senders(*signal, instead_of(*signal))?;
                self.0.push((*signal, unix::signal(SignalKind::from_raw(signal.as_raw()))?));
            }
        }
        Ok(())
    }

    /// Waits for one that asks to end.
    pub(crate) async fn asked_to_end(&mut self) {
        while !asks_to_end(self.next().await.signal) {}
    }

    /// Forgets what asked to stop: that has been done.
    pub(crate) fn forget_stops(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        for (signal, stream) in self.0.iter_mut().filter(|(signal, _)| asks_to_stop(*signal)) {
            while stream.poll_recv(&mut context).is_ready() {}
            sys::was_sent(*signal);
        }
    }

    /// The next signal that came.
    ///
    /// # Cancel safety
    ///
    /// Safe: a signal is taken only by the poll that returns it.
    pub(crate) async fn next(&mut self) -> Caught {
        poll_fn(|context| {
            for (signal, stream) in &mut self.0 {
                while stream.poll_recv(context).is_ready() {
                    // One that has been done, or was undone since, is not forgotten by a stream that had yet to hear of it.
                    if instead_of(*signal).is_empty() || sys::has_come(*signal) {
                        return Poll::Ready(Caught { signal: *signal, was_sent: sys::was_sent(*signal) });
                    }
                }
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // On a real terminal the two often count as one, for the kernel or for the job.
    #[test]
    fn what_the_terminal_sends_the_job_has_already() {
        let reached = |was_sent| Caught { signal: Signal::INT, was_sent }.reached_the_group();
        assert!(reached(false), "a key would interrupt the job twice");
        assert!(!reached(true), "the job would not hear of what was sent to us alone");
    }
}
