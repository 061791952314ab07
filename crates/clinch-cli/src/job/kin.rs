//! All that descends from us once the job has to stop, in whatever process groups: found anew for each signal, and remembered by
//! nobody, since whoever loses its parent from then on falls to us.
//!
//! What has left its parents before that, a daemon, is no part of the job any more, unless it is a run of the same lock.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use super::door::Inner;
use super::reentry::settled;
use super::signals::asks_to_end;
use crate::args::Orphans;

/// How long is looked for those who are to be asked, which delays all else. Who is to be killed is looked for in any case.
const LOOK_FOR: Duration = Duration::from_millis(50);

/// How many are met in any case, however slow the host is.
const FEW: usize = 64;

/// The descendants of this process, but for those that are not of the job.
#[derive(Debug)]
pub(crate) struct Kin {
    /// Whether what was left behind before the first signal is no part of the job.
    leaves: bool,
    gathered: bool,
    /// Children that this process had before it became `clinch`, what the job has left behind, and the watch.
    spared: HashSet<Pid>,
}

impl Kin {
    pub(crate) fn new(orphans: Orphans, watch: Pid) -> Kin {
        let leaves = orphans == Orphans::Leave && !getpid().is_init();
        Kin { leaves, gathered: false, spared: HashSet::from([watch]) }
    }

    /// From now on, what loses its parent is of the job. Before the first signal, since those orphan.
    pub(crate) fn gather(&mut self, leader: Pid) {
        if self.leaves && !std::mem::replace(&mut self.gathered, true) {
            self.spared.extend(children(getpid(), true).filter(|pid| *pid != leader));
        }
    }

    /// Sends a signal to all of them but the members of a process group that has it already, and to the runs that were let in with all below
    /// them; says whether there was any.
    pub(crate) fn signal(&self, signal: Signal, but: Option<Pid>, inner: &[Inner]) -> bool {
        // Who is only asked is killed later.
        settled(|| self.signal_once(signal, but, inner), |found| *found || signal != Signal::KILL)
    }

    /// As above, to those that one look meets, which it tells too.
    fn signal_once(&self, signal: Signal, but: Option<Pid>, inner: &[Inner]) -> (bool, HashSet<Pid>) {
        let us = getpid();
        let until = || (signal != Signal::KILL).then(|| Instant::now() + LOOK_FOR);
        // Who cannot look, perhaps for want of a descriptor, finds nobody, and knows nothing.
        let (mut seen, mut found) = (self.spared.clone(), can_look().is_err());
        let mut send = |stat: &Stat, held: &OwnedFd| {
            if but.map(raw) != Some(stat.group) {
                found |= pidfd_send_signal(held, signal).is_ok();
                // Who is stopped does not hear it.
                let _ = pidfd_send_signal(held, Signal::CONT);
            }
        };
        descend(children(us, true).map(|child| (child, us)).collect(), &mut seen, until(), &mut send);
        let inner: Vec<_> = inner.iter().filter_map(Inner::root).collect();
        seen.retain(|pid| !self.spared.contains(pid) || !inner.iter().any(|(inner, _)| inner == pid));
        descend(inner, &mut seen, until(), &mut send);
        (found, seen)
    }
}

/// Whether all who descend from us can be found and told: by a `/proc` that is of our namespace and lists children, and by descriptors of processes.
pub(crate) fn can_look() -> io::Result<()> {
    let us = getpid();
    // As many as a look takes at a time.
    let _held = [pidfd_open(us, PidfdFlags::empty())?, pidfd_open(us, PidfdFlags::empty())?];
    let lacks = |what| move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"));
    let own = fs::read_link("/proc/self").map_err(lacks("/proc/self"))?;
    if own.to_str() != Some(&us.to_string()) {
        return Err(io::Error::other("/proc is of another pid namespace"));
    }
    let children = format!("/proc/{us}/task/{us}/children");
    fs::read_to_string(&children).map_err(lacks(&children))?;
    Ok(())
}

/// Sends a signal to a run that was let in, and to all below it. A stopped one goes on if that asks it to end.
pub(crate) fn signal_all(inner: &Inner, signal: Signal) {
    let until = Instant::now() + LOOK_FOR;
    descend(inner.root().into_iter().collect(), &mut HashSet::new(), Some(until), |_, held| {
        let _ = pidfd_send_signal(held, signal);
        if asks_to_end(signal) {
            let _ = pidfd_send_signal(held, Signal::CONT);
        }
    });
}

/// Meets processes, each with its parent, and all below them, but those that were seen.
fn descend(
    mut next: Vec<(Pid, Pid)>,
    seen: &mut HashSet<Pid>,
    until: Option<Instant>,
    mut meet: impl FnMut(&Stat, &OwnedFd),
) {
    let us = getpid();
    while let Some((pid, parent)) = next.pop() {
        if seen.len() >= FEW && until.is_some_and(|until| Instant::now() > until) {
            break;
        }
        if !seen.insert(pid) {
            continue;
        }
        // By a descriptor, and one at a time: the id may be another's soon, and there may be few descriptors.
        let Ok(held) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        // Who has that id now and that parent, or us for want of it, is who was found.
        let Some(stat) = Stat::of(pid).filter(|stat| [parent, us].map(raw).contains(&stat.parent)) else {
            continue;
        };
        next.extend(children(pid, stat.threads > 1).map(|child| (child, pid)));
        meet(&stat, &held);
    }
}

/// Who was found to be the child of another.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) pid: Pid,
    pub(crate) parent: Option<Pid>,
}

impl Found {
    /// The children of a process.
    pub(crate) fn children(of: Pid) -> impl Iterator<Item = Found> {
        children(of, true).map(move |pid| Found { pid, parent: Some(of) })
    }

    /// Sends it a signal, unless its id is another's by now.
    pub(crate) fn send(&self, signal: Signal) {
        let Ok(held) = pidfd_open(self.pid, PidfdFlags::empty()) else { return };
        let is_it = |parent| Stat::of(self.pid).is_some_and(|stat| stat.parent == raw(parent));
        if self.parent.is_none_or(is_it) {
            let _ = pidfd_send_signal(held, signal);
        }
    }
}

/// The children of a process: of its first thread, or of all of them.
pub(crate) fn children(of: Pid, threads: bool) -> impl Iterator<Item = Pid> {
    let tasks = format!("/proc/{of}/task");
    let lists = match threads {
        true => {
            let tasks = fs::read_dir(tasks).into_iter().flatten().flatten();
            tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok()).collect()
        }
        false => fs::read_to_string(format!("{tasks}/{of}/children")).unwrap_or_default(),
    };
    let pids = lists.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?));
    pids.collect::<Vec<_>>().into_iter()
}

fn raw(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}

/// What `/proc/PID/stat` says of a process.
pub(crate) struct Stat {
    pub(crate) parent: i32,
    pub(crate) group: i32,
    pub(crate) threads: u32,
    /// Whether it has ended, and nobody has asked how.
    pub(crate) is_over: bool,
    /// Where its stack starts.
    pub(crate) stack: u64,
    /// Whether it has an environment, in which nothing is.
    pub(crate) has_empty_environment: bool,
    /// Where the words of its command line are.
    pub(crate) words: Range<usize>,
}

impl Stat {
    pub(crate) fn of(pid: Pid) -> Option<Stat> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The second field is in parentheses and may hold anything; the third is next.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        let (code, from, to) = (number(23)?, number(47)?, number(48)?);
        Some(Stat {
            // The kernel tells last where the program is.
            has_empty_environment: from == to && to > 0 && code > 0,
            // Its first thread may have ended before others.
            is_over: matches!(*fields.first()?, "Z" | "X") && number(17)? <= 1,
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            threads: fields.get(17)?.parse().ok()?,
            words: fields.get(45)?.parse().ok()?..fields.get(46)?.parse().ok()?,
            stack: fields.get(25)?.parse().ok()?,
        })
    }
}
