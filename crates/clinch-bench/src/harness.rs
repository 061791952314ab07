//! Interleaved rounds: every case runs once per round, in an order that rotates, so that a slow second of the machine
//! hits all cases alike and none always comes first.

use crate::Result;
use crate::report::{Metric, Row};

/// What one case measured in one round.
pub(crate) type Sample = Vec<(Metric, f64)>;

/// One thing to measure.
pub(crate) struct Case<'a> {
    name: String,
    run: Box<dyn FnMut() -> Result<Sample> + 'a>,
}

impl<'a> Case<'a> {
    pub(crate) fn new(name: impl Into<String>, run: impl FnMut() -> Result<Sample> + 'a) -> Case<'a> {
        Case { name: name.into(), run: Box::new(run) }
    }
}

/// Runs the cases for this many rounds and collects what they measured.
pub(crate) fn interleave(rounds: usize, mut cases: Vec<Case<'_>>) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = cases.iter().map(|case| Row::new(case.name.clone())).collect();
    for round in 0..rounds {
        let mut order: Vec<_> = cases.iter_mut().zip(&mut rows).collect();
        let first = round % order.len().max(1);
        order.rotate_left(first);
        for (case, row) in order {
            let sample = (case.run)().map_err(|error| format!("{}: {error}", case.name))?;
            row.add(sample);
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn every_case_runs_once_per_round_and_each_comes_first_in_turn() {
        let order = RefCell::new(String::new());
        let case = |name: &'static str| {
            let order = &order;
            Case::new(name, move || {
                order.borrow_mut().push_str(name);
                Ok(vec![(Metric::new("n", ""), order.borrow().len() as f64)])
            })
        };
        let rows = interleave(3, vec![case("a"), case("b"), case("c")]).unwrap();
        assert_eq!(*order.borrow(), "abcbcacab");
        assert_eq!(rows[0].values("n"), [1.0, 6.0, 8.0]);
    }

    #[test]
    fn an_error_names_its_case() {
        let failing = Case::new("bad", || Err("no luck".into()));
        assert_eq!(interleave(1, vec![failing]).unwrap_err().to_string(), "bad: no luck");
    }
}
