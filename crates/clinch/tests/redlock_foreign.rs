//! `redlock://` beside the Redlock clients that fleets already run: over the same servers, they exclude us and we exclude
//! them.
//!
//! With an empty prefix the lock's key is its name and nothing else. Each property runs with each client, on servers of
//! its own.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

mod foreign {
    pub(crate) mod contention;
    pub(crate) mod held;
    pub(crate) mod ledger;
    pub(crate) mod ours;
    pub(crate) mod quorum;
    pub(crate) mod rust;
    pub(crate) mod starvation;
    pub(crate) mod worker;

    use clinch::Locks;
    use clinch_testkit::Redis;

    pub(crate) use ours::{
        LONG, NAME, PATIENCE, SOON, lock_in_background, soon, values, we_could_lock, within,
    };
    pub(crate) use worker::{Foreign, Worker};

    /// Three servers that vote at once. None restarts, so none need sync what it appends.
    pub(crate) fn start() -> Vec<Redis> {
        (0..3)
            .map(|_| Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always").start())
            .collect()
    }

    /// A client of ours with long leases. `options` go into the URL.
    pub(crate) async fn connect_to(servers: &[Redis], options: &str) -> Locks {
        let hosts: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
        let url = format!("redlock://{}?durable=on&max_ttl=24h&prefix={options}", hosts.join(","));
        clinch_testkit::vouch(&url, servers);
        clinch::connect(&url).await.unwrap().ttl(LONG).unwrap()
    }
}

use foreign::{Foreign, contention, held, quorum, starvation};

macro_rules! properties {
    ($client:ident: $($group:ident::$name:ident),* $(,)?) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            $group::$name(Foreign::$client).await;
        }
    )*};
}

/// All properties with one client of all servers.
macro_rules! beside {
    ($module:ident, $client:ident) => {
        mod $module {
            use super::*;

            properties!($client:
                contention::no_update_is_lost_and_nobody_meets,
                quorum::what_they_hold_we_wait_for_without_asking,
                quorum::what_they_hold_we_poll_for_without_push,
                quorum::what_they_hold_when_they_die_comes_to_us,
                quorum::their_renewals_grant_nothing_and_their_removal_wakes_us,
                held::what_we_hold_they_get_after_our_release,
                held::what_we_hold_they_get_after_our_lease_and_we_know_first,
                held::a_deleted_lock_is_lost_and_theirs_is_left_alone,
                starvation::our_constant_load_leaves_them_a_gap,
                starvation::their_constant_load_leaves_us_a_turn,
            );
        }
    };
}

beside!(redlock, Redlock);
beside!(rslock, Rslock);

mod redis_py {
    use super::*;

    properties!(RedisPy: quorum::a_client_of_one_server_keeps_nobody_out);
}

mod redis_cli {
    use super::*;

    properties!(RedisCli: quorum::a_client_of_one_server_keeps_nobody_out);
}
