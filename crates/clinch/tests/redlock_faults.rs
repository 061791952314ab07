//! `redlock://` under faults: whatever happens to a minority of the servers, nobody holds twice and nothing is left.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::error::Error as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clinch::backend::Freed;
use clinch::{Error, ErrorKind, Guard, Locks, LossKind, Released};
use clinch_testkit::{Proxy, Redis, RedisBuilder, Reply, vouch};
use tokio::task::JoinHandle;

mod common;

use common::{PATIENCE, eventually, lock, queue, stand_in, unique};

#[path = "redlock_faults/clocks.rs"]
mod clocks;
#[path = "redlock_faults/closing.rs"]
mod closing;
#[path = "redlock_faults/durable.rs"]
mod durable;
#[path = "redlock_faults/eviction.rs"]
mod eviction;
#[path = "redlock_faults/late.rs"]
mod late;
#[path = "redlock_faults/meeting.rs"]
mod meeting;
#[path = "redlock_faults/minority.rs"]
mod minority;
#[path = "redlock_faults/race.rs"]
mod race;
#[path = "redlock_faults/restarts.rs"]
mod restarts;
#[path = "redlock_faults/strangers.rs"]
mod strangers;

/// A TTL that nobody lives to see the end of: what is free within [`PATIENCE`] was not freed by expiry.
const LONG_TTL: Duration = Duration::from_secs(300);

/// Independent servers.
struct Servers(Vec<Redis>);

impl Servers {
    /// Some that forget nothing.
    fn durable(count: usize) -> Servers {
        Servers((0..count).map(|_| durable().start()).collect())
    }

    /// Some that forget everything when they restart.
    fn forgetful(count: usize) -> Servers {
        Servers((0..count).map(|_| Redis::start()).collect())
    }

    fn url(&self, query: &str) -> String {
        url_of(self.0.iter().map(|server| server.addr().to_string()), query)
    }

    /// By way of these addresses, with `durable=on`, as if clients had come for long: the servers vote at once.
    fn url_at(&self, hosts: impl Iterator<Item = String>, query: &str) -> String {
        let url = url_of(hosts, query);
        vouch(&url, &self.0);
        url
    }

    /// A client that may rely on the servers' memory, with long leases.
    async fn connect(&self) -> Locks {
        connect(&self.voting_url()).await
    }

    fn voting_url(&self) -> String {
        self.url_at(self.0.iter().map(|server| server.addr().to_string()), "durable=on&max_ttl=24h")
    }

    /// The servers that have a key for this lock.
    fn with_key(&self, name: &str) -> Vec<usize> {
        let has = |at: &usize| self.0[*at].call(&["EXISTS", &format!("clinch:{name}")]).int() == 1;
        (0..self.0.len()).filter(has).collect()
    }

    async fn expect_no_key(&self, name: &str) {
        let what = format!("nothing is left of {name}");
        eventually(&what, async || self.with_key(name).is_empty().then_some(())).await;
    }
}

fn durable() -> RedisBuilder {
    Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always")
}

fn url_of(hosts: impl Iterator<Item = String>, query: &str) -> String {
    format!("redlock://{}?{query}", hosts.collect::<Vec<_>>().join(","))
}

async fn connect(url: &str) -> Locks {
    clinch::connect(url).await.unwrap().ttl(LONG_TTL).unwrap()
}

/// Waits for a grant to a client to which each server gives its vote.
async fn all_vote_for(locks: &Locks) {
    let mutex = locks.mutex("job").unwrap();
    let granted = async || {
        let granted = mutex.try_lock().await;
        let why = granted.as_ref().err().map(chain).unwrap_or_default();
        assert!(!why.contains("does not vote"), "{why}");
        granted.ok().flatten()
    };
    drop(eventually("it is granted", granted).await);
}

/// An error with all its causes.
fn chain(error: &clinch::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
