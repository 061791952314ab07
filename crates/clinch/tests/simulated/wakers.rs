//! Callers' wakers: one may drop the task that it is to wake.

use super::*;

/// A task whose executor has ended lives in its wakers alone: what wakes it drops it, with all that it has.
struct Orphan(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);

impl std::task::Wake for Orphan {
    fn wake(self: Arc<Self>) {}
}

fn orphan(future: impl Future<Output = ()> + Send + 'static) {
    let task = Arc::new(Orphan(Mutex::new(None)));
    let waker = Waker::from(task.clone());
    let mut future = Box::pin(future);
    assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    *task.0.lock().unwrap() = Some(future);
}

#[test]
fn a_loss_may_drop_the_task_that_it_wakes() {
    unblocked(|| async {
        let env = world(40);
        let locks = Locks::new(Arc::new(Memory::new(env.clone())), env.clone()).ttl(TTL).unwrap();
        let capped = locks.clone().max_hold(TTL).unwrap();
        let guard = capped.mutex("job").unwrap().lock().await.unwrap();
        orphan(async move { drop(guard.lost().await) });
        pass(&env, 2 * TTL).await;
        assert!(locks.mutex("job").unwrap().try_lock().await.unwrap().is_some(), "its guard was not dropped");
    });
}

#[test]
fn a_grant_may_drop_the_task_that_it_wakes() {
    unblocked(|| async {
        let env = world(41);
        let store = Memory::new(env.clone());
        let locks = Locks::new(Arc::new(store.client(env.clone())), env.clone()).ttl(TTL).unwrap();
        let held = locks.mutex("job").unwrap().lock().await.unwrap();
        let other = locks.mutex("other").unwrap().lock().await.unwrap();
        let holder = locks.state("job").await.unwrap().unwrap().claims.remove(0);
        let claim = Claim {
            id: ClaimId::from_bits(1),
            name: LockName::new("job").unwrap(),
            mode: holder.mode,
            ttl: 10 * TTL,
            enqueue: true,
            place: false,
            isolated: false,
            owner: Arc::new(holder.owner),
        };
        assert!(matches!(store.claim(&claim).await.unwrap(), Progress::Queued(_)));
        orphan(async move {
            let _other = other;
            drop(store.wait(&claim).await);
        });
        // Its timer is over, so that the grant alone wakes it.
        pass(&env, TTL + TTL / 2).await;
        held.release().await.unwrap();
        assert!(
            locks.mutex("other").unwrap().try_lock().await.unwrap().is_some(),
            "its guard was not dropped"
        );
    });
}

/// One of those that wait for one thing is of no concern to the others.
#[tokio::test(start_paused = true)]
async fn a_waker_that_panics_keeps_nobody_asleep() {
    struct Panics;
    impl std::task::Wake for Panics {
        fn wake(self: Arc<Self>) {
            std::panic::resume_unwind(Box::new("a caller's waker panics"));
        }
    }
    let env = world(42);
    let (_far, locks, near) = faulty(&env);
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let bad = Waker::from(Arc::new(Panics));
    let wait = || {
        let mut lost = Box::pin(guard.lost());
        assert!(lost.as_mut().poll(&mut Context::from_waker(&bad)).is_pending());
        lost
    };
    let before = wait();
    let mut told = std::pin::pin!(guard.lost());
    assert!(at_once(told.as_mut()).await.is_none());
    let after = wait();
    near.evict("job", guard.claim_id()).await.unwrap();
    let evicted = env.clock().now();
    // Looks again at its end.
    let _ = tokio::time::timeout(TTL, told).await;
    assert!(env.clock().now().since(evicted) < TTL, "it slept on");
    drop((before, after));
}
