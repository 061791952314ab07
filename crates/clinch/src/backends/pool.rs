//! Connections by runtime: each runtime that calls has its own, opened once for all who wait for it.
//!
//! A connection is driven by the runtime it was opened on, so a caller's steps need no other thread, and the keeper's
//! steps do not depend on the caller's. When a runtime ends, so do its connections; the next one opens its own.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::watch;

use crate::backends::driven::{driver, watch_over};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
#[cfg(feature = "redis")]
use crate::lane::Lane;
use crate::lane::caught;
use crate::sync::lock;

/// Something that can end.
pub(super) trait Connection: Send + Sync + 'static {
    /// Whether it can still be used.
    fn is_open(&self) -> bool;
}

/// One connection per runtime. There are hardly ever more than two.
pub(super) struct Pool<C>(Arc<Mutex<Cells<C>>>);

struct Cells<C> {
    opening: Vec<(Id, Opening<C>)>,
    /// How often opening has failed lately, and until when nobody opens again.
    rests: (u32, Instant),
}

/// What came of opening a connection, once it is known.
type Opening<C> = watch::Receiver<Option<Result<Arc<C>>>>;

/// The pause after an opening that failed; it doubles with each that follows, and a random part of it, up to half, is left
/// out, so that the clients of a server that starts again do not all come at once.
const REST: Duration = Duration::from_millis(10);

/// How often it doubles.
const DOUBLINGS: u32 = 5;

/// For how long after a pause the next one is longer: a connection that opens well and is of no use at once has failed, too.
const LATELY: Duration = Duration::from_secs(1);

impl<C> Default for Pool<C> {
    fn default() -> Pool<C> {
        let rests = (0, Instant::from_nanos(0));
        Pool(Arc::new(Mutex::new(Cells { opening: Vec::new(), rests })))
    }
}

impl<C: Connection> Pool<C> {
    /// The connection of the current runtime, or outside of any that works, of the background lane's; opened by `open`
    /// when there is none. All who ask meanwhile wait for the same opening, and after one that failed the next begins
    /// after a pause. A runtime that nobody drives opens nothing, and is left for the lane's.
    ///
    /// # Cancel safety
    ///
    /// Opening goes on for others, and for the next call.
    pub(super) async fn get<F>(&self, env: &Env, open: impl Fn() -> F) -> Result<Arc<C>>
    where
        F: Future<Output = Result<C>> + Send + 'static,
    {
        let mut tried = false;
        loop {
            let runtime = driver(env.lane())?;
            let (mut opening, ours) = self.opening(&runtime, env, &open)?;
            // An opening that ended before we came tells nothing about now.
            let fresh = ours || tried;
            tried = true;
            let Ok(ended) = opening.wait_for(Option::is_some).await.map(|ended| match &*ended {
                Some(Ok(connection)) if connection.is_open() => Some(Ok(connection.clone())),
                Some(Err(error)) if fresh => Some(Err(error.again())),
                _ => None,
            }) else {
                self.forget(&runtime, &opening);
                env.lane().leave(&runtime)?;
                continue;
            };
            match ended {
                Some(Ok(connection)) => return Ok(connection),
                _ if env.lane().is_idle(&runtime) => self.forget(&runtime, &opening),
                Some(Err(error)) => {
                    self.forget(&runtime, &opening);
                    return Err(error);
                }
                None if ours => {
                    self.forget(&runtime, &opening);
                    return Err(Error::new(
                        ErrorKind::Unavailable,
                        "the connection broke as soon as it was open",
                    ));
                }
                None => self.forget(&runtime, &opening),
            }
        }
    }

    /// The open connection of the current runtime, if there is one.
    #[cfg(feature = "redis")]
    pub(super) fn peek(&self, lane: &Lane) -> Option<Arc<C>> {
        let runtime = driver(lane).ok()?.id();
        let cells = lock(&self.0);
        let (_, opening) = cells.opening.iter().find(|(owner, _)| *owner == runtime)?;
        let connection = opening.borrow().as_ref()?.as_ref().ok()?.clone();
        connection.is_open().then_some(connection)
    }

    /// Those connections that are open.
    #[cfg(feature = "redis")]
    pub(super) fn all(&self) -> Vec<Arc<C>> {
        let connection = |opening: &Opening<C>| opening.borrow().as_ref()?.as_ref().ok().cloned();
        lock(&self.0).opening.iter().filter_map(|(_, opening)| connection(opening)).collect()
    }

    fn opening<F>(&self, runtime: &Handle, env: &Env, open: impl Fn() -> F) -> Result<(Opening<C>, bool)>
    where
        F: Future<Output = Result<C>> + Send + 'static,
    {
        let mut cells = lock(&self.0);
        if let Some((_, opening)) = cells.opening.iter().find(|(owner, _)| *owner == runtime.id()) {
            return Ok((opening.clone(), false));
        }
        // Runtimes come and go in tests and in programs that block on futures; what they left is forgotten here.
        cells.opening.retain(|(_, opening)| opening.has_changed().is_ok());
        let (report, opening) = watch::channel(None);
        let report = Arc::new(report);
        watch_over(runtime, env, &report)?;
        let (future, pause, pool, env) =
            (open(), env.sleep_until(cells.rests.1), Arc::downgrade(&self.0), env.clone());
        env.process().spawn_on(runtime, async move {
            pause.await;
            // Those who waited may have left a runtime that stood still.
            if report.is_closed() {
                return;
            }
            let opened = caught(future).await;
            let opened = opened.unwrap_or_else(|| {
                Err(Error::new(ErrorKind::Unavailable, "opening the connection panicked"))
            });
            if let Some(cells) = pool.upgrade().filter(|_| opened.is_err()) {
                lock(&cells).rest(&env);
            }
            report.send_replace(Some(opened.map(Arc::new)));
            // Kept until nobody knows of the connection any more, so that a closed channel means a dead runtime.
            report.closed().await;
        });
        cells.opening.push((runtime.id(), opening.clone()));
        Ok((opening, true))
    }

    /// Notes that a connection was of no use though it could be opened, which rests as an opening that failed.
    pub(super) fn failed(&self, env: &Env) {
        lock(&self.0).rest(env);
    }

    /// Forgets a connection that is of no use, unless somebody has replaced it already.
    fn forget(&self, runtime: &Handle, opening: &Opening<C>) {
        lock(&self.0)
            .opening
            .retain(|(owner, current)| *owner != runtime.id() || !current.same_channel(opening));
    }
}

impl<C> Cells<C> {
    /// Notes that opening failed, and for how long nobody opens again: many callers make no storm.
    fn rest(&mut self, env: &Env) {
        let (failures, until) = self.rests;
        let now = env.now();
        let failures = if now < until + LATELY { failures } else { 0 };
        let pause = (REST * (1 << failures)).mul_f64(1.0 - env.random().jitter() / 2.0);
        self.rests = ((failures + 1).min(DOUBLINGS), now + pause);
    }
}

#[cfg(all(test, feature = "redis"))]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::time::SystemTime;

    use super::*;
    use crate::clock::Clock;
    use crate::net::Tcp;
    use crate::random::Random;

    #[derive(Default)]
    struct Closing(AtomicBool);

    impl Connection for Closing {
        fn is_open(&self) -> bool {
            !self.0.load(Ordering::Relaxed)
        }
    }

    struct Open;

    impl Connection for Open {
        fn is_open(&self) -> bool {
            true
        }
    }

    #[allow(clippy::unwrap_used, reason = "test code")]
    fn simulated() -> Env {
        let clock = Clock::simulated(SystemTime::UNIX_EPOCH);
        let lane = Lane::here().unwrap();
        let tcp = Tcp::new(clock, lane.clone());
        Env::new(clock, Random::seeded(1), lane, Arc::new(tcp))
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_opens_well_and_is_of_no_use_makes_no_storm() {
        let (env, pool, mut dials) = (simulated(), Pool::<Closing>::default(), 0);
        let end = env.now() + Duration::from_secs(10);
        while env.now() < end {
            let connection = pool.get(&env, || async { Ok(Closing::default()) }).await.unwrap();
            connection.0.store(true, Ordering::Relaxed);
            pool.failed(&env);
            dials += 1;
        }
        assert!((10..100).contains(&dials), "{dials} in 10 s");
        env.sleep_until(env.now() + Duration::from_secs(5)).await;
        pool.failed(&env);
        let failed = env.now();
        pool.get(&env, || async { Ok(Closing::default()) }).await.unwrap();
        assert!(env.now().since(failed) <= REST, "what was of use for long is opened again at once");
    }

    #[tokio::test(start_paused = true)]
    async fn many_callers_of_a_store_that_is_down_share_few_dials() {
        let env = simulated();
        let (pool, dials) = (Arc::new(Pool::<Open>::default()), Arc::new(AtomicU32::new(0)));
        let end = env.now() + Duration::from_secs(10);
        let mut callers = tokio::task::JoinSet::new();
        for _ in 0..200 {
            let (env, pool, dials) = (env.clone(), pool.clone(), dials.clone());
            callers.spawn(async move {
                let dial = || {
                    let (env, dials) = (env.clone(), dials.clone());
                    async move {
                        dials.fetch_add(1, Ordering::Relaxed);
                        let up = env.now() >= end;
                        up.then_some(Open).ok_or_else(|| Error::new(ErrorKind::Unavailable, "down"))
                    }
                };
                while pool.get(&env, dial).await.is_err() {
                    env.sleep_until(env.now() + Duration::from_millis(1)).await;
                }
            });
        }
        callers.join_all().await;
        let dials = dials.load(Ordering::Relaxed);
        assert!((10..100).contains(&dials), "{dials} in 10 s");
        let late = env.now().since(end);
        assert!(late < Duration::from_secs(1), "a store that is up again is found {late:?} late");
    }

    #[tokio::test]
    async fn an_opening_that_panics_keeps_nobody_waiting() {
        async fn panics() -> Result<Open> {
            panic!("once")
        }
        let (env, pool, patience) =
            (Env::host(Lane::thread()), Pool::<Open>::default(), Duration::from_secs(20));
        let broken = tokio::time::timeout(patience, pool.get(&env, panics)).await.expect("it hangs");
        assert_eq!(broken.map(drop).unwrap_err().kind(), ErrorKind::Unavailable);
        let next = tokio::time::timeout(patience, pool.get(&env, || async { Ok(Open) })).await;
        next.expect("it hangs").map(drop).unwrap();
        assert!(!env.lane().is_idle(&Handle::current()), "a runtime that works is not left");
    }
}
