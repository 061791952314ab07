//! `memory://`: the executable specification of the model, for one process.
//!
//! A lock name is an ordered queue of claims; a claim lives until it is released or its lease runs out; it is granted
//! when all live claims ahead are compatible, and loses its place when it does not take that. Everything else is
//! bookkeeping. All other backends are compared with this.

use std::collections::btree_map::Entry::{Occupied, Vacant};
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::Notify;

use crate::backend::{
    Backend, Busy, Capabilities, ClaimState, Freed, Grant, LockState, NOTICE, Progress, Renewal, TAKE_WITHIN,
    Wake,
};
use crate::check::Check;
use crate::claim::{Claim, ClaimId, Loss, LossKind, Mode};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::lane::Lane;
use crate::name::LockName;
use crate::process::Own;
use crate::queue::{admits, agree_on_capacity};
use crate::sync::{apart, lock};
use crate::token::Token;
use crate::url::StoreUrl;

/// At how many names whoever brings one looks.
const LOOKS: usize = 3;

/// A store in this process's memory. Clones share it.
#[derive(Clone, Debug)]
pub struct Memory {
    env: Env,
    store: Arc<Mutex<Store>>,
    news: Arc<News>,
}

/// What is to be told to one client of its own accord.
#[derive(Debug, Default)]
struct News {
    losses: Mutex<Vec<(ClaimId, Loss)>>,
    come: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Store {
    /// The last ticket given; tickets are the fencing tokens.
    last: u64,
    queues: BTreeMap<LockName, Queue>,
    /// The name that was looked at last for its own sake.
    swept: Option<LockName>,
}

#[derive(Debug, Default)]
struct Queue {
    claims: Vec<Entry>,
    /// Until when nobody is granted anything.
    closed_until: Option<Instant>,
    /// Whom to wake when the store is unlocked: a waker may drop a task with its guard.
    called: Vec<Arc<Notify>>,
}

#[derive(Debug)]
struct Entry {
    claim: Claim,
    token: Token,
    granted: bool,
    /// Taken away by an operator. It keeps its room until its holder has released it, or its shortened lease ends.
    evicted: bool,
    since: SystemTime,
    expires: Instant,
    /// Until when a waiter that could be granted has to take it.
    take_by: Option<Instant>,
    woken: Arc<Notify>,
    client: Arc<News>,
}

/// Opens the store of a URL: `memory://` is a store of its own; `memory://NAME` is this process's store of that name, of which a
/// forked child has one of its own.
pub(crate) fn open_url(url: &StoreUrl, env: &Env) -> Result<Arc<dyn Backend>> {
    static STORES: Own<Mutex<HashMap<String, Memory>>> = Own::new();
    if !url.path.trim_matches('/').is_empty() {
        return Err(Error::invalid("memory:// takes a name at most, as in memory://tests"));
    }
    if url.authority.is_empty() {
        return Ok(Arc::new(Memory::new(env.clone())));
    }
    let mut stores = lock(STORES.get());
    // The table keeps a store that has a world of its own, so that no client's lane lives as long as the process.
    let store = stores.entry(url.authority.clone()).or_insert_with(|| Memory::new(Env::host(Lane::thread())));
    Ok(Arc::new(store.client(env.clone())))
}

impl Memory {
    /// An empty store in this world.
    pub fn new(env: Env) -> Memory {
        Memory { env, store: Arc::default(), news: Arc::default() }
    }

    /// Another client of the same store, in another world, whose clock must be the same: leases of all are judged by whoever looks.
    pub fn client(&self, env: Env) -> Memory {
        Memory { env, store: self.store.clone(), news: Arc::default() }
    }

    /// Looks at one queue as it is at this moment: what has expired is gone, and whoever that lets in is woken.
    fn at<T>(&self, name: &LockName, step: impl FnOnce(&mut Queue, &mut u64, Instant) -> T) -> T {
        let mut store = lock(&self.store);
        let now = self.env.now();
        let Store { last, queues, .. } = &mut *store;
        let (queue, comes) = match queues.entry(name.clone()) {
            Occupied(queue) => (queue.into_mut(), false),
            Vacant(room) => (room.insert(Queue::default()), true),
        };
        queue.expire(now);
        let result = step(queue, last, now);
        queue.wake(now);
        let called = std::mem::take(&mut queue.called);
        if queue.is_over(now) {
            queues.remove(name);
        }
        if comes {
            store.sweep(now);
        }
        drop(store);
        called.into_iter().for_each(|waiter| apart(|| waiter.notify_one()));
        result
    }
}

impl Store {
    /// Whoever brings a name looks at some, in turn: what lingers there, or was left, may be over, and that name never be used
    /// again. At more than one, since the next in turn may be the newest for ever.
    fn sweep(&mut self, now: Instant) {
        for _ in 0..LOOKS.min(self.queues.len()) {
            let after = self.swept.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
            let next = self.queues.range::<LockName, _>((after, Bound::Unbounded)).next();
            let Some((name, queue)) = next.or_else(|| self.queues.first_key_value()) else { return };
            let (name, is_over) = (name.clone(), queue.is_over(now));
            if is_over {
                self.queues.remove(&name);
            }
            self.swept = Some(name);
        }
    }
}

impl Queue {
    /// Whether nothing is left of it by then.
    fn is_over(&self, now: Instant) -> bool {
        self.claims.iter().all(|entry| entry.end() <= now)
            && self.closed_until.is_none_or(|until| until <= now)
    }

    fn expire(&mut self, now: Instant) {
        self.claims.retain(|entry| entry.end() > now);
        self.closed_until = self.closed_until.filter(|until| *until > now);
    }

    fn modes(&self) -> impl Iterator<Item = Mode> {
        self.claims.iter().map(|entry| entry.claim.mode)
    }

    fn position(&self, id: ClaimId) -> Option<usize> {
        self.claims.iter().position(|entry| entry.claim.id == id && !entry.evicted)
    }

    /// Whether the claim at this position is, or can be, granted.
    fn grants(&self, position: usize, mode: Mode) -> bool {
        if self.claims.get(position).is_some_and(|entry| entry.granted) {
            return true;
        }
        self.closed_until.is_none() && admits(self.modes().take(position), mode)
    }

    /// Wakes the claims that could be granted. Who does not take it loses its place in the end, for which the one behind it is
    /// to look out.
    fn wake(&mut self, now: Instant) {
        let (mut grants, mut called) = (true, false);
        for position in 0..self.claims.len() {
            let Some(mode) = self.claims.get(position).map(|entry| entry.claim.mode) else { return };
            grants = grants && self.grants(position, mode);
            let Some(entry) = self.claims.get_mut(position).filter(|entry| !entry.granted) else { continue };
            if !grants {
                entry.take_by = None;
                if std::mem::take(&mut called) {
                    self.called.push(entry.woken.clone());
                }
            } else if entry.take_by.is_none() {
                entry.take_by = Some(now + TAKE_WITHIN);
                called = true;
                self.called.push(entry.woken.clone());
            }
        }
    }

    /// Wakes the next in line, who sleeps until an end that is no longer the one that counts.
    fn hurry(&mut self) {
        let next = self.claims.iter().find(|entry| !entry.granted);
        self.called.extend(next.map(|next| next.woken.clone()));
    }

    /// Until when nobody holds and nobody is let in.
    fn closed(&self) -> Option<Instant> {
        let held = self.claims.iter().any(|entry| entry.granted && !entry.evicted);
        let evicted = self.claims.iter().filter(|entry| entry.evicted && !held).map(|entry| entry.expires);
        evicted.chain(self.closed_until).max()
    }

    fn busy(&self, position: usize, place_ttl: Option<Duration>, now: Instant) -> Busy {
        let ahead = u32::try_from(position).unwrap_or(u32::MAX);
        let holder = self.claims.first().map(|entry| entry.state(true, now));
        Busy { ahead, holder, place_ttl, ..Busy::default() }
    }
}

impl Entry {
    /// When it goes if nothing happens.
    fn end(&self) -> Instant {
        self.take_by.map_or(self.expires, |take_by| take_by.min(self.expires))
    }

    fn state(&self, granted: bool, now: Instant) -> ClaimState {
        ClaimState {
            id: self.claim.id,
            mode: self.claim.mode,
            granted,
            token: Some(self.token),
            owner: (*self.claim.owner).clone(),
            since: self.since,
            expires_in: Some(self.end().since(now)),
        }
    }
}

#[async_trait]
impl Backend for Memory {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fencing: true,
            fifo: true,
            queue: true,
            shared: true,
            permits: true,
            linger: true,
            push: true,
            expiry: true,
            detached: true,
            inline: true,
            ..Capabilities::default()
        }
    }

    async fn examine(&self) -> Vec<Check> {
        vec![Check::pass(
            "url",
            "the memory of this process: nobody else sees its locks, and they end with it",
        )]
    }

    async fn claim(&self, claim: &Claim) -> Result<Progress> {
        let wall = self.env.clock().wall();
        self.at(&claim.name, |queue, last, now| {
            agree_on_capacity(queue.modes(), claim.mode)?;
            let position = queue.position(claim.id).unwrap_or(queue.claims.len());
            let grants = queue.grants(position, claim.mode);
            if !grants && !claim.enqueue {
                return Ok(Progress::Busy(queue.busy(position, None, now)));
            }
            if position == queue.claims.len() {
                *last += 1;
                let token = Token::new(*last).ok_or_else(|| Error::invalid("tokens are used up"))?;
                queue.claims.push(Entry {
                    claim: claim.clone(),
                    token,
                    granted: false,
                    evicted: false,
                    since: wall,
                    expires: now,
                    take_by: None,
                    woken: Arc::default(),
                    client: self.news.clone(),
                });
            }
            let busy = queue.busy(position, Some(claim.ttl), now);
            let Some(entry) = queue.claims.get_mut(position) else { return Ok(Progress::Busy(busy)) };
            entry.expires = now + claim.ttl;
            if !grants {
                return Ok(Progress::Queued(busy));
            }
            if !entry.granted {
                (entry.granted, entry.take_by, entry.since) = (true, None, wall);
            }
            Ok(Progress::Granted(Grant { token: entry.token, ttl: Some(claim.ttl), from: None }))
        })
    }

    async fn wait(&self, claim: &Claim) -> Result<Wake> {
        // A claim is woken when it can be granted, or loses its place; what nobody tells of is a lease that runs out, or a closed
        // time.
        loop {
            let watch = self.at(&claim.name, |queue, _, _| {
                let position = queue.position(claim.id).filter(|at| !queue.grants(*at, claim.mode))?;
                let ahead = queue.claims.iter().take(position).map(Entry::end);
                Some((queue.claims.get(position)?.woken.clone(), ahead.chain(queue.closed_until).min()?))
            });
            let Some((woken, end)) = watch else { return Ok(Wake::Step) };
            tokio::select! {
                () = woken.notified() => {}
                () = self.env.sleep_until(end) => {}
            }
        }
    }

    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        let renew = |claim: &Claim| {
            self.at(&claim.name, |queue, _, now| match queue.position(claim.id) {
                Some(position) => {
                    if let Some(entry) = queue.claims.get_mut(position) {
                        // An older request may arrive after one that asked for more.
                        entry.expires = entry.expires.max(now + claim.ttl);
                    }
                    Renewal::Renewed(Some(claim.ttl))
                }
                None => gone(),
            })
        };
        claims.iter().map(|claim| renew(claim)).collect()
    }

    async fn lost(&self) -> Vec<(ClaimId, Loss)> {
        loop {
            let losses = std::mem::take(&mut *lock(&self.news.losses));
            if !losses.is_empty() {
                return losses;
            }
            self.news.come.notified().await;
        }
    }

    async fn verify(&self, claim: &Claim) -> Result<Renewal> {
        Ok(self.at(&claim.name, |queue, _, now| {
            let entry = queue.position(claim.id).and_then(|position| queue.claims.get(position));
            entry.map_or_else(gone, |entry| Renewal::Renewed(Some(entry.expires.since(now))))
        }))
    }

    async fn downgrade(&self, claim: &Claim) -> Result<()> {
        self.at(&claim.name, |queue, _, _| {
            let entry = queue.position(claim.id).and_then(|position| queue.claims.get_mut(position));
            match entry.filter(|entry| entry.granted) {
                Some(entry) => {
                    entry.claim.mode = Mode::Shared;
                    Ok(())
                }
                None => Err(Error::lost(&claim.name, loss())),
            }
        })
    }

    async fn release(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        Ok(self.at(&claim.name, |queue, _, now| {
            let there = queue.position(claim.id).is_some();
            queue.claims.retain(|entry| entry.claim.id != claim.id);
            if there && !linger.is_zero() {
                queue.closed_until = queue.closed_until.max(Some(now + linger));
                queue.hurry();
            }
            if there { Freed::Removed } else { Freed::Absent }
        }))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        let names: Vec<LockName> = lock(&self.store)
            .queues
            .keys()
            .filter(|name| name.as_str().starts_with(prefix))
            .cloned()
            .collect();
        let wall = self.env.clock().wall();
        let state = |name: LockName| {
            let (claims, closed_until) = self.at(&name, |queue, _, now| {
                let claims = queue.claims.iter().enumerate().filter(|(_, entry)| !entry.evicted);
                let claims = claims
                    .map(|(position, entry)| entry.state(queue.grants(position, entry.claim.mode), now));
                (claims.collect::<Vec<_>>(), queue.closed().map(|until| wall + until.since(now)))
            });
            LockState { name, claims, closed_until }
        };
        let states = names.into_iter().map(state);
        Ok(states.filter(|state| !state.claims.is_empty() || state.closed_until.is_some()).collect())
    }

    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed> {
        Ok(self.at(name, |queue, _, now| {
            queue.closed_until = None;
            let position = queue.position(claim);
            let Some(entry) = position.and_then(|position| queue.claims.get_mut(position)) else {
                return Freed::Absent;
            };
            queue.called.push(entry.woken.clone());
            if entry.granted {
                // Who waits takes a new place, and may have been granted that before its client would hear of the old one.
                entry.client.tell(claim);
                queue.called.push(entry.client.come.clone());
                (entry.evicted, entry.expires) = (true, entry.expires.min(now + NOTICE));
                queue.hurry();
            } else {
                queue.claims.retain(|entry| entry.claim.id != claim);
            }
            Freed::Removed
        }))
    }
}

impl News {
    fn tell(&self, claim: ClaimId) {
        lock(&self.losses).push((claim, loss()));
    }
}

fn gone() -> Renewal {
    Renewal::Lost(loss())
}

fn loss() -> Loss {
    Loss::new(LossKind::Deleted, "the store no longer has the claim")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locks::Locks;
    use crate::random::Random;

    /// What holds this lock.
    fn claim_of(memory: &Memory, name: &str) -> Claim {
        memory.at(&LockName::new(name).unwrap(), |queue, _, _| queue.claims.first().unwrap().claim.clone())
    }

    /// What a waiter has lost is a place. By the time that its client hears of that, it may have been granted another.
    #[tokio::test]
    async fn an_evicted_waiter_is_told_of_no_loss() {
        let env = Env::host(Lane::here().unwrap());
        let memory = Memory::new(env.clone());
        let locks = Locks::new(Arc::new(memory.clone()), env);
        let held = locks.mutex("job").unwrap().lock().await.unwrap();
        let claim = Claim { id: ClaimId::from_bits(1), enqueue: true, ..claim_of(&memory, "job") };
        assert!(matches!(memory.claim(&claim).await.unwrap(), Progress::Queued(_)));
        assert_eq!(memory.evict(&claim.name, claim.id).await.unwrap(), Freed::Removed);
        assert!(lock(&memory.news.losses).is_empty());
        assert_eq!(memory.evict(&claim.name, held.claim_id()).await.unwrap(), Freed::Removed);
        assert_eq!(lock(&memory.news.losses).len(), 1);
    }

    /// Of names that are used once, nobody asks again.
    #[tokio::test(start_paused = true)]
    async fn what_is_over_is_not_kept_for_a_name_that_nobody_uses_again() {
        let clock = crate::Clock::simulated(SystemTime::UNIX_EPOCH);
        let lane = Lane::here().unwrap();
        let net = Arc::new(crate::net::Tcp::new(clock, lane.clone()));
        let env = Env::new(clock, Random::seeded(1), lane, net);
        let memory = Memory::new(env.clone());
        let locks = Locks::new(Arc::new(memory.clone()), env.clone()).ttl(Duration::from_secs(10)).unwrap();
        for at in 0..500 {
            for what in ["closed", "left"] {
                let guard = locks.mutex(&format!("{what}/{at:04}")).unwrap().lock().await.unwrap();
                match what {
                    "closed" => drop(guard.release_closed(Duration::from_secs(10)).await.unwrap()),
                    _ => drop(guard.detach().await.unwrap()),
                }
            }
            env.sleep_until(env.now() + Duration::from_secs(1)).await;
        }
        let kept = lock(&memory.store).queues.len();
        assert!(kept < 60, "twenty at a time are not over, and {kept} are kept");
    }
}
