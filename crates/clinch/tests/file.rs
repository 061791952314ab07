//! `file://`: the conformance suite, and the hazards that only files have.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use clinch::backend::Backend;
use clinch::{Env, ErrorKind, Guard, Locks, LossKind, Renew};

/// How long a state may take to come about before the test counts as failed.
const PATIENCE: Duration = Duration::from_secs(30);

async fn connect(dir: &Path) -> Locks {
    clinch::connect(&format!("file://{}", dir.display())).await.unwrap()
}

async fn lock(locks: &Locks, name: &str) -> Guard {
    locks.mutex(name).unwrap().lock().timeout(PATIENCE).await.unwrap()
}

/// Waits until a lock has so many claims.
async fn claims(locks: &Locks, name: &str, count: usize) {
    let end = tokio::time::Instant::now() + PATIENCE;
    while locks.state(name).await.unwrap().map_or(0, |state| state.claims.len()) != count {
        assert!(tokio::time::Instant::now() < end, "{name} has {count} claims");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn the_lock_file(dir: &Path) -> PathBuf {
    dir.join("job.lock")
}

/// Changes a field of the header as if somebody else had written it.
fn rewrite_header(file: &Path, key: &str, value: &str) {
    use std::os::unix::fs::FileExt;
    let text = std::fs::read(file).unwrap();
    let at = String::from_utf8_lossy(&text[..192]).find(&format!(" {key}=")).unwrap() + key.len() + 2;
    std::fs::File::options()
        .write(true)
        .open(file)
        .unwrap()
        .write_all_at(value.as_bytes(), at as u64)
        .unwrap();
}

fn header_field(file: &Path, key: &str) -> u64 {
    let text = std::fs::read(file).unwrap();
    let header = String::from_utf8_lossy(&text[..192]).into_owned();
    let value = header.split(&format!(" {key}=")).nth(1).unwrap().split(' ').next().unwrap();
    value.parse().unwrap()
}

/// A Python process that does something to a file and stays until it is dropped.
struct Python(Child);

impl Python {
    /// Runs `script`, which prints a line when it is where it shall stay.
    fn start(script: &str, file: &Path) -> Python {
        use std::io::BufRead;
        let mut child = Command::new("python3")
            .args(["-c", script])
            .arg(file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("these tests need python3");
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "ready");
        Python(child)
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

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

/// The holder of `clinch acquire` lets go when the time in its record has passed, without asking anybody again.
#[tokio::test]
async fn a_lease_whose_time_has_passed_is_renewed_by_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, outside) = (connect(dir.path()).await, connect(dir.path()).await);
    let guard = lock(&locks, "job").await;
    let id = guard.claim_id();
    for _ in 0..2 {
        outside.renew_detached("job", id, Duration::from_millis(200)).await.unwrap();
    }
    let end = tokio::time::Instant::now() + PATIENCE;
    while outside.state("job").await.unwrap().unwrap().claims[0].expires_in != Some(Duration::ZERO) {
        assert!(tokio::time::Instant::now() < end);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let error = outside.renew_detached("job", id, PATIENCE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
}

#[tokio::test]
async fn a_client_whose_directory_was_moved_takes_no_more_locks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("locks");
    let locks = connect(&path).await;
    let held = lock(&locks, "job").await;
    let waiter = tokio::spawn({
        let mutex = locks.mutex("job").unwrap();
        async move { mutex.lock().timeout(Duration::from_secs(2)).await }
    });
    claims(&locks, "job", 2).await;
    std::fs::rename(&path, dir.path().join("moved")).unwrap();
    let others = lock(&connect(&path).await, "job").await;
    drop(held);
    assert_eq!(waiter.await.unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    let error = locks.mutex("other").unwrap().try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("was moved"), "{error}");
    assert!(locks.list("").await.unwrap_err().to_string().contains("was moved"));
    assert!(others.is_held());
}

/// Whatever an evicted holder still does, it does alone, be it one of several.
#[tokio::test]
async fn an_evicted_holder_has_the_lock_until_it_lets_go() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let guards = [
        lock(&locks, "mutex").await,
        locks.rwlock("rwlock").unwrap().read().await.unwrap(),
        locks.semaphore("semaphore", 2).unwrap().acquire(2).unwrap().await.unwrap(),
    ];
    for guard in &guards {
        let (other, name, claim) = (other.clone(), guard.name().to_string(), guard.claim_id());
        tokio::spawn(async move { other.evict(&name, claim).await });
    }
    for guard in &guards {
        tokio::time::timeout(PATIENCE, guard.lost()).await.expect("it is told");
    }
    const BESIDE: &str = "another got in beside an evicted holder";
    for _ in 0..100 {
        assert!(other.mutex("mutex").unwrap().try_lock().await.unwrap().is_none(), "{BESIDE}");
        assert!(other.rwlock("rwlock").unwrap().try_write().await.unwrap().is_none(), "{BESIDE}");
        assert!(other.semaphore("semaphore", 2).unwrap().try_acquire(1).await.unwrap().is_none(), "{BESIDE}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(guards);
    assert!(other.mutex("mutex").unwrap().try_lock().await.unwrap().is_some());
    assert!(other.rwlock("rwlock").unwrap().try_write().await.unwrap().is_some());
    assert!(other.semaphore("semaphore", 2).unwrap().try_acquire(1).await.unwrap().is_some());
}

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

/// Polls a future once.
async fn once<T>(future: &mut std::pin::Pin<Box<impl Future<Output = T> + ?Sized>>) -> Option<T> {
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(match future.as_mut().poll(context) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        })
    })
    .await
}

/// A future that is kept and not polled holds its turn for ever, and all behind it wait.
#[tokio::test]
async fn a_turn_that_nobody_takes_goes_on_to_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let held = lock(&other, "job").await;
    let mut silent = Box::pin(lock(&locks, "job"));
    assert!(once(&mut silent).await.is_none());
    let next = tokio::spawn({
        let other = other.clone();
        async move { lock(&other, "job").await }
    });
    claims(&other, "job", 3).await;
    drop(held);
    let next = tokio::time::timeout(PATIENCE, next).await.expect("the turn goes on").unwrap();
    assert!(once(&mut silent).await.is_none(), "a turn that went on was taken");
    claims(&other, "job", 2).await;
    let token = next.token();
    drop(next);
    assert!(tokio::time::timeout(PATIENCE, silent).await.expect("it has a place again").token() > token);
}

/// The record of a claim is changed by one at a time: else a grant could undo an eviction.
#[tokio::test]
async fn a_record_that_is_being_changed_is_changed_by_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let (locks, other) = (connect(dir.path()).await, connect(dir.path()).await);
    let holder = lock(&locks, "job").await;
    let waiter = tokio::spawn({
        let locks = locks.clone();
        async move { lock(&locks, "job").await }
    });
    claims(&other, "job", 2).await;
    let place = other.state("job").await.unwrap().unwrap().claims[1].clone();
    let byte = (1 << 54) + 1 + place.token.unwrap().get() % 1024;
    let script = format!(
        "import fcntl,os,struct,sys
fd=os.open(sys.argv[1],os.O_RDWR)
fcntl.fcntl(fd,37,struct.pack('hhqqi4x',fcntl.F_WRLCK,0,{byte},1,0))
print('ready',flush=True)
sys.stdin.read()"
    );
    let changing = Python::start(&script, &the_lock_file(dir.path()));
    let error = other.evict("job", place.id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    drop(holder);
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(!waiter.is_finished(), "a waiter wrote its record while another did");
    }
    drop(changing);
    drop(tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap());
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
        .args(["--exact", "failing_disk"])
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

#[tokio::test]
async fn a_descriptor_keeps_the_lock_until_its_last_copy_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let guard = lock(&locks, "job").await;
    let copy = guard.descriptor().unwrap();
    // As after kill -9 of the process that has the guard: nothing is unlocked, the descriptor lives on elsewhere.
    let other = connect(dir.path()).await;
    std::mem::forget(guard);
    assert!(other.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    drop(copy);

    let guard = lock(&locks, "other").await;
    let copy = guard.descriptor().unwrap();
    let waiter = tokio::spawn({
        let other = other.clone();
        async move { lock(&other, "other").await }
    });
    while other.state("other").await.unwrap().is_none_or(|state| state.claims.len() < 2) {
        tokio::task::yield_now().await;
    }
    guard.release().await.unwrap();
    drop(tokio::time::timeout(PATIENCE, waiter).await.expect("a release frees it for all copies").unwrap());
    drop(copy);
}

#[tokio::test]
async fn a_process_stopped_while_it_takes_its_ticket_delays_but_breaks_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    drop(lock(&locks, "job").await);
    // Holds the byte that guards the header, as a claimant does for some microseconds, for as long as it lives.
    let meta = "import fcntl,os,struct,sys
fd=os.open(sys.argv[1],os.O_RDWR)
fcntl.fcntl(fd,37,struct.pack('hhqqi4x',fcntl.F_WRLCK,0,1<<54,1,0))
print('ready',flush=True)
sys.stdin.read()";
    let stopped = Python::start(meta, &the_lock_file(dir.path()));
    let mutex = locks.mutex("job").unwrap();
    assert!(mutex.try_lock().await.unwrap().is_none(), "whoever takes a ticket is about to hold it");
    let timeout = mutex.lock().timeout(Duration::from_millis(50)).await.unwrap_err();
    assert_eq!(timeout.kind(), ErrorKind::TimedOut);
    let waiter = tokio::spawn(async move { mutex.lock().timeout(PATIENCE).await });
    drop(stopped);
    drop(waiter.await.unwrap().unwrap());
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
async fn a_full_queue_refuses_and_loses_nothing() {
    const RECORDS: usize = 1024;
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let readers = locks.rwlock("job").unwrap();
    let mut guards = Vec::new();
    for _ in 0..RECORDS {
        guards.push(readers.read().timeout(PATIENCE).await.unwrap());
    }
    let error = readers.read().timeout(PATIENCE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    assert_eq!(locks.state("job").await.unwrap().unwrap().claims.len(), RECORDS);
    drop(guards.swap_remove(500));
    drop(readers.read().timeout(PATIENCE).await.unwrap());
}

#[tokio::test]
async fn a_long_lived_permit_keeps_its_record_while_thousands_pass() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await.label("the patient one").unwrap();
    let patient = locks.semaphore("job", 2).unwrap().acquire(1).unwrap().await.unwrap();
    let hasty = connect(dir.path()).await.semaphore("job", 2).unwrap();
    for _ in 0..2500 {
        drop(hasty.try_acquire(1).await.unwrap().unwrap());
    }
    let state = locks.state("job").await.unwrap().unwrap();
    assert_eq!(state.claims.len(), 1);
    assert_eq!(
        (state.claims[0].id, state.claims[0].owner.label.as_str()),
        (patient.claim_id(), "the patient one")
    );
}

#[tokio::test]
async fn a_lock_that_lingers_closed_opens_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    lock(&locks, "job").await.release_closed(Duration::from_millis(300)).await.unwrap();
    assert!(locks.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    assert!(locks.state("job").await.unwrap().unwrap().closed_until.is_some());
    drop(lock(&locks, "job").await);
}

#[tokio::test]
async fn two_long_names_that_share_their_start_are_two_locks() {
    let dir = tempfile::tempdir().unwrap();
    let locks = connect(dir.path()).await;
    let (one, two) = (format!("{}1", "x".repeat(511)), format!("{}2", "x".repeat(511)));
    let guard = lock(&locks, &one).await;
    drop(lock(&locks, &two).await);
    let names: Vec<String> =
        locks.list("xx").await.unwrap().into_iter().map(|state| state.name.to_string()).collect();
    assert_eq!(names, [one]);
    drop(guard);
}

#[tokio::test]
async fn hosts_and_unknown_keys_in_the_url_are_refused() {
    for (url, kind) in [
        ("file://server/share", ErrorKind::Invalid),
        ("file:///d?networkfs=allow", ErrorKind::Invalid),
        ("file:///d?network-fs=yes", ErrorKind::Invalid),
        ("file:///proc/clinch", ErrorKind::Unavailable),
        ("file:///d?require=survives-failover", ErrorKind::Unsupported),
    ] {
        let url = url.replace("/d?", &format!("{}/d?", std::env::temp_dir().display()));
        assert_eq!(clinch::connect(&url).await.unwrap_err().kind(), kind, "{url}");
    }
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

/// Set for [`pairs`] to what it shall do.
const PAIRS: &str = "CLINCH_TEST_PAIRS";

/// Locks and releases as often as it is told; nothing by itself.
#[test]
fn pairs() {
    let Some(count) = std::env::var(PAIRS).ok().and_then(|count| count.parse().ok()) else { return };
    let dir = tempfile::tempdir().unwrap();
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        let mutex = connect(dir.path()).await.mutex("job").unwrap();
        for _ in 0..count {
            mutex.lock().await.unwrap().release().await.unwrap();
        }
    });
}

/// How often the file calls were made in a process that took this many pairs.
fn calls(pairs: u32) -> std::collections::BTreeMap<String, u32> {
    let counts = tempfile::NamedTempFile::new().unwrap();
    let traced =
        "trace=openat,fcntl,pread64,pwrite64,close,fstat,newfstatat,fsync,fdatasync,flock,read,write";
    let status = Command::new("strace")
        .args(["-f", "-c", "-e", traced, "-o"])
        .arg(counts.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "pairs"])
        .env(PAIRS, pairs.to_string())
        .stdout(Stdio::null())
        .status()
        .expect("this test needs strace");
    assert!(status.success());
    let text = std::fs::read_to_string(counts.path()).unwrap();
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let rows = rows.filter(|row| row.len() >= 5 && row[0].parse::<f32>().is_ok() && !row.contains(&"total"));
    rows.map(|row| (row.last().unwrap().to_string(), row[3].parse().unwrap())).collect()
}

#[test]
fn an_uncontended_pair_costs_seven_system_calls() {
    let (few, many) = (calls(100), calls(600));
    // Starting up takes a call more or less from one process to the next.
    let of = |call: &str| many.get(call).unwrap_or(&0).saturating_sub(*few.get(call).unwrap_or(&0));
    // The standard library's debug build asks of every descriptor that it closes whether it is open.
    let fcntl = if cfg!(debug_assertions) { 4 } else { 3 };
    let per_pair =
        ["openat", "fcntl", "pread64", "pwrite64", "close"].map(|call| (call, (of(call) + 250) / 500));
    assert_eq!(per_pair, [("openat", 1), ("fcntl", fcntl), ("pread64", 1), ("pwrite64", 1), ("close", 1)]);
    let total: u32 = many.keys().map(|call| of(call)).sum();
    assert!(total < (4 + fcntl) * 500 + 250, "{many:?}: no call but these, save one fsync in 1024 claims");
}

/// Set for [`descriptors`] when it is to use up its own.
const DESCRIPTORS: &str = "CLINCH_TEST_DESCRIPTORS";

/// Holds locks until no descriptor is left; nothing by itself, since the limit is the whole process's.
#[test]
fn descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if std::env::var_os(DESCRIPTORS).is_none() {
        return;
    }
    const SOFT: u64 = 40;
    const HARD: u64 = 90;
    setrlimit(Resource::Nofile, Rlimit { current: Some(SOFT), maximum: Some(HARD) }).unwrap();
    let dir = tempfile::tempdir().unwrap();
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        let locks = connect(dir.path()).await;
        let mut guards = Vec::new();
        let error = loop {
            match locks.mutex(&guards.len().to_string()).unwrap().lock().await {
                Ok(guard) => guards.push(guard),
                Err(error) => break error,
            }
        };
        assert_eq!(getrlimit(Resource::Nofile).current, Some(HARD), "the soft limit was raised");
        assert!(guards.len() as u64 > SOFT, "and used: {}", guards.len());
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert!(error.to_string().contains("90") && error.to_string().contains("ulimit"), "{error}");
        assert!(guards.iter().all(Guard::is_held));
        drop(guards.pop());
        drop(lock(&locks, "again").await);
    });
}

#[test]
fn running_out_of_descriptors_is_said_clearly_and_loses_nothing() {
    let mut test = Command::new(std::env::current_exe().unwrap());
    let output = test.args(["--exact", "descriptors"]).env(DESCRIPTORS, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// One client of a directory, in any world.
struct InFiles(tempfile::TempDir);

#[async_trait::async_trait]
impl clinch::conformance::Fixture for InFiles {
    async fn connect(&self, env: &Env) -> Arc<dyn Backend> {
        clinch::backends::file::open(self.0.path(), env.clone()).unwrap()
    }

    fn url(&self) -> Option<String> {
        Some(format!("file://{}", self.0.path().display()))
    }
}

clinch::conformance!(InFiles(tempfile::tempdir().unwrap()));
