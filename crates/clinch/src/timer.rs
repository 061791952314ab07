//! Timers on the injected clock, for any executor.
//!
//! tokio's timers run on CLOCK_MONOTONIC: after a suspend they fire late by the whole time asleep, and they need the
//! caller to run tokio. These wait on a timerfd of CLOCK_BOOTTIME in the background lane and wake whoever asked.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use tokio::sync::Notify;

use crate::clock::{Clock, Instant};
use crate::lane::Lane;
use crate::process::Process;
#[cfg(any(target_os = "linux", target_os = "android"))]
use crate::readable::Readable;
use crate::sync::{apart, lock};

/// All timers of one client.
#[derive(Clone, Debug)]
pub(crate) struct Timers {
    clock: Clock,
    lane: Lane,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Wakes the driver when something earlier than what it waits for was added.
    kick: Notify,
}

#[derive(Debug, Default)]
struct State {
    sleepers: BTreeMap<(Instant, u64), Waker>,
    next_id: u64,
    driven: bool,
    /// What the driver waits for now; it needs no kick for anything later.
    armed: Option<Instant>,
}

impl Timers {
    pub(crate) fn new(clock: Clock, lane: Lane) -> Timers {
        Timers { clock, lane, shared: Arc::default() }
    }

    /// Waits until the clock reads at least `until`. Costs nothing before its first poll.
    pub(crate) fn sleep_until(&self, until: Instant) -> Sleep {
        Sleep { timers: self.clone(), until, id: None }
    }

    /// Starts the driver. Without a background thread this wakes all that wait.
    fn drive(&self) {
        let driving = Arc::new(Driving(self.shared.clone(), self.lane.process()));
        let clock = self.clock;
        let _ = self.lane.run(move || drive(clock, driving.clone()));
    }
}

/// The driver of the timers, as they see it. However it ends, all that wait are woken, and start another.
struct Driving(Arc<Shared>, Process);

impl Drop for Driving {
    fn drop(&mut self) {
        if self.1.is_left() {
            return;
        }
        let sleepers = {
            let mut state = lock(&self.0.state);
            (state.driven, state.armed) = (false, None);
            std::mem::take(&mut state.sleepers)
        };
        wake(sleepers);
    }
}

fn wake(sleepers: BTreeMap<(Instant, u64), Waker>) {
    sleepers.into_values().for_each(|waker| apart(|| waker.wake()));
}

/// A pending wait. Dropping it forgets the timer.
#[derive(Debug)]
pub(crate) struct Sleep {
    timers: Timers,
    until: Instant,
    id: Option<u64>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Sleep { timers, until, id } = self.get_mut();
        if timers.clock.now() >= *until {
            return Poll::Ready(());
        }
        // In a forked child nothing can wake us later. Waking early is the safe side: every caller looks at the clock or at the
        // state again.
        if timers.lane.process().is_left() {
            return Poll::Ready(());
        }
        // Unlocked, and so is the drop of the one before: either may be a caller's.
        let waker = cx.waker().clone();
        let mut state = lock(&timers.shared.state);
        let id = *id.get_or_insert_with(|| {
            state.next_id += 1;
            state.next_id
        });
        let earlier = state.sleepers.insert((*until, id), waker);
        if state.armed.is_none_or(|armed| *until < armed) {
            state.armed = Some(*until);
            timers.shared.kick.notify_one();
        }
        let driven = std::mem::replace(&mut state.driven, true);
        drop(state);
        drop(earlier);
        if !driven {
            // Without a background thread we are woken at once, so whoever waits looks at the clock all the time.
            timers.drive();
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(id) = self.id
            && !self.timers.lane.process().is_left()
        {
            // Dropped unlocked, as in `poll`.
            let _waker = lock(&self.timers.shared.state).sleepers.remove(&(self.until, id));
        }
    }
}

/// Wakes sleepers as their time comes, for as long as the lane lives. One that begins anew knows nothing of the one before.
async fn drive(clock: Clock, driving: Arc<Driving>) {
    let shared = &driving.0;
    let mut alarm = Alarm::new(clock);
    loop {
        let (due, next) = {
            let mut state = lock(&shared.state);
            let now = clock.now();
            let later = state.sleepers.split_off(&(now, u64::MAX));
            let due = std::mem::replace(&mut state.sleepers, later);
            state.armed = state.sleepers.keys().next().map(|(until, _)| *until);
            (due, state.armed)
        };
        wake(due);
        tokio::select! {
            () = alarm.ring(next) => {}
            () = shared.kick.notified() => {}
        }
    }
}

/// One settable alarm on the injected clock.
enum Alarm {
    /// A simulation's clock, or no timerfd to be had now: tokio's own timer.
    Tokio(Clock),
    #[cfg(any(target_os = "linux", target_os = "android"))]
    Boot(Clock, Readable),
}

impl Alarm {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn new(clock: Clock) -> Alarm {
        use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
        if clock.simulated_instant(clock.now()).is_some() {
            return Alarm::Tokio(clock);
        }
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        match timerfd_create(TimerfdClockId::Boottime, flags)
            .map_err(std::io::Error::from)
            .and_then(Readable::new)
        {
            Ok(timer) => Alarm::Boot(clock, timer),
            Err(_) => Alarm::Tokio(clock),
        }
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn new(clock: Clock) -> Alarm {
        Alarm::Tokio(clock)
    }

    /// Completes at `at`, or never without one. May complete early; the caller looks at the clock.
    async fn ring(&mut self, at: Option<Instant>) {
        let Some(at) = at else { return std::future::pending().await };
        if let Alarm::Tokio(clock) = *self {
            *self = Alarm::new(clock);
        }
        match self {
            Alarm::Tokio(clock) => match clock.simulated_instant(at) {
                Some(at) => tokio::time::sleep_until(at).await,
                None => tokio::time::sleep(at.since(clock.now())).await,
            },
            #[cfg(any(target_os = "linux", target_os = "android"))]
            Alarm::Boot(clock, timer) => ring_boot(*clock, timer, at).await,
        }
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
async fn ring_boot(clock: Clock, timer: &Readable, at: Instant) {
    use std::os::fd::AsFd;

    use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_settime};
    let nanos = at.as_nanos();
    let value = Timespec {
        tv_sec: i64::try_from(nanos / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: (nanos % 1_000_000_000) as _,
    };
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    let setting = Itimerspec { it_interval: zero, it_value: value };
    if timerfd_settime(timer.as_fd(), TimerfdTimerFlags::ABSTIME, &setting).is_err() {
        return tokio::time::sleep(at.since(clock.now())).await;
    }
    // Setting the timer again has made an old expiry unreadable, so what is read is this one.
    let mut expirations = [0u8; 8];
    let _ = timer.read(&mut expirations).await;
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    struct Unpark(std::thread::Thread);

    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    /// Waits outside any runtime. Only what wakes it has it look again.
    fn wait(mut sleep: Sleep) {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while Pin::new(&mut sleep).poll(&mut Context::from_waker(&waker)).is_pending() {
            std::thread::park_timeout(Duration::from_secs(20));
            assert!(std::time::Instant::now() < deadline, "nothing wakes it");
        }
    }

    fn in_20_ms(timers: &Timers) -> Sleep {
        timers.sleep_until(timers.clock.now() + Duration::from_millis(20))
    }

    #[test]
    fn a_timer_wakes_a_caller_that_has_no_runtime() {
        wait(in_20_ms(&Timers::new(Clock::host(), Lane::thread())));
    }

    #[test]
    fn timers_go_on_where_their_runtime_ends_in_a_panic() {
        let (tell, told) = std::sync::mpsc::channel();
        let panics = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let timers = Timers::new(Clock::host(), Lane::here().unwrap());
                in_20_ms(&timers).await;
                tell.send(timers).unwrap();
                panic!("the runtime is dropped while its thread unwinds");
            });
        });
        let timers = told.recv().unwrap();
        assert!(panics.join().is_err());
        wait(in_20_ms(&timers));
    }

    #[test]
    fn a_waker_that_panics_stops_no_timer() {
        struct Panics;
        impl std::task::Wake for Panics {
            fn wake(self: Arc<Self>) {
                panic!("the executor is gone");
            }
        }
        let timers = Timers::new(Clock::host(), Lane::thread());
        let mut bad = timers.sleep_until(timers.clock.now() + Duration::from_millis(1));
        let waker = Waker::from(Arc::new(Panics));
        assert!(Pin::new(&mut bad).poll(&mut Context::from_waker(&waker)).is_pending());
        wait(in_20_ms(&timers));
    }

    /// However the driver ends, who waits starts another.
    #[test]
    fn a_driver_that_ends_is_replaced() {
        let timers = Timers::new(Clock::host(), Lane::thread());
        wait(in_20_ms(&timers));
        drop(Driving(timers.shared.clone(), timers.lane.process()));
        wait(in_20_ms(&timers));
    }

    /// Set where no thread can be started.
    const ALONE: &str = "CLINCH_TEST_ALONE";

    #[test]
    fn alone() {
        if std::env::var_os(ALONE).is_some() {
            let lane = Lane::thread();
            assert_eq!(lane.spawn(async {}).unwrap_err().kind(), crate::ErrorKind::Exhausted);
            wait(in_20_ms(&Timers::new(Clock::host(), lane)));
        }
    }

    /// Whoever waits then looks at the clock all the time.
    #[test]
    #[cfg(target_os = "linux")]
    fn timers_work_where_no_thread_can_be_started() {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "timer::tests::alone", "--nocapture"]).env(ALONE, "1");
        // No stack of this size can be had.
        let output = command.env("RUST_MIN_STACK", (1u64 << 46).to_string()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_simulated_timer_fires_on_simulated_time_and_in_order() {
        let clock = Clock::simulated(SystemTime::UNIX_EPOCH);
        let timers = Timers::new(clock, Lane::here().unwrap());
        let late = timers.sleep_until(clock.now() + Duration::from_secs(3600));
        let early = timers.sleep_until(clock.now() + Duration::from_secs(60));
        let dropped = timers.sleep_until(clock.now() + Duration::from_secs(1));
        let order = Mutex::new(Vec::new());
        tokio::join!(
            async {
                late.await;
                lock(&order).push(clock.now().as_nanos() / 1_000_000_000);
            },
            async {
                early.await;
                lock(&order).push(clock.now().as_nanos() / 1_000_000_000);
            },
            async { drop(dropped) },
        );
        assert_eq!(*lock(&order), [60, 3600]);
    }
}
