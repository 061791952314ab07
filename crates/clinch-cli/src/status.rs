//! The one line on a terminal that is rewritten in its place. What is written where is the writer's business (`writer.rs`).

use std::io::{self, Write};

use rustix::process::getpid;
use rustix::stdio::{stderr, stdout};
use rustix::termios::{isatty, tcgetpgrp};

use crate::grid::{Cut, cut};
use crate::job::sys;
use crate::output::{AT_ONCE, has_room, printable};
use crate::table;

/// Back to the start of the line, and all of it away.
pub(crate) const CLEAR: &str = "\r\x1b[K";

/// How wide a terminal is that does not say it.
const WIDTH: usize = 80;

/// Whether stderr is a terminal that can rewrite a line.
pub(crate) fn is_possible() -> bool {
    isatty(stderr()) && !table::is_dumb()
}

/// Whether we are what was typed at the prompt, and no part of a script or of a pipe, as far as can be seen.
pub(crate) fn is_alone() -> bool {
    isatty(stdout()) && sys::group() == getpid().as_raw_nonzero().get()
}

/// Whether the terminal is ours to write to. From the background, it is the shell's line that would be written over; and who writes from there may
/// be stopped for it.
pub(crate) fn is_ours() -> bool {
    tcgetpgrp(stderr()).is_ok_and(|group| group.as_raw_nonzero().get() == sys::group())
}

/// Puts a line in the place of the one before; says whether it stands there.
pub(crate) fn draw(line: &str) -> bool {
    // One letter is left free: behind the last, some terminals are on the next line.
    let width = table::width(stderr()).unwrap_or(WIDTH).saturating_sub(1);
    let line = cut(&printable(line), width, Cut::Middle);
    is_ours()
        && has_room(stderr(), AT_ONCE)
        && io::stderr().write_all(format!("{CLEAR}{line}").as_bytes()).is_ok()
}

/// Takes it away.
pub(crate) fn clear() {
    if is_ours() && has_room(stderr(), AT_ONCE) {
        let _ = io::stderr().write_all(CLEAR.as_bytes());
    }
}
