//! When a claim surely held: from its grant to the first of release, loss, crash and deadline, less the clock errors.

use super::model::{At, Claim, Lock, Release};
use crate::event::{Kind, Mode};

/// The time in which a claim surely held.
pub(super) struct Hold<'h> {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Where the last deadline that counts comes from: the grant or a renewal.
    pub(super) deadline: Option<At<'h>>,
    /// A renewal that took a new deadline when the old one had passed, after the event with that old one.
    pub(super) late: Option<(At<'h>, At<'h>)>,
}

/// A part of a hold in one mode.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) mode: Mode,
}

/// Whether two claims of these modes cannot hold together, whoever else holds.
pub(super) fn excludes(one: Mode, other: Mode) -> bool {
    match (one, other) {
        (Mode::Shared, Mode::Shared) => false,
        // Those that disagree about the total cannot both be right.
        (Mode::Permits { n, of }, Mode::Permits { n: m, of: total }) => {
            of != total || n.saturating_add(m) > of
        }
        _ => true,
    }
}

impl<'h> Lock<'h> {
    /// What was surely held, claim by claim.
    pub(super) fn parts(&self, lateness: u64) -> Vec<(&Claim<'h>, Part)> {
        let claims = self.claims().into_iter();
        claims.flat_map(|claim| claim.parts(lateness).into_iter().map(move |part| (claim, part))).collect()
    }
}

/// What was surely held of a lock, in the order in which it began.
pub(super) struct Held<'a, 'h> {
    parts: Vec<(&'a Claim<'h>, Part)>,
    /// When the last of the parts up to each one ended.
    ended: Vec<u64>,
}

impl<'a, 'h> Held<'a, 'h> {
    pub(super) fn of(lock: &'a Lock<'h>, lateness: u64) -> Self {
        let mut parts = lock.parts(lateness);
        parts.sort_by_key(|(claim, part)| (part.start, claim.granted.map(|at| at.index)));
        let ends = parts.iter().scan(0, |last, (_, part)| {
            *last = part.end.max(*last);
            Some(*last)
        });
        Held { ended: ends.collect(), parts }
    }

    /// Another claim that excludes this one, and that held since before one instant until after another.
    pub(super) fn rival(&self, claim: &Claim<'h>, before: u64, after: u64) -> Option<(&'a Claim<'h>, Part)> {
        let first = self.ended.partition_point(|end| *end <= after);
        let parts = self.parts.iter().skip(first).take_while(|(_, part)| part.start < before);
        let mut rivals = parts.filter(|(other, part)| {
            (other.process, other.id) != (claim.process, claim.id)
                && part.end > after
                && excludes(claim.mode(), part.mode)
        });
        rivals.next().copied()
    }
}

impl<'h> Claim<'h> {
    /// A renewal moves the deadline if it came in time (within `lateness`): a holder whose deadline has passed
    /// does not hold, and a renewal does not change that.
    pub(super) fn hold(&self, lateness: u64) -> Option<Hold<'h>> {
        let granted = self.granted?;
        let ended = self.ended();
        let mut hold = Hold {
            start: granted.latest(),
            end: ended.map_or(u64::MAX, |at| self.alive_until(&at)),
            deadline: granted.event.deadline.map(|_| granted),
            late: None,
        };
        let renewed = self.renewed.iter().filter(|renewal| renewal.order() > granted.order());
        for renewal in renewed.filter(|renewal| renewal.event.deadline.is_some()) {
            if ended.is_some_and(|end| end.order() < renewal.order()) {
                break;
            }
            match hold.deadline {
                Some(old) if is_late(&old, renewal.earliest(), lateness) => {
                    hold.late = Some((old, *renewal));
                    break;
                }
                _ => hold.deadline = Some(*renewal),
            }
        }
        if let Some(at) = hold.deadline {
            let deadline = at.event.deadline.unwrap_or(u64::MAX);
            hold.end = hold.end.min(deadline.saturating_sub(at.event.error));
        }
        Some(hold)
    }

    /// Until when a claim that was ended by an event surely was not.
    fn alive_until(&self, end: &At<'h>) -> u64 {
        if end.event.kind != Kind::Crash || end.event.from.is_some() {
            return end.earliest();
        }
        self.sign.map_or(end.earliest(), |sign| sign.latest().min(end.earliest()))
    }

    /// The hold in parts of one mode each: alone until a downgrade was asked for, shared from then on; and closed to
    /// everybody for as long as its release asked for.
    pub(super) fn parts(&self, lateness: u64) -> Vec<Part> {
        let Some(hold) = self.hold(lateness) else { return Vec::new() };
        let mut parts = match self.downgrade.filter(|_| !self.refused_to_downgrade()) {
            None => vec![Part { start: hold.start, end: hold.end, mode: self.mode() }],
            Some(at) => vec![
                Part { start: hold.start, end: hold.end.min(at.earliest()), mode: self.mode() },
                Part { start: hold.start.max(at.earliest()), end: hold.end, mode: Mode::Shared },
            ],
        };
        // Behind others, a grant that was answered in this time may have been made before it.
        let alone = self.mode() == Mode::Exclusive && self.downgrade.is_none() && hold.start < hold.end;
        parts.extend(self.closing().filter(|_| alone).map(|release| Part {
            start: release.begun.latest(),
            end: release.begun.earliest().saturating_add(release.linger()),
            mode: Mode::Exclusive,
        }));
        parts.retain(|part| part.start < part.end);
        parts
    }

    /// The hold by the times as they were recorded, as if clocks were exact.
    pub(super) fn told(&self) -> Option<(u64, u64)> {
        let granted = self.granted?;
        let end = self.ended().map_or(u64::MAX, |at| match at.event.kind {
            Kind::Crash => self.alive_until(&at),
            _ => at.event.time,
        });
        Some((granted.event.time, granted.event.deadline.map_or(end, |deadline| end.min(deadline))))
    }

    pub(super) fn refused_to_downgrade(&self) -> bool {
        self.downgraded.is_some_and(|at| at.event.kind == Kind::Fail)
    }

    /// The release that keeps the lock closed.
    fn closing(&self) -> Option<&Release<'h>> {
        self.releases.iter().find(|release| release.linger() > 0 && release.is_answered(Kind::Ok))
    }

    /// The events that prove a hold at an instant: the call, the grant, the renewals without which the deadline
    /// would have passed before, and the end.
    pub(super) fn proof(&self, instant: u64, lateness: u64) -> Vec<Option<At<'h>>> {
        let mut proof = vec![self.acquire, self.granted, self.downgrade, self.downgraded];
        let mut current = self.granted;
        while let Some(at) = current {
            let Some(deadline) = at.event.deadline else { break };
            if deadline.saturating_sub(at.event.error) > instant {
                break;
            }
            // The last renewal that this deadline allows reaches furthest.
            let allowed = self.renewed.partition_point(|renewal| !is_late(&at, renewal.earliest(), lateness));
            current =
                self.renewed.iter().take(allowed).rev().copied().find(|renewal| {
                    renewal.event.deadline > at.event.deadline && renewal.order() > at.order()
                });
            proof.push(current);
        }
        let ended = self.ended();
        proof.push(ended);
        proof.push(self.sign.filter(|_| ended.is_some_and(|end| end.event.kind == Kind::Crash)));
        proof.extend(self.closing().map(|release| release.ended));
        proof.extend(self.closing().map(|release| Some(release.begun)));
        proof
    }
}

/// Whether an instant is past the deadline that an event set.
pub(super) fn is_late(set: &At<'_>, instant: u64, lateness: u64) -> bool {
    set.event.deadline.is_some_and(|deadline| instant > deadline.saturating_add(lateness))
}
