//! What is asked of the checker and what it answers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::model::{At, Model};
use crate::event::Event;
use crate::history::History;

/// Violations of one property that are reported with their witness; the rest are counted. A broken lock breaks
/// thousands of times, and nobody reads the second hundred.
const SHOWN_PER_PROPERTY: u64 = 100;

/// A promise of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Property {
    /// Conflicting holds of one lock do not overlap, permits are never more than there are, and a grant is of the mode that
    /// was asked for.
    Exclusion,
    /// A fenced store accepts no write with a token older than one it accepted, and refuses no other.
    Fence,
    /// A later grant has a larger token, no two claims have the same, and none changes or is missing.
    Tokens,
    /// A lock that nobody holds, or that can be shared, is granted to somebody who waits, within the slack of its release
    /// or of the TTL of a holder that went without one.
    Leak,
    /// Who is queued first is served first.
    Overtaking,
    /// A release says what happened, and a claim that failed does not hold.
    Phantom,
    /// A holder whose deadline passes is told of the loss by then, before any rival is granted.
    Loss,
}

impl Property {
    /// All properties, in the order in which they are reported.
    pub const ALL: [Property; 7] = [
        Property::Exclusion,
        Property::Fence,
        Property::Tokens,
        Property::Leak,
        Property::Overtaking,
        Property::Phantom,
        Property::Loss,
    ];

    /// The name, which does not change between versions.
    pub fn name(self) -> &'static str {
        match self {
            Property::Exclusion => "exclusion",
            Property::Fence => "fence",
            Property::Tokens => "tokens",
            Property::Leak => "leak",
            Property::Overtaking => "overtaking",
            Property::Phantom => "phantom",
            Property::Loss => "loss",
        }
    }
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Property {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Property::ALL.into_iter().find(|property| property.name() == name).ok_or_else(|| {
            let known = Property::ALL.map(Property::name).join(", ");
            format!("no property is called \"{name}\"; there are {known}")
        })
    }
}

/// What to judge, and how strictly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// The properties to judge.
    pub properties: BTreeSet<Property>,
    /// How long after it fell free at the latest a lock may stay ungranted while somebody waits, in nanoseconds; and how long,
    /// beyond its TTL, a waiter may be stopped where first come, first served is promised.
    pub slack: u64,
    /// How long after its deadline a holder may be told of the loss, in nanoseconds, beyond the clock error: for
    /// recorders whose threads are not scheduled at once. It excuses nobody when a rival holds.
    pub lateness: u64,
    /// Whether first come, first served is promised; otherwise [`Property::Overtaking`] is not judged.
    pub fifo: bool,
}

impl Default for Rules {
    /// All properties, 5 s of slack, no lateness, no promise of first come, first served.
    fn default() -> Self {
        Rules { properties: Property::ALL.into(), slack: 5_000_000_000, lateness: 0, fifo: false }
    }
}

impl Rules {
    /// The same rules for some of the properties only.
    #[must_use]
    pub fn only(mut self, properties: &[Property]) -> Self {
        self.properties = properties.iter().copied().collect();
        self
    }

    /// Whether these rules judge a property.
    pub fn judges(&self, property: Property) -> bool {
        self.properties.contains(&property) && (property != Property::Overtaking || self.fifo)
    }
}

/// What the history proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// There was something to judge, and no property was violated.
    Valid,
    /// At least one property was violated.
    Violated,
    /// Nothing was granted, nothing was judged, events could not be understood, or there are [doubts](Report::doubts).
    Unknown,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Valid => "valid",
            Verdict::Violated => "violated",
            Verdict::Unknown => "unknown",
        })
    }
}

/// One event of a witness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// Its place in the history, from 0.
    pub index: usize,
    /// The event itself.
    pub event: Event,
}

/// One broken promise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Which promise.
    pub property: Property,
    /// What happened, in one sentence.
    pub explanation: String,
    /// The events that prove it, by time, as few as are known to do; as a history of their own they violate the same property.
    pub witness: Vec<Evidence>,
}

/// A question that the history leaves open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Doubt {
    /// The promise that may have been broken.
    pub property: Property,
    /// What happened, and why it proves nothing.
    pub reason: String,
}

/// How much was judged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Events in the history.
    pub events: u64,
    /// Locks that they name.
    pub locks: u64,
    /// Claims that were granted.
    pub grants: u64,
    /// Violations found; no more than 100 of each property are reported.
    pub violations: u64,
}

/// The checker's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What the history proves.
    pub verdict: Verdict,
    /// How much was judged.
    pub counts: Counts,
    /// The broken promises, property by property.
    pub violations: Vec<Violation>,
    /// Where a promise may have been broken and the history does not say; the first hundred of each property.
    pub doubts: Vec<Doubt>,
    /// What a reader should know besides: events left out, questions left open.
    pub notes: Vec<String>,
}

impl Report {
    /// The reported violations of one property.
    pub fn of(&self, property: Property) -> impl Iterator<Item = &Violation> {
        self.violations.iter().filter(move |violation| violation.property == property)
    }
}

/// Collects violations while the properties are judged.
pub(super) struct Findings<'r> {
    pub(super) rules: &'r Rules,
    found: BTreeMap<Property, u64>,
    violations: Vec<Violation>,
    doubts: Vec<Doubt>,
    notes: Vec<String>,
}

impl<'r> Findings<'r> {
    pub(super) fn new(rules: &'r Rules) -> Self {
        Findings {
            rules,
            found: BTreeMap::new(),
            violations: Vec::new(),
            doubts: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Counts a violation, and has it described if it is one of the first.
    pub(super) fn add<'h>(
        &mut self,
        property: Property,
        describe: impl FnOnce() -> (String, Vec<Option<At<'h>>>),
    ) {
        let found = self.found.entry(property).or_default();
        *found += 1;
        if *found > SHOWN_PER_PROPERTY {
            return;
        }
        let (explanation, events) = describe();
        let mut events: Vec<At<'h>> = events.into_iter().flatten().collect();
        events.sort_by_key(At::order);
        events.dedup_by_key(|at| at.index);
        let witness =
            events.into_iter().map(|at| Evidence { index: at.index, event: at.event.clone() }).collect();
        self.violations.push(Violation { property, explanation, witness });
    }

    /// Adds a question that the history leaves open, if it is one of the first.
    pub(super) fn doubt(&mut self, property: Property, reason: impl FnOnce() -> String) {
        let asked = self.doubts.iter().filter(|doubt| doubt.property == property).count() as u64;
        if asked < SHOWN_PER_PROPERTY {
            self.doubts.push(Doubt { property, reason: reason() });
        }
    }

    pub(super) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    pub(super) fn report(mut self, history: &History, model: &Model<'_>) -> Report {
        let counts = Counts {
            events: history.events().len() as u64,
            locks: model.locks.len() as u64,
            grants: model.grants(),
            violations: self.found.values().sum(),
        };
        let mut notes = history.notes().to_vec();
        notes.extend(model.faults.iter().cloned());
        notes.append(&mut self.notes);
        for (property, found) in self.found.iter().filter(|(_, found)| **found > SHOWN_PER_PROPERTY) {
            notes.push(format!(
                "{found} violations of {property}; the first {SHOWN_PER_PROPERTY} are reported"
            ));
        }
        let judged = Property::ALL.into_iter().any(|property| self.rules.judges(property));
        let verdict = if counts.violations > 0 {
            Verdict::Violated
        } else if counts.grants == 0 || !judged || !model.faults.is_empty() || !self.doubts.is_empty() {
            Verdict::Unknown
        } else {
            Verdict::Valid
        };
        Report { verdict, counts, violations: self.violations, doubts: self.doubts, notes }
    }
}
