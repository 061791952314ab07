//! Which runtime drives what a caller asks for, and whether it does.

use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use tokio::runtime::{self, Handle, RuntimeFlavor};
use tokio::sync::{oneshot, watch};
use tokio::task;

use crate::calm::{Caller, caller};
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::lane::Lane;

/// A runtime that has not begun within this time what was spawned on it is taken for one that nobody drives.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// The runtime that drives what is asked for here: the caller's, or where none works, the lane's.
pub(crate) fn driver(lane: &Lane) -> Result<Handle> {
    match driven() {
        Some(runtime) if !lane.is_idle(&runtime) => Ok(runtime),
        _ => lane.handle(),
    }
}

/// Has the lane see to it that somebody drives a runtime, until it has reported what it works at. If nobody does, the lane's is taken
/// from now on, and all who wait for the report are told. The lane's own is never doubted: there is no other. The report is the
/// runtime's alone: what drops it unmade, as a runtime that ends, tells those who wait.
pub(crate) fn watch_over<T: Send + Sync + 'static>(
    runtime: &Handle,
    env: &Env,
    report: &Arc<watch::Sender<Option<Result<T>>>>,
) -> Result<()> {
    if env.lane().handle()?.id() == runtime.id() {
        return Ok(());
    }
    let (runtime, world) = (runtime.clone(), env.clone());
    let (report, mut reports) = (Arc::downgrade(report), report.subscribe());
    env.lane().spawn(async move {
        let made = tokio::select! {
            biased;
            made = reports.wait_for(Option::is_some) => made.is_ok(),
            () = stands_still(&runtime, &world) => false,
        };
        if !made
            && world.lane().leave(&runtime).is_ok()
            && let Some(report) = report.upgrade()
        {
            let error = Error::new(ErrorKind::Unavailable, "nobody drives the runtime of this call");
            report.send_replace(Some(Err(error)));
        }
    })
}

/// Waits until a runtime is seen to stand still, or to have ended.
async fn stands_still(runtime: &Handle, env: &Env) {
    loop {
        let (beat, beats) = oneshot::channel();
        env.process().spawn_on(runtime, async move {
            let _ = beat.send(());
        });
        let mut look = pin!(sign_of_life(env));
        tokio::select! {
            biased;
            beat = beats => match beat {
                Ok(()) => look.await,
                Err(_) => return,
            },
            () = &mut look => return,
        }
    }
}

/// In two halves: where the whole process was stopped in one, and the lane goes on first, the other is left for the runtime.
async fn sign_of_life(env: &Env) {
    for _ in 0..2 {
        env.sleep_until(env.now() + SIGN_OF_LIFE / 2).await;
    }
}

/// The runtime that polls this, as far as can be told: not one whose context was merely entered while another executor polls, nor
/// that of a thread for what blocks. One of several threads drives itself.
fn driven() -> Option<Handle> {
    let runtime = Handle::try_current().ok()?;
    let alone = runtime.runtime_flavor() == RuntimeFlavor::CurrentThread;
    (!alone || polls(&runtime)).then_some(runtime)
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

thread_local! {
    static WOKEN: Arc<Woken> = Arc::new(Woken(AtomicBool::new(false)));
    /// Who was seen last to be polled by tokio, so that one who asks often costs its runtime one turn.
    static POLLED: Cell<Option<(Polled, runtime::Id)>> = const { Cell::new(None) };
}

/// Who is polled: a task, or what is no task, by whoever polls it.
#[derive(Clone, Copy, PartialEq)]
enum Polled {
    Task(task::Id),
    By(Caller),
}

/// Whether this runtime polls on this thread. There tokio keeps the waker of whoever yields; elsewhere it wakes at once. A task has an
/// id also where it blocks a thread of its own.
fn polls(runtime: &Handle) -> bool {
    let asks = task::try_id().map(Polled::Task).or_else(|| caller().map(Polled::By));
    let asks = asks.map(|asks| (asks, runtime.id()));
    if asks.is_some() && POLLED.get() == asks {
        return true;
    }
    let Ok(woken) = WOKEN.try_with(Arc::clone) else { return false };
    woken.0.store(false, Ordering::Relaxed);
    let waker = Waker::from(woken.clone());
    let _ = pin!(task::yield_now()).poll(&mut Context::from_waker(&waker));
    let polled = !woken.0.load(Ordering::Relaxed);
    POLLED.set(asks.filter(|_| polled));
    polled
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::Pin;
    use std::task::Poll;
    use std::time::SystemTime;

    use super::*;
    use crate::calm::calm;
    use crate::clock::Clock;
    use crate::net::Tcp;
    use crate::random::Random;

    #[test]
    fn a_runtime_that_is_only_entered_drives_nothing() {
        let alone = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let many = tokio::runtime::Runtime::new().unwrap();
        assert!(driven().is_none());
        assert!(alone.block_on(async { driven() }).is_some());
        assert!(alone.block_on(async { tokio::spawn(async { driven() }).await.unwrap() }).is_some());
        let entered = alone.enter();
        assert!(driven().is_none());
        drop(entered);
        let blocks = alone.spawn_blocking(driven);
        assert!(alone.block_on(blocks).unwrap().is_none());
        let _entered = many.enter();
        assert!(driven().is_some());
    }

    /// A turn of a runtime costs system calls.
    #[test]
    fn a_caller_that_asks_often_costs_its_runtime_one_turn() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        // Tokio wakes it in the turn that it costs, and who asks again begins anew.
        let has_turned = || WOKEN.with(|woken| woken.0.load(Ordering::Relaxed));
        let asks = || calm(async { driven() });
        let asks_within = || calm(async { asks().await });
        runtime.block_on(async {
            assert!(asks().await.is_some());
            assert!(!has_turned());
            task::yield_now().await;
            for _ in 0..3 {
                assert!(asks().await.is_some() && has_turned(), "it costs one turn more");
                assert!(asks_within().await.is_some() && has_turned(), "it costs one turn more");
            }
        });
        // Nor is it believed of another who asks on the same thread, also if nothing tells that one from others.
        let by_hand = || pin!(asks()).poll(&mut Context::from_waker(Waker::noop()));
        assert!(runtime.block_on(async { matches!(by_hand(), Poll::Ready(Some(_))) }));
        let _entered = runtime.enter();
        assert!(matches!(by_hand(), Poll::Ready(None)), "somebody else polls this");
    }

    #[tokio::test]
    async fn a_report_that_nobody_can_make_any_more_is_not_waited_for() {
        let env = Env::host(Lane::thread());
        let (report, mut reports) = watch::channel::<Option<Result<()>>>(None);
        let report = Arc::new(report);
        watch_over(&Handle::current(), &env, &report).unwrap();
        drop(report);
        let heard = tokio::time::timeout(SIGN_OF_LIFE * 20, reports.wait_for(Option::is_some)).await;
        assert!(heard.expect("it hangs").is_err());
    }

    /// Whether it is over by now.
    async fn is_over(future: &mut (impl Future<Output = ()> + Unpin)) -> bool {
        poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context).is_ready())).await
    }

    /// The process was stopped, and the lane goes on first.
    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_was_stopped_with_the_lane_does_not_stand_still() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let clock = Clock::simulated(SystemTime::UNIX_EPOCH);
        let lane = Lane::here().unwrap();
        let tcp = Tcp::new(clock, lane.clone());
        let env = Env::new(clock, Random::seeded(1), lane, Arc::new(tcp));
        let handle = runtime.handle().clone();
        let mut still = Box::pin(stands_still(&handle, &env));
        assert!(!is_over(&mut still).await);
        tokio::time::advance(SIGN_OF_LIFE * 100).await;
        assert!(!is_over(&mut still).await, "it had no turn yet");
        let turn = move || {
            runtime.block_on(task::yield_now());
            runtime
        };
        let runtime = std::thread::spawn(turn).join().unwrap();
        tokio::time::advance(SIGN_OF_LIFE * 100).await;
        assert!(!is_over(&mut still).await, "it answered");
        still.await;
        runtime.shutdown_background();
    }
}
