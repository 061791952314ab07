//! Waiters whose address leads to another server than the one that pushes to them.

use super::renewed::cut_steps;
use super::*;

/// P1: behind one address there may be another server after a while, and what the one before it grants there is held by others here.
#[tokio::test]
async fn a_grant_of_the_server_that_had_the_address_before_is_none() {
    moves(LONG_TTL, true).await;
}

/// P5: who has its place on another server listens there.
#[tokio::test]
async fn who_waits_on_another_server_than_before_is_told_by_it() {
    moves(Duration::from_secs(3), false).await;
}

/// A waiter's address leads to another server, while the connection stays that it listens on. `granted`: by the one before, and else its
/// place is missed.
async fn moves(ttl: Duration, granted: bool) {
    let (old, new) = (Redis::start(), Redis::start());
    let proxy = Proxy::start(old.addr());
    let far = connect_through(&proxy).await.ttl(ttl).unwrap();
    let before = lock(&connect(&old.url()).await, "job").await;
    let mut waiter = queue(&far, "job");
    sees_waiters(&old, "job", 1).await;
    let holder = lock(&connect(&new.url()).await, "job").await;
    enter(&new, &holder);
    proxy.set_upstream(new.addr());
    cut_steps(&old);
    lock(&far, "other").await.release().await.unwrap();
    if granted {
        assert_eq!(before.release().await.unwrap(), Released::Released);
    }
    tokio::select! {
        early = &mut waiter => {
            let early = early.expect("nobody told it");
            panic!("granted beside another holder: {early:?}");
        }
        () = eventually("it listens there", async || {
            let channels = new.call(&["PUBSUB", "CHANNELS"]).array();
            (!channels.is_empty() && waiters(&new, "job").len() == 1).then_some(())
        }) => {}
    }
    sees_waiters(&new, "job", 1).await;
    leave_and_release(&new, holder).await;
    let guard = waiter.await.unwrap();
    enter(&new, &guard);
    leave_and_release(&new, guard).await;
    expect_unused(&new, &far, "job").await;
}
