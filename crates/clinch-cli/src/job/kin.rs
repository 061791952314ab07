//! What a job has started in process groups of its own, and what those have: found when the job has to stop, and remembered, since
//! it loses its parents then.
//!
//! What has left its parents before that, a daemon, is not found: it is no part of the job any more.

use std::fs;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal, getpgid, kill_process, pidfd_open, pidfd_send_signal};

/// How often is looked for more: what is found may just be starting others.
const ROUNDS: usize = 8;

/// Processes, each by a descriptor: its id may be another's when it has ended.
#[derive(Debug, Default)]
pub(crate) struct Kin(Vec<(Pid, Option<OwnedFd>)>);

impl Kin {
    /// Finds all descendants of the leader of a process group, and of those found before, that are not in that group.
    pub(crate) fn find(&mut self, leader: Pid) {
        for _ in 0..ROUNDS {
            let known = self.0.len();
            let mut seen: Vec<Pid> = self.0.iter().map(|(pid, _)| *pid).chain([leader]).collect();
            let mut at = 0;
            while let Some(parent) = seen.get(at).copied() {
                at += 1;
                for child in children(parent) {
                    if !seen.contains(&child) {
                        seen.push(child);
                        self.add(child, parent, leader);
                    }
                }
            }
            if self.0.len() == known {
                return;
            }
        }
    }

    fn add(&mut self, child: Pid, parent: Pid, leader: Pid) {
        // Without a descriptor, if there are too many, it is reached by its id.
        let held = pidfd_open(child, PidfdFlags::empty()).ok();
        // Whoever has that id now, and had it when the descriptor was opened, is a child of that parent.
        let is_it = children(parent).any(|other| other == child);
        if is_it && getpgid(Some(child)).is_ok_and(|group| group != leader) {
            self.0.push((child, held));
        }
    }

    /// Sends a signal to all of them that are left.
    pub(crate) fn signal(&self, signal: Signal) {
        for (pid, held) in &self.0 {
            let _ = match held {
                Some(held) => pidfd_send_signal(held, signal),
                None => kill_process(*pid, signal),
            };
        }
    }
}

/// The children of a process, of all its threads.
fn children(of: Pid) -> impl Iterator<Item = Pid> {
    let threads = fs::read_dir(format!("/proc/{}/task", of.as_raw_nonzero())).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| {
        let pids = list.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?));
        pids.collect::<Vec<_>>()
    })
}
