//! Whose turn it is, until when, and what a process that is stopped or not polled does to the others.

use super::*;

/// The holder of `clinch acquire` lets go when the time in its record has passed, without asking anybody again.
#[tokio::test]
async fn a_lease_whose_time_has_passed_is_renewed_by_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, outside) = (connect(dir.path()).await, connect(dir.path()).await);
    let guard = lock(&locks, "job").await;
    let id = guard.claim_id();
    for _ in 0..2 {
        outside.renew_detached("job", id, Duration::from_millis(200)).await.unwrap();
    }
    let end = tokio::time::Instant::now() + PATIENCE;
    while outside.state("job").await.unwrap().unwrap().claims[0].expires_in != Some(Duration::ZERO) {
        assert!(tokio::time::Instant::now() < end);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let error = outside.renew_detached("job", id, PATIENCE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
}

/// Nobody would tell the holder, who would go on beside the next.
#[tokio::test]
async fn what_a_process_holds_is_released_by_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, outside) = (connect(dir.path()).await, connect(dir.path()).await);
    let guard = lock(&locks, "job").await;
    let waiter = tokio::spawn({
        let locks = locks.clone();
        async move { lock(&locks, "job").await }
    });
    claims(&outside, "job", 2).await;
    for claim in outside.state("job").await.unwrap().unwrap().claims {
        let error = outside.release_detached("job", claim.id).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        assert_eq!(error.to_string().contains("only waits"), !claim.granted, "{error}");
    }
    assert!(outside.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    assert_eq!(guard.release().await.unwrap(), clinch::Released::Released);
    let guard = waiter.await.unwrap();
    let id = guard.claim_id();
    outside.renew_detached("job", id, PATIENCE).await.unwrap();
    assert_eq!(outside.release_detached("job", id).await.unwrap(), clinch::Released::Released);
    assert!(
        outside.mutex("job").unwrap().try_lock().await.unwrap().is_some(),
        "it was given an end, and that is now"
    );
}

/// It may be another's since, whom the late release would find closed out.
#[tokio::test]
async fn what_was_released_by_its_id_is_not_released_again() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, outside) = (connect(dir.path()).await, connect(dir.path()).await);
    for linger in [Duration::ZERO, PATIENCE] {
        let guard = lock(&locks, "job").await;
        let id = guard.claim_id();
        outside.renew_detached("job", id, PATIENCE).await.unwrap();
        assert_eq!(outside.release_detached("job", id).await.unwrap(), clinch::Released::Released);
        let next = outside.mutex("job").unwrap().try_lock().await.unwrap().expect("it is free");
        let released = guard.release_closed(linger).await.unwrap();
        assert!(matches!(released, clinch::Released::AlreadyLost(_)), "it was released twice");
        assert_eq!(outside.state("job").await.unwrap().unwrap().closed_until, None);
        next.release().await.unwrap();
    }
}

/// What ends nothing closes nothing either.
#[tokio::test]
async fn a_release_by_its_id_that_fails_closes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, outside) = (connect(dir.path()).await, connect(dir.path()).await);
    let guard = lock(&locks, "job").await;
    let claim = claim_of(&outside, &guard).await;
    outside.renew_detached("job", claim.id, PATIENCE).await.unwrap();
    let changing = keep_record(&the_lock_file(dir.path()), guard.token().get());
    let store = clinch::backends::file::open(dir.path(), Env::host(clinch::Lane::thread())).unwrap();
    let error = store.release(&claim, PATIENCE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert_eq!(outside.state("job").await.unwrap().unwrap().closed_until, None);
    drop(changing);
    assert_eq!(store.release(&claim, PATIENCE).await.unwrap(), Freed::Removed);
    assert!(outside.state("job").await.unwrap().unwrap().closed_until.is_some());
}

/// The claim of a guard, as another client that knows it by its id has it.
async fn claim_of(locks: &Locks, guard: &Guard) -> clinch::Claim {
    let state = locks.state(guard.name().as_str()).await.unwrap().unwrap().claims.remove(0);
    assert_eq!(state.id, guard.claim_id());
    clinch::Claim {
        id: state.id,
        name: guard.name().clone(),
        mode: state.mode,
        ttl: PATIENCE,
        enqueue: false,
        place: false,
        isolated: true,
        owner: Arc::new(state.owner),
    }
}

/// A process that is stopped while it changes the record of a ticket.
fn keep_record(file: &Path, ticket: u64) -> Python {
    let byte = (1 << 54) + 1 + ticket % 8192;
    let script = format!(
        "import fcntl,os,struct,sys
fd=os.open(sys.argv[1],os.O_RDWR)
fcntl.fcntl(fd,37,struct.pack('hhqqi4x',fcntl.F_WRLCK,0,{byte},1,0))
print('ready',flush=True)
sys.stdin.read()"
    );
    Python::start(&script, file)
}

/// The second is told that there is nothing to evict, while the holder is still at it.
#[tokio::test]
async fn two_evictions_of_one_claim_say_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let guard = lock(&locks, "job").await;
    let evict = || other.evict("job", guard.claim_id());
    let (first, second) = tokio::join!(evict(), evict());
    assert_eq!((first.unwrap(), second.unwrap()), (Freed::Removed, Freed::Removed));
    drop(guard);
}

/// Whatever an evicted holder still does, it does alone, be it one of several.
#[tokio::test]
async fn an_evicted_holder_has_the_lock_until_it_lets_go() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let guards = [
        lock(&locks, "mutex").await,
        locks.rwlock("rwlock").unwrap().read().await.unwrap(),
        locks.semaphore("semaphore", 2).unwrap().acquire(2).unwrap().await.unwrap(),
    ];
    for guard in &guards {
        let (other, name, claim) = (other.clone(), guard.name().to_string(), guard.claim_id());
        tokio::spawn(async move { other.evict(&name, claim).await });
    }
    for guard in &guards {
        tokio::time::timeout(PATIENCE, guard.lost()).await.expect("it is told");
    }
    const BESIDE: &str = "another got in beside an evicted holder";
    for _ in 0..100 {
        assert!(other.mutex("mutex").unwrap().try_lock().await.unwrap().is_none(), "{BESIDE}");
        assert!(other.rwlock("rwlock").unwrap().try_write().await.unwrap().is_none(), "{BESIDE}");
        assert!(other.semaphore("semaphore", 2).unwrap().try_acquire(1).await.unwrap().is_none(), "{BESIDE}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(guards);
    assert!(other.mutex("mutex").unwrap().try_lock().await.unwrap().is_some());
    assert!(other.rwlock("rwlock").unwrap().try_write().await.unwrap().is_some());
    assert!(other.semaphore("semaphore", 2).unwrap().try_acquire(1).await.unwrap().is_some());
}

/// Polls a future once.
async fn once<T>(future: &mut std::pin::Pin<Box<impl Future<Output = T> + ?Sized>>) -> Option<T> {
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(match future.as_mut().poll(context) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        })
    })
    .await
}

/// A future that is kept and not polled holds its turn for ever, and all behind it wait.
#[tokio::test]
async fn a_turn_that_nobody_takes_goes_on_to_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let held = lock(&other, "job").await;
    let mut silent = Box::pin(lock(&locks, "job"));
    assert!(once(&mut silent).await.is_none());
    let next = tokio::spawn({
        let other = other.clone();
        async move { lock(&other, "job").await }
    });
    claims(&other, "job", 3).await;
    drop(held);
    let next = tokio::time::timeout(PATIENCE, next).await.expect("the turn goes on").unwrap();
    assert!(once(&mut silent).await.is_none(), "a turn that went on was taken");
    claims(&other, "job", 2).await;
    let token = next.token();
    drop(next);
    assert!(tokio::time::timeout(PATIENCE, silent).await.expect("it has a place again").token() > token);
}

/// The record of a claim is changed by one at a time: else a grant could undo an eviction.
#[tokio::test]
async fn a_record_that_is_being_changed_is_changed_by_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let holder = lock(&locks, "job").await;
    let waiter = tokio::spawn({
        let locks = locks.clone();
        async move { lock(&locks, "job").await }
    });
    claims(&other, "job", 2).await;
    let place = other.state("job").await.unwrap().unwrap().claims[1].clone();
    let changing = keep_record(&the_lock_file(dir.path()), place.token.unwrap().get());
    let error = other.evict("job", place.id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    drop(holder);
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(!waiter.is_finished(), "a waiter wrote its record while another did");
    }
    drop(changing);
    drop(tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap());
}

/// Holds the byte that guards the header, as a claimant does for some microseconds, for as long as it lives.
const KEEP_HEADER: &str = "import fcntl,os,struct,sys
fd=os.open(sys.argv[1],os.O_RDWR)
fcntl.fcntl(fd,37,struct.pack('hhqqi4x',fcntl.F_WRLCK,0,1<<54,1,0))
print('ready',flush=True)
sys.stdin.read()";

/// Who holds the lock can be seen without the header.
#[tokio::test]
async fn a_lock_that_is_held_is_told_as_that_while_its_header_is_kept_busy() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let guard = lock(&locks, "job").await;
    let stopped = Python::start(KEEP_HEADER, &the_lock_file(dir.path()));
    let mutex = other.mutex("job").unwrap();
    assert!(mutex.try_lock().await.unwrap().is_none());
    for timeout in [0, 50] {
        let taken = mutex.lock().timeout(Duration::from_millis(timeout)).await.unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::TimedOut);
        assert!(taken.to_string().contains(&format!("pid {}", std::process::id())), "{taken}");
    }
    assert!(other.rwlock("job").unwrap().try_read().await.unwrap().is_none());
    drop(guard);
    let unknown = mutex.try_lock().await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unavailable, "{unknown:?}");
    drop(stopped);
    lock(&locks, "job").await.release_closed(Duration::from_secs(600)).await.unwrap();
    let _stopped = Python::start(KEEP_HEADER, &the_lock_file(dir.path()));
    assert!(mutex.try_lock().await.unwrap().is_none(), "it is kept closed");
}

/// A job would be skipped for one that ended long ago.
#[tokio::test]
async fn who_had_the_lock_once_does_not_count_while_nobody_can_say_who_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let holder = lock(&locks, "job").await;
    let waiter = tokio::spawn({
        let mutex = other.mutex("job").unwrap();
        async move { mutex.lock().timeout(Duration::from_secs(4)).await }
    });
    claims(&locks, "job", 2).await;
    let place = locks.state("job").await.unwrap().unwrap().claims[1].clone();
    let changing = keep_record(&the_lock_file(dir.path()), place.token.unwrap().get());
    drop(holder);
    let unknown = waiter.await.unwrap().unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unavailable, "{unknown:?}");
    drop(changing);
}

#[tokio::test]
async fn a_process_stopped_while_it_takes_its_ticket_delays_but_breaks_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    drop(lock(&locks, "job").await);
    let stopped = Python::start(KEEP_HEADER, &the_lock_file(dir.path()));
    let mutex = locks.mutex("job").unwrap();
    let unknown = mutex.try_lock().await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unavailable, "nobody knows whether the lock is taken: {unknown:?}");
    let unknown = mutex.lock().timeout(Duration::from_millis(50)).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unavailable, "nor does who waits: {unknown:?}");
    let waiter = tokio::spawn(async move { mutex.lock().timeout(PATIENCE).await });
    drop(stopped);
    drop(waiter.await.unwrap().unwrap());
}

/// The wall clock was ahead once, by years, or the host starts with one that is behind: the lock is closed until the clock has caught up.
#[tokio::test]
async fn a_clock_that_was_ahead_keeps_no_lock_closed() {
    const PERIOD: Duration = Duration::from_millis(300);
    let dir = tempfile::tempdir().unwrap();
    let (locks, file) = (connect(dir.path()).await, the_lock_file(dir.path()));
    for other_boot in [false, true] {
        lock(&locks, "job").await.release_closed(PERIOD).await.unwrap();
        let ahead = format!("{:016}", header_field(&file, "closed") + 3 * 365 * 24 * 3600 * 1000);
        rewrite_header(&file, "closed", &ahead);
        if other_boot {
            rewrite_header(&file, "boot", &format!("{:032x}", 7));
        }
        let opens = locks.state("job").await.unwrap().map(|state| state.closed_until.unwrap());
        let latest = std::time::SystemTime::now() + Duration::from_secs(2);
        assert!(opens.is_none_or(|opens| opens < latest), "people are told {opens:?}");
        // Who does not wait is let in, too, in its time.
        let end = tokio::time::Instant::now() + PATIENCE;
        while locks.mutex("job").unwrap().try_lock().await.unwrap().is_none() {
            assert!(tokio::time::Instant::now() < end, "it stays closed");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
