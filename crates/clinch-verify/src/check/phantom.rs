//! Phantom: a release says what happened: nothing is released that was not held, and nothing that is held was lost
//! unsaid. A claim that failed does not hold.

use std::collections::HashMap;

use super::hold::Held;
use super::model::{At, Claim, Lock, Model, Release};
use super::report::{Findings, Property};
use crate::event::Kind;

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    let lateness = findings.rules.lateness;
    for (name, lock) in &model.locks {
        let writes = last_accepted(lock);
        let held = Held::of(lock, lateness);
        for claim in lock.claims() {
            for release in &claim.releases {
                judge_release(name, claim, release, &held, findings);
            }
            judge_lost_unsaid(name, claim, findings);
            judge_failed(name, claim, writes.get(claim.id).copied(), findings);
        }
    }
}

/// The last accepted write of each claim: if any came after the claim failed, this one did.
fn last_accepted<'h>(lock: &Lock<'h>) -> HashMap<&'h str, At<'h>> {
    let accepted = lock.writes.iter().filter(|write| write.event.accepted == Some(true));
    accepted.filter_map(|write| Some((write.event.claim.as_deref()?, *write))).collect()
}

fn judge_release<'h>(
    name: &str,
    claim: &Claim<'h>,
    release: &Release<'h>,
    held: &Held<'_, 'h>,
    findings: &mut Findings<'_>,
) {
    let Some(released) = release.ended.filter(|ended| ended.event.kind == Kind::Ok) else { return };
    let lateness = findings.rules.lateness;
    let owned =
        || not_owned(claim, release).or_else(|| owned_by_a_rival(claim, release, released, held, lateness));
    let Some((proof, why)) = owned() else { return };
    findings.add(Property::Phantom, || {
        let text = format!(
            "lock \"{name}\": the release of {claim} at t={} was answered \"released\" although {why}",
            release.begun.event.time
        );
        let mut witness = vec![Some(release.begun), Some(released)];
        witness.extend(proof);
        (text, witness)
    });
}

/// Why a claim surely held nothing when it was released, and the events that prove it.
///
/// A claim that is queued, or whose acquire has no known outcome, may hold without knowing it; releasing it is
/// how a careful client makes sure.
fn not_owned<'h>(claim: &Claim<'h>, release: &Release<'h>) -> Option<(Vec<Option<At<'h>>>, &'static str)> {
    if let Some(lost) = claim.lost.filter(|lost| lost.precedes(&release.begun)) {
        return Some((vec![claim.granted, Some(lost)], "the holder had been told of the loss"));
    }
    let before = claim.releases.iter().find(|other| {
        other.ended.is_some_and(|ended| ended.event.kind == Kind::Ok && ended.precedes(&release.begun))
    });
    if let Some(before) = before {
        let proof = vec![claim.granted, Some(before.begun), before.ended];
        return Some((proof, "it had been released before"));
    }
    if claim.granted.is_some() || claim.unknown.is_some() {
        return None;
    }
    match claim.failed {
        Some(failed) => Some((vec![Some(failed)], "its acquire had failed")),
        None if claim.asked().is_none() && claim.enqueued.is_none() => {
            Some((Vec::new(), "it had never been asked for"))
        }
        None => None,
    }
}

/// A rival that held for as long as the call took, past the deadline of the one that let go.
fn owned_by_a_rival<'h>(
    claim: &Claim<'h>,
    release: &Release<'h>,
    released: At<'h>,
    held: &Held<'_, 'h>,
    lateness: u64,
) -> Option<(Vec<Option<At<'h>>>, &'static str)> {
    // Two that both hold by their own deadlines are a matter of exclusion.
    let hold = claim.hold(lateness).filter(|hold| hold.end < release.begun.earliest())?;
    let (rival, _) = held.rival(claim, release.begun.earliest(), released.latest())?;
    let mut proof = rival.proof(released.latest(), lateness);
    proof.extend([claim.acquire, claim.granted, hold.deadline]);
    Some((proof, "its deadline had passed and another held"))
}

/// The first release of a claim that finds it gone before its deadline, although nobody had told the holder.
fn judge_lost_unsaid(name: &str, claim: &Claim<'_>, findings: &mut Findings<'_>) {
    let lateness = findings.rules.lateness;
    let Some(release) = claim.releases.first().filter(|release| release.is_answered(Kind::Fail)) else {
        return;
    };
    let (Some(hold), Some(answer)) = (claim.hold(lateness), release.ended) else { return };
    // A withdrawal that the grant crossed found nothing to free.
    if hold.start >= release.begun.earliest() {
        return;
    }
    let told = claim.lost.is_some_and(|lost| lost.earliest() <= answer.latest());
    let deadline = hold.deadline.and_then(|at| Some(at.event.deadline?.saturating_sub(at.event.error)));
    let killed = claim.crash.is_some_and(|crash| crash.earliest() <= answer.latest());
    if told || killed || hold.late.is_some() || deadline.is_some_and(|deadline| deadline <= answer.latest()) {
        return;
    }
    findings.add(Property::Phantom, || {
        let text = format!(
            "lock \"{name}\": the release of {claim} at t={} found it lost, although its deadline had not passed and \
             nobody had told",
            release.begun.event.time
        );
        let mut witness = claim.proof(answer.latest(), lateness);
        witness.extend([Some(release.begun), release.ended]);
        (text, witness)
    });
}

fn judge_failed<'h>(name: &str, claim: &Claim<'h>, write: Option<At<'h>>, findings: &mut Findings<'_>) {
    let Some(failed) = claim.failed else { return };
    let signs = [claim.granted, claim.renewed.last().copied(), write];
    let Some(holds) = signs.into_iter().flatten().find(|sign| failed.precedes(sign)) else { return };
    findings.add(Property::Phantom, || {
        let text = format!(
            "lock \"{name}\": the acquire of {claim} failed at t={}, but the claim held at t={}",
            failed.event.time, holds.event.time
        );
        (text, vec![Some(failed), Some(holds)])
    });
}
