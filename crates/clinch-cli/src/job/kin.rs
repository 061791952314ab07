//! All that descends from us, in whatever process groups: found anew for each signal, and remembered by
//! nobody, since whoever loses its parent falls to us.
//!
//! What has left its parents and our process group before the job has to stop, a daemon, is no part of it any more, unless it is a run of
//! the same lock.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use super::door::Inner;
use super::reentry::settled;
use super::signals::asks_to_end;
use super::stat::Stat;
use super::{namespace, sys, watcher};
use crate::args::Orphans;

/// How long is looked for those who are to be asked, which delays all else. Who is to be killed is looked for in any case.
const LOOK_FOR: Duration = Duration::from_millis(50);

/// How many are met in any case, however slow the host is.
const FEW: usize = 64;

/// The descendants of this process, but for those that are not of the job.
#[derive(Debug)]
pub(crate) struct Kin {
    /// Whether what was left behind before the job has to stop is no part of it.
    leaves: bool,
    gathered: bool,
    /// Whether it is all of our pid namespace, which nothing shows.
    is_namespace: bool,
    /// When that was killed.
    killed: Option<Instant>,
    /// Children that this process had before the job, daemons that this has left behind, and the watch.
    spared: HashSet<Pid>,
}

impl Kin {
    /// Before the job is started.
    pub(crate) fn new(orphans: Orphans, watch: Pid) -> Kin {
        let is_init = getpid().is_init();
        let is_namespace = namespace::is_the_job();
        let before = (!is_init).then(|| children(getpid(), true)).into_iter().flatten();
        let leaves = orphans == Orphans::Leave && !is_init;
        Kin { leaves, gathered: false, is_namespace, killed: None, spared: before.chain([watch]).collect() }
    }

    /// Whether a child of ours is of the job, as far as is known.
    pub(crate) fn has(&self, child: Pid) -> bool {
        !self.spared.contains(&child) && !is_watch(child)
    }

    /// Whether its parts are found by no list of children.
    pub(crate) fn is_namespace(&self) -> bool {
        self.is_namespace
    }

    /// A child has ended. Its id may be another's from now on.
    pub(crate) fn forget(&mut self, child: Pid) {
        self.spared.remove(&child);
    }

    /// From now on, what loses its parent is of the job. Before the first signal, since those orphan.
    pub(crate) fn gather(&mut self, leader: Pid) {
        if self.leaves && !std::mem::replace(&mut self.gathered, true) {
            self.spared.extend(daemons(leader));
        }
    }

    /// Another watch has taken the place of the one before.
    pub(crate) fn spare(&mut self, watch: Pid) {
        self.spared.insert(watch);
    }

    /// Stops all who still run, also the runs that were let in with all below them; tells whom, and who is stopped by now.
    pub(crate) fn hold(&self, leader: Pid, inner: &[Inner]) -> (Vec<OwnedFd>, HashSet<Pid>) {
        if self.is_namespace {
            // The kernel stops no process 1, which goes on with the job.
            return (Vec::new(), HashSet::new());
        }
        let mut spared = self.spared.clone();
        if self.leaves && !self.gathered {
            spared.extend(daemons(leader));
        }
        let (mut held, mut met) = (Vec::new(), HashSet::new());
        loop {
            let before = met.len();
            let mut stop = |stat: &Stat, process: &OwnedFd| {
                // Who was stopped before is not for us to wake.
                if Pid::from_raw(stat.pid).is_some_and(|pid| met.insert(pid))
                    && !stat.is_stopped
                    && pidfd_send_signal(process, Signal::STOP).is_ok()
                {
                    held.extend(process.try_clone());
                }
                true
            };
            self.meet(spared.clone(), inner, || None, &mut stop);
            if met.len() == before {
                return (held, met);
            }
        }
    }

    /// Passes a signal on: to the first process of the job, and to whatever descends from us in our process group or that one's. Once to each: a
    /// `clinch run` among them passes it on to what is below it.
    /// Where our group has it already, only to that of the first process, if it is another.
    pub(crate) fn pass_on(&self, signal: Signal, leader: Pid, group_has_it: bool) {
        if self.is_namespace {
            return namespace::pass_on(signal, Some(leader), group_has_it);
        }
        let (us, ours) = (getpid(), sys::group());
        let theirs = Stat::of(leader).map(|stat| stat.group).filter(|group| *group != ours);
        let groups = [Some(ours).filter(|_| !group_has_it), theirs];
        if groups == [None, None] {
            return;
        }
        let mut seen = self.spared.clone();
        // Twice, for whoever falls to us since its parent has just ended by that.
        for _ in 0..2 {
            let roots = children(us, true).map(|child| (child, us)).collect();
            descend(roots, &mut seen, Some(Instant::now() + LOOK_FOR), |stat, held| {
                if groups.contains(&Some(stat.group)) {
                    let _ = pidfd_send_signal(held, signal);
                }
                !is_clinch(stat.pid)
            });
        }
    }

    /// Sends a signal to all of them, and to the runs that were let in with all below them.
    pub(crate) fn signal(&mut self, signal: Signal, inner: &[Inner]) -> Reached {
        if self.is_namespace {
            let since = match signal {
                Signal::KILL => *self.killed.get_or_insert_with(Instant::now),
                _ => Instant::now(),
            };
            return Reached { any: namespace::end(signal, since), beyond: Vec::new() };
        }
        // Who is only asked is killed later.
        settled(|| self.signal_once(signal, inner), |reached| reached.any || signal != Signal::KILL)
    }

    /// As above, to those that one look meets, which it tells too.
    fn signal_once(&self, signal: Signal, inner: &[Inner]) -> (Reached, HashSet<Pid>) {
        let until = || (signal != Signal::KILL).then(|| Instant::now() + LOOK_FOR);
        // Who cannot look, perhaps for want of a descriptor, finds nobody, and knows nothing.
        let mut reached = Reached { any: can_look().is_err(), beyond: Vec::new() };
        let mut send = |stat: &Stat, held: &OwnedFd| {
            match pidfd_send_signal(held, signal) {
                Ok(()) => reached.any = true,
                Err(Errno::PERM) if !stat.is_over => reached.beyond.extend(Pid::from_raw(stat.pid)),
                Err(_) => {}
            }
            // Who is stopped does not hear it.
            let _ = pidfd_send_signal(held, Signal::CONT);
            true
        };
        let seen = self.meet(self.spared.clone(), inner, until, &mut send);
        (reached, seen)
    }

    /// Meets all who descend from us but those that are spared, and then the runs that were let in with all below them, in any case.
    fn meet(
        &self,
        spared: HashSet<Pid>,
        inner: &[Inner],
        until: impl Fn() -> Option<Instant>,
        mut meet: impl FnMut(&Stat, &OwnedFd) -> bool,
    ) -> HashSet<Pid> {
        let (us, mut seen) = (getpid(), spared.clone());
        descend(children(us, true).map(|child| (child, us)).collect(), &mut seen, until(), &mut meet);
        let inner: Vec<_> = inner.iter().filter_map(Inner::root).collect();
        seen.retain(|pid| !spared.contains(pid) || !inner.iter().any(|(inner, _)| inner == pid));
        descend(inner, &mut seen, until(), &mut meet);
        seen
    }
}

/// Whom a signal has reached.
#[derive(Debug)]
pub(crate) struct Reached {
    /// Whether there was anybody.
    pub(crate) any: bool,
    /// Those that run and may not be sent any: another user's, by `sudo`.
    pub(crate) beyond: Vec<Pid>,
}

/// What the job has left behind in process groups of its own.
fn daemons(leader: Pid) -> impl Iterator<Item = Pid> {
    let ours = sys::group();
    let is_daemon = move |pid: &Pid| Stat::of(*pid).is_some_and(|stat| stat.group != ours);
    children(getpid(), true).filter(move |pid| *pid != leader).filter(is_daemon)
}

/// Whether all who descend from us can be found and told: by a `/proc` that is of our namespace and lists children, and by descriptors of processes.
pub(crate) fn can_look() -> io::Result<()> {
    let us = getpid();
    // As many as a look takes at a time.
    let _held = [pidfd_open(us, PidfdFlags::empty())?, pidfd_open(us, PidfdFlags::empty())?];
    has_own_proc()?;
    let children = format!("/proc/{us}/task/{us}/children");
    let lacks = |error: io::Error| io::Error::new(error.kind(), format!("{children}: {error}"));
    fs::read_to_string(&children).map_err(lacks)?;
    Ok(())
}

/// Whether `/proc` is of our pid namespace: the ids in that of another are strangers'.
pub(crate) fn has_own_proc() -> io::Result<()> {
    let what = match fs::read_link("/proc/self") {
        Ok(own) if own.to_str() == Some(&getpid().to_string()) => return Ok(()),
        Ok(_) => "/proc is of another pid namespace".to_owned(),
        Err(error) => format!("/proc/self: {error}"),
    };
    Err(io::Error::other(format!(
        "{what}; mount the one of this namespace, by `unshare --mount-proc` or `mount -t proc proc /proc`"
    )))
}

/// Sends a signal to a run that was let in, and to all below it, but for the members of our process group where they have it. A stopped
/// one goes on if that asks it to end.
pub(crate) fn signal_all(inner: &Inner, signal: Signal, group_has_it: bool) {
    let until = Instant::now() + LOOK_FOR;
    let but = group_has_it.then(sys::group);
    descend(inner.root().into_iter().collect(), &mut HashSet::new(), Some(until), |stat, held| {
        if but != Some(stat.group) {
            let _ = pidfd_send_signal(held, signal);
        }
        if asks_to_end(signal) {
            let _ = pidfd_send_signal(held, Signal::CONT);
        }
        true
    });
}

/// Whether a process runs this very program.
fn is_clinch(pid: i32) -> bool {
    let program =
        |of: &str| fs::metadata(format!("/proc/{of}/exe")).map(|file| (file.dev(), file.ino())).ok();
    program("self").is_some_and(|ours| program(&pid.to_string()) == Some(ours))
}

/// Whether a process runs a program of our name, perhaps another version, of which one has taken the other's place meanwhile.
fn is_any_clinch(pid: i32) -> bool {
    let program = |of: &str| {
        let path = fs::read_link(format!("/proc/{of}/exe")).ok()?;
        let name = path.file_name()?.as_bytes();
        Some(name.strip_suffix(b" (deleted)").unwrap_or(name).to_vec())
    };
    program("self").is_some_and(|ours| program(&pid.to_string()) == Some(ours))
}

/// Whether a process may be a wrapper, perhaps another user's, of whose program its name alone is told.
pub(crate) fn may_be_wrapper(pid: Pid) -> bool {
    is_named(pid, c"clinch") || is_any_clinch(raw(pid))
}

/// Whether a process has this name, or had it when it ended.
pub(crate) fn is_named(pid: Pid, name: &CStr) -> bool {
    fs::read(format!("/proc/{pid}/comm")).is_ok_and(|is| is.strip_suffix(b"\n") == Some(name.to_bytes()))
}

/// Whether a process watches over a run (`watcher.rs`), perhaps one inside the job: it is no part of that, and has to see to its own when this ends. It is
/// known by its name and program, also while it becomes the verb, and by leading a session.
pub(crate) fn is_watch(pid: Pid) -> bool {
    [watcher::NAME, watcher::ENDS, watcher::BECOMES].iter().any(|name| is_named(pid, name))
        && Stat::of(pid).is_some_and(|stat| stat.leads_session)
        && (is_clinch(raw(pid)) || is_any_clinch(raw(pid)))
}

/// Meets processes, each with its parent, and all below those of which `meet` says that it goes on there, but those that were seen.
fn descend(
    mut next: Vec<(Pid, Pid)>,
    seen: &mut HashSet<Pid>,
    until: Option<Instant>,
    mut meet: impl FnMut(&Stat, &OwnedFd) -> bool,
) {
    let us = getpid();
    while let Some((pid, parent)) = next.pop() {
        if seen.len() >= FEW && until.is_some_and(|until| Instant::now() > until) {
            break;
        }
        if !seen.insert(pid) || is_watch(pid) {
            continue;
        }
        // By a descriptor, and one at a time: the id may be another's soon, and there may be few descriptors.
        let Ok(held) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        // Who has that id now and that parent, or us for want of it, is who was found.
        let Some(stat) = Stat::of(pid).filter(|stat| [parent, us].map(raw).contains(&stat.parent)) else {
            continue;
        };
        let threads = stat.threads > 1;
        let before: Vec<Pid> = children(pid, threads).collect();
        if meet(&stat, &held) {
            // Again: the kernel lets nobody start another who has yet to hear a signal.
            next.extend(before.into_iter().chain(children(pid, threads)).map(|child| (child, pid)));
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
