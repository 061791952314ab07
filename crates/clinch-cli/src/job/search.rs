//! A search through processes and all below them, which may be left and gone on with.
//!
//! Where `/proc` hides a process (`hidepid`, and a program that its own user may execute only), its id still is in the list of its parent, and it hears signals.
//! What it has started is found as far as that can be seen, by whom it names as its parent; the rest falls to us when it ends.

use std::collections::HashSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, getpid, pidfd_open, waitid};

use super::kin::{children, is_watch, raw};
use super::stat::Stat;
use super::sys;

/// How many are met in any case at a time, however slow the host is.
const FEW: usize = 64;

/// A process that was found.
pub(super) struct Met {
    pub(super) pid: Pid,
    /// By which it was found, or us, to whom it fell meanwhile.
    pub(super) parent: Pid,
    /// `None`: it is hidden.
    stat: Option<Stat>,
    pub(super) held: OwnedFd,
}

impl Met {
    /// Who has that id now and that parent, or us for want of it, is who was found.
    fn of(pid: Pid, parent: Pid) -> Option<Met> {
        // By a descriptor, and one at a time: the id may be another's soon, and there may be few descriptors.
        let held = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let (stat, mut parents) = (Stat::of(pid), [parent, getpid()].into_iter());
        let parent = match &stat {
            Some(stat) => parents.find(|parent| raw(*parent) == stat.parent)?,
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
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}

/// Those children of a hidden process that are not.
pub(super) fn seen_children(of: Pid) -> impl Iterator<Item = Pid> {
    everybody().filter(move |pid| Stat::of(*pid).is_some_and(|stat| stat.parent == raw(of)))
}

/// How far it has come.
#[derive(Debug)]
pub(super) struct Search {
    /// Those to meet, each with its parent.
    pub(super) next: Vec<(Pid, Pid)>,
    /// Those that are not met, or not again.
    pub(super) seen: HashSet<Pid>,
}

impl Search {
    /// Meets these, and all below those of which `meet` says that it goes on there. Says whether all were met, which may take longer than until then.
    pub(super) fn go_on(&mut self, until: Option<Instant>, mut meet: impl FnMut(&Met) -> bool) -> bool {
        for met in 0.. {
            if met >= FEW && until.is_some_and(|until| Instant::now() > until) {
                return false;
            }
            let Some((pid, parent)) = self.next.pop() else { break };
            if !self.seen.insert(pid) || is_watch(pid) {
                continue;
            }
            let Some(one) = Met::of(pid, parent) else { continue };
            let before = one.children();
            if meet(&one) {
                // Again: the kernel lets nobody start another who has yet to hear a signal.
                self.next.extend(before.into_iter().chain(one.children()).map(|child| (child, pid)));
            }
        }
        true
    }
}
