//! Releases that are not answered, and claims that arrive when nobody wants them any more.

use super::*;

/// A server that is stopped for longer than the TTL, and then grants what was given up long ago.
#[tokio::test(start_paused = true)]
async fn a_claim_that_arrives_long_after_it_was_given_up_is_freed() {
    let env = world(5);
    let (far, locks, near) = faulty(&env);
    for dropped in [false, true] {
        let late = far.send_late();
        let mutex = locks.mutex("job").unwrap();
        let request = tokio::spawn(async move { mutex.lock().timeout(TTL / 10).await });
        pass(&env, Duration::from_millis(1)).await;
        far.sever();
        match dropped {
            true => request.abort(),
            false => drop(request.await.unwrap().unwrap_err()),
        }
        pass(&env, 4 * TTL).await;
        assert!(late.arrive(&far).await, "not applied");
        assert!(near.mutex("job").unwrap().try_lock().await.unwrap().is_none());
        far.heal();
        // Less than the TTL of the ghost.
        pass(&env, TTL / 4).await;
        let free = near.mutex("job").unwrap().try_lock().await.unwrap();
        free.expect("nobody freed what was granted late").release().await.unwrap();
    }
    locks.close(TTL).await.unwrap();
}

/// What cannot be released is not tried for ever, and not after the client has ended.
#[tokio::test(start_paused = true)]
async fn releases_that_nobody_answers_are_given_up_in_the_end() {
    let env = world(6);
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.sever();
    drop(guard);
    pass(&env, Duration::from_secs(600)).await;
    let first = far.calls_of(Step::Release);
    assert!(locks.close(TTL).await.unwrap_err().to_string().contains("1 releases"));
    pass(&env, Duration::from_secs(600)).await;
    let later = far.calls_of(Step::Release) - first;
    assert!((100..=300).contains(&later), "{later} attempts in ten minutes");
    pass(&env, Duration::from_secs(3600)).await;
    locks.close(Duration::ZERO).await.expect("given up");
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.sever();
    drop((guard, locks));
    pass(&env, Duration::from_secs(60)).await;
    let last = far.calls_of(Step::Release);
    pass(&env, Duration::from_secs(60)).await;
    assert_eq!(far.calls_of(Step::Release), last, "released after the end of its client");
}

/// What the store says can never be released is not tried again, however long nobody answered before.
#[tokio::test(start_paused = true)]
async fn a_release_that_is_refused_for_good_is_given_up() {
    let env = world(8);
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.sever();
    drop(guard);
    pass(&env, Duration::from_secs(60)).await;
    far.heal();
    far.deny(Step::Release);
    pass(&env, Duration::from_secs(60)).await;
    locks.close(Duration::ZERO).await.expect("tried again for ever");
}

/// Releases that one server does not answer, or refuses, take no time from those that another, or the same, would answer.
#[tokio::test(start_paused = true)]
async fn a_release_that_is_not_answered_delays_no_other() {
    let env = world(13);
    let (two, locks, near) = Two::new(&env, 100 * TTL);
    two.refuses.store(true, Ordering::Relaxed);
    two.servers.iter().for_each(|server| server.sever());
    // Tried, since they may have been applied, and left.
    let leave = async |name: String| {
        let request = locks.mutex(&name).unwrap();
        two.servers.iter().for_each(|server| server.heal());
        let guard = request.lock().await.unwrap();
        two.servers.iter().for_each(|server| server.sever());
        drop(guard);
    };
    for count in 0..40 {
        leave(format!("b{count}")).await;
        leave(format!("a{count}!")).await;
    }
    leave("a".to_owned()).await;
    pass(&env, 3 * TTL).await;
    assert!(near.mutex("a").unwrap().try_lock().await.unwrap().is_none());
    two.servers[1].heal();
    // One pause between two rounds.
    pass(&env, TTL / 5).await;
    let free = near.mutex("a").unwrap().try_lock().await.unwrap();
    free.expect("others' releases have kept it waiting").release().await.unwrap();
    assert!(near.mutex("b1").unwrap().try_lock().await.unwrap().is_none());
    assert!(near.mutex("a1!").unwrap().try_lock().await.unwrap().is_none());
    two.refuses.store(false, Ordering::Relaxed);
    two.servers[0].heal();
    pass(&env, TTL / 5).await;
    assert!(near.list("").await.unwrap().is_empty(), "every release is made good");
    locks.close(Duration::ZERO).await.unwrap();
}

/// Nobody waits for the release of a lease that has run out by itself, and a client that ends gives back what it has all the same.
#[tokio::test(start_paused = true)]
async fn whoever_ends_does_not_wait_longer_than_the_lease() {
    let env = world(14);
    for lost in [false, true] {
        let (two, locks, _) = Two::new(&env, TTL);
        let guard = locks.mutex("b").unwrap().lock().await.unwrap();
        pass(&env, TTL / 6).await;
        two.servers[0].sever();
        let severed = env.clock().now();
        pass(&env, TTL / 2).await;
        if lost {
            guard.lost().await;
            drop(guard);
        } else {
            assert!(guard.is_held());
            let error = guard.release().await.unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{error:?}");
        }
        locks.close(10 * TTL).await.unwrap_err();
        let took = env.clock().now().since(severed);
        assert!(
            took <= TTL + Duration::from_secs(1),
            "ended {took:?} after the server, with a lease of {TTL:?}"
        );
        assert!(two.closed.load(Ordering::Relaxed), "what the client had was not given back");
    }
}

/// Polls on the spot whatever is woken, as some executors do.
struct OnTheSpot<T> {
    future: Mutex<Option<Pin<Box<dyn Future<Output = T> + Send>>>>,
    done: Mutex<Option<T>>,
}

impl<T: Send + 'static> std::task::Wake for OnTheSpot<T> {
    fn wake(self: Arc<Self>) {
        let Some(mut future) = self.future.lock().unwrap().take() else { return };
        let waker = Waker::from(self.clone());
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            std::task::Poll::Ready(done) => *self.done.lock().unwrap() = Some(done),
            std::task::Poll::Pending => *self.future.lock().unwrap() = Some(future),
        }
    }
}

/// Between the release that a caller gave up and the one in the background, nobody may take the client for done.
#[tokio::test(start_paused = true)]
async fn a_release_that_goes_over_to_the_background_is_waited_for() {
    let env = world(18);
    for given_up in [true, false] {
        let (two, locks, _) = Two::new(&env, TTL);
        let guard = locks.mutex("b").unwrap().lock().await.unwrap();
        two.servers[0].hang(Step::Release);
        let mut release = Box::pin(guard.release());
        assert!(at_once(release.as_mut()).await.is_none());
        let closing = async move { locks.close(10 * TTL).await };
        let close =
            Arc::new(OnTheSpot { future: Mutex::new(Some(Box::pin(closing))), done: Mutex::default() });
        Waker::from(close.clone()).wake();
        match given_up {
            true => drop(release),
            false => drop(release.await.unwrap_err()),
        }
        pass(&env, 2 * TTL).await;
        let closed = close.done.lock().unwrap().take().expect("it waits for longer than the lease");
        closed.expect_err("what nobody has answered was taken for released");
    }
}

/// A release may be without any answer, as of a server that hangs.
#[tokio::test(start_paused = true)]
async fn a_release_that_hangs_ends_with_the_lease() {
    let env = world(15);
    let (far, locks, _) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    far.hang(Step::Release);
    let start = env.clock().now();
    let released = tokio::time::timeout(10 * TTL, guard.release()).await;
    assert_eq!(released.expect("it waits for ever").unwrap_err().kind(), ErrorKind::Unknown);
    assert!(env.clock().now().since(start) <= TTL);
}

/// A release is repeated for as long as the store may keep what `extend` asked for, not for the TTL of the beginning.
#[tokio::test(start_paused = true)]
async fn what_was_extended_is_released_for_as_long_as_that_lasts() {
    const LONG: Duration = Duration::from_secs(5 * 3600);
    for dropped in [false, true] {
        let env = world(17);
        let (far, locks, near) = faulty(&env);
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        guard.extend(LONG).await.unwrap();
        guard.extend(TTL).await.unwrap();
        far.sever();
        let released = match dropped {
            true => {
                drop(guard);
                None
            }
            false => Some(tokio::spawn(guard.release())),
        };
        pass(&env, LONG / 2).await;
        far.heal();
        pass(&env, TTL).await;
        let free = near.mutex("job").unwrap().try_lock().await.unwrap();
        free.expect("its release was given up").release().await.unwrap();
        if let Some(released) = released {
            released.await.unwrap().expect("the release was given up");
        }
    }
}

/// A release is repeated for a moment beyond the deadline. Whoever hears then that there is nothing cannot tell whether an attempt of its
/// own has freed the lock or the end of the lease, after which another may have held it.
#[tokio::test(start_paused = true)]
async fn a_release_in_doubt_is_none_once_its_lease_is_over() {
    // Where an attempt may take longer than what lies between the deadline and the end in the store.
    const SHORT: Duration = Duration::from_secs(6);
    for seed in 0..20 {
        let env = world(seed);
        let (far, locks, near) = faulty(&env);
        let mutex = locks.ttl(SHORT).unwrap().renew(Renew::Never).mutex("job").unwrap();
        let guard = mutex.lock().await.unwrap();
        let others = near.mutex("job").unwrap();
        let rival = tokio::spawn(async move { others.lock().await.unwrap() });
        env.sleep_until(guard.deadline().unwrap() - Duration::from_millis(1)).await;
        far.lose_requests_of(Step::Release);
        let released = tokio::spawn(guard.release());
        let next = rival.await.unwrap();
        far.heal();
        let error = released.await.unwrap().expect_err("another holds it, and it was released");
        assert_eq!(error.kind(), ErrorKind::Unknown, "seed {seed}: {error:?}");
        next.release().await.unwrap();
        pass(&env, SHORT).await;
        assert!(near.list("").await.unwrap().is_empty());
    }
}

/// Of a lease that another process keeps, nobody here knows when it ended: what is found gone after an answer that was lost may long have
/// been lost.
#[tokio::test(start_paused = true)]
async fn a_detached_release_in_doubt_is_none() {
    let env = world(22);
    let (far, locks, near) = faulty(&env);
    let guard = near.mutex("job").unwrap().lock().await.unwrap();
    let gone = guard.claim_id();
    guard.release().await.unwrap();
    far.lose_requests_of(Step::Release);
    let released = tokio::spawn(async move { locks.release_detached("job", gone).await });
    pass(&env, Duration::from_secs(1)).await;
    far.heal();
    let error = released.await.unwrap().expect_err("it was lost before anybody released it");
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}");
}

/// Whoever releases at the last moment has the time of one attempt to hear that it did.
#[tokio::test(start_paused = true)]
async fn a_release_just_before_the_deadline_is_heard() {
    let env = world(21);
    let (far, locks, near) = faulty(&env);
    let guard = locks.renew(Renew::Never).mutex("job").unwrap().lock().await.unwrap();
    far.slow_down(Step::Release, Duration::from_secs(2));
    env.sleep_until(guard.deadline().unwrap() - Duration::from_millis(1)).await;
    assert_eq!(guard.release().await.unwrap(), clinch::Released::Released);
    drop(near.mutex("job").unwrap().try_lock().await.unwrap().expect("it was not released"));
}

/// A client of a store that answers nothing any more ends some time after the last has let go of it, whatever it was at.
#[tokio::test(start_paused = true)]
async fn a_client_of_a_silent_store_comes_to_an_end() {
    let env = world(20);
    let idle = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let (far, locks, near) = faulty(&env);
    let held = near.mutex("awaited").unwrap().lock().await.unwrap();
    let mut guards = Vec::new();
    for number in 0..10 {
        guards.push(locks.mutex(&format!("job{number}")).unwrap().lock().await.unwrap());
    }
    let awaited = locks.mutex("awaited").unwrap();
    let waiters: Vec<_> = (0..10)
        .map(|_| {
            let mutex = awaited.clone();
            tokio::spawn(async move { mutex.lock().await.map(drop) })
        })
        .collect();
    pass(&env, TTL).await;
    assert_eq!(far.waiting("awaited").len(), waiters.len());
    far.sever();
    let detached = guards.pop().unwrap();
    let detach = tokio::spawn(detached.detach());
    drop(guards);
    pass(&env, TTL / 2).await;
    locks.close(TTL / 10).await.unwrap_err();
    for waiter in waiters {
        waiter.abort();
        let _ = waiter.await;
    }
    drop((awaited, locks));
    detach.await.unwrap().unwrap_err();
    pass(&env, 4 * TTL).await;
    assert_eq!(Arc::strong_count(&far), 1, "something of it goes on");
    drop((held, near, far, env));
    tokio::time::sleep(TTL).await;
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert_eq!(tasks, idle, "its tasks go on");
}
