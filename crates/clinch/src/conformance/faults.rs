//! A backend with faults on command: cut off, hanging, losing answers, holding them back.
//!
//! No fault rests on timing. What is scripted happens to the next call of a step, and the test can wait for it.

use std::collections::{HashMap, HashSet};
use std::future::{pending, poll_fn};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::backend::{Backend, Capabilities, ClaimState, Freed, LockState, Progress, Renewal, Wake};
use crate::check::Check;
use crate::claim::{Claim, ClaimId, Loss};
use crate::clock::{Clock, Instant};
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::sync::lock;

/// A method of [`Backend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "named after the methods")]
pub enum Step {
    Claim,
    Downgrade,
    Evict,
    List,
    Lost,
    Release,
    Renew,
    Verify,
    Wait,
}

/// A backend around another, with faults to be switched on. With none on it changes nothing.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Backend>,
    clock: Clock,
    script: Mutex<Script>,
    severed: watch::Sender<bool>,
    waiting: Mutex<HashMap<ClaimId, LockName>>,
}

#[derive(Debug, Default)]
struct Script {
    hanging: HashSet<Step>,
    losing: HashSet<Step>,
    astray: HashSet<Step>,
    failing: HashSet<Step>,
    missing: HashSet<Step>,
    panicking: HashSet<Step>,
    denied: HashSet<Step>,
    slow: HashMap<Step, Duration>,
    late: Option<Arc<Mutex<Option<Claim>>>>,
    on_their_way: Vec<Arc<Mutex<Option<Claim>>>>,
    gates: HashMap<Step, watch::Sender<Door>>,
    hesitant: bool,
    calls: HashMap<Step, (u64, Instant)>,
}

/// What shall happen to one call.
struct Plan {
    slow: Option<Duration>,
    hang: bool,
    lose: bool,
    gate: Option<watch::Sender<Door>>,
    hesitate: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    Shut,
    Knocked,
    Open,
}

/// Holds back the answer of one call; see [`Faulty::hold_reply_of`]. Dropping it lets the answer through.
#[derive(Debug)]
pub struct Gate(watch::Sender<Door>);

impl Gate {
    /// Waits until the step has been applied and its answer is held back.
    pub async fn reached(&self) {
        // The sender is ours, so the wait cannot fail.
        let _ = self.0.subscribe().wait_for(|door| *door != Door::Shut).await;
    }

    /// Lets the answer through.
    pub fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.send_replace(Door::Open);
    }
}

/// The request of a claim that is on its way; see [`Faulty::send_late`].
#[derive(Debug)]
pub struct Late(Arc<Mutex<Option<Claim>>>);

impl Late {
    /// Lets the request reach the store, unless its claim was released meanwhile: that it then does nothing is the backend's
    /// contract. Says whether it did reach it.
    pub async fn arrive(self, client: &Faulty) -> bool {
        let claim = lock(&self.0).take();
        match claim {
            Some(claim) => client.inner.claim(&claim).await.is_ok(),
            None => false,
        }
    }
}

impl Faulty {
    /// Wraps a backend.
    pub fn new(inner: Arc<dyn Backend>, clock: Clock) -> Arc<Faulty> {
        let severed = watch::Sender::new(false);
        Arc::new(Faulty { inner, clock, script: Mutex::default(), severed, waiting: Mutex::default() })
    }

    /// Cuts the client off: from now on no call reaches the store, and waits under way end.
    pub fn sever(&self) {
        self.severed.send_replace(true);
    }

    /// Ends [`Faulty::sever`], all hanging, all panics, all denials and all losses of requests; calls that hang already go on hanging.
    pub fn heal(&self) {
        let mut script = lock(&self.script);
        script.hanging.clear();
        script.astray.clear();
        script.panicking.clear();
        script.denied.clear();
        drop(script);
        self.severed.send_replace(false);
    }

    /// Lets every call of this step hang for ever, not applied.
    pub fn hang(&self, step: Step) {
        lock(&self.script).hanging.insert(step);
    }

    /// Applies the next call of this step and loses its answer.
    pub fn lose_reply_of(&self, step: Step) {
        lock(&self.script).losing.insert(step);
    }

    /// Loses every call of this step on its way, not applied, of which whoever made it cannot tell.
    pub fn lose_requests_of(&self, step: Step) {
        lock(&self.script).astray.insert(step);
    }

    /// Fails the next call of this step, not applied.
    pub fn fail_before(&self, step: Step) {
        lock(&self.script).failing.insert(step);
    }

    /// Lets the next call of this step say that the store does not have the claim any more, not applied.
    pub fn miss(&self, step: Step) {
        lock(&self.script).missing.insert(step);
    }

    /// Lets every call of this step panic, not applied.
    pub fn panic_in(&self, step: Step) {
        lock(&self.script).panicking.insert(step);
    }

    /// Lets every call of this step fail for good, not applied.
    pub fn deny(&self, step: Step) {
        lock(&self.script).denied.insert(step);
    }

    /// Lets every call of this step take this long on its way. Only for steps that are taken in a tokio runtime.
    pub fn slow_down(&self, step: Step, time: Duration) {
        lock(&self.script).slow.insert(step, time);
    }

    /// Keeps the request of the next claim on its way; its answer counts as lost at once.
    pub fn send_late(&self) -> Late {
        let late = Arc::default();
        lock(&self.script).late = Some(Arc::clone(&late));
        Late(late)
    }

    /// Applies the next call of this step and holds its answer back until the gate opens.
    pub fn hold_reply_of(&self, step: Step) -> Gate {
        let door = watch::Sender::new(Door::Shut);
        lock(&self.script).gates.insert(step, door.clone());
        Gate(door)
    }

    /// Makes every step pending once before it is applied and once before it answers, so that there are more polls at
    /// which its future can be dropped.
    pub fn hesitate(&self) {
        lock(&self.script).hesitant = true;
    }

    /// How many calls of this step were made.
    pub fn calls_of(&self, step: Step) -> u64 {
        lock(&self.script).calls.get(&step).map_or(0, |(count, _)| *count)
    }

    /// A moment that surely lies after the last call of this step was sent and before it reached the store.
    pub fn last_call_of(&self, step: Step) -> Option<Instant> {
        lock(&self.script).calls.get(&step).map(|(_, at)| *at)
    }

    /// The claims that wait for a lock at this moment: in [`Backend::wait`], after a step that did not grant it.
    pub fn waiting(&self, name: &str) -> Vec<ClaimId> {
        let waiting = lock(&self.waiting);
        waiting.iter().filter(|(_, lock)| lock.as_str() == name).map(|(id, _)| *id).collect()
    }

    fn take_late(&self) -> Option<Arc<Mutex<Option<Claim>>>> {
        let mut script = lock(&self.script);
        let late = script.late.take()?;
        script.on_their_way.push(late.clone());
        Some(late)
    }

    fn plan(&self, step: Step) -> Result<Plan> {
        let mut script = lock(&self.script);
        let now = self.clock.now();
        let (count, at) = script.calls.entry(step).or_insert((0, now));
        (*count, *at) = (*count + 1, now);
        if *self.severed.borrow() {
            return Err(Error::new(ErrorKind::Unavailable, "the client is cut off (injected)"));
        }
        assert!(!script.panicking.contains(&step), "a panic in the backend (injected)");
        if script.denied.contains(&step) {
            return Err(Error::invalid("the step is not possible (injected)"));
        }
        if script.astray.contains(&step) {
            return Err(Error::new(ErrorKind::Unknown, "the request was lost (injected)"));
        }
        if script.missing.remove(&step) {
            return Err(Error::new(ErrorKind::Lost, "the claim is not there (injected)"));
        }
        if script.failing.remove(&step) {
            return Err(Error::new(ErrorKind::Unavailable, "the step was not sent (injected)"));
        }
        Ok(Plan {
            slow: script.slow.get(&step).copied(),
            hang: script.hanging.contains(&step),
            lose: script.losing.remove(&step),
            gate: script.gates.remove(&step),
            hesitate: script.hesitant,
        })
    }

    async fn through<T>(&self, step: Step, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let Plan { slow, hang, lose, gate, hesitate } = self.plan(step)?;
        if let Some(time) = slow {
            tokio::time::sleep(time).await;
        }
        if hang {
            return pending().await;
        }
        if hesitate {
            yield_once().await;
        }
        let answer = call.await;
        if hesitate {
            yield_once().await;
        }
        if let Some(door) = gate {
            door.send_if_modified(|door| {
                let shut = *door == Door::Shut;
                if shut {
                    *door = Door::Knocked;
                }
                shut
            });
            let _ = door.subscribe().wait_for(|door| *door == Door::Open).await;
        }
        if lose {
            return Err(Error::new(ErrorKind::Unknown, "the answer was lost (injected)"));
        }
        answer
    }
}

/// A claim is noted as waiting for as long as this lives.
struct Waiting<'a>(&'a Faulty, ClaimId);

impl<'a> Waiting<'a> {
    fn new(client: &'a Faulty, claim: &Claim) -> Waiting<'a> {
        lock(&client.waiting).insert(claim.id, claim.name.clone());
        Waiting(client, claim.id)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.waiting).remove(&self.1);
    }
}

/// Pending once, without a runtime.
async fn yield_once() {
    let mut yielded = false;
    poll_fn(|context| {
        if yielded {
            return Poll::Ready(());
        }
        yielded = true;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[async_trait]
impl Backend for Faulty {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn longest_ttl(&self) -> Duration {
        self.inner.longest_ttl()
    }

    fn shard(&self, name: &LockName) -> u64 {
        assert!(!lock(&self.script).panicking.contains(&Step::Renew), "a panic in the backend (injected)");
        self.inner.shard(name)
    }

    async fn examine(&self) -> Vec<Check> {
        self.inner.examine().await
    }

    async fn claim(&self, claim: &Claim) -> Result<Progress> {
        if let Some(late) = self.take_late() {
            *lock(&late) = Some(claim.clone());
            return Err(Error::new(ErrorKind::Unknown, "the request is on its way (injected)"));
        }
        self.through(Step::Claim, self.inner.claim(claim)).await
    }

    async fn wait(&self, claim: &Claim) -> Result<Wake> {
        let _waiting = Waiting::new(self, claim);
        let mut severed = self.severed.subscribe();
        tokio::select! {
            biased;
            wake = self.through(Step::Wait, self.inner.wait(claim)) => wake,
            _ = severed.wait_for(|severed| *severed) => {
                Err(Error::new(ErrorKind::Unavailable, "the client was cut off while it waited (injected)"))
            }
        }
    }

    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        let answer = self.through(Step::Renew, async { Ok(self.inner.renew(claims).await) }).await;
        answer.unwrap_or_else(|error| {
            let failed = |_| Renewal::Failed(Error::new(error.kind(), error.to_string()));
            claims.iter().map(failed).collect()
        })
    }

    async fn lost(&self) -> Vec<(ClaimId, Loss)> {
        assert!(!lock(&self.script).panicking.contains(&Step::Lost), "a panic in the backend (injected)");
        if lock(&self.script).hanging.contains(&Step::Lost) {
            pending::<()>().await;
        }
        let mut severed = self.severed.subscribe();
        loop {
            // The sender is ours, so neither wait can fail.
            let _ = severed.wait_for(|severed| !*severed).await;
            tokio::select! {
                biased;
                _ = severed.wait_for(|severed| *severed) => {}
                losses = self.inner.lost() => return losses,
            }
        }
    }

    async fn verify(&self, claim: &Claim) -> Result<Renewal> {
        self.through(Step::Verify, self.inner.verify(claim)).await
    }

    async fn downgrade(&self, claim: &Claim) -> Result<()> {
        self.through(Step::Downgrade, self.inner.downgrade(claim)).await
    }

    async fn release(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        let freed = self.through(Step::Release, self.inner.release(claim, linger)).await;
        if freed.is_ok() {
            for late in &lock(&self.script).on_their_way {
                lock(late).take_if(|late| late.id == claim.id);
            }
        }
        freed
    }

    fn forget(&self, claim: &Claim) {
        self.inner.forget(claim);
    }

    async fn close(&self) {
        self.inner.close().await;
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        self.through(Step::List, self.inner.list(prefix)).await
    }

    async fn state(&self, name: &LockName) -> Result<Option<LockState>> {
        self.through(Step::List, self.inner.state(name)).await
    }

    async fn own_state(&self, claim: &Claim) -> Result<Option<ClaimState>> {
        self.through(Step::List, self.inner.own_state(claim)).await
    }

    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed> {
        self.through(Step::Evict, self.inner.evict(name, claim)).await
    }

    fn descriptor(&self, claim: ClaimId) -> Option<OwnedFd> {
        self.inner.descriptor(claim)
    }

    fn key(&self, claim: ClaimId) -> Option<String> {
        self.inner.key(claim)
    }
}
