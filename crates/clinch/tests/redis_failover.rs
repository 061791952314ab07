//! `redis+sentinel://` and `redis+cluster://`: the conformance suite, and locks over failovers and moving slots.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use clinch::backend::Backend;
use clinch::conformance::Fixture;
use clinch::{Env, Locks, Token};
use clinch_testkit::{Cluster, Sentinel};

mod common;

use common::{PATIENCE, eventually, lock, queue, release};

#[path = "redis_failover/replaced.rs"]
mod replaced;

/// A TTL that outlives any failover: sentinels that do not agree at once try again some seconds later.
const LONG: Duration = Duration::from_secs(180);

struct OnServers(String);

#[async_trait]
impl Fixture for OnServers {
    async fn connect(&self, env: &Env) -> Arc<dyn Backend> {
        clinch::backends::redis::open(&self.0, env.clone()).await.unwrap()
    }

    fn url(&self) -> Option<String> {
        Some(self.0.clone())
    }
}

mod sentinel {
    use super::*;

    static SERVERS: LazyLock<Sentinel> = LazyLock::new(Sentinel::start);

    clinch::conformance!(OnServers(SERVERS.url()));
}

mod cluster {
    use super::*;

    static SERVERS: LazyLock<Cluster> = LazyLock::new(Cluster::start);

    clinch::conformance!(OnServers(SERVERS.url()));
}

async fn connect(url: &str, ttl: Duration) -> Locks {
    clinch::connect(url).await.unwrap().ttl(ttl).unwrap()
}

/// Locks and releases in a loop until told to stop, and checks that tokens rise and nobody else is inside.
struct Load {
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    sections: Arc<AtomicU64>,
}

impl Load {
    /// Four tasks of two clients on each of these locks.
    async fn start(url: &str, names: &[String]) -> Load {
        let (stop, sections) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut tasks = Vec::new();
        for name in names {
            let last = Arc::new(tokio::sync::Mutex::new(None::<Token>));
            let inside = Arc::new(AtomicU64::new(0));
            for _ in 0..2 {
                let locks = connect(url, Duration::from_secs(6)).await;
                for _ in 0..2 {
                    let (locks, name, last, inside) =
                        (locks.clone(), name.clone(), last.clone(), inside.clone());
                    let (stop, sections) = (stop.clone(), sections.clone());
                    tasks.push(tokio::spawn(async move {
                        while !stop.load(Ordering::Relaxed) {
                            // A failover may take longer than one attempt is tried.
                            let Ok(guard) = locks.mutex(&name).unwrap().lock().timeout(PATIENCE).await else {
                                continue;
                            };
                            let mut last = last.lock().await;
                            let before = inside.fetch_add(1, Ordering::SeqCst);
                            let token = guard.token();
                            let risen = last.is_none_or(|last| token > last);
                            *last = Some(token).max(*last);
                            drop(last);
                            tokio::task::yield_now().await;
                            // Judged only if it was held all the while: over a failover a lock can be lost.
                            let held = guard.is_held();
                            inside.fetch_sub(1, Ordering::SeqCst);
                            assert!(!held || before == 0 && risen, "two held \"{name}\", or its tokens fell");
                            let _ = guard.release().await;
                            sections.fetch_add(1, Ordering::Relaxed);
                        }
                    }));
                }
            }
        }
        Load { stop, tasks, sections }
    }

    /// Waits until so many more critical sections were passed.
    async fn passes(&self, more: u64) {
        let goal = self.sections.load(Ordering::Relaxed) + more;
        let reached = async {
            while self.sections.load(Ordering::Relaxed) < goal {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let what = format!("{more} more critical sections");
        assert!(tokio::time::timeout(PATIENCE, reached).await.is_ok(), "not within {PATIENCE:?}: {what}");
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            tokio::time::timeout(PATIENCE, task).await.expect("a task hangs").unwrap();
        }
    }
}

/// Waits until all replicas have what the master acknowledged: Redis itself promises nothing here.
fn replicate(master: &clinch_testkit::Redis, replicas: usize) {
    // WAIT speaks of what its own connection wrote, and this one wrote nothing but this.
    let mut client = master.client();
    client.call(&["PUBLISH", "replicated", "1"]);
    clinch_testkit::until("the replicas follow", || {
        client.call(&["WAIT", &replicas.to_string(), "1000"]).int() >= replicas as i64
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_keeps_what_was_replicated_and_tokens_rise() {
    let servers = Sentinel::start();
    let locks = connect(&servers.url(), LONG).await;
    let other = connect(&servers.url(), LONG).await;
    let load = Load::start(&servers.url(), &["under-load".into()]).await;
    let guard = lock(&locks, "kept").await;
    let waiter = tokio::spawn({
        let other = other.clone();
        async move { lock(&other, "kept").await }
    });
    while locks.state("kept").await.unwrap().is_none_or(|state| state.claims.len() < 2) {
        tokio::task::yield_now().await;
    }
    load.passes(50).await;
    replicate(servers.master(), 2);
    tokio::task::block_in_place(|| servers.failover());
    load.passes(50).await;
    guard.extend(LONG).await.expect("a replicated lock is still held");
    assert!(!waiter.is_finished());
    let token = guard.token();
    guard.release().await.unwrap();
    let next = tokio::time::timeout(PATIENCE, waiter).await.expect("the waiter is granted").unwrap();
    assert!(next.token() > token, "{} came after {token}", next.token());
    // What was handed over lives for some seconds until it is renewed for the first time.
    next.extend(LONG).await.unwrap();

    let old = tokio::task::block_in_place(|| {
        // Sentinels that have yet to see the end of one failover do not begin another.
        servers.wait_until_ready();
        replicate(servers.master(), 2);
        servers.kill_master()
    });
    tokio::task::block_in_place(|| servers.wait_for_new_master(old).port());
    next.extend(LONG).await.unwrap();
    load.passes(50).await;
    load.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_master_is_left_for_the_new_one() {
    let servers = Sentinel::start();
    let locks = connect(&servers.url(), LONG).await;
    let guard = lock(&locks, "job").await;
    replicate(servers.master(), 2);
    let hung = servers.pause_master();
    tokio::task::block_in_place(|| servers.wait_for_new_master(hung.port()).port());
    // The connection to the hung one is open and silent.
    let renewed = async {
        while guard.extend(LONG).await.is_err() {
            assert!(guard.is_held(), "the keeper clung to the hung master");
        }
    };
    tokio::time::timeout(PATIENCE, renewed).await.unwrap();
    let token = guard.token();
    guard.release().await.unwrap();
    assert!(lock(&locks, "job").await.token() > token);
    hung.resume();
}

/// Two masters that both grant: the one that the sentinels see no more, but its clients do, and the one that they made
/// in its place. Whoever hears of the new one leaves the old one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_the_sentinels_left_is_left() {
    let servers = Sentinel::start();
    for node in servers.nodes() {
        node.call(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"]);
    }
    let url = servers.url().replace("redis+sentinel://", "redis+sentinel://app:pw@");
    let locks = connect(&url, Duration::from_secs(20)).await;
    lock(&locks, "before").await.release().await.unwrap();
    // To the sentinels it is as if it were gone.
    let old = servers.master();
    let mut watch = old.client();
    watch.call(&["ACL", "SETUSER", "default", "off"]);
    watch.call(&["CLIENT", "KILL", "TYPE", "normal", "USER", "default", "SKIPME", "yes"]);
    let new = tokio::task::block_in_place(|| servers.wait_for_new_master(old.port()));
    assert_eq!(watch.call(&["ROLE"]).array()[0].clone().text(), "master", "the old one does not know");
    let moved = async {
        loop {
            let guard = lock(&locks, "after").await;
            let there = new.call(&["EXISTS", "clinch:after"]).int() == 1;
            guard.release().await.unwrap();
            if there {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, moved).await.expect("it clung to the old master");
}

/// The names of locks that the master on this port has.
fn names_on(servers: &Cluster, port: u16) -> impl Iterator<Item = String> {
    let names = (0..).map(|n| format!("job-{n}"));
    names.filter(move |name| servers.master_of(&format!("clinch:{name}")).port() == port)
}

/// One name for each master of a cluster.
fn names_by_master(servers: &Cluster) -> Vec<String> {
    let ports: Vec<u16> = servers.masters().iter().map(|master| master.port()).collect();
    ports.into_iter().map(|port| names_on(servers, port).next().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_moves_under_load() {
    let servers = Cluster::start();
    let names = names_by_master(&servers);
    let key = format!("clinch:{}", names[0]);
    let slot = servers.slot_of(&key);
    let locks = connect(&servers.url(), Duration::from_secs(30)).await;
    let held = locks.mutex("held").unwrap().lock().await.unwrap();
    let load = Load::start(&servers.url(), &names).await;
    load.passes(100).await;
    let from = servers.owner(slot).port();
    let to = servers.masters().into_iter().find(|master| master.port() != from).unwrap();
    let migration = servers.begin_migration(slot, to);
    tokio::task::block_in_place(|| migration.move_keys());
    migration.finish();
    assert_eq!(servers.owner(slot).port(), to.port());
    load.passes(200).await;
    // And back, so that a client that learnt once learns again.
    let back = servers.masters().into_iter().find(|master| master.port() == from).unwrap();
    tokio::task::block_in_place(|| servers.migrate_slot(slot, back));
    load.passes(200).await;
    load.end().await;
    held.verify().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_renewed_in_the_middle_of_its_slots_move() {
    let servers = Cluster::start();
    let locks = connect(&servers.url(), Duration::from_secs(30)).await;
    let guard = lock(&locks, "job").await;
    let slot = servers.slot_of("clinch:job");
    let from = servers.owner(slot).port();
    let to = servers.masters().into_iter().find(|master| master.port() != from).unwrap();
    let migration = servers.begin_migration(slot, to);
    // Still on the old server, then asked for on the new one, then moved.
    guard.extend(Duration::from_secs(30)).await.unwrap();
    migration.move_key("clinch:job");
    guard.extend(Duration::from_secs(30)).await.unwrap();
    migration.move_keys();
    migration.finish();
    guard.extend(Duration::from_secs(30)).await.unwrap();
    let token = guard.token();
    guard.release().await.unwrap();
    assert!(lock(&locks, "job").await.token() > token);
}

/// A slot whose keys stand on two servers refuses what takes several of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_of_a_slot_that_moves_are_renewed_and_released() {
    const TTL: Duration = Duration::from_secs(4);
    let servers = Cluster::start();
    let locks = connect(&servers.url(), TTL).await;
    let guards = [lock(&locks, "one{x}").await, lock(&locks, "two{x}").await];
    let elsewhere = connect(&servers.url(), TTL).await;
    let waiter = queue(&elsewhere, "one{x}");
    eventually("it waits", async || (locks.state("one{x}").await.unwrap()?.claims.len() == 2).then_some(()))
        .await;
    let slot = servers.slot_of("clinch:one{x}");
    let from = servers.owner(slot).port();
    let to = servers.masters().into_iter().find(|master| master.port() != from).unwrap();
    let migration = servers.begin_migration(slot, to);
    migration.move_key("clinch:one{x}");
    let later = guards.each_ref().map(|guard| guard.deadline().unwrap() + TTL);
    for (guard, later) in guards.iter().zip(later) {
        eventually("it is renewed over and over", async || {
            assert!(guard.is_held(), "it was lost: {:?}", guard.standing());
            (guard.deadline().unwrap() > later).then_some(())
        })
        .await;
    }
    for guard in guards {
        release(guard).await;
    }
    assert!(!waiter.is_finished(), "granted while the slot moves");
    migration.move_keys();
    migration.finish();
    release(waiter.await.unwrap()).await;
    release(lock(&locks, "one{x}").await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_master_takes_no_replicated_lock_with_it() {
    let servers = Cluster::start();
    let names = names_by_master(&servers);
    let locks = connect(&servers.url(), Duration::from_secs(20)).await;
    let mut guards = Vec::new();
    for name in &names {
        guards.push(lock(&locks, name).await);
    }
    let waiter = tokio::spawn({
        let (locks, name) = (connect(&servers.url(), Duration::from_secs(20)).await, names[0].clone());
        async move { lock(&locks, &name).await }
    });
    while locks.state(&names[0]).await.unwrap().is_none_or(|state| state.claims.len() < 2) {
        tokio::task::yield_now().await;
    }
    let slot = servers.slot_of(&format!("clinch:{}", names[0]));
    let master = servers.owner(slot);
    let port = master.port();
    replicate(master, 1);
    master.kill();
    tokio::task::block_in_place(|| servers.wait_for_new_owner(slot, port).port());
    for guard in &guards {
        while let Err(error) = guard.extend(Duration::from_secs(20)).await {
            assert!(guard.is_held(), "{error}");
        }
    }
    let token = guards[0].token();
    guards.remove(0).release().await.unwrap();
    let next = tokio::time::timeout(PATIENCE, waiter).await.expect("the waiter is granted").unwrap();
    assert!(next.token() > token);
}

/// Locks on each master: so many that, were renewals for several masters in one batch, each batch had some for each.
const ON_EACH: usize = 16;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_master_loses_only_its_own_locks_and_they_are_told_in_time() {
    let servers = Cluster::start();
    let masters = servers.masters();
    let hung = masters[0];
    let names: Vec<Vec<String>> =
        masters.iter().map(|master| names_on(&servers, master.port()).take(ON_EACH).collect()).collect();
    let replica = servers.replica_of(&format!("clinch:{}", names[0][0]));
    let locks = connect(&servers.url(), Duration::from_secs(3)).await;
    // First those that are kept: what is renewed together with the last that is lost ends no later than that.
    let (mut kept, mut lost) = (Vec::new(), Vec::new());
    for name in names[1..].iter().flatten() {
        kept.push(lock(&locks, name).await);
    }
    for name in &names[0] {
        lost.push(lock(&locks, name).await);
    }
    // Nobody takes over, and the others go on serving: by default a cluster with a hole serves nobody.
    for node in servers.nodes() {
        node.call(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    }
    replica.pause();
    hung.pause();
    for guard in &lost {
        let loss = tokio::time::timeout(PATIENCE, guard.lost()).await.expect("the loss is told");
        assert_eq!(loss.kind, clinch::LossKind::Expired);
    }
    for guard in &kept {
        assert!(guard.is_held(), "a lock of another master was lost");
        guard.verify().await.expect("a lock of another master was lost");
    }
    hung.resume();
    replica.resume();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_master_starts_no_storm_of_questions() {
    const WAITERS: usize = 200;
    let servers = Cluster::start();
    let locks = connect(&servers.url(), LONG).await;
    let masters = servers.masters();
    let (dies, stays) = (masters[0], masters[1]);
    let names: Vec<String> = names_on(&servers, dies.port()).take(WAITERS).collect();
    lock(&locks, &names[0]).await.release().await.unwrap();
    // Through its socket alone: how the kit itself asks who has what would be counted too.
    let mut watch = stays.client();
    watch.call(&["CONFIG", "RESETSTAT"]);
    let began = tokio::time::Instant::now();
    dies.kill();
    let mut tasks = tokio::task::JoinSet::new();
    for name in names {
        let locks = locks.clone();
        tasks.spawn(async move { lock(&locks, &name).await.release().await.unwrap() });
    }
    tokio::time::timeout(PATIENCE, tasks.join_all()).await.expect("they get their locks from who took over");
    let questions = watch.commandstats().get("cluster|slots").copied().unwrap_or(0);
    // Whoever acquires and whoever renews ask four times a second each.
    let seconds = began.elapsed().as_secs() + 1;
    assert!(questions <= 2 * 4 * seconds, "{questions} questions in {seconds} s");
}
