//! Connections that break, and requests that come late.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::tcp::OwnedReadHalf;

use super::*;

/// A URL of one server by two ways.
pub(super) fn two_ways(etcd: &Etcd) -> (Proxy, Proxy, String) {
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

/// Where every answer takes longer than a sixth of a place's time, that is no sign of a server that hangs.
#[tokio::test]
async fn a_waiter_keeps_its_connections_and_its_turn_where_answers_take_long() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let (near, far) = (connect(&etcd.url()).await, connect(&format!("etcd://{}", proxy.addr())).await);
    let guard = lock(&near, "job").await;
    proxy.delay(Duration::from_millis(300));
    let waiter = queue(&far, "job");
    sees_claims(&near, "job", 2).await;
    let (keepalives, connections) = (etcd.handled("LeaseKeepAlive"), proxy.accepted());
    let renewed = async || (etcd.handled("LeaseKeepAlive") >= keepalives + 5).then_some(());
    eventually("its place is renewed", renewed).await;
    let behind = queue(&near, "job");
    sees_claims(&near, "job", 3).await;
    release(guard).await;
    let guard = join("the waiter is granted", waiter).await;
    assert!(!behind.is_finished(), "it was overtaken");
    assert_eq!(proxy.accepted(), connections, "it has cut its connections");
    release(guard).await;
    release(join("the next is granted", behind).await).await;
}

/// A waiter that members are too slow for ends what its holders of the same client are about to be answered, again and again.
#[tokio::test]
async fn a_waiter_without_answers_costs_no_holder_its_lock() {
    const TTL: Duration = Duration::from_secs(6);
    let etcd = Etcd::start();
    let (one, other, url) = two_ways(&etcd);
    let (near, far) = (connect(&etcd.url()).await, connect(&url).await);
    let guard = lock(&near, "job").await;
    let kept = lock(&far.clone().ttl(TTL).unwrap(), "kept").await;
    let waiter = queue(&far, "job");
    sees_claims(&near, "job", 2).await;
    // More than a waiter may wait for an answer, and less than this holder may.
    [&one, &other].into_iter().for_each(|way| way.delay(Duration::from_millis(350)));
    let before = kept.deadline().unwrap();
    let renewed = async || (!kept.is_held() || kept.deadline().unwrap() > before + 2 * TTL).then_some(());
    eventually("the lease is renewed", renewed).await;
    assert!(kept.is_held(), "{:?}", kept.standing());
    [&one, &other].into_iter().for_each(|way| way.delay(Duration::ZERO));
    release(guard).await;
    release(join("the waiter is granted", waiter).await).await;
    release(kept).await;
}

/// What a waiter sends arrives and keeps its place, but what it is told comes too late for it: nobody else gets in.
#[tokio::test]
async fn a_waiter_that_hears_nothing_in_time_is_in_nobodys_way() {
    const TTL: Duration = Duration::from_secs(2);
    let etcd = Etcd::start();
    let (one, other, url) = two_ways(&etcd);
    let (near, far) = (connect(&etcd.url()).await, connect(&url).await);
    let guard = lock(&near, "job").await;
    let waiter = queue(&far.ttl(TTL).unwrap(), "job");
    sees_claims(&near, "job", 2).await;
    let behind = queue(&near, "job");
    sees_claims(&near, "job", 3).await;
    // More than a sixth of its TTL.
    [&one, &other].into_iter().for_each(|way| way.delay(Duration::from_millis(220)));
    release(guard).await;
    let guard = join("the next is granted", behind).await;
    [&one, &other].into_iter().for_each(|way| way.delay(Duration::ZERO));
    release(guard).await;
    waiter.abort();
}

/// A network that carries little at a time.
#[derive(Debug)]
struct Narrow;

impl Narrow {
    const BYTES: usize = 8 << 10;
    const PAUSE: Duration = Duration::from_millis(100);
}

#[async_trait]
impl Connector for Narrow {
    async fn connect(&self, host: &str, port: u16) -> std::io::Result<Box<dyn Stream>> {
        let (stream, writer) = TcpStream::connect((host, port)).await?.into_split();
        let trickle = Trickle { stream, rest: Box::pin(tokio::time::sleep(Duration::ZERO)) };
        Ok(Box::new(tokio::io::join(trickle, writer)))
    }
}

struct Trickle {
    stream: OwnedReadHalf,
    rest: Pin<Box<tokio::time::Sleep>>,
}

impl AsyncRead for Trickle {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        ready!(self.rest.as_mut().poll(context));
        let mut part = [0; Narrow::BYTES];
        let mut part = ReadBuf::new(&mut part[..buffer.remaining().min(Narrow::BYTES)]);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut part))?;
        buffer.put_slice(part.filled());
        self.rest.as_mut().reset(tokio::time::Instant::now() + Narrow::PAUSE);
        Poll::Ready(Ok(()))
    }
}

/// An answer that takes longer than a server may be silent, but flows, is cut, and so is its repetition.
#[tokio::test]
async fn a_large_answer_over_a_slow_network_arrives() {
    /// What one argument of a command may be, nearly.
    const PART: usize = 100_000;
    let etcd = Etcd::start();
    for at in 0..3 {
        etcd.ctl(&["put", &format!("/clinch/job/{at}"), &"x".repeat(PART)]);
    }
    let env = Env::new(Clock::host(), Random::system(), Lane::thread(), Arc::new(Narrow));
    let locks = Locks::connect(&etcd.url(), env).await.unwrap();
    let state = within("the state", locks.state("job")).await.unwrap();
    assert_eq!(state.unwrap().claims.len(), 3);
}

/// A claim is held back on its way while its release goes another; then the claim arrives.
#[tokio::test]
async fn nothing_is_left_of_a_claim_that_comes_after_its_own_release() {
    let etcd = Etcd::start();
    let far = connect(&etcd.url()).await;
    for round in 0..6 {
        let (one, other, url) = two_ways(&etcd);
        let near = connect(&url).await;
        release(lock(&near, "warm").await).await;
        let used = if one.connections() > 0 { &one } else { &other };
        used.black_hole(true);
        let name = format!("late-{round}");
        if round % 3 == 0 {
            let given_up = near.mutex(&name).unwrap().lock().timeout(Duration::from_millis(50)).await;
            assert!(given_up.is_err());
        } else {
            // Granted by the other way, once this one was given up.
            release(lock(&near, &name).await).await;
        }
        near.close(PATIENCE).await.unwrap();
        assert_eq!(keys(&etcd, &name), [""; 0]);
        used.black_hole(false);
        // Whatever was held back comes before the end of its connection. That of the watches may go on.
        let delivered = async || (used.connections() <= 1 || round % 3 == 0).then_some(());
        eventually("what was held back is delivered", delivered).await;
        for _ in 0..5 {
            expect_unused(&etcd, &far, &name).await;
        }
    }
}

/// A release is held back on its way and repeated another; then the client claims the lock again, and the first release
/// arrives.
#[tokio::test]
async fn a_release_that_comes_late_frees_nobody_elses_claim() {
    let etcd = Etcd::start();
    let (one, other, url) = two_ways(&etcd);
    let (near, far) = (connect(&url).await, connect(&etcd.url()).await);
    let guard = lock(&near, "job").await;
    // The server shall not hear that nobody waits any more: it would give up what it has just read.
    for way in [&one, &other] {
        way.hold_ends(true);
    }
    let used = if one.connections() > 0 { &one } else { &other };
    used.black_hole(true);
    release(guard).await;
    let guard = lock(&near, "job").await;
    let before = etcd.handled("DeleteRange");
    used.black_hole(false);
    let arrived = async || (etcd.handled("DeleteRange") > before).then_some(());
    eventually("the first release arrives", arrived).await;
    assert_eq!(keys(&etcd, "job"), [guard.store_key().unwrap()], "a late release freed another claim");
    guard.verify().await.unwrap();
    assert!(far.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    release(guard).await;
    expect_unused(&etcd, &far, "job").await;
}

/// The server counts from when the renewal came, not from when its answer did.
#[tokio::test]
async fn a_lock_on_a_lease_whose_renewal_was_answered_late_ends_before_the_lease() {
    const TTL: Duration = Duration::from_secs(6);
    const LATE: Duration = Duration::from_millis(600);
    let (etcd, clock) = (Etcd::start(), Clock::host());
    let renewals = || etcd.metric("grpc_server_msg_sent_total{grpc_method=\"LeaseKeepAlive\"");
    let proxy = Proxy::start(etcd.addr());
    loop {
        // What is allowed for clocks that run apart would hide what is looked for.
        let near = connect(&format!("etcd://{}?drift=1", proxy.addr())).await.ttl(TTL).unwrap();
        release(lock(&near, "job").await).await;
        // A lease that was renewed a short while ago is not renewed for the next lock.
        let old = clock.now() + TTL / 2;
        eventually("the lease is old", async || (clock.now() > old).then_some(())).await;
        let before = renewals();
        proxy.hold_replies(true);
        let first = queue(&near, "first");
        eventually("the lease is renewed", async || (renewals() > before).then_some(())).await;
        let renewed = clock.now();
        eventually("the answer is late", async || (clock.now() > renewed + LATE).then_some(())).await;
        proxy.hold_replies(false);
        let first = join("the lock is granted", first).await;
        let second = lock(&near, "second").await;
        let deadline = second.deadline().unwrap();
        // If that took too long, the lease was renewed once more.
        let counts = renewals() == before + 1.0;
        release(first).await;
        release(second).await;
        if counts {
            assert!(deadline < renewed + TTL, "held past the end of its lease");
            return;
        }
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
        // It may be this that is cut.
        let _ = guard.verify().await;
        assert_eq!(keys(&etcd, &name).len(), 1, "a repeated claim stands in the queue twice");
        release(guard).await;
        expect_unused(&etcd, &far, &name).await;
    }
    assert!(proxy.cuts() > 5);
}
