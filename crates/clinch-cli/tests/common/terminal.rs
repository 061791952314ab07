//! Shells on terminals.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use super::{Running, World, eventually, pty};

/// An interactive shell on a terminal of its own.
pub struct Terminal {
    keys: File,
    pub seen: Arc<Mutex<String>>,
    pub shell: Running,
}

impl Terminal {
    /// With bash, as it is without anybody's settings.
    pub fn new(world: &World) -> Terminal {
        Terminal::of(world, &["bash", "--norc", "--noprofile", "-i"])
    }

    pub fn of(world: &World, shell: &[&str]) -> Terminal {
        let (keys, open) = pty::open();
        let shell = start(world, &open, shell);
        let seen = Arc::new(Mutex::new(String::new()));
        let (mut screen, written) = (keys.try_clone().unwrap(), seen.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 1024];
            while let Ok(len) = screen.read(&mut bytes) {
                written.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..len]));
            }
        });
        Terminal { keys, seen, shell }
    }

    pub fn type_in(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// All that was written to it.
    pub fn text(&self) -> String {
        self.seen.lock().unwrap().clone()
    }

    pub fn shows(&self, text: &str) {
        eventually(&format!("{text:?} is shown"), || self.seen.lock().unwrap().contains(text));
    }
}

/// Starts a command that leads a session on this terminal.
pub fn start(world: &World, open: &impl Fn() -> OwnedFd, words: &[&str]) -> Running {
    let mut command = Command::new("env");
    command.args(["--default-signal", "setsid", "--ctty"]).args(words);
    command.current_dir(world.path(".")).env("CLINCH", env!("CARGO_BIN_EXE_clinch"));
    command.env("CLINCH_URL", world.url()).env("HISTFILE", "/dev/null").env_remove("CLINCH_HELD");
    command.stdin(Stdio::from(open())).stdout(Stdio::from(open())).stderr(Stdio::from(open()));
    Running(command.spawn().unwrap())
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the terminal showed:\n{}", self.seen.lock().unwrap());
        }
    }
}
