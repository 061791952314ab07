//! `etcd://`: the conformance suite on servers of two versions, with and without TLS and users, and on a cluster.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use clinch::Env;
use clinch::backend::Backend;
use clinch::conformance::Fixture;
use clinch_testkit::{Etcd, EtcdCluster, etcd_3_5};

/// One server, or cluster, for all properties of a kind.
struct OnServer(String);

#[async_trait]
impl Fixture for OnServer {
    async fn connect(&self, env: &Env) -> Arc<dyn Backend> {
        clinch::backends::etcd::open(&self.0, env.clone()).await.unwrap()
    }

    fn url(&self) -> Option<String> {
        Some(self.0.clone())
    }

    /// etcd keeps a lease for 2 s at least; a shorter TTL is kept by the client, and the lock comes free later.
    fn ttl(&self) -> Duration {
        Duration::from_secs(1)
    }
}

mod debian {
    use super::*;

    static SERVER: LazyLock<Etcd> = LazyLock::new(Etcd::start);

    clinch::conformance!(OnServer(SERVER.url()));
}

mod version_3_5 {
    use super::*;

    static SERVER: LazyLock<Etcd> = LazyLock::new(|| Etcd::builder().binary(etcd_3_5()).start());

    clinch::conformance!(OnServer(SERVER.url()));
}

mod cluster {
    use super::*;

    static SERVERS: LazyLock<EtcdCluster> = LazyLock::new(EtcdCluster::start);

    clinch::conformance!(OnServer(SERVERS.url()));
}
