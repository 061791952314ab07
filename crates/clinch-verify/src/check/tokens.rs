//! Tokens: a later grant has a larger token, no two claims have the same, and where one has a token all have one that
//! never changes.
//!
//! "Later" is what the history proves: the one was answered before the other was asked for; or, of two exclusive
//! holds, which cannot have been granted in the other order, the one was answered before the other.

use std::collections::{HashMap, HashSet};

use super::model::{At, Claim, Model};
use super::report::{Findings, Property};
use crate::event::Mode;

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    for (name, lock) in &model.locks {
        let claims = lock.claims();
        let grants: Vec<_> = claims.iter().filter_map(|claim| Grant::of(claim)).collect();
        distinct(name, &grants, findings);
        missing(name, &claims, &grants, findings);
        changing(name, &grants, findings);

        let mut reported = HashSet::new();
        let asked = grants.iter().filter_map(|grant| Some((*grant, grant.claim.asked()?))).collect();
        rising(name, &grants, asked, "was asked for", &mut reported, findings);

        let exclusive: Vec<_> =
            grants.into_iter().filter(|grant| grant.is_exclusive(findings.rules.lateness)).collect();
        let granted = exclusive.iter().map(|grant| (*grant, grant.granted)).collect();
        rising(name, &exclusive, granted, "was granted", &mut reported, findings);
    }
}

#[derive(Clone, Copy)]
struct Grant<'a, 'h> {
    claim: &'a Claim<'h>,
    granted: At<'h>,
    token: u64,
}

impl<'a, 'h> Grant<'a, 'h> {
    fn of(claim: &'a Claim<'h>) -> Option<Self> {
        Some(Grant { claim, granted: claim.granted?, token: claim.token()? })
    }

    /// Only a hold that lasted says anything about the order: an answer that came too late to be used may well
    /// come after the next grant.
    fn is_exclusive(&self, lateness: u64) -> bool {
        self.claim.mode() == Mode::Exclusive
            && self.claim.hold(lateness).is_some_and(|hold| hold.start < hold.end)
    }
}

fn distinct(name: &str, grants: &[Grant<'_, '_>], findings: &mut Findings<'_>) {
    let mut owners: HashMap<u64, &Grant<'_, '_>> = HashMap::new();
    for grant in grants {
        let owner = *owners.entry(grant.token).or_insert(grant);
        if owner.claim.id != grant.claim.id {
            findings.add(Property::Tokens, || {
                let text = format!("lock \"{name}\": {} and {} got the same token", owner.claim, grant.claim);
                (text, vec![Some(owner.granted), Some(grant.granted)])
            });
        }
    }
}

fn missing(name: &str, claims: &[&Claim<'_>], grants: &[Grant<'_, '_>], findings: &mut Findings<'_>) {
    let Some(other) = grants.first() else { return };
    for claim in claims.iter().filter(|claim| claim.token().is_none()) {
        let Some(granted) = claim.granted else { continue };
        findings.add(Property::Tokens, || {
            let text =
                format!("lock \"{name}\": {claim} was granted without a token, unlike {}", other.claim);
            (text, vec![Some(granted), Some(other.granted)])
        });
    }
}

fn changing(name: &str, grants: &[Grant<'_, '_>], findings: &mut Findings<'_>) {
    for grant in grants {
        let answers = grant.claim.regranted.iter().chain(&grant.claim.renewed);
        let other = answers
            .copied()
            .find_map(|at| at.event.token.filter(|token| *token != grant.token).map(|token| (token, at)));
        let Some((token, at)) = other else { continue };
        findings.add(Property::Tokens, || {
            let text = format!(
                "lock \"{name}\": {} was told of another token, {token}, at t={}",
                grant.claim, at.event.time
            );
            (text, vec![Some(grant.granted), Some(at)])
        });
    }
}

/// Reports each grant with a token smaller than that of a grant answered before the later one's own instant.
fn rising<'h>(
    name: &str,
    grants: &[Grant<'_, 'h>],
    mut later: Vec<(Grant<'_, 'h>, At<'h>)>,
    what: &str,
    reported: &mut HashSet<usize>,
    findings: &mut Findings<'_>,
) {
    later.sort_by_key(|(_, at)| at.earliest());
    let mut earlier: Vec<_> = grants.iter().collect();
    earlier.sort_by_key(|grant| grant.granted.latest());
    let mut earlier = earlier.into_iter().peekable();
    let mut largest: Option<&Grant<'_, 'h>> = None;
    for (grant, at) in later {
        while let Some(before) = earlier.next_if(|before| before.granted.precedes(&at)) {
            if largest.is_none_or(|largest| before.token > largest.token) {
                largest = Some(before);
            }
        }
        let Some(before) = largest.filter(|before| before.token > grant.token) else { continue };
        if !reported.insert(grant.granted.index) {
            continue;
        }
        findings.add(Property::Tokens, || {
            let text = format!(
                "lock \"{name}\": {} was granted at t={}, before {} {what} at t={}, but has the larger token",
                before.claim, before.granted.event.time, grant.claim, at.event.time
            );
            let asked = [before.claim.acquire, grant.claim.acquire, Some(at)];
            (text, [Some(before.granted), Some(grant.granted)].into_iter().chain(asked).collect())
        });
    }
}
