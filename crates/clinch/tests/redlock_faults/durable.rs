//! Servers that forget nothing vote after a restart, unless a clock was set; not before somebody has watched them.

use std::collections::HashMap;
use std::time::SystemTime;

use clinch::{ClaimId, Clock, Env, Lane, Random};

use super::late::Detour;
use super::*;

const QUERY: &str = "durable=on&max_ttl=60s&ttl=60s";

/// When somebody has watched the servers for long enough, by all their clocks.
const LATER: i64 = 70;

const HOUR: i64 = 3600;

/// Three servers that vouch for each other. The first alone still has a lock that all of them had given, of a holder who is not there
/// to renew it: something befell the second, by whose clock the lease is over, and the third gives its vote as if it had never been
/// asked.
struct Stage {
    servers: Servers,
    name: String,
    holder: ClaimId,
}

impl Stage {
    async fn new(hazard: &str) -> Stage {
        let servers = compared_for(LATER).await;
        let locks = clinch::connect(&servers.url(QUERY)).await.unwrap();
        let name = unique(hazard);
        let guard = lock(&locks, &name).await;
        eventually("all have given it", async || (servers.with_key(&name).len() == 3).then_some(())).await;
        let holder = guard.detach().await.unwrap().claim;
        Stage { servers, name, holder }
    }

    async fn befall(&self, restarted: &[usize]) {
        self.befall_by(HOUR, restarted).await;
    }

    async fn befall_by(&self, seconds: i64, restarted: &[usize]) {
        // First the clock: a server that had run for an hour before it answered would be another one.
        self.servers.0[1].step_clock(LATER + seconds);
        restarted.iter().for_each(|at| self.servers.0[*at].restart());
        self.servers.0[2].call(&["DEL", &format!("clinch:{}", self.name)]);
        eventually("its lease is over there", async || {
            (self.servers.with_key(&self.name) == [0]).then_some(())
        })
        .await;
    }

    async fn is_not_granted_to(&self, rival: &Locks) {
        let second = rival.mutex(&self.name).unwrap().try_lock().await;
        assert!(!matches!(second, Ok(Some(_))), "somebody has it beside {}", self.holder);
    }
}

/// With how many other clocks what was left on a server compares its own.
fn witnesses(server: &Redis) -> usize {
    let left = "return redis.call('GET', redis.call('KEYS', 'clinch:~{voucher}:*')[1] or '') or ''";
    server.call(&["EVAL", left, "0"]).text().split(' ').skip(3).count()
}

/// One by one, as the others are, they would vouch for it: each was there when its clock was right.
#[tokio::test]
async fn a_newcomer_sees_that_a_clock_was_set_though_all_have_restarted() {
    let stage = Stage::new("all-restarted").await;
    stage.befall(&[0, 1, 2]).await;
    for _ in 0..2 {
        let newcomer = clinch::connect(&stage.servers.url(QUERY)).await.unwrap();
        stage.is_not_granted_to(&newcomer).await;
    }
}

/// Its clock ended the lease, and what was left of it at the same time.
#[tokio::test]
async fn a_clock_that_was_set_ahead_of_its_voucher_does_not_vote() {
    let stage = Stage::new("forty-days").await;
    stage.befall_by(40 * 24 * HOUR, &[]).await;
    let newcomer = clinch::connect(&stage.servers.url(QUERY)).await.unwrap();
    stage.is_not_granted_to(&newcomer).await;
}

/// It is the first to look after the servers: nothing that was left there is meant for it.
#[tokio::test]
async fn the_first_of_a_group_waits_and_is_told_for_how_long() {
    let stage = Stage::new("new-group").await;
    stage.befall(&[]).await;
    let newcomer = clinch::connect(&stage.servers.url("durable=on&max_ttl=1h&ttl=60s")).await.unwrap();
    stage.is_not_granted_to(&newcomer).await;
    let error = newcomer.mutex("job").unwrap().try_lock().await.expect_err("nobody has watched them");
    let told = chain(&error);
    // An hour, and as much longer as that can take by another clock.
    assert!(told.contains("does not vote for another 1h "), "{told}");
    assert!(told.contains("may have had its clock set before"), "{told}");
}

#[tokio::test]
async fn who_may_not_read_info_sees_that_a_clock_was_set() {
    let rules = "on nopass ~* &* +@all -info";
    let servers = Servers((0..3).map(|_| durable().acl_user("clinch", rules).start()).collect());
    let hosts = servers.0.iter().map(|server| format!("clinch:x@{}", server.addr()));
    let url = url_of(hosts, QUERY);
    eventually("each is compared with the two others", async || {
        let error = clinch::connect(&url).await.unwrap().mutex("job").unwrap().try_lock().await;
        error.expect_err("nobody has watched them");
        servers.0.iter().all(|server| witnesses(server) == 2).then_some(())
    })
    .await;
}

/// It is the same process, whatever it says of its past: a client that was there is no worse off than one that comes.
#[tokio::test]
async fn a_server_that_tells_another_past_is_no_other_server() {
    let servers = Servers::durable(4);
    for at in 0..3 {
        restarts::follow(&servers, at, 3).await;
    }
    let three = || servers.0[..3].iter();
    let hosts = three().map(|server| server.addr().to_string());
    let locks = connect(&servers.url_at(hosts, "durable=on&max_ttl=24h")).await;
    drop(lock(&locks, &unique("before")).await);
    eventually("they have run for longer than they are away", async || {
        let runs =
            |server: &Redis| server.client().info("server")["uptime_in_seconds"].parse::<u64>().unwrap();
        three().all(|server| runs(server) > 3).then_some(())
    })
    .await;
    for server in three() {
        server.call(&["CONFIG", "RESETSTAT"]);
        server.call(&["CLIENT", "KILL", "TYPE", "normal"]);
    }
    all_vote_for(&locks).await;
}

/// All that it knows of the other clocks is too old to be compared with.
#[tokio::test]
async fn who_did_nothing_for_long_sees_that_a_clock_was_set() {
    let stage = Stage::new("idle").await;
    let idle = timeless(&stage.servers).await;
    drop(lock(&idle, &unique("before")).await);
    // Twenty seconds pass, here and there.
    pass(20, &stage.servers, LATER + 20).await;
    stage.befall(&[1]).await;
    // It meets the one that restarted, and reads no other clock. What it is told of the lock is no matter.
    eventually("it is connected again", async || {
        let _ = idle.state(&stage.name).await;
        let clients = stage.servers.0[1].client().info("clients")["connected_clients"].parse::<u32>();
        (clients.unwrap() > 1).then_some(())
    })
    .await;
    let _ = idle.state(&stage.name).await;
    stage.is_not_granted_to(&idle).await;
}

/// A client by whose clock time can pass at once.
async fn timeless(servers: &Servers) -> Locks {
    let network = Detour { proxies: HashMap::new(), past: false.into() };
    let clock = Clock::simulated(SystemTime::now());
    let env = Env::new(clock, Random::system(), Lane::here().unwrap(), Arc::new(network));
    Locks::connect(&servers.url(QUERY), env).await.unwrap()
}

/// So many seconds pass for such clients, and on the servers, which are `ahead` then.
async fn pass(seconds: u64, servers: &Servers, ahead: i64) {
    tokio::time::pause();
    // Before others run, who could read a clock in between.
    servers.0.iter().for_each(|server| server.step_clock(ahead));
    tokio::time::advance(Duration::from_secs(seconds)).await;
    tokio::time::resume();
}

/// Servers that have been compared with each other for so many seconds.
async fn compared_for(seconds: i64) -> Servers {
    let servers = Servers((0..3).map(|_| durable().stepped_clock().start()).collect());
    eventually("each is compared with the two others", async || {
        clinch::connect(&servers.url(QUERY)).await.unwrap();
        servers.0.iter().all(|server| witnesses(server) == 2).then_some(())
    })
    .await;
    servers.0.iter().for_each(|server| server.step_clock(seconds));
    servers
}

/// What it saw when it came is too old by then to be compared.
#[tokio::test]
async fn who_does_nothing_for_a_while_after_it_came_need_not_wait() {
    let servers = compared_for(LATER).await;
    let locks = timeless(&servers).await;
    pass(20, &servers, LATER + 20).await;
    let granted = locks.mutex("job").unwrap().try_lock().await;
    assert!(granted.unwrap().is_some());
}

/// Each of its tries finds nothing but readings that are too old.
#[tokio::test]
async fn who_tries_seldom_waits_no_longer_than_others() {
    let servers = compared_for(30).await;
    let locks = timeless(&servers).await;
    let mutex = locks.mutex("job").unwrap();
    pass(20, &servers, 50).await;
    let error = mutex.try_lock().await.expect_err("nobody has watched them for long enough");
    assert!(chain(&error).contains("does not vote for another "), "{error:?}");
    pass(20, &servers, 70).await;
    // Its own 66 seconds are not over.
    assert!(mutex.try_lock().await.unwrap().is_some());
}
