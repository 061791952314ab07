//! Waits that would never end: for a lock that the job around this process holds. Where it re-enters, it does not wait; this is for what cannot,
//! as with an environment that was cleared.
//!
//! It is looked for only beside a wait that lasts, so that a lock that is free is asked for nothing more.

use std::convert::Infallible;
use std::fs;
use std::future::{Future, pending};
use std::time::Duration;

use clinch::Locks;
use clinch::backend::ClaimState;

use super::nesting::{self, Outer};
use super::reentry;
use crate::args::Share;
use crate::connect::TRY_AGAIN;
use crate::exit::{CONFLICT, Failure};
use crate::output::say;
use crate::waiting::Waiting;

/// How long a wait lasts before it is looked at.
const LOOK_AFTER: Duration = Duration::from_millis(200);

/// A request for a lock, as those look at it who are around it.
pub(crate) struct Asked<'a> {
    pub(crate) locks: &'a Locks,
    pub(crate) waiting: &'a Waiting<'a>,
    pub(crate) share: &'a Share,
    /// Whether nobody wants to hear of what it waits for.
    pub(crate) is_quiet: bool,
}

/// Waits, unless that would never end.
pub(crate) async fn unless_for_itself<T>(
    asked: Asked<'_>,
    wait: impl Future<Output = T>,
) -> Result<T, Failure> {
    tokio::select! {
        biased;
        done = wait => Ok(done),
        refused = look_on(asked) => match refused { Err(why) => Err(why), Ok(never) => match never {} },
    }
}

async fn look_on(asked: Asked<'_>) -> Result<Infallible, Failure> {
    let Asked { locks, waiting, share, is_quiet } = asked;
    let name = waiting.name;
    tokio::time::sleep(LOOK_AFTER).await;
    let claims = loop {
        match locks.state(name).await {
            Ok(state) => break state.map(|state| state.claims).unwrap_or_default(),
            Err(_) => tokio::time::sleep(TRY_AGAIN).await,
        }
    };
    // Who holds it around us did before we began, and does until we end: once is enough.
    let is_around = |claim: &ClaimState| {
        claim.granted && Some(claim.id) != waiting.claim.get() && reentry::is_around(&claim.owner)
    };
    let around: Vec<ClaimState> = claims.into_iter().filter(is_around).collect();
    let held = std::env::var(nesting::HELD).unwrap_or_default();
    let (outer, _) = nesting::find(&held, name);
    let (jobs, others): (Vec<_>, Vec<_>) = around.into_iter().partition(|claim| is_job(claim, &outer, name));
    if nesting::excludes(&jobs, share) {
        return Err(Failure::new(
            CONFLICT,
            format!("lock \"{name}\" is held by the job around this one; waiting for it would never end"),
        ));
    }
    if let Some(claim) = others.first().filter(|_| !is_quiet && nesting::excludes(&others, share)) {
        say(format_args!(
            "lock \"{name}\": waiting for process {}, which has started this one; it seems to hold the lock by `clinch acquire`, \
             until it releases it or its lease ends",
            claim.owner.pid
        ));
    }
    pending().await
}

/// Whether a process above us that seems to hold a lock does so for a job: it has told us so, or its command line says so. An id alone may be that of
/// a process in another container with the name of this host.
fn is_job(claim: &ClaimState, outer: &[Outer], name: &str) -> bool {
    let words = fs::read(format!("/proc/{}/cmdline", claim.owner.pid)).unwrap_or_default();
    let mut words = words.split(|byte| *byte == 0).skip_while(|word| *word != b"run");
    // The store may have a prefix.
    let is_name = |word: &[u8]| {
        !word.is_empty() && (word.ends_with(name.as_bytes()) || name.as_bytes().ends_with(word))
    };
    outer.iter().any(|outer| outer.claim == claim.id) || words.next().is_some() && words.any(is_name)
}
