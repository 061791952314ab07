//! The real code in a simulated world: paused time, seeded randomness, everything on one thread. A seed replays a run.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use clinch::backend::Backend;
use clinch::backends::memory::Memory;
use clinch::conformance::faults::{Faulty, Step};
use clinch::net::{Connector, Stream};
use clinch::{Clock, Env, Lane, Locks, LossKind, Random};
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
