//! What people and programs read: messages on stderr, tables and JSON on stdout, times.

use std::fmt::Display;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::time::{Duration, SystemTime};

use clinch::backend::{ClaimState, LockState};
use clinch::{ClaimId, Mode, Token};
use jiff::{Timestamp, Zoned, tz::TimeZone};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use serde::Serialize;

use crate::exit::{Failure, UNWRITTEN};
use crate::writer::{To, WRITER};

/// How long a pipe that is full may take until something is read from it.
pub(crate) const PATIENTLY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// For who does not wait here.
pub(crate) const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Says something on stderr.
pub(crate) fn say(what: impl Display) {
    WRITER.write(&To::Stderr, message(what));
}

/// A line for people. It may tell of a holder, in the words of whoever that is.
pub(crate) fn message(what: impl Display) -> String {
    format!("clinch: {}\n", printable(&what.to_string()))
}

/// Whether a line can be written without waiting, within this time.
pub(crate) fn has_room(to: BorrowedFd<'_>, within: Timespec) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(to, PollFlags::OUT)];
    retry_on_intr(|| poll(&mut fds, Some(&within))) != Ok(0)
}

/// Prints on stdout what was done, which somebody has to hear of.
pub(crate) fn answer(text: &str) -> Result<(), Failure> {
    write(text).map_err(|error| Failure::new(UNWRITTEN, format!("cannot write the answer: {error}")))
}

/// Prints on stdout what was looked for. Whoever looks may look away.
pub(crate) fn show(text: &str) -> Result<(), Failure> {
    match write(text) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => {
            written.map_err(|error| Failure::new(UNWRITTEN, format!("cannot write the answer: {error}")))
        }
    }
}

fn write(text: &str) -> io::Result<()> {
    io::stdout().write_all(text.as_bytes())?;
    io::stdout().flush()
}

/// JSON, indented: people look at it too.
pub(crate) fn json(value: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::system("JSON", error))?;
    Ok(plain_json(&text) + "\n")
}

/// JSON that cannot mislead who looks at it.
pub(crate) fn plain_json(text: &str) -> String {
    // Outside of its texts there are none of these but line ends.
    let is_plain = |c: char| c == '\n' || !misleads(c);
    text.chars().flat_map(|c| if is_plain(c) { vec![c] } else { json_escaped(c) }).collect()
}

fn json_escaped(c: char) -> Vec<char> {
    c.encode_utf16(&mut [0; 2])
        .iter()
        .flat_map(|unit| format!("\\u{unit:04x}").chars().collect::<Vec<_>>())
        .collect()
}

/// A lock in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct LockJson {
    name: String,
    /// Until when it stays closed although nobody holds it.
    closed_until: Option<String>,
    claims: Vec<ClaimJson>,
}

/// A claim in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct ClaimJson {
    claim: Option<String>,
    /// `exclusive`, `shared` or `permits`.
    mode: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    permits: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity: Option<u32>,
    /// `held` or `waiting`.
    state: &'static str,
    /// Whether it is no client of ours, so that what is null is not known.
    foreign: bool,
    token: Option<u64>,
    since: Option<String>,
    expires_in_ms: Option<u64>,
    host: Option<String>,
    pid: Option<u32>,
    user: Option<String>,
    label: Option<String>,
}

impl From<&LockState> for LockJson {
    fn from(lock: &LockState) -> LockJson {
        LockJson {
            name: lock.name.as_str().to_owned(),
            closed_until: lock.closed_until.map(rfc3339),
            claims: lock.claims.iter().map(ClaimJson::from).collect(),
        }
    }
}

impl From<&ClaimState> for ClaimJson {
    fn from(claim: &ClaimState) -> ClaimJson {
        let (mode, permits, capacity) = match claim.mode {
            Mode::Exclusive => ("exclusive", None, None),
            Mode::Shared => ("shared", None, None),
            Mode::Permits { count, capacity } => ("permits", Some(count.get()), Some(capacity.get())),
        };
        let ours = !is_foreign(claim);
        let owner = ours.then(|| claim.owner.clone());
        ClaimJson {
            claim: named(claim.id),
            mode,
            permits,
            capacity,
            state: state(claim),
            foreign: !ours,
            token: claim.token.filter(|_| claim.granted).map(Token::get),
            since: Some(rfc3339(claim.since)).filter(|since| ours && !since.is_empty()),
            expires_in_ms: claim.expires_in.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
            pid: owner.as_ref().map(|owner| owner.pid),
            host: owner.as_ref().map(|owner| owner.host.clone()),
            user: owner.as_ref().map(|owner| owner.user.clone()),
            label: owner.map(|owner| owner.label),
        }
    }
}

fn state(claim: &ClaimState) -> &'static str {
    if claim.granted { "held" } else { "waiting" }
}

/// Whether a holder is no client of ours, so that nothing is known of it but that it holds.
pub(crate) fn is_foreign(claim: &ClaimState) -> bool {
    claim.owner.pid == 0
}

/// One claim, at length.
pub(crate) fn describe(claim: &ClaimState) -> String {
    let owner = &claim.owner;
    if is_foreign(claim) {
        return format!("{} by {}", state(claim), printable(&owner.host));
    }
    let label =
        if owner.label.is_empty() { String::new() } else { format!(" ({})", printable(&owner.label)) };
    format!(
        "{} since {} by {} on {}, pid {}{label}",
        state(claim),
        local(claim.since),
        printable(&owner.user),
        printable(&owner.host),
        owner.pid
    )
}

/// A claim's id, where the store has one for it.
pub(crate) fn named(id: ClaimId) -> Option<String> {
    (id != ClaimId::from_bits(0)).then(|| id.to_string())
}

/// Whether a letter could steer a terminal, turn its text around, or is not seen.
fn misleads(c: char) -> bool {
    let turns =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_unseen = matches!(
        c,
        '\u{ad}' | '\u{200b}' | '\u{2060}'..='\u{2064}' | '\u{3164}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}'
    );
    c.is_control() || turns || is_unseen
}

/// Text of others without what misleads.
pub(crate) fn printable(text: &str) -> String {
    text.chars().flat_map(|c| if misleads(c) { c.escape_unicode().collect() } else { vec![c] }).collect()
}

/// A text that a POSIX shell reads back as one word.
pub(crate) fn shell_word(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@%+=,".contains(&byte);
    if !text.is_empty() && text.bytes().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// What `acquire` answers.
#[derive(Debug, Serialize)]
pub(crate) struct LeaseJson {
    pub(crate) name: String,
    pub(crate) claim: String,
    pub(crate) token: u64,
    pub(crate) ttl_ms: u64,
    /// The process whose end frees the lock.
    pub(crate) for_pid: Option<i32>,
}

/// What `renew`, `release` and `break` answer.
#[derive(Debug, Serialize)]
pub(crate) struct ResultJson {
    pub(crate) name: String,
    pub(crate) claim: Option<String>,
    pub(crate) result: &'static str,
}

impl ResultJson {
    pub(crate) fn new(name: &str, claim: ClaimId, result: &'static str) -> ResultJson {
        ResultJson { name: name.to_owned(), claim: named(claim), result }
    }
}

/// A duration in its two largest units.
pub(crate) fn short(time: Duration) -> String {
    let seconds = time.as_secs();
    let (h, m, s) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (h, m, s) {
        (0, 0, 0) => format!("{}ms", time.subsec_millis()),
        (0, 0, s) => format!("{s}s"),
        (0, m, 0) => format!("{m}m"),
        (0, m, s) => format!("{m}m {s}s"),
        (h, 0, _) => format!("{h}h"),
        (h, m, _) => format!("{h}h {m}m"),
    }
}

/// A moment for programs: RFC 3339 in UTC, with milliseconds.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    Timestamp::try_from(time).map(|time| format!("{time:.3}")).unwrap_or_default()
}

/// A moment for people: the local time, with the date unless it is today's.
pub(crate) fn local(time: SystemTime) -> String {
    let zone = TimeZone::system();
    let Ok(time) = Timestamp::try_from(time).map(|time| time.to_zoned(zone)) else { return "?".to_owned() };
    let today = time.date() == Zoned::now().date();
    time.strftime(if today { "%H:%M:%S" } else { "%Y-%m-%d %H:%M:%S" }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_words_read_back() {
        assert_eq!(shell_word("reports/daily"), "reports/daily");
        assert_eq!(shell_word("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(shell_word(""), "''");
    }

    #[test]
    fn times_and_texts_are_safe_to_show() {
        assert_eq!(rfc3339(SystemTime::UNIX_EPOCH + Duration::from_millis(1500)), "1970-01-01T00:00:01.500Z");
        assert_eq!(short(Duration::from_millis(3_723_004)), "1h 2m");
        assert_eq!(short(Duration::from_millis(40)), "40ms");
        assert_eq!([60, 61, 3600].map(|time| short(Duration::from_secs(time))), ["1m", "1m 1s", "1h"]);
        assert_eq!(printable("a\x1b[2Jb\u{202e}c\u{200b}"), r"a\u{1b}[2Jb\u{202e}c\u{200b}");
        assert_eq!(message("held by \x1b[2J"), "clinch: held by \\u{1b}[2J\n");
        let odd = ["\u{9b}2J \"\u{202e}\u{e0041}\n日"];
        let text = json(&odd).unwrap();
        assert!(text.contains(r#"\u009b2J \"\u202e\udb40\udc41\n日"#), "{text}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), odd);
    }
}
