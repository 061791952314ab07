//! Blur: where clock errors swallow a hold whole, nobody can say whether another overlapped it.
//!
//! It keeps exclusion from being called kept where it was not judged.

use super::hold::excludes;
use super::model::Model;
use super::report::{Findings, Property};

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    for (name, lock) in &model.locks {
        let mut told: Vec<_> =
            lock.claims().into_iter().filter_map(|claim| Some((claim.told()?, claim))).collect();
        told.retain(|((start, end), _)| start < end);
        told.sort_by_key(|((start, _), claim)| (*start, claim.granted.map(|at| at.index)));
        let mut told = told.into_iter();
        let Some(mut longest) = told.next() else { continue };
        for next in told {
            let ((start, end), claim) = next;
            let blurred = [claim, longest.1].iter().any(|claim| {
                claim.granted.is_some_and(|at| at.event.error > 0)
                    && claim.parts(findings.rules.lateness).is_empty()
            });
            if start < longest.0.1 && excludes(claim.mode(), longest.1.mode()) && blurred {
                findings.doubt(Property::Exclusion, || {
                    format!(
                        "lock \"{name}\": by their times {} and {claim} both held at t={start}, but the clocks may be \
                         off by more than that",
                        longest.1
                    )
                });
            }
            if end > longest.0.1 {
                longest = next;
            }
        }
    }
}
