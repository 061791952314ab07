//! Locks on a quorum of five Redis servers of the bench's own, which know nothing of each other.

pub(super) mod contention;
pub(super) mod pair;
pub(crate) mod stopped;
mod votes;

use std::time::{Duration, Instant};

use clinch_testkit::Redis;

use crate::worker::runtime;
use crate::{Error, Result};

/// How many servers, and how many of them decide.
const SERVERS: usize = 5;
const QUORUM: usize = 3;

/// A TTL after which freshly started servers vote, so that no scenario has to wait for longer.
const SHORT: &str = "max_ttl=2s&ttl=2s";

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

    /// Servers that forget everything when they are restarted, and already vote on [`SHORT`] leases.
    fn voting() -> Result<Servers> {
        let servers = Servers::start(crate::redis_server::start)?;
        let until = Instant::now() + PATIENCE;
        // A client learns when it connects for how long a server has run.
        while let Err(error) = servers.try_once() {
            if Instant::now() > until {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(servers)
    }

    fn try_once(&self) -> Result<()> {
        runtime()?.block_on(async {
            let locks = clinch::connect(&self.url(SHORT)).await?;
            let guard = locks.mutex("first")?.try_lock().await?.ok_or("somebody has the first lock")?;
            guard.release().await?;
            Ok::<_, Error>(())
        })
    }

    /// The URL by which our library locks on all of them.
    fn url(&self, query: &str) -> String {
        let hosts: Vec<String> = self.all.iter().map(|server| server.addr().to_string()).collect();
        format!("redlock://{}?{query}", hosts.join(","))
    }
}
