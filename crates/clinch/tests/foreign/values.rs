//! What foreign clients write into the key, and who is told when they leave: one server, no foreign client needed.

use std::time::Duration;

use clinch::Released;
use clinch_testkit::{Redis, Reply};

use super::{NAME, connect, lock_in_background, soon, until_waiting, wait_to_be_told, we_could_lock};

/// Far away.
const LEASE_MS: &str = "600000";

/// Takes the lock as a foreign client does.
fn set(server: &Redis, value: &[u8]) -> bool {
    server.call(&[b"SET", NAME.as_bytes(), value, b"NX", b"PX", LEASE_MS.as_bytes()]) != Reply::Nil
}

/// Any value is a lock: what stands in the key is the business of whoever put it there.
async fn excludes_us(value: &[u8]) {
    let server = Redis::start();
    let locks = connect(&server, "").await;
    assert!(set(&server, value));
    assert!(!we_could_lock(&locks).await, "the lock was taken from its holder");
    assert!(locks.rwlock(NAME).unwrap().try_read().await.unwrap().is_none());
    assert!(locks.semaphore(NAME, 2).unwrap().try_acquire(1).await.unwrap().is_none());
    let state = locks.state(NAME).await.unwrap().expect("a held lock has a state");
    assert_eq!(state.claims[0].owner.host, "another program");
    let wait = wait_to_be_told(&server).await;
    until_waiting(&server, 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!wait.is_finished());
    assert_eq!(server.call(&["STRLEN", NAME]), Reply::Int(value.len() as i64));
    assert_eq!(server.call(&["DEL", NAME]), Reply::Int(1));
    let ours = soon("their release wakes us", wait).await;
    assert!(!set(&server, value));
    ours.release().await;
}

#[tokio::test]
async fn a_number_excludes_us() {
    excludes_us(b"1").await;
}

#[tokio::test]
async fn a_long_value_excludes_us() {
    excludes_us(&[b'x'; 100_000]).await;
}

#[tokio::test]
async fn bytes_that_are_no_text_exclude_us() {
    excludes_us(&[0xff, 0, 0x80, b' ', 0xfe]).await;
}

#[tokio::test]
async fn an_empty_value_excludes_us() {
    excludes_us(b"").await;
}

#[tokio::test]
async fn a_value_that_looks_like_a_marker_of_ours_excludes_us() {
    excludes_us(b"clinch deploy on web-3").await;
}

#[tokio::test]
async fn a_lock_without_a_lease_excludes_us() {
    let server = Redis::start();
    let locks = connect(&server, "").await;
    server.call(&["SET", NAME, "as redis-py does by default", "NX"]);
    assert!(!we_could_lock(&locks).await);
    let state = locks.state(NAME).await.unwrap().expect("a held lock has a state");
    assert_eq!(state.claims[0].expires_in, None);
    let wait = wait_to_be_told(&server).await;
    until_waiting(&server, 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!wait.is_finished());
    assert_eq!(server.call(&["DEL", NAME]), Reply::Int(1));
    soon("their release wakes us", wait).await.release().await;
}

/// The server tells of that in another way than of one key.
#[tokio::test]
async fn a_flush_of_the_database_wakes_us() {
    let server = Redis::start();
    assert!(set(&server, b"theirs"));
    let wait = wait_to_be_told(&server).await;
    until_waiting(&server, 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!wait.is_finished());
    server.call(&["FLUSHDB"]);
    let ours = soon("the flush wakes us", wait).await;
    assert!(!set(&server, b"theirs"));
    ours.release().await;
}

#[tokio::test]
async fn the_lean_mode_excludes_and_is_excluded() {
    let server = Redis::start();
    let locks = connect(&server, "&lean=on").await;
    assert!(set(&server, b"theirs"));
    assert!(!we_could_lock(&locks).await);
    let state = locks.state(NAME).await.unwrap().expect("a held lock has a state");
    assert_eq!(state.claims[0].owner.host, "another program");
    let wait = lock_in_background(&locks);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!wait.is_finished());
    assert_eq!(server.call(&["DEL", NAME]), Reply::Int(1));
    let guard = soon("their release is found", wait).await;
    assert!(!set(&server, b"theirs"));
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    assert!(set(&server, b"theirs"));
}

/// The first in line watches the key. When it gives up, the next one must.
#[tokio::test]
async fn the_next_in_line_hears_of_their_release_when_the_first_has_given_up() {
    let server = Redis::start();
    assert!(set(&server, b"theirs"));
    let first = lock_in_background(&connect(&server, "").await);
    until_waiting(&server, 1).await;
    let next = wait_to_be_told(&server).await;
    until_waiting(&server, 2).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    first.abort();
    until_waiting(&server, 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(server.call(&["DEL", NAME]), Reply::Int(1));
    soon("their release wakes the next", next).await.release().await;
}
