//! Waiting for a lock: the one loop behind every primitive.

use std::future::IntoFuture;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Busy, Grant, Progress, Wake};
use crate::claim::{Claim, Mode, Owner};
use crate::clock::Instant;
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::guard::{Claimed, Guard};
use crate::keeper::Kept;
use crate::lease;
use crate::name::LockName;
use crate::tenure::{Policy, Standing};

/// How long a store that does not answer at all is tried by a wait that has no deadline of its own.
const UNREACHABLE_FOR: Duration = Duration::from_secs(10);

/// How leases are asked for and kept.
#[derive(Clone, Debug)]
pub(crate) struct LeaseOptions {
    pub(crate) ttl: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) manual: bool,
    pub(crate) isolated: bool,
    pub(crate) owner: Arc<Owner>,
}

/// One lock that can be asked for: what the primitives are made of.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) engine: Arc<Engine>,
    pub(crate) name: LockName,
    pub(crate) options: LeaseOptions,
}

impl Target {
    pub(crate) fn acquire<G>(&self, mode: Mode) -> Acquire<'_, G> {
        Acquire { target: self, mode, until: None, guard: PhantomData }
    }

    /// One step: granted now or not at all.
    pub(crate) async fn try_acquire(&self, mode: Mode) -> Result<Option<Guard>> {
        Ok(self.step(mode).await?.ok())
    }

    /// One step that leaves no place in the queue.
    async fn step(&self, mode: Mode) -> Result<Result<Guard, Busy>> {
        let (claimed, claim) = self.new_claim(mode, false)?;
        let mut attempt = 0;
        let (sent, progress) = loop {
            let sent = self.engine.env.now();
            match self.engine.backend.claim(&claim).await {
                Ok(progress) => break (sent, progress),
                Err(error) if self.engine.worth_repeating(&error, &mut attempt).await => {}
                Err(error) => return Err(error),
            }
        };
        match progress {
            Progress::Granted(grant) => self.guard(claimed, &claim, grant, sent).map(Ok),
            Progress::Busy(busy) => {
                claimed.settle();
                Ok(Err(busy))
            }
            Progress::Queued(busy) => Ok(Err(busy)),
        }
    }

    fn new_claim(&self, mode: Mode, enqueue: bool) -> Result<(Claimed, Arc<Claim>)> {
        self.engine.check_open()?;
        let claim = Arc::new(Claim {
            id: self.engine.env.random().claim_id()?,
            name: self.name.clone(),
            mode,
            ttl: self.options.ttl,
            enqueue,
            place: false,
            // What nobody renews must end although others are renewed.
            isolated: self.options.isolated || self.options.manual,
            owner: self.options.owner.clone(),
        });
        Ok((Claimed::new(self.engine.clone(), claim.clone()), claim))
    }

    /// Turns a grant into a guard, unless it came too late to be of use.
    fn guard(&self, claimed: Claimed, claim: &Arc<Claim>, grant: Grant, sent: Instant) -> Result<Guard> {
        let LeaseOptions { max_hold, manual, .. } = self.options;
        let now = self.engine.env.now();
        let hold_until = max_hold.map(|hold| now + hold);
        let kept = self.engine.keeper.keep_lease(
            claim,
            grant,
            sent,
            Policy { drift: self.engine.env.drift(), manual, hold_until },
        )?;
        match kept.tenure.standing(now) {
            Standing::Lost(_) => Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "lock \"{}\" was granted so late that its lease had already run out; use a longer TTL",
                    self.name
                ),
            )),
            Standing::Held | Standing::Jeopardy => Ok(Guard::new(claimed, kept, grant.token)),
        }
    }

    /// Whether a pushed grant, which may be short until its first renewal, can be used as it is; else the claim is asked
    /// for again, which grants its whole TTL.
    fn is_enough(&self, grant: Grant) -> bool {
        !self.options.manual || grant.ttl.is_none_or(|ttl| ttl >= self.options.ttl)
    }

    /// Waits for a grant until `until`; `None`: for as long as it takes.
    async fn wait(&self, mode: Mode, until: Option<Instant>) -> Result<Guard> {
        let start = self.engine.env.now();
        let mut wait = Wait { target: self, start, until, busy: None, failure: None };
        match until {
            Some(until) if until <= start => match self.step(mode).await? {
                Ok(guard) => Ok(guard),
                Err(busy) => {
                    wait.busy = Some(busy);
                    Err(wait.timed_out())
                }
            },
            Some(until) => {
                let end = self.engine.env.sleep_until(until);
                tokio::select! {
                    biased;
                    result = wait.run(mode) => return result,
                    () = end => {}
                }
                Err(wait.timed_out())
            }
            None => wait.run(mode).await,
        }
    }
}

/// One wait in progress, with what to say if it fails.
struct Wait<'a> {
    target: &'a Target,
    start: Instant,
    until: Option<Instant>,
    busy: Option<Busy>,
    failure: Option<Error>,
}

impl Wait<'_> {
    async fn run(&mut self, mode: Mode) -> Result<Guard> {
        let engine = &self.target.engine;
        let (claimed, claim) = self.target.new_claim(mode, true)?;
        let mut place: Option<Kept> = None;
        let mut sent = engine.env.now();
        let mut answered = sent;
        let mut attempt = 0;
        loop {
            match engine.backend.claim(&claim).await {
                Ok(Progress::Granted(grant)) => return self.target.guard(claimed, &claim, grant, sent),
                Ok(Progress::Queued(busy) | Progress::Busy(busy)) => {
                    (attempt, self.failure) = (0, None);
                    // One that the store no longer has was taken anew by this step.
                    let kept = place.as_ref().is_some_and(|place| !place.tenure.is_lost());
                    if let (false, Some(ttl)) = (kept, busy.place_ttl) {
                        place = Some(engine.keeper.keep_place(&claim, sent, ttl)?);
                    }
                    self.busy = Some(busy);
                    let woken = engine.backend.wait(&claim).await;
                    // However long nothing was asked of the store: it is silent only from the next step on.
                    answered = engine.env.now();
                    match woken {
                        Ok(Wake::Granted(grant)) if self.target.is_enough(grant) => {
                            return self.target.guard(claimed, &claim, grant, sent);
                        }
                        Ok(Wake::Granted(_) | Wake::Step) => {}
                        Err(error) => self.retry(error, &mut attempt, answered).await?,
                    }
                }
                Err(error) => self.retry(error, &mut attempt, answered).await?,
            }
            sent = engine.env.now();
        }
    }

    /// Pauses before the step is repeated, or gives up.
    async fn retry(&mut self, error: Error, attempt: &mut u32, answered: Instant) -> Result<()> {
        let env = &self.target.engine.env;
        let silent = self.until.is_none() && env.now().since(answered) >= UNREACHABLE_FOR;
        if silent || !error.is_transient() {
            return Err(error);
        }
        self.failure = Some(error);
        env.sleep_until(env.now() + lease::backoff(*attempt, env.random().jitter())).await;
        *attempt += 1;
        Ok(())
    }

    /// Why the wait ended without a grant: who holds the lock, or that the store did not answer.
    fn timed_out(&mut self) -> Error {
        let waited = self.target.engine.env.now().since(self.start);
        let waited = in_steps(waited);
        let name = &self.target.name;
        if let Some(failure) = self.failure.take() {
            return Error::new(
                ErrorKind::Unavailable,
                format!(
                    "the store did not answer for lock \"{name}\"; tried for {}",
                    humantime::format_duration(waited)
                ),
            )
            .with_source(failure);
        }
        if self.busy.is_none() {
            let waited = humantime::format_duration(waited);
            let message = format!("the store had not answered for lock \"{name}\" after {waited}");
            return Error::new(ErrorKind::Unavailable, message);
        }
        let by = self.busy.as_ref().and_then(|busy| busy.holder.as_ref()).map(|holder| {
            let since =
                self.target.engine.env.clock().wall().duration_since(holder.since).unwrap_or_default();
            let Owner { host, pid, .. } = &holder.owner;
            if *pid == 0 {
                // Not a claim of ours: nothing else is known.
                return format!("held by {host}");
            }
            format!("held by {host} (pid {pid}, for {})", humantime::format_duration(in_steps(since)))
        });
        let waited = match waited {
            Duration::ZERO => String::new(),
            waited => format!("; waited {}", humantime::format_duration(waited)),
        };
        // Nobody holds a lock that lingers closed.
        let message = format!("lock \"{name}\" is {}{waited}", by.unwrap_or_else(|| "not free".to_owned()));
        let error = Error::new(ErrorKind::TimedOut, message);
        match self.busy.take().and_then(|busy| busy.detail) {
            Some(detail) => error.with_source(detail.as_ref()),
            None => error,
        }
    }
}

/// A time as people want to read it: whole seconds, or milliseconds of a short one.
fn in_steps(time: Duration) -> Duration {
    match time.as_secs() {
        0 => Duration::from_millis(u64::from(time.subsec_millis())),
        seconds => Duration::from_secs(seconds),
    }
}

/// A request for a lock. Await it to wait for the grant.
///
/// Claims are granted in the order in which the store received them, where the backend is
/// [`fifo`](crate::Capabilities::fifo); a waiter that is dropped or dies leaves the queue.
///
/// # Cancel safety
///
/// Dropping the request or its future withdraws the claim in the background. Nothing is held and nothing is left in the
/// queue.
///
/// # Errors
///
/// [`ErrorKind::TimedOut`] when the deadline passed first; the error names the holder. [`ErrorKind::Unavailable`] when
/// the store could not be reached until then; without a deadline, when it did not answer for 10 s.
///
/// # Examples
///
/// ```
/// # use std::time::Duration;
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let locks = clinch::connect("memory://").await?;
/// let mutex = locks.mutex("nightly")?;
/// let guard = mutex.lock().await?;
/// let error = mutex.lock().timeout(Duration::from_millis(5)).await.unwrap_err();
/// assert_eq!(error.kind(), clinch::ErrorKind::TimedOut);
/// # drop(guard);
/// # Ok::<_, clinch::Error>(()) }).unwrap();
/// ```
#[derive(Debug)]
#[must_use = "a request does nothing until it is awaited"]
pub struct Acquire<'a, G = Guard> {
    target: &'a Target,
    mode: Mode,
    until: Option<Instant>,
    guard: PhantomData<fn() -> G>,
}

impl<'a, G: From<Guard> + 'a> Acquire<'a, G> {
    /// Waits at most this long from now. Zero asks once and does not wait.
    pub fn timeout(self, time: Duration) -> Acquire<'a, G> {
        let now = self.target.engine.env.now();
        self.deadline(now + time)
    }

    /// Waits until this moment of the host's clock at the latest.
    pub fn deadline(mut self, until: Instant) -> Acquire<'a, G> {
        self.until = Some(until);
        self
    }
}

impl<'a> Acquire<'a, Guard> {
    /// Waits for the lock, runs `body` while it is held, and releases it.
    ///
    /// # Guarantees
    ///
    /// When the lease is lost, the body's future is dropped at its next await, before the store can grant the lock to
    /// another. A body that never awaits cannot be stopped; let it check [`Guard::is_held`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body and releases the lock in the background.
    ///
    /// # Errors
    ///
    /// Those of the request, and [`ErrorKind::Lost`] when the lease was lost before the body was done, or was found
    /// lost at the release.
    ///
    /// # Examples
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// let locks = clinch::connect("memory://").await?;
    /// let report = locks.mutex("report")?.lock().run(async |guard| format!("by {}", guard.token())).await?;
    /// # drop(report);
    /// # Ok::<_, clinch::Error>(()) }).unwrap();
    /// ```
    pub async fn run<T>(self, body: impl AsyncFnOnce(&Guard) -> T) -> Result<T> {
        let guard = self.await?;
        let value = tokio::select! {
            biased;
            loss = guard.lost() => return Err(Error::lost(guard.name(), loss)),
            value = body(&guard) => value,
        };
        let name = guard.name().clone();
        match guard.release().await? {
            crate::Released::Released => Ok(value),
            crate::Released::AlreadyLost(loss) => Err(Error::lost(&name, loss)),
        }
    }
}

impl<'a, G: From<Guard> + 'a> IntoFuture for Acquire<'a, G> {
    type Output = Result<G>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<G>> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.target.wait(self.mode, self.until).await.map(G::from) })
    }
}
