//! `redlock://`: the conformance suite on three and on five servers.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::sync::{Arc, LazyLock};

use async_trait::async_trait;
use clinch::Env;
use clinch::backend::Backend;
use clinch::conformance::Fixture;
use clinch_testkit::Redis;

/// One set of servers for all properties of a kind.
struct OnServers(String);

#[async_trait]
impl Fixture for OnServers {
    async fn connect(&self, env: &Env) -> Arc<dyn Backend> {
        clinch::backends::redis::redlock::open(&self.0, env.clone()).await.unwrap()
    }

    fn url(&self) -> Option<String> {
        Some(self.0.clone())
    }
}

/// Servers that forget nothing when they restart, and vote at once by a [`url`].
fn durable(count: usize) -> Vec<Redis> {
    let server = || Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always").start();
    (0..count).map(|_| server()).collect()
}

fn url(servers: &[Redis], query: &str) -> String {
    let hosts: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
    let url = format!("redlock://{}?durable=on&max_ttl=24h{query}", hosts.join(","));
    // A property states another drift, and so is of another group.
    for drift in ["10", "25"] {
        clinch_testkit::vouch(&format!("{url}&drift={drift}"), servers);
    }
    url
}

mod three {
    use super::*;

    static SERVERS: LazyLock<Vec<Redis>> = LazyLock::new(|| durable(3));

    clinch::conformance!(OnServers(url(&SERVERS, "")));
}

mod five {
    use super::*;

    static SERVERS: LazyLock<Vec<Redis>> = LazyLock::new(|| durable(5));

    clinch::conformance!(OnServers(url(&SERVERS, "")));
}

mod without_tokens {
    use super::*;

    static SERVERS: LazyLock<Vec<Redis>> = LazyLock::new(|| durable(3));

    clinch::conformance!(OnServers(url(&SERVERS, "&fencing=off")));
}
