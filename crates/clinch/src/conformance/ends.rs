//! What goes on after its end: holders that were stopped beyond their lease, releases in doubt, guards and clients that are gone.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;

use super::Fixture;
use super::client::{
    Client, PATIENCE, Polled, answered, eventually, join, lock, queue, runtime, unique, until_past, within,
};
use super::faults::Step;
use crate::backend::Freed;
use crate::error::ErrorKind;
use crate::guard::{Guard, Released};
use crate::lane::Lane;

/// P2, P7: a holder that was stopped until its lease was over, or its eviction, with all that works for it in the background, says when
/// it goes on that it holds nothing, and that its release has freed nothing. Who holds since then is not disturbed.
pub async fn stopped_holder_goes_on(fixture: &dyn Fixture) {
    let expiry = Client::new(fixture).await.capabilities().expiry;
    thread::scope(|scope| {
        // What is stopped is a runtime that nobody drives.
        let scenes = [false, true].into_iter().filter(|evicted| expiry || *evicted);
        let scenes = scenes.map(|evicted| scope.spawn(move || stop_a_holder(fixture, evicted)));
        for scene in scenes.collect::<Vec<_>>() {
            scene.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
}

fn stop_a_holder(fixture: &dyn Fixture, evicted: bool) {
    let (stopped, driven) = (runtime(), runtime());
    let name = unique("stopped");
    let rival = driven.block_on(Client::new(fixture));
    let one = stopped.block_on(async { Client::on(Lane::here().unwrap(), fixture).await });
    // Of long enough a lease for the eviction to find it.
    let guard = stopped.block_on(lock(&one.with_ttl(fixture.ttl() * 4), &name));
    let next = driven.block_on(async {
        if evicted {
            let freed = answered(async || rival.locks.evict(&name, guard.claim_id()).await).await;
            assert_eq!(freed.unwrap(), Freed::Removed);
        }
        rival.lock(&name).await
    });
    if one.capabilities().expiry {
        assert!(!guard.is_held(), "two hold at a time");
        assert_eq!(guard.remaining(), Some(Duration::ZERO));
    }
    let released = driven.block_on(guard.release()).unwrap();
    assert!(matches!(released, Released::AlreadyLost(_)), "another holds it, and it was {released:?}");
    stopped.block_on(closed(&one));
    driven.block_on(async {
        next.verify().await.expect("a holder that was stopped has freed its successor's lock");
        assert_eq!(next.release().await.unwrap(), Released::Released);
        rival.expect_unused(&name).await;
    });
}

/// P7: a release of which nobody can say whether it came before the end of the lease does not say that it has released, whether it is
/// polled all the time, or not until another holds; and it is repeated in the background.
pub async fn doubtful_release_counts_as_released(fixture: &dyn Fixture) {
    let rival = Client::new(fixture).await;
    if !rival.capabilities().expiry {
        return;
    }
    for polled in [true, false] {
        let (one, name) = (Client::new(fixture).await, unique("doubt"));
        let guard = lock(&one.with_ttl(fixture.ttl() * 2), &name).await;
        let waiter = queue(&rival.locks, &name);
        rival.waits(&name, 1).await;
        one.faults.lose_requests_of(Step::Release);
        let mut release = Polled::new(guard.release());
        let mut released = release.poll(2).await;
        if polled && released.is_none() {
            released = Some(eventually("a release in doubt ends", async || release.once().await).await);
        }
        let next = join("what nobody renews is another's", waiter).await;
        let calls = one.faults.calls_of(Step::Release);
        one.faults.heal();
        let released = match released {
            Some(released) => released,
            None => eventually("a release in doubt ends", async || release.once().await).await,
        };
        assert!(!matches!(released, Ok(Released::Released)), "another holds it, and it was {released:?}");
        made_good(&one, calls, next).await;
    }
}

/// P7: a body whose lock could not be released for sure before the end of its lease does not count as done under it.
pub async fn doubtful_run_counts_as_done(fixture: &dyn Fixture) {
    let (one, rival) = (Client::new(fixture).await, Client::new(fixture).await);
    if !one.capabilities().expiry {
        return;
    }
    let name = unique("doubt-run");
    let mutex = one.with_ttl(fixture.ttl() * 2).mutex(&name).unwrap();
    let body = async |_: &Guard| one.faults.lose_requests_of(Step::Release);
    let error = within("a body that is done ends", mutex.lock().run(body)).await.unwrap_err();
    let kinds = [ErrorKind::Unavailable, ErrorKind::Unknown, ErrorKind::Lost];
    assert!(kinds.contains(&error.kind()), "{error:?}");
    let next = rival.lock(&name).await;
    let calls = one.faults.calls_of(Step::Release);
    one.faults.heal();
    made_good(&one, calls, next).await;
}

/// Waits until a release in doubt is repeated, which takes nothing of who holds by now.
async fn made_good(one: &Client, calls: u64, next: Guard) {
    eventually("a release in doubt is repeated in the background", async || {
        (one.faults.calls_of(Step::Release) > calls).then_some(())
    })
    .await;
    closed(one).await;
    next.verify().await.expect("the repeated release freed a successor's lock");
    assert_eq!(next.release().await.unwrap(), Released::Released);
}

/// Waits until all releases of a client are done. Those of leases that are over are waited for a moment only, in which a busy store may
/// not answer.
async fn closed(client: &Client) {
    eventually("its releases are done", async || client.locks.close(PATIENCE).await.ok()).await;
}

/// P7: once a guard is released, dropped, lost or detached, nobody renews its lease any more, or asks after it.
pub async fn guard_goes_on_after_its_end(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !one.capabilities().expiry {
        return;
    }
    let ttl = fixture.ttl() * 2;
    for end in ["released", "dropped", "evicted", "detached"] {
        if end == "detached" && !one.capabilities().detached {
            continue;
        }
        let name = unique("after-its-end");
        let before = one.faults.calls_of(Step::Renew);
        let guard = lock(&one.with_ttl(ttl), &name).await;
        eventually("it is renewed", async || (one.faults.calls_of(Step::Renew) > before).then_some(())).await;
        let kept = match end {
            "released" => {
                guard.release().await.unwrap();
                None
            }
            "dropped" => {
                drop(guard);
                None
            }
            "detached" => {
                guard.detach().await.unwrap();
                None
            }
            _ => {
                other.locks.evict(&name, guard.claim_id()).await.unwrap();
                within("an evicted holder is told", guard.lost()).await;
                Some(guard)
            }
        };
        // What was under way when it ended is over by then.
        until_past(&one, one.now() + ttl / 4).await;
        let asked = || one.faults.calls_of(Step::Renew) + one.faults.calls_of(Step::Verify);
        let calls = asked();
        until_past(&one, one.now() + ttl).await;
        assert_eq!(asked(), calls, "what was {end} is asked for");
        drop(kept);
        other.expect_unused(&name).await;
    }
}

/// P5, P7: closing a client while many wait and many releases are under way ends with the releases done. The waiters that give up then
/// leave nothing behind; no task and no thread of the client goes on.
pub async fn closed_client_goes_on(fixture: &dyn Fixture) {
    const WAITERS: usize = 100;
    const RELEASES: u64 = 50;
    let tasks = tasks();
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let thread = thread_of(&one).await;
    let (name, many) = (unique("closing"), unique("closing-many"));
    let held = other.lock(&name).await;
    let names: Vec<String> = (0..RELEASES).map(|number| format!("{many}/{number}")).collect();
    let guards = join_all(names.iter().map(|name| one.lock(name))).await;
    let waiters: Vec<_> = (0..WAITERS).map(|_| queue(&one.locks, &name)).collect();
    if one.capabilities().queue {
        one.waits(&name, WAITERS).await;
    } else {
        // Those who poll hardly ever all wait.
        eventually("all have asked", async || {
            (one.faults.calls_of(Step::Claim) >= RELEASES + WAITERS as u64).then_some(())
        })
        .await;
    }
    one.faults.lose_requests_of(Step::Release);
    drop(guards);
    let (closed, ()) = tokio::join!(one.locks.close(PATIENCE), async {
        eventually("all releases are under way", async || {
            (one.faults.calls_of(Step::Release) >= RELEASES).then_some(())
        })
        .await;
        one.faults.heal();
    });
    closed.unwrap();
    let left = other.locks.list(&many).await.unwrap();
    assert!(left.is_empty(), "closed before its releases were done: {left:?}");
    waiters.iter().for_each(tokio::task::JoinHandle::abort);
    join_all(waiters).await;
    other.sees_claims(&name, 1).await;
    held.verify().await.unwrap();
    gone(one, thread).await;
    drop(held);
    other.expect_unused(&name).await;
    drop(other);
    eventually("no task of them goes on", async || (self::tasks() <= tasks).then_some(())).await;
}

/// The tasks of this runtime.
fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// The thread of a client's background lane, where the system can tell.
async fn thread_of(client: &Client) -> Option<PathBuf> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let ask = async move {
        let _ = tell.send(std::fs::read_link("/proc/thread-self").ok());
    };
    client.env.lane().spawn(ask).unwrap();
    Some(PathBuf::from("/proc").join(told.await.unwrap()?))
}

/// Waits until nothing of a client is left: nobody has its store, and its thread has ended.
async fn gone(client: Client, thread: Option<PathBuf>) {
    let Client { locks, faults, env } = client;
    drop((locks, env));
    eventually("nobody has the store any more", async || (Arc::strong_count(&faults) == 1).then_some(()))
        .await;
    drop(faults);
    eventually("its background thread ends", async || {
        thread.as_ref().is_none_or(|thread| !thread.exists()).then_some(())
    })
    .await;
}
