//! Moving a slot, and losing a master.

#![allow(clippy::unwrap_used, reason = "test code")]

use clinch_testkit::{Cluster, Reply};

#[test]
fn a_slot_moves_with_its_keys() {
    let cluster = Cluster::start();
    assert_eq!(cluster.nodes().len(), 6);
    assert!(cluster.url().starts_with("redis+cluster://127.0.0.1:"), "{}", cluster.url());
    for key in ["a", "{tag}b", "c{", "{}d"] {
        let slot = i64::from(cluster.slot_of(key));
        assert_eq!(cluster.nodes()[0].call(&["CLUSTER", "KEYSLOT", key]).int(), slot);
    }

    let from = cluster.master_of("{tag}a");
    let to = cluster.masters().into_iter().find(|master| master.port() != from.port()).unwrap();
    let slot = cluster.slot_of("{tag}a");
    for key in ["{tag}a", "{tag}b"] {
        from.call(&["SET", key, "1"]);
    }
    let migration = cluster.begin_migration(slot, to);
    migration.move_key("{tag}a");
    let error = from.client().try_call(&["GET", "{tag}a"]).unwrap();
    assert_eq!(error, Reply::Error(format!("ASK {slot} 127.0.0.1:{}", to.port())));
    let error = from.client().try_call(&["MGET", "{tag}a", "{tag}b"]).unwrap();
    assert!(matches!(error, Reply::Error(error) if error.starts_with("TRYAGAIN")));
    assert_eq!(from.call(&["GET", "{tag}b"]).int(), 1);
    migration.move_keys();
    let error = from.client().try_call(&["GET", "{tag}b"]).unwrap();
    assert_eq!(error, Reply::Error(format!("ASK {slot} 127.0.0.1:{}", to.port())));
    migration.finish();
    assert_eq!(cluster.master_of("{tag}a").port(), to.port());
    let error = from.client().try_call(&["GET", "{tag}a"]).unwrap();
    assert_eq!(error, Reply::Error(format!("MOVED {slot} 127.0.0.1:{}", to.port())));
    assert_eq!(to.call(&["GET", "{tag}b"]).int(), 1);
    cluster.migrate_slot(slot, from);
    assert_eq!(cluster.master_of("{tag}a").port(), from.port());
    cluster.wait_until_ready();
}

#[test]
fn a_killed_master_is_replaced_by_its_replica() {
    let cluster = Cluster::start();
    let (slot, old, replica) = (cluster.slot_of("a"), cluster.master_of("a"), cluster.replica_of("a"));
    old.kill();
    let new = cluster.wait_for_new_owner(slot, old.port());
    assert_eq!(new.port(), replica.port());
    new.call(&["SET", "a", "1"]);
    old.restart();
    cluster.wait_until_ready();
    assert_eq!(cluster.replica_of("a").port(), old.port());
}
