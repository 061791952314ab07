//! The real code in a simulated world: paused time, seeded randomness, everything on one thread. A seed replays a run.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::future::IntoFuture;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Waker};
use std::time::{Duration, SystemTime};

use clinch::backend::{Backend, Capabilities, Freed, LockState, NOTICE, Progress, Renewal, Wake};
use clinch::backends::memory::Memory;
use clinch::conformance::faults::{Faulty, Step};
use clinch::net::{Connector, Stream};
use clinch::{
    Claim, ClaimId, Clock, Env, Error, ErrorKind, Lane, LockName, Locks, LossKind, Random, Renew, Standing,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A network of one host that says what it hears.
#[derive(Debug)]
struct Echo;

#[async_trait::async_trait]
impl Connector for Echo {
    async fn connect(&self, _host: &str, _port: u16) -> io::Result<Box<dyn Stream>> {
        let (near, far) = tokio::io::duplex(64);
        tokio::spawn(async move {
            let (mut read, mut write) = tokio::io::split(far);
            tokio::io::copy(&mut read, &mut write).await
        });
        Ok(Box::new(near))
    }
}

fn world(seed: u64) -> Env {
    let clock = Clock::simulated(SystemTime::UNIX_EPOCH);
    Env::new(clock, Random::seeded(seed), Lane::here().unwrap(), Arc::new(Echo))
}

const TTL: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_for_a_simulated_day() {
    let env = world(1);
    let locks = Locks::new(Arc::new(Memory::new(env.clone())), env.clone()).ttl(TTL).unwrap();
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let start = env.clock().now();
    env.sleep_until(start + Duration::from_secs(24 * 3600)).await;
    assert!(guard.is_held());
    assert!(locks.mutex("job").unwrap().try_lock().await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_told_before_the_store_grants_to_the_next() {
    for seed in 0..50 {
        let env = world(seed);
        let store = Memory::new(env.clone());
        let faulty = Faulty::new(Arc::new(store.client(env.clone())), env.clock());
        let locks = Locks::new(faulty.clone() as Arc<dyn Backend>, env.clone()).ttl(TTL).unwrap();
        let rival = Locks::new(Arc::new(store), env.clone()).ttl(TTL).unwrap();
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        // Cut off somewhere between two renewals; each seed has other jitter.
        env.sleep_until(env.clock().now() + Duration::from_millis(700 * seed)).await;
        faulty.hang(Step::Renew);
        let told = async {
            let loss = guard.lost().await;
            (loss.kind, env.clock().now())
        };
        let granted = async {
            let next = rival.mutex("job").unwrap().lock().await.unwrap();
            let at = env.clock().now();
            assert!(next.token() > guard.token());
            at
        };
        let ((kind, told), granted) = tokio::join!(told, granted);
        assert_eq!(kind, LossKind::Expired);
        assert!(told < granted, "seed {seed}: told at {told:?}, granted at {granted:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_died_does_not_block_the_queue() {
    let env = world(3);
    let store = Memory::new(env.clone());
    let locks = Locks::new(Arc::new(store.client(env.clone())), env.clone()).ttl(TTL).unwrap();
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let faulty = Faulty::new(Arc::new(store), env.clock());
    let dying = Locks::new(faulty.clone() as Arc<dyn Backend>, env.clone()).ttl(TTL).unwrap();
    let waiter = tokio::spawn(async move { dying.mutex("job").unwrap().lock().await.map(drop) });
    while locks.state("job").await.unwrap().unwrap().claims.len() < 2 {
        tokio::task::yield_now().await;
    }
    // From here on nothing of the waiter reaches the store: no renewal, no withdrawal.
    faulty.sever();
    let mutex = locks.mutex("job").unwrap();
    let next = mutex.lock().timeout(10 * TTL);
    guard.release().await.unwrap();
    let start = env.clock().now();
    let next = next.await.expect("a dead waiter blocks the queue");
    assert!(env.clock().now().since(start) <= TTL, "its place lived longer than its lease");
    drop(next);
    waiter.abort();
}

/// The store counts as unreachable once it has failed to answer for a while, not because it was not asked for one.
#[tokio::test(start_paused = true)]
async fn a_waiter_rides_out_a_failure_however_long_it_has_waited() {
    let env = world(4);
    let store = Memory::new(env.clone());
    let locks = Locks::new(Arc::new(store.client(env.clone())), env.clone()).ttl(TTL).unwrap();
    let faulty = Faulty::new(Arc::new(store), env.clock());
    let far = Locks::new(faulty.clone() as Arc<dyn Backend>, env.clone()).ttl(TTL).unwrap();
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let waiter = tokio::spawn(async move { far.mutex("job").unwrap().lock().await });
    // Less than the TTL: the waiter looks again when the lease that it knows has run out.
    env.sleep_until(env.clock().now() + TTL / 2).await;
    assert_eq!(faulty.waiting("job").len(), 1);
    faulty.fail_before(Step::Claim);
    guard.release().await.unwrap();
    let next = waiter.await.unwrap().expect("one failure is no outage");
    next.release().await.unwrap();
}

/// A client of a store behind faults, and the same store for others.
fn faulty(env: &Env) -> (Arc<Faulty>, Locks, Locks) {
    let store = Memory::new(env.clone());
    let faulty = Faulty::new(Arc::new(store.client(env.clone())), env.clock());
    let locks = Locks::new(faulty.clone() as Arc<dyn Backend>, env.clone()).ttl(TTL).unwrap();
    (faulty, locks, Locks::new(Arc::new(store), env.clone()).ttl(TTL).unwrap())
}

async fn pass(env: &Env, time: Duration) {
    env.sleep_until(env.clock().now() + time).await;
}

/// A server that is stopped for longer than the TTL, and then grants what was given up long ago.
#[tokio::test(start_paused = true)]
async fn a_claim_that_arrives_long_after_it_was_given_up_is_freed() {
    let env = world(5);
    let (far, locks, near) = faulty(&env);
    for dropped in [false, true] {
        let late = far.send_late();
        let mutex = locks.mutex("job").unwrap();
        let request = tokio::spawn(async move { mutex.lock().timeout(TTL / 10).await });
        pass(&env, Duration::from_millis(1)).await;
        far.sever();
        match dropped {
            true => request.abort(),
            false => drop(request.await.unwrap().unwrap_err()),
        }
        pass(&env, 4 * TTL).await;
        assert!(late.arrive(&far).await, "not applied");
        assert!(near.mutex("job").unwrap().try_lock().await.unwrap().is_none());
        far.heal();
        // Less than the TTL of the ghost.
        pass(&env, TTL / 4).await;
        let free = near.mutex("job").unwrap().try_lock().await.unwrap();
        free.expect("nobody freed what was granted late").release().await.unwrap();
    }
    locks.close(TTL).await.unwrap();
}

/// What cannot be released is not tried for ever, and not after the client has ended.
#[tokio::test(start_paused = true)]
async fn releases_that_nobody_answers_are_given_up_in_the_end() {
    let env = world(6);
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.sever();
    drop(guard);
    pass(&env, Duration::from_secs(600)).await;
    let first = far.calls_of(Step::Release);
    assert!(locks.close(TTL).await.unwrap_err().to_string().contains("1 releases"));
    pass(&env, Duration::from_secs(600)).await;
    let later = far.calls_of(Step::Release) - first;
    assert!((100..=300).contains(&later), "{later} attempts in ten minutes");
    pass(&env, Duration::from_secs(3600)).await;
    locks.close(Duration::ZERO).await.expect("given up");
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.sever();
    drop((guard, locks));
    pass(&env, Duration::from_secs(60)).await;
    let last = far.calls_of(Step::Release);
    pass(&env, Duration::from_secs(60)).await;
    assert_eq!(far.calls_of(Step::Release), last, "released after the end of its client");
}

/// What the store says can never be released is not tried again, however long nobody answered before.
#[tokio::test(start_paused = true)]
async fn a_release_that_is_refused_for_good_is_given_up() {
    let env = world(8);
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.sever();
    drop(guard);
    pass(&env, Duration::from_secs(60)).await;
    far.heal();
    far.deny(Step::Release);
    pass(&env, Duration::from_secs(60)).await;
    locks.close(Duration::ZERO).await.expect("tried again for ever");
}

/// A store of two servers, of which one keeps the locks whose names begin with `a`.
#[derive(Debug)]
struct Two {
    servers: [Arc<Faulty>; 2],
    /// Refuses to release locks whose names end with `!`.
    refuses: AtomicBool,
    /// Fails whoever waits.
    deaf: AtomicBool,
    closed: AtomicBool,
}

impl Two {
    /// The store, a client of it, and the same store for others.
    fn new(env: &Env, ttl: Duration) -> (Arc<Two>, Locks, Locks) {
        let store = Memory::new(env.clone());
        let server = || Faulty::new(Arc::new(store.client(env.clone())), env.clock());
        let [refuses, deaf, closed] = Default::default();
        let two = Arc::new(Two { servers: [server(), server()], refuses, deaf, closed });
        let locks = Locks::new(two.clone() as Arc<dyn Backend>, env.clone()).ttl(ttl).unwrap();
        (two, locks, Locks::new(Arc::new(store), env.clone()).ttl(ttl).unwrap())
    }

    fn of(&self, name: &LockName) -> &Faulty {
        &self.servers[self.shard(name) as usize]
    }
}

#[async_trait::async_trait]
impl Backend for Two {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.servers[0].capabilities();
        capabilities.inline = false;
        capabilities
    }
    fn shard(&self, name: &LockName) -> u64 {
        u64::from(name.as_str().starts_with('a'))
    }
    async fn claim(&self, claim: &Claim) -> clinch::Result<Progress> {
        self.of(&claim.name).claim(claim).await
    }
    async fn wait(&self, claim: &Claim) -> clinch::Result<Wake> {
        if self.deaf.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Unavailable, "it cannot tell of grants"));
        }
        self.of(&claim.name).wait(claim).await
    }
    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        self.of(&claims[0].name).renew(claims).await
    }
    async fn verify(&self, claim: &Claim) -> clinch::Result<Renewal> {
        self.of(&claim.name).verify(claim).await
    }
    async fn downgrade(&self, claim: &Claim) -> clinch::Result<()> {
        self.of(&claim.name).downgrade(claim).await
    }
    async fn release(&self, claim: &Claim, linger: Duration) -> clinch::Result<Freed> {
        if self.refuses.load(Ordering::Relaxed) && claim.name.as_str().ends_with('!') {
            return Err(Error::new(ErrorKind::Refused, "not you"));
        }
        self.of(&claim.name).release(claim, linger).await
    }
    async fn list(&self, prefix: &str) -> clinch::Result<Vec<LockState>> {
        self.servers[0].list(prefix).await
    }
    async fn evict(&self, name: &LockName, claim: ClaimId) -> clinch::Result<Freed> {
        self.of(name).evict(name, claim).await
    }
    async fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }
}

/// Releases that one server does not answer, or refuses, take no time from those that another, or the same, would answer.
#[tokio::test(start_paused = true)]
async fn a_release_that_is_not_answered_delays_no_other() {
    let env = world(13);
    let (two, locks, near) = Two::new(&env, 100 * TTL);
    two.refuses.store(true, Ordering::Relaxed);
    two.servers.iter().for_each(|server| server.sever());
    // Tried, since they may have been applied, and left.
    let leave = async |name: String| {
        let request = locks.mutex(&name).unwrap();
        two.servers.iter().for_each(|server| server.heal());
        let guard = request.lock().await.unwrap();
        two.servers.iter().for_each(|server| server.sever());
        drop(guard);
    };
    for count in 0..40 {
        leave(format!("b{count}")).await;
        leave(format!("a{count}!")).await;
    }
    leave("a".to_owned()).await;
    pass(&env, 3 * TTL).await;
    assert!(near.mutex("a").unwrap().try_lock().await.unwrap().is_none());
    two.servers[1].heal();
    // One pause between two rounds.
    pass(&env, TTL / 5).await;
    let free = near.mutex("a").unwrap().try_lock().await.unwrap();
    free.expect("others' releases have kept it waiting").release().await.unwrap();
    assert!(near.mutex("b1").unwrap().try_lock().await.unwrap().is_none());
    assert!(near.mutex("a1!").unwrap().try_lock().await.unwrap().is_none());
    two.refuses.store(false, Ordering::Relaxed);
    two.servers[0].heal();
    pass(&env, TTL / 5).await;
    assert!(near.list("").await.unwrap().is_empty(), "every release is made good");
    locks.close(Duration::ZERO).await.unwrap();
}

/// Nobody waits for the release of a lease that has run out by itself, and a client that ends gives back what it has all the same.
#[tokio::test(start_paused = true)]
async fn whoever_ends_does_not_wait_longer_than_the_lease() {
    let env = world(14);
    for lost in [false, true] {
        let (two, locks, _) = Two::new(&env, TTL);
        let guard = locks.mutex("b").unwrap().lock().await.unwrap();
        pass(&env, TTL / 6).await;
        two.servers[0].sever();
        let severed = env.clock().now();
        pass(&env, TTL / 2).await;
        if lost {
            guard.lost().await;
            drop(guard);
        } else {
            assert!(guard.is_held());
            let error = guard.release().await.unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{error:?}");
        }
        locks.close(10 * TTL).await.unwrap_err();
        let took = env.clock().now().since(severed);
        assert!(
            took <= TTL + Duration::from_secs(1),
            "ended {took:?} after the server, with a lease of {TTL:?}"
        );
        assert!(two.closed.load(Ordering::Relaxed), "what the client had was not given back");
    }
}

/// A release may be without any answer, as of a server that hangs.
#[tokio::test(start_paused = true)]
async fn a_release_that_hangs_ends_with_the_lease() {
    let env = world(15);
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.hang(Step::Release);
    let start = env.clock().now();
    let released = tokio::time::timeout(10 * TTL, guard.release()).await;
    assert_eq!(released.expect("it waits for ever").unwrap_err().kind(), ErrorKind::Unknown);
    assert!(env.clock().now().since(start) <= TTL);
}

/// Steps that succeed in between make the failures of a wait no rarer.
#[tokio::test(start_paused = true)]
async fn a_wait_that_fails_at_once_makes_no_storm() {
    let env = world(16);
    let (two, locks, near) = Two::new(&env, TTL);
    let guard = near.mutex("b").unwrap().lock().await.unwrap();
    two.deaf.store(true, Ordering::Relaxed);
    let mutex = locks.mutex("b").unwrap();
    let waiter = tokio::spawn(async move { mutex.lock().await });
    pass(&env, 2 * TTL).await;
    let steps = two.servers[0].calls_of(Step::Claim);
    assert!((50..=200).contains(&steps), "{steps} steps in a minute");
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_panics_loses_no_lease() {
    let env = world(7);
    let (far, locks, near) = faulty(&env);
    far.panic_in(Step::Lost);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    pass(&env, TTL / 4).await;
    far.panic_in(Step::Renew);
    pass(&env, TTL / 4).await;
    far.heal();
    pass(&env, 20 * TTL).await;
    assert!(guard.is_held(), "a panic in the backend has ended the keeper");
    assert!(near.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    // A release that panics is repeated too.
    far.panic_in(Step::Release);
    drop(guard);
    pass(&env, Duration::from_secs(1)).await;
    far.heal();
    pass(&env, TTL / 2).await;
    let free = near.mutex("job").unwrap().try_lock().await.unwrap();
    free.expect("a panic in the backend leaks the lock").release().await.unwrap();
    // One that panics for ever loses the lease in time, and says so.
    far.panic_in(Step::Lost);
    far.panic_in(Step::Renew);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let deadline = guard.deadline().unwrap();
    assert_eq!(guard.lost().await.kind, LossKind::Expired);
    assert!(env.clock().now().since(deadline) < Duration::from_millis(5));
}

/// A waiter whose future is not polled learns of the loss of its place when it is; until then nothing spins.
#[tokio::test(start_paused = true)]
async fn a_place_that_was_taken_away_is_not_renewed_for_ever() {
    let env = world(8);
    let (far, locks, near) = faulty(&env);
    let guard = near.mutex("job").unwrap().lock().await.unwrap();
    let mutex = locks.mutex("job").unwrap();
    let mut request = std::pin::pin!(mutex.lock().into_future());
    tokio::select! {
        biased;
        _ = &mut request => panic!("two hold one lock"),
        () = pass(&env, TTL / 2) => {}
    }
    let place = far.waiting("job")[0];
    near.evict("job", place).await.unwrap();
    let before = far.calls_of(Step::Renew);
    tokio::time::timeout(10 * TTL, std::future::pending::<()>()).await.unwrap_err();
    let renewals = far.calls_of(Step::Renew) - before;
    assert!(renewals <= 1, "{renewals} renewals of a place that is gone");
    tokio::select! {
        biased;
        _ = &mut request => panic!("two hold one lock"),
        () = pass(&env, Duration::from_millis(1)) => {}
    }
    assert_eq!(near.state("job").await.unwrap().unwrap().claims.len(), 2, "it queues again");
    guard.release().await.unwrap();
    request.await.unwrap().release().await.unwrap();
}

/// An evicted waiter that is polled takes another place at once.
#[tokio::test(start_paused = true)]
async fn an_evicted_waiter_queues_again_at_once() {
    let env = world(9);
    let (far, locks, near) = faulty(&env);
    let guard = near.mutex("job").unwrap().lock().await.unwrap();
    let mutex = locks.mutex("job").unwrap();
    let waiter = tokio::spawn(async move { mutex.lock().await });
    pass(&env, Duration::from_secs(1)).await;
    let place = far.waiting("job")[0];
    let before = far.calls_of(Step::Claim);
    near.evict("job", place).await.unwrap();
    pass(&env, Duration::from_millis(1)).await;
    assert_eq!(far.calls_of(Step::Claim), before + 1);
    assert_eq!(near.state("job").await.unwrap().unwrap().claims.len(), 2);
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
}

/// Renewals go out in batches. One that is given up early for a short lease must not take the long ones' with it.
#[tokio::test(start_paused = true)]
async fn a_short_lease_does_not_cost_long_ones_their_renewals() {
    let env = world(10);
    let (far, locks, _) = faulty(&env);
    far.slow_down(Step::Renew, Duration::from_millis(150));
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let short = locks.clone().ttl(Duration::from_millis(600)).unwrap().mutex("short").unwrap();
    let end = env.clock().now() + 10 * TTL;
    while env.clock().now() < end {
        // Its renewals come too late.
        short.lock().await.unwrap().lost().await;
        assert_eq!(guard.standing(), Standing::Held);
    }
}

/// A waiter holds nothing, so it has nothing to lose: a store that says so is asked again.
#[tokio::test(start_paused = true)]
async fn a_waiter_does_not_say_that_it_lost_the_lock() {
    let env = world(11);
    let (far, locks, _) = faulty(&env);
    far.miss(Step::Claim);
    locks.mutex("job").unwrap().lock().await.unwrap().release().await.unwrap();
    far.miss(Step::Claim);
    let guard = locks.mutex("job").unwrap().try_lock().await.unwrap().unwrap();
    far.miss(Step::Wait);
    let error = locks.mutex("job").unwrap().lock().timeout(TTL).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    guard.release().await.unwrap();
}

/// A process that is stopped while it asks has not asked a silent store all that time.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_was_stopped_asks_again() {
    let env = world(12);
    let (far, locks, _) = faulty(&env);
    let gate = far.hold_reply_of(Step::Claim);
    far.lose_reply_of(Step::Claim);
    let mutex = locks.mutex("job").unwrap();
    let waiter = tokio::spawn(async move { mutex.lock().await });
    gate.reached().await;
    pass(&env, 10 * TTL).await;
    gate.open();
    waiter.await.unwrap().expect("one answer was lost").release().await.unwrap();
}

/// Leases that nobody renews any more, because the runtime that did is gone, are told so; releases go on, and so does the client.
#[test]
fn a_lane_that_ended_is_told() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let lane = runtime();
    let (far, locks, near, guard) = lane.block_on(async {
        let env = Env::host(Lane::here().unwrap());
        let (far, locks, near) = faulty(&env);
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        let dropped = locks.mutex("dropped").unwrap().lock().await.unwrap();
        far.sever();
        drop(dropped);
        // Time for the keeper to start, and the release.
        pass(&env, Duration::from_millis(5)).await;
        (far, locks, near, guard)
    });
    drop(lane);
    runtime().block_on(async {
        assert_eq!(guard.lost().await.kind, LossKind::Unverifiable);
        far.heal();
        drop(
            near.mutex("dropped").unwrap().lock().timeout(TTL / 2).await.expect("its release was forgotten"),
        );
        drop(guard);
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        let error = locks.mutex("job").unwrap().lock().timeout(TTL / 1000).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
        guard.release().await.unwrap();
        locks.close(TTL).await.unwrap();
    });
}

/// A process that was stopped past its deadline goes on with whatever was woken first, perhaps with the body of the lock.
#[test]
fn a_body_is_not_polled_again_after_its_deadline() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let env = Env::host(Lane::here().unwrap());
        let locks = Locks::new(Arc::new(Memory::new(env.clone())), env.clone());
        let mutex = locks.ttl(Duration::from_millis(300)).unwrap().mutex("job").unwrap();
        let mut went_on = false;
        let body = async |guard: &clinch::Guard| {
            // Time for the keeper to start.
            pass(&env, Duration::from_millis(5)).await;
            let deadline = guard.deadline().unwrap();
            while env.clock().now() <= deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            woken_at_once().await;
            went_on = true;
        };
        let error = mutex.lock().run(body).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
        assert!(!went_on, "the body went on without the lock");
    });
}

/// Pending once, and woken before anybody else.
async fn woken_at_once() {
    let mut woken = false;
    std::future::poll_fn(|context| {
        context.waker().wake_by_ref();
        match std::mem::replace(&mut woken, true) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
}

/// A store that tells nothing of its own accord, and a lease that nobody renews: it is looked at instead, and stays as long
/// as it was.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_not_renewed_hears_of_its_eviction_within_the_notice() {
    let env = world(9);
    let (far, locks, near) = faulty(&env);
    far.hang(Step::Lost);
    let locks = locks.ttl(100 * TTL).unwrap().renew(Renew::Never);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let deadline = guard.deadline();
    pass(&env, TTL).await;
    far.fail_before(Step::Verify);
    pass(&env, TTL).await;
    assert!(guard.is_held() && guard.deadline() == deadline, "a look changed something");
    assert_eq!(far.calls_of(Step::Renew), 0);
    near.evict("job", guard.claim_id()).await.unwrap();
    let evicted = env.clock().now();
    assert_eq!(guard.lost().await.kind, LossKind::Deleted);
    let told = env.clock().now().since(evicted);
    assert!(told < NOTICE / 2, "told {told:?} after the eviction");
}

#[tokio::test(start_paused = true)]
async fn a_long_lease_hears_of_its_eviction_within_the_notice() {
    let env = world(11);
    let (far, locks, near) = faulty(&env);
    far.hang(Step::Lost);
    let guard = locks.ttl(100 * TTL).unwrap().mutex("job").unwrap().lock().await.unwrap();
    near.evict("job", guard.claim_id()).await.unwrap();
    let evicted = env.clock().now();
    assert_eq!(guard.lost().await.kind, LossKind::Deleted);
    let told = env.clock().now().since(evicted);
    assert!(told < NOTICE, "told {told:?} after the eviction");
}

/// How long after its eviction a holder hears of it from a store that tells nothing of its own accord, if the first attempt
/// to ask hangs.
async fn told_by_the_second_attempt(seed: u64, renew: Renew) -> Duration {
    let env = world(seed);
    let (far, locks, near) = faulty(&env);
    let step = if renew == Renew::Auto { Step::Renew } else { Step::Verify };
    let next = async || {
        let calls = far.calls_of(step);
        while far.calls_of(step) == calls {
            pass(&env, Duration::from_millis(10)).await;
        }
    };
    far.hang(Step::Lost);
    let guard = locks.ttl(100 * TTL).unwrap().renew(renew).mutex("job").unwrap().lock().await.unwrap();
    // One got through just now, so the next is far away.
    next().await;
    near.evict("job", guard.claim_id()).await.unwrap();
    let evicted = env.clock().now();
    far.hang(step);
    next().await;
    far.heal();
    far.hang(Step::Lost);
    assert_eq!(guard.lost().await.kind, LossKind::Deleted);
    env.clock().now().since(evicted)
}

#[tokio::test(start_paused = true)]
async fn an_eviction_is_heard_in_time_although_one_attempt_hangs() {
    for seed in 0..8 {
        for renew in [Renew::Auto, Renew::Never] {
            let told = told_by_the_second_attempt(seed, renew).await;
            let left = NOTICE.saturating_sub(told);
            assert!(left >= Duration::from_secs(4), "seed {seed}, {renew:?}: {left:?} left to stop");
        }
    }
}

/// Whether a future is ready at its first poll; it is dropped then.
async fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = future => Some(done),
        () = std::future::ready(()) => None,
    }
}

/// A shorter lease that was asked for ends when it says, also if nobody waits for the answer.
#[tokio::test(start_paused = true)]
async fn a_shorter_lease_is_told_lost_in_time_although_its_request_was_dropped() {
    for renew in [Renew::Auto, Renew::Never] {
        let env = world(13);
        let (far, locks, _) = faulty(&env);
        let guard = locks.renew(renew).mutex("job").unwrap().lock().await.unwrap();
        far.hang(Step::Renew);
        assert!(at_once(guard.extend(Duration::from_secs(1))).await.is_none());
        let deadline = guard.deadline().unwrap();
        assert!(deadline < env.clock().now() + Duration::from_secs(1));
        assert_eq!(guard.lost().await.kind, LossKind::Expired);
        let late = env.clock().now().since(deadline);
        assert!(late < Duration::from_millis(5), "{renew:?}: told {late:?} late");
    }
    // One that can be renewed is, as soon as its TTL wants it.
    let env = world(14);
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.hang(Step::Renew);
    assert!(at_once(guard.extend(Duration::from_secs(1))).await.is_none());
    far.heal();
    pass(&env, TTL).await;
    assert!(guard.is_held(), "a request that was dropped lost the lease");
}

/// What a guard asks of a store that does not answer ends with its lease, and what is lost is not renewed any more.
#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_neither_waited_for_nor_renewed() {
    let env = world(15);
    let (far, locks, near) = faulty(&env);
    let guard = locks.clone().renew(Renew::Never).mutex("job").unwrap().lock().await.unwrap();
    far.hang(Step::Verify);
    far.hang(Step::Renew);
    let both = async { tokio::join!(guard.verify(), guard.extend(TTL)) };
    let (verified, extended) = tokio::time::timeout(2 * TTL, both).await.expect("waits for ever");
    assert_eq!(verified.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(extended.unwrap_err().kind(), ErrorKind::Lost);
    drop(guard);
    far.heal();
    // The store has it for longer than its holder may.
    let guard = locks.max_hold(Duration::from_secs(1)).unwrap().mutex("job").unwrap().lock().await.unwrap();
    pass(&env, Duration::from_secs(1)).await;
    let calls = far.calls_of(Step::Renew);
    assert_eq!(guard.extend(100 * TTL).await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(guard.verify().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(far.calls_of(Step::Renew), calls, "a lost lease was renewed");
    assert!(near.mutex("job").unwrap().lock().timeout(TTL).await.is_ok());
}

/// A store's lease may carry many claims, and others renew it: what ran out for its holder does not end by itself then. The
/// holder is stuck and drops nothing.
#[tokio::test(start_paused = true)]
async fn a_lost_lease_that_others_keep_alive_is_freed() {
    let env = world(16);
    let (far, locks, near) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.hang(Step::Renew);
    let lost = tokio::time::timeout(2 * TTL, async {
        while guard.is_held() {
            near.renew_detached("job", guard.claim_id(), TTL).await.unwrap();
            pass(&env, Duration::from_secs(1)).await;
        }
        env.clock().now()
    });
    let (lost, mut freed) = (lost.await.expect("never lost"), None);
    while freed.is_none() && env.clock().now().since(lost) < 4 * TTL {
        let kept = near.renew_detached("job", guard.claim_id(), TTL).await;
        freed = kept.is_err().then(|| env.clock().now().since(lost));
        pass(&env, Duration::from_millis(10)).await;
    }
    let freed = freed.expect("nobody frees what its holder has lost");
    // Not sooner than a store would have let it end.
    assert!(freed > Duration::from_secs(2), "freed {freed:?} after it was told");
    assert!(near.mutex("job").unwrap().try_lock().await.unwrap().is_some());
}

/// A release is repeated for as long as the store may keep what `extend` asked for, not for the TTL of the beginning.
#[tokio::test(start_paused = true)]
async fn what_was_extended_is_released_for_as_long_as_that_lasts() {
    const LONG: Duration = Duration::from_secs(5 * 3600);
    for dropped in [false, true] {
        let env = world(17);
        let (far, locks, near) = faulty(&env);
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        guard.extend(LONG).await.unwrap();
        guard.extend(TTL).await.unwrap();
        far.sever();
        let released = match dropped {
            true => {
                drop(guard);
                None
            }
            false => Some(tokio::spawn(guard.release())),
        };
        pass(&env, LONG / 2).await;
        far.heal();
        pass(&env, TTL).await;
        let free = near.mutex("job").unwrap().try_lock().await.unwrap();
        free.expect("its release was given up").release().await.unwrap();
        if let Some(released) = released {
            released.await.unwrap().expect("the release was given up");
        }
    }
}

/// What the keeper frees itself, it frees later than it tells so: whoever is told needs a moment to stop.
#[tokio::test(start_paused = true)]
async fn a_lease_at_its_longest_is_freed_a_moment_after_its_holder_is_told() {
    let env = world(10);
    let (_far, locks, near) = faulty(&env);
    let guard = locks.max_hold(TTL / 10).unwrap().mutex("job").unwrap().lock().await.unwrap();
    let deadline = guard.deadline().unwrap();
    let told = async {
        guard.lost().await;
        env.clock().now()
    };
    let granted = async {
        let _next = near.mutex("job").unwrap().lock().await.unwrap();
        env.clock().now()
    };
    let (told, granted) = tokio::join!(told, granted);
    assert!(told >= deadline);
    assert!(
        granted >= told + Duration::from_millis(100),
        "granted {:?} after it was told",
        granted.since(told)
    );
    assert!(granted < told + TTL / 2, "the longest hold did not free it");
}

/// What happens in a small contended run, with its simulated times.
async fn trace(seed: u64) -> Vec<String> {
    let env = world(seed);
    let locks = Locks::new(Arc::new(Memory::new(env.clone())), env.clone()).ttl(TTL).unwrap();
    let trace = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for task in 0..4u64 {
        let (mutex, env, trace) = (locks.mutex("job").unwrap(), env.clone(), trace.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..5 {
                let guard = mutex.lock().await.unwrap();
                let line = format!("{task} {} {} {:?}", guard.claim_id(), guard.token(), env.clock().now());
                trace.lock().unwrap().push(line);
                env.sleep_until(env.clock().now() + Duration::from_millis(40 + task)).await;
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    trace.lock().unwrap().clone()
}

#[test]
fn a_seed_replays_a_run_exactly() {
    let run = |seed| {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(trace(seed))
    };
    assert_eq!(run(7).len(), 20);
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8), "another seed has other claim ids");
}

#[tokio::test(start_paused = true)]
async fn the_network_is_whatever_the_world_says() {
    let mut stream = world(1).connector().connect("anywhere", 1).await.unwrap();
    stream.write_all(b"ping").await.unwrap();
    let mut heard = [0; 4];
    stream.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"ping");
}

/// A task whose executor has ended lives in its wakers alone: what wakes it drops it, with all that it has.
struct Orphan(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);

impl std::task::Wake for Orphan {
    fn wake(self: Arc<Self>) {}
}

fn orphan(future: impl Future<Output = ()> + Send + 'static) {
    let task = Arc::new(Orphan(Mutex::new(None)));
    let waker = Waker::from(task.clone());
    let mut future = Box::pin(future);
    assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    *task.0.lock().unwrap() = Some(future);
}

/// A world on a thread of its own, where what blocks is told.
fn unblocked<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    let (done, told) = mpsc::channel();
    std::thread::spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).build().unwrap().block_on(test());
        done.send(()).unwrap();
    });
    told.recv_timeout(Duration::from_secs(20)).expect("it failed, or a waker has blocked its thread");
}

#[test]
fn a_loss_may_drop_the_task_that_it_wakes() {
    unblocked(|| async {
        let env = world(40);
        let locks = Locks::new(Arc::new(Memory::new(env.clone())), env.clone()).ttl(TTL).unwrap();
        let capped = locks.clone().max_hold(TTL).unwrap();
        let guard = capped.mutex("job").unwrap().lock().await.unwrap();
        orphan(async move { drop(guard.lost().await) });
        pass(&env, 2 * TTL).await;
        assert!(locks.mutex("job").unwrap().try_lock().await.unwrap().is_some(), "its guard was not dropped");
    });
}

#[test]
fn a_grant_may_drop_the_task_that_it_wakes() {
    unblocked(|| async {
        let env = world(41);
        let store = Memory::new(env.clone());
        let locks = Locks::new(Arc::new(store.client(env.clone())), env.clone()).ttl(TTL).unwrap();
        let held = locks.mutex("job").unwrap().lock().await.unwrap();
        let other = locks.mutex("other").unwrap().lock().await.unwrap();
        let holder = locks.state("job").await.unwrap().unwrap().claims.remove(0);
        let claim = Claim {
            id: ClaimId::from_bits(1),
            name: LockName::new("job").unwrap(),
            mode: holder.mode,
            ttl: 10 * TTL,
            enqueue: true,
            place: false,
            isolated: false,
            owner: Arc::new(holder.owner),
        };
        assert!(matches!(store.claim(&claim).await.unwrap(), Progress::Queued(_)));
        orphan(async move {
            let _other = other;
            drop(store.wait(&claim).await);
        });
        // Its timer is over, so that the grant alone wakes it.
        pass(&env, TTL + TTL / 2).await;
        held.release().await.unwrap();
        assert!(
            locks.mutex("other").unwrap().try_lock().await.unwrap().is_some(),
            "its guard was not dropped"
        );
    });
}
