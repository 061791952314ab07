//! Clients that stand still: another process, stopped and let go on.

use super::*;

/// What the other process is told to do; without it, the test that it runs does nothing.
const ORDER: &str = "CLINCH_TEST_HOLD";

/// What the other process does: holds the lock, and answers each line with whether it still does.
#[tokio::test]
async fn another_process() {
    let Ok(url) = std::env::var(ORDER) else { return };
    let locks = clinch::connect(&url).await.unwrap().ttl(Duration::from_secs(2)).unwrap();
    let guard = lock(&locks, "job").await;
    println!("\nsays held {}", guard.token());
    for line in std::io::stdin().lines() {
        line.unwrap();
        println!("\nsays {}", if guard.is_held() { "held" } else { "lost" });
    }
}

struct Other {
    child: Child,
    says: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Other {
    fn start(url: &str) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "stopped::another_process", "--nocapture", "--test-threads=1"])
            .env(ORDER, url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let says = BufReader::new(child.stdout.take().unwrap()).lines();
        Other { child, says }
    }

    fn says(&mut self) -> String {
        let mut lines = self.says.by_ref().map(Result::unwrap);
        lines.find_map(|line| line.strip_prefix("says ").map(str::to_owned)).unwrap()
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_holder_that_stood_still_does_not_believe_that_it_holds() {
    let etcd = Etcd::start();
    let locks = connect(&etcd.url()).await;
    let mut other = Other::start(&etcd.url());
    let token: u64 = other.says().strip_prefix("held ").unwrap().parse().unwrap();
    let waiter = queue(&locks, "job");
    sees_claims(&locks, "job", 2).await;
    other.signal("-STOP");
    let guard = join("the lock of a stopped process is granted", waiter).await;
    assert!(guard.token().get() > token);
    other.signal("-CONT");
    writeln!(other.child.stdin.as_mut().unwrap(), "well?").unwrap();
    assert_eq!(other.says(), "lost");
    drop(other);
    guard.verify().await.unwrap();
    release(guard).await;
    expect_unused(&etcd, &locks, "job").await;
}
