//! Freeing claims for sure: the one loop that repeats a release until the store has answered it, and what becomes of claims
//! whose release nobody answered for long.

use std::collections::hash_map::{Entry, HashMap};
use std::collections::{HashSet, VecDeque};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{self, Backend, Freed, LEFT_FOR};
use crate::claim::{ByClaim, Claim, ClaimId};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::lane::caught;
use crate::lease;
use crate::sync::{AtWork, apart, lock};

/// How long a release is repeated by a task of its own, and how long by a caller when the lease itself has no end.
const RELEASE_FOR: Duration = Duration::from_secs(30);

/// How many of those are remembered; a store that is away for long must not cost memory for each attempt.
const MOST_LEFT: usize = 4096;

/// How often one of those is tried while its server does not answer.
const TRY_LEFT_EVERY: Duration = Duration::from_secs(5);

/// How long one is waited for although its lease has run out: a store that answers again is asked within that time.
const MOMENT: Duration = Duration::from_millis(1500);

/// The releases of one client.
#[derive(Debug)]
pub(crate) struct Releases {
    backend: Arc<dyn Backend>,
    env: Env,
    state: Mutex<State>,
    /// Tells that one is over.
    done: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Each with the end of its lease, where that is known.
    under_way: ByClaim<Option<Instant>>,
    /// What nobody has answered yet, by [server](Backend::shard): one that is away delays the releases of no other.
    left: HashMap<u64, Left>,
}

/// What one server has not answered.
#[derive(Debug, Default)]
struct Left {
    /// Each with the time until which it is tried.
    claims: VecDeque<(Arc<Claim>, Instant)>,
    /// Whether a task tries them.
    swept: AtWork,
}

impl Left {
    /// The first, which becomes the last: what is tried is not what is given up for want of room.
    fn next(&mut self) -> Option<(Arc<Claim>, Instant)> {
        let next = self.claims.pop_front()?;
        self.claims.push_back(next.clone());
        Some(next)
    }

    fn remove(&mut self, id: ClaimId) {
        self.claims.retain(|(claim, _)| claim.id != id);
    }
}

impl Releases {
    pub(crate) fn new(backend: Arc<dyn Backend>, env: Env) -> Arc<Releases> {
        Arc::new(Releases { backend, env, state: Mutex::default(), done: Notify::new() })
    }

    /// Marks the release of a claim as under way, so that nobody else begins it; `None`: somebody did. `ends`: when its lease
    /// ends by itself, as far as that is known.
    pub(crate) fn begin(self: &Arc<Releases>, id: ClaimId, ends: Option<Instant>) -> Option<UnderWay> {
        let ends = self.known(ends);
        match lock(&self.state).under_way.entry(id) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => {
                vacant.insert(ends);
                Some(UnderWay(self.clone(), id))
            }
        }
    }

    /// When a lease ends by itself, as far as that is known.
    fn known(&self, ends: Option<Instant>) -> Option<Instant> {
        ends.filter(|_| self.backend.capabilities().expiry)
    }

    /// Until when a caller's release is worth repeating: when the lease has run out, there is nothing left to free. One attempt
    /// has its time in any case.
    pub(crate) fn until(&self, claim: &Claim, ends: Option<Instant>) -> Instant {
        let now = self.env.now();
        match self.backend.capabilities().expiry {
            true => ends.unwrap_or(now + claim.ttl).max(now + backend::attempt(claim.ttl)),
            false => now + RELEASE_FOR,
        }
    }

    /// Frees a claim, repeating what failed until `until`.
    ///
    /// When an attempt's answer was lost, it may have been applied, so a later "absent" then counts as removed. Not from `deadline` on: the
    /// lease may have ended by itself, and another have held since.
    pub(crate) async fn free(
        &self,
        claim: &Claim,
        linger: Duration,
        until: Instant,
        deadline: Option<Instant>,
    ) -> Result<Freed> {
        tokio::select! {
            biased;
            freed = self.repeat(claim, linger, until, deadline) => freed,
            () = self.env.sleep_until(until) => Err(unanswered(claim)),
        }
    }

    async fn repeat(
        &self,
        claim: &Claim,
        linger: Duration,
        until: Instant,
        deadline: Option<Instant>,
    ) -> Result<Freed> {
        let mut maybe_applied = false;
        let mut attempt = 0;
        loop {
            let error = match self.backend.release(claim, linger).await {
                Ok(Freed::Absent) if maybe_applied => {
                    let over = deadline.is_some_and(|deadline| deadline <= self.env.now());
                    return if over { Err(in_doubt(claim)) } else { Ok(Freed::Removed) };
                }
                Ok(freed) => return Ok(freed),
                Err(error) if !error.is_transient() => return Err(error),
                Err(error) => error,
            };
            maybe_applied |= error.kind() == ErrorKind::Unknown;
            let retry = self.env.now() + lease::backoff(attempt, self.env.random().jitter());
            if retry >= until {
                return Err(error);
            }
            self.env.sleep_until(retry).await;
            attempt += 1;
        }
    }

    /// Frees a claim in the background, or at once where the store needs no waiting. Works anywhere, also in a drop outside
    /// any runtime. Does nothing while a release of this claim is under way. `ends` as for [`Releases::begin`].
    pub(crate) fn free_in_background(self: &Arc<Releases>, claim: Arc<Claim>, ends: Option<Instant>) {
        if let Some(under_way) = self.begin(claim.id, ends) {
            self.go_on_in_background(under_way, claim, ends);
        }
    }

    /// As [`Releases::free_in_background`], for a claim whose release is under way.
    pub(crate) fn go_on_in_background(&self, under_way: UnderWay, claim: Arc<Claim>, ends: Option<Instant>) {
        // A renewal that was under way, too, may have moved it.
        let ends = self.known(ends);
        lock(&self.state).under_way.insert(claim.id, ends);
        let under_way = Arc::new(under_way);
        let mut begun: Pin<Box<dyn Future<Output = ()> + Send>> =
            Box::pin(release(under_way.clone(), claim.clone()));
        if self.backend.capabilities().inline
            && begun.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
        {
            return;
        }
        let begun = Mutex::new(Some(begun));
        // Without a background thread the claim is left to its lease.
        let _ = self.env.lane().run(move || {
            let begun = lock(&begun).take();
            begun.unwrap_or_else(|| Box::pin(release(under_way.clone(), claim.clone())))
        });
    }

    /// Whether a release is over: the store has answered it, or no repetition changes what it said.
    fn is_over(&self, claim: &Claim, freed: Option<Result<Freed>>) -> bool {
        match freed {
            Some(Ok(_)) => true,
            Some(Err(error)) if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported) => {
                self.forget(claim);
                true
            }
            Some(Err(_)) | None => false,
        }
    }

    fn forget(&self, claim: &Claim) {
        apart(|| self.backend.forget(claim));
    }

    /// Waits until nothing is under way; says how many were not answered until then. Those whose lease has ended by
    /// itself are waited for a moment only; not at all those that were refused or given no answer for so long that they are only tried now and then.
    pub(crate) async fn finish(&self, until: Instant) -> Result<(), usize> {
        let soon = self.env.now() + MOMENT;
        loop {
            let mut done = pin!(self.done.notified());
            done.as_mut().enable();
            let now = self.env.now();
            let (unanswered, wait) = {
                let state = lock(&self.state);
                let left = state.left.values().flat_map(|left| &left.claims);
                let left: HashSet<ClaimId> = left.map(|(claim, _)| claim.id).collect();
                let (mut unanswered, mut end) = (left.len(), None);
                for (_, ends) in state.under_way.iter().filter(|(id, _)| !left.contains(id)) {
                    unanswered += 1;
                    end = end.max(Some(ends.map_or(until, |ends| ends.max(soon).min(until))));
                }
                (unanswered, end.filter(|end| *end > now))
            };
            match wait {
                _ if unanswered == 0 => return Ok(()),
                None => return Err(unanswered),
                Some(end) => tokio::select! {
                    biased;
                    () = done => {}
                    () = self.env.sleep_until(end) => {}
                },
            }
        }
    }

    /// Keeps a claim whose release nobody answered to be tried again.
    fn leave(self: &Arc<Releases>, claim: Arc<Claim>) {
        let until = self.env.now() + claim.ttl.max(LEFT_FOR);
        let server = backend::shard(&*self.backend, &claim.name);
        let (sweeping, given_up) = {
            let mut state = lock(&self.state);
            let left = state.left.entry(server).or_default();
            left.remove(claim.id);
            left.claims.push_back((claim, until));
            let sweeping = left.swept.begin();
            let all: usize = state.left.values().map(|left| left.claims.len()).sum();
            let most = state.left.values_mut().max_by_key(|left| left.claims.len());
            (sweeping, most.filter(|_| all > MOST_LEFT).and_then(|left| left.claims.pop_front()))
        };
        if let Some((claim, _)) = given_up {
            self.forget(&claim);
        }
        if let Some(sweeping) = sweeping {
            let releases = Arc::downgrade(self);
            // Without a background thread, whatever is left next starts another.
            let _ = self.env.lane().run(move || sweep(releases.clone(), server, sweeping.clone()));
        }
    }

    /// Tries all that a server has left unanswered, one after another for as long as it answers.
    async fn try_left(self: &Arc<Releases>, server: u64) {
        let round = lock(&self.state).left.get(&server).map_or(0, |left| left.claims.len());
        for _ in 0..round {
            let next = lock(&self.state).left.get_mut(&server).and_then(Left::next);
            let Some((claim, until)) = next else { return };
            // Whoever releases it now may leave it here again.
            let Some(_under_way) = self.begin(claim.id, None) else { continue };
            let freed = caught(self.backend.release(&claim, Duration::ZERO)).await;
            let answered =
                freed.as_ref().is_some_and(|freed| !freed.as_ref().is_err_and(Error::is_transient));
            let mut over = self.is_over(&claim, freed);
            if !over && self.env.now() >= until {
                self.forget(&claim);
                over = true;
            }
            if let Some(left) = lock(&self.state).left.get_mut(&server).filter(|_| over) {
                left.remove(claim.id);
            }
            if !answered {
                return;
            }
        }
    }

    /// Ends a sweep that has nothing left to try.
    fn is_swept(&self, server: u64) -> bool {
        let mut state = lock(&self.state);
        let swept = state.left.get(&server).is_none_or(|left| left.claims.is_empty());
        if swept {
            state.left.remove(&server);
        }
        swept
    }
}

fn unanswered(claim: &Claim) -> Error {
    let message = format!("the store did not answer the release of lock \"{}\" in time", claim.name);
    Error::new(ErrorKind::Unknown, message)
}

fn in_doubt(claim: &Claim) -> Error {
    let message = format!(
        "lock \"{}\" is not held any more, and may have been lost before it was released",
        claim.name
    );
    Error::new(ErrorKind::Unknown, message)
}

/// A release under way, until this is dropped.
pub(crate) struct UnderWay(Arc<Releases>, ClaimId);

impl Drop for UnderWay {
    fn drop(&mut self) {
        // In a forked child it may be locked for ever.
        if self.0.env.process().is_left() {
            return;
        }
        lock(&self.0.state).under_way.remove(&self.1);
        apart(|| self.0.done.notify_waiters());
    }
}

/// Frees a claim, or leaves it to be tried again.
async fn release(under_way: Arc<UnderWay>, claim: Arc<Claim>) {
    let releases = &under_way.0;
    let until = releases.env.now() + RELEASE_FOR;
    let freed = caught(releases.free(&claim, Duration::ZERO, until, None)).await;
    if !releases.is_over(&claim, freed) {
        releases.leave(claim);
    }
}

/// Tries what a server has left unanswered now and then, for as long as the client lives.
async fn sweep(releases: Weak<Releases>, server: u64, _sweeping: Arc<()>) {
    while let Some(releases) = releases.upgrade() {
        releases.try_left(server).await;
        if releases.is_swept(server) {
            return;
        }
        let pause = TRY_LEFT_EVERY.mul_f64(0.5 + 0.5 * releases.env.random().jitter());
        let pause = releases.env.sleep_until(releases.env.now() + pause);
        // The client may end meanwhile.
        drop(releases);
        pause.await;
    }
}

#[cfg(all(test, feature = "memory"))]
#[allow(clippy::unwrap_used, reason = "test code")]
mod tests {
    use std::time::SystemTime;

    use async_trait::async_trait;

    use super::*;
    use crate::backend::{Capabilities, LockState, Progress, Renewal, Wake};
    use crate::backends::memory::Memory;
    use crate::{Clock, Lane, LockName, Mode, Owner, Random};

    fn env() -> Env {
        let clock = Clock::simulated(SystemTime::UNIX_EPOCH);
        let lane = Lane::here().unwrap();
        let net = Arc::new(crate::net::Tcp::new(clock, lane.clone()));
        Env::new(clock, Random::seeded(1), lane, net)
    }

    fn claim(bits: u128) -> Arc<Claim> {
        Arc::new(Claim {
            id: ClaimId::from_bits(bits),
            name: LockName::new("job").unwrap(),
            mode: Mode::Exclusive,
            ttl: Duration::from_secs(1),
            enqueue: false,
            place: false,
            isolated: false,
            owner: Arc::new(Owner { host: "h".into(), pid: 1, user: "u".into(), label: String::new() }),
        })
    }

    /// A store that fails all releases in one way, and notes what it is to forget.
    #[derive(Debug)]
    struct Failing(ErrorKind, Mutex<Vec<ClaimId>>);

    #[async_trait]
    impl Backend for Failing {
        fn capabilities(&self) -> Capabilities {
            Capabilities { expiry: true, ..Capabilities::default() }
        }

        async fn claim(&self, _: &Claim) -> Result<Progress> {
            unreachable!()
        }

        async fn wait(&self, _: &Claim) -> Result<Wake> {
            unreachable!()
        }

        async fn renew(&self, _: &[Arc<Claim>]) -> Vec<Renewal> {
            unreachable!()
        }

        async fn verify(&self, _: &Claim) -> Result<Renewal> {
            unreachable!()
        }

        async fn downgrade(&self, _: &Claim) -> Result<()> {
            unreachable!()
        }

        async fn release(&self, _: &Claim, _: Duration) -> Result<Freed> {
            Err(Error::new(self.0, "as the test wants"))
        }

        fn forget(&self, claim: &Claim) {
            lock(&self.1).push(claim.id);
        }

        async fn list(&self, _: &str) -> Result<Vec<LockState>> {
            unreachable!()
        }

        async fn evict(&self, _: &LockName, _: ClaimId) -> Result<Freed> {
            unreachable!()
        }
    }

    fn failing(kind: ErrorKind, env: &Env) -> (Arc<Failing>, Arc<Releases>) {
        let store = Arc::new(Failing(kind, Mutex::default()));
        (store.clone(), Releases::new(store, env.clone()))
    }

    /// A store may know much of a claim, and would know it for ever.
    #[tokio::test(start_paused = true)]
    async fn what_is_given_up_is_forgotten_by_the_store() {
        let (env, job) = (env(), claim(1));
        for (kind, given_up_after) in [
            (ErrorKind::Invalid, Duration::ZERO),
            (ErrorKind::Unsupported, Duration::ZERO),
            (ErrorKind::Unavailable, LEFT_FOR),
        ] {
            let (store, releases) = failing(kind, &env);
            let begun = env.now();
            releases.free_in_background(job.clone(), None);
            while lock(&store.1).is_empty() {
                assert!(env.now() < begun + LEFT_FOR * 2, "{kind:?}: the store was never told");
                env.sleep_until(env.now() + TRY_LEFT_EVERY).await;
            }
            assert!(env.now() >= begun + given_up_after, "{kind:?}: given up too soon");
            assert_eq!(*lock(&store.1), [job.id], "{kind:?}");
            assert_eq!(releases.finish(env.now()).await, Ok(()), "{kind:?}");
        }
    }

    /// The first to come is the first to go, and the store is told.
    #[tokio::test(start_paused = true)]
    async fn no_more_than_so_many_are_remembered() {
        let env = env();
        let (store, releases) = failing(ErrorKind::Unavailable, &env);
        let more = 3;
        (0..MOST_LEFT + more).for_each(|bits| releases.leave(claim(bits as u128)));
        let gone: Vec<_> = (0..more).map(|bits| ClaimId::from_bits(bits as u128)).collect();
        assert_eq!(*lock(&store.1), gone);
        assert_eq!(releases.finish(env.now()).await, Err(MOST_LEFT));
    }

    /// One of which a release is just being left is not yet free for a sweep, which must not take it for released.
    #[tokio::test(start_paused = true)]
    async fn a_sweep_forgets_no_claim_that_somebody_else_is_releasing() {
        let env = env();
        let releases = Releases::new(Arc::new(Memory::new(env.clone())), env.clone());
        let claim = claim(1);
        let server = releases.backend.shard(&claim.name);
        let under_way = releases.begin(claim.id, None).unwrap();
        releases.leave(claim);
        releases.try_left(server).await;
        let left = lock(&releases.state).left.get(&server).map_or(0, |left| left.claims.len());
        assert_eq!(left, 1, "the sweep has forgotten it");
        // It is waited for no longer, and counted once.
        let now = env.now();
        assert_eq!(releases.finish(now + LEFT_FOR).await, Err(1));
        assert_eq!(env.now(), now);
        drop(under_way);
        assert_eq!(releases.finish(now).await, Err(1));
        releases.try_left(server).await;
        assert_eq!(releases.finish(now).await, Ok(()));
    }
}
