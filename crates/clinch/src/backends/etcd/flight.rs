//! Flights: what many ask for at once is asked of the server once.
//!
//! Each is flown by a task of its own, so that whoever started one may be dropped, or kept and not polled, and delays
//! nobody. Each runtime has its own, as it has its own connection: the background lane never waits for a caller's.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use tokio::runtime::{Handle, Id};
use tokio::sync::watch;

use crate::backends::driven::{driver, watch_over};
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::lane::caught;
use crate::sync::lock;

/// What is being asked, by runtime and key.
pub(super) struct Flights<K, T>(Mutex<HashMap<(Id, K), Flight<T>>>);

/// What came of it, once that is known.
type Flight<T> = watch::Receiver<Option<Result<T>>>;

impl<K, T> Default for Flights<K, T> {
    fn default() -> Flights<K, T> {
        Flights(Mutex::default())
    }
}

impl<K: Clone + Eq + Hash, T: Clone + Send + Sync + 'static> Flights<K, T> {
    /// The answer of the flight that is under way, or of a new one; of one on the lane, where its runtime ends or stands still.
    ///
    /// # Cancel safety
    ///
    /// The flight goes on for others.
    pub(super) async fn join<F>(&self, env: &Env, key: K, fly: impl FnOnce() -> F + Clone) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        loop {
            let runtime = driver(env.lane())?;
            let mut flight = self.flight(&runtime, env, key.clone(), fly.clone());
            let error = match flight.wait_for(Option::is_some).await.as_deref() {
                Ok(Some(Ok(answer))) => return Ok(answer.clone()),
                Ok(Some(Err(error))) => error.again(),
                Ok(None) | Err(_) => {
                    // The lane's own is not left: what it was asked for is in doubt.
                    let _ = env.lane().leave(&runtime);
                    Error::new(ErrorKind::Unknown, "the runtime that asked the server ended")
                }
            };
            if !env.lane().is_idle(&runtime) {
                return Err(error);
            }
        }
    }

    /// Starts a flight on the lane that nobody waits for, unless it is under way.
    pub(super) fn start<F>(&self, env: &Env, key: K, fly: impl FnOnce() -> F) -> Result<()>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        drop(self.flight(&env.lane().handle()?, env, key, fly));
        Ok(())
    }

    fn flight<F>(&self, runtime: &Handle, env: &Env, key: K, fly: impl FnOnce() -> F) -> Flight<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let mut flights = lock(&self.0);
        // Those that have landed, or whose runtime ended, tell nothing of now.
        flights.retain(|_, flight| flight.borrow().is_none() && flight.has_changed().is_ok());
        let under_way = flights.entry((runtime.id(), key)).or_insert_with(|| {
            let (report, flight) = watch::channel(None);
            let (report, future) = (Arc::new(report), fly());
            // Without a background thread there is no lock to fly for.
            let _ = watch_over(runtime, env, &report);
            env.process().spawn_on(runtime, async move {
                let panicked = || Err(Error::new(ErrorKind::Unknown, "what asked the server panicked"));
                report.send_replace(Some(caught(future).await.unwrap_or_else(panicked)));
            });
            flight
        });
        under_way.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, poll_fn};
    use std::pin::pin;
    use std::task::Poll;
    use std::time::Duration;

    use super::*;
    use crate::lane::Lane;

    const PATIENCE: Duration = Duration::from_secs(20);

    async fn panics() -> Result<u32> {
        // Without the hook, which reads symbols: a runtime that does so for a second on a busy host is taken for one that drives nothing.
        std::panic::resume_unwind(Box::new("once"))
    }

    #[tokio::test]
    async fn a_flight_that_panics_keeps_nobody_waiting() {
        let (env, flights) = (Env::host(Lane::thread()), Flights::<(), u32>::default());
        let broken = tokio::time::timeout(PATIENCE, flights.join(&env, (), panics)).await.expect("it hangs");
        assert_eq!(broken.unwrap_err().kind(), ErrorKind::Unknown);
        let next = tokio::time::timeout(PATIENCE, flights.join(&env, (), || async { Ok(1) })).await;
        assert_eq!(next.expect("it hangs").unwrap(), 1);
        assert!(!env.lane().is_idle(&Handle::current()), "a runtime that works is not left");
    }

    #[test]
    fn a_flight_goes_on_where_its_runtime_does_not() {
        for ended in [false, true] {
            let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let (still, driven) = (runtime(), runtime());
            let (env, flights) = (Env::host(Lane::thread()), Flights::<(), u32>::default());
            let first = still.handle().id();
            let mut joined = pin!(flights.join(&env, (), move || async move {
                if Handle::current().id() == first {
                    pending::<()>().await;
                }
                Ok(1)
            }));
            still.block_on(poll_fn(|context| {
                assert!(joined.as_mut().poll(context).is_pending());
                Poll::Ready(())
            }));
            let still = (!ended).then_some(still);
            let joined = driven.block_on(async { tokio::time::timeout(PATIENCE, joined).await });
            assert_eq!(joined.expect("it hangs").unwrap(), 1);
            drop(still);
        }
    }
}
