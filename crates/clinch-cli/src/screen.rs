//! The terminal's second screen, and the way back from it whatever ends us.

use std::io::{self, BufWriter, IsTerminal, Stdout};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{DisableBracketedPaste, EnableBracketedPaste};
use ratatui::crossterm::execute;
use ratatui::crossterm::style::Print;
use ratatui::crossterm::terminal::{
    DisableLineWrap, EnableLineWrap, EnterAlternateScreen, LeaveAlternateScreen,
};
use ratatui::layout::Rect;
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};
use rustix::io::retry_on_intr;
use rustix::process::Signal;
use rustix::termios::{
    LocalModes, OptionalActions, Termios, Winsize, tcdrain, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr,
};

use crate::exit::{Failure, SIGNAL_BASE};
use crate::job::signals::{asks_to_stop, ended_at_once};
use crate::job::sys;
use crate::table::is_dumb;
use crate::writer::WRITER;

/// What a frame takes at most, as a rule: it is written at once, so that nobody sees half of it.
const FRAME: usize = 1 << 16;

/// What a terminal is taken for that does not say how large it is.
const USUAL: Rect = Rect::new(0, 0, 80, 24);

/// How many columns and rows are drawn at most.
const MOST: (u16, u16) = (1000, 500);

/// Whether the second screen is shown.
static SHOWN: AtomicBool = AtomicBool::new(false);

/// What the terminal that is typed on was like before, and how it is made so again.
static BEFORE: Mutex<Option<(Termios, OptionalActions)>> = Mutex::new(None);

/// Ends colours and the like.
const PLAIN: &str = "\x1b[0m";

/// Whether our stdout is a terminal on which one can write anywhere.
pub(crate) fn is_there() -> bool {
    io::stdout().is_terminal() && !is_dumb()
}

/// The second screen, until dropped.
pub(crate) struct Screen {
    /// Whether keys are read one by one.
    has_keys: bool,
    terminal: Terminal<CrosstermBackend<BufWriter<Stdout>>>,
    area: Rect,
}

impl Screen {
    pub(crate) fn enter(has_keys: bool) -> Result<Screen, Failure> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                leave();
                report(panic);
            }));
        });
        // What was said before is not to stand in the middle of it.
        WRITER.finish();
        let area = area();
        let backend = CrosstermBackend::new(BufWriter::with_capacity(FRAME, io::stdout()));
        // Its size is told by us, who ask the terminal that is written to.
        let options = TerminalOptions { viewport: Viewport::Fixed(area) };
        let terminal = Terminal::with_options(backend, options).map_err(failed)?;
        let mut screen = Screen { has_keys, terminal, area };
        screen.enter_again()?;
        Ok(screen)
    }

    /// How large it is now.
    pub(crate) fn area(&self) -> Rect {
        self.area
    }

    pub(crate) fn draw(&mut self, what: impl FnOnce(&mut Frame<'_>)) -> Result<(), Failure> {
        self.terminal.draw(what).map(drop).map_err(failed)
    }

    /// After somebody else had the terminal.
    fn enter_again(&mut self) -> Result<(), Failure> {
        await_foreground().map_err(failed)?;
        let enter = || {
            take_keys(self.has_keys)?;
            SHOWN.store(true, Ordering::Relaxed);
            // What is pasted must not be taken for keys.
            execute!(io::stdout(), EnterAlternateScreen, Hide, DisableLineWrap, EnableBracketedPaste)
        };
        enter().map_err(failed)?;
        self.fit()
    }

    /// Takes on the terminal's size; all of it is drawn anew.
    fn fit(&mut self) -> Result<(), Failure> {
        self.area = area();
        self.terminal.resize(self.area).map_err(failed)
    }

    /// Has us do what a signal asks for: be stopped and come back, or end. `None`: we go on.
    pub(crate) fn heed(&mut self, signal: Signal) -> Result<Option<u8>, Failure> {
        match signal {
            Signal::WINCH => self.fit()?,
            Signal::CONT => self.enter_again()?,
            signal if asks_to_stop(signal) => self.stop()?,
            signal => return Ok(Some(end_by(signal))),
        }
        Ok(None)
    }

    /// Is stopped, as by Ctrl-Z, until somebody has us go on.
    pub(crate) fn stop(&mut self) -> Result<(), Failure> {
        if sys::is_ignored(Signal::TSTP) {
            return Ok(());
        }
        leave();
        sys::stop_group(Signal::TSTP);
        self.enter_again()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        leave();
    }
}

/// Ends as a signal has us end; the code for where it cannot.
pub(crate) fn end_by(signal: Signal) -> u8 {
    leave();
    sys::die_by(signal);
    SIGNAL_BASE + u8::try_from(signal.as_raw()).unwrap_or(0)
}

/// Is stopped for as long as another job has the terminal.
fn await_foreground() -> io::Result<()> {
    // The kernel stops by TTOU who waits there from the background, and has it wait again each time it goes on. Meanwhile nothing
    // is shown, so that a signal may end us as it ends anybody.
    ended_at_once(|| retry_on_intr(|| tcdrain(rustix::stdio::stdout())))?;
    Ok(())
}

/// Whether the terminal is another job's.
fn is_in_background() -> bool {
    tcgetpgrp(rustix::stdio::stdout()).is_ok_and(|group| group != rustix::process::getpgrp())
}

/// How large the terminal is that is written to, as far as it is drawn on: some say that they have no end.
fn area() -> Rect {
    let size = tcgetwinsize(rustix::stdio::stdout());
    let drawn = |size: Winsize| Rect::new(0, 0, size.ws_col.min(MOST.0), size.ws_row.min(MOST.1));
    let area = size.map_or(USUAL, drawn);
    if area.is_empty() { USUAL } else { area }
}

fn failed(error: io::Error) -> Failure {
    Failure::system("cannot write to the terminal", error)
}

/// Makes the terminal what it was.
fn leave() {
    // From the background it would stop us, and change what is another's.
    if !SHOWN.swap(false, Ordering::Relaxed) || is_in_background() {
        return;
    }
    // They fail when the terminal is gone, and then it is nobody's.
    let plain = Print(PLAIN);
    let _ = execute!(io::stdout(), plain, DisableBracketedPaste, EnableLineWrap, Show, LeaveAlternateScreen);
    let _ = give_keys_back();
}

/// The terminal on which somebody types.
fn keyboard() -> BorrowedFd<'static> {
    if io::stdin().is_terminal() { rustix::stdio::stdin() } else { rustix::stdio::stdout() }
}

/// Keeps what is typed from being shown, which would move what is drawn. Who has keys reads them one by one.
fn take_keys(has_keys: bool) -> io::Result<()> {
    give_keys_back()?;
    // Looked at anew each time: who had the terminal meanwhile may have changed it.
    let before = tcgetattr(keyboard())?;
    let mut modes = before.clone();
    // What nobody has read and nobody has seen is not left to the shell, which would run it.
    let back = if has_keys {
        modes.make_raw();
        OptionalActions::Now
    } else {
        modes.local_modes.remove(LocalModes::ECHO | LocalModes::ECHONL);
        OptionalActions::Flush
    };
    *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some((before, back));
    Ok(tcsetattr(keyboard(), OptionalActions::Now, &modes)?)
}

fn give_keys_back() -> io::Result<()> {
    match BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some((modes, how)) => Ok(tcsetattr(keyboard(), how, &modes)?),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{LocalModes, tcgetattr};

    use super::*;

    const ON_A_TERMINAL: &str = "CLINCH_TEST_PANICS";

    /// What the test below runs on a terminal. Does nothing otherwise.
    #[test]
    fn panics() {
        if std::env::var_os(ON_A_TERMINAL).is_none() {
            return;
        }
        let _screen = Screen::enter(true).unwrap();
        panic!("on purpose");
    }

    #[test]
    fn a_panic_gives_the_terminal_back_before_it_is_told() {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let path = ptsname(&ours, Vec::new()).unwrap();
        let path = path.to_str().unwrap();
        let open = || std::fs::File::options().read(true).write(true).open(path).unwrap();
        let kept = open();
        let mut test = Command::new("setsid");
        test.arg("--ctty").arg(std::env::current_exe().unwrap()).env("TERM", "xterm").env(ON_A_TERMINAL, "1");
        test.args(["--exact", "screen::tests::panics", "--nocapture", "--test-threads=1"]);
        test.stdin(Stdio::from(open())).stdout(Stdio::from(open())).stderr(Stdio::from(open()));
        assert!(!test.status().unwrap().success());
        let modes = tcgetattr(&kept).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO));
        // All that was written is there already, since it ended.
        let (mut bytes, mut terminal) = ([0; 1 << 14], std::fs::File::from(ours));
        let mut shown = String::new();
        while !shown.contains("on purpose") {
            let len = terminal.read(&mut bytes).unwrap();
            shown += &String::from_utf8_lossy(&bytes[..len]);
        }
        let at = |text: &str| shown.find(text).unwrap();
        assert!(at("\x1b[?1049h") < at("\x1b[?1049l") && at("\x1b[?1049l") < at("on purpose"), "{shown:?}");
        assert!(at("\x1b[?25h") < at("on purpose"), "{shown:?}");
    }
}
