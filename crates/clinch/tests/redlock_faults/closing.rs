//! What goes on in the background is waited for when a client closes, as one does that lives for a moment: nobody does it later.

use super::*;

/// Three servers of which the last is far away: its answers come when a quorum has long decided.
struct Far {
    servers: Servers,
    way: Proxy,
    url: String,
}

impl Far {
    fn new(servers: Servers, query: &str) -> Far {
        let way = Proxy::start(servers.0[2].addr());
        let hosts = [servers.0[0].addr(), servers.0[1].addr(), way.addr()].map(|addr| addr.to_string());
        Far { url: url_of(hosts.into_iter(), query), servers, way }
    }

    fn voting() -> Far {
        let far = Far::new(Servers::durable(3), "durable=on&max_ttl=24h");
        vouch(&far.url, &far.servers.0);
        far
    }
}

#[tokio::test]
async fn a_release_reaches_also_a_far_server_before_the_client_is_closed() {
    let far = Far::voting();
    let (holder, other) = (connect(&far.url).await, connect(&far.url).await);
    let name = unique("far");
    let held = restarts::lock_on_all(&far.servers, &holder, &name).await.detach().await.unwrap();
    let guard = restarts::lock_on_all(&far.servers, &holder, &unique("held")).await;
    far.way.delay(Duration::from_millis(100));
    // By who knows nothing of the claim, and by who made it.
    let released = other.release_detached(&name, held.claim).await.unwrap();
    assert_eq!(released, Released::Released);
    other.close(PATIENCE).await.unwrap();
    assert_eq!(far.servers.with_key(&name), [0; 0]);
    let name = guard.name().to_string();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    holder.close(PATIENCE).await.unwrap();
    assert_eq!(far.servers.with_key(&name), [0; 0]);
}

/// It may never answer.
#[tokio::test]
async fn a_server_that_hangs_keeps_nobody_from_closing() {
    let far = Far::voting();
    let locks = connect(&far.url).await;
    let guard = restarts::lock_on_all(&far.servers, &locks, &unique("hangs")).await;
    far.servers.0[2].pause();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    tokio::time::timeout(PATIENCE / 2, locks.close(PATIENCE)).await.expect("it waits for ever").unwrap();
}

/// How many vouchers stand on a server.
fn vouchers(server: &Redis) -> i64 {
    server.call(&["EVAL", "return #redis.call('KEYS', 'clinch:~{voucher}:*')", "0"]).int()
}

/// Of those that live for a moment none would tell it otherwise, and it would be left out of all their votes.
#[tokio::test]
async fn word_is_left_also_on_a_far_server_before_the_client_is_closed() {
    let far = Far::new(Servers::forgetful(3), "max_ttl=4s");
    far.way.delay(Duration::from_millis(60));
    let locks = clinch::connect(&far.url).await.unwrap();
    locks.close(PATIENCE).await.unwrap();
    assert_eq!(vouchers(&far.servers.0[2]), 1);
}

/// It asks for no votes, by which it would see that there is something to tell.
#[tokio::test]
async fn word_is_left_on_a_server_that_restarts_by_who_only_renews() {
    let servers = Servers::forgetful(3);
    let locks = restarts::connect_forgetful(restarts::hosts(&servers)).await;
    let guard = restarts::lock_on_all(&servers, &locks, &unique("renews")).await;
    servers.0[2].restart();
    eventually("word is left on the one that came back", async || {
        assert!(guard.is_held(), "{:?}", guard.standing());
        (vouchers(&servers.0[2]) == 1).then_some(())
    })
    .await;
}
