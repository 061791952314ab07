//! `clinch doctor`: whether a store is fit for locks, and what to do where it is not.

mod trial;

use std::collections::{BTreeMap, BTreeSet};

use clinch::{Check, Env, ErrorKind, Lane, Locks, Owner, Verdict};
use schemars::JsonSchema;
use serde::Serialize;
use unicode_width::UnicodeWidthStr;

use self::trial::{LockTimes, RoundTrip};
use crate::args::{Doctor, Store};
use crate::connect::{close, connect};
use crate::documents::document;
use crate::exit::{Failure, Outcome};
use crate::output::{printable, show};
use crate::table::Look;

/// What our claims say that they are for.
const LABEL: &str = "clinch doctor";

/// The least room for words, on a terminal so narrow that they are better cut by itself.
const NARROW: usize = 24;

pub(crate) async fn run(store: &Store, doctor: &Doctor) -> Outcome {
    let url = doctor.target.clone().unwrap_or_else(|| store.url.clone());
    let store = Store { url };
    let mut checks = Locks::examine(&store.url, Env::host(Lane::here()?)).await?;
    // After what the URL means.
    checks.insert(checks.len().min(1), who());
    let mut report = Report { checks, ..Report::default() };
    match connect(&store).await {
        Ok(locks) => {
            let locks = locks.label(LABEL)?;
            report.try_out(&locks).await?;
            // What is left runs out by itself.
            let _ = close(&locks).await;
        }
        // Why is told already.
        Err(_) if report.verdict() == Verdict::Fail => {}
        Err(error) if error.kind() == ErrorKind::Invalid => return Err(error.into()),
        Err(error) => report.checks.push(failed("connect", error, "mend what it says, or the URL")),
    }
    show(&if doctor.json {
        document(ReportJson::from(&report))?
    } else {
        report.lines(Look::of_stdout(false))
    })?;
    Ok(match report.verdict() {
        Verdict::Pass => 0,
        Verdict::Warn => 1,
        Verdict::Fail => 2,
    })
}

/// What stands in the records of our claims.
fn who() -> Check {
    let Owner { host, pid, user, .. } = Owner::of_this_process();
    Check::pass("who", format!("{user}@{host}, pid {pid}, label \"{LABEL}\""))
}

/// A check that an error ended.
fn failed(what: &'static str, error: clinch::Error, remedy: impl Into<String>) -> Check {
    Check::fail(what, Failure::from(error).message, remedy.into())
}

/// All that was found out.
#[derive(Default)]
struct Report {
    checks: Vec<Check>,
    round_trip: Option<RoundTrip>,
    capabilities: Option<BTreeMap<&'static str, bool>>,
    lock: Option<LockTimes>,
}

impl Report {
    /// Uses the store as everybody would.
    async fn try_out(&mut self, locks: &Locks) -> Result<(), Failure> {
        let (check, round_trip) = trial::round_trips(locks).await?;
        self.checks.push(check);
        self.round_trip = round_trip;
        let promises = locks.capabilities();
        let named = |wanted| {
            let names = promises.entries().filter(move |(_, is_there)| *is_there == wanted);
            names.map(|(name, _)| name).collect::<Vec<_>>().join(", ")
        };
        self.checks.push(Check::pass("capabilities", format!("{}; not {}", named(true), named(false))));
        self.capabilities = Some(promises.entries().collect());
        let (check, lock) = trial::lock(locks).await?;
        self.checks.push(check);
        self.lock = lock;
        Ok(())
    }

    fn verdict(&self) -> Verdict {
        self.checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Pass)
    }

    /// For people: one line for each check, which a terminal shows in several.
    fn lines(&self, look: Look) -> String {
        let servers: BTreeSet<&str> = self.checks.iter().filter_map(|check| check.at.as_deref()).collect();
        // Where there is but one server, the first line names it.
        let server = |check: &Check| check.at.clone().filter(|_| servers.len() > 1).unwrap_or_default();
        let widest = |text: &dyn Fn(&Check) -> String| {
            self.checks.iter().map(|check| text(check).width()).max().unwrap_or(0)
        };
        let (what, at) = (widest(&|check| check.what.to_owned()), widest(&server));
        let at = if at == 0 { 0 } else { at + 2 };
        let mut lines = String::new();
        for check in &self.checks {
            let verdict = match look.colour {
                true => format!("\x1b[{}m{}\x1b[0m", colour(check.verdict), check.verdict),
                false => check.verdict.to_string(),
            };
            let head = format!("  {:what$}  {:at$}", check.what, server(check));
            let remedy = check.remedy.iter().map(|remedy| format!("; {remedy}"));
            let text: String = std::iter::once(check.seen.to_string()).chain(remedy).collect();
            let indent = "fail".len() + head.width();
            let room = look.width.and_then(|width| width.checked_sub(indent)).filter(|room| *room >= NARROW);
            let text = wrapped(&printable(&text), room).join(&format!("\n{}", " ".repeat(indent)));
            lines += &format!("{verdict}{head}{text}\n");
        }
        lines
    }
}

fn colour(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "32",
        Verdict::Warn => "33",
        Verdict::Fail => "31",
    }
}

/// A text in lines no wider than there is room, if its words are not.
fn wrapped(text: &str, room: Option<usize>) -> Vec<String> {
    let Some(room) = room else { return vec![text.to_owned()] };
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.width() + 1 + word.width() <= room => line.extend([" ", word]),
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// What `clinch doctor --json` prints.
#[derive(Serialize, JsonSchema)]
pub(crate) struct ReportJson<'a> {
    /// The worst of all: `pass`, `warn` or `fail`.
    verdict: String,
    /// What was looked at.
    checks: Vec<CheckJson<'a>>,
    /// How long answers take; null where the store could not be used.
    round_trip: &'a Option<RoundTrip>,
    /// What the store promises; null as above.
    capabilities: &'a Option<BTreeMap<&'static str, bool>>,
    /// A lock that was really taken; null where that failed.
    lock: &'a Option<LockTimes>,
}

/// Something that was looked at.
#[derive(Serialize, JsonSchema)]
struct CheckJson<'a> {
    /// What it is.
    what: &'a str,
    /// The server, where there may be several.
    at: Option<&'a str>,
    /// `pass`, `warn` or `fail`.
    verdict: String,
    /// What was seen.
    seen: &'a str,
    /// What to do; null where nothing needs to be done.
    remedy: Option<&'a str>,
}

impl<'a> From<&'a Report> for ReportJson<'a> {
    fn from(report: &'a Report) -> ReportJson<'a> {
        let check = |check: &'a Check| CheckJson {
            what: check.what,
            at: check.at.as_deref(),
            verdict: check.verdict.to_string(),
            seen: &check.seen,
            remedy: check.remedy.as_deref(),
        };
        ReportJson {
            verdict: report.verdict().to_string(),
            checks: report.checks.iter().map(check).collect(),
            round_trip: &report.round_trip,
            capabilities: &report.capabilities,
            lock: &report.lock,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let long = "words ".repeat(40);
        let checks = vec![
            Check::pass("url", "two servers"),
            Check::warn("eviction", long.trim().to_owned(), "mend it").at("h:1"),
            Check::fail("vote", "none\x1b[2J", "wait").at("host:2"),
        ];
        Report { checks, ..Report::default() }
    }

    #[test]
    fn a_report_is_one_line_for_each_check_and_fits_a_terminal() {
        let whole = report().lines(Look::default());
        assert_eq!(whole.lines().count(), 3, "{whole}");
        assert!(whole.contains("fail  vote      host:2  none\\u{1b}[2J; wait\n"), "{whole}");
        let narrow = report().lines(Look { width: Some(50), colour: false });
        assert!(narrow.lines().all(|line| line.width() <= 50) && narrow.lines().count() > 5, "{narrow}");
        assert_eq!(
            narrow.split_whitespace().collect::<Vec<_>>(),
            whole.split_whitespace().collect::<Vec<_>>()
        );
        let colour = report().lines(Look { width: None, colour: true });
        assert!(colour.contains("\x1b[33mwarn\x1b[0m  eviction"), "{colour:?}");
    }
}
