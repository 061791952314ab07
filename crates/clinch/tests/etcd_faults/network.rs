//! Connections that break, and requests that come late.

use super::*;

/// A URL of one server by two ways.
fn two_ways(etcd: &Etcd) -> (Proxy, Proxy, String) {
    let (one, other) = (Proxy::start(etcd.addr()), Proxy::start(etcd.addr()));
    let url = format!("etcd://{},{}", one.addr(), other.addr());
    (one, other, url)
}

#[tokio::test]
async fn a_way_that_leads_nowhere_is_left_for_another() {
    let etcd = Etcd::start();
    let (one, other, url) = two_ways(&etcd);
    let near = connect(&url).await.ttl(Duration::from_secs(12)).unwrap();
    let far = connect(&etcd.url()).await;
    let guard = lock(&far, "job").await;
    let waiter = queue(&near, "job");
    sees_claims(&far, "job", 2).await;
    let kept = lock(&near, "kept").await;
    let used = if one.connections() > 0 { &one } else { &other };
    used.black_hole(true);
    let before = kept.deadline().unwrap();
    let renewed = async || (!kept.is_held() || kept.deadline().unwrap() > before).then_some(());
    eventually("the lease is renewed by the other way", renewed).await;
    assert!(kept.is_held());
    release(guard).await;
    release(join("the waiter is granted", waiter).await).await;
    release(kept).await;
}

#[tokio::test]
async fn nothing_is_left_of_a_claim_that_comes_after_its_own_release() {
    let etcd = Etcd::start();
    let far = connect(&etcd.url()).await;
    for round in 0..6 {
        let (one, other, url) = two_ways(&etcd);
        let near = connect(&url).await;
        release(lock(&near, "warm").await).await;
        let (used, free) = if one.connections() > 0 { (&one, &other) } else { (&other, &one) };
        // On its way, the claim is overtaken by its release.
        used.black_hole(true);
        let name = format!("late-{round}");
        let mutex = near.mutex(&name).unwrap();
        let given_up = match round % 2 {
            0 => mutex.lock().timeout(Duration::from_millis(50)).await.map(drop),
            _ => mutex.try_lock().await.map(drop),
        };
        // A try goes on by the other way, and may well be granted there.
        let _ = given_up;
        near.close(PATIENCE).await.unwrap();
        assert!(free.accepted() > 0, "the release went another way");
        assert_eq!(keys(&etcd, &name), [""; 0]);
        let requests = etcd.handled("Txn");
        used.black_hole(false);
        let arrived = async || (etcd.handled("Txn") > requests || used.connections() == 0).then_some(());
        eventually("what was held back arrives", arrived).await;
        expect_unused(&etcd, &far, &name).await;
    }
}

#[tokio::test]
async fn connections_that_break_at_any_byte_leave_nothing_behind() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let far = connect(&etcd.url()).await;
    let near = connect(&format!("etcd://{}", proxy.addr())).await;
    release(lock(&near, "warm").await).await;
    for bytes in (0..400).step_by(23) {
        let direction = [clinch_testkit::Direction::Requests, clinch_testkit::Direction::Replies][bytes % 2];
        proxy.cut_after(direction, u64::try_from(bytes).unwrap());
        let name = format!("cut-{bytes}");
        let guard = lock(&near, &name).await;
        guard.verify().await.or_else(|_| Ok::<_, ()>(())).unwrap();
        assert_eq!(keys(&etcd, &name).len(), 1, "a repeated claim stands in the queue twice");
        release(guard).await;
        expect_unused(&etcd, &far, &name).await;
    }
    assert!(proxy.cuts() > 5);
}
