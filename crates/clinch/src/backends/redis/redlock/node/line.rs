//! The connections to a server: who it is, asked when one opens, and what is sent over them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::super::timing::Patience;
use super::super::turns::Ear;
use super::{Left, Node};
use crate::backends::pool::Connection;
use crate::backends::redis::check::Server;
use crate::backends::redis::dial::Endpoint;
use crate::backends::redis::failure::{Failure, of_opening};
use crate::backends::redis::inbox::{Inbox, Watched};
use crate::backends::redis::link::Link;
use crate::backends::redis::reply;
use crate::backends::redis::resp::{Command, Value};
use crate::backends::redis::route::exchange;
use crate::backends::redis::script::{self, Script};
use crate::backends::redis::settings::Address;
use crate::clock::Instant;
use crate::error::{Error, Result};
use crate::sync::lock;

/// For how long a server to which no connection could be opened is left alone; longer, if it has refused us.
const REST: Duration = Duration::from_millis(250);
const LONG_REST: Duration = Duration::from_secs(2);

/// For how long nobody else is the server to which an address has led, after its last connection there has ended: longer than any
/// round of requests, in which it would vote twice.
const PARTED: Duration = Duration::from_secs(10);

/// Which process each address leads to: two may lead to one server, which must not vote twice.
#[derive(Default)]
pub(in super::super) struct Runs(Mutex<HashMap<Address, Vec<Seen>>>);

/// A connection to a process, and when that ended, if it did.
struct Seen {
    process: String,
    ended: Arc<OnceLock<Instant>>,
}

impl Runs {
    /// Notes which run a server is to which a connection was opened.
    fn join(&self, address: &Address, run: &str, ended: Arc<OnceLock<Instant>>, now: Instant) -> Result<()> {
        let mut runs = lock(&self.0);
        let counts = |seen: &Seen| seen.ended.get().is_none_or(|ended| now.since(*ended) < PARTED);
        runs.values_mut().for_each(|seen| seen.retain(counts));
        let process = process(run).to_owned();
        if process.is_empty() {
            return Ok(());
        }
        let is_twin = |(other, seen): &(&Address, &Vec<Seen>)| {
            *other != address && seen.iter().any(|seen| seen.process == process)
        };
        if let Some((twin, _)) = runs.iter().find(is_twin) {
            return Err(Error::invalid(format!(
                "{twin} and {address} are one server; each must be independent of the others"
            )));
        }
        runs.entry(address.clone()).or_default().push(Seen { process, ended });
        Ok(())
    }
}

/// The process of a run. In one process a server can have several: it was a replica meanwhile, and has other data.
pub(in super::super) fn process(run: &str) -> &str {
    run.split_once('/').map_or(run, |(process, _)| process)
}

/// A connection, and whose it is.
pub(in super::super) struct Line {
    pub(in super::super) link: Link,
    /// By what the server ends this connection.
    id: Option<u64>,
    /// The run of the server that it leads to.
    run: String,
}

impl Line {
    /// Names the run of the server; empty when it did not say.
    pub(in super::super) fn run(&self) -> &str {
        &self.run
    }

    /// Whether it leads to the same process, as far as is known: what was sent to another has ended with it.
    pub(in super::super) fn is_to_process_of(&self, other: &Line) -> bool {
        process(&self.run) == process(&other.run)
    }
}

impl Connection for Line {
    fn is_open(&self) -> bool {
        self.link.is_open()
    }
}

impl Node {
    /// The connection of the current runtime.
    pub(in super::super) async fn line(self: &Arc<Node>) -> Result<Arc<Line>> {
        if let Some(line) = self.lines.peek(self.dialer.env.lane())
            && self.is_met_by(&line)
        {
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
                let rest = |error: &Error| if error.is_transient() { REST } else { LONG_REST };
                lock(&node.known).rests =
                    opened.as_ref().err().map(|error| (node.now() + rest(error), error.again()));
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
        let mut left = Command::new("GET");
        left.arg(&self.group.key);
        let scripts = [
            &script::REDLOCK_CLAIM,
            &script::REDLOCK_AGREE,
            &script::REDLOCK_VOUCH,
            &script::RENEW_HELD,
            &script::RELEASE_LEAN,
        ];
        let [claim, agree, vouch, renew, release] = scripts.map(|script| script.load());
        let sent = self.now();
        let answers = link
            .call_together([&id, &info, &time, &left, &claim, &agree, &vouch, &renew, &release])
            .await
            .map_err(|failure| self.failed(failure))?;
        let received = self.now();
        let mut answers = answers.into_iter().map(Failure::check);
        let mut next = || answers.next().unwrap_or(Ok(Value::Nil));
        let id = next().ok().and_then(|id| reply::number(&id).ok()).and_then(|id| u64::try_from(id).ok());
        let server = match next() {
            Ok(info) => Server::read(info.text().unwrap_or_default()),
            // A user who may not look is believed to know.
            Err(failure) if failure.code() == "NOPERM" && self.rules.durable => Server::default(),
            Err(failure) => return Err(self.failed(failure)),
        };
        server.refuse_sentinel()?;
        let time = next();
        let left = match next() {
            Ok(left) => Left::read(reply::lossy(&left), &self.group),
            // Something else has the key, and is overwritten.
            Err(failure) if failure.code() == "WRONGTYPE" => Left::default(),
            Err(failure) if failure.code() == "NOPERM" => {
                return Err(self.voucher_refused(self.failed(failure)));
            }
            Err(failure) => return Err(self.failed(failure)),
        };
        for _ in scripts {
            next().map_err(|failure| self.failed(failure))?;
        }
        server.refuse_replica()?;
        server.refuse_unfit(self.dialer.settings.eviction_allowed)?;
        if self.rules.durable {
            server.refuse_forgetful(&link).await?;
        }
        let run = match server.run.is_empty() {
            true => String::new(),
            false => format!("{}/{}", server.run, server.history),
        };
        self.runs.join(&self.address, &run, link.ended(), received)?;
        self.met(&run, server.uptime, left, link.ended(), received);
        if let Some(us) = time.ok().and_then(|time| reply::micros(&time)) {
            self.clock_read(us, sent, received);
        }
        lock(&self.known).patience = Patience::new(received.since(begun) / 3);
        Ok(Line { link, id, run })
    }

    /// Runs a script's command on a connection. Where the server does not know the script any more, it is sent with the
    /// command, if that is `still_wanted` then.
    pub(in super::super) async fn run_while(
        &self,
        line: &Line,
        script: &Script,
        command: &Command,
        still_wanted: impl FnOnce() -> bool,
    ) -> Result<Value> {
        match exchange(&line.link, command, None, false).await {
            Err(failure) if failure.code() == "NOSCRIPT" && still_wanted() => {
                self.run_on(line, script, command).await
            }
            answer => self.taken(line, answer),
        }
    }

    /// Runs a script's command on a connection.
    pub(in super::super) async fn run_on(
        &self,
        line: &Line,
        script: &Script,
        command: &Command,
    ) -> Result<Value> {
        self.taken(line, exchange(&line.link, command, Some(script), false).await)
    }

    fn taken(&self, line: &Line, answer: Result<Value, Failure>) -> Result<Value> {
        if answer.as_ref().is_err_and(Failure::is_wrong_server) {
            line.link.close();
        }
        answer.map_err(|failure| failure.into_error_of_step(line.link.server()))
    }

    /// Sends plain commands that nothing may come between.
    pub(in super::super) async fn call_on<const N: usize>(
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
    /// sent on it may still be on its way, and the server is told to end it. False: that could not be made sure, and what was
    /// sent may arrive for as long as `timing::on_its_way`.
    pub(in super::super) async fn line_after(
        self: &Arc<Node>,
        before: Option<Arc<Line>>,
    ) -> Result<(Arc<Line>, bool)> {
        let before = match before {
            Some(before) if before.is_open() => return Ok((before, true)),
            before => before,
        };
        // What is asked so is repeated for sure: who speaks for a server that is away does not end it.
        let line = self.line().await.map_err(of_opening)?;
        let Some(before) = before else { return Ok((line, true)) };
        if line.run.is_empty() || before.run.is_empty() {
            return Ok((line, false));
        }
        let Some(id) = before.id.filter(|_| line.is_to_process_of(&before)) else {
            // Another process has no connections of the old one, and may have given its number to somebody else.
            let sure = !line.is_to_process_of(&before);
            return Ok((line, sure));
        };
        let mut kill = Command::new("CLIENT");
        kill.arg("KILL").arg("ID").arg(id);
        match line.link.call(&kill).await {
            // One that is not there any more is an answer, too.
            Ok(_) => Ok((line, true)),
            Err(failure) if failure.passes() => Err(self.failed(failure)),
            Err(_) => Ok((line, false)),
        }
    }

    /// Has the server tell when a key changes, for as long as the inbox lives.
    pub(in super::super) async fn watch(
        self: &Arc<Node>,
        key: &str,
        ear: &Arc<Ear>,
    ) -> Result<(Watched, Arc<Inbox>)> {
        let opened = self.inboxes.get(&self.dialer.env, || {
            let (node, ear) = (self.clone(), ear.clone());
            async move { Inbox::open(node.dialer.clone(), Endpoint::At(node.address.clone()), ear).await }
        });
        let inbox = opened.await?;
        Ok((inbox.watch(key).await?, inbox))
    }
}
