//! Tokens rise over whatever happens to the file and to the disk.

use super::*;

#[tokio::test]
async fn tokens_rise_over_a_reboot_that_lost_unsynced_tickets() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let before = lock(&locks, "job").await.token().get();
    let file = the_lock_file(dir.path());
    let reserved = header_field(&file, "reserved");
    assert!(reserved >= before, "every ticket given lies below the durable mark");
    // The power went: what was not synced is gone, and this is another boot.
    rewrite_header(&file, "last", &format!("{:016}", before - 1));
    rewrite_header(&file, "boot", &"0".repeat(32));
    let after = lock(&locks, "job").await.token().get();
    assert!(after > reserved, "{after} may have been given before the reboot; the mark was {reserved}");
}

#[tokio::test]
async fn tokens_rise_over_the_durable_mark() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let file = the_lock_file(dir.path());
    let mut last = 0;
    for _ in 0..2100 {
        let guard = lock(&locks, "job").await;
        assert!(guard.token().get() > last);
        last = guard.token().get();
        assert!(header_field(&file, "reserved") >= last, "a ticket above the durable mark was given");
    }
}

#[tokio::test]
async fn tokens_rise_over_the_removal_of_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("locks");
    let before = lock(&connect(&path).await, "job").await.token();
    std::fs::remove_dir_all(&path).unwrap();
    assert!(lock(&connect(&path).await, "job").await.token() > before);
}

/// Set for [`failing_disk`] to the directory in which it shall try.
const FAILING_DISK: &str = "CLINCH_TEST_FAILING_DISK";

/// Asks for a lock that it cannot get; nothing by itself.
#[test]
fn failing_disk() {
    let Some(dir) = std::env::var_os(FAILING_DISK) else { return };
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        let error = connect(Path::new(&dir)).await.mutex("job").unwrap().try_lock().await.unwrap_err();
        assert!(error.kind() == ErrorKind::Unavailable, "{error:?}");
    });
}

/// After a power cut, tokens that were given below it would be given again.
#[tokio::test]
async fn a_mark_that_did_not_reach_the_disk_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let before = lock(&locks, "job").await.token().get();
    let file = the_lock_file(dir.path());
    rewrite_header(&file, "reserved", &format!("{before:016}"));
    let test = std::env::current_exe().unwrap();
    let strace = Command::new("strace")
        .args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync", "-e", "inject=fsync:error=EIO"])
        .arg(test)
        .args(["--exact", "tokens::failing_disk"])
        .env(FAILING_DISK, dir.path())
        .output()
        .expect("this test needs strace");
    assert!(strace.status.success(), "{}", String::from_utf8_lossy(&strace.stdout));
    let mark = header_field(&file, "reserved");
    assert!(mark > before);
    let after = lock(&locks, "job").await.token().get();
    assert!(after > mark, "{after} lies below the mark {mark}, which is not durable");
    assert!(header_field(&file, "reserved") >= after);
}

/// Set for [`dying_reader`] to the directory in which it shall try.
const DYING_READER: &str = "CLINCH_TEST_DYING_READER";

/// Asks for a read lock, and gets it or not; nothing by itself.
#[test]
fn dying_reader() {
    let Some(dir) = std::env::var_os(DYING_READER) else { return };
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        let tried = connect(Path::new(&dir)).await.rwlock("job").unwrap().try_read().await;
        assert_eq!(tried.unwrap_err().kind(), ErrorKind::Exhausted);
    });
}

/// The record that somebody left who did not get so far as to take its ticket would be believed of the next that takes it, who could not be
/// evicted.
#[tokio::test]
async fn what_a_claim_that_failed_has_left_is_not_taken_for_the_next_ones() {
    for writes in 0..2 {
        let dir = tempfile::tempdir().unwrap();
        let locks = connect(dir.path()).await;
        let readers = locks.rwlock("job").unwrap();
        let reader = readers.read().timeout(PATIENCE).await.unwrap();
        let full = format!("inject=pwrite64:error=ENOSPC:when={}+", writes + 1);
        let strace = Command::new("strace")
            .args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=pwrite64", "-e", &full])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "tokens::dying_reader"])
            .env(DYING_READER, dir.path())
            .output()
            .expect("this test needs strace");
        assert!(strace.status.success(), "{}", String::from_utf8_lossy(&strace.stdout));
        reader.release().await.unwrap();
        let writer = readers.write().timeout(PATIENCE).await.unwrap();
        let beside = connect(dir.path()).await.rwlock("job").unwrap().try_read().await.unwrap();
        assert!(beside.is_none(), "a reader beside the writer, after {writes} writes");
        let (outside, id) = (connect(dir.path()).await, writer.claim_id());
        let evicted = tokio::spawn(async move { outside.evict("job", id).await });
        while !evicted.is_finished() && writer.verify().await.is_ok() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        drop(writer);
        assert_eq!(evicted.await.unwrap().unwrap(), Freed::Removed, "after {writes} writes");
    }
}
