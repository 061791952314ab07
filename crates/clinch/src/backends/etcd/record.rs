//! What stands in a claim's key, for people and for `clinch ls`: one JSON object.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::wire::KeyValue;
use crate::backend::ClaimState;
use crate::claim::{Claim, ClaimId, Mode, Owner};
use crate::error::{Error, Result};
use crate::token::Token;

/// How far the wall clocks of two hosts may be apart, where nothing else says when a lock opens.
const APART: Duration = Duration::from_secs(60);

/// What etcd tells of the time that is left of a lease may be less than is left by this.
const ROUNDED: Duration = Duration::from_secs(1);

/// What stands in the place of a claimant who is no client of ours.
const FOREIGN: &str = "another program";

/// A claim's record.
#[derive(Serialize, Deserialize)]
struct Record {
    claim: String,
    mode: String,
    since: String,
    #[serde(flatten)]
    owner: Owner,
    /// On a key that nobody holds but that keeps the lock closed: for how many milliseconds, from when it was written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    closed_ms: Option<u64>,
    /// And the term in which that was: in any other, its lease was begun anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    term: Option<u64>,
    /// Whether it is closed because the claim was evicted: until then, its holder may hear of it and release it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    evicted: bool,
}

/// A claim as it stands in the queue.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) key: Vec<u8>,
    pub(super) created: i64,
    /// At which revision the key was last written.
    pub(super) modified: i64,
    pub(super) lease: i64,
    pub(super) standing: Standing,
}

/// What a key in a queue means.
#[derive(Clone, Debug)]
pub(super) enum Standing {
    /// Nobody's: the lock is kept closed for this long from when the key was last written, to all, or after an eviction
    /// to those who could not hold it beside the evicted claim.
    Closed { evicted: Option<(ClaimId, Mode)>, time: Duration, since: SystemTime, term: Option<u64> },
    /// A claim of another program's, which is exclusive.
    Foreign,
    /// A claim of ours.
    Ours { id: ClaimId, mode: Mode, owner: Owner, since: SystemTime },
}

/// The record of a claim that is made now.
pub(super) fn of(claim: &Claim, mode: Mode, now: SystemTime) -> Result<Vec<u8>> {
    text(&Record {
        claim: claim.id.to_string(),
        mode: mode.to_string(),
        since: humantime::format_rfc3339_micros(now).to_string(),
        owner: (*claim.owner).clone(),
        closed_ms: None,
        term: None,
        evicted: false,
    })
}

/// The record of a lock that is closed from now on, in this term.
pub(super) fn closed(claim: &Claim, time: Duration, term: u64, now: SystemTime) -> Result<Vec<u8>> {
    text(&Record {
        claim: claim.id.to_string(),
        mode: claim.mode.to_string(),
        since: humantime::format_rfc3339_micros(now).to_string(),
        owner: (*claim.owner).clone(),
        closed_ms: Some(whole_ms(time)),
        term: Some(term),
        evicted: false,
    })
}

/// The record of a claim that is evicted now, which keeps what it held closed for this long; `None` for what is no claim.
pub(super) fn evicted(place: &Place, time: Duration, now: SystemTime) -> Result<Option<Vec<u8>>> {
    let Standing::Ours { id, mode, owner, .. } = &place.standing else { return Ok(None) };
    let record = Record {
        claim: id.to_string(),
        mode: mode.to_string(),
        since: humantime::format_rfc3339_micros(now).to_string(),
        owner: owner.clone(),
        closed_ms: Some(whole_ms(time)),
        term: None,
        evicted: true,
    };
    text(&record).map(Some)
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis().saturating_add(1)).unwrap_or(u64::MAX)
}

fn text(record: &Record) -> Result<Vec<u8>> {
    serde_json::to_vec(record)
        .map_err(|error| Error::invalid("the owner cannot be written as text").with_source(error))
}

impl Place {
    /// Reads a key of a queue. What cannot be read as ours is another program's.
    pub(super) fn read(kv: &KeyValue) -> Place {
        let standing = ours(kv).unwrap_or(Standing::Foreign);
        let (created, modified) = (kv.create_revision, kv.mod_revision);
        Place { key: kv.key.clone(), created, modified, lease: kv.lease, standing }
    }

    /// Whether it is a claim of ours with this id, held or queued.
    pub(super) fn is(&self, claim: ClaimId) -> bool {
        matches!(self.standing, Standing::Ours { id, .. } if id == claim)
    }

    /// Whether it is what an eviction of this claim left.
    pub(super) fn is_evicted(&self, claim: ClaimId) -> bool {
        matches!(self.standing, Standing::Closed { evicted: Some((id, _)), .. } if id == claim)
    }

    /// Whether nobody holds it, and it keeps the lock closed.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.standing, Standing::Closed { .. })
    }

    /// Whether it is the same claim as another, as far as those behind it are concerned.
    pub(super) fn is_same_claim(&self, other: &Place) -> bool {
        self.mode() == other.mode() && !self.is_closed() && !other.is_closed()
    }

    /// From when on whoever comes opens the lock, where its claim was released: its lease counts that, but each election begins all leases
    /// anew, and then wall clocks are what is left. `None`: its lease is right, or it is an evicted holder's notice, which no wall
    /// clock may end.
    pub(super) fn overdue_from(&self, term: u64) -> Option<SystemTime> {
        match self.standing {
            Standing::Closed { evicted: None, time, since, term: Some(closed) } if closed != term => {
                Some(since + time + APART)
            }
            _ => None,
        }
    }

    /// Until when it keeps the lock closed, of whose lease so much is left; never a time that is past.
    pub(super) fn closed_until(
        &self,
        left: Option<Duration>,
        term: u64,
        now: SystemTime,
    ) -> Option<SystemTime> {
        let Standing::Closed { time, since, .. } = self.standing else { return None };
        let (told, is_over) = (since + time, left.map_or(now, |left| now + left + ROUNDED));
        match self.overdue_from(term) {
            _ if told > now => Some(told.min(is_over)),
            Some(overdue) => (overdue > now).then_some(overdue.min(is_over)),
            None => Some(is_over),
        }
    }

    /// How much of the lock it asks for.
    pub(super) fn mode(&self) -> Mode {
        match &self.standing {
            Standing::Ours { mode, .. } | Standing::Closed { evicted: Some((_, mode)), .. } => *mode,
            Standing::Foreign | Standing::Closed { evicted: None, .. } => Mode::Exclusive,
        }
    }

    /// Its id: a foreign one's is the revision that created it, which names it as long as it lives.
    pub(super) fn id(&self) -> ClaimId {
        match &self.standing {
            Standing::Ours { id, .. } => *id,
            Standing::Foreign | Standing::Closed { .. } => {
                ClaimId::from_bits(u128::from(self.created.unsigned_abs()))
            }
        }
    }

    pub(super) fn token(&self) -> Option<Token> {
        u64::try_from(self.created).ok().and_then(Token::new)
    }

    /// As others see it; `None` for what keeps a lock closed.
    pub(super) fn state(&self, granted: bool, expires_in: Option<Duration>) -> Option<ClaimState> {
        let (owner, since) = match &self.standing {
            Standing::Closed { .. } => return None,
            Standing::Ours { owner, since, .. } => (owner.clone(), *since),
            Standing::Foreign => {
                let (host, user) = (FOREIGN.to_owned(), String::new());
                (Owner { host, pid: 0, user, label: String::new() }, SystemTime::UNIX_EPOCH)
            }
        };
        let (id, mode, token) = (self.id(), self.mode(), self.token());
        Some(ClaimState { id, mode, granted, token, owner, since, expires_in })
    }
}

fn ours(kv: &KeyValue) -> Option<Standing> {
    let record: Record = serde_json::from_slice(&kv.value).ok()?;
    let id = record.claim.parse().ok()?;
    let since = humantime::parse_rfc3339(&record.since).ok()?;
    let mode = record.mode.parse().ok()?;
    let Some(time) = record.closed_ms else {
        return Some(Standing::Ours { id, mode, owner: record.owner, since });
    };
    let evicted = record.evicted.then_some((id, mode));
    Some(Standing::Closed { evicted, time: Duration::from_millis(time), since, term: record.term })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::name::LockName;

    fn kv(key: &str, value: &[u8]) -> KeyValue {
        let (key, value) = (key.as_bytes().to_vec(), value.to_vec());
        KeyValue { key, value, create_revision: 9, ..KeyValue::default() }
    }

    fn claim() -> Claim {
        Claim {
            id: ClaimId::from_bits(3),
            name: LockName::new("n").unwrap(),
            mode: "2 of 5".parse().unwrap(),
            ttl: Duration::from_secs(1),
            enqueue: true,
            place: false,
            isolated: false,
            owner: Arc::new(Owner { host: "h".into(), pid: 7, user: "me".into(), label: "a \"b\"".into() }),
        }
    }

    #[test]
    fn a_record_reads_back_and_a_person_can_read_it() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_micros(1_700_000_000_000_001);
        let value = of(&claim(), claim().mode, now).unwrap();
        let text = std::str::from_utf8(&value).unwrap();
        assert!(text.contains("\"2 of 5\"") && text.contains("2023-11-14T22:13:20.000001Z"), "{text}");
        let key = "/clinch/n/1f-0".to_owned();
        let state = Place::read(&kv(&key, &value)).state(true, None).unwrap();
        assert_eq!((state.id, state.mode, state.since), (claim().id, claim().mode, now));
        assert_eq!((state.token.unwrap().get(), state.owner), (9, (*claim().owner).clone()));
        let value = closed(&claim(), Duration::from_millis(400), 7, now).unwrap();
        let place = Place::read(&kv(&key, &value));
        assert!(
            matches!(place.standing, Standing::Closed { time, .. } if time >= Duration::from_millis(400))
        );
        assert!(place.state(false, None).is_none());
    }

    #[test]
    fn what_others_write_is_an_exclusive_claim_of_a_stranger() {
        let own = "/clinch/n/1f-0".to_owned();
        for (key, value) in [("/clinch/n/694d81", &b""[..]), (&own, b""), (&own, b"{}"), (&own, b"\xff")] {
            let state = Place::read(&kv(key, value)).state(true, None).unwrap();
            assert_eq!((state.owner.host.as_str(), state.owner.pid), ("another program", 0));
            assert_eq!((state.mode, state.id), (Mode::Exclusive, ClaimId::from_bits(9)));
        }
    }
}
