//! What a failed call proves, in this crate's words.

use tonic::{Code, Status};

use crate::error::{Error, ErrorKind};

/// Why a call gave no answer.
#[derive(Debug)]
pub(super) struct Failure {
    status: Status,
    server: String,
}

impl Failure {
    pub(super) fn new(status: Status, server: &str) -> Failure {
        Failure { status, server: server.to_owned() }
    }

    /// Whether the connection broke: the request may have been applied or not.
    pub(super) fn is_cut(&self) -> bool {
        // What a server says comes without a cause of ours.
        std::error::Error::source(&self.status).is_some()
    }

    /// Whether the request was surely not sent: the connection had ended, or took no more requests.
    pub(super) fn is_unsent(&self) -> bool {
        let mut cause = std::error::Error::source(&self.status);
        while let Some(error) = cause {
            if let Some(error) = error.downcast_ref::<hyper::Error>() {
                return error.is_canceled();
            }
            cause = error.source();
        }
        false
    }

    /// What stands behind what is told of a connection that broke.
    fn cause(&self) -> Option<String> {
        let mut cause = std::error::Error::source(&self.status)?.source()?;
        let mut text = cause.to_string();
        while let Some(next) = cause.source() {
            text += &format!(": {next}");
            cause = next;
        }
        Some(text)
    }

    /// Whether the member knows of no leader: it did nothing, and another may do better.
    pub(super) fn is_leaderless(&self) -> bool {
        self.status.message().contains("no leader")
    }

    /// Whether the member only learns as yet: it serves next to nothing.
    pub(super) fn is_learner(&self) -> bool {
        self.status.message().contains("not supported for learner")
    }

    /// Whether there was no answer in time.
    pub(super) fn is_late(&self) -> bool {
        self.status.code() == Code::DeadlineExceeded && !self.is_cut()
    }

    /// Whether the server surely did nothing: what it says in front of everything it does. All else that it says while it
    /// stops, or while leaders change, it may say of what it has proposed and others will apply.
    fn is_surely_not_applied(&self) -> bool {
        let says = |words: &[&str]| words.iter().any(|word| self.status.message().contains(word));
        says(&["no leader", "too many requests", "not capable", "not supported for learner"])
    }

    /// Whether what proves us is no longer good, for a client that has a password or not.
    pub(super) fn wants_login(&self, password: bool) -> bool {
        let says = |word: &str| self.status.message().contains(word);
        password
            && (says("invalid auth token")
                || says("revision of auth store is old")
                || says("user name is empty"))
    }

    /// Whether the server keeps no users.
    pub(super) fn is_auth_disabled(&self) -> bool {
        self.status.message().contains("authentication is not enabled")
    }

    /// Whether the lease that the request named is gone.
    pub(super) fn is_lease_gone(&self) -> bool {
        self.status.message().contains("requested lease not found")
    }

    /// Whether there is a lease already with the id that the request wanted for one.
    pub(super) fn is_lease_there(&self) -> bool {
        self.status.message().contains("lease already exists")
    }

    pub(super) fn into_error(self) -> Error {
        let Failure { status, server } = &self;
        let text = status.message().trim_start_matches("etcdserver: ");
        if self.is_cut() {
            let kind = if self.is_unsent() { ErrorKind::Unavailable } else { ErrorKind::Unknown };
            let error = Error::new(kind, format!("the connection to {server} broke: {text}"));
            // Not the status itself, whose words are for programmers.
            return match self.cause() {
                Some(cause) => error.with_source(cause),
                None => error,
            };
        }
        let (kind, advice) = self.conclusion();
        Error::new(kind, format!("{server} answered: {text}")).with_remedy(advice.trim_start_matches("; "))
    }

    fn conclusion(&self) -> (ErrorKind, &'static str) {
        let says = |word: &str| self.status.message().contains(word);
        match self.status.code() {
            // Perhaps applied: what was under way when the quota was crossed is answered like this, and done by then.
            _ if says("database space exceeded") => (
                ErrorKind::Exhausted,
                "; etcd takes no new key until it is compacted and defragmented and `etcdctl alarm disarm` is run, or \
                 --quota-backend-bytes is raised",
            ),
            _ if says("request is too large") => {
                (ErrorKind::Invalid, "; raise --max-request-bytes of etcd, or shorten label and name")
            }
            _ if says("permission denied") => (
                ErrorKind::Refused,
                "; this user needs a role with readwrite on the prefix; see the documentation of the etcd store",
            ),
            _ if says("authentication failed") => {
                (ErrorKind::Refused, "; look at user and password in the URL")
            }
            _ if says("user name is empty") => {
                (ErrorKind::Refused, "; give user and password in the URL: etcd://user:password@host")
            }
            _ if says("invalid auth token") => (ErrorKind::Refused, "; even after logging in anew"),
            _ if says("no leader") => {
                (ErrorKind::Unavailable, "; too few members of the cluster are up or reach each other")
            }
            _ if says("too large TTL") => (ErrorKind::Invalid, "; use a shorter TTL"),
            // A list that was read in pages, of a revision that was forgotten meanwhile.
            _ if says("has been compacted") => (ErrorKind::Unavailable, "; ask again"),
            _ if self.is_surely_not_applied() => (ErrorKind::Unavailable, ""),
            Code::PermissionDenied | Code::Unauthenticated => (ErrorKind::Refused, ""),
            Code::Unimplemented => (ErrorKind::Unsupported, "; is it an etcd of version 3.4 or later?"),
            Code::ResourceExhausted => (ErrorKind::Exhausted, ""),
            Code::InvalidArgument | Code::OutOfRange => (ErrorKind::Unsupported, ""),
            // Time-outs, a change of leaders, and whatever else may come between proposing and answering.
            _ => (ErrorKind::Unknown, ""),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_says_what_to_conclude() {
        let kind = |status: Status| Failure::new(status, "h:1").into_error().kind();
        let unavailable = |text: &str| Status::unavailable(format!("etcdserver: {text}"));
        assert_eq!(kind(unavailable("no leader")), ErrorKind::Unavailable);
        assert_eq!(kind(unavailable("request timed out")), ErrorKind::Unknown);
        assert_eq!(kind(unavailable("leader changed")), ErrorKind::Unknown);
        assert_eq!(kind(unavailable("rpc not supported for learner")), ErrorKind::Unavailable);
        // These are said of requests that were proposed already.
        assert_eq!(kind(unavailable("server stopped")), ErrorKind::Unknown);
        assert_eq!(kind(Status::unknown("raft: stopped")), ErrorKind::Unknown);
        let late = "request timed out, possibly due to previous leader failure";
        assert_eq!(kind(unavailable(late)), ErrorKind::Unknown);
        assert_eq!(kind(Status::deadline_exceeded("context deadline exceeded")), ErrorKind::Unknown);
        assert_eq!(kind(Status::unavailable("transport is closing")), ErrorKind::Unknown);
        let exhausted = Status::resource_exhausted("etcdserver: mvcc: database space exceeded");
        assert_eq!(kind(exhausted), ErrorKind::Exhausted);
        assert_eq!(kind(Status::resource_exhausted("etcdserver: too many requests")), ErrorKind::Unavailable);
        assert_eq!(kind(Status::permission_denied("etcdserver: permission denied")), ErrorKind::Refused);
        assert_eq!(kind(Status::invalid_argument("etcdserver: request is too large")), ErrorKind::Invalid);
        let password = "etcdserver: authentication failed, invalid user ID or password";
        assert_eq!(kind(Status::invalid_argument(password)), ErrorKind::Refused);
        let error = Failure::new(unavailable("no leader"), "h:1").into_error().to_string();
        assert!(error.starts_with("h:1 answered: no leader; too few members"), "{error}");
    }
}
