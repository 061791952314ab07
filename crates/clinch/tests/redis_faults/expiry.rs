//! What stands in the store with an expiry: nobody else's claim shortens it, removes it or outlives it.

use super::queues::{backend, claim};
use super::*;
use crate::common::{in_vain, release};
use clinch::backend::Progress;
use clinch::{Claim, Mode};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

/// For how many milliseconds each key of a lock lives, the lock's own one included.
fn lives(redis: &Redis, name: &str) -> Vec<(String, i64)> {
    let keys = redis.call(&["KEYS", &format!("*{name}")]).array().into_iter().map(Reply::text);
    keys.map(|key| (redis.call(&["PTTL", &key]).int(), key)).map(|(left, key)| (key, left)).collect()
}

/// The keys of a lock that are of this type.
fn keys(redis: &Redis, name: &str, kind: &str) -> Vec<String> {
    let keys = redis.call(&["KEYS", &format!("*{name}")]).array().into_iter().map(Reply::text);
    keys.filter(|key| redis.call(&["TYPE", key]).text() == kind).collect()
}

/// From version 7.2 on WAIT speaks of the last write alone, however many copies that has: a step that wrote nothing would be
/// confirmed though no replica is there.
#[tokio::test]
async fn a_lease_is_written_also_where_it_is_long_enough() {
    let redis = Redis::start();
    let backend = backend(&redis).await;
    let written =
        || redis.client().info("persistence")["rdb_changes_since_last_save"].parse::<u64>().unwrap();
    for (bits, mode) in [(1, Mode::Exclusive), (2, Mode::Shared)] {
        let long = claim("job", mode, bits);
        let short = Arc::new(Claim { ttl: LONG_TTL / 2, ..claim("job", mode, bits) });
        assert!(matches!(backend.claim(&long).await.unwrap(), Progress::Granted(_)));
        let mut before = written();
        backend.renew(std::slice::from_ref(&short)).await;
        assert!(written() > before, "a renewal of {mode} wrote nothing");
        before = written();
        assert!(matches!(backend.claim(&short).await.unwrap(), Progress::Granted(_)));
        assert!(written() > before, "a repeated claim of {mode} wrote nothing");
        before = written();
        backend.verify(&short).await.unwrap();
        assert_eq!(written(), before, "who only reads writes");
        let left = redis.call(&["PTTL", "clinch:job"]).int();
        assert!(left > short.ttl.as_millis() as i64, "{mode} was cut short: {left}");
        backend.release(&long, Duration::ZERO).await.unwrap();
    }
}

/// Others who come with short leases, wait, and give up.
async fn come_and_go(locks: &Locks, name: &str) {
    let short = locks.clone().ttl(SECOND).unwrap();
    let both = short.rwlock(name).unwrap();
    for _ in 0..2 {
        let error = in_vain(async |patience| both.write().timeout(patience).await).await;
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
        assert!(both.try_write().await.unwrap().is_none());
    }
}

/// How a lock can be shut, and what must outlive it.
async fn shut(locks: &Locks, name: &str, how: &str) -> Option<Guard> {
    match how {
        "a reader" => Some(locks.rwlock(name).unwrap().read().await.unwrap()),
        "a permit" => Some(locks.semaphore(name, 2).unwrap().acquire(1).unwrap().await.unwrap()),
        "a downgraded writer" => {
            Some(locks.rwlock(name).unwrap().write().await.unwrap().downgrade().await.unwrap())
        }
        _ => {
            lock(locks, name).await.release_closed(HOUR).await.unwrap();
            None
        }
    }
}

const WAYS: [&str; 4] = ["a reader", "a permit", "a downgraded writer", "closed"];

#[tokio::test]
async fn a_short_lease_cuts_no_longer_one_short() {
    let locks = connect(&SERVER.url()).await.ttl(HOUR).unwrap();
    for how in WAYS {
        let name = unique("long");
        let guard = shut(&locks, &name, how).await;
        come_and_go(&locks, &name).await;
        let rest = HOUR.as_millis() as i64 - 60_000;
        let records = lives(&SERVER, &name);
        let needed = if guard.is_some() { 3 } else { 2 };
        let long = records.iter().filter(|(_, left)| *left > rest).count();
        assert_eq!(long, needed, "{how}: {records:?}");
        if let Some(guard) = guard {
            guard.verify().await.unwrap();
            release(guard).await;
            expect_unused(&SERVER, &locks, &name).await;
        }
    }
}

/// An operator takes the end from every key that there is: nothing that a later claim does may cut them short.
#[tokio::test]
async fn a_short_lease_cuts_none_short_whose_keys_had_lost_their_ends() {
    let locks = connect(&SERVER.url()).await.ttl(HOUR).unwrap();
    for how in WAYS {
        let name = unique("endless");
        let guard = shut(&locks, &name, how).await;
        let before = lives(&SERVER, &name);
        for (key, _) in &before {
            SERVER.call(&["PERSIST", key]);
        }
        come_and_go(&locks, &name).await;
        let rest = HOUR.as_millis() as i64 - 60_000;
        let mut records = lives(&SERVER, &name);
        let was_there = |key: &str| before.iter().any(|(known, _)| known == key);
        records.retain(|(key, left)| was_there(key) && *left != -1 && *left < rest);
        assert!(records.is_empty(), "{how}: {records:?}");
        if let Some(guard) = guard {
            guard.verify().await.unwrap();
            release(guard).await;
        }
    }
}

/// Whoever holds a part, or closed the lock, has its marker in the lock's key; that one counts when the records are lost.
#[tokio::test]
async fn a_marker_keeps_the_lock_until_its_own_end_whatever_else_is_lost() {
    let redis = Redis::start();
    let locks = connect(&redis.url()).await.ttl(HOUR).unwrap();
    for how in WAYS {
        for lost in [&["hash"][..], &["zset"], &["hash", "zset"]] {
            let name = unique("marked");
            let guard = shut(&locks, &name, how).await;
            for kind in lost {
                for key in keys(&redis, &name, kind) {
                    redis.call(&["DEL", &key]);
                }
            }
            come_and_go(&locks, &name).await;
            let both = locks.rwlock(&name).unwrap();
            let case = format!("{how} without {lost:?}");
            if how != "a reader" && how != "a downgraded writer" || lost.contains(&"hash") {
                assert!(both.try_read().await.unwrap().is_none(), "{case}: a reader got in");
            }
            let permits = locks.semaphore(&name, 1).unwrap();
            if let Ok(permit) = permits.try_acquire(1).await {
                assert!(permit.is_none(), "{case}: a permit was given");
            }
            let key = format!("clinch:{name}");
            let left = redis.call(&["PTTL", &key]).int();
            assert!(left > HOUR.as_millis() as i64 - 60_000, "{case}: the marker lives {left} ms");
            // When it ends, who waits gets in, without having asked all the time.
            for key in [keys(&redis, &name, "hash"), keys(&redis, &name, "zset")].concat() {
                redis.call(&["DEL", &key]);
            }
            redis.call(&["PEXPIRE", &key, "200"]);
            let scripts = scripts_run(&redis);
            release(lock(&locks, &name).await).await;
            assert!(scripts_run(&redis) - scripts < 50, "{case}: it asked all the time");
            drop(guard);
        }
    }
}

#[tokio::test]
async fn a_lock_whose_key_lost_its_end_is_still_its_holders() {
    let locks = connect(&SERVER.url()).await.ttl(HOUR).unwrap();
    for downgraded in [false, true] {
        let name = unique("persisted");
        let both = locks.rwlock(&name).unwrap();
        let guard = both.write().await.unwrap();
        let key = format!("clinch:{name}");
        assert_eq!(SERVER.call(&["PERSIST", &key]).int(), 1);
        guard.verify().await.unwrap();
        assert!(both.try_write().await.unwrap().is_none(), "two hold it");
        assert_eq!(SERVER.call(&["PTTL", &key]).int(), -1, "a look changes nothing");
        if downgraded {
            let guard = guard.downgrade().await.unwrap();
            guard.verify().await.unwrap();
            assert!(both.try_write().await.unwrap().is_none(), "a writer beside a reader");
            let left = SERVER.call(&["PTTL", &key]).int();
            assert!(left > HOUR.as_millis() as i64 / 2, "{left}");
            release(guard).await;
        } else {
            guard.extend(HOUR).await.unwrap();
            let left = SERVER.call(&["PTTL", &key]).int();
            assert!(left > HOUR.as_millis() as i64 / 2, "a renewal gives it its end back: {left}");
            guard.release().await.unwrap();
        }
        expect_unused(&SERVER, &locks, &name).await;
    }
}

/// A lock's key is the prefix and the name: whoever spells the same key otherwise asks for the same lock.
#[tokio::test]
async fn one_key_under_two_prefixes_is_one_lock() {
    let prefix = unique("jobs");
    let one = connect(&format!("{}?prefix={prefix}:", SERVER.url())).await;
    let two = connect(&format!("{}?prefix=&gap=0s", SERVER.url())).await;
    for how in WAYS {
        let name = unique("spelled");
        let whole = format!("{prefix}:{name}");
        let guard = shut(&one, &name, how).await;
        assert!(two.mutex(&whole).unwrap().try_lock().await.unwrap().is_none(), "{how}: two hold it");
        if let Some(guard) = guard {
            // One queue, whose messages reach everybody.
            let waiter = queue(&two, &whole);
            sees_waiters(&SERVER, &whole, 1).await;
            let token = guard.token();
            release(guard).await;
            let second = waiter.await.unwrap();
            assert!(second.token() > token);
            let waiter = queue(&one, &name);
            sees_waiters(&SERVER, &whole, 1).await;
            assert_eq!(two.list(&whole).await.unwrap()[0].claims.len(), 2);
            assert_eq!(one.list(&name).await.unwrap()[0].claims.len(), 2);
            let token = second.token();
            release(second).await;
            let third = waiter.await.unwrap();
            assert!(third.token() > token);
            release(third).await;
        }
    }
}
