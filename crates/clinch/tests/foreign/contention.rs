//! Real contention: both kinds take one lock, in both directions, and it alone guards a counter.

use std::time::{Duration, Instant};

use clinch::{Locks, Released};

use super::ledger::Ledger;
use super::{Foreign, LONG, NAME, Worker, connect_to, start, within};

/// Of each kind.
const WORKERS: usize = 3;

/// Critical sections of both kinds together.
const SECTIONS: u64 = 2000;

/// How long all of them may take together: on a busy host each takes several times as long, and it has to be seen that none is starved, not
/// how fast they are.
const ALL: Duration = Duration::from_secs(240);

/// The longest pause of ours between two sections (ms), so that the lock is free now and then.
const PAUSE_MS: u64 = 20;

/// How long a foreign client waits between two tries.
const POLL: Duration = Duration::from_millis(5);

/// The longest pause of theirs (ms), such that both kinds get about as many turns: in a shell everything takes longer.
fn their_pause_ms(client: Foreign) -> u64 {
    match client {
        Foreign::RedisCli => 0,
        Foreign::RedisPy | Foreign::Redlock | Foreign::Rslock => 4,
    }
}

pub(crate) async fn no_update_is_lost_and_nobody_meets(client: Foreign) {
    let servers = start();
    let locks = [connect_to(&servers, "").await, connect_to(&servers, "").await];
    let mut them = Vec::new();
    for _ in 0..WORKERS {
        them.push(Worker::polling(client, &servers, NAME, LONG, Some(POLL)).await);
    }
    let since = Instant::now();
    for (at, worker) in them.iter_mut().enumerate() {
        worker.tell(&format!("work they-{at} {SECTIONS} {}", their_pause_ms(client)));
    }
    // Two of ours share a connection.
    let ours: Vec<_> = (0..WORKERS)
        .map(|at| {
            tokio::spawn(work(locks[at % locks.len()].clone(), Ledger::new(&servers), format!("we-{at}")))
        })
        .collect();
    let (mut our_share, mut their_share, mut overlaps) = (0, 0, 0);
    for task in ours {
        let (done, met) = within(ALL, "our turns", task).await.unwrap();
        our_share += done;
        overlaps += met;
    }
    for worker in &mut them {
        let answer = worker.says().await;
        let words: Vec<&str> = answer.split(' ').collect();
        let ["done", done, met] = words[..] else { panic!("a worker says {answer}") };
        their_share += done.parse::<u64>().unwrap();
        overlaps += met.parse::<u64>().unwrap();
    }
    println!("{client:?}: {our_share} sections ours, {their_share} theirs, in {:.1?}", since.elapsed());
    assert_eq!(overlaps, 0, "two were in there together");
    assert_eq!(Ledger::new(&servers).count(), SECTIONS);
    assert_eq!(our_share + their_share, SECTIONS, "an update was lost");
    let least = SECTIONS / 10;
    assert!(our_share > least && their_share > least, "{our_share} ours, {their_share} theirs");
}

/// Critical sections until the counter has its target; how many, and in how many somebody else was.
async fn work(locks: Locks, mut ledger: Ledger, me: String) -> (u64, u64) {
    let lock = locks.mutex(NAME).unwrap();
    let (mut done, mut overlaps) = (0, 0);
    loop {
        let guard = lock.lock().await.unwrap();
        let section = ledger.section(&me, SECTIONS).await;
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        overlaps += u64::from(section.overlapped);
        if section.finished {
            return (done, overlaps);
        }
        done += 1;
        ledger.pause(PAUSE_MS).await;
    }
}
