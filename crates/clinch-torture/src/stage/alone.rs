//! One Redis that keeps on disk what it acknowledged.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use clinch_testkit::{Proxy, Redis};

use super::{Extent, Stage, last, network};
use crate::cells::Fault;
use crate::dice::Dice;

/// As many connections as a server takes unless it is told otherwise.
const CLIENTS: &str = "10000";

/// A clock that runs at another rate goes ahead, or stays behind, by so much ...
const SHIFT: i64 = 4_000_000;

/// ... each time that so much has passed: by 8 %, as far as a clock is ever slewed, and less than the drift that is allowed for.
const EACH: Duration = Duration::from_millis(50);

pub(crate) struct Alone {
    redis: Redis,
    way: Proxy,
    /// By how many nanoseconds its clock is off.
    off: AtomicI64,
}

impl Alone {
    pub(crate) fn start() -> Alone {
        let redis =
            Redis::builder().stepped_clock().arg("--appendonly", "yes").arg("--appendfsync", "always");
        let redis = redis.start();
        let way = Proxy::start(redis.addr());
        Alone { redis, way, off: AtomicI64::new(0) }
    }

    /// Has the clock run at another rate; where that leads it stays.
    fn slew(&self, dice: &mut Dice) {
        let by = *dice.pick(&[SHIFT, -SHIFT]);
        for _ in 0..40 + dice.below(100) {
            std::thread::sleep(EACH);
            self.redis.shift_clock(self.off.fetch_add(by, Ordering::Relaxed) + by);
        }
    }
}

impl Stage for Alone {
    fn url(&self) -> String {
        format!("redis://{}", self.way.addr())
    }

    fn direct(&self) -> Option<String> {
        Some(self.redis.url())
    }

    fn faults(&self) -> Vec<Fault> {
        let server = [Fault::ServerStop, Fault::ServerKill, Fault::Full, Fault::Crowd, Fault::ClockRate];
        [network::FAULTS, &server].concat()
    }

    fn strike(&self, fault: Fault, dice: &mut Dice) -> Extent {
        match fault {
            Fault::ServerStop => {
                self.redis.pause();
                last(dice);
                self.redis.resume();
            }
            Fault::ServerKill => {
                self.redis.kill();
                last(dice);
                self.redis.restart();
            }
            Fault::Full => {
                let mut client = self.redis.client();
                client.call(&["CONFIG", "SET", "maxmemory", "1"]);
                last(dice);
                client.call(&["CONFIG", "SET", "maxmemory", "0"]);
            }
            Fault::Crowd => {
                let mut client = self.redis.client();
                client.call(&["CONFIG", "SET", "maxclients", "1"]);
                self.way.cut_all();
                last(dice);
                client.call(&["CONFIG", "SET", "maxclients", CLIENTS]);
            }
            Fault::ClockRate => self.slew(dice),
            other => network::strike(other, &[&self.way], dice),
        }
        Extent::Any
    }
}
