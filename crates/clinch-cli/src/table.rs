//! The table of `clinch ls`: one line per claim, no wider than the terminal.

use std::io::{self, IsTerminal};
use std::time::SystemTime;

use clinch::Mode;
use clinch::backend::{ClaimState, LockState};
use unicode_width::UnicodeWidthStr;

use crate::output::{is_foreign, local, printable, short};

/// Between two columns.
const GAP: usize = 2;

/// What stands for what was cut away.
const CUT: &str = "…";

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
        let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout()).ok();
        // A terminal that does not say how wide it is says zero.
        let width = size.map(|size| usize::from(size.ws_col)).filter(|width| *width > 0 && !is_wide);
        let is = |variable: &str, value: &str| std::env::var_os(variable).is_some_and(|is| is == value);
        let refused = !is("NO_COLOR", "") && std::env::var_os("NO_COLOR").is_some();
        Look { width, colour: !refused && !is("TERM", "dumb") }
    }
}

/// What a cell says besides its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tone {
    Plain,
    Head,
    Held,
    Waiting,
    Closed,
    Expired,
}

impl Tone {
    /// The terminal's code for it.
    fn code(self) -> Option<&'static str> {
        match self {
            Tone::Plain => None,
            Tone::Head => Some("1"),
            Tone::Held => Some("32"),
            Tone::Waiting => Some("33"),
            Tone::Closed => Some("36"),
            Tone::Expired => Some("31"),
        }
    }
}

type Cell = (String, Tone);

/// What of a text is cut away.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Start,
    Middle,
    End,
}

/// The columns, and what is cut away of each.
const COLUMNS: [(&str, Cut); 7] = [
    ("NAME", Cut::Middle),
    ("STATE", Cut::End),
    ("MODE", Cut::End),
    ("LEFT", Cut::End),
    ("TOKEN", Cut::Start),
    // With the pid at its end.
    ("OWNER", Cut::Middle),
    ("LABEL", Cut::End),
];

/// The order in which columns are narrowed, and how far. What has no width is not shown.
const NARROWED: [(usize, usize); 11] =
    [(4, 7), (6, 8), (5, 24), (0, 48), (4, 0), (6, 0), (0, 24), (5, 0), (0, 12), (2, 0), (3, 0)];

type Row = [Cell; COLUMNS.len()];

/// A table of locks for people.
pub(crate) fn table(locks: &[LockState], look: Look, now: SystemTime) -> String {
    let mut rows = Vec::new();
    for lock in locks {
        let name = printable(lock.name.as_str());
        rows.extend(lock.closed_until.map(|until| closed(name.clone(), until)));
        rows.extend(lock.claims.iter().map(|claim| row(name.clone(), claim, now)));
    }
    let filled = widths(&rows).map(|width| width > 0);
    let heads = COLUMNS.map(|(name, _)| name).into_iter().zip(filled);
    let mut heads = heads.map(|(name, filled)| if filled { name.to_owned() } else { String::new() });
    rows.insert(0, std::array::from_fn(|_| (heads.next().unwrap_or_default(), Tone::Head)));
    if let Some(width) = look.width {
        narrow(&mut rows, width);
    }
    let widths = widths(&rows);
    rows.iter().map(|row| line(row, &widths, look.colour)).collect()
}

fn closed(name: String, until: SystemTime) -> Row {
    let plain = |text: String| (text, Tone::Plain);
    let empty = || plain(String::new());
    let until = format!("until {}", local(until));
    [plain(name), ("closed".to_owned(), Tone::Closed), empty(), plain(until), empty(), empty(), empty()]
}

fn row(name: String, claim: &ClaimState, now: SystemTime) -> Row {
    let owner = &claim.owner;
    let (state, tone) = if claim.granted { ("held", Tone::Held) } else { ("waiting", Tone::Waiting) };
    // Where the clock of who holds it is ahead of ours, nobody can tell for how long.
    let state = match now.duration_since(claim.since) {
        Ok(time) if !is_foreign(claim) => format!("{state} for {}", short(time)),
        _ => state.to_owned(),
    };
    let left = match claim.expires_in {
        Some(left) if left.is_zero() => ("expired".to_owned(), Tone::Expired),
        left => (left.map(|left| format!("{} left", short(left))).unwrap_or_default(), Tone::Plain),
    };
    let token = claim.token.filter(|_| claim.granted);
    let by = match is_foreign(claim) {
        true => owner.host.clone(),
        false => format!("{}@{} pid {}", owner.user, owner.host, owner.pid),
    };
    let plain = |text: String| (text, Tone::Plain);
    [
        plain(name),
        (state, tone),
        plain(if claim.mode == Mode::Exclusive { String::new() } else { claim.mode.to_string() }),
        left,
        plain(token.map(|token| token.to_string()).unwrap_or_default()),
        plain(printable(&by)),
        plain(printable(&owner.label)),
    ]
}

fn widths(rows: &[Row]) -> [usize; COLUMNS.len()] {
    std::array::from_fn(|column| {
        rows.iter().filter_map(|row| row.get(column)).map(|(text, _)| text.width()).max().unwrap_or(0)
    })
}

/// Takes away from the columns that bear it until all fits, if it can.
fn narrow(rows: &mut [Row], room: usize) {
    for (column, least) in NARROWED {
        let widths = widths(rows);
        let total: usize = widths.iter().filter(|width| **width > 0).map(|width| width + GAP).sum();
        let total = total.saturating_sub(GAP);
        let (Some(width), Some((_, what))) = (widths.get(column), COLUMNS.get(column)) else { return };
        let Some(over) = total.checked_sub(room).filter(|over| *over > 0) else { return };
        let wanted = if least == 0 { 0 } else { width.saturating_sub(over).max(least) };
        for (text, _) in rows.iter_mut().filter_map(|row| row.get_mut(column)) {
            *text = cut(text, wanted, *what);
        }
    }
}

/// How many letters are looked at for each place on the terminal, however long a text of others is. One of these is seen at least.
const LETTERS: usize = 8;

/// A text that is no wider than this.
fn cut(text: &str, width: usize, what: Cut) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let Some(room) = width.checked_sub(CUT.width()) else { return String::new() };
    let (start, end) = match what {
        Cut::Start => (0, room),
        Cut::Middle => (room.div_ceil(2), room / 2),
        Cut::End => (room, 0),
    };
    [first(text, start), CUT, last(text, end)].concat()
}

/// What of its start has room. Letters that stand together may be wider than each of them.
fn first(text: &str, room: usize) -> &str {
    let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).take(LETTERS * (room + 1)).collect();
    let mut starts = ends.into_iter().rev().filter_map(|end| text.get(..end));
    starts.find(|start| start.width() <= room).unwrap_or_default()
}

/// What of its end has room.
fn last(text: &str, room: usize) -> &str {
    let starts: Vec<usize> = text.char_indices().rev().map(|(at, _)| at).take(LETTERS * (room + 1)).collect();
    let mut ends = starts.into_iter().rev().filter_map(|at| text.get(at..));
    ends.find(|end| end.width() <= room).unwrap_or_default()
}

fn line(row: &Row, widths: &[usize], colour: bool) -> String {
    let last = row.iter().rposition(|(text, _)| !text.is_empty()).unwrap_or(0);
    let mut line = String::new();
    let shown = row.iter().zip(widths).take(last + 1).enumerate().filter(|(_, (_, width))| **width > 0);
    for (column, ((text, tone), width)) in shown {
        match tone.code().filter(|_| colour) {
            Some(code) => line.push_str(&format!("\x1b[{code}m{text}\x1b[0m")),
            None => line.push_str(text),
        }
        if column < last {
            line.extend(std::iter::repeat_n(' ', width - text.width() + GAP));
        }
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
