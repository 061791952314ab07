//! Servers that hang, are slow, are gone, or break off in the middle.

use std::future::IntoFuture;

use super::*;

#[tokio::test]
async fn a_minority_that_hangs_delays_nobody_and_keeps_nothing() {
    let servers = Servers::durable(5);
    let (one, other) = (servers.connect().await, servers.connect().await);
    let name = unique("hanging");
    let mut last = lock(&one, &name).await.token();
    for hanging in [&servers.0[..1], &servers.0[1..3]] {
        hanging.iter().for_each(Redis::pause);
        for (locks, rival) in [(&one, &other), (&other, &one)] {
            let guard = lock(locks, &name).await;
            assert!(guard.token() > last, "{} came after {last}", guard.token());
            last = guard.token();
            assert!(rival.mutex(&name).unwrap().try_lock().await.unwrap().is_none());
            let waiter = queue(rival, &name);
            assert_eq!(guard.release().await.unwrap(), Released::Released);
            let next = waiter.await.unwrap();
            assert!(next.token() > last);
            last = next.token();
            next.verify().await.unwrap();
            assert_eq!(next.release().await.unwrap(), Released::Released);
        }
        hanging.iter().for_each(Redis::resume);
        servers.expect_no_key(&name).await;
    }
}

#[tokio::test]
async fn a_hold_lives_on_without_a_minority_and_ends_without_a_majority() {
    let servers = Servers::durable(3);
    let (one, other) = (servers.connect().await, servers.connect().await);
    let name = unique("renewed");
    let ttl = Duration::from_secs(2);
    let guard = lock(&one.clone().ttl(ttl).unwrap(), &name).await;
    servers.0[0].pause();
    let first = guard.deadline().unwrap();
    eventually("renewed by two of three", async || {
        assert!(guard.is_held());
        (guard.deadline().unwrap() > first + 2 * ttl).then_some(())
    })
    .await;
    servers.0[1].pause();
    let rival = queue(&other, &name);
    let lost = tokio::time::timeout(10 * ttl, guard.lost()).await;
    let loss = lost.expect("a minority goes on renewing");
    assert_eq!(loss.kind, LossKind::Expired, "{loss}");
    assert!(!rival.is_finished(), "granted by a minority, and before the loss was told");
    servers.0[1].resume();
    let next = rival.await.unwrap();
    assert!(!guard.is_held() && next.token() > guard.token());
    servers.0[0].resume();
    assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
    next.verify().await.expect("a late release took the next holder's lock");
    drop(next);
    servers.expect_no_key(&name).await;
}

#[tokio::test]
async fn a_majority_that_hangs_is_an_error_in_time_and_what_was_won_is_given_back() {
    let servers = Servers::durable(5);
    let locks = servers.connect().await;
    let name = unique("majority");
    drop(lock(&locks, &name).await);
    servers.expect_no_key(&name).await;
    let hanging = &servers.0[..3];
    hanging.iter().for_each(Redis::pause);
    let error = locks.mutex(&name).unwrap().lock().timeout(Duration::from_secs(2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    let text = chain(&error);
    for server in hanging {
        assert!(text.contains(&server.addr().to_string()), "{text}");
    }
    let tried = locks.mutex(&name).unwrap().try_lock().await.unwrap_err();
    assert!(matches!(tried.kind(), ErrorKind::Unknown | ErrorKind::Unavailable), "{tried:?}");
    let key = format!("clinch:{name}");
    eventually("the living servers are clear", async || {
        servers.0[3..].iter().all(|server| server.call(&["EXISTS", &key]).int() == 0).then_some(())
    })
    .await;
    hanging.iter().for_each(Redis::resume);
    servers.expect_no_key(&name).await;
    drop(lock(&locks, &name).await);
    locks.close(PATIENCE).await.unwrap();
}

#[tokio::test]
async fn slow_servers_are_not_waited_for() {
    let servers = Servers::durable(5);
    let proxies: Vec<Proxy> = servers.0.iter().map(|server| Proxy::start(server.addr())).collect();
    let url = servers.url_at(proxies.iter().map(|proxy| proxy.addr().to_string()), "durable=on&max_ttl=24h");
    let (far, near) = (connect(&url).await, servers.connect().await);
    let name = unique("slow");
    drop(lock(&far, &name).await);
    // Slower than the time-out of a server, and then slow enough for each release to come while its claim is on its way.
    for delay in [200, 40] {
        proxies[..2].iter().for_each(|proxy| proxy.delay(Duration::from_millis(delay)));
        for _ in 0..10 {
            let guard = lock(&far, &name).await;
            assert!(near.mutex(&name).unwrap().try_lock().await.unwrap().is_none());
            assert_eq!(guard.release().await.unwrap(), Released::Released);
            drop(lock(&near, &name).await);
        }
    }
    far.close(PATIENCE).await.unwrap();
    servers.expect_no_key(&name).await;
}

#[tokio::test]
async fn a_free_lock_is_not_found_taken_for_a_slow_vote_that_decides() {
    let servers = Servers::durable(3);
    let proxies: Vec<Proxy> = servers.0.iter().map(|server| Proxy::start(server.addr())).collect();
    let locks = connect(
        &servers.url_at(proxies.iter().map(|proxy| proxy.addr().to_string()), "durable=on&max_ttl=24h"),
    )
    .await;
    let name = unique("decides");
    drop(lock(&locks, &name).await);
    servers.expect_no_key(&name).await;
    servers.0[0].call(&["SET", &format!("clinch:{name}"), "somebody", "PX", "100000000"]);
    // There and back, longer than the time-out of a server that is not needed.
    proxies[2].delay(Duration::from_millis(40));
    // Again where this host had no time.
    let mutex = locks.mutex(&name).unwrap();
    let guard = eventually("two of three are free", async || mutex.try_lock().await.unwrap()).await;
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

#[tokio::test]
async fn killed_servers_are_done_without() {
    let servers = Servers::durable(5);
    let (one, other) = (servers.connect().await, servers.connect().await);
    let name = unique("killed");
    let guard = lock(&one, &name).await;
    let token = guard.token();
    servers.0[..2].iter().for_each(Redis::kill);
    guard.verify().await.unwrap();
    let waiter = queue(&other, &name);
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    let next = waiter.await.unwrap();
    assert!(next.token() > token);
    let states = one.list(&name).await.unwrap();
    assert_eq!(states[0].claims[0].id, next.claim_id());
    drop(next);
    servers.0[..2].iter().for_each(Redis::restart);
    // Those that are back from the disk still have the first claim, which nobody could release there.
    let held = lock(&other, &name).await;
    assert!(held.is_held());
}

/// The one that hangs may have the vote that makes it a hold.
#[tokio::test]
async fn a_lock_of_which_too_few_servers_tell_is_not_said_to_be_free() {
    let servers = Servers::durable(3);
    let locks = servers.connect().await;
    let (bare, whole) = (unique("bare"), unique("whole"));
    let first = super::restarts::lock_on_all(&servers, &locks, &bare).await;
    let second = super::restarts::lock_on_all(&servers, &locks, &whole).await;
    servers.0[2].call(&["DEL", &format!("clinch:{bare}")]);
    servers.0[1].pause();
    let looks = || servers.0[0].client().commandstats().get("getrange").copied().unwrap_or(0);
    let before = looks();
    let error = locks.state(&bare).await.expect_err("whether it is held is not known");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    // Else one that only changes hands is said to be unknown, and all others with it.
    assert_eq!(looks() - before, 2, "it is not looked at again");
    let survey = locks.survey("").await.unwrap();
    let shown: Vec<&str> = survey.locks.iter().map(|state| state.name.as_str()).collect();
    assert_eq!(shown, [&*whole]);
    let (unread, listed) = (survey.unread.expect("one is missing"), locks.list("").await.unwrap_err());
    assert_eq!((unread.kind(), listed.kind()), (ErrorKind::Unavailable, ErrorKind::Unavailable));
    assert!(locks.state("nobody's").await.unwrap().is_none(), "a quorum knows of nothing");
    servers.0[1].resume();
    let held = eventually("it is shown again", async || locks.state(&bare).await.ok().flatten()).await;
    assert_eq!(held.claims[0].id, first.claim_id());
    drop((first, second));
}

#[tokio::test]
async fn an_even_number_of_servers_resolves_a_tie() {
    let servers = Servers::durable(4);
    let (one, other) = (servers.connect().await, servers.connect().await);
    let name = unique("even");
    // Two votes are gone: the other two are no majority, and nobody waits for more.
    let key = format!("clinch:{name}");
    for server in &servers.0[..2] {
        server.call(&["SET", &key, "somebody", "PX", "100000000"]);
    }
    let nobody_has_it = one.mutex(&name).unwrap().try_lock().await.unwrap_err();
    assert_eq!(nobody_has_it.kind(), ErrorKind::Unavailable);
    assert!(chain(&nobody_has_it).contains("another program"), "{nobody_has_it:?}");
    assert_eq!(servers.with_key(&name), [0, 1]);
    servers.0[1].call(&["DEL", &key]);
    let guard = lock(&one, &name).await;
    assert!(other.mutex(&name).unwrap().try_lock().await.unwrap().is_none());
    drop(guard);
    eventually("released", async || (servers.with_key(&name) == [0]).then_some(())).await;
    servers.0[1].call(&["SET", &key, "somebody", "PX", "100000000"]);
    let mutex = one.mutex(&name).unwrap();
    eventually("the error says who has the other half", async || {
        let error = mutex.lock().timeout(Duration::from_secs(1)).await.unwrap_err();
        let told = error.kind() == ErrorKind::Unavailable && chain(&error).contains("another program");
        told.then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_waiter_that_nobody_polls_does_not_block_the_others() {
    let servers = Servers::durable(3);
    let (one, other) = (servers.connect().await, servers.connect().await);
    let name = unique("unpolled");
    let guard = lock(&one, &name).await;
    let mutex = other.mutex(&name).unwrap();
    let mut stuck = Box::pin(mutex.lock().into_future());
    let first_poll = tokio::time::timeout(Duration::from_millis(300), &mut stuck).await;
    assert!(first_poll.is_err(), "two hold one lock");
    // Behind it, in the same client.
    let waiter = queue(&other, &name);
    drop(guard);
    assert!(waiter.await.unwrap().is_held());
}

#[tokio::test]
async fn a_vote_that_was_cast_too_late_is_given_back() {
    let servers = Servers::durable(5);
    let locks = servers.connect().await;
    drop(lock(&locks, &unique("warm")).await);
    let name = unique("too-late");
    let key = format!("clinch:{name}");
    for server in &servers.0[..3] {
        server.call(&["SET", &key, "somebody", "PX", "100000000"]);
    }
    let scripts_run = |server: &Redis| server.client().commandstats()["evalsha"];
    let late = &servers.0[3..];
    let before: Vec<u64> = late.iter().map(scripts_run).collect();
    late.iter().for_each(Redis::pause);
    assert!(locks.mutex(&name).unwrap().try_lock().await.unwrap().is_none());
    late.iter().for_each(Redis::resume);
    eventually("they were asked", async || {
        late.iter().zip(&before).all(|(server, before)| scripts_run(server) > *before).then_some(())
    })
    .await;
    eventually("what they gave is given back", async || (servers.with_key(&name) == [0, 1, 2]).then_some(()))
        .await;
}

#[tokio::test]
async fn a_caller_whose_runtime_stands_still_keeps_no_votes() {
    let servers = Arc::new(Servers::durable(5));
    let name = unique("standstill");
    let (gave_up, seen) = std::sync::mpsc::channel();
    let (go_on, wait) = std::sync::mpsc::channel::<()>();
    let caller = std::thread::spawn({
        let (servers, name) = (servers.clone(), name.clone());
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let locks = runtime.block_on(async {
                let locks = servers.connect().await;
                drop(lock(&locks, &unique("warm")).await);
                servers.0[..3].iter().for_each(Redis::pause);
                let mutex = locks.mutex(&name).unwrap();
                mutex.lock().timeout(Duration::from_millis(800)).await.unwrap_err();
                locks
            });
            // From now on nobody drives its connections.
            gave_up.send(()).unwrap();
            let _ = wait.recv();
            drop(locks);
        }
    });
    tokio::task::spawn_blocking(move || seen.recv_timeout(PATIENCE)).await.unwrap().unwrap();
    servers.0[..3].iter().for_each(Redis::resume);
    servers.expect_no_key(&name).await;
    drop(lock(&servers.connect().await, &name).await);
    drop(go_on);
    caller.join().unwrap();
}

/// P7: what a script did before it broke off is the claim's, and leaves with it.
#[tokio::test]
async fn a_vote_whose_script_broke_off_is_taken_back() {
    let servers = Servers::durable(3);
    let locks = servers.connect().await;
    drop(lock(&locks, &unique("warm")).await);
    for broken in [1, 2] {
        for server in &servers.0[..broken] {
            // The lock's key is written first.
            server.call(&["DEL", "clinch:~{fence}"]);
            server.call(&["LPUSH", "clinch:~{fence}", "no token"]);
        }
        let name = unique("broke-off");
        let mutex = locks.mutex(&name).unwrap();
        match broken {
            1 => {
                let guard = lock(&locks, &name).await;
                eventually("all have the key", async || (servers.with_key(&name).len() == 3).then_some(()))
                    .await;
                assert_eq!(guard.release().await.unwrap(), Released::Released);
            }
            _ => {
                let error = mutex.try_lock().await.expect_err("granted without a token");
                assert!(chain(&error).contains("WRONGTYPE"), "{}", chain(&error));
            }
        }
        servers.expect_no_key(&name).await;
    }
}

/// P7: what is said in the place of servers that are away, before anything was sent there, ends no release.
#[tokio::test]
async fn a_release_outlasts_what_speaks_for_servers_that_are_away() {
    let servers = Servers::durable(3);
    let proxies = [1, 2].map(|at: usize| Proxy::start(servers.0[at].addr()));
    let hosts = [servers.0[0].addr(), proxies[0].addr(), proxies[1].addr()].map(|addr| addr.to_string());
    let locks = connect(&servers.url_at(hosts.into_iter(), "durable=on&max_ttl=24h")).await;
    let name = unique("spoken-for");
    let guard = super::restarts::lock_on_all(&servers, &locks, &name).await;
    let (addr, asked) = stand_in().await;
    for proxy in &proxies {
        proxy.set_upstream(addr);
        proxy.cut_all();
    }
    let releasing = tokio::spawn(guard.release());
    eventually("both were asked in vain", async || (asked.load(Ordering::Relaxed) >= 4).then_some(())).await;
    for (proxy, server) in proxies.iter().zip(&servers.0[1..]) {
        proxy.set_upstream(server.addr());
    }
    assert_eq!(releasing.await.unwrap().unwrap(), Released::Released);
    servers.expect_no_key(&name).await;
}

/// A try that asks again could be overtaken by the withdrawal of what it asked for first, and lose the lock that it was just given.
#[tokio::test]
async fn a_late_withdrawal_of_a_try_takes_nothing_from_its_next_attempt() {
    let servers = Servers::durable(3);
    let proxy = Proxy::start(servers.0[0].addr());
    let hosts = [proxy.addr(), servers.0[1].addr(), servers.0[2].addr()].map(|addr| addr.to_string());
    let voting = servers.voting_url();
    let locks = connect(&servers.url_at(hosts.into_iter(), voting.split_once('?').unwrap().1)).await;
    drop(lock(&locks, &unique("warm")).await);
    let way = clinch_testkit::Direction::Requests;
    let taken_elsewhere = || {
        let name = unique("late");
        let key = format!("clinch:{name}");
        for (at, by) in [(1, "y"), (2, "z")] {
            servers.0[at].call(&["SET", &key, by, "PX", "60000"]);
        }
        (locks.mutex(&name).unwrap(), key)
    };
    // The servers know all scripts after the first.
    taken_elsewhere().0.try_lock().await.unwrap_err();
    let before = proxy.forwarded(way);
    taken_elsewhere().0.try_lock().await.unwrap_err();
    // A claim and a withdrawal, five times.
    let attempt = (proxy.forwarded(way) - before) / 5;
    for _ in 0..5 {
        let (mutex, key) = taken_elsewhere();
        let cuts = proxy.cuts();
        // In the middle of the first withdrawal.
        proxy.cut_after(way, attempt - 10);
        let trying = tokio::spawn(async move { mutex.try_lock().await });
        eventually("the withdrawal is cut", async || (proxy.cuts() > cuts).then_some(())).await;
        servers.0[1].call(&["DEL", &key]);
        if let Ok(Some(guard)) = trying.await.unwrap() {
            // For longer than a withdrawal takes to be repeated.
            for _ in 0..50 {
                guard.verify().await.expect("its own withdrawal took the lock away");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
}
