//! What a run comes to.

use std::fmt;

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Total {
    pub(crate) grants: u64,
    pub(crate) faults: u64,
    pub(crate) losses: u64,
    pub(crate) violations: u64,
    /// Pairs of a fault and a step that never met.
    pub(crate) empty: u64,
}

impl Total {
    /// That of a run that did not come to its end.
    pub(crate) fn broken() -> Total {
        Total { violations: 1, ..Total::default() }
    }

    pub(crate) fn and(self, other: Total) -> Total {
        Total {
            grants: self.grants + other.grants,
            faults: self.faults + other.faults,
            losses: self.losses + other.losses,
            violations: self.violations + other.violations,
            empty: self.empty + other.empty,
        }
    }

    /// Whether it proves something, and all that it proves is right.
    pub(crate) fn is_right(&self) -> bool {
        self.grants > 0 && self.violations == 0 && self.empty == 0
    }
}

impl fmt::Display for Total {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Total { grants, faults, losses, violations, empty } = self;
        if *empty > 0 {
            write!(f, "{empty} empty cells: ")?;
        }
        write!(f, "{grants} grants, {faults} faults, {losses} losses, {violations} violations")
    }
}
