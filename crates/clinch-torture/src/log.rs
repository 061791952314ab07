//! What a worker and its nemesis write down: calls for the judge, and remarks of which step was under way when, for the count of
//! what met.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use clinch::{ClaimId, LossKind};
use clinch_verify::{Call, ClaimRecorder, Event, Kind, Mode, Recorder};

use crate::cells::Step;
use crate::say::now;

/// Begins the remark of a step.
const STEP: &str = "step ";

/// Begins the remark of a claim that was taken from its holder.
const DELETED: &str = "deleted ";

/// Begins the remark of a lease that was to be renewed and ran out, before its TTL in milliseconds.
const EXPIRED: &str = "expired ";

/// Begins the id of what stands for an eviction, before the claim that was evicted.
const EVICTION: &str = "eviction of ";

/// The history of a round, as one process adds to it.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    recorder: Recorder,
    process: String,
    /// What the names of a round's locks begin with.
    prefix: String,
}

impl Log {
    pub(crate) fn open(history: &Path, process: &str, prefix: &str) -> std::io::Result<Log> {
        let recorder = Recorder::file(history)?;
        Ok(Log { recorder, process: process.to_owned(), prefix: prefix.to_owned() })
    }

    /// The whole name of a lock of this round.
    pub(crate) fn lock_name(&self, lock: &str) -> String {
        format!("{}{lock}", self.prefix)
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A new claim on a lock; without a TTL it ends with its process.
    pub(crate) fn claim(&self, lock: &str, id: &str, mode: Mode, ttl: Option<Duration>) -> ClaimRecorder {
        let claim = self.recorder.claim(&self.process, lock, id, mode);
        match ttl {
            Some(ttl) => claim.ttl_ms(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)),
            None => claim,
        }
    }

    /// Notes that a process was killed between two moments.
    pub(crate) fn crash(&self, process: &str, before: u64, after: u64) {
        self.recorder.crash(process, before, after);
    }

    /// Notes that a process was seen to be gone; it may have been since it last wrote something.
    pub(crate) fn gone(&self, process: &str, at: u64) {
        self.recorder.record(Event { process: Some(process.to_owned()), ..Event::new(Kind::Crash, at) });
    }

    pub(crate) fn note(&self, text: &str, at: u64) {
        self.recorder.note(text, at);
    }

    /// Notes when a step was under way.
    pub(crate) fn step(&self, step: Step, begun: u64, ended: u64) {
        self.note(&format!("{STEP}{step} {begun}"), ended);
    }

    /// Notes a loss, where it is one that needs a reason: that the store has not the claim any more, although its time is not up.
    pub(crate) fn lost(&self, kind: LossKind, claim: Option<ClaimId>) {
        if let Some(claim) = claim.filter(|_| kind == LossKind::Deleted) {
            self.note(&format!("{DELETED}{claim}"), now());
        }
    }

    /// Notes that a lease ran out though its process went on.
    pub(crate) fn expired(&self, ttl: Duration) {
        self.note(&format!("{EXPIRED}{}", ttl.as_millis()), now());
    }

    /// Notes that somebody is about to take a claim away. The lock may be closed for a time then, which is told as a claim of which
    /// nobody knows whether it is granted.
    pub(crate) fn eviction(&self, lock: &str, claim: ClaimId, closed: Duration) -> Call {
        self.claim(lock, &format!("{EVICTION}{claim} at {}", now()), Mode::Exclusive, Some(closed))
            .acquire(now())
    }

    /// Whether all of it reached the file.
    pub(crate) fn written(&self) -> std::io::Result<()> {
        self.recorder.written()
    }
}

/// The claims that their holders were told to be gone, although nobody took them away.
pub(crate) fn lost_for_no_reason(events: &[Event]) -> Vec<&str> {
    let evicted =
        events.iter().filter_map(|event| event.claim.as_deref()?.strip_prefix(EVICTION)?.split(' ').next());
    let evicted: HashSet<&str> = evicted.collect();
    let deleted = events.iter().filter_map(|event| event.text.as_deref()?.strip_prefix(DELETED));
    deleted.filter(|claim| !evicted.contains(claim)).collect()
}

/// When a lease ran out that was to be renewed, and its TTL in nanoseconds.
pub(crate) fn expired(event: &Event) -> Option<(u64, u64)> {
    let ms: u64 = event.text.as_deref()?.strip_prefix(EXPIRED)?.parse().ok()?;
    Some((event.time, ms * 1_000_000))
}

/// The step that a remark is of, with when it was begun and ended.
pub(crate) fn step_of(event: &Event) -> Option<(Step, u64, u64)> {
    let text = event.text.as_deref().filter(|_| event.kind == Kind::Note)?;
    let (step, begun) = text.strip_prefix(STEP)?.split_once(' ')?;
    Some((Step::from_word(step)?, begun.parse().ok()?, event.time))
}

#[cfg(test)]
mod tests {
    use clinch_verify::History;

    use super::*;

    #[test]
    fn a_step_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let log = Log::open(&path, "w1", "torture/1/").unwrap();
        log.step(Step::Tend, 7, 9);
        log.note("a remark", 10);
        let history = History::read(std::fs::File::open(path).unwrap()).unwrap();
        let steps: Vec<_> = history.events().iter().filter_map(step_of).collect();
        assert_eq!(steps, [(Step::Tend, 7, 9)]);
    }

    #[test]
    fn who_was_evicted_has_a_reason_to_lose() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let log = Log::open(&path, "w1", "torture/1/").unwrap();
        let (evicted, other, expired) = (ClaimId::from_bits(1), ClaimId::from_bits(2), ClaimId::from_bits(3));
        drop(log.eviction("a", evicted, Duration::from_secs(1)));
        log.lost(LossKind::Deleted, Some(evicted));
        log.lost(LossKind::Deleted, Some(other));
        log.lost(LossKind::Expired, Some(expired));
        let history = History::read(std::fs::File::open(path).unwrap()).unwrap();
        assert_eq!(lost_for_no_reason(history.events()), [other.to_string()]);
    }
}
