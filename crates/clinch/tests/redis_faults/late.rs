//! Requests and answers that arrive when nobody wants them any more.

use super::queues::{backend, claim};
use super::*;
use clinch::backend::Progress;
use clinch::{Claim, Mode};

/// A server, and a client whose one connection leads through a proxy that has just become a black hole; its later
/// connections do not.
async fn stage(redis: &Redis) -> (Proxy, Locks) {
    let proxy = Proxy::start(redis.addr());
    let detour = Detour::to(proxy.addr());
    let far = detour.connect_once(redis).await;
    assert_eq!(proxy.accepted(), 1);
    proxy.black_hole(true);
    detour.turn(redis.addr());
    (proxy, far)
}

#[tokio::test]
async fn a_claim_that_its_own_release_overtook_leaves_nothing() {
    let redis = Redis::start();
    let near = connect(&redis.url()).await;
    for taken in [false, true] {
        let name = unique("overtaken");
        let (proxy, far) = stage(&redis).await;
        let guard = if taken { Some(lock(&near, &name).await) } else { None };
        let before = scripts_run(&redis);
        let waiter = queue(&far, &name);
        // Its request lies in the proxy once the connection was driven.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        waiter.abort();
        sees_scripts_run(&redis, before + 1).await;
        proxy.black_hole(false);
        sees_scripts_run(&redis, before + 2).await;
        let held_by = holder(&redis, &name).map(|(id, _)| id);
        assert_eq!(held_by, guard.as_ref().map(|guard| guard.claim_id().to_string()), "the claim came back");
        assert_eq!(waiters(&redis, &name), []);
        drop(guard);
        expect_unused(&redis, &near, &name).await;
    }
}

#[tokio::test]
async fn an_attempt_that_arrives_after_all_is_over_leaves_nothing() {
    let redis = Redis::start();
    let near = connect(&redis.url()).await;
    let name = unique("old-attempt");
    let (proxy, far) = stage(&redis).await;
    // The first attempt fell into the hole, the second went past it.
    let guard = lock(&far, &name).await;
    enter(&redis, &guard);
    leave_and_release(&redis, guard).await;
    let before = scripts_run(&redis);
    proxy.black_hole(false);
    sees_scripts_run(&redis, before + 1).await;
    assert_eq!(holder(&redis, &name), None);
    expect_unused(&redis, &near, &name).await;
}

#[tokio::test]
async fn a_claim_given_up_before_its_answer_leaves_nothing() {
    let near = connect(&SERVER.url()).await;
    for taken in [false, true] {
        let name = unique("given-up");
        let proxy = Proxy::start(SERVER.addr());
        let far = connect_through(&proxy).await;
        // Also opens the connection of releases in the background.
        drop(lock(&far, &name).await);
        expect_unused(&SERVER, &near, &name).await;
        let guard = if taken { Some(lock(&near, &name).await) } else { None };
        proxy.hold_replies(true);
        let waiter = queue(&far, &name);
        eventually("the server has the claim", async || match taken {
            false => holder(&SERVER, &name).map(|_| ()),
            true => (waiters(&SERVER, &name).len() == 1).then_some(()),
        })
        .await;
        waiter.abort();
        let left = left(&SERVER, &name).len();
        drop(guard);
        eventually("nothing is left", async || super::left(&SERVER, &name).is_empty().then_some(())).await;
        assert_ne!(left, 0);
        proxy.hold_replies(false);
        expect_unused(&SERVER, &near, &name).await;
        lock(&far, &name).await.release().await.unwrap();
        expect_unused(&SERVER, &near, &name).await;
    }
}

/// What is left for a step that may still arrive goes when it is over, though the lock is used all the time.
#[tokio::test]
async fn the_grave_of_a_claim_is_not_kept_for_ever() {
    let redis = Redis::start();
    let near = connect(&redis.url()).await;
    let (proxy, far) = stage(&redis).await;
    let guard = lock(&far, "job").await;
    proxy.cut_all();
    guard.release().await.unwrap();
    let claims = redis.call(&["KEYS", "*claims:clinch:job"]).array().remove(0).text();
    let graves = redis.call(&["HKEYS", &claims]).array();
    assert_eq!(graves.len(), 1);
    // Time passes.
    redis.call(&["HSET", &claims, &graves[0].clone().text(), "x 1000"]);
    for _ in 0..3 {
        lock(&near, "job").await.release().await.unwrap();
    }
    assert_eq!(redis.call(&["HGETALL", &claims]).array(), []);
}

/// A grave would keep all others from the short way for a minute: a lock that jobs try at a high rate would be all graves.
#[tokio::test]
async fn a_try_whose_answer_came_leaves_no_grave() {
    let redis = Redis::start();
    let locks = connect(&redis.url()).await.isolated();
    let (mutex, gpu) = (locks.mutex("job").unwrap(), locks.semaphore("gpu", 2).unwrap());
    for _ in 0..8 {
        let guard = mutex.try_lock().await.unwrap().unwrap();
        assert!(mutex.try_lock().await.unwrap().is_none());
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        let both = gpu.try_acquire(2).await.unwrap().unwrap();
        assert!(gpu.try_acquire(1).await.unwrap().is_none());
        assert_eq!(both.release().await.unwrap(), Released::Released);
    }
    assert_eq!(redis.call(&["KEYS", "*claims*"]).array(), [], "there are graves");
}

/// Those of detached claims may be many, and a semaphore that is used beside them is as quick as without.
#[tokio::test]
async fn graves_cost_who_takes_permits_nothing() {
    let redis = Redis::start();
    let locks = connect(&redis.url()).await;
    let gpu = locks.semaphore("gpu", 2).unwrap();
    let detached = gpu.try_acquire(1).await.unwrap().unwrap().detach().await.unwrap();
    locks.release_detached("gpu", detached.claim).await.unwrap();
    assert_eq!(redis.call(&["KEYS", "*claims*"]).array().len(), 1, "there is no grave");
    // Those that ask for rights when a client connects are counted, too.
    let reads = || redis.client().commandstats().get("hgetall").copied().unwrap_or(0);
    let before = reads();
    for _ in 0..4 {
        assert_eq!(gpu.try_acquire(2).await.unwrap().unwrap().release().await.unwrap(), Released::Released);
    }
    assert_eq!(reads() - before, 0, "all graves are read");
}

/// Whoever releases a detached claim does not know whether all its steps have arrived.
#[tokio::test]
async fn a_claim_that_comes_after_its_detached_release_leaves_nothing() {
    let name = unique("late-detached");
    let (near, backend) = (connect(&SERVER.url()).await, backend(&SERVER).await);
    let detached = lock(&near, &name).await.detach().await.unwrap();
    let first = Claim { id: detached.claim, ..claim(&name, Mode::Exclusive, 0) };
    let released = near.release_detached(&name, detached.claim).await.unwrap();
    assert!(matches!(released, Released::Released), "{released:?}");
    let progress = backend.claim(&Claim { enqueue: false, ..first }).await.unwrap();
    assert!(matches!(progress, Progress::Busy(_)), "the claim came back: {progress:?}");
    expect_unused(&SERVER, &near, &name).await;
}
