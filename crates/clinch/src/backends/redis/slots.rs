//! Which server of a Cluster has which hash slots.

use std::collections::{BTreeMap, HashMap, HashSet};
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
    /// The names of all servers of the cluster, replicas included.
    names: HashSet<String>,
    /// Who did not answer lately.
    mistrusted: Option<Arc<Node>>,
}

/// What one server says of the cluster.
#[derive(Debug)]
pub(super) struct View {
    pub(super) ranges: Vec<Range>,
    names: HashSet<String>,
}

/// A range of slots, by its first and its last, and the server that has it.
type Range = (u16, u16, Address);

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

    /// Whether a view is of the cluster that is known. An address may have been given to another one, or a server may have
    /// left; a cluster does not change most of its servers at once.
    pub(super) fn is_of_this_cluster(&self, view: &View) -> bool {
        let known = self.names.intersection(&view.names).count();
        self.names.is_empty() || view.names.is_empty() || 2 * known >= self.names.len()
    }

    /// Forgets all slots for these, and all servers that neither have slots nor stand in the URL.
    pub(super) fn replace(&mut self, view: View, seeds: &[Address]) {
        self.slots.clear();
        self.mistrusted = None;
        self.names = view.names;
        self.nodes.retain(|known, _| {
            seeds.contains(known) || view.ranges.iter().any(|(_, _, owner)| owner == known)
        });
        for (first, last, address) in view.ranges {
            let node = self.node(address);
            self.slots.insert(first, (last, node));
        }
    }

    /// Notes that a server did not answer.
    pub(super) fn mistrust(&mut self, node: &Arc<Node>) {
        self.mistrusted = Some(node.clone());
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

    /// All servers that are known, and apart from them who is mistrusted.
    pub(super) fn known(&mut self, seeds: &[Address]) -> [Vec<Arc<Node>>; 2] {
        for seed in seeds {
            self.node(seed.clone());
        }
        let mistrusted = self.mistrusted.as_ref();
        let all = self.nodes.values().cloned();
        let (last, first) =
            all.partition(|node| mistrusted.is_some_and(|mistrusted| Arc::ptr_eq(mistrusted, node)));
        [first, last]
    }
}

impl View {
    /// Reads the answer to `CLUSTER SLOTS` that a server gave.
    pub(super) fn read(answer: &Value, answerer: &Endpoint) -> Result<View> {
        let mut names = HashSet::new();
        for range in list(answer)? {
            for server in list(range)?.iter().skip(2) {
                // Before version 4 they had none.
                names.extend(list(server)?.get(2).and_then(Value::text).map(str::to_owned));
            }
        }
        Ok(View { ranges: ranges(answer, answerer)?, names })
    }
}

/// One that does not know its own name leaves its host out.
fn ranges(answer: &Value, answerer: &Endpoint) -> Result<Vec<Range>> {
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

    /// The answer to `CLUSTER SLOTS` of a cluster of these servers, each with a slot and a replica.
    fn view(servers: &[(&str, u16)]) -> View {
        let text = |text: &str| Value::Text(text.into());
        let ranges = servers.iter().zip(0..).map(|((name, port), slot)| {
            let server = |name: &str, port: u16| {
                Value::List(vec![text("h"), Value::Int(port.into()), text(name), Value::List(Vec::new())])
            };
            let replica = server(&format!("{name}'s replica"), port + 1);
            Value::List(vec![Value::Int(slot), Value::Int(slot), server(name, *port), replica])
        });
        let endpoint = Endpoint::At(Address::Tcp("h".into(), 1));
        View::read(&Value::List(ranges.collect()), &endpoint).unwrap()
    }

    #[test]
    fn only_who_has_slots_or_stands_in_the_url_is_asked_and_who_is_mistrusted_last() {
        let seeds = [Address::Tcp("h".into(), 10)];
        let mut map = Map::default();
        let asked = |map: &mut Map| {
            map.known(&seeds).map(|nodes| {
                let mut ports: Vec<u16> = nodes
                    .iter()
                    .map(|node| match node.endpoint() {
                        Endpoint::At(Address::Tcp(_, port)) => *port,
                        _ => panic!("no port"),
                    })
                    .collect();
                ports.sort_unstable();
                ports
            })
        };
        map.replace(view(&[("a", 10), ("b", 20), ("c", 30)]), &seeds);
        assert_eq!(asked(&mut map), [vec![10, 20, 30], vec![]]);
        let b = map.owner(1).unwrap();
        map.mistrust(&b);
        assert_eq!(asked(&mut map), [vec![10, 30], vec![20]]);
        map.replace(view(&[("d", 40), ("c", 30)]), &seeds);
        assert_eq!(asked(&mut map), [vec![10, 30, 40], vec![]]);
    }

    #[test]
    fn another_cluster_behind_a_known_address_is_told_from_one_that_changes() {
        let mut map = Map::default();
        let first = || view(&[("a", 10), ("b", 20), ("c", 30)]);
        assert!(map.is_of_this_cluster(&first()), "the first one is the one");
        map.replace(first(), &[]);
        assert!(map.is_of_this_cluster(&first()));
        assert!(map.is_of_this_cluster(&view(&[("a", 10), ("d", 20), ("c", 30)])));
        assert!(!map.is_of_this_cluster(&view(&[("x", 10), ("y", 20), ("z", 30)])));
        assert!(!map.is_of_this_cluster(&view(&[("a", 10)])), "it left, and has only itself");
    }
}
