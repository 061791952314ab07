//! The keeper: renews leases before they run out and reports the ones it could not.
//!
//! One keeper serves all claims of one client, on the background lane, so that a blocked caller cannot lose a lock.
//! It knows nothing of guards or modes: it is given claims and tells their fate. Deadlines are computed in
//! [`lease`](crate::lease); this module only acts on them.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{Backend, Grant, MAX_ATTEMPT, Renewal, shard};
use crate::claim::{ByClaim, Claim, ClaimId, Loss};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::lane::caught;
use crate::lease;
use crate::process::Process;
use crate::release::Releases;
use crate::sync::lock;
use crate::tenure::{Asking, CHECK_EVERY, Policy, Standing, Tenure};
use crate::token::Token;

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
    releases: Arc<Releases>,
    /// Whether the store ends by itself what nobody renews.
    expires: bool,
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
    pub(crate) fn new(backend: Arc<dyn Backend>, env: Env, releases: Arc<Releases>) -> Keeper {
        Keeper {
            shared: Arc::new(Shared {
                expires: backend.capabilities().expiry,
                backend,
                releases,
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
        self.keep(place, None, sent, Some(ttl), policy)
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
        self.keep(claim.clone(), Some(grant.token), from, ttl, policy)
    }

    fn keep(
        &self,
        claim: Arc<Claim>,
        token: Option<Token>,
        from: Instant,
        ttl: Option<Duration>,
        policy: Policy,
    ) -> Result<Kept> {
        let tenure = Tenure::new(self.shared.id(), claim, token, from, ttl, policy, self.env.process());
        let next = tenure.begin(self.env.random().jitter());
        let kept = Kept { shared: self.shared.clone(), tenure: Arc::new(tenure), ended: false };
        let running = {
            let mut schedule = lock(&self.shared.schedule);
            schedule.put(next, kept.tenure.clone());
            self.shared.arm(&mut schedule, next);
            std::mem::replace(&mut schedule.running, true)
        };
        if !running {
            let keeping = Keeping(self.shared.clone(), self.env.process());
            self.env.lane().spawn(keep(keeping, self.env.clone()))?;
        }
        Ok(kept)
    }

    /// Asks the store now: renews with `ttl`, or only reads when there is none. What is lost is not asked for, nor waited for any
    /// longer: a renewal would only make the store keep it.
    pub(crate) async fn confirm(&self, tenure: &Arc<Tenure>, ttl: Option<Duration>) -> Result<()> {
        let sent = self.env.now();
        if let Standing::Lost(loss) = tenure.standing(sent) {
            return Err(Error::lost(&tenure.claim.name, loss));
        }
        if let Some(ttl) = ttl {
            tenure.ask(sent, ttl, self.env.random().jitter());
            // Before anything is waited for: this future may be dropped, and the deadline be nearer than it was.
            self.shared.look_again(std::slice::from_ref(tenure), sent);
        }
        // After it is known what is asked for: what still asks for less was sent earlier.
        let sent = self.env.now();
        let answer = tokio::select! {
            biased;
            answer = self.shared.ask(tenure, ttl.is_some()) => answer?,
            loss = tenure.lost() => return Err(Error::lost(&tenure.claim.name, loss)),
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
    ended: bool,
}

impl Kept {
    /// Ends it, where it is known that this is the process that made it: to ask costs a system call.
    pub(crate) fn end(mut self) {
        self.ended = true;
        lock(&self.shared.schedule).take(&self.tenure);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // A forked child's copy of the schedule is nobody's, and may be locked for ever.
        if !self.ended && !self.tenure.is_left() {
            lock(&self.shared.schedule).take(&self.tenure);
        }
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

    /// Renews one claim, or reads whether it is there.
    async fn ask(&self, tenure: &Tenure, renew: bool) -> Result<Renewal> {
        if !renew {
            return self.backend.verify(&tenure.claim).await;
        }
        let mut answers = self.backend.renew(&[tenure.asking()]).await;
        Ok(answers.pop().unwrap_or_else(|| Renewal::Failed(no_answer())))
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
        let losses: ByClaim<Loss> = losses.into_iter().collect();
        let is_lost = |tenure: &&Arc<Tenure>| losses.contains_key(&tenure.claim.id);
        let lost: Vec<Arc<Tenure>> = lock(&self.schedule).due.values().filter(is_lost).cloned().collect();
        for tenure in lost {
            if let Some(loss) = losses.get(&tenure.claim.id) {
                self.tell_one(tenure, loss.clone(), env);
            }
        }
    }

    fn tell_one(&self, tenure: Arc<Tenure>, loss: Loss, env: &Env) {
        let now = env.now();
        let _ = tenure.answer(Renewal::Lost(loss), now, now, env.random().jitter());
        self.look_again(&[tenure], now);
    }

    /// Reviews all that is due. `None`: stopped.
    fn review(&self, now: Instant) -> Option<Todo> {
        let mut schedule = lock(&self.schedule);
        if schedule.stopped {
            return None;
        }
        let (mut tell, mut renew, mut look, mut free) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        // Renewals may go out a little early to share a trip, so look as far ahead as any of them may.
        let horizon = now + lease::coalesce(lease::MAX_TTL);
        let (mut due, mut by) = (Vec::new(), now);
        while let Some(tenure) = schedule.take_due(by) {
            due.push(tenure);
            by = horizon;
        }
        for tenure in due {
            let review = tenure.review(now);
            if review.news {
                tell.push(tenure.clone());
            }
            match review.renew {
                Some(_) if tenure.policy.manual => look.push(tenure.clone()),
                Some(asking) => renew.push((tenure.clone(), asking)),
                None => {}
            }
            match review.next {
                Some(next) => schedule.put(next, tenure),
                // What its holder may not have any more is freed for it a moment after the loss is told. Not what an operator
                // took: that is the next one's when its guard is dropped.
                None => match tenure.outlived(self.expires) {
                    Some(at) if at <= now => free.push(tenure),
                    Some(at) => schedule.put(at, tenure),
                    None => {}
                },
            }
        }
        // With nothing to keep it looks again some time, so that not every lease that is held shortly wakes it.
        let next = schedule.due.first_key_value().map_or(now + CHECK_EVERY, |((at, _), _)| *at);
        schedule.armed = Some(next);
        Some(Todo { tell, renew, look, free, next })
    }
}

/// What a review of the schedule found.
struct Todo {
    /// Those of which somebody is to be told.
    tell: Vec<Arc<Tenure>>,
    renew: Vec<(Arc<Tenure>, Asking)>,
    look: Vec<Arc<Tenure>>,
    free: Vec<Arc<Tenure>>,
    next: Instant,
}

/// The keeper's task, as its schedule sees it. However it ends, with the runtime that it ran on or by a panic, all claims are
/// told that nobody renews them any more, and the next claim starts another.
struct Keeping(Arc<Shared>, Process);

impl Drop for Keeping {
    fn drop(&mut self) {
        // A forked child drops its copy of a runtime; what it has of the schedule may be locked for ever.
        if self.1.is_left() {
            return;
        }
        let left = {
            let mut schedule = lock(&self.0.schedule);
            (schedule.running, schedule.armed) = (false, None);
            std::mem::take(&mut schedule.due)
        };
        left.into_values().for_each(|tenure| tenure.abandon());
    }
}

/// The keeper's task.
async fn keep(keeping: Keeping, env: Env) {
    let shared = &keeping.0;
    // Over all turns: what it has begun, as a question to the store, would be begun anew with each and may never come to its end.
    let mut told = pin!(news(&*shared.backend, &env));
    loop {
        // Before it is known what is asked for: who asks for another TTL meanwhile has asked later.
        let sent = env.now();
        let Some(todo) = shared.review(sent) else { return };
        todo.tell.iter().for_each(|tenure| tenure.tell());
        for batch in batches(&*shared.backend, todo.renew) {
            // Each in its own task: one that hangs on a slow server delays no other.
            env.process().spawn(renew(shared.clone(), env.clone(), batch, sent));
        }
        for tenure in todo.look {
            env.process().spawn(look(shared.clone(), env.clone(), tenure));
        }
        for tenure in todo.free {
            shared.releases.free_in_background(tenure.leaving(), tenure.runs_out());
        }
        tokio::select! {
            () = shared.kick.notified() => {}
            losses = &mut told => {
                shared.tell(losses, &env);
                told.set(news(&*shared.backend, &env));
            }
            () = env.sleep_until(todo.next) => {}
        }
    }
}

/// What the store tells of its own accord. After a panic it is not asked again until the keeper has had something to do.
async fn news(backend: &dyn Backend, env: &Env) -> Vec<(ClaimId, Loss)> {
    match caught(backend.lost()).await {
        Some(losses) => losses,
        None => {
            env.sleep_until(env.now() + CHECK_EVERY).await;
            Vec::new()
        }
    }
}

/// Renewals that share a trip.
#[derive(Default)]
struct Batch {
    tenures: Vec<Arc<Tenure>>,
    /// Of each what to ask for.
    claims: Vec<Arc<Claim>>,
    patience: Duration,
}

/// Splits renewals into batches of which each concerns one server and leases of about one length: a batch is given up when its
/// shortest lease cannot wait any more, and a long one must not lose its renewal by that.
fn batches(backend: &dyn Backend, renew: Vec<(Arc<Tenure>, Asking)>) -> impl Iterator<Item = Batch> {
    let mut alike: BTreeMap<(u64, u32), Vec<Batch>> = BTreeMap::new();
    for (tenure, Asking { claim, patience }) in renew {
        let length = patience.as_millis().max(1).ilog2();
        let batches = alike.entry((shard(backend, &claim.name), length)).or_default();
        if batches.last().is_none_or(|batch| batch.claims.len() == RENEW_BATCH) {
            batches.push(Batch { patience, ..Batch::default() });
        }
        let Some(batch) = batches.last_mut() else { continue };
        batch.tenures.push(tenure);
        batch.claims.push(claim);
        batch.patience = batch.patience.min(patience);
    }
    alike.into_values().flatten()
}

/// Renews one batch, once.
async fn renew(shared: Arc<Shared>, env: Env, batch: Batch, sent: Instant) {
    let answers = tokio::select! {
        biased;
        answers = caught(shared.backend.renew(&batch.claims)) => answers.unwrap_or_default(),
        () = env.sleep_until(sent + batch.patience) => Vec::new(),
    };
    let (now, mut answers) = (env.now(), answers.into_iter());
    // One for all: what was renewed together is due together again, and stands side by side in the schedule until then.
    let jitter = env.random().jitter();
    for tenure in &batch.tenures {
        let answer = answers.next().unwrap_or_else(|| Renewal::Failed(no_answer()));
        // A failure is retried at the instant that `answer` has set, and told when the deadline passes.
        let _ = tenure.answer(answer, sent, now, jitter);
    }
    shared.look_again(&batch.tenures, now);
}

/// Looks whether a lease that nobody renews is still there. That makes it no longer, and no answer proves nothing.
async fn look(shared: Arc<Shared>, env: Env, tenure: Arc<Tenure>) {
    let answer = tokio::select! {
        biased;
        answer = caught(shared.backend.verify(&tenure.claim)) => answer,
        () = env.sleep_until(env.now() + MAX_ATTEMPT) => None,
    };
    if let Some(Ok(Renewal::Lost(loss))) = answer {
        shared.tell_one(tenure, loss, &env);
    }
}

fn no_answer() -> Error {
    Error::new(ErrorKind::Unknown, "the store did not answer a renewal in time")
}

#[cfg(all(test, feature = "memory"))]
#[allow(clippy::unwrap_used, reason = "test code")]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::backends::memory::Memory;
    use crate::net::Tcp;
    use crate::{Clock, Lane, LockName, Mode, Owner, Random};

    #[tokio::test(start_paused = true)]
    async fn leases_that_are_held_shortly_do_not_each_wake_the_keeper() {
        let clock = Clock::simulated(SystemTime::UNIX_EPOCH);
        let lane = Lane::here().unwrap();
        let tcp = Tcp::new(clock, lane.clone());
        let env = Env::new(clock, Random::seeded(1), lane, Arc::new(tcp));
        let store: Arc<dyn Backend> = Arc::new(Memory::new(env.clone()));
        let keeper = Keeper::new(store.clone(), env.clone(), Releases::new(store, env.clone()));
        let ttl = Duration::from_secs(30);
        let claim = Arc::new(Claim {
            id: ClaimId::from_bits(1),
            name: LockName::new("job").unwrap(),
            mode: Mode::Exclusive,
            ttl,
            enqueue: false,
            place: false,
            isolated: false,
            owner: Arc::new(Owner { host: "h".into(), pid: 1, user: "u".into(), label: String::new() }),
        });
        let armed = || lock(&keeper.shared.schedule).armed;
        let grant = Grant { token: Token::new(1).unwrap(), ttl: Some(ttl), from: None };
        let policy = || Policy { drift: env.drift(), manual: false, hold_until: None };
        let hold = || keeper.keep_lease(&claim, grant, env.now(), policy()).unwrap().end();
        // The first starts the task, which finds nothing to keep.
        hold();
        env.sleep_until(env.now() + CHECK_EVERY / 4).await;
        let before = armed();
        assert!(before.is_some());
        hold();
        assert_eq!(armed(), before, "it is woken");
    }
}
