//! Which server a command goes to: the one, the master that Sentinel names, or the one that has the slot.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use super::check::Server;
use super::claims::Claims;
use super::cluster::Cluster;
use super::copies::Copies;
use super::dial::{Dialer, Endpoint};
use super::failure::{Failure, of_opening};
use super::inbox::Inbox;
use super::link::Link;
use super::resp::{Command, Value};
use super::script::Script;
use super::sentinel::Sentinel;
use super::settings::{Address, Topology};
use crate::backends::pool::{Connection, Pool};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtWork, lock};

/// How often one command is sent elsewhere before it is given back to the caller's own loop.
const REDIRECTS: u32 = 5;

/// The servers of one URL.
pub(super) struct Route {
    dialer: Arc<Dialer>,
    claims: Arc<Claims>,
    kind: Kind,
    /// Whether a server has said that it is one of a Cluster, whatever the URL says.
    slots_seen: AtomicBool,
}

enum Kind {
    One(Arc<Node>),
    Cluster(Cluster),
}

/// Whether an answer says that something was done that is to have copies.
type Did = fn(&Value) -> bool;

/// An answer; with a failure, the server that it is of.
type Answered<T = Value> = Result<T, (Failure, String)>;

/// What a server answered, and whether what it says was done has the copies that the URL asks for.
pub(super) struct Done {
    pub(super) answer: Value,
    pub(super) copied: Result<()>,
}

/// One server.
pub(super) struct Node {
    endpoint: Endpoint,
    links: Pool<Link>,
    inboxes: Pool<Inbox>,
    /// For what is to be confirmed.
    copies: Pool<Copies>,
    /// Whether somebody sees to it that this remains the master that Sentinel names.
    followed: Mutex<AtWork>,
}

impl Node {
    pub(super) fn new(endpoint: Endpoint) -> Arc<Node> {
        Arc::new(Node {
            endpoint,
            links: Pool::default(),
            inboxes: Pool::default(),
            copies: Pool::default(),
            followed: Mutex::default(),
        })
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Whether the server is at one of these addresses.
    pub(super) fn is_one_of(&self, addresses: &[Address]) -> bool {
        matches!(&self.endpoint, Endpoint::At(address) if addresses.contains(address))
    }

    /// The connection of the current runtime.
    pub(super) async fn link(self: &Arc<Node>, dialer: &Arc<Dialer>) -> Result<Arc<Link>> {
        if let Endpoint::Master(sentinel) = &self.endpoint {
            self.follow(sentinel, dialer)?;
        }
        if let Some(link) = self.links.peek(dialer.env.lane()) {
            return self.expect_latest(&link).map(|()| link);
        }
        let open = || {
            let (dialer, endpoint) = (dialer.clone(), self.endpoint.clone());
            async move { dialer.open_for_steps(&endpoint).await }
        };
        let link = Box::pin(self.links.get(&dialer.env, open)).await?;
        self.expect_latest(&link)?;
        Ok(link)
    }

    /// The connection of the current runtime on which claims are made, if it is there.
    fn link_of_steps(&self, dialer: &Dialer) -> Option<Arc<Link>> {
        let lane = dialer.env.lane();
        match dialer.settings.durability.asks_for_more() {
            true => self.copies.peek(lane).map(|copies| copies.link.clone()),
            false => self.links.peek(lane),
        }
    }

    /// Listens to all sentinels, unless somebody does.
    fn follow(self: &Arc<Node>, sentinel: &Arc<Sentinel>, dialer: &Arc<Dialer>) -> Result<()> {
        let Some(following) = lock(&self.followed).begin() else { return Ok(()) };
        for address in &sentinel.sentinels {
            let (sentinel, dialer, following) = (sentinel.clone(), dialer.clone(), following.clone());
            let (address, node) = (address.clone(), Arc::downgrade(self));
            let lane = dialer.env.lane().clone();
            lane.run(move || {
                let _following = &following;
                sentinel.clone().follow(dialer.clone(), address.clone(), node.clone())
            })?;
        }
        Ok(())
    }

    /// Refuses a connection to a master that was replaced. Asked whenever a connection is taken: one that was being opened
    /// or used was not there to be closed when the news came.
    fn expect_latest(&self, link: &Link) -> Result<()> {
        match &self.endpoint {
            Endpoint::Master(sentinel) => sentinel.expect_latest(link),
            Endpoint::At(_) => Ok(()),
        }
    }

    /// Ends the connections to a master that was replaced.
    pub(super) fn leave_replaced(&self) {
        self.links.all().iter().for_each(|link| drop(self.expect_latest(link)));
        self.copies.all().iter().for_each(|copies| drop(self.expect_latest(&copies.link)));
        self.inboxes.all().iter().for_each(|inbox| drop(self.expect_latest(&inbox.link)));
    }
}

impl Route {
    pub(super) fn new(dialer: Arc<Dialer>, claims: Arc<Claims>) -> Route {
        let kind = match &dialer.settings.topology {
            Topology::Single(address) => Kind::One(Node::new(Endpoint::At(address.clone()))),
            Topology::Sentinel(sentinel) => Kind::One(Node::new(Endpoint::Master(sentinel.clone()))),
            Topology::Cluster(seeds) => Kind::Cluster(Cluster::new(seeds)),
        };
        Route { dialer, claims, kind, slots_seen: AtomicBool::new(false) }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.kind, Kind::Cluster(_))
    }

    /// Whether keys of several slots must not go into one command.
    pub(super) fn has_slots(&self) -> bool {
        self.is_cluster() || self.slots_seen.load(Ordering::Relaxed)
    }

    /// Tells servers apart, as far as is known which one has the slot.
    pub(super) fn shard(&self, slot: impl FnOnce() -> u16) -> u64 {
        match &self.kind {
            Kind::One(_) => 0,
            Kind::Cluster(cluster) => {
                cluster.owner(slot()).map_or(0, |node| Arc::as_ptr(&node).addr() as u64)
            }
        }
    }

    /// Runs a script's command on the server that has the slot.
    ///
    /// # Cancel safety
    ///
    /// The command may be applied or not.
    pub(super) async fn run(&self, slot: u16, script: &Script, command: &Command) -> Result<Value> {
        of_step(self.send(slot, command, Some(script), None).await).map(|done| done.answer)
    }

    /// As [`Route::run`], and confirms that what was written has the copies that the URL asks for, if the answer says that
    /// something was. What else the answer says stands also where it has not.
    pub(super) async fn run_durably(
        &self,
        slot: u16,
        script: &Script,
        command: &Command,
        did: Did,
    ) -> Result<Done> {
        of_step(self.send(slot, command, Some(script), Some(did)).await)
    }

    /// As [`Route::run`], of a plain command that is a step.
    pub(super) async fn call(&self, slot: u16, command: &Command) -> Result<Value> {
        of_step(self.send(slot, command, None, None).await).map(|done| done.answer)
    }

    /// As [`Route::run_durably`], of a plain command that is a step and answers nil where it did nothing.
    pub(super) async fn call_durably(&self, slot: u16, command: &Command) -> Result<Value> {
        of_step(self.send(slot, command, None, Some(|answer| *answer != Value::Nil)).await)?.if_copied()
    }

    /// Sends a plain command that is no step.
    pub(super) async fn probe(&self, slot: u16, command: &Command) -> Result<Value> {
        let sent = self.send(slot, command, None, None).await?;
        sent.map(|done| done.answer).map_err(|(failure, server)| failure.into_error(&server))
    }

    /// Sends a command and follows the redirections of a Cluster. An error says that it was not applied. What seldom happens is boxed:
    /// the futures of all steps are as large as the largest that they may wait for.
    async fn send(
        &self,
        slot: u16,
        command: &Command,
        script: Option<&Script>,
        durably: Option<Did>,
    ) -> Result<Answered<Done>> {
        let durably = durably.filter(|_| self.dialer.settings.durability.asks_for_more());
        let mut node = self.node(slot).await?;
        let mut asking = false;
        for _ in 0..=REDIRECTS {
            let sent = match durably {
                Some(did) => Box::pin(self.send_confirmed(&node, command, script, asking, did)).await,
                None => match self.link(&node).await {
                    Ok(link) => {
                        let answer = self.ask_on(&link, &node.links, command, script, asking).await;
                        Ok(answer.map(|answer| Done { answer, copied: Ok(()) }))
                    }
                    Err(error) => Err(error),
                },
            };
            let (failure, server) = match sent {
                Ok(Ok(done)) => {
                    if done.copied.is_err() {
                        self.mistrust(&node).await;
                    }
                    return Ok(Ok(done));
                }
                Ok(Err(failed)) => failed,
                Err(error) => {
                    self.mistrust(&node).await;
                    return Err(error);
                }
            };
            let next = failure.redirect().and_then(|(slot, host, port)| {
                let moved = failure.code() == "MOVED";
                Some((self.redirected(slot, host, port, &node, moved)?, !moved))
            });
            match next {
                Some((target, ask)) => (node, asking) = (target, ask),
                None => {
                    if matches!(failure, Failure::Cut { .. }) || failure.is_wrong_server() {
                        self.mistrust(&node).await;
                    }
                    return Ok(Err((failure, server)));
                }
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "the servers of the cluster point at each other"))
    }

    /// As [`Route::send`] to one server, on the connection for what is to be confirmed.
    async fn send_confirmed(
        &self,
        node: &Arc<Node>,
        command: &Command,
        script: Option<&Script>,
        asking: bool,
        did: Did,
    ) -> Result<Answered<Done>> {
        let open = || Copies::open(self.dialer.clone(), node.endpoint.clone());
        let copies = node.copies.get(&self.dialer.env, open).await?;
        node.expect_latest(&copies.link)?;
        let answer = match self.ask_on(&copies.link, &node.copies, command, script, asking).await {
            Ok(answer) => answer,
            Err(failed) => return Ok(Err(failed)),
        };
        let mut copied = Ok(());
        if did(&answer) {
            copied = copies.confirm().await.and_then(|()| {
                node.expect_latest(&copies.link).map_err(|error| {
                    let server = copies.link.server();
                    Error::new(ErrorKind::Unknown, format!("{server} did it, but is left: {error}"))
                })
            });
        }
        Ok(Ok(Done { answer, copied }))
    }

    /// One command on a connection of this pool.
    async fn ask_on<C: Connection>(
        &self,
        link: &Link,
        pool: &Pool<C>,
        command: &Command,
        script: Option<&Script>,
        asking: bool,
    ) -> Answered {
        let answer = exchange(link, command, script, asking).await;
        if answer.as_ref().is_err_and(Failure::is_wrong_server) && link.is_open() {
            // Whoever is the master now, it is not this one: the next step asks again who is, and not sooner than after
            // an opening that failed.
            link.close();
            pool.failed(&self.dialer.env);
        }
        answer.map_err(|failure| (failure, link.server().to_owned()))
    }

    /// The inbox that listens to this channel already, if there is one.
    pub(super) fn listening(&self, slot: u16, channel: impl FnOnce() -> String) -> Option<Arc<Inbox>> {
        let lane = self.dialer.env.lane();
        let inbox = match &self.kind {
            Kind::One(node) => node.inboxes.peek(lane),
            Kind::Cluster(cluster) => cluster.owner(slot)?.inboxes.peek(lane),
        }?;
        inbox.listens(&channel()).then_some(inbox)
    }

    /// The inbox of the server that has the slot, listening to this channel.
    pub(super) async fn inbox(&self, slot: u16, channel: &str, sharded: bool) -> Result<Arc<Inbox>> {
        let node = self.node(slot).await?;
        let mut inbox = self.inbox_of(&node).await?;
        if node.link_of_steps(&self.dialer).is_some_and(|link| inbox.is_elsewhere(&link.about.run)) {
            // Another server has its address now, and there nobody would listen.
            inbox.link.close();
            inbox = self.inbox_of(&node).await?;
            if let Some(link) =
                node.link_of_steps(&self.dialer).filter(|link| inbox.is_elsewhere(&link.about.run))
            {
                // New connections lead elsewhere, so it is the steps that go to the server that had the address before.
                link.close();
            }
        }
        if let Err(error) = inbox.listen(channel, sharded).await {
            if error.kind() == ErrorKind::Unavailable {
                // A slot that moved away, perhaps.
                inbox.link.close();
                self.mistrust(&node).await;
            }
            return Err(error);
        }
        Ok(inbox)
    }

    /// What the server that has the slot says of itself.
    pub(super) async fn about(&self, slot: u16) -> Result<Server> {
        let node = self.node(slot).await?;
        Ok(self.link(&node).await?.about.clone())
    }

    /// The inbox of the server that has the slot, whatever it listens to.
    pub(super) async fn watcher(&self, slot: u16) -> Result<(Arc<Inbox>, Arc<Node>)> {
        let node = self.node(slot).await?;
        Ok((self.inbox_of(&node).await?, node))
    }

    /// The inbox of this number, if it leads to where steps of the slot go now.
    pub(super) async fn inbox_of_steps(&self, slot: u16, id: u64) -> Option<Arc<Inbox>> {
        let node = self.node(slot).await.ok()?;
        let inbox = node.inboxes.peek(self.dialer.env.lane()).filter(|inbox| inbox.id == id)?;
        let link = self.link(&node).await.ok()?;
        node.expect_latest(&inbox.link).ok()?;
        let run = &link.about.run;
        if inbox.is_elsewhere(run) {
            // Another server has its address now. What the old one tells is of no use, and what it grants is not to count.
            inbox.link.close();
        }
        (inbox.is_of(run) && inbox.link.is_open()).then_some(inbox)
    }

    /// Whether what an inbox tells is of the server that steps of the slot go to now. Asks nobody: where it is not known, it is not so.
    pub(super) fn tells_of_steps(&self, slot: u16, inbox: &Inbox) -> bool {
        let node = match &self.kind {
            Kind::One(node) => Some(node.clone()),
            Kind::Cluster(cluster) => cluster.owner(slot),
        };
        node.is_some_and(|node| {
            let link = node.link_of_steps(&self.dialer);
            link.is_some_and(|link| inbox.is_of(&link.about.run)) && node.expect_latest(&inbox.link).is_ok()
        })
    }

    /// Takes note of a server that a slot has moved to, if this answer of another says so.
    pub(super) fn has_moved(&self, failure: &Failure, from: &Arc<Node>) -> bool {
        let moved = failure.redirect().filter(|_| failure.code() == "MOVED");
        moved.and_then(|(slot, host, port)| self.redirected(slot, host, port, from, true)).is_some()
    }

    async fn inbox_of(&self, node: &Arc<Node>) -> Result<Arc<Inbox>> {
        let opened = node.inboxes.get(&self.dialer.env, || {
            Inbox::open(self.dialer.clone(), node.endpoint.clone(), self.claims.clone())
        });
        match opened.await.and_then(|inbox| node.expect_latest(&inbox.link).map(|()| inbox)) {
            Ok(inbox) => Ok(inbox),
            Err(error) => {
                self.mistrust(node).await;
                Err(of_opening(error))
            }
        }
    }

    /// The servers that the URL names or leads to, as far as can be found out, and whether locks need them. An error says that no
    /// master is known.
    pub(super) async fn addresses(&self) -> Result<Vec<(Address, bool)>> {
        let cluster = match &self.kind {
            Kind::One(node) => return Ok(vec![(self.dialer.locate(&node.endpoint).await?, true)]),
            Kind::Cluster(cluster) => cluster,
        };
        // Where that cannot be learnt, those of the URL tell why.
        let _ = cluster.learn(&self.dialer).await;
        let owner = |node: Arc<Node>| match &node.endpoint {
            Endpoint::At(address) => Some((address.clone(), true)),
            Endpoint::Master(_) => None,
        };
        let mut addresses: Vec<_> = cluster.owners().into_iter().filter_map(owner).collect();
        let are_known = !addresses.is_empty();
        for seed in cluster.seeds() {
            if !addresses.iter().any(|(known, _)| known == seed) {
                addresses.push((seed.clone(), !are_known));
            }
        }
        Ok(addresses)
    }

    /// One connection to each server that has locks.
    pub(super) async fn masters(&self) -> Result<Vec<Arc<Link>>> {
        let nodes = match &self.kind {
            Kind::One(node) => vec![node.clone()],
            Kind::Cluster(cluster) => {
                cluster.learn(&self.dialer).await?;
                cluster.owners()
            }
        };
        let mut links = Vec::new();
        for node in nodes {
            links.push(self.link(&node).await?);
        }
        Ok(links)
    }

    async fn link(&self, node: &Arc<Node>) -> Result<Arc<Link>> {
        let link = node.link(&self.dialer).await?;
        if link.about.has_slots {
            self.slots_seen.store(true, Ordering::Relaxed);
        }
        Ok(link)
    }

    /// The server that has a slot, as far as is known.
    async fn node(&self, slot: u16) -> Result<Arc<Node>> {
        let cluster = match &self.kind {
            Kind::One(node) => return Ok(node.clone()),
            Kind::Cluster(cluster) => cluster,
        };
        if let Some(node) = cluster.owner(slot) {
            return Ok(node);
        }
        Box::pin(cluster.learn(&self.dialer)).await?;
        cluster.owner(slot).ok_or_else(|| {
            Error::new(
                ErrorKind::Unavailable,
                format!("no server of the cluster has slot {slot} at this moment"),
            )
        })
    }

    /// Where a server says that a slot is, if the URL knows of such servers.
    fn redirected(
        &self,
        slot: u16,
        host: &str,
        port: u16,
        from: &Arc<Node>,
        moved: bool,
    ) -> Option<Arc<Node>> {
        let Kind::Cluster(cluster) = &self.kind else { return None };
        let host = match (&from.endpoint, host) {
            (Endpoint::At(Address::Tcp(same, _)), "" | "?") => same.as_str(),
            _ => host,
        };
        Some(cluster.redirected(slot, Address::Tcp(host.to_owned(), port), moved))
    }

    /// After a server did not answer: finds out who has its slots now.
    async fn mistrust(&self, node: &Arc<Node>) {
        if let Kind::Cluster(cluster) = &self.kind {
            Box::pin(cluster.mistrust(&self.dialer, node)).await;
        }
    }
}

impl Done {
    /// The answer, which counts only with its copies.
    pub(super) fn if_copied(self) -> Result<Value> {
        self.copied.map(|()| self.answer)
    }
}

fn of_step<T>(sent: Result<Answered<T>>) -> Result<T> {
    sent.map_err(of_opening)?.map_err(|(failure, server)| failure.into_error_of_step(&server))
}

/// One command and its answer; a script that the server does not know is loaded on the way, in one trip more.
pub(super) async fn exchange(
    link: &Link,
    command: &Command,
    script: Option<&Script>,
    asking: bool,
) -> Result<Value, Failure> {
    static ASK: LazyLock<Command> = LazyLock::new(|| Command::new("ASKING"));
    let answer = match asking {
        false => link.call(command).await,
        true => last(link.call_together([&ASK, command]).await?),
    };
    match (answer, script) {
        (Err(failure), Some(script)) if failure.code() == "NOSCRIPT" => {
            let load = &script.load();
            last(match asking {
                false => link.call_together([load, command]).await?,
                true => link.call_together([load, &ASK, command]).await?,
            })
        }
        (answer, _) => answer,
    }
}

/// The last of several answers, unless an earlier one is an error.
fn last(answers: Vec<Value>) -> Result<Value, Failure> {
    answers.into_iter().try_fold(Value::Nil, |_, answer| Failure::check(answer))
}
