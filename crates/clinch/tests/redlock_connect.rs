//! `redlock://`: what is refused and what is said, by servers that cannot be used, do not vote, or hold what is no lock.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::sync::LazyLock;
use std::time::Duration;

use clinch::{Error, ErrorKind, Guard, Locks, Released};
use clinch_testkit::{Redis, RedisBuilder, vouch};

mod common;

use common::{
    PATIENCE, contend_where_the_runtime_is_gone, contend_without_a_runtime, eventually, lock, queue, release,
    unique,
};

#[path = "redlock_connect/answers.rs"]
mod answers;
#[path = "redlock_connect/refusals.rs"]
mod refusals;
#[path = "redlock_connect/users.rs"]
mod users;
#[path = "redlock_connect/values.rs"]
mod values;

/// A password that must not show anywhere.
const SECRET: &str = "hunter2";

/// What a URL says of servers that vote at once where somebody has vouched for them.
const DURABLE: &str = "durable=on&max_ttl=24h";

/// Three servers for all tests that leave them alone.
static SERVERS: LazyLock<Vec<Redis>> = LazyLock::new(three);

/// A server that forgets nothing.
fn voting() -> RedisBuilder {
    Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always")
}

fn three() -> Vec<Redis> {
    (0..3).map(|_| voting().start()).collect()
}

fn hosts(servers: &[Redis]) -> Vec<String> {
    servers.iter().map(|server| server.addr().to_string()).collect()
}

fn url(servers: &[Redis], query: &str) -> String {
    let url = format!("redlock://{}?{query}", hosts(servers).join(","));
    if query.starts_with("durable=on") {
        vouch(&url, servers);
    }
    url
}

async fn connect(url: &str) -> Locks {
    clinch::connect(url).await.unwrap_or_else(|error| panic!("{url}: {error:?}"))
}

/// As [`works`], by way of servers for which somebody has vouched.
async fn works_at<'a>(url: &str, servers: impl IntoIterator<Item = &'a Redis>) -> Locks {
    vouch(url, servers);
    works(url).await
}

/// Whether a lock can be used through this URL.
async fn works(url: &str) -> Locks {
    let locks = connect(url).await;
    release(lock(&locks, &unique("works")).await).await;
    locks
}

/// The error of a URL that is refused, of this kind and with these words. It shows no secret.
async fn refused(url: &str, kind: ErrorKind, words: &[&str]) -> Error {
    let error = clinch::connect(url).await.map(drop).expect_err(url);
    for shown in [error.to_string(), format!("{error:?}"), format!("{error:#?}")] {
        assert!(!shown.contains(SECRET), "{url}: {shown}");
    }
    assert_eq!(error.kind(), kind, "{url}: {error:?}");
    for word in words {
        assert!(error.to_string().contains(word), "{url}: no \"{word}\" in: {error}");
    }
    error
}

#[test]
fn everything_works_without_a_runtime() {
    contend_without_a_runtime(&url(&SERVERS, DURABLE));
}

#[test]
fn everything_works_where_the_runtime_is_gone() {
    contend_where_the_runtime_is_gone(&url(&SERVERS, DURABLE));
}
