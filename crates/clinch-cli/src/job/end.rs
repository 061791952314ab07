//! The end of a job whose wrapper was killed: what the watch becomes.

use std::collections::HashSet;
use std::fs;

use clinch::ClaimId;
use rustix::process::{Pid, Signal, kill_process_group};

use super::kin::{Found, children};
use crate::args::EndJob;
use crate::exit::{Failure, Outcome};

/// Kills all of a job.
pub(crate) fn run(args: &EndJob) -> Outcome {
    let claim: ClaimId = args.claim.parse().map_err(|_| Failure::usage("this is no claim"))?;
    if let Some(job) = args.pid.and_then(Pid::from_raw) {
        end(job);
        // The last of them, and members of its group that have lost their parents.
        let _ = kill_process_group(job, Signal::KILL);
    }
    if args.all {
        for root in holders(claim) {
            end(root);
            Found { pid: root, parent: None }.send(Signal::KILL);
        }
    }
    Ok(0)
}

/// Stops a process and kills all that descends from it: when there is nobody left who could start another, and from the last on, so that
/// nobody loses a parent before it is found.
fn end(root: Pid) {
    let mut stopped = HashSet::new();
    let mut all;
    loop {
        all = tree(root);
        let new: Vec<&Found> = all.iter().filter(|found| stopped.insert(found.pid)).collect();
        if new.is_empty() {
            break;
        }
        for found in new {
            found.send(Signal::STOP);
        }
    }
    for found in all.iter().skip(1).rev() {
        found.send(Signal::KILL);
    }
}

/// A process and its descendants, parents first.
fn tree(root: Pid) -> Vec<Found> {
    let mut all = vec![Found { pid: root, parent: None }];
    let mut next = 0;
    while let Some(parent) = all.get(next).map(|found| found.pid) {
        all.extend(children(parent, true).map(|pid| Found { pid, parent: Some(parent) }));
        next += 1;
    }
    all
}

/// Those that were told of this claim: all that the job has started and that did not hide it.
fn holders(claim: ClaimId) -> Vec<Pid> {
    let claim = claim.to_string();
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    let told = |pid: &Pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(claim.len()).any(|part| part == claim.as_bytes())
    };
    pids.filter(told).collect()
}
