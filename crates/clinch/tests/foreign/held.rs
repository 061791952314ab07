//! What we hold: they do not have it before it was released, has run out, or was deleted, and then it is theirs.

use std::time::Duration;

use clinch::{Guard, LossKind, Released, Renew};
use clinch_testkit::Redis;

use super::{Foreign, LONG, NAME, PATIENCE, SOON, Worker, connect_to, start, values, we_could_lock, within};

/// Somebody who polls would have asked twice.
const A_WHILE: Duration = Duration::from_millis(500);

/// Renewed every 700 ms: nothing is renewed while all servers are told to delete it.
const TTL: Duration = Duration::from_millis(2100);

pub(crate) async fn what_we_hold_they_get_after_our_release(client: Foreign) {
    let servers = start();
    let locks = connect_to(&servers, "").await;
    let mut them = Worker::polling(client, &servers, NAME, LONG, None).await;
    let guard = locks.mutex(NAME).unwrap().lock().await.unwrap();
    assert_eq!(them.ask("try").await, "no");
    them.tell("lock");
    tokio::time::sleep(A_WHILE).await;
    assert!(them.is_silent());
    guard.verify().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    assert_eq!(them.says().await, "locked");
    assert!(!we_could_lock(&locks).await);
    assert_eq!(them.ask("release").await, "released");
    assert!(we_could_lock(&locks).await);
}

pub(crate) async fn what_we_hold_they_get_after_our_lease_and_we_know_first(client: Foreign) {
    let servers = start();
    let locks = connect_to(&servers, "").await;
    let mut them = Worker::polling(client, &servers, NAME, LONG, None).await;
    let forgetful = locks.clone().renew(Renew::Never).ttl(Duration::from_secs(1)).unwrap();
    let guard = forgetful.mutex(NAME).unwrap().lock().await.unwrap();
    assert_eq!(them.ask("try").await, "no");
    assert_eq!(them.ask("lock").await, "locked");
    assert!(!guard.is_held(), "two hold it");
    assert_eq!(guard.lost().await.kind, LossKind::Expired);
    let theirs = values(&servers);
    assert!(
        matches!(guard.release().await.unwrap(), Released::AlreadyLost(loss) if loss.kind == LossKind::Expired)
    );
    // What is released in the background is done by then.
    locks.close(LONG).await.unwrap();
    assert_eq!(values(&servers), theirs);
    assert_eq!(them.ask("release").await, "released");
}

/// An operator deletes our lock by force, and a foreign client takes it.
pub(crate) async fn a_deleted_lock_is_lost_and_theirs_is_left_alone(client: Foreign) {
    let servers = start();
    let locks = connect_to(&servers, "").await.ttl(TTL).unwrap();
    let mut them = Worker::polling(client, &servers, NAME, LONG, None).await;
    let guard = locks.mutex(NAME).unwrap().lock().await.unwrap();
    delete(&servers, &guard).await;
    assert_eq!(them.ask("try").await, "yes");
    let theirs = values(&servers);
    let loss = within(SOON, "the renewal finds it gone", guard.lost()).await;
    assert_eq!(loss.kind, LossKind::Deleted);
    assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost(loss));
    locks.close(LONG).await.unwrap();
    assert_eq!(values(&servers), theirs);
    assert_eq!(them.ask("release").await, "released");

    // Released before any renewal: the servers say that it is gone.
    let locks = connect_to(&servers, "").await;
    let guard = locks.mutex(NAME).unwrap().lock().await.unwrap();
    delete(&servers, &guard).await;
    assert_eq!(them.ask("try").await, "yes");
    let theirs = values(&servers);
    let released = guard.release().await.unwrap();
    assert!(
        matches!(&released, Released::AlreadyLost(loss) if loss.kind == LossKind::Deleted),
        "{released:?}"
    );
    locks.close(LONG).await.unwrap();
    assert_eq!(values(&servers), theirs);
    assert_eq!(them.ask("release").await, "released");
}

/// Deletes what a guard holds, once it stands on all servers: for the grant, more than half were enough.
async fn delete(servers: &[Redis], guard: &Guard) {
    let id = guard.claim_id().to_string();
    let everywhere = async {
        for server in servers {
            while !server.call(&["GETRANGE", NAME, "0", "31"]).text().eq(&id) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    };
    within(PATIENCE, "all servers have it", everywhere).await;
    for server in servers {
        server.call(&["DEL", NAME]);
    }
}
