//! A Redis Cluster of three masters and three replicas.

use crate::redis::Redis;
use crate::resp::{Reply, Resp};
use crate::wait::{until, until_some};

mod migration;
mod slot;

pub use migration::Migration;
pub use slot::slot_of;

const MASTERS: usize = 3;
const SLOTS: u16 = 16_384;

/// Six nodes of a Redis Cluster; each master has a replica.
#[derive(Debug)]
pub struct Cluster(Vec<Redis>);

/// A range of slots as a node sees it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Range {
    first: i64,
    last: i64,
    master: u16,
    replicas: Vec<u16>,
}

impl Cluster {
    /// Starts all nodes and waits until all of them see the whole cluster and the replicas follow.
    pub fn start() -> Cluster {
        let node = |_| {
            let node = Redis::builder().cluster().arg("--cluster-node-timeout", "1000");
            // A replica that has received nothing yet, not even a ping of its master, is hidden from clients.
            node.arg("--repl-ping-replica-period", "1").start()
        };
        let cluster = Cluster((0..2 * MASTERS).map(node).collect());
        let mut clients: Vec<Resp> = cluster.0.iter().map(Redis::client).collect();
        for (at, client) in clients.iter_mut().enumerate() {
            client.call(&["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()]);
            for other in &cluster.0[..at] {
                client.call(&["CLUSTER", "MEET", "127.0.0.1", &other.port().to_string()]);
            }
        }
        for (at, client) in clients[..MASTERS].iter_mut().enumerate() {
            let bound = |at: usize| usize::from(SLOTS) * at / MASTERS;
            let (first, last) = (bound(at).to_string(), (bound(at + 1) - 1).to_string());
            client.call(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
        }
        until("the nodes have met", || {
            clients.iter_mut().all(|client| {
                let nodes = client.call(&["CLUSTER", "NODES"]).text();
                nodes.lines().filter(|node| !node.contains("handshake")).count() == 2 * MASTERS
            })
        });
        for at in 0..MASTERS {
            let master = clients[at].call(&["CLUSTER", "MYID"]).text();
            clients[MASTERS + at].call(&["CLUSTER", "REPLICATE", &master]);
        }
        cluster.wait_until_ready();
        cluster
    }

    /// The URL that names all nodes.
    pub fn url(&self) -> String {
        let addrs: Vec<String> = self.0.iter().map(|node| node.addr().to_string()).collect();
        format!("redis+cluster://{}", addrs.join(","))
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Redis] {
        &self.0
    }

    /// The nodes that own slots, as all nodes that are up see it.
    #[track_caller]
    pub fn masters(&self) -> Vec<&Redis> {
        let mut ports: Vec<u16> = self.agreed().iter().map(|range| range.master).collect();
        ports.sort_unstable();
        ports.dedup();
        ports.into_iter().map(|port| self.node(port)).collect()
    }

    /// The slot of a key.
    pub fn slot_of(&self, key: &str) -> u16 {
        slot_of(key.as_bytes())
    }

    /// The master that owns the slot of a key, as all nodes that are up see it.
    #[track_caller]
    pub fn master_of(&self, key: &str) -> &Redis {
        self.owner(self.slot_of(key))
    }

    /// A replica of that master.
    #[track_caller]
    pub fn replica_of(&self, key: &str) -> &Redis {
        let slot = i64::from(self.slot_of(key));
        let ranges = self.agreed();
        let range = ranges.iter().find(|range| range.first <= slot && slot <= range.last);
        self.node(*range.and_then(|range| range.replicas.first()).expect("the master has a replica"))
    }

    /// The master that owns a slot, as all nodes that are up see it.
    #[track_caller]
    pub fn owner(&self, slot: u16) -> &Redis {
        until_some("the slot has an owner", || self.agreed_owner(slot))
    }

    /// Waits until all nodes that are up see another owner of the slot than the one on port `old`, and it serves.
    #[track_caller]
    pub fn wait_for_new_owner(&self, slot: u16, old: u16) -> &Redis {
        until_some("the slot has a new owner", || {
            let owner = self.agreed_owner(slot).filter(|owner| owner.port() != old && owner.is_up())?;
            let role = owner.field("replication", "role")?;
            (self.is_ok() && role == "master").then_some(owner)
        })
    }

    /// Moves a slot with all its keys to another master.
    pub fn migrate_slot(&self, slot: u16, to: &Redis) {
        let migration = self.begin_migration(slot, to);
        migration.move_keys();
        migration.finish();
    }

    /// Begins to move a slot to another master; its keys stay where they are.
    pub fn begin_migration<'a>(&'a self, slot: u16, to: &'a Redis) -> Migration<'a> {
        Migration::begin(self, slot, to)
    }

    /// Waits until all nodes that are up agree on all slots, and the replicas that are up follow their masters.
    #[track_caller]
    pub fn wait_until_ready(&self) {
        until("the cluster is ready", || {
            let Some(ranges) = self.view() else { return false };
            let masters: Vec<u16> = ranges.iter().map(|range| range.master).collect();
            let followed = |port: &u16| ranges.iter().any(|range| range.replicas.contains(port));
            self.is_ok()
                && self.up().all(|node| {
                    let port = node.port();
                    masters.contains(&port)
                        || followed(&port)
                            && node
                                .field("replication", "master_link_status")
                                .is_some_and(|link| link == "up")
                })
        });
    }

    fn is_ok(&self) -> bool {
        self.up().all(|node| {
            let info = node.ask(&["CLUSTER", "INFO"]);
            info.is_some_and(|info| info.text().lines().any(|line| line == "cluster_state:ok"))
        })
    }

    fn up(&self) -> impl Iterator<Item = &Redis> {
        self.0.iter().filter(|node| node.is_up())
    }

    #[track_caller]
    fn node(&self, port: u16) -> &Redis {
        self.0.iter().find(|node| node.port() == port).expect("the node is of this cluster")
    }

    #[track_caller]
    fn agreed(&self) -> Vec<Range> {
        until_some("the nodes agree on the slots", || self.view())
    }

    fn agreed_owner(&self, slot: u16) -> Option<&Redis> {
        let slot = i64::from(slot);
        let ranges = self.view()?;
        let range = ranges.iter().find(|range| range.first <= slot && slot <= range.last)?;
        Some(self.node(range.master))
    }

    /// Who has which slots, if all nodes that are up see the same.
    fn view(&self) -> Option<Vec<Range>> {
        let mut views = self.up().map(|node| {
            let slots = node.ask(&["CLUSTER", "SLOTS"])?.array();
            let mut ranges: Vec<Range> = slots.into_iter().map(Range::read).collect();
            ranges.sort();
            Some(ranges)
        });
        let view = views.next()??;
        views.all(|other| other.as_ref() == Some(&view)).then_some(view)
    }
}

impl Range {
    fn read(reply: Reply) -> Range {
        let mut fields = reply.array().into_iter();
        let mut number = || fields.next().expect("a number").int();
        let (first, last) = (number(), number());
        let mut ports =
            fields.map(|node| u16::try_from(node.array()[1].clone().int()).expect("a port of a node"));
        let master = ports.next().expect("a master");
        let mut replicas: Vec<u16> = ports.collect();
        replicas.sort_unstable();
        Range { first, last, master, replicas }
    }
}
