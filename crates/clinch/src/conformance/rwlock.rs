//! Starved writers, readers beside a writer.

use futures_util::future::join_all;

use super::Fixture;
use super::client::{Client, LONG_TTL, expect_waiting, join, queue, unique, within};
use super::history::{Ask, contend};
use crate::guard::{Guard, Released};
use crate::locks::Locks;

/// How many try at once.
const CROWD: usize = 40;

/// Whether the store has shared claims; one that has not must say so instead of granting something else.
async fn has_readers(client: &Client) -> bool {
    if client.capabilities().shared {
        return true;
    }
    super::steps::expect_unsupported(client.locks.rwlock(&unique("no-readers")).unwrap().try_read().await);
    false
}

async fn read(locks: &Locks, name: &str) -> Guard {
    let lock = locks.rwlock(name).unwrap();
    within("a reader is granted", lock.read()).await.unwrap()
}

fn queue_reader(locks: &Locks, name: &str) -> tokio::task::JoinHandle<Guard> {
    let (locks, name) = (locks.clone(), name.to_owned());
    tokio::spawn(async move { read(&locks, &name).await })
}

/// P1: under contention of readers and writers, no writer holds beside anybody.
pub async fn readers_meet_a_writer(fixture: &dyn Fixture) {
    if has_readers(&Client::new(fixture).await).await {
        contend(fixture, LONG_TTL, &[Ask::Exclusive, Ask::Shared, Ask::Shared], false);
    }
}

/// Readers hold together, those in a row and those of a crowd that tries at once.
pub async fn readers_exclude_each_other(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !has_readers(&one).await {
        return;
    }
    let name = unique("readers");
    let mut readers = Vec::new();
    for client in [&one, &other, &one, &other] {
        readers.push(read(&client.locks, &name).await);
    }
    let tries = [&one, &other].map(|client| client.locks.rwlock(&name).unwrap());
    let crowd = tries.iter().cycle().take(CROWD).map(|lock| async { lock.try_read().await });
    readers.extend(join_all(crowd).await.into_iter().filter_map(Result::unwrap));
    assert_eq!(readers.len(), 4 + CROWD, "a reader was refused beside readers");
    assert!(!one.could_lock(&name).await, "a writer got in beside readers");
    assert!(readers.iter().all(Guard::is_held));
    for reader in readers {
        assert_eq!(reader.release().await.unwrap(), Released::Released);
    }
    other.expect_unused(&name).await;
}

/// Readers that wait behind a writer are let in together when it goes, however many they are.
pub async fn waiting_readers_exclude_each_other(fixture: &dyn Fixture) {
    /// More than a store might look at, or wake, in one go.
    const WAITING: usize = 12;
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !has_readers(&one).await {
        return;
    }
    let name = unique("waiting-readers");
    let writer = one.lock(&name).await;
    let readers: Vec<_> = (0..WAITING)
        .map(|number| queue_reader(if number % 2 == 0 { &one.locks } else { &other.locks }, &name))
        .collect();
    one.waits(&name, WAITING / 2).await;
    other.waits(&name, WAITING / 2).await;
    assert_eq!(writer.release().await.unwrap(), Released::Released);
    let mut held = Vec::new();
    for reader in readers {
        held.push(join("a reader is granted beside those that hold", reader).await);
    }
    assert!(held.iter().all(Guard::is_held));
    drop(held);
    other.expect_unused(&name).await;
}

/// P6: a reader that comes after a waiting writer waits behind it, though it could share with those who hold.
pub async fn reader_overtakes_a_writer(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !has_readers(&one).await || !one.capabilities().fifo {
        return;
    }
    let name = unique("reader-behind-writer");
    let holder = read(&one.locks, &name).await;
    let writer = queue(&other.locks, &name);
    other.waits(&name, 1).await;
    let barging = one.locks.rwlock(&name).unwrap().try_read().await.unwrap();
    assert!(barging.is_none(), "a reader passed a waiting writer by trying");
    let reader = queue_reader(&one.locks, &name);
    one.waits(&name, 1).await;
    expect_waiting("a reader behind a waiting writer", &reader).await;
    assert_eq!(one.claims(&name).await.iter().filter(|claim| claim.granted).count(), 1);
    assert_eq!(holder.release().await.unwrap(), Released::Released);
    let writer = join("the writer is granted", writer).await;
    expect_waiting("a reader beside a writer", &reader).await;
    assert_eq!(writer.release().await.unwrap(), Released::Released);
    drop(join("the reader is granted", reader).await);
    other.expect_unused(&name).await;
}

/// P6: readers who relieve each other without a gap do not keep a writer out.
pub async fn writer_starves(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !has_readers(&one).await || !one.capabilities().fifo {
        return;
    }
    let name = unique("starved-writer");
    let mut holder = read(&one.locks, &name).await;
    let mut writer = None;
    let mut relieved = 0;
    for turn in 0..6 {
        if turn == 2 {
            writer = Some(queue(&other.locks, &name));
            other.waits(&name, 1).await;
        }
        let next = queue_reader(&one.locks, &name);
        if let Some(writer) = writer.take() {
            // The chain ends here: the next reader has to wait for the writer.
            one.waits(&name, 1).await;
            assert_eq!(holder.release().await.unwrap(), Released::Released);
            let writer = join("the writer is granted between readers", writer).await;
            expect_waiting("a reader beside a writer", &next).await;
            assert_eq!(writer.release().await.unwrap(), Released::Released);
            drop(join("the next reader is granted", next).await);
            break;
        }
        let next = join("a reader relieves a reader", next).await;
        assert_eq!(holder.release().await.unwrap(), Released::Released);
        holder = next;
        relieved += 1;
    }
    assert_eq!(relieved, 2);
    other.expect_unused(&name).await;
}

/// A downgraded writer shares with the readers that wait behind it, and keeps its token.
pub async fn downgrade_shuts_readers_out(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !has_readers(&one).await {
        return;
    }
    let name = unique("downgrade");
    let lock = one.locks.rwlock(&name).unwrap();
    let writer = within("a writer is granted", lock.write()).await.unwrap();
    let token = writer.token();
    let readers = [queue_reader(&other.locks, &name), queue_reader(&one.locks, &name)];
    one.waits(&name, 1).await;
    other.waits(&name, 1).await;
    let reader = within("a downgrade is answered", writer.downgrade()).await.unwrap();
    assert_eq!(reader.token(), token, "a downgrade changed the token");
    assert!(reader.is_held());
    let mut held = vec![reader];
    for waiting in readers {
        held.push(join("a reader joins a downgraded writer", waiting).await);
    }
    assert!(held.iter().all(Guard::is_held));
    held[0].verify().await.unwrap();
    for reader in held {
        assert_eq!(reader.release().await.unwrap(), Released::Released);
    }
    other.expect_unused(&name).await;
}

/// P1: no writer gets in at or after a downgrade before the last reader is gone.
pub async fn downgrade_lets_a_writer_in(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !has_readers(&one).await {
        return;
    }
    let name = unique("downgrade-writer");
    let lock = one.locks.rwlock(&name).unwrap();
    let writer = within("a writer is granted", lock.write()).await.unwrap();
    let next = queue(&other.locks, &name);
    other.waits(&name, 1).await;
    let reader = within("a downgrade is answered", writer.downgrade()).await.unwrap();
    expect_waiting("a writer beside a downgraded one", &next).await;
    assert!(!other.could_lock(&name).await, "a writer got in beside a downgraded one");
    assert_eq!(reader.release().await.unwrap(), Released::Released);
    drop(join("the writer is granted", next).await);
    other.expect_unused(&name).await;
}
