//! A failover, asked for and forced.

#![allow(clippy::unwrap_used, reason = "test code")]

use clinch_testkit::{Redis, Sentinel, until};

#[test]
fn fails_over_when_asked_and_when_the_master_dies() {
    let group = Sentinel::start();
    assert!(group.url().starts_with("redis+sentinel://127.0.0.1:"), "{}", group.url());
    assert!(group.url().ends_with("/clinch"), "{}", group.url());
    let first = group.master();
    assert_eq!(group.replicas().len(), 2);
    // Replication is asynchronous, and WAIT speaks of what its own connection wrote.
    let mut writer = first.client();
    writer.call(&["SET", "a", "1"]);
    until("the replicas have it", || writer.call(&["WAIT", "2", "1000"]).int() == 2);

    let second = group.failover();
    assert_ne!(second.port(), first.port());
    assert_eq!(second.call(&["GET", "a"]).int(), 1);
    group.wait_until_ready();
    assert_eq!(first.client().info("replication")["role"], "slave");

    let old = group.kill_master();
    assert_eq!(old, second.port());
    let third = group.wait_for_new_master(old);
    assert_eq!(group.master().port(), third.port());
    group.wait_until_ready();
    second.restart();
    until("the old master follows the new one", || is_replica(second));
    group.wait_until_ready();
}

#[test]
fn a_paused_master_is_replaced_and_comes_back_as_a_replica() {
    let group = Sentinel::start();
    let old = group.pause_master();
    let new = group.wait_for_new_master(old.port());
    assert_ne!(new.port(), old.port());
    old.resume();
    // It takes itself for the master until a sentinel tells it otherwise.
    until("the old master follows", || is_replica(old));
}

/// A sentinel that gives a server another role resets its connections, this one with them.
fn is_replica(server: &Redis) -> bool {
    server.field("replication", "role").is_some_and(|role| role == "slave")
}
