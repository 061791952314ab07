//! What the watch becomes when the wrapper of a job was killed: the end of the job, or, where the job has ended with its lock kept, the wait
//! for what else runs under that lock.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use clinch::backend::{LEFT_FOR, NOTICE};
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

/// How often a store is asked at first without much of a pause.
const OFTEN: u32 = 40;

/// The pause from then on.
const SELDOM: Duration = Duration::from_secs(5);

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
            // The job may run for longer than its turn lasts.
            let counted = async || count(store, args).await;
            return match kept.until_it_ends(job, counted) {
                // Whoever did that has opened it, too.
                (Ending::TakenAway, counted) => counted,
                (Ending::ByItself, counted) => block_on(close(store, args, args.close.as_ref())).and(counted),
            };
        }
    }
    block_on(async {
        let (closed, counted) = tokio::join!(close(store, args, args.close.as_ref()), count(store, args));
        closed.and(counted)
    })
}

/// Notes that the job ran, if it began, and lets go of its turn.
async fn count(store: &Store, args: &EndJob) -> Outcome {
    let counted = close(store, args, args.count.as_ref().filter(|_| args.began)).await;
    args.turn.into_iter().for_each(watcher::let_go);
    counted
}

/// Keeps a lock closed that a process held.
async fn close(store: &Store, args: &EndJob, closing: Option<&Closing>) -> Outcome {
    let (Some(of), Some(Closing { until, claim, name })) = (args.of, closing) else { return Ok(0) };
    let env = Env::host(Lane::here()?);
    let end = env.clock().now() + asks_for(Duration::from_millis(args.ttl));
    let mut tries = 0;
    loop {
        let now = env.clock().now();
        let left = until.since(now);
        if left.is_zero() {
            return Ok(0);
        }
        let close = async |locks: Locks| {
            locks.on_behalf_of(of).release_detached_closed(name, *claim, left.max(DYING)).await
        };
        // The store may be away for a while, and have the claim when it is back.
        match ask(store, close).await {
            Err(error) if is_transient(&error) && now < end => tokio::time::sleep(pause(tries)).await,
            closed => return Ok(closed.map(|_| 0)?),
        }
        tries += 1;
    }
}

/// How long a store that is away is asked to close a lock: as long as a client tries what nobody has answered.
fn asks_for(ttl: Duration) -> Duration {
    ttl.max(LEFT_FOR)
}

/// The pause before it is asked again.
fn pause(tries: u32) -> Duration {
    if tries < OFTEN { TRY_AGAIN } else { SELDOM }
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

    /// A store that is gone for good is asked four times a second for ten years.
    #[test]
    fn a_store_that_is_gone_is_asked_less_often_and_not_for_ever() {
        assert_eq!((pause(0), pause(OFTEN)), (TRY_AGAIN, SELDOM));
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        assert_eq!((asks_for(Duration::ZERO), asks_for(hours(24))), (hours(1), hours(24)));
    }
}
