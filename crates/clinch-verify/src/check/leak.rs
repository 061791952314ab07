//! Leak: a lock whose holder is gone is granted to somebody who waits, within TTL and slack.
//!
//! The sweep looks at the times in which a lock can be held by nobody at all, however the unknown outcomes came
//! out, and asks whether a waiter sat through more than the slack of one. It does not judge a lock that is held in
//! part: which waiter of a semaphore is due next, the history does not say.

use std::iter::Peekable;
use std::vec::IntoIter;

use super::model::{At, Claim, Lock, Model, span};
use super::report::{Findings, Property};

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    let Some(end) = model.last else { return };
    for (name, lock) in &model.locks {
        let mut waiters = Waiters::of(lock, end);
        for gap in gaps(lock, end) {
            let slack = findings.rules.slack;
            let Some((waiter, from, until)) = waiters.starved(&gap, slack) else { continue };
            findings.add(Property::Leak, || {
                let claim = waiter.claim;
                let text = format!(
                    "lock \"{name}\": {claim} waited for {} although nobody can have held the lock from t={} on",
                    span(until.saturating_sub(from)),
                    gap.from
                );
                let mut witness = vec![claim.acquire, claim.granted, claim.failed, Some(gap.closed_by)];
                // A waiter that was withdrawn or killed waited until then.
                witness.push(claim.ended().filter(|_| claim.granted.is_none()));
                witness.extend(gap.freed_by);
                (text, witness)
            });
        }
    }
}

/// A time in which the lock may be held.
struct Busy<'h> {
    from: u64,
    opened_by: At<'h>,
    until: u64,
    proof: Vec<Option<At<'h>>>,
}

impl<'h> Busy<'h> {
    /// From a grant to TTL after the last moment at which the holder can have renewed.
    fn held(claim: &Claim<'h>) -> Option<Self> {
        let granted = claim.granted?;
        let deadline = std::iter::once(&granted)
            .chain(claim.renewed.iter().filter(|renewal| renewal.order() > granted.order()))
            .filter_map(|at| Some((at.event.deadline?.saturating_add(at.event.error), *at)))
            .max_by_key(|(until, at)| (*until, std::cmp::Reverse(at.index)));
        let releases = claim.releases.iter().map(|release| release.ended.unwrap_or(release.begun));
        let ends = releases.chain(claim.lost).chain(claim.crash).map(|at| (at.latest(), at));
        let end = ends.chain(deadline).min_by_key(|(until, at)| (*until, at.index));
        Some(Busy {
            from: granted.earliest(),
            opened_by: granted,
            // An end before the grant is a withdrawal that the grant crossed.
            until: end.map_or(u64::MAX, |(until, _)| until.max(granted.latest()).saturating_add(claim.ttl())),
            proof: vec![claim.acquire, Some(granted), end.map(|(_, at)| at)],
        })
    }

    /// From the request to TTL after its outcome was given up on: it may have been granted at any time between.
    fn in_doubt(claim: &Claim<'h>) -> Option<Self> {
        let asked = claim.asked()?;
        let end = match claim.unknown {
            Some(unknown) => unknown,
            None if claim.failed.is_some() => return None,
            // A caller that gave up while it waited withdraws its claim, or was killed.
            None => {
                let release = claim.releases.first().map(|release| release.ended.unwrap_or(release.begun));
                release.or(claim.lost).or(claim.crash)?
            }
        };
        Some(Busy {
            from: asked.earliest(),
            opened_by: asked,
            until: end.latest().saturating_add(claim.ttl()),
            proof: vec![Some(asked), Some(end)],
        })
    }

    /// A queued claim may be granted before its client comes to ask for it, from when on it is a waiter.
    fn queued(claim: &Claim<'h>) -> Option<Self> {
        let enqueue = claim.enqueue.or(claim.enqueued)?;
        let ends = [claim.acquire, claim.granted, claim.failed, claim.unqueued, claim.unknown, claim.ended()];
        let end = ends.into_iter().flatten().min_by_key(At::order);
        // One that asked is a waiter from then on, one that was granted a holder: neither needs the TTL here.
        let goes_on = [claim.acquire, claim.granted].into_iter().flatten();
        let ttl = if goes_on.map(|at| at.index).any(|index| end.is_some_and(|end| end.index == index)) {
            0
        } else {
            claim.ttl()
        };
        Some(Busy {
            from: enqueue.earliest(),
            opened_by: enqueue,
            until: end.map_or(u64::MAX, |at| at.latest().saturating_add(ttl)),
            proof: vec![Some(enqueue), end],
        })
    }
}

/// A time in which surely nobody holds the lock.
struct Gap<'h> {
    from: u64,
    until: u64,
    /// The events of the claim that held last, if any did.
    freed_by: Vec<Option<At<'h>>>,
    closed_by: At<'h>,
}

fn gaps<'h>(lock: &Lock<'h>, end: At<'h>) -> Vec<Gap<'h>> {
    let mut busy: Vec<Busy<'h>> = Vec::new();
    for claim in lock.claims() {
        busy.extend(Busy::queued(claim));
        busy.extend(Busy::held(claim).or_else(|| Busy::in_doubt(claim)));
    }
    busy.sort_by_key(|busy| (busy.from, busy.opened_by.index));
    let mut gaps = Vec::new();
    let mut free = 0;
    let mut freed_by = Vec::new();
    for next in busy {
        if next.from > free {
            let freed_by = std::mem::take(&mut freed_by);
            gaps.push(Gap { from: free, until: next.from, freed_by, closed_by: next.opened_by });
        }
        if next.until > free {
            free = next.until;
            freed_by = next.proof;
        }
    }
    if end.earliest() > free {
        gaps.push(Gap { from: free, until: end.earliest(), freed_by, closed_by: end });
    }
    gaps
}

struct Waiter<'a, 'h> {
    claim: &'a Claim<'h>,
    from: u64,
    until: u64,
}

/// The waiters of a lock, taken in while the sweep moves on.
struct Waiters<'a, 'h> {
    later: Peekable<IntoIter<Waiter<'a, 'h>>>,
    /// Of those taken in, the one that waits longest.
    patient: Option<Waiter<'a, 'h>>,
}

impl<'a, 'h> Waiters<'a, 'h> {
    fn of(lock: &'a Lock<'h>, end: At<'h>) -> Self {
        let mut waiters: Vec<_> = lock
            .claims()
            .into_iter()
            .filter(|claim| claim.granted.is_some() || claim.unknown.is_none())
            .filter_map(|claim| {
                let ends = [claim.granted, claim.failed, claim.ended(), Some(end)];
                let until = ends.into_iter().flatten().map(|at| at.earliest()).min()?;
                Some(Waiter { claim, from: claim.acquire?.latest(), until })
            })
            .collect();
        waiters.sort_by_key(|waiter| waiter.from);
        Waiters { later: waiters.into_iter().peekable(), patient: None }
    }

    /// The first waiter that sat through more than the slack of a gap, and from when until when it did.
    ///
    /// Gaps must come in order. Whoever came before a gap is represented by the one who stayed longest.
    fn starved(&mut self, gap: &Gap<'h>, slack: u64) -> Option<(&Waiter<'a, 'h>, u64, u64)> {
        let mut done = false;
        while !done {
            if let Some(waiter) = &self.patient
                && overlap(waiter, gap) > slack
            {
                break;
            }
            done = match self.later.next_if(|waiter| waiter.from < gap.until) {
                Some(next) => {
                    if self.patient.as_ref().is_none_or(|patient| next.until > patient.until) {
                        self.patient = Some(next);
                    }
                    false
                }
                None => true,
            };
        }
        let waiter = self.patient.as_ref().filter(|waiter| overlap(waiter, gap) > slack)?;
        Some((waiter, waiter.from.max(gap.from), waiter.until.min(gap.until)))
    }
}

fn overlap(waiter: &Waiter<'_, '_>, gap: &Gap<'_>) -> u64 {
    waiter.until.min(gap.until).saturating_sub(waiter.from.max(gap.from))
}
