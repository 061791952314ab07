//! What the watch becomes when the wrapper of a job was killed: the end of the job, or, where the job has ended with its lock kept, the wait
//! for what else runs under that lock.

use std::collections::{HashSet, VecDeque};
use std::fs;
use std::iter::from_fn;
use std::thread::sleep;
use std::time::{Duration, Instant};

use clinch::ClaimId;
use rustix::process::{Pid, Signal};

use super::kin::Found;
use super::reentry::{has_entered, was_told};
use super::supervise::LEFT_BEHIND;
use super::{sys, watch};
use crate::args::EndJob;
use crate::exit::{Failure, Outcome};

/// For how long a process that is becoming another is looked at again, which has no environment until its program was read; or one that is stuck.
const BECOMING: Duration = Duration::from_secs(1);

/// The pause for a process that is just becoming another.
const PAUSE: Duration = Duration::from_millis(1);

/// Kills all of a job, or keeps its lock.
pub(crate) fn run(args: &EndJob) -> Outcome {
    let claim: ClaimId = args.claim.parse().map_err(|_| Failure::usage("this is no claim"))?;
    let mut job = args.pid.and_then(Pid::from_raw);
    // Parts of a job may have lost their parents with the wrapper, as all do whom the kernel hangs up. Nobody can tell them from daemons.
    let is_of_it = if args.all || job.is_some() { was_told } else { has_entered };
    let all = || all_of(|pid| is_of_it(pid, claim));
    if args.keep {
        sys::set_name(watch::NAME);
        while let Some(one) = all().next() {
            while is_of_it(one, claim) == Some(true) {
                sleep(LEFT_BEHIND);
            }
        }
        return Ok(0);
    }
    // First without the others, of whom some may take a while to be told.
    stop(|| job.into_iter());
    let mut killed = HashSet::new();
    loop {
        let found = stop(|| job.into_iter().chain(all()));
        if found.iter().filter(|found| killed.insert(found.pid)).count() == 0 {
            return Ok(0);
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
fn tree(roots: impl Iterator<Item = Found>) -> Vec<Found> {
    let mut all: Vec<Found> = roots.collect();
    let mut next = 0;
    while let Some(parent) = all.get(next).map(|found| found.pid) {
        all.extend(Found::children(parent));
        next += 1;
    }
    all
}

/// All who are of it. Of whom that cannot be told yet is asked again last, for a while.
fn all_of(is_of_it: impl Fn(Pid) -> Option<bool>) -> impl Iterator<Item = Pid> {
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
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}
