//! What the watch becomes when the wrapper of a job was killed: the end of the job, or, where the job has ended with its lock kept, the wait
//! for what else runs under that lock.

use std::fmt;
use std::str::FromStr;
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

/// A lock that is to be kept closed behind a claim.
#[derive(Clone, Debug)]
pub(crate) struct Closing {
    pub(crate) until: clinch::Instant,
    pub(crate) claim: ClaimId,
    pub(crate) name: String,
}

/// As one word of a command line; the name comes last, as it may have anything in it.
impl fmt::Display for Closing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.until.as_nanos(), self.claim, self.name)
    }
}

impl FromStr for Closing {
    type Err = &'static str;

    fn from_str(word: &str) -> Result<Closing, &'static str> {
        let parts = || {
            let (until, rest) = word.split_once(':')?;
            let (claim, name) = rest.split_once(':')?;
            let until = clinch::Instant::from_nanos(until.parse().ok()?);
            Some(Closing { until, claim: claim.parse().ok()?, name: name.to_owned() })
        };
        parts().ok_or("this is no NANOS:CLAIM:NAME")
    }
}

/// Kills all of a job, or keeps its lock; then keeps that closed, if it is to be, and notes that it ran.
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
    let Some(of) = args.of else { return Ok(0) };
    let turn = args.count.as_ref().filter(|_| args.began);
    block_on(async {
        let (closed, counted) = tokio::join!(close(store, args.close.as_ref(), of), close(store, turn, of));
        closed.and(counted)
    })
}

/// Keeps a lock closed that a process held.
async fn close(store: &Store, closing: Option<&Closing>, of: u32) -> Outcome {
    let Some(Closing { until, claim, name }) = closing else { return Ok(0) };
    let env = Env::host(Lane::here()?);
    loop {
        let left = until.since(env.clock().now());
        if left.is_zero() {
            return Ok(0);
        }
        let close = async |locks: Locks| {
            locks.on_behalf_of(of).release_detached_closed(name, *claim, left.max(DYING)).await
        };
        // The store may be away for a while, and have the claim when it is back.
        match ask(store, close).await {
            Err(error) if is_transient(&error) => tokio::time::sleep(TRY_AGAIN).await,
            closed => return Ok(closed.map(|_| 0)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lock is not closed whose name has in it what parts the words.
    #[test]
    fn any_name_is_passed_on() {
        let (until, claim) = (clinch::Instant::from_nanos(17), ClaimId::from_bits(5));
        let closing = Closing { until, claim, name: "https://a:8443/x y".to_owned() };
        let read: Closing = closing.to_string().parse().unwrap();
        assert_eq!((read.until, read.claim, read.name), (until, claim, closing.name));
        assert!(["", "1", "1:x:y", ":5:y"].iter().all(|word| word.parse::<Closing>().is_err()));
    }
}
