//! Members that make up a cluster, and what can come between them.

use super::Etcd;
use crate::port::Port;
use crate::proxy::Proxy;
use crate::wait::until;

/// Members of one cluster.
#[derive(Debug)]
pub struct EtcdCluster {
    pub(super) members: Vec<Etcd>,
}

impl EtcdCluster {
    /// Three of Debian's servers.
    pub fn start() -> EtcdCluster {
        Etcd::builder().start_cluster(3)
    }

    /// The members.
    pub fn members(&self) -> &[Etcd] {
        &self.members
    }

    /// The URL of all members.
    pub fn url(&self) -> String {
        let addrs: Vec<String> = self.members.iter().map(|member| member.addr().to_string()).collect();
        format!("etcd://{}", addrs.join(","))
    }

    /// The URL of all members but one.
    pub fn url_without(&self, member: &Etcd) -> String {
        let others = self.members.iter().filter(|other| other.addr() != member.addr());
        let addrs: Vec<String> = others.map(|other| other.addr().to_string()).collect();
        format!("etcd://{}", addrs.join(","))
    }

    /// Parts a member from all others: nothing passes in either direction, neither bytes nor the end of a connection.
    /// Clients reach it as before. Panics unless the cluster was started with [`partitions`](super::EtcdBuilder::partitions).
    pub fn cut_off(&self, member: &Etcd) {
        for other in &self.members {
            let proxy = other.peer.proxy.as_ref().expect("members reach each other through proxies");
            match other.addr() == member.addr() {
                true => proxy.black_hole(true),
                false => proxy.hold_process(Some(member.pid())),
            }
        }
    }

    /// Lets all members reach each other again. What was under way between them arrives now.
    pub fn heal(&self) {
        for proxy in self.members.iter().filter_map(|member| member.peer.proxy.as_ref()) {
            proxy.black_hole(false);
            proxy.hold_process(None);
        }
    }

    /// The member that leads, once there is one.
    #[track_caller]
    pub fn leader(&self) -> &Etcd {
        let mut leader = None;
        until("the cluster has a leader", || {
            leader = self.members.iter().position(Etcd::is_leader);
            leader.is_some()
        });
        &self.members[leader.expect("there is one")]
    }

    /// A member that does not lead.
    #[track_caller]
    pub fn follower(&self) -> &Etcd {
        let leader = self.leader().pid();
        self.members.iter().find(|member| member.pid() != leader).expect("a cluster of several")
    }
}

/// Where the other members find one.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) port: Port,
    /// What they are led through.
    proxy: Option<Proxy>,
}

impl Peer {
    pub(super) fn new(behind_proxy: bool) -> Peer {
        let port = Port::free();
        let proxy = behind_proxy.then(|| Proxy::start(port.addr()));
        Peer { port, proxy }
    }

    pub(super) fn url(&self) -> String {
        let addr = self.proxy.as_ref().map_or(self.port.addr(), Proxy::addr);
        format!("http://{addr}")
    }
}
