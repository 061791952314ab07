//! How leases are renewed, how they are lost, and how that is told.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_for_a_simulated_day() {
    let env = world(1);
    let locks = Locks::new(Arc::new(Memory::new(env.clone())), env.clone()).ttl(TTL).unwrap();
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let start = env.clock().now();
    env.sleep_until(start + Duration::from_secs(24 * 3600)).await;
    assert!(guard.is_held());
    assert!(locks.mutex("job").unwrap().try_lock().await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_told_before_the_store_grants_to_the_next() {
    for seed in 0..50 {
        let env = world(seed);
        let store = Memory::new(env.clone());
        let faulty = Faulty::new(Arc::new(store.client(env.clone())), env.clock());
        let locks = Locks::new(faulty.clone() as Arc<dyn Backend>, env.clone()).ttl(TTL).unwrap();
        let rival = Locks::new(Arc::new(store), env.clone()).ttl(TTL).unwrap();
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        // Cut off somewhere between two renewals; each seed has other jitter.
        env.sleep_until(env.clock().now() + Duration::from_millis(700 * seed)).await;
        faulty.hang(Step::Renew);
        let told = async {
            let loss = guard.lost().await;
            (loss.kind, env.clock().now())
        };
        let granted = async {
            let next = rival.mutex("job").unwrap().lock().await.unwrap();
            let at = env.clock().now();
            assert!(next.token() > guard.token());
            at
        };
        let ((kind, told), granted) = tokio::join!(told, granted);
        assert_eq!(kind, LossKind::Expired);
        assert!(told < granted, "seed {seed}: told at {told:?}, granted at {granted:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_panics_loses_no_lease() {
    let env = world(7);
    let (far, locks, near) = faulty(&env);
    far.panic_in(Step::Lost);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    pass(&env, TTL / 4).await;
    far.panic_in(Step::Renew);
    pass(&env, TTL / 4).await;
    far.heal();
    pass(&env, 20 * TTL).await;
    assert!(guard.is_held(), "a panic in the backend has ended the keeper");
    assert!(near.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    // A release that panics is repeated too.
    far.panic_in(Step::Release);
    drop(guard);
    pass(&env, Duration::from_secs(1)).await;
    far.heal();
    pass(&env, TTL / 2).await;
    let free = near.mutex("job").unwrap().try_lock().await.unwrap();
    free.expect("a panic in the backend leaks the lock").release().await.unwrap();
    // One that panics for ever loses the lease in time, and says so.
    far.panic_in(Step::Lost);
    far.panic_in(Step::Renew);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let deadline = guard.deadline().unwrap();
    assert_eq!(guard.lost().await.kind, LossKind::Expired);
    assert!(env.clock().now().since(deadline) < Duration::from_millis(5));
}

/// What the keeper asks for counts from when it asked, however long the answer takes.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_answered_late_counts_from_when_it_was_sent() {
    let env = world(44);
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let before = guard.deadline().unwrap();
    let gate = far.hold_reply_of(Step::Renew);
    gate.reached().await;
    let reached = far.last_call_of(Step::Renew).unwrap();
    // More than the margin.
    pass(&env, TTL / 30).await;
    assert_eq!(guard.deadline(), Some(before), "it counts although nobody has answered");
    gate.open();
    pass(&env, Duration::from_millis(1)).await;
    let deadline = guard.deadline().unwrap();
    assert!(deadline > before, "it does not count");
    // The drift that is taken off must not make up for the time that the answer took.
    assert!(deadline < reached + (TTL - env.drift().over(TTL)), "it counts from the answer");
}

/// Renewals share trips, and each claim has its own answer.
#[tokio::test(start_paused = true)]
async fn of_many_that_are_renewed_together_only_the_one_that_is_gone_is_lost() {
    let env = world(45);
    let (far, locks, near) = faulty(&env);
    far.hang(Step::Lost);
    let mut guards = Vec::new();
    for number in 0..300 {
        guards.push(locks.mutex(&format!("job {number}")).unwrap().lock().await.unwrap());
    }
    near.evict("job 7", guards[7].claim_id()).await.unwrap();
    pass(&env, TTL).await;
    assert!(far.calls_of(Step::Renew) < 300, "they are not renewed together");
    let lost: Vec<usize> = (0..300).filter(|number| !guards[*number].is_held()).collect();
    assert_eq!(lost, [7], "an answer was taken for another's");
}

/// Renewals go out in batches. One that is given up early for a short lease must not take the long ones' with it.
#[tokio::test(start_paused = true)]
async fn a_short_lease_does_not_cost_long_ones_their_renewals() {
    let env = world(10);
    let (far, locks, _) = faulty(&env);
    far.slow_down(Step::Renew, Duration::from_millis(150));
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let short = locks.clone().ttl(Duration::from_millis(600)).unwrap().mutex("short").unwrap();
    let end = env.clock().now() + 10 * TTL;
    while env.clock().now() < end {
        // Its renewals come too late.
        short.lock().await.unwrap().lost().await;
        assert_eq!(guard.standing(), Standing::Held);
    }
}

/// Leases that nobody renews any more, because the runtime that did is gone, are told so; releases go on, and so does the client.
#[test]
fn a_lane_that_ended_is_told() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let lane = runtime();
    let (far, locks, near, guard) = lane.block_on(async {
        let env = Env::host(Lane::here().unwrap());
        let (far, locks, near) = faulty(&env);
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        let dropped = locks.mutex("dropped").unwrap().lock().await.unwrap();
        far.sever();
        drop(dropped);
        // Time for the keeper to start, and the release.
        pass(&env, Duration::from_millis(5)).await;
        (far, locks, near, guard)
    });
    drop(lane);
    runtime().block_on(async {
        assert_eq!(guard.lost().await.kind, LossKind::Unverifiable);
        far.heal();
        drop(
            near.mutex("dropped").unwrap().lock().timeout(TTL / 2).await.expect("its release was forgotten"),
        );
        drop(guard);
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        let error = locks.mutex("job").unwrap().lock().timeout(TTL / 1000).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
        guard.release().await.unwrap();
        locks.close(TTL).await.unwrap();
    });
}

/// A process that was stopped past its deadline goes on with whatever was woken first, perhaps with the body of the lock.
#[test]
fn a_body_is_not_polled_again_after_its_deadline() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let env = Env::host(Lane::here().unwrap());
        let locks = Locks::new(Arc::new(Memory::new(env.clone())), env.clone());
        let mutex = locks.ttl(Duration::from_millis(300)).unwrap().mutex("job").unwrap();
        let mut went_on = false;
        let body = async |guard: &clinch::Guard| {
            // Time for the keeper to start.
            pass(&env, Duration::from_millis(5)).await;
            let deadline = guard.deadline().unwrap();
            while env.clock().now() <= deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            woken_at_once().await;
            went_on = true;
        };
        let result = mutex.lock().run(body).await;
        assert!(!went_on, "the body went on without the lock");
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
    });
}

/// Pending once, and woken before anybody else.
async fn woken_at_once() {
    let mut woken = false;
    std::future::poll_fn(|context| {
        context.waker().wake_by_ref();
        match std::mem::replace(&mut woken, true) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
}

/// A shorter lease that was asked for ends when it says, also if nobody waits for the answer.
#[tokio::test(start_paused = true)]
async fn a_shorter_lease_is_told_lost_in_time_although_its_request_was_dropped() {
    for renew in [Renew::Auto, Renew::Never] {
        let env = world(13);
        let (far, locks, _) = faulty(&env);
        let guard = locks.renew(renew).mutex("job").unwrap().lock().await.unwrap();
        far.hang(Step::Renew);
        assert!(at_once(guard.extend(Duration::from_secs(1))).await.is_none());
        let deadline = guard.deadline().unwrap();
        assert!(deadline < env.clock().now() + Duration::from_secs(1));
        assert_eq!(guard.lost().await.kind, LossKind::Expired);
        let late = env.clock().now().since(deadline);
        assert!(late < Duration::from_millis(5), "{renew:?}: told {late:?} late");
    }
    // One that can be renewed is, as soon as its TTL wants it.
    let env = world(14);
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.hang(Step::Renew);
    assert!(at_once(guard.extend(Duration::from_secs(1))).await.is_none());
    far.heal();
    pass(&env, TTL).await;
    assert!(guard.is_held(), "a request that was dropped lost the lease");
}

/// An answer that was overtaken by a later one says nothing any more.
#[tokio::test(start_paused = true)]
async fn a_shorter_lease_is_made_no_longer_by_an_older_answer() {
    const SHORT: Duration = Duration::from_secs(1);
    let env = world(46);
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let gate = far.hold_reply_of(Step::Renew);
    gate.reached().await;
    pass(&env, Duration::from_millis(1)).await;
    guard.extend(SHORT).await.unwrap();
    gate.open();
    pass(&env, Duration::from_millis(1)).await;
    assert!(guard.deadline().unwrap() < env.clock().now() + SHORT, "an older answer counts");
}

/// What a guard had is not renewed any more once that is gone, though its release does not come through.
#[tokio::test(start_paused = true)]
async fn nothing_is_renewed_after_its_guard() {
    for dropped in [false, true] {
        let env = world(47);
        let (far, locks, near) = faulty(&env);
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        far.hang(Step::Release);
        match dropped {
            true => drop(guard),
            false => assert!(at_once(guard.release()).await.is_none()),
        }
        let calls = far.calls_of(Step::Renew);
        pass(&env, 2 * TTL).await;
        assert_eq!(far.calls_of(Step::Renew), calls, "it is renewed without its guard");
        assert!(near.mutex("job").unwrap().try_lock().await.unwrap().is_some());
    }
}

/// Who detaches a lease leaves all of its TTL to others, and nobody renews it then.
#[tokio::test(start_paused = true)]
async fn a_detached_lease_lasts_its_ttl_from_then_on() {
    let env = world(48);
    let (_far, locks, near) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    // The next renewal is near, and will not be.
    pass(&env, TTL / 8).await;
    guard.detach().await.unwrap();
    pass(&env, TTL - TTL / 30).await;
    let early = near.mutex("job").unwrap().try_lock().await.unwrap();
    assert!(early.is_none(), "it was left with what others had used of it");
    pass(&env, TTL / 15).await;
    assert!(near.mutex("job").unwrap().try_lock().await.unwrap().is_some(), "somebody renews it");
}

/// What a guard asks of a store that does not answer ends with its lease, and what is lost is not renewed any more.
#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_neither_waited_for_nor_renewed() {
    let env = world(15);
    let (far, locks, near) = faulty(&env);
    let guard = locks.clone().renew(Renew::Never).mutex("job").unwrap().lock().await.unwrap();
    far.hang(Step::Verify);
    far.hang(Step::Renew);
    let both = async { tokio::join!(guard.verify(), guard.extend(TTL)) };
    let (verified, extended) = tokio::time::timeout(2 * TTL, both).await.expect("waits for ever");
    assert_eq!(verified.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(extended.unwrap_err().kind(), ErrorKind::Lost);
    drop(guard);
    far.heal();
    // The store has it for longer than its holder may.
    let guard = locks.max_hold(Duration::from_secs(1)).unwrap().mutex("job").unwrap().lock().await.unwrap();
    pass(&env, Duration::from_secs(1)).await;
    let calls = far.calls_of(Step::Renew);
    assert_eq!(guard.extend(100 * TTL).await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(guard.verify().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(far.calls_of(Step::Renew), calls, "a lost lease was renewed");
    assert!(near.mutex("job").unwrap().lock().timeout(TTL).await.is_ok());
}

/// A store's lease may carry many claims, and others renew it: what ran out for its holder does not end by itself then. The
/// holder is stuck and drops nothing.
#[tokio::test(start_paused = true)]
async fn a_lost_lease_that_others_keep_alive_is_freed() {
    let env = world(16);
    let (far, locks, near) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.hang(Step::Renew);
    let lost = tokio::time::timeout(2 * TTL, async {
        while guard.is_held() {
            near.renew_detached("job", guard.claim_id(), TTL).await.unwrap();
            pass(&env, Duration::from_secs(1)).await;
        }
        env.clock().now()
    });
    let (lost, mut freed) = (lost.await.expect("never lost"), None);
    while freed.is_none() && env.clock().now().since(lost) < 4 * TTL {
        let kept = near.renew_detached("job", guard.claim_id(), TTL).await;
        freed = kept.is_err().then(|| env.clock().now().since(lost));
        pass(&env, Duration::from_millis(10)).await;
    }
    let freed = freed.expect("nobody frees what its holder has lost");
    // Not sooner than a store would have let it end.
    assert!(freed > Duration::from_secs(2), "freed {freed:?} after it was told");
    assert!(near.mutex("job").unwrap().try_lock().await.unwrap().is_some());
}

/// What the keeper frees itself, it frees later than it tells so: whoever is told needs a moment to stop.
#[tokio::test(start_paused = true)]
async fn a_lease_at_its_longest_is_freed_a_moment_after_its_holder_is_told() {
    let env = world(10);
    let (_far, locks, near) = faulty(&env);
    let guard = locks.max_hold(TTL / 10).unwrap().mutex("job").unwrap().lock().await.unwrap();
    let deadline = guard.deadline().unwrap();
    let told = async {
        guard.lost().await;
        env.clock().now()
    };
    let granted = async {
        let _next = near.mutex("job").unwrap().lock().await.unwrap();
        env.clock().now()
    };
    let (told, granted) = tokio::join!(told, granted);
    assert!(told >= deadline);
    assert!(
        granted >= told + Duration::from_millis(100),
        "granted {:?} after it was told",
        granted.since(told)
    );
    assert!(granted < told + TTL / 2, "the longest hold did not free it");
}

/// What is lost is nobody's to leave to others: it is not detached, which is said, but freed.
#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_not_detached() {
    let env = world(43);
    let (far, locks, near) = faulty(&env);
    let near = near.ttl(100 * TTL).unwrap();
    for evicted in [false, true] {
        let capped = locks.clone().ttl(100 * TTL).unwrap().isolated().max_hold(TTL).unwrap();
        let guard = capped.mutex("job").unwrap().lock().await.unwrap();
        // All is as a detached lease needs it, but the loss.
        match evicted {
            true => {
                near.evict("job", guard.claim_id()).await.unwrap();
                guard.lost().await;
            }
            false => pass(&env, TTL).await,
        }
        let calls = far.calls_of(Step::Renew);
        let (claim, error) = (guard.claim_id(), guard.detach().await.unwrap_err());
        assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
        assert_eq!(far.calls_of(Step::Renew), calls, "a lost lease was renewed");
        near.renew_detached("job", claim, TTL).await.expect_err("it was left to others");
        drop(near.mutex("job").unwrap().lock().timeout(TTL).await.expect("it was not freed"));
    }
}

/// Leases that were taken at different times, and have different jitter, share trips.
#[tokio::test(start_paused = true)]
async fn many_leases_are_renewed_by_few_calls() {
    const LEASES: usize = 200;
    let env = world(44);
    let (far, locks, _) = faulty(&env);
    let mut guards = Vec::new();
    for number in 0..LEASES {
        guards.push(locks.mutex(&format!("job{number}")).unwrap().lock().await.unwrap());
        pass(&env, Duration::from_millis(20)).await;
    }
    let calls = far.calls_of(Step::Renew);
    pass(&env, 2 * TTL).await;
    let calls = far.calls_of(Step::Renew) - calls;
    assert!(guards.iter().all(clinch::Guard::is_held));
    assert!(calls < 12 * LEASES as u64 / 5, "{calls} calls for {LEASES} leases in a minute");
}

/// Renewals of locks on different servers do not go out together: one that hangs costs those of the others nothing.
#[tokio::test(start_paused = true)]
async fn a_server_that_hangs_costs_others_no_renewal() {
    let env = world(45);
    let (two, locks, _) = Two::new(&env, TTL);
    let (gone, held) = (locks.mutex("a").unwrap(), locks.mutex("b").unwrap());
    let (gone, held) = (gone.lock().await.unwrap(), held.lock().await.unwrap());
    two.servers[1].hang(Step::Renew);
    let end = env.clock().now() + 2 * TTL;
    while env.clock().now() < end {
        assert_eq!(held.standing(), Standing::Held);
        pass(&env, TTL / 100).await;
    }
    assert!(!gone.is_held());
}
