//! What the watch becomes when the wrapper of a job was killed: the end of the job, or, where the job has ended with its lock kept, the wait
//! for what else runs under that lock.

use std::thread::sleep;
use std::time::{Duration, Instant};

use clinch::backend::NOTICE;
use clinch::{ClaimId, Env, Lane, Locks};
use rustix::process::Pid;

use super::keep::{Ending, Kept};
use super::parts::{Part, Parts, told_of};
use super::{sys, watcher};
use crate::args::{EndJob, Store};
use crate::connect::{TRY_AGAIN, ask, block_on, is_transient};
use crate::exit::{Failure, Outcome};

/// How long a lock is closed at least: those who were killed may take a moment to be gone, for which its lease lasted.
const DYING: Duration = Duration::from_secs(1);

/// Kills all of a job, or keeps its lock; then keeps that closed, if it is to be.
pub(crate) fn run(store: &Store, args: &EndJob) -> Outcome {
    sys::set_name(if args.keep.is_some() { watcher::NAME } else { watcher::ENDS });
    let claim: ClaimId = args.claim.parse().map_err(|_| Failure::usage("this is no claim"))?;
    let job = args.pid.and_then(Pid::from_raw);
    match &args.keep {
        _ if args.ended => {}
        None => {
            let mut parts =
                Parts::new(job.and_then(Part::who_has), told_of(claim, args.all || job.is_some()));
            parts.kill(Instant::now() + NOTICE);
        }
        Some(name) => {
            let grace = args.grace.map(Duration::from_millis);
            let kept = Kept { store, name, claim, all: args.all, grace };
            if kept.until_it_ends(job) == Ending::TakenAway {
                // Whoever did that has opened it, too.
                return Ok(0);
            }
        }
    }
    match (&args.close, args.until, args.of) {
        (Some(name), Some(until), Some(of)) => {
            block_on(close(store, name, claim, clinch::Instant::from_nanos(until), of))
        }
        _ => Ok(0),
    }
}

/// Keeps a lock closed that a process held.
async fn close(store: &Store, name: &str, claim: ClaimId, until: clinch::Instant, of: u32) -> Outcome {
    let env = Env::host(Lane::here()?);
    loop {
        let left = until.since(env.clock().now());
        if left.is_zero() {
            return Ok(0);
        }
        let close = async |locks: Locks| {
            locks.on_behalf_of(of).release_detached_closed(name, claim, left.max(DYING)).await
        };
        // The store may be away for a while, and have the claim when it is back.
        match ask(store, close).await {
            Err(error) if is_transient(&error) => sleep(TRY_AGAIN),
            closed => return Ok(closed.map(|_| 0)?),
        }
    }
}
