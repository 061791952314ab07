//! Telling all of a job a signal: a while at a time, since all else has to wait meanwhile, until nobody is left who was not told.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, pidfd_send_signal};

use super::kin::{is_clinch, raw};
use super::search::{Met, Search};
use super::signals::asks_to_end;
use super::sys;

/// How long is looked for those who are to be told, at a time.
const LOOK_FOR: Duration = Duration::from_millis(50);

/// How long is looked for them at all, for which the lock of a job that has ended is kept.
const ASK_FOR: Duration = Duration::from_secs(30);

/// Who is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    /// All, also who is stopped.
    All,
    /// Those in these process groups. A `clinch run` among them passes it on to what is below it.
    Groups([Option<i32>; 2]),
    /// All but those in this process group, who have it. Who is stopped goes on if that asks it to end.
    AllBut(Option<i32>),
}

/// A signal that is being told.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) signal: Signal,
    pub(super) to: To,
    search: Search,
    since: Instant,
    /// When all were met for the first time. What one has started later is what it does about the signal.
    met: Option<Duration>,
    /// Whether anybody was told since.
    has_told: bool,
    beyond: Beyond,
}

/// Those that run and may not be sent a signal: another user's, by `sudo`.
#[derive(Debug, Default)]
pub(super) struct Beyond {
    all: HashSet<Pid>,
    /// Those of them whose parent is none.
    pub(super) topmost: Vec<Pid>,
}

impl Beyond {
    /// Whether a signal has reached it.
    pub(super) fn send(&mut self, signal: Signal, to: &Met) -> bool {
        let sent = pidfd_send_signal(&to.held, signal);
        if sent == Err(Errno::PERM) && to.runs() && self.all.insert(to.pid) && !self.all.contains(&to.parent)
        {
            self.topmost.push(to.pid);
        }
        sent.is_ok()
    }
}

impl Ask {
    /// Tells those who are found by this search.
    pub(super) fn new(signal: Signal, to: To, search: Search) -> Ask {
        let (since, beyond) = (Instant::now(), Beyond::default());
        Ask { signal, to, search, since, met: None, has_told: false, beyond }
    }

    /// Goes on for a while, says whether it is over, and who could not be told. Whoever has lost its parents meanwhile is a child of ours, or of a
    /// reaper in the job.
    pub(super) fn go_on(&mut self, ours: impl Fn() -> Vec<(Pid, Pid)>) -> (bool, Vec<Pid>) {
        let until = Instant::now() + LOOK_FOR;
        let is_over = loop {
            let Ask { signal, to, search, met, has_told, beyond, .. } = self;
            let are_met = search.go_on(Some(until), |one| {
                let is_later = met.is_some_and(|met| one.begun().is_some_and(|begun| begun > met));
                *has_told |= !is_later;
                !is_later && tell(one, *signal, *to, beyond)
            });
            if self.since.elapsed() > ASK_FOR || are_met && self.met.is_some() && !self.has_told {
                break true;
            }
            if !are_met {
                break false;
            }
            self.met.get_or_insert_with(sys::since_boot);
            self.has_told = false;
            // What falls to us from an inner run is as well what the job has left behind.
            let next = if matches!(self.to, To::AllBut(_)) { Vec::new() } else { ours() };
            self.search.begin_anew(next);
        };
        (is_over, std::mem::take(&mut self.beyond.topmost))
    }

    /// How many were met.
    pub(super) fn met(&self) -> usize {
        self.search.count()
    }
}

/// Whether to go on below it.
fn tell(one: &Met, signal: Signal, to: To, beyond: &mut Beyond) -> bool {
    match to {
        To::All => {
            beyond.send(signal, one);
            // Who is stopped does not hear it.
            let _ = pidfd_send_signal(&one.held, Signal::CONT);
            true
        }
        To::Groups(groups) => {
            if one.group().is_some_and(|group| groups.contains(&Some(group))) {
                let _ = pidfd_send_signal(&one.held, signal);
            }
            !is_clinch(raw(one.pid))
        }
        To::AllBut(but) => {
            if but.is_none() || but != one.group() {
                let _ = pidfd_send_signal(&one.held, signal);
            }
            if asks_to_end(signal) {
                let _ = pidfd_send_signal(&one.held, Signal::CONT);
            }
            true
        }
    }
}
