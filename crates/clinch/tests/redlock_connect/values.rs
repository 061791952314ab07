//! What is no lock of ours under the lock's key: on one server it costs a vote, on two the lock is not granted.

use clinch_testkit::Reply;

use super::*;

const NAME: &str = "job";
const KEY: &str = "clinch:job";

/// How a server comes to hold something there.
#[derive(Clone, Copy, Debug)]
enum Bad {
    List,
    NoText,
    Huge,
    Eternal,
}

impl Bad {
    fn put(self, server: &Redis) {
        let mut client = server.client();
        match self {
            Bad::List => client.call(&["RPUSH", KEY, "a", "b"]),
            Bad::NoText => client.call(&[b"SET", KEY.as_bytes(), b"\xff\x00\x80 \xfe", b"PX", b"3600000"]),
            Bad::Huge => {
                client.call(&["SETRANGE", KEY, "100000000", "x"]);
                client.call(&["PEXPIRE", KEY, "3600000"])
            }
            Bad::Eternal => client.call(&["SET", KEY, "as some clients do by default"]),
        };
    }

    /// What is told of it.
    fn words(self) -> &'static str {
        match self {
            Bad::List => "a key under the lock's name is no lock",
            Bad::NoText | Bad::Huge => "is taken by another program for another ",
            Bad::Eternal => "is taken by another program without an end",
        }
    }

    fn is_there(self, server: &Redis) -> bool {
        let mut client = server.client();
        match self {
            Bad::List => client.call(&["LLEN", KEY]) == Reply::Int(2),
            Bad::NoText => client.call(&["STRLEN", KEY]) == Reply::Int(5),
            Bad::Huge => client.call(&["STRLEN", KEY]) == Reply::Int(100_000_001),
            Bad::Eternal => client.call(&["PTTL", KEY]) == Reply::Int(-1),
        }
    }
}

async fn costs_votes(bad: Bad) {
    let servers = three();
    let locks = connect(&url(&servers, DURABLE)).await.ttl(Duration::from_secs(1)).unwrap();
    let mutex = locks.mutex(NAME).unwrap();

    bad.put(&servers[1]);
    let guard = lock(&locks, NAME).await;
    guard.verify().await.unwrap();
    assert_eq!(locks.state(NAME).await.unwrap().unwrap().claims[0].id, guard.claim_id());
    let deadline = guard.deadline();
    eventually("it is renewed", async || (guard.deadline() > deadline).then_some(())).await;
    release(guard).await;
    assert!(bad.is_there(&servers[1]), "it was left alone");

    bad.put(&servers[2]);
    let waited = mutex.lock().timeout(Duration::from_secs(2)).await.unwrap_err();
    match bad {
        Bad::List => {
            let error = mutex.try_lock().await.unwrap_err();
            assert_eq!((error.kind(), waited.kind()), (ErrorKind::Invalid, ErrorKind::Invalid), "{waited:?}");
        }
        Bad::NoText | Bad::Huge | Bad::Eternal => {
            assert!(mutex.try_lock().await.unwrap().is_none(), "one vote was enough");
            assert_eq!(waited.kind(), ErrorKind::TimedOut, "{waited:?}");
        }
    }
    for server in &servers[1..] {
        let words = bad.words();
        let told = format!("{waited:?}");
        assert!(told.contains(&server.addr().to_string()) && told.matches(words).count() == 2, "{told}");
        assert!(bad.is_there(server), "it was left alone");
    }
    eventually("nothing of ours is left", async || {
        (servers[0].call(&["EXISTS", KEY]).int() == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_list_is_no_lock() {
    costs_votes(Bad::List).await;
}

#[tokio::test]
async fn bytes_that_are_no_text_are_a_strangers_lock() {
    costs_votes(Bad::NoText).await;
}

#[tokio::test]
async fn a_huge_value_is_a_strangers_lock() {
    costs_votes(Bad::Huge).await;
}

#[tokio::test]
async fn a_key_without_an_expiry_is_a_strangers_lock() {
    costs_votes(Bad::Eternal).await;
}

#[tokio::test]
async fn a_lock_that_an_operator_made_eternal_is_still_held() {
    let servers = three();
    let locks = connect(&url(&servers, DURABLE)).await.ttl(Duration::from_secs(300)).unwrap();
    let guard = lock(&locks, NAME).await;
    let is_eternal = |server: &Redis| {
        server.call(&["PERSIST", KEY]);
        server.call(&["PTTL", KEY]).int() == -1
    };
    eventually("all have it, without an end", async || servers.iter().all(is_eternal).then_some(())).await;
    guard.verify().await.unwrap();
    release(guard).await;
}

/// Locks are renewed together; one whose key is a list on a server must not cost the others that server.
#[tokio::test]
async fn a_list_in_place_of_one_lock_does_not_end_another() {
    const OTHERS: usize = 20;
    let servers = three();
    let locks = connect(&url(&servers, DURABLE)).await.ttl(Duration::from_secs(2)).unwrap();
    Bad::List.put(&servers[0]);
    let mut sound = Vec::new();
    for number in 0..OTHERS {
        sound.push(lock(&locks, &format!("sound/{number}")).await);
    }
    let spoilt = lock(&locks, NAME).await;
    eventually("all servers have them", async || {
        let has = |server: &Redis| server.call(&["KEYS", "clinch:sound/*"]).array().len() == OTHERS;
        servers.iter().all(has).then_some(())
    })
    .await;
    servers[2].kill();
    tokio::time::timeout(PATIENCE, spoilt.lost()).await.expect("one vote of three is no hold");
    let before: Vec<_> = sound.iter().map(Guard::deadline).collect();
    for (guard, before) in sound.into_iter().zip(before) {
        let renewed_or_lost = async || (guard.deadline() > before || !guard.is_held()).then_some(());
        eventually("it is renewed", renewed_or_lost).await;
        assert!(guard.is_held(), "{guard:?}");
        release(guard).await;
    }
}
