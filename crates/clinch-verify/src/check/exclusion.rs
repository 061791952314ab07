//! Exclusion: conflicting holds of one lock do not overlap.
//!
//! A sweep over the starts of the holds of a lock, with those still held kept by mode and by end. One violation is
//! reported for each hold that starts while it must not.

use std::collections::{BTreeMap, BTreeSet};

use super::hold::Part;
use super::model::{At, Claim, Model, span};
use super::report::{Findings, Property};
use crate::event::Mode;

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    for (name, lock) in &model.locks {
        let lateness = findings.rules.lateness;
        let mut holds = lock.parts(lateness);
        holds.sort_by_key(|(claim, part)| (part.start, claim.granted.map(|at| at.index)));
        let mut sweep = Sweep { name, holds: &holds, held: BTreeMap::new(), permits: BTreeMap::new() };
        for (number, (claim, hold)) in holds.iter().enumerate() {
            sweep.start(number, claim, hold, findings);
        }
    }
}

/// Modes as the sweep tells them apart: permits of different totals are of different kinds and exclude each other,
/// since they cannot both be right about the total.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Exclusive,
    Shared,
    Permits { of: u64 },
}

impl Class {
    fn of(mode: Mode) -> Self {
        match mode {
            Mode::Exclusive => Class::Exclusive,
            Mode::Shared => Class::Shared,
            Mode::Permits { of, .. } => Class::Permits { of },
        }
    }

    fn excludes(self, other: Class) -> bool {
        self == Class::Exclusive || self != other
    }
}

/// How many permits a hold takes; other modes are not counted.
fn permits(mode: Mode) -> u64 {
    match mode {
        Mode::Permits { n, .. } => n,
        Mode::Exclusive | Mode::Shared => 0,
    }
}

type Numbered<'a, 'h> = [(&'a Claim<'h>, Part)];

struct Sweep<'a, 'h> {
    name: &'a str,
    holds: &'a Numbered<'a, 'h>,
    /// What is held, by class: the end of each hold and its number.
    held: BTreeMap<Class, BTreeSet<(u64, usize)>>,
    /// The sum of permits held, by total.
    permits: BTreeMap<Class, u64>,
}

impl<'h> Sweep<'_, 'h> {
    fn start(&mut self, number: usize, claim: &Claim<'h>, hold: &Part, findings: &mut Findings<'_>) {
        let class = Class::of(hold.mode);
        self.drop_ended(hold.start);
        let conflict = self
            .held
            .iter()
            .filter(|(other, _)| class.excludes(**other))
            .filter_map(|(_, set)| set.last())
            .max()
            .and_then(|(_, other)| self.holds.get(*other));
        let taken = self.permits.get(&class).copied().unwrap_or(0).saturating_add(permits(hold.mode));
        let lateness = findings.rules.lateness;
        if let Some((other, other_hold)) = conflict {
            findings.add(Property::Exclusion, || {
                let overlap = hold.end.min(other_hold.end).saturating_sub(hold.start);
                let text = format!(
                    "lock \"{}\": {other} and {claim} both held from t={} for {}",
                    self.name,
                    hold.start,
                    if overlap > u64::MAX / 2 { "good".to_owned() } else { span(overlap) }
                );
                (text, [other.proof(hold.start, lateness), claim.proof(hold.start, lateness)].concat())
            });
        } else if let Class::Permits { of } = class
            && taken > of
        {
            findings.add(Property::Exclusion, || {
                let text = format!(
                    "lock \"{}\": {taken} of {of} permits were held at t={} when {claim} got its own",
                    self.name, hold.start
                );
                (text, self.fewest_permits(claim, hold.start, of, lateness))
            });
        }
        self.held.entry(class).or_default().insert((hold.end, number));
        *self.permits.entry(class).or_default() = taken;
    }

    /// A hold that ends at an instant and one that starts at it do not overlap.
    fn drop_ended(&mut self, now: u64) {
        for (class, set) in &mut self.held {
            while let Some(&(end, number)) = set.first() {
                if end > now {
                    break;
                }
                set.pop_first();
                let freed = self.holds.get(number).map_or(0, |(_, part)| permits(part.mode));
                if let Some(sum) = self.permits.get_mut(class) {
                    *sum = sum.saturating_sub(freed);
                }
            }
        }
        self.held.retain(|_, set| !set.is_empty());
    }

    /// The claim and as few others as are too many together with it: those with most permits.
    fn fewest_permits(&self, claim: &Claim<'h>, now: u64, of: u64, lateness: u64) -> Vec<Option<At<'h>>> {
        let mut others: Vec<_> = self
            .held
            .get(&Class::Permits { of })
            .into_iter()
            .flatten()
            .filter_map(|(_, number)| self.holds.get(*number).map(|(claim, _)| *claim))
            .collect();
        others.sort_by_key(|other| std::cmp::Reverse(permits(other.mode())));
        let mut sum = permits(claim.mode());
        let mut proof = claim.proof(now, lateness);
        for other in others {
            if sum > of {
                break;
            }
            sum = sum.saturating_add(permits(other.mode()));
            proof.extend(other.proof(now, lateness));
        }
        proof
    }
}
