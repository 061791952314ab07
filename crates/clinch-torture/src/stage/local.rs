//! Stores of one host: there is no server to harm, only those who use them.

use clinch_verify::Rules;
use tempfile::TempDir;

use super::{Extent, SLACK, Stage, some_time};
use crate::cells::{Fault, Step};
use crate::dice::Dice;

/// The store of one process.
pub(crate) struct Memory;

impl Stage for Memory {
    fn url(&self) -> String {
        "memory://torture".to_owned()
    }

    fn direct(&self) -> Option<String> {
        None
    }

    /// Its store would end with it.
    fn harms(&self) -> Vec<Fault> {
        vec![Fault::Stop, Fault::Block]
    }

    /// All that works there stands still then.
    fn longest_stop(&self) -> u64 {
        1500
    }

    fn faults(&self) -> Vec<Fault> {
        Vec::new()
    }

    fn strike(&self, _fault: Fault, dice: &mut Dice) -> Extent {
        std::thread::sleep(some_time(dice));
        Extent::None
    }
}

/// A directory.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn new() -> Files {
        Files(clinch_testkit::temp_dir())
    }
}

impl Stage for Files {
    fn url(&self) -> String {
        format!("file://{}", self.0.path().display())
    }

    fn direct(&self) -> Option<String> {
        Some(self.url())
    }

    /// Who is stopped for the whole notice of an eviction does not hear of it, and has no lease that could end; and a waiter that is
    /// not polled for 3 s loses its turn.
    fn longest_stop(&self) -> u64 {
        1500
    }

    fn expiry(&self) -> bool {
        false
    }

    /// Not of waiters: they queue again at the end, and order is judged here.
    fn breaks(&self) -> &[Step] {
        &[Step::Hold]
    }

    fn rules(&self) -> Rules {
        Rules { slack: SLACK, fifo: true, ..Rules::default() }
    }

    fn faults(&self) -> Vec<Fault> {
        Vec::new()
    }

    fn strike(&self, _fault: Fault, dice: &mut Dice) -> Extent {
        std::thread::sleep(some_time(dice));
        Extent::None
    }
}
