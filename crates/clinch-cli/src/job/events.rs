//! The JSON lines of `--events`: what happened, for a program that cannot tell it from an exit code.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::Value;

use super::sys;
use crate::exit::Failure;
use crate::output::{PATIENTLY, has_room, rfc3339, say};

/// Where events go, if anybody asked for them.
#[derive(Debug)]
pub(crate) struct Events {
    to: Option<File>,
    name: String,
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    event: &'a str,
    name: &'a str,
    #[serde(flatten)]
    more: Value,
}

impl Events {
    /// Opens a file for appending, or takes over the open descriptor of `fd:N`.
    pub(crate) fn open(to: Option<&OsStr>, name: &str) -> Result<Events, Failure> {
        let to = to.map(|to| match to.to_str().and_then(|to| to.strip_prefix("fd:")) {
            Some(number) => adopt(number),
            None => OpenOptions::new().append(true).create(true).open(to).map_err(|error| {
                Failure::usage(format!("cannot write events to {}: {error}", to.to_string_lossy()))
            }),
        });
        Ok(Events { to: to.transpose()?, name: name.to_owned() })
    }

    /// Whether anybody listens.
    pub(crate) fn wanted(&self) -> bool {
        self.to.is_some()
    }

    /// Writes one event with what belongs to it, an object.
    pub(crate) fn emit(&mut self, event: &str, more: impl FnOnce() -> Value) {
        let Some(to) = &mut self.to else { return };
        let line = Line { time: rfc3339(SystemTime::now()), event, name: &self.name, more: more() };
        // One write for each line, so that processes that append to one file do not mix theirs.
        let text = serde_json::to_string(&line).map(|line| line + "\n").map_err(io::Error::from);
        let written = text.and_then(|line| match has_room(to.as_fd(), PATIENTLY) {
            true => to.write_all(line.as_bytes()),
            false => Err(io::Error::other("nobody reads them")),
        });
        if let Err(error) = written {
            say(format_args!("cannot write events any more: {error}"));
            self.to = None;
        }
    }
}

fn adopt(number: &str) -> Result<File, Failure> {
    let Ok(number) = number.parse::<u16>() else {
        return Err(Failure::usage(format!("--events fd:{number} names no descriptor; fd:3 would")));
    };
    let adopted = sys::adopt(number.into());
    Ok(adopted
        .map_err(|error| Failure::usage(format!("cannot write events to descriptor {number}: {error}")))?
        .into())
}
