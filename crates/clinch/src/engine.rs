//! What all handles of one client share: the backend, the world, the keeper, and the releases still under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::Backend;
use crate::claim::Claim;
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::keeper::Keeper;
use crate::lease;
use crate::release::free;

/// How long a release is tried in the background when the lease itself has no end.
const RELEASE_FOR: Duration = Duration::from_secs(30);

/// How often a step that nobody waits for long is repeated when its answer was lost: some 150 ms in all.
const REPEATS: u32 = 4;

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) env: Env,
    pub(crate) keeper: Keeper,
    /// The process that made this. A forked child has its connections and descriptors, but no threads to keep anything.
    process: u32,
    closed: AtomicBool,
    releasing: AtomicUsize,
    released: Notify,
}

impl Engine {
    pub(crate) fn new(backend: Arc<dyn Backend>, env: Env) -> Arc<Engine> {
        let keeper = Keeper::new(backend.clone(), env.clone());
        Arc::new(Engine {
            backend,
            env,
            keeper,
            process: std::process::id(),
            closed: AtomicBool::new(false),
            releasing: AtomicUsize::new(0),
            released: Notify::new(),
        })
    }

    /// Refuses everything in a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Closed,
            "this client belongs to the process that this one was forked from; connect again",
        ))
    }

    /// Refuses new claims after [`Engine::close`].
    pub(crate) fn check_open(&self) -> Result<()> {
        self.check_process()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "this client is closed; connect again"));
        }
        Ok(())
    }

    /// Refuses new claims and waits until the background releases are done, at most `patience` long.
    pub(crate) async fn close(&self, patience: Duration) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        let mut end = std::pin::pin!(self.env.sleep_until(self.env.now() + patience));
        loop {
            let mut released = std::pin::pin!(self.released.notified());
            released.as_mut().enable();
            let left = self.releasing.load(Ordering::Acquire);
            if left == 0 {
                tokio::select! {
                    biased;
                    () = self.backend.close() => {}
                    () = &mut end => {}
                }
                return Ok(());
            }
            tokio::select! {
                biased;
                () = released => {}
                () = &mut end => {
                    return Err(Error::new(
                        ErrorKind::Unavailable,
                        format!("{left} releases were still under way after {patience:?}; their leases run out"),
                    ));
                }
            }
        }
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

    /// Until when releasing a claim is worth trying: when its lease has surely run out, there is nothing left to free.
    pub(crate) fn release_until(&self, claim: &Claim) -> Instant {
        let lease = if self.backend.capabilities().expiry { claim.ttl } else { RELEASE_FOR };
        self.env.now() + lease
    }

    /// Frees a claim in the background, or at once where the store needs no waiting. Works anywhere, also in a drop
    /// outside any runtime.
    pub(crate) fn free_in_background(self: &Arc<Engine>, claim: Arc<Claim>) {
        let until = self.release_until(&claim);
        let engine = self.clone();
        self.releasing.fetch_add(1, Ordering::AcqRel);
        let counted = Releasing(engine.clone());
        let mut release = Box::pin(async move {
            // A failure leaves the claim to its lease; there is nobody to tell.
            let _ = free(&*engine.backend, &engine.env, &claim, Duration::ZERO, until).await;
            drop(counted);
        });
        if self.backend.capabilities().inline {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            if release.as_mut().poll(&mut context).is_ready() {
                return;
            }
        }
        // Without a background thread the claim is left to its lease.
        let _ = self.env.lane().spawn(release);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.keeper.stop();
    }
}

/// One background release under way.
struct Releasing(Arc<Engine>);

impl Drop for Releasing {
    fn drop(&mut self) {
        self.0.releasing.fetch_sub(1, Ordering::AcqRel);
        self.0.released.notify_waiters();
    }
}
