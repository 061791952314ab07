//! One of the independent servers: its connections, what is known of it, and whether its vote counts.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::super::check::Server;
use super::super::dial::{Dialer, Endpoint};
use super::super::failure::Failure;
use super::super::inbox::{Inbox, Watched};
use super::super::link::Link;
use super::super::reply;
use super::super::resp::{Command, Value};
use super::super::route::exchange;
use super::super::script::{self, Script};
use super::super::settings::Address;
use super::settings::Rules;
use super::timing::{self, Offset, Patience};
use super::turns::Ear;
use crate::backends::pool::{Connection, Pool};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;

/// For how long a server to which no connection could be opened is left alone.
const REST: Duration = Duration::from_millis(250);

/// One server.
pub(super) struct Node {
    pub(super) address: Address,
    pub(super) dialer: Arc<Dialer>,
    rules: Rules,
    /// Who of all servers is which run.
    runs: Arc<Runs>,
    lines: Pool<Line>,
    inboxes: Pool<Inbox>,
    known: Mutex<Known>,
}

/// The run of each server, by address: two addresses may lead to one server, which must not vote twice.
#[derive(Default)]
pub(super) struct Runs(Mutex<HashMap<Address, String>>);

impl Runs {
    /// Notes which run a server is.
    fn join(&self, address: &Address, run: &str) -> Result<()> {
        let mut runs = lock(&self.0);
        let twin = runs.iter().find(|(other, known)| *other != address && *known == run && !run.is_empty());
        if let Some((twin, _)) = twin {
            return Err(Error::invalid(format!(
                "{twin} and {address} are one server; each must be independent of the others"
            )));
        }
        runs.insert(address.clone(), run.to_owned());
        Ok(())
    }
}

/// A connection, and whose it is.
pub(super) struct Line {
    pub(super) link: Link,
    /// By what the server ends this connection.
    id: Option<u64>,
    /// The run of the server that it leads to.
    run: String,
}

/// What is known of a server.
struct Known {
    patience: Patience,
    clock: Option<Offset>,
    /// The run that was met last, and when the connection to it ended, if it did.
    run: Option<(String, Arc<OnceLock<Instant>>)>,
    /// Until when its vote does not count, and why.
    abstains: Option<Abstention>,
    /// Why no connection could be opened, and until when nobody tries again.
    rests: Option<(Instant, Error)>,
}

/// Why a server's vote does not count for a time.
#[derive(Clone, Debug)]
pub(super) struct Abstention {
    pub(super) until: Instant,
    pub(super) why: String,
}

impl Line {
    /// Names the run of the server; empty when it did not say.
    pub(super) fn run(&self) -> &str {
        &self.run
    }
}

impl Connection for Line {
    fn is_open(&self) -> bool {
        self.link.is_open()
    }
}

impl Node {
    pub(super) fn new(address: Address, dialer: Arc<Dialer>, rules: Rules, runs: Arc<Runs>) -> Arc<Node> {
        let known = Known {
            patience: Patience::new(Duration::from_millis(10)),
            clock: None,
            run: None,
            abstains: None,
            rests: None,
        };
        Arc::new(Node {
            address,
            dialer,
            rules,
            runs,
            lines: Pool::default(),
            inboxes: Pool::default(),
            known: Mutex::new(known),
        })
    }

    fn now(&self) -> Instant {
        self.dialer.env.now()
    }

    /// For how long an answer is waited for.
    pub(super) fn patience(&self, ttl: Duration) -> Duration {
        lock(&self.known).patience.wait(ttl)
    }

    /// For how long a vote is waited for that still decides.
    pub(super) fn patience_for_vote(&self, ttl: Duration) -> Duration {
        lock(&self.known).patience.wait_for_vote(ttl)
    }

    /// Notes that an answer took this long, or did not come.
    pub(super) fn answered(&self, after: Option<Duration>) {
        let patience = &mut lock(&self.known).patience;
        match after {
            Some(after) => patience.answered(after),
            None => patience.struck(),
        }
    }

    /// Why the vote of this server does not count at this moment, if it does not.
    pub(super) fn abstains(&self, now: Instant) -> Option<Abstention> {
        let mut known = lock(&self.known);
        known.abstains.take_if(|abstention| abstention.until <= now);
        known.abstains.clone()
    }

    /// What the server's clock will at most read at `at`, in microseconds, as far as it is known.
    pub(super) fn latest_us(&self, at: Instant) -> Option<u64> {
        Some(lock(&self.known).clock?.latest_us(at))
    }

    /// Takes in what the server's clock read between two moments. A clock that has jumped may have ended leases early, so
    /// the server does not vote until all those would have ended anyway.
    pub(super) fn clock_read(&self, us: u64, sent: Instant, received: Instant) {
        let mut known = lock(&self.known);
        let read = Offset::read(us, sent, received);
        let (clock, jumped) = known.clock.map_or((read, None), |clock| clock.then(read));
        known.clock = Some(clock);
        if let Some(by) = jumped {
            let why = format!("its clock has jumped by {}", humantime::format_duration(in_millis(by)));
            known.abstain(Abstention { until: received + self.rules.max_ttl, why });
        }
    }

    /// The connection of the current runtime.
    pub(super) async fn line(self: &Arc<Node>) -> Result<Arc<Line>> {
        if let Some(line) = self.lines.peek(self.dialer.env.lane()) {
            return Ok(line);
        }
        if let Some((until, error)) = &lock(&self.known).rests
            && *until > self.now()
        {
            return Err(error.again());
        }
        let open = || {
            let node = self.clone();
            async move {
                let opened = node.open().await;
                lock(&node.known).rests =
                    opened.as_ref().err().map(|error| (node.now() + REST, error.again()));
                opened
            }
        };
        self.lines.get(&self.dialer.env, open).await
    }

    async fn open(&self) -> Result<Line> {
        let begun = self.now();
        let (link, _) = self.dialer.open(&Endpoint::At(self.address.clone()), None).await?;
        self.dialer.limited(&self.address, self.meet(link, begun)).await
    }

    /// Asks who the server is, and gives it the scripts.
    async fn meet(&self, link: Link, begun: Instant) -> Result<Line> {
        let (mut id, info, time) = (Command::new("CLIENT"), Command::new("INFO"), Command::new("TIME"));
        id.arg("ID");
        let scripts =
            [&script::REDLOCK_CLAIM, &script::REDLOCK_AGREE, &script::RENEW_HELD, &script::RELEASE_LEAN];
        let [claim, agree, renew, release] = scripts.map(|script| script.load());
        let sent = self.now();
        let answers = link
            .call_together([&id, &info, &time, &claim, &agree, &renew, &release])
            .await
            .map_err(|failure| self.failed(failure))?;
        let received = self.now();
        let mut answers = answers.into_iter().map(Failure::check);
        let mut next = || answers.next().unwrap_or(Ok(Value::Nil));
        let id = next().ok().and_then(|id| reply::number(&id).ok()).and_then(|id| u64::try_from(id).ok());
        let info = next().map_err(|failure| self.failed(failure));
        let time = next();
        for _ in scripts {
            next().map_err(|failure| self.failed(failure))?;
        }
        let server = match info {
            Ok(info) => Server::read(info.text().unwrap_or_default()),
            // A user who may not look is believed to know.
            Err(error) if error.kind() == ErrorKind::Refused && self.rules.durable => Server::default(),
            Err(error) => return Err(error),
        };
        server.refuse_replica()?;
        server.refuse_unfit(self.dialer.settings.eviction_allowed)?;
        if self.rules.durable && !server.run.is_empty() && !server.logs_writes {
            return Err(Error::new(
                ErrorKind::Refused,
                "durable=on says that this server keeps what it acknowledged, but it has no append-only file: set \
                 appendonly yes and appendfsync always, or leave durable=on away",
            ));
        }
        self.runs.join(&self.address, &server.run)?;
        self.met(&server, link.ended(), received);
        if let Some(us) = time.ok().and_then(|time| micros(&time)) {
            self.clock_read(us, sent, received);
        }
        lock(&self.known).patience = Patience::new(received.since(begun) / 3);
        Ok(Line { link, id, run: server.run })
    }

    /// Judges whether a server that was just met may vote.
    fn met(&self, server: &Server, ended: Arc<OnceLock<Instant>>, now: Instant) {
        let Rules { max_ttl, durable, .. } = self.rules;
        let mut known = lock(&self.known);
        let before = known.run.replace((server.run.clone(), ended));
        if before.as_ref().is_some_and(|(run, _)| *run == server.run && !run.is_empty()) {
            // Whole seconds tell no more of a run than when it was met first.
            return;
        }
        let another = before.filter(|(_, ended)| {
            let seen = ended.get().copied().unwrap_or(now);
            timing::stands_in(now, server.uptime, seen)
        });
        if another.is_some() {
            let why = "it is another server than before".to_owned();
            known.abstain(Abstention { until: now + max_ttl, why });
        } else if let Some(until) = timing::votes_from(now, server.uptime, max_ttl).filter(|_| !durable) {
            let why = format!("it started {}s ago and may have forgotten locks", server.uptime);
            known.abstain(Abstention { until, why });
        }
    }

    /// Runs a script's command on a connection.
    pub(super) async fn run_on(&self, line: &Line, script: &Script, command: &Command) -> Result<Value> {
        let answer = exchange(&line.link, command, Some(script), false).await;
        if answer.as_ref().is_err_and(Failure::is_wrong_server) {
            line.link.close();
        }
        answer.map_err(|failure| failure.into_error(line.link.server()))
    }

    /// Sends plain commands that nothing may come between.
    pub(super) async fn call_on<const N: usize>(
        &self,
        line: &Line,
        commands: [&Command; N],
    ) -> Result<Vec<Value>> {
        let answers = line.link.call_together(commands).await.map_err(|failure| self.failed(failure))?;
        answers
            .into_iter()
            .map(|answer| Failure::check(answer).map_err(|failure| self.failed(failure)))
            .collect()
    }

    /// A connection on which what is sent comes after everything that was sent on `before`. If that one is closed, what was
    /// sent on it may still be on its way, and the server is told to end it. False: that could not be made sure.
    pub(super) async fn line_after(self: &Arc<Node>, before: Option<Arc<Line>>) -> Result<(Arc<Line>, bool)> {
        let before = match before {
            Some(before) if before.is_open() => return Ok((before, true)),
            before => before,
        };
        let line = self.line().await?;
        let Some(before) = before else { return Ok((line, true)) };
        if line.run.is_empty() || before.run.is_empty() {
            return Ok((line, false));
        }
        let Some(id) = before.id.filter(|_| line.run == before.run) else {
            // Another run has no connections of the old one, and may have given its number to somebody else.
            let sure = line.run != before.run;
            return Ok((line, sure));
        };
        let mut kill = Command::new("CLIENT");
        kill.arg("KILL").arg("ID").arg(id);
        let killed = match line.link.call(&kill).await {
            Ok(_) => true,
            Err(Failure::Server { code, .. }) => code != "NOPERM",
            Err(cut) => return Err(self.failed(cut)),
        };
        Ok((line, killed))
    }

    /// Has the server tell when a key changes, for as long as the inbox lives.
    pub(super) async fn watch(self: &Arc<Node>, key: &str, ear: &Arc<Ear>) -> Result<(Watched, Arc<Inbox>)> {
        let opened = self.inboxes.get(&self.dialer.env, || {
            let (node, ear) = (self.clone(), ear.clone());
            async move { Inbox::open(node.dialer.clone(), Endpoint::At(node.address.clone()), ear).await }
        });
        let inbox = opened.await?;
        Ok((inbox.watch(key).await?, inbox))
    }

    fn failed(&self, failure: Failure) -> Error {
        failure.into_error(&self.address.to_string())
    }
}

impl Known {
    /// Of two reasons the one that lasts longer counts.
    fn abstain(&mut self, abstention: Abstention) {
        if self.abstains.as_ref().is_none_or(|known| known.until < abstention.until) {
            self.abstains = Some(abstention);
        }
    }
}

/// What TIME answered, in microseconds.
fn micros(time: &Value) -> Option<u64> {
    let [seconds, micros] = reply::list(time).ok()? else { return None };
    let part = |value: &Value| value.text()?.parse::<u64>().ok();
    part(seconds)?.checked_mul(1_000_000)?.checked_add(part(micros)?)
}

/// A time without what is too fine to be read.
pub(super) fn in_millis(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}
