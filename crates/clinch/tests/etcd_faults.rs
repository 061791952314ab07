//! `etcd://` under faults of members, network, leases and clients: whatever breaks, nobody holds twice.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use clinch::backend::Backend;
use clinch::conformance::faults::{Faulty, Step};
use clinch::net::{Connector, Stream};
use clinch::{ClaimId, Clock, Env, ErrorKind, Guard, Lane, Locks, LossKind, Mode, Random, Released, Renew};
use clinch_testkit::{Etcd, EtcdCluster, Proxy};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

mod common;

use common::{PATIENCE, lock, release};

#[path = "etcd_faults/closed.rs"]
mod closed;
#[path = "etcd_faults/closings.rs"]
mod closings;
#[path = "etcd_faults/cluster.rs"]
mod cluster;
#[path = "etcd_faults/detached.rs"]
mod detached;
#[path = "etcd_faults/evictions.rs"]
mod evictions;
#[path = "etcd_faults/frames.rs"]
mod frames;
#[path = "etcd_faults/full.rs"]
mod full;
#[path = "etcd_faults/ghosts.rs"]
mod ghosts;
#[path = "etcd_faults/hung.rs"]
mod hung;
#[path = "etcd_faults/leases.rs"]
mod leases;
#[path = "etcd_faults/moves.rs"]
mod moves;
#[path = "etcd_faults/network.rs"]
mod network;
#[path = "etcd_faults/partition.rs"]
mod partition;
#[path = "etcd_faults/sieve.rs"]
mod sieve;
#[path = "etcd_faults/silent.rs"]
mod silent;
#[path = "etcd_faults/stopped.rs"]
mod stopped;
#[path = "etcd_faults/turns.rs"]
mod turns;

/// A TTL whose end nobody lives to see.
const LONG_TTL: Duration = Duration::from_secs(3600);

async fn connect(url: &str) -> Locks {
    clinch::connect(url).await.unwrap().ttl(LONG_TTL).unwrap()
}

/// A client whose renewals nobody answers: of what was lost, only what the store tells of its own accord tells it.
async fn unrenewed(url: &str, env: Env) -> Locks {
    let backend = clinch::backends::etcd::open(url, env.clone()).await.unwrap();
    let faulty = Faulty::new(backend, env.clock());
    faulty.hang(Step::Renew);
    Locks::new(faulty, env).ttl(LONG_TTL).unwrap()
}

/// Waits for the lock in a task of its own.
fn queue(locks: &Locks, name: &str) -> JoinHandle<Guard> {
    let (locks, name) = (locks.clone(), name.to_owned());
    tokio::spawn(async move { locks.mutex(&name).unwrap().lock().await.unwrap() })
}

/// What the future gives; panics with `what` when that takes too long.
async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}

async fn join<T>(what: &str, task: JoinHandle<T>) -> T {
    within(what, task).await.unwrap()
}

/// Looks until there is something to see.
async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    within(what, async {
        loop {
            if let Some(seen) = look().await {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

/// Waits until a lock has so many claims.
async fn sees_claims(locks: &Locks, name: &str, count: usize) {
    eventually(&format!("{count} claims on {name}"), async || {
        let state = locks.state(name).await.ok()?;
        (state.map_or(0, |state| state.claims.len()) == count).then_some(())
    })
    .await;
}

/// The keys of a lock.
fn keys(etcd: &Etcd, name: &str) -> Vec<String> {
    etcd.keys(&format!("/clinch/{name}/"))
}

/// The lease of its TTL that a claim was made for, in hex: its key says so.
fn lease(guard: &Guard) -> String {
    let key = guard.store_key().unwrap();
    key.rsplit('/').next().unwrap().split('-').next().unwrap().to_owned()
}

/// The lease that a key hangs on, in hex, and for how many seconds it was granted.
fn carrier(etcd: &Etcd, key: &str) -> (String, u64) {
    let leases = etcd.leases().into_iter().map(|lease| {
        let printed = etcd.ctl(&["lease", "timetolive", &lease, "--keys"]);
        (lease, printed)
    });
    let mut carriers = leases
        .filter(|(_, printed)| printed.contains(&format!("{key} ")) || printed.contains(&format!("{key}]")));
    let (lease, printed) = carriers.next().expect("a lease has the key");
    let granted = printed.split("TTL(").nth(1).unwrap().split('s').next().unwrap();
    (lease, granted.parse().unwrap())
}

/// How many seconds are left of the lease that a key hangs on.
fn left(etcd: &Etcd, key: &str) -> u64 {
    let printed = etcd.ctl(&["lease", "timetolive", &carrier(etcd, key).0]);
    printed.split("remaining(").nth(1).unwrap().split('s').next().unwrap().parse().unwrap()
}

/// A store without the engine above it.
async fn open(url: &str) -> Arc<dyn Backend> {
    clinch::backends::etcd::open(url, Env::host(Lane::thread())).await.unwrap()
}

/// Checks that another client gets the lock, and that nothing is left after it.
async fn expect_unused(etcd: &Etcd, locks: &Locks, name: &str) {
    release(lock(locks, name).await).await;
    eventually("nothing is left", async || keys(etcd, name).is_empty().then_some(())).await;
}
