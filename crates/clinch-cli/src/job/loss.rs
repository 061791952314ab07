//! When to stop a child whose lock is about to be lost. Pure: reads no clock and sends no signal.
//!
//! Renewals move the deadline. Only when the moment `deadline - grace` arrives and the deadline has not moved on, the child
//! is told to stop; shortly before the deadline itself, it is killed.

use std::time::Duration;

use clinch::LossKind;

use crate::args::OnLost;
use crate::exit::Failure;

/// The longest grace that nobody asked for.
const MAX_DEFAULT_GRACE: Duration = Duration::from_secs(5);

/// How long a child gets to stop when the lock was taken away before its time: others may have it soon. Once its time is up they may
/// have it now, and there is no grace left.
const GRACE_AFTER_LOSS: Duration = Duration::from_secs(1);

/// Time that is kept between KILL and the deadline: timers are late, and dying takes a moment.
const MAX_KILL_MARGIN: Duration = Duration::from_millis(100);

/// As well for each process of the job, which has to be found in `/proc`. Measured: 0.6 to 0.8 ms, by a build without optimization on a busy host.
const KILL_MARGIN_EACH: Duration = Duration::from_millis(1);

/// How a child is stopped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    on_lost: OnLost,
    grace: Duration,
    /// How many processes are to be killed at least, as far as is known.
    parts: usize,
}

/// How far the stopping has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The lock is held.
    #[default]
    Running,
    /// The child was sent TERM.
    Terminated,
    /// The child was sent KILL.
    Killed,
}

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Look again after this time at the latest; `None`: when something happens.
    Wait(Option<Duration>),
    Term,
    /// The danger is over, and the job has outlived it.
    GoOn,
    Kill,
}

impl Plan {
    /// Refuses a grace that the lease has no room for.
    ///
    /// A lease is renewed after a third of its TTL and retried until two thirds; TERM must come after that, else the first
    /// slow answer would end the job. `ttl` is `None` where leases do not end.
    pub(crate) fn new(
        on_lost: OnLost,
        ttl: Option<Duration>,
        max_hold: Option<Duration>,
        grace: Option<Duration>,
    ) -> Result<Plan, Failure> {
        let limits = [
            ttl.map(|ttl| (ttl / 4, "a quarter of the TTL", ttl)),
            max_hold.map(|hold| (hold / 2, "half of --max-hold", hold)),
        ];
        for (limit, what, whole) in limits.into_iter().flatten() {
            if let Some(grace) = grace.filter(|grace| *grace > limit) {
                return Err(Failure::usage(format!(
                    "--grace {grace:?} is more than {what} of {whole:?}: the job could not be stopped in time"
                )));
            }
        }
        let shortest = [ttl, max_hold].into_iter().flatten().min();
        let default = shortest.map_or(MAX_DEFAULT_GRACE, |time| (time / 6).min(MAX_DEFAULT_GRACE));
        Ok(Plan { on_lost, grace: grace.unwrap_or(default), parts: 0 })
    }

    /// How long a child has to stop at least.
    pub(crate) fn grace(&self) -> Duration {
        self.grace.min(GRACE_AFTER_LOSS)
    }

    /// So many processes were met.
    pub(crate) fn meets(&mut self, parts: usize) {
        self.parts = parts;
    }

    /// How long a child gets to stop when the lock was taken away; `None`: it is not stopped.
    pub(crate) fn grace_after_loss(&self) -> Option<Duration> {
        match self.on_lost {
            OnLost::Term => Some(self.grace()),
            OnLost::Kill => Some(Duration::ZERO),
            OnLost::Ignore => None,
        }
    }

    /// How long what the first process has left behind may go on: no longer than its grace, though the lease may be renewed again.
    pub(crate) fn left_for_the_rest(&self, remaining: Option<Duration>, told: Duration) -> Duration {
        let left = self.grace.saturating_sub(told);
        remaining.map_or(left, |remaining| remaining.min(left))
    }

    /// What to do with `remaining` until the deadline (`None`: there is none), or when the lock is already `lost`, and how.
    /// `told` is how long ago the child was sent TERM.
    pub(crate) fn step(
        &self,
        stage: Stage,
        remaining: Option<Duration>,
        lost: Option<LossKind>,
        told: Option<Duration>,
    ) -> Step {
        if self.on_lost == OnLost::Ignore || stage == Stage::Killed {
            return Step::Wait(None);
        }
        if matches!(lost, Some(LossKind::Expired | LossKind::HeldTooLong)) {
            // Nobody saw it coming: this process was stopped, or the whole machine slept.
            return Step::Kill;
        }
        let remaining = if lost.is_some() { Some(Duration::ZERO) } else { remaining };
        let Some(remaining) = remaining else { return Step::Wait(None) };
        if stage == Stage::Running {
            return match remaining.checked_sub(self.grace) {
                Some(left) if !left.is_zero() => Step::Wait(Some(left)),
                _ if self.on_lost == OnLost::Kill || self.grace.is_zero() => Step::Kill,
                _ => Step::Term,
            };
        }
        let left = if lost.is_some() {
            self.grace().saturating_sub(told.unwrap_or_default())
        } else {
            remaining.saturating_sub(kill_margin(self.grace, self.parts))
        };
        if left.is_zero() {
            return Step::Kill;
        }
        // Renewed: but what ends in its time does so since it was asked to.
        let time = told.map(|told| self.grace.saturating_sub(told)).filter(|_| remaining > self.grace);
        match time {
            Some(Duration::ZERO) => Step::GoOn,
            Some(time) => Step::Wait(Some(left.min(time))),
            None => Step::Wait(Some(left)),
        }
    }
}

/// How long before the deadline a job of so many processes is killed: half of its grace is its own in any case.
fn kill_margin(grace: Duration, parts: usize) -> Duration {
    let each = KILL_MARGIN_EACH.saturating_mul(u32::try_from(parts).unwrap_or(u32::MAX));
    let margin = (grace / 4).min(MAX_KILL_MARGIN);
    margin.saturating_add(each).min(grace / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn plan(on_lost: OnLost) -> Plan {
        Plan::new(on_lost, Some(MS(6000)), None, Some(MS(1000))).unwrap()
    }

    #[test]
    fn term_comes_a_grace_before_the_deadline_and_kill_before_it() {
        let plan = plan(OnLost::Term);
        assert_eq!(plan.step(Stage::Running, Some(MS(5000)), None, None), Step::Wait(Some(MS(4000))));
        assert_eq!(plan.step(Stage::Running, Some(MS(1000)), None, None), Step::Term);
        let soon = plan.step(Stage::Terminated, Some(MS(900)), None, Some(MS(100)));
        assert_eq!(soon, Step::Wait(Some(MS(800))));
        assert_eq!(plan.step(Stage::Terminated, Some(MS(100)), None, Some(MS(900))), Step::Kill);
        assert_eq!(plan.step(Stage::Killed, Some(MS(0)), Some(LossKind::Expired), None), Step::Wait(None));
    }

    #[test]
    fn many_are_killed_sooner_but_have_half_of_their_grace() {
        for (grace, parts, margin) in
            [(1000, 0, 100), (200, 0, 50), (1000, 2, 102), (5000, 1500, 1600), (1000, 1500, 500), (0, 9, 0)]
        {
            assert_eq!(kill_margin(MS(grace), parts), MS(margin), "{grace} {parts}");
        }
        assert_eq!(kill_margin(MS(1000), usize::MAX), MS(500));
        let mut plan = plan(OnLost::Term);
        plan.meets(400);
        assert_eq!(plan.step(Stage::Terminated, Some(MS(300)), None, Some(MS(700))), Step::Kill);
    }

    #[test]
    fn a_lock_taken_away_leaves_little_grace_and_none_when_it_ran_out() {
        let plan = plan(OnLost::Term);
        let deleted = Some(LossKind::Deleted);
        assert_eq!(plan.grace_after_loss(), Some(MS(1000)));
        assert_eq!(plan.step(Stage::Running, None, deleted, None), Step::Term);
        assert_eq!(plan.step(Stage::Terminated, None, deleted, Some(MS(400))), Step::Wait(Some(MS(600))));
        assert_eq!(plan.step(Stage::Terminated, Some(MS(0)), deleted, Some(MS(1000))), Step::Kill);
        for (stage, told) in [(Stage::Running, None), (Stage::Terminated, Some(MS(100)))] {
            assert_eq!(plan.step(stage, Some(MS(0)), Some(LossKind::Expired), told), Step::Kill);
        }
    }

    /// A job that outlives a danger to its lock is asked to end no more, and its exit code says that the lock was lost; or one that cleans up has its work taken
    /// for done.
    #[test]
    fn a_job_has_outlived_a_danger_when_its_time_to_end_is_over() {
        let plan = plan(OnLost::Term);
        let step =
            |remaining, lost, told| plan.step(Stage::Terminated, Some(MS(remaining)), lost, Some(MS(told)));
        assert_eq!(step(5000, None, 400), Step::Wait(Some(MS(600))));
        assert_eq!(step(5000, None, 1000), Step::GoOn);
        assert_eq!(step(1000, None, 1000), Step::Wait(Some(MS(900))), "no time to ask it again");
        assert_eq!(step(5000, Some(LossKind::Deleted), 1000), Step::Kill);
    }

    /// A part that ignores TERM keeps the lock for ever once the store is back.
    #[test]
    fn a_renewed_lease_is_nothing_to_what_is_left_of_a_job() {
        let plan = plan(OnLost::Term);
        let step = |remaining, told| {
            let left = plan.left_for_the_rest(remaining, told);
            plan.step(Stage::Terminated, Some(left), None, Some(told))
        };
        for remaining in [Some(MS(5000)), None] {
            assert_eq!(step(remaining, MS(100)), Step::Wait(Some(MS(800))));
            assert_eq!(step(remaining, MS(1000)), Step::Kill);
        }
        assert_eq!(step(Some(MS(300)), MS(0)), Step::Wait(Some(MS(200))));
    }

    #[test]
    fn what_was_asked_for_is_done() {
        assert_eq!(plan(OnLost::Kill).step(Stage::Running, Some(MS(900)), None, None), Step::Kill);
        let expired = Some(LossKind::Expired);
        assert_eq!(plan(OnLost::Ignore).step(Stage::Running, Some(MS(0)), expired, None), Step::Wait(None));
        let graces = [OnLost::Kill, OnLost::Ignore].map(|on_lost| plan(on_lost).grace_after_loss());
        assert_eq!(graces, [Some(MS(0)), None]);
        assert_eq!(plan(OnLost::Term).step(Stage::Running, None, None, None), Step::Wait(None));
    }

    #[test]
    fn a_grace_without_room_is_refused_with_both_figures() {
        let error = Plan::new(OnLost::Term, Some(MS(10_000)), None, Some(MS(3000))).unwrap_err();
        assert!(error.message.contains("3s") && error.message.contains("10s"), "{}", error.message);
        assert!(Plan::new(OnLost::Term, None, Some(MS(1000)), Some(MS(600))).is_err());
        assert!(Plan::new(OnLost::Term, None, None, Some(MS(60_000))).is_ok());
    }

    #[test]
    fn defaults_fit_their_lease() {
        let cases =
            [(Some(600), None, 100), (Some(60_000), None, 5000), (None, Some(1200), 200), (None, None, 5000)];
        for (ttl, hold, grace) in cases {
            let plan = Plan::new(OnLost::Term, ttl.map(MS), hold.map(MS), None).unwrap();
            assert_eq!(plan.grace, MS(grace));
        }
    }
}
