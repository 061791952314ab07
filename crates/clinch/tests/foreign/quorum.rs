//! Foreign clients of the same servers that vote: what they hold we wait for, and are told when it comes free.

use std::pin::pin;
use std::time::{Duration, Instant};

use clinch::{ErrorKind, Released};
use clinch_testkit::{Redis, Reply};

use super::{
    Foreign, LONG, NAME, PATIENCE, Worker, connect_to, lock_in_background, soon, start, values,
    we_could_lock, within,
};

/// A poller would ask 20 times meanwhile.
const A_WHILE: Duration = Duration::from_secs(2);

/// Scripts of ours on each server while we wait for a foreign holder: a claim, what withdraws it where its answer was slow, and
/// once more where the servers were slow to say that they watch.
const ASKED: u64 = 3;

/// How far a lease may seem too short: the servers count whole milliseconds.
const ROUNDING: Duration = Duration::from_millis(5);

pub(crate) async fn what_they_hold_we_wait_for_without_asking(client: Foreign) {
    let servers = start();
    let locks = connect_to(&servers, "").await;
    let mut them = Worker::polling(client, &servers, NAME, LONG, None).await;
    assert_eq!(them.ask("try").await, "yes");

    assert!(!we_could_lock(&locks).await);
    let state = locks.state(NAME).await.unwrap().expect("a held lock has a state");
    let [holder] = &state.claims[..] else { panic!("one holder: {state:?}") };
    assert!(holder.granted && holder.owner.host == "another program", "{holder:?}");
    let error = locks.mutex(NAME).unwrap().lock().timeout(Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("held by another program"), "{error}");

    reset_counts(&servers);
    let wait = lock_in_background(&locks);
    until_watched(&servers).await;
    tokio::time::sleep(A_WHILE).await;
    for server in &servers {
        let asked = count(server, "evalsha");
        assert!(asked <= ASKED, "asked {asked} times while nothing changed");
    }
    assert!(!wait.is_finished());

    assert_eq!(them.ask("release").await, "released");
    let guard = soon("their release wakes us", wait).await;
    assert_eq!(them.ask("try").await, "no");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    assert_eq!(them.ask("try").await, "yes");
}

pub(crate) async fn what_they_hold_we_poll_for_without_push(client: Foreign) {
    let servers = start();
    let locks = connect_to(&servers, "&protocol=resp2").await;
    let mut them = Worker::polling(client, &servers, NAME, LONG, None).await;
    assert_eq!(them.ask("try").await, "yes");
    assert!(!we_could_lock(&locks).await);
    reset_counts(&servers);
    let wait = lock_in_background(&locks);
    until_counted(&servers, "evalsha", 3).await;
    assert!(!wait.is_finished());
    assert_eq!(them.ask("release").await, "released");
    let guard = soon("their release is found", wait).await;
    assert_eq!(them.ask("try").await, "no");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

pub(crate) async fn what_they_hold_when_they_die_comes_to_us(client: Foreign) {
    let servers = start();
    for options in ["", "&protocol=resp2"] {
        let locks = connect_to(&servers, options).await;
        let lease = Duration::from_millis(1500);
        let mut them = Worker::polling(client, &servers, NAME, lease, None).await;
        let since = Instant::now();
        assert_eq!(them.ask("try").await, "yes");
        reset_counts(&servers);
        let wait = lock_in_background(&locks);
        until_counted(&servers, "evalsha", 1).await;
        them.kill();
        let guard = soon("their lease ends", wait).await;
        assert!(since.elapsed() + ROUNDING >= lease, "granted while theirs lived");
        assert_eq!(guard.release().await.unwrap(), Released::Released);
    }
}

pub(crate) async fn their_renewals_grant_nothing_and_their_removal_wakes_us(client: Foreign) {
    let servers = start();
    let locks = connect_to(&servers, "").await;
    let lease = Duration::from_secs(4);
    let mut them = Worker::polling(client, &servers, NAME, lease, None).await;
    assert_eq!(them.ask("try").await, "yes");
    let theirs = values(&servers);
    reset_counts(&servers);
    let wait = lock_in_background(&locks);
    let mut watched = pin!(until_watched(&servers));
    let (mut renewals, mut is_watched) = (0, false);
    // As often as is longer than the lease, and until all servers would tell us.
    while renewals < 8 || !is_watched {
        tokio::select! {
            () = &mut watched, if !is_watched => is_watched = true,
            () = tokio::time::sleep(lease / 5) => {
                assert_eq!(them.ask("extend").await, "extended");
                renewals += 1;
            }
        }
        assert!(!wait.is_finished());
        assert_eq!(values(&servers), theirs);
    }
    for server in &servers {
        assert_eq!(server.call(&["DEL", NAME]), Reply::Int(1));
    }
    let guard = soon("the removal wakes us", wait).await;
    assert_eq!(them.ask("extend").await, "lost");
    assert_eq!(them.ask("release").await, "lost");
    guard.verify().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

/// Who locks one server only has one vote: that keeps nobody out, and the votes of two such do not add up.
pub(crate) async fn a_client_of_one_server_keeps_nobody_out(client: Foreign) {
    let servers = start();
    let locks = connect_to(&servers, "").await;
    let mut them = Worker::start(client, &servers[0], NAME, LONG).await;
    assert_eq!(them.ask("try").await, "yes");
    let theirs = servers[0].call(&["GET", NAME]);
    let guard = soon("two of three votes are free", lock_in_background(&locks)).await;
    guard.verify().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    assert_eq!(servers[0].call(&["GET", NAME]), theirs, "it was left alone");

    let mut others = Worker::start(client, &servers[1], NAME, LONG).await;
    assert_eq!(others.ask("try").await, "yes");
    let refused = locks.mutex(NAME).unwrap().try_lock().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "one vote of three, and nobody has more: {refused:?}");
    assert!(locks.state(NAME).await.unwrap().is_none(), "nobody has a quorum");
    let wait = lock_in_background(&locks);
    assert_eq!(others.ask("release").await, "released");
    let guard = soon("a second vote is free", wait).await;
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    assert_eq!(them.ask("release").await, "released");
}

fn reset_counts(servers: &[Redis]) {
    for server in servers {
        server.call(&["CONFIG", "RESETSTAT"]);
    }
}

fn count(server: &Redis, command: &str) -> u64 {
    server.client().commandstats().get(command).copied().unwrap_or(0)
}

/// Waits until each server has got so many of these commands since the counts were reset.
async fn until_counted(servers: &[Redis], command: &str, times: u64) {
    let look = async {
        while servers.iter().any(|server| count(server, command) < times) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(PATIENCE, &format!("{times} of {command}"), look).await;
}

/// Waits until all servers are to tell of the next change of the key.
async fn until_watched(servers: &[Redis]) {
    until_counted(servers, "client|caching", 1).await;
    until_counted(servers, "pttl", 1).await;
}
