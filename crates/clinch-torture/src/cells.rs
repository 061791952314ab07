//! What meets: every kind of fault with every kind of step. A pair that never met says that the fault was inert, or that the
//! work was, and proves nothing.

use std::collections::BTreeMap;
use std::fmt;

macro_rules! kinds {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $kind:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum $name {
            $($(#[$of])* $kind,)*
        }

        impl $name {
            pub(crate) const ALL: &[$name] = &[$($name::$kind),*];

            pub(crate) fn word(self) -> &'static str {
                match self {
                    $($name::$kind => $word,)*
                }
            }

            pub(crate) fn from_word(word: &str) -> Option<$name> {
                $name::ALL.iter().copied().find(|kind| kind.word() == word)
            }
        }
    };
}

kinds! {
    /// What a worker does to a lock.
    Step {
        /// Waits for a grant.
        Lock = "lock",
        /// Asks without waiting.
        Try = "try",
        /// Drops a request at one of its polls.
        Cancel = "cancel",
        /// Holds, while leases are renewed in the background.
        Hold = "hold",
        Extend = "extend",
        Verify = "verify",
        Downgrade = "downgrade",
        /// Leaves a lease to itself.
        Detach = "detach",
        /// Renews or ends a lease that was left to itself.
        Tend = "tend",
        /// Drops a guard.
        Drop = "drop",
        Release = "release",
        /// Holds a lock under `clinch run`.
        Job = "job",
    }
}

kinds! {
    /// What is done to whom.
    Fault {
        /// SIGKILL to a worker.
        Kill = "kill",
        /// SIGSTOP to a worker, for longer than a TTL.
        Stop = "stop",
        /// A worker's runtime is blocked, for longer than a TTL.
        Block = "block",
        /// SIGKILL to the `clinch run` of a job.
        KillWrapper = "kill-wrapper",
        /// SIGSTOP to the `clinch run` of a job, for longer than a TTL.
        StopWrapper = "stop-wrapper",
        /// SIGKILL to a job.
        KillJob = "kill-job",
        /// An operator takes a claim away.
        Break = "break",
        /// Connections are reset, in the middle of requests and of answers.
        Cut = "cut",
        /// Connections are reset, and new ones refused.
        Refuse = "refuse",
        /// Nothing is delivered for a while; then everything is.
        Silence = "silence",
        /// Requests are delivered, answers are not for a while.
        Deaf = "deaf",
        /// Nothing is delivered for a while, and then requests whose callers are gone.
        Late = "late",
        /// What is under way is delivered after what its callers have sent on new connections meanwhile.
        Strand = "strand",
        /// Everything takes longer.
        Slow = "slow",
        /// SIGSTOP to a server, for longer than a TTL.
        ServerStop = "server-stop",
        /// SIGKILL to a server, which comes back with its data.
        ServerKill = "server-kill",
        /// SIGKILL to a server, which comes back without its data.
        ServerEmpty = "server-empty",
        /// SIGKILL to all servers, which come back with their data.
        AllKill = "all-kill",
        /// A server reaches none of the others.
        Partition = "partition",
        /// A server takes no more data.
        Full = "full",
        /// A server takes no more connections.
        Crowd = "crowd",
        /// A server's wall clock is set.
        ClockStep = "clock-step",
        /// A server's wall clock runs 8 % off.
        ClockRate = "clock-rate",
        /// Another server becomes the master.
        Failover = "failover",
        /// A slot of a cluster moves.
        Reshard = "reshard",
    }
}

/// How often each fault met each step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cells(BTreeMap<(Fault, Step), u64>);

impl Cells {
    pub(crate) fn add(&mut self, fault: Fault, step: Step, count: u64) {
        *self.0.entry((fault, step)).or_default() += count;
    }

    pub(crate) fn merge(&mut self, other: Cells) {
        other.0.into_iter().for_each(|((fault, step), count)| self.add(fault, step, count));
    }

    pub(crate) fn count(&self, fault: Fault, step: Step) -> u64 {
        self.0.get(&(fault, step)).copied().unwrap_or(0)
    }

    /// How often anything met.
    pub(crate) fn all(&self) -> u64 {
        self.0.values().sum()
    }

    /// Whether a fault met nothing at all.
    pub(crate) fn is_inert(&self, fault: Fault, steps: &[Step]) -> bool {
        steps.iter().all(|step| self.count(fault, *step) == 0)
    }

    /// Whether a step was met by nothing at all.
    pub(crate) fn is_idle(&self, step: Step, faults: &[Fault]) -> bool {
        faults.iter().all(|fault| self.count(*fault, step) == 0)
    }

    /// The pairs of these that never met.
    pub(crate) fn empty(&self, faults: &[Fault], steps: &[Step]) -> Vec<(Fault, Step)> {
        let pairs = faults.iter().flat_map(|fault| steps.iter().map(|step| (*fault, *step)));
        pairs.filter(|(fault, step)| can_meet(*fault, *step) && self.count(*fault, *step) == 0).collect()
    }

    pub(crate) fn table(&self, faults: &[Fault], steps: &[Step]) -> String {
        let mut text = format!("{:<12}", "");
        steps.iter().for_each(|step| text += &format!("{:>10}", step.word()));
        for fault in faults {
            text += &format!("\n{:<12}", fault.word());
            for step in steps {
                let cell = match self.count(*fault, *step) {
                    0 if !can_meet(*fault, *step) => "-".to_owned(),
                    count => count.to_string(),
                };
                text += &format!("{cell:>10}");
            }
        }
        text
    }
}

/// An operator takes a claim away from who holds or waits; whatever else its owner does is no matter of the store's. Workers
/// harm themselves, and jobs are no workers.
fn can_meet(fault: Fault, step: Step) -> bool {
    match fault {
        Fault::Break => matches!(step, Step::Hold | Step::Lock),
        Fault::Kill | Fault::Stop | Fault::Block => step != Step::Job,
        Fault::KillWrapper | Fault::StopWrapper | Fault::KillJob => step == Step::Job,
        _ => true,
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_that_never_met_is_told() {
        let mut cells = Cells::default();
        let (faults, steps) = ([Fault::Kill, Fault::Break], [Step::Hold, Step::Try]);
        cells.add(Fault::Kill, Step::Hold, 2);
        cells.add(Fault::Break, Step::Hold, 1);
        assert_eq!(cells.empty(&faults, &steps), [(Fault::Kill, Step::Try)], "a try cannot be broken");
        cells.add(Fault::Kill, Step::Try, 1);
        assert!(cells.empty(&faults, &steps).is_empty());
    }
}
