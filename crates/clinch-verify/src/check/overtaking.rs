//! Overtaking: where first come, first served is promised, who was known to be queued before another one asked is
//! granted before it.
//!
//! Only claims that were granted are compared: one that was withdrawn or whose process died has left the queue.

use std::collections::BTreeMap;

use super::model::{At, Claim, Model};
use super::report::{Findings, Property};
use crate::event::Mode;

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    let lateness = findings.rules.lateness;
    for (name, lock) in &model.locks {
        let mut claims = lock.claims();
        // An answer that came too late to be used says nothing about the order of grants.
        claims.retain(|claim| claim.hold(lateness).is_some_and(|hold| hold.start < hold.end));
        let by_token = claims.iter().all(|claim| claim.token().is_some());
        let served: Vec<_> = claims.iter().filter_map(|claim| Served::of(claim, by_token)).collect();

        let mut queued: Vec<_> =
            served.iter().filter_map(|served| Some((served.claim.enqueued?, *served))).collect();
        queued.sort_by_key(|(at, _)| at.latest());
        let mut queued = queued.into_iter().peekable();
        let mut asked: Vec<_> =
            served.iter().filter_map(|served| Some((served.claim.asked()?, *served))).collect();
        asked.sort_by_key(|(at, _)| at.earliest());

        let mut ahead = Ahead::default();
        for (at, served) in asked {
            while let Some((_, earlier)) = queued.next_if(|(queued, _)| queued.precedes(&at)) {
                ahead.add(earlier);
            }
            if let Some(overtaken) = ahead.last_to_wait_for(&served).filter(|other| served.before(other)) {
                report(name, &overtaken, &served, at, findings);
            }
        }
    }
}

fn report<'h>(
    name: &str,
    overtaken: &Served<'_, 'h>,
    served: &Served<'_, 'h>,
    asked: At<'h>,
    findings: &mut Findings<'_>,
) {
    findings.add(Property::Overtaking, || {
        let queued = overtaken.claim.enqueued;
        let text = format!(
            "lock \"{name}\": {} was queued at t={}, before {} asked at t={}, but was granted after it",
            overtaken.claim,
            queued.map_or(0, |at| at.event.time),
            served.claim,
            asked.event.time
        );
        (text, vec![queued, overtaken.claim.granted, Some(asked), served.claim.granted])
    });
}

/// A granted claim with its place in the order of grants.
#[derive(Clone, Copy)]
struct Served<'a, 'h> {
    claim: &'a Claim<'h>,
    /// The token where all grants have one; else the time, whose error makes it a range.
    first: u64,
    last: u64,
}

impl<'a, 'h> Served<'a, 'h> {
    fn of(claim: &'a Claim<'h>, by_token: bool) -> Option<Self> {
        let granted = claim.granted?;
        let token = claim.token().filter(|_| by_token);
        let first = token.unwrap_or(granted.earliest());
        let last = token.unwrap_or(granted.latest());
        Some(Served { claim, first, last })
    }

    fn before(&self, other: &Served<'_, '_>) -> bool {
        self.last < other.first
    }
}

/// Those queued so far, of each mode the one served last.
#[derive(Default)]
struct Ahead<'a, 'h> {
    exclusive: Option<Served<'a, 'h>>,
    shared: Option<Served<'a, 'h>>,
    /// By number of permits, with smaller numbers served later: whoever is beaten in both is left out.
    permits: BTreeMap<u64, Served<'a, 'h>>,
}

impl<'a, 'h> Ahead<'a, 'h> {
    fn add(&mut self, served: Served<'a, 'h>) {
        match served.claim.mode() {
            Mode::Exclusive => self.exclusive = later(self.exclusive, Some(served)),
            Mode::Shared => self.shared = later(self.shared, Some(served)),
            Mode::Permits { n, .. } => {
                if self.permits.range(n..).next().is_some_and(|(_, other)| other.first >= served.first) {
                    return;
                }
                while let Some((&beaten, _)) =
                    self.permits.range(..=n).next_back().filter(|(_, other)| other.first <= served.first)
                {
                    self.permits.remove(&beaten);
                }
                self.permits.insert(n, served);
            }
        }
    }

    /// Of those ahead that a claim cannot hold together with, the one served last.
    fn last_to_wait_for(&self, served: &Served<'_, '_>) -> Option<Served<'a, 'h>> {
        let most_permits = self.permits.first_key_value().map(|(_, other)| *other);
        match served.claim.mode() {
            Mode::Exclusive => later(later(self.exclusive, self.shared), most_permits),
            Mode::Shared => later(self.exclusive, most_permits),
            Mode::Permits { n, of } => {
                let too_many = of.saturating_sub(n).saturating_add(1);
                let permits = self.permits.range(too_many..).next().map(|(_, other)| *other);
                later(later(self.exclusive, self.shared), permits)
            }
        }
    }
}

fn later<'a, 'h>(one: Option<Served<'a, 'h>>, other: Option<Served<'a, 'h>>) -> Option<Served<'a, 'h>> {
    [one, other].into_iter().flatten().max_by_key(|served| served.first)
}
