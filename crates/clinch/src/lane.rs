//! The background lane: where renewals, background releases and sessions run, apart from the caller.
//!
//! Normally a thread of its own with a small runtime, started when first needed, so that a caller who blocks its own
//! threads cannot lose locks, and a guard may be dropped anywhere. `clinch run` and simulations use their own runtime.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Mutex, mpsc};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::error::{Error, ErrorKind, Result};
use crate::process::Process;
use crate::sync::lock;

/// Runs futures in the background.
#[derive(Clone)]
pub struct Lane(Arc<Kind>, Process);

enum Kind {
    Thread(Mutex<Option<Thread>>),
    Here { runtime: Handle, tasks: Mutex<Vec<AbortHandle>> },
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
        Lane(Arc::new(Kind::Thread(Mutex::new(None))), Process::this())
    }

    /// The tokio runtime that this is called in.
    ///
    /// Renewals and time-outs then depend on that runtime making progress: for programs whose runtime never blocks and outlives
    /// the client, and simulations. When it ends, every lease is told lost.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] outside a tokio runtime.
    pub fn here() -> Result<Lane> {
        let runtime = Handle::try_current().map_err(|error| {
            Error::invalid("Lane::here needs a tokio runtime around it").with_source(error)
        })?;
        Ok(Lane(Arc::new(Kind::Here { runtime, tasks: Mutex::default() }), Process::this()))
    }

    /// Whose it is. In a forked child nothing runs on it.
    pub(crate) fn process(&self) -> Process {
        self.1
    }

    /// Runs a future in the background; it is dropped with the lane.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Exhausted`] when the thread could not be started; [`ErrorKind::Closed`] in a forked child.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        self.1.check()?;
        match &*self.0 {
            Kind::Here { runtime, tasks } => {
                let task = runtime.spawn(future).abort_handle();
                let mut tasks = lock(tasks);
                tasks.retain(|task| !task.is_finished());
                tasks.push(task);
            }
            Kind::Thread(_) => drop(self.handle()?.spawn(future)),
        }
        Ok(())
    }

    /// The lane's runtime, started if need be. What is spawned on it directly may outlive the lane where it is the
    /// caller's own.
    ///
    /// # Errors
    ///
    /// As [`Lane::spawn`].
    pub(crate) fn handle(&self) -> Result<Handle> {
        self.1.check()?;
        let thread = match &*self.0 {
            Kind::Here { runtime, .. } => return Ok(runtime.clone()),
            Kind::Thread(thread) => thread,
        };
        let mut thread = lock(thread);
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

impl Drop for Kind {
    fn drop(&mut self) {
        if let Kind::Here { tasks, .. } = self {
            for task in lock(tasks).drain(..) {
                task.abort();
            }
        }
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &*self.0 {
            Kind::Thread(_) => "Lane(thread)",
            Kind::Here { .. } => "Lane(here)",
        })
    }
}

/// What a future gave, or `None` when it panicked. For calls into a backend from the background: a panic there must not end
/// what serves all other claims. The panic hook has said it.
pub(crate) async fn caught<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(poll) => poll.map(Some),
        Err(_) => std::task::Poll::Ready(None),
    })
    .await
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
    use std::time::Duration;

    use super::*;

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
