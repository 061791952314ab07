//! Users who may do no more than they must.

use clinch::LossKind;
use clinch_testkit::Proxy;

use super::*;

/// The rules of the user in the module's documentation, which are also the test of that.
fn rules() -> Vec<String> {
    let docs = include_str!("../../src/backends/redis/redlock.rs");
    let (_, line) = docs.split_once("//! user clinch on >PASSWORD").expect("it has an ACL line");
    let (line, _) = line.split_once("//! ```").unwrap();
    line.replace("//!", "").split_whitespace().map(str::to_owned).collect()
}

/// Three servers with the user, and their URL, by way of a proxy to the last one.
fn servers(rules: &[String]) -> (Vec<Redis>, Proxy, String) {
    let rules = format!("on >{SECRET} {}", rules.join(" "));
    let servers: Vec<Redis> = (0..3).map(|_| voting().acl_user("clinch", &rules).start()).collect();
    let proxy = Proxy::start(servers[2].addr());
    let addresses = [servers[0].addr(), servers[1].addr(), proxy.addr()];
    let hosts = addresses.map(|addr| format!("clinch:{SECRET}@{addr}"));
    let url = format!("redlock://{}?{DURABLE}", hosts.join(","));
    vouch(&url, &servers);
    (servers, proxy, url)
}

/// Uses everything that the store has, as two clients.
async fn use_everything(servers: &[Redis], proxy: &Proxy, url: &str) {
    // Servers whose tokens are ahead: any two are told of the larger one.
    servers[0].call(&["SET", "clinch:~{fence}", "2000000000000000"]);
    servers[1].call(&["SET", "clinch:~{fence}", "2100000000000000"]);
    let (near, far) = (connect(url).await.ttl(Duration::from_secs(2)).unwrap(), connect(url).await);
    let guard = lock(&near, "job").await;
    assert!(guard.token().get() > 2_000_000_000_000_000, "{guard:?}");
    assert!(far.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    let waiter = queue(&far, "job");
    eventually("the waiter watches", async || {
        let watches = |server: &Redis| server.client().commandstats().contains_key("client|caching");
        servers.iter().all(watches).then_some(())
    })
    .await;
    assert_eq!(far.state("job").await.unwrap().unwrap().claims[0].id, guard.claim_id());
    assert!(far.list("").await.unwrap().iter().any(|state| state.name.as_str() == "job"));
    guard.verify().await.unwrap();
    guard.extend(Duration::from_secs(3)).await.unwrap();
    let deadline = guard.deadline();
    eventually("it is renewed", async || (guard.deadline() > deadline).then_some(())).await;
    let before = guard.token();
    release(guard).await;
    let guard = waiter.await.unwrap();
    assert!(guard.token() > before);
    near.evict("job", guard.claim_id()).await.unwrap();
    assert_eq!(guard.verify().await.unwrap_err().loss().map(|loss| loss.kind), Some(LossKind::Deleted));

    let detached = lock(&near, "detached").await.detach().await.unwrap();
    far.renew_detached("detached", detached.claim, Duration::from_secs(9)).await.unwrap();
    assert_eq!(far.release_detached("detached", detached.claim).await.unwrap(), Released::Released);

    // A claim of which the last server has said nothing when its connection breaks.
    proxy.hold_replies(true);
    let guard = lock(&far, "broken").await;
    let there = async || servers[2].call(&["EXISTS", "clinch:broken"]).int() == 1;
    eventually("the claim arrives", async || there().await.then_some(())).await;
    proxy.cut_all();
    proxy.hold_replies(false);
    release(guard).await;
    eventually("it is withdrawn there, too", async || (!there().await).then_some(())).await;
    for locks in [near, far] {
        locks.close(PATIENCE).await.unwrap();
    }
}

#[tokio::test]
async fn a_user_with_the_least_rights_can_do_everything() {
    // What durable=on asks for besides.
    let (servers, proxy, url) = servers(&[rules(), vec!["+config|get".to_owned()]].concat());
    use_everything(&servers, &proxy, &url).await;
    for server in &servers {
        assert_eq!(server.call(&["ACL", "LOG"]).array(), [], "something was asked for in vain");
    }
    assert!(servers[2].client().commandstats().contains_key("client|kill"), "a broken connection was ended");
}

#[tokio::test]
async fn a_user_who_may_not_end_connections_can_do_everything() {
    let fewer: Vec<String> = rules().into_iter().filter(|rule| rule != "+client|kill").collect();
    let (servers, proxy, url) = servers(&fewer);
    use_everything(&servers, &proxy, &url).await;
}

#[tokio::test]
async fn a_user_who_may_not_be_told_of_changes_asks() {
    let fewer: Vec<String> = rules().into_iter().filter(|rule| rule != "+client|tracking").collect();
    let (_servers, _proxy, url) = servers(&fewer);
    let (near, far) = (connect(&url).await, connect(&url).await);
    let guard = lock(&near, "job").await;
    let waiter = queue(&far, "job");
    release(guard).await;
    release(waiter.await.unwrap()).await;
}
