//! Which signals are caught, and when.
//!
//! While the lock is awaited, the four that ask a process to end withdraw the claim. Once there is a child, those that a
//! job may want are passed on to it. What was ignored when this process began stays ignored, for the child too.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

use super::sys;

/// Ask a process to end.
const ENDING: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];

/// Further ones that concern a job.
const PASSED_ON: [Signal; 5] = [Signal::USR1, Signal::USR2, Signal::WINCH, Signal::TSTP, Signal::CONT];

/// Those that are caught once there is a child.
pub(crate) fn caught() -> impl Iterator<Item = Signal> {
    ENDING.into_iter().chain(PASSED_ON).filter(|signal| !sys::is_ignored(*signal))
}

/// Whether a signal asks a process to end.
pub(crate) fn asks_to_end(signal: Signal) -> bool {
    ENDING.contains(&signal)
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

    /// Catches all of these.
    pub(crate) fn all() -> io::Result<Signals> {
        let mut signals = Signals::ending()?;
        signals.pass_on()?;
        Ok(signals)
    }

    /// Catches those too that only a child can make use of.
    pub(crate) fn pass_on(&mut self) -> io::Result<()> {
        self.catch(&PASSED_ON)
    }

    fn catch(&mut self, signals: &[Signal]) -> io::Result<()> {
        for signal in signals {
            if !sys::is_ignored(*signal) {
                self.0.push((*signal, unix::signal(SignalKind::from_raw(signal.as_raw()))?));
            }
        }
        Ok(())
    }

    /// Waits for one that asks to end.
    pub(crate) async fn asked_to_end(&mut self) {
        while !asks_to_end(self.next().await) {}
    }

    /// The next signal that came.
    ///
    /// # Cancel safety
    ///
    /// Safe: a signal is taken only by the poll that returns it.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            for (signal, stream) in &mut self.0 {
                if stream.poll_recv(context).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }
}
