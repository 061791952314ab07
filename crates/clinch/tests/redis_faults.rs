//! `redis://` under faults of the network and the server: whatever breaks, nobody holds twice and nothing is left.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use clinch::backend::{Freed, NOTICE};
use clinch::net::{Connector, Stream};
use clinch::{Clock, Env, ErrorKind, Guard, Lane, Locks, LossKind, Random, Released, Standing};
use clinch_testkit::{Cluster, Direction, Proxy, Redis, Reply, Resp, tools, vouch};

mod common;

use common::{PATIENCE, eventually, lock, queue, stand_in, unique};

#[path = "redis_faults/copies.rs"]
mod copies;
#[path = "redis_faults/cuts.rs"]
mod cuts;
#[path = "redis_faults/elsewhere.rs"]
mod elsewhere;
#[path = "redis_faults/evictions.rs"]
mod evictions;
#[path = "redis_faults/expiry.rs"]
mod expiry;
#[path = "redis_faults/late.rs"]
mod late;
#[path = "redis_faults/pushes.rs"]
mod pushes;
#[path = "redis_faults/queues.rs"]
mod queues;
#[path = "redis_faults/renewed.rs"]
mod renewed;
#[path = "redis_faults/server.rs"]
mod server;
#[path = "redis_faults/silent.rs"]
mod silent;
#[path = "redis_faults/taken.rs"]
mod taken;
#[path = "redis_faults/values.rs"]
mod values;

/// A TTL that nobody lives to see the end of: what is free within [`PATIENCE`] was not freed by expiry.
const LONG_TTL: Duration = Duration::from_secs(120);

/// The server of all tests that leave it alone.
static SERVER: LazyLock<Redis> = LazyLock::new(Redis::start);

/// Notes in Redis itself who is inside of a lock, so that a second holder is seen whatever the clients believe, and
/// that tokens rise.
const ENTER: &str = "
    if redis.call('EXISTS', KEYS[1]) == 1 then return 'two hold it' end
    if tonumber(redis.call('GET', KEYS[2]) or 0) >= tonumber(ARGV[1]) then return 'the token did not rise' end
    redis.call('MSET', KEYS[1], '', KEYS[2], ARGV[1])
    return 'alone'";

async fn connect(url: &str) -> Locks {
    clinch::connect(url).await.unwrap().ttl(LONG_TTL).unwrap()
}

/// A client of a server behind a proxy.
async fn connect_through(proxy: &Proxy) -> Locks {
    connect(&format!("redis://{}", proxy.addr())).await
}

/// A network whose connections lead where it was told last.
#[derive(Debug)]
struct Detour(Mutex<SocketAddr>);

impl Detour {
    fn to(addr: SocketAddr) -> Arc<Detour> {
        Arc::new(Detour(Mutex::new(addr)))
    }

    fn turn(&self, addr: SocketAddr) {
        *self.0.lock().unwrap() = addr;
    }

    /// A client that has made the connection of its commands, and no other.
    async fn connect_once(self: &Arc<Detour>, redis: &Redis) -> Locks {
        let env = Env::new(Clock::host(), Random::system(), Lane::thread(), self.clone());
        let locks = Locks::connect(&redis.url(), env).await.unwrap().ttl(LONG_TTL).unwrap();
        lock(&locks, "warm").await.release().await.unwrap();
        locks
    }
}

#[async_trait]
impl Connector for Detour {
    async fn connect(&self, _: &str, _: u16) -> std::io::Result<Box<dyn Stream>> {
        let addr = *self.0.lock().unwrap();
        Ok(Box::new(tokio::net::TcpStream::connect(addr).await?))
    }
}

/// The waiters of a lock in their order: the claim and the inbox, `-` while nobody listens.
fn waiters(redis: &Redis, name: &str) -> Vec<(String, String)> {
    let script = "local all = {}
        for _, id in ipairs(redis.call('LRANGE', redis.call('KEYS', '*queue:*' .. ARGV[1])[1] or 'none', 0, -1)) do
          local record = redis.call('HGET', redis.call('KEYS', '*claims:*' .. ARGV[1])[1], id)
          all[#all + 1] = { id, string.match(record, '^w %S+ %d+ %d+ %d+ (%S+)') }
        end
        return all";
    let all = redis.call(&["EVAL", script, "0", name]).array().into_iter().map(Reply::array);
    all.map(|pair| (pair[0].clone().text(), pair[1].clone().text())).collect()
}

/// Waits until so many waiters of a lock listen.
async fn sees_waiters(redis: &Redis, name: &str, count: usize) -> Vec<(String, String)> {
    eventually(&format!("{count} wait for {name}"), async || {
        let waiters = waiters(redis, name);
        let all = waiters.len() == count && waiters.iter().all(|(_, inbox)| inbox != "-");
        all.then_some(waiters)
    })
    .await
}

/// The claim that holds a lock, and for how many milliseconds more.
fn holder(redis: &Redis, name: &str) -> Option<(String, i64)> {
    let key = format!("clinch:{name}");
    match redis.call(&["GET", &key]) {
        Reply::Text(record) => Some((record[..32].to_owned(), redis.call(&["PTTL", &key]).int())),
        _ => None,
    }
}

fn scripts_run(redis: &Redis) -> u64 {
    redis.client().commandstats()["evalsha"]
}

async fn sees_scripts_run(redis: &Redis, count: u64) {
    eventually("a script runs", async || (scripts_run(redis) == count).then_some(())).await;
}

fn enter(redis: &Redis, guard: &Guard) {
    let name = guard.name().as_str();
    let (inside, last) = (format!("inside {name}"), format!("last {name}"));
    let token = guard.token().to_string();
    assert_eq!(redis.call(&["EVAL", ENTER, "2", &inside, &last, &token]).text(), "alone", "{name}");
}

fn leave(redis: &Redis, name: &str) {
    assert_eq!(redis.call(&["DEL", &format!("inside {name}")]).int(), 1, "{name}");
}

async fn leave_and_release(redis: &Redis, guard: Guard) {
    leave(redis, guard.name().as_str());
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

/// What is left of a lock in the store, apart from the graves of claims whose last step may still arrive. All of it but
/// the fence, whose key does not hold the name, must end by itself.
fn left(redis: &Redis, name: &str) -> Vec<String> {
    let mut client = redis.client();
    let keys = client.call(&["KEYS", &format!("clinch:*{name}")]).array();
    let mut left = Vec::new();
    for key in keys.into_iter().map(|key| key.text()) {
        if key.contains(":claims:") {
            let records = client.call(&["HVALS", &key]).array().into_iter().map(Reply::text);
            left.extend(records.filter(|record| !record.starts_with("x ")));
        } else {
            left.push(key.clone());
        }
        assert_ne!(client.call(&["PTTL", &key]).int(), -1, "{key:?} stays for ever");
    }
    left
}

/// Checks that another client gets the lock, with a larger token than all before, and that nothing is left after it.
async fn expect_unused(redis: &Redis, near: &Locks, name: &str) {
    let guard = lock(near, name).await;
    enter(redis, &guard);
    leave_and_release(redis, guard).await;
    eventually(&format!("nothing is left of {name}"), async || left(redis, name).is_empty().then_some(()))
        .await;
}
