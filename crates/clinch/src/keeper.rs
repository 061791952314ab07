//! The keeper: renews leases before they run out and reports the ones it could not.
//!
//! One keeper serves all claims of one client, on the background lane, so that a blocked caller cannot lose a lock.
//! It knows nothing of guards or modes: it is given claims and tells their fate. Deadlines are computed in
//! [`lease`](crate::lease); this module only acts on them.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{Backend, Grant, Renewal};
use crate::claim::{Claim, Loss, LossKind};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::lease;
use crate::release::free;
use crate::sync::lock;
use crate::token::Token;

/// Claims per call of [`Backend::renew`]: a trip's cost is well spread, and one answer stays small.
const RENEW_BATCH: usize = 256;

/// How often a lease that never expires is looked at, in case somebody deleted it by hand.
const CHECK_EVERY: Duration = Duration::from_secs(2);

/// Renews the claims of one client.
#[derive(Debug)]
pub(crate) struct Keeper {
    shared: Arc<Shared>,
    env: Env,
}

#[derive(Debug)]
struct Shared {
    backend: Arc<dyn Backend>,
    schedule: Mutex<Schedule>,
    next_id: AtomicU64,
    /// Wakes the keeper's task: something is due earlier than what it waits for, or it shall stop.
    kick: Notify,
}

/// What to look at when.
#[derive(Debug, Default)]
struct Schedule {
    due: BTreeSet<(Instant, u64)>,
    tenures: HashMap<u64, (Instant, Arc<Tenure>)>,
    running: bool,
    stopped: bool,
    armed: Option<Instant>,
}

/// A claim's time in the store, queued or held, as far as it is known here.
#[derive(Debug)]
pub(crate) struct Tenure {
    id: u64,
    pub(crate) claim: Arc<Claim>,
    pub(crate) token: Option<Token>,
    policy: Policy,
    state: Mutex<State>,
    changed: Notify,
}

/// How long a lease may be kept.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Policy {
    /// Never renewed unless asked.
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
    renew_at: Option<Instant>,
    standing: Standing,
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
    /// When the holder must stop claiming to hold; `None`: never.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let state = lock(&self.state);
        self.deadline_of(&state)
    }

    fn deadline_of(&self, state: &State) -> Option<Instant> {
        let lease = state.ttl.map(|ttl| lease::deadline(state.confirmed, ttl));
        match (lease, self.policy.hold_until) {
            (Some(lease), Some(cap)) => Some(lease.min(cap)),
            (lease, cap) => lease.or(cap),
        }
    }

    /// How the lease stands at `now`. A passed deadline is a loss, whether or not the keeper came to say so.
    pub(crate) fn standing(&self, now: Instant) -> Standing {
        let mut state = lock(&self.state);
        self.expire(&mut state, now);
        state.standing.clone()
    }

    /// Waits until the lease stands otherwise than `than`.
    pub(crate) async fn changed(&self, than: impl Fn(&Standing) -> bool) -> Standing {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let standing = lock(&self.state).standing.clone();
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
        if self.policy.hold_until.is_some_and(|cap| cap <= now) {
            self.lose(state, Loss::new(LossKind::Expired, "held for as long as it may be"));
        } else if self.deadline_of(state).is_some_and(|deadline| deadline <= now) {
            self.lose(state, Loss::new(LossKind::Expired, "no renewal was confirmed in time"));
        }
    }

    fn lose(&self, state: &mut State, loss: Loss) {
        state.standing = Standing::Lost(loss);
        state.renew_at = None;
        self.changed.notify_waiters();
    }

    /// Takes the answer to a renewal that was sent at `sent`; says whether the claim is still there.
    fn answer(&self, renewal: Renewal, sent: Instant, now: Instant, jitter: f64) -> Result<()> {
        let mut state = lock(&self.state);
        self.expire(&mut state, now);
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
                state.renew_at = self.next_renewal(&state, jitter);
                if state.standing == Standing::Jeopardy {
                    state.standing = Standing::Held;
                    self.changed.notify_waiters();
                }
                Ok(())
            }
            // A place in the queue that is gone is taken again by the waiter's own next step.
            Renewal::Lost(_) if self.token.is_none() => {
                state.renew_at = self.next_renewal(&state, jitter);
                Ok(())
            }
            Renewal::Lost(loss) => {
                self.lose(&mut state, loss.clone());
                Err(Error::lost(&self.claim.name, loss))
            }
            Renewal::Failed(error) => {
                let pause = lease::attempt(state.ttl.unwrap_or(CHECK_EVERY)).mul_f64(0.25 + 0.25 * jitter);
                state.renew_at = (!self.policy.manual).then_some(now + pause);
                Err(error)
            }
        }
    }

    /// The claim as it is to be renewed.
    fn asking(&self) -> Arc<Claim> {
        let ttl = lock(&self.state).ask;
        if ttl == self.claim.ttl {
            self.claim.clone()
        } else {
            Arc::new(Claim { ttl, ..(*self.claim).clone() })
        }
    }

    fn next_renewal(&self, state: &State, jitter: f64) -> Option<Instant> {
        match state.ttl {
            _ if self.policy.manual => None,
            Some(ttl) => Some(lease::renewal(state.confirmed, ttl, jitter)),
            None => Some(state.confirmed + CHECK_EVERY),
        }
    }

    /// What the keeper has to do about this claim at `now`, and when to look again; `None`: it is over.
    fn review(&self, now: Instant) -> Option<Review> {
        let mut state = lock(&self.state);
        self.expire(&mut state, now);
        if matches!(state.standing, Standing::Lost(_)) {
            return None;
        }
        let ttl = state.ttl.unwrap_or(CHECK_EVERY);
        let renew = state.renew_at.is_some_and(|at| at <= now + lease::coalesce(ttl));
        if renew {
            // Not due again before this attempt has failed or timed out.
            state.renew_at = Some(now + lease::attempt(ttl).mul_f64(1.5));
        }
        let renewing = !self.policy.manual && self.token.is_some();
        let worry = state.ttl.filter(|_| renewing).map(|ttl| lease::jeopardy(state.confirmed, ttl));
        if worry.is_some_and(|at| at <= now) && state.standing == Standing::Held {
            state.standing = Standing::Jeopardy;
            self.changed.notify_waiters();
        }
        let deadline = self.deadline_of(&state).filter(|_| self.token.is_some());
        let worry = worry.filter(|at| *at > now);
        let next = [state.renew_at, worry, deadline].into_iter().flatten().min();
        Some(Review { renew, next: next.unwrap_or(now + CHECK_EVERY) })
    }
}

struct Review {
    renew: bool,
    next: Instant,
}

impl Keeper {
    pub(crate) fn new(backend: Arc<dyn Backend>, env: Env) -> Keeper {
        Keeper {
            shared: Arc::new(Shared {
                backend,
                schedule: Mutex::default(),
                next_id: AtomicU64::new(0),
                kick: Notify::new(),
            }),
            env,
        }
    }

    /// Keeps a place in the queue alive until it is dropped.
    pub(crate) fn keep_place(&self, claim: &Arc<Claim>, sent: Instant, ttl: Duration) -> Result<Kept> {
        self.keep(Tenure::new(self.shared.id(), claim.clone(), None, sent, Some(ttl), Policy::default()))
    }

    /// Keeps a granted lease alive until it is dropped or lost.
    pub(crate) fn keep_lease(
        &self,
        claim: &Arc<Claim>,
        grant: Grant,
        sent: Instant,
        policy: Policy,
    ) -> Result<Kept> {
        let from = grant.from.unwrap_or(sent);
        // What the store would keep for ever but nobody renews is kept for one TTL at a time.
        let ttl = grant.ttl.or(policy.manual.then_some(claim.ttl));
        self.keep(Tenure::new(self.shared.id(), claim.clone(), Some(grant.token), from, ttl, policy))
    }

    fn keep(&self, tenure: Tenure) -> Result<Kept> {
        let mut schedule = lock(&self.shared.schedule);
        let next = {
            let mut state = lock(&tenure.state);
            state.renew_at = tenure.next_renewal(&state, self.env.random().jitter());
            let deadline = tenure.deadline_of(&state);
            state.renew_at.into_iter().chain(deadline).min()
        };
        let tenure = Arc::new(tenure);
        if let Some(next) = next {
            if !schedule.running {
                self.env.lane().spawn(keep(self.shared.clone(), self.env.clone()))?;
                schedule.running = true;
            }
            schedule.put(next, tenure.clone());
            self.shared.arm(&mut schedule, next);
        }
        Ok(Kept { shared: self.shared.clone(), tenure })
    }

    /// Asks the store now: renews with `ttl`, or only reads when there is none.
    pub(crate) async fn confirm(&self, tenure: &Arc<Tenure>, ttl: Option<Duration>) -> Result<()> {
        let backend = &self.shared.backend;
        let sent = self.env.now();
        let answer = match ttl {
            None => backend.verify(&tenure.claim).await?,
            Some(ttl) => {
                lock(&tenure.state).ask = ttl;
                let mut answers = backend.renew(&[tenure.asking()]).await;
                answers.pop().unwrap_or_else(|| Renewal::Failed(no_answer()))
            }
        };
        match (answer, ttl) {
            // A read proves the lease as it is; it does not make it longer.
            (Renewal::Renewed(_), None) => match tenure.standing(self.env.now()) {
                Standing::Lost(loss) => Err(Error::lost(&tenure.claim.name, loss)),
                Standing::Held | Standing::Jeopardy => Ok(()),
            },
            (answer, _) => {
                let now = self.env.now();
                let result = tenure.answer(answer, sent, now, self.env.random().jitter());
                self.shared.look_again(tenure, now);
                result
            }
        }
    }

    /// Ends the keeper's task; leases are then left to run out.
    pub(crate) fn stop(&self) {
        lock(&self.shared.schedule).stopped = true;
        self.shared.kick.notify_one();
    }
}

impl Tenure {
    fn new(
        id: u64,
        claim: Arc<Claim>,
        token: Option<Token>,
        confirmed: Instant,
        ttl: Option<Duration>,
        policy: Policy,
    ) -> Tenure {
        let ask = claim.ttl;
        let state = State { confirmed, ttl, ask, renew_at: None, standing: Standing::Held };
        Tenure { id, claim, token, policy, state: Mutex::new(state), changed: Notify::new() }
    }
}

/// A claim that is being kept alive; dropping it ends that.
#[derive(Debug)]
pub(crate) struct Kept {
    shared: Arc<Shared>,
    pub(crate) tenure: Arc<Tenure>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        lock(&self.shared.schedule).take(self.tenure.id);
    }
}

impl Schedule {
    fn put(&mut self, next: Instant, tenure: Arc<Tenure>) {
        self.due.insert((next, tenure.id));
        self.tenures.insert(tenure.id, (next, tenure));
    }

    fn take(&mut self, id: u64) -> Option<Arc<Tenure>> {
        let (next, tenure) = self.tenures.remove(&id)?;
        self.due.remove(&(next, id));
        Some(tenure)
    }
}

impl Shared {
    fn id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes sure that the keeper's task wakes by `next`.
    fn arm(&self, schedule: &mut Schedule, next: Instant) {
        if schedule.armed.is_none_or(|armed| next < armed) {
            schedule.armed = Some(next);
            self.kick.notify_one();
        }
    }

    /// Has the keeper's task look at a claim again, if it is still kept.
    fn look_again(&self, tenure: &Arc<Tenure>, now: Instant) {
        let mut schedule = lock(&self.schedule);
        if schedule.take(tenure.id).is_some() {
            schedule.put(now, tenure.clone());
            self.arm(&mut schedule, now);
        }
    }

    /// Reviews all that is due. `None`: stopped.
    fn review(&self, now: Instant) -> Option<Todo> {
        let mut schedule = lock(&self.schedule);
        if schedule.stopped {
            return None;
        }
        let expires = self.backend.capabilities().expiry;
        let (mut renew, mut free) = (Vec::new(), Vec::new());
        // Renewals may go out a little early to share a trip, so look as far ahead as any of them may.
        let horizon = now + lease::coalesce(lease::MAX_TTL);
        let due: Vec<u64> = match schedule.due.first() {
            Some((first, _)) if *first <= now => {
                schedule.due.iter().take_while(|(at, _)| *at <= horizon).map(|(_, id)| *id).collect()
            }
            _ => Vec::new(),
        };
        for id in due {
            let Some(tenure) = schedule.take(id) else { continue };
            match tenure.review(now) {
                Some(review) => {
                    if review.renew {
                        renew.push(tenure.clone());
                    }
                    schedule.put(review.next, tenure);
                }
                // What the store would keep longer than the holder may is freed now that the loss is told.
                None if tenure.policy.hold_until.is_some_and(|cap| cap <= now) || !expires => {
                    free.push(tenure)
                }
                None => {}
            }
        }
        schedule.armed = schedule.due.first().map(|(at, _)| *at);
        Some(Todo { renew, free, next: schedule.armed })
    }
}

/// What a review of the schedule found.
struct Todo {
    renew: Vec<Arc<Tenure>>,
    free: Vec<Arc<Tenure>>,
    next: Option<Instant>,
}

/// The keeper's task.
async fn keep(shared: Arc<Shared>, env: Env) {
    while let Some(todo) = shared.review(env.now()) {
        for batch in todo.renew.chunks(RENEW_BATCH) {
            // Each in its own task: one that hangs on a slow node delays no other.
            tokio::spawn(renew(shared.clone(), env.clone(), batch.to_vec()));
        }
        for tenure in todo.free {
            tokio::spawn(free_outheld(shared.clone(), env.clone(), tenure));
        }
        let next = todo.next.unwrap_or_else(|| env.now() + CHECK_EVERY);
        tokio::select! {
            () = shared.kick.notified() => {}
            () = env.sleep_until(next) => {}
        }
    }
}

/// Frees a claim that was held for as long as it may be: its loss was told, and the store need not wait for its TTL.
async fn free_outheld(shared: Arc<Shared>, env: Env, tenure: Arc<Tenure>) {
    let until = env.now() + tenure.claim.ttl;
    // If this fails, the lease runs out by itself, or with the guard's drop.
    let _ = free(&*shared.backend, &env, &tenure.claim, Duration::ZERO, until).await;
}

/// Renews one batch, once.
async fn renew(shared: Arc<Shared>, env: Env, batch: Vec<Arc<Tenure>>) {
    let claims: Vec<Arc<Claim>> = batch.iter().map(|tenure| tenure.asking()).collect();
    let patience = claims.iter().map(|claim| lease::attempt(claim.ttl)).min().unwrap_or(CHECK_EVERY);
    let sent = env.now();
    let mut answers = tokio::select! {
        biased;
        answers = shared.backend.renew(&claims) => answers,
        () = env.sleep_until(sent + patience) => Vec::new(),
    }
    .into_iter();
    for tenure in batch {
        let answer = answers.next().unwrap_or_else(|| Renewal::Failed(no_answer()));
        let now = env.now();
        // A failure is retried at the instant that `answer` has set, and told when the deadline passes.
        let _ = tenure.answer(answer, sent, now, env.random().jitter());
        shared.look_again(&tenure, now);
    }
}

fn no_answer() -> Error {
    Error::new(ErrorKind::Unknown, "the store did not answer a renewal in time")
}
