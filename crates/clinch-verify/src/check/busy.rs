//! When a lock may be held, however the unknown outcomes came out, and the gaps in which surely nobody held it.

use std::collections::BTreeSet;

use super::model::{At, Claim, Lock, Release};
use crate::event::{Kind, Mode};

/// A time in which a claim may hold the lock.
pub(super) struct Busy<'h> {
    pub(super) mode: Mode,
    pub(super) from: u64,
    pub(super) opened_by: At<'h>,
    pub(super) until: u64,
    pub(super) proof: Vec<Option<At<'h>>>,
    /// Its acquire has no known outcome.
    pub(super) in_doubt: bool,
}

/// All times in which any claim of a lock may hold it.
pub(super) fn all<'h>(lock: &Lock<'h>) -> Vec<Busy<'h>> {
    let mut all = Vec::new();
    for claim in lock.claims() {
        all.extend(Busy::queued(claim));
        match Busy::held(claim) {
            Some(held) => all.extend(held.downgraded(claim)),
            None => all.extend(Busy::in_doubt(claim)),
        }
    }
    all
}

/// All times in which any claim of a lock may wait to be granted.
pub(super) fn waits<'a, 'h>(lock: &'a Lock<'h>, end: At<'h>) -> Vec<(&'a Claim<'h>, Busy<'h>)> {
    let claims = lock.claims().into_iter();
    claims.filter_map(|claim| Some((claim, Busy::waiting(claim, end)?))).collect()
}

impl<'h> Busy<'h> {
    pub(super) fn load(&self, weight: u64) -> Load<'h> {
        let Busy { from, opened_by, until, .. } = *self;
        Load { from, opened_by, until, proof: self.proof.clone(), weight }
    }

    /// From a grant until its release was answered, or TTL after the last moment at which the holder can have renewed.
    fn held(claim: &Claim<'h>) -> Option<Self> {
        let granted = claim.granted?;
        let deadline = std::iter::once(&granted)
            .chain(claim.renewed.iter().filter(|renewal| renewal.order() > granted.order()))
            .filter_map(|at| Some((at.event.deadline?.saturating_add(at.event.error), *at)))
            .max_by_key(|(until, at)| (*until, std::cmp::Reverse(at.index)))
            .map(|(until, at)| (until.saturating_add(claim.ttl()), at));
        let told = [claim.lost, claim.crash].into_iter().flatten();
        let told = told.map(|at| (at.latest().saturating_add(claim.ttl()), at));
        let released = claim.releases.iter().map(|release| freed(release, claim));
        // An end before the grant is a withdrawal that the grant crossed.
        let crossed = granted.latest().saturating_add(claim.ttl());
        let ends = released.chain(told).chain(deadline);
        let ends = ends
            .map(|(until, at)| (if at.order() < granted.order() { until.max(crossed) } else { until }, at));
        let end = ends.min_by_key(|(until, at)| (*until, at.index));
        // Who keeps a lock without a TTL, however long its process is stopped, may say late that it was granted.
        let opened_by = claim.asked().filter(|_| claim.ttl() == 0).unwrap_or(granted);
        Some(Busy {
            mode: claim.mode(),
            from: opened_by.earliest(),
            opened_by,
            until: end.map_or(u64::MAX, |(until, _)| until.max(granted.latest())),
            proof: vec![claim.acquire, Some(granted), end.map(|(_, at)| at)],
            in_doubt: false,
        })
    }

    /// One that went on as a shared hold is another from when that was answered on.
    fn downgraded(mut self, claim: &Claim<'h>) -> Vec<Self> {
        let answered = claim.downgraded.filter(|at| at.event.kind == Kind::Ok && at.latest() < self.until);
        let Some(answered) = answered else { return vec![self] };
        let shared = Busy {
            mode: Mode::Shared,
            from: answered.latest().max(self.from),
            opened_by: answered,
            until: self.until,
            proof: self.proof.clone(),
            in_doubt: false,
        };
        self.until = shared.from;
        self.proof.extend([claim.downgrade, claim.downgraded]);
        vec![self, shared]
    }

    /// From the request to TTL after its outcome was given up on: it may have been granted at any time between.
    fn in_doubt(claim: &Claim<'h>) -> Option<Self> {
        let asked = claim.asked()?;
        let (until, end) = match claim.unknown {
            Some(unknown) => (unknown.latest().saturating_add(claim.ttl()), unknown),
            None if claim.failed.is_some() => return None,
            // A caller that gave up while it waited withdraws its claim, or was killed.
            None => {
                let release = claim.releases.first().map(|release| freed(release, claim));
                let told = claim.lost.or(claim.crash);
                release.or(told.map(|at| (at.latest().saturating_add(claim.ttl()), at)))?
            }
        };
        Some(Busy {
            mode: claim.mode(),
            from: asked.earliest(),
            opened_by: asked,
            until,
            // What ended its place as well, which would be there for longer.
            proof: vec![Some(asked), Some(end), claim.ended()],
            in_doubt: true,
        })
    }

    /// From the request until it was granted, failed or given up.
    fn waiting(claim: &Claim<'h>, end: At<'h>) -> Option<Self> {
        let asked = claim.acquire?;
        let given_up = [claim.failed, claim.unknown, claim.ended(), Some(end)];
        let given_up = given_up.into_iter().flatten().min_by_key(At::order)?;
        let answer = claim.releases.first().and_then(|release| release.ended);
        Some(Busy {
            mode: claim.mode(),
            from: asked.earliest(),
            opened_by: asked,
            until: claim.granted.unwrap_or(given_up).latest(),
            proof: vec![Some(asked), claim.granted, claim.failed, claim.unknown, answer, Some(given_up)],
            in_doubt: false,
        })
    }

    /// A queued claim may be granted before its client comes to ask for it, from when on it is a waiter; one that never
    /// comes is given up by the store a TTL after its last sign of life.
    fn queued(claim: &Claim<'h>) -> Option<Self> {
        let enqueue = claim.enqueue.or(claim.enqueued)?;
        let ends = [claim.acquire, claim.granted, claim.failed, claim.unqueued, claim.unknown, claim.ended()];
        let end = ends.into_iter().flatten().min_by_key(At::order);
        // One that asked is a waiter from then on, one that was granted a holder: neither needs the TTL here.
        let mut goes_on = [claim.acquire, claim.granted].into_iter().flatten().map(|at| at.index);
        let signs = [Some(enqueue), claim.enqueued, claim.renewed.last().copied()];
        let until = match end {
            Some(end) if goes_on.any(|index| index == end.index) => end.latest(),
            Some(end) => end.latest().saturating_add(claim.ttl()),
            None if claim.ttl() == 0 => u64::MAX,
            None => {
                let sign = signs.into_iter().flatten().map(|at| at.latest()).max();
                sign.unwrap_or(0).saturating_add(claim.ttl())
            }
        };
        Some(Busy {
            mode: claim.mode(),
            from: enqueue.earliest(),
            opened_by: enqueue,
            until,
            proof: signs.into_iter().chain([end]).collect(),
            in_doubt: false,
        })
    }
}

/// Until when a lock may stay held after a release, and the event that says so: an answered one frees it at once, but
/// for the time that it asked for.
fn freed<'h>(release: &Release<'h>, claim: &Claim<'h>) -> (u64, At<'h>) {
    match release.ended.filter(|ended| ended.event.kind != Kind::Unknown) {
        Some(ended) => (ended.latest().saturating_add(release.linger()), ended),
        None => {
            let at = release.ended.unwrap_or(release.begun);
            (at.latest().saturating_add(claim.ttl().max(release.linger())), at)
        }
    }
}

/// Something that takes room in a lock for a time.
pub(super) struct Load<'h> {
    pub(super) from: u64,
    pub(super) opened_by: At<'h>,
    pub(super) until: u64,
    pub(super) proof: Vec<Option<At<'h>>>,
    pub(super) weight: u64,
}

/// A time in which no more than the room is taken.
pub(super) struct Gap<'h> {
    pub(super) from: u64,
    pub(super) until: u64,
    /// The events of the load that went last, if any did.
    pub(super) freed_by: Vec<Option<At<'h>>>,
    pub(super) closed_by: At<'h>,
}

/// The gaps between loads, by time, until the end of the history.
pub(super) fn gaps<'h>(loads: &[Load<'h>], room: u64, end: At<'h>) -> Vec<Gap<'h>> {
    // Of one instant, what ends comes before what begins.
    let mut points = BTreeSet::new();
    for (number, load) in
        loads.iter().enumerate().filter(|(_, load)| load.weight > 0 && load.from < load.until)
    {
        points.insert((load.until, false, load.opened_by.index, number));
        points.insert((load.from, true, load.opened_by.index, number));
    }
    let (mut taken, mut gaps, mut free) = (0_u64, Vec::new(), Some((0, Vec::new())));
    for (time, begins, _, number) in points {
        let Some(load) = loads.get(number) else { continue };
        taken = if begins { taken.saturating_add(load.weight) } else { taken.saturating_sub(load.weight) };
        if taken <= room {
            free = free.or_else(|| Some((time, load.proof.clone())));
        } else if let Some((from, freed_by)) = free.take()
            && from < time
        {
            gaps.push(Gap { from, until: time, freed_by, closed_by: load.opened_by });
        }
    }
    if let Some((from, freed_by)) = free.filter(|(from, _)| *from < end.earliest()) {
        gaps.push(Gap { from, until: end.earliest(), freed_by, closed_by: end });
    }
    gaps
}
