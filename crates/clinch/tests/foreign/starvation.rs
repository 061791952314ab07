//! Constant load of one kind leaves the other its turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::ledger::Ledger;
use super::{Foreign, LONG, NAME, PATIENCE, SOON, Worker, connect_to, start, within};

/// Our tasks under constant load.
const TASKS: usize = 8;

/// Foreign clients under constant load.
const WORKERS: usize = 3;

/// How often in a row the starving one must get its turn.
const TURNS: usize = 5;

/// How often the load takes the lock between two of these turns, at least.
const BETWEEN: u64 = 50;

/// Never reached.
const NO_END: u64 = 1 << 40;

/// A client that sleeps as long as it does by default finds the lock free, although ours only ever hand it over.
pub(crate) async fn our_constant_load_leaves_them_a_gap(client: Foreign) {
    let servers = start();
    let locks = connect_to(&servers, "").await;
    let mut them = Worker::polling(client, &servers, NAME, LONG, None).await;
    let taken = Arc::new(AtomicU64::new(0));
    let mut load = JoinSet::new();
    for _ in 0..TASKS {
        let (lock, taken) = (locks.mutex(NAME).unwrap(), taken.clone());
        load.spawn(async move {
            loop {
                lock.lock().await.unwrap().release().await.unwrap();
                taken.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let mut times = Vec::new();
    for _ in 0..TURNS {
        until_more("we go on", || taken.load(Ordering::Relaxed)).await;
        let since = Instant::now();
        them.tell("lock");
        let locked = within(SOON, "they get a turn", them.says());
        tokio::select! {
            answer = locked => assert_eq!(answer, "locked"),
            ended = load.join_next() => panic!("our load ended: {ended:?}"),
        }
        times.push(since.elapsed());
        assert_eq!(them.ask("release").await, "released");
    }
    println!(
        "{client:?} beside {TASKS} of ours got the lock after {times:.0?}; meanwhile we had it {taken:?} times"
    );
}

/// Our waiter has one try for each of their releases, and gets through.
pub(crate) async fn their_constant_load_leaves_us_a_turn(client: Foreign) {
    let servers = start();
    let locks = connect_to(&servers, "").await;
    let mut them = Vec::new();
    for at in 0..WORKERS {
        let mut worker = Worker::polling(client, &servers, NAME, LONG, Some(Duration::from_millis(2))).await;
        worker.tell(&format!("work they-{at} {NO_END} 0"));
        them.push(worker);
    }
    let mut ledger = Ledger::new(&servers);
    let lock = locks.mutex(NAME).unwrap();
    let mut times = Vec::new();
    for _ in 0..TURNS {
        until_more("they go on", || ledger.count()).await;
        let since = Instant::now();
        let guard = within(SOON, "we get a turn", async { lock.lock().await.unwrap() }).await;
        times.push(since.elapsed());
        guard.release().await.unwrap();
    }
    println!("we beside {WORKERS} of {client:?} got the lock after {times:.1?}");
}

/// Waits until the load has gone on for a while.
async fn until_more(what: &str, mut taken: impl FnMut() -> u64) {
    let enough = taken() + BETWEEN;
    let goes_on = async {
        while taken() < enough {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(PATIENCE, what, goes_on).await;
}
