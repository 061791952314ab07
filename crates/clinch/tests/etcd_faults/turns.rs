//! Turns in the queue: of waiters that died, that nobody polls, and of holders that were evicted.

use std::pin::Pin;
use std::task::Poll;
use std::time::SystemTime;

use clinch::Claim;
use clinch::backend::{Freed, Progress, Renewal};
use clinch_testkit::etcd_3_5;

use super::moves::elsewhere;
use super::sieve::{Fate, Sieve};
use super::*;

/// A place lives for a few seconds; a grant for its TTL, under the same key, with the token that the place had.
#[tokio::test]
async fn a_place_hangs_on_a_short_lease_and_its_grant_on_a_long_one() {
    for etcd in [Etcd::start(), Etcd::builder().binary(etcd_3_5()).start()] {
        let (near, far) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
        let reader = near.rwlock("job").unwrap().read().await.unwrap();
        assert_eq!(carrier(&etcd, &reader.store_key().unwrap()).1, LONG_TTL.as_secs());
        let wanted = far.rwlock("job").unwrap();
        let writer = tokio::spawn(async move { wanted.write().await.unwrap() });
        sees_claims(&near, "job", 2).await;
        let place = near.state("job").await.unwrap().unwrap().claims[1].clone();
        let key = keys(&etcd, "job").into_iter().find(|key| *key != reader.store_key().unwrap()).unwrap();
        assert!(carrier(&etcd, &key).1 < 5, "the place lives for {} s", carrier(&etcd, &key).1);
        // One of the same client that is let in at once, and yet not the first.
        let wanted = far.rwlock("index").unwrap();
        let first = near.rwlock("index").unwrap().read().await.unwrap();
        let second = wanted.read().await.unwrap();
        assert_eq!(carrier(&etcd, &second.store_key().unwrap()).1, LONG_TTL.as_secs());
        reader.release().await.unwrap();
        let writer = join("the writer is granted", writer).await;
        assert_eq!((writer.store_key().unwrap(), Some(writer.token())), (key.clone(), place.token));
        assert_eq!(carrier(&etcd, &key).1, LONG_TTL.as_secs());
        assert_eq!(writer.release().await.unwrap(), Released::Released);
        release(first).await;
        release(second).await;
    }
}

/// Polls a future until a lock has so many claims, and never again unless the caller does.
async fn polled_until_queued<F: Future + Unpin>(future: &mut F, locks: &Locks, name: &str, count: usize) {
    tokio::select! {
        _ = future => panic!("granted beside another"),
        () = sees_claims(locks, name, count) => {}
    }
}

/// Has a future begin, and no more.
async fn poll_once<F: Future + Unpin>(future: &mut F) {
    let is_pending =
        std::future::poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context).is_pending()));
    assert!(is_pending.await, "it needs no answer");
}

/// A waiter that is kept but not polled does not keep the lock: neither when it was told of its turn, nor in its first step,
/// though other claims keep the leases of both.
#[tokio::test]
async fn a_waiter_that_nobody_polls_lets_the_lock_go_on() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    let guard = lock(&near, "job").await;
    let mutex = far.mutex("job").unwrap();
    let mut unpolled = Box::pin(mutex.lock().into_future());
    polled_until_queued(&mut unpolled, &near, "job", 2).await;
    // Of the same client, on the same lease.
    let behind = queue(&far, "job");
    sees_claims(&near, "job", 3).await;
    release(guard).await;
    let behind = join("the one behind is granted", behind).await;
    let token = behind.token();
    tokio::select! {
        early = &mut unpolled => panic!("granted beside another: {early:?}"),
        () = sees_claims(&near, "job", 2) => {}
    }
    release(behind).await;
    let late = within("it is granted at its next turn", unpolled).await.unwrap();
    assert!(late.token() > token);
    late.verify().await.unwrap();
    release(late).await;
    expect_unused(&etcd, &near, "job").await;
}

pub(super) fn contains(all: &[u8], part: &[u8]) -> bool {
    all.windows(part.len()).any(|window| window == part)
}

/// Whether a request deletes a key of this lock in a transaction.
pub(super) fn deletes(request: &[u8], name: &str) -> bool {
    let key = format!("/clinch/{name}/");
    let is_delete = |at: usize| matches!(request[..at], [.., 0x1a, _, 0x0a, _]);
    (0..request.len()).any(|at| request[at..].starts_with(key.as_bytes()) && is_delete(at))
}

/// Whether a request hangs a key of this lock on another lease.
pub(super) fn moves(request: &[u8], name: &str) -> bool {
    // That leaves the value as it is; a look says in the same field how it is sorted, and by what.
    let keeps_value =
        [request, b"\0"].concat().windows(3).any(|part| part[..2] == *b"\x28\x01" && part[2] != 0x30);
    // Or the claim takes its turn: where the key is still on that lease, it says anew since when it holds.
    let has = |bytes: &[u8]| contains(request, bytes);
    let takes_turn = has(b"\x10\x04") && has(b"\"since\"") && !has(b"closed_ms");
    contains(request, format!("/clinch/{name}/").as_bytes()) && (keeps_value || takes_turn)
}

/// A turn that went on to the next is over, also when the delete that passes it on comes late: whoever is polled again gets
/// no lock that this delete then takes from it.
#[tokio::test]
async fn a_turn_that_is_passed_on_late_is_not_taken_after_all() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (near, far) = (connect(&etcd.url()).await, connect(&sieve.url()).await);
    let (guard, other) = (lock(&near, "job").await, lock(&near, "other").await);
    // It keeps the lease of the places.
    let kept = queue(&far, "other");
    sees_claims(&near, "other", 2).await;
    let mutex = far.mutex("job").unwrap();
    let mut unpolled = Box::pin(mutex.lock().into_future());
    polled_until_queued(&mut unpolled, &near, "job", 2).await;
    let behind = queue(&near, "job");
    sees_claims(&near, "job", 3).await;
    sieve.catch(Fate::Late, |request| deletes(request, "job"));
    release(guard).await;
    sieve.caught().await;
    let next = tokio::select! {
        early = &mut unpolled => panic!("granted with a delete of its key on its way: {early:?}"),
        next = join("the one behind is granted", behind) => next,
    };
    sieve.let_go().await;
    next.verify().await.unwrap();
    release(next).await;
    let late = within("it is granted at its next turn", unpolled).await.unwrap();
    late.verify().await.unwrap();
    release(late).await;
    release(other).await;
    release(join("the other is granted", kept).await).await;
    expect_unused(&etcd, &near, "job").await;
}

/// A first step that nobody polls keeps no lock that it was granted, though others keep the lease which that hangs on, and
/// nobody that of the places.
#[tokio::test]
async fn a_first_step_that_nobody_polls_lets_the_lock_go_on() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    let far = far.ttl(Duration::from_secs(6)).unwrap();
    let (kept, other) = (lock(&far, "kept").await, lock(&near, "other").await);
    let waiter = queue(&far, "other");
    sees_claims(&near, "other", 2).await;
    let mutex = far.mutex("job").unwrap();
    let mut unpolled = Box::pin(mutex.lock().into_future());
    poll_once(&mut unpolled).await;
    sees_claims(&near, "job", 1).await;
    // Nobody waits any more.
    release(other).await;
    let waiter = join("the waiter is granted", waiter).await;
    release(lock(&near, "job").await).await;
    release(waiter).await;
    release(kept).await;
    drop(unpolled);
    expect_unused(&etcd, &near, "job").await;
}

/// A grant that is asked for again, for it came too late, is nobody's until it is taken.
#[tokio::test]
async fn a_stale_grant_that_nobody_takes_lets_the_lock_go_on() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    let claim = ghosts::claim(1, "job", LONG_TTL);
    let backend = clinch::backends::etcd::open(&etcd.url(), Env::host(Lane::thread())).await.unwrap();
    ghosts::granted(&*backend, &claim).await;
    let (kept, mut again) = (ghosts::claim(2, "kept", LONG_TTL), backend.claim(&claim));
    ghosts::granted(&*backend, &kept).await;
    poll_once(&mut again).await;
    let next = queue(&near, "job");
    eventually("it goes on", async || {
        let renewals = backend.renew(std::slice::from_ref(&kept)).await;
        assert!(matches!(renewals[..], [Renewal::Renewed(_)]), "{renewals:?}");
        next.is_finished().then_some(())
    })
    .await;
    release(join("the next is granted", next).await).await;
    drop(again);
    for claim in [&claim, &kept] {
        backend.release(claim, Duration::ZERO).await.unwrap();
    }
    expect_unused(&etcd, &far, "job").await;
}

/// Whoever is granted while an operator puts it out of the queue is told before another is granted, and so keeps the lock
/// here, also where its key does not change its lease.
#[tokio::test]
async fn a_waiter_that_is_granted_while_it_is_evicted_is_a_holder() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (near, far) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    let operator = connect(&sieve.url()).await;
    let guard = lock(&near, "job").await;
    let waiter = queue(&far.ttl(Duration::from_secs(3)).unwrap(), "job");
    sees_claims(&near, "job", 2).await;
    let waiting = near.state("job").await.unwrap().unwrap().claims[1].id;
    sieve.catch(Fate::Late, |request| deletes(request, "job"));
    let evicted = tokio::spawn(async move { operator.evict("job", waiting).await });
    sieve.caught().await;
    release(guard).await;
    let granted = join("the waiter is granted", waiter).await;
    evicted.abort();
    sieve.let_go().await;
    granted.verify().await.unwrap();
    release(granted).await;
    expect_unused(&etcd, &near, "job").await;
}

/// A waiter with a lease of its own is granted though the answer was lost that told of its turn, and its place with it.
#[tokio::test]
async fn an_isolated_waiter_does_not_queue_behind_its_own_grant() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let near = connect(&etcd.url()).await;
    let backend = clinch::backends::etcd::open(&sieve.url(), Env::host(Lane::thread())).await.unwrap();
    let guard = lock(&near, "job").await;
    let claim = Claim { isolated: true, place: true, ..(*ghosts::claim(1, "job", LONG_TTL)).clone() };
    assert!(matches!(backend.claim(&claim).await.unwrap(), Progress::Queued(_)));
    let place = backend.key(claim.id).unwrap();
    release(guard).await;
    within("it hears that nobody is ahead", backend.wait(&claim)).await.unwrap();
    sieve.catch(Fate::Last, |request| moves(request, "job"));
    backend.claim(&claim).await.unwrap_err();
    sieve.caught().await;
    // That of the near one and that of the claim are left.
    let is_over = async || (etcd.leases().len() == 2).then_some(());
    eventually("the lease of the places runs out", is_over).await;
    assert_eq!(carrier(&etcd, &place).1, LONG_TTL.as_secs());
    sieve.let_go().await;
    let claim = Arc::new(claim);
    eventually("it hears of that", async || {
        let renewals = backend.renew(std::slice::from_ref(&claim)).await;
        matches!(renewals[..], [Renewal::Lost(_)]).then_some(())
    })
    .await;
    ghosts::granted(&*backend, &claim).await;
    assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
    expect_unused(&etcd, &near, "job").await;
}

/// What an eviction keeps closed is open as soon as its holder has heard of it and let go, long before its time.
#[tokio::test]
async fn an_evicted_holder_is_told_at_once_and_its_release_opens_the_lock() {
    let etcd = Etcd::start();
    let (near, far) = (unrenewed(&etcd.url(), Env::host(Lane::thread())).await, connect(&etcd.url()).await);
    let guard = lock(&near, "job").await;
    let waiter = queue(&far, "job");
    sees_claims(&far, "job", 2).await;
    let leases = etcd.leases();
    far.evict("job", guard.claim_id()).await.unwrap();
    let state = far.state("job").await.unwrap().unwrap();
    assert!(state.closed_until.is_some(), "not closed for its holder: {state:?}");
    assert!(state.claims.len() == 1 && !state.claims[0].granted, "{state:?}");
    let loss = within("the holder is told", guard.lost()).await;
    assert_eq!(loss.kind, LossKind::Deleted, "{loss}");
    assert!(!waiter.is_finished(), "granted before the evicted holder let go");
    // A second eviction of it opens nothing, and one of a waiter is told apart.
    far.evict("job", guard.claim_id()).await.unwrap();
    let closed_until = far.state("job").await.unwrap().unwrap().closed_until.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost(loss));
    let next = join("the waiter is granted", waiter).await;
    assert!(SystemTime::now() < closed_until, "it was opened by the end of a lease, not by its release");
    assert_eq!(etcd.leases(), leases, "what kept it closed is given back");
    release(next).await;
    expect_unused(&etcd, &near, "job").await;
}

/// An evicted reader keeps no reader out, a waiter that is evicted nobody, and whoever does not let go, nobody for long.
#[tokio::test]
async fn what_an_eviction_closes_is_what_was_held() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    let near = near.ttl(Duration::from_secs(4)).unwrap();
    let reader = near.rwlock("index").unwrap().read().await.unwrap();
    let wanted = far.rwlock("index").unwrap();
    let writer = tokio::spawn(async move { wanted.write().await.unwrap() });
    sees_claims(&far, "index", 2).await;
    let waiting = far.state("index").await.unwrap().unwrap().claims[1].id;
    far.evict("index", reader.claim_id()).await.unwrap();
    assert!(far.rwlock("index").unwrap().try_write().await.unwrap().is_none());
    writer.abort();
    assert!(writer.await.unwrap_err().is_cancelled());
    let _ = far.evict("index", waiting).await;
    let other = far.rwlock("index").unwrap().read().timeout(PATIENCE).await.unwrap();
    assert!(far.state("index").await.unwrap().unwrap().closed_until.is_some(), "the reader has not let go");
    release(other).await;
    // It is never let go.
    let writer = far.rwlock("index").unwrap().write().timeout(PATIENCE).await.unwrap();
    assert!(!reader.is_held());
    assert_eq!(writer.release().await.unwrap(), Released::Released);
    assert!(matches!(reader.release().await.unwrap(), Released::AlreadyLost(_)));
    expect_unused(&etcd, &far, "index").await;
}

fn place(id: u128, name: &str) -> Arc<Claim> {
    Arc::new(Claim { place: true, ..(*ghosts::claim(id, name, LONG_TTL)).clone() })
}

/// However many waiters of a client nobody polls, those whose turn has come are found among those whose turn has not.
#[tokio::test]
async fn turns_go_on_though_many_wait_unpolled_whose_turn_has_not_come() {
    const HALF: u128 = 20;
    let etcd = Etcd::start();
    let (near, far) = (open(&etcd.url()).await, open(&etcd.url()).await);
    let name = |number: u128| format!("job {number}");
    for number in 0..2 * HALF {
        ghosts::granted(&*near, &ghosts::claim(number, &name(number), LONG_TTL)).await;
        let waiter = far.claim(&place(1000 + number, &name(number))).await.unwrap();
        assert!(matches!(waiter, Progress::Queued(_)), "{waiter:?}");
    }
    for number in 0..HALF {
        near.release(&ghosts::claim(number, &name(number), LONG_TTL), Duration::ZERO).await.unwrap();
    }
    let kept = place(1000 + 2 * HALF - 1, &name(2 * HALF - 1));
    eventually("all go on", async || {
        let renewals = far.renew(std::slice::from_ref(&kept)).await;
        assert!(matches!(renewals[..], [Renewal::Renewed(_)]), "{renewals:?}");
        let left = etcd.keys("/clinch/job ").len();
        assert!(left >= 2 * HALF as usize, "more than unpolled turns went on");
        (left == 2 * HALF as usize).then_some(())
    })
    .await;
}

/// The engine gives a renewal a sixth of the TTL. Whatever else is looked after on that occasion takes time of its own.
#[tokio::test]
async fn a_renewal_is_answered_before_other_things_are_looked_after() {
    const BETWEEN_RENEWALS: Duration = Duration::from_millis(500);
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (near, far) = (open(&etcd.url()).await, open(&sieve.url()).await);
    for (id, name) in [(1, "job"), (2, "other")] {
        ghosts::granted(&*near, &ghosts::claim(id, name, LONG_TTL)).await;
        far.claim(&place(10 + id, name)).await.unwrap();
    }
    let (unheard, kept) = (far.key(ClaimId::from_bits(11)).unwrap(), place(12, "other"));
    // A plain look at this key.
    let look =
        [&[0, 0, 0, 0, unheard.len() as u8 + 2, 0x0a, unheard.len() as u8], unheard.as_bytes()].concat();
    sieve.catch(Fate::Late, move |request| contains(request, &look));
    let mut caught = Box::pin(sieve.caught());
    loop {
        let before = sieve.accepted();
        let renewals = far.renew(std::slice::from_ref(&kept)).await;
        assert!(matches!(renewals[..], [Renewal::Renewed(_)]), "{renewals:?}");
        // The look may reach the sieve some time after the renewal was answered; what is sent meanwhile would stand behind it.
        if tokio::time::timeout(BETWEEN_RENEWALS, &mut caught).await.is_ok() {
            // A connection that does not answer is left for another after a second or two.
            assert_eq!(sieve.accepted(), before.max(2), "the renewal waited for what was caught");
            break;
        }
    }
    sieve.let_go().await;
}

/// A first step that nobody polls keeps no lock either where its lease is kept by steps alone, and nobody renews anything.
#[tokio::test]
async fn a_first_step_that_nobody_polls_lets_the_lock_go_on_though_steps_keep_its_lease() {
    const TTL: Duration = Duration::from_secs(6);
    let etcd = Etcd::start();
    let backend = open(&etcd.url()).await;
    let busy = async |id| {
        let claim = ghosts::claim(id, "busy", TTL);
        ghosts::granted(&*backend, &claim).await;
        backend.release(&claim, Duration::ZERO).await.unwrap();
    };
    busy(10).await;
    let tried = ghosts::claim(1, "job", TTL);
    let mut unpolled = backend.claim(&tried);
    poll_once(&mut unpolled).await;
    eventually("its key is made", async || (!keys(&etcd, "job").is_empty()).then_some(())).await;
    let mut id = 100;
    eventually("it goes on", async || {
        busy(id).await;
        id += 1;
        keys(&etcd, "job").is_empty().then_some(())
    })
    .await;
    drop(unpolled);
}

/// A waiter that is polled keeps its turn, however long ago the first of its steps failed, and though each of them is on its way
/// when others keep its lease.
#[tokio::test]
async fn a_waiter_that_is_polled_keeps_its_turn_though_its_steps_fail() {
    const LONG: Duration = Duration::from_secs(5);
    let (etcd, clock) = (Etcd::start(), Clock::host());
    let sieve = Sieve::start(etcd.addr()).await;
    let (near, far) = (open(&etcd.url()).await, connect(&etcd.url()).await);
    let env = silent::split_env_by(sieve.addr());
    let backend = clinch::backends::etcd::open(&etcd.url(), env).await.unwrap();
    let (waiter, kept) = (place(11, "job"), place(12, "other"));
    for (id, claim) in [(1, &waiter), (2, &kept)] {
        ghosts::granted(&*near, &ghosts::claim(id, claim.name.as_str(), LONG_TTL)).await;
        let progress = backend.claim(claim).await.unwrap();
        assert!(matches!(progress, Progress::Queued(_)), "{progress:?}");
    }
    let behind = queue(&far, "job");
    sees_claims(&far, "job", 3).await;
    near.release(&ghosts::claim(1, "job", LONG_TTL), Duration::ZERO).await.unwrap();
    let (elsewhere, begun) = (elsewhere(), clock.now());
    let step = || {
        let (backend, claim) = (backend.clone(), waiter.clone());
        elsewhere.spawn(async move { backend.claim(&claim).await })
    };
    while clock.now() < begun + LONG {
        sieve.catch(Fate::Late, |request| moves(request, "job"));
        let step = step();
        sieve.caught().await;
        eventually("the step fails", async || {
            let renewals = backend.renew(std::slice::from_ref(&kept)).await;
            assert!(matches!(renewals[..], [Renewal::Renewed(_)]), "{renewals:?}");
            step.is_finished().then_some(())
        })
        .await;
        let failed = step.await.unwrap();
        assert!(failed.is_err(), "{failed:?}");
        assert!(!behind.is_finished(), "its turn went on to the next");
    }
    sieve.let_go().await;
    eventually("it takes its turn", async || {
        assert!(!behind.is_finished(), "its turn went on to the next");
        matches!(step().await.unwrap().ok()?, Progress::Granted(_)).then_some(())
    })
    .await;
    backend.release(&waiter, Duration::ZERO).await.unwrap();
    release(join("the one behind is granted", behind).await).await;
    elsewhere.shutdown_background();
}
