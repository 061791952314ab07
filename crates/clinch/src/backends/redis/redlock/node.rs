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
use super::group::Group;
use super::settings::Rules;
use super::timing::{self, Evenness, Offset, Patience};
use super::turns::Ear;
use super::voucher::Voucher;
use crate::backends::pool::{Connection, Pool};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;

/// For how long a server to which no connection could be opened is left alone; longer, if it has refused us.
const REST: Duration = Duration::from_millis(250);
const LONG_REST: Duration = Duration::from_secs(2);

/// One server.
pub(super) struct Node {
    pub(super) address: Address,
    pub(super) dialer: Arc<Dialer>,
    rules: Rules,
    /// Whose word on it is believed.
    pub(super) group: Arc<Group>,
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
        let twin = runs
            .iter()
            .find(|(other, known)| *other != address && process(known) == process(run) && !run.is_empty());
        if let Some((twin, _)) = twin {
            return Err(Error::invalid(format!(
                "{twin} and {address} are one server; each must be independent of the others"
            )));
        }
        runs.insert(address.clone(), run.to_owned());
        Ok(())
    }
}

/// The process of a run. In one process a server can have several: it was a replica meanwhile, and has other data.
fn process(run: &str) -> &str {
    run.split_once('/').map_or(run, |(process, _)| process)
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
    /// Since when this client has looked after a run that it did not know, unless somebody vouches for it.
    watch: Option<Watch>,
    /// What was left on the server.
    voucher: Left,
    /// Why nothing can be left on it.
    refuses: Option<String>,
    /// Why no connection could be opened, and until when nobody tries again.
    rests: Option<(Instant, Error)>,
}

/// A run that this client has met, and looks after until everything is over that the server may have forgotten.
#[derive(Clone, Copy)]
struct Watch {
    since: Instant,
    /// It is another server than before. What is left on it tells nothing of the one that it stands in for.
    stands_in: bool,
}

/// What clients have left on a server, as far as is known.
#[derive(Clone, Default)]
pub(super) struct Left {
    pub(super) text: String,
    pub(super) voucher: Option<Voucher>,
}

impl Left {
    /// What does not begin with the terms of one's group counts as nothing, and is overwritten.
    pub(super) fn read(text: String, group: &Group) -> Left {
        match text.strip_prefix(group.terms()) {
            Some(word) => Left { voucher: Voucher::parse(word), text },
            None => Left::default(),
        }
    }
}

impl Known {
    /// Whether this run was met last.
    fn is_met(&self, run: &str) -> bool {
        self.run.as_ref().is_some_and(|(known, _)| known == run)
    }
}

/// What is known of a server that has been met.
pub(super) struct Acquaintance {
    pub(super) run: String,
    pub(super) clock: Offset,
    pub(super) left: Left,
}

/// Whether a server's vote counts.
pub(super) enum Standing {
    Votes,
    Abstains(Abstention),
    /// Only if what was left on it vouches for it.
    Unless(Abstention),
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

    /// Whether it leads to the same process, as far as is known: what was sent to another has ended with it.
    pub(super) fn is_to_process_of(&self, other: &Line) -> bool {
        process(&self.run) == process(&other.run)
    }
}

impl Connection for Line {
    fn is_open(&self) -> bool {
        self.link.is_open()
    }
}

impl Node {
    pub(super) fn new(
        address: Address,
        dialer: Arc<Dialer>,
        rules: Rules,
        group: Arc<Group>,
        runs: Arc<Runs>,
    ) -> Arc<Node> {
        let known = Known {
            patience: Patience::new(Duration::from_millis(10)),
            clock: None,
            run: None,
            abstains: None,
            watch: None,
            voucher: Left::default(),
            refuses: None,
            rests: None,
        };
        Arc::new(Node {
            address,
            dialer,
            rules,
            group,
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

    /// How evenly its clock is taken to run.
    pub(super) fn evenness(&self) -> Evenness {
        Evenness { drift: self.dialer.env.drift(), max_ttl: self.rules.max_ttl }
    }

    /// Whether the vote of this server counts at this moment, as far as this client knows by itself.
    pub(super) fn standing(&self, now: Instant) -> Standing {
        let longest_lease = self.evenness().longest_lease();
        let mut known = lock(&self.known);
        known.abstains.take_if(|abstention| abstention.until <= now);
        known.watch.take_if(|watch| watch.since + longest_lease <= now);
        match (known.watch, &known.abstains) {
            (None, None) => Standing::Votes,
            (_, Some(abstention)) => Standing::Abstains(abstention.clone()),
            (Some(Watch { since, stands_in }), None) => {
                let why = match stands_in {
                    true => "it is another server than before".to_owned(),
                    false => format!(
                        "it was met first {}s ago and may have {} before{}",
                        now.since(since).as_secs(),
                        if self.rules.durable { "had its clock set" } else { "forgotten locks" },
                        known.refuses.as_deref().unwrap_or_default()
                    ),
                };
                let abstention = Abstention { until: since + longest_lease, why };
                if stands_in { Standing::Abstains(abstention) } else { Standing::Unless(abstention) }
            }
        }
    }

    /// What is known of it, if it has been met.
    pub(super) fn acquaintance(&self) -> Option<Acquaintance> {
        let known = lock(&self.known);
        let (run, _) = known.run.as_ref()?;
        Some(Acquaintance { run: run.clone(), clock: known.clock?, left: known.voucher.clone() })
    }

    /// Notes that the vote of a run of it counts, since that was vouched for. False: it is another run by now.
    pub(super) fn trust(&self, run: &str) -> bool {
        let mut known = lock(&self.known);
        let is_met = known.is_met(run);
        known.watch.take_if(|_| is_met);
        is_met
    }

    /// Whether a connection leads to the run that was met last, of which it is known whether its vote counts.
    pub(super) fn is_met_by(&self, line: &Line) -> bool {
        lock(&self.known).is_met(&line.run)
    }

    /// Notes what stands on a run of the server now.
    pub(super) fn left(&self, run: &str, left: Left) {
        let mut known = lock(&self.known);
        if known.is_met(run) {
            known.voucher = left;
        }
    }

    /// What was read of the server's clock, if its vote counts.
    pub(super) fn clock(&self, now: Instant) -> Option<Offset> {
        let known = lock(&self.known);
        let jumped = known.abstains.as_ref().is_some_and(|abstention| abstention.until > now);
        known.clock.filter(|_| !jumped && known.watch.is_none())
    }

    /// Reads its clock and what was left on it, which a vote would tell.
    pub(super) async fn look(self: Arc<Node>) -> Result<()> {
        let line = self.line().await?;
        let mut get = Command::new("GET");
        get.arg(&self.group.key);
        let sent = self.now();
        let answers = self.call_on(&line, [&Command::new("TIME"), &get]).await?;
        let received = self.now();
        let [time, left] = answers.as_slice() else { return Ok(()) };
        if let Some(us) = micros(time).filter(|_| self.is_met_by(&line)) {
            self.clock_read(us, sent, received);
        }
        self.left(&line.run, Left::read(reply::lossy(left), &self.group));
        Ok(())
    }

    /// Takes in what the server's clock read between two moments. A clock that has jumped may have ended leases early, so
    /// the server does not vote until all those would have ended anyway.
    pub(super) fn clock_read(&self, us: u64, sent: Instant, received: Instant) {
        let evenness = self.evenness();
        let mut known = lock(&self.known);
        let read = Offset::read(us, sent, received, evenness);
        let (clock, jumped) = known.clock.map_or((read, None), |clock| clock.then(read, evenness));
        known.clock = Some(clock);
        if let Some(by) = jumped {
            let why = format!("its clock has jumped by {}", humantime::format_duration(in_millis(by)));
            known.abstains = Some(Abstention { until: received + evenness.longest_lease(), why });
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
        let info = next().map_err(|failure| self.failed(failure));
        let time = next();
        let left = match next() {
            Ok(left) => Left::read(reply::lossy(&left), &self.group),
            // Something else has the key, and is overwritten.
            Err(failure) if failure.code() == "WRONGTYPE" => Left::default(),
            Err(failure) => return Err(self.voucher_refused(self.failed(failure))),
        };
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
        if self.rules.durable {
            server.refuse_forgetful(&link).await?;
        }
        let run = match server.run.is_empty() {
            true => String::new(),
            false => format!("{}/{}", server.run, server.history),
        };
        self.runs.join(&self.address, &run)?;
        self.met(&run, server.uptime, left, link.ended(), received);
        if let Some(us) = time.ok().and_then(|time| micros(&time)) {
            self.clock_read(us, sent, received);
        }
        lock(&self.known).patience = Patience::new(received.since(begun) / 3);
        Ok(Line { link, id, run })
    }

    /// Takes in what a server that was just met says of itself.
    fn met(&self, run: &str, uptime: u64, left: Left, ended: Arc<OnceLock<Instant>>, now: Instant) {
        let mut known = lock(&self.known);
        known.voucher = left;
        let before = known.run.replace((run.to_owned(), ended));
        if before.as_ref().is_some_and(|(before, _)| before == run && !run.is_empty()) {
            return;
        }
        // What was read of another's tells nothing of this one.
        known.clock = None;
        let stands_in = before.is_some_and(|(_, ended)| {
            let seen = ended.get().copied().unwrap_or(now);
            timing::stands_in(now, uptime, seen)
        });
        known.watch = Some(Watch { since: now, stands_in });
    }

    /// Until when, by the server's clock, what is sent now is of use; none, where the clock is not known.
    pub(super) fn end_of_use(&self) -> String {
        let latest = lock(&self.known).clock.map(|clock| clock.likely_latest_us(self.now(), self.evenness()));
        let useful = u64::try_from(timing::USEFUL.as_micros()).unwrap_or(u64::MAX);
        let end = latest.map_or(u64::MAX, |latest| latest.saturating_add(useful));
        format!("{:016}", end.min(9_999_999_999_999_999))
    }

    /// Runs a script's command on a connection. Where the server does not know the script any more, it is sent with the
    /// command, if that is `still_wanted` then.
    pub(super) async fn run_while(
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
    pub(super) async fn run_on(&self, line: &Line, script: &Script, command: &Command) -> Result<Value> {
        self.taken(line, exchange(&line.link, command, Some(script), false).await)
    }

    fn taken(&self, line: &Line, answer: Result<Value, Failure>) -> Result<Value> {
        if answer.as_ref().is_err_and(Failure::is_wrong_server) {
            line.link.close();
        }
        answer.map_err(|failure| failure.into_error_of_step(line.link.server()))
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
    /// sent on it may still be on its way, and the server is told to end it. False: that could not be made sure, and what was
    /// sent may arrive for as long as [`timing::on_its_way`].
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
    pub(super) async fn watch(self: &Arc<Node>, key: &str, ear: &Arc<Ear>) -> Result<(Watched, Arc<Inbox>)> {
        let opened = self.inboxes.get(&self.dialer.env, || {
            let (node, ear) = (self.clone(), ear.clone());
            async move { Inbox::open(node.dialer.clone(), Endpoint::At(node.address.clone()), ear).await }
        });
        let inbox = opened.await?;
        Ok((inbox.watch(key).await?, inbox))
    }

    /// Says which key it is about.
    fn voucher_refused(&self, error: Error) -> Error {
        let text = format!(
            "{}: clients need the right to the keys clinch:~*, under any prefix=, so also to \"{}\", where they leave what they \
             saw of a server",
            self.address, self.group.key
        );
        Error::new(error.kind(), text).with_source(error)
    }

    /// Notes whether something could be left on the server.
    pub(super) fn told(&self, answer: Result<()>) {
        let refused = answer.err().filter(|error| !error.is_transient());
        lock(&self.known).refuses = refused.map(|error| {
            format!("; what is seen of it cannot be left in its key \"{}\": {error}", self.group.key)
        });
    }

    fn failed(&self, failure: Failure) -> Error {
        failure.into_error(&self.address.to_string())
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
