//! What all handles of one client share: the backend, the world, the keeper, and the releases still under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::backend::Backend;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::keeper::Keeper;
use crate::lease;
use crate::release::Releases;

/// How often a step that nobody waits for long is repeated when its answer was lost, some 150 ms in all; and how often a
/// grant that came too late is asked for again.
pub(crate) const REPEATS: u32 = 4;

/// How long giving back what a client keeps in the store may take where releases were not answered.
const CLOSE_SILENT: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) env: Env,
    pub(crate) keeper: Keeper,
    pub(crate) releases: Arc<Releases>,
    closed: AtomicBool,
}

impl Engine {
    pub(crate) fn new(backend: Arc<dyn Backend>, env: Env) -> Arc<Engine> {
        let releases = Releases::new(backend.clone(), env.clone());
        let keeper = Keeper::new(backend.clone(), env.clone(), releases.clone());
        Arc::new(Engine { backend, env, keeper, releases, closed: AtomicBool::new(false) })
    }

    /// Refuses everything in a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.env.process().check()
    }

    /// As [`Env::here`].
    pub(crate) fn here<T>(&self, future: impl Future<Output = Result<T>>) -> impl Future<Output = Result<T>> {
        self.env.here(future)
    }

    /// Refuses new claims after [`Engine::close`].
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "this client is closed; connect again"));
        }
        Ok(())
    }

    /// Refuses new claims and waits until the releases under way are done, at most `patience` long.
    pub(crate) async fn close(&self, patience: Duration) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        let end = self.env.now() + patience;
        let finished = self.releases.finish(end).await;
        // A store that left releases unanswered is hardly waited for.
        let end = if finished.is_ok() { end } else { end.min(self.env.now() + CLOSE_SILENT) };
        tokio::select! {
            biased;
            () = self.backend.close() => {}
            () = self.env.sleep_until(end) => {}
        }
        finished.map_err(|left| {
            let message = format!(
                "{left} releases were not answered within {patience:?}, or were refused; their leases run out"
            );
            Error::new(ErrorKind::Unavailable, message)
        })
    }

    /// After a single step's answer was lost: pauses and says that it is to be asked for again, a few times.
    pub(crate) async fn worth_repeating(&self, error: &Error, attempt: &mut u32) -> bool {
        if error.kind() != ErrorKind::Unknown || *attempt >= REPEATS {
            return false;
        }
        self.env.sleep_until(self.env.now() + lease::backoff(*attempt, self.env.random().jitter())).await;
        *attempt += 1;
        true
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.env.process().is_left() {
            // What a forked child shares with its parent, and would close for both, stays as it is until it ends.
            std::mem::forget((self.backend.clone(), self.env.clone()));
            return;
        }
        self.keeper.stop();
    }
}
