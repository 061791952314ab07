//! Finding the master that Sentinel names, and leaving it when Sentinel names another.
//!
//! Every failover has an epoch, which grows. A sentinel that was cut off goes on naming an old master, and so does that
//! master itself; whoever has heard of a later one does not go back, unless most of the sentinels have not.

use std::pin::pin;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt};
use tokio::sync::Notify;

use super::dial::{Dialer, authenticate, cannot_log_in};
use super::failure::Failure;
use super::link::Link;
use super::reply::list;
use super::resp::{Command, Value};
use super::route::Node;
use super::settings::{Address, Credentials};
use super::wire::Pushes;
use crate::check::{Check, Verdict};
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;

/// The channel on which a sentinel tells of a new master.
const SWITCHED: &str = "+switch-master";

/// How often a sentinel is asked whether it is still there, and tried again when it was not.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How long the first answer that a client gets waits for those of other sentinels.
const SOON: Duration = Duration::from_millis(100);

/// The sentinels that know which server is the master.
pub(super) struct Sentinel {
    pub(super) sentinels: Vec<Address>,
    pub(super) master: String,
    pub(super) credentials: Credentials,
    pub(super) latest: Mutex<Option<Latest>>,
}

/// The last failover that was heard of.
pub(super) struct Latest {
    epoch: u64,
    /// The master since then; sentinels may have several names for it.
    masters: Vec<Address>,
}

/// What one sentinel said.
struct Said {
    epoch: u64,
    master: Address,
}

impl Latest {
    fn of(said: &Said) -> Latest {
        Latest { epoch: said.epoch, masters: vec![said.master.clone()] }
    }
}

impl Sentinel {
    /// Notes what a sentinel said, `alone`: as the only name of the master. False: it has missed a failover.
    fn hear(&self, said: &Said, alone: bool) -> bool {
        let mut latest = lock(&self.latest);
        match &mut *latest {
            Some(latest) if said.epoch < latest.epoch => return false,
            Some(latest) if said.epoch == latest.epoch && !alone => {
                if !latest.masters.contains(&said.master) {
                    latest.masters.push(said.master.clone());
                }
            }
            latest => *latest = Some(Latest::of(said)),
        }
        true
    }

    /// Refuses a connection to a server that was replaced, as was heard while it was opened or lay idle: nobody would leave
    /// it any more.
    pub(super) fn expect_latest(&self, link: &Link) -> Result<()> {
        let is = |master: &Address| master.to_string() == link.server();
        if lock(&self.latest).as_ref().is_none_or(|latest| latest.masters.iter().any(is)) {
            return Ok(());
        }
        link.close();
        let message = format!("{} is no longer the master that Sentinel names", link.server());
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    /// Asks all sentinels at once for the master; the first that has not missed a failover decides. Who has heard of none
    /// yet cannot tell, and gives the others a moment to say that they know of a later one.
    pub(super) async fn locate(&self, dialer: &Dialer) -> Result<Address> {
        let mut asked: FuturesUnordered<_> =
            self.sentinels.iter().map(|address| dialer.limited(address, self.ask(dialer, address))).collect();
        let mut failure = Error::new(ErrorKind::Unavailable, "no sentinel answered");
        let mut behind = Vec::new();
        let fresh = lock(&self.latest).is_none();
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(said) if self.hear(&said, false) => {
                    return Ok(if fresh {
                        self.latest_of(asked, said, &dialer.env).await
                    } else {
                        said.master
                    });
                }
                Ok(said) => behind.push(said),
                Err(error) => failure = error,
            }
        }
        // Most of them cannot have missed one: they were set up anew.
        let most = behind.len() * 2 > self.sentinels.len();
        match behind.into_iter().max_by_key(|said| said.epoch).filter(|_| most) {
            Some(said) => {
                *lock(&self.latest) = Some(Latest::of(&said));
                Ok(said.master)
            }
            None => Err(failure),
        }
    }

    /// The master of the latest failover that those who answer soon know of.
    async fn latest_of(
        &self,
        mut asked: impl Stream<Item = Result<Said>> + Unpin,
        mut said: Said,
        env: &Env,
    ) -> Address {
        let mut soon = pin!(env.sleep_until(env.now() + SOON));
        loop {
            tokio::select! {
                answer = asked.next() => match answer {
                    Some(Ok(other)) if other.epoch > said.epoch && self.hear(&other, false) => said = other,
                    Some(_) => {}
                    None => return said.master,
                },
                () = &mut soon => return said.master,
            }
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
        if let Err(failure) = Failure::check(details.clone())
            && failure.is_no_command()
        {
            let message = format!("the server at {address} is no Sentinel");
            return Err(Error::new(ErrorKind::Unsupported, message).with_remedy(dialer.settings.one_server()));
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

    /// What each sentinel says.
    pub(super) async fn examine(&self, dialer: &Dialer) -> Vec<Check> {
        let look = async |address: &Address| {
            let check = match dialer.limited(address, self.ask(dialer, address)).await {
                Ok(said) => Check::pass("sentinel", format!("names {} as the master", said.master)),
                Err(error) => Check::failed("sentinel", &error, "start it, or mend the sentinels in the URL"),
            };
            check.at(address)
        };
        let checks = join_all(self.sentinels.iter().map(look)).await;
        match checks.iter().any(|check| check.verdict == Verdict::Pass) {
            true => checks.into_iter().map(Check::spared).collect(),
            false => checks,
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
            if let Some(node) = node.upgrade().filter(|_| self.hear(&said, true)) {
                node.leave_replaced();
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

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use futures_util::stream;

    use super::*;
    use crate::clock::Clock;
    use crate::lane::Lane;
    use crate::net::Tcp;
    use crate::random::Random;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_knows_nothing_yet_lets_others_speak_and_waits_for_nobody_long() {
        let clock = Clock::simulated(SystemTime::UNIX_EPOCH);
        let lane = Lane::here().unwrap();
        let env = Env::new(clock, Random::seeded(1), lane.clone(), Arc::new(Tcp::new(clock, lane)));
        let said = |epoch, port| Said { epoch, master: Address::Tcp("h".into(), port) };
        let sentinel = Sentinel {
            sentinels: Vec::new(),
            master: "m".into(),
            credentials: Credentials { user: None, password: None },
            latest: Mutex::default(),
        };
        assert!(sentinel.hear(&said(4, 1), false));
        let others = stream::iter([Ok(said(3, 3)), Ok(said(5, 2))]).chain(stream::pending());
        let master = sentinel.latest_of(others, said(4, 1), &env).await;
        assert_eq!(master.to_string(), "h:2");
        assert!(!sentinel.hear(&said(4, 1), true), "it went back");
        let names = |sentinel: &Sentinel| lock(&sentinel.latest).as_ref().map(|latest| latest.masters.len());
        assert!(sentinel.hear(&said(5, 7), false) && names(&sentinel) == Some(2), "another name of it");
        assert!(sentinel.hear(&said(5, 7), true) && names(&sentinel) == Some(1));
    }
}
