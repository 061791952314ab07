//! Exit codes, and the failures that end in one.
//!
//! | code | meaning |
//! | --- | --- |
//! | 0 to 255 | of `run`: the child's own |
//! | 128 + n | the child, or the wrapper while it waited, was ended by signal n |
//! | 1 | of `show` and `break`: nobody holds the lock; of `doctor`: something could be better |
//! | 2 | of `doctor`: something fails |
//! | 64 | usage: wrong arguments, or something that this store cannot do |
//! | 69 | the store could not be reached, has no room, or cannot say whether the lock is taken |
//! | 70 | something of this host failed that should have worked |
//! | 74 | the answer could not be written; `acquire` then holds nothing |
//! | 75 | not acquired; `--conflict-exit-code` sets another; of `break`: somebody still has the lock, or it is closed anew |
//! | 77 | the store refused access |
//! | 79 | the lock was lost, and the child stopped |
//! | 126, 127 | the command cannot be executed, was not found; as a shell's |

use std::borrow::Cow;
use std::error::Error as _;
use std::io;

use clinch::ErrorKind;
use rustix::io::Errno;

use crate::output::say_failure;

pub(crate) const NOBODY: u8 = 1;
pub(crate) const USAGE: u8 = 64;
pub(crate) const UNAVAILABLE: u8 = 69;
pub(crate) const INTERNAL: u8 = 70;
pub(crate) const UNWRITTEN: u8 = 74;
pub(crate) const CONFLICT: u8 = 75;
pub(crate) const REFUSED: u8 = 77;
pub(crate) const LOST: u8 = 79;
pub(crate) const NOT_EXECUTABLE: u8 = 126;
pub(crate) const NOT_FOUND: u8 = 127;
pub(crate) const SIGNAL_BASE: u8 = 128;

/// The result of a verb: its exit code, or why it failed.
pub(crate) type Outcome = Result<u8, Failure>;

/// Why a verb failed: what to say, and the code to exit with.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: Cow<'static, str>,
    /// Whether the lock was not acquired because another has it, or had its turn.
    pub(crate) is_taken: bool,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<Cow<'static, str>>) -> Failure {
        Failure { code, message: message.into(), is_taken: false }
    }

    /// Another has the lock, or had its turn.
    pub(crate) fn taken(message: impl Into<Cow<'static, str>>) -> Failure {
        Failure { is_taken: true, ..Failure::new(CONFLICT, message) }
    }

    pub(crate) fn usage(message: impl Into<Cow<'static, str>>) -> Failure {
        Failure::new(USAGE, message)
    }

    /// Something of this host that should have worked did not.
    pub(crate) fn system(what: &str, error: impl std::fmt::Display) -> Failure {
        Failure::new(INTERNAL, format!("{what}: {error}"))
    }

    /// Says it on stderr and returns the code.
    pub(crate) fn report(self) -> u8 {
        if !self.message.is_empty() {
            say_failure(&self.message, self.code);
        }
        self.code
    }
}

impl From<clinch::Error> for Failure {
    fn from(error: clinch::Error) -> Failure {
        let is_taken = error.kind() == ErrorKind::TimedOut;
        let code = if lacks_descriptors(&error) { INTERNAL } else { code(error.kind()) };
        Failure { is_taken, ..Failure::new(code, chain(&error)) }
    }
}

/// The exit code for an error of the library.
pub(crate) fn code(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::TimedOut => CONFLICT,
        ErrorKind::Lost => LOST,
        ErrorKind::Refused => REFUSED,
        ErrorKind::Invalid | ErrorKind::Unsupported => USAGE,
        _ => UNAVAILABLE,
    }
}

/// Whether this host, not the store, has failed: no descriptor was left.
fn lacks_descriptors(error: &clinch::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        let number = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if number
            .is_some_and(|number| [Errno::MFILE, Errno::NFILE].contains(&Errno::from_raw_os_error(number)))
        {
            return true;
        }
        cause = error.source();
    }
    false
}

/// An error and its causes on one line.
fn chain(error: &clinch::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let why = error.to_string();
        // Most name their cause themselves.
        if !text.contains(&why) {
            text += &format!(": {why}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_has_its_code_and_its_causes() {
        assert_eq!(code(ErrorKind::TimedOut), 75);
        assert_eq!(code(ErrorKind::Lost), 79);
        assert_eq!(code(ErrorKind::Refused), 77);
        for kind in [ErrorKind::Invalid, ErrorKind::Unsupported] {
            assert_eq!(code(kind), 64);
        }
        for kind in [ErrorKind::Unavailable, ErrorKind::Unknown, ErrorKind::Exhausted, ErrorKind::Closed] {
            assert_eq!(code(kind), 69);
        }
        let error = clinch::Error::new(ErrorKind::Unavailable, "no answer").with_source("cable cut");
        assert_eq!(Failure::from(error).message, "no answer: cable cut");
        for (number, code) in [(Errno::MFILE, 70), (Errno::NFILE, 70), (Errno::CONNREFUSED, 69)] {
            let cause = clinch::Error::new(ErrorKind::Exhausted, "here").with_source(io::Error::from(number));
            let error = clinch::Error::new(ErrorKind::Unavailable, "no answer").with_source(cause);
            assert_eq!(Failure::from(error).code, code);
        }
    }
}
