//! What is measured. Each scenario has its floor, its target, and its own file.

mod contention;
pub(crate) mod etcd;
pub(crate) mod held;
mod kill;
mod pair;
pub(crate) mod redis;
pub(crate) mod redlock;
mod run;

use crate::Result;
use crate::args::Settings;
use crate::report::Report;

/// One thing to measure, by name.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) run: fn(&Settings) -> Result<Report>,
}

pub(crate) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "file-pair",
        about: "uncontended lock and release in one process, beside open + flock + close",
        run: pair::run,
    },
    Scenario {
        name: "run",
        about: "\"clinch run -n x -- true\" beside \"flock -n f true\", whole processes",
        run: run::run,
    },
    Scenario {
        name: "file-contention",
        about: "2, 16 and 64 waiters on one lock, tasks and processes, beside blocking flock",
        run: contention::run,
    },
    Scenario {
        name: "kill",
        about: "from the SIGKILL of the holder to the grant of a waiter, beside blocking flock",
        run: kill::run,
    },
    Scenario {
        name: "held",
        about: "10,000 held leases: CPU of the keeper, memory per lease, losses",
        run: held::run,
    },
    Scenario {
        name: "redis-pair",
        about: "uncontended lock and release on Redis, beside SET NX and a script that deletes",
        run: redis::pair::run,
    },
    Scenario {
        name: "redis-throughput",
        about: "64 tasks with a lock each on Redis, beside one pipelined connection",
        run: redis::throughput::run,
    },
    Scenario {
        name: "redis-contention",
        about: "2 to 1000 waiters on one lock of Redis, tasks and processes, beside BLPOP and LPUSH",
        run: redis::contention::run,
    },
    Scenario {
        name: "redis-held",
        about: "10,000 and 100,000 held leases on Redis, beside a script for 256 keys at a time",
        run: redis::held::run,
    },
    Scenario {
        name: "redis-kill",
        about: "from the end of a killed holder's lease on Redis, or past a killed waiter, to the next grant",
        run: redis::kill::run,
    },
    Scenario {
        name: "etcd-pair",
        about: "uncontended lock and release on etcd, beside a transaction that puts and a delete",
        run: etcd::pair::run,
    },
    Scenario {
        name: "etcd-contention",
        about: "2, 16 and 64 waiters on one lock of etcd, beside Go's concurrency.Mutex and etcd's Lock API",
        run: etcd::contention::run,
    },
    Scenario {
        name: "etcd-held",
        about: "10,000 held leases on etcd, beside as many keys on one lease that is kept alive",
        run: etcd::held::run,
    },
    Scenario {
        name: "etcd-kill",
        about: "from the end of a killed holder's lease on etcd to the next grant, beside Go's concurrency.Mutex",
        run: etcd::kill::run,
    },
    Scenario {
        name: "redlock-pair",
        about: "uncontended lock and release on five Redis servers, beside the same requests with no logic",
        run: redlock::pair::run,
    },
    Scenario {
        name: "redlock-stopped",
        about: "one, two and three of five Redis servers stand still: locks, releases, what is left, exits",
        run: redlock::stopped::run,
    },
    Scenario {
        name: "redlock-contention",
        about: "2 and 16 waiters on one lock of five Redis servers, tasks and processes: votes and fairness",
        run: redlock::contention::run,
    },
];
