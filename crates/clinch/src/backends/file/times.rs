//! Every wait, window and number of tries of this store, in one place: some rest on others.

use std::time::Duration;

/// How often a waiter looks although nothing woke it: when an event was lost, or the lock opens by itself.
pub(super) const RECHECK: Duration = Duration::from_secs(1);

/// A waiter that reads so many claims to know that it has to wait leaves out one look; twice as many, two; and so on.
pub(super) const READ_PER_LOOK: usize = 16;

/// How soon a waiter looks again after an event that did not let it in: the event comes just before the lock is free.
pub(super) const RECHECK_AFTER_EVENT: Duration = Duration::from_millis(1);

/// How often a waiter looks where nothing can wake it: the kernel has no watch left (then once for each claim ahead of it), or it has
/// no place to wait at.
pub(super) const RECHECK_UNWATCHED: Duration = Duration::from_millis(20);

/// How long a waiter that looks every [`RECHECK`] may be silent before somebody else looks whether its turn has come.
pub(super) const SILENT: Duration = Duration::from_millis(2500);

/// How often the turn of a silent waiter is looked at.
pub(super) const LOOK_AT_SILENT: Duration = Duration::from_millis(500);

/// How often a client that makes claims looks whether its path still leads to its directory.
pub(super) const LOOK_AT_DIRECTORY: Duration = Duration::from_secs(1);

/// How old a file's last change must be to tell it from a later one: time stamps may be as coarse as the 2 s of vfat.
pub(super) const STAMP_GRAIN: Duration = Duration::from_secs(3);

/// Tries to get the byte that guards the header or a record before giving up: whoever has it needs microseconds, unless
/// it is stopped.
pub(super) const TRIES: u32 = 100;

/// Of these tries, how many only yield.
pub(super) const TRIES_THAT_YIELD: u32 = 90;

/// The sleep between the others; the kernel makes some 70 µs of it.
pub(super) const PAUSE_BETWEEN_TRIES: Duration = Duration::from_micros(20);

/// How long a claim that does not wait is tried while another has the header: that one's fsync may take some time, and until it is done
/// nobody knows whether the lock is taken.
pub(super) const TRY_FOR_A_LOOK: Duration = Duration::from_secs(4);

/// How long what concerns one claim is tried while others have the header or its record.
pub(super) const TRY_FOR: Duration = Duration::from_secs(1);

/// Tries to read a record that is just being rewritten.
pub(super) const TRIES_TO_READ: u32 = 5;

/// How long an eviction lasts whose evictor ended before it could say when it is over: a holder that hears of it ends
/// it, unless it keeps a lease for a shell, which another eviction ends.
pub(super) const SOME_TIME: Duration = Duration::from_secs(600);

/// Times that a claim starts anew because somebody removed the lock file under it.
pub(super) const RESTARTS: u32 = 16;

/// A waiter that is polled is never taken for a silent one, not even when one of its looks is late.
const _: () = assert!(SILENT.as_millis() >= 2 * RECHECK.as_millis());
