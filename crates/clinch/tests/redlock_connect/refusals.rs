//! URLs and servers that make no quorum, and TTLs that it would not survive.

use ErrorKind::{Invalid, Refused, Unavailable};
use clinch_testkit::Proxy;

use super::*;

#[tokio::test]
async fn a_url_that_makes_no_quorum_says_what_to_change() {
    let [a, b, c] = hosts(&SERVERS).try_into().unwrap();
    for (url, words) in [
        (format!("redlock://{a}"), &["three servers or more", "redis://"][..]),
        (format!("redlock://{a},{b}"), &["3 to 15 servers", "here are 2"]),
        (format!("redlock://{a},{b},{a}"), &[&a, "stands twice", "one vote"]),
        (format!("redlock://{a},{b},ann:{SECRET}@{a}"), &[&a, "stands twice"]),
        (format!("redlock://{a},{b},:{SECRET}@{c}?max_tll=1s"), &["did you mean max_ttl=?"]),
        (format!("redlock://{a},{b},{c}?max_ttl=25h"), &["24h"]),
        (format!("redlock://{a},{b},{c}?max_ttl=3s&ttl=5s"), &["5s", "3s"]),
    ] {
        refused(&url, Invalid, words).await;
    }
}

/// As people write them: what should have been `%2F`, `%3F` or `%2C` ends the part of the URL in which secrets are expected.
#[tokio::test]
async fn a_password_that_should_have_been_escaped_is_not_shown() {
    let [a, b, c] = hosts(&SERVERS).try_into().unwrap();
    for login in [
        format!(":{SECRET}/x@"),
        format!(":x/{SECRET}@"),
        format!("ann:1?{SECRET}@"),
        format!("ann:{SECRET}?x@"),
        format!("ann:{SECRET},x@"),
        format!("ann:x,{SECRET}@"),
        format!("ann:{SECRET}%ff@"),
    ] {
        refused(&format!("redlock://{login}{a},{b},{c}"), Invalid, &[]).await;
        refused(&format!("redlock://{a},{b},{login}{c}"), Invalid, &[]).await;
    }
}

/// The URL cannot tell; the server's own id can.
#[tokio::test]
async fn one_server_under_two_names_has_one_vote() {
    let [a, b, _] = hosts(&SERVERS).try_into().unwrap();
    let alias = format!("localhost:{}", SERVERS[0].port());
    let url = format!("redlock://{a},{b},{alias}?{DURABLE}");
    refused(&url, Invalid, &[&a, &alias, "are one server", "independent"]).await;
}

#[tokio::test]
async fn each_server_has_a_user_and_a_password_of_its_own() {
    let with_password = voting().password(SECRET).start();
    let with_user = voting().acl_user("ann", &format!("on >{SECRET} ~* &* +@all")).start();
    let with_none = voting().start();
    let all = [&with_password, &with_user, &with_none];
    let [a, b, c] = all.map(|server| server.addr().to_string());
    let url = |login_a: &str, login_b: &str| format!("redlock://{login_a}{a},{login_b}{b},{c}?{DURABLE}");
    let (right_a, right_b) = (format!(":{SECRET}@"), format!("ann:{SECRET}@"));
    let locks = works_at(&url(&right_a, &right_b), all).await;
    assert!(!format!("{locks:?} {:?}", locks.mutex("job").unwrap()).contains(SECRET));
    for server in [&with_password, &with_user] {
        server.kill();
    }
    let error = locks.mutex("job").unwrap().try_lock().await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
    for server in [&with_password, &with_user] {
        server.restart();
    }

    // One that does not let us in is done without; two are a mistake in the URL.
    let words = "look at user and password in the URL";
    for (login_a, login_b) in
        [(format!(":x{SECRET}@"), &right_b), (String::new(), &right_b), (right_a, &format!("bob:{SECRET}@"))]
    {
        works_at(&url(&login_a, login_b), all).await;
    }
    refused(&url(&format!(":x{SECRET}@"), &format!("bob:{SECRET}@")), Refused, &[&a, &b, words]).await;
}

/// Who has just come must not need more servers than who has been there for long.
#[tokio::test]
async fn a_minority_that_refuses_is_done_without() {
    let mut servers: Vec<Redis> = (0..4).map(|_| voting().start()).collect();
    servers.push(voting().password(SECRET).start());
    let refuses = servers[4].addr().to_string();
    let locks = works(&url(&servers, DURABLE)).await;
    servers[0].kill();
    let locks_without_one = works(&url(&servers, DURABLE)).await;
    servers[1].kill();
    // It is told who is missing, also to whom the others are enough once they are back.
    let words = ["only 2 of 5", &*refuses, "NOAUTH", "Connection refused"];
    refused(&url(&servers, DURABLE), Unavailable, &words).await;
    for locks in [locks, locks_without_one] {
        let error = locks.mutex("job").unwrap().try_lock().await.unwrap_err();
        assert!(error.to_string().contains(&refuses) && error.to_string().contains("NOAUTH"), "{error}");
    }
    servers[1].restart();
    servers[0].restart();
    let locks = works(&url(&servers, DURABLE)).await;
    // It is let in once it lets us in.
    servers[4].client().call(&["AUTH", SECRET]);
    let mut admin = servers[4].client();
    admin.call(&["CONFIG", "SET", "requirepass", ""]);
    eventually("it votes", async || {
        let name = unique("votes");
        let guard = lock(&locks, &name).await;
        let votes = admin.call(&["EXISTS", &format!("clinch:{name}")]).int() == 1;
        release(guard).await;
        votes.then_some(())
    })
    .await;
}

#[tokio::test]
async fn one_of_three_that_is_out_of_reach_is_no_reason_to_fail() {
    let servers = three();
    servers[2].kill();
    works(&url(&servers, DURABLE)).await;
    servers[1].kill();
    let [_, b, c] = hosts(&servers).try_into().unwrap();
    let words = ["only 1 of 3 servers can be reached, 2 are needed", &b, &c, "Connection refused"];
    refused(&url(&servers, DURABLE), Unavailable, &words).await;
}

#[tokio::test]
async fn one_of_three_that_says_nothing_is_no_reason_to_fail() {
    let silent = [Proxy::start(SERVERS[1].addr()), Proxy::start(SERVERS[2].addr())];
    silent.iter().for_each(|proxy| proxy.black_hole(true));
    let [a, b, _] = hosts(&SERVERS).try_into().unwrap();
    let [c, d] = silent.each_ref().map(|proxy| proxy.addr().to_string());
    works_at(&format!("redlock://{a},{b},{d}?{DURABLE}"), &*SERVERS).await;
    // Whoever opens the connection and whoever looks after it give up after two seconds, both.
    let words = ["only 1 of 3", &c, &d, "did not answer"];
    refused(&format!("redlock://{a},{c},{d}?{DURABLE}"), Unavailable, &words).await;
}

#[tokio::test]
async fn each_server_is_encrypted_or_not() {
    let servers: Vec<Redis> = (0..3).map(|_| voting().tls().start()).collect();
    let [a, b, _] = hosts(&SERVERS).try_into().unwrap();
    let [x, y, z] = hosts(&servers).try_into().unwrap();
    let all_servers = || SERVERS.iter().chain(&servers);
    let ca = servers[0].certificates().ca();
    // Those of all three authorities.
    let all = ca.with_file_name("all.pem");
    let bundle: Vec<String> =
        servers.iter().map(|server| std::fs::read_to_string(server.certificates().ca()).unwrap()).collect();
    std::fs::write(&all, bundle.concat()).unwrap();
    let (ca, all) = (format!("ca={}", ca.display()), format!("ca={}", all.display()));

    works_at(&format!("redlock://{a},{b},{x}+tls?{DURABLE}&{ca}"), all_servers()).await;
    works_at(&format!("redlocks://{x},{y},{z}?{DURABLE}&{all}"), all_servers()).await;
    // A server that another authority vouches for is not the one that was meant.
    works_at(&format!("redlock://{a},{x}+tls,{y}+tls?{DURABLE}&{ca}"), all_servers()).await;
    let words = [&*y, &*z, "ca= names the authority", "redlock:// without +tls speaks"];
    refused(&format!("redlock://{x}+tls,{y}+tls,{z}+tls?{DURABLE}&{ca}"), Refused, &words).await;
    refused(&format!("redlock://{a},{b},{x}?{DURABLE}&{ca}"), Invalid, &["+tls"]).await;
    // Encrypted or not, as the server does not speak: two of three that do not answer.
    let words = ["only 1 of 3", &x, &y, "did not let us in"];
    refused(&format!("redlock://{a},{x},{y}?{DURABLE}"), Unavailable, &words).await;
    let words = ["only 1 of 3", &a, &b, "does it speak TLS?"];
    refused(&format!("redlock://{a}+tls,{b}+tls,{x}+tls?{DURABLE}&{ca}"), Unavailable, &words).await;
}

#[tokio::test]
async fn servers_that_would_lose_locks_are_refused_by_name() {
    let replica = voting().replica_of(&SERVERS[0]).start();
    let evicting = voting().arg("--maxmemory", "100mb").arg("--maxmemory-policy", "allkeys-lru").start();
    let forgetful = Redis::start();
    let hasty = voting().arg("--appendfsync", "everysec").start();
    let rewriting = voting().arg("--no-appendfsync-on-rewrite", "yes").start();
    let [a, b, _] = hosts(&SERVERS).try_into().unwrap();
    let refusals = [
        (&replica, &["this server is a replica"][..]),
        (&evicting, &["maxmemory-policy allkeys-lru", "eviction=allow"]),
        (&hasty, &["last second of its append-only file", "appendfsync always"]),
        (&rewriting, &["while it rewrites its append-only file", "no-appendfsync-on-rewrite no"]),
        (&forgetful, &["no append-only file", "appendfsync always", "durable=on"]),
    ];
    for (at, (server, words)) in refusals.iter().enumerate() {
        // One of three has no vote; with two, there is no quorum.
        let (address, next) = (server.addr().to_string(), refusals[(at + 1) % refusals.len()]);
        let second = next.0.addr().to_string();
        works_at(&format!("redlock://{a},{b},{address}?{DURABLE}"), &*SERVERS).await;
        assert!(!server.client().commandstats().contains_key("evalsha"), "{address} was asked for a vote");
        let words = [&[&*address, &*second], *words, next.1].concat();
        refused(&format!("redlock://{a},{address},{second}?{DURABLE}"), Refused, &words).await;
    }
    let others = [&evicting, &voting().start()];
    let [x, y] = others.map(|server| server.addr().to_string());
    works_at(&format!("redlock://{a},{x},{y}?{DURABLE}&eviction=allow"), SERVERS.iter().chain(others)).await;
}

#[tokio::test]
async fn a_ttl_that_is_too_long_is_refused_before_anything_is_sent() {
    let servers = three();
    let locks = connect(&url(&servers, "durable=on&max_ttl=30s")).await;
    assert_eq!(locks.lease_ttl(), Duration::from_secs(30));
    let guard = lock(&locks, "job").await;
    let detached = lock(&locks, "detached").await.detach().await.unwrap();
    let asked = || servers.iter().map(|server| server.client().commandstats()["evalsha"]).sum::<u64>();
    // The last answers to a grant are not waited for.
    let first = eventually("all servers have been asked", async || {
        servers
            .iter()
            .all(|server| server.call(&["EXISTS", "clinch:job", "clinch:detached"]).int() == 2)
            .then(asked)
    })
    .await;
    let long = Duration::from_secs(31);
    let refusals = [
        locks.clone().ttl(long).unwrap_err(),
        guard.extend(long).await.unwrap_err(),
        locks.renew_detached("detached", detached.claim, long).await.unwrap_err(),
    ];
    for error in refusals {
        assert_eq!(error.kind(), Invalid, "{error:?}");
        assert!(error.to_string().contains("between 100ms and 30s here; 31s is not"), "{error}");
    }
    assert_eq!(asked(), first, "something was sent");
    guard.extend(Duration::from_secs(29)).await.unwrap();
    release(guard).await;
}
