//! Waiting: what a waiter asks, and what becomes of its place.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_waiter_that_died_does_not_block_the_queue() {
    let env = world(3);
    let store = Memory::new(env.clone());
    let locks = Locks::new(Arc::new(store.client(env.clone())), env.clone()).ttl(TTL).unwrap();
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let faulty = Faulty::new(Arc::new(store), env.clock());
    let dying = Locks::new(faulty.clone() as Arc<dyn Backend>, env.clone()).ttl(TTL).unwrap();
    let waiter = tokio::spawn(async move { dying.mutex("job").unwrap().lock().await.map(drop) });
    while locks.state("job").await.unwrap().unwrap().claims.len() < 2 {
        tokio::task::yield_now().await;
    }
    // From here on nothing of the waiter reaches the store: no renewal, no withdrawal.
    faulty.sever();
    let mutex = locks.mutex("job").unwrap();
    let next = mutex.lock().timeout(10 * TTL);
    guard.release().await.unwrap();
    let start = env.clock().now();
    let next = next.await.expect("a dead waiter blocks the queue");
    assert!(env.clock().now().since(start) <= TTL, "its place lived longer than its lease");
    drop(next);
    waiter.abort();
}

/// A place lasts for as long as its waiter waits, however short its TTL.
#[tokio::test(start_paused = true)]
async fn a_waiter_keeps_its_place_for_longer_than_its_ttl() {
    let env = world(50);
    let (far, locks, near) = faulty(&env);
    let near = near.ttl(100 * TTL).unwrap();
    let guard = near.mutex("job").unwrap().lock().await.unwrap();
    let [first, second] = [&locks, &near].map(|locks| locks.mutex("job").unwrap());
    let first = tokio::spawn(async move { first.lock().await });
    pass(&env, Duration::from_secs(1)).await;
    let place = far.waiting("job")[0];
    let second = tokio::spawn(async move { second.lock().await });
    pass(&env, 5 * TTL).await;
    let claims = near.state("job").await.unwrap().unwrap().claims;
    assert_eq!(claims[1].id, place, "it has lost its place to one that came later");
    guard.release().await.unwrap();
    first.await.unwrap().unwrap().release().await.unwrap();
    second.await.unwrap().unwrap().release().await.unwrap();
}

/// However many can be let in, nobody is left to find that out by the end of another's lease.
#[tokio::test(start_paused = true)]
async fn all_readers_behind_a_writer_are_let_in_at_once() {
    let env = world(51);
    let (_far, locks, near) = faulty(&env);
    let writer = near.rwlock("job").unwrap().write().await.unwrap();
    let read = |_| {
        let lock = locks.rwlock("job").unwrap();
        tokio::spawn(async move { lock.read().await })
    };
    let readers: Vec<_> = (0..20).map(read).collect();
    pass(&env, Duration::from_secs(1)).await;
    writer.release().await.unwrap();
    pass(&env, Duration::from_millis(10)).await;
    let left = readers.iter().filter(|reader| !reader.is_finished()).count();
    assert_eq!(left, 0, "readers were left behind");
}

/// The store counts as unreachable once it has failed to answer for a while, not because it was not asked for one.
#[tokio::test(start_paused = true)]
async fn a_waiter_rides_out_a_failure_however_long_it_has_waited() {
    let env = world(4);
    let store = Memory::new(env.clone());
    let locks = Locks::new(Arc::new(store.client(env.clone())), env.clone()).ttl(TTL).unwrap();
    let faulty = Faulty::new(Arc::new(store), env.clock());
    let far = Locks::new(faulty.clone() as Arc<dyn Backend>, env.clone()).ttl(TTL).unwrap();
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let waiter = tokio::spawn(async move { far.mutex("job").unwrap().lock().await });
    // Less than the TTL: the waiter looks again when the lease that it knows has run out.
    env.sleep_until(env.clock().now() + TTL / 2).await;
    assert_eq!(faulty.waiting("job").len(), 1);
    faulty.fail_before(Step::Claim);
    guard.release().await.unwrap();
    let next = waiter.await.unwrap().expect("one failure is no outage");
    next.release().await.unwrap();
}

/// Steps that succeed in between make the failures of a wait no rarer.
#[tokio::test(start_paused = true)]
async fn a_wait_that_fails_at_once_makes_no_storm() {
    let env = world(16);
    let (two, locks, near) = Two::new(&env, TTL);
    let guard = near.mutex("b").unwrap().lock().await.unwrap();
    two.deaf.store(true, Ordering::Relaxed);
    let mutex = locks.mutex("b").unwrap();
    let waiter = tokio::spawn(async move { mutex.lock().await });
    pass(&env, 2 * TTL).await;
    let steps = two.servers[0].calls_of(Step::Claim);
    assert!((50..=200).contains(&steps), "{steps} steps in a minute");
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
}

/// A waiter whose future is not polled learns of the loss of its place when it is; until then nothing spins.
#[tokio::test(start_paused = true)]
async fn a_place_that_was_taken_away_is_not_renewed_for_ever() {
    let env = world(8);
    let (far, locks, near) = faulty(&env);
    let guard = near.mutex("job").unwrap().lock().await.unwrap();
    let mutex = locks.mutex("job").unwrap();
    let mut request = std::pin::pin!(mutex.lock().into_future());
    tokio::select! {
        biased;
        _ = &mut request => panic!("two hold one lock"),
        () = pass(&env, TTL / 2) => {}
    }
    let place = far.waiting("job")[0];
    near.evict("job", place).await.unwrap();
    let before = far.calls_of(Step::Renew);
    tokio::time::timeout(10 * TTL, std::future::pending::<()>()).await.unwrap_err();
    let renewals = far.calls_of(Step::Renew) - before;
    assert!(renewals <= 1, "{renewals} renewals of a place that is gone");
    tokio::select! {
        biased;
        _ = &mut request => panic!("two hold one lock"),
        () = pass(&env, Duration::from_millis(1)) => {}
    }
    assert_eq!(near.state("job").await.unwrap().unwrap().claims.len(), 2, "it queues again");
    guard.release().await.unwrap();
    request.await.unwrap().release().await.unwrap();
}

/// An evicted waiter that is polled takes another place at once.
#[tokio::test(start_paused = true)]
async fn an_evicted_waiter_queues_again_at_once() {
    let env = world(9);
    let (far, locks, near) = faulty(&env);
    let guard = near.mutex("job").unwrap().lock().await.unwrap();
    let mutex = locks.mutex("job").unwrap();
    let waiter = tokio::spawn(async move { mutex.lock().await });
    pass(&env, Duration::from_secs(1)).await;
    let place = far.waiting("job")[0];
    let before = far.calls_of(Step::Claim);
    near.evict("job", place).await.unwrap();
    pass(&env, Duration::from_millis(1)).await;
    assert_eq!(far.calls_of(Step::Claim), before + 1);
    assert_eq!(near.state("job").await.unwrap().unwrap().claims.len(), 2);
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
}

/// A waiter holds nothing, so it has nothing to lose: a store that says so is asked again.
#[tokio::test(start_paused = true)]
async fn a_waiter_does_not_say_that_it_lost_the_lock() {
    let env = world(11);
    let (far, locks, _) = faulty(&env);
    far.miss(Step::Claim);
    locks.mutex("job").unwrap().lock().await.unwrap().release().await.unwrap();
    far.miss(Step::Claim);
    let guard = locks.mutex("job").unwrap().try_lock().await.unwrap().unwrap();
    far.miss(Step::Wait);
    let error = locks.mutex("job").unwrap().lock().timeout(TTL).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    guard.release().await.unwrap();
}

/// A process that is stopped while it asks has not asked a silent store all that time.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_was_stopped_asks_again() {
    let env = world(12);
    let (far, locks, _) = faulty(&env);
    let gate = far.hold_reply_of(Step::Claim);
    far.lose_reply_of(Step::Claim);
    let mutex = locks.mutex("job").unwrap();
    let waiter = tokio::spawn(async move { mutex.lock().await });
    gate.reached().await;
    pass(&env, 10 * TTL).await;
    gate.open();
    waiter.await.unwrap().expect("one answer was lost").release().await.unwrap();
}

/// A store may find no time left of a place. It is asked again, but not without a pause.
#[test]
fn a_place_without_time_left_is_renewed_after_a_pause() {
    unblocked(|| async {
        let env = world(42);
        let (two, locks, near) = Two::new(&env, TTL);
        let guard = near.mutex("b").unwrap().lock().await.unwrap();
        two.hasty.store(true, Ordering::Relaxed);
        let mutex = locks.mutex("b").unwrap();
        let waiter = tokio::spawn(async move { mutex.lock().await });
        pass(&env, TTL).await;
        let renewals = two.servers[0].calls_of(Step::Renew);
        assert!((10..=3000).contains(&renewals), "{renewals} renewals in {TTL:?}");
        guard.release().await.unwrap();
        waiter.await.unwrap().unwrap().release().await.unwrap();
    });
}

/// Whoever does not wait asks a store that does not answer a few times, and no more.
#[tokio::test(start_paused = true)]
async fn a_try_that_nobody_answers_gives_up() {
    let env = world(46);
    let (far, locks, _) = faulty(&env);
    far.lose_requests_of(Step::Claim);
    let error = locks.mutex("job").unwrap().try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}");
    assert_eq!(far.calls_of(Step::Claim), 5);
}

/// A store whose grants are all but over when they are heard does not keep who asks for ever.
#[tokio::test(start_paused = true)]
async fn a_store_whose_grants_always_come_too_late_is_given_up() {
    for wait in [false, true] {
        let env = world(47);
        let (far, locks, near) = faulty(&env);
        far.slow_down(Step::Claim, TTL);
        let mutex = locks.mutex("job").unwrap();
        let error = match wait {
            true => mutex.lock().await.map(drop).unwrap_err(),
            false => mutex.try_lock().await.map(drop).unwrap_err(),
        };
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert!(error.to_string().contains("so late"), "{error}");
        assert_eq!(far.calls_of(Step::Claim), 5);
        drop(near.mutex("job").unwrap().lock().timeout(TTL).await.expect("it holds the lock nevertheless"));
    }
}
