//! Grants that are pushed to waiters who do not hear of them.

use super::*;
use crate::common::{queue_unkept, release};

#[tokio::test]
async fn a_push_lost_with_its_connection_is_asked_for() {
    let name = unique("push-cut");
    let proxy = Proxy::start(SERVER.addr());
    let (far, near) = (connect_through(&proxy).await, connect(&SERVER.url()).await);
    let guard = lock(&near, &name).await;
    enter(&SERVER, &guard);
    let waiter = queue(&far, &name);
    let waiting = sees_waiters(&SERVER, &name, 1).await;
    proxy.hold_replies(true);
    leave_and_release(&SERVER, guard).await;
    assert_eq!(holder(&SERVER, &name).unwrap().0, waiting[0].0, "it was handed over");
    proxy.cut_all();
    proxy.hold_replies(false);
    let guard = waiter.await.unwrap();
    assert_eq!(guard.claim_id().to_string(), waiting[0].0);
    enter(&SERVER, &guard);
    leave_and_release(&SERVER, guard).await;
    expect_unused(&SERVER, &near, &name).await;
}

/// Waits until two inboxes were pinged again, by when those who wait have asked again, too.
async fn sees_two_pings(redis: &Redis) {
    let pings = || redis.client().commandstats().get("ping").copied().unwrap_or(0);
    let before = pings();
    eventually("the inboxes are pinged", async || (pings() >= before + 2).then_some(())).await;
}

/// With what fell into the hole lost at last, or delivered late; to waiters that have just come, or have asked again.
async fn into_a_black_hole(lost: bool, asked_again: bool) {
    let (redis, name) = (Redis::start(), unique("push-black"));
    let proxy = Proxy::start(redis.addr());
    let (far, near) = (connect_through(&proxy).await, connect(&redis.url()).await);
    let guard = lock(&near, &name).await;
    enter(&redis, &guard);
    let mut first = queue(&far, &name);
    sees_waiters(&redis, &name, 1).await;
    let second = queue(&connect(&redis.url()).await, &name);
    let waiting = sees_waiters(&redis, &name, 2).await;
    if asked_again {
        sees_two_pings(&redis).await;
    }
    proxy.black_hole(true);
    leave_and_release(&redis, guard).await;
    let (id, lease) = holder(&redis, &name).unwrap();
    assert!(id == waiting[0].0 && (1..=3000).contains(&lease), "{id} for {lease} ms");
    let soon = tokio::time::timeout(Duration::from_secs(15), second).await;
    let guard = soon.expect("who cannot hear blocks the queue").unwrap();
    assert_eq!(guard.claim_id().to_string(), waiting[1].0);
    enter(&redis, &guard);
    if lost {
        proxy.cut_all();
    }
    proxy.black_hole(false);
    tokio::select! {
        _ = sees_waiters(&redis, &name, 1) => {}
        early = &mut first => {
            let early = early.unwrap();
            assert!(early.token() > guard.token(), "the token did not rise, and two hold: {early:?}, {guard:?}");
            panic!("granted beside another holder: {early:?}, {guard:?}");
        }
    }
    assert!(!first.is_finished());
    leave_and_release(&redis, guard).await;
    let guard = first.await.unwrap();
    enter(&redis, &guard);
    leave_and_release(&redis, guard).await;
    expect_unused(&redis, &near, &name).await;
}

#[tokio::test]
async fn a_waiter_that_cannot_hear_costs_one_window_and_comes_again() {
    into_a_black_hole(true, false).await;
    into_a_black_hole(true, true).await;
}

#[tokio::test]
async fn a_grant_that_is_heard_after_its_end_is_none() {
    into_a_black_hole(false, false).await;
    into_a_black_hole(false, true).await;
}

/// A grant, its end, the question of who did not hear of it, the answer, and only then the message of the grant.
#[tokio::test]
async fn a_grant_that_is_heard_after_a_later_answer_is_none() {
    let (redis, name) = (Redis::start(), unique("push-late"));
    let inbox = Proxy::start(redis.addr());
    let near = connect(&redis.url()).await;
    let detour = Detour::to(redis.addr());
    let far = detour.connect_once(&redis).await;
    detour.turn(inbox.addr());
    let guard = lock(&near, &name).await;
    let mut first = queue(&far, &name);
    let waiting = sees_waiters(&redis, &name, 1).await;
    assert_eq!(inbox.accepted(), 1);
    let second = queue(&connect(&redis.url()).await, &name);
    sees_waiters(&redis, &name, 2).await;
    inbox.black_hole(true);
    guard.release().await.unwrap();
    assert_eq!(holder(&redis, &name).unwrap().0, waiting[0].0);
    // Its lease ends.
    assert_eq!(redis.call(&["DEL", &format!("clinch:{name}")]).int(), 1);
    let guard = second.await.unwrap();
    enter(&redis, &guard);
    assert_eq!(sees_waiters(&redis, &name, 1).await[0].0, waiting[0].0);
    // The answer comes on the connection of this one, and before it.
    lock(&far, &unique("after")).await.release().await.unwrap();
    let before = scripts_run(&redis);
    inbox.black_hole(false);
    tokio::select! {
        early = &mut first => {
            let early = early.unwrap();
            assert!(early.token() > guard.token(), "the token did not rise, and two hold: {early:?}, {guard:?}");
            panic!("granted beside another holder: {early:?}, {guard:?}");
        }
        // It hears the message, and asks.
        () = sees_scripts_run(&redis, before + 1) => {}
    }
    leave_and_release(&redis, guard).await;
    let guard = first.await.unwrap();
    enter(&redis, &guard);
    leave_and_release(&redis, guard).await;
    expect_unused(&redis, &near, &name).await;
}

#[tokio::test]
async fn a_waiter_that_died_is_passed_over_at_once() {
    let name = unique("dead");
    let proxy = Proxy::start(SERVER.addr());
    let (far, near) = (connect_through(&proxy).await, connect(&SERVER.url()).await);
    let guard = lock(&near, &name).await;
    enter(&SERVER, &guard);
    let dead = queue(&far, &name);
    let (_, inbox) = sees_waiters(&SERVER, &name, 1).await.remove(0);
    let second = queue(&connect(&SERVER.url()).await, &name);
    let waiting = sees_waiters(&SERVER, &name, 2).await;
    let channel = eventually("it listens", async || {
        SERVER.call(&["PUBSUB", "CHANNELS", &format!("*:{inbox}")]).array().pop().map(Reply::text)
    })
    .await;
    proxy.refuse(true);
    proxy.cut_all();
    eventually("nobody listens for the dead", async || {
        (SERVER.call(&["PUBSUB", "NUMSUB", &channel]).array()[1].clone().int() == 0).then_some(())
    })
    .await;
    leave_and_release(&SERVER, guard).await;
    assert_eq!(holder(&SERVER, &name).unwrap().0, waiting[1].0);
    let guard = second.await.unwrap();
    enter(&SERVER, &guard);
    leave_and_release(&SERVER, guard).await;
    dead.abort();
    drop(far);
}

/// Between the end of a dead holder's lease and the next look of those who wait, the lock's key is free.
#[tokio::test]
async fn a_newcomer_does_not_pass_who_waits_for_a_dead_holder() {
    let (near, far) = (connect(&SERVER.url()).await, connect(&SERVER.url()).await);
    for tries in [true, false] {
        let name = unique("newcomer");
        let dead = lock(&near, &name).await;
        let waiter = queue(&far, &name);
        let waiting = sees_waiters(&SERVER, &name, 1).await;
        // Its lease ends.
        assert_eq!(SERVER.call(&["DEL", &format!("clinch:{name}")]).int(), 1);
        let newcomer = if tries {
            let newcomer = near.mutex(&name).unwrap().try_lock().await.unwrap();
            assert!(newcomer.is_none(), "a try passed a waiter");
            None
        } else {
            Some(queue(&near, &name))
        };
        let guard = waiter.await.unwrap();
        assert_eq!(guard.claim_id().to_string(), waiting[0].0);
        enter(&SERVER, &guard);
        leave_and_release(&SERVER, guard).await;
        if let Some(newcomer) = newcomer {
            let guard = newcomer.await.unwrap();
            enter(&SERVER, &guard);
            leave_and_release(&SERVER, guard).await;
        }
        assert!(matches!(dead.release().await.unwrap(), Released::AlreadyLost(_)));
        expect_unused(&SERVER, &near, &name).await;
    }
}

/// P6: renewals of a place keep no grant that nobody takes; the lock goes on to the next, and who did not take it waits again.
#[tokio::test]
async fn a_grant_that_its_waiter_never_takes_goes_on_to_the_next() {
    for shared in [false, true] {
        // Its place is renewed three times within the life of a pushed grant.
        never_takes(&SERVER, shared, Duration::from_secs(3), || {}).await;
    }
}

/// P1: a pushed grant is as old as it is, however far the server's clock was set forward while its waiter waited.
#[tokio::test]
async fn a_step_of_the_servers_clock_makes_no_old_grant_new() {
    let redis = Redis::builder().stepped_clock().start();
    never_takes(&redis, false, LONG_TTL, || redis.step_clock(5)).await;
}

/// A waiter that is not polled from when it waits until its grant has gone on to the next, who came after that `event`.
async fn never_takes(redis: &Redis, shared: bool, ttl: Duration, event: impl FnOnce()) {
    let name = unique("never-taken");
    let near = connect(&redis.url()).await;
    let holder = lock(&near, &name).await;
    let far = connect(&redis.url()).await.ttl(ttl).unwrap();
    let (mutex, both) = (far.mutex(&name).unwrap(), far.rwlock(&name).unwrap());
    let request = match shared {
        false => mutex.lock(),
        true => both.read(),
    };
    let mut first = std::pin::pin!(request.timeout(PATIENCE).into_future());
    let polled = tokio::select! {
        _ = &mut first => None,
        waiting = sees_waiters(redis, &name, 1) => Some(waiting),
    };
    let waiting = polled.expect("granted while it was held");
    // From here on nobody polls it.
    event();
    let second = queue(&connect(&redis.url()).await, &name);
    eventually("the second waits", async || {
        let all = waiters(redis, &name);
        all.last().is_some_and(|(id, inbox)| *id != waiting[0].0 && inbox != "-").then_some(())
    })
    .await;
    holder.release().await.unwrap();
    let state = near.state(&name).await.unwrap().unwrap();
    assert_eq!((state.claims[0].id.to_string(), state.claims[0].granted), (waiting[0].0.clone(), true));
    let soon = tokio::time::timeout(Duration::from_secs(15), second).await;
    let guard = soon.expect("a grant that nobody takes is kept for ever").unwrap();
    enter(redis, &guard);
    tokio::select! {
        early = &mut first => panic!("granted beside another holder: {early:?}"),
        _ = sees_waiters(redis, &name, 1) => {}
    }
    leave_and_release(redis, guard).await;
    let guard = first.await.unwrap();
    enter(redis, &guard);
    leave_and_release(redis, guard).await;
    expect_unused(redis, &near, &name).await;
}

/// A pushed grant is short until its first renewal, which comes well before it ends.
#[tokio::test]
async fn a_grant_that_was_taken_is_renewed_in_time() {
    let name = unique("taken");
    let (near, far) = (connect(&SERVER.url()).await, connect(&SERVER.url()).await);
    let holder = lock(&near, &name).await;
    let waiter = queue(&far, &name);
    sees_waiters(&SERVER, &name, 1).await;
    holder.release().await.unwrap();
    let guard = waiter.await.unwrap();
    let renewed = eventually("the lease is as long as asked for", async || {
        let (_, left) = super::holder(&SERVER, &name)?;
        (left > 3000).then_some(left)
    });
    assert!(renewed.await <= i64::try_from(LONG_TTL.as_millis()).unwrap());
    assert!(guard.is_held(), "it was renewed after its end");
    guard.verify().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

/// P8: a waiter whose future is kept but not polled, just as it begins to listen, keeps nobody else of its client waiting.
#[tokio::test]
async fn who_is_not_polled_while_it_begins_to_listen_blocks_nobody() {
    let redis = Redis::start();
    let (near, far) = (connect(&redis.url()).await, connect(&redis.url()).await);
    let holder = lock(&near, "job").await;
    let mutex = far.mutex("job").unwrap();
    let mut first = std::pin::pin!(mutex.lock().timeout(PATIENCE).into_future());
    eventually("it begins to listen", async || {
        if redis.call(&["PUBSUB", "CHANNELS"]).array().len() == 1 {
            return Some(());
        }
        // Once, so that it sends no more than one request.
        std::future::poll_fn(|context| {
            assert!(first.as_mut().poll(context).is_pending(), "granted while it was held");
            std::task::Poll::Ready(())
        })
        .await;
        None
    })
    .await;
    // From here on nobody polls it.
    let second = queue(&far, "job");
    eventually("the second waits", async || (waiters(&redis, "job").len() == 2).then_some(())).await;
    holder.release().await.unwrap();
    let soon = tokio::time::timeout(Duration::from_secs(30), second).await;
    let guard = soon.expect("it waits for one that is not polled").unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    assert_eq!(first.await.unwrap().release().await.unwrap(), Released::Released);
}

/// A holder in the lean mode tells nobody when it leaves, so who waits for it watches the key, as a foreign client's. The renewals of
/// its place would find out, too: here are none.
#[tokio::test]
async fn who_waits_for_a_lean_holder_sees_it_leave() {
    let (redis, name) = (Redis::start(), unique("lean-holder"));
    let lean = connect(&format!("{}?lean=on", redis.url())).await;
    let near = connect(&redis.url()).await;
    let holder = lock(&lean, &name).await;
    let waiter = queue_unkept(super::queues::backend(&redis).await, &name).await;
    sees_waiters(&redis, &name, 1).await;
    let state = near.state(&name).await.unwrap().unwrap();
    assert_eq!(state.claims[0].id, holder.claim_id(), "{state:?}");
    release(holder).await;
    // By itself it would look after 30 s.
    let soon = tokio::time::timeout(Duration::from_secs(20), waiter).await;
    soon.expect("nobody saw that the lock is free").unwrap().release().await;
    expect_unused(&redis, &near, &name).await;
}

/// A grant that is handed over is short until its first renewal, and the way to the server may be long, more so for who has
/// yet to connect.
#[tokio::test]
async fn what_is_handed_over_a_slow_link_is_kept() {
    tokio::join!(kept_over_a_slow_link(200), kept_over_a_slow_link(300));
}

async fn kept_over_a_slow_link(each_way: u64) {
    let name = unique("push-slow");
    let proxy = Proxy::start(SERVER.addr());
    let (far, near) = (connect_through(&proxy).await, connect(&SERVER.url()).await);
    let guard = lock(&near, &name).await;
    proxy.delay(Duration::from_millis(each_way));
    let waiter = queue(&far, &name);
    sees_waiters(&SERVER, &name, 1).await;
    release(guard).await;
    let guard = waiter.await.unwrap();
    let lost = tokio::time::timeout(Duration::from_secs(5), guard.lost()).await;
    assert!(lost.is_err(), "{each_way} ms each way: {lost:?}");
    let (id, lease) = holder(&SERVER, &name).unwrap();
    assert!(id == guard.claim_id().to_string() && lease > 3000, "{id} for {lease} ms");
    proxy.delay(Duration::ZERO);
    release(guard).await;
}
