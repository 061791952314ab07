//! Locks on a quorum of five Redis servers of the bench's own, which know nothing of each other.

pub(super) mod contention;
pub(super) mod pair;
pub(crate) mod stopped;
mod votes;

use std::time::{Duration, Instant};

use clinch_testkit::Redis;

use crate::Result;

/// How many servers, and how many of them decide.
const SERVERS: usize = 5;
const QUORUM: usize = 3;

/// A TTL after which freshly started servers vote, so that no scenario has to wait for longer.
const SHORT: &str = "max_ttl=2s&ttl=2s";
const SHORT_SECONDS: u64 = 2;

/// How long servers may take until they vote.
const PATIENCE: Duration = Duration::from_secs(20);

/// The servers.
struct Servers {
    all: Vec<Redis>,
    urls: Vec<String>,
}

impl Servers {
    fn start(one: impl Fn() -> Result<Redis>) -> Result<Servers> {
        let all = (0..SERVERS).map(|_| one()).collect::<Result<Vec<_>>>()?;
        let urls = all.iter().map(Redis::url).collect();
        Ok(Servers { all, urls })
    }

    /// Servers that forget everything when they are restarted, and all vote on [`SHORT`] leases already.
    fn voting() -> Result<Servers> {
        let servers = Servers::start(crate::redis_server::start)?;
        let until = Instant::now() + PATIENCE;
        while servers.least_uptime()? <= SHORT_SECONDS {
            if Instant::now() > until {
                return Err(format!("after {PATIENCE:?}, a server has not run for {SHORT_SECONDS}s").into());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(servers)
    }

    /// For how many seconds the last one that was started has run, as it says itself.
    fn least_uptime(&self) -> Result<u64> {
        let uptime = |server: &Redis| {
            let info = server.try_client()?.info("server");
            Ok(info.get("uptime_in_seconds").ok_or("a server does not tell its uptime")?.parse()?)
        };
        let uptimes = self.all.iter().map(uptime).collect::<Result<Vec<u64>>>()?;
        Ok(uptimes.into_iter().min().unwrap_or_default())
    }

    /// The URL by which our library locks on all of them.
    fn url(&self, query: &str) -> String {
        let hosts: Vec<String> = self.all.iter().map(|server| server.addr().to_string()).collect();
        format!("redlock://{}?{query}", hosts.join(","))
    }
}
