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

use clinch::backend::{Backend, Freed};
use clinch::{Env, ErrorKind, Guard, Locks, LossKind, Renew};

#[path = "file/damaged.rs"]
mod damaged;
#[path = "file/limits.rs"]
mod limits;
#[path = "file/moved.rs"]
mod moved;
#[path = "file/tokens.rs"]
mod tokens;
#[path = "file/turns.rs"]
mod turns;

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
