//! A worker on rslock.

use std::time::Duration;

use clinch_testkit::Redis;
use rslock::{Lock, LockManager};
use tokio::sync::mpsc;

use super::ledger::Ledger;

/// A lock of rslock's.
pub(crate) struct Client {
    /// Tries once.
    once: LockManager,
    /// Tries until it is granted.
    patient: LockManager,
    key: String,
    lease: Duration,
    held: Option<Lock>,
}

impl Client {
    pub(crate) fn new(servers: &[Redis], key: &str, lease: Duration, poll: Option<Duration>) -> Client {
        let mut patient = LockManager::new(servers.iter().map(Redis::url).collect());
        let mut once = patient.clone();
        once.set_retry(1, Duration::from_millis(1));
        if let Some(poll) = poll {
            patient.set_retry(u32::MAX, poll);
        }
        Client { once, patient, key: key.to_owned(), lease, held: None }
    }

    async fn acquire(&mut self) {
        let lock = self.patient.acquire_no_guard(self.key.as_str(), self.lease).await;
        self.held = Some(lock.expect("it goes on until it is granted"));
    }

    /// Whether the lock was ours until now; rslock's own answer does not say, and its `is_freed` asks one server only.
    async fn release(&mut self) -> bool {
        let lock = self.held.take().expect("it holds a lock");
        let owned = self.once.extend(&lock, self.lease).await.is_ok();
        lock.release().await;
        owned
    }

    async fn work(&mut self, ledger: &mut Ledger, me: &str, target: u64, pause: u64) -> String {
        let (mut done, mut overlaps) = (0, 0);
        loop {
            self.acquire().await;
            let section = ledger.section(me, target).await;
            assert!(self.release().await, "lost while working");
            overlaps += u64::from(section.overlapped);
            if section.finished {
                return format!("done {done} {overlaps}");
            }
            done += 1;
            ledger.pause(pause).await;
        }
    }
}

/// Does what it is told until nobody tells it anything any more.
pub(crate) async fn obey(
    mut client: Client,
    mut ledger: Ledger,
    mut orders: mpsc::UnboundedReceiver<String>,
    say: mpsc::UnboundedSender<String>,
) {
    let _ = say.send("ready".into());
    while let Some(order) = orders.recv().await {
        let words: Vec<&str> = order.split(' ').collect();
        let answer = match words[..] {
            ["try"] => {
                client.held = client.once.lock(client.key.as_str(), client.lease).await.ok();
                if client.held.is_some() { "yes" } else { "no" }.into()
            }
            ["lock"] => {
                client.acquire().await;
                "locked".into()
            }
            ["extend"] => {
                let lock = client.held.as_ref().expect("it holds a lock");
                if client.once.extend(lock, client.lease).await.is_ok() { "extended" } else { "lost" }.into()
            }
            ["release"] => if client.release().await { "released" } else { "lost" }.into(),
            ["work", me, target, pause] => {
                let (target, pause) = (target.parse().unwrap(), pause.parse().unwrap());
                client.work(&mut ledger, me, target, pause).await
            }
            _ => panic!("no order \"{order}\""),
        };
        let _ = say.send(answer);
    }
}
