//! What is measured by using the store: how long an answer takes, and a lock from its grant to its release.

use std::time::Duration;

use clinch::backend::attempt;
use clinch::{Check, Env, Guard, Lane, Locks, Owner, Released};
use schemars::JsonSchema;
use serde::Serialize;

use super::failed;
use crate::connect::{ANSWER_FOR, Limits};
use crate::exit::Failure;
use crate::output::shell_word;

/// How often the store is asked for its round trip, if that takes no longer than one answer may.
const CALLS: usize = 50;

/// How long answers take, in microseconds.
#[derive(Serialize, JsonSchema)]
pub(super) struct RoundTrip {
    /// How often it was asked.
    calls: usize,
    /// Half of the answers took no longer.
    p50_us: u64,
    /// Of a hundred answers one took longer.
    p99_us: u64,
}

/// How long each step of a lock took, in microseconds.
#[derive(Serialize, JsonSchema)]
pub(super) struct LockTimes {
    /// The lock.
    name: String,
    /// To acquire it.
    acquire_us: u64,
    /// To renew it.
    renew_us: u64,
    /// To release it.
    release_us: u64,
}

/// Asks for a lock's state again and again.
pub(super) async fn round_trips(locks: &Locks) -> Result<(Check, Option<RoundTrip>), Failure> {
    let (env, name) = (Env::host(Lane::here()?), name());
    let until = env.clock().now() + ANSWER_FOR;
    let mut times = Vec::with_capacity(CALLS);
    while times.len() < CALLS && env.clock().now() < until {
        let begun = env.clock().now();
        if let Err(error) = Limits::of_a_question(&env).keep(locks.state(&name)).await {
            let remedy = "look whether the store, or the way to it, stands still at times";
            return Ok((failed("round-trip", error, remedy), None));
        }
        times.push(env.clock().now().since(begun));
    }
    times.sort_unstable();
    let calls = times.len();
    let at = |percent: usize| {
        times.get(calls.saturating_sub(1).min(calls * percent / 100)).copied().unwrap_or_default()
    };
    let (p50, p99) = (at(50), at(99));
    let seen = format!("p50 {p50:.1?}, p99 {p99:.1?} of {calls} reads");
    let patience = attempt(locks.lease_ttl());
    let check = match p99 > patience / 2 {
        false => Check::pass("round-trip", seen),
        true => Check::warn(
            "round-trip",
            format!("{seen}; a renewal is given {patience:?}"),
            "use a nearer store, or say a longer ttl= in the URL",
        ),
    };
    Ok((check, Some(RoundTrip { calls, p50_us: us(p50), p99_us: us(p99) })))
}

/// Acquires, renews and releases a lock.
pub(super) async fn lock(locks: &Locks) -> Result<(Check, Option<LockTimes>), Failure> {
    let (env, name) = (Env::host(Lane::here()?), name());
    let begun = env.clock().now();
    let wait = async { locks.mutex(&name)?.lock().timeout(ANSWER_FOR).await };
    let guard = match wait.await {
        Ok(guard) => guard,
        Err(error) => {
            let remedy =
                format!("look at the lines above; `clinch show {}` tells who has it", shell_word(&name));
            return Ok((failed("lock", error, remedy), None));
        }
    };
    let (token, acquired) = (guard.token(), env.clock().now());
    let limits = Limits::of_a_question(&env);
    Ok(match limits.keep(renew_and_release(locks, guard, &env)).await {
        Err(error) => (failed("lock", error, "look at the lines above"), None),
        Ok((renewed, released)) => {
            let steps = [acquired.since(begun), renewed.since(acquired), released.since(renewed)];
            let [acquire, renew, release] = steps;
            let seen = format!(
                "acquired in {acquire:.1?}, renewed in {renew:.1?}, released in {release:.1?}; token {token}"
            );
            let [acquire_us, renew_us, release_us] = steps.map(us);
            (Check::pass("lock", seen), Some(LockTimes { name, acquire_us, renew_us, release_us }))
        }
    })
}

/// When each was done.
async fn renew_and_release(
    locks: &Locks,
    guard: Guard,
    env: &Env,
) -> clinch::Result<(clinch::Instant, clinch::Instant)> {
    guard.extend(locks.lease_ttl()).await?;
    let renewed = env.clock().now();
    match guard.release().await? {
        Released::AlreadyLost(loss) => Err(clinch::Error::new(
            clinch::ErrorKind::Lost,
            format!("it was lost before its release: {loss}"),
        )),
        _ => Ok((renewed, env.clock().now())),
    }
}

/// Of our own, and the same each time: `file://` keeps the file of every lock.
fn name() -> String {
    let Owner { host, user, .. } = Owner::of_this_process();
    format!("clinch-doctor/{user}@{host}")
}

fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
