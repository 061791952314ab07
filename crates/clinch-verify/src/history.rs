//! A history: the events of a run in the order in which they were recorded, read from and written to JSON lines.
//!
//! Reading is strict with one exception: an event may be cut off, because a recorder that was killed while it wrote, or had no room
//! on its disk, leaves a part of one, behind which another recorder's event may stand. It is left out and noted: the last one in any case, and
//! others for as many processes as were killed. One that goes on without an event that it did not record seems to do what it did not. Any other
//! damage means that something besides recorders wrote to the file, and nothing in it can be trusted.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};

use crate::event::{Event, Kind};

/// The events of a run, in the order in which they were recorded.
///
/// The order in the file settles nothing but ties: events are ordered by their time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    events: Vec<Event>,
    notes: Vec<String>,
}

impl History {
    /// A history without events.
    pub fn new() -> Self {
        Self::default()
    }

    /// The events, in the order of recording.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// What the reader had to leave out.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Adds one event at the end.
    pub fn push(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Adds the events and notes of another history, such as that of another host.
    pub fn append(&mut self, mut other: History) {
        self.events.append(&mut other.events);
        self.notes.append(&mut other.notes);
    }

    /// Reads JSON lines, one event each; lines of blanks alone are passed over.
    ///
    /// # Errors
    ///
    /// [`ReadError::Line`] for the first line that is not an event. One that was cut off makes a note instead if it is the last one, or if
    /// there are as many crashes.
    pub fn read(source: impl Read) -> Result<Self, ReadError> {
        let mut reader = BufReader::new(source);
        let mut history = History::new();
        let mut text = Vec::new();
        let mut line = 0;
        // The errors that the events are which were cut off before others.
        let mut cut_off = Vec::new();
        while reader.read_until(b'\n', &mut text).map_err(ReadError::Io)? > 0 {
            line += 1;
            history.read_line(line, &text, &mut cut_off)?;
            text.clear();
        }
        let crashes = history.events.iter().filter(|event| event.kind == Kind::Crash).count();
        match cut_off.into_iter().nth(crashes) {
            Some(error) => Err(error),
            None => Ok(history),
        }
    }

    /// Reads JSON lines from a string; see [`read`](Self::read).
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn parse(text: &str) -> Result<Self, ReadError> {
        Self::read(text.as_bytes())
    }

    /// Writes JSON lines.
    ///
    /// # Errors
    ///
    /// Those of the writer.
    pub fn write(&self, mut sink: impl Write) -> io::Result<()> {
        for event in &self.events {
            sink.write_all(&to_line(event)?)?;
        }
        Ok(())
    }

    fn read_line(&mut self, line: usize, text: &[u8], cut_off: &mut Vec<ReadError>) -> Result<(), ReadError> {
        if text.trim_ascii().is_empty() {
            return Ok(());
        }
        let mut rest = text;
        while !rest.is_empty() {
            // An event, or what there is of one that was cut off before the next.
            let next = rest.windows(HEAD.len()).skip(1).position(|part| part == HEAD).map(|at| at + 1);
            let (part, next) = rest.split_at_checked(next.unwrap_or(rest.len())).unwrap_or((rest, &[]));
            match serde_json::from_slice(part) {
                Ok(event) => self.events.push(event),
                // The parser runs out of input and finds no other fault. Anything else was written that way.
                Err(error) if error.is_eof() && !part.ends_with(b"\n") => {
                    self.notes.push(format!(
                        "an event of line {line} is cut off after {} bytes; it is left out, those before it are complete",
                        part.len()
                    ));
                    if !next.is_empty() {
                        cut_off.push(ReadError::at(line, text.len() - rest.len(), &error));
                    }
                }
                Err(error) => return Err(ReadError::at(line, text.len() - rest.len(), &error)),
            }
            rest = next;
        }
        Ok(())
    }
}

impl From<Vec<Event>> for History {
    fn from(events: Vec<Event>) -> Self {
        History { events, notes: Vec::new() }
    }
}

/// With what each event begins that a recorder has written. It stands nowhere else in one: the quotes in a text are escaped.
const HEAD: &[u8] = br#"{"k":"#;

/// One event as a line with its line feed, for a single write.
pub(crate) fn to_line(event: &Event) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(event).map_err(io::Error::from)?;
    line.push(b'\n');
    Ok(line)
}

/// Why a history could not be read.
#[derive(Debug)]
#[non_exhaustive]
pub enum ReadError {
    /// The source could not be read.
    Io(io::Error),
    /// A line is not an event.
    Line {
        /// The line, counted from 1.
        line: usize,
        /// The byte of the line at which the fault was noticed, counted from 1; 0 when it has none.
        column: usize,
        /// What is wrong with it.
        message: String,
    },
}

impl ReadError {
    fn at(line: usize, before: usize, error: &serde_json::Error) -> Self {
        let text = error.to_string();
        // The parser saw a single line, so its own "at line 1" would mislead.
        let message = text.split_once(" at line ").map_or(text.as_str(), |(message, _)| message);
        ReadError::Line { line, column: before + error.column(), message: message.to_owned() }
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::Io(error) => write!(f, "cannot read: {error}"),
            ReadError::Line { line, column: 0, message } => write!(f, "line {line}: {message}"),
            ReadError::Line { line, column, message } => {
                write!(f, "line {line}, column {column}: {message}")
            }
        }
    }
}

impl std::error::Error for ReadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ReadError::Io(error) => Some(error),
            ReadError::Line { .. } => None,
        }
    }
}
