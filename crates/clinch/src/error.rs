//! One error type, with a kind that says what the caller may conclude and must do.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
#[cfg(any(feature = "etcd", feature = "redis"))]
use std::io;

use crate::claim::Loss;

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a caller may conclude from an [`Error`], and so what to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The client was closed, or what it was connected to is gone for good; connect again.
    Closed,
    /// A bound was reached: descriptors, queue length, disk space. Free some or raise the bound that the message names.
    Exhausted,
    /// The request itself is wrong; nothing was sent. Change it.
    Invalid,
    /// The lease was lost while it was being used. [`Error::loss`] says why.
    Lost,
    /// The store refused access. Mend permissions or credentials.
    Refused,
    /// The deadline passed before the lock was granted.
    TimedOut,
    /// The store could not be reached; the step was surely not applied.
    Unavailable,
    /// The step may have been applied: its answer did not come. Repeat it: every step is idempotent by claim id.
    Unknown,
    /// This store or platform cannot do what was asked.
    Unsupported,
}

/// What failed, where, and what to do about it.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: Cow<'static, str>,
    /// What to do about it.
    remedy: Option<Cow<'static, str>>,
    loss: Option<Loss>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of this kind; for writers of backends.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Error {
        Error(Box::new(Inner { kind, message: message.into(), remedy: None, loss: None, source: None }))
    }

    /// The same error with its cause.
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        self.0.source = Some(source.into());
        self
    }

    /// The same error with what to do about it, if that is known: told after what failed.
    #[cfg(any(feature = "etcd", feature = "file", feature = "redis"))]
    pub(crate) fn with_remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Error {
        self.0.remedy = Some(remedy.into()).filter(|remedy| !remedy.is_empty());
        self
    }

    /// The same error with where that was.
    #[cfg(feature = "file")]
    pub(crate) fn at(mut self, place: impl fmt::Display) -> Error {
        self.0.message = format!("{place}: {}", self.0.message).into();
        self
    }

    /// What failed, without what to do about it.
    #[cfg(any(feature = "etcd", feature = "file", feature = "redis"))]
    pub(crate) fn what(&self) -> &str {
        &self.0.message
    }

    /// What to do about it, where that is known.
    #[cfg(any(feature = "etcd", feature = "file", feature = "redis"))]
    pub(crate) fn remedy(&self) -> Option<&str> {
        self.0.remedy.as_deref()
    }

    /// What the caller may conclude.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Why the lease was lost, for [`ErrorKind::Lost`].
    pub fn loss(&self) -> Option<&Loss> {
        self.0.loss.as_ref()
    }

    pub(crate) fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(ErrorKind::Invalid, message)
    }

    pub(crate) fn lost(name: &crate::LockName, loss: Loss) -> Error {
        let mut error = Error::new(ErrorKind::Lost, format!("lock \"{name}\" was lost: {loss}"));
        error.0.loss = Some(loss);
        error
    }

    /// The same words for another who waited for the same thing; the cause stays with the first, unless it is the system's.
    #[cfg(any(feature = "etcd", feature = "redis"))]
    pub(crate) fn again(&self) -> Error {
        let mut again = Error::new(self.kind(), self.0.message.clone());
        again.0.remedy = self.0.remedy.clone();
        let cause = self.source().and_then(|cause| cause.downcast_ref::<io::Error>());
        again.0.source =
            cause.and_then(io::Error::raw_os_error).map(|number| io::Error::from_raw_os_error(number).into());
        again
    }

    /// Whether repeating the same step can help without anybody changing anything.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self.kind(), ErrorKind::Unavailable | ErrorKind::Unknown)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.remedy {
            Some(remedy) => write!(f, "{}; {remedy}", self.0.message),
            None => self.0.message.fmt(f),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)?;
        let mut cause = self.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}
