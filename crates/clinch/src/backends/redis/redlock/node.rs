//! One of the independent servers: what is known of it, and whether its vote counts.

mod line;

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

pub(super) use self::line::{Line, Runs, process};
use super::super::dial::Dialer;
use super::super::failure::Failure;
use super::super::inbox::Inbox;
use super::super::reply;
use super::super::resp::{Command, Sixteen};
use super::super::settings::Address;
use super::group::Group;
use super::settings::Rules;
use super::timing::{self, Evenness, Offset, Patience};
use super::voucher::Voucher;
use crate::backends::pool::Pool;
use crate::clock::Instant;
use crate::error::{Error, Result};
use crate::sync::lock;

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

    /// How long its answers take; `None`: the last one did not come.
    pub(super) fn trip(&self) -> Option<Duration> {
        lock(&self.known).patience.trip()
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

    /// Whether a connection leads to the run that was met last, of which it is known whether its vote counts. One that does not
    /// would never be of use again, and is closed.
    pub(super) fn is_met_by(&self, line: &Line) -> bool {
        let is_met = lock(&self.known).is_met(line.run());
        if !is_met {
            line.link.close();
        }
        is_met
    }

    /// Notes what stands on the run of the server to which a connection leads. Where somebody has left word of another run of the same
    /// process since it was opened, the connection is closed: the next one asks again which run that is.
    pub(super) fn left(&self, line: &Line, left: Left) {
        let of_another =
            |voucher: &Voucher| voucher.run != line.run() && process(&voucher.run) == process(line.run());
        let is_of_another = left.voucher.as_ref().is_some_and(of_another);
        let is_news = {
            let mut known = lock(&self.known);
            if !known.is_met(line.run()) {
                return;
            }
            let is_news = known.voucher.text != left.text;
            known.voucher = left;
            is_news
        };
        if is_of_another && is_news {
            line.link.close();
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
        if let Some(us) = reply::micros(time).filter(|_| self.is_met_by(&line)) {
            self.clock_read(us, sent, received);
        }
        self.left(&line, Left::read(reply::lossy(left), &self.group));
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
        // The same process was there all the time, and what is left on a run of it tells of that one.
        let before = before.filter(|(before, _)| process(before) != process(run));
        let stands_in = before.is_some_and(|(_, ended)| {
            let seen = ended.get().copied().unwrap_or(now);
            timing::stands_in(now, uptime, seen)
        });
        known.watch = Some(Watch { since: now, stands_in });
    }

    /// Until when, by the server's clock, what is sent now is of use; none, where the clock is not known.
    pub(super) fn end_of_use(&self, now: Instant) -> Sixteen {
        let latest = lock(&self.known).clock.map(|clock| clock.likely_latest_us(now, self.evenness()));
        let useful = u64::try_from(timing::USEFUL.as_micros()).unwrap_or(u64::MAX);
        Sixteen(latest.map_or(u64::MAX, |latest| latest.saturating_add(useful)))
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

/// A time without what is too fine to be read.
pub(super) fn in_millis(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}
