//! Requests and answers that are lost, or arrive when nobody wants them any more.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use clinch::net::{Connector, Stream};
use clinch::{Clock, Env, Lane, Random};
use clinch_testkit::Direction;

use super::*;

/// A network whose connections lead through proxies, and past them when told so.
#[derive(Debug)]
struct Detour {
    proxies: HashMap<u16, SocketAddr>,
    past: AtomicBool,
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

#[tokio::test]
async fn a_claim_on_its_way_over_a_broken_connection_does_not_outlive_its_release() {
    let servers = Servers::durable(3);
    let proxies: Vec<Proxy> = servers.0.iter().map(|server| Proxy::start(server.addr())).collect();
    let ports = servers.0.iter().map(Redis::port).zip(proxies.iter().map(Proxy::addr)).collect();
    let detour = Arc::new(Detour { proxies: ports, past: AtomicBool::new(false) });
    let env = Env::new(Clock::host(), Random::system(), Lane::thread(), detour.clone());
    let url = servers.url("durable=on&max_ttl=24h");
    let locks = Locks::connect(&url, env).await.unwrap().ttl(LONG_TTL).unwrap();
    let warm = unique("warm");
    lock(&locks, &warm).await.release().await.unwrap();
    servers.expect_no_key(&warm).await;
    let name = unique("on-its-way");
    proxies[2].black_hole(true);
    detour.past.store(true, Ordering::Release);
    let guard = lock(&locks, &name).await;
    assert_eq!(servers.with_key(&name), [0, 1]);
    // The connection is given up, since nothing was answered, and the third is reached by another.
    eventually("the third is reached again", async || {
        let others = lock(&locks, &unique("other")).await;
        (servers.with_key(others.name().as_str()).len() == 3).then_some(())
    })
    .await;
    let before = scripts_run(&servers.0[2]);
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    eventually("the third has run the release", async || (scripts_run(&servers.0[2]) > before).then_some(()))
        .await;
    proxies[2].black_hole(false);
    eventually("what was held is delivered", async || (proxies[2].connections() == 0).then_some(())).await;
    assert_eq!(servers.with_key(&name), [] as [usize; 0], "the claim came after its release");
}

#[tokio::test]
async fn what_was_granted_without_a_word_is_given_back() {
    let servers = Servers::durable(3);
    let proxies: Vec<Proxy> = servers.0.iter().map(|server| Proxy::start(server.addr())).collect();
    let url = url_of(proxies.iter().map(|proxy| proxy.addr().to_string()), "durable=on&max_ttl=24h");
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
        let url = url_of(hosts.map(|addr| addr.to_string()), "durable=on&max_ttl=24h");
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
    let url = url_of(proxies.iter().map(|proxy| proxy.addr().to_string()), "durable=on&max_ttl=24h");
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
    let url = url_of(hosts.map(|addr| addr.to_string()), "durable=on&max_ttl=24h");
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
    let url = url_of(hosts.map(|addr| addr.to_string()), "durable=on&max_ttl=24h");
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
