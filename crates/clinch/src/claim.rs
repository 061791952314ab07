//! What is asked of a store and what it says of others: claims, modes, owners, losses. Plain values.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::name::LockName;

/// Identifies one attempt to hold a lock: 128 random bits, fresh for every attempt.
///
/// Whoever knows it can renew or release the claim, so treat it like a password of one lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(u128);

impl ClaimId {
    /// The id with these bits.
    pub const fn from_bits(bits: u128) -> ClaimId {
        ClaimId(bits)
    }

    /// The 128 bits.
    pub const fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Shows the first half only: enough to tell claims apart in a log, not enough to release one.
impl fmt::Debug for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClaimId({:016x}..)", (self.0 >> 64) as u64)
    }
}

impl FromStr for ClaimId {
    type Err = Error;

    fn from_str(text: &str) -> Result<ClaimId> {
        let hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match u128::from_str_radix(text, 16) {
            Ok(bits) if hex => Ok(ClaimId(bits)),
            // What stands there instead may be a secret.
            _ if text.contains("://") => {
                Err(Error::invalid("a claim id is 32 hexadecimal digits, and no URL"))
            }
            _ => Err(Error::invalid(format!("a claim id is 32 hexadecimal digits; \"{text}\" is not"))),
        }
    }
}

/// What is known of claims, by their ids.
pub(crate) type ByClaim<V> = HashMap<ClaimId, V, BuildHasherDefault<Bits>>;

/// The hash of an id is its bits: they are random already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bits(u64);

impl Hasher for Bits {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u128(&mut self, bits: u128) {
        self.0 ^= (bits >> 64) as u64 ^ bits as u64;
    }
}

/// How much of a lock a claim asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// All of it.
    Exclusive,
    /// One of `capacity` equal parts, `count` times over: a semaphore.
    Permits {
        /// How many permits the claim takes, from 1 to `capacity`.
        count: NonZeroU32,
        /// How many there are. All claims on one name must agree about it.
        capacity: NonZeroU32,
    },
    /// One of any number of readers.
    Shared,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Exclusive => f.write_str("exclusive"),
            Mode::Shared => f.write_str("shared"),
            Mode::Permits { count, capacity } => write!(f, "{count} of {capacity}"),
        }
    }
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Mode> {
        let permits = || {
            let (count, capacity) = text.split_once(" of ")?;
            Some(Mode::Permits { count: count.parse().ok()?, capacity: capacity.parse().ok()? })
        };
        match text {
            "exclusive" => Ok(Mode::Exclusive),
            "shared" => Ok(Mode::Shared),
            _ => permits().ok_or_else(|| Error::invalid(format!("\"{text}\" is not a lock mode"))),
        }
    }
}

/// Who made a claim, for people: written to the store, shown by `clinch ls` and in errors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The host's name.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// The user, by name where it is known.
    pub user: String,
    /// What the owner says it is doing; at most [`Owner::MAX_LABEL`] bytes. Empty when it says nothing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
}

impl Owner {
    /// The longest label, in bytes.
    pub const MAX_LABEL: usize = 128;

    /// This process, without a label.
    pub fn of_this_process() -> Owner {
        let text = |text: &str, max: usize| -> String {
            let clean = text.chars().filter(|c| !c.is_control());
            clean
                .scan(0, |len, c| {
                    *len += c.len_utf8();
                    (*len <= max).then_some(c)
                })
                .collect()
        };
        // What the environment says may be of whoever started this by su or sudo.
        let uid = nix::unistd::geteuid();
        let user = nix::unistd::User::from_uid(uid).ok().flatten();
        let user = user.map_or_else(|| format!("uid {uid}"), |user| user.name);
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Owner { host: text(&host, 64), pid: std::process::id(), user: text(&user, 32), label: String::new() }
    }
}

/// One attempt to hold a lock.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Its id. Every step of a claim is idempotent by it.
    pub id: ClaimId,
    /// The lock.
    pub name: LockName,
    /// How much of it.
    pub mode: Mode,
    /// How long a grant, or a place in the queue, lives without a renewal.
    pub ttl: Duration,
    /// Whether a claim that cannot be granted at once takes a place in the queue.
    pub enqueue: bool,
    /// Whether a renewal is meant for its place in the queue alone: a grant that came meanwhile, and that nobody has taken,
    /// keeps the end that it has, so that it goes on to the next if nobody ever takes it.
    pub place: bool,
    /// Whether its lease shall end for itself, where a store would let one lease carry many claims.
    pub isolated: bool,
    /// Who asks.
    pub owner: Arc<Owner>,
}

/// Why a lease was lost. A loss never un-happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// What happened.
    pub kind: LossKind,
    /// How that was noticed, for people.
    pub detail: Cow<'static, str>,
}

/// What happened to a lost lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossKind {
    /// Somebody removed it from the store: an operator, or the store forgot it.
    Deleted,
    /// Its time ran out: no renewal was confirmed in time.
    Expired,
    /// It was held for as long as it may be: [`Locks::max_hold`](crate::Locks::max_hold).
    HeldTooLong,
    /// The session that carried it ended.
    SessionEnded,
    /// The store gave an answer that neither proves nor disproves it.
    Unverifiable,
}

impl Loss {
    /// A loss with what is known about it; for writers of backends.
    pub fn new(kind: LossKind, detail: impl Into<Cow<'static, str>>) -> Loss {
        Loss { kind, detail: detail.into() }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            LossKind::Deleted => "deleted",
            LossKind::Expired => "expired",
            LossKind::HeldTooLong => "held too long",
            LossKind::SessionEnded => "session ended",
            LossKind::Unverifiable => "unverifiable",
        };
        write!(f, "{kind} ({})", self.detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_id_reads_back_and_hides_half_of_itself_in_logs() {
        let id = ClaimId::from_bits(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        assert_eq!(id.to_string().parse::<ClaimId>().unwrap(), id);
        assert!(!format!("{id:?}").contains("4455"));
        for bad in ["", "12", "+123456789abcdef00112233445566778", &"g".repeat(32)] {
            assert!(bad.parse::<ClaimId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_mode_reads_back() {
        let permits = Mode::Permits { count: NonZeroU32::MIN, capacity: NonZeroU32::new(7).unwrap() };
        for mode in [Mode::Exclusive, Mode::Shared, permits] {
            assert_eq!(mode.to_string().parse::<Mode>().unwrap(), mode);
        }
        assert!("0 of 3".parse::<Mode>().is_err());
    }
}
