//! A wait for the lock of the job around this process, where the run of that was killed: it would never end. The watch keeps the lock until all have ended
//! that were told of it (`--orphans wait`), and knows none of them from a part of the job.

use std::future::pending;
use std::time::Duration;

use clinch::Locks;
use clinch::backend::ClaimState;
use tokio::time::{sleep, timeout};

use crate::connect::ANSWER_FOR;
use crate::exit::{CONFLICT, Failure};
use crate::job::nesting::{self, Outer};
use crate::job::reentry::is_gone;

/// How often whoever waits looks for that.
const LOOKS_EVERY: Duration = Duration::from_secs(1);

/// The jobs around this process that may hold this lock, and whether one of them has its very name.
pub(crate) fn jobs_around(name: &str) -> (Vec<Outer>, bool) {
    nesting::find(&std::env::var(nesting::HELD).unwrap_or_default(), name)
}

/// Whether a store without leases keeps the lock for one of these jobs although its run is gone.
pub(crate) async fn is_kept(locks: &Locks, name: &str, outer: &[Outer]) -> clinch::Result<bool> {
    if outer.is_empty() || locks.capabilities().expiry {
        return Ok(false);
    }
    let is_outer = |one: &ClaimState| outer.iter().any(|outer| outer.claim == one.id);
    // Twice, since who is gone may have released it after the store was asked.
    for _ in 0..2 {
        let claims = locks.state(name).await?.map(|state| state.claims).unwrap_or_default();
        if !claims.iter().any(|one| one.granted && is_outer(one) && is_gone(one)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Completes when that is so.
pub(crate) async fn comes_to_be_kept(locks: &Locks, name: &str, outer: &[Outer]) {
    if outer.is_empty() || locks.capabilities().expiry {
        return pending().await;
    }
    loop {
        sleep(LOOKS_EVERY).await;
        // What cannot be told now may be told later.
        if let Ok(Ok(true)) = timeout(ANSWER_FOR, is_kept(locks, name, outer)).await {
            return;
        }
    }
}

/// Why nobody waits then.
pub(crate) fn waits_for_itself(name: &str) -> Failure {
    let why = format!(
        "lock \"{name}\" is kept for the job around this one, whose `clinch run` is gone, or in another pid namespace; waiting for it would never \
         end"
    );
    Failure::new(CONFLICT, why)
}
