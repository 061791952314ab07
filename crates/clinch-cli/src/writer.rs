//! The one thread that writes messages and events. Nobody else does: `poll` says of a file that it always has room, and its write may then
//! wait for ever, for a server of files that is gone or a file system that is frozen; who has a job to stop in time has no time for that.
//!
//! While all is well, a line is written when [`Writer::write`] returns, so that it stands before what the job writes next.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::job::sys;
use crate::output::{PATIENTLY, has_room, message};
use crate::status;

/// Lines that may wait. A run that goes well has a dozen in all; one whose store fails has a few for each renewal.
const LINES: usize = 256;

/// How long who writes a line waits for it, unless one was too late already.
const PROMPTLY: Duration = Duration::from_millis(50);

/// How long the end of the process waits for what is not yet written.
const FINISH: Duration = Duration::from_secs(1);

/// The writer of this process.
pub(crate) static WRITER: Writer = Writer::new(To::Stderr);

/// Where a line goes.
#[derive(Clone, Debug)]
pub(crate) enum To {
    Stderr,
    Events(Arc<Log>),
}

/// A file of events, or a descriptor for them. Nothing more is written to it when one failed.
#[derive(Debug)]
pub(crate) struct Log {
    file: File,
    has_failed: AtomicBool,
}

impl Log {
    pub(crate) fn new(file: File) -> Log {
        Log { file, has_failed: AtomicBool::new(false) }
    }
}

/// A thread that writes, once there is something to write, and what waits for it.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Where it tells what could not be written.
    messages: To,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    lines: VecDeque<(To, String)>,
    /// What is to stand in the last line of the terminal, where that changes; `None` in it: nothing.
    status: Option<Option<String>>,
    /// Whether something stands there.
    has_status: bool,
    runs: bool,
    /// Whether something is just being written.
    writes: bool,
    /// Whether somebody has waited in vain since all was written last.
    is_late: bool,
    dropped: usize,
}

impl Writer {
    const fn new(messages: To) -> Writer {
        let state = State {
            lines: VecDeque::new(),
            status: None,
            has_status: false,
            runs: false,
            writes: false,
            is_late: false,
            dropped: 0,
        };
        Writer { messages, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Writes a line after those before it, soon.
    pub(crate) fn write(&'static self, to: &To, line: String) {
        let mut state = self.lock();
        if state.lines.len() >= LINES {
            state.dropped += 1;
            return;
        }
        state.lines.push_back((to.clone(), line));
        self.wake(state, true);
    }

    /// Puts a line into the last one of the terminal, in place of the one before; `None` takes that away. Other lines go above it.
    pub(crate) fn status(&'static self, line: Option<String>) {
        let mut state = self.lock();
        let is_there = state.has_status || state.status.is_some() || state.writes;
        let clears = line.is_none();
        if is_there || !clears {
            state.status = Some(line);
            // What comes next is the job's, or the shell's.
            self.wake(state, clears);
        }
    }

    /// Has all be written, and waits for that a moment if it is asked to.
    fn wake<'a>(&'static self, mut state: MutexGuard<'a, State>, waits: bool) {
        if !state.runs {
            state.runs = sys::start_deaf(|| self.run()).is_ok();
        }
        if !state.runs {
            // Where no thread can be had, no job can be started, which somebody should hear of.
            drop(self.write_all(state));
            return;
        }
        self.changed.notify_all();
        if waits && !state.is_late {
            let (mut state, is_done) = self.written(state, PROMPTLY);
            state.is_late = !is_done;
        }
    }

    /// Waits, bounded, until all is written: before the end of the process, or before it becomes another.
    pub(crate) fn finish(&self) {
        drop(self.written(self.lock(), FINISH));
    }

    fn written<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        within: Duration,
    ) -> (MutexGuard<'a, State>, bool) {
        let is_busy = |state: &mut State| {
            state.writes || !state.lines.is_empty() || state.dropped > 0 || state.status.is_some()
        };
        let waited = self.changed.wait_timeout_while(state, within, is_busy);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        (state, !timeout.timed_out())
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            state = self.write_all(state);
            state.is_late = false;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn write_all<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        loop {
            let (line, had_status) = (state.next(&self.messages), state.has_status);
            let status = if line.is_none() { state.status.take() } else { None };
            if line.is_none() && status.is_none() {
                return state;
            }
            state.writes = true;
            drop(state);
            let has_status = match (line, status) {
                (Some((To::Stderr, line)), _) if had_status && status::is_ours() => {
                    self.write_one(&To::Stderr, &format!("{}{line}", status::CLEAR));
                    false
                }
                (Some((to, line)), _) => {
                    self.write_one(&to, &line);
                    had_status && !matches!(to, To::Stderr)
                }
                (None, Some(Some(line))) => status::draw(&line),
                (None, _) => {
                    if had_status {
                        status::clear();
                    }
                    false
                }
            };
            state = self.lock();
            (state.writes, state.has_status) = (false, has_status);
        }
    }

    /// One write for each line, so that processes that append to one file do not mix theirs.
    fn write_one(&self, to: &To, line: &str) {
        match to {
            // That it is closed, or that nobody reads it, is nobody's failure.
            To::Stderr => {
                if has_room(rustix::stdio::stderr(), PATIENTLY) {
                    let _ = io::stderr().write_all(line.as_bytes());
                }
            }
            To::Events(log) if log.has_failed.load(Ordering::Relaxed) => {}
            To::Events(log) => {
                let written = match has_room(log.file.as_fd(), PATIENTLY) {
                    true => (&log.file).write_all(line.as_bytes()),
                    false => Err(io::Error::other("nobody reads them")),
                };
                if let Err(error) = written {
                    log.has_failed.store(true, Ordering::Relaxed);
                    self.write_one(
                        &self.messages,
                        &message(format_args!("cannot write events any more: {error}")),
                    );
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn next(&mut self, messages: &To) -> Option<(To, String)> {
        self.lines.pop_front().or_else(|| {
            let dropped = std::mem::take(&mut self.dropped);
            let text = || message(format_args!("{dropped} messages and events could not be written in time"));
            (dropped > 0).then(|| (messages.clone(), text()))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};

    use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

    use super::*;

    /// A writer, and a place for lines that has room for one page, which nobody reads yet.
    fn blocked() -> (&'static Writer, To, File) {
        let (hear, tell) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        fcntl_setpipe_size(&tell, 4096).unwrap();
        let to = To::Events(Arc::new(Log::new(tell.into())));
        (Box::leak(Box::new(Writer::new(to.clone()))), to, hear.into())
    }

    #[test]
    fn a_line_is_written_at_once_while_all_is_well() {
        let (writer, to, mut hear) = blocked();
        for line in ["one\n", "two\n"] {
            writer.write(&to, line.to_owned());
            let mut heard = [0; 4];
            let is_read = hear.read_exact(&mut heard);
            assert!(is_read.is_ok() && heard == line.as_bytes());
        }
    }

    /// Whoever says something waits for ever where a write does, though there was room; or what it said is lost when that is over.
    #[test]
    fn a_write_that_does_not_end_keeps_nobody() {
        let (writer, to, hear) = blocked();
        let long = "x".repeat(10_000);
        writer.write(&to, format!("{long}\n"));
        while !writer.lock().writes {}
        for line in 0..LINES + 3 {
            writer.write(&to, format!("{line}\n"));
        }
        writer.finish();
        // For all of it, since no line waits long for us.
        fcntl_setpipe_size(&hear, 1 << 16).unwrap();
        let mut heard = BufReader::new(hear).lines().map(Result::unwrap);
        assert_eq!(heard.next().unwrap(), long);
        let rest: Vec<String> = heard.by_ref().take(LINES).collect();
        assert_eq!(rest, (0..LINES).map(|line| line.to_string()).collect::<Vec<_>>());
        assert_eq!(heard.next().unwrap(), "clinch: 3 messages and events could not be written in time");
        writer.finish();
        writer.write(&to, "more\n".to_owned());
        assert_eq!(heard.next().unwrap(), "more");
    }
}
