//! All that descends from us once the job has to stop, in whatever process groups: found anew for each signal, and remembered by
//! nobody, since whoever loses its parent from then on falls to us.
//!
//! What has left its parents before that, a daemon, is not found: it is no part of the job any more.

use std::collections::HashSet;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, child_subreaper, getpid, pidfd_open, pidfd_send_signal, set_child_subreaper,
};

/// How long is looked for those who are to be asked, which delays all else. Who is to be killed is looked for in any case.
const LOOK_FOR: Duration = Duration::from_millis(50);

/// The descendants of this process, but for those that are not of the job.
#[derive(Debug)]
pub(crate) struct Kin {
    /// Children that this process had before it became `clinch`, and the watch.
    spared: HashSet<Pid>,
}

impl Kin {
    pub(crate) fn sparing(watch: Option<Pid>) -> Kin {
        Kin { spared: watch.into_iter().collect() }
    }

    /// From now on, what loses its parent falls to us, as it does to process 1. Before the first signal, since those orphan.
    pub(crate) fn gather(&mut self, leader: Pid) {
        if getpid().is_init() || matches!(child_subreaper(), Ok(Some(_))) {
            return;
        }
        self.spared.extend(children(getpid(), true).filter(|pid| *pid != leader));
        // Kernels without it are older than all that clinch runs on.
        let _ = set_child_subreaper(Some(getpid()));
    }

    /// Sends a signal to all of them but the members of a process group that has it already; says whether there was any.
    pub(crate) fn signal(&self, signal: Signal, but: Option<Pid>) -> bool {
        let (us, since) = (getpid(), Instant::now());
        let mut found = false;
        let mut seen = self.spared.clone();
        let mut next: Vec<(Pid, Pid)> = children(us, true).map(|child| (child, us)).collect();
        while let Some((pid, parent)) = next.pop() {
            if signal != Signal::KILL && since.elapsed() > LOOK_FOR {
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
            if but.map(raw) != Some(stat.group) {
                found |= pidfd_send_signal(&held, signal).is_ok();
                // Who is stopped does not hear it.
                let _ = pidfd_send_signal(&held, Signal::CONT);
            }
        }
        found
    }
}

/// Who was found to be the child of another.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) pid: Pid,
    pub(crate) parent: Option<Pid>,
}

impl Found {
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
    /// Where its stack starts.
    pub(crate) stack: u64,
}

impl Stat {
    pub(crate) fn of(pid: Pid) -> Option<Stat> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The second field is in parentheses and may hold anything; the third is next.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        Some(Stat {
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            threads: fields.get(17)?.parse().ok()?,
            stack: fields.get(25)?.parse().ok()?,
        })
    }
}
