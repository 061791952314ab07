//! The one file that reads a clock.
//!
//! Deadlines live on CLOCK_BOOTTIME, which goes on while the machine is suspended; `std::time::Instant` on Linux stops
//! then (rust-lang/rust#87906), and a lease would seem to live on in a laptop that slept past its end.

use std::fmt;
use std::ops::{Add, Sub};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

/// By how much this process's CLOCK_BOOTTIME is ahead of the host's, in nanoseconds: in a time namespace (CLONE_NEWTIME) it has an offset,
/// and moments that processes of several of them share through files must mean the same. Read by each client as it starts, since a
/// forked child may be in another.
static AHEAD: AtomicI64 = AtomicI64::new(0);

/// A moment of this host since it booted, time in suspend included. Comparable between processes of one host, also of different time
/// namespaces.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// The moment this many nanoseconds after boot.
    pub const fn from_nanos(nanos: u64) -> Instant {
        Instant(nanos)
    }

    /// Nanoseconds since boot.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this moment; zero when it is not later.
    pub const fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
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
        Instant(self.0.saturating_sub(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
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
        write!(f, "boot+{:?}", Duration::from_nanos(self.0))
    }
}

/// Where the time comes from.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Source);

#[derive(Clone, Copy, Debug)]
enum Source {
    Host,
    Simulated { epoch: tokio::time::Instant, wall: SystemTime },
}

impl Clock {
    /// The host's clocks.
    pub fn host() -> Clock {
        let offsets = std::fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
        AHEAD.store(boot_offset(&offsets).unwrap_or(0), Ordering::Relaxed);
        Clock(Source::Host)
    }

    /// The clock of a simulation: starts at `wall` and advances with tokio's paused time. Must be made inside a tokio
    /// runtime.
    pub fn simulated(wall: SystemTime) -> Clock {
        Clock(Source::Simulated { epoch: tokio::time::Instant::now(), wall })
    }

    /// This moment.
    pub fn now(&self) -> Instant {
        match self.0 {
            Source::Host => boot_time(),
            Source::Simulated { epoch, .. } => Instant(0) + epoch.elapsed(),
        }
    }

    /// The wall clock, for people and for numbers that must survive a reboot; never for leases.
    pub fn wall(&self) -> SystemTime {
        match self.0 {
            Source::Host => SystemTime::now(),
            Source::Simulated { epoch, wall } => wall + epoch.elapsed(),
        }
    }

    /// This moment as the clock itself tells it, which in a time namespace counts from another boot.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub(crate) fn own_nanos(&self, at: Instant) -> u64 {
        match self.0 {
            Source::Host => at.0.saturating_add_signed(AHEAD.load(Ordering::Relaxed)),
            Source::Simulated { .. } => at.0,
        }
    }

    /// For a simulated clock, the moment on tokio's clock at which it reads `at`.
    pub(crate) fn simulated_instant(&self, at: Instant) -> Option<tokio::time::Instant> {
        match self.0 {
            Source::Host => None,
            Source::Simulated { epoch, .. } => Some(epoch + at.since(Instant(0))),
        }
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_time() -> Instant {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos =
        seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0));
    Instant(nanos.saturating_sub_signed(AHEAD.load(Ordering::Relaxed)))
}

/// The offset of CLOCK_BOOTTIME, in nanoseconds, in what the kernel tells of a time namespace.
fn boot_offset(offsets: &str) -> Option<i64> {
    let mut fields = offsets.lines().find_map(|line| line.strip_prefix("boottime"))?.split_ascii_whitespace();
    let mut field = || fields.next()?.parse::<i64>().ok();
    field()?.checked_mul(1_000_000_000)?.checked_add(field()?)
}

/// Elsewhere, the monotonic clock, which on macOS and the BSDs may stop in suspend.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot_time() -> Instant {
    use std::sync::OnceLock;
    static START: OnceLock<std::time::Instant> = OnceLock::new();
    // A day ahead, so that arithmetic near the start does not saturate.
    Instant(86_400_000_000_000) + START.get_or_init(std::time::Instant::now).elapsed()
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
    fn the_offset_of_a_time_namespace_is_read() {
        let offsets =
            |seconds: i64| format!("monotonic          -5         7\nboottime  {seconds:>10}       250\n");
        assert_eq!(boot_offset(&offsets(100_000)), Some(100_000_000_000_250));
        assert_eq!(boot_offset(&offsets(-3)), Some(-2_999_999_750));
        for odd in ["", "monotonic 1 2", "boottime", "boottime x 0", "boottime 1", &offsets(i64::MAX)] {
            assert_eq!(boot_offset(odd), None, "{odd}");
        }
    }

    /// Set for [`tells_the_time`] in another time namespace.
    const TELL: &str = "CLINCH_TEST_TELL_THE_TIME";

    #[test]
    fn tells_the_time() {
        if let Some(path) = std::env::var_os(TELL) {
            std::fs::write(path, Clock::host().now().as_nanos().to_string()).unwrap();
        }
    }

    /// What one writes as an end would seem to be long past or far away to the other.
    #[test]
    #[cfg(target_os = "linux")]
    fn processes_of_two_time_namespaces_tell_the_same_time() {
        let told = std::env::temp_dir().join(format!("clinch-time-{}", std::process::id()));
        for ahead in ["100000", "-1"] {
            let unshare = |program: &std::path::Path| {
                let mut command = std::process::Command::new("unshare");
                command.args(["--user", "--time", "--fork", "--boottime", ahead]).arg(program);
                command.args(["--exact", "clock::tests::tells_the_time"]).env(TELL, &told);
                command.output().is_ok_and(|output| output.status.success())
            };
            if !unshare(std::path::Path::new("true")) {
                eprintln!("not seen: no time namespace may be made here");
                return;
            }
            let clock = Clock::host();
            let before = clock.now();
            assert!(unshare(&std::env::current_exe().unwrap()));
            let there = Instant(std::fs::read_to_string(&told).unwrap().parse().unwrap());
            std::fs::remove_file(&told).unwrap();
            assert!(before <= there && there <= clock.now(), "{before:?} {there:?}");
        }
    }

    #[test]
    fn the_boot_clock_never_goes_back() {
        let clock = Clock::host();
        let first = clock.now();
        assert!(clock.now() >= first);
        assert!(first.as_nanos() > 0);
    }
}
