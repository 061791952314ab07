//! A run inside a job of the same lock: it enters that, and becomes its command.

use std::cell::Cell;
use std::pin::pin;
use std::time::Duration;

use clinch::backend::ClaimState;
use clinch::{ClaimId, Token};

use super::Session;
use crate::args::{Orphans, Run};
use crate::around::{is_kept, jobs_around, waits_for_itself};
use crate::connect::{TRY_AGAIN, is_transient};
use crate::exit::{CONFLICT, Failure};
use crate::job::door::knock;
use crate::job::events::Event;
use crate::job::fork::exec;
use crate::job::nesting::Outer;
use crate::job::{nesting, reentry, spawn};
use crate::output::say;
use crate::waiting::{SHOWN_AFTER, Waiting};
use crate::writer::WRITER;

/// When to look again where the store says nothing of the job around this one, or that lets nobody in now.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl Session<'_> {
    /// Enters the lock of a job around us, if there is one, and tells how the command ended that ran there.
    pub(super) async fn enter(&mut self) -> Result<Option<u8>, Failure> {
        let (outer, same_name) = jobs_around(&self.run.name);
        // Twice where it is likely: what is not listed may be just being rewritten.
        let pauses = [Duration::ZERO, LOOK_AGAIN].into_iter().take(1 + usize::from(same_name));
        for pause in pauses.filter(|_| !outer.is_empty()) {
            tokio::time::sleep(pause).await;
            if let Some(ended) = self.reenter(&outer).await? {
                return Ok(Some(ended));
            }
        }
        if self.limits.keep(is_kept(&self.locks, &self.run.name, &outer)).await? {
            return Err(waits_for_itself(&self.run.name));
        }
        self.outer = outer;
        Ok(None)
    }

    /// Runs the command in place of us, under the lock that an outer job holds. `None`: it does not; what stands in the environment
    /// may be of a job that ended long ago, or that this is no part of.
    async fn reenter(&mut self, outer: &[Outer]) -> Result<Option<u8>, Failure> {
        let Run { name, share, .. } = self.run;
        let is_outer = |one: &ClaimState| {
            one.granted && find_door(outer, one.id).is_some() && reentry::is_around(&one.owner)
        };
        // That it waits for a job around it is told here.
        let waiting = Waiting::of_run(self.run, &self.limits, &self.events).warning(false);
        let is_told = Cell::new(false);
        let claim = loop {
            // For who looks at us when the outer run was killed.
            reentry::tell(true);
            let state = self.limits.keep(self.locks.state(name)).await;
            let claims = state.map(|state| state.map(|state| state.claims).unwrap_or_default());
            let held = claims.map(|claims| claims.into_iter().find(is_outer));
            if let Ok(Some(claim)) = &held
                && let Some(door) = find_door(outer, claim.id)
                && let knocked = self.knock_and_tell(door, claim.owner.pid, &is_told)
                && let Ok(knocked) = self.limits.within(waiting.beside(Some(&self.locks), knocked)).await
            {
                // To wait for it would never end.
                let cannot =
                    format!("lock \"{name}\" is held by the job around this one, which can let nobody in");
                match knocked {
                    Ok(true) => break claim.clone(),
                    // Under another name of this host that job is ours if its door says so; else it is another's.
                    Ok(false) | Err(_) if !reentry::is_here(&claim.owner) => {
                        reentry::tell(false);
                        return Ok(None);
                    }
                    Ok(false) => {}
                    Err(error) => return Err(Failure::new(CONFLICT, format!("{cannot}: {error}"))),
                }
            }
            reentry::tell(false);
            let is_unanswered = held.as_ref().is_err_and(|error| is_transient(error) && self.limits.go_on());
            if !is_unanswered && held?.is_none() {
                return Ok(None);
            }
            if self.limits.is_over() {
                return Err(Failure::new(
                    CONFLICT,
                    format!(
                        "lock \"{name}\" is held by the job around this one, which lets nobody in now: it is about to end, or stopped"
                    ),
                ));
            }
            if !is_unanswered {
                self.tell_of_the_door(&is_told);
            }
            // What is about to end is held until it has.
            tokio::time::sleep(if is_unanswered { TRY_AGAIN } else { LOOK_AGAIN }).await;
        };
        drop(waiting);
        let claim = &claim;
        if !nesting::covers(claim, share) {
            let mode = claim.mode;
            return Err(Failure::usage(format!(
                "the job around this one holds lock \"{name}\" ({mode}), which does not include what is asked for, and \
                 waiting for it would never end"
            )));
        }
        if let Some(option) = outer_only(self.run) {
            return Err(Failure::usage(format!(
                "lock \"{name}\" is held by the job around this one: {option} is for the run that holds it, and nothing to one inside"
            )));
        }
        let token = claim.token.map(Token::get);
        self.events.emit(|| Event::Reentered { claim: claim.id.to_string(), token });
        self.tell(|| "held by the job around this one".to_owned());
        let mut command = spawn::command(self.run)?;
        command.env("CLINCH_NAME", name).env("CLINCH_CLAIM", claim.id.to_string());
        command.envs(claim.token.map(|token| ("CLINCH_TOKEN", token.to_string())));
        command.env(reentry::REENTERED, reentry::mark(claim.id));
        // No process group and no supervision: signals and losses of the outer job concern this one as they are.
        WRITER.finish();
        Err(spawn::not_started(command.get_program(), &exec(&command)))
    }

    /// Knocks at the door of a job; says that it waits there if nobody answers, as where the `clinch run` of that is stopped.
    async fn knock_and_tell(&self, door: &str, pid: u32, is_told: &Cell<bool>) -> std::io::Result<bool> {
        let mut knocked = pin!(knock(door, pid));
        tokio::select! {
            biased;
            knocked = &mut knocked => return knocked,
            () = tokio::time::sleep(SHOWN_AFTER) => {}
        }
        if !self.run.patience.no_wait {
            self.tell_of_the_door(is_told);
        }
        knocked.await
    }

    /// Says, once, that it waits for the job around it.
    fn tell_of_the_door(&self, is_told: &Cell<bool>) {
        if !self.run.quiet && !self.run.skip && !is_told.replace(true) {
            say(format_args!(
                "lock \"{}\": waiting for the job around this one, which lets nobody in now",
                self.run.name
            ));
        }
    }
}

/// What it was given that only the run can do which holds the lock.
fn outer_only(run: &Run) -> Option<&'static str> {
    let options = [
        (run.once_per.is_some(), "--once-per"),
        (run.min_hold.is_some(), "--min-hold"),
        (run.max_hold.is_some(), "--max-hold"),
        (run.orphans == Orphans::Wait, "--orphans wait"),
        (run.no_fork, "--no-fork (-F)"),
    ];
    options.into_iter().find_map(|(is_given, option)| is_given.then_some(option))
}

/// Where the job lets runs inside it in that has this claim.
fn find_door(outer: &[Outer], claim: ClaimId) -> Option<&str> {
    outer.iter().find(|outer| outer.claim == claim).map(|outer| &*outer.door)
}
