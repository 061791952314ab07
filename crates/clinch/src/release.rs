//! Freeing a claim for sure: the one loop that repeats a release until the store has answered it.

use std::time::Duration;

use crate::backend::{Backend, Freed};
use crate::claim::Claim;
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{ErrorKind, Result};
use crate::lease;

/// Frees a claim, repeating what failed until `until`.
///
/// When an attempt's answer was lost, it may have been applied, so a later "absent" then counts as removed.
pub(crate) async fn free(
    backend: &dyn Backend,
    env: &Env,
    claim: &Claim,
    linger: Duration,
    until: Instant,
) -> Result<Freed> {
    let mut maybe_applied = false;
    let mut attempt = 0;
    loop {
        let error = match backend.release(claim, linger).await {
            Ok(Freed::Absent) if maybe_applied => return Ok(Freed::Removed),
            Ok(freed) => return Ok(freed),
            Err(error) if !error.is_transient() => return Err(error),
            Err(error) => error,
        };
        maybe_applied |= error.kind() == ErrorKind::Unknown;
        let retry = env.now() + lease::backoff(attempt, env.random().jitter());
        if retry >= until {
            return Err(error);
        }
        env.sleep_until(retry).await;
        attempt += 1;
    }
}
