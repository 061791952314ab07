//! An operator deletes our lock by force, and a foreign client takes it.

use std::time::Duration;

use clinch::{LossKind, Released};
use clinch_testkit::Redis;

use super::{Foreign, LONG, NAME, PATIENCE, SOON, Worker, connect, value, within};

/// Renewed every 300 ms.
const TTL: Duration = Duration::from_millis(900);

pub(crate) async fn a_reader_whose_lock_was_deleted_leaves_theirs_alone(client: Foreign) {
    let server = Redis::start();
    let locks = connect(&server, "").await.ttl(TTL).unwrap();
    let mut them = Worker::start(client, &server, NAME, LONG).await;
    let guard = locks.rwlock(NAME).unwrap().read().await.unwrap();
    take_by_force(&server, &mut them).await;
    let theirs = value(&server);
    // Some renewals come and go.
    tokio::time::sleep(2 * TTL).await;
    assert_eq!(value(&server), theirs, "our renewal took their lock away");
    drop(guard);
    locks.close(LONG).await.unwrap();
    assert_eq!(value(&server), theirs, "our release took their lock away");
    assert_eq!(them.ask("release").await, "released");
}

pub(crate) async fn a_reader_whose_lock_was_taken_is_told(client: Foreign) {
    let server = Redis::start();
    let locks = connect(&server, "").await.ttl(TTL).unwrap();
    let mut them = Worker::start(client, &server, NAME, LONG).await;
    let guard = locks.rwlock(NAME).unwrap().read().await.unwrap();
    take_by_force(&server, &mut them).await;
    let loss = within(SOON, "the renewal finds it taken", guard.lost()).await;
    assert_eq!(loss.kind, LossKind::Deleted);
    assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost(loss));
}

/// Deletes our lock until they have it: a reader's renewal may put it back at any moment.
async fn take_by_force(server: &Redis, them: &mut Worker) {
    let take = async {
        while them.ask("try").await == "no" {
            server.call(&["DEL", NAME]);
        }
    };
    within(PATIENCE, "they take it", take).await;
}
