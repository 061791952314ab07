//! Five Redis servers that know nothing of each other and keep nothing on disk.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use clinch_testkit::{Proxy, Redis};

use super::network::{self, some_of};
use super::{Extent, Stage, last};
use crate::cells::{Fault, Step};
use crate::dice::Dice;

const SERVERS: usize = 5;

/// How many may be harmed in a way that makes them forget or miscount.
const MINORITY: usize = SERVERS / 2;

/// The server whose clock is set while it runs.
const CLOCK: usize = 0;

/// The longest TTL, and for how long a server that may have forgotten locks has no vote.
const MAX_TTL: Duration = Duration::from_secs(2);

/// How long after one server has forgotten its locks another may: by then the first votes again, or nothing of that time is left.
const REST: Duration = Duration::from_secs(6);

/// By how many seconds a clock is set.
const STEPS: &[i64] = &[3600, -3600, 1, -1, 5, 86_400];

pub(crate) struct Redlock {
    servers: Vec<Redis>,
    ways: Vec<Proxy>,
    /// When a server last forgot its locks.
    forgot: Mutex<Option<Instant>>,
}

impl Redlock {
    pub(crate) fn start() -> Redlock {
        let servers: Vec<Redis> = (0..SERVERS).map(|_| Redis::builder().stepped_clock().start()).collect();
        let ways = servers.iter().map(|server| Proxy::start(server.addr())).collect();
        Redlock { servers, ways, forgot: Mutex::default() }
    }

    /// Has a server forget its votes, while some locks have those of a bare majority, that one among them.
    fn forget(&self, dice: &mut Dice) {
        let (away, others) = self.ways.split_at(MINORITY);
        away.iter().for_each(|way| way.black_hole(true));
        std::thread::sleep(dice.ms(200, 1200));
        let server = &self.servers[MINORITY + dice.index(others.len())];
        let wakes_wrong = dice.chance(50);
        server.restart();
        if wakes_wrong {
            // As a host does that gets the time only after it has booted: now it seems to have run for an hour.
            server.step_clock(3600);
        }
        away.iter().for_each(|way| way.black_hole(false));
        last(dice);
        if wakes_wrong {
            server.kill();
            server.step_clock(0);
            server.restart();
        }
    }
}

impl Stage for Redlock {
    fn url(&self) -> String {
        let hosts: Vec<String> = self.ways.iter().map(|way| way.addr().to_string()).collect();
        let ttl = MAX_TTL.as_secs();
        format!("redlock://{}?max_ttl={ttl}s&ttl={ttl}s", hosts.join(","))
    }

    /// By other addresses they would be another group's servers.
    fn direct(&self) -> Option<String> {
        Some(self.url())
    }

    fn shared(&self) -> bool {
        false
    }

    fn longest_ttl(&self) -> Duration {
        MAX_TTL
    }

    fn faults(&self) -> Vec<Fault> {
        [network::FAULTS, &[Fault::ServerStop, Fault::ServerEmpty, Fault::ClockStep]].concat()
    }

    /// Who waits has no place there.
    fn breaks(&self) -> &[Step] {
        &[Step::Hold]
    }

    fn remembers(&self) -> bool {
        false
    }

    fn strike(&self, fault: Fault, dice: &mut Dice) -> Extent {
        let most = if dice.chance(75) { MINORITY } else { SERVERS };
        match fault {
            Fault::ServerStop => {
                let stopped = some_of(&self.servers, most, dice);
                stopped.iter().for_each(|server| server.pause());
                last(dice);
                stopped.iter().for_each(|server| server.resume());
            }
            Fault::ServerEmpty => {
                let mut forgot = self.forgot.lock().expect("nobody panics with it");
                if forgot.is_some_and(|at| at.elapsed() < REST) {
                    return Extent::None;
                }
                self.forget(dice);
                *forgot = Some(Instant::now());
            }
            Fault::ClockStep => {
                self.servers[CLOCK].step_clock(*dice.pick(STEPS));
                last(dice);
                self.servers[CLOCK].step_clock(0);
            }
            other => network::strike(other, &some_of(&self.ways, most, dice), dice),
        }
        Extent::Any
    }
}
