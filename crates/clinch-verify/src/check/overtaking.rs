//! Overtaking: where first come, first served is promised, nobody is granted before one that was queued when it asked
//! and that it cannot hold together with.
//!
//! The times of the grants tell the order, since of two that cannot hold together the one that held first was granted
//! first; tokens do not, where they are the tickets of the queue. A place with a TTL may be lost by a process that is
//! stopped, so it is believed for its TTL; whoever asks a TTL and the slack later comes after its owner, if that was not stopped for so long.

use std::collections::BTreeMap;

use super::model::{At, Claim, Model};
use super::report::{Findings, Property};
use crate::event::Mode;

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    let Some(end) = model.last else { return };
    let (lateness, slack) = (findings.rules.lateness, findings.rules.slack);
    for (name, lock) in &model.locks {
        let claims = lock.claims();
        // An answer that came too late to be used says nothing about the order of grants.
        let lasted = |claim: &Claim<'_>| claim.hold(lateness).is_some_and(|hold| hold.start < hold.end);
        let served: Vec<_> = claims.iter().copied().filter(|claim| lasted(claim)).collect();
        let queued = claims.iter().filter(|claim| claim.granted.is_none() || lasted(claim));
        let places = queued.flat_map(|claim| places(claim, end, slack)).collect();
        overtaken(places, &served, |place, claim, asked| {
            report(name, &place, claim, asked, findings);
        });
        let untold = served.iter().filter_map(|claim| Place::untold(claim)).collect();
        overtaken(untold, &served, |place, claim, asked| {
            findings.doubt(Property::Overtaking, || {
                format!(
                    "lock \"{name}\": {} asked before {claim} did at t={} and was granted after it, but when it was \
                     queued is not recorded",
                    place.claim, asked.event.time
                )
            });
        });
    }
}

/// Goes through the claims in the order in which they asked and names those that were granted before a claim that had
/// its place by then.
fn overtaken<'a, 'h>(
    mut places: Vec<Place<'a, 'h>>,
    served: &[&'a Claim<'h>],
    mut found: impl FnMut(Place<'a, 'h>, &'a Claim<'h>, At<'h>),
) {
    places.sort_by_key(|place| place.from);
    let mut places = places.into_iter().peekable();
    let mut asked: Vec<_> =
        served.iter().filter_map(|claim| Some((claim.asked()?, claim.granted?, *claim))).collect();
    asked.sort_by_key(|(at, ..)| at.earliest());
    let mut ahead = Ahead::default();
    for (at, granted, claim) in asked {
        while let Some(earlier) = places.next_if(|place| place.from < at.earliest()) {
            ahead.add(earlier);
        }
        if let Some(place) =
            ahead.last_to_wait_for(claim.mode()).filter(|place| granted.latest() < place.until)
        {
            found(place, claim, at);
        }
    }
}

fn report<'h>(
    name: &str,
    place: &Place<'_, 'h>,
    claim: &Claim<'h>,
    asked: At<'h>,
    findings: &mut Findings<'_>,
) {
    let lateness = findings.rules.lateness;
    findings.add(Property::Overtaking, || {
        let waiter = place.claim;
        let text = format!(
            "lock \"{name}\": {waiter} was queued at t={}, before {claim} asked at t={}, but {}",
            waiter.enqueued.map_or(0, |at| at.event.time),
            asked.event.time,
            if waiter.granted.is_some() { "was granted after it" } else { "was not granted" }
        );
        let mut witness = vec![waiter.enqueue, waiter.enqueued, waiter.acquire, place.ended_by];
        witness.extend([Some(asked), claim.enqueue]);
        // That their grants were of use.
        for served in [waiter, claim] {
            witness.extend(served.granted.into_iter().flat_map(|at| served.proof(at.latest(), lateness)));
        }
        (text, witness)
    });
}

/// A claim that stood in the queue in a time: whoever asked after `from` is not granted before `until`.
#[derive(Clone, Copy)]
struct Place<'a, 'h> {
    claim: &'a Claim<'h>,
    from: u64,
    until: u64,
    ended_by: Option<At<'h>>,
}

/// The places that a claim surely had.
fn places<'a, 'h>(claim: &'a Claim<'h>, end: At<'h>, slack: u64) -> Vec<Place<'a, 'h>> {
    let Some(queued) = claim.enqueued.filter(|_| claim.acquire.or(claim.granted).is_some()) else {
        return Vec::new();
    };
    let ended_by = claim.granted.or_else(|| {
        let ends = [claim.failed, claim.unknown, claim.ended(), Some(end)];
        ends.into_iter().flatten().min_by_key(At::earliest)
    });
    let until = match (claim.granted, ended_by) {
        (Some(granted), _) => granted.earliest(),
        // It may have given up before that was recorded.
        (None, last) => last.map_or(0, |last| last.earliest().saturating_sub(slack)),
    };
    let place = Place { claim, from: queued.latest(), until, ended_by };
    if claim.ttl() == 0 {
        return vec![place];
    }
    let lives = claim.enqueue.map_or(0, |asked| asked.earliest().saturating_add(claim.ttl()));
    let anew = queued.latest().saturating_add(claim.ttl()).saturating_add(slack);
    vec![Place { until: until.min(lives), ..place }, Place { from: anew, ..place }]
}

impl<'a, 'h> Place<'a, 'h> {
    /// The place of one that asked, where nobody recorded when it was queued.
    fn untold(claim: &'a Claim<'h>) -> Option<Self> {
        let (asked, granted) = (claim.acquire?, claim.granted?);
        let told = claim.enqueue.or(claim.enqueued).is_some();
        let place = Place { claim, from: asked.latest(), until: granted.earliest(), ended_by: Some(granted) };
        (!told).then_some(place)
    }
}

/// Those queued so far, of each mode the one served last.
#[derive(Default)]
struct Ahead<'a, 'h> {
    exclusive: Option<Place<'a, 'h>>,
    shared: Option<Place<'a, 'h>>,
    /// By number of permits, with smaller numbers served later: whoever is beaten in both is left out.
    permits: BTreeMap<u64, Place<'a, 'h>>,
}

impl<'a, 'h> Ahead<'a, 'h> {
    fn add(&mut self, place: Place<'a, 'h>) {
        match place.claim.mode() {
            Mode::Exclusive => self.exclusive = later(self.exclusive, Some(place)),
            Mode::Shared => self.shared = later(self.shared, Some(place)),
            Mode::Permits { n, .. } => {
                if self.permits.range(n..).next().is_some_and(|(_, other)| other.until >= place.until) {
                    return;
                }
                while let Some((&beaten, _)) =
                    self.permits.range(..=n).next_back().filter(|(_, other)| other.until <= place.until)
                {
                    self.permits.remove(&beaten);
                }
                self.permits.insert(n, place);
            }
        }
    }

    /// Of those ahead that a claim of a mode cannot hold together with, the one served last.
    fn last_to_wait_for(&self, mode: Mode) -> Option<Place<'a, 'h>> {
        let most_permits = self.permits.first_key_value().map(|(_, other)| *other);
        match mode {
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

fn later<'a, 'h>(one: Option<Place<'a, 'h>>, other: Option<Place<'a, 'h>>) -> Option<Place<'a, 'h>> {
    [one, other].into_iter().flatten().max_by_key(|place| place.until)
}
