//! The servers that a store is made of, and what can be done to them and to the way there.

mod alone;
mod etcd;
mod groups;
mod local;
mod network;
mod redlock;

use std::time::Duration;

use clinch_verify::Rules;

use crate::cells::{Fault, Step};
use crate::dice::Dice;

/// How long a lock may stay free while somebody waits, in nanoseconds: as long as faults in a row can keep everybody from it.
const SLACK: u64 = 30_000_000_000;

/// How many servers a fault has harmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// It was not possible at this time.
    None,
    /// No more than a store goes on without.
    Minority,
    /// Perhaps more.
    Any,
}

/// A store with its servers.
pub(crate) trait Stage: Sync {
    /// How workers reach it.
    fn url(&self) -> String;

    /// How an operator does, whom no fault of the network shall keep from it; none where no other process sees the store.
    fn direct(&self) -> Option<String>;

    /// What may be done to workers.
    fn harms(&self) -> Vec<Fault> {
        vec![Fault::Kill, Fault::Stop, Fault::Block]
    }

    /// For how long a worker is stopped at most, in milliseconds.
    fn longest_stop(&self) -> u64 {
        6000
    }

    /// The longest lease that it gives.
    fn longest_ttl(&self) -> Duration {
        Duration::from_secs(600)
    }

    /// What may be done to servers without that any promise is off.
    fn faults(&self) -> Vec<Fault>;

    /// Does one of these, for as long as the dice say, and undoes it.
    fn strike(&self, fault: Fault, dice: &mut Dice) -> Extent;

    /// Whether it has readers.
    fn shared(&self) -> bool {
        true
    }

    /// Whether a lease ends by itself.
    fn expiry(&self) -> bool {
        true
    }

    /// What claims are doing of which an operator takes some away.
    fn breaks(&self) -> &[Step] {
        &[Step::Hold, Step::Lock]
    }

    /// Whether none of that makes the store forget what it acknowledged.
    fn remembers(&self) -> bool {
        true
    }

    /// What is promised.
    fn rules(&self) -> Rules {
        Rules { slack: SLACK, ..Rules::default() }
    }
}

/// The names of all stores.
pub(crate) const STORES: &[&str] = &["memory", "file", "redis", "sentinel", "cluster", "redlock", "etcd"];

/// Starts the servers of a store.
pub(crate) fn start(store: &str) -> Option<Box<dyn Stage>> {
    Some(match store {
        "memory" => Box::new(local::Memory),
        "file" => Box::new(local::Files::new()),
        "redis" => Box::new(alone::Alone::start()),
        "sentinel" => Box::new(groups::Watched::start()),
        "cluster" => Box::new(groups::Slots::start()),
        "redlock" => Box::new(redlock::Redlock::start()),
        "etcd" => Box::new(etcd::Members::start()),
        _ => return None,
    })
}

/// For how long a fault is on: mostly shorter than what anybody gives up after, now and then longer than many a TTL.
fn some_time(dice: &mut Dice) -> Duration {
    if dice.chance(75) { dice.ms(150, 1200) } else { dice.ms(1500, 5000) }
}

/// Lets a fault be on for a while.
fn last(dice: &mut Dice) {
    std::thread::sleep(some_time(dice));
}
