//! One holder, one who wants the lock, in both directions.

use std::time::{Duration, Instant};

use clinch::{ErrorKind, Released};
use clinch_testkit::{Redis, Reply};

use super::{
    Foreign, LONG, NAME, Worker, connect, lock_in_background, soon, until_waiting, value, wait_to_be_told,
    we_could_lock,
};

/// A poller would ask 20 times meanwhile.
const A_WHILE: Duration = Duration::from_secs(2);

/// Commands of ours while we wait for a foreign holder: the last by which we have begun to.
const ASKED: u64 = 1;

/// How far a lease may seem too short: the server counts whole milliseconds.
const ROUNDING: Duration = Duration::from_millis(5);

pub(crate) async fn what_they_hold_we_wait_for_without_asking(client: Foreign) {
    let server = Redis::start();
    let locks = connect(&server, "").await;
    let mut them = Worker::start(client, &server, NAME, LONG).await;
    assert_eq!(them.ask("try").await, "yes");

    assert!(!we_could_lock(&locks).await);
    let state = locks.state(NAME).await.unwrap().expect("a held lock has a state");
    let [holder] = &state.claims[..] else { panic!("one holder: {state:?}") };
    assert!(holder.granted && holder.owner.host == "another program", "{holder:?}");
    let error = locks.mutex(NAME).unwrap().lock().timeout(Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("another program"), "{error}");
    until_waiting(&server, 0).await;

    let wait = wait_to_be_told(&server).await;
    until_waiting(&server, 1).await;
    server.call(&["CONFIG", "RESETSTAT"]);
    tokio::time::sleep(A_WHILE).await;
    let asked = server.client().commandstats().get("evalsha").copied().unwrap_or(0);
    assert!(asked <= ASKED, "asked {asked} times while nothing changed");
    assert!(!wait.is_finished());

    assert_eq!(them.ask("release").await, "released");
    let ours = soon("their release wakes us", wait).await;
    assert_eq!(them.ask("try").await, "no");
    ours.release().await;
    assert_eq!(them.ask("try").await, "yes");
}

pub(crate) async fn what_they_hold_we_poll_for_without_push(client: Foreign) {
    let server = Redis::start();
    let locks = connect(&server, "&protocol=resp2").await;
    let mut them = Worker::start(client, &server, NAME, LONG).await;
    assert_eq!(them.ask("try").await, "yes");
    assert!(!we_could_lock(&locks).await);
    let wait = lock_in_background(&locks);
    until_waiting(&server, 1).await;
    tokio::time::sleep(A_WHILE / 4).await;
    assert!(!wait.is_finished());
    assert_eq!(them.ask("release").await, "released");
    let guard = soon("their release is found", wait).await;
    assert_eq!(them.ask("try").await, "no");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

pub(crate) async fn what_they_hold_when_they_die_comes_to_us(client: Foreign) {
    let server = Redis::start();
    for options in ["", "&protocol=resp2"] {
        let locks = connect(&server, options).await;
        let lease = Duration::from_millis(1500);
        let mut them = Worker::start(client, &server, NAME, lease).await;
        let since = Instant::now();
        assert_eq!(them.ask("try").await, "yes");
        let wait = lock_in_background(&locks);
        until_waiting(&server, 1).await;
        them.kill();
        let guard = soon("their lease ends", wait).await;
        assert!(since.elapsed() + ROUNDING >= lease, "granted while theirs lived");
        assert_eq!(guard.release().await.unwrap(), Released::Released);
    }
}

pub(crate) async fn their_renewals_grant_nothing_and_their_removal_wakes_us(client: Foreign) {
    let server = Redis::start();
    let lease = Duration::from_secs(2);
    let mut them = Worker::start(client, &server, NAME, lease).await;
    assert_eq!(them.ask("try").await, "yes");
    let theirs = value(&server);
    let locks = connect(&server, "").await;
    let wait = lock_in_background(&locks);
    until_waiting(&server, 1).await;
    for _ in 0..8 {
        tokio::time::sleep(lease / 5).await;
        assert_eq!(them.ask("extend").await, "extended");
        assert!(!wait.is_finished());
        assert_eq!(value(&server), theirs);
    }
    wait.abort();
    until_waiting(&server, 0).await;
    // Long enough for nobody to look at its end.
    assert_eq!(server.call(&["PEXPIRE", NAME, "600000"]), Reply::Int(1));
    let wait = wait_to_be_told(&server).await;
    assert_eq!(server.call(&["DEL", NAME]), Reply::Int(1));
    let ours = soon("the removal wakes us", wait).await;
    assert_eq!(them.ask("extend").await, "lost");
    assert_eq!(them.ask("release").await, "lost");
    ours.release().await;
}

pub(crate) async fn a_closed_lock_is_closed_to_them(client: Foreign) {
    let server = Redis::start();
    let locks = connect(&server, "").await;
    let mut them = Worker::start(client, &server, NAME, LONG).await;
    let linger = Duration::from_millis(1500);
    let guard = locks.mutex(NAME).unwrap().lock().await.unwrap();
    let since = Instant::now();
    assert_eq!(guard.release_closed(linger).await.unwrap(), Released::Released);
    assert_eq!(them.ask("try").await, "no");
    assert!(!we_could_lock(&locks).await);
    assert_eq!(them.ask("lock").await, "locked");
    assert!(since.elapsed() + ROUNDING >= linger, "they came in while it was closed");
    assert!(!we_could_lock(&locks).await);
    assert_eq!(them.ask("release").await, "released");
    assert!(we_could_lock(&locks).await);
}
