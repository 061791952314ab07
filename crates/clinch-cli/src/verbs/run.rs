//! `clinch run`: a command under a lock. The order of things; the machinery is in `job`.

mod inside;

use std::cell::OnceCell;
use std::pin::pin;
use std::time::Duration;

use clinch::{Env, ErrorKind, Guard, Instant, Lane, Locks, Loss, LossKind, Released, Standing};
use rustix::process::{Signal, getpid, set_child_subreaper};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::AbortHandle;

use crate::args::{OnLost, Run, Store};
use crate::around::{comes_to_be_kept, waits_for_itself};
use crate::connect::{CLOSE_FOR, Limits, block_on, close, connect_within, is_transient};
use crate::documents::whole_ms;
use crate::exit::{CONFLICT, Failure, LOST, Outcome, SIGNAL_BASE};
use crate::job::door::Door;
use crate::job::events::{Event, Events};
use crate::job::in_place::{self, Stayed};
use crate::job::loss::Plan;
use crate::job::namespace::can_reach_all;
use crate::job::nesting::Outer;
use crate::job::signals::{Caught, Signals};
use crate::job::spawn;
use crate::job::supervise::{Ended, Progress, Supervisor};
use crate::job::sys;
use crate::job::watch::Orders;
use crate::output::say;
use crate::request::{Request, why_taken, with_lease};
use crate::turn;
use crate::waiting::Waiting;

/// Runs the verb.
pub(crate) fn run(store: &Store, run: &Run) -> Outcome {
    // Before the runtime is made, whose descriptors nobody is to write to.
    let opened = turn::check(run).and_then(|()| Events::open(run.events.as_deref(), &run.name));
    let outcome =
        opened.and_then(|events| block_on(async { Session::open(store, run, events).await?.run().await }));
    let mut failure = match outcome {
        Err(failure) if failure.code == LOST && run.quiet => return Ok(LOST),
        Err(failure) if failure.code == CONFLICT => failure,
        outcome => return outcome,
    };
    if run.quiet || run.skip && failure.is_taken {
        failure.message = "".into();
    }
    // Where a job cannot get in and nobody does its work, that is no success.
    if !run.skip || failure.is_taken {
        failure.code = run.conflict_exit_code;
    }
    Err(failure)
}

/// One `clinch run`.
struct Session<'a> {
    store: &'a Store,
    run: &'a Run,
    env: Env,
    locks: Locks,
    limits: Limits,
    plan: Plan,
    events: Events,
    /// The jobs around us that may hold the lock.
    outer: Vec<Outer>,
    /// Whether we were asked to end after the job had ended.
    is_hurried: bool,
    /// The task that notes that the job began.
    counting: OnceCell<AbortHandle>,
    /// What asked us to end before the job began, or the key by which that died.
    ended_by: Option<Signal>,
}

/// What became of waiting.
enum Waited {
    Granted(Guard),
    Signalled(Signal),
}

impl<'a> Session<'a> {
    async fn open(store: &'a Store, run: &'a Run, events: Events) -> Result<Session<'a>, Failure> {
        let env = Env::host(Lane::here()?);
        let limits = Limits::of(&run.patience, &env);
        let prepared = Session::prepare(store, run, &env, &limits, &events).await;
        let (locks, plan) = prepared.inspect_err(|failure| events.emit(|| Event::refused(failure)))?;
        let (outer, is_hurried, counting, ended_by) = (Vec::new(), false, OnceCell::new(), None);
        Ok(Session { store, run, env, locks, limits, plan, events, outer, is_hurried, counting, ended_by })
    }

    /// Reaches the store, and makes sure that it can do what is asked for.
    async fn prepare(
        store: &Store,
        run: &Run,
        env: &Env,
        limits: &Limits,
        events: &Events,
    ) -> Result<(Locks, Plan), Failure> {
        // A job is not lost with others: nothing else hangs on its lease.
        let waiting = Waiting::of_run(run, limits, events);
        let locks = waiting.beside(None, connect_within(store, env, limits)).await?.isolated();
        drop(waiting);
        let can = locks.capabilities();
        turn::refuse_to_linger(run, can)?;
        in_place::refuse(run, can)?;
        let ttl = can.expiry.then(|| run.lease.ttl.unwrap_or_else(|| locks.lease_ttl()));
        let plan = Plan::new(run.on_lost, ttl, run.max_hold, run.grace)?;
        let mut locks = with_lease(locks, &run.lease, &spawn::default_label(run))?;
        if let Some(time) = run.max_hold {
            locks = locks.max_hold(time)?;
        }
        Ok((locks, plan))
    }

    /// Enters the lock of a job around us, if there is one, and tells how the command ended that ran there. Else sees to it that a job of ours
    /// could end in time: nothing is locked yet.
    async fn enter_or_check(&mut self) -> Result<Option<u8>, Failure> {
        let entered = self.enter().await?;
        // What nobody could end would run on without its lock.
        if entered.is_none() && !self.run.no_fork {
            can_reach_all().map_err(|error| Failure::system("cannot look after a job", error))?;
        }
        Ok(entered)
    }

    async fn run(mut self) -> Outcome {
        let entered = self.enter_or_check().await;
        if let Some(ended) = entered.inspect_err(|failure| self.events.emit(|| Event::refused(failure)))? {
            return Ok(ended);
        }
        let cannot_listen = |error| Failure::system("cannot catch signals", error);
        let mut signals = Signals::ending().map_err(cannot_listen)?;
        let guard = match self.acquire(&mut signals).await {
            Ok(Waited::Granted(guard)) => guard,
            Ok(Waited::Signalled(signal)) => return self.withdrawn(signal).await,
            Err(failure) => {
                // A place in the queue, or a claim in doubt, is withdrawn first: nobody else would do it.
                let _ = close(&self.locks).await;
                self.events.emit(|| Event::refused(&failure));
                return Err(failure);
            }
        };
        let closed_until = self.run.min_hold.map(|time| self.env.clock().now() + time);
        self.report_acquired(&guard);
        if self.run.no_fork {
            return self.stand_aside(guard).await;
        }
        let outcome = self.hold(&guard, closed_until, &mut signals).await;
        // One that we stopped has lost its lock, or is about to.
        if outcome.as_ref().is_ok_and(|ended| !ended.stopped && ended.exit.code() != 0) {
            // What it asked for may have arrived all the same, or do so yet.
            if self.run.retry_failed && guard.is_held() {
                self.counting.get().into_iter().for_each(AbortHandle::abort);
            }
            let hurried = hurried(&mut self.is_hurried, &mut signals);
            turn::give_back(&self.locks, self.run, &guard, hurried).await;
        }
        let outcome = self.finish(guard, closed_until, outcome, &mut signals).await;
        self.ended_by.into_iter().for_each(sys::die_by);
        outcome
    }

    /// Waits for the lock, or until a signal asks us to end.
    async fn acquire(&self, signals: &mut Signals) -> Result<Waited, Failure> {
        let request = Request::new(&self.locks, &self.run.name, &self.run.share)?;
        let waiting = Waiting::of_run(self.run, &self.limits, &self.events);
        let granted = request.acquire(&self.limits, |claim| waiting.waits_with(claim));
        let refused = tokio::select! {
            biased;
            result = waiting.beside(Some(&self.locks), granted) => match result {
                Ok(guard) => return Ok(Waited::Granted(guard)),
                Err(error) => Failure::from(error),
            },
            caught = signals.next() => return Ok(Waited::Signalled(caught.signal)),
            () = comes_to_be_kept(&self.locks, &self.run.name, &self.outer) => return Err(waits_for_itself(&self.run.name)),
        };
        // Where nobody is told of it, nobody is asked.
        match self.run.quiet && !self.run.skip && !self.events.wanted() {
            true => Err(refused),
            false => Err(why_taken(&self.locks, &self.limits, &self.run.name, refused).await),
        }
    }

    /// Ends by the signal that ended the wait. The claim was withdrawn when its future was dropped.
    async fn withdrawn(&mut self, signal: Signal) -> Outcome {
        // If the store does not answer, the place in the queue runs out by itself.
        let _ = close(&self.locks).await;
        self.events.emit(|| Event::Refused { reason: ended_by(signal) });
        sys::die_by(signal);
        Ok(code_of(signal))
    }

    /// Lets the command take our place. Returns only if it did not.
    async fn stand_aside(&mut self, guard: Guard) -> Outcome {
        let stayed = in_place::become_command(self.run, &guard);
        if let Err(error) = guard.release().await {
            say(format_args!("could not release lock \"{}\": {error}", self.run.name));
        }
        match stayed {
            Stayed::Signalled(signal) => self.withdrawn(signal).await,
            Stayed::Because(failure) => Err(failure),
        }
    }

    /// Runs the job to its end.
    async fn hold(
        &mut self,
        guard: &Guard,
        closed_until: Option<Instant>,
        signals: &mut Signals,
    ) -> Result<Ended, Failure> {
        let cannot_listen = |error| Failure::system("cannot catch signals", error);
        let turn = tokio::select! {
            biased;
            turn = turn::take(&self.locks, &self.limits, self.run) => turn?,
            _ = guard.lost() => return Err(spawn::too_late(guard)),
            Caught { signal, .. } = signals.next() => {
                self.ended_by = Some(signal);
                return Err(Failure::new(code_of(signal), ended_by(signal)));
            }
        };
        let mut command = spawn::command(self.run)?;
        let door = Door::open();
        spawn::tell(&mut command, guard, door.address());
        // What loses its parent falls to us, as it does to process 1: the job may have to be waited for, or to be ended.
        set_child_subreaper(Some(getpid()))
            .map_err(|error| Failure::system("cannot look after what the job leaves behind", error))?;
        signals.pass_on().map_err(cannot_listen)?;
        sys::unblock(Signal::CHILD);
        let mut deaths = signal(SignalKind::child()).map_err(cannot_listen)?;
        let (store, orphans, grace) = (self.store, self.run.orphans, self.plan.grace_after_loss());
        let counted_until = self.run.once_per.map(|period| self.env.clock().now() + period);
        let counts = turn.as_ref().zip(counted_until);
        let (child, start) = spawn::start(
            &command,
            guard,
            door,
            Orders { store, orphans, closed_until, turn: counts, ttl: self.locks.lease_ttl(), grace },
        )?;
        // Now, not at the end: the run counts even if nobody lives to see its end. If we do not live to do it, the watch does.
        let counted = async {
            let Some((turn, period)) = turn.zip(self.run.once_per) else { return };
            if start.has_begun().await {
                let counting = turn::count(turn, period, self.run.name.clone());
                let _ = self.counting.set(counting.abort_handle());
                let _ = counting.await;
            }
        };
        let supervisor = Supervisor {
            env: &self.env,
            guard,
            child,
            start: &start,
            plan: self.plan,
            run: self.run,
            events: &mut self.events,
            progress: Progress::default(),
        };
        // Whatever becomes of that, the job has to be stopped when its lock is lost.
        let mut counted = pin!(counted);
        let ended = {
            let mut supervised = pin!(async {
                let ended = supervisor.supervise(signals, &mut deaths).await;
                ended.map_err(|why| spawn::not_begun(&command, guard, &why))
            });
            tokio::select! {
                biased;
                () = &mut counted => return supervised.await,
                ended = &mut supervised => ended?,
            }
        };
        tokio::select! {
            biased;
            () = counted => {}
            () = signals.asked_to_end() => self.is_hurried = true,
        }
        Ok(ended)
    }

    /// Releases the lock after the job, and finds the exit code.
    async fn finish(
        &mut self,
        guard: Guard,
        closed_until: Option<Instant>,
        outcome: Result<Ended, Failure>,
        signals: &mut Signals,
    ) -> Outcome {
        // A job that never began need not be kept from the others.
        let closed_until = closed_until.filter(|_| outcome.is_ok());
        let linger = closed_until.map_or(Duration::ZERO, |until| until.since(self.env.clock().now()));
        let deaf = self.run.on_lost == OnLost::Ignore;
        let mut lost = outcome.as_ref().is_ok_and(|ended| ended.stopped);
        let was_held = outcome.as_ref().is_ok_and(|ended| ended.held);
        // Who asks us to end does not wait for a store that does not answer; nor does anybody for a job that never began.
        self.is_hurried |= outcome.is_err();
        let released = tokio::select! {
            biased;
            released = release(&self.locks, guard, linger) => {
                // Whatever is still being released in the background; its lease would end it otherwise.
                let _ = close(&self.locks).await;
                released
            }
            () = hurried(&mut self.is_hurried, signals) => Err(clinch::Error::new(ErrorKind::Unknown, "the store did not answer in time")),
        };
        let is_unclosed = released.as_ref().is_err_and(is_transient) && !linger.is_zero();
        match released {
            Ok(Released::Released) => {
                self.events.emit(|| Event::Released { closed_ms: whole_ms(linger) });
                self.tell(|| "released".to_owned());
            }
            // While its end was to be noted, at a store that was away.
            Ok(Released::AlreadyLost(loss)) if was_held && loss.kind == LossKind::Expired => {
                say(format_args!("could not release lock \"{}\" before it ran out: {loss}", self.run.name));
            }
            Ok(Released::AlreadyLost(loss)) => {
                self.events.lost(&loss);
                if !lost && !self.run.quiet {
                    say(format_args!("lock \"{}\" was lost before the job ended: {loss}", self.run.name));
                }
                lost = true;
            }
            Err(error) if is_unclosed => say(format_args!(
                "could not close lock \"{}\" yet, which may open before its time: {error}",
                self.run.name
            )),
            // The job is done and kept the lock all the while; what the store keeps too long is no failure of the job.
            Err(error) => say(format_args!("could not release lock \"{}\": {error}", self.run.name)),
        }
        let is_uncounted = self.counting.get().is_some_and(|counting| !counting.is_finished());
        if is_uncounted {
            say(format_args!(
                "could not note yet that \"{}\" ran; it may run again before its time",
                self.run.name
            ));
        }
        let ended = outcome.inspect_err(|failure| {
            self.events.emit(|| Event::refused(failure));
        })?;
        let (code, key) = (ended.exit.code(), ended.key);
        if is_unclosed || is_uncounted {
            // Its watch does it, as if we had been killed, when the store answers again.
            std::mem::forget(ended);
        }
        if lost && !deaf {
            return Ok(LOST);
        }
        self.ended_by = self.ended_by.or(key);
        Ok(code)
    }

    fn report_acquired(&mut self, guard: &Guard) {
        let (token, claim) = (guard.token().get(), guard.claim_id().to_string());
        self.events.emit(|| Event::Acquired { token, claim, pid: std::process::id() });
        self.tell(|| format!("acquired, token {token}"));
    }

    /// Says something about the lock if anybody wants to know.
    fn tell(&self, what: impl FnOnce() -> String) {
        if self.run.verbose {
            say(format_args!("lock \"{}\": {}", self.run.name, what()));
        }
    }
}

/// Releases a lock, and keeps it closed. One that was lost by time alone is closed, too, unless the store has given it up: nobody else had it yet.
async fn release(locks: &Locks, guard: Guard, linger: Duration) -> clinch::Result<Released> {
    if let Standing::Lost(Loss { kind: LossKind::Expired | LossKind::HeldTooLong, .. }) = guard.standing()
        && !linger.is_zero()
    {
        let closed = locks.release_detached_closed(guard.name().as_str(), guard.claim_id(), linger);
        // What comes of it decides nothing: the guard frees what is left.
        let _ = tokio::time::timeout(CLOSE_FOR, closed).await;
    }
    guard.release_closed(linger).await
}

/// Completes when somebody has asked us to end after the job, and has waited long enough for a store that does not answer.
async fn hurried(is_hurried: &mut bool, signals: &mut Signals) {
    if !*is_hurried {
        signals.asked_to_end().await;
        *is_hurried = true;
    }
    tokio::time::sleep(CLOSE_FOR).await;
}

fn ended_by(signal: Signal) -> String {
    format!("ended by signal {}", signal.as_raw())
}

fn code_of(signal: Signal) -> u8 {
    SIGNAL_BASE.saturating_add(u8::try_from(signal.as_raw()).unwrap_or(0))
}
