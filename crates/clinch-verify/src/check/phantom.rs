//! Phantom: nothing is released that was not held, and a claim that failed does not hold.

use std::collections::HashMap;

use super::model::{At, Claim, Lock, Model, Release};
use super::report::{Findings, Property};
use crate::event::Kind;

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    for (name, lock) in &model.locks {
        let writes = last_accepted(lock);
        for claim in lock.claims() {
            for release in &claim.releases {
                judge_release(name, claim, release, findings);
            }
            judge_failed(name, claim, writes.get(claim.id).copied(), findings);
        }
    }
}

/// The last accepted write of each claim: if any came after the claim failed, this one did.
fn last_accepted<'h>(lock: &Lock<'h>) -> HashMap<&'h str, At<'h>> {
    let accepted = lock.writes.iter().filter(|write| write.event.accepted == Some(true));
    accepted.filter_map(|write| Some((write.event.claim.as_deref()?, *write))).collect()
}

fn judge_release<'h>(name: &str, claim: &Claim<'h>, release: &Release<'h>, findings: &mut Findings<'_>) {
    let Some(released) = release.ended.filter(|ended| ended.event.kind == Kind::Ok) else { return };
    let Some((proof, why)) = not_owned(claim, release) else { return };
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
