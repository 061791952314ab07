//! The outside world as a value: clock, randomness, network, background lane.

use std::sync::Arc;

use crate::calm::calm;
use crate::clock::{Clock, Instant};
use crate::drift::Drift;
use crate::error::Result;
use crate::lane::Lane;
use crate::net::{Connector, Owned, Tcp};
use crate::process::Process;
use crate::random::Random;
use crate::timer::{Sleep, Timers};

/// Everything outside the process that a client touches, so that a simulator can stand in for it.
///
/// [`Env::host`] is the real world; [`Env::new`] takes the parts. It belongs to the process in which its [`Lane`] was made: a forked
/// child makes its own.
#[derive(Clone, Debug)]
pub struct Env {
    clock: Clock,
    random: Arc<Random>,
    lane: Lane,
    connector: Arc<dyn Connector>,
    timers: Timers,
    drift: Drift,
}

impl Env {
    /// The host's clock, random numbers and network, with this background lane.
    pub fn host(lane: Lane) -> Env {
        let clock = Clock::host();
        Env::new(clock, Random::system(), lane.clone(), Arc::new(Tcp::new(clock, lane)))
    }

    /// A world made of these parts.
    pub fn new(clock: Clock, random: Random, lane: Lane, connector: Arc<dyn Connector>) -> Env {
        let timers = Timers::new(clock, lane.clone());
        let connector = Arc::new(Owned(connector, lane.process()));
        Env { clock, random: Arc::new(random), lane, connector, timers, drift: Drift::DEFAULT }
    }

    /// The same world, whose clocks may run apart by this much.
    pub fn with_drift(mut self, drift: Drift) -> Env {
        self.drift = drift;
        self
    }

    /// By how much the clocks of this host and of a store may run apart.
    pub fn drift(&self) -> Drift {
        self.drift
    }

    /// The clock.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// The network.
    pub fn connector(&self) -> &Arc<dyn Connector> {
        &self.connector
    }

    /// The process that this world is of; a child that is forked from it needs another.
    pub(crate) fn process(&self) -> Process {
        self.lane.process()
    }

    /// For callers to poll, in this process only.
    pub(crate) fn here<T>(&self, future: impl Future<Output = Result<T>>) -> impl Future<Output = Result<T>> {
        // Moved where it stays before it is part of another: most are large.
        let here = calm(self.process().only(future));
        async { here.await? }
    }

    pub(crate) fn lane(&self) -> &Lane {
        &self.lane
    }

    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(crate) fn random(&self) -> &Random {
        &self.random
    }

    /// Waits until the clock reads at least `until`, on any executor. Costs nothing before its first poll. In a forked child, where
    /// nothing could wake it, it waits for nothing.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn sleep_until(&self, until: Instant) -> impl Future<Output = ()> + Send + Unpin + use<> {
        self.sleep(until)
    }

    fn sleep(&self, until: Instant) -> Sleep {
        self.timers.sleep_until(until)
    }
}
