//! Tables and lines on a full screen.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use crate::grid::{Grid, Tone};

/// How tones look.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint {
    pub(crate) has_colour: bool,
}

impl Paint {
    pub(crate) fn style(self, tone: Tone) -> Style {
        let colour = match tone {
            Tone::Plain => return Style::new(),
            Tone::Head => return Style::new().add_modifier(Modifier::BOLD),
            Tone::Held => Color::Green,
            Tone::Waiting => Color::Yellow,
            Tone::Closed => Color::Cyan,
            Tone::Expired => Color::Red,
        };
        if self.has_colour { Style::new().fg(colour) } else { Style::new() }
    }

    /// As much of a table as there is room for. Each text stands where its column begins, however wide the terminal thinks that those
    /// before it are.
    pub(crate) fn grid<const N: usize>(self, grid: &Grid<N>, area: Rect, buffer: &mut Buffer) {
        for (row, cells) in area.rows().zip(grid.lines()) {
            for (at, text, tone) in cells {
                let at = u16::try_from(at).unwrap_or(u16::MAX).min(row.width);
                let room = usize::from(row.width - at);
                buffer.set_stringn(row.x + at, row.y, text, room, self.style(tone));
            }
        }
    }
}

/// One line at the top of an area, cut off where that ends.
pub(crate) fn line(text: &str, style: Style, area: Rect, buffer: &mut Buffer) {
    if let Some(row) = area.rows().next() {
        buffer.set_stringn(row.x, row.y, text, usize::from(row.width), style);
    }
}
