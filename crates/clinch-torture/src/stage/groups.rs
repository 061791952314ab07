//! Several Redis servers that copy each other: behind sentinels, and as a Cluster.

use std::collections::BTreeSet;
use std::time::Duration;

use clinch_testkit::{Cluster, Redis, Reply, Sentinel, slot_of};
use clinch_verify::{Property, Rules};

use super::{Extent, SLACK, Stage, last};
use crate::cells::Fault;
use crate::dice::Dice;

/// A master with replicas, of which sentinels make another one the master.
pub(crate) struct Watched(Sentinel);

impl Watched {
    pub(crate) fn start() -> Watched {
        Watched(Sentinel::start())
    }
}

impl Stage for Watched {
    fn url(&self) -> String {
        self.0.url()
    }

    fn direct(&self) -> Option<String> {
        Some(self.url())
    }

    /// A failover may lose a release, too: the lock then stays taken until its lease ends.
    fn longest_ttl(&self) -> Duration {
        Duration::from_secs(5)
    }

    fn faults(&self) -> Vec<Fault> {
        vec![Fault::Failover, Fault::ServerKill, Fault::ServerStop]
    }

    /// A master may have granted what its replicas have yet to hear of.
    fn remembers(&self) -> bool {
        false
    }

    fn rules(&self) -> Rules {
        Rules { slack: SLACK, ..Rules::default() }.only(&[Property::Tokens, Property::Leak])
    }

    fn strike(&self, fault: Fault, dice: &mut Dice) -> Extent {
        match fault {
            Fault::Failover => {
                self.0.failover();
            }
            Fault::ServerKill => {
                let old = self.0.kill_master();
                self.0.wait_for_new_master(old);
                last(dice);
                self.0.nodes().iter().filter(|node| node.port() == old).for_each(Redis::restart);
            }
            Fault::ServerStop => {
                let stopped = match dice.chance(50) {
                    true => *dice.pick(&self.0.replicas()),
                    false => dice.pick(self.0.sentinels()),
                };
                stopped.pause();
                last(dice);
                stopped.resume();
            }
            _ => return Extent::None,
        }
        self.0.wait_until_ready();
        Extent::Any
    }
}

/// A Cluster whose slots move.
pub(crate) struct Slots(Cluster);

impl Slots {
    pub(crate) fn start() -> Slots {
        Slots(Cluster::start())
    }

    /// Moves the slot of some lock to another master, with pauses in the middle.
    fn reshard(&self, dice: &mut Dice) -> Extent {
        let masters = self.0.masters();
        let keys: BTreeSet<String> = masters.iter().filter_map(|master| some_key(master)).collect();
        let keys: Vec<String> = keys.into_iter().collect();
        if keys.is_empty() {
            return Extent::None;
        }
        let slot = slot_of(dice.pick(&keys).as_bytes());
        let owner = self.0.owner(slot).port();
        let others: Vec<_> = masters.into_iter().filter(|master| master.port() != owner).collect();
        let to: &&Redis = dice.pick(&others);
        let migration = self.0.begin_migration(slot, to);
        std::thread::sleep(dice.ms(0, 1200));
        migration.move_keys();
        std::thread::sleep(dice.ms(0, 1200));
        migration.move_keys();
        migration.finish();
        Extent::Any
    }
}

fn some_key(master: &Redis) -> Option<String> {
    match master.client().try_call(&["RANDOMKEY"]) {
        Ok(Reply::Text(key)) => Some(key),
        _ => None,
    }
}

impl Stage for Slots {
    fn url(&self) -> String {
        self.0.url()
    }

    fn direct(&self) -> Option<String> {
        Some(self.url())
    }

    fn faults(&self) -> Vec<Fault> {
        vec![Fault::Reshard, Fault::ServerStop]
    }

    fn strike(&self, fault: Fault, dice: &mut Dice) -> Extent {
        match fault {
            Fault::Reshard => self.reshard(dice),
            // Shorter than what makes its replica the master, which may not know of all locks.
            Fault::ServerStop => {
                let node = dice.pick(self.0.nodes());
                node.pause();
                std::thread::sleep(dice.ms(50, 500));
                node.resume();
                self.0.wait_until_ready();
                Extent::Any
            }
            _ => Extent::None,
        }
    }
}
