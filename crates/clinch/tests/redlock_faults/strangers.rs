//! Leases that other processes than their holder's renew and release.

use super::restarts::{MAX_TTL, connect_forgetful, hosts, lock_on_all};
use super::*;

/// What one server has of a lock, without the token and the time of its own.
fn record(server: &Redis, name: &str) -> String {
    let value = server.call(&["GET", &format!("clinch:{name}")]).text();
    value.splitn(4, ' ').nth(3).unwrap().to_owned()
}

/// As of one that its holder renews: servers that restart one after the other, as where all get a new version, take it from nobody.
#[tokio::test]
async fn a_lease_that_another_renews_outlives_servers_that_restart_one_by_one() {
    let servers = Servers::forgetful(3);
    let (holder, other) =
        tokio::join!(connect_forgetful(hosts(&servers)), connect_forgetful(hosts(&servers)));
    let name = unique("renewed");
    let left = lock_on_all(&servers, &holder, &name).await.detach().await.unwrap();
    let owner = record(&servers.0[0], &name);
    for server in &servers.0 {
        server.restart();
        eventually("all have it again", async || {
            // While its connection is made anew, a server answers nothing.
            let _ = other.renew_detached(&name, left.claim, MAX_TTL).await;
            (servers.with_key(&name).len() == 3).then_some(())
        })
        .await;
        assert_eq!(record(server, &name), owner, "it is the holder's still");
    }
    let seen = other.state(&name).await.unwrap().unwrap();
    assert_eq!(seen.claims[0].id, left.claim);
    assert_eq!(other.release_detached(&name, left.claim).await.unwrap(), Released::Released);
    servers.expect_no_key(&name).await;
}

/// It finds nothing on the server whose vote is just set anew, whose answers take 100 ms.
#[tokio::test]
async fn a_release_by_one_is_not_undone_by_the_renewal_of_another() {
    let servers = Servers::durable(3);
    let way = Proxy::start(servers.0[1].addr());
    let hosts = [servers.0[0].addr(), way.addr(), servers.0[2].addr()].map(|addr| addr.to_string());
    let url = servers.url_at(hosts.into_iter(), "durable=on&max_ttl=24h");
    let (holder, far, other) = (servers.connect().await, connect(&url).await, servers.connect().await);
    way.delay(Duration::from_millis(50));
    let mut names = Vec::new();
    for after in (0..200).step_by(8).map(Duration::from_millis) {
        let name = unique("undone");
        let left = lock_on_all(&servers, &holder, &name).await.detach().await.unwrap();
        servers.0[1].call(&["DEL", &format!("clinch:{name}")]);
        far.renew_detached(&name, left.claim, LONG_TTL).await.unwrap();
        // Whatever is on its way then.
        tokio::time::sleep(after).await;
        assert_eq!(other.release_detached(&name, left.claim).await.unwrap(), Released::Released);
        names.push(name);
    }
    for name in names {
        servers.expect_no_key(&name).await;
    }
}
