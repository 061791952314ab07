//! Users who may do no more than they must, or less.

use super::*;

/// The commands that the scripts call.
const IN_SCRIPTS: &str = "time exists set getset getrange setrange pttl pexpire del hget hmget hgetall hlen hscan \
    hdel hset hsetnx rpush lpush lrange llen lindex lrem lpop zadd zcard zscore zrange zrevrange zrangebyscore zrem publish";

/// The commands that clients send besides, HELLO and AUTH apart, which everybody may.
const SENT: &str = "evalsha script|load subscribe ping client|tracking client|caching mget scan info";

/// Makes the user who may do these things, and no more; answers the URL for it.
fn user(redis: &Redis, commands: &[&str], channels: &str) -> String {
    user_of(redis, "~clinch:*", commands, channels)
}

/// As [`user`], with the rights on these keys.
fn user_of(redis: &Redis, keys: &str, commands: &[&str], channels: &str) -> String {
    let rules = format!("on >pw {keys} {channels} -@all");
    let mut words: Vec<String> = ["ACL", "SETUSER", "clinch", "reset"].map(str::to_owned).to_vec();
    words.extend(rules.split_whitespace().map(str::to_owned));
    words.extend(commands.iter().map(|command| format!("+{command}")));
    redis.call(&words);
    redis.url_as("clinch", "pw")
}

fn all() -> Vec<&'static str> {
    IN_SCRIPTS.split_whitespace().chain(SENT.split_whitespace()).collect()
}

fn all_but(without: &str) -> Vec<&'static str> {
    all().into_iter().filter(|command| *command != without).collect()
}

#[tokio::test]
async fn a_user_with_the_least_rights_can_do_everything() {
    let redis = Redis::start();
    redis.call(&["ACL", "LOG", "RESET"]);
    use_everything(&redis, &user(&redis, &all(), "resetchannels &clinch:*"), true).await;
    assert_eq!(redis.call(&["ACL", "LOG"]).array(), [], "something was asked for in vain");
}

/// Locks, waits and is handed the lock, and asks none of the servers for anything in vain.
async fn hand_over(url: &str, servers: &[Redis]) {
    let locks = connect(url).await;
    for name in ["a", "b", "c", "d"] {
        let guard = lock(&locks, name).await;
        let waiter = queue(&connect(url).await, name);
        eventually("it waits", async || (locks.state(name).await.unwrap()?.claims.len() == 2).then_some(()))
            .await;
        guard.extend(Duration::from_secs(30)).await.unwrap();
        release(guard).await;
        release(waiter.await.unwrap()).await;
    }
    locks.list("").await.unwrap();
    for server in servers {
        assert_eq!(server.call(&["ACL", "LOG"]).array(), [], "something was asked for in vain");
    }
}

/// Queues and tokens stand beside the locks, by whatever prefix; a user has no right on those of other prefixes.
#[tokio::test]
async fn a_user_of_one_prefix_needs_no_rights_on_others() {
    let redis = Redis::start();
    let keys = "~jobs:* ~clinch:~{???}:*:jobs:* ~clinch:~{???}:fence";
    let url = user_of(&redis, keys, &all(), "resetchannels &clinch:~{inbox}:*");
    redis.call(&["ACL", "LOG", "RESET"]);
    hand_over(&format!("{url}?prefix=jobs:"), &[redis]).await;
    let redis = Redis::start();
    for (keys, prefix) in [(keys, "others:"), ("~jobs:*", "jobs:"), ("~clinch:*", "jobs:")] {
        let url = user_of(&redis, keys, &all(), "resetchannels &clinch:*");
        let connected = clinch::connect(&format!("{url}?prefix={prefix}")).await;
        let error = connected.map(drop).expect_err(keys);
        assert_eq!(error.kind(), ErrorKind::Refused, "{keys}: {error:?}");
    }
}

#[tokio::test]
async fn a_user_with_the_least_rights_can_use_a_cluster() {
    let servers = Cluster::start();
    let more = ["cluster|slots", "asking", "spublish", "ssubscribe"];
    for node in servers.nodes() {
        user(node, &[all(), more.to_vec()].concat(), "resetchannels &clinch:*");
    }
    let url = servers.url().replace("://", "://clinch:pw@");
    hand_over(&url, servers.nodes()).await;
}

/// Who may not ask for the version listens as before version 7, and so does who connected before an upgrade.
#[tokio::test]
async fn who_listens_in_another_way_is_told_in_that_way() {
    let servers = Cluster::start();
    for node in servers.nodes() {
        node.call(&["ACL", "SETUSER", "old", "on", ">pw", "~*", "&*", "+@all", "-info"]);
    }
    let new = connect(&servers.url()).await;
    let old = connect(&servers.url().replace("://", "://old:pw@")).await;
    let master = servers.master_of("clinch:job");
    let listening = async |count: usize| {
        eventually("they wait and listen", async || {
            let keys = master.call(&["KEYS", "*claims:clinch:job"]).array();
            let records = master.call(&["HVALS", &keys.into_iter().next()?.text()]).array();
            let listening = records.into_iter().map(Reply::text).filter(|record| {
                record.starts_with("w ") && record.split(' ').nth(5).is_some_and(|inbox| inbox != "-")
            });
            (listening.count() == count).then_some(())
        })
        .await;
    };
    for (holder, waiter, told) in [(&new, &old, "publish"), (&old, &new, "spublish")] {
        let guard = lock(holder, "job").await;
        let next = queue(waiter, "job");
        listening(1).await;
        let mut last = queue(holder, "job");
        listening(2).await;
        master.call(&["CONFIG", "RESETSTAT"]);
        release(guard).await;
        let next = tokio::select! {
            next = next => next.unwrap(),
            _ = &mut last => panic!("who came first was passed over"),
        };
        let stats = master.client().commandstats();
        assert!(stats.contains_key(told), "not told by {told}: {stats:?}");
        release(next).await;
        release(last.await.unwrap()).await;
    }
}

#[tokio::test]
async fn a_user_with_the_least_rights_can_use_what_sentinel_names() {
    let servers = Sentinel::start();
    for node in servers.nodes() {
        user(node, &[all(), vec!["role"]].concat(), "resetchannels &clinch:*");
    }
    let url = servers.url().replace("://", "://clinch:pw@");
    hand_over(&url, servers.nodes()).await;
}

#[tokio::test]
async fn a_user_with_the_least_rights_can_wait_for_copies_in_another_database() {
    let master = Redis::start();
    let replica = Redis::builder().replica_of(&master).start();
    let url = user(&master, &[all(), vec!["select", "wait"]].concat(), "resetchannels &clinch:*");
    eventually("the replica follows", async || (master.call(&["WAIT", "1", "100"]).int() == 1).then_some(()))
        .await;
    hand_over(&format!("{url}/3?wait_replicas=1"), &[master]).await;
    drop(replica);
}

/// Each command that scripts call is needed, and its absence is told at once.
async fn each_is_missed(redis: &Redis) {
    for without in IN_SCRIPTS.split_whitespace().filter(|command| *command != "publish") {
        let url = user(redis, &all_but(without), "resetchannels &clinch:*");
        let error = clinch::connect(&url).await.map(drop).expect_err(without);
        assert_eq!(error.kind(), ErrorKind::Refused, "{without}: {error:?}");
        let words = format!("may not run {}", without.to_uppercase());
        assert!(error.to_string().contains(&words), "{error}");
    }
}

#[tokio::test]
async fn a_missing_right_is_named_at_once() {
    each_is_missed(&Redis::start()).await;
}

#[tokio::test]
async fn a_missing_right_is_named_at_once_by_redis_8() {
    each_is_missed(&Redis::builder().binary(tools::redis_8()).start()).await;
}

#[tokio::test]
async fn without_channels_waiters_ask() {
    let redis = Redis::start();
    use_everything(&redis, &user(&redis, &all(), "resetchannels"), false).await;
}

#[tokio::test]
async fn without_subscribing_waiters_ask() {
    let redis = Redis::start();
    use_everything(&redis, &user(&redis, &all_but("subscribe"), "&*"), false).await;
}

#[tokio::test]
async fn without_publishing_waiters_ask() {
    let redis = Redis::start();
    use_everything(&redis, &user(&redis, &all_but("publish"), "&*"), false).await;
}

/// Or a read that is refused is asked for without end.
#[tokio::test]
async fn who_may_not_read_many_keys_learns_of_a_loss_by_a_renewal() {
    let redis = Redis::start();
    let locks = connect(&user(&redis, &all_but("mget"), "&*")).await.ttl(Duration::from_secs(2)).unwrap();
    let guard = lock(&locks, "job").await;
    let mut stats = redis.client();
    let mut count = |command: &str| stats.commandstats().get(command).copied().unwrap_or(0);
    eventually("it was renewed often", async || (count("pexpire") > 4).then_some(())).await;
    assert_eq!(count("client|caching"), 1, "a look that is refused");
    redis.call(&["DEL", "clinch:job"]);
    let loss = tokio::time::timeout(PATIENCE, guard.lost()).await.expect("nobody told the holder");
    assert_eq!(loss.kind, LossKind::Deleted);
}

/// Who waits may listen, but who releases may not tell.
#[tokio::test]
async fn a_release_that_may_not_publish_is_a_release() {
    let redis = Redis::start();
    // Whoever is not told looks when the lease that it knows of has ended.
    let near = connect(&user(&redis, &all_but("publish"), "&*")).await.ttl(Duration::from_secs(2)).unwrap();
    let guard = lock(&near, "job").await;
    let waiter = queue(&connect(&redis.url()).await, "job");
    let listens = "return #redis.call('PUBSUB', 'CHANNELS')";
    eventually("it listens", async || (redis.call(&["EVAL", listens, "0"]).int() == 1).then_some(())).await;
    eventually("it waits", async || (near.state("job").await.unwrap()?.claims.len() == 2).then_some(()))
        .await;
    release(guard).await;
    release(waiter.await.unwrap()).await;
}

#[tokio::test]
async fn without_scripts_redis_7_is_refused_with_advice() {
    for without in ["evalsha", "script|load"] {
        let redis = Redis::start();
        let error = refused(&user(&redis, &all_but(without), "&*")).await;
        assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
        assert!(error.to_string().contains("allow EVALSHA and SCRIPT LOAD, or use Valkey"), "{error}");
    }
}
