//! Stores whose leases outlive a process: what the command leaves there when it ends.

mod common;

use clinch_testkit::{Etcd, Redis};
use common::{World, eventually};

/// Whoever gave up waiting stands in the way of others, or gets the lock after its end.
fn who_gave_up_leaves_the_queue(world: &World) {
    let holder = world.start(["run", "--ttl", "60s", "x", "sleep", "60"]);
    eventually("the lock is held", || world.held("x"));
    for verb in [
        &["run", "-w", "300ms", "--ttl", "60s", "x", "true"][..],
        &["acquire", "-w", "300ms", "--ttl", "60s", "x"],
    ] {
        assert_eq!(world.code(verb.iter().copied()), 75, "{verb:?}");
        assert_eq!(world.claims("x", "waiting").len(), 0, "{verb:?}");
    }
    drop(holder);
}

#[test]
fn who_gave_up_leaves_the_queue_on_redis() {
    let redis = Redis::start();
    who_gave_up_leaves_the_queue(&World::on(redis.url()));
}

#[test]
fn who_gave_up_leaves_the_queue_on_etcd() {
    let etcd = Etcd::start();
    who_gave_up_leaves_the_queue(&World::on(etcd.url()));
}

/// A server that is down when a command starts, or has no connection left, is not waited for.
#[test]
fn a_server_that_comes_late_is_waited_for() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    redis.kill();
    assert_eq!(world.code(["run", "-w", "300ms", "x", "true"]), 69);
    let mut run = world.start(["run", "-w", "60s", "x", "touch", "ran"]);
    redis.restart();
    eventually("the job runs", || world.path("ran").exists());
    assert_eq!(run.code(), 0);
}
