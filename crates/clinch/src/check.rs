//! What a store says of itself: one thing that was looked at, how it stands, and what to do about it.

use std::borrow::Cow;
#[cfg(any(feature = "etcd", feature = "file", feature = "redis"))]
use std::error::Error as _;
use std::fmt;

#[cfg(any(feature = "etcd", feature = "file", feature = "redis"))]
use crate::error::Error;

/// How one thing stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// As it should be.
    Pass,
    /// Locks work, but less well or less safely than they could.
    Warn,
    /// Locks do not work, or do not exclude.
    Fail,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Pass => "pass",
            Verdict::Warn => "warn",
            Verdict::Fail => "fail",
        })
    }
}

/// One thing of a store that its promises rest on, as [`Locks::examine`](crate::Locks::examine) found it. No part of it holds a
/// secret of the URL.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// What was looked at: one word, always the same.
    pub what: &'static str,
    /// The server that it is about, where there are servers.
    pub at: Option<String>,
    /// How it stands.
    pub verdict: Verdict,
    /// What was seen.
    pub seen: Cow<'static, str>,
    /// What to do about it; of everything that does not pass.
    pub remedy: Option<Cow<'static, str>>,
}

impl Check {
    /// As it should be.
    pub fn pass(what: &'static str, seen: impl Into<Cow<'static, str>>) -> Check {
        Check { what, at: None, verdict: Verdict::Pass, seen: seen.into(), remedy: None }
    }

    /// Could be better.
    pub fn warn(
        what: &'static str,
        seen: impl Into<Cow<'static, str>>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Check {
        Check { verdict: Verdict::Warn, remedy: Some(remedy.into()), ..Check::pass(what, seen) }
    }

    /// Does not work.
    pub fn fail(
        what: &'static str,
        seen: impl Into<Cow<'static, str>>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Check {
        Check { verdict: Verdict::Fail, ..Check::warn(what, seen, remedy) }
    }

    /// What an error tells, with what to do where it does not say that itself.
    #[cfg(any(feature = "etcd", feature = "file", feature = "redis"))]
    pub(crate) fn failed(what: &'static str, error: &Error, otherwise: &'static str) -> Check {
        let mut seen = error.what().to_owned();
        let mut cause = error.source();
        while let Some(error) = cause {
            let text = error.to_string();
            // Most name their cause themselves.
            if !seen.contains(&text) {
                seen += &format!(": {text}");
            }
            cause = error.source();
        }
        let remedy = error.remedy().unwrap_or(otherwise).to_owned();
        Check::fail(what, seen, remedy)
    }

    /// The same, where others do for what fails.
    #[cfg(any(feature = "etcd", feature = "redis"))]
    pub(crate) fn spared(mut self) -> Check {
        self.verdict = self.verdict.min(Verdict::Warn);
        self
    }

    /// The same, about this server.
    pub fn at(mut self, server: impl fmt::Display) -> Check {
        self.at = Some(server.to_string());
        self
    }
}
