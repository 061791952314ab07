//! Locks that somebody takes away by force from holders who do not renew for long: they are told at once.

use super::*;

/// A TTL that nobody outlives.
const NO_RENEWAL: Duration = Duration::from_secs(3600);

async fn connect(redis: &Redis) -> Locks {
    super::connect(&redis.url()).await.ttl(NO_RENEWAL).unwrap()
}

/// Waits until the server would tell of so many keys.
pub(super) async fn sees_watched(redis: &Redis, count: usize) {
    let mut client = redis.client();
    let count = count.to_string();
    eventually("the locks are watched", async || {
        (client.info("stats")["tracking_total_keys"] == count).then_some(())
    })
    .await;
}

fn looks(redis: &Redis) -> u64 {
    redis.client().commandstats().get("client|caching").copied().unwrap_or(0)
}

pub(super) async fn is_told(guard: &Guard) {
    let loss = tokio::time::timeout(PATIENCE, guard.lost()).await.expect("nobody told the holder");
    assert_eq!(loss.kind, LossKind::Deleted);
    assert!(loss.detail.contains("the server told"), "a renewal found it: {loss}");
}

#[tokio::test]
async fn a_lock_that_is_deleted_is_told_at_once_also_after_a_renewal() {
    let redis = Redis::start();
    let near = connect(&redis).await;
    for renewed in [false, true] {
        let guard = lock(&near, "job").await;
        sees_watched(&redis, 1).await;
        if renewed {
            // The change that this is ends the watch.
            guard.extend(NO_RENEWAL).await.unwrap();
            sees_watched(&redis, 1).await;
        }
        assert!(guard.is_held());
        redis.call(&["DEL", "clinch:job"]);
        is_told(&guard).await;
        drop(guard);
        expect_unused(&redis, &near, "job").await;
    }
}

/// Or it is looked at again much later, and another has the lock when the key is deleted.
#[tokio::test]
async fn a_lock_whose_key_becomes_no_text_is_told_at_once() {
    let redis = Redis::start();
    let guard = lock(&connect(&redis).await, "job").await;
    sees_watched(&redis, 1).await;
    redis.call(&["EVAL", "redis.call('DEL', KEYS[1]) redis.call('RPUSH', KEYS[1], 'x')", "1", "clinch:job"]);
    is_told(&guard).await;
}

#[tokio::test]
async fn an_eviction_is_told_at_once() {
    let redis = Redis::start();
    let (near, far) = (connect(&redis).await, connect(&redis).await);
    let guard = lock(&near, "job").await;
    let waiter = queue(&far, "job");
    sees_waiters(&redis, "job", 1).await;
    sees_watched(&redis, 1).await;
    assert_eq!(far.evict("job", guard.claim_id()).await.unwrap(), Freed::Removed);
    is_told(&guard).await;
    assert!(!waiter.is_finished(), "granted before the holder let go");
    drop(guard);
    let guard = waiter.await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

/// P2, as far as it goes where nothing is left of the lock: who waited comes after the holder was told.
#[tokio::test]
async fn a_holder_hears_of_an_emptied_database_before_a_waiter_is_granted() {
    let redis = Redis::start();
    let (near, far) = (connect(&redis).await, connect(&redis).await);
    let guard = lock(&near, "job").await;
    let waiter = queue(&far, "job");
    sees_waiters(&redis, "job", 1).await;
    sees_watched(&redis, 1).await;
    redis.call(&["FLUSHALL"]);
    comes_after(guard, waiter).await;
}

/// Whoever waits is granted once the holder was told of its loss.
async fn comes_after(guard: Guard, waiter: tokio::task::JoinHandle<Guard>) {
    let next = async {
        let next = waiter.await.unwrap();
        assert!(!guard.is_held(), "two guards hold at a time");
        next
    };
    let (next, ()) = tokio::join!(next, is_told(&guard));
    assert!(next.token() > guard.token());
    drop(guard);
    assert_eq!(next.release().await.unwrap(), Released::Released);
}

/// P2: who renews its place just then misses it, and comes no sooner for that.
#[tokio::test]
async fn a_waiter_that_misses_its_place_comes_after_the_holder_was_told() {
    let redis = Redis::start();
    let near = connect(&redis).await;
    // Its place is renewed within a third of that.
    let far = connect(&redis).await.ttl(Duration::from_secs(1)).unwrap();
    let guard = lock(&near, "job").await;
    let waiter = queue(&far, "job");
    sees_waiters(&redis, "job", 1).await;
    sees_watched(&redis, 1).await;
    let emptied = std::time::Instant::now();
    redis.call(&["FLUSHALL"]);
    comes_after(guard, waiter).await;
    let after = emptied.elapsed();
    assert!(after >= Duration::from_millis(450), "granted {after:?} after what was held was deleted");
}

#[tokio::test]
async fn a_watch_that_was_cut_begins_anew() {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.addr());
    let far = connect_through(&proxy).await.ttl(NO_RENEWAL).unwrap();
    let guard = lock(&far, "job").await;
    sees_watched(&redis, 1).await;
    let before = looks(&redis);
    proxy.cut_all();
    eventually("it is watched again", async || (looks(&redis) > before).then_some(())).await;
    sees_watched(&redis, 1).await;
    redis.call(&["DEL", "clinch:job"]);
    is_told(&guard).await;
}

#[tokio::test]
async fn many_locks_are_watched_together_and_none_is_lost_by_it() {
    const LOCKS: usize = 300;
    let redis = Redis::start();
    let near = connect(&redis).await;
    let guards = lock_many(&near, LOCKS).await;
    let writer = near.rwlock("index").unwrap().write().await.unwrap();
    sees_watched(&redis, LOCKS + 1).await;
    let looks = looks(&redis);
    // How many depends on how long a busy host took to take them: not one for each.
    assert!(looks <= LOCKS as u64 / 2, "{looks} looks at {LOCKS} locks");
    // What is no longer the sole holder's is not watched any more.
    let reader = writer.downgrade().await.unwrap();
    for guard in guards.iter().take(LOCKS / 2) {
        guard.extend(NO_RENEWAL).await.unwrap();
    }
    sees_watched(&redis, LOCKS).await;
    assert!(guards.iter().chain([&reader]).all(Guard::is_held));
    reader.verify().await.unwrap();
    redis.call(&["DEL", "clinch:job 7"]);
    is_told(&guards[7]).await;
    assert_eq!(guards.iter().filter(|guard| guard.is_held()).count(), LOCKS - 1);
}

async fn lock_many(locks: &Locks, count: usize) -> Vec<Guard> {
    let mut taking = tokio::task::JoinSet::new();
    for number in 0..count {
        let locks = locks.clone();
        taking.spawn(async move { lock(&locks, &format!("job {number}")).await });
    }
    taking.join_all().await
}

/// Otherwise many locks that are lost at once keep their client from renewing those that it still has.
#[tokio::test]
async fn locks_that_are_lost_together_are_asked_for_together() {
    const LOCKS: usize = 1000;
    let redis = Redis::start();
    let near = connect(&redis).await;
    let guards = lock_many(&near, LOCKS).await;
    sees_watched(&redis, LOCKS).await;
    redis.call(&["CONFIG", "RESETSTAT"]);
    redis.call(&["FLUSHALL"]);
    for guard in &guards {
        is_told(guard).await;
    }
    let asked = redis.client().commandstats()["evalsha"];
    assert!(asked <= LOCKS as u64 / 50, "{asked} scripts for {LOCKS} locks");
}

/// The same where each has a slot of its own: one read and one question for each.
#[tokio::test]
async fn a_cluster_is_asked_once_for_each_lock_that_is_lost() {
    const LOCKS: usize = 1000;
    let servers = Cluster::start();
    let near = super::connect(&servers.url()).await.ttl(NO_RENEWAL).unwrap();
    let guards = lock_many(&near, LOCKS).await;
    let sum = |count: &dyn Fn(&Redis) -> u64| servers.masters().into_iter().map(count).sum::<u64>();
    let watched = |redis: &Redis| redis.client().info("stats")["tracking_total_keys"].parse().unwrap();
    eventually("the locks are watched", async || (sum(&watched) == LOCKS as u64).then_some(())).await;
    for master in servers.masters() {
        master.call(&["CONFIG", "RESETSTAT"]);
    }
    for master in servers.masters() {
        master.call(&["FLUSHALL"]);
    }
    for guard in &guards {
        is_told(guard).await;
    }
    let asked = sum(&|redis| redis.client().commandstats().get("evalsha").copied().unwrap_or(0));
    assert!(asked <= LOCKS as u64 * 3 / 2, "{asked} scripts for {LOCKS} locks");
}

/// What is asked of the store is asked anew with each thing that the keeper does, and never answered where the way is long.
#[tokio::test]
async fn a_loss_is_told_at_once_however_often_other_leases_are_renewed_meanwhile() {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.addr());
    let far = connect_through(&proxy).await.ttl(NO_RENEWAL).unwrap();
    let guard = lock(&far, "job").await;
    let mut others = Vec::new();
    for ttl in [3000, 3100, 3200, 3300, 3400, 3500] {
        let short = far.clone().ttl(Duration::from_millis(ttl)).unwrap();
        others.push(lock(&short, &format!("other {ttl}")).await);
    }
    sees_watched(&redis, 1 + others.len()).await;
    proxy.delay(Duration::from_millis(100));
    redis.call(&["DEL", "clinch:job"]);
    is_told(&guard).await;
    for other in &others {
        assert_eq!(other.standing(), Standing::Held);
    }
}
