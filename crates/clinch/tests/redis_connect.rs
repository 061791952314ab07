//! `redis://`: every form of URL, every refusal, and the servers and users that can do less or more.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::io::BufRead;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use clinch::{Error, ErrorKind, Locks, LossKind, Released};
use clinch_testkit::{Cluster, Proxy, Redis, Reply, Sentinel, tools};

mod common;

use common::{
    PATIENCE, contend_where_the_runtime_is_gone, contend_without_a_runtime, eventually, lock, queue, release,
    unique,
};

/// A password that must not show anywhere.
const SECRET: &str = "hunter2";

/// A server with users, for all tests that leave it alone.
static SERVER: LazyLock<Redis> = LazyLock::new(|| {
    Redis::builder().password(SECRET).acl_user("ann", &format!("on >{SECRET} ~* &* +@all")).start()
});

/// A server that speaks TLS, also on an address that its certificate does not name.
static ENCRYPTED: LazyLock<Redis> =
    LazyLock::new(|| Redis::builder().tls().arg("--bind", "127.0.0.1 127.0.0.2").start());

async fn connect(url: &str) -> Locks {
    clinch::connect(url).await.unwrap()
}

/// The error of a URL that is refused, which shows no secret.
async fn refused(url: &str) -> Error {
    let error = clinch::connect(url).await.expect_err(url);
    for shown in [error.to_string(), format!("{error:?}"), format!("{error:#?}")] {
        assert!(!shown.contains(SECRET), "{url}: {shown}");
    }
    error
}

/// A real server that speaks HTTP.
struct Http(Child, u16);

impl Http {
    fn start() -> Http {
        let script = "import http.server as h
s=h.ThreadingHTTPServer(('127.0.0.1',0),h.SimpleHTTPRequestHandler)
print(s.server_address[1],flush=True)
s.serve_forever()";
        let mut python = Command::new("python3");
        let python = python.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = python.spawn().expect("these tests need python3");
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Http(child, line.trim().parse().unwrap())
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port at which nobody listens any more.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

mod urls {
    use super::*;

    /// A lock taken through this URL is this key of this database.
    async fn expect_key(redis: &Redis, url: &str, db: u32, prefix: &str) {
        let name = unique("url");
        let guard = lock(&connect(url).await, &name).await;
        let mut client = redis.client();
        client.call(&["SELECT", &db.to_string()]);
        let record = client.call(&["GET", &format!("{prefix}{name}")]);
        assert!(
            matches!(record, Reply::Text(text) if text.starts_with(&guard.claim_id().to_string())),
            "{url}"
        );
        release(guard).await;
    }

    #[tokio::test]
    async fn every_form_of_url_leads_to_its_server_database_and_key() {
        let (port, socket) = (SERVER.port(), SERVER.socket());
        let socket = socket.display();
        for (url, db, prefix) in [
            (format!("redis://:{SECRET}@127.0.0.1:{port}"), 0, "clinch:"),
            (format!("REDIS://ann:{SECRET}@localhost:{port}/"), 0, "clinch:"),
            (format!("redis://ann:{SECRET}@127.0.0.1:{port}/3?ttl=5s"), 3, "clinch:"),
            (format!("redis://:%68unter2@127.0.0.1:{port}/1?prefix=a%20b/"), 1, "a b/"),
            (format!("redis://:{SECRET}@127.0.0.1:{port}/2?prefix="), 2, ""),
            (format!("redis://:{SECRET}@127.0.0.1:{port}/4?protocol=resp2"), 4, "clinch:"),
            (format!("redis://:{SECRET}@127.0.0.1:{port}/5?lean=on"), 5, "clinch:"),
            (format!("redis://:{SECRET}@127.0.0.1:{port}?require=fencing,fifo,push"), 0, "clinch:"),
            (format!("redis+unix://:{SECRET}@{socket}"), 0, "clinch:"),
            (format!("redis+unix://ann:{SECRET}@{socket}?db=6&protocol=resp2"), 6, "clinch:"),
        ] {
            expect_key(&SERVER, &url, db, prefix).await;
        }
        let (port, ca) = (ENCRYPTED.port(), ENCRYPTED.certificates().ca());
        let ca = ca.display();
        for url in
            [format!("rediss://127.0.0.1:{port}/1?ca={ca}"), format!("rediss://localhost:{port}/1?ca={ca}")]
        {
            expect_key(&ENCRYPTED, &url, 1, "clinch:").await;
        }
    }

    #[tokio::test]
    async fn a_server_that_asks_for_a_certificate_gets_ours() {
        let redis = Redis::builder().tls().arg("--tls-auth-clients", "yes").start();
        let tls = redis.certificates();
        let url = format!(
            "{}&cert={}&key={}",
            redis.url(),
            tls.client_cert().display(),
            tls.client_key().display()
        );
        expect_key(&redis, &url, 0, "clinch:").await;
        assert_eq!(refused(&redis.url()).await.kind(), ErrorKind::Unavailable);
        let half = refused(&format!("{}&cert={}", redis.url(), tls.client_cert().display())).await;
        assert_eq!(half.kind(), ErrorKind::Invalid, "{half:?}");
    }

    #[tokio::test]
    async fn every_refusal_says_what_to_change() {
        use ErrorKind::{Invalid, Refused, Unavailable, Unsupported};
        let (port, tls, free, http) = (SERVER.port(), ENCRYPTED.port(), free_port(), Http::start());
        let other = Redis::builder().tls().start();
        let (ca, other) = (ENCRYPTED.certificates().ca(), other.certificates().ca());
        let (ca, other) = (ca.display(), other.display());
        let login = format!(":{SECRET}@127.0.0.1:{port}");
        for (url, kind, words) in [
            (format!("redis://:x{login}"), Refused, "user and password in the URL"),
            (format!("redis://127.0.0.1:{port}"), Refused, "user and password in the URL"),
            (format!("redis://bob{login}"), Refused, "user and password in the URL"),
            (format!("redis://ann@127.0.0.1:{port}"), Refused, "user and password in the URL"),
            (format!("redis://{login}/99"), Invalid, "out of range"),
            (format!("redis://{login}/main"), Invalid, "a database of Redis is a number"),
            (format!("redis://:{SECRET}@127.0.0.1:{free}"), Unavailable, "Connection refused"),
            (format!("redis://:{SECRET}@nowhere.invalid"), Unavailable, "nowhere.invalid:6379"),
            ("redis+unix:///nowhere/redis.sock".to_owned(), Unavailable, "No such file"),
            (format!("redis://:{SECRET}@127.0.0.1:{}", http.1), Unavailable, "did not let us in"),
            (format!("redis://127.0.0.1:{}?protocol=resp2", http.1), Unavailable, "did not let us in"),
            (format!("rediss://127.0.0.1:{}?ca={ca}", http.1), Refused, "redis:// speaks without TLS"),
            (format!("rediss://127.0.0.1:{tls}?ca={other}"), Refused, "ca= names the authority"),
            (format!("rediss://127.0.0.1:{tls}"), Refused, "UnknownIssuer; ca= names the authority"),
            (format!("rediss://127.0.0.2:{tls}?ca={ca}"), Refused, "not valid for name"),
            (format!("rediss://127.0.0.1:{tls}?ca=/nowhere.pem"), Invalid, "/nowhere.pem cannot be used"),
            (format!("rediss://:{SECRET}@127.0.0.1:{port}?ca={ca}"), Unavailable, "did not answer"),
            (format!("redis://127.0.0.1:{tls}"), Unavailable, "did not let us in"),
            (format!("redis://{login}?ca={ca}"), Invalid, "are for rediss://"),
            (format!("redis://{login}?lien=on"), Invalid, "did you mean lean=?"),
            (format!("redis://{login}?perfix=x"), Invalid, "did you mean prefix=?"),
            (format!("redis://{login}?password={SECRET}"), Invalid, "it knows ca=, cert="),
            (format!("redis://{login}?lean=on&lean=on"), Invalid, "stands twice"),
            (format!("redis://{login}?protocol={SECRET}"), Invalid, "protocol= is one of"),
            (format!("redis://{login}?lean=on&require=fencing"), Unsupported, "\"fencing\""),
            (format!("redis+cluster://{login}"), Unsupported, "cluster support disabled"),
        ] {
            let error = clinch::connect(&url).await.expect_err(&url);
            assert_eq!(error.kind(), kind, "{url}: {error:?}");
            assert!(error.to_string().contains(words), "{url}: {error}");
        }
    }

    #[tokio::test]
    async fn a_password_is_never_shown() {
        let (port, free) = (SERVER.port(), free_port());
        for url in [
            format!("redis://:x{SECRET}@127.0.0.1:{port}"),
            format!("redis://bob:{SECRET}@127.0.0.1:{port}"),
            format!("redis://ann:{SECRET}@127.0.0.1:{port}/99"),
            format!("redis://ann:{SECRET}@127.0.0.1:{free}?password={SECRET}"),
            format!("redis://ann:{SECRET}@127.0.0.1:{free}"),
            format!("redis://ann:{SECRET}@127.0.0.1:{free}:1"),
            format!("redis://ann:{SECRET}%ff@127.0.0.1:{free}"),
            format!("redis://ann:{SECRET}@a,b"),
            format!("redis+sentinel://ann:{SECRET}@127.0.0.1:{free}/main?sentinel_password={SECRET}"),
            format!("rediss://ann:{SECRET}@127.0.0.1:{port}"),
        ] {
            refused(&url).await;
        }
        let redis = Redis::builder().password(SECRET).start();
        let locks = connect(&redis.url()).await;
        assert!(!format!("{locks:?} {:?}", locks.mutex("job").unwrap()).contains(SECRET));
        redis.kill();
        let error = locks.mutex("job").unwrap().try_lock().await.unwrap_err();
        assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
    }

    /// As people write them: what should have been `%2F` or `%3F` ends the part of the URL in which secrets are expected.
    #[tokio::test]
    async fn a_password_that_should_have_been_escaped_is_not_shown_either() {
        for url in [
            format!("redis://:{SECRET}/x@127.0.0.1"),
            format!("redis://:x/{SECRET}@127.0.0.1"),
            format!("redis://:1/{SECRET}@127.0.0.1"),
            format!("redis://ann:1/{SECRET}@127.0.0.1"),
            format!("redis://ann:1?{SECRET}@127.0.0.1"),
            format!("redis://ann:{SECRET}?x@127.0.0.1"),
        ] {
            refused(&url).await;
        }
    }

    #[tokio::test]
    async fn a_replica_is_refused() {
        let replica = Redis::builder().replica_of(&SERVER).password(SECRET).start();
        let error = refused(&replica.url()).await;
        assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
        assert!(error.to_string().contains("give the address of its master"), "{error}");
    }

    #[tokio::test]
    async fn a_server_that_may_drop_locks_is_refused_unless_the_url_takes_the_risk() {
        for policy in ["allkeys-lru", "volatile-ttl"] {
            let redis = Redis::builder().arg("--maxmemory-policy", policy).start();
            // Without a limit nothing is dropped.
            release(lock(&connect(&redis.url()).await, "job").await).await;
            redis.call(&["CONFIG", "SET", "maxmemory", "100mb"]);
            let error = refused(&redis.url()).await;
            assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
            let text = error.to_string();
            assert!(text.contains(policy) && text.contains("eviction=allow"), "{text}");
            release(lock(&connect(&format!("{}?eviction=allow", redis.url())).await, "job").await).await;
        }
    }
}

/// Uses everything that the full store has, as two clients of a URL. `pushed`: whether waiters hear of a grant.
async fn use_everything(redis: &Redis, url: &str, pushed: bool) {
    let (near, far) = (connect(url).await.ttl(Duration::from_secs(2)).unwrap(), connect(url).await);
    assert!(near.capabilities().fencing && near.capabilities().push);
    let name = unique("everything");
    let guard = lock(&near, &name).await;
    assert!(far.mutex(&name).unwrap().try_lock().await.unwrap().is_none());
    let waiter = queue(&far, &name);
    let inbox = "local key = redis.call('KEYS', '*claims:clinch:' .. ARGV[1])[1]
        local record = key and redis.call('HVALS', key)[1]
        return record and string.match(record, '^w %S+ %d+ %d+ %d+ (%S+)') or ''";
    eventually("the waiter waits, and listens if it may", async || {
        let inbox = redis.call(&["EVAL", inbox, "0", &name]).text();
        (!inbox.is_empty() && (inbox != "-") == pushed).then_some(())
    })
    .await;
    let claims: Vec<bool> =
        far.state(&name).await.unwrap().unwrap().claims.iter().map(|claim| claim.granted).collect();
    assert_eq!(claims, [true, false]);
    assert!(far.list("").await.unwrap().iter().any(|state| state.name.as_str() == name));
    guard.verify().await.unwrap();
    guard.extend(Duration::from_secs(3)).await.unwrap();
    let deadline = guard.deadline();
    eventually("it is renewed", async || (guard.deadline() > deadline).then_some(())).await;
    let before = guard.token();
    release(guard).await;
    let guard = waiter.await.unwrap();
    assert!(guard.token() > before);
    guard.release_closed(Duration::from_millis(10)).await.unwrap();

    let both = (near.rwlock(&name).unwrap(), far.rwlock(&name).unwrap());
    let first = both.0.write().timeout(PATIENCE).await.unwrap().downgrade().await.unwrap();
    let second = both.1.read().timeout(PATIENCE).await.unwrap();
    let deadline = first.deadline();
    eventually("a reader is renewed", async || (first.deadline() > deadline).then_some(())).await;
    far.evict(&name, first.claim_id()).await.unwrap();
    let loss = tokio::time::timeout(PATIENCE, first.lost()).await.unwrap();
    assert_eq!(loss.kind, LossKind::Deleted);
    release(second).await;

    let permits = near.semaphore(&unique("permits"), 3).unwrap();
    let two = permits.acquire(2).unwrap().timeout(PATIENCE).await.unwrap();
    assert!(permits.try_acquire(2).await.unwrap().is_none());
    release(two).await;

    let foreign = unique("foreign");
    redis.call(&["SET", &format!("clinch:{foreign}"), "x"]);
    let waiter = queue(&far, &foreign);
    let queued = "return #redis.call('KEYS', '*queue:clinch:' .. ARGV[1])";
    eventually("it waits", async || (redis.call(&["EVAL", queued, "0", &foreign]).int() == 1).then_some(()))
        .await;
    redis.call(&["DEL", &format!("clinch:{foreign}")]);
    release(waiter.await.unwrap()).await;
    for locks in [near, far] {
        locks.close(PATIENCE).await.unwrap();
    }
}

mod users {
    use super::*;

    /// The commands that the scripts call.
    const IN_SCRIPTS: &str = "time exists set getset getrange setrange pttl pexpire del hget hmget hvals hgetall hlen hscan \
        hdel hset hsetnx rpush lpush lrange llen lindex lrem lpop zadd zcard zscore zrange zrevrange zrangebyscore zrem publish";

    /// The commands that clients send, HELLO and AUTH apart, which everybody may.
    const SENT: &str = "evalsha script|load subscribe ping client|tracking client|caching scan info";

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
            eventually("it waits", async || {
                (locks.state(name).await.unwrap()?.claims.len() == 2).then_some(())
            })
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
        eventually("the replica follows", async || {
            (master.call(&["WAIT", "1", "100"]).int() == 1).then_some(())
        })
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

    /// Who waits may listen, but who releases may not tell.
    #[tokio::test]
    async fn a_release_that_may_not_publish_is_a_release() {
        let redis = Redis::start();
        // Whoever is not told looks when the lease that it knows of has ended.
        let near =
            connect(&user(&redis, &all_but("publish"), "&*")).await.ttl(Duration::from_secs(2)).unwrap();
        let guard = lock(&near, "job").await;
        let waiter = queue(&connect(&redis.url()).await, "job");
        let listens = "return #redis.call('PUBSUB', 'CHANNELS')";
        eventually("it listens", async || (redis.call(&["EVAL", listens, "0"]).int() == 1).then_some(()))
            .await;
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
}

mod servers {
    use super::*;

    #[tokio::test]
    async fn valkey_can_do_everything() {
        let valkey = Redis::builder().binary(tools::valkey()).start();
        use_everything(&valkey, &valkey.url(), true).await;
    }

    #[tokio::test]
    async fn redis_8_can_do_everything() {
        let redis = Redis::builder().binary(tools::redis_8()).start();
        use_everything(&redis, &redis.url(), true).await;
    }

    #[tokio::test]
    async fn protocol_2_can_do_everything() {
        let redis = Redis::start();
        use_everything(&redis, &format!("{}?protocol=resp2", redis.url()), true).await;
    }

    #[tokio::test]
    async fn valkey_without_scripts_has_a_lean_mutex() {
        let rules = "on >pw ~clinch:* -@all +set +delifeq +getrange +pttl +scan +info";
        let valkey = Redis::builder().binary(tools::valkey()).acl_user("lean", rules).start();
        let url = valkey.url_as("lean", "pw");
        let (near, far) = (connect(&url).await.ttl(Duration::from_secs(1)).unwrap(), connect(&url).await);
        let can = near.capabilities();
        assert!(!can.fencing && !can.fifo && !can.shared && !can.push && can.expiry && can.hosts);
        let guard = lock(&near, "job").await;
        assert!(far.mutex("job").unwrap().try_lock().await.unwrap().is_none());
        let waiter = queue(&far, "job");
        guard.verify().await.unwrap();
        let deadline = guard.deadline();
        eventually("it is renewed", async || (guard.deadline() > deadline).then_some(())).await;
        assert!(!waiter.is_finished());
        assert_eq!(far.list("").await.unwrap()[0].claims[0].id, guard.claim_id());
        release(guard).await;
        let guard = waiter.await.unwrap();
        valkey.call(&["SET", "clinch:job", "of another", "KEEPTTL"]);
        assert_eq!(guard.verify().await.unwrap_err().kind(), ErrorKind::Lost);
        assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
        assert_eq!(valkey.call(&["GET", "clinch:job"]).text(), "of another", "it was left alone");
        let error = near.rwlock("other").unwrap().read().timeout(PATIENCE).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    }

    #[tokio::test]
    async fn a_grant_without_its_copies_is_none() {
        let master = Redis::start();
        let replica = Redis::builder().replica_of(&master).start();
        let locks = connect(&format!("{}?wait_replicas=1", master.url())).await;
        release(lock(&locks, "job").await).await;
        replica.pause();
        let mutex = locks.mutex("job").unwrap();
        let error = mutex.lock().timeout(Duration::from_millis(2500)).await.unwrap_err();
        assert!([ErrorKind::Unknown, ErrorKind::Unavailable].contains(&error.kind()), "{error:?}");
        assert!(format!("{error:?}").contains("only 0 of 1 replicas"), "{error:?}");
        eventually("it is not held", async || {
            (master.call(&["EXISTS", "clinch:job"]).int() == 0).then_some(())
        })
        .await;
        let queue = master.call(&["EVAL", "return #redis.call('KEYS', '*queue:clinch:job')", "0"]);
        assert_eq!(queue.int(), 0);
        replica.resume();
        release(lock(&locks, "job").await).await;
    }
}

mod executors {
    use super::*;

    #[test]
    fn everything_works_without_a_runtime() {
        let redis = Redis::start();
        contend_without_a_runtime(&redis.url());
        contend_without_a_runtime(&format!("{}?lean=on", redis.url()));
    }

    #[test]
    fn grants_are_confirmed_without_a_runtime() {
        let master = Redis::start();
        let _replica = Redis::builder().replica_of(&master).start();
        clinch_testkit::until("the replica follows", || master.call(&["WAIT", "1", "100"]).int() == 1);
        contend_without_a_runtime(&format!("{}?wait_replicas=1", master.url()));
    }

    #[test]
    fn everything_works_where_the_runtime_is_gone() {
        contend_where_the_runtime_is_gone(&Redis::start().url());
    }
}

mod connections {
    use super::*;

    /// All connections that a server takes. One that was closed a moment ago may still be counted: a process that another
    /// test starts has a copy of it until it runs its program.
    fn crowd(redis: &Redis, count: usize) -> Vec<clinch_testkit::Resp> {
        let mut clients = Vec::new();
        let mut join = || {
            let mut client = redis.client();
            let joins = matches!(client.try_call(&["PING"]), Ok(Reply::Text(_)));
            clients.extend(joins.then_some(client));
            clients.len()
        };
        clinch_testkit::until("every connection is taken", || join() == count);
        assert_eq!(join(), count, "there is no bound");
        clients
    }

    #[tokio::test]
    async fn a_server_that_has_no_connection_left_is_waited_for() {
        let redis = Redis::builder().arg("--maxclients", "6").start();
        let locks = connect(&redis.url()).await;
        redis.call(&["CLIENT", "KILL", "TYPE", "normal"]);
        let mut crowd = crowd(&redis, 6);
        for error in [refused(&redis.url()).await, locks.mutex("job").unwrap().try_lock().await.unwrap_err()]
        {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        }
        let waiter = queue(&locks, "job");
        let rejected = |client: &mut clinch_testkit::Resp| -> u64 {
            client.info("stats")["rejected_connections"].parse().unwrap()
        };
        let before = rejected(&mut crowd[0]);
        eventually("it is turned away", async || (rejected(&mut crowd[0]) > before + 1).then_some(())).await;
        assert!(!waiter.is_finished(), "ended with {:?}", waiter.await);
        drop(crowd);
        release(waiter.await.unwrap()).await;
    }

    /// What a client leads to changes: after a failover, or behind an address that is given to another.
    #[tokio::test]
    async fn a_server_that_may_drop_locks_is_refused_also_when_it_comes_later() {
        let (first, second) = (Redis::start(), Redis::start());
        second.call(&["CONFIG", "SET", "maxmemory", "100mb", "maxmemory-policy", "allkeys-lru"]);
        for query in ["", "?eviction=allow"] {
            let proxy = Proxy::start(first.addr());
            let locks = connect(&format!("redis://{}{query}", proxy.addr())).await;
            release(lock(&locks, "job").await).await;
            proxy.set_upstream(second.addr());
            proxy.cut_all();
            let locked = locks.mutex("job").unwrap().lock().timeout(PATIENCE).await;
            match query {
                "" => {
                    let error = locked.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
                    assert!(error.to_string().contains("eviction=allow"), "{error}");
                }
                _ => release(locked.unwrap()).await,
            }
        }
    }

    /// A server may repeat what it was sent.
    #[tokio::test]
    async fn a_password_that_the_server_repeats_is_not_shown() {
        let redis = Redis::builder()
            .arg("--rename-command", "AUTH XAUTH")
            .arg("--rename-command", "HELLO XHELLO")
            .start();
        let error = refused(&format!("redis://ann:{SECRET}@{}", redis.addr())).await;
        assert!(error.to_string().contains("did not let us in"), "{error}");
    }

    #[tokio::test]
    async fn a_server_without_subscriptions_is_asked() {
        let redis = Redis::builder().arg("--rename-command", "SUBSCRIBE XSUBSCRIBE").start();
        use_everything(&redis, &redis.url(), false).await;
    }
}
