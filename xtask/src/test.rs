//! All tests.

use crate::shell::{Result, cargo, run as sh};
use crate::{mutants, needs, readme};

pub(crate) fn run() -> Result {
    needs::provide()?;
    // Process tests start these; a test must not find them missing or stale.
    sh(&mut cargo(&["build", "--workspace", "--bins"]))?;
    let mut tests = cargo(&["test", "--workspace", "--all-features", "--all-targets", "--no-fail-fast"]);
    // Most tests wait: for a server to start, or a lease to end.
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    sh(tests.env("RUST_TEST_THREADS", (2 * processors).to_string()))?;
    sh(&mut cargo(&["test", "--workspace", "--all-features", "--doc"]))?;
    readme::run()?;
    mutants::run_todays()
}
