//! A claim's tenure: its time in the store as far as it is known here, and how it ends.
//!
//! State and judgement only: what the keeper and the guard ask and tell. Reads no clock, calls no store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{self, MAX_ATTEMPT, NOTICE, Renewal};
use crate::claim::{Claim, Loss, LossKind};
use crate::clock::Instant;
use crate::drift::Drift;
use crate::error::{Error, Result};
use crate::lease;
use crate::process::Process;
use crate::sync::{apart, lock};
use crate::token::Token;

/// How often a lease that never expires, or that nobody renews, is looked at: an operator may have taken it away.
pub(crate) const CHECK_EVERY: Duration = Duration::from_secs(4);

/// An evicted holder may hear of it by a renewal alone, or by a look where nobody renews. It must do so although one of them hangs,
/// and have stopped when the notice is over.
const _: () = {
    let (attempt, left) = (MAX_ATTEMPT.as_secs(), NOTICE.as_secs() - STOP_WITHIN.as_secs());
    // The second is sent as soon as the first was given up.
    assert!(lease::MAX_RENEWAL.as_secs() + 2 * attempt <= left);
    // The second is sent when it is due.
    assert!(attempt <= CHECK_EVERY.as_secs() && 2 * CHECK_EVERY.as_secs() + attempt <= left);
};

/// The shortest time for one attempt: less than the shortest TTL asks for.
const MIN_ATTEMPT: Duration = Duration::from_millis(10);

/// What that leaves for timers to be late, for a job's grace and its end.
const STOP_WITHIN: Duration = Duration::from_secs(4);

/// A claim's time in the store, queued or held, as far as it is known here.
#[derive(Debug)]
pub(crate) struct Tenure {
    pub(crate) id: u64,
    pub(crate) claim: Arc<Claim>,
    pub(crate) token: Option<Token>,
    pub(crate) policy: Policy,
    process: Process,
    /// Where the keeper finds it in its schedule; changed only while that is locked.
    due: AtomicU64,
    state: Mutex<State>,
    changed: Notify,
}

/// How long a lease may be kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    /// By how much our clock and the store's may run apart.
    pub(crate) drift: Drift,
    /// Never renewed unless asked, but looked at.
    pub(crate) manual: bool,
    /// Lost at this moment whatever the store says.
    pub(crate) hold_until: Option<Instant>,
}

#[derive(Debug)]
struct State {
    /// When the last confirmed renewal, or the claim, was sent.
    confirmed: Instant,
    /// How long it lives from then on; `None`: until it is released.
    ttl: Option<Duration>,
    /// The TTL to ask for.
    ask: Duration,
    /// The longest that was ever asked for: the store may keep the claim for as long.
    longest: Duration,
    /// Whether the lease shall end for itself from now on.
    isolated: bool,
    /// Whether it was handed over for a short time and has not been renewed since.
    handed_over: bool,
    renew_at: Option<Instant>,
    standing: Standing,
    /// Whether somebody is to be told of that, once nothing is locked.
    news: bool,
    /// When the loss was told, once its time was up.
    expired_at: Option<Instant>,
}

/// How a lease stands.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Standing {
    /// Held, and renewed in time.
    Held,
    /// Held until the deadline, but renewals are overdue.
    Jeopardy,
    /// Lost. This never changes again.
    Lost(Loss),
}

impl Tenure {
    pub(crate) fn new(
        id: u64,
        claim: Arc<Claim>,
        token: Option<Token>,
        confirmed: Instant,
        ttl: Option<Duration>,
        policy: Policy,
        process: Process,
    ) -> Tenure {
        let ask = claim.ttl;
        let state = State {
            confirmed,
            ttl,
            ask,
            longest: ask,
            isolated: claim.isolated,
            handed_over: token.is_some() && ttl.is_some_and(|ttl| ttl < ask),
            renew_at: None,
            standing: Standing::Held,
            news: false,
            expired_at: None,
        };
        let due = AtomicU64::new(0);
        Tenure { id, claim, token, policy, process, due, state: Mutex::new(state), changed: Notify::new() }
    }

    /// When the keeper looks at it, if it does.
    pub(crate) fn due(&self) -> Instant {
        Instant::from_nanos(self.due.load(Ordering::Relaxed))
    }

    pub(crate) fn set_due(&self, at: Instant) {
        self.due.store(at.as_nanos(), Ordering::Relaxed);
    }

    /// Sets the first renewal; says when to look first.
    pub(crate) fn begin(&self, jitter: f64) -> Instant {
        let mut state = lock(&self.state);
        let renew_at = self.next_renewal(&state, jitter);
        state.renew_at = Some(renew_at);
        self.deadline_of(&state).map_or(renew_at, |deadline| deadline.min(renew_at))
    }

    /// Notes that a request with another TTL goes out at `sent`. If that one is shorter, the deadline is from now on what
    /// it would be with it: the answer may get lost, or nobody wait for it.
    pub(crate) fn ask(&self, sent: Instant, ttl: Duration, jitter: f64) {
        let drift = self.policy.drift;
        let mut state = lock(&self.state);
        (state.ask, state.longest) = (ttl, state.longest.max(ttl));
        if state.ttl.is_some_and(|old| {
            lease::deadline(sent, ttl, drift) < lease::deadline(state.confirmed, old, drift)
        }) {
            (state.confirmed, state.ttl) = (sent, Some(ttl));
            let renew_at = self.next_renewal(&state, jitter);
            state.renew_at = state.renew_at.map(|at| at.min(renew_at));
        }
    }

    /// When the holder must stop claiming to hold; `None`: never.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.is_left() {
            return Some(Instant::from_nanos(0));
        }
        let state = lock(&self.state);
        self.deadline_of(&state)
    }

    /// When the store ends the claim by itself if nobody renews it: what was extended once may be kept for as long. `None`: never.
    pub(crate) fn runs_out(&self) -> Option<Instant> {
        let state = lock(&self.state);
        state.ttl.map(|ttl| lease::deadline(state.confirmed, ttl.max(state.longest), self.policy.drift))
    }

    /// From when on the store may have ended the claim by itself, as far as is known. `None`: never.
    pub(crate) fn may_end_at(&self) -> Option<Instant> {
        self.may_end(&lock(&self.state))
    }

    fn may_end(&self, state: &State) -> Option<Instant> {
        state.ttl.map(|ttl| lease::deadline(state.confirmed, ttl, self.policy.drift))
    }

    fn deadline_of(&self, state: &State) -> Option<Instant> {
        match (self.may_end(state), self.policy.hold_until) {
            (Some(lease), Some(cap)) => Some(lease.min(cap)),
            (lease, cap) => lease.or(cap),
        }
    }

    /// How the lease stands at `now`. A passed deadline is a loss, whether or not the keeper came to say so.
    pub(crate) fn standing(&self, now: Instant) -> Standing {
        if self.is_left() { Standing::Lost(left()) } else { self.standing_here(now) }
    }

    /// As [`Tenure::standing`], where it is known that this is the process that holds it: to ask costs a system call.
    pub(crate) fn standing_here(&self, now: Instant) -> Standing {
        self.change(|state| {
            self.expire(state, now);
            state.standing.clone()
        })
    }

    /// Whether this is a forked child of the process that holds it: the lock is its parent's.
    pub(crate) fn is_left(&self) -> bool {
        self.process.is_left()
    }

    /// Whether a loss was told. Of a place, which has no deadline, the store alone tells that.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(lock(&self.state).standing, Standing::Lost(_))
    }

    /// Waits until a loss is told, and says why.
    pub(crate) async fn lost(&self) -> Loss {
        loop {
            if let Standing::Lost(loss) = self.changed(|now| !matches!(now, Standing::Lost(_))).await {
                return loss;
            }
        }
    }

    /// When to free a claim whose time is up, should its holder not do so. It was told before, and has a moment to stop. Where the
    /// store ends what nobody renews, not sooner than that: it does not end what others keep alive with a lease that they share.
    pub(crate) fn outlived(&self, expires: bool) -> Option<Instant> {
        let state = lock(&self.state);
        let at = state.expired_at?;
        let stopped = at + lease::stop_within(self.claim.ttl);
        let capped = self.policy.hold_until.is_some_and(|cap| cap <= at);
        let ends = state.ttl.filter(|_| expires && !capped).map(|ttl| state.confirmed + ttl);
        Some(ends.map_or(stopped, |ends| ends.max(stopped)))
    }

    /// The claim as it is to be freed: what knows only its TTL knows for how long the store may keep it.
    pub(crate) fn leaving(&self) -> Arc<Claim> {
        let longest = lock(&self.state).longest;
        self.asked_with(longest, self.claim.isolated)
    }

    /// Nobody will look after the claim any more.
    pub(crate) fn abandon(&self) {
        self.change(|state| {
            if !matches!(state.standing, Standing::Lost(_)) {
                state.lose(Loss::new(LossKind::Unverifiable, "what renewed it in the background has ended"));
            }
        });
    }

    /// Changes the state, and tells of it when that is unlocked.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let (result, news) = {
            let mut state = lock(&self.state);
            (change(&mut state), std::mem::take(&mut state.news))
        };
        if news {
            apart(|| self.changed.notify_waiters());
        }
        result
    }

    /// Tells how the lease stands now, if nobody was told yet. To be called with nothing locked: a waker may drop a task with its guard.
    pub(crate) fn tell(&self) {
        self.change(|_| ());
    }

    /// Waits until the lease stands otherwise than `than`.
    pub(crate) async fn changed(&self, than: impl Fn(&Standing) -> bool) -> Standing {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let standing = match self.is_left() {
                true => Standing::Lost(left()),
                false => lock(&self.state).standing.clone(),
            };
            if !than(&standing) {
                return standing;
            }
            changed.await;
        }
    }

    /// Turns a passed deadline into a loss.
    fn expire(&self, state: &mut State, now: Instant) {
        if matches!(state.standing, Standing::Lost(_)) || self.token.is_none() {
            return;
        }
        let Some(deadline) = self.deadline_of(state).filter(|deadline| *deadline <= now) else { return };
        // Whichever came first: once a lease is over, another may have it.
        let loss = match self.policy.hold_until {
            Some(cap) if cap == deadline => Loss::new(LossKind::HeldTooLong, "its longest hold is over"),
            _ => Loss::new(LossKind::Expired, "no renewal was confirmed in time"),
        };
        state.expired_at = Some(now);
        state.lose(loss);
    }

    /// Takes the answer to a renewal that was sent at `sent`; says whether the claim is still there.
    pub(crate) fn answer(&self, renewal: Renewal, sent: Instant, now: Instant, jitter: f64) -> Result<()> {
        self.change(|state| self.take_answer(state, renewal, sent, now, jitter))
    }

    fn take_answer(
        &self,
        state: &mut State,
        renewal: Renewal,
        sent: Instant,
        now: Instant,
        jitter: f64,
    ) -> Result<()> {
        self.expire(state, now);
        if let Standing::Lost(loss) = &state.standing {
            return Err(Error::lost(&self.claim.name, loss.clone()));
        }
        match renewal {
            Renewal::Renewed(ttl) => {
                // Answers may overtake each other; only the latest request counts.
                if sent >= state.confirmed {
                    state.confirmed = sent;
                    state.ttl = ttl.or(self.policy.manual.then_some(state.ask));
                }
                state.handed_over = false;
                state.renew_at = Some(self.next_renewal(state, jitter));
                if state.standing == Standing::Jeopardy {
                    (state.standing, state.news) = (Standing::Held, true);
                }
                Ok(())
            }
            Renewal::Lost(loss) => {
                state.lose(loss.clone());
                Err(Error::lost(&self.claim.name, loss))
            }
            Renewal::Failed(error) => {
                // Counted from when it was sent: what hung for long is repeated at once.
                let pause = attempt(state).mul_f64(0.25 + 0.25 * jitter);
                if !self.policy.manual {
                    state.renew_at = Some((sent + pause).max(now));
                }
                Err(error)
            }
        }
    }

    /// The claim as it is to be renewed.
    pub(crate) fn asking(&self) -> Arc<Claim> {
        let State { ask: ttl, isolated, .. } = *lock(&self.state);
        self.asked_with(ttl, isolated)
    }

    fn asked_with(&self, ttl: Duration, isolated: bool) -> Arc<Claim> {
        if ttl == self.claim.ttl && isolated == self.claim.isolated {
            self.claim.clone()
        } else {
            Arc::new(Claim { ttl, isolated, ..(*self.claim).clone() })
        }
    }

    /// From the next renewal on, the lease shall end for itself: nobody will renew it together with others.
    pub(crate) fn isolate(&self) {
        lock(&self.state).isolated = true;
    }

    /// Whether it is a lease of its own, of the whole TTL, and hardly any of that has passed.
    pub(crate) fn is_new(&self, now: Instant) -> bool {
        let state = lock(&self.state);
        let whole = state.ttl.is_some_and(|ttl| ttl >= self.claim.ttl);
        self.claim.isolated && whole && now.since(state.confirmed) <= self.claim.ttl / 10
    }

    /// When it is to be renewed next, or looked at.
    fn next_renewal(&self, state: &State, jitter: f64) -> Instant {
        match state.ttl.filter(|_| !self.policy.manual) {
            // Never at once: a store may find no time left of a place.
            Some(ttl) => lease::renewal(state.confirmed, ttl, jitter).max(state.confirmed + MIN_ATTEMPT),
            None => state.confirmed + CHECK_EVERY,
        }
    }

    /// What the keeper has to do about this claim at `now`, and when to look again.
    pub(crate) fn review(&self, now: Instant) -> Review {
        let mut state = lock(&self.state);
        self.expire(&mut state, now);
        if matches!(state.standing, Standing::Lost(_)) {
            return Review { renew: None, news: state.news, next: None };
        }
        let ttl = state.ttl.unwrap_or(CHECK_EVERY);
        let is_due = state.renew_at.is_some_and(|at| at <= now + lease::coalesce(ttl));
        let renew = is_due.then(|| {
            let claim = self.asked_with(state.ask, state.isolated);
            Asking { claim, patience: patience(&state) }
        });
        if let Some(Asking { patience, .. }) = &renew {
            // Not due again before this attempt has failed or timed out.
            let attempt = if self.policy.manual { CHECK_EVERY } else { patience.mul_f64(1.5) };
            state.renew_at = Some(now + attempt);
        }
        if self.worry_at(&state).is_some_and(|at| at <= now) && state.standing == Standing::Held {
            (state.standing, state.news) = (Standing::Jeopardy, true);
        }
        let next = self.next_of(&state, now).unwrap_or(now + CHECK_EVERY);
        Review { renew, news: state.news, next: Some(next) }
    }

    /// When there will be something to do about this claim; `None`: now, since it is over.
    pub(crate) fn next_look(&self, now: Instant) -> Option<Instant> {
        let state = lock(&self.state);
        match state.standing {
            Standing::Lost(_) => None,
            Standing::Held | Standing::Jeopardy => self.next_of(&state, now),
        }
    }

    fn next_of(&self, state: &State, now: Instant) -> Option<Instant> {
        let worry = self.worry_at(state).filter(|at| *at > now);
        let deadline = self.deadline_of(state).filter(|_| self.token.is_some());
        [state.renew_at, worry, deadline].into_iter().flatten().min()
    }

    /// From when on a held lease is in jeopardy if it is not renewed.
    fn worry_at(&self, state: &State) -> Option<Instant> {
        let renewed = !self.policy.manual && self.token.is_some();
        state.ttl.filter(|_| renewed).map(|ttl| lease::jeopardy(state.confirmed, ttl))
    }
}

impl State {
    fn lose(&mut self, loss: Loss) {
        (self.standing, self.news) = (Standing::Lost(loss), true);
        self.renew_at = None;
    }
}

/// How long one attempt at a renewal may take. Never nothing: a store may find no time left of a place, and the keeper would ask for
/// it again and again without a pause.
fn patience(state: &State) -> Duration {
    match state.ttl.filter(|_| state.handed_over) {
        // Its time is short, but the way to the store is not shorter for that, and who only waited may have to connect first.
        Some(ttl) => ttl.min(MAX_ATTEMPT).max(MIN_ATTEMPT),
        None => attempt(state),
    }
}

/// The time of one attempt of several.
fn attempt(state: &State) -> Duration {
    backend::attempt(state.ttl.map_or(state.ask, |ttl| ttl.min(state.ask))).max(MIN_ATTEMPT)
}

/// What a forked child is told of its parent's lease.
fn left() -> Loss {
    Loss::new(LossKind::Unverifiable, "the lock is held by the process that this one was forked from")
}

/// A renewal that is due, or a look where nobody renews.
pub(crate) struct Asking {
    /// The claim as it is to be renewed.
    pub(crate) claim: Arc<Claim>,
    /// How long one attempt may take.
    pub(crate) patience: Duration,
}

/// What a look at a tenure found.
pub(crate) struct Review {
    pub(crate) renew: Option<Asking>,
    /// Whether [`Tenure::tell`] is to be called, once the keeper's schedule is unlocked.
    pub(crate) news: bool,
    /// When to look again; `None`: it is over.
    pub(crate) next: Option<Instant>,
}

#[cfg(test)]
mod tests;
