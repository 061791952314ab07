//! The operator: looks at the store beside the workers, frees what the dead have left, takes claims away, and at the end sees
//! that nothing is left.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use clinch::Locks;
use clinch::backend::{ClaimState, Freed, LockState, NOTICE};

use crate::cells::{Cells, Fault, Step};
use crate::crew::Left;
use crate::dice::Dice;
use crate::log::Log;
use crate::say::now;
use crate::turn::Terms;

/// Between two looks at the store.
const LOOK: Duration = Duration::from_millis(300);

/// How long the store may take to answer before the operator tries again later.
const PATIENCE: Duration = Duration::from_secs(5);

/// A lease with no more than this left ends before the notice of an eviction does, so its holder need not hear of it.
const SHORT: Duration = Duration::from_secs(10);

/// For how long a lock may be closed after an eviction: the notice, and what a store takes longer at most.
const CLOSED: Duration = Duration::from_secs(2 * NOTICE.as_secs());

/// How long what a process has left may stand after it has closed its client.
const LEAVE: Duration = Duration::from_secs(10);

/// How long a lock may take to come free once nobody works any more.
const FREE: Duration = Duration::from_secs(60);

/// What the operator is told.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    /// Takes some claim away.
    Break,
    Left(Left),
    /// No worker is left: the last look.
    Finish,
}

/// What the operator has found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) cells: Cells,
    pub(crate) odd: Vec<String>,
}

pub(crate) struct Operator {
    url: String,
    log: Log,
    dice: Dice,
    breaks: Vec<Step>,
    locks: Option<Locks>,
    killed: HashSet<u32>,
    closed: HashMap<u32, Instant>,
    found: Found,
}

impl Operator {
    /// `breaks`: what claims are doing of which it takes some away.
    pub(crate) fn new(url: String, log: Log, dice: Dice, breaks: Vec<Step>) -> Operator {
        Operator {
            url,
            breaks,
            log,
            dice,
            locks: None,
            killed: HashSet::new(),
            closed: HashMap::new(),
            found: Found::default(),
        }
    }

    /// Works until it is told to finish.
    pub(crate) fn run(mut self, orders: &Receiver<Order>) -> Found {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        loop {
            match orders.recv_timeout(LOOK) {
                Ok(Order::Break) => runtime.block_on(self.look(true)),
                Ok(Order::Left(Left::Killed(pid))) => {
                    self.killed.insert(pid);
                }
                Ok(Order::Left(Left::Closed(pid))) => {
                    self.closed.insert(pid, Instant::now());
                }
                Err(RecvTimeoutError::Timeout) => runtime.block_on(self.look(false)),
                Ok(Order::Finish) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        runtime.block_on(self.finish());
        self.found
    }

    /// Looks at all claims once, and does with them what an operator does.
    async fn look(&mut self, breaks: bool) {
        let Some(states) = self.list().await else { return };
        let mut breakable = Vec::new();
        for (lock, claim) in
            states.iter().flat_map(|state| state.claims.iter().map(move |claim| (state, claim)))
        {
            if self.killed.contains(&claim.owner.pid) {
                // What ends soon by itself may do so.
                if !is_short(claim) {
                    self.evict(lock, claim).await;
                }
            } else if self.is_left_over(claim) {
                self.found.odd.push(format!("left by a process that has closed its client: {claim:?}"));
                self.evict(lock, claim).await;
            } else if self.breaks.contains(&doing(claim)) && (!claim.granted || is_short(claim)) {
                breakable.push((lock, claim));
            }
        }
        if breaks && !breakable.is_empty() {
            let (lock, claim) = *self.dice.pick(&breakable);
            if self.evict(lock, claim).await {
                self.found.cells.add(Fault::Break, doing(claim), 1);
            }
        }
    }

    fn is_left_over(&self, claim: &ClaimState) -> bool {
        self.closed.get(&claim.owner.pid).is_some_and(|closed| closed.elapsed() > LEAVE)
    }

    /// Takes a claim away; whether it was there.
    async fn evict(&mut self, lock: &LockState, claim: &ClaimState) -> bool {
        let Some(locks) = self.locks().await else { return false };
        let name = lock.name.as_str();
        let closing = self.log.eviction(name, claim.id, CLOSED);
        let evicted = tokio::time::timeout(PATIENCE, locks.evict(name, claim.id)).await;
        closing.unknown(now());
        matches!(evicted, Ok(Ok(Freed::Removed)))
    }

    async fn list(&mut self) -> Option<Vec<LockState>> {
        let locks = self.locks().await?;
        let listed = tokio::time::timeout(PATIENCE, locks.list(self.log.prefix())).await;
        listed.ok()?.ok()
    }

    async fn locks(&mut self) -> Option<Locks> {
        if self.locks.is_none() {
            let connected = tokio::time::timeout(PATIENCE, clinch::connect(&self.url)).await;
            self.locks = connected.ok().and_then(|connected| connected.ok());
        }
        self.locks.clone()
    }

    /// Sees that every lock can be had, and that nothing is left after that.
    async fn finish(&mut self) {
        for lock in Terms::locks() {
            let until = Instant::now() + FREE;
            while let Err(error) = self.take(&lock).await {
                self.look(false).await;
                if Instant::now() > until {
                    self.found.odd.push(format!("lock \"{lock}\" does not come free at the end: {error}"));
                    break;
                }
            }
        }
        let until = Instant::now() + FREE;
        loop {
            let left = self.list().await;
            if left.as_ref().is_some_and(Vec::is_empty) {
                return;
            }
            if Instant::now() > until {
                return self.found.odd.push(format!("left in the store at the end: {left:?}"));
            }
            self.look(false).await;
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Holds a lock alone for a moment.
    async fn take(&mut self, lock: &str) -> Result<(), String> {
        let locks = self.locks().await.ok_or("the store is out of reach")?;
        let mutex = locks.mutex(&self.log.lock_name(lock)).map_err(|error| error.to_string())?;
        let guard = mutex.lock().timeout(PATIENCE).await.map_err(|error| error.to_string())?;
        guard.release().await.map(drop).map_err(|error| error.to_string())
    }
}

fn doing(claim: &ClaimState) -> Step {
    if claim.granted { Step::Hold } else { Step::Lock }
}

/// Whether it ends before an eviction of it would count; or never, but with its process.
fn is_short(claim: &ClaimState) -> bool {
    claim.expires_in.is_none_or(|left| left <= SHORT)
}
