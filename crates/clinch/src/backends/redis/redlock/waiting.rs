//! Waiting for a lock that another holds: told by the servers, not by asking them again and again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::super::inbox::{Inbox, Watched};
use super::round::Round;
use super::store::Quorum;
use crate::claim::Claim;
use crate::clock::Instant;

/// For how long a waiter trusts that changes are told before it asks on its own.
const GUARD: Duration = Duration::from_secs(30);

/// For how long a waiter leaves it to another of the same client to look after the lock. One that is first, but whose
/// caller does not poll it, delays the others by no more.
const TURN: Duration = Duration::from_secs(1);

/// How often a waiter asks where too few servers can tell of changes.
const POLL: Duration = Duration::from_millis(100);

/// From the first change that is told to when the lock is asked for although no quorum has told one: longer than a
/// release takes to reach the other servers.
const SETTLE: Duration = Duration::from_millis(10);

/// Added to the end of a lease: the servers count whole milliseconds.
const ROUNDING: Duration = Duration::from_millis(2);

/// For how long a server has to say that it watches.
const PATIENCE: Duration = Duration::from_millis(50);

impl Quorum {
    /// Waits until it is worth asking for the lock again.
    pub(super) async fn wait_for_change(&self, claim: &Claim) {
        let key = self.key(&claim.name);
        let entry = self.claims.begin(claim.id, self.nodes.len());
        if let Some(again) = entry.take_again() {
            return self.env.sleep_until(again).await;
        }
        let left_to_others = self.env.now() + self.varied(TURN);
        loop {
            let Some(turn) = self.turns.of(&key, claim.id) else { return };
            if turn.first {
                break;
            }
            tokio::select! {
                biased;
                () = turn.woken.notified() => {}
                () = self.env.sleep_until(left_to_others) => {
                    entry.lose_patience();
                    return;
                }
            }
        }
        let Some((mut look, inboxes)) = self.watch(&key).await else { return };
        // A server that cannot tell any more may have had something to tell.
        let gone = |(at, inbox): (usize, Arc<Inbox>)| async move {
            inbox.link.gone().await;
            at
        };
        let mut gone: FuturesUnordered<_> = inboxes.into_iter().map(gone).collect();
        let quorum = self.quorum() as u32;
        loop {
            let changes = self.turns.changes(&key);
            if changes >= quorum {
                return;
            }
            if changes > 0 {
                look = look.min(self.env.now() + self.varied(SETTLE));
            }
            let Some(turn) = self.turns.of(&key, claim.id) else { return };
            tokio::select! {
                biased;
                () = turn.woken.notified() => {}
                Some(at) = gone.next() => self.turns.changed(&key, at),
                () = self.env.sleep_until(look) => return,
            }
        }
    }

    /// Has the servers tell when the key changes. Says when to ask although nobody has told anything, and which servers
    /// tell; `None`: ask now.
    async fn watch(&self, key: &str) -> Option<(Instant, Vec<(usize, Arc<Inbox>)>)> {
        self.turns.begin_to_watch(key);
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, (node, ear)) in self.nodes.iter().zip(&self.ears).enumerate() {
            let (node, ear, key) = (node.clone(), ear.clone(), key.to_owned());
            round.ask(at, PATIENCE, async move { node.watch(&key, &ear).await });
        }
        let quorum = self.quorum();
        let mut ends = Vec::new();
        let (mut absent, mut inboxes) = (0, Vec::new());
        round
            .answers(|at, answer| {
                let Ok((watched, inbox)) = answer else { return false };
                match watched {
                    Watched::Absent => {
                        absent += 1;
                        ends.push(Duration::ZERO);
                        self.turns.changed(key, at);
                    }
                    Watched::There(left) => ends.extend(left),
                    Watched::Never => return false,
                }
                inboxes.push((at, inbox));
                absent >= quorum
            })
            .await;
        if absent >= quorum {
            return None;
        }
        let now = self.env.now();
        ends.sort_unstable();
        let ends = ends.get(quorum - 1).map_or(GUARD, |end| *end + ROUNDING).min(GUARD);
        // Too few can tell of a change: what they do not tell is asked for.
        let most = if inboxes.len() >= quorum { ends } else { ends.min(self.varied(POLL)) };
        Some((now + most, inboxes))
    }

    /// A time of which a random part, up to a half, is left away, so that waiters do not ask together.
    fn varied(&self, time: Duration) -> Duration {
        time.mul_f64(0.5 + 0.5 * self.env.random().jitter())
    }
}
