//! All that descends from us, in whatever process groups: found anew for each signal, and remembered by
//! nobody, since whoever loses its parent falls to us; or by a signal alone that is being told (`ask.rs`).
//!
//! What has left its parents and our process group before the job has to stop, a daemon, is no part of it any more, unless it is a run of
//! the same lock.

use std::collections::{HashSet, VecDeque};
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use super::ask::{Ask, Beyond, FIND_FOR, To, Unreached, add_all_below};
use super::door::Inner;
use super::parts::Part;
use super::reentry::settled;
use super::search::{Met, Search};
use super::signals::{asks_to_end, asks_to_stop};
use super::stat::Stat;
use super::{namespace, sys, watcher};
use crate::args::Orphans;

/// How long a process takes at most to hear of a stop. Nobody renews the lock meanwhile; one that waits for storage may take for ever.
const HEARD_WITHIN: Duration = Duration::from_millis(500);

/// How soon is looked again whether it has.
const PAUSE: Duration = Duration::from_millis(1);

/// The descendants of this process, but for those that are not of the job.
#[derive(Debug)]
pub(crate) struct Kin {
    /// Whether what was left behind before the job has to stop is no part of it.
    leaves: bool,
    gathered: bool,
    /// What was left behind before it had to stop for the first time.
    daemons: Option<HashSet<Pid>>,
    /// Whether it is all of our pid namespace, which nothing shows.
    is_namespace: bool,
    /// When that was killed.
    killed: Option<Instant>,
    /// What was below this process before the job, which may fall to us, and the watch.
    spared: HashSet<Pid>,
    /// Signals that some have yet to hear, one after another.
    asks: VecDeque<Ask>,
    /// The last one that asked to end.
    last: Option<Ask>,
    /// How many were met by the look that met most.
    most: usize,
}

impl Kin {
    /// Before the job is started.
    pub(crate) fn new(orphans: Orphans, watch: Pid) -> Kin {
        let is_init = getpid().is_init();
        let is_namespace = namespace::is_the_job();
        let mut spared = HashSet::from([watch]);
        if !is_init {
            add_all_below(getpid(), &mut spared);
        }
        let leaves = orphans == Orphans::Leave && !is_init;
        let (killed, asks, last) = (None, VecDeque::new(), None);
        Kin { leaves, gathered: false, daemons: None, is_namespace, killed, spared, asks, last, most: 0 }
    }

    /// Whether a child of ours is of the job, as far as is known.
    pub(crate) fn has(&self, child: Pid) -> bool {
        let is_daemon = || self.daemons.as_ref().is_some_and(|daemons| daemons.contains(&child));
        !(self.spared.contains(&child) || is_watch(child) || self.gathered && is_daemon())
    }

    /// Whether its parts are found by no list of children.
    pub(crate) fn is_namespace(&self) -> bool {
        self.is_namespace
    }

    /// A child has ended. Its id may be another's from now on.
    pub(crate) fn forget(&mut self, child: Pid) {
        self.spared.remove(&child);
        self.daemons.as_mut().map(|daemons| daemons.remove(&child));
    }

    /// From now on, what loses its parent is of the job. Before the first signal, since those orphan.
    pub(crate) fn gather(&mut self, leader: Pid) {
        if self.leaves && !std::mem::replace(&mut self.gathered, true) {
            self.daemons.get_or_insert_with(|| daemons(leader).collect());
        }
    }

    /// It need not stop any more. Where it has to after all, what loses its parent from the first time on is of it: that may be by the first signal.
    /// Who has yet to hear that it was to end does not.
    pub(crate) fn scatter(&mut self) {
        self.gathered = false;
        self.asks.retain(|ask| ask.to != To::All);
        self.last = None;
    }

    /// Whether nobody has heard yet that all are to end.
    pub(crate) fn is_finding(&self) -> bool {
        self.asks.iter().any(|ask| ask.to == To::All && ask.is_finding())
    }

    /// Who is not of the job.
    fn spared(&self) -> HashSet<Pid> {
        let daemons = self.daemons.iter().filter(|_| self.gathered).flatten();
        self.spared.iter().chain(daemons).copied().collect()
    }

    /// Another watch has taken the place of the one before.
    pub(crate) fn spare(&mut self, watch: Pid) {
        self.spared.insert(watch);
    }

    /// Stops all who still run, also the runs that were let in with all below them; tells whom, and who is stopped by now.
    pub(super) fn hold(&mut self, leader: Pid, inner: &[Inner]) -> (Vec<Part>, HashSet<Pid>) {
        self.forget_stops();
        if self.is_namespace {
            // The kernel stops no process 1, which goes on with the job.
            return (Vec::new(), HashSet::new());
        }
        let mut spared = self.spared();
        if self.leaves && !self.gathered {
            match &self.daemons {
                Some(daemons) => spared.extend(daemons),
                None => spared.extend(daemons(leader)),
            }
        }
        let (mut held, mut met, since) = (Vec::new(), HashSet::new(), Instant::now());
        loop {
            // What has yet to stop may just be starting another.
            let (before, were_still) = (held.len(), held.iter().all(Part::is_still));
            let mut stop = |one: &Met| {
                // Who was stopped before is not for us to wake.
                if met.insert(one.pid)
                    && !one.is_stopped()
                    // Not by a descriptor: there may be few.
                    && let Some(part) = Part::met(one)
                    && pidfd_send_signal(&one.held, Signal::STOP).is_ok()
                {
                    held.push(part);
                }
                true
            };
            search(spared.clone(), inner).go_on(None, &mut stop);
            // Of those who may not be stopped there may be more without end.
            if held.len() == before {
                if were_still || since.elapsed() > HEARD_WITHIN {
                    return (held, met);
                }
                sleep(PAUSE);
            }
        }
    }

    /// Passes a signal on: to the first process of the job, and to whatever descends from us in our process group or that one's. Once to each: a
    /// `clinch run` among them passes it on to what is below it.
    /// Where our group has it already, only to that of the first process, if it is another.
    pub(crate) fn pass_on(&mut self, signal: Signal, leader: Pid, group_has_it: bool) {
        if signal == Signal::CONT {
            self.forget_stops();
        }
        if self.is_namespace {
            return namespace::pass_on(signal, Some(leader), group_has_it);
        }
        let ours = sys::group();
        let theirs = sys::group_of(leader).filter(|group| *group != ours);
        let groups = [Some(ours).filter(|_| !group_has_it), theirs];
        if groups != [None, None] {
            self.ask(signal, To::Groups(groups), search(self.spared(), &[]), FIND_FOR);
        }
    }

    /// Passes a signal on to the runs that were let in, and to all below them, but for the members of our process group where they have it.
    pub(crate) fn pass_on_to_inner(&mut self, signal: Signal, inner: &[Inner], group_has_it: bool) {
        let next = inner.iter().filter_map(Inner::root).collect();
        let but = group_has_it.then(sys::group);
        self.ask(signal, To::AllBut(but), Search::new(next, HashSet::new()), FIND_FOR);
    }

    /// Asks all of them to end, and the runs that were let in with all below them. They have this grace, so whatever else they have yet to hear does not matter.
    pub(crate) fn ask_to_end(&mut self, inner: &[Inner], grace: Duration) {
        if self.is_namespace {
            namespace::end(Signal::TERM, Instant::now());
            return;
        }
        self.asks.clear();
        self.ask(Signal::TERM, To::All, search(self.spared(), inner), FIND_FOR.min(grace / 4));
    }

    fn ask(&mut self, signal: Signal, to: To, search: Search, within: Duration) {
        // One that nobody has heard yet is one with the next, as for the kernel.
        if !self.asks.iter().skip(1).any(|ask| ask.signal == signal && ask.to == to) {
            self.asks.push_back(Ask::new(signal, to, search, within));
        }
    }

    /// Whether some have yet to hear of a signal.
    pub(crate) fn is_asking(&self) -> bool {
        !self.asks.is_empty()
    }

    /// Goes on to tell them, for a while; tells who cannot be told.
    pub(crate) fn go_on(&mut self) -> Vec<Beyond> {
        let Some(ask) = self.asks.front_mut() else { return Vec::new() };
        let (is_over, beyond) = ask.go_on(ours);
        self.most = self.most.max(ask.met());
        if is_over {
            // What a reload has started is to stay.
            let is_last = |ask: &Ask| asks_to_end(ask.signal) && ask.signal != Signal::HUP;
            self.last = self.asks.pop_front().filter(is_last).or(self.last.take());
        }
        beyond
    }

    /// The first process has ended. What it leaves behind, or a reaper that it was, may be what nobody has told.
    pub(crate) fn ask_the_rest(&mut self) {
        self.asks.extend(self.last.take());
        self.asks.iter_mut().for_each(|ask| ask.again(ours));
    }

    /// Those who were stopped meanwhile, or go on, or whose first process has ended, are not to be stopped by what was told before.
    pub(crate) fn forget_stops(&mut self) {
        self.asks.retain(|ask| !asks_to_stop(ask.signal));
    }

    /// How many there are at least, as far as is known.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Kills all of them, and the runs that were let in with all below them.
    pub(crate) fn kill(&mut self, inner: &[Inner]) -> Reached {
        self.asks.clear();
        if self.is_namespace {
            let since = *self.killed.get_or_insert_with(Instant::now);
            return Reached { any: namespace::end(Signal::KILL, since), beyond: Vec::new() };
        }
        settled(|| self.kill_once(inner), |reached| reached.any)
    }

    /// As above, those that one look meets, which it tells too.
    fn kill_once(&self, inner: &[Inner]) -> (Reached, HashSet<Pid>) {
        // Who cannot look, perhaps for want of a descriptor, finds nobody, and knows nothing.
        let (mut any, mut unreached) = (can_look().is_err(), Unreached::default());
        let mut search = search(self.spared(), inner);
        search.go_on(None, |one| {
            // One that has ended may have a parent that nobody can reach, and that leaves it so.
            any |= unreached.send(Signal::KILL, one) && one.runs();
            true
        });
        let beyond = unreached.topmost.into_iter().map(Beyond::Unstoppable).collect();
        (Reached { any, beyond }, search.into_seen())
    }
}

/// For all who descend from us but those that are spared, and the runs that were let in with all below them, in any case.
fn search(spared: HashSet<Pid>, inner: &[Inner]) -> Search {
    let inner: Vec<_> = inner.iter().filter_map(Inner::root).collect();
    let mut seen = spared;
    seen.retain(|pid| !inner.iter().any(|(inner, _)| inner == pid));
    Search::new(ours().into_iter().chain(inner).collect(), seen)
}

/// Our children, each with us, the first process of the job last: a search goes on with the last one, and that one starts others.
fn ours() -> Vec<(Pid, Pid)> {
    let mut ours: Vec<_> = children(getpid(), true).map(|child| (child, getpid())).collect();
    ours.reverse();
    ours
}

/// Whom a signal has reached.
#[derive(Debug)]
pub(crate) struct Reached {
    /// Whether there was anybody.
    pub(crate) any: bool,
    /// Those that run and may not be sent any. The topmost of them.
    pub(crate) beyond: Vec<Beyond>,
}

/// What the job has left behind in process groups of its own.
fn daemons(leader: Pid) -> impl Iterator<Item = Pid> {
    let ours = sys::group();
    let is_daemon = move |pid: &Pid| sys::group_of(*pid).is_some_and(|group| group != ours);
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
fn has_own_proc() -> io::Result<()> {
    let what = match fs::read_link("/proc/self") {
        Ok(own) if own.to_str() == Some(&getpid().to_string()) => return Ok(()),
        Ok(_) => "/proc is of another pid namespace".to_owned(),
        Err(error) => format!("/proc/self: {error}"),
    };
    Err(io::Error::other(format!(
        "{what}; mount the one of this namespace, by `unshare --mount-proc` or `mount -t proc proc /proc`"
    )))
}

/// Whether a process runs this very program, or one of its name: perhaps another version, of which one has taken the other's place meanwhile.
pub(super) fn is_clinch(pid: i32) -> bool {
    let file = |of: &str| fs::metadata(format!("/proc/{of}/exe")).map(|file| (file.dev(), file.ino())).ok();
    let name = |of: &str| {
        let path = fs::read_link(format!("/proc/{of}/exe")).ok()?;
        let name = path.file_name()?.as_bytes();
        Some(name.strip_suffix(b" (deleted)").unwrap_or(name).to_vec())
    };
    let (ours, theirs) = ("self", pid.to_string());
    file(ours).is_some_and(|ours| file(&theirs) == Some(ours))
        || name(ours).is_some_and(|ours| name(&theirs) == Some(ours))
}

/// Whether a process may be a wrapper, perhaps another user's, of whose program its name alone is told.
pub(crate) fn may_be_wrapper(pid: Pid) -> bool {
    is_named(pid, c"clinch") || is_clinch(raw(pid))
}

/// Whether a process has this name, or had it when it ended.
pub(super) fn is_named(pid: Pid, name: &CStr) -> bool {
    has_name(pid, &[name])
}

fn has_name(pid: Pid, names: &[&CStr]) -> bool {
    let is_one = |is: &[u8]| names.iter().any(|name| is.strip_suffix(b"\n") == Some(name.to_bytes()));
    fs::read(format!("/proc/{pid}/comm")).is_ok_and(|is| is_one(&is))
}

/// What `ps` shows for one that holds the lock of `clinch acquire`.
pub(crate) const HOLDER: &CStr = c"lock-holder";

/// Whether a process watches over a run (`watcher.rs`), perhaps one inside the job, or holds a lock for an `acquire`: it is no part of that, and has to see to
/// its own when this ends. It is known by its name and program, also while it becomes the verb, and by leading a session.
pub(crate) fn is_watch(pid: Pid) -> bool {
    has_name(pid, &[watcher::NAME, watcher::ENDS, watcher::BECOMES, HOLDER])
        && Stat::of(pid).is_some_and(|stat| stat.leads_session)
        && is_clinch(raw(pid))
}

/// The children of a process: of its first thread, or of all of them.
pub(crate) fn children(of: Pid, all: bool) -> impl Iterator<Item = Pid> {
    let of_one = |thread| fs::read_to_string(format!("/proc/{of}/task/{thread}/children"));
    let lists: String = match all {
        true => threads(of).filter_map(|thread| of_one(thread).ok()).collect(),
        false => of_one(of).unwrap_or_default(),
    };
    let pids = lists.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?));
    pids.collect::<Vec<_>>().into_iter()
}

/// The threads of a process.
pub(super) fn threads(of: Pid) -> impl Iterator<Item = Pid> {
    numbered(&format!("/proc/{of}/task"))
}

/// The entries of a directory that are numbers.
pub(super) fn numbered(directory: &str) -> impl Iterator<Item = Pid> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}

pub(super) fn raw(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}
