//! `redis://` beside the lock clients that fleets already run: on one key, they exclude us and we exclude them.
//!
//! With an empty prefix the lock's key is its name and nothing else. Each property runs with each client, on a server
//! of its own.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

mod common;

mod foreign {
    pub(crate) mod contention;
    pub(crate) mod force;
    pub(crate) mod held;
    pub(crate) mod ledger;
    pub(crate) mod ours;
    pub(crate) mod parts;
    pub(crate) mod rust;
    pub(crate) mod starvation;
    pub(crate) mod turns;
    pub(crate) mod values;
    pub(crate) mod worker;

    use std::time::Duration;

    use clinch::{Env, Lane, Locks};
    use clinch_testkit::{Redis, Reply};
    use tokio::task::JoinHandle;

    use crate::common::{Unkept, queue_unkept};

    pub(crate) use ours::{
        LONG, NAME, PATIENCE, SOON, lock_in_background, soon, values, we_could_lock, within,
    };
    pub(crate) use worker::{Foreign, Worker};

    /// The one server.
    pub(crate) fn start() -> Vec<Redis> {
        vec![Redis::start()]
    }

    /// A client of ours with long leases. `options` go into the URL.
    pub(crate) async fn connect(server: &Redis, options: &str) -> Locks {
        let url = format!("redis://{}?prefix={options}", server.addr());
        clinch::connect(&url).await.unwrap().ttl(LONG).unwrap()
    }

    /// Waits for the lock in a task. It gets in when it is told, or 30 s later.
    pub(crate) async fn wait_to_be_told(server: &Redis) -> JoinHandle<Unkept> {
        let url = format!("redis://{}?prefix=", server.addr());
        let backend = clinch::backends::redis::open(&url, Env::host(Lane::thread())).await.unwrap();
        queue_unkept(backend, NAME).await
    }

    pub(crate) async fn connect_to(servers: &[Redis], options: &str) -> Locks {
        connect(&servers[0], options).await
    }

    /// Waits until so many of ours wait. Asks the server itself, so that our own commands can be counted.
    pub(crate) async fn until_waiting(server: &Redis, waiters: i64) {
        let mut client = server.client();
        let look = async {
            loop {
                let keys = client.call(&["KEYS", &format!("*:queue:{NAME}")]).array();
                let queued =
                    keys.into_iter().next().map_or(0, |key| client.call(&["LLEN", &key.text()]).int());
                if queued == waiters {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within(PATIENCE, &format!("{waiters} wait"), look).await;
    }

    /// What the lock's key holds.
    pub(crate) fn value(server: &Redis) -> Reply {
        server.call(&["GET", NAME])
    }
}

use foreign::{Foreign, contention, force, held, parts, starvation, turns};

macro_rules! properties {
    ($client:ident: $($group:ident::$name:ident),* $(,)?) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            $group::$name(Foreign::$client).await;
        }
    )*};
}

/// All properties with one client.
macro_rules! beside {
    ($module:ident, $client:ident) => {
        mod $module {
            use super::*;

            properties!($client:
                contention::no_update_is_lost_and_nobody_meets,
                turns::what_they_hold_we_wait_for_without_asking,
                turns::what_they_hold_we_poll_for_without_push,
                turns::what_they_hold_when_they_die_comes_to_us,
                turns::their_renewals_grant_nothing_and_their_removal_wakes_us,
                held::what_we_hold_they_get_after_our_release,
                held::what_we_hold_they_get_after_our_lease_and_we_know_first,
                turns::a_closed_lock_is_closed_to_them,
                parts::the_last_of_our_readers_lets_them_in,
                parts::the_last_of_our_permits_lets_them_in,
                parts::our_last_lease_lets_them_in_and_we_know_first,
                parts::a_reader_that_comes_back_late_does_not_free_their_lock,
                held::a_deleted_lock_is_lost_and_theirs_is_left_alone,
                force::a_reader_whose_lock_was_deleted_leaves_theirs_alone,
                force::a_reader_whose_lock_was_taken_is_told,
                starvation::our_constant_load_leaves_them_a_gap,
                starvation::their_constant_load_leaves_us_a_turn,
            );
        }
    };
}

beside!(redis_py, RedisPy);
beside!(redlock, Redlock);
beside!(rslock, Rslock);
beside!(redis_cli, RedisCli);
