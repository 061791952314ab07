//! Locks that an operator takes away from their holders.

use super::queues::{backend, claim};
use super::*;
use clinch::backend::{Progress, Renewal};
use clinch::{Claim, Mode};

/// What is left of a lock's lease, in milliseconds.
fn lease_left(redis: &Redis, name: &str) -> i64 {
    redis.call(&["PTTL", &format!("clinch:{name}")]).int()
}

/// A renewal, another eviction, a try and a look change nothing: the lock stays closed until its holder lets go.
#[tokio::test]
async fn an_evicted_lock_stays_closed_until_its_holder_lets_go() {
    let name = unique("evicted");
    let (near, far) = (connect(&SERVER.url()).await, connect(&SERVER.url()).await);
    let guard = lock(&near, &name).await;
    enter(&SERVER, &guard);
    let waiter = queue(&far, &name);
    let waiting = sees_waiters(&SERVER, &name, 1).await;
    let notice = i64::try_from(NOTICE.as_millis()).unwrap();
    assert_eq!(far.evict(&name, guard.claim_id()).await.unwrap(), Freed::Removed);
    assert!((1..=notice).contains(&lease_left(&SERVER, &name)), "it is closed for no more than the notice");
    assert_eq!(far.evict(&name, guard.claim_id()).await.unwrap(), Freed::Absent);
    let state = far.state(&name).await.unwrap().unwrap();
    assert!(state.claims.iter().all(|claim| !claim.granted), "given on before its holder let go: {state:?}");
    assert!(state.closed_until.is_some(), "{state:?}");
    assert!(
        matches!(&state.claims[..], [next] if !next.granted && next.id.to_string() == waiting[0].0),
        "{state:?}"
    );
    assert_eq!(guard.extend(LONG_TTL).await.unwrap_err().kind(), ErrorKind::Lost);
    assert!((1..=notice).contains(&lease_left(&SERVER, &name)), "a renewal brought an evicted lease back");
    assert!(far.mutex(&name).unwrap().try_lock().await.unwrap().is_none());
    assert!(!waiter.is_finished(), "granted beside an evicted holder that has not let go");
    leave(&SERVER, &name);
    assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
    let guard = waiter.await.unwrap();
    enter(&SERVER, &guard);
    leave_and_release(&SERVER, guard).await;
    expect_unused(&SERVER, &near, &name).await;
}

/// A part of a lock that was taken away keeps its room, and none of the others.
#[tokio::test]
async fn an_evicted_part_keeps_its_room_until_its_holder_lets_go() {
    let name = unique("evicted-part");
    let (near, far) = (connect(&SERVER.url()).await, connect(&SERVER.url()).await);
    let permits = near.semaphore(&name, 3).unwrap();
    let [first, second] = [(); 2].map(|()| permits.acquire(1).unwrap());
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!(far.evict(&name, first.claim_id()).await.unwrap(), Freed::Removed);
    assert_eq!(far.evict(&name, first.claim_id()).await.unwrap(), Freed::Absent);
    assert_eq!(first.extend(LONG_TTL).await.unwrap_err().kind(), ErrorKind::Lost);
    second.extend(LONG_TTL).await.unwrap();
    let state = far.state(&name).await.unwrap().unwrap();
    assert!(matches!(&state.claims[..], [other] if other.id == second.claim_id()), "{state:?}");
    let theirs = far.semaphore(&name, 3).unwrap();
    let third = theirs.try_acquire(1).await.unwrap().expect("one of three is free");
    assert!(theirs.try_acquire(1).await.unwrap().is_none(), "four have one of three");
    second.release().await.unwrap();
    third.release().await.unwrap();
    let state = far.state(&name).await.unwrap().unwrap();
    assert!(state.claims.is_empty() && state.closed_until.is_some(), "{state:?}");
    assert!(far.mutex(&name).unwrap().try_lock().await.unwrap().is_none());
    assert!(matches!(first.release().await.unwrap(), Released::AlreadyLost(_)));
    expect_unused(&SERVER, &near, &name).await;
}

/// Whoever was granted the lock, did not hear of it, and was evicted then, asks again and is granted in the end.
#[tokio::test]
async fn a_claim_that_was_evicted_before_its_answer_came_asks_again() {
    for shared in [false, true] {
        let name = unique("evicted-early");
        let proxy = Proxy::start(SERVER.addr());
        let (near, far) = (connect(&SERVER.url()).await, connect_through(&proxy).await);
        drop(lock(&far, &name).await);
        expect_unused(&SERVER, &near, &name).await;
        proxy.hold_replies(true);
        let (locks, wanted) = (far.clone().ttl(Duration::from_secs(2)).unwrap(), name.clone());
        let asking = tokio::spawn(async move {
            match shared {
                false => lock(&locks, &wanted).await,
                true => locks.rwlock(&wanted).unwrap().read().timeout(PATIENCE).await.unwrap(),
            }
        });
        let claims = eventually("it is granted", async || {
            near.state(&name).await.unwrap().map(|state| state.claims).filter(|claims| !claims.is_empty())
        });
        let claim = claims.await.remove(0);
        assert_eq!(near.evict(&name, claim.id).await.unwrap(), Freed::Removed);
        proxy.cut_all();
        proxy.hold_replies(false);
        let guard = asking.await.unwrap();
        assert_eq!(guard.claim_id(), claim.id);
        guard.verify().await.unwrap();
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        expect_unused(&SERVER, &near, &name).await;
    }
}

/// Where there is no queue, with scripts and without.
#[tokio::test]
async fn an_evicted_lean_lock_stays_closed_until_its_holder_lets_go() {
    const RULES: &str = "on >pw ~clinch:* -@all +set +delifeq +getrange +pttl +scan +info";
    let valkey = Redis::builder().binary(tools::valkey()).acl_user("lean", RULES).start();
    for url in [format!("{}?lean=on", SERVER.url()), valkey.url_as("lean", "pw")] {
        let name = unique("evicted-lean");
        let (near, far) = (connect(&url).await, connect(&url).await);
        let guard = lock(&near, &name).await;
        assert_eq!(far.evict(&name, guard.claim_id()).await.unwrap(), Freed::Removed);
        assert_eq!(far.evict(&name, guard.claim_id()).await.unwrap(), Freed::Absent);
        let mutex = far.mutex(&name).unwrap();
        assert!(mutex.try_lock().await.unwrap().is_none(), "given on before its holder let go");
        assert_eq!(guard.extend(LONG_TTL).await.unwrap_err().kind(), ErrorKind::Lost);
        let state = far.state(&name).await.unwrap().unwrap();
        let closed = state.closed_until.unwrap().duration_since(SystemTime::now()).unwrap();
        assert!(state.claims.is_empty() && closed <= NOTICE, "{state:?}");
        assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
        let guard = tokio::time::timeout(NOTICE / 2, mutex.lock()).await.expect("it stays closed").unwrap();
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        assert!(far.state(&name).await.unwrap().is_none());
    }
}

/// A copy of the holder's first step that arrives after its lock was taken away takes a place in the queue, which no renewal
/// takes for the lock.
#[tokio::test]
async fn a_late_step_does_not_keep_an_evicted_holder() {
    for evicted in [true, false] {
        let name = unique("late-step");
        let backend = backend(&SERVER).await;
        let (first, next) = (claim(&name, Mode::Exclusive, 1), claim(&name, Mode::Exclusive, 2));
        assert!(matches!(backend.claim(&first).await.unwrap(), Progress::Granted(_)));
        assert!(matches!(backend.claim(&next).await.unwrap(), Progress::Queued(_)));
        match evicted {
            true => drop(backend.evict(&first.name, first.id).await.unwrap()),
            false => drop(SERVER.call(&["DEL", &format!("clinch:{name}")])),
        }
        assert!(matches!(backend.claim(&first).await.unwrap(), Progress::Queued(_)));
        let first = Arc::new(first);
        let renewed = backend.renew(std::slice::from_ref(&first)).await.remove(0);
        assert!(
            matches!(renewed, Renewal::Lost(_)),
            "a place in the queue was renewed as the lock: {renewed:?}"
        );
        let read = backend.verify(&first).await.unwrap();
        assert!(matches!(read, Renewal::Lost(_)), "a place in the queue was taken for the lock: {read:?}");
        for claim in [&first, &next] {
            backend.release(claim, Duration::ZERO).await.unwrap();
        }
    }
}

/// The marker of parts whose records are lost counts until its end, whoever else is evicted.
#[tokio::test]
async fn an_eviction_opens_nothing_that_others_hold() {
    let name = unique("evict-beside");
    let backend = backend(&SERVER).await;
    let reader = claim(&name, Mode::Shared, 1);
    let (first, second) = (claim(&name, Mode::Exclusive, 2), claim(&name, Mode::Exclusive, 3));
    assert!(matches!(backend.claim(&reader).await.unwrap(), Progress::Granted(_)));
    for writer in [&first, &second] {
        assert!(matches!(backend.claim(writer).await.unwrap(), Progress::Queued(_)));
    }
    let holders = SERVER.call(&["KEYS", &format!("*holders:*{name}")]).array().remove(0).text();
    assert_eq!(SERVER.call(&["DEL", &holders]).int(), 1);
    for evicted in [&first, &reader] {
        backend.evict(&evicted.name, evicted.id).await.unwrap();
        assert_eq!(SERVER.call(&["GET", &format!("clinch:{name}")]).text(), "clinch parts");
        assert!(
            matches!(backend.claim(&second).await.unwrap(), Progress::Queued(_)),
            "granted beside a reader"
        );
    }
}

/// While a slot of a Cluster moves, its servers answer nothing that takes several keys: the lock's own tells.
#[tokio::test]
async fn the_key_of_an_evicted_lock_tells_its_holder() {
    let redis = Redis::start();
    let (backend, held) = (backend(&redis).await, Arc::new(claim("job", Mode::Exclusive, 1)));
    assert!(matches!(backend.claim(&held).await.unwrap(), Progress::Granted(_)));
    assert!(matches!(backend.renew(std::slice::from_ref(&held)).await[..], [Renewal::Renewed(_)]));
    backend.evict(&held.name, held.id).await.unwrap();
    let before = scripts_run(&redis);
    assert!(matches!(backend.renew(std::slice::from_ref(&held)).await[..], [Renewal::Lost(_)]));
    assert_eq!(scripts_run(&redis) - before, 1, "it asked for more keys");
}

/// What its lease no longer covered when it was released, it cannot keep closed for others.
#[tokio::test]
async fn a_part_that_has_ended_keeps_nothing_closed() {
    let name = unique("ended-part");
    let backend = backend(&SERVER).await;
    let [first, second, third] = [1, 2, 3].map(|bits| claim(&name, Mode::Shared, bits));
    let first = Claim { ttl: Duration::from_millis(200), ..first };
    for reader in [&first, &second] {
        assert!(matches!(backend.claim(reader).await.unwrap(), Progress::Granted(_)));
    }
    eventually("the first has ended", async || {
        (backend.state(&first.name).await.unwrap()?.claims.len() == 1).then_some(())
    })
    .await;
    backend.release(&first, LONG_TTL).await.unwrap();
    let third = backend.claim(&third).await.unwrap();
    assert!(matches!(third, Progress::Granted(_)), "closed by one whose lease was over: {third:?}");
}

/// P2: a foreign client has taken the lock of readers whose marker was deleted by force; a reader that asks again is none.
#[tokio::test]
async fn a_reader_whose_lock_a_foreign_client_took_is_not_granted_again() {
    let name = unique("taken-part");
    let (backend, reader) = (backend(&SERVER).await, claim(&name, Mode::Shared, 1));
    assert!(matches!(backend.claim(&reader).await.unwrap(), Progress::Granted(_)));
    SERVER.call(&["SET", &format!("clinch:{name}"), "theirs", "PX", "60000"]);
    let again = backend.claim(&reader).await.unwrap();
    assert!(matches!(again, Progress::Queued(_)), "granted beside a foreign holder: {again:?}");
    backend.release(&reader, Duration::ZERO).await.unwrap();
}
