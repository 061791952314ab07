//! The life of one claim, from its request to its end, told to the judge as its holder saw it.
//!
//! Times are read before a guard is asked and before a call is made, so that a process that is stopped in between tells nothing
//! untrue: it held at that time if the guard says so later.

mod ask;
mod detached;

use std::sync::Arc;
use std::time::Duration;

use clinch::{ClaimId, Error, ErrorKind, Guard, Locks, Loss, LossKind, Released, Renew, Result, Standing};
use clinch_verify::{Call, ClaimRecorder};

use crate::cells::Step;
use crate::harm::{Harm, harmed};
use crate::log::Log;
use crate::say::{now, say};
use crate::turn::{Act, End, Held, Turn};
use crate::worker::Orders;

/// Between two looks at a guard that is held.
const LOOK: Duration = Duration::from_millis(40);

/// How long one call may take before it counts as hanging. A wait that nobody bounds lasts until those ahead have had their turn,
/// among them some whose processes died.
const BOUND: Duration = Duration::from_secs(120);

/// For how long an evicted holder goes on before it lets go, in milliseconds: nobody is to be granted what it holds meanwhile.
const GRACE_MS: u64 = 1000;

/// What a worker's turns have in common.
pub(crate) struct Work {
    pub(crate) locks: Locks,
    pub(crate) log: Log,
    pub(crate) orders: Arc<Orders>,
    /// Whether nobody harms this process, so that its leases are renewed in time if anybody's are.
    pub(crate) steady: bool,
    /// When the round has begun.
    pub(crate) began: u64,
}

struct Life<'a> {
    work: &'a Work,
    turn: &'a Turn,
    /// The claims that this turn makes.
    locks: Locks,
    name: String,
    claim: ClaimRecorder,
    /// What the store knows it by, once it is granted.
    id: Option<ClaimId>,
    /// When it was last seen to hold.
    seen: u64,
    deadline: Option<u64>,
    lost: bool,
    harm: Option<Harm>,
}

/// Plays a turn, and gives the harm back that found no occasion.
pub(crate) async fn live(work: &Work, turn: &Turn, id: &str, harm: Option<Harm>) -> Result<Option<Harm>> {
    let renew = if turn.renewed { Renew::Auto } else { Renew::Never };
    let label = format!("{}ms", turn.ttl.as_millis());
    let name = work.log.lock_name(&turn.lock);
    let mut locks = work.locks.clone().ttl(turn.ttl)?.renew(renew).label(&label)?;
    if let Some(time) = turn.max_hold {
        locks = locks.max_hold(time)?;
    }
    let mut life = Life {
        locks,
        claim: work.log.claim(&name, id, turn.ask.mode(), longest(work, turn)),
        work,
        turn,
        name,
        id: None,
        seen: 0,
        deadline: None,
        lost: false,
        harm,
    };
    if let Some(held) = life.ask().await {
        life.hold(held).await;
    }
    Ok(life.harm)
}

/// The longest TTL that the claim asks for in its life; none where it ends with its process.
fn longest(work: &Work, turn: &Turn) -> Option<Duration> {
    let extended = turn.acts.iter().filter_map(|act| match act {
        Act::Extend(ttl) => Some(*ttl),
        Act::Verify | Act::Downgrade => None,
    });
    work.locks.capabilities().expiry.then(|| extended.fold(turn.ttl, Duration::max))
}

impl Work {
    /// For how long the round has gone on.
    pub(crate) fn time(&self) -> Duration {
        Duration::from_nanos(now().saturating_sub(self.began))
    }

    /// Whether first come is first served whatever is done to workers: where a place needs no renewals.
    fn judges_order(&self) -> bool {
        let can = self.locks.capabilities();
        can.fifo && !can.expiry
    }
}

impl Life<'_> {
    async fn hold(&mut self, mut held: Held) {
        let turn = self.turn;
        let part = turn.hold / u32::try_from(turn.acts.len() + 1).unwrap_or(1);
        for act in &turn.acts {
            if !self.stay(held.guard(), part).await {
                break;
            }
            held = match (act, held) {
                (Act::Downgrade, Held::Writer(writer)) => {
                    let call = self.claim.downgrade(self.seen);
                    match self.step(Step::Downgrade, writer.downgrade()).await {
                        Ok(guard) => {
                            call.ok(now());
                            Held::Guard(guard)
                        }
                        Err(error) => return self.downgrade_failed(&call, &error),
                    }
                }
                (Act::Downgrade, held) => held,
                (Act::Extend(ttl), held) => {
                    let extended = self.step(Step::Extend, held.guard().extend(*ttl)).await;
                    self.answered(held.guard(), "an extension", extended);
                    held
                }
                (Act::Verify, held) => {
                    let verified = self.step(Step::Verify, held.guard().verify()).await;
                    self.answered(held.guard(), "a look at the store", verified);
                    held
                }
            };
        }
        self.stay(held.guard(), part).await;
        self.end(held).await;
    }

    /// Whoever fails to go on as a reader holds nothing any more.
    fn downgrade_failed(&mut self, call: &Call, error: &Error) {
        call.unknown(now());
        self.claim.release(self.seen);
        self.expect("a downgrade", error, &[ErrorKind::Lost, ErrorKind::Unavailable, ErrorKind::Unknown]);
    }

    /// Holds the lock for a time, or until it is lost; whether it is still held.
    async fn stay(&mut self, guard: &Guard, time: Duration) -> bool {
        let begun = now();
        let mut harm = self.harm.take_if(|harm| harm.step == Step::Hold);
        let until = begun.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let mut looks = 0;
        loop {
            looks += 1;
            if let Some(harm) = harm.take_if(|harm| looks >= harm.after || now() >= until) {
                harm.strike();
            }
            let held = self.look(guard).await;
            // The last turns are cut short.
            let left = if self.work.orders.ends() { 0 } else { until.saturating_sub(now()) };
            if !held || left == 0 {
                self.harm = self.harm.or(harm);
                self.work.log.step(Step::Hold, begun, now());
                return held;
            }
            // A loss ends the pause.
            let _ = tokio::time::timeout(LOOK.min(Duration::from_nanos(left)), guard.lost()).await;
        }
    }

    /// Looks at the guard and tells what has changed since the last look; whether it is held.
    async fn look(&mut self, guard: &Guard) -> bool {
        if self.lost {
            return false;
        }
        let at = now();
        let deadline = guard.deadline().map(|deadline| deadline.as_nanos());
        match guard.standing() {
            Standing::Lost(loss) => self.is_lost(&loss, guard).await,
            _ => {
                if deadline != self.deadline {
                    self.claim.renewed_since(self.seen, at, deadline);
                    self.deadline = deadline;
                }
                self.seen = at;
            }
        }
        !self.lost
    }

    /// What is lost has ended. But who was evicted has some time to stop, for which nobody else is granted.
    async fn is_lost(&mut self, loss: &Loss, guard: &Guard) {
        self.lost = true;
        self.work.log.lost(loss.kind, Some(guard.claim_id()));
        let turn = self.turn;
        if self.work.steady && turn.renewed && turn.acts.is_empty() && loss.kind == LossKind::Expired {
            self.work.log.expired(turn.ttl);
        }
        if loss.kind == LossKind::Deleted {
            tokio::time::sleep(Duration::from_millis(self.seen % GRACE_MS)).await;
            self.seen = now().min(self.deadline.unwrap_or(u64::MAX));
        }
        self.claim.lost_since(self.seen, now());
    }

    /// What an answer that tells of a loss must mean for the guard.
    fn answered(&mut self, guard: &Guard, what: &str, answer: Result<()>) {
        let Err(error) = answer else { return };
        if error.kind() == ErrorKind::Lost && guard.is_held() {
            say(&format!("odd {what} says that the lease is lost, and its guard does not: {error}"));
        }
        self.expect(what, &error, &[ErrorKind::Lost, ErrorKind::Unavailable, ErrorKind::Unknown]);
    }

    /// From here on its holder does not claim to hold.
    async fn let_go(&mut self, guard: &Guard, linger: Duration) -> Call {
        let at = if self.look(guard).await { self.seen } else { now() };
        match u64::try_from(linger.as_millis()).unwrap_or(u64::MAX) {
            0 => self.claim.release(at),
            linger => self.claim.release_and_linger(at, linger),
        }
    }

    async fn end(&mut self, held: Held) {
        let end = if self.lost { End::Release } else { self.turn.end };
        match (end, held) {
            (End::Drop, held) => {
                self.let_go(held.guard(), Duration::ZERO).await;
                self.step(Step::Drop, async { drop(held) }).await;
            }
            (End::Detach { renewed }, Held::Guard(guard)) => self.detach(guard, renewed).await,
            (End::Linger(time), Held::Guard(guard)) => {
                let call = self.let_go(&guard, time).await;
                let answer = self.step(Step::Release, guard.release_closed(time)).await;
                self.released(&call, answer);
            }
            (_, Held::Guard(guard)) => {
                let call = self.let_go(&guard, Duration::ZERO).await;
                let answer = self.step(Step::Release, guard.release()).await;
                self.released(&call, answer);
            }
            (_, Held::Writer(writer)) => {
                let call = self.let_go(&writer, Duration::ZERO).await;
                let answer = self.step(Step::Release, writer.release()).await;
                self.released(&call, answer);
            }
        }
    }

    fn released(&mut self, call: &Call, answer: Result<Released>) {
        match answer {
            Ok(Released::Released) => call.ok(now()),
            Ok(Released::AlreadyLost(loss)) => {
                if !self.lost {
                    // The answer is the first that tells of it.
                    self.work.log.lost(loss.kind, self.id);
                    self.claim.lost_since(self.seen, now());
                }
                call.fail(now());
            }
            Err(error) => {
                call.unknown(now());
                self.expect("a release", &error, &[ErrorKind::Unavailable, ErrorKind::Unknown]);
            }
        }
    }

    /// Takes a step, does the harm that is meant for it, and notes when it was under way.
    async fn step<T>(&mut self, step: Step, future: impl Future<Output = T>) -> T {
        let begun = now();
        let harm = self.harm.take_if(|harm| harm.step == step);
        match tokio::time::timeout(BOUND, Box::pin(harmed(future, harm))).await {
            Ok(outcome) => {
                self.work.log.step(step, begun, now());
                outcome
            }
            Err(_) => {
                say(&format!("odd {step} of lock \"{}\" is not over after {BOUND:?}", self.name));
                std::future::pending().await
            }
        }
    }

    fn expect(&self, what: &str, error: &Error, known: &[ErrorKind]) {
        if !known.contains(&error.kind()) {
            say(&format!("odd {what} on lock \"{}\" failed: {error:?}", self.name));
        }
    }
}
