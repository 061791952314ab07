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

mod foreign {
    pub(crate) mod contention;
    pub(crate) mod force;
    pub(crate) mod ledger;
    pub(crate) mod parts;
    pub(crate) mod rust;
    pub(crate) mod starvation;
    pub(crate) mod turns;
    pub(crate) mod values;
    pub(crate) mod worker;

    use std::time::Duration;

    use clinch::{Guard, Locks, Released};
    use clinch_testkit::{Redis, Reply};
    use tokio::task::JoinHandle;

    pub(crate) use worker::{Foreign, Worker};

    /// The lock, and its key.
    pub(crate) const NAME: &str = "job";

    /// How long a state may take to come about before the test counts as failed.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

    /// How long it may take until somebody notices who was told or who polls. Shorter than the 30 s after which a waiter
    /// looks without being told, and than the 40 s after which a place with [`LONG`] is renewed.
    pub(crate) const SOON: Duration = Duration::from_secs(20);

    /// A lease that nobody lives to see the end of.
    pub(crate) const LONG: Duration = Duration::from_secs(120);

    /// A client of ours with long leases. `options` go into the URL.
    pub(crate) async fn connect(server: &Redis, options: &str) -> Locks {
        let url = format!("redis://{}?prefix={options}", server.addr());
        clinch::connect(&url).await.unwrap().ttl(LONG).unwrap()
    }

    /// What the future gives; panics with `what` when that takes longer than `time`.
    #[track_caller]
    pub(crate) fn within<F: Future>(
        time: Duration,
        what: &str,
        future: F,
    ) -> impl Future<Output = F::Output> {
        let place = std::panic::Location::caller();
        async move {
            let result = tokio::time::timeout(time, future).await;
            result.unwrap_or_else(|_| panic!("{place}: waited {time:?} in vain: {what}"))
        }
    }

    /// What a task gives that should be done soon.
    #[track_caller]
    pub(crate) fn soon<T>(what: &str, task: JoinHandle<T>) -> impl Future<Output = T> {
        let result = within(SOON, what, task);
        async { result.await.unwrap() }
    }

    /// Waits for the lock in a task.
    pub(crate) fn lock_in_background(locks: &Locks) -> JoinHandle<Guard> {
        let lock = locks.mutex(NAME).unwrap();
        tokio::spawn(async move { lock.lock().await.unwrap() })
    }

    /// Whether we could take the lock at this moment; it is freed again at once.
    pub(crate) async fn we_could_lock(locks: &Locks) -> bool {
        match locks.mutex(NAME).unwrap().try_lock().await.unwrap() {
            Some(guard) => {
                assert_eq!(guard.release().await.unwrap(), Released::Released);
                true
            }
            None => false,
        }
    }

    /// Waits until so many of ours wait. Asks the server itself, so that our own commands can be counted.
    pub(crate) async fn until_waiting(server: &Redis, waiters: i64) {
        let mut client = server.client();
        let look = async {
            loop {
                let keys = client.call(&["KEYS", &format!("*\0queue:{NAME}")]).array();
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

use foreign::{Foreign, contention, force, parts, starvation, turns};

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
                turns::what_we_hold_they_get_after_our_release,
                turns::what_we_hold_they_get_after_our_lease_and_we_know_first,
                turns::a_closed_lock_is_closed_to_them,
                parts::the_last_of_our_readers_lets_them_in,
                parts::the_last_of_our_permits_lets_them_in,
                parts::our_last_lease_lets_them_in_and_we_know_first,
                parts::a_reader_that_comes_back_late_does_not_free_their_lock,
                force::a_deleted_lock_is_lost_and_theirs_is_left_alone,
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
