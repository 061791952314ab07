//! One event of a history and its form on a line of JSON.
//!
//! The line format is the contract between recorders in any language and this checker, so it is strict: an unknown
//! field or a missing one is an error, since a history that is half understood cannot acquit anybody.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// What kind of thing happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A call was about to be made.
    #[serde(rename = "inv")]
    Invoke,
    /// The call was answered with success; a release was answered "released".
    Ok,
    /// The call surely had no effect; a release was answered "was not held any more".
    Fail,
    /// The outcome of the call is not known, and never will be.
    #[serde(rename = "info")]
    Unknown,
    /// The holder was told that it no longer holds.
    Lost,
    /// The process was seen to be dead, after a kill; all that it held has ended by now.
    Crash,
    /// A fenced store decided about a write.
    Store,
    /// A remark for human readers, such as the fault being injected.
    Note,
}

/// What was asked of the lock, or of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// To hold the lock; `ok` is the grant.
    Acquire,
    /// To be put into the queue; `ok` is the instant at which the claim was known to be queued.
    Enqueue,
    /// To hold on for longer; `ok` may carry a new deadline.
    Renew,
    /// To let go.
    Release,
    /// To hold what is held alone together with other shared holders from now on.
    Downgrade,
    /// To write to a fenced store.
    Write,
}

/// How a lock is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Alone.
    Exclusive,
    /// Together with other shared holders.
    Shared,
    /// `n` of `of` permits.
    Permits {
        /// How many are held.
        n: u64,
        /// How many there are.
        of: u64,
    },
}

/// One event; which fields are present depends on the kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// `k`: what kind of event this is.
    pub kind: Kind,
    /// `id`: which call of this process; an outcome has the id of its invocation.
    pub id: Option<u64>,
    /// `p`: the process (client) concerned. The name of a killed process is never used again.
    pub process: Option<String>,
    /// `lock`: the name of the lock.
    pub lock: Option<String>,
    /// `f`: what was asked.
    pub op: Option<Op>,
    /// `mode`, `n`, `of`: how the lock is asked for or held.
    pub mode: Option<Mode>,
    /// `claim`: one attempt to hold; never used for a second attempt.
    pub claim: Option<String>,
    /// `token`: the fencing token.
    pub token: Option<u64>,
    /// `t`: when, in nanoseconds of CLOCK_BOOTTIME of the recording host.
    pub time: u64,
    /// `te`: by how many nanoseconds `time` may be off, either way; 0 when absent.
    pub error: u64,
    /// `from`: the earliest time at which this can have happened, where it was seen only later, at `time`: of a crash,
    /// when the kill was about to be sent; of a loss, or of a new deadline, when the holder was last seen to hold. A crash
    /// without it may have come at any time after the last event of its process.
    pub from: Option<u64>,
    /// `ttl`: the time to live in milliseconds; absent for a hold that ends with its process.
    pub ttl_ms: Option<u64>,
    /// `dl`: until when the holder itself believes to hold, in nanoseconds like `time`; absent: for ever.
    pub deadline: Option<u64>,
    /// `linger`: of a release, for how many milliseconds after it the lock stays closed to everybody.
    pub linger_ms: Option<u64>,
    /// `acc`: whether the store accepted the write.
    pub accepted: Option<bool>,
    /// `text`: the words of a note.
    pub text: Option<String>,
}

impl Event {
    /// An event with nothing but a kind and a time.
    pub fn new(kind: Kind, time: u64) -> Self {
        Event {
            kind,
            id: None,
            process: None,
            lock: None,
            op: None,
            mode: None,
            claim: None,
            token: None,
            time,
            error: 0,
            from: None,
            ttl_ms: None,
            deadline: None,
            linger_ms: None,
            accepted: None,
            text: None,
        }
    }

    /// The earliest instant at which this can have happened.
    pub fn earliest(&self) -> u64 {
        self.from.unwrap_or(self.time).saturating_sub(self.error)
    }

    /// The latest instant at which this can have happened.
    pub fn latest(&self) -> u64 {
        self.time.saturating_add(self.error)
    }

    /// What keeps this event from being judged, if anything: a field that its kind needs and that is absent.
    pub fn problem(&self) -> Option<&'static str> {
        if self.from.is_some_and(|from| from > self.time) {
            return Some("`from` must not be later than `t`");
        }
        match self.kind {
            Kind::Invoke | Kind::Ok | Kind::Fail | Kind::Unknown => self.call_problem(),
            Kind::Lost => self.claim_problem(),
            Kind::Crash if self.process.is_none() => Some("a crash needs `p`, the process that was killed"),
            Kind::Store => self.store_problem(),
            Kind::Crash | Kind::Note => None,
        }
    }

    fn call_problem(&self) -> Option<&'static str> {
        match self.op {
            None => Some("a call needs `f`, what was asked"),
            _ if self.id.is_none() => Some("a call needs `id`"),
            // A client may record its own writes for human readers; the store's record is what is judged.
            Some(Op::Write) => None,
            Some(Op::Acquire | Op::Enqueue)
                if self.mode.is_none() && matches!(self.kind, Kind::Invoke | Kind::Ok) =>
            {
                Some("an acquire or enqueue needs `mode`")
            }
            Some(Op::Downgrade) if self.mode != Some(Mode::Shared) => {
                Some("a downgrade needs `mode`: \"s\", how it goes on")
            }
            Some(_) => self.claim_problem(),
        }
    }

    fn claim_problem(&self) -> Option<&'static str> {
        if self.process.is_none() {
            return Some("this event needs `p`, the process");
        }
        if self.lock.is_none() {
            return Some("this event needs `lock`");
        }
        self.claim.is_none().then_some("this event needs `claim`")
    }

    fn store_problem(&self) -> Option<&'static str> {
        if self.op != Some(Op::Write) {
            return Some("a store event needs `f`: \"write\"");
        }
        if self.lock.is_none() || self.token.is_none() || self.accepted.is_none() {
            return Some("a store's write needs `lock`, `token` and `acc`");
        }
        None
    }
}

/// The letters of `mode`.
#[derive(Clone, Copy, Serialize, Deserialize)]
enum Letter {
    #[serde(rename = "x")]
    Exclusive,
    #[serde(rename = "s")]
    Shared,
    #[serde(rename = "p")]
    Permits,
}

/// The fields as they stand on the line; generic so that writing borrows the strings and reading owns them.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line<S> {
    k: Kind,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", default = "Option::default")]
    p: Option<S>,
    #[serde(skip_serializing_if = "Option::is_none", default = "Option::default")]
    lock: Option<S>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    f: Option<Op>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    mode: Option<Letter>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    n: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    of: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", default = "Option::default")]
    claim: Option<S>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    token: Option<u64>,
    t: u64,
    #[serde(skip_serializing_if = "is_zero", default)]
    te: u64,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    from: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    ttl: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    dl: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    linger: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    acc: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none", default = "Option::default")]
    text: Option<S>,
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn mode_from(letter: Option<Letter>, n: Option<u64>, of: Option<u64>) -> Result<Option<Mode>, &'static str> {
    match (letter, n, of) {
        (None, None, None) => Ok(None),
        (Some(Letter::Exclusive), None, None) => Ok(Some(Mode::Exclusive)),
        (Some(Letter::Shared), None, None) => Ok(Some(Mode::Shared)),
        (Some(Letter::Permits), n, Some(of)) if n != Some(0) && of != 0 => {
            Ok(Some(Mode::Permits { n: n.unwrap_or(1), of }))
        }
        (Some(Letter::Permits), ..) => Err("mode \"p\" needs `of`, and `n` and `of` of at least 1"),
        _ => Err("`n` and `of` belong to mode \"p\""),
    }
}

impl Serialize for Event {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (mode, n, of) = match self.mode {
            None => (None, None, None),
            Some(Mode::Exclusive) => (Some(Letter::Exclusive), None, None),
            Some(Mode::Shared) => (Some(Letter::Shared), None, None),
            Some(Mode::Permits { n, of }) => (Some(Letter::Permits), Some(n), Some(of)),
        };
        let line = Line {
            k: self.kind,
            id: self.id,
            p: self.process.as_deref(),
            lock: self.lock.as_deref(),
            f: self.op,
            mode,
            n,
            of,
            claim: self.claim.as_deref(),
            token: self.token,
            t: self.time,
            te: self.error,
            from: self.from,
            ttl: self.ttl_ms,
            dl: self.deadline,
            linger: self.linger_ms,
            acc: self.accepted,
            text: self.text.as_deref(),
        };
        line.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let line = Line::<String>::deserialize(deserializer)?;
        let event = Event {
            kind: line.k,
            id: line.id,
            process: line.p,
            lock: line.lock,
            op: line.f,
            mode: mode_from(line.mode, line.n, line.of).map_err(de::Error::custom)?,
            claim: line.claim,
            token: line.token,
            time: line.t,
            error: line.te,
            from: line.from,
            ttl_ms: line.ttl,
            deadline: line.dl,
            linger_ms: line.linger,
            accepted: line.acc,
            text: line.text,
        };
        event.problem().map_or(Ok(event), |problem| Err(de::Error::custom(problem)))
    }
}
