//! Runs that have entered the lock of the job around them, seen from outside: a lock is not released under them.
//!
//! Such a run has become its command, so it can be told by its environment only, which names it and the claim. While it still asks
//! the store, its name tells. Neither side may believe the other too early: the inner one says that it asks, then asks, and then looks
//! whether the outer one is about to end; the outer one says that it is about to end, and then looks for inner ones.

use std::ffi::CStr;
use std::fs;
use std::time::Duration;

use clinch::ClaimId;
use rustix::process::Pid;

use super::kin::{Found, Stat};
use super::sys;

/// Names this process and the claim that it has entered.
pub(crate) const REENTERED: &str = "CLINCH_REENTERED";

/// For how long a process that is becoming another is looked at again: it has no environment until its program was read.
pub(crate) const BECOMING: Duration = Duration::from_secs(1);

/// The runs that have entered a claim.
#[derive(Debug, Default)]
pub(crate) struct Entered {
    pub(crate) found: Vec<Found>,
    /// Those of which that cannot be told yet.
    pub(crate) unclear: Vec<Pid>,
}

/// What a run of a lock is about to do, told by the name of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum About {
    Nothing,
    /// To enter a claim, if the store says that it is held.
    Enter,
    /// To release its claim.
    End,
}

impl About {
    fn name(self) -> &'static CStr {
        match self {
            About::Nothing => c"clinch",
            About::Enter => c"clinch-enters",
            About::End => c"clinch-ends",
        }
    }

    pub(crate) fn tell(self) {
        sys::set_name(self.name());
    }

    /// Whether a process tells this.
    pub(crate) fn is_of(self, pid: u32) -> bool {
        let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.strip_suffix(b"\n") == Some(self.name().to_bytes())
    }
}

/// What the command of this process has in [`REENTERED`].
pub(crate) fn mark(claim: ClaimId) -> String {
    format!("{claim},{}", std::process::id())
}

/// Those below these processes, or among them, that have entered a claim, or are about to.
pub(crate) fn entered(claim: ClaimId, among: impl Iterator<Item = Found>) -> Entered {
    let mut next: Vec<Found> = among.collect();
    let mut entered = Entered::default();
    while let Some(found) = next.pop() {
        match has_entered(found.pid, claim) {
            Some(true) => entered.found.push(found),
            told => {
                entered.unclear.extend(told.is_none().then_some(found.pid));
                next.extend(Found::children(found.pid));
            }
        }
    }
    entered
}

/// Whether a process has entered a claim, or is about to. `None`: cannot be told yet.
pub(crate) fn has_entered(pid: Pid, claim: ClaimId) -> Option<bool> {
    // In this order: it changes its name last.
    let is_about_to = u32::try_from(pid.as_raw_nonzero().get()).is_ok_and(|pid| About::Enter.is_of(pid));
    let environment = environment(pid)?;
    let mut entries = environment.split(|byte| *byte == 0);
    let has_entered = entries.any(|entry| {
        let entry = entry.strip_prefix(REENTERED.as_bytes()).and_then(|entry| entry.strip_prefix(b"="));
        let entry = entry.and_then(|entry| entry.strip_prefix(claim.to_string().as_bytes()));
        // What it has started has inherited this, and is not it.
        entry.is_some_and(|id| id.strip_prefix(b",") == own_id(pid).as_deref().map(str::as_bytes))
    });
    Some(has_entered || is_about_to && holds(&environment, claim))
}

/// Whether a process was told of a claim. `None`: cannot be told yet.
pub(crate) fn was_told(pid: Pid, claim: ClaimId) -> Option<bool> {
    Some(holds(&environment(pid)?, claim))
}

fn holds(environment: &[u8], claim: ClaimId) -> bool {
    let claim = claim.to_string();
    environment.windows(claim.len()).any(|part| part == claim.as_bytes())
}

/// The environment of a process. `None`: it is just becoming another, and has none yet.
fn environment(pid: Pid) -> Option<Vec<u8>> {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    // Nor has one that has ended, which has no open files either; or who was started with none, which has a place for it.
    let is_whole = !environment.is_empty()
        || fs::read_link(format!("/proc/{pid}/exe")).is_err()
        || Stat::of(pid).is_none_or(|stat| stat.has_empty_environment);
    is_whole.then_some(environment)
}

/// The id that a process has for itself.
fn own_id(pid: Pid) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_ascii_whitespace().last().map(str::to_owned)
}
