//! The conformance suite: the promises of this crate as properties that every backend must have.
//!
//! One property per function, named after the hazard. A property takes a [`Fixture`], which makes clients of one store,
//! and panics with what went wrong. What differs between stores is a capability, never a store's name: a property that
//! rests on a capability checks what a store without it must do instead. Nothing here sleeps to hope and nothing judges
//! speed: state is polled under a generous deadline, and order is read from histories and from deadlines.
//!
//! | group | hazards |
//! | --- | --- |
//! | [`cancel`] | futures dropped at every poll |
//! | [`ends`] | what goes on after its end: stopped holders, releases in doubt, closed clients |
//! | [`executors`] | callers that run no tokio |
//! | [`loss`] | stalled keepers, cut-off clients, lost answers, releases that come too late |
//! | [`mutex`] | two holders, overtaking, leaked locks |
//! | [`names`] | names that a store would fold, cut or take for something else |
//! | [`operators`] | eviction, closed locks, detached leases, closing |
//! | [`processes`] | killed processes |
//! | [`renewals`] | renewals answered late, out of order or for another; places that nobody renews |
//! | [`rwlock`] | starved writers, readers beside a writer |
//! | [`semaphore`] | too many permits, disagreement about the capacity |
//! | [`steps`] | steps of a backend that are not idempotent, capabilities that are not true |
//! | [`time`] | odd time-outs and TTLs, deadlines that come too late, blocked runtimes |
//!
//! # Examples
//!
//! A backend's test file is its fixture and one line:
//!
//! ```
//! use std::sync::Arc;
//!
//! use clinch::backend::Backend;
//! use clinch::backends::memory::Memory;
//! use clinch::conformance::Fixture;
//! use clinch::{Env, Lane};
//!
//! struct InMemory(Memory);
//!
//! #[async_trait::async_trait]
//! impl Fixture for InMemory {
//!     async fn connect(&self, env: &Env) -> Arc<dyn Backend> {
//!         Arc::new(self.0.client(env.clone()))
//!     }
//! }
//!
//! clinch::conformance!(InMemory(Memory::new(Env::host(Lane::thread()))));
//! ```

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "this is test code: a violated property is a panic"
)]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::backend::Backend;
use crate::env::Env;

pub mod cancel;
mod client;
pub mod ends;
pub mod executors;
pub mod faults;
mod history;
pub mod loss;
pub mod mutex;
pub mod names;
pub mod operators;
pub mod processes;
pub mod renewals;
pub mod rwlock;
pub mod semaphore;
pub mod steps;
pub mod time;
mod worker;

pub use worker::worker;

/// How long one property may take before it counts as hung.
const PROPERTY_TIMEOUT: Duration = Duration::from_secs(120);

/// A store to run the properties on, and how to reach it.
#[async_trait]
pub trait Fixture: Sync {
    /// Another client of the one store, independent of all earlier ones, in this world.
    async fn connect(&self, env: &Env) -> Arc<dyn Backend>;

    /// The URL by which other processes reach the same store with [`connect`](crate::connect). A store whose
    /// [`processes`](crate::Capabilities::processes) is set needs one for the properties of killed processes.
    fn url(&self) -> Option<String> {
        None
    }

    /// A TTL that is short enough to be waited for, and long enough for a busy host to renew in time.
    fn ttl(&self) -> Duration {
        Duration::from_millis(600)
    }
}

/// Runs one property on a thread and runtime of its own. `module` is that of the test.
pub fn run(
    module: &'static str,
    fixture: impl Fixture + Send + 'static,
    property: impl AsyncFnOnce(&dyn Fixture) + Send + 'static,
) {
    worker::remember(module);
    let (done, finished) = std::sync::mpsc::channel::<()>();
    // Panics then name the test.
    let thread =
        std::thread::Builder::new().name(std::thread::current().name().unwrap_or("property").to_owned());
    let thread = thread.spawn(move || {
        let _done = done;
        client::runtime().block_on(property(&fixture));
    });
    let thread = thread.expect("a thread for the property");
    // Nothing is ever sent: the channel closes when the property ends. A property that spins would never let a timer of
    // its own runtime fire, hence the second thread.
    let hangs = finished.recv_timeout(PROPERTY_TIMEOUT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
    assert!(!hangs, "the property was not done within {PROPERTY_TIMEOUT:?}");
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Hands the list of all properties, by group, to another macro. The one place that knows them.
#[doc(hidden)]
#[macro_export]
macro_rules! __for_each_property {
    ([$($then:tt)*] [$($argument:tt)*]) => {
        $($then)*! { [$($argument)*]
            cancel {
                acquiring_permits_dropped_at_every_poll
                downgrading_dropped_at_every_poll
                extending_dropped_at_every_poll
                locking_dropped_at_every_poll
                queueing_dropped_at_every_poll
                reading_dropped_at_every_poll
                releasing_dropped_at_every_poll
                requests_dropped_on_their_way
                running_dropped_at_every_poll
                trying_dropped_at_every_poll
                verifying_dropped_at_every_poll
                writing_dropped_at_every_poll
            }
            ends {
                closed_client_goes_on
                doubtful_release_counts_as_released
                doubtful_run_counts_as_done
                guard_goes_on_after_its_end
                stopped_holder_goes_on
            }
            executors {
                lane_ends
                no_runtime
                runtime_drives_nothing
                runtime_stands_still
                waker_drops_its_task
                waker_panics
            }
            loss {
                claim_not_applied
                jeopardy_not_told
                keeper_stalled
                late_attempt_of_a_refused_try_holds
                late_release_frees_a_successor
                release_not_applied
                reply_lost_on_claim
                reply_lost_on_downgrade
                reply_lost_on_queueing
                reply_lost_on_release
                reply_lost_on_renewal
                reply_lost_on_try
                severed_holder
                severed_waiter
                severed_waiter_comes_back
                tokens_fall_after_loss
            }
            mutex {
                barging_try
                dropped_guard_leaks
                dropped_guard_leaks_in_a_panic
                dropped_guard_leaks_outside_a_runtime
                holders_overlap
                permanent_wait_after_release
                run_without_the_lock
                second_client_shares_a_hold
                tokens_fall
                tokens_fall_after_reconnecting
                unpolled_waiter_blocks
                waiters_overtake
            }
            names {
                bad_names_reach_the_store
                list_by_prefix
                names_collide
            }
            operators {
                close_abandons_releases
                closed_client_claims
                closed_lock_stays_closed
                detached_lease_ends_with_its_client
                evicted_holder_goes_on
                evicted_waiter_blocks
                eviction_lets_two_hold
                eviction_of_nobody
                eviction_seen_by_release
                eviction_seen_by_verify
                lingering_lock_is_granted
                owner_record_is_unreadable
                renewal_by_id_shortens_a_lease
            }
            processes {
                killed_holder_blocks
                killed_holders_overlap
                killed_waiter_blocks
                processes_overlap
                tokens_fall_across_processes
            }
            renewals {
                deadline_counts_from_the_renewals_reply
                eviction_told_to_another_holder
                living_waiter_loses_its_place
                overtaken_renewal_lengthens_a_lease
                shorter_lease_is_not_renewed
                shorter_lease_lives_on
            }
            rwlock {
                downgrade_lets_a_writer_in
                downgrade_shuts_readers_out
                reader_overtakes_a_writer
                readers_exclude_each_other
                readers_meet_a_writer
                waiting_readers_exclude_each_other
                writer_starves
            }
            semaphore {
                big_claim_starves
                capacities_disagree
                impossible_counts
                mixed_modes_overtake
                one_holder_at_a_time
                too_many_permits
            }
            steps {
                claim_applied_twice
                fit_store_is_called_unfit
                lease_outlives_its_ttl
                modes_that_are_not_there
                place_lost_by_asking_again
                release_applied_twice
                release_of_a_stranger
                release_overtakes_the_claim
                renewal_shortens_a_lease
                token_does_not_fit
            }
            time {
                deadline_counts_from_the_extensions_reply
                deadline_counts_from_the_reply
                extension_does_not_extend
                grant_comes_too_late
                held_for_ever
                odd_timeouts
                odd_ttls
                renewed_although_never
                runtime_blocked
                stated_drift_is_ignored
                timed_out_waiter_stays
                unanswered_wait
                unrenewed_lease
            }
        }
    };
}

/// Emits one test per property of the [conformance suite](mod@crate::conformance), run on the store that the expression
/// makes; it is evaluated anew for every property, and may well yield the same store.
///
/// The tests need nothing around them: no runtime, no order, no single thread. One more, `clinch_worker`, does nothing by itself: it
/// is what [processes](crate::conformance::processes) start, as further processes of the same test executable.
#[macro_export]
macro_rules! conformance {
    ($fixture:expr) => {
        $crate::__for_each_property! { [$crate::__conformance_tests] [$fixture] }

        #[test]
        fn clinch_worker() {
            $crate::conformance::worker();
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_tests {
    ([$fixture:expr] $($group:ident { $($property:ident)* })*) => {
        /// The conformance suite.
        mod conformance {
            $(mod $group {
                #[allow(unused_imports, reason = "the fixture expression may need them")]
                use super::super::*;
                $(#[test]
                fn $property() {
                    let module = ::core::module_path!();
                    $crate::conformance::run(module, $fixture, $crate::conformance::$group::$property);
                })*
            })*
        }
    };
}

#[cfg(test)]
mod tests {
    macro_rules! names {
        ([] $($group:ident { $($property:ident)* })*) => {
            [$((concat!(stringify!($group), ".rs"), &[$(stringify!($property)),*] as &[&str])),*]
        };
    }

    /// A property that is not in the list would be run by nobody.
    #[test]
    fn every_property_is_listed() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/conformance");
        for (file, listed) in crate::__for_each_property!([names][]) {
            let source = std::fs::read_to_string(dir.join(file)).unwrap();
            let written =
                source.lines().filter_map(|line| line.strip_prefix("pub async fn ")?.split('(').next());
            let mut written: Vec<_> = written.collect();
            written.sort_unstable();
            assert_eq!(written, listed, "{file}");
        }
    }
}
