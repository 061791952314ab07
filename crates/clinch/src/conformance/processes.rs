//! Killed processes.
//!
//! These start further processes of the test executable, tell them what to do, and kill some of them with SIGKILL.
//! On a store that is one process's own they check that it says so.

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use clinch_verify::{History, Property, Rules};
use futures_util::future::join_all;

use super::Fixture;
use super::client::{Client, LONG_TTL, eventually, join, queue, unique, until_past};
use super::history::{Ask, Record, judge, leave, take};
use super::worker::Worker;
use crate::guard::Released;

/// The store's URL, where other processes can reach it.
async fn reachable(fixture: &dyn Fixture) -> Option<(Client, String)> {
    let client = Client::new(fixture).await;
    let url = fixture.url();
    assert_eq!(client.capabilities().processes, url.is_some(), "url() does not fit the capability");
    Some((client, url?))
}

/// The TTL of a process that is to be killed: never to be waited for where the store frees a dead process's locks.
fn killable_ttl(fixture: &dyn Fixture, client: &Client) -> Duration {
    if client.capabilities().crash_release { LONG_TTL } else { fixture.ttl() }
}

/// A holder that is killed frees its lock: at once on stores with `crash_release`, else when its lease runs out.
pub async fn killed_holder_blocks(fixture: &dyn Fixture) {
    let Some((client, url)) = reachable(fixture).await else { return };
    let name = unique("killed-holder");
    let mut holder = Worker::start(&url, killable_ttl(fixture, &client));
    holder.tell(&format!("lock {name}"));
    holder.says("granted").await;
    assert!(!client.could_lock(&name).await, "a lock of another process was granted");
    assert_eq!(client.claims(&name).await[0].owner.pid, holder.pid());
    let waiter = queue(&client.locks, &name);
    client.waits(&name, 1).await;
    holder.kill();
    drop(join("the lock of a killed process is granted", waiter).await);
    client.expect_unused(&name).await;
}

/// P6: a waiter that is killed delays nobody behind it for longer than its place lives, which is short however long its
/// TTL; or, where there are no places, than a grant that it did not live to see.
pub async fn killed_waiter_blocks(fixture: &dyn Fixture) {
    let Some((client, url)) = reachable(fixture).await else { return };
    let name = unique("killed-waiter");
    let guard = client.lock(&name).await;
    let ttl = if client.capabilities().queue { LONG_TTL } else { killable_ttl(fixture, &client) };
    let mut dead = Worker::start(&url, ttl);
    dead.tell(&format!("lock {name}"));
    dead.says("waiting").await;
    if client.capabilities().queue {
        client.sees_claims(&name, 2).await;
    }
    let waiter = queue(&client.locks, &name);
    client.waits(&name, 1).await;
    dead.kill();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    drop(join("the waiter behind a killed one is granted", waiter).await);
    // The place of the dead one may be listed for as long as it asked for, but stands in nobody's way, not even of a try.
    eventually("a try is granted", async || client.could_lock(&name).await.then_some(())).await;
}

/// P3: tokens rise over releases, kills and restarts of processes.
pub async fn tokens_fall_across_processes(fixture: &dyn Fixture) {
    let Some((client, url)) = reachable(fixture).await else { return };
    if !client.capabilities().fencing {
        return;
    }
    let name = unique("tokens-processes");
    let mut last = 0;
    for turn in 0..6 {
        let mut worker = Worker::start(&url, killable_ttl(fixture, &client));
        worker.tell(&format!("lock {name}"));
        let token: u64 = worker.says("granted").await.parse().unwrap();
        assert!(token > last, "token {token} came after {last}");
        last = token;
        match turn % 3 {
            0 => worker.kill(),
            1 => {
                worker.tell("release");
                worker.says("released").await;
            }
            _ => worker.tell("quit"),
        }
    }
    assert!(client.lock(&name).await.token().get() > last);
}

/// P1, P3: processes that contend for one lock while some are killed never hold together, their tokens rise if there are
/// any, and a fenced store takes no write of a dead holder after its successor's. The lock comes free after every kill.
pub async fn processes_overlap(fixture: &dyn Fixture) {
    const STAYING: usize = 3;
    const KILLED: usize = 4;
    let Some((client, url)) = reachable(fixture).await else { return };
    let dir = tempfile::tempdir().unwrap();
    let (history, store) = (dir.path().join("history"), dir.path().join("store"));
    let record = Record::files(client.env.clock(), history.clone(), store.clone());
    let name = unique("processes");
    let ttl = killable_ttl(fixture, &client);
    let work = |process: &str, turns: usize| {
        let mut worker = Worker::start(&url, ttl);
        let (history, store) = (history.display(), store.display());
        worker.tell(&format!("work\t{name}\t{turns}\t{process}\t{history}\t{store}"));
        worker
    };
    let mut staying: Vec<_> = (0..STAYING).map(|number| work(&format!("staying-{number}"), 32)).collect();
    for number in 0..KILLED {
        let process = format!("killed-{number}");
        let mut victim = work(&process, 1_000_000);
        // Killed wherever it is by now: holding, waiting, releasing or writing.
        victim.says(&format!("turn {}", 2 + number)).await;
        let before = record.now();
        victim.kill();
        record.recorder.crash(&process, before, record.now());
    }
    for worker in &mut staying {
        worker.says("done").await;
    }
    client.expect_unused(&name).await;
    let history = History::read(std::fs::File::open(&history).unwrap()).unwrap();
    // Loss is for those who record their renewals; here deadlines only shorten what counts as held.
    let judged = [Property::Exclusion, Property::Fence, Property::Tokens, Property::Leak, Property::Phantom];
    judge(&history, Rules::default().only(&judged));
}

/// P1, P3, P6: whoever waits follows a holder that is killed, in whatever mode that held, and nobody comes before those are gone that hold
/// beside it and live.
pub async fn killed_holders_overlap(fixture: &dyn Fixture) {
    /// At a time, each with a lock of its own.
    const LINES: usize = 10;
    /// On each, one after another.
    const KILLS: u32 = 5;
    let Some((client, url)) = reachable(fixture).await else { return };
    let store = client.capabilities();
    let more = [store.shared.then_some(Ask::Shared), store.permits.then_some(Ask::Permits(2, 3))];
    let asks: Vec<Ask> = [Ask::Exclusive].into_iter().chain(more.into_iter().flatten()).collect();
    let dir = tempfile::tempdir().unwrap();
    let history = dir.path().join("history");
    let record = Record::files(client.env.clock(), history.clone(), dir.path().join("store"));
    // Long enough for a host that is busy with starting processes to renew in time.
    let ttl = if client.capabilities().crash_release { LONG_TTL } else { fixture.ttl() * 2 };
    let hits = Cell::new(0);
    let stage = Stage { client: &client, url: &url, ttl, history: &history, record: &record, hits: &hits };
    let line = async |number: usize| {
        let name = unique("killed-holders");
        for kill in 0..KILLS {
            // At another time between two renewals each.
            let lives = fixture.ttl() * kill / KILLS;
            let ask = asks[number % asks.len()];
            kill_a_holder(&stage, (&format!("{number}-{kill}"), &name), ask, lives).await;
        }
        client.expect_unused(&name).await;
    };
    join_all((0..LINES).map(line)).await;
    assert!(hits.get() >= LINES, "{} of the killed held when they were", hits.get());
    let history = History::read(std::fs::File::open(&history).unwrap()).unwrap();
    let judged = [Property::Exclusion, Property::Tokens, Property::Leak, Property::Phantom];
    judge(&history, Rules::default().only(&judged));
}

/// Where holders are killed.
struct Stage<'a> {
    client: &'a Client,
    url: &'a str,
    /// Of those that are killed.
    ttl: Duration,
    history: &'a Path,
    record: &'a Record,
    /// How many held the lock when they were killed.
    hits: &'a Cell<usize>,
}

/// Kills one that holds a lock in this mode, while one waits for that and, where the mode allows it, another holds beside it.
async fn kill_a_holder(stage: &Stage<'_>, (process, name): (&str, &str), ask: Ask, lives: Duration) {
    let Stage { client, record, .. } = *stage;
    let mut victim = Worker::start(stage.url, stage.ttl);
    victim.tell(&format!("hold\t{name}\t{ask}\t{process}\t{}", stage.history.display()));
    victim.says("holding").await;
    let (beside, behind) = match ask {
        Ask::Exclusive => (None, Ask::Exclusive),
        Ask::Shared => (Some(Ask::Shared), Ask::Exclusive),
        Ask::Permits(n, of) => (Some(Ask::Permits(of - n, of)), ask),
    };
    let (other, next) = (format!("{process}-beside"), format!("{process}-behind"));
    let mut holds = None;
    if let Some(ask) = beside {
        holds = Some(take(record, &client.locks, &other, name, ask).await);
    }
    let granted = Cell::new(false);
    let taken = async {
        let taken = take(record, &client.locks, &next, name, behind).await;
        granted.set(true);
        taken
    };
    let kill = async {
        // A host that stood still may have cost the victim its lease.
        eventually("somebody waits, or has the lock", async || {
            (granted.get() || !client.faults.waiting(name).is_empty()).then_some(())
        })
        .await;
        until_past(client, client.now() + lives).await;
        stage.hits.set(stage.hits.get() + usize::from(!granted.get()));
        let before = record.now();
        victim.kill();
        record.recorder.crash(process, before, record.now());
        if matches!(behind, Ask::Exclusive)
            && let Some((guard, claim)) = holds.take()
        {
            // Who waits has to wait for this one, too.
            client.sees_claims(name, 1 + usize::from(client.capabilities().queue)).await;
            guard.verify().await.expect("a reader has lost its lock with another that was killed");
            leave(record, guard, &claim).await;
        }
    };
    let ((guard, claim), ()) = tokio::join!(taken, kill);
    if let Some((guard, claim)) = holds {
        guard.verify().await.expect("a holder has lost its lock with another that was killed");
        leave(record, guard, &claim).await;
    }
    leave(record, guard, &claim).await;
}
