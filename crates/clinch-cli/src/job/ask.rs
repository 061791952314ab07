//! Telling all of a job a signal: a while at a time, since all else has to wait meanwhile, until nobody is left who was not told.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, pidfd_send_signal};

use super::kin::{children, is_clinch, raw};
use super::search::{Met, Search};
use super::signals::asks_to_end;
use super::sys;

/// How long is looked for those who are to be told, at a time.
const LOOK_FOR: Duration = Duration::from_millis(50);

/// How long is looked for them at all, for which the lock of a job that has ended is kept.
const ASK_FOR: Duration = Duration::from_secs(30);

/// How many are named that cannot be stopped, of which some may be orphaned without end.
const MOST_NAMED: usize = 16;

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
    /// How long was looked so far.
    spent: Duration,
    /// When all were met for the first time. What one has started later is what it does about the signal.
    met: Option<Duration>,
    /// Whether anybody was told since.
    has_told: bool,
    /// Those that were found below a `clinch run`, which hear it from that.
    told_elsewhere: HashSet<Pid>,
    unreached: Unreached,
}

/// One that runs and may not be sent a signal: another user's, by `sudo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beyond {
    /// It was to end for the lock's sake.
    Unstoppable(Pid),
    /// One was passed on to it.
    Deaf(Pid),
}

/// All of them that were met.
#[derive(Debug, Default)]
pub(super) struct Unreached {
    all: HashSet<Pid>,
    /// Those of them whose parent is none.
    pub(super) topmost: Vec<Pid>,
}

impl Unreached {
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

/// Those of them of which it was said.
#[derive(Debug, Default)]
pub(crate) struct Named {
    unstoppable: Those,
    deaf: Those,
}

#[derive(Debug, Default)]
struct Those {
    all: HashSet<Pid>,
    are_more: bool,
}

impl Named {
    /// What is to be said of one, if it was not.
    pub(crate) fn words(&mut self, one: Beyond) -> Option<String> {
        match one {
            Beyond::Unstoppable(pid) => self.unstoppable.words(
                pid,
                "and cannot be stopped: it runs on without the lock",
                "there are others of the job that cannot be stopped",
            ),
            Beyond::Deaf(pid) => self.deaf.words(
                pid,
                "and hears no signal from this one",
                "there are others of the job that hear no signal from this one",
            ),
        }
    }
}

impl Those {
    fn words(&mut self, pid: Pid, what: &str, others: &str) -> Option<String> {
        if self.all.contains(&pid) {
            return None;
        }
        if self.all.len() < MOST_NAMED {
            self.all.insert(pid);
            return Some(format!("process {pid} of the job is another user's {what}"));
        }
        let is_new = !std::mem::replace(&mut self.are_more, true);
        is_new.then(|| others.to_owned())
    }
}

impl Ask {
    /// Tells those who are found by this search.
    pub(super) fn new(signal: Signal, to: To, search: Search) -> Ask {
        let (spent, unreached) = (Duration::ZERO, Unreached::default());
        let told_elsewhere = HashSet::new();
        Ask { signal, to, search, spent, met: None, has_told: false, told_elsewhere, unreached }
    }

    /// Goes on for a while, says whether it is over, and who could not be told. Whoever has lost its parents meanwhile is a child of ours, or of a
    /// reaper in the job.
    pub(super) fn go_on(&mut self, ours: impl Fn() -> Vec<(Pid, Pid)>) -> (bool, Vec<Beyond>) {
        let begun = Instant::now();
        let until = begun + LOOK_FOR;
        let is_over = loop {
            let Ask { signal, to, search, met, has_told, told_elsewhere, unreached, .. } = self;
            let are_met = search.go_on(Some(until), |one| {
                let is_later = met.is_some_and(|met| one.begun().is_some_and(|begun| begun > met));
                if is_later || told_elsewhere.contains(&one.pid) {
                    return false;
                }
                *has_told = true;
                tell(one, *signal, *to, told_elsewhere, unreached)
            });
            if self.spent + begun.elapsed() > ASK_FOR || are_met && self.met.is_some() && !self.has_told {
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
        self.spent += begun.elapsed();
        let beyond = if self.to == To::All { Beyond::Unstoppable } else { Beyond::Deaf };
        (is_over, std::mem::take(&mut self.unreached.topmost).into_iter().map(beyond).collect())
    }

    /// How many were met.
    pub(super) fn met(&self) -> usize {
        self.search.count()
    }
}

fn add_all_below(one: Pid, all: &mut HashSet<Pid>) {
    let mut next = vec![one];
    while let Some(parent) = next.pop() {
        next.extend(children(parent, true).filter(|child| all.insert(*child)));
    }
}

/// Whether to go on below it.
fn tell(
    one: &Met,
    signal: Signal,
    to: To,
    told_elsewhere: &mut HashSet<Pid>,
    unreached: &mut Unreached,
) -> bool {
    match to {
        To::All => {
            unreached.send(signal, one);
            // Who is stopped does not hear it.
            let _ = pidfd_send_signal(&one.held, Signal::CONT);
            true
        }
        To::Groups(groups) => {
            let passes_on = is_clinch(raw(one.pid));
            if one.group().is_some_and(|group| groups.contains(&Some(group))) {
                if passes_on {
                    // Before it hears anything: when it ends by that, what it leaves behind falls to us.
                    add_all_below(one.pid, told_elsewhere);
                }
                unreached.send(signal, one);
            }
            !passes_on
        }
        To::AllBut(but) => {
            if but.is_none() || but != one.group() {
                unreached.send(signal, one);
            }
            if asks_to_end(signal) {
                let _ = pidfd_send_signal(&one.held, Signal::CONT);
            }
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line is written for each, without end; or nobody hears of the others.
    #[test]
    fn of_many_that_cannot_be_stopped_some_are_named() {
        let mut named = Named::default();
        let said: Vec<String> = (1..=20)
            .cycle()
            .take(100)
            .filter_map(|id| named.words(Beyond::Unstoppable(Pid::from_raw(id)?)))
            .collect();
        assert_eq!(said.len(), MOST_NAMED + 1);
        assert!(said.last().is_some_and(|last| last.contains("others")), "{said:?}");
    }
}
