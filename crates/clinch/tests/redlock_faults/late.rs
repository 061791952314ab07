//! Requests and answers that are lost, or arrive when nobody wants them any more.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::task::{Context, Poll};

use async_trait::async_trait;
use clinch::backend::{Backend, Progress};
use clinch::net::{Connector, Stream};
use clinch::{Claim, ClaimId, Clock, Env, Lane, LockName, Mode, Owner, Random};
use clinch_testkit::Direction;
use tokio::io::{AsyncRead, ReadBuf, ReadHalf};

use super::*;

/// A network whose connections lead through proxies, and past them when told so.
#[derive(Debug)]
pub(super) struct Detour {
    pub(super) proxies: HashMap<u16, SocketAddr>,
    pub(super) past: AtomicBool,
}

#[async_trait]
impl Connector for Detour {
    async fn connect(&self, host: &str, port: u16) -> std::io::Result<Box<dyn Stream>> {
        let past = self.past.load(Ordering::Acquire);
        let stream = match self.proxies.get(&port) {
            Some(proxy) if !past => tokio::net::TcpStream::connect(proxy).await,
            _ => tokio::net::TcpStream::connect((host, port)).await,
        };
        Ok(Box::new(stream?))
    }
}

fn scripts_run(server: &Redis) -> u64 {
    server.client().commandstats()["evalsha"]
}

/// As the engine makes them, and with a number of its own.
fn claim(number: u64, hazard: &str) -> Claim {
    let owner = Owner { host: "here".into(), pid: 1, user: "me".into(), label: String::new() };
    Claim {
        id: ClaimId::from_bits(number.into()),
        name: LockName::new(unique(hazard)).unwrap(),
        mode: Mode::Exclusive,
        ttl: LONG_TTL,
        enqueue: false,
        place: false,
        isolated: false,
        owner: owner.into(),
    }
}

/// A claim to three servers that two have granted. It is on its way to the third over a connection that was given up, and the
/// third is reached by another one.
struct OnItsWay {
    servers: Servers,
    third: Proxy,
    backend: Arc<dyn Backend>,
    claim: Claim,
}

impl OnItsWay {
    async fn stage(hazard: &str, servers: Servers) -> OnItsWay {
        let third = Proxy::start(servers.0[2].addr());
        let proxies = HashMap::from([(servers.0[2].port(), third.addr())]);
        let detour = Arc::new(Detour { proxies, past: AtomicBool::new(false) });
        let env = Env::new(Clock::host(), Random::system(), Lane::thread(), detour.clone());
        let url = servers.voting_url();
        let backend = clinch::backends::redis::redlock::open(&url, env).await.unwrap();
        let numbers = AtomicU64::new(1);
        let take = async |hazard: &str| {
            let claim = claim(numbers.fetch_add(1, Ordering::Relaxed), hazard);
            let taken = backend.claim(&claim).await;
            assert!(matches!(taken, Ok(Progress::Granted(_))), "{taken:?}");
            claim
        };
        let warm = take("warm").await;
        backend.release(&warm, Duration::ZERO).await.unwrap();
        servers.expect_no_key(warm.name.as_str()).await;
        third.black_hole(true);
        detour.past.store(true, Ordering::Release);
        let claim = take(hazard).await;
        assert_eq!(servers.with_key(claim.name.as_str()), [0, 1]);
        // The connection is given up, since nothing was answered.
        eventually("the third is reached again", async || {
            let other = take("other").await;
            let reached = servers.with_key(other.name.as_str()).len() == 3;
            let _ = backend.release(&other, Duration::ZERO).await;
            reached.then_some(())
        })
        .await;
        OnItsWay { servers, third, backend, claim }
    }

    async fn release(&self) {
        let before = scripts_run(&self.servers.0[2]);
        assert_eq!(self.backend.release(&self.claim, Duration::ZERO).await.unwrap(), Freed::Removed);
        eventually("the third has run the release", async || {
            (scripts_run(&self.servers.0[2]) > before).then_some(())
        })
        .await;
    }

    async fn arrives(&self) {
        self.third.black_hole(false);
        eventually("what was held is delivered", async || (self.third.connections() == 0).then_some(()))
            .await;
    }

    /// Servers of whose connections none may end another.
    fn without_rights() -> Servers {
        let servers = Servers::durable(3);
        for server in &servers.0 {
            server.call(&["ACL", "SETUSER", "default", "-client", "+client|id", "+client|tracking"]);
        }
        servers
    }
}

#[tokio::test]
async fn a_claim_on_its_way_over_a_broken_connection_does_not_outlive_its_release() {
    let stage = OnItsWay::stage("on-its-way", Servers::durable(3)).await;
    stage.release().await;
    stage.arrives().await;
    let left = stage.servers.with_key(stage.claim.name.as_str());
    assert_eq!(left, [] as [usize; 0], "the claim came after its release");
}

/// The client forgets, when its first release was given up, after what the next one has to come.
#[tokio::test]
async fn a_claim_on_its_way_over_broken_connections_does_not_outlive_a_release_that_failed_before() {
    let servers = Servers::durable(3);
    let proxies: Vec<Proxy> = servers.0.iter().map(|server| Proxy::start(server.addr())).collect();
    let ports = servers.0.iter().zip(&proxies).map(|(server, proxy)| (server.port(), proxy.addr()));
    let detour = Arc::new(Detour { proxies: ports.collect(), past: AtomicBool::new(false) });
    let fails = Arc::new(AtomicBool::new(false));
    let network = Arc::new(Failing { detour: detour.clone(), fails: fails.clone() });
    let env = Env::new(Clock::host(), Random::system(), Lane::thread(), network);
    let locks = Locks::connect(&servers.voting_url(), env).await.unwrap();
    let (warm, name) = (unique("warm"), unique("broken"));
    lock(&locks, &warm).await.release().await.unwrap();
    // The claim is on its way over connections that break, and for a second there are no others.
    proxies.iter().for_each(|proxy| proxy.black_hole(true));
    let waited = {
        let (locks, name) = (locks.clone(), name.clone());
        tokio::spawn(
            async move { locks.mutex(&name).unwrap().lock().timeout(Duration::from_millis(300)).await },
        )
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    fails.store(true, Ordering::Release);
    detour.past.store(true, Ordering::Release);
    tokio::time::sleep(Duration::from_secs(1)).await;
    fails.store(false, Ordering::Release);
    assert!(waited.await.unwrap().is_err());
    locks.close(PATIENCE).await.unwrap();
    proxies.iter().for_each(|proxy| proxy.black_hole(false));
    let delivered = async || proxies.iter().all(|proxy| proxy.connections() == 0).then_some(());
    eventually("what was held is delivered", delivered).await;
    let left = servers.with_key(&name);
    assert!(left.len() < 2, "the claim came after its release: {left:?}");
    // The last one is seen to in the background.
    servers.expect_no_key(&name).await;
}

/// A network of which the first connections break, and that refuses others, when told so.
#[derive(Debug)]
struct Failing {
    detour: Arc<Detour>,
    fails: Arc<AtomicBool>,
}

#[async_trait]
impl Connector for Failing {
    async fn connect(&self, host: &str, port: u16) -> std::io::Result<Box<dyn Stream>> {
        if self.fails.load(Ordering::Acquire) {
            return Err(std::io::ErrorKind::ConnectionRefused.into());
        }
        let stream = self.detour.connect(host, port).await?;
        if self.detour.past.load(Ordering::Acquire) {
            return Ok(stream);
        }
        let (fails, look) = (self.fails.clone(), Box::pin(tokio::time::sleep(Duration::ZERO)));
        let (stream, writer) = tokio::io::split(stream);
        Ok(Box::new(tokio::io::join(Breaking { stream, fails, look }, writer)))
    }
}

struct Breaking {
    stream: ReadHalf<Box<dyn Stream>>,
    fails: Arc<AtomicBool>,
    look: Pin<Box<tokio::time::Sleep>>,
}

impl AsyncRead for Breaking {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        while self.look.as_mut().poll(context).is_ready() {
            if self.fails.load(Ordering::Acquire) {
                return Poll::Ready(Err(std::io::ErrorKind::ConnectionReset.into()));
            }
            self.look.as_mut().reset(tokio::time::Instant::now() + Duration::from_millis(10));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

/// Nobody can make sure that it comes no more; so the release is repeated until nobody would give it a vote.
#[tokio::test]
async fn a_claim_that_may_still_be_on_its_way_is_released_for_as_long_as_that_may_be() {
    let stage = OnItsWay::stage("no-right", OnItsWay::without_rights()).await;
    let before = scripts_run(&stage.servers.0[2]);
    stage.release().await;
    eventually("the third has run the release again", async || {
        (scripts_run(&stage.servers.0[2]) > before + 1).then_some(())
    })
    .await;
    stage.arrives().await;
    stage.servers.expect_no_key(stage.claim.name.as_str()).await;
}

/// A vote that is asked for again while the first request may still arrive would be released once, and then given once more.
#[tokio::test]
async fn a_vote_is_not_asked_for_again_while_an_earlier_request_may_still_arrive() {
    let stage = OnItsWay::stage("asked-again", OnItsWay::without_rights()).await;
    // The engine repeats a step whose answer it did not hear of. The third would decide.
    stage.servers.0[0].pause();
    let again = stage.backend.claim(&stage.claim).await;
    assert!(!matches!(again, Ok(Progress::Granted(_))), "a vote counts that may be given twice");
    stage.servers.0[0].resume();
    let _ = stage.backend.release(&stage.claim, Duration::ZERO).await;
    stage.arrives().await;
    stage.servers.expect_no_key(stage.claim.name.as_str()).await;
}

#[tokio::test]
async fn what_was_granted_without_a_word_is_given_back() {
    let servers = Servers::durable(3);
    let proxies: Vec<Proxy> = servers.0.iter().map(|server| Proxy::start(server.addr())).collect();
    let url = servers.url_at(proxies.iter().map(|proxy| proxy.addr().to_string()), "durable=on&max_ttl=24h");
    let (far, near) = (connect(&url).await, servers.connect().await);
    let name = unique("without-a-word");
    drop(lock(&far, &name).await);
    servers.expect_no_key(&name).await;
    proxies[1..].iter().for_each(|proxy| proxy.hold_replies(true));
    let before = scripts_run(&servers.0[1]);
    let waiter = queue(&far, &name);
    eventually("it was granted", async || (scripts_run(&servers.0[1]) > before).then_some(())).await;
    waiter.abort();
    servers.expect_no_key(&name).await;
    let guard = lock(&near, &name).await;
    proxies[1..].iter().for_each(|proxy| proxy.hold_replies(false));
    guard.verify().await.unwrap();
    drop(guard);
    drop(lock(&far, &name).await);
    servers.expect_no_key(&name).await;
}

/// Three servers; two have the lock for somebody. The third, behind a proxy, has given its vote to a waiter that has not
/// heard of it.
struct Unheard {
    servers: Servers,
    third: Proxy,
    name: String,
    locks: Locks,
    waiter: tokio::task::JoinHandle<Guard>,
}

impl Unheard {
    async fn stage(hazard: &str) -> Unheard {
        let servers = Servers::durable(3);
        let third = Proxy::start(servers.0[2].addr());
        let hosts = servers.0[..2].iter().map(Redis::addr).chain([third.addr()]);
        let url = servers.url_at(hosts.map(|addr| addr.to_string()), "durable=on&max_ttl=24h");
        let locks = connect(&url).await;
        let warm = unique("warm");
        lock(&locks, &warm).await.release().await.unwrap();
        servers.expect_no_key(&warm).await;
        let name = unique(hazard);
        for server in &servers.0[..2] {
            server.call(&["SET", &format!("clinch:{name}"), "somebody", "PX", "100000000"]);
        }
        third.hold_replies(true);
        let waiter = queue(&locks, &name);
        eventually("the third votes", async || (servers.with_key(&name).len() == 3).then_some(())).await;
        Unheard { servers, third, name, locks, waiter }
    }

    async fn sees_it_given_back(&self) {
        eventually("the vote is given back", async || {
            (self.servers.with_key(&self.name) == [0, 1]).then_some(())
        })
        .await;
        assert!(!self.waiter.is_finished());
    }
}

#[tokio::test]
async fn a_vote_that_a_waiter_hears_of_too_late_is_given_back() {
    let stage = Unheard::stage("heard-late").await;
    stage.third.hold_replies(false);
    stage.sees_it_given_back().await;
    stage.waiter.abort();
}

#[tokio::test]
async fn a_vote_that_a_waiter_never_hears_of_is_given_back() {
    let stage = Unheard::stage("never-heard").await;
    stage.third.cut_all();
    stage.third.hold_replies(false);
    stage.sees_it_given_back().await;
    stage.waiter.abort();
}

/// Renewals of another lock are the clock.
#[tokio::test]
async fn a_late_answer_to_a_lost_vote_takes_nothing_from_the_one_that_was_won_since() {
    let Unheard { servers, third, name, locks, waiter } = Unheard::stage("won-since").await;
    for server in &servers.0[..2] {
        server.call(&["DEL", &format!("clinch:{name}")]);
    }
    let guard = waiter.await.unwrap();
    third.hold_replies(false);
    let clock = locks.ttl(Duration::from_secs(1)).unwrap();
    let other = lock(&clock, &unique("clock")).await;
    let renewals = || servers.0[2].client().commandstats().get("pexpire").copied().unwrap_or(0);
    let before = renewals();
    eventually("the other is renewed", async || (renewals() >= before + 3).then_some(())).await;
    assert_eq!(servers.with_key(&name), [0, 1, 2], "a vote of the holder was given back");
    assert!(guard.is_held() && other.is_held());
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    servers.expect_no_key(&name).await;
}

#[tokio::test]
async fn connections_cut_at_any_byte_leave_nothing_and_let_nobody_in_twice() {
    let servers = Servers::durable(3);
    let proxies: Vec<Proxy> = servers.0.iter().map(|server| Proxy::start(server.addr())).collect();
    let url = servers.url_at(proxies.iter().map(|proxy| proxy.addr().to_string()), "durable=on&max_ttl=24h");
    let (far, near) = (connect(&url).await, servers.connect().await);
    let name = unique("cut");
    let mut last = lock(&far, &name).await.token();
    for round in 0..120u64 {
        for (at, proxy) in proxies.iter().enumerate().take(1 + round as usize % 3) {
            let odd = (round + at as u64) % 2 == 1;
            let way = if odd { Direction::Replies } else { Direction::Requests };
            proxy.cut_after(way, (round * 7 + at as u64 * 13) % 400);
        }
        let guard = lock(&far, &name).await;
        assert!(guard.token() > last, "{} came after {last}", guard.token());
        assert!(near.mutex(&name).unwrap().try_lock().await.unwrap().is_none(), "two hold it");
        let released = guard.release().await.unwrap();
        assert_eq!(released, Released::Released);
        let next = lock(&near, &name).await;
        last = next.token();
        drop(next);
    }
    far.close(PATIENCE).await.unwrap();
    servers.expect_no_key(&name).await;
}

/// It may be long until a server that stood still goes on, and nobody may be left then who would give the vote back.
#[tokio::test]
async fn a_claim_that_a_server_finds_long_after_it_was_sent_gets_no_vote() {
    const TTL: Duration = Duration::from_secs(2);
    let servers = Servers::durable(3);
    let third = Proxy::start(servers.0[2].addr());
    let hosts = servers.0[..2].iter().map(Redis::addr).chain([third.addr()]);
    let url = servers.url_at(hosts.map(|addr| addr.to_string()), "durable=on&max_ttl=24h");
    let locks = connect(&url).await.ttl(TTL).unwrap();
    let warm = unique("warm");
    lock(&locks, &warm).await.release().await.unwrap();
    servers.expect_no_key(&warm).await;
    let name = unique("long-after");
    for server in &servers.0[..2] {
        server.call(&["SET", &format!("clinch:{name}"), "somebody", "PX", "100000000"]);
    }
    let before = scripts_run(&servers.0[2]);
    third.black_hole(true);
    let waiter = queue(&locks, &name);
    // By then it was given up, and so was its release.
    tokio::time::sleep(Duration::from_secs(6)).await;
    third.black_hole(false);
    eventually("the claim arrives", async || (scripts_run(&servers.0[2]) > before).then_some(())).await;
    assert_eq!(servers.with_key(&name), [0, 1], "nobody waits for its vote");
    waiter.abort();
}

#[tokio::test]
async fn a_script_that_a_server_has_forgotten_is_not_sent_again_after_the_release() {
    let servers = Servers::durable(3);
    let third = Proxy::start(servers.0[2].addr());
    let hosts = servers.0[..2].iter().map(Redis::addr).chain([third.addr()]);
    let url = servers.url_at(hosts.map(|addr| addr.to_string()), "durable=on&max_ttl=24h");
    let locks = connect(&url).await;
    let warm = unique("warm");
    lock(&locks, &warm).await.release().await.unwrap();
    servers.expect_no_key(&warm).await;
    let name = unique("forgotten");
    for server in &servers.0[..2] {
        server.call(&["SET", &format!("clinch:{name}"), "somebody", "PX", "100000000"]);
    }
    // It knows the script of the release alone.
    servers.0[2].call(&["SCRIPT", "FLUSH"]);
    let release = include_str!("../../src/backends/redis/lua/release_lean.lua");
    servers.0[2].call(&["SCRIPT", "LOAD", release]);
    third.hold_replies(true);
    let before = scripts_run(&servers.0[2]);
    let waiter = queue(&locks, &name);
    eventually("the claim arrives", async || (scripts_run(&servers.0[2]) > before).then_some(())).await;
    waiter.abort();
    eventually("the release arrives", async || (scripts_run(&servers.0[2]) > before + 1).then_some(())).await;
    third.hold_replies(false);
    // Renewals of another lock are the clock.
    let other = lock(&locks.ttl(Duration::from_secs(1)).unwrap(), &unique("other")).await;
    let begun = other.deadline().unwrap();
    eventually("renewals", async || {
        (other.deadline().unwrap() > begun + Duration::from_secs(1)).then_some(())
    })
    .await;
    assert_eq!(servers.with_key(&name), [0, 1], "the claim was sent after its release");
}

/// A server that has forgotten the script of the release is sent it again, with the release: that must not come after a claim
/// that was sent meanwhile.
#[tokio::test]
async fn a_release_that_is_sent_again_takes_no_later_vote_along() {
    let servers = Servers::durable(3);
    let third = Proxy::start(servers.0[2].addr());
    let hosts = servers.0[..2].iter().map(Redis::addr).chain([third.addr()]);
    let url = servers.url_at(hosts.map(|addr| addr.to_string()), "durable=on&max_ttl=24h&fencing=off");
    let backend = clinch::backends::redis::redlock::open(&url, Env::host(Lane::thread())).await.unwrap();
    let other = claim(1, "other");
    let turn = async || {
        assert!(matches!(backend.claim(&other).await, Ok(Progress::Granted(_))));
        backend.release(&other, Duration::ZERO).await.unwrap();
    };
    turn().await;
    servers.0[2].call(&["SCRIPT", "FLUSH"]);
    let script = include_str!("../../src/backends/redis/lua/redlock_claim.lua");
    servers.0[2].call(&["SCRIPT", "LOAD", script]);
    servers.0[..2].iter().for_each(Redis::pause);
    third.hold_replies(true);
    let before = scripts_run(&servers.0[2]);
    let wanted = Claim { enqueue: true, ..claim(2, "along") };
    assert!(backend.claim(&wanted).await.is_err(), "nobody has answered");
    eventually("the release arrives", async || (scripts_run(&servers.0[2]) > before + 1).then_some(())).await;
    servers.0[0].resume();
    let (again, ()) = tokio::join!(backend.claim(&wanted), async {
        eventually("the next claim arrives", async || {
            (scripts_run(&servers.0[2]) > before + 2).then_some(())
        })
        .await;
        third.hold_replies(false);
    });
    let granted = matches!(again, Ok(Progress::Granted(_)));
    // Whatever was to be sent again in the background is sent by then.
    let end = std::time::Instant::now() + Duration::from_millis(500);
    while std::time::Instant::now() < end {
        turn().await;
    }
    let has_vote = servers.0[2].call(&["EXISTS", &format!("clinch:{}", wanted.name)]).int() == 1;
    assert!(has_vote || !granted, "the vote of a holder is gone");
    servers.0[1].resume();
    let _ = backend.release(&wanted, Duration::ZERO).await;
    servers.expect_no_key(wanted.name.as_str()).await;
}

/// A release that was not answered may arrive later, too: its repetition is no end before the connection is ended.
#[tokio::test]
async fn a_release_on_its_way_over_a_broken_connection_takes_no_later_vote_along() {
    let servers = Servers::durable(3);
    let third = Proxy::start(servers.0[2].addr());
    let proxies = HashMap::from([(servers.0[2].port(), third.addr())]);
    let detour = Arc::new(Detour { proxies, past: AtomicBool::new(false) });
    let env = Env::new(Clock::host(), Random::system(), Lane::thread(), detour.clone());
    let url = servers.url_at(
        servers.0.iter().map(|server| server.addr().to_string()),
        "durable=on&max_ttl=24h&fencing=off",
    );
    let backend = clinch::backends::redis::redlock::open(&url, env).await.unwrap();
    let other = claim(1, "other");
    assert!(matches!(backend.claim(&other).await, Ok(Progress::Granted(_))));
    backend.release(&other, Duration::ZERO).await.unwrap();
    servers.0[..2].iter().for_each(Redis::pause);
    let wanted = Claim { enqueue: true, ..claim(2, "along") };
    let key = format!("clinch:{}", wanted.name);
    let there = || servers.0[2].call(&["EXISTS", &key]).int() == 1;
    let (in_vain, ()) = tokio::join!(backend.claim(&wanted), async {
        eventually("the third votes", async || there().then_some(())).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        third.black_hole(true);
        detour.past.store(true, Ordering::Release);
    });
    assert!(in_vain.is_err(), "nobody else has answered");
    eventually("the vote is given back over another connection", async || (!there()).then_some(())).await;
    servers.0[0].resume();
    eventually("it has votes again", async || {
        matches!(backend.claim(&wanted).await, Ok(Progress::Granted(_))).then_some(())
    })
    .await;
    third.black_hole(false);
    eventually("what was held is delivered", async || (third.connections() == 0).then_some(())).await;
    assert!(there(), "the vote of a holder is gone");
    servers.0[1].resume();
    let _ = backend.release(&wanted, Duration::ZERO).await;
    servers.expect_no_key(wanted.name.as_str()).await;
}
