//! What a forked child may do with what it has of its parent: nothing. Only `file://` is shown; the engine says it for all.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    unsafe_code,
    reason = "test code; fork(2) is unsafe"
)]
#![cfg(all(target_os = "linux", feature = "file"))]

use std::time::Duration;

use clinch::{ErrorKind, Guard, Locks};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().unwrap()
}

/// Set for [`parent`] when it is to fork.
const FORK: &str = "CLINCH_TEST_FORK";

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
    // SAFETY: the child is allowed to run on in glibc, whose allocator is made ready for it, and it ends with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let sound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            runtime().block_on(child_refused(&url, locks, guard));
        }));
        // SAFETY: ends the process and does nothing else.
        unsafe { libc::_exit(i32::from(sound.is_err())) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above and writes its status.
    assert_eq!(unsafe { libc::waitpid(child, std::ptr::from_mut(&mut status), 0) }, child);
    assert_eq!(status, 0, "the child failed");
    runtime().block_on(async {
        guard.verify().await.unwrap();
        let other = clinch::connect(&url).await.unwrap();
        assert!(other.mutex("job").unwrap().try_lock().await.unwrap().is_none(), "the child freed the lock");
        guard.release().await.unwrap();
        assert!(other.mutex("job").unwrap().try_lock().await.unwrap().is_some());
    });
}

async fn child_refused(url: &str, locks: Locks, guard: Guard) {
    let closed = |error: clinch::Error| {
        assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
        assert!(error.to_string().contains("forked"), "{error}");
    };
    closed(locks.mutex("other").unwrap().try_lock().await.unwrap_err());
    closed(locks.mutex("other").unwrap().lock().timeout(Duration::from_secs(1)).await.unwrap_err());
    closed(locks.list("").await.unwrap_err());
    closed(locks.close(Duration::from_secs(1)).await.unwrap_err());
    closed(locks.state("job").await.unwrap_err());
    closed(locks.evict("job", guard.claim_id()).await.unwrap_err());
    closed(locks.renew_detached("job", guard.claim_id(), Duration::from_secs(1)).await.unwrap_err());
    closed(locks.release_detached("job", guard.claim_id()).await.unwrap_err());
    closed(guard.verify().await.unwrap_err());
    closed(guard.extend(Duration::from_secs(1)).await.unwrap_err());
    closed(guard.release().await.unwrap_err());
    let own = clinch::connect(url).await.unwrap();
    assert!(
        own.mutex("job").unwrap().try_lock().await.unwrap().is_none(),
        "the child freed its parent's lock"
    );
    drop(own.mutex("other").unwrap().try_lock().await.unwrap().expect("a client of its own works"));
}

#[test]
fn a_forked_child_is_refused_and_frees_nothing() {
    let mut test = std::process::Command::new(std::env::current_exe().unwrap());
    let output = test.args(["--exact", "parent", "--nocapture"]).env(FORK, "1").output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
