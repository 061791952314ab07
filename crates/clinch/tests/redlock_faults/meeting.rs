//! Claims that meet: each has a part of the votes, and what is not known is not told as known.

use super::*;

/// Clients that each have another server at hand, and all others 15 ms away.
async fn far_apart(servers: &Servers, clients: usize) -> (Vec<Locks>, Vec<Proxy>) {
    let voting = servers.voting_url();
    let (_, query) = voting.split_once('?').unwrap();
    let (mut connected, mut proxies) = (Vec::new(), Vec::new());
    for near in 0..clients {
        let hosts = servers.0.iter().enumerate().map(|(at, server)| {
            if at == near {
                return server.addr().to_string();
            }
            let proxy = Proxy::start(server.addr());
            proxy.delay(Duration::from_millis(15));
            proxies.push(proxy);
            proxies.last().unwrap().addr().to_string()
        });
        let hosts: Vec<String> = hosts.collect();
        let locks = connect(&servers.url_at(hosts.into_iter(), query)).await;
        drop(lock(&locks, &unique("met")).await);
        connected.push(locks);
    }
    (connected, proxies)
}

/// All try at the same moment: a job that is skipped when another has it must not be skipped by all.
async fn not_all_are_told_that_another_has_it(clients: &[Locks]) {
    for _ in 0..10 {
        let name = unique("at once");
        let tries = clients.iter().map(|locks| {
            let mutex = locks.mutex(&name).unwrap();
            tokio::spawn(async move { mutex.try_lock().await })
        });
        let mut outcomes = Vec::new();
        for task in tries.collect::<Vec<_>>() {
            outcomes.push(task.await.unwrap());
        }
        let skipped = outcomes.iter().filter(|outcome| matches!(outcome, Ok(None))).count();
        assert!(skipped < clients.len(), "all were told that another has it");
        outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).for_each(|error| {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        });
    }
}

#[tokio::test]
async fn who_tries_at_the_same_moment_is_not_told_that_another_has_it() {
    let servers = Servers::durable(3);
    let (clients, _proxies) = far_apart(&servers, 3).await;
    not_all_are_told_that_another_has_it(&clients).await;
}

/// Each of two has one vote, and the third server could have given the second to either.
#[tokio::test]
async fn who_tries_at_the_same_moment_beside_a_hung_server_is_not_told_that_another_has_it() {
    let servers = Servers::durable(3);
    let (clients, _proxies) = far_apart(&servers, 2).await;
    servers.0[2].pause();
    not_all_are_told_that_another_has_it(&clients).await;
    servers.0[2].resume();
}

/// If both ask whenever both have withdrawn, neither gets two votes, for ever.
#[tokio::test]
async fn who_waits_beside_a_hung_server_for_what_nobody_holds_gets_it() {
    let servers = Servers::durable(3);
    let (clients, _proxies) = far_apart(&servers, 2).await;
    servers.0[2].pause();
    for _ in 0..5 {
        let name = unique("nobody's");
        let waits = clients.iter().map(|locks| {
            let mutex = locks.mutex(&name).unwrap();
            tokio::spawn(async move { mutex.lock().timeout(Duration::from_secs(10)).await.map(drop) })
        });
        for wait in waits.collect::<Vec<_>>() {
            wait.await.unwrap().unwrap();
        }
    }
    servers.0[2].resume();
}

/// Two that meet beside a hung server hear nothing certain at first; the one that loses must hear later who has won.
#[tokio::test]
async fn who_loses_beside_a_hung_server_is_told_who_has_won() {
    let servers = Servers::durable(3);
    let (clients, _proxies) = far_apart(&servers, 2).await;
    servers.0[2].pause();
    for _ in 0..4 {
        let name = unique("won");
        let waits = clients.iter().map(|locks| {
            let mutex = locks.mutex(&name).unwrap();
            tokio::spawn(async move { mutex.lock().timeout(Duration::from_secs(4)).await })
        });
        let mut outcomes = Vec::new();
        for wait in waits.collect::<Vec<_>>() {
            outcomes.push(wait.await.unwrap());
        }
        let losers: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
        assert_eq!(losers.len(), 1, "{outcomes:?}");
        assert_eq!(losers[0].kind(), ErrorKind::TimedOut, "{:?}", losers[0]);
        assert!(losers[0].to_string().contains("held by"), "{:?}", losers[0]);
    }
    servers.0[2].resume();
}

/// A waiter that has asked in vain: another program has one vote, and the third server, which hangs, may have given it a second.
async fn left_in_doubt(servers: &Servers, locks: &Locks, name: &str) -> JoinHandle<Guard> {
    servers.0[0].call(&["SET", &format!("clinch:{name}"), "another", "PX", "600000"]);
    let steps = || servers.0[1].client().commandstats()["evalsha"];
    let before = steps();
    let first = queue(locks, name);
    // A claim and its withdrawal, more than once.
    eventually("it has asked again", async || (steps() >= before + 6).then_some(())).await;
    first
}

/// A wait of the same client, which has been told what the first was.
async fn follow(locks: &Locks, name: &str, time: Duration) -> Pin<Box<impl Future<Output = Error> + use<>>> {
    let mutex = locks.mutex(name).unwrap();
    let mut wait = Box::pin(async move { mutex.lock().timeout(time).await.expect_err("two hold one lock") });
    assert!(tokio::time::timeout(Duration::ZERO, &mut wait).await.is_err());
    wait
}

/// In less time than a turn of its own takes.
#[tokio::test]
async fn who_follows_one_that_was_left_in_doubt_is_told_when_that_ends() {
    let servers = Servers::durable(3);
    let locks = servers.connect().await;
    drop(lock(&locks, &unique("warm")).await);
    servers.0[2].pause();
    eventually("told before its deadline", async || {
        let name = unique("doubt");
        let first = left_in_doubt(&servers, &locks, &name).await;
        let follower = follow(&locks, &name, Duration::from_millis(450)).await;
        servers.0[1].call(&["SET", &format!("clinch:{name}"), "another", "PX", "600000"]);
        let error = follower.await;
        first.abort();
        (error.kind() == ErrorKind::TimedOut && error.to_string().contains("held by")).then_some(())
    })
    .await;
    servers.0[2].resume();
}

#[tokio::test]
async fn who_followed_one_that_was_left_in_doubt_and_then_won_is_told_who_holds_the_lock() {
    let servers = Servers::durable(3);
    let locks = servers.connect().await;
    drop(lock(&locks, &unique("warm")).await);
    servers.0[2].pause();
    let name = unique("won");
    let first = left_in_doubt(&servers, &locks, &name).await;
    let follower = tokio::spawn(follow(&locks, &name, Duration::from_secs(4)).await);
    servers.0[0].call(&["DEL", &format!("clinch:{name}")]);
    let guard = first.await.unwrap();
    let error = follower.await.unwrap();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    assert!(error.to_string().contains("held by") && guard.is_held(), "{error:?}");
    servers.0[2].resume();
}
