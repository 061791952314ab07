//! Locks that are watched are renewed on the connection that watches them: whatever comes between, nothing is lost or overlooked.

use std::sync::atomic::AtomicUsize;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::taken::is_told;
use super::*;

/// Renewed every 3 s: what is told at once is told long before the next renewal.
const TTL: Duration = Duration::from_secs(9);

/// A client of a server that has the scripts of renewals.
async fn connect(addr: SocketAddr) -> Locks {
    let locks = super::connect(&format!("redis://{addr}")).await.ttl(TTL).unwrap();
    let guard = lock(&locks, "warm").await;
    guard.extend(TTL).await.unwrap();
    guard.release().await.unwrap();
    locks
}

/// Waits until so many locks are watched, and counts renewals from then on.
async fn sees_watched(redis: &Redis, count: usize) {
    super::taken::sees_watched(redis, count).await;
    redis.call(&["CONFIG", "RESETSTAT"]);
}

/// How many were renewed since.
fn renewals(redis: &Redis) -> u64 {
    redis.client().commandstats().get("pexpire").copied().unwrap_or(0)
}

/// What happens after a renewal on the connection that watches, before the server has what follows it there. False: it ends.
type Between = Arc<dyn Fn() -> bool + Send + Sync>;

/// The way to a server where something happens in the middle of what is written.
async fn way(redis: &Redis, between: Between) -> SocketAddr {
    let (server, listener) = (redis.addr(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (client, between) = (listener.accept().await.unwrap().0, between.clone());
            let server = TcpStream::connect(server).await.unwrap();
            tokio::spawn(pass(client, server, between));
        }
    });
    addr
}

async fn pass(client: TcpStream, server: TcpStream, between: Between) {
    let ((mut from, mut back), (mut answers, mut to)) = (client.into_split(), server.into_split());
    let answers = tokio::spawn(async move { tokio::io::copy(&mut answers, &mut back).await });
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        let sent = &bytes[..count];
        let find = |what: &str| sent.windows(what.len()).position(|part| part == what.as_bytes());
        // Before the opt-in of a look stands nothing, its script, or a renewal.
        let is_renewal = |at: &usize| *at > 0 && find("LOAD").is_none();
        let at = find("*3\r\n$6\r\nCLIENT\r\n$7\r\nCACHING").filter(is_renewal).unwrap_or(count);
        to.write_all(&sent[..at]).await.unwrap();
        if at < count && !between() {
            break;
        }
        if to.write_all(&sent[at..]).await.is_err() {
            break;
        }
    }
    answers.abort();
}

#[tokio::test]
async fn a_lock_that_is_deleted_right_after_it_was_renewed_is_told_at_once() {
    let redis = Redis::start();
    let guard = lock(&connect(redis.addr()).await, "job").await;
    sees_watched(&redis, 1).await;
    eventually("it is renewed", async || (renewals(&redis) > 0).then_some(())).await;
    redis.call(&["DEL", "clinch:job"]);
    is_told(&guard).await;
}

#[tokio::test]
async fn a_lock_that_another_takes_before_the_server_notes_its_key_again_is_told_at_once() {
    let redis = Arc::new(Redis::start());
    let (server, taken) = (redis.clone(), AtomicUsize::new(0));
    let between: Between = Arc::new(move || {
        let end = std::time::Instant::now() + PATIENCE;
        while renewals(&server) == 0 {
            assert!(std::time::Instant::now() < end, "no renewal came");
        }
        if taken.fetch_add(1, Ordering::Relaxed) == 0 {
            server.call(&["SET", "clinch:job", "another", "PX", "600000"]);
        }
        true
    });
    let way = way(&redis, between).await;
    let far = connect(way).await;
    let guard = lock(&far, "job").await;
    sees_watched(&redis, 1).await;
    is_told(&guard).await;
    assert_eq!(redis.call(&["GET", "clinch:job"]).text(), "another");
}

#[tokio::test]
async fn renewals_whose_connection_ends_are_done_on_another_and_the_watch_goes_on() {
    const LOCKS: usize = 20;
    let redis = Redis::start();
    let ends = Arc::new(AtomicUsize::new(2));
    let left = ends.clone();
    let between: Between = Arc::new(move || {
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err()
    });
    let way = way(&redis, between).await;
    let far = connect(way).await;
    let mut guards = Vec::new();
    for number in 0..LOCKS {
        guards.push(lock(&far, &format!("job {number}")).await);
    }
    sees_watched(&redis, LOCKS).await;
    eventually("two renewals ended", async || (ends.load(Ordering::Relaxed) == 0).then_some(())).await;
    sees_watched(&redis, LOCKS).await;
    eventually("they are renewed", async || (renewals(&redis) >= LOCKS as u64).then_some(())).await;
    sees_watched(&redis, LOCKS).await;
    assert!(guards.iter().all(Guard::is_held));
    redis.call(&["DEL", "clinch:job 7"]);
    is_told(&guards[7]).await;
    assert_eq!(guards.iter().filter(|guard| guard.is_held()).count(), LOCKS - 1);
}

/// P1: behind one address there may be another server after a while, which knows nothing of what the connections that stay renew.
#[tokio::test]
async fn renewals_go_to_the_server_that_has_the_other_steps() {
    let (old, new) = (Redis::start(), Redis::start());
    let proxy = Proxy::start(old.addr());
    let far = connect(proxy.addr()).await;
    let guard = lock(&far, "job").await;
    sees_watched(&old, 1).await;
    proxy.set_upstream(new.addr());
    cut_steps(&old);
    let loss = tokio::time::timeout(PATIENCE, guard.lost()).await.expect("renewed where nobody looks");
    assert_eq!(loss.kind, LossKind::Deleted);
    assert_eq!(renewals(&old), 0);
    lock(&connect(new.addr()).await, "job").await.release().await.unwrap();
}

/// Cuts all connections of ours to a server but those on which it tells of changes.
pub(super) fn cut_steps(redis: &Redis) {
    for client in redis.call(&["CLIENT", "LIST"]).text().lines() {
        let field = |name: &str| {
            client.split(' ').find_map(|field| field.strip_prefix(name)).unwrap_or_default().to_owned()
        };
        if field("name=") == "clinch" && !field("flags=").contains('t') {
            redis.call(&["CLIENT", "KILL", "ID", &field("id=")]);
        }
    }
}

/// P1: a server of a Cluster, taken for one alone, has no command on keys of several slots.
#[tokio::test]
async fn a_server_with_slots_keeps_and_watches_locks_of_all_slots() {
    const LOCKS: usize = 5;
    let redis = Redis::builder().cluster().start();
    redis.call(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    eventually("it has all slots", async || {
        redis.call(&["CLUSTER", "INFO"]).text().contains("cluster_state:ok").then_some(())
    })
    .await;
    let near = connect(redis.addr()).await;
    let mut guards = Vec::new();
    for number in 0..LOCKS {
        guards.push(lock(&near, &format!("job {number}")).await);
    }
    sees_watched(&redis, LOCKS).await;
    eventually("they are renewed", async || (renewals(&redis) >= LOCKS as u64).then_some(())).await;
    sees_watched(&redis, LOCKS).await;
    assert!(guards.iter().all(Guard::is_held));
    redis.call(&["DEL", "clinch:job 3"]);
    is_told(&guards[3]).await;
    assert_eq!(guards.iter().filter(|guard| guard.is_held()).count(), LOCKS - 1);
    let checks = Locks::examine(&redis.url(), Env::host(Lane::thread())).await.unwrap();
    assert!(
        checks.iter().any(|check| check.what == "mode" && check.verdict == clinch::Verdict::Warn),
        "{checks:?}"
    );
}
