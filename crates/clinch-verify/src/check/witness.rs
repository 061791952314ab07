//! Each witness proves what it is for, by itself.
//!
//! What judges a property knows the events that it looked at. That others did not speak against it, such as one that ended a claim sooner, takes
//! more of them, now and then: then a witness is all that happened to its lock, or all that happened.

use std::collections::BTreeSet;

use super::report::{Evidence, Report, Rules, Violation};
use crate::event::{Event, Kind};
use crate::history::History;

pub(super) fn complete(report: &mut Report, history: &History, rules: &Rules) {
    for violation in &mut report.violations {
        if proves(violation, rules) {
            continue;
        }
        let locks: BTreeSet<_> =
            violation.witness.iter().filter_map(|evidence| evidence.event.lock.clone()).collect();
        // A crash is its process's, whatever lock it names.
        let of_its_locks = |event: &Event| {
            event.kind == Kind::Crash || event.lock.as_ref().is_some_and(|lock| locks.contains(lock))
        };
        violation.witness = all(history, of_its_locks);
        if !proves(violation, rules) {
            violation.witness = all(history, |_| true);
        }
    }
}

fn proves(violation: &Violation, rules: &Rules) -> bool {
    let events: Vec<Event> = violation.witness.iter().map(|evidence| evidence.event.clone()).collect();
    let again = super::judge(&events.into(), &rules.clone().only(&[violation.property]));
    again.of(violation.property).next().is_some()
}

/// All such events, by time.
fn all(history: &History, which: impl Fn(&Event) -> bool) -> Vec<Evidence> {
    let events = history.events().iter().enumerate().filter(|(_, event)| which(event));
    let mut all: Vec<Evidence> =
        events.map(|(index, event)| Evidence { index, event: event.clone() }).collect();
    all.sort_by_key(|evidence| (evidence.event.time, evidence.index));
    all
}
