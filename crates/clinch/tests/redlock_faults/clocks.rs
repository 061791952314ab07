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
    let mutex = rival.mutex(&name).unwrap();
    eventually("it is told why that one does not vote", async || {
        let error = mutex.lock().timeout(Duration::from_millis(100)).await.expect_err("two hold one lock");
        chain(&error).contains("its clock has jumped by 59m").then_some(())
    })
    .await;
    holder_is_told_first(&name, guard, &rival).await;
}

/// Two of three have the lock for a client that cannot reach the third; something happens to the second. Whoever comes then
/// knows nothing of that, and must not become a second holder with the third.
async fn a_newcomer_does_not_become_a_second_holder(hazard: &str, befall: impl FnOnce(&Redis)) {
    let servers = with_clocks();
    let third = Proxy::start(servers.0[2].addr());
    let hosts =
        || [servers.0[0].addr(), servers.0[1].addr(), third.addr()].into_iter().map(|addr| addr.to_string());
    // All three are vouched for.
    drop(connect_forgetful(hosts()).await);
    third.refuse(true);
    third.cut_all();
    let holder = connect_forgetful(hosts()).await;
    let uptime =
        |at: usize| servers.0[at].client().info("server")["uptime_in_seconds"].parse::<u64>().unwrap();
    eventually("the third has run for long", async || (uptime(2) > MAX_TTL.as_secs() + 1).then_some(()))
        .await;
    let name = unique(hazard);
    let guard = lock(&holder, &name).await;
    eventually("both have given their vote", async || (servers.with_key(&name).len() == 2).then_some(()))
        .await;
    befall(&servers.0[1]);
    eventually("its clock is set", async || (uptime(1) > 3000).then_some(())).await;
    third.refuse(false);
    let newcomer = clinch::connect(&url_of(hosts(), "max_ttl=4s")).await.unwrap();
    let second = newcomer.mutex(&name).unwrap().try_lock().await;
    let held = guard.is_held();
    assert!(!matches!(second, Ok(Some(_))), "a newcomer has it, the holder says {held}");
}

#[tokio::test]
async fn a_newcomer_sees_that_a_clock_was_set_ahead() {
    a_newcomer_does_not_become_a_second_holder("newcomer-set", |server| server.step_clock(3600)).await;
}

#[tokio::test]
async fn a_newcomer_does_not_believe_for_how_long_a_server_has_run() {
    a_newcomer_does_not_become_a_second_holder("newcomer-boot", |server| {
        server.restart();
        server.step_clock(3600);
    })
    .await;
}

/// A job that is started once in a while, and tries once: none of these clients lives for as long as a server must be watched.
#[tokio::test]
async fn clients_that_only_try_once_vouch_for_the_servers_to_those_that_come_after() {
    let servers = Servers::forgetful(3);
    let begun = std::time::Instant::now();
    let once = async || {
        let locks = clinch::connect(&servers.url("max_ttl=2s")).await.unwrap();
        locks.mutex("once").unwrap().try_lock().await
    };
    let error = once().await.expect_err("nobody has watched the servers");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let guard = eventually("somebody need not wait", async || {
        tokio::time::sleep(Duration::from_millis(100)).await;
        once().await.ok().flatten()
    })
    .await;
    drop(guard);
    assert!(begun.elapsed() >= Duration::from_secs(2), "a server voted too early");
}

#[tokio::test]
async fn a_clock_that_is_ahead_does_not_pull_the_tokens_along() {
    let servers = with_clocks();
    let locks = connect_forgetful(hosts(&servers)).await;
    servers.0[2].step_clock(3600);
    // Once it has answered, its clock is known.
    for _ in 0..50 {
        let guard = lock(&locks, &unique("pulled")).await;
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let ahead = Duration::from_micros(guard.token().get()).saturating_sub(wall);
        assert!(ahead < MAX_TTL, "a token is {ahead:?} ahead of the clocks that count");
        assert_eq!(guard.release().await.unwrap(), Released::Released);
    }
}

/// All leases of such a server end when its clock is right again: who asked it meanwhile must have seen that.
#[tokio::test]
async fn a_clock_that_was_not_set_for_a_while_has_jumped() {
    let servers = with_clocks();
    let locks = connect_forgetful(hosts(&servers)).await;
    let tries = async || locks.mutex("jumped").unwrap().try_lock().await;
    let refused = async || {
        let tried = tries().await.map(|guard| guard.map(|guard| guard.token()));
        chain(&tried.expect_err("the vote of a clock that was set counts"))
    };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
    for seconds in [40 - now, 300 * 365 * 86_400] {
        let guard = eventually("all vote again", async || {
            let guard = tries().await.ok().flatten()?;
            (servers.with_key("jumped").len() == 3).then_some(guard)
        });
        assert_eq!(guard.await.release().await.unwrap(), Released::Released);
        servers.0[2].pause();
        servers.0[1].step_clock(seconds);
        // It is asked meanwhile.
        refused().await;
        servers.0[1].step_clock(0);
        let why = refused().await;
        assert!(why.contains("its clock has jumped by"), "{why}");
        servers.0[2].resume();
    }
}

#[tokio::test]
async fn a_clock_beyond_all_tokens_leaves_nothing_behind() {
    const YEARS: i64 = 230 * 365 * 86_400;
    let servers = with_clocks();
    let locks = connect_forgetful(hosts(&servers)).await;
    servers.0[2].step_clock(YEARS);
    let name = unique("beyond");
    let mut last = lock(&locks, &name).await.token();
    for _ in 0..20 {
        let guard = lock(&locks, &name).await;
        assert!(guard.token() > last, "{} came after {last}", guard.token());
        last = guard.token();
    }
    servers.0[2].step_clock(0);
    // Without it there is no majority.
    servers.0[1].pause();
    assert!(lock(&locks, &name).await.token() > last);
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
    let url = servers.url_at(hosts(), "durable=on&max_ttl=24h&min_validity=390ms");
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
    // Of this lease there never is as much.
    let error = far.ttl(Duration::from_millis(390)).unwrap().mutex(&name).unwrap().lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[tokio::test]
async fn what_clients_of_another_group_have_left_tells_nothing() {
    let servers = Servers::forgetful(4);
    let of = |which: [usize; 3], query: &str| {
        url_of(which.map(|at| servers.0[at].addr().to_string()).into_iter(), query)
    };
    let (here, query) = ([0, 1, 2], "max_ttl=2s&ttl=2s");
    let first = clinch::connect(&of(here, query)).await.unwrap();
    drop(lock(&first, "first").await);
    let attempt =
        async |url: String| clinch::connect(&url).await.unwrap().mutex("job").unwrap().try_lock().await;
    for (which, more) in [([0, 1, 3], ""), (here, "&drift=25"), (here, "&prefix=p:"), (here, "&fencing=off")]
    {
        let error = attempt(of(which, &format!("{query}{more}")))
            .await
            .expect_err("nobody of this group has watched");
        assert!(chain(&error).contains("may have forgotten"), "{which:?} {more}: {}", chain(&error));
    }
    // Of its own group somebody has watched for long enough by now, or soon.
    let guard = eventually("the order of the servers tells nothing", async || {
        attempt(of([2, 0, 1], query)).await.ok().flatten()
    })
    .await;
    drop(guard);
}

#[tokio::test]
async fn what_is_no_voucher_is_overwritten() {
    let servers = Servers::forgetful(3);
    let url = servers.url("max_ttl=1s&ttl=1s");
    drop(clinch::connect(&url).await.unwrap());
    let key = "return redis.call('KEYS', 'clinch:~{voucher}:*')[1]";
    let keys: Vec<String> = servers.0.iter().map(|server| server.call(&["EVAL", key, "0"]).text()).collect();
    servers.0[0].call(&["SET", &keys[0], "something else"]);
    servers.0[1].call(&[&b"SET"[..], keys[1].as_bytes(), &[0xff, 0xfe]]);
    servers.0[2].call(&["DEL", &keys[2]]);
    servers.0[2].call(&["LPUSH", &keys[2], "x"]);
    drop(clinch::connect(&url).await.unwrap());
    for (server, key) in servers.0.iter().zip(&keys) {
        let begin = server.call(&["GETRANGE", key, "0", "8"]);
        assert_eq!(begin, Reply::Text("127.0.0.1".into()), "{key}");
        assert!(server.call(&["PTTL", key]).int() > 29 * 86_400_000);
    }
}
