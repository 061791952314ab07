//! Readers and permits of ours, which foreign clients know nothing of.

use std::time::Duration;

use clinch::{Acquire, Guard, Locks, Released, Renew, RwLock, Semaphore};
use clinch_testkit::Redis;

use super::{Foreign, LONG, NAME, Worker, connect, soon, until_waiting, value};

/// A part of the lock.
#[derive(Clone)]
enum Part {
    Reader(RwLock),
    Permit(Semaphore),
}

impl Part {
    fn reader(locks: &Locks) -> Part {
        Part::Reader(locks.rwlock(NAME).unwrap())
    }

    fn permit(locks: &Locks) -> Part {
        Part::Permit(locks.semaphore(NAME, 3).unwrap())
    }

    /// Takes the first part, a reader's by way of the whole lock.
    async fn take_first(&self) -> Guard {
        match self {
            Part::Reader(lock) => lock.write().await.unwrap().downgrade().await.unwrap(),
            Part::Permit(_) => self.take().await.unwrap(),
        }
    }

    fn take(&self) -> Acquire<'_> {
        match self {
            Part::Reader(lock) => lock.read(),
            Part::Permit(semaphore) => semaphore.acquire(1).unwrap(),
        }
    }

    async fn try_take(&self) -> Option<Guard> {
        match self {
            Part::Reader(lock) => lock.try_read().await.unwrap(),
            Part::Permit(semaphore) => semaphore.try_acquire(1).await.unwrap(),
        }
    }
}

pub(crate) async fn the_last_of_our_readers_lets_them_in(client: Foreign) {
    the_last_lets_them_in(client, Part::reader).await;
}

pub(crate) async fn the_last_of_our_permits_lets_them_in(client: Foreign) {
    the_last_lets_them_in(client, Part::permit).await;
}

async fn the_last_lets_them_in(client: Foreign, part: fn(&Locks) -> Part) {
    let server = Redis::start();
    let part = part(&connect(&server, "").await);
    let mut them = Worker::start(client, &server, NAME, LONG).await;
    let (one, two) = (part.take_first().await, part.take().await.unwrap());
    assert_eq!(them.ask("try").await, "no");
    assert_eq!(one.release().await.unwrap(), Released::Released);
    assert_eq!(them.ask("try").await, "no");
    assert_eq!(two.release().await.unwrap(), Released::Released);
    assert_eq!(them.ask("try").await, "yes");

    assert!(part.try_take().await.is_none());
    let waiting = part.clone();
    let wait = tokio::spawn(async move { waiting.take().await.unwrap() });
    until_waiting(&server, 1).await;
    // It has its place, and in a moment it listens.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!wait.is_finished());
    assert_eq!(them.ask("release").await, "released");
    let guard = soon("their release wakes us", wait).await;
    assert_eq!(them.ask("try").await, "no");
    let another = part.try_take().await.expect("parts go together");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    assert_eq!(them.ask("try").await, "no");
    assert_eq!(another.release().await.unwrap(), Released::Released);
}

pub(crate) async fn our_last_lease_lets_them_in_and_we_know_first(client: Foreign) {
    let server = Redis::start();
    let locks = connect(&server, "").await;
    let mut them = Worker::start(client, &server, NAME, LONG).await;
    for part in [Part::reader, Part::permit] {
        let (one, two) = short_and_long(&locks, part).await;
        assert_eq!(them.ask("try").await, "no");
        assert_eq!(them.ask("lock").await, "locked");
        assert!(!one.is_held() && !two.is_held(), "they share it with ours");
        assert_eq!(them.ask("release").await, "released");
    }
}

pub(crate) async fn a_reader_that_comes_back_late_does_not_free_their_lock(client: Foreign) {
    let server = Redis::start();
    let mut them = Worker::start(client, &server, NAME, LONG).await;
    for part in [Part::reader, Part::permit] {
        let locks = connect(&server, "").await;
        let (one, two) = short_and_long(&locks, part).await;
        assert_eq!(them.ask("lock").await, "locked");
        let theirs = value(&server);
        assert!(matches!(one.release().await.unwrap(), Released::AlreadyLost(_)));
        drop(two);
        // What is released in the background is done by then.
        locks.close(LONG).await.unwrap();
        assert_eq!(value(&server), theirs, "our late release changed their lock");
        assert_eq!(them.ask("release").await, "released");
    }
}

/// Two holders of parts who do not renew.
async fn short_and_long(locks: &Locks, part: fn(&Locks) -> Part) -> (Guard, Guard) {
    let forgetful = locks.clone().renew(Renew::Never);
    let with_ttl = |ms| part(&forgetful.clone().ttl(Duration::from_millis(ms)).unwrap());
    let one = with_ttl(400).take().await.unwrap();
    let two = with_ttl(1500).take().await.unwrap();
    (one, two)
}
