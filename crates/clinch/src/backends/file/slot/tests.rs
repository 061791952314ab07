//! What is done with a claim of this process while others have the file, or the disk fails.

use std::path::Path;
use std::sync::Arc;

use super::super::dir::{Dir, Options};
use super::super::layout::META;
use super::super::ofd;
use super::*;
use crate::backend::Progress;
use crate::claim::{ClaimId, Owner};
use crate::env::Env;
use crate::lane::Lane;
use crate::locks::Locks;

fn store(dir: &Path) -> Arc<File> {
    File::new(Dir::open(dir, Options::default()).unwrap(), Env::host(Lane::thread())).unwrap()
}

fn locks(store: &Arc<File>) -> Locks {
    Locks::new(store.clone(), store.env.clone())
}

/// A disk that fails: the description of the lock file cannot be read any more.
#[tokio::test]
async fn a_release_frees_what_it_cannot_read() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (store(dir.path()), store(dir.path()));
    let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
    {
        let slot = ours.slots.lock().unwrap().get(&guard.claim_id()).unwrap().clone();
        let mut slot = lock(&slot);
        slot.file.unlock_all().unwrap();
        let deaf = std::fs::File::options().write(true).open(dir.path().join("job.lock")).unwrap();
        let byte = ofd::Range { first: slot.ticket, last: slot.ticket };
        assert!(ofd::try_lock(&deaf, byte).unwrap());
        slot.file = LockFile::new(deaf.into());
        slot.granted_at = Instant::from_nanos(0);
    }
    assert!(locks(&other).mutex("job").unwrap().try_lock().await.unwrap().is_none());
    let released = guard.release().await.unwrap();
    assert!(matches!(released, crate::Released::AlreadyLost(_)), "nobody knows whether it was held");
    assert!(locks(&other).mutex("job").unwrap().try_lock().await.unwrap().is_some(), "a ghost");
}

/// Until its slot is made, a process may be stopped for so long that its claim is evicted and over.
#[test]
fn a_grant_is_dated_from_before_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let asked = Instant::from_nanos(1);
    // The second is not alone.
    for number in [1, 2] {
        let claim = Claim {
            id: ClaimId::from_bits(number),
            name: LockName::new("job").unwrap(),
            mode: Mode::Shared,
            ttl: Duration::from_secs(1),
            enqueue: true,
            place: false,
            isolated: false,
            owner: Arc::new(Owner { host: String::new(), pid: 1, user: String::new(), label: String::new() }),
        };
        assert!(matches!(store.enter(&claim, asked).unwrap(), Progress::Granted(_)));
        let slot = lock(&store.slots).get(&claim.id).unwrap().clone();
        assert_eq!(lock(&slot).granted_at, asked);
    }
}

/// An operator is told that somebody is stopped, or a holder is not renewed.
#[tokio::test]
async fn outsiders_wait_for_another_claims_fsync() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (store(dir.path()), store(dir.path()));
    let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
    let (id, file) = (guard.claim_id(), other.open("job.lock", false).unwrap().unwrap());
    let fsync = async || {
        assert!(ofd::try_lock(&file, ofd::Range { first: META, last: META }).unwrap());
        tokio::time::sleep(Duration::from_millis(50)).await;
        file.unlock_all().unwrap();
    };
    let outside = locks(&other);
    let ((), renewed) = tokio::join!(fsync(), outside.renew_detached("job", id, Duration::from_secs(60)));
    renewed.unwrap();
    // Its guard is dropped then: it was given an end, so who evicts it does not hear that it was told.
    let let_go = async move {
        guard.lost().await;
    };
    let ((), evicted, ()) = tokio::join!(fsync(), outside.evict("job", id), let_go);
    assert_eq!(evicted.unwrap(), Freed::Removed);
}

/// One that takes a ticket has the header for as long as its fsync takes.
#[tokio::test]
async fn a_try_is_not_refused_by_another_claims_fsync() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let semaphore = locks(&store).semaphore("job", 2).unwrap();
    let held = semaphore.acquire(1).unwrap().await.unwrap();
    let file = store.open("job.lock", false).unwrap().unwrap();
    let meta = ofd::Range { first: META, last: META };
    assert!(ofd::try_lock(&file, meta).unwrap());
    let fsync = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        file.unlock_all().unwrap();
    };
    let (permit, ()) = tokio::join!(semaphore.try_acquire(1), fsync);
    drop((permit.unwrap().expect("a permit is free"), held));
}
