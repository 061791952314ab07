//! `redis-kill`: what a process that was killed with SIGKILL costs those who wait. Its lease has to run out if it held the
//! lock; if it waited itself, those behind it should hardly notice.

use std::time::Duration;

use super::counted;
use crate::Result;
use crate::args::Settings;
use crate::contend::Kind;
use crate::harness::{Case, Sample, interleave};
use crate::machine::{nanos, now, sleep_until};
use crate::raw_redis::{OWNER, Raw, Reply};
use crate::redis_server;
use crate::report::{Limit, Metric, Report, Table, Target};
use crate::scenarios::kill::{killed_holder, late, while_waiting};
use crate::worker::Worker;

/// The figures to reach: after the end of the lease, commands, and after a release.
const TARGET_LATE_MS: f64 = 20.0;
const TARGET_COMMANDS: f64 = 1.0;
const TARGET_NEXT_MS: f64 = 3000.0;

/// The lease of the holder and of the waiter, who renews its place three times in it.
const LEASE: Duration = Duration::from_secs(6);

/// From when somebody has asked until something is done to others: long enough to surely wait.
const SETTLE: Duration = Duration::from_millis(300);

/// Until when before the lease ends commands are counted: what comes then is the grant.
const SPARE: Duration = Duration::from_millis(100);

const SLEEPER: &str = "PTTL, sleep, SET NX";

const LATE: Metric = Metric::new("grant after the end of the lease", "ms");
const COMMANDS: Metric = Metric::new("commands while waiting", "/s");
const NEXT: Metric = Metric::new("release to grant", "ms");

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    let server = redis_server::start()?;
    let url = server.url();
    let ours = Kind::Clinch.name();

    let cases = vec![Case::new(SLEEPER, || sleeper(&url)), Case::new(ours, || counted_kill(&url))];
    let held = Table {
        title: format!("the holder is killed, lease {LEASE:?}"),
        floor: Some((SLEEPER, LATE.name)),
        rows: interleave(settings.rounds, cases)?,
    };
    let case = |kind: Kind| {
        let url = &url;
        Case::new(kind.name(), move || killed_waiter(kind, url))
    };
    let queued = Table {
        title: "the first of two waiters is killed, then the lock is released".to_owned(),
        floor: Some((Kind::Blpop.name(), NEXT.name)),
        rows: interleave(settings.rounds, [Kind::Blpop, Kind::Clinch].map(case).into())?,
    };
    let target = |what: &str, limit, measured| Target {
        what: format!("redis-kill: {what}"),
        limit: Limit::AtMost(limit),
        measured,
    };
    let targets = vec![
        target(
            "grant after the end of the lease, worst round, ms",
            TARGET_LATE_MS,
            held.max(ours, LATE.name),
        ),
        // On a fresh server the first round has scripts to load.
        target("commands per second while waiting", TARGET_COMMANDS, held.median(ours, COMMANDS.name)),
        target(
            "release past a killed waiter to grant, worst round, ms",
            TARGET_NEXT_MS,
            queued.max(ours, NEXT.name),
        ),
    ];
    Ok(Report { tables: vec![held, queued], targets, ..Report::default() })
}

/// The floor: nobody can know of the end of a lease before it ends.
fn sleeper(url: &str) -> Result<Sample> {
    const KEY: &str = "raw:kill";
    let mut raw = Raw::connect(url)?;
    let lease = LEASE.as_millis().to_string();
    let take = ["SET", KEY, OWNER, "NX", "PX", &lease];
    if raw.call(&take)? == Reply::Nil {
        return Err("somebody has the lock already".into());
    }
    let taken = now();
    let (got, calls) = counted(url, || {
        while raw.call(&take)? == Reply::Nil {
            let left = raw.call(&["PTTL", KEY])?.int()?;
            // A key has ended when its time is past, not when it is reached.
            std::thread::sleep(Duration::from_millis(left.unsigned_abs() + 1));
        }
        Ok(now())
    })?;
    raw.call(&["DEL", KEY])?;
    let commands = calls.sent(&["set", "pttl"]) as f64 / LEASE.as_secs_f64();
    Ok(vec![(LATE, late(taken, LEASE, got)), (COMMANDS, commands)])
}

/// What waits for the lock of a killed holder costs the server.
fn counted_kill(url: &str) -> Result<Sample> {
    let url = format!("{url}?ttl={LEASE:?}");
    let meanwhile = |end: u64| {
        let from = now();
        let (to, calls) = counted(&url, || {
            sleep_until(end - nanos(SPARE));
            Ok(now())
        })?;
        // Connecting comes once, however long the wait is.
        let sent = calls.sent(&[]) - calls.of("hello");
        Ok(sent as f64 / Duration::from_nanos(to - from).as_secs_f64())
    };
    let (commands, late) = killed_holder(Kind::Clinch, &url, LEASE, SETTLE, meanwhile)?;
    Ok(vec![(LATE, late), (COMMANDS, commands)])
}

/// Of two waiters the first is killed, in a process of its own; then the lock is released.
fn killed_waiter(kind: Kind, url: &str) -> Result<Sample> {
    kind.prepare(url)?;
    let mut holder = Worker::start("hold", kind, url)?;
    let mut first = Worker::start("queue", kind, url)?;
    std::thread::sleep(SETTLE);
    let (released, got) = while_waiting(kind, url, SETTLE, || {
        first.kill()?;
        std::thread::sleep(SETTLE);
        let released = now();
        holder.end()?;
        Ok(released)
    })?;
    Ok(vec![(NEXT, (got as f64 - released as f64) / 1e6)])
}
