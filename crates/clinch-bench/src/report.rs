//! What is printed: tables of medians with their spread, ratios to the floor, targets and whether they were met. As
//! Markdown for people, as JSON (with the value of every round) for programs.

use std::fmt::{self, Write};

use serde_json::{Value, json};

use crate::figures::{ratios, spread};

/// What a column shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Metric {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
}

impl Metric {
    pub(crate) const fn new(name: &'static str, unit: &'static str) -> Metric {
        Metric { name, unit }
    }
}

/// The figures of one case: per metric, one value per round.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    case: String,
    series: Vec<(Metric, Vec<f64>)>,
}

impl Row {
    pub(crate) fn new(case: String) -> Row {
        Row { case, series: Vec::new() }
    }

    pub(crate) fn add(&mut self, sample: Vec<(Metric, f64)>) {
        for (metric, value) in sample {
            match self.series.iter_mut().find(|(known, _)| *known == metric) {
                Some((_, values)) => values.push(value),
                None => self.series.push((metric, vec![value])),
            }
        }
    }

    /// The values of a metric by round; none where the case does not have it.
    pub(crate) fn values(&self, metric: &str) -> &[f64] {
        let found = self.series.iter().find(|(known, _)| known.name == metric);
        found.map_or(&[], |(_, values)| values)
    }
}

/// Cases that were measured together.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) title: String,
    /// The case that the others are compared with, and by which metric.
    pub(crate) floor: Option<(&'static str, &'static str)>,
    pub(crate) rows: Vec<Row>,
}

impl Table {
    /// The values of one case; none where there is no such case.
    pub(crate) fn values(&self, case: &str, metric: &str) -> &[f64] {
        self.rows.iter().find(|row| row.case == case).map_or(&[], |row| row.values(metric))
    }

    /// The median of the ratios to the floor of each round.
    pub(crate) fn ratio(&self, case: &str) -> Option<f64> {
        let (floor, metric) = self.floor?;
        self.ratio_to(floor, case, metric)
    }

    /// The median of the ratios to some case, by some metric, of each round.
    pub(crate) fn ratio_to(&self, base: &str, case: &str, metric: &str) -> Option<f64> {
        Some(spread(&ratios(self.values(case, metric), self.values(base, metric)))?.median)
    }

    pub(crate) fn median(&self, case: &str, metric: &str) -> Option<f64> {
        Some(spread(self.values(case, metric))?.median)
    }

    /// The largest value of any round.
    pub(crate) fn max(&self, case: &str, metric: &str) -> Option<f64> {
        Some(spread(self.values(case, metric))?.max)
    }

    /// The smallest value of any round.
    pub(crate) fn min(&self, case: &str, metric: &str) -> Option<f64> {
        Some(spread(self.values(case, metric))?.min)
    }

    fn ratios(&self, case: &str) -> Option<Vec<f64>> {
        let (floor, metric) = self.floor?;
        Some(ratios(self.values(case, metric), self.values(floor, metric)))
    }

    fn metrics(&self) -> Vec<Metric> {
        let mut metrics = Vec::new();
        for (metric, _) in self.rows.iter().flat_map(|row| &row.series) {
            if !metrics.contains(metric) {
                metrics.push(*metric);
            }
        }
        metrics
    }

    fn markdown(&self, out: &mut String) -> fmt::Result {
        let metrics = self.metrics();
        let rounds = self.rows.iter().flat_map(|row| &row.series).map(|(_, values)| values.len()).max();
        writeln!(out, "**{}** (rounds: {})\n", self.title, rounds.unwrap_or(0))?;
        let mut head: Vec<String> = vec!["case".to_owned()];
        head.extend(
            metrics.iter().map(|metric| format!("{} {}", metric.name, metric.unit).trim().to_owned()),
        );
        if let Some((floor, metric)) = self.floor {
            head.push(format!("{metric} × {floor}"));
        }
        writeln!(out, "| {} |\n|{}", head.join(" | "), "---|".repeat(head.len()))?;
        for row in &self.rows {
            let mut cells = vec![row.case.clone()];
            cells.extend(metrics.iter().map(|metric| cell(row.values(metric.name))));
            cells.extend(self.ratios(&row.case).map(|ratios| cell(&ratios)));
            writeln!(out, "| {} |", cells.join(" | "))?;
        }
        Ok(())
    }

    fn json(&self) -> Value {
        let row = |row: &Row| {
            let figures = row.series.iter().map(|(metric, values)| {
                json!({ "metric": metric.name, "unit": metric.unit, "summary": summary(values), "rounds": values })
            });
            let ratios = self.ratios(&row.case);
            json!({
                "case": row.case,
                "figures": figures.collect::<Vec<_>>(),
                "ratio": ratios.map(|ratios| json!({ "summary": summary(&ratios), "rounds": ratios })),
            })
        };
        let floor = self.floor.map(|(case, metric)| json!({ "case": case, "metric": metric }));
        json!({ "title": self.title, "floor": floor, "rows": self.rows.iter().map(row).collect::<Vec<_>>() })
    }
}

/// A bound that a figure has to keep.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    AtLeast(f64),
    AtMost(f64),
}

/// A figure to reach, and what was measured.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) what: String,
    pub(crate) limit: Limit,
    /// `None` when nothing was measured, which does not meet any target.
    pub(crate) measured: Option<f64>,
}

impl Target {
    pub(crate) fn met(&self) -> bool {
        self.measured.is_some_and(|measured| match self.limit {
            Limit::AtLeast(least) => measured >= least,
            Limit::AtMost(most) => measured <= most,
        })
    }

    fn markdown(&self, out: &mut String) -> fmt::Result {
        let (word, limit) = match self.limit {
            Limit::AtLeast(least) => ("at least", least),
            Limit::AtMost(most) => ("at most", most),
        };
        let measured = self.measured.map_or_else(|| "nothing".to_owned(), precise);
        let verdict = if self.met() { "met" } else { "MISSED" };
        writeln!(out, "- {verdict}: {}: {measured} (target: {word} {})", self.what, number(limit))
    }

    fn json(&self) -> Value {
        let (bound, limit) = match self.limit {
            Limit::AtLeast(least) => ("at least", least),
            Limit::AtMost(most) => ("at most", most),
        };
        json!({ "what": self.what, "bound": bound, "limit": limit, "measured": self.measured, "met": self.met() })
    }
}

/// What came out of one scenario.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    pub(crate) scenario: &'static str,
    pub(crate) tables: Vec<Table>,
    pub(crate) targets: Vec<Target>,
    pub(crate) notes: Vec<String>,
    /// Why the scenario could not be run.
    pub(crate) error: Option<String>,
}

impl Report {
    pub(crate) fn markdown(&self) -> String {
        let mut out = format!("## {}\n\n", self.scenario);
        // Writing to a string cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        for table in &self.tables {
            table.markdown(out)?;
            writeln!(out)?;
        }
        for note in &self.notes {
            writeln!(out, "{note}\n")?;
        }
        for target in &self.targets {
            target.markdown(out)?;
        }
        match &self.error {
            Some(error) => writeln!(out, "Not measured: {error}"),
            None => Ok(()),
        }
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "scenario": self.scenario,
            "tables": self.tables.iter().map(Table::json).collect::<Vec<_>>(),
            "targets": self.targets.iter().map(Target::json).collect::<Vec<_>>(),
            "notes": self.notes,
            "error": self.error,
        })
    }
}

fn cell(values: &[f64]) -> String {
    match spread(values) {
        None => "–".to_owned(),
        Some(all) if all.min == all.max => number(all.median),
        Some(all) => format!("{} [{}–{}]", number(all.median), number(all.min), number(all.max)),
    }
}

fn summary(values: &[f64]) -> Value {
    spread(values).map_or(Value::Null, |all| json!({ "median": all.median, "min": all.min, "max": all.max }))
}

/// With enough digits to see on which side of a limit it lies.
fn precise(value: f64) -> String {
    if value.fract() == 0.0 { number(value) } else { format!("{value:.4}") }
}

/// Three significant digits for small numbers, none after the point for large ones; fairness needs a fourth.
fn number(value: f64) -> String {
    match value.abs() {
        size if size.fract() == 0.0 && size < 1e9 => format!("{value:.0}"),
        size if size < 1.0 => format!("{value:.4}"),
        size if size < 10.0 => format!("{value:.2}"),
        size if size < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P50: Metric = Metric::new("p50", "µs");

    fn table() -> Table {
        let mut rows = vec![Row::new("floor".to_owned()), Row::new("ours".to_owned())];
        for (floor, ours) in [(4.0, 8.0), (2.0, 5.0), (4.0, 12.0)] {
            rows[0].add(vec![(P50, floor)]);
            rows[1].add(vec![(P50, ours)]);
        }
        Table { title: "pair".to_owned(), floor: Some(("floor", "p50")), rows }
    }

    #[test]
    fn a_table_shows_median_spread_and_the_median_of_ratios() {
        let mut out = String::new();
        table().markdown(&mut out).unwrap();
        assert!(out.contains("| case | p50 µs | p50 × floor |"), "{out}");
        assert!(out.contains("| ours | 8 [5–12] | 2.50 [2–3] |"), "{out}");
        assert_eq!(table().ratio("ours"), Some(2.5));
        assert_eq!(table().ratio("nobody"), None);
        assert_eq!(table().ratio_to("ours", "floor", "p50"), Some(0.4));
        assert_eq!(table().json()["rows"][1]["ratio"]["summary"]["median"], 2.5);
    }

    #[test]
    fn a_target_is_met_at_its_limit_and_never_by_nothing() {
        let target = |limit, measured| Target { what: "x".to_owned(), limit, measured };
        assert!(target(Limit::AtMost(3.0), Some(3.0)).met());
        assert!(!target(Limit::AtMost(3.0), Some(3.1)).met());
        assert!(target(Limit::AtLeast(0.9), Some(0.9)).met());
        assert!(!target(Limit::AtLeast(0.9), None).met() && !target(Limit::AtMost(0.9), None).met());
    }

    #[test]
    fn a_report_says_what_was_missed_and_what_could_not_run() {
        let missed = Target { what: "ratio".to_owned(), limit: Limit::AtMost(3.0), measured: Some(4.0) };
        let report = Report { scenario: "pair", targets: vec![missed], ..Report::default() };
        assert!(report.markdown().contains("MISSED: ratio: 4 (target: at most 3)"));
        let report = Report { error: Some("no binary".to_owned()), ..Report::default() };
        assert!(report.markdown().contains("Not measured: no binary"));
    }
}
