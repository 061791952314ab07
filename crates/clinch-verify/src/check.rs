//! The judge: which promises of a lock a history proves broken.
//!
//! A violation is reported only when it follows from the events for every possible true time within their error
//! bounds: the checker may miss what the history does not prove, but what it reports happened. Where a promise seems
//! broken and the history does not say, the verdict is unknown, with the reason. It searches nothing; each property is a
//! sweep over sorted events, so that millions of them take seconds.

mod blur;
mod busy;
mod exclusion;
mod fence;
mod hold;
mod leak;
mod loss;
mod mode;
mod model;
mod overtaking;
mod phantom;
mod refusal;
mod report;
mod tokens;
mod witness;

use crate::history::History;
use model::Model;
use report::Findings;
pub use report::{Counts, Doubt, Evidence, Property, Report, Rules, Verdict, Violation};

/// Judges a history by the rules.
///
/// # Examples
///
/// ```
/// use clinch_verify::{History, Rules, Verdict, check};
///
/// // Nothing was granted, so nothing was proved.
/// assert_eq!(check(&History::new(), &Rules::default()).verdict, Verdict::Unknown);
/// ```
pub fn check(history: &History, rules: &Rules) -> Report {
    let mut report = judge(history, rules);
    witness::complete(&mut report, history, rules);
    report
}

fn judge(history: &History, rules: &Rules) -> Report {
    let model = Model::of(history.events());
    let mut findings = Findings::new(rules);
    if rules.judges(Property::Exclusion) {
        mode::judge(&model, &mut findings);
        exclusion::judge(&model, &mut findings);
        blur::judge(&model, &mut findings);
    }
    if rules.judges(Property::Fence) {
        fence::judge(&model, &mut findings);
    }
    if rules.judges(Property::Tokens) {
        tokens::judge(&model, &mut findings);
    }
    if rules.judges(Property::Leak) {
        leak::judge(&model, &mut findings);
        refusal::judge(&model, &mut findings);
    }
    if rules.judges(Property::Overtaking) {
        overtaking::judge(&model, &mut findings);
    }
    if rules.judges(Property::Phantom) {
        phantom::judge(&model, &mut findings);
    }
    if rules.judges(Property::Loss) {
        loss::judge(&model, &mut findings);
    }
    findings.report(history, &model)
}
