//! What the watch becomes when the wrapper of a job was killed: the end of the job, or, where the job has ended with its lock kept, the wait
//! for what else runs under that lock.

use std::collections::{HashSet, VecDeque};
use std::fs;
use std::iter::from_fn;
use std::thread::sleep;
use std::time::{Duration, Instant};

use clinch::{ClaimId, Env, Lane, Locks};
use rustix::process::{Pid, Signal};

use super::keep::{Ending, Kept};
use super::kin::{Found, is_watch};
use super::reentry::{has_entered, was_told};
use super::{sys, watcher};
use crate::args::{EndJob, Store};
use crate::connect::{TRY_AGAIN, ask, block_on, is_transient};
use crate::exit::{Failure, Outcome};

/// For how long a process that is becoming another is looked at again, which has no environment until its program was read; or one that is stuck.
const BECOMING: Duration = Duration::from_secs(1);

/// How long a lock is closed at least: those who were killed may take a moment to be gone, for which its lease lasted.
const DYING: Duration = Duration::from_secs(1);

/// The pause for a process that is just becoming another.
const PAUSE: Duration = Duration::from_millis(1);

/// Kills all of a job, or keeps its lock; then keeps that closed, if it is to be.
pub(crate) fn run(store: &Store, args: &EndJob) -> Outcome {
    sys::set_name(if args.keep.is_some() { watcher::NAME } else { watcher::ENDS });
    let claim: ClaimId = args.claim.parse().map_err(|_| Failure::usage("this is no claim"))?;
    let job = args.pid.and_then(Pid::from_raw);
    match &args.keep {
        _ if args.ended => {}
        None => end(job, told_of(claim, args.all || job.is_some())),
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

/// Who else is of a job: all who were told of its claim, or those alone that have entered that. `None`: cannot be told yet. Parts of a job may have lost
/// their parents with the wrapper, as all do whom the kernel hangs up, and nobody can tell them from daemons.
pub(super) fn told_of(claim: ClaimId, all: bool) -> impl Fn(Pid) -> Option<bool> {
    move |pid| if all { was_told(pid, claim) } else { has_entered(pid, claim) }
}

/// Kills a job, and all who are of it.
pub(super) fn end(mut job: Option<Pid>, is_of_it: impl Fn(Pid) -> Option<bool>) {
    let all = || all_of(&is_of_it);
    // First without the others, of whom some may take a while to be told.
    stop(|| job.into_iter());
    let mut killed = HashSet::new();
    loop {
        let found = stop(|| job.into_iter().chain(all()));
        if found.iter().filter(|found| killed.insert(found.pid)).count() == 0 {
            return;
        }
        // From the last on, so that nobody loses a parent before it is found.
        for found in found.iter().rev() {
            found.send(Signal::KILL);
        }
        job = None;
    }
}

/// Stops these and all that descends from them, until there is nobody left who could start another.
fn stop<I: Iterator<Item = Pid>>(roots: impl Fn() -> I) -> Vec<Found> {
    let mut stopped = HashSet::new();
    loop {
        // At once: of others it may not be told yet.
        let all =
            tree(roots().map(|pid| Found { pid, parent: None }).inspect(|root| root.send(Signal::STOP)));
        let new: Vec<&Found> = all.iter().filter(|found| stopped.insert(found.pid)).collect();
        if new.is_empty() {
            return all;
        }
        for found in new {
            found.send(Signal::STOP);
        }
    }
}

/// Processes and their descendants: whoever is met again below another stands behind that one, too.
pub(super) fn tree(roots: impl Iterator<Item = Found>) -> Vec<Found> {
    let mut all: Vec<Found> = roots.collect();
    let mut next = 0;
    while let Some(parent) = all.get(next).map(|found| found.pid) {
        all.extend(Found::children(parent));
        next += 1;
    }
    all
}

/// All who are of it. Of whom that cannot be told yet is asked again last, for a while.
pub(super) fn all_of(is_of_it: impl Fn(Pid) -> Option<bool>) -> impl Iterator<Item = Pid> {
    let (mut next, since) = (everybody().collect::<VecDeque<_>>(), Instant::now());
    from_fn(move || {
        loop {
            let pid = next.pop_front()?;
            match is_of_it(pid) {
                Some(true) => return Some(pid),
                None if since.elapsed() < BECOMING => {
                    sleep(PAUSE);
                    next.push_back(pid);
                }
                _ => {}
            }
        }
    })
}

fn everybody() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let all = entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    all.filter(|pid| !is_watch(*pid))
}
