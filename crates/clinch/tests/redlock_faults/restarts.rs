//! Servers that come back, and have forgotten everything.

use std::io::Write as _;

use super::*;

/// The longest TTL in these tests, and so for how long a restarted server does not vote.
pub(super) const MAX_TTL: Duration = Duration::from_secs(4);

pub(super) async fn connect_forgetful(hosts: impl Iterator<Item = String>) -> Locks {
    let url = url_of(hosts, &format!("max_ttl={}s", MAX_TTL.as_secs()));
    let locks = clinch::connect(&url).await.unwrap().ttl(MAX_TTL).unwrap();
    // When the servers have just started, that waits until they vote. It also tells the client their clocks.
    drop(lock(&locks, &unique("first")).await);
    locks
}

pub(super) fn hosts(servers: &Servers) -> impl Iterator<Item = String> {
    servers.0.iter().map(|server| server.addr().to_string())
}

/// Takes a lock, and waits until it has the votes of all three: one that started a second later than the others may not
/// have voted when it was granted.
pub(super) async fn lock_on_all(servers: &Servers, locks: &Locks, name: &str) -> Guard {
    let guard = lock(locks, name).await;
    eventually("all have given their vote", async || {
        assert!(guard.is_held(), "{:?}", guard.standing());
        (servers.with_key(name).len() == 3).then_some(())
    })
    .await;
    guard
}

/// Of three servers that had given their vote, the last now gives it to anybody, as if it had never been asked, and
/// something was done to the second. Both would make the rival a majority. But the holder is told first.
pub(super) async fn holder_is_told_first(name: &str, guard: Guard, rival: &Locks) {
    let waiter = queue(rival, name);
    let loss = guard.lost().await;
    assert_eq!(loss.kind, LossKind::Deleted, "{loss}");
    assert!(!waiter.is_finished(), "two hold one lock");
    let next = waiter.await.unwrap();
    assert!(next.token() > guard.token());
}

#[tokio::test]
async fn a_server_that_came_back_empty_does_not_help_a_second_holder() {
    let servers = Servers::forgetful(3);
    let (holder, rival) =
        tokio::join!(connect_forgetful(hosts(&servers)), connect_forgetful(hosts(&servers)));
    let name = unique("forgetful");
    let guard = lock_on_all(&servers, &holder, &name).await;
    servers.0[1].restart();
    servers.0[2].call(&["DEL", &format!("clinch:{name}")]);
    // Neither who did not know the servers before, and has to be told, nor who did.
    let newcomer = clinch::connect(&servers.url("max_ttl=4s")).await.unwrap();
    let mutex = newcomer.mutex(&name).unwrap();
    eventually("it is told why nobody votes", async || {
        let error = mutex.lock().timeout(Duration::from_millis(300)).await.expect_err("two hold one lock");
        chain(&error).contains("may have forgotten").then_some(())
    })
    .await;
    holder_is_told_first(&name, guard, &rival).await;
}

#[tokio::test]
async fn a_server_that_has_forgotten_its_last_token_is_given_that_of_the_others() {
    let servers = Servers::forgetful(3);
    let url = servers.url("max_ttl=4s");
    let first = clinch::connect(&url).await.unwrap();
    for server in &servers.0[..2] {
        server.call(&["SET", "clinch:~{fence}", "9000000000000000"]);
    }
    servers.0[2].restart();
    eventually("the third is given it", async || {
        let _newcomer = clinch::connect(&url).await.unwrap();
        let fence = servers.0[2].call(&["GET", "clinch:~{fence}"]);
        (fence == Reply::Text("9000000000000000".into())).then_some(())
    })
    .await;
    drop(first);
}

/// Who comes while one of the others hangs can tell it only a part of what it has forgotten. It does not end with that.
#[tokio::test]
async fn a_server_that_was_told_too_little_is_told_the_rest() {
    let servers = Servers::forgetful(3);
    let url = servers.url("max_ttl=4s");
    drop(clinch::connect(&url).await.unwrap());
    servers.0[2].call(&["SET", "clinch:~{fence}", "9000000000000000"]);
    servers.0[2].pause();
    servers.0[0].restart();
    eventually("word is left on the one that came back", async || {
        let _newcomer = clinch::connect(&url).await.unwrap();
        let left = "return #redis.call('KEYS', 'clinch:~{voucher}:*')";
        (servers.0[0].call(&["EVAL", left, "0"]).int() == 1).then_some(())
    })
    .await;
    servers.0[2].resume();
    eventually("it is given the last token, too", async || {
        let _newcomer = clinch::connect(&url).await.unwrap();
        let fence = servers.0[0].call(&["GET", "clinch:~{fence}"]);
        (fence == Reply::Text("9000000000000000".into())).then_some(())
    })
    .await;
}

/// Two that came back empty, while the only other one that knows the last token is away, have nothing to tell each other.
#[tokio::test]
async fn servers_that_were_told_too_little_do_not_count_each_other() {
    const LAST: &str = "9000000000000000";
    let servers = Servers::forgetful(5);
    let url = servers.url("max_ttl=4s");
    let told = |server: &Redis| {
        let left = "return redis.call('GET', redis.call('KEYS', 'clinch:~{voucher}:*')[1] or '') or ''";
        let left = server.call(&["EVAL", left, "0"]).text();
        left.split(' ').nth(2).map_or(0, |told| u64::from_str_radix(told, 16).unwrap().count_ones())
    };
    eventually("each was given the tokens of three others", async || {
        drop(clinch::connect(&url).await.unwrap());
        servers.0.iter().all(|server| told(server) >= 3).then_some(())
    })
    .await;
    servers.0[4].call(&["SET", "clinch:~{fence}", LAST]);
    servers.0[4].pause();
    servers.0[..2].iter().for_each(Redis::restart);
    eventually("those who came back are given the others'", async || {
        drop(clinch::connect(&url).await.unwrap());
        servers.0[..2].iter().all(|server| told(server) >= 2).then_some(())
    })
    .await;
    servers.0[4].resume();
    eventually("they are given the last token, too", async || {
        drop(clinch::connect(&url).await.unwrap());
        let has = |server: &Redis| server.call(&["GET", "clinch:~{fence}"]) == Reply::Text(LAST.into());
        servers.0[..2].iter().all(has).then_some(())
    })
    .await;
}

#[tokio::test]
async fn another_server_under_the_same_address_does_not_help_a_second_holder() {
    let servers = Servers::forgetful(4);
    let proxy = Proxy::start(servers.0[1].addr());
    let through =
        || [servers.0[0].addr(), proxy.addr(), servers.0[2].addr()].map(|addr| addr.to_string()).into_iter();
    let (holder, rival) = tokio::join!(connect_forgetful(through()), connect_forgetful(through()));
    let name = unique("stand-in");
    let guard = lock_on_all(&servers, &holder, &name).await;
    // It has run for long, but not here.
    proxy.set_upstream(servers.0[3].addr());
    proxy.cut_all();
    servers.0[2].call(&["DEL", &format!("clinch:{name}")]);
    holder_is_told_first(&name, guard, &rival).await;
}

/// Each is refused only for as long as the other address may still lead there.
#[tokio::test]
async fn two_servers_that_exchange_their_addresses_vote_again() {
    let servers = Servers::forgetful(3);
    let proxies = [0, 1].map(|at| Proxy::start(servers.0[at].addr()));
    let [one, other] = proxies.each_ref();
    let through = [one.addr(), other.addr(), servers.0[2].addr()].map(|addr| addr.to_string());
    let locks = connect_forgetful(through.into_iter()).await;
    one.set_upstream(servers.0[1].addr());
    other.set_upstream(servers.0[0].addr());
    proxies.iter().for_each(Proxy::cut_all);
    servers.0[2].kill();
    drop(lock(&locks, &unique("exchanged")).await);
}

/// Whichever server restarts, be it the one whose answer nobody waits for: one after the other, as where all get a new version, they
/// take no lock.
#[tokio::test]
async fn a_vote_that_a_restart_took_is_set_anew_and_released_too() {
    let servers = Servers::forgetful(3);
    let proxies: Vec<Proxy> = servers.0.iter().map(|server| Proxy::start(server.addr())).collect();
    let locks = connect_forgetful(proxies.iter().map(|proxy| proxy.addr().to_string())).await;
    let name = unique("anew");
    let guard = lock_on_all(&servers, &locks, &name).await;
    for (server, proxy) in servers.0.iter().zip(&proxies) {
        proxy.delay(Duration::from_millis(30));
        server.restart();
        eventually("all have it again", async || {
            guard.extend(MAX_TTL).await.unwrap();
            (servers.with_key(&name).len() == 3).then_some(())
        })
        .await;
        proxy.delay(Duration::ZERO);
    }
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    servers.expect_no_key(&name).await;
}

/// What was sent there is lost with its connection, or found so late that the server refuses it.
#[tokio::test]
async fn a_vote_that_was_never_given_is_claimed_again() {
    let servers = Servers::durable(3);
    let proxy = Proxy::start(servers.0[2].addr());
    let hosts = [servers.0[0].addr(), servers.0[1].addr(), proxy.addr()].map(|addr| addr.to_string());
    let locks = connect(&servers.url_at(hosts.into_iter(), "durable=on&max_ttl=24h")).await;
    let locks = locks.ttl(Duration::from_secs(3)).unwrap();
    drop(lock(&locks, &unique("before")).await);
    proxy.black_hole(true);
    let name = unique("never");
    let guard = lock(&locks, &name).await;
    assert_eq!(servers.with_key(&name), [0, 1]);
    proxy.cut_all();
    proxy.black_hole(false);
    eventually("all have it", async || {
        assert!(guard.is_held(), "{:?}", guard.standing());
        (servers.with_key(&name).len() == 3).then_some(())
    })
    .await;
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    servers.expect_no_key(&name).await;
}

#[tokio::test]
async fn a_vote_is_set_anew_where_the_scripts_are_forgotten_too() {
    let servers = Servers::durable(3);
    // Tokens that are ahead of all clocks: a server that has forgotten them would give a smaller one.
    servers.0.iter().for_each(|server| drop(server.call(&["SET", "clinch:~{fence}", "9000000000000000"])));
    let locks = servers.connect().await;
    let name = unique("flushed");
    let key = format!("clinch:{name}");
    let guard = lock_on_all(&servers, &locks, &name).await;
    servers.0[1].call(&["SCRIPT", "FLUSH"]);
    servers.0[1].call(&["DEL", &key, "clinch:~{fence}"]);
    eventually("all have it again", async || {
        guard.extend(LONG_TTL).await.unwrap();
        (servers.with_key(&name).len() == 3).then_some(())
    })
    .await;
    let token = guard.token().to_string();
    for number in [&["GETRANGE", &key, "33", "48"][..], &["GET", "clinch:~{fence}"]] {
        let set = servers.0[1].call(number).text();
        assert!(set >= token, "{number:?}: {set} for {token}");
    }
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    servers.expect_no_key(&name).await;
}

#[tokio::test]
async fn a_renewal_under_way_does_not_bring_a_released_lock_back() {
    let servers = Servers::durable(3);
    let locks = servers.connect().await;
    for _ in 0..200 {
        let name = unique("back");
        let guard = lock(&locks, &name).await;
        servers.0[1].call(&["DEL", &format!("clinch:{name}")]);
        // The renewal finds one vote missing and sets it anew while the release is on its way.
        let (_, released) =
            tokio::join!(guard.extend(LONG_TTL), locks.release_detached(&name, guard.claim_id()));
        assert!(matches!(released.unwrap(), Released::Released | Released::AlreadyLost(_)));
        drop(guard);
        servers.expect_no_key(&name).await;
    }
}

/// Makes a server a replica of another until it has what that one has.
pub(super) async fn follow(servers: &Servers, replica: usize, master: usize) {
    servers.0[replica].call(&["REPLICAOF", "127.0.0.1", &servers.0[master].port().to_string()]);
    expect_info(&servers.0[replica], "master_link_status", "up").await;
    servers.0[replica].call(&["REPLICAOF", "NO", "ONE"]);
}

async fn expect_info(server: &Redis, field: &str, value: &str) {
    let is = || server.client().info("replication")[field] == value;
    eventually(&format!("{field}:{value}"), async || is().then_some(())).await;
}

/// A server that was failed over to its replica, and back: one process all the while, with most of what stood there before. It does not even
/// tell any more that it was a replica.
#[tokio::test]
async fn a_server_that_was_a_replica_meanwhile_is_not_vouched_for() {
    let servers = Servers::forgetful(4);
    let three = || servers.0[..3].iter().map(|server| server.addr().to_string());
    drop(connect_forgetful(three()).await);
    follow(&servers, 3, 0).await;
    servers.0[0].call(&["SET", "what", "it forgets"]);
    follow(&servers, 0, 3).await;
    servers.0[2].kill();
    servers.0[0].call(&["CONFIG", "SET", "repl-backlog-ttl", "1"]);
    expect_info(&servers.0[0], "master_replid2", &"0".repeat(40)).await;
    let newcomer = clinch::connect(&url_of(three(), "max_ttl=4s")).await.unwrap();
    let error = newcomer.mutex("job").unwrap().try_lock().await.expect_err("it may have forgotten locks");
    assert!(chain(&error).contains("may have forgotten"), "{}", chain(&error));
}

/// What `redis-cli --rdb` or a first replica begins is another history of the same data.
#[tokio::test]
async fn a_backup_takes_no_vote() {
    let servers = Servers::forgetful(3);
    let living = connect_forgetful(hosts(&servers)).await;
    for server in &servers.0 {
        let mut backup = std::net::TcpStream::connect(server.addr()).unwrap();
        backup.write_all(b"SYNC\r\n").unwrap();
        expect_info(server, "repl_backlog_active", "1").await;
        server.call(&["CLIENT", "KILL", "TYPE", "normal"]);
    }
    let newcomer = clinch::connect(&servers.url("max_ttl=4s")).await.unwrap();
    for locks in [newcomer, living] {
        all_vote_for(&locks).await;
    }
}

/// Uses the servers from another runtime of the same process, which has its own connections.
async fn look_from_elsewhere(locks: &Locks) {
    let locks = locks.clone();
    let look = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            eventually("all answer", async || locks.list("").await.ok()).await;
        });
    };
    tokio::task::spawn_blocking(look).await.unwrap();
}

/// A connection of ours outlives that its server was a replica; another runtime notices.
#[tokio::test]
async fn a_connection_from_before_does_not_keep_a_server_from_voting() {
    let servers = Servers::forgetful(4);
    let three = servers.0[..3].iter().map(|server| server.addr().to_string());
    let locks = connect_forgetful(three).await;
    follow(&servers, 0, 3).await;
    look_from_elsewhere(&locks).await;
    servers.0[2].kill();
    drop(lock(&locks, &unique("before")).await);
}

/// What a server says of its past changes without a restart. Who has met it before finds the word of those who come now, and does not
/// write over it for ever what nobody can read any more: asks the server again.
#[tokio::test]
async fn who_was_there_before_does_not_take_their_word_from_those_who_come() {
    let servers = Servers::forgetful(4);
    for at in 0..3 {
        follow(&servers, at, 3).await;
    }
    let three = || servers.0[..3].iter();
    let url = url_of(three().map(|server| server.addr().to_string()), "max_ttl=2s&ttl=2s");
    let left = || -> Vec<String> {
        let left = "return redis.call('GET', redis.call('KEYS', 'clinch:~{voucher}:*')[1] or '') or ''";
        three().map(|server| server.call(&["EVAL", left, "0"]).text()).collect()
    };
    let runs = |left: &[String]| -> Vec<String> {
        left.iter().map(|left| left.split(' ').nth(1).unwrap_or_default().to_owned()).collect()
    };
    let living = clinch::connect(&url).await.unwrap();
    drop(lock(&living, &unique("before")).await);
    let before = runs(&left());
    three().for_each(|server| drop(server.call(&["CONFIG", "RESETSTAT"])));
    let told = eventually("those who come leave word", async || {
        drop(clinch::connect(&url).await.unwrap());
        let told = left();
        runs(&told).iter().zip(&before).all(|(run, before)| run != before).then_some(told)
    })
    .await;
    let mutex = living.mutex("job").unwrap();
    eventually("it brings their word up to date", async || {
        drop(mutex.try_lock().await);
        let now = left();
        assert_eq!(runs(&now), runs(&told), "it writes over it");
        now.iter().zip(&told).all(|(now, told)| now != told).then_some(())
    })
    .await;
}

/// The old server lives on under its old connections, but nobody else asks it any more.
#[tokio::test]
async fn a_server_that_was_replaced_renews_nothing() {
    let mut servers = Servers::durable(4);
    let stand_in = servers.0.pop().unwrap();
    let proxy = Proxy::start(servers.0[1].addr());
    let through =
        [servers.0[0].addr(), proxy.addr(), servers.0[2].addr()].map(|addr| addr.to_string()).into_iter();
    let locks = connect(&servers.url_at(through, "durable=on&max_ttl=24h")).await;
    let name = unique("replaced");
    let guard = lock_on_all(&servers, &locks, &name).await;
    proxy.set_upstream(stand_in.addr());
    look_from_elsewhere(&locks).await;
    servers.0[2].kill();
    let error = guard.extend(LONG_TTL).await.expect_err("one of three has renewed");
    assert!(chain(&error).contains("1 of 3"), "{}", chain(&error));
}
