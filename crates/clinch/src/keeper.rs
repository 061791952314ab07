//! The keeper: renews leases before they run out and reports the ones it could not.
//!
//! One keeper serves all claims of one client, on the background lane, so that a blocked caller cannot lose a lock.
//! It knows nothing of guards or modes: it is given claims and tells their fate. Deadlines are computed in
//! [`lease`](crate::lease); this module only acts on them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{Backend, Grant, Renewal};
use crate::claim::{Claim, ClaimId, Loss};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::lease;
use crate::release::free;
use crate::sync::lock;
use crate::tenure::{CHECK_EVERY, Policy, Standing, Tenure};

/// Claims per call of [`Backend::renew`]: a trip's cost is well spread, and one answer stays small.
const RENEW_BATCH: usize = 256;

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
    due: BTreeMap<(Instant, u64), Arc<Tenure>>,
    running: bool,
    stopped: bool,
    armed: Option<Instant>,
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
        let place = Arc::new(Claim { place: true, ..(**claim).clone() });
        let policy = Policy { drift: self.env.drift(), manual: false, hold_until: None };
        self.keep(Tenure::new(self.shared.id(), place, None, sent, Some(ttl), policy))
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
        let next = tenure.begin(self.env.random().jitter());
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
                tenure.ask(sent, ttl);
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
                self.shared.look_again(std::slice::from_ref(tenure), now);
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

/// A claim that is being kept alive; dropping it ends that.
#[derive(Debug)]
pub(crate) struct Kept {
    shared: Arc<Shared>,
    pub(crate) tenure: Arc<Tenure>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        lock(&self.shared.schedule).take(&self.tenure);
    }
}

impl Schedule {
    fn put(&mut self, next: Instant, tenure: Arc<Tenure>) {
        tenure.set_due(next);
        self.due.insert((next, tenure.id), tenure);
    }

    fn take(&mut self, tenure: &Tenure) -> Option<Arc<Tenure>> {
        self.due.remove(&(tenure.due(), tenure.id))
    }

    /// The first, if it is due by then.
    fn take_due(&mut self, by: Instant) -> Option<Arc<Tenure>> {
        let first = self.due.first_entry()?;
        (first.key().0 <= by).then(|| first.remove())
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

    /// Has the keeper's task look at claims again, as far as they are still kept.
    fn look_again(&self, tenures: &[Arc<Tenure>], now: Instant) {
        let mut schedule = lock(&self.schedule);
        for tenure in tenures {
            if let Some(tenure) = schedule.take(tenure) {
                let next = tenure.next_look(now).unwrap_or(now);
                schedule.put(next, tenure);
                self.arm(&mut schedule, next);
            }
        }
    }

    /// Tells the holders of claims what the store said of them.
    fn tell(&self, losses: Vec<(ClaimId, Loss)>, env: &Env) {
        let losses: HashMap<ClaimId, Loss> = losses.into_iter().collect();
        let kept: Vec<Arc<Tenure>> = lock(&self.schedule).due.values().cloned().collect();
        for tenure in kept {
            let Some(loss) = losses.get(&tenure.claim.id) else { continue };
            let now = env.now();
            let _ = tenure.answer(Renewal::Lost(loss.clone()), now, now, env.random().jitter());
            self.look_again(&[tenure], now);
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
        let (mut due, mut by) = (Vec::new(), now);
        while let Some(tenure) = schedule.take_due(by) {
            due.push(tenure);
            by = horizon;
        }
        for tenure in due {
            match tenure.review(now) {
                Some(review) => {
                    if review.renew {
                        renew.push(tenure.clone());
                    }
                    schedule.put(review.next, tenure);
                }
                // What the store would keep longer than the holder may is freed now that its time is over. Whoever was told of
                // another loss is still stopping, and frees it then.
                None if tenure.policy.hold_until.is_some_and(|cap| cap <= now)
                    || !expires && tenure.has_expired() =>
                {
                    free.push(tenure)
                }
                None => {}
            }
        }
        schedule.armed = schedule.due.first_key_value().map(|((at, _), _)| *at);
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
        for batch in batches(&*shared.backend, todo.renew) {
            // Each in its own task: one that hangs on a slow server delays no other.
            tokio::spawn(renew(shared.clone(), env.clone(), batch));
        }
        for tenure in todo.free {
            tokio::spawn(free_outheld(shared.clone(), env.clone(), tenure));
        }
        let next = todo.next.unwrap_or_else(|| env.now() + CHECK_EVERY);
        tokio::select! {
            () = shared.kick.notified() => {}
            losses = shared.backend.lost() => shared.tell(losses, &env),
            () = env.sleep_until(next) => {}
        }
    }
}

/// Splits renewals into batches of which each concerns one server.
fn batches(backend: &dyn Backend, renew: Vec<Arc<Tenure>>) -> impl Iterator<Item = Vec<Arc<Tenure>>> {
    let mut shards: BTreeMap<u64, Vec<Arc<Tenure>>> = BTreeMap::new();
    for tenure in renew {
        shards.entry(backend.shard(&tenure.claim.name)).or_default().push(tenure);
    }
    let chunks = |shard: Vec<Arc<Tenure>>| shard.chunks(RENEW_BATCH).map(<[_]>::to_vec).collect::<Vec<_>>();
    shards.into_values().flat_map(chunks)
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
    let now = env.now();
    for tenure in &batch {
        let answer = answers.next().unwrap_or_else(|| Renewal::Failed(no_answer()));
        // A failure is retried at the instant that `answer` has set, and told when the deadline passes.
        let _ = tenure.answer(answer, sent, now, env.random().jitter());
    }
    shared.look_again(&batch, now);
}

fn no_answer() -> Error {
    Error::new(ErrorKind::Unknown, "the store did not answer a renewal in time")
}
