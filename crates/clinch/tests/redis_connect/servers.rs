//! Servers of several makes, protocols that can do less, and copies that cannot be had.

use super::*;

#[tokio::test]
async fn valkey_can_do_everything() {
    let valkey = Redis::builder().binary(tools::valkey()).start();
    use_everything(&valkey, &valkey.url(), true).await;
}

#[tokio::test]
async fn redis_8_can_do_everything() {
    let redis = Redis::builder().binary(tools::redis_8()).start();
    use_everything(&redis, &redis.url(), true).await;
}

#[tokio::test]
async fn protocol_2_can_do_everything() {
    let redis = Redis::start();
    use_everything(&redis, &format!("{}?protocol=resp2", redis.url()), true).await;
}

#[tokio::test]
async fn valkey_without_scripts_has_a_lean_mutex() {
    let rules = "on >pw ~clinch:* -@all +set +delifeq +getrange +pttl +scan +info";
    let valkey = Redis::builder().binary(tools::valkey()).acl_user("lean", rules).start();
    let url = valkey.url_as("lean", "pw");
    let (near, far) = (connect(&url).await.ttl(Duration::from_secs(1)).unwrap(), connect(&url).await);
    let can = near.capabilities();
    assert!(!can.fencing && !can.fifo && !can.shared && !can.push && can.expiry && can.hosts);
    let guard = lock(&near, "job").await;
    assert!(far.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    let waiter = queue(&far, "job");
    guard.verify().await.unwrap();
    let deadline = guard.deadline();
    eventually("it is renewed", async || (guard.deadline() > deadline).then_some(())).await;
    assert!(!waiter.is_finished());
    assert_eq!(far.list("").await.unwrap()[0].claims[0].id, guard.claim_id());
    release(guard).await;
    let guard = waiter.await.unwrap();
    valkey.call(&["SET", "clinch:job", "of another", "KEEPTTL"]);
    assert_eq!(guard.verify().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
    assert_eq!(valkey.call(&["GET", "clinch:job"]).text(), "of another", "it was left alone");
    let error = near.rwlock("other").unwrap().read().timeout(PATIENCE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
}

#[tokio::test]
async fn a_grant_without_its_copies_is_none() {
    let master = Redis::start();
    let replica = Redis::builder().replica_of(&master).start();
    let locks = connect(&format!("{}?wait_replicas=1", master.url())).await;
    release(lock(&locks, "job").await).await;
    replica.pause();
    let mutex = locks.mutex("job").unwrap();
    let error = mutex.lock().timeout(Duration::from_millis(2500)).await.unwrap_err();
    assert!([ErrorKind::Unknown, ErrorKind::Unavailable].contains(&error.kind()), "{error:?}");
    assert!(format!("{error:?}").contains("only 0 of 1 replicas"), "{error:?}");
    eventually("it is not held", async || (master.call(&["EXISTS", "clinch:job"]).int() == 0).then_some(()))
        .await;
    let queue = master.call(&["EVAL", "return #redis.call('KEYS', '*queue:clinch:job')", "0"]);
    assert_eq!(queue.int(), 0);
    replica.resume();
    release(lock(&locks, "job").await).await;
}
