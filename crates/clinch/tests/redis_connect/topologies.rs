//! URLs whose scheme says otherwise than what stands at the address.

use clinch::{Env, Lane, Verdict};

use super::*;

/// Names whose locks this server has, and others that it has not.
fn names_here_and_elsewhere(servers: &Cluster, here: &Redis) -> (String, String) {
    let name = |is_here: bool| {
        let mut names = (0..).map(|number| format!("job {number}"));
        let is_it =
            |name: &String| (servers.master_of(&format!("clinch:{name}")).port() == here.port()) == is_here;
        names.find(is_it).expect("there is no end of names")
    };
    (name(true), name(false))
}

fn expect_other_scheme(error: &Error, words: &str) {
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
}

/// It has the locks of its own slots alone; who asks for another would wait for ever.
#[tokio::test]
async fn one_server_of_a_cluster_says_at_once_what_it_does_not_have() {
    let servers = Cluster::start();
    let here = servers.master_of("clinch:~probe");
    for other in servers.masters().into_iter().filter(|other| other.port() != here.port()) {
        expect_other_scheme(&refused(&other.url()).await, "redis+cluster://");
    }
    let (near, far) = names_here_and_elsewhere(&servers, here);
    for url in [here.url(), format!("{}?lean=on", here.url())] {
        let locks = connect(&url).await;
        release(lock(&locks, &near).await).await;
        let mutex = locks.mutex(&far).unwrap();
        expect_other_scheme(&mutex.lock().timeout(PATIENCE).await.unwrap_err(), "redis+cluster://");
        expect_other_scheme(&mutex.try_lock().await.unwrap_err(), "redis+cluster://");
        expect_other_scheme(&locks.state(&far).await.unwrap_err(), "redis+cluster://");
        // Nothing was left there, and nothing is sent for that.
        locks.close(PATIENCE).await.unwrap();
    }
    let checks = Locks::examine(&here.url(), Env::host(Lane::thread())).await.unwrap();
    let mode = checks.iter().find(|check| check.what == "mode").expect("doctor says nothing of it");
    assert!(
        mode.seen.contains("of its own slots") && format!("{:?}", mode.remedy).contains("redis+cluster://"),
        "{mode:?}"
    );
}

/// P1: a slot that moves away takes its locks along, who wait for them hear of it at once, and who holds one is told in time.
#[tokio::test]
async fn a_lock_that_moves_away_from_the_server_of_the_url_is_lost_in_time() {
    let servers = Cluster::start();
    let here = servers.master_of("clinch:~probe");
    let name = names_here_and_elsewhere(&servers, here).0;
    let (slot, key) = (servers.slot_of(&format!("clinch:{name}")), format!("clinch:{name}"));
    let locks = connect(&here.url()).await.ttl(Duration::from_secs(3)).unwrap();
    let guard = lock(&locks, &name).await;
    let waiter = tokio::spawn({
        let mutex = connect(&here.url()).await.mutex(&name).unwrap();
        async move { mutex.lock().timeout(PATIENCE).await.map(drop) }
    });
    eventually("the waiter waits", async || {
        here.call(&["KEYS", "*queue:clinch:*"]).array().into_iter().next()
    })
    .await;
    let errors = |redis: &Redis| redis.field("stats", "total_error_replies").unwrap().parse::<u64>().unwrap();
    let before = errors(here);
    let to = servers.masters().into_iter().find(|other| other.port() != here.port()).unwrap();
    servers.migrate_slot(slot, to);
    expect_other_scheme(&waiter.await.unwrap().unwrap_err(), "redis+cluster://");
    let loss = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
    assert_eq!(loss.kind, LossKind::Expired);
    assert!(errors(here) - before < 60, "{} times it was asked", errors(here) - before);
    // Whoever has the right URL is let in when the lease that moved along has ended, which is after that.
    assert!(!guard.is_held());
    let next = lock(&connect(&servers.url()).await, &name).await;
    assert_eq!(to.call(&["EXISTS", &key]).int(), 1);
    release(next).await;
}

/// Each form of URL at what another is for says which that is.
#[tokio::test]
async fn a_url_of_another_form_says_which_is_right() {
    let servers = Sentinel::start();
    let (sentinel, server) = (servers.sentinels()[0].addr(), Redis::start());
    for url in [format!("redis://{sentinel}"), format!("redis+cluster://{sentinel}")] {
        expect_other_scheme(
            &refused(&url).await,
            "this is a Sentinel; say redis+sentinel://HOST/MASTER in the URL",
        );
    }
    let plain = server.addr();
    for url in [format!("redis+sentinel://{plain}/main"), format!("redis+cluster://{plain}")] {
        expect_other_scheme(&refused(&url).await, "say redis:// in the URL");
    }
    let [one, two, three] = [0, 1, 2].map(|at| servers.sentinels()[at].addr());
    let error = refused(&format!("redlock://{one},{two},{three}")).await;
    expect_other_scheme(&error, "this is a Sentinel");
    for (url, words) in [
        (format!("redis://{sentinel}"), "redis+sentinel://"),
        (format!("redis+sentinel://{plain}/main"), "redis://"),
        (format!("redis+cluster://{plain}"), "redis://"),
    ] {
        let checks = Locks::examine(&url, Env::host(Lane::thread())).await.unwrap();
        let failed = checks.iter().filter(|check| check.verdict == Verdict::Fail);
        let told = failed.map(|check| format!("{} {:?}", check.seen, check.remedy)).collect::<Vec<_>>();
        assert!(told.iter().any(|told| told.contains(words)), "{url}: {checks:?}");
    }
}
