//! The background lane: where renewals, background releases and sessions run, apart from the caller.
//!
//! Normally a thread of its own with a small runtime, started when first needed, so that a caller who blocks its own
//! threads cannot lose locks, and a guard may be dropped anywhere. `clinch run` and simulations use their own runtime.

use std::fmt;
use std::future::{pending, poll_fn};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
#[cfg(any(feature = "etcd", feature = "redis"))]
use std::sync::OnceLock;
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::error::{Error, ErrorKind, Result};
use crate::process::Process;
use crate::sync::lock;

/// How many runtimes that nobody drives are remembered.
#[cfg(any(feature = "etcd", feature = "redis"))]
const MOST_IDLE: usize = 16;

/// Runs futures in the background.
#[derive(Clone)]
pub struct Lane(Arc<Kind>, Process);

struct Kind {
    /// The runtime to run on for as long as it lives.
    here: Option<Here>,
    /// Else, and after that.
    thread: Mutex<Option<Thread>>,
    /// Runtimes of callers that have ended, or that nobody drives.
    #[cfg(any(feature = "etcd", feature = "redis"))]
    idle: OnceLock<Mutex<Vec<tokio::runtime::Id>>>,
}

struct Here {
    runtime: Handle,
    tasks: Mutex<Vec<AbortHandle>>,
    process: Process,
}

/// A running thread. Dropping it tells the thread to stop; nobody waits for that, since the last owner may be a task of
/// that very thread.
struct Thread {
    runtime: Handle,
    _stop: oneshot::Sender<()>,
}

impl Lane {
    /// A thread of its own, started by the first future that is spawned.
    pub fn thread() -> Lane {
        Lane::new(None)
    }

    /// The tokio runtime that this is called in.
    ///
    /// Renewals and time-outs then depend on that runtime making progress: for programs whose runtime never blocks and outlives
    /// the client, and simulations. When it ends, every lease is told lost, and what comes after that runs on a thread of its own.
    /// A runtime that lives on and that nobody drives any more stops them without a word.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] outside a tokio runtime, and in one without I/O or timers.
    pub fn here() -> Result<Lane> {
        let runtime = Handle::try_current().map_err(|error| {
            Error::invalid("Lane::here needs a tokio runtime around it").with_source(error)
        })?;
        if !has_drivers() {
            return Err(Error::invalid(
                "Lane::here needs a tokio runtime with I/O and timers: build it with enable_all()",
            ));
        }
        Ok(Lane::new(Some(Here { runtime, tasks: Mutex::default(), process: Process::this() })))
    }

    /// Whose it is. In a forked child nothing runs on it.
    pub(crate) fn process(&self) -> Process {
        self.1
    }

    fn new(here: Option<Here>) -> Lane {
        let kind = Kind {
            here,
            thread: Mutex::new(None),
            #[cfg(any(feature = "etcd", feature = "redis"))]
            idle: OnceLock::new(),
        };
        Lane(Arc::new(kind), Process::this())
    }

    /// Runs a future in the background; it is dropped with the lane, and with a runtime that ends.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Exhausted`] when the thread could not be started; [`ErrorKind::Closed`] in a forked child.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        self.spawn_with(|| future)
    }

    /// As [`Lane::spawn`]; the future is made when there is something to run it.
    fn spawn_with<F>(&self, future: impl FnOnce() -> F) -> Result<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.1.check()?;
        match self.living() {
            Some(here) => here.spawn(future()),
            None => {
                let thread = self.on_thread()?;
                self.1.spawn_on(&thread, future());
            }
        }
        Ok(())
    }

    /// Runs what `make` makes in the background, and makes it anew when the runtime that it runs on ends, for as long as the lane
    /// lives. One that panics is not made again. Where it is over, `make` is dropped.
    ///
    /// # Errors
    ///
    /// As [`Lane::spawn`].
    pub(crate) fn run<M, F>(&self, make: M) -> Result<()>
    where
        M: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        self.run_again(make, false)
    }

    /// As [`Lane::run`]; `again` after a runtime has ended.
    fn run_again<M, F>(&self, make: M, again: bool) -> Result<()>
    where
        M: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let (lane, process) = (Arc::downgrade(&self.0), self.1);
        self.spawn_with(move || Lasting { lane, process, make: Some(make), again }.run())
    }

    /// The lane's runtime, started if need be. What is spawned on it directly may outlive the lane where it is the
    /// caller's own.
    ///
    /// # Errors
    ///
    /// As [`Lane::spawn`].
    #[cfg(any(feature = "etcd", feature = "redis"))]
    pub(crate) fn handle(&self) -> Result<Handle> {
        self.1.check()?;
        match self.living() {
            Some(here) => Ok(here.runtime.clone()),
            None => self.on_thread(),
        }
    }

    /// Whether a runtime is known to be of no use to its callers, for whom this lane's then works.
    #[cfg(any(feature = "etcd", feature = "redis"))]
    pub(crate) fn is_idle(&self, runtime: &Handle) -> bool {
        self.0.idle.get().is_some_and(|idle| lock(idle).contains(&runtime.id()))
    }

    /// Notes that a runtime drives nothing.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`] when it is this lane's own; else as [`Lane::spawn`].
    #[cfg(any(feature = "etcd", feature = "redis"))]
    pub(crate) fn leave(&self, runtime: &Handle) -> Result<()> {
        if runtime.id() == self.handle()?.id() {
            return Err(Error::new(ErrorKind::Closed, "the runtime of this client has ended"));
        }
        let idle = &mut lock(self.0.idle.get_or_init(Mutex::default));
        if !idle.contains(&runtime.id()) {
            if idle.len() == MOST_IDLE {
                idle.remove(0);
            }
            idle.push(runtime.id());
        }
        Ok(())
    }

    /// The runtime that this lane was made in, if that has not ended.
    fn living(&self) -> Option<&Here> {
        self.0.here.as_ref().filter(|here| here.is_alive())
    }

    fn on_thread(&self) -> Result<Handle> {
        let mut thread = lock(&self.0.thread);
        let running = match thread.take() {
            Some(running) => running,
            None => start().map_err(|error| {
                Error::new(ErrorKind::Exhausted, "could not start the background thread").with_source(error)
            })?,
        };
        let runtime = running.runtime.clone();
        *thread = Some(running);
        Ok(runtime)
    }
}

impl Here {
    fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        let task = self.runtime.spawn(self.process.task(future)).abort_handle();
        let mut tasks = lock(&self.tasks);
        tasks.retain(|task| !task.is_finished());
        tasks.push(task);
    }

    /// A runtime that has ended drops what is spawned on it, and says so in no other way.
    fn is_alive(&self) -> bool {
        let probe = self.runtime.spawn(pending::<()>());
        let alive = !probe.is_finished();
        probe.abort();
        alive
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        // In a forked child nothing runs there, and it may be locked for ever.
        if self.process.is_left() {
            return;
        }
        for task in lock(&self.tasks).drain(..) {
            task.abort();
        }
    }
}

/// A task that is made anew when its runtime ends.
struct Lasting<M: Fn() -> F + Send + Sync + 'static, F: Future<Output = ()> + Send + 'static> {
    lane: Weak<Kind>,
    process: Process,
    /// `None` when it is done.
    make: Option<M>,
    /// Whether it was made because a runtime had ended, and has not run since: where that fails too, it is over.
    again: bool,
}

impl<M: Fn() -> F + Send + Sync + 'static, F: Future<Output = ()> + Send + 'static> Lasting<M, F> {
    async fn run(mut self) {
        self.again = false;
        if let Some(make) = &self.make {
            let _ = caught(async { make().await }).await;
        }
        self.make = None;
    }
}

impl<M: Fn() -> F + Send + Sync + 'static, F: Future<Output = ()> + Send + 'static> Drop for Lasting<M, F> {
    fn drop(&mut self) {
        if self.again || self.process.is_left() {
            return;
        }
        let (make, lane) = (self.make.take(), self.lane.upgrade().map(|lane| Lane(lane, self.process)));
        if let (Some(make), Some(lane)) = (make, lane) {
            // Without a background thread nobody can go on with it.
            let _ = lane.run_again(make, true);
        }
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.here.is_some() { "Lane(here)" } else { "Lane(thread)" })
    }
}

/// What a future gave, or `None` when it panicked. For calls into a backend from the background: a panic there must not end
/// what serves all other claims. The panic hook has said it.
pub(crate) async fn caught<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(poll) => poll.map(Some),
        Err(_) => Poll::Ready(None),
    })
    .await
}

/// Whether the current runtime has timers and I/O. Tokio tells what is missing only by a panic.
fn has_drivers() -> bool {
    catch_unwind(|| {
        drop(tokio::time::sleep(Duration::ZERO));
        #[cfg(unix)]
        drop(tokio::net::UnixDatagram::unbound());
    })
    .is_ok()
}

fn start() -> io::Result<Thread> {
    let (report, started) = mpsc::sync_channel(1);
    let (stop, stopped) = oneshot::channel::<()>();
    std::thread::Builder::new().name("clinch".into()).spawn(move || {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                let _ = report.send(Err(error));
                return;
            }
        };
        let _ = report.send(Ok(runtime.handle().clone()));
        // Ends when the sender is dropped; what still runs is dropped with the runtime, on this thread.
        let _ = runtime.block_on(stopped);
    })?;
    let runtime = started.recv().map_err(io::Error::other)??;
    Ok(Thread { runtime, _stop: stop })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn a_lane_needs_a_runtime_with_timers_and_io() {
        assert_eq!(Lane::here().unwrap_err().kind(), ErrorKind::Invalid);
        for timers in [false, true] {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            if timers {
                builder.enable_time();
            }
            let error = builder.build().unwrap().block_on(async { Lane::here() }).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
        assert!(runtime().block_on(async { Lane::here() }).is_ok());
    }

    #[test]
    fn a_task_goes_on_where_its_runtime_has_ended() {
        for begun in [false, true] {
            let runtime = runtime();
            let lane = runtime.block_on(async { Lane::here() }).unwrap();
            let (tell, told) = mpsc::channel();
            lane.run(move || {
                let tell = tell.clone();
                async move {
                    tell.send(std::thread::current().name().map(str::to_owned)).unwrap();
                    pending().await
                }
            })
            .unwrap();
            if begun {
                runtime.block_on(tokio::task::yield_now());
                assert_ne!(told.recv().unwrap().as_deref(), Some("clinch"));
            }
            drop(runtime);
            let next = told.recv_timeout(Duration::from_secs(20)).expect("it goes on elsewhere");
            assert_eq!(next.as_deref(), Some("clinch"));
            drop(lane);
            assert!(told.recv_timeout(Duration::from_secs(20)).is_err(), "it ends with the lane");
        }
    }

    #[test]
    fn a_thread_lane_works_outside_any_runtime_and_ends_with_its_last_owner() {
        let lane = Lane::thread();
        let (done, finished) = mpsc::channel();
        let owner = lane.clone();
        let dropped = done.clone();
        lane.spawn(async move {
            done.send(std::thread::current().name().map(str::to_owned)).unwrap();
            drop(owner);
        })
        .unwrap();
        assert_eq!(finished.recv_timeout(Duration::from_secs(20)).unwrap().as_deref(), Some("clinch"));
        struct SayWhenDropped(mpsc::Sender<Option<String>>);
        impl Drop for SayWhenDropped {
            fn drop(&mut self) {
                let _ = self.0.send(None);
            }
        }
        let guard = SayWhenDropped(dropped);
        lane.spawn(async move {
            let _guard = guard;
            std::future::pending::<()>().await;
        })
        .unwrap();
        drop(lane);
        assert_eq!(
            finished.recv_timeout(Duration::from_secs(20)).unwrap(),
            None,
            "the pending task was dropped"
        );
    }
}
