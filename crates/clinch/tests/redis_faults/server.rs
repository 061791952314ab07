//! Servers that stop, restart, lose everything, are busy or full.

use clinch::Mode;
use clinch::backend::{Progress, Renewal, Wake};

use super::queues::claim;
use super::*;

#[tokio::test]
async fn a_holder_on_a_stopped_server_is_told_in_time_and_before_anybody_else_holds() {
    let redis = Redis::start();
    let near = connect(&redis.url()).await.ttl(Duration::from_secs(2)).unwrap();
    let guard = lock(&near, "job").await;
    let clock = Clock::host();
    // Read in this order, a renewal in between does no harm.
    let deadline = clock.wall() + guard.deadline().unwrap().since(clock.now());
    let ends = u64::try_from(redis.call(&["PEXPIRETIME", "clinch:job"]).int()).unwrap();
    assert!(deadline < SystemTime::UNIX_EPOCH + Duration::from_millis(ends));

    let far = connect(&redis.url()).await;
    let waiter = tokio::spawn(async move { (lock(&far, "job").await, clock.now()) });
    sees_waiters(&redis, "job", 1).await;
    redis.pause();
    let loss = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
    let told = clock.now();
    assert_eq!(loss.kind, LossKind::Expired);
    assert!(told >= guard.deadline().unwrap(), "told of a loss that was none yet");
    assert!(!waiter.is_finished());
    redis.resume();
    let (second, granted) = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
    assert!(granted > told);
    assert!(second.token() > guard.token());
    assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost(loss));
    assert!(second.is_held());
    second.verify().await.unwrap();
    second.release().await.unwrap();
    expect_unused(&redis, &near, "job").await;
}

/// The server loses everything while one holds, one waits and one reads something else.
async fn wiped(wipe: impl FnOnce(&Redis)) {
    let redis = Redis::start();
    let near = connect(&redis.url()).await.ttl(Duration::from_secs(3)).unwrap();
    let far = connect(&redis.url()).await;
    let guard = lock(&near, "job").await;
    let reader = near.rwlock("other").unwrap().read().await.unwrap();
    let waiter = queue(&far, "job");
    sees_waiters(&redis, "job", 1).await;
    wipe(&redis);
    for guard in [&guard, &reader] {
        let loss = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(loss.kind, LossKind::Deleted);
    }
    let second = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
    assert!(second.token() > guard.token(), "{} came after {}", second.token(), guard.token());
    assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
    second.verify().await.unwrap();
    assert_eq!(second.release().await.unwrap(), Released::Released);
    expect_unused(&redis, &near, "job").await;
}

#[tokio::test]
async fn a_server_restarted_empty_tells_holders_and_lets_waiters_in() {
    wiped(Redis::restart).await;
}

#[tokio::test]
async fn a_flushed_server_tells_holders_and_lets_waiters_in() {
    wiped(|redis| drop(redis.call(&["FLUSHALL"]))).await;
}

#[tokio::test]
async fn nobody_notices_that_scripts_are_flushed() {
    let redis = Arc::new(Redis::start());
    let mut load = tokio::task::JoinSet::new();
    for worker in 0..8 {
        let (redis, locks) = (redis.clone(), connect(&redis.url()).await);
        load.spawn(async move {
            for _ in 0..40 {
                let guard = lock(&locks, if worker % 2 == 0 { "even" } else { "odd" }).await;
                enter(&redis, &guard);
                leave_and_release(&redis, guard).await;
            }
        });
    }
    while !load.is_empty() {
        redis.call(&["SCRIPT", "FLUSH"]);
        tokio::select! {
            done = load.join_next() => done.unwrap().unwrap(),
            () = tokio::time::sleep(Duration::from_millis(1)) => {}
        }
    }
    assert!(redis.client().commandstats()["script|load"] > 10, "the flushes came between");
}

#[tokio::test]
async fn a_script_that_is_gone_costs_one_trip_more() {
    let redis = Redis::start();
    let locks = connect(&redis.url()).await;
    let mut client = redis.client();
    let pair = async |client: &mut Resp| {
        let read = |client: &mut Resp| {
            let stats = client.commandstats();
            let trips: i64 = client.info("stats")["total_writes_processed"].parse().unwrap();
            let count = |name: &str| i64::try_from(stats.get(name).copied().unwrap_or(0)).unwrap();
            [count("evalsha"), count("script|load"), trips]
        };
        let before = read(client);
        lock(&locks, "job").await.release().await.unwrap();
        let after = read(client);
        std::array::from_fn(|at| after[at] - before[at])
    };
    pair(&mut client).await;
    let (mut known, mut flushed) = (i64::MAX, i64::MAX);
    // A server that is busy may write one answer in two parts, and never fewer than there are: the least of several counts.
    for _ in 0..5 {
        let [scripts, loads, trips]: [i64; 3] = pair(&mut client).await;
        assert_eq!([scripts, loads], [2, 0]);
        known = known.min(trips);
        client.call(&["SCRIPT", "FLUSH"]);
        let [scripts, loads, trips] = pair(&mut client).await;
        // Each of the two scripts: refused, then loaded and run together.
        assert_eq!([scripts, loads], [4, 2]);
        flushed = flushed.min(trips);
    }
    assert_eq!(flushed, known + 2);
}

#[tokio::test]
async fn a_busy_server_is_waited_for() {
    let redis = Redis::builder().arg("--lua-time-limit", "100").start();
    let near = connect(&redis.url()).await.ttl(Duration::from_secs(6)).unwrap();
    let guard = lock(&near, "job").await;
    enter(&redis, &guard);
    let waiter = queue(&connect(&redis.url()).await, "job");
    sees_waiters(&redis, "job", 1).await;
    let mut client = redis.client();
    let busy = std::thread::spawn({
        let mut client = redis.client();
        move || client.try_call(&["EVAL", "while true do end", "0"])
    });
    eventually("the server is busy", async || {
        let error = near.state("job").await.err()?;
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        error.to_string().contains("BUSY").then_some(())
    })
    .await;
    let error = near.mutex("other").unwrap().try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert_eq!(guard.verify().await.unwrap_err().kind(), ErrorKind::Unavailable);
    let worried = tokio::time::timeout(PATIENCE, guard.changed(&Standing::Held)).await.unwrap();
    assert_eq!(worried, Standing::Jeopardy);
    client.call(&["SCRIPT", "KILL"]);
    assert!(matches!(busy.join().unwrap().unwrap(), Reply::Error(_)));
    let mended = tokio::time::timeout(PATIENCE, guard.changed(&worried)).await.unwrap();
    assert_eq!(mended, Standing::Held);
    leave_and_release(&redis, guard).await;
    let guard = waiter.await.unwrap();
    enter(&redis, &guard);
    leave_and_release(&redis, guard).await;
    expect_unused(&redis, &near, "job").await;
}

/// A server that has no memory for anything new as soon as it is told so.
fn fill(redis: &Redis) {
    redis.call(&["CONFIG", "SET", "maxmemory", "1mb"]);
    let mut client = redis.client();
    let mut count = 0;
    while matches!(client.try_call(&["RPUSH", "ballast", &"x".repeat(10_000)]).unwrap(), Reply::Int(_)) {
        count += 1;
        assert!(count < 1000, "the server is never full");
    }
}

#[tokio::test]
async fn a_full_server_takes_no_new_lock_but_keeps_and_hands_over_those_it_has() {
    let redis = Redis::builder().arg("--maxmemory-policy", "noeviction").start();
    let (near, far) = (connect(&redis.url()).await, connect(&redis.url()).await);
    let guard = lock(&near, "job").await;
    enter(&redis, &guard);
    let waiter = queue(&far, "job");
    sees_waiters(&redis, "job", 1).await;
    fill(&redis);
    let other = near.mutex("other").unwrap();
    let patient = other.lock().timeout(Duration::from_secs(1)).await.unwrap_err();
    for error in [patient, other.try_lock().await.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert!(format!("{error:?}").contains("out of memory"), "{error:?}");
    }
    assert_eq!(left(&redis, "other"), [""; 0]);
    let patient = queue(&near, "other");
    guard.extend(2 * LONG_TTL).await.unwrap();
    guard.verify().await.unwrap();
    assert!(holder(&redis, "job").unwrap().1 > i64::try_from(LONG_TTL.as_millis()).unwrap());
    leave(&redis, "job");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
    guard.extend(LONG_TTL).await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    connect(&redis.url()).await;
    assert!(!patient.is_finished());
    redis.call(&["CONFIG", "SET", "maxmemory", "0"]);
    let guard = tokio::time::timeout(PATIENCE, patient).await.unwrap().unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    expect_unused(&redis, &near, "job").await;
}

#[tokio::test]
async fn a_full_server_keeps_readers_and_permits() {
    let redis = Redis::builder().arg("--maxmemory-policy", "noeviction").start();
    let locks = connect(&redis.url()).await;
    let reader = locks.rwlock("index").unwrap().read().await.unwrap();
    let permit = locks.semaphore("gpu", 4).unwrap().acquire(2).unwrap().await.unwrap();
    let waiter = queue(&locks, "index");
    sees_waiters(&redis, "index", 1).await;
    fill(&redis);
    for guard in [&reader, &permit] {
        guard.verify().await.unwrap();
        guard.extend(2 * LONG_TTL).await.unwrap();
    }
    for guard in [reader, permit] {
        assert_eq!(guard.release().await.unwrap(), Released::Released);
    }
    let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

/// What was handed over is the waiter's also where it has to ask for it, as it does over a slow link: nothing is written that needs memory.
#[tokio::test]
async fn a_full_server_gives_a_waiter_what_it_was_handed() {
    for mode in [Mode::Exclusive, Mode::Shared] {
        let redis = Redis::builder().arg("--maxmemory-policy", "noeviction").start();
        let backend = super::queues::backend(&redis).await;
        let (holder, waiter) = (claim("job", Mode::Exclusive, 1), claim("job", mode, 2));
        assert!(matches!(backend.claim(&holder).await.unwrap(), Progress::Granted(_)));
        // Who listens is handed it.
        eventually("it is queued, and listens", async || {
            assert!(matches!(backend.claim(&waiter).await.unwrap(), Progress::Queued(_)));
            let told = tokio::time::timeout(Duration::from_millis(20), backend.wait(&waiter)).await;
            assert!(!matches!(told, Ok(Ok(Wake::Granted(_)))), "it was held");
            waiters(&redis, "job")
                .iter()
                .any(|(_, record)| record.split(' ').nth(5) != Some("-"))
                .then_some(())
        })
        .await;
        fill(&redis);
        assert_eq!(backend.release(&holder, Duration::ZERO).await.unwrap(), Freed::Removed);
        assert!(matches!(backend.claim(&waiter).await.unwrap(), Progress::Granted(_)), "{mode}");
        // For the whole of its TTL now.
        let renewal = backend.verify(&waiter).await.unwrap();
        assert!(
            matches!(renewal, Renewal::Renewed(Some(left)) if left > LONG_TTL / 2),
            "{mode}: {renewal:?}"
        );
        assert_eq!(backend.release(&waiter, Duration::ZERO).await.unwrap(), Freed::Removed);
        // A full server still says who has a lock.
        assert!(matches!(backend.claim(&holder).await.unwrap_err().kind(), ErrorKind::Unavailable));
    }
}

/// Of a lock that nobody waits for, of one that has a queue, and of a part of one.
#[tokio::test]
async fn a_full_server_keeps_locks_closed_and_takes_downgrades() {
    let redis = Redis::builder().arg("--maxmemory-policy", "noeviction").start();
    let locks = connect(&redis.url()).await;
    let mut guards = vec![lock(&locks, "alone").await, lock(&locks, "job").await];
    guards.push(locks.rwlock("index").unwrap().read().await.unwrap());
    let writer = locks.rwlock("data").unwrap().write().await.unwrap();
    let waiter = queue(&locks, "job");
    sees_waiters(&redis, "job", 1).await;
    fill(&redis);
    for guard in guards {
        let name = guard.name().clone();
        assert_eq!(guard.release_closed(LONG_TTL).await.unwrap(), Released::Released, "{name}");
        let left = redis.call(&["PTTL", &format!("clinch:{name}")]).int();
        assert!(left > 60_000, "{name} is closed for {left} ms");
    }
    let reader = writer.downgrade().await.unwrap();
    reader.verify().await.unwrap();
    assert_eq!(reader.release().await.unwrap(), Released::Released);
    assert!(!waiter.is_finished());
    waiter.abort();
}

/// P7: before anything was sent, nothing that is said in the place of the server answers a release or a wait.
#[tokio::test]
async fn a_release_and_a_wait_outlast_what_speaks_for_a_server_that_is_away() {
    let (mine, theirs) = (unique("spoken-for"), unique("spoken-for"));
    let proxy = Proxy::start(SERVER.addr());
    let (near, far) = (connect(&SERVER.url()).await, connect_through(&proxy).await);
    let (guard, held) = (lock(&far, &mine).await, lock(&near, &theirs).await);
    let waiter = queue(&far, &theirs);
    sees_waiters(&SERVER, &theirs, 1).await;
    let (addr, asked) = stand_in().await;
    proxy.set_upstream(addr);
    proxy.cut_all();
    let releasing = tokio::spawn(guard.release());
    eventually("it was asked in vain", async || (asked.load(Ordering::Relaxed) >= 8).then_some(())).await;
    proxy.set_upstream(SERVER.addr());
    assert_eq!(releasing.await.unwrap().unwrap(), Released::Released);
    assert_eq!(held.release().await.unwrap(), Released::Released);
    let guard = waiter.await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    expect_unused(&SERVER, &near, &mine).await;
}
