//! A terminal of a test's own, and what is seen on it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use super::{Running, World, eventually};

/// Our end of a new terminal, and what opens the other.
pub fn open() -> (File, impl Fn() -> OwnedFd) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let path = ptsname(&ours, Vec::new()).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    (File::from(ours), move || rustix::fs::open(&path, flags, Mode::empty()).unwrap())
}

/// What a terminal has been sent, and what is to be seen of it.
struct Seen {
    bytes: Vec<u8>,
    terminal: vt100::Parser,
}

/// A shell with job control on a terminal that is looked at as people do.
pub struct Screen {
    keys: File,
    seen: Arc<Mutex<Seen>>,
    pub shell: Running,
}

impl Screen {
    /// So many rows and columns.
    pub fn start(world: &World, rows: u16, columns: u16) -> Screen {
        let (keys, open) = open();
        let mut command = Command::new("env");
        // Not a line editor, which would leave the terminal in a state of its own.
        let shell = ["bash", "--norc", "--noprofile", "--noediting", "-i"];
        command.args(["--default-signal", "setsid", "--ctty"]).args(shell);
        command.current_dir(world.path(".")).env("CLINCH", env!("CARGO_BIN_EXE_clinch"));
        command.env("CLINCH_URL", world.url()).env("HISTFILE", "/dev/null").env("TERM", "xterm");
        command.env("PS1", "$ ").env_remove("CLINCH_HELD").env_remove("NO_COLOR");
        command.stdin(Stdio::from(open())).stdout(Stdio::from(open())).stderr(Stdio::from(open()));
        let terminal = vt100::Parser::new(size(rows), size(columns), 0);
        let seen = Arc::new(Mutex::new(Seen { bytes: Vec::new(), terminal }));
        let mut screen = Screen { keys, seen, shell: Running(command.spawn().unwrap()) };
        screen.resize(rows, columns);
        let (mut output, seen) = (screen.keys.try_clone().unwrap(), screen.seen.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(len) = output.read(&mut bytes) {
                let mut seen = seen.lock().unwrap();
                seen.bytes.extend(&bytes[..len]);
                seen.terminal.process(&bytes[..len]);
            }
        });
        screen
    }

    pub fn resize(&mut self, rows: u16, columns: u16) {
        self.seen.lock().unwrap().terminal.screen_mut().set_size(size(rows), size(columns));
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.keys, size).unwrap();
    }

    pub fn type_in(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// All lines until the last that is not empty, as they are seen.
    pub fn lines(&self) -> Vec<String> {
        let text = self.look(|screen| screen.contents());
        let lines: Vec<String> = text.lines().map(|line| line.trim_end().to_owned()).collect();
        let len = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
        lines[..len].to_vec()
    }

    /// The line that has this in it.
    pub fn line(&self, text: &str) -> String {
        self.lines().into_iter().find(|line| line.contains(text)).unwrap_or_default()
    }

    pub fn shows(&self, text: &str) {
        eventually(&format!("{text:?} is seen"), || !self.line(text).is_empty());
    }

    pub fn look<T>(&self, what: impl FnOnce(&vt100::Screen) -> T) -> T {
        what(self.seen.lock().unwrap().terminal.screen())
    }

    /// The process that the shell has started.
    pub fn child(&self) -> i32 {
        let pid = self.shell.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.trim().parse().unwrap()
    }

    /// All that was sent until now.
    pub fn bytes(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap().bytes).into_owned()
    }

    /// Whether the terminal is a shell's again: no second screen, a cursor, keys that are echoed and make lines.
    pub fn is_as_it_was(&self) -> bool {
        use rustix::termios::{LocalModes, tcgetattr};
        let modes = tcgetattr(&self.keys).unwrap().local_modes;
        let is_left = self
            .look(|screen| !screen.alternate_screen() && !screen.hide_cursor() && !screen.bracketed_paste());
        is_left && modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }
}

fn size(size: u16) -> NonZero<u16> {
    NonZero::new(size).unwrap()
}

impl Drop for Screen {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("on the terminal:\n{}", self.lines().join("\n"));
        }
    }
}
