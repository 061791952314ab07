//! Members and callers that stand still in the midst of something.

use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use clinch::backend::{Backend, Renewal};
use clinch::{Claim, LockName};

use super::*;

/// A process that ends with its test.
struct Kept(Child);

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Polls once, and no more: it waits for an answer from then on.
async fn poll_once(mut future: Pin<&mut impl Future>) {
    let once = |context: &mut Context<'_>| Poll::Ready(future.as_mut().poll(context).is_pending());
    assert!(std::future::poll_fn(once).await, "it was answered at once");
}

/// A client of one server by two ways, and those: the one that it uses, which leads nowhere from now on, and the other.
async fn stuck(etcd: &Etcd, claim: Option<&Claim>) -> (Arc<dyn Backend>, Proxy, Proxy) {
    let (one, other, url) = network::two_ways(etcd);
    let backend = clinch::backends::etcd::open(&url, Env::host(Lane::thread())).await.unwrap();
    if let Some(claim) = claim {
        ghosts::granted(&*backend, claim).await;
    }
    let (used, unused) = if one.connections() > 0 { (one, other) } else { (other, one) };
    used.black_hole(true);
    (backend, used, unused)
}

/// A way that leads nowhere is left for another although everybody who asks gives up sooner than it is known to lead
/// nowhere.
#[tokio::test]
async fn a_way_that_leads_nowhere_is_left_however_soon_its_askers_give_up() {
    let etcd = Etcd::start();
    let (backend, _used, unused) = stuck(&etcd, None).await;
    let name = LockName::new("job").unwrap();
    let left = async || {
        poll_once(pin!(backend.state(&name))).await;
        (unused.accepted() > 0).then_some(())
    };
    eventually("it is left for the other way", left).await;
}

/// Renewals are tried for a sixth of the TTL: within that the way is left, in time for the lease.
#[tokio::test]
async fn a_way_that_leads_nowhere_is_left_while_the_lease_lives() {
    let etcd = Etcd::start();
    let claim = ghosts::claim(1, "job", Duration::from_secs(6));
    let (backend, _used, _unused) = stuck(&etcd, Some(&claim)).await;
    let renewal = async || {
        let renewing = backend.renew(std::slice::from_ref(&claim));
        // As soon as the keeper gives up.
        tokio::time::timeout(Duration::from_secs(1), renewing)
            .await
            .ok()?
            .pop()
            .filter(|renewal| !matches!(renewal, Renewal::Failed(_)))
    };
    let renewal = eventually("it is renewed", renewal).await;
    assert!(matches!(renewal, Renewal::Renewed(_)), "{renewal:?}");
    let released = async || backend.release(&claim, Duration::ZERO).await.ok();
    eventually("it is released", released).await;
}

/// So is the only one there is: another connection may be answered at once, and a lock ends with the lease.
#[tokio::test]
async fn a_connection_that_leads_nowhere_is_left_for_another_of_the_same_way() {
    const TTL: Duration = Duration::from_secs(2);
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let backend = open(&format!("etcd://{}", proxy.addr())).await;
    let claim = ghosts::claim(1, "job", TTL);
    ghosts::granted(&*backend, &claim).await;
    let before = proxy.accepted();
    proxy.black_hole(true);
    // As the keeper asks. What was renewed just before is not asked for again.
    let mut given_up = 0;
    while given_up < 2 {
        let asked = tokio::time::timeout(TTL / 6, backend.renew(std::slice::from_ref(&claim))).await;
        given_up += usize::from(asked.is_err());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(proxy.accepted() > before, "two attempts went over one connection");
}

/// A server that stood still for longer than any lease finds, when it goes on, what was asked of it meanwhile: nothing of
/// that may stand in anybody's way.
#[tokio::test]
async fn what_was_asked_of_a_server_that_stood_still_haunts_nobody() {
    const TTL: Duration = Duration::from_secs(2);
    let (etcd, clock) = (Etcd::start(), Clock::host());
    let near = clinch::connect(&etcd.url()).await.unwrap().ttl(TTL).unwrap();
    let far = connect(&etcd.url()).await;
    let kept = lock(&near, "kept").await;
    let held = lock(&near, "held").await;
    release(lock(&far, "warm").await).await;
    etcd.pause();
    let mutex = near.mutex("late").unwrap();
    for _ in 0..3 {
        // A claim on its way, its release, and a release of what is held.
        mutex.lock().timeout(Duration::from_millis(100)).await.unwrap_err();
    }
    drop(held);
    within("the loss is told", kept.lost()).await;
    let past = clock.now() + 2 * TTL;
    eventually("every lease is over", async || (clock.now() > past).then_some(())).await;
    etcd.resume();
    for name in ["late", "held", "kept"] {
        release(join("it is free", queue(&far, name)).await).await;
        expect_unused(&etcd, &near, name).await;
    }
}

/// A future that is kept but not polled, in the midst of a renewal or of making a lease, is no reason for others to wait.
#[tokio::test]
async fn a_caller_that_is_not_polled_stops_nobody() {
    const TTL: Duration = Duration::from_secs(4);
    let (etcd, clock) = (Etcd::start(), Clock::host());
    let locks = clinch::connect(&etcd.url()).await.unwrap();
    let short = locks.clone().ttl(TTL).unwrap();
    let guard = lock(&short, "job").await;
    // A renewal that is younger would do.
    let old = clock.now() + TTL / 8;
    eventually("the last renewal is a while ago", async || (clock.now() > old).then_some(())).await;
    let mut extend = Box::pin(guard.extend(TTL));
    poll_once(extend.as_mut()).await;
    let long = locks.clone().ttl(LONG_TTL).unwrap();
    let first = long.mutex("first").unwrap();
    let mut first = pin!(first.lock().into_future());
    poll_once(first.as_mut()).await;
    release(within("another gets its lease", lock(&long, "second")).await).await;
    let before = guard.deadline().unwrap();
    let renewed = async || (!guard.is_held() || guard.deadline().unwrap() > before).then_some(());
    eventually("the lease is renewed", renewed).await;
    assert!(guard.is_held(), "lost because a caller was not polled");
    extend.as_mut().await.unwrap();
    drop(extend);
    release(first.await.unwrap()).await;
    release(guard).await;
}

/// Nobody may be told that its lock came too late whose lease is there: it is renewed first.
#[tokio::test]
async fn a_waiter_that_could_not_renew_for_longer_than_its_ttl_is_granted() {
    const TTL: Duration = Duration::from_secs(4);
    let (etcd, clock) = (Etcd::start(), Clock::host());
    let near = connect(&etcd.url()).await;
    let (far, proxy) = silent::split(&etcd).await;
    let far = far.ttl(TTL).unwrap();
    let guard = lock(&near, "job").await;
    proxy.black_hole(true);
    let mine = lock(&far, "mine").await;
    // The cluster itself lets a lease live for longer after an outage.
    let mut keeper = etcd.etcdctl();
    keeper.args(["lease", "keep-alive", &lease(&mine)]).stdout(Stdio::null());
    let mut keeper = Kept(keeper.spawn().unwrap());
    drop(mine);
    let waiter = queue(&far, "job");
    sees_claims(&near, "job", 2).await;
    let late = clock.now() + TTL + TTL / 2;
    eventually("its last renewal is older than its TTL", async || (clock.now() > late).then_some(())).await;
    assert!(keeper.0.try_wait().unwrap().is_none(), "the lease ended");
    let looks = etcd.handled("Txn");
    release(guard).await;
    let looked = async || (waiter.is_finished() || etcd.handled("Txn") > looks).then_some(());
    eventually("the waiter has looked", looked).await;
    proxy.black_hole(false);
    let guard = join("the waiter is granted", waiter).await;
    assert!(guard.is_held());
    release(guard).await;
}
