//! What a failed command proves, in this crate's words.

use super::resp::Value;
use crate::error::{Error, ErrorKind, Result};

/// What one server answered instead of a value.
#[derive(Debug)]
pub(super) enum Failure {
    /// The connection broke; the command may have been applied if it was sent.
    Cut { sent: bool, why: String },
    /// The server refused it; it was surely not applied.
    Server { code: String, detail: String },
}

impl Failure {
    /// Takes errors out of answers.
    pub(super) fn check(answer: Value) -> Result<Value, Failure> {
        match answer {
            Value::Error(error) => {
                let (code, detail) = error.split_once(' ').unwrap_or((&error, ""));
                Err(Failure::Server { code: code.to_owned(), detail: detail.to_owned() })
            }
            answer => Ok(answer),
        }
    }

    pub(super) fn code(&self) -> &str {
        match self {
            Failure::Server { code, .. } => code,
            Failure::Cut { .. } => "",
        }
    }

    /// Where a Cluster says that a slot is: for `MOVED` and `ASK`. An empty host means the one that answered.
    pub(super) fn redirect(&self) -> Option<(u16, &str, u16)> {
        let Failure::Server { code, detail } = self else { return None };
        if code != "MOVED" && code != "ASK" {
            return None;
        }
        let (slot, address) = detail.split_once(' ')?;
        let (host, port) = address.rsplit_once(':')?;
        Some((slot.parse().ok()?, host, port.parse().ok()?))
    }

    /// Whether this server is not, or no longer, the one to ask.
    pub(super) fn is_wrong_server(&self) -> bool {
        matches!(self.code(), "READONLY" | "MASTERDOWN" | "CLUSTERDOWN" | "UNBLOCKED")
    }

    pub(super) fn into_error(self, server: &str) -> Error {
        let (code, detail) = match self {
            Failure::Cut { sent, why } => {
                let kind = if sent { ErrorKind::Unknown } else { ErrorKind::Unavailable };
                return Error::new(kind, format!("the connection to {server} broke: {why}"));
            }
            Failure::Server { code, detail } => (code, detail),
        };
        // A script's error ends in where it was raised, which tells a user nothing.
        let detail = detail.split(" script: ").next().unwrap_or_default().trim();
        // Before version 7.2 a script that may not run a command says so without a code.
        let code = if code == "ERR" && detail.contains("executing the script can't") {
            "NOPERM".into()
        } else {
            code
        };
        let (kind, advice) = match code.as_str() {
            "NOPERM" => (ErrorKind::Refused, "; see the ACL line in the documentation of the Redis store"),
            "NOAUTH" | "WRONGPASS" => (ErrorKind::Refused, "; give user and password in the URL"),
            "WRONGTYPE" => (
                ErrorKind::Invalid,
                "; a key under the lock's name is no lock: delete it, or use another name or prefix=",
            ),
            "OOM" => (ErrorKind::Exhausted, "; the server is out of memory and takes no new lock"),
            "LOADING" | "BUSY" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" | "NOREPLICAS"
            | "MISCONF" | "MOVED" | "ASK" | "NOSCRIPT" | "UNKILLABLE" | "UNBLOCKED" => {
                (ErrorKind::Unavailable, "")
            }
            _ => (ErrorKind::Unsupported, ""),
        };
        Error::new(kind, format!("{server} answered {code} {detail}{advice}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(code: &str, detail: &str) -> Failure {
        Failure::Server { code: code.into(), detail: detail.into() }
    }

    #[test]
    fn an_error_has_a_code() {
        let Err(failure) = Failure::check(Value::Error("MOVED 1 h:2".into())) else { panic!("an answer") };
        assert_eq!((failure.code(), failure.redirect()), ("MOVED", Some((1, "h", 2))));
        assert!(
            matches!(Failure::check(Value::Error("EMPTY".into())), Err(failure) if failure.code() == "EMPTY")
        );
        assert!(Failure::check(Value::Nil).is_ok());
    }

    #[test]
    fn a_redirect_is_read() {
        assert_eq!(server("MOVED", "3999 10.0.0.1:6381").redirect(), Some((3999, "10.0.0.1", 6381)));
        assert_eq!(server("ASK", "7 ::1:6381").redirect(), Some((7, "::1", 6381)));
        assert_eq!(server("MOVED", "3999 :6381").redirect(), Some((3999, "", 6381)));
        for bad in ["", "x", "1 h", "99999 h:1", "1 h:99999"] {
            assert_eq!(server("MOVED", bad).redirect(), None, "{bad}");
        }
        assert_eq!(server("ERR", "1 h:1").redirect(), None);
    }

    #[test]
    fn each_answer_says_what_to_conclude() {
        let kind = |code: &str| server(code, "x").into_error("h:1").kind();
        assert_eq!(kind("LOADING"), ErrorKind::Unavailable);
        assert_eq!(kind("WRONGPASS"), ErrorKind::Refused);
        assert_eq!(kind("WRONGTYPE"), ErrorKind::Invalid);
        assert_eq!(kind("OOM"), ErrorKind::Exhausted);
        assert_eq!(kind("ERR"), ErrorKind::Unsupported);
    }
}
