//! Refusal: who asks while surely nobody holds is not refused.
//!
//! It guards the lock against being kept by nobody. A call may also fail for reasons of its own, such as a server that
//! cannot be reached, and the history does not say which: so it is a doubt, never a violation.

use super::busy::{self, Gap};
use super::model::{Claim, Model};
use super::report::{Findings, Property};

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    let Some(end) = model.last else { return };
    for (name, lock) in &model.locks {
        // Who waits may be due before it.
        let waits = busy::waits(lock, end).into_iter().filter(|(claim, _)| claim.failed.is_none());
        let loads: Vec<_> =
            busy::all(lock).into_iter().chain(waits.map(|(_, busy)| busy)).map(|busy| busy.load(1)).collect();
        let gaps = busy::gaps(&loads, 0, end);
        for claim in lock.claims() {
            let Some((asked, gap)) = refused_in(claim, &gaps) else { continue };
            findings.doubt(Property::Leak, || {
                format!(
                    "lock \"{name}\": {claim} asked at t={asked} and was not granted, although nobody can have held \
                     the lock from t={} on, or waited for it: whether it was refused or failed otherwise is not recorded",
                    gap.from
                )
            });
        }
    }
}

/// The gap in which the whole of a call that failed fell.
fn refused_in<'g, 'h>(claim: &Claim<'h>, gaps: &'g [Gap<'h>]) -> Option<(u64, &'g Gap<'h>)> {
    let (asked, failed) = (claim.acquire?, claim.failed?);
    let gap = gaps.get(gaps.partition_point(|gap| gap.until <= asked.earliest()))?;
    (gap.from <= asked.earliest() && failed.latest() <= gap.until).then_some((asked.event.time, gap))
}
