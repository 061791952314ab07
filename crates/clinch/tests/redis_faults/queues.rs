//! Queues that are long, that lost their keys, that others poll beside.

use super::*;
use crate::common::release;
use clinch::backend::{Backend, Progress, Renewal};
use clinch::backends::redis::redlock;
use clinch::{Claim, ClaimId, Mode, Owner};

const WAITERS: usize = 6;

/// The side keys of a lock that are of this type.
fn keys(redis: &Redis, name: &str, kind: &str) -> Vec<String> {
    let keys = redis.call(&["KEYS", &format!("*:clinch:{name}")]).array().into_iter().map(Reply::text);
    keys.filter(|key| redis.call(&["TYPE", key]).text() == kind).collect()
}

/// Waiters hold the lock in turn and say when; nobody is forgotten, in the order in which they came where that is known.
async fn loses(lost: &[&str], held_by_reader: bool, free_first: bool) {
    let case = format!("{lost:?}, {held_by_reader}, {free_first}");
    let redis = Redis::start();
    let locks = connect(&redis.url()).await.ttl(Duration::from_secs(6)).unwrap();
    let holder = match held_by_reader {
        true => locks.rwlock("job").unwrap().read().await.unwrap(),
        false => lock(&locks, "job").await,
    };
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = tokio::task::JoinSet::new();
    for number in 0..WAITERS {
        let (locks, order, url) = (locks.clone(), order.clone(), redis.url());
        waiters.spawn(async move {
            let guard = lock(&locks, "job").await;
            order.lock().unwrap().push(number);
            let other = clinch::connect(&url).await.unwrap();
            assert!(other.mutex("job").unwrap().try_lock().await.unwrap().is_none(), "two hold it");
            release(guard).await;
        });
        sees_waiters(&redis, "job", number + 1).await;
    }
    let mut holder = Some(holder);
    if free_first {
        // Its lease is over before anybody looks: nobody is told.
        redis.call(&["DEL", "clinch:job"]);
        for key in keys(&redis, "job", "zset") {
            redis.call(&["DEL", &key]);
        }
    }
    for kind in lost {
        for key in keys(&redis, "job", kind) {
            redis.call(&["DEL", &key]);
        }
    }
    if !free_first {
        assert!(locks.mutex("job").unwrap().try_lock().await.unwrap().is_none(), "{case}: two hold it");
        let _ = holder.take().unwrap().release().await.unwrap();
        if held_by_reader && (lost.contains(&"hash") || lost.contains(&"zset")) {
            // What the marker stands for was lost; it counts until its end, which is now.
            assert_eq!(redis.call(&["DEL", "clinch:job"]).int(), 1, "{case}: a marker was removed");
        }
    }
    let scripts = scripts_run(&redis);
    while let Some(done) = waiters.join_next().await {
        done.unwrap();
    }
    assert!(scripts_run(&redis) - scripts < 400, "{case}: they asked all the time");
    if !lost.contains(&"hash") && !free_first {
        let order = order.lock().unwrap();
        assert!(order.is_sorted(), "{case}: {order:?}");
    }
    drop(holder);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_side_keys_neither_spin_nor_hang_nor_let_two_in() {
    let mut all = Vec::new();
    for lost in [&["list"][..], &["hash"], &["list", "hash"], &["zset"], &["list", "hash", "zset"]] {
        all.extend([loses(lost, false, false), loses(lost, true, false), loses(lost, false, true)]);
    }
    futures_util::future::join_all(all).await;
}

pub(super) fn claim(name: &str, mode: Mode, bits: u128) -> Claim {
    Claim {
        id: ClaimId::from_bits(bits),
        name: clinch::LockName::new(name).unwrap(),
        mode,
        ttl: LONG_TTL,
        enqueue: true,
        place: false,
        isolated: false,
        owner: Arc::new(Owner { host: "h".into(), pid: 1, user: "u".into(), label: String::new() }),
    }
}

pub(super) async fn backend(redis: &Redis) -> Arc<dyn Backend> {
    let env = Env::new(Clock::host(), Random::system(), Lane::thread(), Detour::to(redis.addr()));
    clinch::backends::redis::open(&redis.url(), env).await.unwrap()
}

/// More readers than one script lets in, none of whom asks by itself: the release lets all of them in.
#[tokio::test]
async fn all_readers_behind_a_writer_get_in_at_once() {
    const READERS: usize = 300;
    let redis = Redis::start();
    let backend = backend(&redis).await;
    let writer = claim("job", Mode::Exclusive, 1);
    assert!(matches!(backend.claim(&writer).await.unwrap(), Progress::Granted(_)));
    for number in 0..READERS {
        let reader = claim("job", Mode::Shared, 2 + number as u128);
        assert!(matches!(backend.claim(&reader).await.unwrap(), Progress::Queued(_)));
    }
    backend.release(&writer, Duration::ZERO).await.unwrap();
    let holders = keys(&redis, "job", "zset").remove(0);
    assert_eq!(redis.call(&["ZCARD", &holders]).int(), READERS as i64);
}

/// Thousands of dead before the next in line: no script removes them all, and the release finds the living one.
#[tokio::test]
async fn a_release_over_many_dead_is_done_in_parts() {
    const DEAD: usize = 2000;
    let redis = Redis::start();
    let backend = backend(&redis).await;
    let holder = claim("job", Mode::Exclusive, 1);
    assert!(matches!(backend.claim(&holder).await.unwrap(), Progress::Granted(_)));
    let next = claim("job", Mode::Exclusive, 2);
    assert!(matches!(backend.claim(&next).await.unwrap(), Progress::Queued(_)));
    let (list, hash) = (keys(&redis, "job", "list").remove(0), keys(&redis, "job", "hash").remove(0));
    let fill = "local now = redis.call('TIME')[1]
        for i = 1, tonumber(ARGV[1]) do
          local id = string.format('%032x', i + 1000000)
          redis.call('LPUSH', KEYS[1], id)
          -- One half died long ago, the other is not heard any more.
          local from = i % 2 == 0 and now .. '000' or '1000'
          redis.call('HSET', KEYS[2], id, 'w x ' .. from .. ' 120000 ' .. now .. '000000 00ff {}')
        end";
    redis.call(&["EVAL", fill, "2", &list, &hash, &DEAD.to_string()]);
    let before = scripts_run(&redis);
    backend.release(&holder, Duration::ZERO).await.unwrap();
    let scripts = scripts_run(&redis) - before;
    assert!(scripts >= (DEAD / 256) as u64, "it took {scripts} scripts");
    let (id, _) = holder_of(&redis);
    assert_eq!(id, next.id.to_string());
    assert_eq!(
        redis.call(&["LLEN", &list]).int(),
        DEAD as i64 / 2,
        "the dead are gone, the silent keep their places"
    );
}

fn holder_of(redis: &Redis) -> (String, i64) {
    holder(redis, "job").expect("nobody got the lock")
}

/// Who stands in the queue twice, as where the records of a queue were lost for a while, is granted once, and its second place
/// takes nothing away: neither what it holds nor its grave.
#[tokio::test]
async fn a_second_place_in_the_queue_is_nothing() {
    let redis = Redis::start();
    let (backend, other) = (backend(&redis).await, backend(&redis).await);
    let twice = async |name: &str, mode: Mode| {
        let (holder, waiter) = (claim(name, Mode::Exclusive, 1), claim(name, mode, 2));
        assert!(matches!(backend.claim(&holder).await.unwrap(), Progress::Granted(_)));
        assert!(matches!(backend.claim(&waiter).await.unwrap(), Progress::Queued(_)));
        redis.call(&["RPUSH", &keys(&redis, name, "list").remove(0), &waiter.id.to_string()]);
        (holder, waiter)
    };
    for (name, mode) in
        [("all", Mode::Exclusive), ("read", Mode::Shared), ("permit", "1 of 3".parse().unwrap())]
    {
        let (holder, waiter) = twice(name, mode).await;
        backend.release(&holder, Duration::ZERO).await.unwrap();
        let held = backend.verify(&waiter).await.unwrap();
        assert!(matches!(held, Renewal::Renewed(Some(_))), "{name}: {held:?}");
        assert_eq!(backend.release(&waiter, Duration::ZERO).await.unwrap(), Freed::Removed);
        assert_eq!(left(&redis, name), [""; 0], "{name}");
    }
    let (holder, waiter) = twice("buried", Mode::Exclusive).await;
    // By somebody who does not know its steps.
    let elsewhere = Claim { enqueue: false, isolated: true, ..claim("buried", Mode::Exclusive, 2) };
    assert_eq!(other.release(&elsewhere, Duration::ZERO).await.unwrap(), Freed::Removed);
    backend.release(&holder, Duration::ZERO).await.unwrap();
    let late = backend.claim(&Claim { enqueue: false, ..waiter }).await.unwrap();
    assert!(matches!(late, Progress::Busy(_)), "a step that came late holds the lock: {late:?}");
}

/// Whoever finds its record lost with all others asks anew, and stands in the queue once.
#[tokio::test]
async fn a_waiter_whose_record_was_lost_stands_in_the_queue_once() {
    let redis = Redis::start();
    let backend = backend(&redis).await;
    for (name, mode) in [("all", Mode::Exclusive), ("read", Mode::Shared)] {
        let holder = claim(name, Mode::Exclusive, 1);
        assert!(matches!(backend.claim(&holder).await.unwrap(), Progress::Granted(_)));
        let waiters: Vec<_> = (2..5).map(|bits| claim(name, mode, bits)).collect();
        for again in [false, true] {
            if again {
                redis.call(&["DEL", &keys(&redis, name, "hash").remove(0)]);
            }
            for waiter in &waiters {
                assert!(matches!(backend.claim(waiter).await.unwrap(), Progress::Queued(_)));
            }
            let list = keys(&redis, name, "list").remove(0);
            let listed: Vec<_> =
                redis.call(&["LRANGE", &list, "0", "-1"]).array().into_iter().map(Reply::text).collect();
            let all: Vec<_> = waiters.iter().map(|waiter| waiter.id.to_string()).collect();
            assert_eq!(listed, all, "{name}, {again}");
        }
    }
}

/// That all say one capacity is not found out by reading every claim.
#[tokio::test]
async fn a_permit_is_not_compared_with_all_claims() {
    let redis = Redis::start();
    let locks = connect(&redis.url()).await;
    let gpu = locks.semaphore("gpu", 3).unwrap();
    let pair = async || release(gpu.acquire(2).unwrap().await.unwrap()).await;
    let held = gpu.acquire(1).unwrap().await.unwrap();
    pair().await;
    let waiter = tokio::spawn({
        let gpu = gpu.clone();
        async move { gpu.acquire(3).unwrap().await.unwrap() }
    });
    sees_waiters(&redis, "gpu", 1).await;
    redis.call(&["CONFIG", "RESETSTAT"]);
    for _ in 0..5 {
        assert!(gpu.try_acquire(1).await.unwrap().is_none());
    }
    let second = tokio::spawn(async move { gpu.acquire(1).unwrap().await.unwrap() });
    sees_waiters(&redis, "gpu", 2).await;
    assert!(!redis.client().commandstats().contains_key("hgetall"), "all claims were read");
    let other = locks.semaphore("gpu", 4).unwrap();
    let error = other.try_acquire(1).await.unwrap_err();
    assert!(error.to_string().contains("others say that the semaphore has 3 permits"), "{error}");
    release(held).await;
    release(waiter.await.unwrap()).await;
    release(second.await.unwrap()).await;
    // With nobody left, any capacity will do.
    release(other.acquire(4).unwrap().await.unwrap()).await;
    assert_eq!(left(&redis, "gpu"), [""; 0]);
}

/// Nor are the claims of a lock read that no permits are of; what is said of permits outlives the loss of the queue.
#[tokio::test]
async fn a_permit_reads_no_claims_where_nobody_has_permits() {
    let redis = Redis::start();
    let backend = backend(&redis).await;
    let permit = |capacity: &str, bits: u128| claim("job", capacity.parse().unwrap(), bits);
    let tries = async |capacity: &str| {
        backend.claim(&Claim { enqueue: false, ..permit(capacity, 9) }).await.map(|tried| match tried {
            Progress::Busy(_) => (),
            other => panic!("two hold it: {other:?}"),
        })
    };
    assert!(matches!(backend.claim(&claim("job", Mode::Exclusive, 1)).await.unwrap(), Progress::Granted(_)));
    assert!(matches!(backend.claim(&claim("job", Mode::Exclusive, 2)).await.unwrap(), Progress::Queued(_)));
    redis.call(&["CONFIG", "RESETSTAT"]);
    tries("1 of 3").await.unwrap();
    tries("1 of 4").await.unwrap();
    let waiter = permit("1 of 3", 3);
    assert!(matches!(backend.claim(&waiter).await.unwrap(), Progress::Queued(_)));
    assert!(!redis.client().commandstats().contains_key("hgetall"), "all claims were read");
    tries("1 of 4").await.expect_err("two capacities");
    redis.call(&["DEL", &keys(&redis, "job", "list").remove(0)]);
    redis.call(&["HDEL", &keys(&redis, "job", "hash").remove(0), ".of"]);
    let place = Arc::new(Claim { place: true, ..waiter });
    assert!(matches!(backend.renew(&[place]).await[..], [Renewal::Renewed(_)]));
    assert_eq!(waiters(&redis, "job").len(), 2, "the queue is not made anew");
    tries("1 of 4").await.expect_err("two capacities");
    tries("1 of 3").await.unwrap();
}

/// However many hold permits, and however many are read at a time: no more are given than there are.
#[tokio::test]
async fn permits_of_many_holders_are_counted() {
    let redis = Redis::start();
    let backend = backend(&redis).await;
    for holders in [255_u32, 256, 257, 512, 513] {
        let name = format!("of {holders}");
        let tries = async |count: u32, bits: u128| {
            let mode = format!("{count} of {}", holders + 2).parse().unwrap();
            let tried = backend.claim(&Claim { enqueue: false, ..claim(&name, mode, bits) }).await.unwrap();
            matches!(tried, Progress::Granted(_))
        };
        for bits in 0..holders {
            assert!(tries(1, 10 + u128::from(bits)).await, "{name}");
        }
        assert!(!tries(3, 1).await && tries(2, 2).await && !tries(1, 3).await, "{name}");
    }
}

/// However many holders died together, their lease is what they had: nobody is refused for one that is over.
#[tokio::test]
async fn the_dead_refuse_nobody_however_many_they_are() {
    let redis = Redis::start();
    let backend = backend(&redis).await;
    let tries = async |name: &str, mode: &str, bits: u128| {
        let claim = Claim {
            enqueue: false,
            ttl: Duration::from_millis(100),
            ..claim(name, mode.parse().unwrap(), bits)
        };
        backend.claim(&claim).await.unwrap()
    };
    for (name, dead, next) in
        [("read", "shared", "exclusive"), ("gpu", "1 of 1000", "3 of 3"), ("both", "1 of 1000", "shared")]
    {
        for bits in 0..300 {
            assert!(matches!(tries(name, dead, 10 + bits).await, Progress::Granted(_)), "{name}");
        }
        let over = async || (redis.call(&["EXISTS", &format!("clinch:{name}")]).int() == 0).then_some(());
        eventually("all leases are over", over).await;
        let granted = tries(name, next, 1).await;
        assert!(matches!(granted, Progress::Granted(_)), "{name}: refused for the dead: {granted:?}");
    }
}

/// Where another program was seen to hold the lock, it gets a turn although ours queue all the time.
#[tokio::test]
async fn who_polls_beside_a_prefix_gets_a_turn() {
    let name = unique("polled");
    let key = format!("clinch:{name}");
    SERVER.call(&["SET", &key, "another's", "PX", "2000"]);
    let mut load = tokio::task::JoinSet::new();
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    for _ in 0..2 {
        let locks = connect(&SERVER.url()).await;
        for _ in 0..2 {
            let (locks, name, done) = (locks.clone(), name.clone(), done.clone());
            load.spawn(async move {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    release(lock(&locks, &name).await).await;
                }
            });
        }
    }
    sees_waiters(&SERVER, &name, 4).await;
    let hash = keys(&SERVER, &name, "hash").remove(0);
    assert_eq!(SERVER.call(&["HEXISTS", &hash, ".foreign"]).int(), 1, "that another holds it is not noted");
    let end = tokio::time::Instant::now() + Duration::from_secs(30);
    for _ in 0..2 {
        while SERVER.call(&["SET", &key, "another's", "NX", "PX", "200"]) != Reply::Text("OK".into()) {
            assert!(tokio::time::Instant::now() < end, "who polls never got a turn");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    done.store(true, std::sync::atomic::Ordering::Relaxed);
    while let Some(ended) = load.join_next().await {
        ended.unwrap();
    }
}

/// Who queues for a lock marks its record; the holder may be a client that knows no queues.
#[tokio::test]
async fn who_holds_without_a_queue_is_freed_although_somebody_queues() {
    let servers: Vec<Redis> = (0..3).map(|_| Redis::start()).collect();
    let hosts: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
    let quorum = connect_quick(&format!("redlock://{}?max_ttl=8s", hosts.join(",")), 8).await;
    let lean = connect(&format!("{}?lean=on", servers[0].url())).await;
    for holds in [&quorum, &lean] {
        let full = connect(&servers[0].url()).await;
        let name = unique("starred");
        let guard = lock(holds, &name).await;
        // A quorum may be without it yet.
        eventually("this server has given its vote", async || holder(&servers[0], &name)).await;
        let waiter = queue(&full, &name);
        sees_waiters(&servers[0], &name, 1).await;
        guard.verify().await.unwrap();
        guard.extend(holds.lease_ttl()).await.unwrap();
        let (id, mut left) = (guard.claim_id().to_string(), i64::MAX);
        release(guard).await;
        while let Some((_, lease)) = holder(&servers[0], &name).filter(|(by, _)| *by == id) {
            left = lease;
        }
        assert!(left > 1000, "it ended by itself");
        release(waiter.await.unwrap()).await;
    }
}

/// A claim that asks again, elsewhere, finds its votes and agrees on their token, although each is marked as one that somebody
/// queues for.
#[tokio::test]
async fn votes_that_are_marked_by_who_queues_are_still_the_claims() {
    let persists = || Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always");
    let servers: Vec<Redis> = (0..3).map(|_| persists().start()).collect();
    let hosts: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
    let url = format!("redlock://{}?durable=on&max_ttl=24h", hosts.join(","));
    vouch(&url, &servers);
    let open = async || redlock::open(&url, Env::host(Lane::thread())).await.unwrap();
    let (held, first) = (claim("job", Mode::Exclusive, 1), open().await);
    assert!(matches!(first.claim(&held).await.unwrap(), Progress::Granted(_)));
    for (at, server) in servers.iter().enumerate() {
        eventually("all have given their vote", async || holder(server, "job")).await;
        server.call(&["SETRANGE", "clinch:job", "32", &format!("*900000000000000{at}")]);
    }
    let again = open().await.claim(&held).await.unwrap();
    let Progress::Granted(grant) = again else { panic!("its votes were not found: {again:?}") };
    let agrees = |server: &&Redis| {
        server.call(&["GETRANGE", "clinch:job", "32", "48"]).text() == format!("*{}", grant.token)
    };
    assert!(servers.iter().filter(agrees).count() >= 2, "{} is not agreed on", grant.token);
}

async fn connect_quick(url: &str, seconds: u64) -> Locks {
    clinch::connect(url).await.unwrap().ttl(Duration::from_secs(seconds)).unwrap()
}
