//! Finding the master that Sentinel names, and leaving it when Sentinel names another.
//!
//! Every failover has an epoch, which grows. A sentinel that was cut off goes on naming an old master, and so does that
//! master itself; whoever has heard of a later one never goes back.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;

use super::dial::{Dialer, authenticate, cannot_log_in};
use super::failure::Failure;
use super::link::{Link, Pushes};
use super::reply::list;
use super::resp::{Command, Value};
use super::route::Node;
use super::settings::{Address, Credentials};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;

/// The channel on which a sentinel tells of a new master.
const SWITCHED: &str = "+switch-master";

/// How often a sentinel is asked whether it is still there, and tried again when it was not.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The sentinels that know which server is the master.
pub(super) struct Sentinel {
    pub(super) sentinels: Vec<Address>,
    pub(super) master: String,
    pub(super) credentials: Credentials,
    /// The epoch of the last failover that was heard of.
    pub(super) epoch: Mutex<u64>,
}

/// What one sentinel said.
struct Said {
    epoch: u64,
    master: Address,
}

impl Sentinel {
    /// Notes what a sentinel said. False: it has missed a failover.
    fn hear(&self, said: &Said) -> bool {
        let mut epoch = lock(&self.epoch);
        *epoch = said.epoch.max(*epoch);
        *epoch == said.epoch
    }

    /// Asks all sentinels at once for the master; the first that has not missed a failover decides.
    pub(super) async fn locate(&self, dialer: &Dialer) -> Result<Address> {
        let mut asked: FuturesUnordered<_> =
            self.sentinels.iter().map(|address| dialer.limited(address, self.ask(dialer, address))).collect();
        let mut failure = Error::new(ErrorKind::Unavailable, "no sentinel answered");
        let mut behind = Vec::new();
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(said) if self.hear(&said) => return Ok(said.master),
                Ok(said) => behind.push(said),
                Err(error) => failure = error,
            }
        }
        // Most of them cannot have missed one: they were set up anew.
        let most = behind.len() * 2 > self.sentinels.len();
        match behind.into_iter().max_by_key(|said| said.epoch).filter(|_| most) {
            Some(said) => {
                *lock(&self.epoch) = said.epoch;
                Ok(said.master)
            }
            None => Err(failure),
        }
    }

    async fn ask(&self, dialer: &Dialer, address: &Address) -> Result<Said> {
        let link = self.login(dialer, address, None).await?;
        let (mut details, mut master) = (Command::new("SENTINEL"), Command::new("SENTINEL"));
        details.arg("MASTER").arg(&self.master);
        // In the midst of a failover the details still have the old address, with the new epoch.
        master.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.master);
        let answers = link.call_together([&details, &master]).await;
        let answers = answers.map_err(|failure| failure.into_error(link.server()))?;
        let nonsense = || {
            let message = format!("the sentinel at {address} gave no address of the master");
            Error::new(ErrorKind::Unavailable, message)
        };
        let [details, master] = &answers[..] else { return Err(nonsense()) };
        if *master == Value::Nil {
            let message = format!(
                "the sentinel at {address} knows no master \"{}\"; look at SENTINEL MASTERS",
                self.master
            );
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        for answer in [details, master] {
            Failure::check(answer.clone()).map_err(|failure| failure.into_error(link.server()))?;
        }
        let mut pairs = list(details)?.chunks_exact(2);
        let epoch = pairs.find_map(|pair| match pair {
            [key, epoch] if key.text() == Some("config-epoch") => epoch.text()?.parse().ok(),
            _ => None,
        });
        match (list(master)?, epoch) {
            ([host, port], Some(epoch)) => {
                let port = port.text().and_then(|port| port.parse().ok());
                let master = host.text().map(str::to_owned).zip(port);
                let (host, port) = master.ok_or_else(nonsense)?;
                Ok(Said { epoch, master: Address::Tcp(host, port) })
            }
            _ => Err(nonsense()),
        }
    }

    async fn login(&self, dialer: &Dialer, address: &Address, pushes: Option<Pushes>) -> Result<Link> {
        let link = Link::new(dialer.stream(address).await?, pushes, address, dialer.env.clone());
        let said = authenticate(&link, &self.credentials).await;
        said.map_err(|failure| cannot_log_in(address, failure))?;
        Ok(link)
    }

    /// Listens to one sentinel for as long as the master is used, and leaves the master when there is a later one: it
    /// may be cut off, know nothing of that, and go on granting.
    pub(super) async fn follow(self: Arc<Sentinel>, dialer: Arc<Dialer>, address: Address, node: Weak<Node>) {
        while node.strong_count() > 0 {
            // One that is away tells nothing; others may.
            let _ = self.listen(&dialer, &address, &node).await;
            dialer.env.sleep_until(dialer.env.now() + LOOK_EVERY).await;
        }
    }

    async fn listen(&self, dialer: &Dialer, address: &Address, node: &Weak<Node>) -> Result<()> {
        let switched = Arc::new(Notify::new());
        let tell = switched.clone();
        let pushes = Box::new(move |_: &[Value]| {
            tell.notify_one();
            true
        });
        let link = dialer.limited(address, self.login(dialer, address, Some(pushes))).await?;
        let broke = |failure: Failure| failure.into_error(link.server());
        link.call(Command::new("SUBSCRIBE").arg(SWITCHED)).await.map_err(broke)?;
        loop {
            let said = dialer.limited(address, self.ask(dialer, address)).await?;
            if let Some(node) = node.upgrade().filter(|_| self.hear(&said)) {
                node.leave_all_but(&said.master);
            }
            loop {
                tokio::select! {
                    () = switched.notified() => break,
                    () = dialer.env.sleep_until(dialer.env.now() + LOOK_EVERY) => {}
                }
                if node.strong_count() == 0 {
                    return Ok(());
                }
                link.call(&Command::new("PING")).await.map_err(broke)?;
            }
        }
    }
}

/// Refuses a server that is no longer what Sentinel said.
pub(super) async fn expect_master(link: &Link) -> Result<()> {
    match link.call(&Command::new("ROLE")).await {
        Ok(Value::List(role)) if role.first().and_then(Value::text).is_some_and(|role| role != "master") => {
            link.close();
            let server = link.server();
            Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "Sentinel named {server} as the master, which says that it is none; a failover is under way"
                ),
            ))
        }
        // Where ROLE is not allowed, the first write tells.
        Ok(_) | Err(Failure::Server { .. }) => Ok(()),
        Err(cut) => Err(cut.into_error(link.server())),
    }
}
