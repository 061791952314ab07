//! What others wrote under a lock's keys: excluded, refused, or got over; never taken for a lock of ours.

use super::*;
use crate::common::{in_vain, release};

/// A try and a short wait, which must not be granted.
async fn refused(locks: &Locks, name: &str) -> (Result<(), clinch::Error>, clinch::Error) {
    let mutex = locks.mutex(name).unwrap();
    let tried = mutex.try_lock().await.map(|guard| assert!(guard.is_none(), "two hold {name}"));
    (tried, in_vain(async |patience| mutex.lock().timeout(patience).await).await)
}

#[tokio::test]
async fn a_key_of_another_type_is_no_lock() {
    let locks = connect(&SERVER.url()).await;
    for write in [
        &["RPUSH", "", "a"][..],
        &["SADD", "", "a"],
        &["HSET", "", "a", "b"],
        &["ZADD", "", "1", "a"],
        &["XADD", "", "*", "a", "b"],
    ] {
        let name = unique("typed");
        let key = format!("clinch:{name}");
        let write: Vec<&str> = write.iter().map(|word| if word.is_empty() { &key } else { *word }).collect();
        SERVER.call(&write);
        let (tried, waited) = refused(&locks, &name).await;
        for error in [tried.unwrap_err(), waited] {
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
            assert!(
                error.to_string().contains("wrong kind of value; a key under the lock's name is no lock")
            );
        }
        assert!(locks.state(&name).await.unwrap().is_none());
        assert_eq!(SERVER.call(&["DEL", &key]).int(), 1, "it was left alone");
        assert_eq!(left(&SERVER, &name), [""; 0]);
        expect_unused(&SERVER, &locks, &name).await;
    }
}

#[tokio::test]
async fn a_foreign_lock_is_waited_for_with_and_without_an_expiry() {
    let locks = connect(&SERVER.url()).await;
    for expires in [true, false] {
        let name = unique("foreign");
        let key = format!("clinch:{name}");
        SERVER.call(&["SET", &key, "1f0a5c2e-uuid", "PX", "1500"]);
        if !expires {
            SERVER.call(&["PERSIST", &key]);
        }
        let (tried, waited) = refused(&locks, &name).await;
        tried.unwrap();
        assert_eq!(waited.kind(), ErrorKind::TimedOut, "{waited:?}");
        assert!(waited.to_string().contains("held by another program"), "{waited}");
        let waiter = queue(&locks, &name);
        sees_waiters(&SERVER, &name, 1).await;
        if !expires {
            assert_eq!(SERVER.call(&["DEL", &key]).int(), 1);
        }
        let guard = waiter.await.unwrap();
        enter(&SERVER, &guard);
        leave_and_release(&SERVER, guard).await;
        expect_unused(&SERVER, &locks, &name).await;
    }
}

/// Whatever the value is that a foreign client of our key chose, the lock is its, and an operator sees so.
async fn excludes(value: &[u8]) {
    let locks = connect(&SERVER.url()).await;
    let name = unique("odd");
    let key = format!("clinch:{name}");
    SERVER.call(&[b"SET", key.as_bytes(), value]);
    let (tried, waited) = refused(&locks, &name).await;
    tried.unwrap();
    assert!(waited.to_string().contains("held by another program"), "{waited}");
    eventually("only the foreign claim is shown", async || {
        let state = locks.state(&name).await.unwrap().expect("the foreign claim is shown");
        (state.claims.len() == 1).then_some(())
    })
    .await;
    assert_eq!(SERVER.call(&["STRLEN", &key]).int(), i64::try_from(value.len()).unwrap());
    SERVER.call(&["DEL", &key]);
    expect_unused(&SERVER, &locks, &name).await;
}

#[tokio::test]
async fn a_foreign_lock_with_an_empty_value_excludes() {
    excludes(b"").await;
}

#[tokio::test]
async fn a_foreign_lock_with_a_binary_value_excludes() {
    excludes(b"\x9b\x00\xff\xfe 20 bytes of random").await;
}

#[tokio::test]
async fn a_foreign_lock_whose_value_begins_like_a_mark_of_ours_excludes() {
    excludes(b"clinch nightly").await;
}

#[tokio::test]
async fn a_huge_value_is_not_read() {
    const SIZE: u64 = 100 << 20;
    let name = unique("huge");
    let key = format!("clinch:{name}");
    SERVER.call(&["SETRANGE", &key, &(SIZE - 1).to_string(), "x"]);
    let proxy = Proxy::start(SERVER.addr());
    let locks = connect_through(&proxy).await;
    let before = proxy.forwarded(Direction::Replies);
    let (tried, waited) = refused(&locks, &name).await;
    tried.unwrap();
    assert_eq!(waited.kind(), ErrorKind::TimedOut, "{waited:?}");
    locks.state(&name).await.unwrap();
    locks.list(&name).await.unwrap();
    let bytes = proxy.forwarded(Direction::Replies) - before;
    assert!(bytes < 64 << 10, "{bytes} bytes were read");
    SERVER.call(&["DEL", &key]);
    expect_unused(&SERVER, &locks, &name).await;
}

#[tokio::test]
async fn a_record_of_ours_that_was_damaged_is_not_ours() {
    let locks = connect(&SERVER.url()).await;
    let damages: [&dyn Fn(&str) -> String; 6] = [
        &|record| record[..20].to_owned(),
        &|record| record[..32].to_owned(),
        &|record| record[1..].to_owned(),
        &|record| format!(" {record}"),
        &|record| record.replace(' ', "\t"),
        &|record| format!("{}{}", &record[..31], record[31..].replacen(|_: char| true, "-", 1)),
    ];
    for damage in damages {
        let name = unique("damaged");
        let key = format!("clinch:{name}");
        let guard = lock(&locks, &name).await;
        let record = SERVER.call(&["GET", &key]).text();
        let damaged = damage(&record);
        SERVER.call(&["SET", &key, &damaged, "KEEPTTL"]);
        let error = guard.verify().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{damaged}: {error:?}");
        assert_eq!(guard.lost().await.kind, LossKind::Deleted);
        let (tried, waited) = refused(&locks, &name).await;
        tried.unwrap();
        assert_eq!(waited.kind(), ErrorKind::TimedOut, "{waited:?}");
        assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
        assert_eq!(SERVER.call(&["GET", &key]).text(), damaged, "it was left alone");
        SERVER.call(&["DEL", &key]);
        expect_unused(&SERVER, &locks, &name).await;
    }
}

/// An own server: the fence is that of other locks, too.
#[tokio::test]
async fn garbage_in_the_side_keys_is_an_error_or_got_over() {
    const ID: &str = "00112233445566778899aabbccddeeff";
    let redis = Redis::start();
    let locks = connect(&redis.url()).await;
    let string: &[&str] = &["SET", "", "garbage"];
    let list: &[&str] = &["RPUSH", "", "garbage"];
    let cases: [(&str, &[&str]); 19] = [
        ("claims", string),
        ("claims", list),
        ("claims", &["HSET", "", "", ""]),
        ("claims", &["HSET", "", ".closed", "garbage", ".run", "garbage"]),
        ("claims", &["HSET", "", ID, "w x"]),
        ("claims", &["HSET", "", ID, "h p1/0 9 9"]),
        ("claims", &["HSET", "", ID, "w p9/9 99999999999999999999 1 1 - {}"]),
        ("queue", string),
        ("queue", list),
        ("queue", &["RPUSH", "", ID, "", ID]),
        ("queue", &["ZADD", "", "1", "garbage"]),
        ("holders", string),
        ("holders", list),
        ("holders", &["ZADD", "", "1", "garbage"]),
        ("holders", &["ZADD", "", "-inf", ID]),
        ("fence", list),
        ("fence", string),
        ("fence", &["SET", "", "-1"]),
        ("fence", &["SET", "", "zzzzzzzzzzzzzzzz"]),
    ];
    for (side, write) in cases {
        let name = unique("garbage");
        let case = format!("{write:?} as {side}");
        let find = |kind: &str| -> Vec<String> {
            let pattern = format!("clinch:*{kind}*");
            redis.call(&["KEYS", &pattern]).array().into_iter().map(Reply::text).collect()
        };
        // What the key is called is seen when it is there.
        let other = lock(&locks, &name).await;
        let waiter = queue(&locks, &name);
        sees_waiters(&redis, &name, 1).await;
        // Not one that an earlier case has left, for a step that may still arrive.
        let claims = find(&format!("claims:*{name}")).remove(0);
        other.release().await.unwrap();
        waiter.await.unwrap().release().await.unwrap();
        let key = match side {
            "fence" => find("fence").into_iter().find(|key| claims.starts_with(&key[..13])).unwrap(),
            side => claims.replace("claims", side),
        };
        let holder = lock(&locks.clone().ttl(Duration::from_secs(1)).unwrap(), &name).await;
        redis.call(&["DEL", &key]);
        let write: Vec<&str> =
            write.iter().enumerate().map(|(at, word)| if at == 1 { &key } else { *word }).collect();
        redis.call(&write);
        let typed = |error: &clinch::Error| {
            use ErrorKind::{Invalid, TimedOut, Unavailable, Unsupported};
            let fit = [Invalid, TimedOut, Unavailable, Unsupported].contains(&error.kind());
            assert!(fit, "{case}: {error:?}");
        };
        let (tried, waited) = refused(&locks, &name).await;
        let _ = tried.inspect_err(typed);
        typed(&waited);
        let reader = locks.rwlock(&name).unwrap().read().timeout(Duration::from_millis(50)).await;
        typed(&reader.expect_err("a reader beside a holder"));
        let _ = locks.state(&name).await.inspect_err(typed);
        let _ = holder.release().await.inspect_err(typed);
        redis.call(&["DEL", &key]);
        let guard = lock(&locks, &name).await;
        assert!(guard.is_held(), "{case}");
        assert_eq!(guard.release().await.unwrap(), Released::Released, "{case}");
        eventually(&case, async || left(&redis, &name).is_empty().then_some(())).await;
    }
}

/// What could be another lock's queue is no lock, however prefix and name spell it.
#[tokio::test]
async fn a_lock_cannot_have_the_key_of_anothers_queue() {
    let servers: Vec<Redis> = (0..3).map(|_| Redis::start()).collect();
    let hosts: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
    let several = format!("redlock://{}?max_ttl=1s&ttl=1s", hosts.join(","));
    for url in [format!("{}?ttl=1s", servers[0].url()), format!("{}?lean=on", servers[0].url()), several] {
        for (prefix, name) in
            [("clinch:", "~{abc}:queue:clinch:job"), ("", "clinch:~{abc}:claims:clinch:job")]
        {
            let locks = clinch::connect(&format!("{url}&prefix={prefix}")).await.unwrap();
            let mutex = locks.mutex(name).unwrap();
            let short = Duration::from_millis(300);
            for error in [
                mutex.try_lock().await.expect_err("granted"),
                mutex.lock().timeout(short).await.expect_err("granted"),
                locks.state(name).await.expect_err("shown"),
            ] {
                assert_eq!(error.kind(), ErrorKind::Invalid, "{url}: {error:?}");
                assert!(error.to_string().contains("are those of queues and tokens"), "{url}: {error}");
            }
            assert_eq!(servers[0].call(&["EXISTS", &format!("{prefix}{name}")]).int(), 0, "{url}");
        }
    }
}

/// Nobody knows which token was the last: that is for a person to say.
#[tokio::test]
async fn a_fence_beyond_all_tokens_grants_nothing_and_says_what_to_do() {
    let redis = Redis::start();
    let locks = connect(&redis.url()).await;
    let guard = lock(&locks, "job").await;
    let before = guard.token();
    guard.release().await.unwrap();
    let fence = redis.call(&["KEYS", "*fence"]).array().remove(0).text();
    redis.call(&["SET", &fence, "9999999999999999"]);
    let (tried, waited) = refused(&locks, "job").await;
    for error in [tried.unwrap_err(), waited] {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        assert!(error.to_string().contains(&format!("set {fence} to the last token")), "{error}");
    }
    assert_eq!(redis.call(&["GET", &fence]).text(), "9999999999999999", "it was left alone");
    redis.call(&["SET", &fence, &before.to_string()]);
    let guard = lock(&locks, "job").await;
    assert!(guard.token() > before, "{} after {before}", guard.token());
}

/// P3: a clock that is far ahead for a while grants nothing, and spoils nothing for when it is right again.
#[tokio::test]
async fn a_clock_beyond_all_tokens_leaves_no_fence_behind() {
    const YEARS: i64 = 230 * 365 * 86_400;
    let redis = Redis::builder().stepped_clock().start();
    let locks = connect(&redis.url()).await;
    let guard = lock(&locks, "job").await;
    let before = guard.token();
    release(guard).await;
    redis.step_clock(YEARS);
    let (tried, waited) = refused(&locks, "job").await;
    let read = locks.rwlock("job").unwrap().try_read().await.expect_err("granted without a token");
    for error in [tried.unwrap_err(), waited, read] {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        assert!(error.to_string().contains("is beyond the year 2255"), "{error}");
    }
    redis.step_clock(0);
    let guard = lock(&locks, "job").await;
    assert!(guard.token() > before, "{} after {before}", guard.token());
    release(guard).await;
}

/// P1, P3: a server that boots before anybody has set its clock grants nothing. Its tokens would be small, and all leases over once it
/// is set; what was granted before is renewed and released all the same.
#[tokio::test]
async fn a_clock_that_nobody_has_set_grants_nothing() {
    let redis = Redis::builder().stepped_clock().start();
    let locks = connect(&redis.url()).await;
    let reader = locks.rwlock("read").unwrap().read().await.unwrap();
    let guard = lock(&locks, "job").await;
    let before = guard.token();
    let held = lock(&locks, "waited for").await;
    let waiter = queue(&locks, "waited for");
    sees_waiters(&redis, "waited for", 1).await;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64;
    // Seconds after 1970, years after it, and the last of those whose time has fewer digits.
    for clock in [40, 95, 315_532_800, 999_900_000] {
        redis.step_clock(clock - now);
        let read = locks.rwlock("read").unwrap().try_read().await.expect_err("granted without a clock");
        let permit =
            locks.semaphore("gpu", 2).unwrap().try_acquire(1).await.expect_err("granted without a clock");
        let tried = locks.mutex("other").unwrap().try_lock().await.expect_err("granted without a clock");
        for error in [read, permit, tried] {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
            assert!(error.to_string().contains("the clock of this server is not set"), "{error}");
        }
        guard.verify().await.unwrap();
        reader.verify().await.unwrap();
    }
    release(guard).await;
    release(reader).await;
    // Not for as long as nobody can be granted what was released.
    release(held).await;
    redis.step_clock(0);
    release(waiter.await.unwrap()).await;
    let guard = lock(&locks, "job").await;
    assert!(guard.token() > before, "{} after {before}", guard.token());
    release(guard).await;
}
