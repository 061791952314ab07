//! Servers whose clock is set while locks are held.

use super::restarts::{MAX_TTL, connect_forgetful, holder_is_told_first, hosts, lock_on_all};
use super::*;

fn with_clocks() -> Servers {
    Servers((0..3).map(|_| Redis::builder().stepped_clock().start()).collect())
}

#[tokio::test]
async fn a_clock_that_was_set_ahead_does_not_help_a_second_holder() {
    let servers = with_clocks();
    let (holder, rival) =
        tokio::join!(connect_forgetful(hosts(&servers)), connect_forgetful(hosts(&servers)));
    let name = unique("ahead");
    let guard = lock_on_all(&servers, &holder, &name).await;
    servers.0[1].step_clock(3600);
    servers.0[2].call(&["DEL", &format!("clinch:{name}")]);
    // The second has let the holder's lease run out at once.
    let error = rival.mutex(&name).unwrap().lock().timeout(Duration::from_millis(100)).await.unwrap_err();
    assert!(chain(&error).contains("its clock has jumped by 59m"), "{}", chain(&error));
    holder_is_told_first(&name, guard, &rival).await;
}

#[tokio::test]
async fn tokens_rise_although_a_clock_was_set_back() {
    let servers = with_clocks();
    let (one, other) = tokio::join!(connect_forgetful(hosts(&servers)), connect_forgetful(hosts(&servers)));
    let name = unique("back");
    let mut last = lock(&one, &name).await.token();
    for (step, locks) in [(-3600, &other), (-7200, &one), (0, &other)] {
        servers.0[0].step_clock(step);
        for _ in 0..3 {
            let guard = lock(locks, &name).await;
            assert!(guard.token() > last, "{} came after {last}", guard.token());
            last = guard.token();
        }
    }
    // One that is set does not vote for a time, and then it does again.
    servers.0[2].pause();
    let mutex = one.mutex(&name).unwrap();
    assert!(mutex.lock().timeout(MAX_TTL * 5).await.unwrap().token() > last);
}

#[tokio::test]
async fn a_token_that_one_server_gave_binds_those_that_are_asked_next() {
    let servers = Servers::durable(3);
    let (one, other) = (servers.connect().await, servers.connect().await);
    let name = unique("agree");
    // The last of the three has given tokens when its clock was ahead.
    servers.0[2].call(&["SET", "clinch:~{fence}", "9000000000000000"]);
    servers.0[1].pause();
    let guard = lock(&one, &name).await;
    let token = guard.token();
    assert!(token.get() > 9_000_000_000_000_000, "{token}");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    servers.0[1].resume();
    servers.0[2].pause();
    let next = lock(&other, &name).await;
    assert!(next.token() > token, "{} came after {token}", next.token());
    // It stands beside the claim, too, for people.
    let shown = other.list(&name).await.unwrap()[0].claims[0].token;
    assert_eq!(shown, Some(next.token()));
}

#[tokio::test]
async fn a_grant_of_which_too_little_is_left_is_given_back() {
    let servers = Servers::durable(3);
    let proxies: Vec<Proxy> = servers.0.iter().map(|server| Proxy::start(server.addr())).collect();
    let hosts = || proxies.iter().map(|proxy| proxy.addr().to_string());
    let short = Duration::from_millis(400);
    let url = url_of(hosts(), "durable=on&max_ttl=24h&min_validity=390ms");
    let far = clinch::connect(&url).await.unwrap().ttl(short).unwrap();
    let name = unique("late-grant");
    // What the votes take on their way is counted against the lease.
    proxies.iter().for_each(|proxy| proxy.delay(Duration::from_millis(8)));
    let mutex = far.mutex(&name).unwrap();
    eventually("all votes come late", async || {
        let error = mutex.try_lock().await.expect_err("granted with too little left");
        error.to_string().contains("too little of its lease was left").then_some(())
    })
    .await;
    servers.expect_no_key(&name).await;
}

#[tokio::test]
async fn a_larger_drift_ends_a_lease_sooner() {
    let servers = Servers::durable(3);
    let locks = connect(&servers.url("durable=on&max_ttl=24h&drift=25")).await;
    let guard = lock(&locks, &unique("drift")).await;
    assert!(guard.remaining().unwrap() < LONG_TTL.mul_f64(0.75), "{:?}", guard.remaining());
    // Also when it has been renewed.
    guard.extend(LONG_TTL).await.unwrap();
    assert!(guard.remaining().unwrap() < LONG_TTL.mul_f64(0.75), "{:?}", guard.remaining());
}
