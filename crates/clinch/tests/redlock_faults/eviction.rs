//! What an operator takes away from its holder, and who hears of it.

use super::*;

#[tokio::test]
async fn what_an_evicted_holder_had_is_nobodys_before_it_lets_go() {
    let servers = Servers::durable(3);
    let (one, other) = (servers.connect().await, servers.connect().await);
    let name = unique("evicted");
    let guard = lock(&one, &name).await;
    assert_eq!(other.evict(&name, guard.claim_id()).await.unwrap(), Freed::Removed);
    assert!(other.mutex(&name).unwrap().try_lock().await.unwrap().is_none(), "its holder still runs");
    let state = other.state(&name).await.unwrap().expect("it is not free yet");
    assert!(state.claims.is_empty() && state.closed_until.is_some(), "{state:?}");
    let waiter = queue(&other, &name);
    assert_eq!(guard.verify().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
    let next = waiter.await.unwrap();
    assert_eq!(next.release().await.unwrap(), Released::Released);
    servers.expect_no_key(&name).await;
}

/// Also where the lease ends sooner than the notice, which needs not be shortened.
#[tokio::test]
async fn full_servers_evict() {
    let servers = Servers::durable(3);
    let locks = servers.connect().await.ttl(Duration::from_secs(10)).unwrap();
    let name = unique("full");
    let guard = lock(&locks, &name).await;
    servers.0.iter().for_each(|server| drop(server.call(&["CONFIG", "SET", "maxmemory", "1"])));
    assert_eq!(locks.evict(&name, guard.claim_id()).await.unwrap(), Freed::Removed);
    assert_eq!(guard.verify().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
    servers.expect_no_key(&name).await;
}

/// One of its servers hangs, and another cannot be reached from the holder's host, but from the operator's.
#[tokio::test]
async fn a_holder_that_hears_of_its_eviction_from_one_server_alone_stops() {
    let servers = Servers::durable(3);
    let proxy = Proxy::start(servers.0[0].addr());
    let hosts = [proxy.addr(), servers.0[1].addr(), servers.0[2].addr()].map(|addr| addr.to_string());
    let one = connect(&servers.url_at(hosts.into_iter(), "durable=on&max_ttl=24h")).await;
    let other = servers.connect().await;
    let names = [unique("verifies"), unique("renews")];
    let guards = [lock(&one, &names[0]).await, lock(&one, &names[1]).await];
    eventually("all have given both votes", async || {
        names.iter().all(|name| servers.with_key(name).len() == 3).then_some(())
    })
    .await;
    servers.0[2].pause();
    proxy.refuse(true);
    proxy.cut_all();
    for (name, guard) in names.iter().zip(&guards) {
        assert_eq!(other.evict(name, guard.claim_id()).await.unwrap(), Freed::Removed);
    }
    let [verifies, renews] = guards;
    let waiter = queue(&other, &names[1]);
    assert_eq!(verifies.verify().await.unwrap_err().kind(), ErrorKind::Lost);
    tokio::select! {
        biased;
        loss = renews.lost() => assert_eq!(loss.kind, LossKind::Deleted, "{loss}"),
        _ = waiter => panic!("two hold one lock"),
    }
    servers.0[2].resume();
}

#[tokio::test]
async fn an_eviction_that_reached_a_minority_takes_nothing() {
    let servers = Servers::durable(3);
    let locks = servers.connect().await;
    let name = unique("half-evicted");
    let guard = lock(&locks, &name).await;
    eventually("all have given their vote", async || (servers.with_key(&name).len() == 3).then_some(()))
        .await;
    servers.0[0].call(&["SETRANGE", &format!("clinch:{name}"), "32", "!"]);
    guard.verify().await.unwrap();
    guard.extend(LONG_TTL).await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    servers.expect_no_key(&name).await;
}

/// What one server was told takes nothing: a quorum has the lock still, whichever servers answer first.
#[tokio::test]
async fn what_a_quorum_has_is_shown_as_held_beside_the_mark_of_an_eviction() {
    let servers = Servers::durable(3);
    let locks = servers.connect().await;
    let [name, other] = [unique("marked"), unique("marked twice")];
    let guards = [lock(&locks, &name).await, lock(&locks, &other).await];
    eventually("all have given both votes", async || {
        [&name, &other].iter().all(|name| servers.with_key(name).len() == 3).then_some(())
    })
    .await;
    let mark = |at: usize, name: &str| {
        servers.0[at].call(&["SETRANGE", &format!("clinch:{name}"), "32", "!"]);
    };
    (0..1).for_each(|at| mark(at, &name));
    (0..2).for_each(|at| mark(at, &other));
    for _ in 0..50 {
        let state = locks.state(&name).await.unwrap().expect("it is held");
        let holders: Vec<_> = state.claims.iter().map(|claim| claim.id).collect();
        assert_eq!((holders, state.closed_until), (vec![guards[0].claim_id()], None));
        let state = locks.state(&other).await.unwrap().expect("it is not free yet");
        assert!(state.claims.is_empty() && state.closed_until.is_some(), "{state:?}");
    }
    assert_eq!(locks.evict(&name, guards[0].claim_id()).await.unwrap(), Freed::Removed);
    let state = locks.state(&name).await.unwrap().expect("it is not free yet");
    assert!(state.claims.is_empty() && state.closed_until.is_some(), "{state:?}");
    assert_eq!(guards[0].verify().await.unwrap_err().kind(), ErrorKind::Lost);
}
