//! The JSON lines of `--events`: what happened, for a program that cannot tell it from an exit code.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use clinch::{Loss, LossKind};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::Serialize;

use super::children::Exit;
use super::sys;
use crate::documents::{ClaimJson, Version, whole_ms};
use crate::exit::Failure;
use crate::output::{plain_json, rfc3339};
use crate::writer::{Log, To, WRITER};

/// Where events go, if anybody asked for them.
#[derive(Debug)]
pub(crate) struct Events {
    to: Option<To>,
    name: String,
    has_told_loss: bool,
}

/// One line of `clinch run --events`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Line<'a> {
    v: Version,
    /// When it was written: RFC 3339 in UTC.
    time: String,
    /// The lock.
    name: &'a str,
    #[serde(flatten)]
    event: Event,
}

/// What happened.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// The lock is waited for. Written again when something of this changes but the time.
    Waiting {
        /// How many claims are ahead, with those that hold the lock; null where that is not known, as on stores without a queue.
        ahead: Option<u64>,
        /// Who holds the lock; the first of several. Null: nobody, or it is not known.
        holder: Option<Box<ClaimJson>>,
        /// Until when the lock is kept closed: RFC 3339 in UTC.
        closed_until: Option<String>,
        /// Why nothing is known: the store does not answer.
        error: Option<String>,
        /// How long it was waited for until now.
        waited_ms: u64,
    },
    /// The lock is held.
    Acquired {
        /// The fencing token.
        token: u64,
        /// The claim's id.
        claim: String,
        /// The process of `clinch run`.
        pid: u32,
    },
    /// The job around this one holds the lock; the command is begun under its claim, and this is the last event.
    Reentered {
        /// The id of its claim.
        claim: String,
        /// The fencing token.
        token: Option<u64>,
    },
    /// Renewals are overdue.
    Jeopardy {
        /// What is left of the lease; null where it does not end.
        remaining_ms: Option<u64>,
    },
    /// A renewal has come through after all.
    Held {
        /// What is left of the lease; null where it does not end.
        remaining_ms: Option<u64>,
    },
    /// The lock was lost.
    Lost {
        kind: LossWord,
        /// How that was noticed, for people.
        reason: String,
    },
    /// The job is told to end, for the lock is about to be lost, or was.
    Stopping {
        signal: StopWord,
        /// What is left of the lease; null where it does not end.
        remaining_ms: Option<u64>,
    },
    /// The job has ended.
    Exited {
        /// Its exit code; null: a signal ended it.
        code: Option<u8>,
        /// The number of the signal that ended it; null: it exited.
        signal: Option<i32>,
        /// How long it ran.
        duration_ms: u64,
    },
    /// The lock was released.
    Released {
        /// For how long it stays closed.
        closed_ms: u64,
    },
    /// The job did not begin.
    Refused {
        /// Why, for people.
        reason: String,
    },
}

/// Why a lock was lost.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LossWord {
    /// Somebody removed it from the store: an operator, or the store forgot it.
    Deleted,
    /// No renewal was confirmed in time.
    Expired,
    /// It was held for as long as `--max-hold` allows.
    MaxHold,
    /// The session that carried it ended.
    SessionEnded,
    /// The store gave an answer that neither proves nor disproves it.
    Unverifiable,
    /// Something else.
    Other,
}

/// How a job is told to end.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StopWord {
    /// By SIGTERM: it has some time to end by itself.
    Term,
    /// By SIGKILL.
    Kill,
}

impl StopWord {
    /// The signal's name.
    pub(crate) fn text(self) -> &'static str {
        match self {
            StopWord::Term => "TERM",
            StopWord::Kill => "KILL",
        }
    }
}

impl Event {
    pub(crate) fn lost(loss: &Loss) -> Event {
        let kind = match loss.kind {
            LossKind::Deleted => LossWord::Deleted,
            LossKind::Expired => LossWord::Expired,
            LossKind::HeldTooLong => LossWord::MaxHold,
            LossKind::SessionEnded => LossWord::SessionEnded,
            LossKind::Unverifiable => LossWord::Unverifiable,
            _ => LossWord::Other,
        };
        Event::Lost { kind, reason: loss.detail.to_string() }
    }

    pub(crate) fn refused(why: &Failure) -> Event {
        Event::Refused { reason: why.message.to_string() }
    }

    pub(crate) fn exited(exit: Exit, time: Duration) -> Event {
        let (code, signal) = match exit {
            Exit::Code(code) => (Some(code), None),
            Exit::Signal(signal) => (None, Some(signal)),
        };
        Event::Exited { code, signal, duration_ms: whole_ms(time) }
    }
}

impl Events {
    /// Opens a file for appending, or takes over the open descriptor of `fd:N`.
    pub(crate) fn open(to: Option<&OsStr>, name: &str) -> Result<Events, Failure> {
        let to = to.map(|to| match to.to_str().and_then(|to| to.strip_prefix("fd:")) {
            Some(number) => adopt(number),
            None => open(Path::new(to)).map_err(|error| {
                Failure::usage(format!("cannot write events to {}: {error}", to.to_string_lossy()))
            }),
        });
        let to = to.transpose()?.map(|file| To::Events(Arc::new(Log::new(file))));
        Ok(Events { to, name: name.to_owned(), has_told_loss: false })
    }

    /// Whether anybody listens.
    pub(crate) fn wanted(&self) -> bool {
        self.to.is_some()
    }

    /// Writes that the lock was lost, which is found out while the job runs and again at its release.
    pub(crate) fn lost(&mut self, loss: &Loss) {
        if !std::mem::replace(&mut self.has_told_loss, true) {
            self.emit(|| Event::lost(loss));
        }
    }

    /// Writes one event.
    pub(crate) fn emit(&self, event: impl FnOnce() -> Event) {
        let Some(to) = &self.to else { return };
        let line = Line { v: Version, time: rfc3339(SystemTime::now()), name: &self.name, event: event() };
        // Texts, numbers and null only, which are always JSON.
        if let Ok(line) = serde_json::to_string(&line) {
            WRITER.write(to, plain_json(&line) + "\n");
        }
    }
}

/// Opens a file, but waits for nobody who reads a FIFO.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let opened = OpenOptions::new().append(true).create(true).custom_flags(flags).open(path);
    let file = opened.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NXIO) => io::Error::other("nobody reads this FIFO"),
        _ => error,
    })?;
    // A write may wait: the writer looks for room before.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
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
