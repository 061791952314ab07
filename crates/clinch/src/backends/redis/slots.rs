//! Which server of a Cluster has which hash slots.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::dial::Endpoint;
use super::reply::{list, number};
use super::resp::Value;
use super::route::Node;
use super::settings::Address;
use crate::error::Result;

/// Who has which slots, as far as is known.
#[derive(Default)]
pub(super) struct Map {
    nodes: HashMap<Address, Arc<Node>>,
    /// First slot of a range -> last slot and owner.
    slots: BTreeMap<u16, (u16, Arc<Node>)>,
}

/// A range of slots, by its first and its last, and the server that has it.
pub(super) type Range = (u16, u16, Address);

impl Map {
    /// The server that has a slot.
    pub(super) fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        let (_, (last, node)) = self.slots.range(..=slot).next_back()?;
        (slot <= *last).then(|| node.clone())
    }

    /// The server at an address, known from now on.
    pub(super) fn node(&mut self, address: Address) -> Arc<Node> {
        let new = || Node::new(Endpoint::At(address.clone()));
        self.nodes.entry(address.clone()).or_insert_with(new).clone()
    }

    /// Takes one slot out of its range.
    pub(super) fn assign(&mut self, slot: u16, node: Arc<Node>) {
        let range =
            self.slots.range(..=slot).next_back().map(|(first, (last, old))| (*first, *last, old.clone()));
        if let Some((first, last, old)) = range.filter(|(_, last, _)| slot <= *last) {
            self.slots.remove(&first);
            if first < slot {
                self.slots.insert(first, (slot - 1, old.clone()));
            }
            if slot < last {
                self.slots.insert(slot + 1, (last, old));
            }
        }
        self.slots.insert(slot, (slot, node));
    }

    /// Forgets all slots for these.
    pub(super) fn replace(&mut self, ranges: Vec<Range>) {
        self.slots.clear();
        for (first, last, address) in ranges {
            let node = self.node(address);
            self.slots.insert(first, (last, node));
        }
    }

    /// Forgets who has the slots of a server.
    pub(super) fn forget(&mut self, node: &Arc<Node>) {
        self.slots.retain(|_, (_, owner)| !Arc::ptr_eq(owner, node));
    }

    /// The servers that have slots.
    pub(super) fn owners(&self) -> Vec<Arc<Node>> {
        let mut owners: Vec<Arc<Node>> = Vec::new();
        for (_, node) in self.slots.values() {
            if !owners.iter().any(|known| Arc::ptr_eq(known, node)) {
                owners.push(node.clone());
            }
        }
        owners
    }

    /// All servers that were ever heard of, these first.
    pub(super) fn known(&mut self, seeds: &[Address]) -> Vec<Arc<Node>> {
        let seeds: Vec<_> = seeds.iter().map(|seed| self.node(seed.clone())).collect();
        let others = self.nodes.values().filter(|node| !seeds.iter().any(|seed| Arc::ptr_eq(seed, node)));
        let others: Vec<_> = others.cloned().collect();
        [seeds, others].concat()
    }
}

/// Reads the answer to `CLUSTER SLOTS` that a server gave. One that does not know its own name leaves its host out.
pub(super) fn ranges(answer: &Value, answerer: &Endpoint) -> Result<Vec<Range>> {
    let mut ranges = Vec::new();
    for range in list(answer)? {
        let [first, last, master, ..] = list(range)? else { continue };
        let [host, port, ..] = list(master)? else { continue };
        let host = match (host.text(), answerer) {
            (Some(host), _) if !host.is_empty() && host != "?" => host,
            (_, Endpoint::At(Address::Tcp(same, _))) => same,
            _ => continue,
        };
        let range =
            (u16::try_from(number(first)?), u16::try_from(number(last)?), u16::try_from(number(port)?));
        if let (Ok(first), Ok(last), Ok(port)) = range {
            ranges.push((first, last, Address::Tcp(host.to_owned(), port)));
        }
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slot_moves_and_the_others_stay() {
        let mut map = Map::default();
        let node = |map: &mut Map, port| map.node(Address::Tcp("h".into(), port));
        let (one, two) = (node(&mut map, 1), node(&mut map, 2));
        map.slots.insert(10, (20, one.clone()));
        for slot in [15, 10, 20, 30] {
            map.assign(slot, two.clone());
        }
        for slot in 0..=40 {
            let wanted = match slot {
                10 | 15 | 20 | 30 => Some(&two),
                11..=19 => Some(&one),
                _ => None,
            };
            let owner = map.owner(slot);
            assert_eq!(owner.as_ref().map(Arc::as_ptr), wanted.map(Arc::as_ptr), "slot {slot}");
        }
    }
}
