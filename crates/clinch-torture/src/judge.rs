//! What a round comes to: the checker's verdict on its history, and what met.

use std::fs::File;
use std::path::Path;

use clinch_verify::{History, Kind, Report, Rules, check};

use crate::cells::{Cells, Fault};
use crate::log::{expired, lost_for_no_reason, step_of};
use crate::stage::Extent;

/// Violations of which all is printed.
const SHOWN: usize = 5;

/// A fault of a server, or of the way to it, and between which times it was on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Struck {
    pub(crate) fault: Fault,
    pub(crate) extent: Extent,
    pub(crate) from: u64,
    pub(crate) until: u64,
}

/// What the history of a round proves.
#[derive(Debug)]
pub(crate) struct Judged {
    pub(crate) report: Report,
    pub(crate) cells: Cells,
    pub(crate) losses: u64,
    /// Claims that were lost before their time although nobody took them away.
    pub(crate) stolen: Vec<String>,
    /// When leases ran out although enough servers were there to renew them.
    pub(crate) needless: Vec<u64>,
}

pub(crate) fn judge(history: &Path, rules: &Rules, struck: &[Struck]) -> Result<Judged, String> {
    let file = File::open(history).map_err(|error| error.to_string())?;
    let history = History::read(file).map_err(|error| error.to_string())?;
    let mut cells = Cells::default();
    let steps: Vec<_> = history.events().iter().filter_map(step_of).collect();
    for strike in struck {
        let met = steps.iter().filter(|(_, begun, ended)| *begun <= strike.until && strike.from <= *ended);
        met.for_each(|(step, ..)| cells.add(strike.fault, *step, 1));
    }
    let losses = history.events().iter().filter(|event| event.kind == Kind::Lost).count() as u64;
    let stolen = lost_for_no_reason(history.events()).into_iter().map(str::to_owned).collect();
    Ok(Judged { report: check(&history, rules), cells, losses, stolen, needless: needless(&history, struck) })
}

/// A lease of this TTL or more has time for several renewals, also on a busy host.
const RENEWABLE: u64 = 5_000_000_000;

/// When leases of processes that nobody harmed ran out, although for all that time only a minority of the servers was harmed.
fn needless(history: &History, struck: &[Struck]) -> Vec<u64> {
    let expired = history.events().iter().filter_map(expired).filter(|(_, ttl)| *ttl >= RENEWABLE);
    let harmed = |from: u64, until: u64| {
        let mut grave = struck.iter().filter(|strike| strike.extent == Extent::Any);
        grave.any(|strike| strike.from <= until && from <= strike.until)
    };
    // After the last renewal that came through, all of the TTL has passed in vain.
    expired.filter(|(at, ttl)| !harmed(at.saturating_sub(*ttl), *at)).map(|(at, _)| at).collect()
}

/// What the checker has to say, for people.
pub(crate) fn words(report: &Report) -> String {
    let mut text = String::new();
    for violation in report.violations.iter().take(SHOWN) {
        text += &format!("{}: {}\n", violation.property, violation.explanation);
        for evidence in &violation.witness {
            let event = serde_json::to_string(&evidence.event).unwrap_or_default();
            text += &format!("    {event}\n");
        }
    }
    for doubt in report.doubts.iter().take(SHOWN) {
        text += &format!("{}: unknown: {}\n", doubt.property, doubt.reason);
    }
    report.notes.iter().take(SHOWN).for_each(|note| text += &format!("note: {note}\n"));
    text
}
