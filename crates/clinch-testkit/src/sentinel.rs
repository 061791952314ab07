//! A Redis master with two replicas, watched by three sentinels.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::redis::Redis;
use crate::resp::Reply;
use crate::wait::{until, until_some};

/// The name under which the sentinels know the master.
const NAME: &str = "clinch";

/// A master that does not answer for so long counts as down.
const DOWN_AFTER_MS: u32 = 500;

/// How long a failover may take before another sentinel tries.
const FAILOVER_TIMEOUT_MS: u32 = 3000;

/// After what time a failover that has not come to an end is begun anew: they have given it up long before.
const GIVEN_UP: Duration = Duration::from_secs(10);

/// Sentinels look every 10 s, ask every second and tell each other every 2 s; tests need not wait for that.
const HASTE: [&str; 10] = [
    "SENTINEL",
    "DEBUG",
    "info-period",
    "200",
    "ping-period",
    "100",
    "publish-period",
    "200",
    "ask-period",
    "200",
];

/// Three Redis servers, of which one is the master, and three sentinels with a quorum of two.
#[derive(Debug)]
pub struct Sentinel {
    nodes: Vec<Redis>,
    sentinels: Vec<Redis>,
}

impl Sentinel {
    /// Starts all six and waits until they know each other and the replicas follow the master.
    pub fn start() -> Sentinel {
        let master = Redis::start();
        let replica = || Redis::builder().replica_of(&master).start();
        let replicas = [replica(), replica()];
        let config = format!(
            "sentinel monitor {NAME} 127.0.0.1 {} 2\n\
             sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}\n\
             sentinel failover-timeout {NAME} {FAILOVER_TIMEOUT_MS}\n",
            master.port()
        );
        let sentinel = |_| {
            let sentinel = Redis::builder().sentinel(config.clone()).start();
            sentinel.call(&HASTE);
            sentinel
        };
        let sentinels = (0..3).map(sentinel).collect();
        let group = Sentinel { nodes: [master].into_iter().chain(replicas).collect(), sentinels };
        group.wait_until_ready();
        group
    }

    /// The URL that names all sentinels and the master's name.
    pub fn url(&self) -> String {
        let addrs: Vec<String> = self.sentinels.iter().map(|sentinel| sentinel.addr().to_string()).collect();
        format!("redis+sentinel://{}/{NAME}", addrs.join(","))
    }

    /// The servers, in no particular roles.
    pub fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// The sentinels.
    pub fn sentinels(&self) -> &[Redis] {
        &self.sentinels
    }

    /// The server that the sentinels name the master at this moment.
    #[track_caller]
    pub fn master(&self) -> &Redis {
        until_some("the sentinels name one master", || self.named_master())
    }

    /// The servers that run and are not the master.
    pub fn replicas(&self) -> Vec<&Redis> {
        let master = self.master().port();
        self.nodes.iter().filter(|node| node.is_up() && node.port() != master).collect()
    }

    /// Kills the master and returns its port.
    pub fn kill_master(&self) -> u16 {
        let master = self.master();
        master.kill();
        master.port()
    }

    /// Pauses the master and returns it.
    pub fn pause_master(&self) -> &Redis {
        let master = self.master();
        master.pause();
        master
    }

    /// Has the sentinels make a replica the master, and returns that one when it is.
    #[track_caller]
    pub fn failover(&self) -> &Redis {
        let old = self.master().port();
        let mut begun: Option<Instant> = None;
        until_some("the sentinels make a replica the master", || {
            // There is no good replica for a moment after another failover, and on a busy host one is given up in the middle.
            if begun.is_none_or(|begun| begun.elapsed() > GIVEN_UP) {
                let reply = self.sentinels[0].client().try_call(&["SENTINEL", "FAILOVER", NAME]);
                begun = matches!(reply, Ok(Reply::Text(_))).then(Instant::now);
            }
            self.named_master().filter(|master| master.port() != old && is_master(master))
        })
    }

    /// Waits until all sentinels name another master than the one on port `old`, and it says so itself.
    #[track_caller]
    pub fn wait_for_new_master(&self, old: u16) -> &Redis {
        until_some("the sentinels name a new master", || {
            self.named_master().filter(|master| master.port() != old && is_master(master))
        })
    }

    /// Waits until every server that is up is the master or follows it, and all sentinels know all of that.
    #[track_caller]
    pub fn wait_until_ready(&self) {
        until("the sentinels and replicas are ready", || {
            let Some(master) = self.named_master().filter(|master| is_master(master)) else { return false };
            let mut replicas = self.nodes.iter().filter(|node| node.is_up() && node.port() != master.port());
            replicas.all(|replica| follows(replica, master))
                && self.up_sentinels().all(|sentinel| self.is_informed(sentinel).unwrap_or(false))
        });
    }

    /// Whether a sentinel knows the others and sees the links of all replicas that are up.
    fn is_informed(&self, sentinel: &Redis) -> Option<bool> {
        let master = fields(sentinel.ask(&["SENTINEL", "MASTER", NAME])?);
        let replicas = sentinel.ask(&["SENTINEL", "REPLICAS", NAME])?.array().into_iter().map(fields);
        let linked = replicas.filter(|replica| {
            replica["flags"] == "slave"
                && replica["master-link-status"] == "ok"
                && replica["master-port"] == master["port"]
        });
        let up = self.nodes.iter().filter(|node| node.is_up()).count();
        Some(master["flags"] == "master" && master["num-other-sentinels"] == "2" && linked.count() + 1 == up)
    }

    /// The master, if all sentinels that run name the same.
    fn named_master(&self) -> Option<&Redis> {
        let mut ports = self.up_sentinels().map(|sentinel| {
            let addr = sentinel.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME])?;
            Some(addr.array().pop()?.int())
        });
        let port = ports.next()??;
        if ports.any(|other| other != Some(port)) {
            return None;
        }
        self.nodes.iter().find(|node| i64::from(node.port()) == port)
    }

    fn up_sentinels(&self) -> impl Iterator<Item = &Redis> {
        self.sentinels.iter().filter(|sentinel| sentinel.is_up())
    }
}

fn is_master(node: &Redis) -> bool {
    node.is_up() && node.field("replication", "role").is_some_and(|role| role == "master")
}

/// Whether both ends say that the replica follows the master.
fn follows(replica: &Redis, master: &Redis) -> bool {
    let says = |name: &str, value: &str| replica.field("replication", name).is_some_and(|said| said == value);
    let online = format!("port={},state=online", replica.port());
    says("role", "slave")
        && says("master_port", &master.port().to_string())
        && says("master_link_status", "up")
        && master.ask(&["INFO", "replication"]).is_some_and(|info| info.text().contains(&online))
}

fn fields(reply: Reply) -> BTreeMap<String, String> {
    reply.table().into_iter().map(|(name, value)| (name, value.text())).collect()
}
