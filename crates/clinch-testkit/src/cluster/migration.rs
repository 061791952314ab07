//! The move of a slot from one master to another, step by step, so that a test can stand in the middle.

use super::Cluster;
use crate::redis::Redis;
use crate::wait::until;

/// Keys that are moved at a time.
const BATCH: &str = "100";

/// A slot on its way. Between the steps the old owner answers `ASK` for keys that it has no more.
#[derive(Debug)]
#[must_use = "a slot that is left on its way makes the cluster answer ASK for ever"]
pub struct Migration<'a> {
    cluster: &'a Cluster,
    slot: u16,
    from: &'a Redis,
    to: &'a Redis,
}

impl<'a> Migration<'a> {
    pub(super) fn begin(cluster: &'a Cluster, slot: u16, to: &'a Redis) -> Migration<'a> {
        let from = cluster.owner(slot);
        assert_ne!(from.port(), to.port(), "the slot is there already");
        let number = slot.to_string();
        to.call(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &id(from)]);
        from.call(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &id(to)]);
        Migration { cluster, slot, from, to }
    }

    /// The owner until [`finish`](Migration::finish).
    pub fn from(&self) -> &'a Redis {
        self.from
    }

    /// The owner from then on.
    pub fn to(&self) -> &'a Redis {
        self.to
    }

    /// Moves one key, which must exist.
    pub fn move_key(&self, key: &str) {
        self.migrate(&[key.to_owned()]);
    }

    /// Moves all keys that the slot has now.
    pub fn move_keys(&self) {
        loop {
            let slot = self.slot.to_string();
            let keys = self.from.call(&["CLUSTER", "GETKEYSINSLOT", &slot, BATCH]).array();
            if keys.is_empty() {
                return;
            }
            let keys: Vec<String> = keys.into_iter().map(crate::Reply::text).collect();
            self.migrate(&keys);
        }
    }

    /// Makes the new owner the owner, and waits until all nodes that are up know it.
    pub fn finish(self) {
        let owner = id(self.to);
        let others = self.cluster.masters().into_iter();
        let others = others.filter(|node| ![self.to.port(), self.from.port()].contains(&node.port()));
        // The new owner first: nobody may send it a client before it knows.
        for node in [self.to, self.from].into_iter().chain(others) {
            node.call(&["CLUSTER", "SETSLOT", &self.slot.to_string(), "NODE", &owner]);
        }
        until("all nodes know the slot's new owner", || {
            self.cluster.agreed_owner(self.slot).is_some_and(|owner| owner.port() == self.to.port())
        });
    }

    fn migrate(&self, keys: &[String]) {
        let port = self.to.port().to_string();
        let mut command = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "30000", "KEYS"];
        command.extend(keys.iter().map(String::as_str));
        self.from.call(&command);
    }
}

fn id(node: &Redis) -> String {
    node.call(&["CLUSTER", "MYID"]).text()
}
