//! What others planted or damaged in the directory hangs nobody, hides nothing and is no lock.

use super::*;

/// Opening a FIFO waits for its other end, for ever, and with it whoever waits for the one who opens it.
#[tokio::test]
async fn planted_fifos_and_sockets_hang_nobody() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    for mode in [0o700, 0o1777] {
        let path = dir.path().join(format!("{mode:o}"));
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let locks = connect(&path).await;
        let held = lock(&locks, "job").await;
        let fifo = |name: &str| {
            let fifo = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, path.join(name), fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        };
        fifo("fifo.lock");
        let _socket = std::os::unix::net::UnixListener::bind(path.join("socket.lock")).unwrap();
        let bells = match mode {
            0o700 => ".bell-".to_owned(),
            _ => format!(".bell-{}-", rustix::process::geteuid().as_raw()),
        };
        (0..256).for_each(|bell| fifo(&format!("{bells}{bell:02x}")));
        for planted in ["fifo", "socket"] {
            let error = locks.mutex(planted).unwrap().try_lock().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused, "{planted}: {error:?}");
        }
        assert_eq!(locks.list("").await.unwrap().len(), 1, "the planted ones do not hide the lock");
        let waiters = [0, 1].map(|_| {
            let locks = locks.clone();
            tokio::spawn(async move { lock(&locks, "job").await.release().await.unwrap() })
        });
        claims(&locks, "job", 3).await;
        drop(held);
        for waiter in waiters {
            tokio::time::timeout(PATIENCE, waiter).await.expect("it gets its turn without a bell").unwrap();
        }
        // What was refused to the claims is refused to their releases; nobody waits for those.
        let closed = tokio::time::timeout(PATIENCE, locks.close(Duration::from_secs(3600))).await;
        let _ = closed.expect("a client that was refused can be closed");
    }
}

#[tokio::test]
async fn a_waiter_whose_file_was_emptied_keeps_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let holder = lock(&locks, "job").await;
    let waiter = tokio::spawn({
        let locks = locks.clone();
        async move { locks.mutex("job").unwrap().lock().timeout(PATIENCE).await }
    });
    claims(&other, "job", 2).await;
    std::fs::File::options().write(true).open(the_lock_file(dir.path())).unwrap().set_len(0).unwrap();
    assert!(other.mutex("job").unwrap().try_lock().await.unwrap().is_none(), "it is held all the same");
    drop(holder);
    let guard = waiter.await.unwrap().expect("a waiter has nothing to lose");
    assert!(other.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    let token = guard.token();
    drop(guard);
    assert!(lock(&other, "job").await.token() > token);
}

/// A backup that is restored under it: its tickets are below those of who is there, and nobody looks above its own.
#[tokio::test]
async fn an_older_copy_of_a_file_lets_nobody_in_beside_its_holder() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let file = the_lock_file(dir.path());
    drop(lock(&locks, "job").await);
    let copy = std::fs::read(&file).unwrap();
    let first = lock(&locks, "job").await;
    let waiter = tokio::spawn({
        let locks = locks.clone();
        async move { lock(&locks, "job").await }
    });
    claims(&other, "job", 2).await;
    drop(first);
    let holder = waiter.await.unwrap();
    std::fs::write(&file, copy).unwrap();
    assert!(other.mutex("job").unwrap().try_lock().await.unwrap().is_none(), "two hold it");
    drop(holder);
    drop(lock(&other, "job").await);
}

#[tokio::test]
async fn a_waiter_whose_file_was_damaged_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let holder = lock(&locks, "job").await;
    let mutex = locks.mutex("job").unwrap();
    let waiter = tokio::spawn(async move { mutex.lock().timeout(PATIENCE).await });
    claims(&locks, "job", 2).await;
    std::fs::write(the_lock_file(dir.path()), "not a lock").unwrap();
    drop(holder);
    let error = waiter.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    assert!(error.to_string().contains("/job.lock: does not begin"), "{error}");
}

#[tokio::test]
async fn a_damaged_lock_file_is_an_error_and_not_a_lock() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    for damage in [&b"not a lock"[..], &[0xff; 4096], b"clinch 1 name=zz last=1"] {
        std::fs::write(the_lock_file(dir.path()), damage).unwrap();
        let error = locks.mutex("job").unwrap().try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        assert!(error.to_string().contains("/job.lock: does not begin"), "{error}");
        assert_eq!(std::fs::read(the_lock_file(dir.path())).unwrap(), damage, "nothing was overwritten");
    }
    // Numbers that no arithmetic may trip over.
    std::fs::remove_file(the_lock_file(dir.path())).unwrap();
    drop(lock(&locks, "job").await);
    rewrite_header(&the_lock_file(dir.path()), "last", "9999999999999999");
    let error = locks.mutex("job").unwrap().try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
}

#[tokio::test]
async fn a_planted_or_damaged_file_does_not_hide_the_other_locks() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let guard = lock(&locks, "job").await;
    std::os::unix::fs::symlink("/etc/passwd", dir.path().join("a.lock")).unwrap();
    std::fs::write(dir.path().join("b.lock"), "not a lock").unwrap();
    std::fs::create_dir(dir.path().join("c.lock")).unwrap();
    let states = locks.list("").await.unwrap();
    assert_eq!(states.iter().map(|state| state.name.as_str()).collect::<Vec<_>>(), ["job"]);
    drop(guard);
}

/// Told that nobody has it, its user moves the file away, and the lock is held twice.
#[tokio::test]
async fn a_lock_whose_file_was_damaged_is_not_shown_as_free() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let the_file = || {
        std::fs::read_dir(dir.path())
            .unwrap()
            .map(|file| file.unwrap().path())
            .find(|path| path.extension().is_some())
            .unwrap()
    };
    let long = "x".repeat(400);
    for name in ["job", &long] {
        for damage in [&b""[..], b"not a lock", &[0; 512]] {
            let held = lock(&locks, name).await;
            std::fs::write(the_file(), damage).unwrap();
            let state = other.state(name).await.unwrap().expect("somebody holds it");
            let claim = &state.claims[0];
            assert!(state.claims.len() == 1 && claim.granted && claim.owner.pid == 0, "{claim:?}");
            assert_eq!(claim.token, Some(held.token()));
            if name == "job" {
                assert_eq!(other.list("").await.unwrap().len(), 1);
            }
            if damage == b"not a lock" {
                let error = other.mutex(name).unwrap().try_lock().await.unwrap_err();
                assert!(error.to_string().contains("leave it where it is"), "{error}");
                drop(held);
                for error in [
                    other.mutex(name).unwrap().try_lock().await.unwrap_err(),
                    other.state(name).await.unwrap_err(),
                ] {
                    assert!(error.to_string().contains("move it away"), "{error}");
                }
            }
            std::fs::remove_file(the_file()).unwrap();
        }
    }
}
