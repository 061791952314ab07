//! `etcd://`: every form of URL, every refusal, and users that may do less.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::task::{Context, Poll};
use std::time::Duration;

use clinch::{Env, Error, ErrorKind, Lane, Locks, Released, Verdict};
use clinch_testkit::{Etcd, EtcdBuilder, EtcdCluster, Port, Proxy, etcd_3_5};

mod common;

use common::{PATIENCE, eventually, lock, release};

/// A password that must not show anywhere.
const SECRET: &str = "hunter2";

/// A server with users, for all tests that leave it alone: `locker` may do what the documentation says that locks need,
/// `nobody` nothing.
static SERVER: LazyLock<Etcd> = LazyLock::new(|| with_users(Etcd::builder().root_password(SECRET).start()));

/// A server that speaks TLS to clients that show a certificate.
static ENCRYPTED: LazyLock<Etcd> = LazyLock::new(|| Etcd::builder().tls().client_auth().start());

fn with_users(etcd: Etcd) -> Etcd {
    etcd.ctl(&["role", "add", "locks"]);
    etcd.ctl(&["role", "grant-permission", "locks", "--prefix=true", "readwrite", "/clinch/"]);
    for user in ["locker", "nobody"] {
        etcd.ctl(&["user", "add", &format!("{user}:{SECRET}")]);
    }
    etcd.ctl(&["user", "grant-role", "locker", "locks"]);
    etcd
}

async fn connect(url: &str) -> Locks {
    clinch::connect(url).await.unwrap()
}

async fn refusal(url: &str) -> Error {
    let error = clinch::connect(url).await.expect_err("connected");
    assert!(!format!("{error} {error:?}").contains(SECRET), "the password shows: {error:?}");
    error
}

#[tokio::test]
async fn wrong_passwords_and_missing_ones_are_named() {
    let wrong = refusal(&SERVER.url_as("locker", "wrong")).await;
    assert_eq!(wrong.kind(), ErrorKind::Refused, "{wrong:?}");
    assert!(wrong.to_string().contains("password"), "{wrong}");
    let missing = refusal(&format!("etcd://{}", SERVER.addr())).await;
    assert_eq!(missing.kind(), ErrorKind::Refused, "{missing:?}");
    assert!(missing.to_string().contains("user"), "{missing}");
    let halves = refusal(&format!("etcd://locker@{}", SERVER.addr())).await;
    assert_eq!(halves.kind(), ErrorKind::Invalid, "{halves:?}");
    let locks = connect(&SERVER.url_as("locker", SECRET)).await;
    assert!(!format!("{locks:?}").contains(SECRET));
}

#[tokio::test]
async fn a_user_without_the_role_is_refused_at_once() {
    for url in
        [SERVER.url_as("nobody", SECRET), format!("{}?prefix=/other/", SERVER.url_as("locker", SECRET))]
    {
        let error = refusal(&url).await;
        assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
        assert!(error.to_string().contains("readwrite"), "does not say what to do: {error}");
    }
}

/// All that this crate does with locks works with the role that the documentation names.
async fn does_everything(url: &str) {
    let (near, far) = (connect(url).await, connect(url).await);
    let guard = lock(&near, "job").await;
    guard.verify().await.unwrap();
    guard.extend(Duration::from_secs(45)).await.unwrap();
    let waiter = tokio::spawn({
        let far = far.clone();
        async move { lock(&far, "job").await }
    });
    let queued = async || (near.state("job").await.unwrap().unwrap().claims.len() == 2).then_some(());
    eventually("it queues", queued).await;
    assert!(far.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    assert_eq!(guard.release_closed(Duration::from_millis(200)).await.unwrap(), Released::Released);
    release(waiter.await.unwrap()).await;
    let writer = near.rwlock("index").unwrap().write().await.unwrap();
    release(writer.downgrade().await.unwrap()).await;
    release(near.semaphore("gpu", 3).unwrap().acquire(2).unwrap().await.unwrap()).await;
    release(lock(&near.clone().isolated(), "apart").await).await;
    let kept = lock(&near, "kept").await.detach().await.unwrap();
    far.renew_detached("kept", kept.claim, Duration::from_secs(60)).await.unwrap();
    assert_eq!(far.list("ke").await.unwrap().len(), 1);
    assert_eq!(far.release_detached("kept", kept.claim).await.unwrap(), Released::Released);
    let evicted = lock(&near, "evicted").await;
    far.evict("evicted", evicted.claim_id()).await.unwrap();
    tokio::time::timeout(PATIENCE, evicted.lost()).await.expect("an evicted holder is told");
}

#[tokio::test]
async fn the_least_role_is_enough() {
    does_everything(&SERVER.url_as("locker", SECRET)).await;
}

#[tokio::test]
async fn the_least_role_is_enough_for_version_3_5() {
    let etcd = with_users(Etcd::builder().binary(etcd_3_5()).root_password(SECRET).start());
    does_everything(&etcd.url_as("locker", SECRET)).await;
}

#[tokio::test]
async fn a_login_that_the_server_forgot_is_made_again() {
    let etcd = with_users(Etcd::builder().root_password(SECRET).start());
    let locks = connect(&etcd.url_as("locker", SECRET)).await.ttl(Duration::from_secs(20)).unwrap();
    let guard = lock(&locks, "job").await;
    // Its tokens are in memory.
    etcd.restart();
    let first = guard.deadline().unwrap();
    eventually("it answers again", async || guard.verify().await.ok()).await;
    let renewed = async || (!guard.is_held() || guard.deadline().unwrap() > first).then_some(());
    eventually("the lease is renewed", renewed).await;
    assert!(guard.is_held());
    // A change of users makes every token of before an old one.
    etcd.ctl(&["user", "add", &format!("another:{SECRET}")]);
    guard.verify().await.unwrap();
    release(guard).await;
    release(lock(&locks, "job").await).await;
}

/// Whoever is in the midst of a login and is not polled keeps nobody else from it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_that_is_not_polled_stops_nobody() {
    let etcd = with_users(Etcd::builder().root_password(SECRET).arg("--auth-token-ttl", "1").start());
    // Nothing of it is watched, so that nobody else logs in.
    let locks = connect(&etcd.url_as("locker", SECRET)).await;
    // The server looks once a second for logins that ran out.
    let ran_out = tokio::time::Instant::now() + Duration::from_secs(4);
    eventually("the login runs out", async || (tokio::time::Instant::now() > ran_out).then_some(())).await;
    let (logins, reads) = (etcd.handled("Authenticate"), || etcd.handled("Range"));
    let mut first = Box::pin(locks.state("first"));
    // One request at a time is on its way, and it is polled again only when that was not the login.
    while etcd.handled("Authenticate") == logins {
        let before = reads();
        let once = |context: &mut Context<'_>| Poll::Ready(first.as_mut().poll(context));
        let answer = std::future::poll_fn(once).await;
        assert!(answer.is_pending(), "it was answered without a login: {answer:?}");
        let handled = async || (etcd.handled("Authenticate") > logins || reads() > before).then_some(());
        eventually("the request is handled", handled).await;
    }
    let second = tokio::time::timeout(PATIENCE, locks.state("second")).await;
    assert!(second.expect("nobody else can log in").unwrap().is_none());
    assert!(first.await.unwrap().is_none());
}

/// A login that ran out is refused to the stream of watches as if the user were not allowed to watch.
#[tokio::test]
async fn a_login_that_ran_out_stops_no_waiter() {
    let etcd = with_users(Etcd::builder().root_password(SECRET).arg("--auth-token-ttl", "1").start());
    let url = etcd.url_as("locker", SECRET);
    let (near, far) = (connect(&url).await, connect(&url).await);
    for _ in 0..3 {
        let guard = lock(&near, "job").await;
        release(lock(&far, "other").await).await;
        // The server looks once a second for logins that ran out.
        let ran_out = tokio::time::Instant::now() + Duration::from_secs(3);
        eventually("the login runs out", async || (tokio::time::Instant::now() > ran_out).then_some(()))
            .await;
        let far = far.clone();
        let waiter = tokio::spawn(async move { lock(&far, "job").await });
        let queued = async || (near.state("job").await.unwrap().unwrap().claims.len() == 2).then_some(());
        eventually("it queues", queued).await;
        let watched = async || (etcd.metric("etcd_debugging_mvcc_watcher_total") >= 3.0).then_some(());
        // The sessions' keys and the predecessor.
        eventually("the waiter watches", watched).await;
        release(guard).await;
        release(tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap()).await;
    }
}

#[tokio::test]
async fn tls_is_spoken_and_nobody_is_trusted_blindly() {
    let tls = ENCRYPTED.certificates();
    let [ca, cert, key] =
        [tls.ca(), tls.client_cert(), tls.client_key()].map(|path| path.display().to_string());
    let addr = ENCRYPTED.addr();
    let locks = connect(&format!("etcds://{addr}?ca={ca}&cert={cert}&key={key}")).await;
    release(lock(&locks, "job").await).await;
    let stranger = refusal(&format!("etcds://{addr}?cert={cert}&key={key}")).await;
    assert_eq!(stranger.kind(), ErrorKind::Refused, "{stranger:?}");
    assert!(stranger.to_string().contains("ca="), "does not say what to do: {stranger}");
    // The server sends it away without a word.
    let nobody = refusal(&format!("etcds://{addr}?ca={ca}")).await;
    assert!(matches!(nobody.kind(), ErrorKind::Unknown | ErrorKind::Unavailable), "{nobody:?}");
    refusal(&format!("etcd://{addr}")).await;
    let plain = Etcd::start();
    refusal(&format!("etcds://{}?ca={ca}", plain.addr())).await;
}

#[tokio::test]
async fn a_server_that_is_away_is_named_and_another_taken() {
    let (away, etcd) = (Port::free(), Etcd::start());
    let error = refusal(&format!("etcd://{}", away.addr())).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains(&away.addr().to_string()), "{error}");
    for _ in 0..4 {
        let locks = connect(&format!("etcd://{},{}", away.addr(), etcd.addr())).await;
        release(lock(&locks, "job").await).await;
    }
}

#[tokio::test]
async fn a_cluster_without_a_majority_says_so() {
    let cluster = EtcdCluster::start();
    let locks = connect(&cluster.url()).await;
    let guard = lock(&locks, "job").await;
    cluster.members().iter().skip(1).for_each(Etcd::kill);
    let named = async || {
        let error = locks.mutex("other").unwrap().try_lock().await.err()?;
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{error:?}");
        error.to_string().contains("no leader").then_some(error)
    };
    let error = eventually("that there is no leader", named).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("too few members"), "does not say why: {error}");
    assert!(guard.is_held(), "its lease has not run out");
}

#[tokio::test]
async fn a_full_server_takes_no_new_lock_but_keeps_and_hands_over_those_it_has() {
    is_full(Etcd::builder()).await;
}

/// This version refuses even transactions that only read.
#[tokio::test]
async fn a_full_server_of_version_3_5_keeps_and_hands_over_those_locks_it_has() {
    is_full(Etcd::builder().binary(etcd_3_5())).await;
}

async fn is_full(builder: EtcdBuilder) {
    let etcd = builder.arg("--quota-backend-bytes", "200000").start();
    let (near, far) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    let near = near.ttl(Duration::from_secs(9)).unwrap();
    let guard = lock(&near, "job").await;
    let waiter = tokio::spawn({
        let far = far.clone();
        async move { lock(&far, "job").await }
    });
    let queued = async || (near.state("job").await.unwrap().unwrap().claims.len() == 2).then_some(());
    eventually("it queues", queued).await;
    let filled = async || etcd.try_ctl(&["put", "ballast", &"x".repeat(20_000)]).is_err().then_some(());
    eventually("the server is full", filled).await;
    for error in [
        near.mutex("other").unwrap().try_lock().await.unwrap_err(),
        near.mutex("other").unwrap().lock().timeout(PATIENCE).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error:?}");
        assert!(error.to_string().contains("alarm disarm"), "does not say what to do: {error}");
    }
    // Who only looks, renews or releases still can.
    assert_eq!(connect(&etcd.url()).await.list("").await.unwrap().len(), 1);
    let first = guard.deadline().unwrap();
    let renewals = etcd.handled("LeaseKeepAlive");
    let renewed = async || {
        let deadline = guard.deadline().filter(|_| guard.is_held()).expect("the lease is held");
        (deadline > first && etcd.handled("LeaseKeepAlive") >= renewals + 6).then_some(())
    };
    eventually("the lease is renewed, the keys were read", renewed).await;
    release(guard).await;
    let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
    // It could not move to a lease of its TTL, so the short one is renewed.
    let first = guard.deadline().unwrap();
    let renewed = async || (guard.deadline().filter(|_| guard.is_held())? > first).then_some(());
    eventually("the next lease is renewed", renewed).await;
    release(guard).await;
}

/// One of the members that the URL names accepts connections and never answers. Which one is dialled first is chance.
#[tokio::test]
async fn a_member_that_hangs_keeps_nobody_from_connecting() {
    let etcd = Etcd::start();
    let hung = Proxy::start(etcd.addr());
    hung.black_hole(true);
    for _ in 0..6 {
        let locks = connect(&format!("etcd://{},{}", hung.addr(), etcd.addr())).await;
        release(lock(&locks, "job").await).await;
    }
}

/// A password that nobody asks for is offered once, and again when users are turned on.
#[tokio::test]
async fn a_server_without_users_is_asked_once_for_a_login() {
    let etcd = Etcd::start();
    let locks = connect(&etcd.url_as("root", SECRET)).await;
    for _ in 0..5 {
        release(lock(&locks, "job").await).await;
    }
    assert_eq!(etcd.handled("Authenticate"), 1);
    etcd.ctl(&["user", "add", &format!("root:{SECRET}")]);
    etcd.ctl(&["user", "grant-role", "root", "root"]);
    etcd.ctl(&["auth", "enable"]);
    release(lock(&locks, "job").await).await;
}

#[tokio::test]
async fn a_request_that_is_too_large_for_the_server_is_named() {
    let etcd = Etcd::builder().arg("--max-request-bytes", "2000").start();
    let locks = connect(&etcd.url()).await;
    release(lock(&locks, "small").await).await;
    let error = locks.mutex(&"/".repeat(512)).unwrap().lock().timeout(PATIENCE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    assert!(error.to_string().contains("--max-request-bytes"), "does not say what to do: {error}");
}

/// etcd's own proxy gives watches other numbers than we ask for, so that the news of one lock would end the lease of another.
#[tokio::test]
async fn a_proxy_that_renumbers_watches_is_refused_and_ends_no_lease() {
    let (etcd, port) = (Etcd::start(), Port::free());
    let listens = port.addr().to_string();
    let mut proxy = Proxied(
        Command::new("etcd")
            .args(["grpc-proxy", "start", "--endpoints", &etcd.addr().to_string(), "--listen-addr", &listens])
            .current_dir(etcd.dir())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let locks = eventually("the proxy is there", async || {
        assert!(proxy.0.try_wait().unwrap().is_none(), "it has ended");
        clinch::connect(&format!("etcd://{listens}")).await.ok()
    })
    .await;
    let guard = lock(&locks, "job").await;
    for _ in 0..2 {
        let refused = locks.mutex("job").unwrap().lock().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused:?}");
        assert!(refused.to_string().contains("grpc-proxy"), "{refused}");
    }
    let checks = Locks::examine(&format!("etcd://{listens}"), Env::host(Lane::thread())).await.unwrap();
    let check = checks.into_iter().find(|check| check.what == "watch").unwrap();
    assert_eq!(check.verdict, Verdict::Fail, "{check:?}");
    release(guard).await;
}

struct Proxied(Child);

impl Drop for Proxied {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
