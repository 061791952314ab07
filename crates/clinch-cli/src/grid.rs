//! Cells in columns, no wider than there is room: what a table is before it is text or part of a screen.

use unicode_width::UnicodeWidthStr;

/// Between two columns.
const GAP: usize = 2;

/// What stands for what was cut away.
const CUT: &str = "…";

/// What a cell says besides its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Head,
    Held,
    Waiting,
    Closed,
    Expired,
}

pub(crate) type Cell = (String, Tone);

/// A cell of which nothing is said but its text.
pub(crate) fn plain(text: impl Into<String>) -> Cell {
    (text.into(), Tone::Plain)
}

/// What of a text is cut away.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cut {
    Start,
    Middle,
    End,
}

/// What the columns of a table are.
pub(crate) struct Columns<const N: usize> {
    /// Their heads, and what is cut away of each.
    pub(crate) heads: [(&'static str, Cut); N],
    /// The order in which they are narrowed, and how far. What has no width is not shown.
    pub(crate) narrowed: &'static [(usize, usize)],
}

/// Rows that fit.
#[derive(Debug)]
pub(crate) struct Grid<const N: usize> {
    rows: Vec<[Cell; N]>,
    widths: [usize; N],
}

impl<const N: usize> Columns<N> {
    /// The rows under their heads. A column that is empty has no head. `room`: how wide all may be; `None`: as wide as it is.
    pub(crate) fn grid(&self, mut rows: Vec<[Cell; N]>, room: Option<usize>) -> Grid<N> {
        let filled = widths(&rows).map(|width| width > 0);
        let heads = self.heads.iter().zip(filled);
        let mut heads = heads.map(|((name, _), filled)| if filled { *name } else { "" });
        rows.insert(0, std::array::from_fn(|_| (heads.next().unwrap_or_default().to_owned(), Tone::Head)));
        if let Some(room) = room {
            self.narrow(&mut rows, room);
        }
        let widths = widths(&rows);
        Grid { rows, widths }
    }

    /// Takes away from the columns that bear it until all fits, if it can.
    fn narrow(&self, rows: &mut [[Cell; N]], room: usize) {
        for (column, least) in self.narrowed {
            let widths = widths(rows);
            let total: usize = widths.iter().filter(|width| **width > 0).map(|width| width + GAP).sum();
            let total = total.saturating_sub(GAP);
            let (Some(width), Some((_, what))) = (widths.get(*column), self.heads.get(*column)) else {
                return;
            };
            let Some(over) = total.checked_sub(room).filter(|over| *over > 0) else { return };
            let wanted = if *least == 0 { 0 } else { width.saturating_sub(over).max(*least) };
            for (text, _) in rows.iter_mut().filter_map(|row| row.get_mut(*column)) {
                *text = cut(text, wanted, *what);
            }
        }
    }
}

impl<const N: usize> Grid<N> {
    /// How many lines there are.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Line by line: where each text begins that is not empty, the text, and how it is shown. The first line has the heads.
    pub(crate) fn lines(&self) -> impl Iterator<Item = Vec<(usize, &str, Tone)>> {
        let mut at = 0;
        let starts = self.widths.map(|width| {
            let start = at;
            at += if width > 0 { width + GAP } else { 0 };
            start
        });
        self.rows.iter().map(move |row| {
            let cells = row.iter().zip(starts).filter(|((text, _), _)| !text.is_empty());
            cells.map(|((text, tone), start)| (start, text.as_str(), *tone)).collect()
        })
    }
}

fn widths<const N: usize>(rows: &[[Cell; N]]) -> [usize; N] {
    std::array::from_fn(|column| {
        rows.iter().filter_map(|row| row.get(column)).map(|(text, _)| text.width()).max().unwrap_or(0)
    })
}

/// How many letters are looked at for each place on the terminal, however long a text of others is. One of these is seen at least.
const LETTERS: usize = 8;

/// A text that is no wider than this.
pub(crate) fn cut(text: &str, width: usize, what: Cut) -> String {
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
