//! The lock file, or its directory, is moved or removed: who holds is told, who waits meets the others again.

use super::*;

#[tokio::test]
async fn a_holder_whose_file_was_removed_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let guard = lock(&locks, "job").await;
    guard.verify().await.unwrap();
    std::fs::remove_file(the_lock_file(dir.path())).unwrap();
    assert_eq!(guard.verify().await.unwrap_err().kind(), ErrorKind::Lost);
    let loss = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
    assert_eq!(loss.kind, LossKind::Deleted);
}

/// Newcomers go by the path, and so take the lock a second time.
#[tokio::test]
async fn a_holder_whose_file_or_directory_was_moved_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("locks");
    let (file, moved) = (the_lock_file(&path), dir.path().join("moved"));
    for (from, to) in [(&file, &dir.path().join("moved.lock")), (&path, &moved)] {
        let locks = connect(&path).await;
        let guard = lock(&locks, "job").await;
        std::fs::rename(from, to).unwrap();
        drop(lock(&connect(&path).await, "job").await);
        let loss = tokio::time::timeout(PATIENCE, guard.lost()).await.expect("the first holder is told");
        assert_eq!(loss.kind, LossKind::Deleted);
        assert!(loss.to_string().contains("moved"), "{loss}");
    }
}

/// It took the lock as root and then gave up its privileges, say: that it cannot see whether its path leads to its file
/// must not hide from it what its record says.
#[tokio::test]
async fn a_holder_that_may_not_look_at_its_path_is_told_of_an_eviction() {
    let dir = tempfile::tempdir().unwrap();
    let (way, moved) = (dir.path().join("way"), dir.path().join("moved"));
    let locks = connect(&way.join("locks")).await;
    let unrenewed = locks.clone().ttl(Duration::from_secs(600)).unwrap().renew(Renew::Never);
    let (guard, looked_at) = (lock(&locks, "job").await, lock(&unrenewed, "other").await);
    // A loop of links, which nobody can follow, root included.
    std::fs::rename(&way, &moved).unwrap();
    std::os::unix::fs::symlink(&way, &way).unwrap();
    let error = guard.verify().await.unwrap_err();
    assert!(
        error.kind() == ErrorKind::Unavailable && error.to_string().contains("way/locks/job.lock"),
        "{error}"
    );
    assert!(guard.is_held(), "that nothing is known is no loss");
    let other = connect(&moved.join("locks")).await;
    let told = async { tokio::join!(guard.lost(), looked_at.lost()) };
    let evict = |name, guard: &Guard| other.evict(name, guard.claim_id());
    let evicted = async { tokio::join!(evict("job", &guard), evict("other", &looked_at)) };
    let ((one, two), evicted) =
        tokio::time::timeout(PATIENCE, async { tokio::join!(told, evicted) }).await.expect("told");
    assert_eq!((evicted.0.unwrap(), evicted.1.unwrap()), (Freed::Removed, Freed::Removed));
    assert!(one.to_string().contains("operator") && two.to_string().contains("operator"), "{one}, {two}");
}

/// Its claims would not meet those of other processes.
#[tokio::test]
async fn a_holder_that_nobody_renews_is_told_too() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await.ttl(Duration::from_secs(600)).unwrap().renew(Renew::Never);
    let (moved, evicted) = (lock(&locks, "job").await, lock(&locks, "other").await);
    std::fs::rename(the_lock_file(dir.path()), dir.path().join("moved.lock")).unwrap();
    let other = connect(dir.path()).await;
    let told = async { tokio::join!(moved.lost(), evicted.lost()) };
    let evict = other.evict("other", evicted.claim_id());
    let ((moved, evicted), _) =
        tokio::time::timeout(PATIENCE, async { tokio::join!(told, evict) }).await.expect("told");
    assert!(moved.to_string().contains("moved"), "{moved}");
    assert!(evicted.to_string().contains("operator"), "{evicted}");
}

#[tokio::test]
async fn a_client_whose_directory_was_moved_takes_no_more_locks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("locks");
    let locks = connect(&path).await;
    let held = lock(&locks, "job").await;
    let waiter = tokio::spawn({
        let mutex = locks.mutex("job").unwrap();
        async move { mutex.lock().await }
    });
    claims(&locks, "job", 2).await;
    std::fs::rename(&path, dir.path().join("moved")).unwrap();
    let others = lock(&connect(&path).await, "job").await;
    drop(held);
    let ended = tokio::time::timeout(PATIENCE, waiter).await.expect("it waits for ever").unwrap();
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::Closed);
    let error = locks.mutex("other").unwrap().try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().contains("was moved"), "{error}");
    assert!(locks.list("").await.unwrap_err().to_string().contains("was moved"));
    assert!(others.is_held());
}

#[tokio::test]
async fn waiters_of_a_removed_file_meet_in_the_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let holder = lock(&locks, "job").await;
    let waiter = tokio::spawn({
        let locks = locks.clone();
        async move { lock(&locks, "job").await }
    });
    while locks.state("job").await.unwrap().is_none_or(|state| state.claims.len() < 2) {
        tokio::task::yield_now().await;
    }
    std::fs::remove_file(the_lock_file(dir.path())).unwrap();
    let newcomer = lock(&locks, "job").await;
    drop(holder);
    // The waiter's old file is free now, but it must not take that for the lock.
    let mutex = locks.mutex("job").unwrap();
    while locks.state("job").await.unwrap().is_none_or(|state| state.claims.len() < 2) {
        assert!(!waiter.is_finished(), "the waiter holds a file that nobody can reach");
        tokio::task::yield_now().await;
    }
    assert!(mutex.try_lock().await.unwrap().is_none());
    drop(newcomer);
    drop(tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap());
}
