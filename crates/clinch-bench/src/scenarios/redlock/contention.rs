//! `redlock-contention`: how fast a lock on five servers goes from one waiter to another, whether everybody gets their turn,
//! and how many votes are split on the way.
//!
//! Without a queue across servers, waiters of different processes compete. Those of one process do not.

use std::time::Duration;

use super::votes::{self, End};
use super::{SERVERS, SHORT, Servers};
use crate::Result;
use crate::args::Settings;
use crate::contend::Kind;
use crate::contest::{self, Contest, HANDOFFS, LENGTH, Place};
use crate::harness::{Case, Sample, interleave};
use crate::redis_server::{self, Monitor};
use crate::report::{Metric, Report, Table};
use crate::scenarios::redis::{COMMANDS, counted_on};

const HOLD: Duration = Duration::from_millis(1);

/// Of the tasks of one client, which come in their order.
const TARGET_JAIN: f64 = 0.99;

const CONTESTS: [Contest; 4] = [
    Contest { place: Place::Tasks, waiters: 2, hold: HOLD, length: LENGTH },
    Contest { place: Place::Tasks, waiters: 16, hold: HOLD, length: LENGTH },
    Contest { place: Place::Processes, waiters: 2, hold: HOLD, length: LENGTH },
    Contest { place: Place::Processes, waiters: 16, hold: HOLD, length: LENGTH },
];

/// On one server, with its queue.
const ONE: &str = "one server";

const VOTES: Metric = Metric::new("votes", "per acquisition");
const SPOILED: Metric = Metric::new("grants after a split", "%");

pub(crate) fn run(settings: &Settings) -> Result<Report> {
    let (servers, one) = (Servers::voting()?, redis_server::start()?);
    let (url, one) = (servers.url(SHORT), one.url());
    let contests = settings.amount(&CONTESTS[..], &[CONTESTS[0], CONTESTS[2]]);
    let mut report = Report::default();
    for contest in contests {
        let case = |name, url, urls| Case::new(name, move || compete(contest, url, urls, settings));
        let queued = std::slice::from_ref(&one);
        let cases = vec![case(Kind::Clinch.name(), &url, &servers.urls[..]), case(ONE, &one, queued)];
        let rows = interleave(settings.rounds, cases)?;
        let table = Table { title: contest.to_string(), floor: Some((ONE, HANDOFFS.name)), rows };
        match contest.place {
            Place::Tasks => report.targets.extend(contest::targets(&table, TARGET_JAIN)),
            Place::Processes => report.targets.extend(contest::exclusion(&table)),
        }
        report.tables.push(table);
    }
    let watched = |contest| {
        let (url, urls) = (&url, &servers.urls);
        Case::new(format!("{contest}"), move || watched(contest, url, urls, settings))
    };
    report.tables.push(Table {
        title: "how votes ended, seen by MONITOR on all servers".to_owned(),
        floor: None,
        rows: interleave(settings.rounds, contests.iter().map(watched).collect())?,
    });
    report.notes.push(
        "A vote is one step of one claim: a request to all servers. It is won; or somebody had a quorum when it ended; or the \
         last holder's release was still on its way; or it was split: nobody had a quorum, and only claims that did not get \
         one either were in the way. Contests that MONITOR watches are slower."
            .to_owned(),
    );
    Ok(report)
}

fn compete(contest: &Contest, url: &str, urls: &[String], settings: &Settings) -> Result<Sample> {
    let (outcome, calls) = counted_on(urls, || contest.run(Kind::Clinch, url, settings))?;
    let mut sample = outcome.sample();
    let each = |calls: u64| calls as f64 / outcome.acquisitions.max(1) as f64;
    // Scripts call PTTL too. What a waiter sends itself comes with CLIENT CACHING each time.
    sample.push((COMMANDS, each(calls.sent(&[]) + calls.of("client|caching"))));
    if urls.len() == SERVERS {
        // Each vote reads the clock once.
        sample.push((VOTES, each(calls.of("time")) / SERVERS as f64));
    }
    Ok(sample)
}

fn watched(contest: &Contest, url: &str, urls: &[String], settings: &Settings) -> Result<Sample> {
    let monitors = urls.iter().map(|url| Monitor::start(url)).collect::<Result<Vec<_>>>()?;
    let outcome = contest.run(Kind::Clinch, url, settings)?;
    let mut events = Vec::new();
    let mut sent = 0;
    for (server, monitor) in monitors.into_iter().enumerate() {
        let lines = monitor.end()?;
        sent += lines.iter().filter_map(|line| redis_server::sent_command(line)).count();
        events.extend(votes::read(server, &lines));
    }
    let count = votes::judge(events, SERVERS);
    let share = |part: usize, all: usize| part as f64 / all.max(1) as f64 * 100.0;
    let acquisitions = outcome.acquisitions.max(1) as f64;
    let mut sample = vec![(VOTES, count.votes() as f64 / acquisitions)];
    let ends = [(End::Won, "won"), (End::Held, "held"), (End::Early, "too early"), (End::Split, "split")];
    sample.extend(ends.map(|(end, name)| (Metric::new(name, "%"), share(count.of(end), count.votes()))));
    sample.push((SPOILED, share(count.spoiled, count.of(End::Won))));
    sample.push((COMMANDS, sent as f64 / acquisitions));
    sample.extend(outcome.sample());
    Ok(sample)
}
