//! Waiting in the queue of a lock: for a message, the end of what stands in the way, or a change that a foreign client made.

use std::time::Duration;

use super::claims::Note;
use super::dating::not_after;
use super::inbox::Watched;
use super::keys::slot_of;
use super::reply::Place;
use super::store::Store;
use crate::backend::{Grant, TAKE_WITHIN, Wake};
use crate::backends::times::GUARD;
use crate::claim::Claim;
use crate::clock::Instant;
use crate::error::{ErrorKind, Result};

/// The shortest time after which a waiter asks again: whatever is amiss with what it waits for, it does not ask all the time.
const FLOOR: Duration = Duration::from_millis(50);

/// How often the next in line looks at a lock whose holder tells nobody when it leaves: a foreign client, on a server
/// that cannot tell either. Also how often anybody looks where messages are not allowed, or come from too few servers.
pub(super) const POLL: Duration = Duration::from_millis(100);

/// For what part of its short lease a pushed grant is as good as new. Where the way to the server is longer than that, its first
/// renewal, which may have to connect first, might come too late.
const NEW_FOR: u32 = 8;

/// Added to the end of a lease: the server counts whole milliseconds.
pub(super) const ROUNDING: Duration = Duration::from_millis(2);

impl Store {
    /// When a queued claim should look again if nobody tells it anything.
    pub(super) fn look(&self, place: &Place, now: Instant) -> Instant {
        let ends = place.look.map_or(GUARD, |look| look + ROUNDING);
        now + (ends + TAKE_WITHIN * place.waiters).clamp(FLOOR, GUARD)
    }

    /// Waits until a queued claim is granted, or it is worth asking.
    pub(super) async fn wait_for_grant(&self, claim: &Claim) -> Result<Wake> {
        let Some((asked, woken)) = self.claims.waiting(claim.id) else { return Ok(Wake::Step) };
        let slot = slot_of(&asked.key);
        let channel = self.channel(slot);
        let poll = || POLL.mul_f64(0.5 + self.env().random().jitter());
        let mut look = asked.look;
        let inbox = match self.tells {
            true => match self.route.inbox(slot, &channel, self.sharded).await {
                Ok(inbox) => Some(inbox),
                // Who may not listen asks, and so does everybody where nobody can.
                Err(error) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::Unsupported) => None,
                Err(error) => return Err(error),
            },
            false => None,
        };
        if let Some(inbox) = &inbox {
            if !self.claims.listening(claim.id, inbox.id) {
                // Nobody listened when the place was taken; what was said since then only the state tells.
                return Ok(Wake::Step);
            }
            if asked.foreign {
                match inbox.watch(&asked.key).await? {
                    Watched::There(_) => {}
                    Watched::Absent => return Ok(Wake::Step),
                    Watched::Never => look = look.min(self.env().now() + poll()),
                }
            }
        } else {
            look = look.min(self.env().now() + poll());
        }
        loop {
            match self.claims.take_note(claim.id) {
                Some(Note::Granted { token, at, lease, heard, inbox: told_by }) => {
                    let now = self.env().now();
                    let from = not_after(asked.sent, asked.server, at, heard, self.env().drift());
                    // A grant from before the answer that told of the place was over by then, and its message is late.
                    let over = at < asked.server;
                    // Another server may have the address by now, where another holds the lock.
                    let ours = inbox.as_ref().filter(|inbox| inbox.id == told_by);
                    let counts = ours.is_some_and(|inbox| self.route.tells_of_steps(slot, inbox));
                    // What may be old already is asked for, which is as good as new.
                    return Ok(match from.filter(|from| now.since(*from) <= lease / NEW_FOR) {
                        _ if over || !counts || self.settings().durability.asks_for_more() => Wake::Step,
                        Some(from) => {
                            self.claims.settled(claim.id);
                            self.claims.held.hold(claim, now);
                            Wake::Granted(Grant { token, ttl: Some(lease), from: Some(from) })
                        }
                        None => Wake::Step,
                    });
                }
                Some(Note::Next { at, time, heard }) => {
                    let began = not_after(asked.sent, asked.server, at, heard, self.env().drift());
                    look = began.unwrap_or(heard) + time + ROUNDING;
                }
                Some(Note::Ask) => return Ok(Wake::Step),
                None => {}
            }
            let gone = async {
                match &inbox {
                    Some(inbox) => inbox.link.gone().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = woken.notified() => {}
                () = gone => return Ok(Wake::Step),
                () = self.env().sleep_until(look) => return Ok(Wake::Step),
            }
        }
    }
}
