//! The loop around a running job: passes signals on, follows its stops, renews nothing (the keeper does) but stops the job
//! when its lock is about to be lost, and returns when it has ended and was reaped.

use std::time::Duration;

use clinch::{Env, Guard, Instant, Loss, LossKind, Standing};
use rustix::process::Signal;
use tokio::signal::unix;

use super::ask::{Beyond, Named};
use super::children::{Child, Exit};
use super::events::{Event, Events, StopWord};
use super::fork::{NotBegun, Start};
use super::loss::{Plan, Stage, Step};
use super::signals::{Caught, Signals, a_stop_has_come, asks_to_stop};
use super::spawn::inherited;
use super::sys;
use super::watch::Watch;
use crate::args::{OnLost, Orphans, Run};
use crate::documents::whole_ms;
use crate::output::say;

/// How soon is looked again for what is left of a killed job.
const ROUND: Duration = Duration::from_millis(10);

/// As above at most, where nobody is left who can be killed: another user's first process may run for long.
const LAST_ROUND: Duration = Duration::from_millis(500);

/// The pause in which all else has its turn while many are told of a signal.
const TURN: Duration = Duration::from_millis(1);

/// How long a job may take to stop after it was asked to, until we take it for one that does not.
const STOPS_WITHIN: Duration = Duration::from_secs(5);

/// How long it takes a shell at most to continue all of a group.
const GOES_ON_WITHIN: Duration = Duration::from_millis(50);

/// How soon is looked again for a run that was left behind: it is no child of ours, so nobody tells us of its end.
pub(crate) const LEFT_BEHIND: Duration = Duration::from_millis(100);

/// A running job and the lock that it runs under.
pub(crate) struct Supervisor<'a> {
    pub(crate) env: &'a Env,
    pub(crate) guard: &'a Guard,
    pub(crate) child: Child,
    pub(crate) start: &'a Start,
    pub(crate) plan: Plan,
    pub(crate) run: &'a Run,
    pub(crate) events: &'a mut Events,
    pub(crate) progress: Progress,
}

/// How far it has come.
#[derive(Debug)]
pub(crate) struct Progress {
    /// When the job was started.
    since: Option<Instant>,
    stage: Stage,
    told: Option<Instant>,
    /// When that was heard: all are found first.
    heard: Option<Instant>,
    exit: Option<Exit>,
    /// By what we were asked to stop, and when.
    asked_to_stop: Option<(Signal, Instant)>,
    /// Whether the job's group has that, too.
    stops_with_group: bool,
    /// When to look whether the job goes on after it was stopped with us.
    looks_at: Option<Instant>,
    standing: Standing,
    /// Whether it waits for a run of the same lock that the job has left behind.
    waits: bool,
    /// Whether it waits for anything that the job has left behind.
    lingers: bool,
    /// How soon is looked again for what is left of a killed job.
    round: Duration,
    /// Those that could not be sent a signal.
    named: Named,
}

impl Default for Progress {
    fn default() -> Progress {
        let (stage, standing) = (Stage::Running, Standing::Held);
        Progress {
            since: None,
            stage,
            told: None,
            heard: None,
            exit: None,
            asked_to_stop: None,
            stops_with_group: false,
            looks_at: None,
            standing,
            waits: false,
            lingers: false,
            round: ROUND,
            named: Named::default(),
        }
    }
}

/// How it ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) exit: Exit,
    /// Whether we stopped it for the lock's sake.
    pub(crate) stopped: bool,
    /// Whether the lock was held when it had ended.
    pub(crate) held: bool,
    /// The key of the terminal by which it died. Who waits for us, a script or a loop, is to end by that, too.
    pub(crate) key: Option<Signal>,
    /// Until the lock is released.
    _watch: Watch,
}

impl Supervisor<'_> {
    /// Returns when the job has ended, or why it did not begin. `deaths` must have been listened to since before it was started.
    pub(crate) async fn supervise(
        mut self,
        signals: &mut Signals,
        deaths: &mut unix::Signal,
    ) -> Result<Ended, NotBegun> {
        let mut died = false;
        self.progress.since = Some(self.env.clock().now());
        loop {
            if let Some(exit) = self.look(std::mem::take(&mut died)) {
                let stopped = self.progress.stage != Stage::Running;
                if let Some(failure) = self.start.failure().filter(|_| !stopped) {
                    return Err(failure);
                }
                let held = self.guard.is_held();
                return Ok(Ended { exit, stopped, held, key: key(exit), _watch: self.child.into_watch() });
            }
            self.stop_if_asked(signals);
            self.wake_if_forgotten();
            // Also after the last turn: a job that has ended was waiting for that alone.
            let asks = self.child.is_asking().then_some(TURN);
            let beyond = self.child.go_on_asking();
            self.name(beyond);
            let again = [self.hold_or_stop(), self.tell_watch()].into_iter().flatten().min();
            let waits = self.progress.waits.then_some(LEFT_BEHIND);
            let again = [again, waits, asks].into_iter().flatten().min();
            let again = again.map(|time| self.env.clock().now() + time);
            let again = [again, self.progress.looks_at].into_iter().flatten().min();
            tokio::select! {
                biased;
                _ = deaths.recv() => died = true,
                caught = signals.next() => self.pass_on(caught),
                standing = self.guard.changed(&self.progress.standing) => {
                    // Before anything is said of it.
                    self.hold_or_stop();
                    self.stands(standing);
                }
                is_unwatched = self.child.let_in() => self.watch_anew(is_unwatched),
                () = sleep_until(self.env, again) => {}
            }
        }
    }

    /// Looks after children, of which some may have died; tells how the job ended if it is over.
    fn look(&mut self, died: bool) -> Option<Exit> {
        if self.progress.stage == Stage::Running && self.child.watch().has_fired() {
            // Although the lock may have been renewed since.
            self.kill();
        }
        if let Some(exit) = self.child.look() {
            if self.progress.stage == Stage::Running && !self.may_go_on() {
                // The watch has seen the end of the lease before us.
                self.kill();
            }
            self.ended(exit);
            if self.start.failure().is_some() {
                // It has left nothing behind.
                self.child.reap();
                return Some(exit);
            }
        }
        let has_ended = self.progress.exit.is_some();
        // While others have time to end, the watch is to know of it, which finds them by that if we are killed. A namespace ends with us.
        if has_ended && (self.progress.stage != Stage::Terminated || self.child.is_namespace()) {
            self.child.reap();
        }
        if died {
            self.child.watch().wake();
        }
        let left = (died || has_ended) && self.child.reap_all();
        if has_ended && self.progress.stage == Stage::Terminated {
            // All of it has its time to end. Of a run of the lock that is below a daemon nobody tells us that it has.
            self.progress.waits = !left && !self.child.inner().is_empty();
            if left || self.progress.waits {
                return None;
            }
            // Whoever that has missed.
            self.progress.stage = Stage::Killed;
            self.child.reap();
        }
        let waits = left && self.progress.stage != Stage::Killed && self.waits();
        if self.progress.stage == Stage::Killed {
            // In rounds, since what was killed may just have started others, until there is nobody who can be.
            self.child.reap_all();
            let left = self.kill_all();
            self.progress.round = if left { ROUND } else { (self.progress.round * 2).min(LAST_ROUND) };
            return self.progress.exit.filter(|_| !left);
        }
        self.progress.lingers = waits;
        // Whoever has yet to hear of a signal that ended the job would go on without the lock.
        self.progress.exit.filter(|_| !waits && !self.child.is_asking())
    }

    /// Whether something that the job has left behind is waited for: all of it if that was asked for, else what runs under the same lock.
    fn waits(&mut self) -> bool {
        if self.run.orphans == Orphans::Wait || self.progress.exit.is_none() {
            return true;
        }
        let Some(first) = self.child.inner().first().map(|inner| inner.pid) else { return false };
        if !std::mem::replace(&mut self.progress.waits, true) && !self.run.quiet {
            let name = &self.run.name;
            say(format_args!(
                "lock \"{name}\": waiting for a run of it that the job has left behind (pid {first})"
            ));
        }
        true
    }

    fn ended(&mut self, exit: Exit) {
        self.progress.exit = Some(exit);
        // Nobody is left who would be stopped, but for a key of the terminal.
        self.child.forget_stops();
        self.child.ask_the_rest();
        if !self.progress.stops_with_group {
            self.progress.asked_to_stop = None;
        }
        if self.start.failure().is_none() {
            let time = self.env.clock().now().since(self.progress.since.unwrap_or(self.env.clock().now()));
            self.events.emit(|| Event::exited(exit, time));
        }
    }

    /// Is stopped with all of the job, if we were asked to and its first process is, and comes back with it. Not sooner, since a job that goes
    /// on needs its lock; nor because the job alone was stopped, since whoever did that may have it go on without us.
    fn stop_if_asked(&mut self, signals: &mut Signals) {
        let now = self.env.clock().now();
        let Some((signal, at)) = self.progress.asked_to_stop.filter(|(_, at)| now.since(*at) < STOPS_WITHIN)
        else {
            return;
        };
        // One that only has yet to tell others of a signal ends with that.
        let is_stopped = match self.progress.exit {
            Some(_) => self.progress.lingers,
            None => self.child.is_stopped(),
        };
        // Who was continued since is not stopped any more.
        if !is_stopped || self.progress.stage != Stage::Running || sys::has_come(Signal::CONT) {
            self.progress.asked_to_stop = Some((signal, at));
            return;
        }
        self.progress.asked_to_stop = None;
        let (held, untold) = self.child.hold();
        if untold > 0 && !self.run.quiet {
            let name = &self.run.name;
            say(format_args!(
                "lock \"{name}\": {untold} processes of the job stay stopped if this one is killed now"
            ));
        }
        // What is told from now on is told after it, or goes with the CONT.
        signals.forget_stops();
        // That took a while.
        if !sys::has_come(Signal::CONT) {
            sys::stop(signal);
        }
        self.child.goes_on();
        // Nobody renewed the lock meanwhile.
        if !self.may_go_on() {
            self.kill();
            return;
        }
        held.iter().for_each(|part| _ = part.send(Signal::CONT));
        self.progress.looks_at = Some(self.env.clock().now() + GOES_ON_WITHIN);
    }

    /// Has the job go on that is stopped although we were continued, some time ago: that was for us alone. Not at once, since a shell continues
    /// all of our group, and a job may stop anew right then.
    fn wake_if_forgotten(&mut self) {
        let now = self.env.clock().now();
        if self.progress.looks_at.is_none_or(|at| now < at) {
            return;
        }
        // What has come just now may have stopped the job anew. It is heard of when nothing else is to be done for a moment.
        self.progress.looks_at = a_stop_has_come().then_some(now + TURN);
        if self.progress.looks_at.is_some() {
            return;
        }
        if self.progress.asked_to_stop.is_none() && self.may_go_on() && self.child.is_stopped() {
            let beyond = self.child.pass_on(Signal::CONT, false);
            self.name(beyond);
        }
    }

    /// Tells the watch until when the lock lasts, after which it ends the job; says when to do that again, long before.
    fn tell_watch(&mut self) -> Option<Duration> {
        let is_heeded = self.run.on_lost != OnLost::Ignore;
        self.child.watch().lasts_until(self.guard.deadline().filter(|_| is_heeded));
        let left = self.guard.remaining().filter(|left| is_heeded && !left.is_zero());
        left.map(|left| (left / 8).max(ROUND))
    }

    /// Has another watch over the job where somebody has killed the one before, not without a lock. Where there can be none, it goes on without.
    fn watch_anew(&mut self, is_unwatched: bool) {
        if is_unwatched
            // Else nothing is left to watch over.
            && self.progress.stage != Stage::Killed
            && !self.child.watch().has_fired()
            && self.guard.is_held()
            && let Ok(lock) = inherited(self.guard)
        {
            let _ = self.child.watch_anew(lock.as_ref());
        }
    }

    fn may_go_on(&self) -> bool {
        self.guard.is_held() || self.run.on_lost == OnLost::Ignore
    }

    fn pass_on(&mut self, caught: Caught) {
        let Caught { signal, .. } = caught;
        let group_has_it = caught.reached_the_group();
        // For what is left behind, by the terminal alone, which stops that too.
        if asks_to_stop(signal) && (self.progress.exit.is_none() || group_has_it) {
            self.progress.asked_to_stop = Some((signal, self.env.clock().now()));
            self.progress.stops_with_group = group_has_it;
        }
        if signal == Signal::CONT {
            self.progress.asked_to_stop = None;
            if !self.may_go_on() {
                return;
            }
        }
        let beyond = match self.progress.exit {
            None => self.child.pass_on(signal, group_has_it),
            // They are stopped with us.
            Some(_) if asks_to_stop(signal) => Vec::new(),
            Some(_) if self.run.orphans == Orphans::Wait => self.child.signal_orphans(signal, group_has_it),
            Some(_) => self.child.pass_on_to_inner(signal, group_has_it),
        };
        self.name(beyond);
    }

    /// Stops the job if it is time; says when to look again.
    fn hold_or_stop(&mut self) -> Option<Duration> {
        loop {
            self.plan.meets(self.child.most());
            let Progress { stage, told, exit, .. } = self.progress;
            let told = told.map(|told| self.env.clock().now().since(told));
            let remaining = self.guard.remaining();
            let remaining = match told.filter(|_| exit.is_some()) {
                Some(told) => Some(self.plan.left_for_the_rest(remaining, told)),
                None => remaining,
            };
            let lost = match self.guard.standing() {
                Standing::Lost(loss) => Some(loss.kind),
                _ => None,
            };
            // One that has outlived the danger has had its time since it heard.
            let told = if lost.is_some() || exit.is_some() { told } else { self.heard() };
            match self.plan.step(stage, remaining, lost, told) {
                Step::Wait(None) if stage == Stage::Killed => return Some(self.progress.round),
                Step::Wait(time) => return time,
                // Nobody is there yet to whom a grace could be of use, and who might begin then.
                Step::Term if self.start.is_under_way() => self.kill(),
                Step::Term => self.terminate(),
                Step::GoOn if self.child.watch().has_fired() => self.kill(),
                Step::GoOn => {
                    self.go_on();
                    // What has waited for that is looked at anew: a stop, say.
                    return Some(Duration::ZERO);
                }
                Step::Kill => self.kill(),
            }
        }
    }

    /// How long ago the job heard that it is to end.
    fn heard(&mut self) -> Option<Duration> {
        let told = self.progress.told?;
        let now = self.env.clock().now();
        if self.progress.heard.is_none() && !self.child.is_finding() {
            self.progress.heard = Some(now);
        }
        Some(now.since(self.progress.heard.unwrap_or(now).max(told)))
    }

    /// Kills all of the job; says whether there was anybody.
    fn kill_all(&mut self) -> bool {
        let reached = self.child.kill();
        self.name(reached.beyond);
        reached.any
    }

    /// Tells, once, of those to whom no signal can be sent.
    fn name(&mut self, beyond: Vec<Beyond>) {
        let name = &self.run.name;
        for words in beyond.into_iter().filter_map(|one| self.progress.named.words(one)) {
            if !self.run.quiet {
                say(format_args!("lock \"{name}\": {words}"));
            }
        }
    }

    fn terminate(&mut self) {
        self.progress.stage = Stage::Terminated;
        self.progress.told = Some(self.env.clock().now());
        self.progress.heard = None;
        let beyond = self.child.ask_to_end(self.plan.grace());
        self.name(beyond);
        self.report_stopping(StopWord::Term);
    }

    /// It was not lost, and the job goes on, which was asked to end.
    fn go_on(&mut self) {
        self.progress.stage = Stage::Running;
        self.progress.told = None;
        self.child.is_spared();
        let remaining_ms = self.guard.remaining().map(whole_ms);
        self.events.emit(|| Event::Held { remaining_ms });
        if !self.run.quiet {
            say(format_args!("lock \"{}\" was not lost: the job goes on", self.run.name));
        }
    }

    fn kill(&mut self) {
        self.progress.stage = Stage::Killed;
        self.kill_all();
        self.report_stopping(StopWord::Kill);
    }

    fn report_stopping(&mut self, signal: StopWord) {
        let remaining_ms = self.guard.remaining().map(whole_ms);
        self.events.emit(|| Event::Stopping { signal, remaining_ms });
        if !self.run.quiet {
            let why = match self.guard.standing() {
                Standing::Held | Standing::Jeopardy if self.child.watch().has_fired() => {
                    "may have been lost while this process was stopped"
                }
                // Renewals are in time: it is its own end that has come.
                Standing::Held if self.run.max_hold.is_some() => "reaches its --max-hold",
                Standing::Held | Standing::Jeopardy => "is about to be lost",
                Standing::Lost(Loss { kind: LossKind::HeldTooLong, .. }) => "has reached its --max-hold",
                _ => "was lost",
            };
            let signal = signal.text();
            say(format_args!("lock \"{}\" {why}: sending {signal} to the job", self.run.name));
        }
    }

    /// Reports how the lease stands.
    fn stands(&mut self, standing: Standing) {
        let remaining_ms = self.guard.remaining().map(whole_ms);
        match &standing {
            Standing::Lost(loss) => {
                self.events.lost(loss);
                if !self.run.quiet {
                    say(format_args!("lock \"{}\" was lost: {loss}", self.run.name));
                }
            }
            Standing::Jeopardy => {
                self.events.emit(|| Event::Jeopardy { remaining_ms });
                if self.run.verbose {
                    say(format_args!("lock \"{}\" is in jeopardy: renewals are overdue", self.run.name));
                }
            }
            _ => self.events.emit(|| Event::Held { remaining_ms }),
        }
        self.progress.standing = standing;
    }
}

/// By which key of the terminal a job died.
fn key(exit: Exit) -> Option<Signal> {
    let died_by = |key: &Signal| exit == Exit::Signal(key.as_raw()) && sys::was_keyed(*key);
    [Signal::INT, Signal::QUIT].into_iter().find(died_by)
}

async fn sleep_until(env: &Env, at: Option<Instant>) {
    match at {
        Some(at) => env.sleep_until(at).await,
        None => std::future::pending().await,
    }
}
