//! Futures dropped at every poll.
//!
//! Each property runs one operation again and again, polling its future once more each time before it is dropped, until
//! it completes. The backend is made to hesitate before and after every step, so that the future is also dropped after
//! the store has applied a step and before the answer has come. Leases are long: what was leaked stays leaked.

use std::time::Duration;

use super::Fixture;
use super::client::{Client, PATIENCE, Polled, eventually, poll_then_drop, unique, within};
use crate::guard::{Guard, Released};

/// Polls of an operation until it must have completed.
const MOST_POLLS: usize = 200;

/// Polls of a waiter before the lock that it waits for is released.
const POLLS_WHILE_HELD: usize = 6;

/// Requests that are dropped on their way. A store that loses this race did so for one of ten.
const REQUESTS: usize = 200;

/// The clients of one scene.
struct Stage {
    /// Whose future is dropped.
    actor: Client,
    /// Who holds before, and looks after, the scene.
    other: Client,
}

/// Plays a scene with one more poll each time until its future completes; after each, the lock must be unused.
async fn at_every_poll(
    fixture: &dyn Fixture,
    hazard: &str,
    scene: impl AsyncFn(&Stage, &str, usize) -> bool,
) {
    let stage = Stage { actor: Client::new(fixture).await, other: Client::new(fixture).await };
    stage.actor.faults.hesitate();
    for polls in 0..MOST_POLLS {
        let name = unique(hazard);
        let completed = scene(&stage, &name, polls).await;
        stage.other.expect_unused(&name).await;
        if completed {
            assert!(polls > 1, "the future was never dropped half-way");
            return;
        }
    }
    panic!("the future did not complete within {MOST_POLLS} polls");
}

/// P5: nothing is left of a request for a free lock.
pub async fn locking_dropped_at_every_poll(fixture: &dyn Fixture) {
    at_every_poll(fixture, "drop-lock", async |stage, name, polls| {
        let mutex = stage.actor.locks.mutex(name).unwrap();
        poll_then_drop(mutex.lock().timeout(Duration::from_secs(60)), polls).await.is_some()
    })
    .await;
}

/// P5: nothing is left of a request that waits in the queue, or that is dropped at its grant.
pub async fn queueing_dropped_at_every_poll(fixture: &dyn Fixture) {
    at_every_poll(fixture, "drop-queue", async |stage, name, polls| {
        let holder = stage.other.lock(name).await;
        let mutex = stage.actor.locks.mutex(name).unwrap();
        let mut request = Polled::new(mutex.lock());
        let while_held = polls.min(POLLS_WHILE_HELD);
        assert!(request.poll(while_held).await.is_none(), "granted while it was held");
        if polls == while_held {
            // The holder goes on while the waiter is dropped, and is not disturbed by it.
            drop(request);
            holder.verify().await.unwrap();
            assert_eq!(holder.release().await.unwrap(), Released::Released);
            return false;
        }
        assert_eq!(holder.release().await.unwrap(), Released::Released);
        request.poll(polls - while_held).await.is_some()
    })
    .await;
}

/// P5: nothing is left of a try.
pub async fn trying_dropped_at_every_poll(fixture: &dyn Fixture) {
    at_every_poll(fixture, "drop-try", async |stage, name, polls| {
        let mutex = stage.actor.locks.mutex(name).unwrap();
        poll_then_drop(mutex.try_lock(), polls).await.is_some()
    })
    .await;
}

/// P5: nothing is left of a request to read.
pub async fn reading_dropped_at_every_poll(fixture: &dyn Fixture) {
    if !Client::new(fixture).await.capabilities().shared {
        return;
    }
    at_every_poll(fixture, "drop-read", async |stage, name, polls| {
        let lock = stage.actor.locks.rwlock(name).unwrap();
        poll_then_drop(lock.read(), polls).await.is_some()
    })
    .await;
}

/// P5: nothing is left of a request to write.
pub async fn writing_dropped_at_every_poll(fixture: &dyn Fixture) {
    at_every_poll(fixture, "drop-write", async |stage, name, polls| {
        let lock = stage.actor.locks.rwlock(name).unwrap();
        poll_then_drop(lock.write(), polls).await.is_some()
    })
    .await;
}

/// P5: nothing is left of a request for permits.
pub async fn acquiring_permits_dropped_at_every_poll(fixture: &dyn Fixture) {
    if !Client::new(fixture).await.capabilities().permits {
        return;
    }
    at_every_poll(fixture, "drop-permits", async |stage, name, polls| {
        let semaphore = stage.actor.locks.semaphore(name, 3).unwrap();
        poll_then_drop(semaphore.acquire(2).unwrap(), polls).await.is_some()
    })
    .await;
}

/// P5, P7: a release that is dropped still releases.
pub async fn releasing_dropped_at_every_poll(fixture: &dyn Fixture) {
    at_every_poll(fixture, "drop-release", async |stage, name, polls| {
        let guard = stage.actor.lock(name).await;
        let released = poll_then_drop(guard.release(), polls).await;
        released.map(|released| assert_eq!(released.unwrap(), Released::Released)).is_some()
    })
    .await;
}

/// P5: a downgrade that is dropped releases.
pub async fn downgrading_dropped_at_every_poll(fixture: &dyn Fixture) {
    if !Client::new(fixture).await.capabilities().shared {
        return;
    }
    at_every_poll(fixture, "drop-downgrade", async |stage, name, polls| {
        let lock = stage.actor.locks.rwlock(name).unwrap();
        let guard = within("a writer is granted", lock.write()).await.unwrap();
        poll_then_drop(guard.downgrade(), polls).await.map(Result::unwrap).is_some()
    })
    .await;
}

/// P5: an extension that is dropped leaves the guard as it was, or extended.
pub async fn extending_dropped_at_every_poll(fixture: &dyn Fixture) {
    at_every_poll(fixture, "drop-extend", async |stage, name, polls| {
        let guard = stage.actor.lock(name).await;
        let extended = poll_then_drop(guard.extend(Duration::from_secs(90)), polls).await;
        still_good(guard).await;
        extended.map(Result::unwrap).is_some()
    })
    .await;
}

/// P5: a look at the store that is dropped leaves the guard as it was.
pub async fn verifying_dropped_at_every_poll(fixture: &dyn Fixture) {
    at_every_poll(fixture, "drop-verify", async |stage, name, polls| {
        let guard = stage.actor.lock(name).await;
        let verified = poll_then_drop(guard.verify(), polls).await;
        still_good(guard).await;
        verified.map(Result::unwrap).is_some()
    })
    .await;
}

/// P5: nothing is left of requests that are dropped when they have just been sent, so that they may reach the store after
/// their own release, which goes another way.
pub async fn requests_dropped_on_their_way(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let name = unique("drop-on-the-way");
    // Opens both ways.
    drop(client.lock(&name).await);
    client.expect_unused(&name).await;
    for number in 0..REQUESTS {
        let mutex = client.locks.mutex(&format!("{name}/{number}")).unwrap();
        let mut request = Polled::new(mutex.lock());
        drop(request.once().await);
        // Has the runtime send it, and sometimes take the answer in.
        for _ in 0..number % 4 {
            tokio::task::yield_now().await;
        }
    }
    client.locks.close(PATIENCE).await.unwrap();
    eventually("nothing is left of dropped requests", async || {
        client.locks.list(&name).await.unwrap().is_empty().then_some(())
    })
    .await;
}

/// P5: a body that is dropped leaves nothing behind, wherever it was.
pub async fn running_dropped_at_every_poll(fixture: &dyn Fixture) {
    at_every_poll(fixture, "drop-run", async |stage, name, polls| {
        let mutex = stage.actor.locks.mutex(name).unwrap();
        let body = async |_: &Guard| tokio::task::yield_now().await;
        poll_then_drop(mutex.lock().run(body), polls).await.map(Result::unwrap).is_some()
    })
    .await;
}

async fn still_good(guard: Guard) {
    assert!(guard.is_held());
    guard.verify().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}
