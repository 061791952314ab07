//! All tests.

use crate::shell::{Result, cargo, run as sh};
use crate::{mutants, needs, readme, suite};

pub(crate) fn run() -> Result {
    needs::provide()?;
    suite::run()?;
    sh(&mut cargo(&["test", "--workspace", "--all-features", "--doc"]))?;
    readme::run()?;
    mutants::run_todays()
}
