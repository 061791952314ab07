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

/// Its commands are written by their callers, and nobody reads the answers.
#[test]
fn a_connection_of_a_runtime_that_stands_still_is_left() {
    let redis = Redis::start();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (still, driven) = (runtime(), runtime());
    let locks = still.block_on(async {
        let locks = connect(&redis.url()).await;
        release(lock(&locks, "before").await).await;
        locks
    });
    let (tell, told) = std::sync::mpsc::channel();
    // Not joined: one that hangs is told.
    std::thread::spawn(move || {
        driven.block_on(async {
            let _entered = still.enter();
            release(lock(&locks, "after").await).await;
        });
        let _ = tell.send(());
    });
    told.recv_timeout(PATIENCE).expect("it hangs");
}
