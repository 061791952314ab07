//! Reaping: the child itself, and orphans that fall to us as process 1 or as their subreaper.

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, WaitOptions, getpid, kill_process, wait, waitid,
    waitpid,
};

use super::door::{Door, Inner};
use super::kin::{Kin, Stat, children};
use super::signals::asks_to_end;
use super::watch::Watch;
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

/// What happened to the child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It ended and was not reaped yet.
    Ended(Exit),
    /// It was stopped by this signal.
    Stopped(Signal),
}

impl Child {
    pub(crate) fn new(pid: Pid, kin: Kin, door: Door, watch: Watch) -> Child {
        Child { pid, exit: None, reaped: false, kin, door, watch }
    }

    /// Looks whether the child has ended or stopped since the last look.
    pub(crate) fn look(&mut self) -> Option<Change> {
        if self.exit.is_some() {
            return None;
        }
        let look = WaitIdOptions::NOHANG | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        if let Some(exit) = self.wait(look).and_then(|status| exit(&status)) {
            self.exit = Some(exit);
            return Some(Change::Ended(exit));
        }
        let stopped = self.wait(WaitIdOptions::NOHANG | WaitIdOptions::STOPPED)?.stopping_signal()?;
        Signal::from_named_raw(stopped).map(Change::Stopped)
    }

    /// Takes the ended child off the process table.
    pub(crate) fn reap(&mut self) {
        self.watch.forget();
        self.wait(WaitIdOptions::NOHANG | WaitIdOptions::EXITED);
        self.reaped = true;
    }

    /// Passes a signal on to the job.
    pub(crate) fn pass_on(&self, signal: Signal) {
        self.kin.pass_on(signal, self.pid);
    }

    /// Lets it go on if it is stopped.
    pub(crate) fn go_on(&self) {
        if !self.reaped && Stat::of(self.pid).is_some_and(|stat| stat.is_stopped) {
            self.pass_on(Signal::CONT);
        }
    }

    /// Sends a signal that is to end it to all of the job: also to parts that made process groups of their own, as `timeout`
    /// does. Says whether there was any.
    pub(crate) fn end(&mut self, signal: Signal) -> bool {
        if signal == Signal::KILL {
            // Not sooner, since what ends by itself may need inner runs for that.
            self.door.close();
        }
        self.kin.gather(self.pid);
        self.kin.signal(signal, self.door.inner())
    }

    /// Lets the next run in that wants to enter the lock. Never completes once there is nothing to enter.
    pub(crate) async fn let_in(&mut self) {
        self.door.let_in().await;
    }

    /// The runs inside the job that have entered its lock. When there is none, none will be.
    pub(crate) fn inner(&mut self) -> &[Inner] {
        if self.door.inner().is_empty() {
            self.door.close();
        }
        self.door.inner()
    }

    /// Reaps every child that has ended, but for the main one; says whether any other is left.
    pub(crate) fn reap_all(&self) -> bool {
        if !self.reaped {
            // By name, since whoever reaps the main one by chance leaves its id to others.
            let ours = [self.pid, self.watch.pid()];
            let others = children(getpid(), true).filter(|pid| !ours.contains(pid));
            return others
                .filter(|pid| !matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(Some(_))))
                .count()
                > 0;
        }
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return true,
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

/// Sends a signal to every child that is left, but for the members of our process group where they have it. They are ours alone to reap,
/// so no id can be anybody else's. The watch hears none.
pub(crate) fn signal_orphans(signal: Signal, group_has_it: bool) {
    let but = Stat::of(getpid()).filter(|_| group_has_it).map(|us| us.group);
    for pid in children(getpid(), true) {
        let has_it = but.is_some() && Stat::of(pid).map(|stat| stat.group) == but;
        if !has_it {
            let _ = kill_process(pid, signal);
        }
        if asks_to_end(signal) {
            // Who is stopped does not hear it.
            let _ = kill_process(pid, Signal::CONT);
        }
    }
}
