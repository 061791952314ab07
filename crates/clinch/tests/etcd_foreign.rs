//! `etcd://` beside the locks that etcd's own tools bring: `etcdctl lock`, Go's `concurrency.Mutex`, and the server's lock
//! service. On one key, they exclude us and we exclude them, in one queue.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use clinch::backend::Freed;
use clinch::{Guard, Locks, Released};
use clinch_testkit::{Etcd, temp_dir, tools};
use tokio::task::JoinHandle;

#[path = "etcd_foreign/service.rs"]
mod service;

/// The lock, and the directory of keys that foreign clients lock.
const NAME: &str = "job";
const KEY: &str = "/clinch/job";

/// How long a state may take to come about before the test counts as failed.
const PATIENCE: Duration = Duration::from_secs(60);

async fn connect(etcd: &Etcd) -> Locks {
    clinch::connect(&etcd.url()).await.unwrap().ttl(Duration::from_secs(3600)).unwrap()
}

async fn lock(locks: &Locks) -> Guard {
    locks.mutex(NAME).unwrap().lock().await.unwrap()
}

async fn release(guard: Guard) {
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

fn queue(locks: &Locks) -> JoinHandle<Guard> {
    let locks = locks.clone();
    tokio::spawn(async move { lock(&locks).await })
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}

/// Waits until so many claims are on the lock, foreign ones included, and says who holds it.
async fn sees_claims(locks: &Locks, count: usize) -> String {
    within(&format!("{count} claims"), async {
        loop {
            let claims = locks.state(NAME).await.unwrap().map(|state| state.claims).unwrap_or_default();
            if claims.len() == count {
                return claims.first().map(|claim| claim.owner.host.clone()).unwrap_or_default();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

/// A process that takes orders and answers them line by line; killed when dropped.
struct Worker {
    child: Child,
    orders: Option<ChildStdin>,
    says: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    fn start(mut command: Command) -> Worker {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, says) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()).lines());
        Worker { child, orders, says }
    }

    /// Go's mutex on the lock's key.
    fn go(etcd: &Etcd) -> Worker {
        let mut command = Command::new(tools::go("etcd-mutex", include_str!("foreign/etcd_mutex.go")));
        command.args([&etcd.addr().to_string(), KEY]);
        let mut worker = Worker::start(command);
        assert_eq!(worker.says(), "ready");
        worker
    }

    /// `etcdctl lock` with a command that says so and then waits for the end of its input.
    fn etcdctl(etcd: &Etcd) -> Worker {
        let mut command = etcd.etcdctl();
        command.args(["lock", KEY]);
        Worker::start(command)
    }

    fn tell(&mut self, order: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
    }

    fn says(&mut self) -> String {
        self.says.next().expect("the worker lives").unwrap()
    }

    fn ask(&mut self, order: &str) -> String {
        self.tell(order);
        self.says()
    }

    /// Ends it as Ctrl-C does, and waits until it has.
    fn interrupt(&mut self) {
        let sent = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        self.child.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn gos_mutex_and_ours_exclude_each_other_and_share_a_queue() {
    let etcd = Etcd::start();
    let locks = connect(&etcd).await;
    let mut go = Worker::go(&etcd);
    let mut other = Worker::go(&etcd);

    let guard = lock(&locks).await;
    assert_eq!(go.ask("try"), "no");
    go.tell("lock");
    sees_claims(&locks, 2).await;
    let waiter = queue(&locks);
    sees_claims(&locks, 3).await;
    other.tell("lock");
    sees_claims(&locks, 4).await;
    release(guard).await;
    assert!(go.says().starts_with("locked"));
    assert_eq!(sees_claims(&locks, 3).await, "another program");
    assert!(locks.mutex(NAME).unwrap().try_lock().await.unwrap().is_none());
    assert!(!waiter.is_finished());
    let error = locks.mutex(NAME).unwrap().lock().timeout(Duration::ZERO).await.unwrap_err().to_string();
    assert!(error.contains("another program"), "{error}");
    assert_eq!(go.ask("unlock"), "unlocked");
    let guard = within("ours is granted", waiter).await.unwrap();
    release(guard).await;
    assert!(other.says().starts_with("locked"));
    assert_eq!(other.ask("unlock"), "unlocked");
    sees_claims(&locks, 0).await;
}

/// A foreign session uses one key for all its turns: it may be gone and queued again under the same name before a waiter
/// behind it looks.
#[tokio::test]
async fn a_foreign_claim_that_queues_again_under_its_old_key_is_not_taken_for_the_old_one() {
    let etcd = Etcd::start();
    let locks = connect(&etcd).await;
    let mut go = Worker::go(&etcd);
    for _ in 0..20 {
        assert!(go.ask("lock").starts_with("locked"));
        let waiter = queue(&locks);
        sees_claims(&locks, 2).await;
        go.tell("unlock");
        go.tell("lock");
        assert_eq!(go.says(), "unlocked");
        let guard = within("ours is granted", waiter).await.unwrap();
        release(guard).await;
        assert!(go.says().starts_with("locked"));
        assert_eq!(go.ask("unlock"), "unlocked");
    }
}

#[tokio::test]
async fn etcdctl_and_we_exclude_each_other_and_an_operator_can_end_its_claim() {
    let etcd = Etcd::start();
    let locks = connect(&etcd).await;
    let mut first = Worker::etcdctl(&etcd);
    assert!(first.says().starts_with(KEY));
    assert!(locks.mutex(NAME).unwrap().try_lock().await.unwrap().is_none());
    let waiter = queue(&locks);
    sees_claims(&locks, 2).await;
    first.interrupt();
    let guard = within("ours is granted", waiter).await.unwrap();
    let mut second = Worker::etcdctl(&etcd);
    sees_claims(&locks, 2).await;
    release(guard).await;
    assert!(second.says().starts_with(KEY));
    let claims = locks.state(NAME).await.unwrap().unwrap().claims;
    assert_eq!((claims[0].owner.host.as_str(), claims[0].owner.pid), ("another program", 0));
    assert_eq!(locks.evict(NAME, claims[0].id).await.unwrap(), Freed::Removed);
    release(within("ours is granted", lock(&locks)).await).await;
}

/// Also where keys begin with the lock's name, and are listed from the first of all keys on.
#[tokio::test]
async fn etcdctl_and_we_exclude_each_other_without_a_prefix() {
    let etcd = Etcd::start();
    let locks = clinch::connect(&format!("{}?prefix=", etcd.url())).await.unwrap();
    let mut command = etcd.etcdctl();
    command.args(["lock", "ctr"]);
    let mut first = Worker::start(command);
    assert!(first.says().starts_with("ctr/"));
    let mutex = locks.mutex("ctr").unwrap();
    assert!(mutex.try_lock().await.unwrap().is_none());
    first.interrupt();
    let guard =
        within("ours is granted", tokio::spawn(async move { mutex.lock().await })).await.unwrap().unwrap();
    assert_eq!(locks.list("").await.unwrap().len(), 1);
    assert!(locks.mutex("ctr").unwrap().try_lock().await.unwrap().is_none());
    release(guard).await;
    assert_eq!(locks.list("").await.unwrap().len(), 0);
}

/// A lock that was released closed is closed to foreign clients as well, also to one that waited already.
#[tokio::test]
async fn a_closed_lock_is_closed_to_everybody() {
    let etcd = Etcd::start();
    let locks = connect(&etcd).await;
    let mut go = Worker::go(&etcd);
    let guard = lock(&locks).await;
    go.tell("lock");
    sees_claims(&locks, 2).await;
    let clock = clinch::Clock::host();
    let closed = clock.now();
    let linger = Duration::from_secs(1);
    assert_eq!(guard.release_closed(linger).await.unwrap(), Released::Released);
    assert!(locks.state(NAME).await.unwrap().unwrap().closed_until.is_some());
    assert!(go.says().starts_with("locked"));
    assert!(clock.now() >= closed + linger);
    assert_eq!(go.ask("unlock"), "unlocked");
}

/// What a critical section does, whoever's lock guards it: reads a counter, waits a moment, and writes it one larger.
struct Ledger(tempfile::TempDir);

impl Ledger {
    fn new() -> Ledger {
        let dir = temp_dir();
        std::fs::write(dir.path().join("counter"), "0").unwrap();
        Ledger(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn count(&self) -> u64 {
        std::fs::read_to_string(self.path().join("counter")).unwrap().trim().parse().unwrap()
    }

    async fn section(path: &Path) {
        let (inside, counter) = (path.join("inside"), path.join("counter"));
        std::fs::create_dir(&inside).expect("somebody else is inside");
        let count: u64 = std::fs::read_to_string(&counter).unwrap().trim().parse().unwrap();
        tokio::time::sleep(Duration::from_micros(500)).await;
        std::fs::write(&counter, (count + 1).to_string()).unwrap();
        std::fs::remove_dir(&inside).expect("somebody else has left");
    }

    /// Two clients of ours, each with so many sections.
    async fn ours(&self, etcd: &Etcd, turns: u64) -> Vec<JoinHandle<()>> {
        let mut tasks = Vec::new();
        for _ in 0..2 {
            let (locks, path) = (connect(etcd).await, self.path().to_owned());
            tasks.push(tokio::spawn(async move {
                for _ in 0..turns {
                    let guard = lock(&locks).await;
                    Ledger::section(&path).await;
                    release(guard).await;
                }
            }));
        }
        tasks
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gos_mutex_and_ours_never_overlap() {
    const TURNS: u64 = 500;
    let (etcd, ledger) = (Etcd::start(), Ledger::new());
    let mut workers: Vec<Worker> = (0..2).map(|_| Worker::go(&etcd)).collect();
    let ours = ledger.ours(&etcd, TURNS).await;
    for worker in &mut workers {
        worker.tell(&format!("work {} {TURNS}", ledger.path().display()));
    }
    for task in ours {
        task.await.unwrap();
    }
    for worker in &mut workers {
        assert_eq!(worker.says(), "done 0");
    }
    assert_eq!(ledger.count(), 4 * TURNS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_and_we_never_overlap() {
    const TURNS: u64 = 250;
    let (etcd, ledger) = (Etcd::start(), Ledger::new());
    let section =
        "set -e; mkdir inside; n=$(cat counter); sleep 0.0005; echo $((n + 1)) > counter; rmdir inside";
    let script = "for _ in $(seq $TURNS); do \"$@\" || exit 1; done; echo done";
    let start = |_| {
        let etcdctl = etcd.etcdctl();
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).arg(etcdctl.get_program()).args(etcdctl.get_args());
        command.args(["lock", KEY, "--", "sh", "-c", section]).current_dir(ledger.path());
        command.env("ETCDCTL_API", "3").env("TURNS", TURNS.to_string());
        Worker::start(command)
    };
    let mut workers: Vec<Worker> = (0..2).map(start).collect();
    let ours = ledger.ours(&etcd, TURNS).await;
    for task in ours {
        task.await.unwrap();
    }
    for worker in &mut workers {
        assert_eq!(worker.says(), "done");
    }
    assert_eq!(ledger.count(), 4 * TURNS);
}
