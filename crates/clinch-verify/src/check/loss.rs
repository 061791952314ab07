//! Loss: a holder whose deadline passes is told so by then, and what is lost stays lost.

use super::model::{At, Claim, Hold, Model, is_late, span};
use super::report::{Findings, Property};

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    let lateness = findings.rules.lateness;
    for (name, lock) in &model.locks {
        for claim in lock.claims() {
            let Some(hold) = claim.hold(lateness) else { continue };
            let last = model.last_of.get(claim.process).copied();
            let Some((proof, what)) = broken(claim, &hold, last, lateness) else { continue };
            findings.add(Property::Loss, || {
                let mut witness = vec![claim.granted];
                witness.extend(proof.map(Some));
                (format!("lock \"{name}\": {claim} {what}"), witness)
            });
        }
    }
}

fn broken<'h>(
    claim: &Claim<'h>,
    hold: &Hold<'h>,
    last: Option<At<'h>>,
    lateness: u64,
) -> Option<([At<'h>; 2], String)> {
    if let Some((old, renewal)) = hold.late {
        let by = past(&old, renewal);
        return Some(([old, renewal], format!("took a new deadline {by} after the old one had passed")));
    }
    if let Some(lost) = claim.lost
        && let Some(renewal) =
            claim.renewed.iter().find(|renewal| renewal.event.deadline.is_some() && lost.precedes(renewal))
    {
        let what = format!("took a new deadline at t={} after it had been lost", renewal.event.time);
        return Some(([lost, *renewal], what));
    }
    let set = hold.deadline?;
    match (claim.ended(), claim.lost) {
        (Some(end), Some(lost)) if end.index == lost.index => {
            is_late(&set, lost.earliest(), lateness).then(|| {
                let what = format!("was told of its loss only {} after its deadline", past(&set, lost));
                ([set, lost], what)
            })
        }
        (Some(_), _) => None,
        (None, _) => last.filter(|last| is_late(&set, last.earliest(), lateness)).map(|last| {
            let by = past(&set, last);
            (
                [set, last],
                format!("was not told of its loss, though its process went on {by} past its deadline"),
            )
        }),
    }
}

fn past(set: &At<'_>, at: At<'_>) -> String {
    span(at.event.time.saturating_sub(set.event.deadline.unwrap_or(0)))
}
