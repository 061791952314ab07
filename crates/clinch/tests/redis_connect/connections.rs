//! Connections that are not to be had, lead elsewhere later, or may do less.

use super::*;

/// All connections that a server takes. One that was closed a moment ago may still be counted: a process that another
/// test starts has a copy of it until it runs its program.
fn crowd(redis: &Redis, count: usize) -> Vec<clinch_testkit::Resp> {
    let mut clients = Vec::new();
    let mut join = || {
        let mut client = redis.client();
        let joins = matches!(client.try_call(&["PING"]), Ok(Reply::Text(_)));
        clients.extend(joins.then_some(client));
        clients.len()
    };
    clinch_testkit::until("every connection is taken", || join() == count);
    assert_eq!(join(), count, "there is no bound");
    clients
}

#[tokio::test]
async fn a_server_that_has_no_connection_left_is_waited_for() {
    let redis = Redis::builder().arg("--maxclients", "6").start();
    let locks = connect(&redis.url()).await;
    redis.call(&["CLIENT", "KILL", "TYPE", "normal"]);
    let mut crowd = crowd(&redis, 6);
    for error in [refused(&redis.url()).await, locks.mutex("job").unwrap().try_lock().await.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    }
    let waiter = queue(&locks, "job");
    let rejected = |client: &mut clinch_testkit::Resp| -> u64 {
        client.info("stats")["rejected_connections"].parse().unwrap()
    };
    let before = rejected(&mut crowd[0]);
    eventually("it is turned away", async || (rejected(&mut crowd[0]) > before + 1).then_some(())).await;
    assert!(!waiter.is_finished(), "ended with {:?}", waiter.await);
    drop(crowd);
    release(waiter.await.unwrap()).await;
}

/// What a client leads to changes: after a failover, or behind an address that is given to another.
#[tokio::test]
async fn a_server_that_may_drop_locks_is_refused_also_when_it_comes_later() {
    let (first, second) = (Redis::start(), Redis::start());
    second.call(&["CONFIG", "SET", "maxmemory", "100mb", "maxmemory-policy", "allkeys-lru"]);
    for query in ["", "?eviction=allow"] {
        let proxy = Proxy::start(first.addr());
        let locks = connect(&format!("redis://{}{query}", proxy.addr())).await;
        release(lock(&locks, "job").await).await;
        proxy.set_upstream(second.addr());
        proxy.cut_all();
        let locked = locks.mutex("job").unwrap().lock().timeout(PATIENCE).await;
        match query {
            "" => {
                let error = locked.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
                assert!(error.to_string().contains("eviction=allow"), "{error}");
            }
            _ => release(locked.unwrap()).await,
        }
    }
}

/// A server may repeat what it was sent.
#[tokio::test]
async fn a_password_that_the_server_repeats_is_not_shown() {
    let redis = Redis::builder()
        .arg("--rename-command", "AUTH XAUTH")
        .arg("--rename-command", "HELLO XHELLO")
        .start();
    let error = refused(&format!("redis://ann:{SECRET}@{}", redis.addr())).await;
    assert!(error.to_string().contains("did not let us in"), "{error}");
}

#[tokio::test]
async fn a_server_without_subscriptions_is_asked() {
    let redis = Redis::builder().arg("--rename-command", "SUBSCRIBE XSUBSCRIBE").start();
    use_everything(&redis, &redis.url(), false).await;
}
