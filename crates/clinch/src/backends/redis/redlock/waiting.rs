//! Waiting for a lock that another holds: told by the servers, not by asking them again and again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::super::inbox::{Inbox, Watched};
use super::super::waiting::{POLL, ROUNDING};
use super::claims::Entry;
use super::round::Round;
use super::seats::News;
use super::store::{ASK_AGAIN, Quorum};
use super::timing;
use super::turns::{Duty, TURN};
use crate::backends::times::GUARD;
use crate::claim::Claim;
use crate::clock::Instant;

/// For how long a server has to say that it watches, at least.
const PATIENCE: Duration = Duration::from_millis(50);

/// What the servers said of a key that is waited for.
struct Watch {
    begun: Instant,
    /// When the key is gone from each server, if nothing changes before; `None`: the server cannot tell of changes.
    ends: Vec<Option<Instant>>,
    /// When a server that cannot tell is asked.
    poll: Instant,
    /// The servers that had no vote to give when they were asked last, as one bit each. Where the key is not there, they
    /// most likely have none yet, and are asked no more often than others that do not vote.
    mute: u64,
    inboxes: Vec<(usize, Arc<Inbox>)>,
}

impl Watch {
    /// When it is worth asking: as soon as so many servers may have a free vote. One vote that is free, while the others are
    /// taken, is nothing to ask for again and again. `changed`: those that have told a change, as one bit each.
    fn look(&self, changed: u64, quorum: usize) -> Instant {
        let mut free: Vec<Instant> = self
            .ends
            .iter()
            .enumerate()
            .map(|(at, end)| {
                let free = if changed >> at & 1 == 1 { self.begun } else { end.unwrap_or(self.poll) };
                let earliest = if self.mute >> at & 1 == 1 { self.begun + ASK_AGAIN } else { self.begun };
                free.max(earliest)
            })
            .collect();
        free.sort_unstable();
        let guard = self.begun + GUARD;
        free.get(quorum - 1).map_or(guard, |free| (*free).min(guard))
    }
}

impl Quorum {
    /// Waits until it is worth asking for the lock again.
    pub(super) async fn wait_for_change(&self, claim: &Claim) {
        let key = self.key(&claim.name);
        let entry = self.entry(claim.id);
        let mut latest = None;
        if let Some((again, watches)) = entry.take_again() {
            self.turns.rests(&key, claim.id, again);
            self.env.sleep_until(again).await;
            if !watches {
                return;
            }
            // No change would tell who has won meanwhile.
            latest = Some(self.env.now() + ASK_AGAIN);
        }
        if !self.wait_for_turn(&key, claim, &entry).await {
            return;
        }
        let Some(mut watch) = self.watch(&key, claim.ttl, entry.mute()).await else { return };
        // A server that cannot tell any more may have had something to tell.
        let gone = |(at, inbox): (usize, Arc<Inbox>)| async move {
            inbox.link.gone().await;
            at
        };
        let mut gone: FuturesUnordered<_> = watch.inboxes.drain(..).map(gone).collect();
        loop {
            let look = watch.look(self.turns.changes(&key), self.quorum());
            let look = latest.map_or(look, |latest| look.min(latest));
            if look <= self.env.now() {
                return;
            }
            let Some(turn) = self.turns.of(&key, claim.id).filter(|turn| turn.duty != Duty::Step) else {
                return;
            };
            self.turns.rests(&key, claim.id, look);
            tokio::select! {
                biased;
                () = turn.woken.notified() => {}
                Some(at) = gone.next() => self.turns.changed(&key, at),
                () = self.env.sleep_until(look) => return,
            }
        }
    }

    /// Waits for as long as there is nothing to do for this waiter. Whether it is to watch the lock; otherwise, to take a step.
    async fn wait_for_turn(&self, key: &str, claim: &Claim, entry: &Entry) -> bool {
        let mut end = self.env.now() + self.varied(TURN);
        let mut is_over = false;
        loop {
            let Some(turn) = self.turns.of(key, claim.id) else { return false };
            match turn.duty {
                Duty::Watch => return true,
                Duty::Step => return false,
                Duty::Stay if !is_over => {}
                Duty::Stay if turn.first => return true,
                Duty::Stay if turn.neglected => {
                    entry.lose_patience();
                    return false;
                }
                // Its step asks no server.
                Duty::Stay if turn.news != News::None => return false,
                Duty::Stay => {
                    // It lives on.
                    self.entry(claim.id);
                    end = self.env.now() + self.varied(TURN);
                }
            }
            is_over = tokio::select! {
                biased;
                () = turn.woken.notified() => false,
                () = self.env.sleep_until(end) => true,
            };
        }
    }

    /// Has the servers tell when the key changes. `None`: ask now.
    async fn watch(&self, key: &str, ttl: Duration, mute: u64) -> Option<Watch> {
        self.turns.begin_to_watch(key);
        let quorum = self.quorum();
        let mut round = Round::new(&self.env, self.nodes.len()).lenient(timing::silence(ttl), quorum);
        for (at, (node, ear)) in self.nodes.iter().zip(&self.ears).enumerate() {
            let (node, ear, key) = (node.clone(), ear.clone(), key.to_owned());
            let patience = node.patience(ttl).max(PATIENCE);
            round.ask(at, patience, async move { node.watch(&key, &ear).await });
        }
        let mut ends = vec![None; self.nodes.len()];
        let (mut absent, mut inboxes) = (0, Vec::new());
        round
            .answers(|at, answer| {
                let Ok((watched, inbox)) = answer else { return false };
                let left = match watched {
                    Watched::Absent => {
                        absent += usize::from(mute >> at & 1 == 0);
                        self.turns.changed(key, at);
                        Duration::ZERO
                    }
                    Watched::There(left) => left.map_or(GUARD, |left| left + ROUNDING),
                    Watched::Never => return false,
                };
                if let Some(end) = ends.get_mut(at) {
                    *end = Some(self.env.now() + left);
                }
                inboxes.push((at, inbox));
                absent >= quorum
            })
            .await;
        if absent >= quorum {
            return None;
        }
        let begun = self.env.now();
        Some(Watch { begun, ends, poll: begun + self.varied(POLL), mute, inboxes })
    }

    /// A time of which a random part, up to a half, is left away, so that waiters do not ask together.
    fn varied(&self, time: Duration) -> Duration {
        time.mul_f64(0.5 + 0.5 * self.env.random().jitter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With these leases (s), and these servers that have told a change: after how long it is worth asking.
    fn look(left: &[Option<u64>], changed: u64) -> Duration {
        look_at(left, changed, 0)
    }

    /// The same, where these had no vote to give.
    fn look_at(left: &[Option<u64>], changed: u64, mute: u64) -> Duration {
        let begun = Instant::from_nanos(1_000_000_000);
        let watch = Watch {
            begun,
            ends: left.iter().map(|left| left.map(|left| begun + Duration::from_secs(left))).collect(),
            poll: begun + POLL,
            mute,
            inboxes: Vec::new(),
        };
        watch.look(changed, left.len() / 2 + 1).since(begun)
    }

    #[test]
    fn it_is_worth_asking_when_a_quorum_may_be_free() {
        let seconds = Duration::from_secs;
        let held = [Some(9), Some(8), Some(7)];
        assert_eq!(look(&held, 0), seconds(8));
        assert_eq!(look(&held, 0b001), seconds(7), "the end of one more is a quorum");
        assert_eq!(look(&held, 0b101), Duration::ZERO);
        assert_eq!(look(&[Some(0), Some(9), Some(9)], 0), seconds(9), "one vote that was free before");
        assert_eq!(look(&[Some(99), Some(99), Some(99)], 0), GUARD);
    }

    #[test]
    fn who_had_no_vote_to_give_is_not_asked_at_once() {
        let seconds = Duration::from_secs;
        let left = [Some(0), Some(9), Some(0)];
        assert_eq!(look_at(&left, 0b101, 0b001), ASK_AGAIN);
        assert_eq!(look_at(&left, 0b111, 0b001), Duration::ZERO, "two others are free");
        assert_eq!(look_at(&[Some(8), Some(9), Some(0)], 0, 0b001), seconds(8));
    }

    #[test]
    fn what_too_few_can_tell_is_asked_for() {
        let seconds = Duration::from_secs;
        assert_eq!(look(&[None, None, Some(9)], 0), POLL);
        assert_eq!(look(&[None, Some(9), Some(8)], 0), seconds(8), "the other two tell");
        assert_eq!(look(&[None, Some(9), Some(8)], 0b010), POLL, "unless the silent one is free, too");
        assert_eq!(look(&[None, None, Some(9), Some(8), Some(7)], 0), seconds(7));
    }
}
