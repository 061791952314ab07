//! How a claim is asked for.

use std::sync::OnceLock;

use clinch::{ClaimId, ErrorKind};
use clinch_verify::Call;

use super::{LOOK, Life, Work};
use crate::cells::Step;
use crate::harm::cancelled;
use crate::say::now;
use crate::turn::{Held, Start};

impl Life<'_> {
    /// Asks for the lock; what was granted, if anything.
    pub(super) async fn ask(&mut self) -> Option<Held> {
        let (ask, locks, name) = (self.turn.ask, self.locks.clone(), self.name.clone());
        let place = self.work.judges_order().then(|| self.claim.enqueue(now()));
        let call = self.claim.acquire(now());
        let told = OnceLock::new();
        let answer = match self.turn.start {
            Start::Wait(patience) => {
                let work = self.work;
                let waits = ask.wait(&locks, &name, patience, &told);
                let queues = queues(work, &name, &told, place.as_ref());
                self.step(Step::Lock, beside(waits, queues)).await.map(Some)
            }
            Start::Try => {
                // It takes no place.
                place.iter().for_each(|place| place.fail(now()));
                self.step(Step::Try, ask.attempt(&locks, &name)).await
            }
            Start::Cancel(polls) => {
                let dropped = async { drop(cancelled(ask.wait(&locks, &name, None, &told), polls).await) };
                self.step(Step::Cancel, dropped).await;
                call.unknown(now());
                return None;
            }
        };
        let at = now();
        match answer {
            Ok(Some(held)) => {
                let guard = held.guard();
                self.id = Some(guard.claim_id());
                self.deadline = guard.deadline().map(|deadline| deadline.as_nanos());
                self.seen = at.min(self.deadline.unwrap_or(u64::MAX));
                let fencing = self.work.locks.capabilities().fencing;
                call.granted(at, fencing.then(|| guard.token().get()), self.deadline);
                Some(held)
            }
            Ok(None) => {
                call.fail(at);
                None
            }
            Err(error) => {
                // What was withdrawn may have been granted before.
                call.unknown(at);
                let known = [ErrorKind::TimedOut, ErrorKind::Unavailable, ErrorKind::Unknown];
                self.expect("a request", &error, &known);
                None
            }
        }
    }
}

/// Looks for a claim in the queue, and tells the judge when it is there.
async fn queues(work: &Work, name: &str, told: &OnceLock<ClaimId>, place: Option<&Call>) {
    let Some(place) = place else { return };
    loop {
        tokio::time::sleep(LOOK).await;
        let (Some(id), Ok(Some(state))) = (told.get(), work.locks.state(name).await) else { continue };
        if state.claims.iter().any(|claim| claim.id == *id) {
            return place.ok(now());
        }
    }
}

/// The outcome of one future, with another one polled beside it for as long as that takes.
async fn beside<T>(main: impl Future<Output = T>, other: impl Future<Output = ()>) -> T {
    let other = async {
        other.await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        biased;
        outcome = main => outcome,
        () = other => unreachable!("it never ends"),
    }
}
