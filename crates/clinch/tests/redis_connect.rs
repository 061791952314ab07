//! `redis://`: every form of URL, every refusal, and the servers and users that can do less or more.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::sync::LazyLock;
use std::time::Duration;

use clinch::{Error, ErrorKind, Locks, LossKind, Released};
use clinch_testkit::{Cluster, Proxy, Redis, Reply, Sentinel, tools};

mod common;

use common::{
    PATIENCE, contend_where_the_runtime_is_gone, contend_without_a_runtime, eventually, lock, queue, release,
    unique,
};

#[path = "redis_connect/connections.rs"]
mod connections;
#[path = "redis_connect/executors.rs"]
mod executors;
#[path = "redis_connect/refusals.rs"]
mod refusals;
#[path = "redis_connect/servers.rs"]
mod servers;
#[path = "redis_connect/topologies.rs"]
mod topologies;
#[path = "redis_connect/urls.rs"]
mod urls;
#[path = "redis_connect/users.rs"]
mod users;

/// A password that must not show anywhere.
const SECRET: &str = "hunter2";

/// A server with users, for all tests that leave it alone.
static SERVER: LazyLock<Redis> = LazyLock::new(|| {
    Redis::builder().password(SECRET).acl_user("ann", &format!("on >{SECRET} ~* &* +@all")).start()
});

/// A server that speaks TLS, also on an address that its certificate does not name.
static ENCRYPTED: LazyLock<Redis> =
    LazyLock::new(|| Redis::builder().tls().arg("--bind", "127.0.0.1 127.0.0.2").start());

async fn connect(url: &str) -> Locks {
    clinch::connect(url).await.unwrap()
}

/// The error of a URL that is refused, which shows no secret.
async fn refused(url: &str) -> Error {
    let error = clinch::connect(url).await.expect_err(url);
    for shown in [error.to_string(), format!("{error:?}"), format!("{error:#?}")] {
        assert!(!shown.contains(SECRET), "{url}: {shown}");
    }
    error
}

/// Uses everything that the full store has, as two clients of a URL. `pushed`: whether waiters hear of a grant.
async fn use_everything(redis: &Redis, url: &str, pushed: bool) {
    let (near, far) = (connect(url).await.ttl(Duration::from_secs(2)).unwrap(), connect(url).await);
    assert!(near.capabilities().fencing && near.capabilities().push);
    let name = unique("everything");
    let guard = lock(&near, &name).await;
    assert!(far.mutex(&name).unwrap().try_lock().await.unwrap().is_none());
    let waiter = queue(&far, &name);
    let inbox = "local key = redis.call('KEYS', '*claims:clinch:' .. ARGV[1])[1]
        local record = key and redis.call('HVALS', key)[1]
        return record and string.match(record, '^w %S+ %d+ %d+ %d+ (%S+)') or ''";
    eventually("the waiter waits, and listens if it may", async || {
        let inbox = redis.call(&["EVAL", inbox, "0", &name]).text();
        (!inbox.is_empty() && (inbox != "-") == pushed).then_some(())
    })
    .await;
    let claims: Vec<bool> =
        far.state(&name).await.unwrap().unwrap().claims.iter().map(|claim| claim.granted).collect();
    assert_eq!(claims, [true, false]);
    assert!(far.list("").await.unwrap().iter().any(|state| state.name.as_str() == name));
    guard.verify().await.unwrap();
    guard.extend(Duration::from_secs(3)).await.unwrap();
    let deadline = guard.deadline();
    eventually("it is renewed", async || (guard.deadline() > deadline).then_some(())).await;
    let before = guard.token();
    release(guard).await;
    let guard = waiter.await.unwrap();
    assert!(guard.token() > before);
    guard.release_closed(Duration::from_millis(10)).await.unwrap();

    let both = (near.rwlock(&name).unwrap(), far.rwlock(&name).unwrap());
    let first = both.0.write().timeout(PATIENCE).await.unwrap().downgrade().await.unwrap();
    let second = both.1.read().timeout(PATIENCE).await.unwrap();
    let deadline = first.deadline();
    eventually("a reader is renewed", async || (first.deadline() > deadline).then_some(())).await;
    far.evict(&name, first.claim_id()).await.unwrap();
    let loss = tokio::time::timeout(PATIENCE, first.lost()).await.unwrap();
    assert_eq!(loss.kind, LossKind::Deleted);
    release(second).await;

    let permits = near.semaphore(&unique("permits"), 3).unwrap();
    let two = permits.acquire(2).unwrap().timeout(PATIENCE).await.unwrap();
    assert!(permits.try_acquire(2).await.unwrap().is_none());
    release(two).await;

    let foreign = unique("foreign");
    redis.call(&["SET", &format!("clinch:{foreign}"), "x"]);
    let waiter = queue(&far, &foreign);
    let queued = "return #redis.call('KEYS', '*queue:clinch:' .. ARGV[1])";
    eventually("it waits", async || (redis.call(&["EVAL", queued, "0", &foreign]).int() == 1).then_some(()))
        .await;
    redis.call(&["DEL", &format!("clinch:{foreign}")]);
    release(waiter.await.unwrap()).await;
    for locks in [near, far] {
        locks.close(PATIENCE).await.unwrap();
    }
}
