//! Members and callers that stand still in the midst of something.

use std::pin::pin;

use super::*;

/// A process that ends with its test.
struct Kept(Child);

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Polls once, and no more.
async fn poll_once(mut future: std::pin::Pin<&mut impl Future>) {
    let once = |context: &mut std::task::Context<'_>| {
        std::task::Poll::Ready(future.as_mut().poll(context).is_pending())
    };
    assert!(std::future::poll_fn(once).await, "it waits for its answer");
}

/// A way that leads nowhere is left for another although everybody who asks gives up sooner than it is known to lead
/// nowhere: steps are asked again and again by callers, renewals by the keeper, for a sixth of a short TTL each.
#[tokio::test]
async fn a_way_that_leads_nowhere_is_left_however_short_the_askers_patience() {
    let etcd = Etcd::start();
    for (renews, ttl) in [(false, LONG_TTL), (true, Duration::from_secs(4))] {
        let (one, other, url) = network::two_ways(&etcd);
        let backend = clinch::backends::etcd::open(&url, Env::host(Lane::thread())).await.unwrap();
        let claim = ghosts::claim(1, "job", ttl);
        ghosts::granted(&*backend, &claim).await;
        let (used, unused) = if one.connections() > 0 { (&one, &other) } else { (&other, &one) };
        used.black_hole(true);
        let before = unused.accepted();
        let left = async || {
            let mut step = match renews {
                true => {
                    let claims = std::slice::from_ref(&claim);
                    Box::pin(async { drop(backend.renew(claims).await) })
                        as std::pin::Pin<Box<dyn Future<Output = ()>>>
                }
                false => Box::pin(async { drop(backend.state(&claim.name).await) }),
            };
            let once = |context: &mut std::task::Context<'_>| {
                std::task::Poll::Ready(step.as_mut().poll(context).is_ready())
            };
            let _ = std::future::poll_fn(once).await;
            (unused.accepted() > before).then_some(())
        };
        eventually("it is left for the other way", left).await;
        let released = async || backend.release(&claim, Duration::ZERO).await.ok();
        eventually("it is released the other way", released).await;
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
