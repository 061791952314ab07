//! A search through processes and all below them, which may be left and gone on with.
//!
//! Where `/proc` hides a process (`hidepid`, and a program that its own user may execute only), its id still is in the list of its parent, and it hears signals.
//! What it has started is found as far as that can be seen, by whom it names as its parent; the rest falls to us when it ends.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, getpid, pidfd_open, waitid};

use super::kin::{children, is_watch, numbered, raw};
use super::parts::Part;
use super::stat::Stat;
use super::sys;

/// How many are met in any case at a time, however slow the host is.
const FEW: usize = 64;

/// A process that was found.
pub(super) struct Met {
    pub(super) pid: Pid,
    /// By which it was found, or to whom it fell meanwhile: us, or one of the job.
    pub(super) parent: Pid,
    /// `None`: it is hidden.
    stat: Option<Stat>,
    pub(super) held: OwnedFd,
}

impl Met {
    /// Who has that id now and that parent, or for want of it us or an adopter, is who was found.
    fn of(pid: Pid, parent: Pid, is_adopter: impl Fn(Pid) -> bool) -> Option<Met> {
        // By a descriptor, and one at a time: the id may be another's soon, and there may be few descriptors.
        let held = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let (stat, mut parents) = (Stat::of(pid), [parent, getpid()].into_iter());
        let parent = match &stat {
            Some(stat) => {
                let adopter = || Pid::from_raw(stat.parent).filter(|parent| is_adopter(*parent));
                parents.find(|parent| raw(*parent) == stat.parent).or_else(adopter)?
            }
            None => parents.find(|parent| children(*parent, true).any(|child| child == pid))?,
        };
        Some(Met { pid, parent, stat, held })
    }

    /// The process group.
    pub(super) fn group(&self) -> Option<i32> {
        self.stat.as_ref().map_or_else(|| sys::group_of(self.pid), |stat| Some(stat.group))
    }

    /// When it began, if that is known.
    pub(super) fn begun(&self) -> Option<Duration> {
        self.stat.as_ref().map(|stat| stat.begun)
    }

    /// Whether a signal has stopped it, as far as is known.
    pub(super) fn is_stopped(&self) -> bool {
        let look = WaitIdOptions::NOHANG | WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
        // Nobody takes the word for that.
        let was_told =
            || waitid(WaitId::Pid(self.pid), look).ok().flatten().is_some_and(|word| word.stopped());
        self.stat.as_ref().map_or_else(was_told, |stat| stat.is_stopped)
    }

    pub(super) fn runs(&self) -> bool {
        runs(&self.held)
    }

    fn children(&self) -> Vec<Pid> {
        match &self.stat {
            Some(stat) => children(self.pid, stat.threads > 1).collect(),
            None => seen_children(self.pid).collect(),
        }
    }
}

/// Whether a process has not ended.
pub(super) fn runs(process: &OwnedFd) -> bool {
    let mut ends = [PollFd::new(process, PollFlags::IN)];
    !matches!(poll(&mut ends, Some(&Timespec::default())), Ok(ended) if ended > 0)
}

/// All that `/proc` shows.
pub(super) fn everybody() -> impl Iterator<Item = Pid> {
    numbered("/proc")
}

/// Those children of a hidden process that are not.
pub(super) fn seen_children(of: Pid) -> impl Iterator<Item = Pid> {
    everybody().filter(move |pid| Stat::of(*pid).is_some_and(|stat| stat.parent == raw(of)))
}

/// How far it has come.
#[derive(Debug)]
pub(super) struct Search {
    /// Those to meet, each with its parent.
    next: Vec<(Pid, Pid)>,
    /// Those that are not met, or not again.
    seen: HashSet<Pid>,
    /// Those below which it went on, as far as they are not hidden, and when each began: its id may be another's later.
    above: HashMap<Pid, Duration>,
    /// Those of them below which it is still to look again.
    again: Vec<Pid>,
    /// Whether somebody was gone before this look has met it.
    has_missed: bool,
}

impl Search {
    /// Of these, each with its parent, and all below them, but for those that are not to be met.
    pub(super) fn new(next: Vec<(Pid, Pid)>, but: HashSet<Pid>) -> Search {
        Search { next, seen: but, above: HashMap::new(), again: Vec::new(), has_missed: false }
    }

    /// Meets these, and all below those of which `meet` says that it goes on there. Says whether all were met, which may take longer than until then.
    pub(super) fn go_on(&mut self, until: Option<Instant>, mut meet: impl FnMut(&Met) -> bool) -> bool {
        for met in 0.. {
            if met >= FEW && until.is_some_and(|until| Instant::now() > until) {
                return false;
            }
            let Some((pid, parent)) = self.next.pop() else {
                let Some(one) = self.again.pop() else { break };
                self.look_again_below(one);
                continue;
            };
            if !self.seen.insert(pid) || is_watch(pid) {
                continue;
            }
            let Some(one) = Met::of(pid, parent, |adopter| self.is_above(adopter)) else {
                // It may be met elsewhere, or has left others behind.
                self.seen.remove(&pid);
                self.has_missed = true;
                continue;
            };
            let before = one.children();
            if meet(&one) {
                // Again: the kernel lets nobody start another who has yet to hear a signal.
                self.next.extend(before.into_iter().chain(one.children()).map(|child| (child, pid)));
                self.above.extend(one.begun().map(|begun| (pid, begun)));
            }
        }
        true
    }

    /// Begins anew with these, and with whoever has come below those that were met: one that is a reaper, as process 1 of a namespace is, gets what
    /// others below it leave behind.
    pub(super) fn begin_anew(&mut self, next: Vec<(Pid, Pid)>) {
        self.next = next;
        self.again = self.above.keys().copied().collect();
        self.has_missed = false;
    }

    /// Looks below one after all, the next time that it begins anew.
    pub(super) fn goes_below(&mut self, one: &Part) {
        self.above.extend(one.begun().map(|begun| (one.pid(), begun)));
    }

    /// These may be met again.
    pub(super) fn forget(&mut self, those: Vec<Pid>) {
        those.iter().for_each(|one| _ = self.seen.remove(one));
    }

    /// Whether somebody was gone before it was met, since it began.
    pub(super) fn has_missed(&self) -> bool {
        self.has_missed
    }

    /// How many were met, or are not to be.
    pub(super) fn count(&self) -> usize {
        self.seen.len()
    }

    /// Those that were met, or are not to be.
    pub(super) fn into_seen(self) -> HashSet<Pid> {
        self.seen
    }

    fn look_again_below(&mut self, one: Pid) {
        match Stat::of(one) {
            Some(stat) if self.above.get(&one) == Some(&stat.begun) => {
                let come = children(one, stat.threads > 1).filter(|child| !self.seen.contains(child));
                self.next.extend(come.map(|child| (child, one)));
            }
            _ => _ = self.above.remove(&one),
        }
    }

    fn is_above(&self, pid: Pid) -> bool {
        self.above.get(&pid).is_some_and(|begun| Stat::of(pid).is_some_and(|stat| stat.begun == *begun))
    }
}
