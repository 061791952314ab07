//! What a failed command proves, in this crate's words.

use super::resp::Value;
use crate::error::{Error, ErrorKind, Result};

/// What one server answered instead of a value.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The connection broke; the command may have been applied if it was sent.
    Cut { sent: bool, why: String },
    /// The server refused it, or what stands before it [lost it](Failure::into_error_of_step). What is [worth a repetition](CODES) was surely not applied: of a script such an error comes
    /// before its first write or not at all, since no server stops one that has written for lack of memory, disk,
    /// replicas or mastership. Other errors, of a right that was taken away or a key of another type, may have come in the
    /// middle; they end the claim, whose release then removes what there is.
    Server { code: String, detail: String },
}

/// What may be concluded from an error, and what to do.
type Meaning = (ErrorKind, &'static str);

/// What to do where another server of a Cluster has what was asked for.
const ELSEWHERE: &str = "it is one of a Cluster: say redis+cluster:// in the URL";

/// What the codes of servers mean. All that may pass by itself is waited for, as long as the caller has time.
const CODES: [(&str, Meaning); 25] = {
    use ErrorKind::{Invalid, Refused, Unavailable};
    const PASSES: Meaning = (Unavailable, "");
    [
        // Whose URL is that of a Cluster follows these.
        ("ASK", (ErrorKind::Unsupported, ELSEWHERE)),
        ("BUSY", PASSES),
        ("CLUSTERDOWN", PASSES),
        ("KILLED", PASSES),
        ("LOADING", PASSES),
        ("MASTERDOWN", PASSES),
        ("MAXCLIENTS", (Unavailable, "; see maxclients in its configuration")),
        ("MISCONF", PASSES),
        ("MOVED", (ErrorKind::Unsupported, ELSEWHERE)),
        ("NOREPLICAS", PASSES),
        ("NOSCRIPT", PASSES),
        ("OOM", (Unavailable, "; the server is out of memory and takes no new lock")),
        ("READONLY", PASSES),
        ("TRYAGAIN", PASSES),
        ("UNBLOCKED", PASSES),
        ("UNKILLABLE", PASSES),
        ("DENIED", (Refused, "; give the server a password, or an address to listen on")),
        ("NOAUTH", (Refused, "; give user and password in the URL")),
        ("NOPERM", (Refused, "; see the ACL line in the documentation of the Redis store")),
        ("WRONGPASS", (Refused, "; give user and password in the URL")),
        (
            "WRONGTYPE",
            (Invalid, "; a key under the lock's name is no lock: delete it, or use another name or prefix="),
        ),
        ("CROSSSLOT", (ErrorKind::Unsupported, "")),
        ("NOPROTO", (ErrorKind::Unsupported, "")),
        // Ours, for what a script broke off with.
        ("CLOCK", (Unavailable, "; set it: until then it grants nothing")),
        ("SCRIPT", (ErrorKind::Unsupported, "")),
    ]
};

/// Errors that servers give no code of their own: words in them, and the code that they would have.
const WORDS: [(&str, &str); 6] = [
    ("max number of clients", "MAXCLIENTS"),
    ("Script killed by user", "KILLED"),
    // Before version 7.2.
    ("executing the script can't", "NOPERM"),
    ("can't run this command or subcommand", "NOPERM"),
    ("clock of this server is not set", "CLOCK"),
    (USER_SCRIPT, "SCRIPT"),
];

/// Where a script broke off.
const USER_SCRIPT: &str = "user_script:";

impl Failure {
    /// Takes errors out of answers.
    pub(super) fn check(answer: Value) -> Result<Value, Failure> {
        match answer {
            Value::Error(error) => Err(Failure::read(&error)),
            answer => Ok(answer),
        }
    }

    fn read(error: &str) -> Failure {
        // Before version 7, what stopped a script stands at the end: "... @user_script: 8: -OOM command not allowed".
        let before_7 = || error.strip_prefix("ERR Error running script")?.rsplit_once(USER_SCRIPT);
        let broke_off = error.strip_prefix("ERR user_script:").or_else(|| Some(before_7()?.1));
        let in_script = broke_off
            .and_then(|at| at.split_once(": ").map(|(_, error)| error.strip_prefix('-').unwrap_or(error)));
        let otherwise = if in_script.is_some() { "SCRIPT" } else { "ERR" };
        // What was sent may hold a password.
        let error = in_script.unwrap_or(error).split(", with args beginning with").next().unwrap_or_default();
        let is_code = |word: &str| word.bytes().all(|byte| byte.is_ascii_uppercase());
        let (code, detail) = match error.split_once(' ') {
            Some(("ERR", detail)) => (otherwise, detail),
            Some((code, detail)) if is_code(code) => (code, detail),
            None if is_code(error) => (error, ""),
            _ => (otherwise, error),
        };
        let has_none = matches!(code, "ERR" | "SCRIPT");
        let code = match WORDS.iter().find(|(words, _)| has_none && detail.contains(words)) {
            Some((_, code)) => code,
            None => code,
        };
        Failure::Server { code: code.to_owned(), detail: detail.to_owned() }
    }

    pub(super) fn code(&self) -> &str {
        match self {
            Failure::Server { code, .. } => code,
            Failure::Cut { .. } => "",
        }
    }

    /// Whether the server does not know the command: so nobody has passed it on.
    pub(super) fn is_no_command(&self) -> bool {
        self.detail().contains("unknown command")
    }

    pub(super) fn detail(&self) -> &str {
        match self {
            Failure::Server { detail, .. } => detail,
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

    /// Whether it may pass by itself.
    pub(super) fn passes(&self) -> bool {
        match self {
            Failure::Cut { .. } => true,
            Failure::Server { code, .. } => {
                meaning(code).is_some_and(|(kind, _)| kind == ErrorKind::Unavailable)
            }
        }
    }

    /// Whether this server is not, or no longer, the one to ask.
    pub(super) fn is_wrong_server(&self) -> bool {
        matches!(self.code(), "READONLY" | "MASTERDOWN" | "CLUSTERDOWN" | "UNBLOCKED")
    }

    /// As [`Failure::into_error`], of a step. An error that is not [known](CODES) may come from whatever stands before the
    /// server, while the step is still on its way.
    pub(super) fn into_error_of_step(self, server: &str) -> Error {
        let is_known = match &self {
            Failure::Cut { .. } => true,
            Failure::Server { code, .. } => meaning(code).is_some() || self.is_no_command(),
        };
        let error = self.into_error(server);
        if is_known { error } else { Error::new(ErrorKind::Unknown, error.to_string()) }
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
        let (kind, advice) = meaning(&code).unwrap_or((ErrorKind::Unsupported, ""));
        Error::new(kind, format!("{server} answered {code} {detail}"))
            .with_remedy(advice.trim_start_matches("; "))
    }
}

/// What it means for a step that no server can be asked. Nothing was sent, and the next opening may go well, whatever was amiss with
/// this one; but who is refused is to hear of it.
pub(super) fn of_opening(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Invalid | ErrorKind::Unknown | ErrorKind::Unsupported => {
            Error::new(ErrorKind::Unavailable, error.to_string()).with_source(error)
        }
        _ => error,
    }
}

/// What an error of a command that frees a claim means. One that is not [known](CODES) may come from the middle of a script,
/// or from whatever stands before the server: it ends no release, as it would an attempt to take the lock. Nor does any end
/// one of which a step may still arrive.
pub(super) fn of_release(error: Error, in_doubt: bool) -> Error {
    match error.kind() {
        ErrorKind::Invalid if !in_doubt => error,
        // Nothing was done, and no repetition finds it here.
        ErrorKind::Unsupported if !in_doubt && error.remedy() == Some(ELSEWHERE) => error,
        ErrorKind::Invalid | ErrorKind::Unsupported => {
            Error::new(ErrorKind::Unknown, error.to_string()).with_source(error)
        }
        _ => error,
    }
}

/// What a code means, if it is known.
pub(super) fn meaning(code: &str) -> Option<Meaning> {
    CODES.iter().find(|(known, _)| *known == code).map(|(_, meaning)| *meaning)
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

    /// Errors as servers of versions 6 to 8 write them.
    #[test]
    fn each_answer_says_what_to_conclude() {
        use ErrorKind::{Invalid, Refused, Unavailable, Unknown, Unsupported};
        for (error, kind) in [
            ("LOADING Redis is loading the dataset in memory", Unavailable),
            (
                "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
                Unavailable,
            ),
            ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", Unavailable),
            ("CLUSTERDOWN Hash slot not served", Unavailable),
            ("CLUSTERDOWN The cluster is down", Unavailable),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Unavailable),
            ("MOVED 1 127.0.0.1:2", Unsupported),
            ("ASK 1 127.0.0.1:2", Unsupported),
            ("NOSCRIPT No matching script. Please use EVAL.", Unavailable),
            ("READONLY You can't write against a read only replica.", Unavailable),
            ("NOREPLICAS Not enough good replicas to write.", Unavailable),
            ("OOM command not allowed when used memory > 'maxmemory'.", Unavailable),
            (
                "OOM command not allowed when used memory > 'maxmemory'. script: 59, on @user_script:3.",
                Unavailable,
            ),
            (
                "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist",
                Unavailable,
            ),
            ("MISCONF Errors writing to the AOF file: No space left on device", Unavailable),
            ("UNBLOCKED force unblock from blocking operation, instance state changed", Unavailable),
            ("UNKILLABLE Sorry the script already executed write commands against the dataset.", Unavailable),
            ("ERR max number of clients reached", Unavailable),
            ("ERR max number of clients + cluster connections reached", Unavailable),
            (
                "ERR Error running script (call to f_59): @user_script:3: @user_script: 3: -OOM command not allowed when used memory > 'maxmemory'. ",
                Unavailable,
            ),
            (
                "ERR Error running script (call to f_59): @user_script:3: @user_script: 3: -MISCONF Errors writing to the AOF file: x",
                Unavailable,
            ),
            (
                "ERR Error running script (call to f_59): @user_script:3: @user_script: 3: -READONLY You can't write against a read only replica. ",
                Unavailable,
            ),
            (
                "ERR Error running script (call to f_59): @user_script:3: @user_script: 3: -NOREPLICAS Not enough good replicas to write. ",
                Unavailable,
            ),
            (
                "ERR Error running script (call to f_59): @user_script:1: Script killed by user with SCRIPT KILL... ",
                Unavailable,
            ),
            (
                "ERR Error running script (call to f_59): @user_script:1: WRONGTYPE Operation against a key holding the wrong kind of value",
                Invalid,
            ),
            (
                "ERR Error running script (call to f_59): @user_script:3: @user_script: 3: The user executing the script can't run this command or subcommand",
                Refused,
            ),
            (
                "ERR Error running script (call to f_59): @user_script:3: @user_script: 3: The user executing the script can't access at least one of the keys mentioned in the command arguments",
                Refused,
            ),
            (
                "ERR The user executing the script can't run this command or subcommand script: 59, on @user_script:1.",
                Refused,
            ),
            ("NOPERM this user has no permissions to run the 'evalsha' command or its subcommand", Refused),
            ("NOPERM No permissions to access a key", Refused),
            ("NOAUTH Authentication required.", Refused),
            ("WRONGPASS invalid username-password pair or user is disabled.", Refused),
            ("DENIED Redis is running in protected mode because protected mode is enabled", Refused),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Invalid),
            ("ERR unknown command 'EVALSHA', with args beginning with: '59' '1'", Unsupported),
            (
                "ERR Error running script (call to f_59): @user_script:3: attempt to index a nil value",
                Unsupported,
            ),
            ("ERR user_script:9: no token follows script: 59, on @user_script:9.", Unsupported),
            ("ERR upstream request timeout", Unknown),
            ("upstream failure", Unknown),
            ("NEWCODE of tomorrow", Unknown),
            ("", Unknown),
        ] {
            let Err(failure) = Failure::check(Value::Error(error.into())) else { panic!("an answer") };
            let told = failure.into_error_of_step("h:1");
            assert_eq!(told.kind(), kind, "{error}: {told}");
            let Err(failure) = Failure::check(Value::Error(error.into())) else { panic!("an answer") };
            assert_eq!(failure.passes(), kind == Unavailable, "{error}");
            assert!(!told.to_string().contains("user_script:"), "{told}");
            assert!(!told.to_string().contains("args beginning"), "{told}");
        }
    }
}
