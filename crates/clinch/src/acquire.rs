//! Waiting for a lock: the one loop behind every primitive.

use std::future::IntoFuture;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Busy, Grant, Progress, Wake};
use crate::claim::{Claim, ClaimId, LossKind, Mode, Owner};
use crate::claimed::Claimed;
use crate::clock::Instant;
use crate::engine::{Engine, REPEATS};
use crate::error::{Error, ErrorKind, Result};
use crate::guard::Guard;
use crate::keeper::Kept;
use crate::lease;
use crate::name::LockName;
use crate::tenure::{Policy, Standing};

/// How long a store that does not answer at all is tried by a wait that has no deadline of its own.
const UNREACHABLE_FOR: Duration = Duration::from_secs(10);

/// For how long nobody may be able to say whether a lock is taken before who had it does not count any more.
const UNSAID: Duration = Duration::from_secs(1);

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
        Acquire { target: self, mode, until: None, id: None, guard: PhantomData }
    }

    /// Granted now or not at all.
    pub(crate) async fn try_acquire(&self, mode: Mode) -> Result<Option<Guard>> {
        match self.engine.here(self.tries(mode)).await? {
            Ok(guard) => Ok(Some(guard)),
            Err(busy) if busy.undecided => Err(undecided(&self.name, busy.detail.as_deref(), Duration::ZERO)),
            Err(_) => Ok(None),
        }
    }

    /// A try; a few where nobody can say whether the lock is taken. Each has a claim of its own: the end of an earlier one, which may yet be
    /// under way to a store, must not take a later one along.
    async fn tries(&self, mode: Mode) -> Result<Result<Guard, Busy>> {
        let env = &self.engine.env;
        let mut unsaid = 0;
        loop {
            match self.step(mode).await? {
                Err(busy) if busy.undecided && unsaid < REPEATS => {
                    env.sleep_until(env.now() + lease::backoff(unsaid, env.random().jitter())).await;
                    unsaid += 1;
                }
                ended => return Ok(ended),
            }
        }
    }

    /// One step that leaves no place in the queue.
    async fn step(&self, mode: Mode) -> Result<Result<Guard, Busy>> {
        let (claimed, claim) = self.new_claim(mode, false, self.engine.env.random().claim_id()?)?;
        let (mut attempt, mut late) = (0, 0);
        loop {
            let sent = self.engine.env.now();
            match self.ask(&claim).await {
                Ok(Progress::Granted(grant)) if late < REPEATS && !self.is_fresh(grant, sent) => late += 1,
                Ok(Progress::Granted(grant)) => return self.guard(claimed, &claim, grant, sent).map(Ok),
                Ok(Progress::Busy(busy)) => {
                    // An attempt whose answer did not come may still be on its way, and would hold the lock.
                    if (attempt, late) == (0, 0) {
                        claimed.settle();
                    }
                    return Ok(Err(busy));
                }
                Ok(Progress::Queued(busy)) => return Ok(Err(busy)),
                Err(error) if self.engine.worth_repeating(&error, &mut attempt).await => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// One step of a claim. Who holds nothing has nothing to lose: a store that says so has lost a place or an attempt.
    async fn ask(&self, claim: &Claim) -> Result<Progress> {
        self.engine.backend.claim(claim).await.map_err(nothing_lost)
    }

    fn new_claim(&self, mode: Mode, enqueue: bool, id: ClaimId) -> Result<(Claimed, Arc<Claim>)> {
        self.engine.check_open()?;
        let claim = Arc::new(Claim {
            id,
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
        match kept.tenure.standing_here(now) {
            Standing::Lost(loss) => {
                let why = match loss.kind {
                    LossKind::Expired => {
                        "was granted so late that its lease had already run out; use a longer TTL".to_owned()
                    }
                    _ => format!("was granted, but cannot be kept: {loss}"),
                };
                Err(Error::new(ErrorKind::Unavailable, format!("lock \"{}\" {why}", self.name)))
            }
            Standing::Held | Standing::Jeopardy => Ok(Guard::new(claimed, kept, grant.token)),
        }
    }

    /// Whether enough is left of a grant for a renewal to come in time; else the claim is asked for again, which grants its
    /// whole TTL from then on. This process may have been stopped, or the waiter not polled, since the grant was made.
    fn is_fresh(&self, grant: Grant, sent: Instant) -> bool {
        let from = grant.from.unwrap_or(sent);
        grant.ttl.is_none_or(|ttl| self.engine.env.now() < lease::jeopardy(from, ttl))
    }

    /// Whether a pushed grant, which may be short until its first renewal, can be used as it is.
    fn is_enough(&self, grant: Grant, sent: Instant) -> bool {
        let whole = !self.options.manual || grant.ttl.is_none_or(|ttl| ttl >= self.options.ttl);
        whole && self.is_fresh(grant, sent)
    }

    /// Waits for a grant until `until`; `None`: for as long as it takes. `id`: the claim's, where it is known already.
    async fn wait(&self, mode: Mode, until: Option<Instant>, id: Option<ClaimId>) -> Result<Guard> {
        let start = self.engine.env.now();
        let mut wait = Wait {
            target: self,
            until,
            heard: start,
            silence: Duration::ZERO,
            busy: None,
            unsaid: None,
            failure: None,
        };
        match until {
            // In a box, since every wait would be larger by it.
            Some(until) if until <= start => match Box::pin(self.tries(mode)).await? {
                Ok(guard) => Ok(guard),
                Err(busy) => {
                    wait.told(busy, start);
                    // To be asked once takes a moment, which is no wait.
                    Err(wait.timed_out(Duration::ZERO))
                }
            },
            Some(until) => {
                let end = self.engine.env.sleep_until(until);
                tokio::select! {
                    biased;
                    result = wait.run(mode, id) => return result,
                    () = end => {}
                }
                Err(wait.timed_out(self.engine.env.now().since(start)))
            }
            None => wait.run(mode, id).await,
        }
    }
}

/// One wait in progress, with what to say if it fails.
struct Wait<'a> {
    target: &'a Target,
    until: Option<Instant>,
    /// When the store last answered, or failed to.
    heard: Instant,
    /// For how long it has not answered.
    silence: Duration,
    busy: Option<Busy>,
    /// Since when nobody could say whether the lock is taken, and why.
    unsaid: Option<(Instant, Option<Arc<str>>)>,
    failure: Option<Error>,
}

impl Wait<'_> {
    async fn run(&mut self, mode: Mode, id: Option<ClaimId>) -> Result<Guard> {
        let target = self.target;
        let engine = &target.engine;
        let id = id.map_or_else(|| engine.env.random().claim_id(), Ok)?;
        let (claimed, claim) = target.new_claim(mode, true, id)?;
        let mut place: Option<Kept> = None;
        let (mut attempt, mut late) = (0, 0);
        loop {
            let sent = engine.env.now();
            // The answer ends here: what lives across an await makes every wait's future larger.
            let failed = match target.ask(&claim).await {
                Ok(Progress::Granted(grant)) if late < REPEATS && !target.is_fresh(grant, sent) => {
                    late += 1;
                    continue;
                }
                Ok(Progress::Granted(grant)) => return target.guard(claimed, &claim, grant, sent),
                Ok(Progress::Queued(busy) | Progress::Busy(busy)) => {
                    late = 0;
                    self.answered();
                    // One that the store no longer had was taken anew by this step.
                    place.take_if(|place| place.tenure.is_lost());
                    if let (None, Some(ttl)) = (&place, busy.place_ttl) {
                        place = Some(engine.keeper.keep_place(&claim, sent, ttl)?);
                    }
                    self.told(busy, engine.env.now());
                    None
                }
                Err(error) => Some(error),
            };
            if let Some(error) = failed {
                self.retry(error, &mut attempt).await?;
                continue;
            }
            let waits = engine.env.now();
            let woken = tokio::select! {
                biased;
                woken = engine.backend.wait(&claim) => woken.map_err(nothing_lost),
                () = lost(place.as_ref()) => Ok(Wake::Step),
            };
            // A wait that fails at once, again and again, is no better for the steps between.
            if woken.is_ok() || engine.env.now().since(waits) >= lease::MAX_BACKOFF {
                attempt = 0;
            }
            // However long nothing was asked of the store: it is silent only from the next step on.
            self.answered();
            match woken {
                Ok(Wake::Granted(grant)) if target.is_enough(grant, sent) => {
                    return target.guard(claimed, &claim, grant, sent);
                }
                Ok(Wake::Granted(_) | Wake::Step) => {}
                Err(error) => self.retry(error, &mut attempt).await?,
            }
        }
    }

    /// Keeps who has the lock, and beside that since when nobody could say whether anybody has.
    fn told(&mut self, busy: Busy, now: Instant) {
        if busy.undecided {
            let since = self.unsaid.as_ref().map_or(now, |(since, _)| *since);
            self.unsaid = Some((since, busy.detail));
        } else {
            (self.busy, self.unsaid) = (Some(busy), None);
        }
    }

    fn answered(&mut self) {
        (self.heard, self.silence, self.failure) = (self.target.engine.env.now(), Duration::ZERO, None);
    }

    /// Pauses before the step is repeated, or gives up.
    async fn retry(&mut self, error: Error, attempt: &mut u32) -> Result<()> {
        let env = &self.target.engine.env;
        let now = env.now();
        // One long gap is a process that was stopped, not a store that was asked and did not answer.
        self.silence += now.since(self.heard).min(UNREACHABLE_FOR / 2);
        self.heard = now;
        let silent = self.until.is_none() && self.silence >= UNREACHABLE_FOR;
        if silent || !error.is_transient() {
            return Err(error);
        }
        self.failure = Some(error);
        env.sleep_until(now + lease::backoff(*attempt, env.random().jitter())).await;
        *attempt += 1;
        Ok(())
    }

    /// Why the wait ended without a grant: who holds the lock, or that the store did not answer.
    fn timed_out(&mut self, waited: Duration) -> Error {
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
        if self.busy.is_none() && self.unsaid.is_none() {
            let waited = humantime::format_duration(waited);
            let message = format!("the store had not answered for lock \"{name}\" after {waited}");
            return Error::new(ErrorKind::Unavailable, message);
        }
        // For a moment, who had the lock before most likely has it still.
        let now = self.target.engine.env.now();
        if let Some((since, why)) = &self.unsaid
            && (self.busy.is_none() || now.since(*since) >= UNSAID)
        {
            return undecided(name, why.as_deref(), waited);
        }
        let by = self.busy.as_ref().and_then(|busy| busy.holder.as_ref()).map(|holder| {
            // None where the clock that dated it is ahead of ours.
            let since = self.target.engine.env.clock().wall().duration_since(holder.since).ok();
            let Owner { host, pid, .. } = &holder.owner;
            if *pid == 0 {
                // Not a claim of ours: nothing else is known.
                return format!("held by {host}");
            }
            let time = since.map(|time| format!(", for {}", humantime::format_duration(in_steps(time))));
            format!("held by {host} (pid {pid}{})", time.unwrap_or_default())
        });
        let waited = and_waited(waited);
        // Nobody holds a lock that lingers closed.
        let message = format!("lock \"{name}\" is {}{waited}", by.unwrap_or_else(|| "not free".to_owned()));
        let error = Error::new(ErrorKind::TimedOut, message);
        match self.busy.take().and_then(|busy| busy.detail) {
            Some(detail) => error.with_source(detail.as_ref()),
            None => error,
        }
    }
}

/// Why a request failed that heard only that nobody could say if the lock is taken.
fn undecided(name: &LockName, why: Option<&str>, waited: Duration) -> Error {
    let message = format!("nobody could say whether lock \"{name}\" is free{}", and_waited(waited));
    let error = Error::new(ErrorKind::Unavailable, message);
    match why {
        Some(why) => error.with_source(why),
        None => error,
    }
}

fn and_waited(waited: Duration) -> String {
    match waited {
        Duration::ZERO => String::new(),
        waited => format!("; waited {}", humantime::format_duration(waited)),
    }
}

/// Waits until a waiter's place is lost; for ever where it has none.
async fn lost(place: Option<&Kept>) {
    match place {
        Some(place) => drop(place.tenure.lost().await),
        None => std::future::pending().await,
    }
}

/// What a step says that found its claim gone, to somebody who does not hold it: to be asked again.
fn nothing_lost(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Lost => {
            Error::new(ErrorKind::Unknown, "the store lost an attempt to take the lock").with_source(error)
        }
        _ => error,
    }
}

/// A time as people want to read it: the nearest whole second, or millisecond of a short one.
fn in_steps(time: Duration) -> Duration {
    let millis = (time + Duration::from_micros(500)).as_millis();
    match u64::try_from(millis).unwrap_or(u64::MAX) {
        millis @ ..1000 => Duration::from_millis(millis),
        millis => Duration::from_secs(millis.saturating_add(500) / 1000),
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
/// the store could not be reached until then, or only said that nobody knows whether the lock is taken, as a quorum without
/// enough votes does; without a deadline, when it did not answer for 10 s.
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
    /// The claim's, where somebody has asked for it.
    id: Option<ClaimId>,
    guard: PhantomData<fn() -> G>,
}

impl<'a, G: From<Guard> + 'a> Acquire<'a, G> {
    /// Waits at most this long from now. Zero does not wait, and is a try.
    pub fn timeout(self, time: Duration) -> Acquire<'a, G> {
        let now = self.target.engine.env.now();
        self.deadline(now + time)
    }

    /// Waits until this moment of the host's clock at the latest.
    pub fn deadline(mut self, until: Instant) -> Acquire<'a, G> {
        self.until = Some(until);
        self
    }

    /// The id of the claim that will wait: by it, who looks on finds its place among the claims of
    /// [`Locks::state`](crate::Locks::state). A request with no time to wait makes claims of other ids.
    ///
    /// # Errors
    ///
    /// As of the request, where the system has no random numbers.
    ///
    /// # Examples
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// let locks = clinch::connect("memory://").await?;
    /// let mutex = locks.mutex("nightly")?;
    /// let mut request = mutex.lock();
    /// let id = request.claim_id()?;
    /// assert_eq!(request.await?.claim_id(), id);
    /// # Ok::<_, clinch::Error>(()) }).unwrap();
    /// ```
    pub fn claim_id(&mut self) -> Result<ClaimId> {
        let id = self.id.map_or_else(|| self.target.engine.env.random().claim_id(), Ok)?;
        Ok(*self.id.insert(id))
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
        let Acquire { target, mode, until, id, .. } = self;
        let waits = target.engine.here(target.wait(mode, until, id));
        Box::pin(async { waits.await.map(G::from) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_steps_that_people_read() {
        let told = |nanos| in_steps(Duration::from_nanos(nanos));
        for (nanos, millis) in [
            (499_999, 0),
            (500_000, 1),
            (1_499_999, 1),
            (999_499_999, 999),
            (999_500_000, 1000),
            (1_499_000_000, 1000),
            (1_500_000_000, 2000),
        ] {
            assert_eq!(told(nanos), Duration::from_millis(millis), "{nanos}");
        }
        assert_eq!((and_waited(Duration::ZERO).as_str(), told(0)), ("", Duration::ZERO));
        assert_eq!(and_waited(Duration::from_secs(90)), "; waited 1m 30s");
    }
}
