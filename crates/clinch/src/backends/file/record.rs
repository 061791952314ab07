//! The record of a claim in a lock file. Pure: bytes in, values out.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::layout::{RECORD_LEN, millis};
use crate::backend::ClaimState;
use crate::claim::{Claim, ClaimId, Mode, Owner};
use crate::clock::Instant;
use crate::token::Token;

/// What a claim says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) ticket: u64,
    #[serde(with = "text")]
    claim: ClaimId,
    #[serde(with = "text")]
    mode: Mode,
    /// Since when it is granted, or queued: milliseconds of the wall clock.
    since: u64,
    /// Not granted yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    waiting: bool,
    /// When the holder will let go unless this is moved: nanoseconds after boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) until: Option<u64>,
    /// Somebody else has ended the claim; its byte does not count from then on: nanoseconds after boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ends: Option<u64>,
    /// Its holder has heard of that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    told: bool,
    owner: Arc<Owner>,
}

/// Values that stand in a record as the text that people see elsewhere too.
mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(value: &impl Display, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn deserialize<'a, T: FromStr<Err: Display>, D: Deserializer<'a>>(
        from: D,
    ) -> Result<T, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl Record {
    pub(super) fn new(claim: &Claim, ticket: u64, granted: bool, wall: SystemTime) -> Record {
        Record {
            ticket,
            claim: claim.id,
            mode: claim.mode,
            since: millis(wall),
            waiting: !granted,
            until: None,
            ends: None,
            told: false,
            owner: claim.owner.clone(),
        }
    }

    /// Writes the record as a line; `None` when it is too long for its place.
    pub(super) fn write(&self, bytes: &mut Vec<u8>) -> Option<()> {
        let start = bytes.len();
        serde_json::to_writer(&mut *bytes, self).ok()?;
        bytes.push(b'\n');
        (bytes.len() - start <= RECORD_LEN).then_some(())
    }

    /// Reads the record at the start of these bytes; what follows its line is left over from an older one.
    pub(super) fn parse(bytes: &[u8]) -> Option<Record> {
        let end = bytes.iter().position(|byte| *byte == b'\n')?;
        serde_json::from_slice(bytes.get(..end)?).ok()
    }

    /// Whether what stands here begins as the record of this ticket does.
    pub(super) fn begins(bytes: &[u8], ticket: u64) -> bool {
        bytes.starts_with(format!("{{\"ticket\":{ticket},").as_bytes())
    }

    pub(super) fn is(&self, id: ClaimId) -> bool {
        self.claim == id
    }

    /// Whether it is of this claim, and nobody has ended that.
    pub(super) fn is_of(&self, id: ClaimId) -> bool {
        self.is(id) && !self.is_ending()
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether its owner has not seen it granted yet.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting
    }

    /// Ends it at this moment, if it does not end before.
    pub(super) fn end(&mut self, at: Instant) {
        self.ends = Some(self.ends.map_or(at.as_nanos(), |ends| ends.min(at.as_nanos())));
    }

    /// Whether somebody else has ended it, now or soon.
    pub(super) fn is_ending(&self) -> bool {
        self.ends.is_some()
    }

    /// Whether its byte does not count any more.
    pub(super) fn has_ended(&self, now: Instant) -> bool {
        self.ends.is_some_and(|ends| ends <= now.as_nanos())
    }

    /// Whether the time has passed at which its holder lets go.
    pub(super) fn has_run_out(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now.as_nanos())
    }

    /// The process that holds it for as long as it likes, since nobody gave it an end.
    pub(super) fn kept_by(&self) -> Option<u32> {
        self.until.is_none().then_some(self.owner.pid)
    }

    /// The same, where it is another than the one that `asks`, or only waits: it would keep to no end. In a container each is
    /// number 1, but of a host of its own, as the store's documentation asks for.
    pub(super) fn is_kept_otherwise(&self, asks: &Claim) -> Option<u32> {
        let own = (&self.owner.host, self.owner.pid) == (&asks.owner.host, asks.owner.pid);
        self.kept_by().filter(|_| !own || self.waiting)
    }

    /// Whether its holder knows that it is ending.
    pub(super) fn was_told(&self) -> bool {
        self.told
    }

    pub(super) fn set_told(&mut self) {
        self.told = true;
    }

    pub(super) fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    pub(super) fn set_granted(&mut self, wall: SystemTime) {
        (self.waiting, self.since) = (false, millis(wall));
    }

    pub(super) fn state(&self, now: Instant) -> ClaimState {
        let end = self.until.into_iter().chain(self.ends).min();
        ClaimState {
            id: self.claim,
            mode: self.mode,
            granted: !self.waiting,
            token: Token::new(self.ticket),
            owner: (*self.owner).clone(),
            since: SystemTime::UNIX_EPOCH + Duration::from_millis(self.since),
            expires_in: end.map(|end| Instant::from_nanos(end).since(now)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::LockName;

    #[test]
    fn the_longest_record_fits_its_place() {
        let owner =
            Owner { host: "\"".repeat(64), pid: u32::MAX, user: "\\".repeat(32), label: "\"".repeat(128) };
        let claim = Claim {
            id: ClaimId::from_bits(u128::MAX),
            name: LockName::new("n").unwrap(),
            mode: "4294967295 of 4294967295".parse().unwrap(),
            ttl: Duration::from_secs(1),
            enqueue: true,
            place: false,
            isolated: false,
            owner: Arc::new(owner),
        };
        let mut record = Record::new(&claim, Token::MAX.get(), false, SystemTime::now());
        (record.until, record.ends, record.told) = (Some(u64::MAX), Some(u64::MAX), true);
        let mut line = Vec::new();
        record.write(&mut line).unwrap();
        line.extend_from_slice(b"rest of an older record\n");
        assert_eq!(Record::parse(&line), Some(record.clone()));
        assert!(record.is(claim.id) && !record.is(ClaimId::from_bits(1)));
    }
}
