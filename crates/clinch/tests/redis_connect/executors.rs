//! Any executor, none, and one that has ended.

use super::*;

#[test]
fn everything_works_without_a_runtime() {
    let redis = Redis::start();
    contend_without_a_runtime(&redis.url());
    contend_without_a_runtime(&format!("{}?lean=on", redis.url()));
}

#[test]
fn grants_are_confirmed_without_a_runtime() {
    let master = Redis::start();
    let _replica = Redis::builder().replica_of(&master).start();
    clinch_testkit::until("the replica follows", || master.call(&["WAIT", "1", "100"]).int() == 1);
    contend_without_a_runtime(&format!("{}?wait_replicas=1", master.url()));
}

#[test]
fn everything_works_where_the_runtime_is_gone() {
    contend_where_the_runtime_is_gone(&Redis::start().url());
}
