//! `redis://`: the conformance suite on every form of server, and the hazards that only Redis has.

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
use clinch_testkit::{Redis, tools};

/// One server for all properties of a kind.
struct OnServer(String);

#[async_trait]
impl Fixture for OnServer {
    async fn connect(&self, env: &Env) -> Arc<dyn Backend> {
        clinch::backends::redis::open(&self.0, env.clone()).await.unwrap()
    }

    fn url(&self) -> Option<String> {
        Some(self.0.clone())
    }
}

mod standalone {
    use super::*;

    static SERVER: LazyLock<Redis> = LazyLock::new(Redis::start);

    clinch::conformance!(OnServer(SERVER.url()));
}

mod protocol_2 {
    use super::*;

    static SERVER: LazyLock<Redis> = LazyLock::new(Redis::start);

    clinch::conformance!(OnServer(format!("{}?protocol=resp2", SERVER.url())));
}

mod unix_socket {
    use super::*;

    static SERVER: LazyLock<Redis> = LazyLock::new(|| Redis::builder().unix_socket().start());

    clinch::conformance!(OnServer(SERVER.url()));
}

mod encrypted {
    use super::*;

    static SERVER: LazyLock<Redis> = LazyLock::new(|| Redis::builder().tls().start());

    clinch::conformance!(OnServer(SERVER.url()));
}

mod lean {
    use super::*;

    static SERVER: LazyLock<Redis> = LazyLock::new(Redis::start);

    clinch::conformance!(OnServer(format!("{}?lean=on", SERVER.url())));
}

mod valkey_without_scripts {
    use super::*;

    const RULES: &str = "on >pw ~clinch:* -@all +set +delifeq +getrange +pttl +scan +info";

    static SERVER: LazyLock<Redis> =
        LazyLock::new(|| Redis::builder().binary(tools::valkey()).acl_user("lean", RULES).start());

    clinch::conformance!(OnServer(SERVER.url_as("lean", "pw")));
}

mod redis_8 {
    use super::*;

    static SERVER: LazyLock<Redis> = LazyLock::new(|| Redis::builder().binary(tools::redis_8()).start());

    clinch::conformance!(OnServer(SERVER.url()));
}
