//! Mode: who asked to hold in one way is not told that it holds in another.
//!
//! It guards exclusion: a client that asked to be alone goes on as if it were.

use super::model::Model;
use super::report::{Findings, Property};

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    for (name, lock) in &model.locks {
        for claim in lock.claims() {
            let (Some(asked), Some(granted)) = (claim.acquire.or(claim.enqueue), claim.granted) else {
                continue;
            };
            if granted.event.mode.is_some() && granted.event.mode != asked.event.mode {
                findings.add(Property::Exclusion, || {
                    let text = format!(
                        "lock \"{name}\": {claim} was granted at t={} in another mode than it asked for at t={}",
                        granted.event.time, asked.event.time
                    );
                    (text, vec![Some(asked), Some(granted)])
                });
            }
        }
    }
}
