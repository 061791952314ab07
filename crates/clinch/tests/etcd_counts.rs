//! `etcd://`: what each thing costs, as the server counts it.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::collections::BTreeMap;
use std::time::Duration;

use clinch::{Clock, Locks};
use clinch_testkit::Etcd;

mod common;

use common::{eventually, lock, queue, release};

/// A TTL that nobody lives to see the end of.
const LONG_TTL: Duration = Duration::from_secs(3600);

async fn connect(etcd: &Etcd) -> Locks {
    clinch::connect(&etcd.url()).await.unwrap().ttl(LONG_TTL).unwrap()
}

/// What the server has answered, by method; its metrics page itself costs nothing of these.
fn answered(etcd: &Etcd) -> BTreeMap<&'static str, u64> {
    let methods = ["Txn", "Range", "Put", "DeleteRange", "LeaseGrant", "LeaseRevoke", "LeaseKeepAlive"];
    methods.into_iter().map(|method| (method, etcd.handled(method))).collect()
}

/// What the server has answered since, where that is anything.
fn since(etcd: &Etcd, before: &BTreeMap<&'static str, u64>) -> Vec<(&'static str, u64)> {
    let now = answered(etcd);
    now.into_iter().map(|(method, count)| (method, count - before[method])).filter(|(_, n)| *n > 0).collect()
}

#[tokio::test]
async fn an_uncontended_lock_and_its_release_are_two_requests() {
    let etcd = Etcd::start();
    let locks = connect(&etcd).await;
    // Grants the lease.
    release(lock(&locks, "job").await).await;
    let (before, revision) = (answered(&etcd), etcd.revision());
    release(lock(&locks, "job").await).await;
    release(locks.mutex("job").unwrap().try_lock().await.unwrap().unwrap()).await;
    release(locks.rwlock("index").unwrap().read().await.unwrap()).await;
    release(locks.semaphore("gpu", 2).unwrap().acquire(1).unwrap().await.unwrap()).await;
    let reads_of_the_test = 1;
    assert_eq!(since(&etcd, &before), [("DeleteRange", 4), ("Range", reads_of_the_test), ("Txn", 4)]);
    assert_eq!(etcd.revision(), revision + 8, "each is one write");
    assert_eq!(etcd.keys("/clinch/job"), [""; 0]);
}

#[tokio::test]
async fn a_try_on_a_busy_lock_writes_nothing() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd).await, connect(&etcd).await);
    release(lock(&far, "other").await).await;
    let guards =
        [lock(&near, "job").await, near.semaphore("gpu", 2).unwrap().acquire(2).unwrap().await.unwrap()];
    let revision = etcd.revision();
    let before = answered(&etcd);
    assert!(far.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    assert!(far.rwlock("job").unwrap().try_read().await.unwrap().is_none());
    assert!(far.semaphore("gpu", 2).unwrap().try_acquire(1).await.unwrap().is_none());
    assert_eq!(since(&etcd, &before), [("Txn", 3)]);
    assert_eq!(etcd.revision(), revision, "a refusal wrote something");
    for guard in guards {
        release(guard).await;
    }
}

#[tokio::test]
async fn a_hand_over_takes_at_most_five_requests_however_many_wait() {
    const TURNS: u64 = 20;
    for waiters in [2, 8, 24] {
        let etcd = Etcd::start();
        let mut clients = Vec::new();
        for _ in 0..waiters {
            let locks = connect(&etcd).await;
            release(lock(&locks, "warm").await).await;
            clients.push(locks);
        }
        let before = answered(&etcd);
        let work = clients.iter().map(|locks| {
            let locks = locks.clone();
            tokio::spawn(async move {
                for _ in 0..TURNS {
                    let guard = lock(&locks, "job").await;
                    tokio::task::yield_now().await;
                    release(guard).await;
                }
            })
        });
        for task in work.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        let mut requests = since(&etcd, &before);
        // How often places are renewed depends on the time alone. With a renewal go a read of their keys, at times, and a
        // step that had found no lease for places that was renewed lately.
        let is_renewal = |(method, _): &(&str, u64)| *method == "LeaseKeepAlive";
        let renewals: u64 =
            requests.extract_if(.., |request| is_renewal(request)).map(|(_, count)| count).sum();
        let sum: u64 = requests.iter().map(|(_, count)| count).sum();
        let turns = waiters * TURNS;
        assert!(
            // A place, the move of its key to the lease that carries a grant, a release; and where somebody else turned out to
            // be ahead, a read and the move once more.
            sum <= 5 * turns + 2 * renewals,
            "{requests:?} for {turns} turns of {waiters}, {renewals} renewals"
        );
    }
}

/// Its place lives for a few seconds and is renewed; nothing else is asked for.
#[tokio::test]
async fn a_waiter_asks_for_nothing_but_its_place_while_it_waits() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd).await, connect(&etcd).await);
    let guard = lock(&near, "job").await;
    release(lock(&far, "other").await).await;
    let waiter = queue(&far, "job");
    let watching = async || (etcd.metric("etcd_debugging_mvcc_watcher_total") >= 4.0).then_some(());
    // The keys of leases and the predecessor.
    eventually("the waiter watches", watching).await;
    let own_keys = async || (etcd.metric("etcd_debugging_mvcc_watcher_total") >= 6.0).then_some(());
    eventually("both keys that are old are watched", own_keys).await;
    let before = answered(&etcd);
    for _ in 0..50 {
        release(lock(&near, "unrelated").await).await;
    }
    let (renewals, requests): (Vec<_>, Vec<_>) =
        since(&etcd, &before).into_iter().partition(|(method, _)| *method == "LeaseKeepAlive");
    // Beside each goes one read: of the lease's key, with every third of that of the place as well.
    let reads = renewals.iter().map(|(_, count)| count + 1).sum::<u64>();
    let of = |method| requests.iter().find(|(name, _)| *name == method).map_or(0, |(_, count)| *count);
    assert_eq!((of("DeleteRange"), of("Put"), of("LeaseGrant"), of("LeaseRevoke")), (50, 0, 0, 0));
    assert!(of("Txn") + of("Range") <= 50 + reads, "{requests:?} with {renewals:?}");
    release(guard).await;
    release(waiter.await.unwrap()).await;
    // Whatever was watched for a claim is watched no more; the lease of places is, until it runs out.
    let left = async || (etcd.metric("etcd_debugging_mvcc_watcher_total") <= 2.0).then_some(());
    eventually("the watches end with their claims", left).await;
}

/// Who waits for permits is told of all that comes free, and so are all others of a client who wait for the same: by one watch.
#[tokio::test]
async fn waiters_for_the_same_permits_share_one_watch() {
    const WAITERS: usize = 8;
    let (etcd, clock) = (Etcd::start(), Clock::host());
    let (near, far) = (connect(&etcd).await, connect(&etcd).await);
    let permits = near.semaphore("gpu", WAITERS as u32).unwrap();
    let all = permits.acquire(WAITERS as u32).unwrap().await.unwrap();
    let waiting = (0..WAITERS).map(|_| {
        let permits = far.semaphore("gpu", WAITERS as u32).unwrap();
        tokio::spawn(async move { permits.acquire(1).unwrap().await.unwrap() })
    });
    let mut waiting: Vec<_> = waiting.collect();
    let stand = async || (etcd.keys("/clinch/gpu").len() == 1 + WAITERS).then_some(());
    eventually("they stand in the queue", stand).await;
    let old = clock.now() + Duration::from_secs(2);
    let watchers = || etcd.metric("etcd_debugging_mvcc_watcher_total") as usize;
    // The keys of three leases and of all claims, which are old by then, and the queue.
    let watched = async || (clock.now() > old && watchers() == 3 + 1 + WAITERS + 1).then_some(());
    eventually("one of them watches", watched).await;
    waiting.pop().unwrap().abort();
    eventually("the others go on", async || (watchers() == 3 + WAITERS + 1).then_some(())).await;
    release(all).await;
    for waiter in waiting {
        release(waiter.await.unwrap()).await;
    }
    eventually("it ends with its last reader", async || (watchers() <= 3).then_some(())).await;
}

/// What was detached is the business of whoever releases it: nothing of it stays with the client that detached it.
#[tokio::test]
async fn detached_leases_leave_no_watches_behind() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd).await, connect(&etcd).await);
    for number in 0..20 {
        let detached = lock(&near, &format!("job {number}")).await.detach().await.unwrap();
        far.release_detached(detached.name.as_str(), detached.claim).await.unwrap();
    }
    // The lease that the locks were taken on is still watched.
    let left = async || (etcd.metric("etcd_debugging_mvcc_watcher_total") <= 2.0).then_some(());
    eventually("the watches end with their guards", left).await;
}

/// A claim reads a few of those ahead, which is enough when it is next. One that is far back must read on.
#[tokio::test]
async fn a_waiter_far_back_whose_predecessor_leaves_is_not_taken_for_the_first() {
    const AHEAD: usize = 24;
    let etcd = Etcd::start();
    let locks = connect(&etcd).await;
    let holder = lock(&locks, "job").await;
    let mut ahead = Vec::new();
    let stand = async |count| {
        let stand = async || (etcd.keys("/clinch/job").len() == count).then_some(());
        eventually("they stand in the queue", stand).await;
    };
    for number in 0..AHEAD {
        ahead.push(queue(&locks, "job"));
        stand(2 + number).await;
    }
    let mut last = queue(&locks, "job");
    stand(2 + AHEAD).await;
    let mut before = answered(&etcd);
    for _ in 0..3 {
        ahead.pop().unwrap().abort();
        // The one behind looks at the first in the queue and then at all.
        let looked = async || {
            let now = answered(&etcd);
            (now["Range"] > before["Range"] && now["Txn"] > before["Txn"]).then_some(())
        };
        eventually("the last looks", looked).await;
        before = answered(&etcd);
    }
    assert!(!last.is_finished());
    release(holder).await;
    for waiter in ahead {
        let guard = tokio::select! {
            guard = waiter => guard.unwrap(),
            early = &mut last => panic!("the last passed others: {early:?}"),
        };
        assert!(!last.is_finished());
        release(guard).await;
    }
    release(last.await.unwrap()).await;
}

#[tokio::test]
async fn many_locks_are_renewed_by_one_keepalive() {
    const LOCKS: usize = 300;
    let etcd = Etcd::start();
    let locks = connect(&etcd).await.ttl(Duration::from_secs(12)).unwrap();
    let mut guards = Vec::new();
    for number in 0..LOCKS {
        guards.push(lock(&locks, &format!("job-{number}")).await);
    }
    assert_eq!(etcd.leases().len(), 1);
    let before = answered(&etcd);
    let first = guards.iter().map(|guard| guard.deadline().unwrap()).max().unwrap();
    let renewed = async || guards.iter().all(|guard| guard.deadline().unwrap() > first).then_some(());
    eventually("all are renewed", renewed).await;
    let after = since(&etcd, &before);
    let of = |method| after.iter().find(|(name, _)| *name == method).map_or(0, |(_, count)| *count);
    assert!(of("LeaseKeepAlive") <= 2, "{after:?} renewed {LOCKS} locks once");
    // That none of them was evicted is one read.
    assert!(of("Txn") + of("Range") <= 2, "{after:?} renewed {LOCKS} locks once");
    for guard in guards {
        assert!(guard.is_held());
        release(guard).await;
    }
}

#[tokio::test]
async fn an_isolated_lock_has_a_lease_of_its_own_and_gives_it_back() {
    let etcd = Etcd::start();
    let locks = connect(&etcd).await;
    let shared = [lock(&locks, "a").await, lock(&locks, "b").await];
    assert_eq!(etcd.leases().len(), 1);
    let isolated = lock(&locks.clone().isolated(), "c").await;
    assert_eq!(etcd.leases().len(), 2);
    assert!(locks.clone().isolated().mutex("c").unwrap().try_lock().await.unwrap().is_none());
    assert_eq!(etcd.leases().len(), 2);
    release(isolated).await;
    assert_eq!(etcd.leases().len(), 1);
    for guard in shared {
        release(guard).await;
    }
}

/// A shared lease carries nothing between two locks, and would for its whole TTL.
#[tokio::test]
async fn a_client_that_is_closed_gives_back_the_leases_that_carry_nothing() {
    let etcd = Etcd::start();
    let (done, other) = (connect(&etcd).await, connect(&etcd).await);
    release(lock(&done, "job").await).await;
    let guard = lock(&other, "other").await;
    assert_eq!(etcd.leases().len(), 2);
    for locks in [done, other] {
        locks.close(common::PATIENCE).await.unwrap();
    }
    assert_eq!(etcd.leases().len(), 1);
    guard.verify().await.unwrap();
    release(guard).await;
}

/// etcd remembers every key that ever was until it is compacted, and whoever looks at a queue reads past them all: a lock
/// that took a new key for each claim would become slower with every one.
#[tokio::test]
async fn a_lock_that_is_taken_often_uses_few_keys() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd).await, connect(&etcd).await);
    let mut used = std::collections::BTreeSet::new();
    for _ in 0..30 {
        let guard = lock(&near, "job").await;
        used.extend(guard.store_key());
        let waiters = [&near, &far].map(|locks| {
            let locks = locks.clone();
            tokio::spawn(async move {
                let guard = lock(&locks, "job").await;
                let key = guard.store_key();
                release(guard).await;
                key
            })
        });
        release(guard).await;
        for waiter in waiters {
            used.extend(waiter.await.unwrap());
        }
    }
    assert!(used.len() <= 4, "{used:?}");
}
