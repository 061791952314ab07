//! All tests.

use crate::shell::{Result, cargo, run as sh};
use crate::{mutants, needs, readme, suite, torture};

pub(crate) fn run() -> Result {
    needs::provide()?;
    suite::run()?;
    sh(&mut cargo(&["test", "--workspace", "--all-features", "--doc"]))?;
    torture::run_for_a_minute()?;
    readme::run()?;
    mutants::run_todays()
}
