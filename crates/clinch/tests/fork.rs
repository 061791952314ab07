//! What a forked child may do with what it has of its parent: nothing, and nothing of it hangs. What is refused is shown on `file://`
//! and `memory://` alone, since the engine says it for all; that connections stay, on servers.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    unsafe_code,
    reason = "test code; fork(2) is unsafe"
)]
#![cfg(all(target_os = "linux", feature = "conformance", feature = "file", feature = "memory"))]

use std::future::IntoFuture;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use clinch::backends::memory::Memory;
use clinch::conformance::faults::{Faulty, Step};
use clinch::{Env, Error, ErrorKind, Guard, Lane, Locks, Loss, LossKind, Released, Standing};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().unwrap()
}

/// Set for [`parent`] and [`busy_parent`] when they are to fork.
const FORK: &str = "CLINCH_TEST_FORK";

fn fork() -> i32 {
    // SAFETY: the child is allowed to run on in glibc, whose allocator is made ready for it, and it ends with `_exit`.
    unsafe { libc::fork() }
}

/// What a child does, and its end. One that hangs is killed.
fn end(run: impl FnOnce()) -> ! {
    // SAFETY: asks for a signal, which ends the process since nothing handles it.
    unsafe { libc::alarm(30) };
    let sound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    // SAFETY: ends the process and does nothing else.
    unsafe { libc::_exit(i32::from(sound.is_err())) }
}

fn join(child: i32) {
    let mut status = 0;
    // SAFETY: waits for the child made above and writes its status.
    assert_eq!(unsafe { libc::waitpid(child, std::ptr::from_mut(&mut status), 0) }, child);
    assert_eq!(status, 0, "the child failed or hung");
}

/// Holds a lock and forks; nothing by itself, since a child that runs on has only one of its parent's threads.
#[test]
fn parent() {
    if std::env::var_os(FORK).is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file://{}", dir.path().display());
    let (locks, guard) = runtime().block_on(async {
        let locks = clinch::connect(&url).await.unwrap();
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        (locks, guard)
    });
    let child = fork();
    if child == 0 {
        end(|| runtime().block_on(child_refused(&url, locks, guard)));
    }
    join(child);
    runtime().block_on(async {
        guard.verify().await.unwrap();
        let other = clinch::connect(&url).await.unwrap();
        assert!(other.mutex("job").unwrap().try_lock().await.unwrap().is_none(), "the child freed the lock");
        guard.release().await.unwrap();
        assert!(other.mutex("job").unwrap().try_lock().await.unwrap().is_some());
    });
}

fn closed(error: Error) {
    assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
    assert!(error.to_string().contains("forked"), "{error}");
}

async fn child_refused(url: &str, locks: Locks, guard: Guard) {
    closed(locks.mutex("other").unwrap().try_lock().await.unwrap_err());
    closed(locks.mutex("other").unwrap().lock().timeout(Duration::from_secs(1)).await.unwrap_err());
    closed(locks.list("").await.unwrap_err());
    closed(locks.close(Duration::from_secs(1)).await.unwrap_err());
    closed(locks.state("job").await.unwrap_err());
    closed(locks.evict("job", guard.claim_id()).await.unwrap_err());
    closed(locks.renew_detached("job", guard.claim_id(), Duration::from_secs(1)).await.unwrap_err());
    closed(locks.release_detached("job", guard.claim_id()).await.unwrap_err());
    assert!(!guard.is_held() && matches!(guard.standing(), Standing::Lost(_)), "{guard:?}");
    assert_eq!(guard.remaining(), Some(Duration::ZERO));
    assert!(guard.deadline().is_some_and(|deadline| deadline < Env::host(Lane::thread()).clock().now()));
    assert!(guard.descriptor().is_none());
    let loss = guard.lost().await;
    assert_eq!(loss.kind, LossKind::Unverifiable);
    assert!(loss.detail.contains("forked"), "{loss}");
    assert_eq!(guard.changed(&Standing::Held).await, Standing::Lost(loss));
    closed(guard.verify().await.unwrap_err());
    closed(guard.extend(Duration::from_secs(1)).await.unwrap_err());
    closed(guard.release().await.unwrap_err());
    let own = clinch::connect(url).await.unwrap();
    assert!(
        own.mutex("job").unwrap().try_lock().await.unwrap().is_none(),
        "the child freed its parent's lock"
    );
    let other = own.mutex("other").unwrap().try_lock().await.unwrap().expect("a client of its own works");
    let grandchild = fork();
    if grandchild == 0 {
        end(|| {
            assert!(!other.is_held(), "{other:?}");
            std::mem::forget((other, own));
        });
    }
    join(grandchild);
    assert!(other.is_held());
}

/// Forks again and again while other threads are at work on the same client, and hold whatever mutex they hold.
#[test]
fn busy_parent() {
    if std::env::var_os(FORK).is_none() {
        return;
    }
    let env = Env::host(Lane::thread());
    let locks = runtime().block_on(Locks::connect("memory://", env.clone())).unwrap();
    let lock = |name: &str| runtime().block_on(locks.mutex(name).unwrap().lock().into_future()).unwrap();
    let shared = Arc::new(lock("shared"));
    let over = Arc::new(AtomicBool::new(false));
    let (mutex, free) = (locks.mutex("shared").unwrap(), locks.mutex("free").unwrap());
    let (looked, ended) = (shared.clone(), over.clone());
    let busy = std::thread::spawn(move || {
        let runtime = runtime();
        while !ended.load(Ordering::Relaxed) {
            let waited = runtime.block_on(mutex.lock().timeout(Duration::from_micros(100)).into_future());
            assert_eq!(waited.unwrap_err().kind(), ErrorKind::TimedOut);
            for _ in 0..100 {
                drop(runtime.block_on(free.try_lock()).unwrap());
                looked.deadline();
            }
        }
    });
    for round in 0..100 {
        let guard = lock(&format!("job/{round}"));
        let mut waiting = Box::pin(async { shared.lost().await });
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let child = fork();
        if child == 0 {
            let (env, shared) = (env.clone(), shared.clone());
            end(|| runtime().block_on(child_of_busy(env, guard, shared, waiting)));
        }
        join(child);
        assert!(guard.is_held() && shared.is_held());
    }
    over.store(true, Ordering::Relaxed);
    busy.join().unwrap();
}

async fn child_of_busy(env: Env, guard: Guard, shared: Arc<Guard>, waiting: impl Future<Output = Loss>) {
    assert!(!guard.is_held() && !shared.is_held(), "{guard:?}");
    assert_eq!(shared.remaining(), Some(Duration::ZERO));
    assert_eq!(waiting.await.kind, LossKind::Unverifiable);
    let error = guard.detach().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
    env.sleep_until(env.clock().now() + Duration::from_millis(1)).await;
    let error = Locks::connect("memory://", env).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
    assert!(error.to_string().contains("forked"), "{error}");
    let locks = clinch::connect("memory://").await.unwrap();
    let _guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let waited = locks.mutex("job").unwrap().lock().timeout(Duration::from_millis(1)).await;
    assert_eq!(waited.unwrap_err().kind(), ErrorKind::TimedOut, "a client of its own works");
}

/// Forks with a client and a waiter on a runtime of its own, and the child drops its copy of that: it costs its parent none of so
/// many connections, of which `accepted` counts all that ever were.
fn child_drops_the_runtime(url: &str, connections: usize, accepted: impl Fn() -> usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (locks, guard, waiter) = runtime.block_on(async {
        let locks = Locks::connect(url, Env::host(Lane::here().unwrap())).await.unwrap();
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        let mutex = locks.mutex("job").unwrap();
        let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
        let waits = async || locks.state("job").await.unwrap().is_some_and(|state| state.claims.len() == 2);
        while !waits().await || accepted() < connections {
            // The timers are under way.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        (locks, guard, waiter)
    });
    let child = fork();
    if child == 0 {
        end(|| drop((runtime, waiter, guard, locks)));
    }
    join(child);
    let goes_on = async {
        guard.verify().await.unwrap();
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        assert_eq!(waiter.await.unwrap().release().await.unwrap(), Released::Released);
    };
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), goes_on).await.unwrap() });
    assert_eq!(accepted(), connections, "the child ended its parent's connections");
}

#[test]
fn parent_in_its_runtime() {
    if std::env::var_os(FORK).is_some() {
        child_drops_the_runtime("memory://", 0, || 0);
    }
}

#[cfg(feature = "redis")]
#[test]
fn parent_on_redis() {
    if std::env::var_os(FORK).is_some() {
        let server = clinch_testkit::Redis::start();
        let proxy = clinch_testkit::Proxy::start(server.addr());
        child_drops_the_runtime(&format!("redis://{}", proxy.addr()), 2, || proxy.accepted());
    }
}

#[cfg(feature = "etcd")]
#[test]
fn parent_on_etcd() {
    if std::env::var_os(FORK).is_some() {
        let server = clinch_testkit::Etcd::start();
        let proxy = clinch_testkit::Proxy::start(server.addr());
        child_drops_the_runtime(&format!("etcd://{}", proxy.addr()), 1, || proxy.accepted());
    }
}

/// Whether it is pending after a poll.
fn pends<T>(future: &mut Pin<Box<impl Future<Output = T> + ?Sized>>) -> bool {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

/// Waits for locks while it forks: of which one is free by then, and one held.
#[test]
fn waiting_parent() {
    if std::env::var_os(FORK).is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file://{}", dir.path().display());
    let connect = || runtime().block_on(clinch::connect(&url)).unwrap();
    let (locks, other) = (connect(), connect());
    let of = |locks: &Locks| ["free", "held"].map(|name| locks.mutex(name).unwrap());
    let [free, held] = of(&other).map(|mutex| runtime().block_on(mutex.lock().into_future()).unwrap());
    let ours = of(&locks);
    let mut waiting = ours.each_ref().map(|mutex| mutex.lock().into_future());
    assert!(waiting.iter_mut().all(pends));
    drop(free);
    for waiting in &mut waiting {
        let child = fork();
        if child == 0 {
            end(|| closed(runtime().block_on(waiting).unwrap_err()));
        }
        join(child);
    }
    drop(held);
    for waiting in waiting {
        let guard = runtime().block_on(waiting).unwrap();
        assert!(guard.is_held());
        assert_eq!(runtime().block_on(guard.release()).unwrap(), Released::Released);
    }
    for mutex in of(&other) {
        assert!(runtime().block_on(mutex.try_lock()).unwrap().is_some(), "a ghost");
    }
}

type Asked<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// Forks while each question is under way.
#[test]
fn asking_parent() {
    if std::env::var_os(FORK).is_none() {
        return;
    }
    let env = Env::host(Lane::thread());
    let faulty = Faulty::new(Arc::new(Memory::new(env.clone())), env.clock());
    let locks = Locks::new(faulty.clone(), env);
    let lock = |name: &str| runtime().block_on(locks.mutex(name).unwrap().lock().into_future()).unwrap();
    let held = [lock("verified"), lock("extended")];
    let (released, detached) = (lock("released"), lock("detached"));
    let written = runtime().block_on(locks.rwlock("written").unwrap().write().into_future()).unwrap();
    let (id, time) = (held[0].claim_id(), Duration::from_secs(20));
    let (mutex, tried) = (locks.mutex("verified").unwrap(), locks.mutex("tried").unwrap());
    let mut asked: Vec<Asked<'_>> = vec![Box::pin(async { mutex.lock().await.map(drop) })];
    assert!(pends(&mut asked[0]));
    for step in
        [Step::Claim, Step::Downgrade, Step::Evict, Step::List, Step::Release, Step::Renew, Step::Verify]
    {
        faulty.hang(step);
    }
    asked.push(Box::pin(async { tried.try_lock().await.map(drop) }));
    asked.push(Box::pin(async { tried.lock().run(async |_| ()).await }));
    asked.push(Box::pin(async { held[0].verify().await }));
    asked.push(Box::pin(async { held[1].extend(time).await }));
    asked.push(Box::pin(async { released.release().await.map(drop) }));
    asked.push(Box::pin(async { detached.detach().await.map(drop) }));
    asked.push(Box::pin(async { written.downgrade().await.map(drop) }));
    asked.push(Box::pin(async { locks.list("").await.map(drop) }));
    asked.push(Box::pin(async { locks.state("verified").await.map(drop) }));
    asked.push(Box::pin(async { locks.evict("verified", id).await.map(drop) }));
    asked.push(Box::pin(async { locks.renew_detached("verified", id, time).await }));
    asked.push(Box::pin(async { locks.release_detached("verified", id).await.map(drop) }));
    asked.push(Box::pin(async { locks.close(time).await }));
    for (index, asked) in asked.iter_mut().enumerate().skip(1) {
        assert!(pends(asked), "{index}");
    }
    let child = fork();
    if child == 0 {
        end(|| asked.into_iter().for_each(|asked| closed(runtime().block_on(asked).unwrap_err())));
    }
    join(child);
    assert!(asked.iter_mut().all(pends));
}

/// Forks again and again while another thread is at work in a store of this process.
#[test]
fn parent_with_a_named_store() {
    if std::env::var_os(FORK).is_none() {
        return;
    }
    let connect = || runtime().block_on(clinch::connect("memory://named")).unwrap();
    let locks = connect();
    let _held = runtime().block_on(locks.mutex("held").unwrap().lock().into_future()).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let (free, ended) = (locks.mutex("free").unwrap(), over.clone());
    let busy = std::thread::spawn(move || {
        while !ended.load(Ordering::Relaxed) {
            drop(runtime().block_on(free.try_lock()).unwrap());
        }
    });
    for _ in 0..20 {
        let child = fork();
        if child == 0 {
            end(|| {
                let own = runtime().block_on(connect().mutex("held").unwrap().try_lock()).unwrap();
                assert!(own.is_some(), "the store is its parent's");
                let again = runtime().block_on(connect().mutex("held").unwrap().try_lock()).unwrap();
                assert!(again.is_none(), "it is not one store");
            });
        }
        join(child);
    }
    over.store(true, Ordering::Relaxed);
    busy.join().unwrap();
    assert!(runtime().block_on(connect().mutex("held").unwrap().try_lock()).unwrap().is_none());
}

fn run(test: &str) {
    run_in(std::process::Command::new(std::env::current_exe().unwrap()), test);
}

fn run_in(mut command: std::process::Command, test: &str) {
    let output = command.args(["--exact", test, "--nocapture"]).env(FORK, "1").output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_forked_child_is_refused_and_frees_nothing() {
    run("parent");
}

/// Or says so and does not.
#[test]
fn a_forked_child_is_refused_where_the_kernel_empties_no_page_for_it() {
    for answer in ["error=EINVAL", "retval=0"] {
        let mut strace = std::process::Command::new("strace");
        strace.args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("inject=madvise:{answer}")]);
        strace.arg(std::env::current_exe().unwrap());
        run_in(strace, "parent");
    }
}

#[test]
fn a_wait_under_way_at_a_fork_is_its_parents() {
    run("waiting_parent");
}

#[test]
fn what_is_under_way_at_a_fork_is_its_parents() {
    run("asking_parent");
}

#[test]
fn a_forked_child_has_named_stores_of_its_own() {
    run("parent_with_a_named_store");
}

#[test]
fn a_child_that_was_forked_at_any_moment_hangs_nowhere() {
    run("busy_parent");
}

#[test]
fn a_child_may_drop_the_runtime_that_its_parent_runs_on() {
    run("parent_in_its_runtime");
}

#[cfg(feature = "redis")]
#[test]
fn a_child_that_drops_the_runtime_ends_no_connection_to_redis() {
    run("parent_on_redis");
}

#[cfg(feature = "etcd")]
#[test]
fn a_child_that_drops_the_runtime_ends_no_connection_to_etcd() {
    run("parent_on_etcd");
}
