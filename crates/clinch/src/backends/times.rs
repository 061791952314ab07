//! Times that mean the same on every store with a server.

use std::time::Duration;

/// For how long a waiter trusts that changes are told before it asks on its own.
pub(super) const GUARD: Duration = Duration::from_secs(30);

/// How often a connection is looked at. One from which nothing came between two looks, though it was asked, is ended: so a server
/// that hangs fails its commands after one to two of these. No timer per command.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);
