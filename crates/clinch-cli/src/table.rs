//! The table of `clinch ls`: one line per claim, no wider than the terminal.

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::time::SystemTime;

use clinch::Mode;
use clinch::backend::{ClaimState, LockState};
use unicode_width::UnicodeWidthStr;

use crate::grid::{Cell, Columns, Cut, Grid, Tone, plain};
use crate::output::{is_foreign, local, printable, short};

/// How a table is shown.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Look {
    /// How wide it may be; `None`: as wide as it is.
    pub(crate) width: Option<usize>,
    pub(crate) colour: bool,
}

impl Look {
    /// For who reads our stdout.
    pub(crate) fn of_stdout(is_wide: bool) -> Look {
        if !io::stdout().is_terminal() {
            return Look::default();
        }
        Look { width: width(rustix::stdio::stdout()).filter(|_| !is_wide), colour: wants_colour() }
    }
}

/// How wide a terminal is.
pub(crate) fn width(terminal: impl AsFd) -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(terminal).ok();
    // One that does not say it says zero.
    size.map(|size| usize::from(size.ws_col)).filter(|width| *width > 0)
}

/// Whether a terminal is to be written to in colour.
pub(crate) fn wants_colour() -> bool {
    let is_refused = std::env::var_os("NO_COLOR").is_some_and(|word| !word.is_empty());
    !is_refused && !is_dumb()
}

/// Whether the terminal knows no more than to print line after line.
pub(crate) fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|term| term == "dumb")
}

/// The terminal's code for a tone.
fn code(tone: Tone) -> Option<&'static str> {
    match tone {
        Tone::Plain => None,
        Tone::Head => Some("1"),
        Tone::Held => Some("32"),
        Tone::Waiting => Some("33"),
        Tone::Closed => Some("36"),
        Tone::Expired => Some("31"),
    }
}

/// How many columns there are.
const WIDTH: usize = 7;

pub(crate) type Row = [Cell; WIDTH];

pub(crate) const COLUMNS: Columns<WIDTH> = Columns {
    heads: [
        ("NAME", Cut::Middle),
        ("STATE", Cut::End),
        ("MODE", Cut::End),
        ("LEFT", Cut::End),
        ("TOKEN", Cut::Start),
        // With the pid at its end.
        ("OWNER", Cut::Middle),
        ("LABEL", Cut::End),
    ],
    narrowed: &[(4, 7), (6, 8), (5, 24), (0, 48), (4, 0), (6, 0), (0, 24), (5, 0), (0, 12), (2, 0), (3, 0)],
};

/// A table of locks for people.
pub(crate) fn table(locks: &[LockState], look: Look, now: SystemTime) -> String {
    grid(locks, look.width, now).lines().map(|cells| line(&cells, look.colour)).collect()
}

/// The same, before it is text.
pub(crate) fn grid(locks: &[LockState], width: Option<usize>, now: SystemTime) -> Grid<WIDTH> {
    let named = |lock: &LockState| rows(lock, &printable(lock.name.as_str()), now).collect::<Vec<_>>();
    COLUMNS.grid(locks.iter().flat_map(named).collect(), width)
}

/// The rows of one lock, with this name.
pub(crate) fn rows(lock: &LockState, name: &str, now: SystemTime) -> impl Iterator<Item = Row> {
    let closed = lock.closed_until.map(|until| closed(name, until));
    closed.into_iter().chain(lock.claims.iter().map(move |claim| row(name, claim, now)))
}

fn closed(name: &str, until: SystemTime) -> Row {
    let empty = || plain("");
    let state = ("closed".to_owned(), Tone::Closed);
    let until = plain(format!("until {}", local(until)));
    [plain(name), state, empty(), until, empty(), empty(), empty()]
}

fn row(name: &str, claim: &ClaimState, now: SystemTime) -> Row {
    let (state, tone) = if claim.granted { ("held", Tone::Held) } else { ("waiting", Tone::Waiting) };
    let state = match age(claim, now) {
        Some(time) => format!("{state} for {time}"),
        None => state.to_owned(),
    };
    let token = claim.token.filter(|_| claim.granted);
    [
        plain(name),
        (state, tone),
        plain(if claim.mode == Mode::Exclusive { String::new() } else { claim.mode.to_string() }),
        left(claim, " left"),
        plain(token.map(|token| token.to_string()).unwrap_or_default()),
        plain(owner(claim)),
        plain(printable(&claim.owner.label)),
    ]
}

/// For how long a claim has held or waited. Where the clock of who made it is ahead of ours, nobody can tell.
pub(crate) fn age(claim: &ClaimState, now: SystemTime) -> Option<String> {
    now.duration_since(claim.since).ok().filter(|_| !is_foreign(claim)).map(short)
}

/// What is left of a lease, and a word that says so.
pub(crate) fn left(claim: &ClaimState, word: &str) -> Cell {
    match claim.expires_in {
        Some(left) if left.is_zero() => ("expired".to_owned(), Tone::Expired),
        left => plain(left.map(|left| format!("{}{word}", short(left))).unwrap_or_default()),
    }
}

/// Who made a claim.
pub(crate) fn owner(claim: &ClaimState) -> String {
    let owner = &claim.owner;
    printable(&match is_foreign(claim) {
        true => owner.host.clone(),
        false => format!("{}@{} pid {}", owner.user, owner.host, owner.pid),
    })
}

fn line(cells: &[(usize, &str, Tone)], colour: bool) -> String {
    let (mut line, mut width) = (String::new(), 0);
    for (at, text, tone) in cells {
        line.extend(std::iter::repeat_n(' ', at.saturating_sub(width)));
        match code(*tone).filter(|_| colour) {
            Some(code) => line.push_str(&format!("\x1b[{code}m{text}\x1b[0m")),
            None => line.push_str(text),
        }
        width = at + text.width();
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clinch::{ClaimId, LockName, Owner, Token};

    use super::*;

    fn lock(name: &str, owner: Owner, granted: bool, left: Option<Duration>) -> LockState {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let claim = ClaimState {
            id: ClaimId::from_bits(1),
            mode: Mode::Exclusive,
            granted,
            token: Token::new(1_700_000_000_123_456),
            owner,
            since: now - Duration::from_secs(720),
            expires_in: left,
        };
        LockState { name: LockName::new(name).unwrap(), claims: vec![claim], closed_until: None }
    }

    fn owner(label: &str) -> Owner {
        Owner { host: "web-3".into(), pid: 12, user: "deploy".into(), label: label.into() }
    }

    fn shown(locks: &[LockState], look: Look) -> Vec<String> {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        table(locks, look, now).lines().map(str::to_owned).collect()
    }

    #[test]
    fn times_are_told_from_now_and_wide_letters_line_up() {
        let locks = [
            lock("日本", owner("x"), true, Some(Duration::from_secs(120))),
            lock("plain", owner("é"), false, Some(Duration::ZERO)),
        ];
        let lines = shown(&locks, Look::default());
        assert!(lines[1].contains("held for 12m ") && lines[1].contains("2m left"), "{lines:?}");
        assert!(lines[2].contains("waiting for 12m ") && lines[2].contains("expired"), "{lines:?}");
        assert!(lines[1].contains("1700000000123456") && !lines[2].contains("1700000000123456"));
        let at = |line: &str, text: &str| line[..line.find(text).unwrap()].width();
        assert_eq!(at(&lines[1], "held"), at(&lines[2], "waiting"));
        assert_eq!(at(&lines[1], "2m left"), at(&lines[2], "expired"));
        assert!(lines.iter().all(|line| line.trim_end() == line));
    }

    #[test]
    fn a_table_fits_the_terminal_and_what_matters_stays() {
        let long = |text: &str| text.repeat(60);
        let far = Owner { host: format!("web-{}", "3".repeat(30)), ..owner(&long("l")) };
        let mut locks = [
            lock(&format!("{}/1", long("n")), far, true, Some(Duration::from_secs(5 * 3600 + 60))),
            lock(&long("❤️"), owner(&long("❤️")), false, Some(Duration::from_secs(59 * 60 + 59))),
        ];
        locks[1].closed_until = Some(SystemTime::UNIX_EPOCH);
        for width in 32..250 {
            let lines = shown(&locks, Look { width: Some(width), colour: false });
            assert!(lines.iter().all(|line| line.width() <= width), "{width}: {lines:#?}");
            assert!(lines[1].contains("held for") && lines[1].contains("…"), "{lines:?}");
            assert!(lines[1].contains("n/1 "), "the end of a name tells it from others: {lines:?}");
        }
        locks[0].name = LockName::new("n/1").unwrap();
        let lines = shown(&locks[..1], Look { width: Some(80), colour: false });
        assert!(lines[1].contains("5h 1m left") && lines[1].contains("…123456"), "{lines:?}");
        assert!(lines[1].contains("deploy@") && lines[1].contains("pid 12"), "{lines:?}");
        assert!(shown(&locks, Look::default())[1].contains(&long("l")));
        assert_eq!(table(&[], Look { width: Some(0), colour: true }, SystemTime::UNIX_EPOCH), "\n");
    }

    #[test]
    fn colour_changes_no_text() {
        let locks = [lock("a", owner("x"), true, None)];
        let plain = shown(&locks, Look::default());
        let mut bare = shown(&locks, Look { width: None, colour: true }).join("\n");
        for code in ["\x1b[1m", "\x1b[32m", "\x1b[0m"] {
            assert!(bare.contains(code), "{bare:?}");
            bare = bare.replace(code, "");
        }
        assert_eq!(bare, plain.join("\n"));
    }
}
