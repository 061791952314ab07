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
    /// The answer of the flight that is under way, or of a new one.
    ///
    /// # Cancel safety
    ///
    /// The flight goes on for others.
    pub(super) async fn join<F>(&self, env: &Env, key: K, fly: impl FnOnce() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let mut flight = self.flight(&driver(env.lane())?, env, key, fly);
        match flight.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(Ok(answer))) => Ok(answer.clone()),
            Ok(Some(Err(error))) => Err(error.again()),
            Ok(None) | Err(_) => {
                Err(Error::new(ErrorKind::Unknown, "the runtime that asked the server ended"))
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
            runtime.spawn(async move {
                report.send_replace(Some(future.await));
            });
            flight
        });
        under_way.clone()
    }
}
