//! What people and programs read: messages on stderr, tables and JSON on stdout, times.

use std::fmt::Display;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use clinch::backend::ClaimState;
use jiff::{Timestamp, Zoned, tz::TimeZone};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};

use serde::Serialize;

use crate::documents::{ErrorJson, MessageJson, line};
use crate::exit::{Failure, UNWRITTEN};
use crate::job::sys;
use crate::writer::{To, WRITER};

/// How long a pipe that is full may take until something is read from it.
pub(crate) const PATIENTLY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// For who does not wait here.
pub(crate) const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Whether who reads our stderr is a program that was promised JSON.
static SPEAKS_JSON: AtomicBool = AtomicBool::new(false);

/// Has all that is said from now on said as JSON, each on one line.
pub(crate) fn speak_json() {
    SPEAKS_JSON.store(true, Ordering::Relaxed);
}

/// Says something on stderr.
pub(crate) fn say(what: impl Display) {
    say_as(what, |message| MessageJson { message });
}

/// Says on stderr why a verb fails, and with which exit code.
pub(crate) fn say_failure(what: &str, code: u8) {
    say_as(what, |error| ErrorJson { error, code });
}

fn say_as<T: Serialize>(what: impl Display, document: impl FnOnce(String) -> T) {
    let line = match SPEAKS_JSON.load(Ordering::Relaxed) {
        true => line(document(what.to_string())),
        false => message(what),
    };
    WRITER.write(&To::Stderr, line);
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

/// Whether somebody may still read what is printed on stdout: a pipe tells when nobody does.
pub(crate) fn is_read() -> bool {
    let mut fds = [PollFd::from_borrowed_fd(rustix::stdio::stdout(), PollFlags::empty())];
    retry_on_intr(|| poll(&mut fds, Some(&AT_ONCE))) == Ok(0)
}

/// Prints on stdout what was done, which somebody has to hear of.
pub(crate) fn answer(text: &str) -> Result<(), Failure> {
    write(text).map_err(|error| Failure::new(UNWRITTEN, format!("cannot write the answer: {error}")))
}

/// Prints on stdout what was looked for. Whoever looks may look away.
pub(crate) fn show(text: &str) -> Result<(), Failure> {
    looked(write(text))
}

/// Prints help or a version on stdout.
pub(crate) fn show_help(help: &clap::Error) -> Result<(), Failure> {
    looked(has_stdout().and_then(|()| help.print()).and_then(|()| io::stdout().flush()))
}

fn looked(written: io::Result<()>) -> Result<(), Failure> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => {
            written.map_err(|error| Failure::new(UNWRITTEN, format!("cannot write the answer: {error}")))
        }
    }
}

fn has_stdout() -> io::Result<()> {
    if sys::has_stdout() { Ok(()) } else { Err(Errno::BADF.into()) }
}

fn write(text: &str) -> io::Result<()> {
    has_stdout()?;
    io::stdout().write_all(text.as_bytes())?;
    io::stdout().flush()
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

/// Until when a lock stays closed, and how long that is from now.
pub(crate) fn closed_until(until: SystemTime) -> String {
    match until.duration_since(SystemTime::now()) {
        Ok(left) => format!("closed until {} (in {})", local(until), short(left)),
        // By the clock of the store it is not over yet.
        Err(_) => format!("closed until {}", local(until)),
    }
}

/// How far two moments may lie apart that are the same: some stores tell how long it is until then.
const SAME_MOMENT: Duration = Duration::from_secs(1);

/// Whether two looks have told of the same moment.
pub(crate) fn is_same_moment(one: SystemTime, other: SystemTime) -> bool {
    one.duration_since(other).unwrap_or_else(|error| error.duration()) < SAME_MOMENT
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
    // In what zsh assigns, these are the paths of commands.
    let is_path = text.starts_with('=') || text.contains(":=");
    if !text.is_empty() && !is_path && text.bytes().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
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
        assert_eq!(["=ls", "a:=ls", "a=b"].map(shell_word), ["'=ls'", "'a:=ls'", "a=b"]);
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
        let text = crate::documents::json(&odd).unwrap();
        assert!(text.contains(r#"\u009b2J \"\u202e\udb40\udc41\n日"#), "{text}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), odd);
    }
}
