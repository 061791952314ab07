//! Reading what the scripts answer. Nothing here trusts the server: an answer that makes no sense is an error.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use super::resp::Value;
use crate::backend::{Busy, ClaimState, Grant, LockState};
use crate::claim::{ClaimId, Mode, Owner};
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::token::Token;

/// What stands in the error's place of a holder who is no client of ours.
const FOREIGN: &str = "another program";

/// What stands before the owner in the record of a holder of ours whose release tells nobody, in the lean mode and of Redlock:
/// who waits for it in a queue has to watch the key.
pub(super) const TELLS_NOBODY: &str = " ";

/// The answer to a claim.
#[derive(Debug)]
pub(super) enum Claimed {
    Granted(Token),
    Queued(Place),
    Busy(Busy),
    OtherCapacity(String),
    Buried,
}

/// A place in the queue.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) busy: Busy,
    /// The server's clock, in milliseconds.
    pub(super) server: u64,
    /// How many waiters are ahead.
    pub(super) waiters: u32,
    /// After what time another step is worth taking, if no message comes; `None`: the holder's lease has no end.
    pub(super) look: Option<Duration>,
    /// Whether the holder's release tells nobody: a foreign client's, or that of one of ours that knows no queue.
    pub(super) foreign: bool,
}

fn nonsense() -> Error {
    Error::new(ErrorKind::Unknown, "the server's answer to a lock script made no sense; is it a Redis?")
}

pub(super) fn number(value: &Value) -> Result<i64> {
    match value {
        Value::Int(number) => Ok(*number),
        other => other.text().and_then(|text| text.parse().ok()).ok_or_else(nonsense),
    }
}

fn count(value: &Value) -> Result<u32> {
    Ok(u32::try_from(number(value)?.max(0)).unwrap_or(u32::MAX))
}

fn millis(value: &Value) -> Result<Option<Duration>> {
    Ok(u64::try_from(number(value)?).ok().map(Duration::from_millis))
}

pub(super) fn list(value: &Value) -> Result<&[Value]> {
    match value {
        Value::List(values) => Ok(values),
        _ => Err(nonsense()),
    }
}

/// What TIME answered, in microseconds.
pub(super) fn micros(time: &Value) -> Option<u64> {
    let [seconds, micros] = list(time).ok()? else { return None };
    let part = |value: &Value| value.text()?.parse::<u64>().ok();
    part(seconds)?.checked_mul(1_000_000)?.checked_add(part(micros)?)
}

/// Whether one of the numbers of a list is such a one.
pub(super) fn has(value: &Value, is: impl Fn(i64) -> bool) -> bool {
    list(value).is_ok_and(|all| all.iter().any(|one| number(one).is_ok_and(&is)))
}

/// What stands in a lock's key, which may be no text at all.
pub(super) fn lossy(value: &Value) -> String {
    match value {
        Value::Text(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        _ => String::new(),
    }
}

fn token(value: &Value) -> Result<Token> {
    let token = value.text().and_then(|text| text.parse().ok()).and_then(Token::new);
    token.ok_or_else(nonsense)
}

/// Reads the answer of `release.lua`: whether there was something to remove, and from where on the queue is to be looked at.
pub(super) fn released(answer: &Value) -> Result<(bool, Option<i64>)> {
    match answer {
        Value::List(both) => match both.as_slice() {
            [removed, at] => Ok((number(removed)? == 1, Some(number(at)?))),
            _ => Err(nonsense()),
        },
        removed => Ok((number(removed)? == 1, None)),
    }
}

/// Whether a claim's step was answered with the lock.
pub(super) fn is_granted(answer: &Value) -> bool {
    matches!(answer, Value::Text(_))
}

/// Reads the answer of `acquire.lua`.
pub(super) fn claimed(answer: &Value, place_ttl: Duration) -> Result<Claimed> {
    if is_granted(answer) {
        return Ok(Claimed::Granted(token(answer)?));
    }
    match list(answer)? {
        [Value::Int(kind @ (2 | 3)), now, ahead, waiters, look, record, left] => {
            let record = &lossy(record);
            let left = millis(left)?;
            let holder = holder(record, left);
            let foreign = holder.as_ref().is_some_and(|holder| holder.owner.pid == 0) || tells_nobody(record);
            let queued = *kind == 2;
            let place_ttl = queued.then_some(place_ttl);
            let busy = Busy { ahead: count(ahead)?, holder, place_ttl, ..Busy::default() };
            if !queued {
                return Ok(Claimed::Busy(busy));
            }
            let server = u64::try_from(number(now)?).map_err(|_| nonsense())?;
            Ok(Claimed::Queued(Place {
                busy,
                server,
                waiters: count(waiters)?,
                look: millis(look)?,
                foreign,
            }))
        }
        [Value::Int(4), capacity] => {
            Ok(Claimed::OtherCapacity(capacity.text().unwrap_or_default().to_owned()))
        }
        [Value::Int(5)] => Ok(Claimed::Buried),
        _ => Err(nonsense()),
    }
}

/// The holder that a lock key's record, or a part holder's id and record, tells of; a stranger where it is no record of
/// ours, `None` where nobody holds.
pub(super) fn holder(record: &str, left: Option<Duration>) -> Option<ClaimState> {
    let (id, rest) = record.split_once(' ').unwrap_or_default();
    let foreign = !record.is_empty() && !matches!(record, "clinch parts" | "clinch closed");
    part(id, rest, left).or_else(|| sole(record, left)).or_else(|| foreign.then(|| stranger(left)))
}

/// A record of the lock key: `<claim id> <token> <since µs> <owner>`, or `<claim id>*<token> ...`, or with a `!` of a claim
/// that was evicted.
fn sole(record: &str, left: Option<Duration>) -> Option<ClaimState> {
    let (id, rest) = record.split_at_checked(32)?;
    let mut words = rest.strip_prefix([' ', '*', '!'])?.splitn(3, ' ');
    let id = id.parse().ok()?;
    let token = words.next()?.parse().ok().and_then(Token::new)?;
    state(id, Mode::Exclusive, Some(token), words.next()?, words.next()?, left)
}

fn tells_nobody(record: &str) -> bool {
    let owner = record.split_at_checked(33).and_then(|(_, rest)| rest.splitn(3, ' ').nth(2));
    owner.is_some_and(|owner| owner.starts_with(TELLS_NOBODY))
}

/// A record of the holder of a part: `h <mode> <token> <since µs> <owner>`, with a `!` before the token of one that was evicted.
fn part(id: &str, record: &str, left: Option<Duration>) -> Option<ClaimState> {
    let mut words = record.strip_prefix("h ")?.splitn(4, ' ');
    let mode = mode(words.next()?)?;
    let token = words.next()?.trim_start_matches('!').parse().ok().and_then(Token::new)?;
    state(id.parse().ok()?, mode, Some(token), words.next()?, words.next()?, left)
}

/// Whether the record, of the lock or of the holder of a part, is that of a claim that was evicted. What others write may have
/// anything anywhere.
pub(super) fn is_evicted(record: &str) -> bool {
    let sole = |(id, rest): (&str, &str)| rest.starts_with('!') && id.parse::<ClaimId>().is_ok();
    record.split_at_checked(32).is_some_and(sole)
        || record
            .strip_prefix("h ")
            .and_then(|rest| rest.split_once(' '))
            .is_some_and(|(_, rest)| rest.starts_with('!'))
}

/// Whether what stands in a key and begins so may be a lock of ours: a holder's record, or what stands there for several.
pub(super) fn may_be_ours(start: &str) -> bool {
    let sole = |(id, rest): (&str, &str)| rest.starts_with([' ', '*', '!']) && id.parse::<ClaimId>().is_ok();
    start.starts_with("clinch ") || start.split_at_checked(32).is_some_and(sole)
}

/// A record of a waiter: `w <mode> <place counts from> <ttl> <since µs> <inbox> <owner>`.
fn waiter(id: &str, record: &str, left: Option<Duration>) -> Option<ClaimState> {
    let mut words = record.strip_prefix("w ")?.splitn(6, ' ');
    let mode = mode(words.next()?)?;
    let since = words.nth(2)?;
    state(id.parse().ok()?, mode, None, since, words.nth(1)?, left)
}

fn state(
    id: ClaimId,
    mode: Mode,
    token: Option<Token>,
    since: &str,
    owner: &str,
    expires_in: Option<Duration>,
) -> Option<ClaimState> {
    let since = SystemTime::UNIX_EPOCH + Duration::from_micros(since.parse().ok()?);
    let owner = serde_json::from_str(owner).ok()?;
    Some(ClaimState { id, mode, granted: token.is_some(), token, owner, since, expires_in })
}

/// A holder of whom only the end of the lease is known.
fn stranger(left: Option<Duration>) -> ClaimState {
    ClaimState {
        id: ClaimId::from_bits(0),
        mode: Mode::Exclusive,
        granted: true,
        token: None,
        owner: Owner { host: FOREIGN.into(), pid: 0, user: String::new(), label: String::new() },
        since: SystemTime::UNIX_EPOCH,
        expires_in: left,
    }
}

/// How a mode is written in the store.
pub(super) fn mode_text(mode: Mode) -> Cow<'static, str> {
    match mode {
        Mode::Exclusive => "x".into(),
        Mode::Shared => "s".into(),
        Mode::Permits { count, capacity } => format!("p{count}/{capacity}").into(),
    }
}

fn mode(text: &str) -> Option<Mode> {
    let permits = || {
        let (count, capacity) = text.strip_prefix('p')?.split_once('/')?;
        Some(Mode::Permits { count: count.parse().ok()?, capacity: capacity.parse().ok()? })
    };
    match text {
        "x" => Some(Mode::Exclusive),
        "s" => Some(Mode::Shared),
        _ => permits(),
    }
}

/// Reads the answer of `state.lua`; `None`: nobody holds, waits, or keeps it closed.
pub(super) fn lock_state(name: &LockName, answer: &Value) -> Result<Option<LockState>> {
    let [now, lock, left, closed, parts, waiting] = list(answer)? else { return Err(nonsense()) };
    let (now, left) = (number(now)?, millis(left)?);
    let record = &lossy(lock);
    let mut claims = Vec::new();
    // What was evicted keeps its room until its holder has stopped.
    let mut evicted = left.filter(|_| is_evicted(record));
    claims.extend(holder(record, left).filter(|_| !is_evicted(record)));
    for (values, read) in [(parts, part as fn(&str, &str, _) -> _), (waiting, waiter)] {
        for entry in list(values)?.chunks_exact(3) {
            let [id, record, ends] = entry else { continue };
            let left = Some(Duration::from_millis(u64::try_from(number(ends)? - now).unwrap_or(0)));
            let (Some(id), Some(record)) = (id.text(), record.text()) else { continue };
            if is_evicted(record) {
                evicted = evicted.max(left);
            } else {
                claims.extend(read(id, record, left));
            }
        }
    }
    let moment = |millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
    let closed = u64::try_from(number(closed)?).ok().filter(|until| *until > 0).map(moment);
    let held = claims.iter().any(|claim| claim.granted);
    let evicted =
        evicted.filter(|_| !held).zip(u64::try_from(now).ok()).map(|(left, now)| moment(now) + left);
    let closed_until = closed.max(evicted);
    let state = LockState { name: name.clone(), claims, closed_until };
    Ok((!state.claims.is_empty() || closed_until.is_some()).then_some(state))
}

/// A grant that was the answer to a step.
pub(super) fn answered(token: Token, ttl: Duration) -> Grant {
    Grant { token, ttl: Some(ttl), from: None }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Others write what they like, also bytes that are no text and have become longer on their way here.
    #[test]
    fn what_another_program_holds_was_not_evicted() {
        let id = ClaimId::from_bits(7).to_string();
        assert!(is_evicted(&format!("{id}!0000000000000001 1 h 1 u")));
        assert!(is_evicted("h x !0000000000000001 1 h 1 u"));
        for random in ["\u{fffd}".repeat(10) + "ab!cd", "x".repeat(32) + "!"] {
            assert!(!is_evicted(&random) && holder(&random, None).is_some(), "{random}");
        }
        assert!(!is_evicted(&format!("{id} 0000000000000001 1 h 1 u")));
    }

    const ID: &str = "000102030405060708090a0b0c0d0e0f";
    const OWNER: &str = r#"{"host":"h","pid":7,"user":"me","label":"a b"}"#;

    fn bulk(text: &str) -> Value {
        Value::Text(text.as_bytes().to_vec())
    }

    fn busy(holder: &str) -> Value {
        let numbers = [2, 5_000, 3, 2, 700].map(Value::Int);
        Value::List([&numbers[..], &[bulk(holder), Value::Int(900)]].concat())
    }

    #[test]
    fn what_may_be_ours_is_known_by_how_it_begins() {
        for ours in [&format!("{ID} 17"), &format!("{ID}*17"), &format!("{ID}!17"), "clinch parts"] {
            assert!(may_be_ours(ours), "{ours}");
        }
        for other in ["", "clinch", ID, &format!("{ID}17"), &ID.replace('f', "x"), &"\u{fffd}".repeat(20)] {
            assert!(!may_be_ours(other), "{other}");
        }
    }

    #[test]
    fn a_refusal_names_the_holder() {
        for (record, mode, foreign) in [
            (format!("{ID} 1700000000000001 1700000000000000 {OWNER}"), Mode::Exclusive, false),
            (format!("{ID}*1700000000000001 1700000000000000 {OWNER}"), Mode::Exclusive, false),
            (format!("{ID}!1700000000000001 1700000000000000 {OWNER}"), Mode::Exclusive, false),
            (format!("{ID} 0 1700000000000000 {TELLS_NOBODY}{OWNER}"), Mode::Exclusive, true),
            (format!("{ID} h s 1700000000000001 1700000000000000 {OWNER}"), Mode::Shared, false),
        ] {
            let Claimed::Queued(place) = claimed(&busy(&record), Duration::ZERO).unwrap() else {
                panic!("not queued")
            };
            let holder = place.busy.holder.unwrap();
            assert_eq!(
                (holder.mode, holder.owner.label.as_str(), holder.id.to_string().as_str()),
                (mode, "a b", ID)
            );
            assert!(place.foreign == foreign && place.look == Some(Duration::from_millis(700)), "{record}");
        }
        for (record, foreign) in
            [("", false), ("clinch closed", false), ("token of redis-py", true), ("17", true)]
        {
            let Claimed::Queued(place) = claimed(&busy(record), Duration::ZERO).unwrap() else {
                panic!("not queued")
            };
            assert_eq!(place.foreign, foreign, "{record}");
        }
    }

    #[test]
    fn modes_read_back() {
        for text in ["exclusive", "shared", "2 of 5"] {
            let wanted: Mode = text.parse().unwrap();
            assert_eq!(mode(&mode_text(wanted)), Some(wanted));
        }
        assert_eq!(mode("p0/3"), None);
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Nil),
            any::<i64>().prop_map(Value::Int),
            "[a-f0-9 hws{}]{0,60}".prop_map(|text| bulk(&text)),
            prop::collection::vec(any::<u8>(), 0..8).prop_map(Value::Text),
        ];
        leaf.prop_recursive(2, 16, 8, |inner| prop::collection::vec(inner, 0..8).prop_map(Value::List))
    }

    proptest! {
        #[test]
        fn no_answer_of_a_server_panics(answer in value()) {
            let _ = claimed(&answer, Duration::ZERO);
            let _ = released(&answer);
            let _ = lock_state(&LockName::new("n").unwrap(), &answer);
        }
    }
}
