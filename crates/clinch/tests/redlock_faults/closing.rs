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
