//! What the tests share: a verdict counts only if its witness stands on its own.

use clinch_verify::{History, Property, Report, Rules, check};

#[allow(dead_code, reason = "each test file uses some of this")]
/// 10 ms of slack: the tests count in milliseconds, and their locks are granted within a few.
pub(crate) fn rules() -> Rules {
    Rules { slack: 10_000_000, fifo: true, ..Rules::default() }
}

/// Asserts that a property is violated, and that each witness by itself violates it too.
#[track_caller]
pub(crate) fn assert_violated(history: &History, rules: &Rules, property: Property) -> Report {
    let report = check(history, rules);
    assert!(report.of(property).next().is_some(), "{property} was not found violated: {report:#?}");
    for violation in report.of(property) {
        let events: Vec<_> = violation.witness.iter().map(|evidence| evidence.event.clone()).collect();
        let again = check(&events.into(), &rules.clone().only(&[property]));
        assert!(again.of(property).next().is_some(), "the witness proves nothing: {violation:#?}");
    }
    report
}
