//! Which process something belongs to.
//!
//! A forked child has what its parent had in memory, but none of its threads: nobody there renews, wakes or tells anything, and
//! a mutex that another thread held at that moment stays locked for ever. So whatever may be met in a child asks first.

use crate::error::{Error, ErrorKind, Result};

const FORKED: &str =
    "this client or its Env belongs to the process that this one was forked from; connect again";

/// The process that made something, by its number alone: a child that is PID 1 of a PID namespace of its own, forked by a PID 1,
/// is taken for its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn this() -> Process {
        Process(std::process::id())
    }

    /// Whether this is a forked child of it.
    pub(crate) fn is_left(self) -> bool {
        self != Process::this()
    }

    /// Refuses everything in a forked child.
    pub(crate) fn check(self) -> Result<()> {
        if self.is_left() { Err(Error::new(ErrorKind::Closed, FORKED)) } else { Ok(()) }
    }
}
