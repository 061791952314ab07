//! A lease that is left to itself, tended and freed from outside.

use clinch::{Detached, ErrorKind, Guard, Released};

use super::{LOOK, Life};
use crate::cells::Step;
use crate::say::now;

/// What such a lease surely lasts of its TTL: a tenth less than that, and the drift, and some for a process that is slow.
const SURELY: f64 = 0.7;

impl Life<'_> {
    /// Leaves a held lease to itself, and frees it after a while.
    pub(super) async fn detach(&mut self, guard: Guard, renewed: bool) {
        if !self.look(&guard).await {
            return drop(guard);
        }
        let mut left_at = self.seen;
        match self.step(Step::Detach, guard.detach()).await {
            Ok(detached) => {
                if renewed && self.pause(left_at).await {
                    let at = now();
                    let (locks, name, ttl) = (self.locks.clone(), self.name.clone(), self.turn.ttl);
                    match self.step(Step::Tend, locks.renew_detached(&name, detached.claim, ttl)).await {
                        Ok(()) => left_at = at,
                        Err(error) => {
                            let known = [ErrorKind::Lost, ErrorKind::Unavailable, ErrorKind::Unknown];
                            self.expect("a renewal of a detached lease", &error, &known);
                        }
                    }
                }
                self.pause(left_at).await;
                self.end_detached(&detached, left_at).await;
            }
            Err(error) => {
                self.claim.release(self.seen);
                let known = [ErrorKind::Lost, ErrorKind::Unavailable, ErrorKind::Unknown];
                self.expect("a detachment", &error, &known);
            }
        }
    }

    /// Until when a lease surely lasts that was left to itself, or renewed, at a moment.
    fn lasts_until(&self, left_at: u64) -> u64 {
        let surely = self.turn.ttl.mul_f64(SURELY);
        left_at.saturating_add(u64::try_from(surely.as_nanos()).unwrap_or(0))
    }

    /// Waits for a part of a lease that was left to itself; whether it surely lasts.
    async fn pause(&mut self, left_at: u64) -> bool {
        let until = self.lasts_until(left_at);
        self.claim.renewed_since(self.seen, now().max(self.seen), Some(until));
        let time = (self.turn.ttl / 4).min(self.turn.hold.max(LOOK));
        tokio::time::sleep(time).await;
        let at = now();
        let lasts = at < until;
        self.seen = if lasts { at } else { self.seen };
        lasts
    }

    async fn end_detached(&mut self, detached: &Detached, left_at: u64) {
        let (at, until) = (now(), self.lasts_until(left_at));
        let lasts = at < until;
        if !lasts {
            // Nobody tells whoever has left a lease to itself.
            self.claim.lost_since(self.seen.min(until), at);
        }
        let call = self.claim.release(at);
        let (locks, name) = (self.locks.clone(), self.name.clone());
        let freed = self.step(Step::Tend, locks.release_detached(&name, detached.claim)).await;
        match freed {
            Ok(Released::Released) if lasts => call.ok(now()),
            // It may have been taken away, of which nobody was told.
            Ok(_) => call.unknown(now()),
            Err(error) => {
                call.unknown(now());
                self.expect("a release from outside", &error, &[ErrorKind::Unavailable, ErrorKind::Unknown]);
            }
        }
    }
}
