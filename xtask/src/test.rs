//! All tests.

use crate::shell::{Result, cargo, run as sh};
use crate::{mutants, needs, readme, suite, torture};

pub(crate) fn run() -> Result {
    needs::provide()?;
    // Process tests start these; a test must not find them missing or stale.
    sh(&mut cargo(&["build", "--workspace", "--bins"]))?;
    suite::run()?;
    sh(&mut cargo(&["test", "--workspace", "--all-features", "--doc"]))?;
    torture::run_a_minute()?;
    readme::run()?;
    mutants::run_todays()
}
