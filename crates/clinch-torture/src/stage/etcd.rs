//! Three members of an etcd cluster.

use clinch_testkit::{Etcd, EtcdCluster, Proxy};

use super::network::{self, some_of};
use super::{Extent, Stage, last};
use crate::cells::Fault;
use crate::dice::Dice;

const MEMBERS: usize = 3;

pub(crate) struct Members {
    cluster: EtcdCluster,
    ways: Vec<Proxy>,
}

impl Members {
    pub(crate) fn start() -> Members {
        let cluster = Etcd::builder().partitions().start_cluster(MEMBERS);
        let ways = cluster.members().iter().map(|member| Proxy::start(member.addr())).collect();
        Members { cluster, ways }
    }
}

impl Stage for Members {
    fn url(&self) -> String {
        let hosts: Vec<String> = self.ways.iter().map(|way| way.addr().to_string()).collect();
        format!("etcd://{}", hosts.join(","))
    }

    fn direct(&self) -> Option<String> {
        Some(self.cluster.url())
    }

    fn faults(&self) -> Vec<Fault> {
        let server = [Fault::ServerStop, Fault::ServerKill, Fault::AllKill, Fault::Partition];
        [network::FAULTS, &server].concat()
    }

    fn strike(&self, fault: Fault, dice: &mut Dice) -> Extent {
        match fault {
            // Not the leader: one that stood still and wakes may end leases that its successor has renewed (etcd#15247).
            Fault::ServerStop => {
                let member = self.cluster.follower();
                member.pause();
                // Now and then for longer than leases that are renewed: the other two keep all of them.
                if dice.chance(30) {
                    std::thread::sleep(dice.ms(9000, 12_000))
                } else {
                    last(dice)
                }
                member.resume();
                return Extent::Minority;
            }
            Fault::ServerKill => {
                let member = *dice.pick(&[self.cluster.leader(), self.cluster.follower()]);
                member.kill();
                last(dice);
                member.restart();
            }
            Fault::AllKill => {
                self.cluster.members().iter().for_each(Etcd::kill);
                last(dice);
                self.cluster.members().iter().for_each(Etcd::start_again);
                self.cluster.members().iter().for_each(Etcd::becomes_ready);
            }
            Fault::Partition => {
                let member = *dice.pick(&[self.cluster.leader(), self.cluster.follower()]);
                self.cluster.cut_off(member);
                last(dice);
                self.cluster.heal();
                self.cluster.members().iter().for_each(Etcd::becomes_ready);
            }
            other => network::strike(other, &some_of(&self.ways, MEMBERS, dice), dice),
        }
        Extent::Any
    }
}
