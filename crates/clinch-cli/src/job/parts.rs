//! The parts of a job, above all of one whose wrapper was killed. Nobody's parent is us, so who has lost its own is found by its environment alone, which it may have
//! cleared. So all are found before the first of them hears anything, and remembered until they have ended.

use std::collections::{HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::iter::from_fn;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use clinch::ClaimId;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::kin::{children, is_watch, threads};
use super::reentry::{has_entered, was_told};
use super::search::{Met, everybody, runs, seen_children};
use super::stat::{Stat, letter};
use super::sys;

/// For how long a process that is becoming another is looked at again, which has no environment until its program was read; or one that is stuck.
const BECOMING: Duration = Duration::from_secs(1);

/// How long is waited for one that does not stop, where nobody else is found any more: it waits for storage.
const STOPS_WITHIN: Duration = Duration::from_millis(500);

/// The pause for a process that is just becoming another, or has yet to stop.
const PAUSE: Duration = Duration::from_millis(1);

/// A process. When it began tells it from others that have its id later: descriptors would, too, but there may be few. One that `/proc` hides has one.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pid: Pid,
    begun: Duration,
    hidden: Option<Rc<OwnedFd>>,
}

impl PartialEq for Part {
    fn eq(&self, other: &Part) -> bool {
        (self.pid, self.begun) == (other.pid, other.begun)
    }
}

impl Eq for Part {}

impl Hash for Part {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.pid, self.begun).hash(state);
    }
}

impl Part {
    /// The process that has this id.
    pub(super) fn who_has(pid: Pid) -> Option<Part> {
        Part::who_had(pid, sys::since_boot()).or_else(|| Part::hidden(pid))
    }

    /// The one that a search has met.
    pub(super) fn met(one: &Met) -> Option<Part> {
        match one.begun() {
            Some(begun) => Some(Part { pid: one.pid, begun, hidden: None }),
            None => {
                let held = one.held.try_clone().ok()?;
                Some(Part { pid: one.pid, begun: Duration::MAX, hidden: Some(Rc::new(held)) })
            }
        }
    }

    /// The process that had this id then; `None`: it is gone, or hidden.
    fn who_had(pid: Pid, then: Duration) -> Option<Part> {
        let begun = Stat::of(pid)?.begun;
        (begun <= then).then_some(Part { pid, begun, hidden: None })
    }

    /// The process that has this id, of which nothing is told.
    fn hidden(pid: Pid) -> Option<Part> {
        let held = pidfd_open(pid, PidfdFlags::empty()).ok().filter(|_| Stat::of(pid).is_none())?;
        Some(Part { pid, begun: Duration::MAX, hidden: Some(Rc::new(held)) })
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    fn runs(&self) -> bool {
        match &self.hidden {
            Some(held) => runs(held),
            None => Stat::of(self.pid).is_some_and(|stat| stat.begun == self.begun && !stat.is_over),
        }
    }

    /// Whether it starts nothing, as far as that can be seen: all of its threads are stopped, or it has ended.
    pub(super) fn is_still(&self) -> bool {
        let stands = |thread| matches!(letter(thread), None | Some(b'T' | b'Z' | b'X'));
        self.hidden.is_some() || !self.runs() || threads(self.pid).all(stands)
    }

    fn children(&self) -> Vec<Part> {
        let parent = self.pid;
        let listed: Vec<Pid> = match &self.hidden {
            // One that is hidden no more lists all of them.
            Some(_) => children(parent, true).chain(seen_children(parent)).collect(),
            None => children(parent, true).collect(),
        };
        let then = sys::since_boot();
        let is_anothers = match &self.hidden {
            Some(held) => !runs(held),
            // They count also where it has ended meanwhile.
            None => Stat::of(parent).is_some_and(|stat| stat.begun != self.begun),
        };
        let is_listed = |part: &Part| children(parent, true).any(|child| child == part.pid);
        let part = |pid| Part::who_had(pid, then).or_else(|| Part::hidden(pid).filter(is_listed));
        listed.into_iter().filter(|pid| !is_anothers && !is_watch(*pid)).filter_map(part).collect()
    }

    /// Sends it a signal.
    pub(super) fn send(&self, signal: Signal) -> rustix::io::Result<()> {
        if let Some(held) = &self.hidden {
            return pidfd_send_signal(held, signal);
        }
        // In this order: it is one process whose descriptor this is, and which began then.
        let held = pidfd_open(self.pid, PidfdFlags::empty())?;
        if self.runs() { pidfd_send_signal(held, signal) } else { Err(Errno::SRCH) }
    }

    /// Whether it runs, and this signal, which it was sent, ends it as soon as it has its turn: not if it blocks it for long.
    pub(super) fn is_to_end_by(&self, signal: Signal, for_long: bool) -> bool {
        self.runs() && !sys::cares_for(self.pid, signal, for_long)
    }

    /// When it began, if that is known.
    pub(super) fn begun(&self) -> Option<Duration> {
        self.hidden.is_none().then_some(self.begun)
    }
}

/// All of a job that were found so far.
#[derive(Debug)]
pub(super) struct Parts<F> {
    known: HashSet<Part>,
    /// Who else is of it.
    is_of_it: F,
}

impl<F: Fn(Pid) -> Option<bool>> Parts<F> {
    /// Of a job with this first process, if that runs.
    pub(super) fn new(first: Option<Part>, is_of_it: F) -> Parts<F> {
        Parts { known: first.into_iter().collect(), is_of_it }
    }

    /// Asks all of them to end, each once: to be asked again may mean to end at once. Says whether: where all are found too late, they stay stopped.
    pub(super) fn ask_to_end(&mut self, until: Instant) -> bool {
        // Nobody ends, or starts another, before all are found: those that it leaves behind would not be. Others may take a while to be told.
        // Half of the time, though some may be started without end by one that may not be stopped.
        let now = Instant::now();
        let found = now + until.saturating_duration_since(now) / 2;
        self.stop(false, found);
        let all = self.stop(true, found);
        if Instant::now() >= until {
            return false;
        }
        for signal in [Signal::TERM, Signal::CONT] {
            // Children first: no parent sees that one was stopped.
            all.iter().for_each(|part| _ = part.send(signal));
        }
        true
    }

    /// Kills all of them, and those that are started meanwhile, until then.
    pub(super) fn kill(&mut self, until: Instant) {
        // As above.
        self.stop(false, until.min(Instant::now() + BECOMING));
        let mut killed = HashSet::new();
        loop {
            let (all, before) = (self.stop(true, until.min(Instant::now() + BECOMING)), killed.len());
            killed
                .extend(all.into_iter().filter(|part| part.send(Signal::KILL).is_ok()).map(|part| part.pid));
            if killed.len() == before || Instant::now() >= until {
                return;
            }
        }
    }

    /// Whether any of them runs. Finds what those have started that do.
    pub(super) fn are_left(&mut self) -> bool {
        self.known = below(self.known.iter().cloned(), |_| ()).into_iter().collect();
        if self.known.is_empty() {
            self.known.extend(all_of(&self.is_of_it));
        }
        !self.known.is_empty()
    }

    /// Stops all who are known or below those, and all `others`, until nobody is left who could start another, or for so long; tells them, children
    /// first.
    fn stop(&mut self, others: bool, until: Instant) -> Vec<Part> {
        let (mut stopped, since) = (HashSet::new(), Instant::now());
        loop {
            // What has yet to stop may just be starting another.
            let (before, were_still) = (stopped.len(), stopped.iter().all(Part::is_still));
            if others {
                // At once: of the next one it may not be told yet.
                self.known.extend(all_of(&self.is_of_it).inspect(|part| _ = part.send(Signal::STOP)));
            }
            let all = below(self.known.iter().cloned(), |part| {
                // Who may not be stopped is met in each round.
                if part.send(Signal::STOP).is_ok() {
                    stopped.insert(part.clone());
                }
            });
            self.known.extend(all.iter().cloned());
            let is_new = stopped.len() > before;
            if Instant::now() >= until || !is_new && (were_still || since.elapsed() > STOPS_WITHIN) {
                return all;
            }
            if !is_new {
                sleep(PAUSE);
            }
        }
    }
}

/// Those of these that run, and all below them, children first. Meets each before what it has started is listed.
fn below(roots: impl Iterator<Item = Part>, mut meet: impl FnMut(&Part)) -> Vec<Part> {
    let (mut seen, mut all) = (HashSet::new(), Vec::new());
    let mut next: Vec<(Part, bool)> = roots.map(|root| (root, false)).collect();
    while let Some((part, are_children_done)) = next.pop() {
        if are_children_done {
            all.push(part);
        } else if part.runs() && seen.insert(part.pid) {
            meet(&part);
            let children = part.children();
            next.push((part, true));
            next.extend(children.into_iter().map(|child| (child, false)));
        }
    }
    all
}

/// Who else is of a job: all who were told of its claim, or those alone that have entered that. `None`: cannot be told yet. Parts of a job may have lost
/// their parents with the wrapper, as all do whom the kernel hangs up, and nobody can tell them from daemons.
pub(super) fn told_of(claim: ClaimId, all: bool) -> impl Fn(Pid) -> Option<bool> {
    move |pid| if all { was_told(pid, claim) } else { has_entered(pid, claim) }
}

/// All who are of it. Of whom that cannot be told yet is asked again last, for a while.
pub(super) fn all_of(is_of_it: impl Fn(Pid) -> Option<bool>) -> impl Iterator<Item = Part> {
    let next = everybody().filter(|pid| !is_watch(*pid));
    let (mut next, since) = (next.collect::<VecDeque<_>>(), Instant::now());
    let then = sys::since_boot();
    from_fn(move || {
        loop {
            let pid = next.pop_front()?;
            match is_of_it(pid) {
                Some(true) => {
                    let Some(part) = Part::who_had(pid, then) else { continue };
                    return Some(part);
                }
                None if since.elapsed() < BECOMING => {
                    sleep(PAUSE);
                    next.push_back(pid);
                }
                _ => {}
            }
        }
    })
}
