//! What programs read: the documents of `--json`, and what they say of locks and claims, as events do too. `clinch schema` describes these
//! very types, so no description differs from what is written.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use clinch::backend::{ClaimState, LockState};
use clinch::{ClaimId, Mode, Token};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Serialize, Serializer};

use crate::exit::Failure;
use crate::output::{is_foreign, plain_json, rfc3339};

/// The version of all that is written as JSON. Fields and words may be added to it; what is renamed, removed, or given another meaning
/// makes another.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Version;

impl Version {
    const NUMBER: u8 = 1;
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u8(Version::NUMBER)
    }
}

impl JsonSchema for Version {
    fn schema_name() -> Cow<'static, str> {
        "Version".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "const": Version::NUMBER, "description": "The version of this format." })
    }
}

/// One document with its version.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Document<T> {
    v: Version,
    #[serde(flatten)]
    body: T,
}

/// A document, indented: people look at it too.
pub(crate) fn document(body: impl Serialize) -> Result<String, Failure> {
    json(&Document { v: Version, body })
}

/// JSON, indented.
pub(crate) fn json(value: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::system("JSON", error))?;
    Ok(plain_json(&text) + "\n")
}

/// A document on one line.
pub(crate) fn line(body: impl Serialize) -> String {
    // Texts and numbers only, which are always JSON.
    let text = serde_json::to_string(&Document { v: Version, body }).unwrap_or_default();
    plain_json(&text) + "\n"
}

/// What `clinch ls --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct LocksJson {
    /// In the order of their names.
    pub(crate) locks: Vec<LockJson>,
}

/// A lock.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct LockJson {
    /// Its name.
    name: String,
    /// Until when nobody is granted it but who holds it already, RFC 3339 in UTC; null: it is not kept closed.
    closed_until: Option<String>,
    /// Who holds it and who waits for it, first come first.
    claims: Vec<ClaimJson>,
}

/// What `clinch show --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ShownJson {
    #[serde(flatten)]
    pub(crate) lock: LockJson,
    /// Until when `clinch run --once-per` does not run again, RFC 3339 in UTC; null: it may run.
    pub(crate) once_per_until: Option<String>,
}

/// A claim: somebody who holds a lock or waits for it. What is null is not known, or does not apply.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ClaimJson {
    /// Its id, by which it is renewed, released or broken; null where the store has none for it.
    claim: Option<String>,
    mode: ModeWord,
    /// How many permits it takes; there for the mode `permits` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    permits: Option<u32>,
    /// How many permits there are; there for the mode `permits` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity: Option<u32>,
    state: StateWord,
    /// Whether another program made it, of which nothing else is known.
    foreign: bool,
    /// The fencing token; null for who waits.
    token: Option<u64>,
    /// Since when it is held, or waits: RFC 3339 in UTC, by the clock of the store or of the holder.
    since: Option<String>,
    /// How long its lease lasts yet unless it is renewed; null where it does not end, 0 when it has expired.
    expires_in_ms: Option<u64>,
    /// The host of its process.
    host: Option<String>,
    /// The process that holds it or waits; of `clinch acquire` the one for which it was taken, mostly a shell.
    pid: Option<u32>,
    /// The user of that process.
    user: Option<String>,
    /// What it is for.
    label: Option<String>,
}

/// How much of a lock a claim takes.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ModeWord {
    /// All of it.
    Exclusive,
    /// As a reader beside other readers.
    Shared,
    /// Some of its permits.
    Permits,
}

/// How a claim stands.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum StateWord {
    /// It holds the lock.
    Held,
    /// It waits for it.
    Waiting,
}

/// What `clinch acquire --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct LeaseJson {
    /// The lock.
    pub(crate) name: String,
    /// The claim, for `clinch renew` and `clinch release`.
    pub(crate) claim: String,
    /// The fencing token: larger than that of every earlier holder.
    pub(crate) token: u64,
    /// How long the lease lasts unless it is renewed.
    pub(crate) ttl_ms: u64,
    /// The process whose end frees the lock; null where it is bound to none.
    pub(crate) for_pid: Option<i32>,
}

/// What `clinch renew --json` and `clinch release --json` print.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct ResultJson {
    /// The lock.
    pub(crate) name: String,
    /// The claim; null where the store has no id for it, or none was meant.
    pub(crate) claim: Option<String>,
    pub(crate) result: ResultWord,
}

/// What `clinch break --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ResultsJson {
    /// One for each claim, and for each lock that was kept closed.
    pub(crate) results: Vec<ResultJson>,
}

/// What became of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ResultWord {
    /// It lasts longer.
    Renewed,
    /// It was held until now and is free.
    Released,
    /// It was lost before.
    Lost,
    /// It was taken away.
    Evicted,
    /// It had ended before it could be taken away.
    Gone,
    /// The lock was kept closed and is open.
    Opened,
    /// The lock stays closed: who held it was told before, and has until then to stop.
    StaysClosed,
    /// The store could not do it, or did not say that it did.
    Failed,
}

impl ResultWord {
    /// The word for people.
    pub(crate) fn text(self) -> &'static str {
        match self {
            ResultWord::Renewed => "renewed",
            ResultWord::Released => "released",
            ResultWord::Lost => "lost",
            ResultWord::Evicted => "evicted",
            ResultWord::Gone => "gone",
            ResultWord::Opened => "opened",
            ResultWord::StaysClosed => "stays closed",
            ResultWord::Failed => "failed",
        }
    }
}

/// What a verb with `--json` writes on stderr, on one line, when it fails.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ErrorJson {
    /// What failed, for people.
    pub(crate) error: String,
    /// The exit code.
    pub(crate) code: u8,
}

/// What a verb with `--json` writes on stderr, on one line, when it has something to say before it ends.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct MessageJson {
    /// For people.
    pub(crate) message: String,
}

impl From<&LockState> for LockJson {
    fn from(lock: &LockState) -> LockJson {
        LockJson {
            closed_until: lock.closed_until.map(rfc3339),
            claims: lock.claims.iter().map(ClaimJson::from).collect(),
            ..LockJson::free(lock.name.as_str())
        }
    }
}

impl LockJson {
    /// A lock that nobody holds, waits for, or keeps closed.
    pub(crate) fn free(name: &str) -> LockJson {
        LockJson { name: name.to_owned(), closed_until: None, claims: Vec::new() }
    }
}

impl From<&ClaimState> for ClaimJson {
    fn from(claim: &ClaimState) -> ClaimJson {
        let (mode, permits, capacity) = match claim.mode {
            Mode::Exclusive => (ModeWord::Exclusive, None, None),
            Mode::Shared => (ModeWord::Shared, None, None),
            Mode::Permits { count, capacity } => (ModeWord::Permits, Some(count.get()), Some(capacity.get())),
        };
        let ours = !is_foreign(claim);
        let owner = ours.then(|| claim.owner.clone());
        ClaimJson {
            claim: named(claim.id),
            mode,
            permits,
            capacity,
            state: if claim.granted { StateWord::Held } else { StateWord::Waiting },
            foreign: !ours,
            token: claim.token.filter(|_| claim.granted).map(Token::get),
            since: Some(rfc3339(claim.since)).filter(|since| ours && !since.is_empty()),
            expires_in_ms: claim.expires_in.map(whole_ms),
            pid: owner.as_ref().map(|owner| owner.pid),
            host: owner.as_ref().map(|owner| owner.host.clone()),
            user: owner.as_ref().map(|owner| owner.user.clone()),
            label: owner.map(|owner| owner.label),
        }
    }
}

impl ResultJson {
    pub(crate) fn new(name: &str, claim: ClaimId, result: ResultWord) -> ResultJson {
        ResultJson { name: name.to_owned(), claim: named(claim), result }
    }

    /// Of a lock that was kept closed.
    pub(crate) fn of_lock(name: &str, result: ResultWord) -> ResultJson {
        ResultJson { name: name.to_owned(), claim: None, result }
    }
}

/// A claim's id, where the store has one for it.
pub(crate) fn named(id: ClaimId) -> Option<String> {
    (id != ClaimId::from_bits(0)).then(|| id.to_string())
}

/// A time as it is told to programs.
pub(crate) fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A moment as it is told to programs, if there is one.
pub(crate) fn moment(time: Option<SystemTime>) -> Option<String> {
    time.map(rfc3339)
}
