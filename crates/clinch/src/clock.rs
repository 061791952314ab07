//! The one file that reads a clock.
//!
//! Deadlines live on CLOCK_BOOTTIME, which goes on while the machine is suspended; `std::time::Instant` on Linux stops
//! then (rust-lang/rust#87906), and a lease would seem to live on in a laptop that slept past its end.

use std::fmt;
use std::num::NonZeroU64;
use std::ops::{Add, Sub};
use std::time::{Duration, SystemTime};

/// A moment of this host since it booted, time in suspend included. Comparable between processes of one host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(
    /// One more than the nanoseconds since boot: of a lease much is known that may be no moment at all, and none takes no room.
    NonZeroU64,
);

impl Instant {
    /// The moment this many nanoseconds after boot.
    pub const fn from_nanos(nanos: u64) -> Instant {
        Instant(NonZeroU64::MIN.saturating_add(nanos))
    }

    /// Nanoseconds since boot.
    pub const fn as_nanos(self) -> u64 {
        self.0.get() - 1
    }

    /// The time from `earlier` to this moment; zero when it is not later.
    pub const fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.as_nanos().saturating_sub(earlier.as_nanos()))
    }
}

/// Saturates at the last moment that can be told, more than 500 years after boot.
impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, time: Duration) -> Instant {
        Instant(self.0.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// Saturates at boot.
impl Sub<Duration> for Instant {
    type Output = Instant;

    fn sub(self, time: Duration) -> Instant {
        Instant::from_nanos(
            self.as_nanos().saturating_sub(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Instant) -> Duration {
        self.since(earlier)
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "boot+{:?}", Duration::from_nanos(self.as_nanos()))
    }
}

/// Where the time comes from.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Source);

#[derive(Clone, Copy, Debug)]
enum Source {
    Host,
    Simulated {
        epoch: tokio::time::Instant,
        wall: SystemTime,
    },
    /// What a test says, which may do something first: it then stands where the clock is read.
    #[cfg(test)]
    Told(fn() -> Instant),
}

impl Clock {
    /// The host's clocks.
    pub const fn host() -> Clock {
        Clock(Source::Host)
    }

    /// The clock of a simulation: starts at `wall` and advances with tokio's paused time. Must be made inside a tokio
    /// runtime.
    pub fn simulated(wall: SystemTime) -> Clock {
        Clock(Source::Simulated { epoch: tokio::time::Instant::now(), wall })
    }

    #[cfg(test)]
    pub(crate) const fn told(now: fn() -> Instant) -> Clock {
        Clock(Source::Told(now))
    }

    /// This moment.
    pub fn now(&self) -> Instant {
        match self.0 {
            Source::Host => boot_time(),
            Source::Simulated { epoch, .. } => Instant::from_nanos(0) + epoch.elapsed(),
            #[cfg(test)]
            Source::Told(now) => now(),
        }
    }

    /// The wall clock, for people and for numbers that must survive a reboot; never for leases.
    pub fn wall(&self) -> SystemTime {
        match self.0 {
            Source::Host => SystemTime::now(),
            Source::Simulated { epoch, wall } => wall + epoch.elapsed(),
            #[cfg(test)]
            Source::Told(_) => SystemTime::now(),
        }
    }

    /// For a simulated clock, the moment on tokio's clock at which it reads `at`.
    pub(crate) fn simulated_instant(&self, at: Instant) -> Option<tokio::time::Instant> {
        match self.0 {
            Source::Host => None,
            Source::Simulated { epoch, .. } => Some(epoch + at.since(Instant::from_nanos(0))),
            #[cfg(test)]
            Source::Told(_) => None,
        }
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_time() -> Instant {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Instant::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// Elsewhere, the monotonic clock, which on macOS and the BSDs may stop in suspend.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot_time() -> Instant {
    use std::sync::OnceLock;
    static START: OnceLock<std::time::Instant> = OnceLock::new();
    // A day ahead, so that arithmetic near the start does not saturate.
    Instant::from_nanos(86_400_000_000_000) + START.get_or_init(std::time::Instant::now).elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_arithmetic_saturates() {
        let start = Instant::from_nanos(5);
        assert_eq!(start - Duration::from_secs(1), Instant::from_nanos(0));
        assert_eq!(start + Duration::MAX, Instant::from_nanos(u64::MAX));
        assert_eq!(start - Instant::from_nanos(9), Duration::ZERO);
    }

    #[test]
    fn a_moment_that_may_be_none_takes_no_more_room() {
        assert_eq!(size_of::<Option<Instant>>(), size_of::<Instant>());
    }

    #[test]
    fn the_boot_clock_never_goes_back() {
        let clock = Clock::host();
        let first = clock.now();
        assert!(clock.now() >= first);
        assert!(first.as_nanos() > 0);
    }
}
