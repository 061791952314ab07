//! Leases that end, keys that are deleted, histories that are compacted.

use clinch::Claim;
use clinch::backend::{Progress, Renewal};

use super::sieve::{Fate, Sieve};
use super::*;

#[tokio::test]
async fn a_revoked_lease_is_told_at_once_to_all_its_holders() {
    let etcd = Etcd::start();
    let (near, far) = (unrenewed(&etcd.url(), Env::host(Lane::thread())).await, connect(&etcd.url()).await);
    let mutex = lock(&near, "job").await;
    let reader = near.rwlock("index").unwrap().read().await.unwrap();
    let isolated = lock(&near.clone().isolated(), "apart").await;
    let waiter = queue(&far, "job");
    sees_claims(&far, "job", 2).await;
    etcd.ctl(&["lease", "revoke", &lease(&mutex)]);
    for guard in [&mutex, &reader] {
        tells_of_its_lease(guard).await;
    }
    let next = join("the waiter is granted", waiter).await;
    assert!(next.token() > mutex.token() && !mutex.is_held());
    isolated.verify().await.unwrap();
    assert!(matches!(mutex.release().await.unwrap(), Released::AlreadyLost(_)));
    next.verify().await.unwrap();
    release(next).await;
    // The next claim gets a lease of its own accord.
    let again = lock(&near, "job").await;
    assert!(again.token() > reader.token());
    release(again).await;
    release(isolated).await;
}

/// The end of a lease deletes its own key and those of its claims at once, and etcd tells of them in any order.
async fn tells_of_its_lease(guard: &Guard) {
    let loss = within("the loss is told", guard.lost()).await;
    assert!(matches!(loss.kind, LossKind::SessionEnded | LossKind::Deleted), "{loss}");
}

#[tokio::test]
async fn a_deleted_key_is_told_at_once_though_the_lease_lives() {
    let etcd = Etcd::start();
    let locks = unrenewed(&etcd.url(), Env::host(Lane::thread())).await;
    let (guard, other) = (lock(&locks, "job").await, lock(&locks, "other").await);
    etcd.ctl(&["del", &guard.store_key().unwrap()]);
    let loss = within("the loss is told", guard.lost()).await;
    assert_eq!(loss.kind, LossKind::Deleted, "{loss}");
    assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost(loss));
    other.verify().await.unwrap();
    assert!(other.is_held());
    release(other).await;
}

#[tokio::test]
async fn a_key_that_was_deleted_while_nobody_watched_is_missed_by_the_next_opening() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let near = connect(&format!("etcd://{}", proxy.addr())).await;
    let guard = lock(&near, "job").await;
    let watched = async || (etcd.metric("etcd_debugging_mvcc_watcher_total") >= 2.0).then_some(());
    eventually("the key is watched", watched).await;
    proxy.refuse(true);
    proxy.cut_all();
    let key = keys(&etcd, "job").pop().unwrap();
    etcd.ctl(&["del", &key]);
    // What is not in the history any more can only be found by reading.
    etcd.ctl(&["put", "unrelated", "x"]);
    etcd.ctl(&["compact", &etcd.revision().to_string()]);
    assert!(guard.is_held(), "nothing can be known of it yet");
    proxy.refuse(false);
    let loss = within("the loss is told", guard.lost()).await;
    assert_eq!(loss.kind, LossKind::Deleted, "{loss}");
}

#[tokio::test]
async fn a_waiter_whose_lease_is_revoked_queues_again_and_is_not_let_in_before() {
    let etcd = Etcd::start();
    let [near, unlucky, behind] =
        [connect(&etcd.url()).await, connect(&etcd.url()).await, connect(&etcd.url()).await];
    let guard = lock(&near, "job").await;
    let mine = lock(&unlucky, "mine").await;
    let first = queue(&unlucky, "job");
    sees_claims(&near, "job", 2).await;
    let places = keys(&etcd, "job");
    let place = places.into_iter().find(|key| *key != guard.store_key().unwrap()).unwrap();
    let second = queue(&behind, "job");
    sees_claims(&near, "job", 3).await;
    let queued = near.state("job").await.unwrap().unwrap().claims[1].id;
    etcd.ctl(&["lease", "revoke", &carrier(&etcd, &place).0]);
    let requeued = async || {
        let claims = near.state("job").await.unwrap()?.claims;
        (claims.len() == 3 && claims[2].id == queued).then_some(())
    };
    eventually("it queues again, at the end", requeued).await;
    release(guard).await;
    let second = join("the one behind is granted", second).await;
    assert!(!first.is_finished());
    let token = second.token();
    release(second).await;
    let first = join("the unlucky one is granted", first).await;
    assert!(first.token() > token);
    release(first).await;
    // What it holds is on another lease.
    mine.verify().await.unwrap();
    release(mine).await;
}

/// The predecessor leaves in the very moment in which the waiter's own key goes: the event that lets it in is true, and
/// it must not be let in (etcd#11456).
#[tokio::test]
async fn a_waiter_whose_key_goes_with_its_predecessor_is_not_let_in() {
    let etcd = Etcd::start();
    let [near, unlucky, behind] =
        [connect(&etcd.url()).await, connect(&etcd.url()).await, connect(&etcd.url()).await];
    let guard = lock(&near, "job").await;
    let first = queue(&unlucky, "job");
    sees_claims(&near, "job", 2).await;
    let second = queue(&behind, "job");
    sees_claims(&near, "job", 3).await;
    let claims = near.state("job").await.unwrap().unwrap().claims;
    let printed = etcd.ctl(&["get", "--prefix", "/clinch/job/"]);
    let lines: Vec<&str> = printed.lines().collect();
    let key = |at: usize| {
        let id = claims[at].id.to_string();
        lines.chunks(2).find(|pair| pair[1].contains(&id)).map(|pair| pair[0])
    };
    etcd.txn(&format!("\ndel {}\ndel {}\n\n\n", key(0).unwrap(), key(1).unwrap()));
    let second = join("the one behind is granted", second).await;
    assert_eq!(within("the holder is told", guard.lost()).await.kind, LossKind::Deleted);
    let requeued = async || {
        let claims = near.state("job").await.unwrap()?.claims;
        (claims.len() == 2 && claims[0].granted && !claims[1].granted).then_some(())
    };
    eventually("the unlucky one queues again", requeued).await;
    assert!(!first.is_finished());
    second.verify().await.unwrap();
    release(second).await;
    let first = join("the unlucky one is granted", first).await;
    first.verify().await.unwrap();
    release(first).await;
}

#[tokio::test]
async fn waiters_survive_a_compaction_and_a_broken_stream() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let (near, far) = (connect(&etcd.url()).await, connect(&format!("etcd://{}", proxy.addr())).await);
    let guard = lock(&near, "job").await;
    let waiter = queue(&far, "job");
    let permits = near.semaphore("gpu", 2).unwrap().acquire(2).unwrap().await.unwrap();
    let wanted = far.semaphore("gpu", 2).unwrap();
    let wanting = tokio::spawn(async move { wanted.acquire(1).unwrap().await.unwrap() });
    sees_claims(&near, "job", 2).await;
    sees_claims(&near, "gpu", 2).await;
    for _ in 0..3 {
        etcd.ctl(&["put", "unrelated", "x"]);
        etcd.ctl(&["compact", &etcd.revision().to_string()]);
        proxy.cut_all();
    }
    proxy.refuse(true);
    proxy.cut_all();
    // Both go while the waiters cannot hear of it.
    release(guard).await;
    release(permits).await;
    etcd.ctl(&["compact", &etcd.revision().to_string()]);
    proxy.refuse(false);
    release(join("the waiter is granted", waiter).await).await;
    release(join("the permit is granted", wanting).await).await;
    expect_unused(&etcd, &near, "job").await;
}

#[tokio::test]
async fn a_server_that_restarts_keeps_locks_queues_and_rising_tokens() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    let guard = lock(&near, "job").await;
    let waiter = queue(&far, "job");
    sees_claims(&near, "job", 2).await;
    let places = keys(&etcd, "job");
    etcd.restart();
    within("the lock is held", async { while guard.verify().await.is_err() {} }).await;
    assert!(guard.is_held() && !waiter.is_finished());
    assert_eq!(keys(&etcd, "job"), places);
    let token = guard.token();
    release(guard).await;
    let next = join("the waiter is granted", waiter).await;
    assert!(next.token() > token);
    release(next).await;
    expect_unused(&etcd, &near, "job").await;
}

/// A server that is away for longer than it keeps places gives them their whole time again when it is back; waiters that gave them up would stand
/// anew, in any order.
#[tokio::test]
async fn waiters_keep_their_turns_over_a_server_that_is_away_for_long() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    let guard = lock(&near, "job").await;
    let first = queue(&far, "job");
    sees_claims(&near, "job", 2).await;
    let second = queue(&connect(&etcd.url()).await, "job");
    sees_claims(&near, "job", 3).await;
    let places = keys(&etcd, "job");
    etcd.kill();
    // Twice the time of a place, and more.
    tokio::time::sleep(Duration::from_secs(7)).await;
    etcd.restart();
    within("the lock is held", async { while guard.verify().await.is_err() {} }).await;
    assert_eq!(keys(&etcd, "job"), places);
    release(guard).await;
    let guard = join("the first is granted", first).await;
    assert!(!second.is_finished());
    release(guard).await;
    release(join("the second is granted", second).await).await;
}

/// The comparison that the documentation of fenced writes names holds exactly as long as the claim.
#[tokio::test]
async fn a_fenced_write_is_refused_once_the_claim_is_gone() {
    let etcd = Etcd::start();
    let locks = connect(&etcd.url()).await;
    let guard = lock(&locks, "job").await;
    let txn = format!(
        "create(\"{}\") = \"{}\"\n\nput data written\n\n\n\n",
        guard.store_key().unwrap(),
        guard.token()
    );
    let write = || etcd.txn(&txn).lines().next().unwrap().to_owned();
    assert_eq!(write(), "SUCCESS");
    release(guard).await;
    let next = lock(&locks, "job").await;
    assert_eq!(write(), "FAILURE");
    release(next).await;
}

/// Renewals go out together. One whose claim is released meanwhile, or is of another client, is no other's business.
#[tokio::test]
async fn a_release_fails_no_renewal_beside_it() {
    let etcd = Etcd::start();
    let backend = open(&etcd.url()).await;
    let claim = |id, name| ghosts::claim(id, name, LONG_TTL);
    let [first, stranger, second] = [claim(1, "first"), claim(2, "stranger"), claim(3, "second")];
    for claim in [&first, &second] {
        ghosts::granted(&*backend, claim).await;
    }
    let batch = [first.clone(), stranger, second];
    let mut renewals = backend.renew(&batch);
    // What is known of them is looked up at once.
    tokio::select! {
        biased;
        _ = &mut renewals => panic!("the stranger was not asked for"),
        () = std::future::ready(()) => {}
    }
    backend.release(&first, Duration::ZERO).await.unwrap();
    let renewals = renewals.await;
    assert!(matches!(renewals[1], Renewal::Lost(_)), "{renewals:?}");
    assert!(matches!(renewals[2], Renewal::Renewed(_)), "{renewals:?}");
}

/// A step has gone unheard, and one after it makes the key on the lease of its TTL. What it is granted counts by that lease,
/// and not by that of the places, which the first step might have used.
#[tokio::test]
async fn a_grant_is_dated_by_the_lease_that_its_key_hangs_on() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (env, far) = (silent::split_env_by(sieve.addr()), open(&etcd.url()).await);
    let backend = clinch::backends::etcd::open(&etcd.url(), env).await.unwrap();
    // Somebody of this client waits elsewhere, so that there is a lease of places, which is kept.
    ghosts::granted(&*far, &ghosts::claim(50, "other", LONG_TTL)).await;
    let place = Arc::new(Claim { place: true, ..(*ghosts::claim(2, "other", LONG_TTL)).clone() });
    assert!(matches!(backend.claim(&place).await.unwrap(), Progress::Queued(_)));
    let elsewhere =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let claim = ghosts::claim(1, "job", LONG_TTL);
    sieve.catch(Fate::Late, |request| turns::contains(request, b"/clinch/job/"));
    let step = || {
        let (backend, claim) = (backend.clone(), claim.clone());
        elsewhere.spawn(async move { backend.claim(&claim).await })
    };
    let mut unheard = step();
    let unheard = loop {
        tokio::select! {
            unheard = &mut unheard => break unheard.unwrap(),
            () = tokio::time::sleep(Duration::from_millis(200)) => {
                backend.renew(std::slice::from_ref(&place)).await;
            }
        }
    };
    assert!(unheard.is_err(), "{unheard:?}");
    let Progress::Granted(grant) = step().await.unwrap().unwrap() else { panic!("nobody is in its way") };
    let key = backend.key(claim.id).unwrap();
    assert_eq!(carrier(&etcd, &key).1, LONG_TTL.as_secs());
    assert_eq!(grant.ttl, Some(LONG_TTL), "dated by another lease than its key hangs on");
    elsewhere.shutdown_background();
}
