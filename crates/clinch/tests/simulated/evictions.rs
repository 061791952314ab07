//! Evictions, of which a store may tell nothing of its own accord.

use super::*;

/// A store that tells nothing of its own accord, and a lease that nobody renews: it is looked at instead, and stays as long
/// as it was.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_not_renewed_hears_of_its_eviction_within_the_notice() {
    let env = world(9);
    let (far, locks, near) = faulty(&env);
    far.hang(Step::Lost);
    let locks = locks.ttl(100 * TTL).unwrap().renew(Renew::Never);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let deadline = guard.deadline();
    pass(&env, TTL).await;
    far.fail_before(Step::Verify);
    pass(&env, TTL).await;
    assert!(guard.is_held() && guard.deadline() == deadline, "a look changed something");
    assert_eq!(far.calls_of(Step::Renew), 0);
    near.evict("job", guard.claim_id()).await.unwrap();
    let evicted = env.clock().now();
    assert_eq!(guard.lost().await.kind, LossKind::Deleted);
    let told = env.clock().now().since(evicted);
    assert!(told < NOTICE / 2, "told {told:?} after the eviction");
}

/// Where nothing else told of it, the release does: what was taken away was not given back.
#[tokio::test(start_paused = true)]
async fn an_eviction_that_nobody_told_is_told_by_the_release() {
    let env = world(49);
    let (far, locks, near) = faulty(&env);
    far.hang(Step::Lost);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    near.evict("job", guard.claim_id()).await.unwrap();
    assert!(guard.is_held());
    let Released::AlreadyLost(loss) = guard.release().await.unwrap() else {
        panic!("what was taken away was released");
    };
    assert_eq!(loss.kind, LossKind::Deleted);
}

#[tokio::test(start_paused = true)]
async fn a_long_lease_hears_of_its_eviction_within_the_notice() {
    let env = world(11);
    let (far, locks, near) = faulty(&env);
    far.hang(Step::Lost);
    let guard = locks.ttl(100 * TTL).unwrap().mutex("job").unwrap().lock().await.unwrap();
    near.evict("job", guard.claim_id()).await.unwrap();
    let evicted = env.clock().now();
    assert_eq!(guard.lost().await.kind, LossKind::Deleted);
    let told = env.clock().now().since(evicted);
    assert!(told < NOTICE, "told {told:?} after the eviction");
}

/// How long after its eviction a holder hears of it from a store that tells nothing of its own accord, if the first attempt
/// to ask hangs.
async fn told_by_the_second_attempt(seed: u64, renew: Renew) -> Duration {
    let env = world(seed);
    let (far, locks, near) = faulty(&env);
    let step = if renew == Renew::Auto { Step::Renew } else { Step::Verify };
    let next = async || {
        let calls = far.calls_of(step);
        while far.calls_of(step) == calls {
            pass(&env, Duration::from_millis(10)).await;
        }
    };
    far.hang(Step::Lost);
    let guard = locks.ttl(100 * TTL).unwrap().renew(renew).mutex("job").unwrap().lock().await.unwrap();
    // One got through just now, so the next is far away.
    next().await;
    near.evict("job", guard.claim_id()).await.unwrap();
    let evicted = env.clock().now();
    far.hang(step);
    next().await;
    far.heal();
    far.hang(Step::Lost);
    assert_eq!(guard.lost().await.kind, LossKind::Deleted);
    env.clock().now().since(evicted)
}

#[tokio::test(start_paused = true)]
async fn an_eviction_is_heard_in_time_although_one_attempt_hangs() {
    for seed in 0..8 {
        for renew in [Renew::Auto, Renew::Never] {
            let told = told_by_the_second_attempt(seed, renew).await;
            let left = NOTICE.saturating_sub(told);
            assert!(left >= Duration::from_secs(4), "seed {seed}, {renew:?}: {left:?} left to stop");
        }
    }
}

/// What the store tells of its own accord is heard then, not at the next renewal.
#[tokio::test(start_paused = true)]
async fn an_eviction_that_the_store_tells_is_heard_at_once() {
    let env = world(12);
    let (far, locks, near) = faulty(&env);
    let guards = ["job", "other"].map(|name| locks.mutex(name).unwrap());
    let [job, other] = &guards;
    let (job, other) = (job.lock().await.unwrap(), other.lock().await.unwrap());
    // The next renewal is far away.
    pass(&env, TTL / 30).await;
    let calls = far.calls_of(Step::Renew);
    near.evict("job", job.claim_id()).await.unwrap();
    let evicted = env.clock().now();
    assert_eq!(job.lost().await.kind, LossKind::Deleted);
    let told = env.clock().now().since(evicted);
    assert!(told < Duration::from_millis(5), "told {told:?} after the eviction");
    assert_eq!(far.calls_of(Step::Renew), calls);
    assert!(other.is_held(), "another was told, too");
}
