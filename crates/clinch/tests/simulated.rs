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
    Claim, ClaimId, Clock, Env, Error, ErrorKind, Lane, LockName, Locks, LossKind, Random, Released, Renew,
    Standing,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[path = "simulated/evictions.rs"]
mod evictions;
#[path = "simulated/leases.rs"]
mod leases;
#[path = "simulated/pushes.rs"]
mod pushes;
#[path = "simulated/releases.rs"]
mod releases;
#[path = "simulated/waiting.rs"]
mod waiting;
#[path = "simulated/wakers.rs"]
mod wakers;

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

/// A world on a thread of its own, where what blocks is told.
fn unblocked<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    let (done, told) = mpsc::channel();
    std::thread::spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).build().unwrap().block_on(test());
        done.send(()).unwrap();
    });
    told.recv_timeout(Duration::from_secs(20)).expect("it failed, or something blocks its thread");
}

/// Whether a future is ready at its first poll; it is dropped then.
async fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = future => Some(done),
        () = std::future::ready(()) => None,
    }
}

/// A store of two servers, of which one keeps the locks whose names begin with `a`.
#[derive(Debug)]
struct Two {
    servers: [Arc<Faulty>; 2],
    /// Refuses to release locks whose names end with `!`.
    refuses: AtomicBool,
    /// Fails whoever waits.
    deaf: AtomicBool,
    /// Finds no time left of any place.
    hasty: AtomicBool,
    closed: AtomicBool,
}

impl Two {
    /// The store, a client of it, and the same store for others.
    fn new(env: &Env, ttl: Duration) -> (Arc<Two>, Locks, Locks) {
        let store = Memory::new(env.clone());
        let server = || Faulty::new(Arc::new(store.client(env.clone())), env.clock());
        let [refuses, deaf, hasty, closed] = Default::default();
        let two = Arc::new(Two { servers: [server(), server()], refuses, deaf, hasty, closed });
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
        let mut progress = self.of(&claim.name).claim(claim).await?;
        if let Progress::Queued(busy) = &mut progress {
            let left = if self.hasty.load(Ordering::Relaxed) { Duration::ZERO } else { claim.ttl };
            busy.place_ttl = busy.place_ttl.map(|ttl| ttl.min(left));
        }
        Ok(progress)
    }
    async fn wait(&self, claim: &Claim) -> clinch::Result<Wake> {
        if self.deaf.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Unavailable, "it cannot tell of grants"));
        }
        self.of(&claim.name).wait(claim).await
    }
    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        let mut renewals = self.of(&claims[0].name).renew(claims).await;
        for (claim, renewal) in claims.iter().zip(&mut renewals) {
            if let Renewal::Renewed(left) = renewal
                && claim.place
                && self.hasty.load(Ordering::Relaxed)
            {
                *left = Some(Duration::ZERO);
            }
        }
        renewals
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
