//! The backend: steps of claims as transactions.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;

use super::claims::{Claims, Known, session_ended};
use super::client::Client;
use super::enter::Entered;
use super::free::Stand;
use super::keys;
use super::record::Place;
use super::session::{Session, Sessions};
use super::step::Step;
use super::view::View;
use super::watch::Watcher;
use super::wire::{self, KeyValue};
use crate::backend::{self, Backend, Capabilities, Freed, LockState, Progress, Renewal, Wake};
use crate::backends::times::GUARD;
use crate::check::Check;
use crate::claim::{Claim, ClaimId, Loss, LossKind, Mode};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::sync::lock;

/// How long a watch may take to open before the waiter reads for itself, and again after as long.
const OPEN_FOR: Duration = Duration::from_secs(2);

/// How often one step is begun anew when leases end under it.
const TURNS: usize = 16;

/// A renewal of a lease as recent as this part of its TTL is as good as another: so claims that are renewed one by one,
/// at moments spread over a thirtieth of the TTL, share one.
const SHARED_FOR: u32 = 16;

/// But not for longer than this, whatever the TTL: an eviction may have come after it, and a renewal may be what tells of it.
const PROOF_FOR: Duration = Duration::from_secs(1);

/// A store on etcd.
#[derive(Clone)]
pub(super) struct Store {
    pub(super) client: Arc<Client>,
    pub(super) watcher: Arc<Watcher>,
    pub(super) claims: Arc<Claims>,
    pub(super) sessions: Arc<Sessions>,
}

impl Store {
    pub(super) fn new(client: Arc<Client>) -> Store {
        let watcher = Watcher::new(client.clone());
        let claims = Arc::<Claims>::default();
        let sessions = Sessions::new(client.clone(), watcher.clone(), claims.clone());
        Store { client, watcher, claims, sessions }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.client.settings.prefix
    }

    pub(super) fn queue(&self, name: &LockName) -> Vec<u8> {
        keys::queue(self.prefix(), name)
    }

    pub(super) fn now(&self) -> Instant {
        self.client.env.now()
    }

    /// Waits until what stands in a claim's way has changed.
    async fn watch(&self, claim: &Claim, view: &View) -> Result<Wake> {
        let Some(known) = self.claims.get(claim.id) else { return Ok(Wake::Step) };
        let subscription = {
            let mut progress = lock(&view.progress);
            match (&progress.subscription, view.ahead.last()) {
                (Some(subscription), _) => subscription.clone(),
                (None, None) => return Ok(Wake::Step),
                (None, Some(last)) => {
                    let queue = self.queue(&claim.name);
                    let key = if view.watches_all() { &queue } else { &last.key };
                    let subscription = Arc::new(self.watcher.read(key, view.watches_all())?);
                    progress.subscription = Some(subscription.clone());
                    subscription
                }
            }
        };
        let begun = self.now();
        loop {
            if self.claims.with(claim.id, Known::is_good) != Some(true) {
                return Ok(Wake::Step);
            }
            let news = subscription.news();
            if let Some(refused) = news.refused {
                return Err(refused);
            }
            let anew = {
                let mut progress = lock(&view.progress);
                std::mem::replace(&mut progress.opened, news.opened) != news.opened
            };
            // What happened before it was opened, but after the last read, nobody tells; and if it is behind that, it may be another etcd.
            if view.follow(news.changes.iter().map(Arc::as_ref)) || anew && news.since != view.revision {
                return Ok(Wake::Step);
            }
            let patience = begun + if news.opened == 0 { OPEN_FOR } else { GUARD };
            let look = view.closed_until.map_or(patience, |open| patience.min(open));
            tokio::select! {
                biased;
                () = subscription.told() => {}
                () = view.woken.notified() => {}
                () = known.carrier().over() => return Ok(Wake::Step),
                () = self.client.env.sleep_until(look) => {
                    self.open_again(view).await?;
                    return Ok(Wake::Step);
                }
            }
        }
    }

    /// Renews claims that hang on one lease.
    async fn renew_session(
        &self,
        session: Arc<Session>,
        claims: &[(usize, &Claim)],
    ) -> Vec<(usize, Renewal)> {
        let failed =
            |error: Error| claims.iter().map(|(at, _)| (*at, Renewal::Failed(error.again()))).collect();
        let now = self.now();
        let is_kept = match self.keep_lately(&session).await {
            Ok(kept) => kept.is_some(),
            Err(error) => return failed(error),
        };
        if is_kept {
            self.keep_those_to_be(claims);
        }
        // The engine counts from before this call; the server, perhaps, from a moment before that.
        let left = session.left(now, self.client.env.drift());
        let is_kept = is_kept && !session.is_over();
        let (mut answers, mut unsettled) = (Vec::with_capacity(claims.len()), Vec::new());
        for (at, claim) in claims {
            // It may have been moved meanwhile.
            let is_renewed = is_kept && session.suffices(claim) && self.claims.rests_on(claim.id, &session);
            let answer = match is_renewed {
                true => Some(Renewal::Renewed(Some(claim.ttl.min(left)))),
                false => self.not_renewed(claim, now),
            };
            match answer {
                Some(answer) => answers.push((*at, answer)),
                None => unsettled.push((*at, *claim)),
            }
        }
        let settled =
            unsettled.into_iter().map(async |(at, claim)| (at, self.settle_on_lease(claim, now).await));
        answers.extend(join_all(settled).await);
        answers
    }

    /// The answer for one claim that no renewal of a lease has renewed. `None`: it has to be settled first on which lease it hangs.
    fn not_renewed(&self, claim: &Claim, now: Instant) -> Option<Renewal> {
        let answer = self.claims.with(claim.id, |known| {
            let is_over = known.carrier().is_over() && (claim.place || known.moves.are_settled());
            match &known.lost {
                Some(loss) => Some(Renewal::Lost(loss.clone())),
                None if is_over => Some(Renewal::Lost(session_ended())),
                // Its key is moved by who waits alone: it lives for as long as where it may hang.
                None if claim.place => Some(Renewal::Renewed(Some(self.left_of(claim, known, now)))),
                None => None,
            }
        });
        let released = || Error::new(ErrorKind::Unknown, "the claim was just released");
        answer.unwrap_or_else(|| Some(Renewal::Failed(released())))
    }

    /// Renews a lease unless that was just done, and says when; `None`: it is gone.
    pub(super) async fn keep_lately(&self, session: &Arc<Session>) -> Result<Option<Instant>> {
        self.sessions.keep(session, (session.ttl / SHARED_FOR).min(PROOF_FOR)).await
    }

    /// Keeps the leases that are to carry waiting claims, so that a grant needs not wait for one. In the background, for whoever
    /// asked for a renewal has little time.
    fn keep_those_to_be(&self, claims: &[(usize, &Claim)]) {
        let waiting = claims.iter().filter(|(_, claim)| claim.place);
        let to_be = |known: &Known| {
            let session = &known.session;
            (known.place.is_some() && !session.is_over()).then(|| (session.lease, session.clone()))
        };
        let sessions: HashMap<i64, Arc<Session>> =
            waiting.filter_map(|(_, claim)| self.claims.with(claim.id, to_be)?).collect();
        for session in sessions.into_values() {
            let all = self.sessions.clone();
            // One that cannot be kept is opened anew when it is needed.
            let _ = self.client.env.lane().spawn(async move {
                let _ = all.keep(&session, session.ttl / 3).await;
            });
        }
    }
}

#[async_trait]
impl Backend for Store {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fencing: true,
            queue: true,
            fifo: true,
            shared: true,
            permits: true,
            push: true,
            expiry: true,
            detached: true,
            linger: true,
            processes: true,
            hosts: true,
            restart: true,
            failover: true,
            ..Capabilities::default()
        }
    }

    async fn examine(&self) -> Vec<Check> {
        self.examine_all().await
    }

    async fn claim(&self, claim: &Claim) -> Result<Progress> {
        let step = Step::new(self.client.env.clock());
        self.claims.steps(claim.id, Some(&step));
        let taken = step.take(async {
            for _ in 0..TURNS {
                match self.enter(claim, &step).await? {
                    Entered::Done(Progress::Queued(busy)) if !claim.enqueue => {
                        let freed = self.free(claim, Duration::ZERO).await;
                        // Until it is freed, it has a place.
                        freed.map_err(|error| {
                            Error::new(ErrorKind::Unknown, error.to_string()).with_source(error)
                        })?;
                        return Ok(Progress::Busy(busy));
                    }
                    Entered::Done(progress) => return Ok(progress),
                    Entered::Again => {}
                }
            }
            Err(Error::new(
                ErrorKind::Unavailable,
                "the claim was begun anew again and again, for etcd ended its leases or answered too late; is it overloaded?",
            ))
        });
        let progress = taken.await?;
        self.claims.steps(claim.id, None);
        Ok(progress)
    }

    fn forget(&self, claim: &Claim) {
        self.claims.answered(claim.id);
        self.claims.forget_isolated(claim.id, self.now());
        self.sessions.closings.forget(claim.id);
    }

    async fn wait(&self, claim: &Claim) -> Result<Wake> {
        match self.claims.view(claim.id) {
            Some(view) => self.watch(claim, &view).await,
            None => Ok(Wake::Step),
        }
    }

    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        let mut sessions: HashMap<i64, (Arc<Session>, Vec<(usize, &Claim)>)> = HashMap::new();
        let (mut detached, mut answers) = (Vec::new(), Vec::new());
        for (at, claim) in claims.iter().enumerate() {
            let grouped = self.claims.with_carrier(claim.id, |session| {
                let group = sessions.entry(session.lease).or_insert_with(|| (session.clone(), Vec::new()));
                group.1.push((at, &**claim));
            });
            match grouped {
                Some(()) => {}
                // It is taken anew by the waiter's next step.
                None if claim.place => answers.push((at, Renewal::Lost(deleted()))),
                None => detached.push((at, claim)),
            }
        }
        // Side by side, for the engine waits for all of them as long as for one.
        let sessions = sessions.into_values();
        let sessions =
            sessions.map(|(session, group)| async move { self.renew_session(session, &group).await });
        let detached = detached.into_iter().map(|(at, claim)| async move {
            (at, self.renew_detached(claim).await.unwrap_or_else(Renewal::Failed))
        });
        let (kept, detached) = tokio::join!(join_all(sessions), join_all(detached));
        answers.extend(kept.into_iter().flatten().chain(detached));
        // One for each claim.
        answers.sort_unstable_by_key(|(at, _)| *at);
        answers.into_iter().map(|(_, renewal)| renewal).collect()
    }

    async fn lost(&self) -> Vec<(ClaimId, Loss)> {
        self.claims.losses().await
    }

    async fn verify(&self, claim: &Claim) -> Result<Renewal> {
        let Some(known) = self.claims.get(claim.id) else {
            return Ok(match self.find(&claim.name, claim.id).await? {
                Some(place) => Renewal::Renewed(self.left(place.lease).await?),
                None => Renewal::Lost(deleted()),
            });
        };
        if let Some(loss) = known.lost {
            return Ok(Renewal::Lost(loss));
        }
        let now = self.now();
        // Half of the time that whoever looks has, so that there is some to ask another.
        let patience = backend::MAX_ATTEMPT / 2;
        let found = self.client.prove(vec![wire::get(&known.key)], patience).await?;
        let is_own =
            |kv: &KeyValue| Some(kv.create_revision) == known.created && !Place::read(kv).is_closed();
        let own = found.ranges.first().and_then(|range| range.kvs.first());
        let Some(own) = own.filter(|own| is_own(own)) else { return Ok(Renewal::Lost(deleted())) };
        let stand = Stand { created: own.create_revision, lease: own.lease };
        self.seen(claim.id, stand, found.revision);
        Ok(match self.claims.get(claim.id) {
            Some(known) if known.moves.astray().is_none() => {
                Renewal::Renewed(Some(known.left(now, self.client.env.drift())))
            }
            _ => Renewal::Renewed(self.left(own.lease).await?),
        })
    }

    async fn downgrade(&self, claim: &Claim) -> Result<()> {
        let value = super::record::of(claim, Mode::Shared, self.client.env.clock().wall())?;
        let Some(known) = self.claims.get(claim.id).filter(|known| known.is_good()) else {
            return Err(Error::lost(&claim.name, deleted()));
        };
        match self.rewrite(claim, &known, value).await? {
            true => Ok(()),
            false => Err(Error::lost(&claim.name, deleted())),
        }
    }

    async fn release(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        self.free_for_good(claim, linger).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        self.list_all(prefix).await
    }

    async fn state(&self, name: &LockName) -> Result<Option<LockState>> {
        self.state_of(name).await
    }

    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed> {
        self.evict_claim(name, claim).await
    }

    async fn close(&self) {
        self.sessions.close().await;
    }

    fn key(&self, claim: ClaimId) -> Option<String> {
        let known = self.claims.get(claim)?;
        known.created?;
        std::str::from_utf8(&known.key).ok().map(str::to_owned)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("prefix", &self.prefix()).finish_non_exhaustive()
    }
}

pub(super) fn deleted() -> Loss {
    Loss::new(LossKind::Deleted, "etcd no longer has the claim's key")
}
