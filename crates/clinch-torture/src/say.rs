//! How a worker speaks to who has started it: a line at a time, at once.

use std::io::Write;

use clinch::Clock;

/// This moment, as histories have it: in nanoseconds since boot, the same for all processes of the host.
pub(crate) fn now() -> u64 {
    Clock::host().now().as_nanos()
}

/// Says a line. Who cannot be heard any more has no reason to go on.
pub(crate) fn say(line: &str) {
    let mut stdout = std::io::stdout().lock();
    if stdout.write_all(format!("{line}\n").as_bytes()).and_then(|()| stdout.flush()).is_err() {
        std::process::exit(1);
    }
}
