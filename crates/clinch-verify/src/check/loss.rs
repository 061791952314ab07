//! Loss: a holder whose deadline passes is told so by then, and what is lost stays lost.
//!
//! Threads of the recorder may be scheduled late, within the lateness of the rules. That excuses nothing once a rival
//! holds: whoever has not been told by then goes on as a second holder.

use super::hold::{Held, Hold, Part, is_late};
use super::model::{At, Claim, Lock, Model, span};
use super::report::{Findings, Property};
use crate::event::Kind;

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    let lateness = findings.rules.lateness;
    for (name, lock) in &model.locks {
        let held = Held::of(lock, lateness);
        for claim in lock.claims() {
            let Some(hold) = claim.hold(lateness) else { continue };
            let last = model.last_of.get(claim.process).copied();
            let broken = comes_back(claim, &hold, lock)
                .or_else(|| beside_a_rival(claim, &hold, last, &held, lateness))
                .or_else(|| told_late(claim, &hold, last, lateness));
            if let Some((proof, what)) = broken {
                findings.add(Property::Loss, || {
                    let mut witness = vec![claim.acquire, claim.granted];
                    witness.extend(proof);
                    (format!("lock \"{name}\": {claim} {what}"), witness)
                });
            } else if claim.ended().is_none()
                && let Some((rival, part)) = rival(claim, &hold, u64::MAX, &held)
            {
                findings.doubt(Property::Loss, || {
                    format!(
                        "lock \"{name}\": the deadline of {claim} passed and {rival} held from t={}, but {} recorded \
                         nothing from then on: whether it was told of its loss is not known",
                        part.start, claim.process
                    )
                });
            }
        }
    }
}

type Broken<'h> = (Vec<Option<At<'h>>>, String);

/// What was lost stays lost: no renewal brings it back, and no write of it takes effect.
fn comes_back<'h>(claim: &Claim<'h>, hold: &Hold<'h>, lock: &Lock<'h>) -> Option<Broken<'h>> {
    if let Some((old, renewal)) = hold.late {
        let by = past(&old, renewal);
        let what = format!("took a new deadline {by} after the old one had passed");
        return Some((vec![Some(old), Some(renewal)], what));
    }
    let lost = claim.lost?;
    for renewed in &claim.renewed {
        // One that was under way may still be answered; it must not be heeded.
        let asked = claim.call_of(renewed).filter(|asked| lost.precedes(asked));
        if asked.is_some() || (renewed.event.deadline.is_some() && lost.precedes(renewed)) {
            let what = format!("was renewed at t={} after it had been lost", renewed.event.time);
            return Some((vec![Some(lost), asked, Some(*renewed)], what));
        }
    }
    let written = lock.writes.iter().find(|write| {
        write.event.accepted == Some(true)
            && write.event.claim.as_deref() == Some(claim.id)
            && lost.precedes(write)
    })?;
    let what = format!("wrote at t={} after it had been lost", written.event.time);
    Some((vec![Some(lost), Some(*written)], what))
}

/// Nobody is granted before a holder whose deadline passed has been told, whatever the lateness.
fn beside_a_rival<'h>(
    claim: &Claim<'h>,
    hold: &Hold<'h>,
    last: Option<At<'h>>,
    held: &Held<'_, 'h>,
    lateness: u64,
) -> Option<Broken<'h>> {
    let set = hold.deadline?;
    let until = went_on(claim, last)?;
    let (rival, part) = rival(claim, hold, until.earliest(), held)?;
    let what = format!(
        "was not told of its loss before t={}, though its deadline had passed and {rival} held from t={} on",
        until.event.time, part.start
    );
    let mut proof = vec![Some(set), Some(until)];
    proof.extend(rival.proof(part.start, lateness));
    Some((proof, what))
}

/// A holder whose deadline passes is told by then, give or take the lateness.
fn told_late<'h>(
    claim: &Claim<'h>,
    hold: &Hold<'h>,
    last: Option<At<'h>>,
    lateness: u64,
) -> Option<Broken<'h>> {
    let set = hold.deadline?;
    let until = went_on(claim, last).filter(|until| is_late(&set, until.earliest(), lateness))?;
    let by = past(&set, until);
    let what = if until.event.kind == Kind::Lost {
        format!("was told of its loss only {by} after its deadline")
    } else {
        format!("was not told of its loss, though its process went on {by} past its deadline")
    };
    Some((vec![Some(set), Some(until)], what))
}

/// The event that shows until when the holder had not been told: the loss itself, its release, or the last of its
/// process. A killed process need not be told.
fn went_on<'h>(claim: &Claim<'h>, last: Option<At<'h>>) -> Option<At<'h>> {
    match claim.ended() {
        Some(end) => (end.event.kind != Kind::Crash).then_some(end),
        None => last,
    }
}

/// A conflicting claim that surely held between the holder's deadline and an instant.
fn rival<'a, 'h>(
    claim: &Claim<'h>,
    hold: &Hold<'h>,
    until: u64,
    held: &Held<'a, 'h>,
) -> Option<(&'a Claim<'h>, Part)> {
    let set = hold.deadline?;
    let deadline = set.event.deadline?.saturating_add(set.event.error).max(hold.start);
    if deadline >= until {
        return None;
    }
    held.rival(claim, until, deadline)
}

fn past(set: &At<'_>, at: At<'_>) -> String {
    span(at.event.time.saturating_sub(set.event.deadline.unwrap_or(0)))
}
