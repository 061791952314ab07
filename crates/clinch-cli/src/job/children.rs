//! Reaping: the child itself, and orphans that fall to us as process 1 or as their subreaper.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, WaitOptions, getpid, kill_process, wait, waitid,
    waitpid,
};

use super::ask::Beyond;
use super::door::{Door, Inner};
use super::kin::{Kin, Reached, children};
use super::parts::Part;
use super::signals::asks_to_end;
use super::stat::Stat;
use super::watch::Watch;
use super::{namespace, sys};
use crate::exit::SIGNAL_BASE;

/// The child, in our process group unless it leaves that.
#[derive(Debug)]
pub(crate) struct Child {
    pid: Pid,
    exit: Option<Exit>,
    reaped: bool,
    /// What it has started.
    kin: Kin,
    /// Where runs inside it enter its lock.
    door: Door,
    /// Keeps its lock or ends it if we are killed.
    watch: Watch,
}

/// How the child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Code(u8),
    Signal(i32),
}

impl Exit {
    /// The exit code that a shell would see.
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Code(code) => code,
            Exit::Signal(signal) => SIGNAL_BASE.saturating_add(u8::try_from(signal).unwrap_or(0)),
        }
    }
}

impl Child {
    pub(crate) fn new(pid: Pid, kin: Kin, door: Door, watch: Watch) -> Child {
        Child { pid, exit: None, reaped: false, kin, door, watch }
    }

    /// How the child has ended, the first time that this is seen. It is not reaped yet.
    pub(crate) fn look(&mut self) -> Option<Exit> {
        if self.exit.is_some() {
            return None;
        }
        let look = WaitIdOptions::NOHANG | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        self.exit = self.wait(look).and_then(|status| exit(&status));
        self.exit
    }

    /// Takes the ended child off the process table.
    pub(crate) fn reap(&mut self) {
        if self.reaped {
            return;
        }
        self.watch.forget();
        self.wait(WaitIdOptions::NOHANG | WaitIdOptions::EXITED);
        self.reaped = true;
    }

    /// Whether it is all of our pid namespace, which nothing shows.
    pub(crate) fn is_namespace(&self) -> bool {
        self.kin.is_namespace()
    }

    /// Passes a signal on to the job, which has it already as far as it is in our process group where that has it; tells who cannot be told.
    pub(crate) fn pass_on(&mut self, signal: Signal, group_has_it: bool) -> Vec<Beyond> {
        self.kin.pass_on(signal, self.pid, group_has_it);
        self.go_on_asking()
    }

    /// Passes a signal on to the runs that it has left behind; tells who cannot be told.
    pub(crate) fn pass_on_to_inner(&mut self, signal: Signal, group_has_it: bool) -> Vec<Beyond> {
        self.kin.pass_on_to_inner(signal, self.door.inner(), group_has_it);
        self.go_on_asking()
    }

    /// Has nobody else stopped by what asked to stop before.
    pub(crate) fn forget_stops(&mut self) {
        self.kin.forget_stops();
    }

    /// Has what its first process has left behind hear what that was told.
    pub(crate) fn ask_the_rest(&mut self) {
        self.kin.ask_the_rest();
    }

    /// Whether some of it have yet to hear of a signal.
    pub(crate) fn is_asking(&self) -> bool {
        self.kin.is_asking()
    }

    /// Goes on to tell them, for a while; tells who cannot be told.
    pub(crate) fn go_on_asking(&mut self) -> Vec<Beyond> {
        self.kin.go_on()
    }

    /// How many processes it has at least, as far as is known.
    pub(crate) fn most(&self) -> usize {
        self.kin.most()
    }

    /// Whether its first process is stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        // Not by its first thread, which may have ended. Nobody takes this word, so it holds for as long as it is stopped.
        let look = WaitIdOptions::NOHANG | WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
        !self.reaped && self.wait(look).is_some_and(|status| status.stopped())
    }

    /// Stops all of it that still runs, and the runs that it has left behind; tells whom, and how many of it stay stopped if we are killed. The watch
    /// stands in for us from now on.
    pub(super) fn hold(&mut self) -> (Vec<Part>, usize) {
        let (held, mut met) = self.kin.hold(self.pid, self.door.inner());
        met.remove(&self.pid);
        let is_stopped = |pid: &Pid| Stat::of(*pid).is_none_or(|stat| stat.is_stopped || stat.is_over);
        // The first for sure: there may be more than are looked at.
        let first = (!self.reaped).then_some(self.pid);
        let (stopped, others): (Vec<Pid>, Vec<Pid>) = met.into_iter().partition(is_stopped);
        let untold = self.watch.stands_in(first.into_iter().chain(stopped), others.into_iter());
        (held, untold)
    }

    /// We go on.
    pub(crate) fn goes_on(&self) {
        self.watch.stands_back();
    }

    /// What sees to it where we cannot.
    pub(crate) fn watch(&mut self) -> &mut Watch {
        &mut self.watch
    }

    /// Has another watch over it, where somebody has killed the one before.
    pub(crate) fn watch_anew(&mut self, lock: Option<&OwnedFd>) -> io::Result<()> {
        let (job, before) = ((!self.reaped).then_some(self.pid), self.watch.pid());
        self.watch.replace(job, lock)?;
        self.kin.forget(before);
        self.kin.spare(self.watch.pid());
        Ok(())
    }

    /// Sends a signal to every child that the job has left behind, but for the members of our process group where they have it; tells who cannot be
    /// told. They are ours alone to reap, so no id can be anybody else's. The watch hears none.
    pub(crate) fn signal_orphans(&self, signal: Signal, group_has_it: bool) -> Vec<Beyond> {
        if self.kin.is_namespace() {
            namespace::pass_on(signal, None, group_has_it);
            return Vec::new();
        }
        let (but, mut beyond) = (group_has_it.then(sys::group), Vec::new());
        for pid in children(getpid(), true).filter(|pid| self.kin.has(*pid)) {
            let has_it = but.is_some() && sys::group_of(pid) == but;
            let runs = || Stat::of(pid).is_none_or(|stat| !stat.is_over);
            if !has_it && kill_process(pid, signal) == Err(Errno::PERM) && runs() {
                beyond.push(Beyond::Deaf(pid));
            }
            if asks_to_end(signal) {
                // Who is stopped does not hear it.
                let _ = kill_process(pid, Signal::CONT);
            }
        }
        beyond
    }

    /// Whether nobody has heard yet that all are to end.
    pub(crate) fn is_finding(&self) -> bool {
        self.kin.is_finding()
    }

    /// What was about to end it has passed.
    pub(crate) fn is_spared(&mut self) {
        self.kin.scatter();
    }

    /// Asks all of the job to end, also parts that made process groups of their own, as `timeout` does; tells who cannot be asked.
    pub(crate) fn ask_to_end(&mut self, grace: Duration) -> Vec<Beyond> {
        self.kin.gather(self.pid);
        self.kin.ask_to_end(self.door.inner(), grace);
        self.go_on_asking()
    }

    /// Kills all of it.
    pub(crate) fn kill(&mut self) -> Reached {
        // Not sooner, since what ends by itself may need inner runs for that.
        self.door.close();
        self.kin.gather(self.pid);
        self.kin.kill(self.door.inner())
    }

    /// Lets the next run in that wants to enter the lock, as long as there is something to enter; or says that somebody has killed the watch.
    pub(crate) async fn let_in(&mut self) -> bool {
        tokio::select! {
            biased;
            () = self.watch.ended() => true,
            () = self.door.let_in() => false,
        }
    }

    /// The runs inside the job that have entered its lock. When there is none, none will be.
    pub(crate) fn inner(&mut self) -> &[Inner] {
        if self.door.inner().is_empty() {
            self.door.close();
        }
        self.door.inner()
    }

    /// What sees to its lock if we are killed before that is released.
    pub(crate) fn into_watch(self) -> Watch {
        self.watch
    }

    /// Reaps every child that has ended, but for the main one; says whether any other is left that is of the job.
    pub(crate) fn reap_all(&mut self) -> bool {
        if self.kin.is_namespace() {
            return namespace::reap_all((!self.reaped).then_some(self.pid));
        }
        if !self.reaped {
            // By name, since whoever reaps the main one by chance leaves its id to others.
            let ours = [self.pid, self.watch.pid()];
            let others: Vec<Pid> = children(getpid(), true).filter(|pid| !ours.contains(pid)).collect();
            let mut left = false;
            for pid in others {
                match waitpid(Some(pid), WaitOptions::NOHANG) {
                    Ok(Some(_)) => self.kin.forget(pid),
                    _ => left |= self.kin.has(pid),
                }
            }
            return left;
        }
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, _))) => self.kin.forget(pid),
                Err(Errno::INTR) => {}
                Ok(None) => return children(getpid(), true).any(|pid| self.kin.has(pid)),
                Err(_) => return false,
            }
        }
    }

    fn wait(&self, options: WaitIdOptions) -> Option<WaitIdStatus> {
        waitid(WaitId::Pid(self.pid), options).ok().flatten()
    }
}

fn exit(status: &WaitIdStatus) -> Option<Exit> {
    status.exit_status().map(code).or_else(|| status.terminating_signal().map(Exit::Signal))
}

fn code(code: i32) -> Exit {
    Exit::Code(u8::try_from(code & 0xff).unwrap_or(u8::MAX))
}
