//! The JSON lines of `--events`: what happened, for a program that cannot tell it from an exit code.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::Value;

use super::sys;
use crate::exit::Failure;
use crate::output::{plain_json, rfc3339};
use crate::writer::{Log, To, WRITER};

/// Where events go, if anybody asked for them.
#[derive(Debug)]
pub(crate) struct Events {
    to: Option<To>,
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
        let to = to.transpose()?.map(|file| To::Events(Arc::new(Log::new(file))));
        Ok(Events { to, name: name.to_owned() })
    }

    /// Whether anybody listens.
    pub(crate) fn wanted(&self) -> bool {
        self.to.is_some()
    }

    /// Writes one event with what belongs to it, an object.
    pub(crate) fn emit(&self, event: &str, more: impl FnOnce() -> Value) {
        let Some(to) = &self.to else { return };
        let line = Line { time: rfc3339(SystemTime::now()), event, name: &self.name, more: more() };
        // Texts, numbers and null only, which are always JSON.
        if let Ok(line) = serde_json::to_string(&line) {
            WRITER.write(to, plain_json(&line) + "\n");
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
