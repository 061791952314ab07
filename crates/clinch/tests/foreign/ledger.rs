//! What a critical section does, whoever's lock guards it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clinch_testkit::{Redis, Reply, Resp};

/// A counter on the first server that plain commands read and write, guarded by nothing but the lock, and the name of who is
/// in there.
pub(crate) struct Ledger {
    server: Resp,
    seed: u64,
}

/// One critical section.
pub(crate) struct Section {
    /// The counter had its target, and was left as it was.
    pub(crate) finished: bool,
    /// Somebody else came in.
    pub(crate) overlapped: bool,
}

impl Ledger {
    pub(crate) fn new(servers: &[Redis]) -> Ledger {
        static SEEDS: AtomicU64 = AtomicU64::new(1);
        Ledger { server: servers[0].client(), seed: SEEDS.fetch_add(1, Ordering::Relaxed) }
    }

    /// Reads the counter, waits a moment and writes it one larger.
    pub(crate) async fn section(&mut self, me: &str, target: u64) -> Section {
        self.server.call(&["SET", "holder", me]);
        let count = self.count();
        let finished = count >= target;
        if !finished {
            tokio::time::sleep(Duration::from_millis(1)).await;
            self.server.call(&["SET", "counter", &(count + 1).to_string()]);
        }
        let overlapped = self.server.call(&["GET", "holder"]) != Reply::Text(me.to_owned());
        Section { finished, overlapped }
    }

    pub(crate) fn count(&mut self) -> u64 {
        match self.server.call(&["GET", "counter"]) {
            Reply::Nil => 0,
            count => count.int().unsigned_abs(),
        }
    }

    /// Waits for a random time of at most `longest` ms.
    pub(crate) async fn pause(&mut self, longest: u64) {
        if longest > 0 {
            self.seed =
                self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            tokio::time::sleep(Duration::from_micros((self.seed >> 33) % (longest * 1000))).await;
        }
    }
}
