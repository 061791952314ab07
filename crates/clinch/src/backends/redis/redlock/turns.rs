//! The waiters of this client, lock by lock: the first looks after the lock, and the others wait for their turn.
//!
//! Servers that know nothing of each other have no queue. If all waiters of a program asked whenever the lock came free,
//! they would split the votes among themselves. Waiters of different programs do compete.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::super::inbox::Listener;
use crate::backend::Busy;
use crate::claim::ClaimId;
use crate::sync::lock;

/// All that wait.
#[derive(Default)]
pub(super) struct Turns(Mutex<HashMap<String, Queue>>);

/// Who waits for one lock.
#[derive(Default)]
struct Queue {
    seats: VecDeque<Seat>,
    /// The servers on which the lock's key has changed since the first began to watch, one bit for each.
    changed: u64,
    /// What the first was answered last.
    busy: Busy,
}

#[derive(Clone)]
struct Seat {
    id: ClaimId,
    woken: Arc<Notify>,
}

/// What a waiter has to do.
pub(super) struct Turn {
    /// Whether it is the first.
    pub(super) first: bool,
    /// Rings when that changes, and for the first when a key changes.
    pub(super) woken: Arc<Notify>,
}

impl Turns {
    /// What to answer a claim without asking the servers: another waiter of this client is first. `None`: ask them.
    pub(super) fn must_wait(&self, key: &str, id: ClaimId) -> Option<Busy> {
        let queues = lock(&self.0);
        let queue = queues.get(key)?;
        let ahead = queue.seats.iter().position(|seat| seat.id == id).unwrap_or(queue.seats.len());
        let ahead = u32::try_from(ahead).unwrap_or(u32::MAX);
        (ahead > 0).then(|| Busy { ahead: ahead.saturating_add(1), ..queue.busy.clone() })
    }

    /// Takes a seat, once. Tells the others what the servers said, if they were asked.
    pub(super) fn sit(&self, key: &str, id: ClaimId, told: Option<&Busy>) {
        let mut queues = lock(&self.0);
        let queue = queues.entry(key.to_owned()).or_default();
        if !queue.seats.iter().any(|seat| seat.id == id) {
            queue.seats.push_back(Seat { id, woken: Arc::default() });
        }
        if let Some(busy) = told {
            queue.busy = busy.clone();
        }
    }

    /// Gives a seat back; who is first then is told.
    pub(super) fn rise(&self, key: &str, id: ClaimId) {
        let mut queues = lock(&self.0);
        let Some(queue) = queues.get_mut(key) else { return };
        let Some(at) = queue.seats.iter().position(|seat| seat.id == id) else { return };
        queue.seats.remove(at);
        match queue.seats.front() {
            Some(next) if at == 0 => next.woken.notify_one(),
            Some(_) => {}
            None => drop(queues.remove(key)),
        }
    }

    /// What a waiter has to do; `None` for one that has no seat.
    pub(super) fn of(&self, key: &str, id: ClaimId) -> Option<Turn> {
        let queues = lock(&self.0);
        let seats = &queues.get(key)?.seats;
        let at = seats.iter().position(|seat| seat.id == id)?;
        Some(Turn { first: at == 0, woken: seats.get(at)?.woken.clone() })
    }

    /// Forgets what has changed so far.
    pub(super) fn begin_to_watch(&self, key: &str) {
        if let Some(queue) = lock(&self.0).get_mut(key) {
            queue.changed = 0;
        }
    }

    /// On which servers the key has changed since, one bit for each.
    pub(super) fn changes(&self, key: &str) -> u64 {
        lock(&self.0).get(key).map_or(0, |queue| queue.changed)
    }

    /// Notes that the key has changed, or is not there, on a server.
    pub(super) fn changed(&self, key: &str, node: usize) {
        if let Some(queue) = lock(&self.0).get_mut(key) {
            queue.tell(node);
        }
    }
}

impl Queue {
    fn tell(&mut self, node: usize) {
        self.changed |= 1 << (node % 64);
        if let Some(first) = self.seats.front() {
            first.woken.notify_one();
        }
    }
}

/// What listens to one server.
pub(super) struct Ear {
    pub(super) turns: Arc<Turns>,
    /// Which server.
    pub(super) node: usize,
}

impl Listener for Ear {
    fn message(&self, _text: &str) {}

    fn changed(&self, key: &str) {
        self.turns.changed(key, self.node);
    }

    fn all_changed(&self) {
        lock(&self.turns.0).values_mut().for_each(|queue| queue.tell(self.node));
    }

    fn is_idle(&self) -> bool {
        lock(&self.turns.0).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_looks_after_the_lock_and_the_next_follows() {
        let turns = Arc::new(Turns::default());
        let [a, b, c] = [1, 2, 3].map(ClaimId::from_bits);
        assert!(turns.must_wait("k", a).is_none());
        turns.sit("k", a, Some(&Busy { ahead: 1, ..Busy::default() }));
        assert!(turns.must_wait("k", a).is_none(), "the first asks again");
        for id in [b, c, b] {
            assert_eq!(turns.must_wait("k", id).map(|busy| busy.ahead), Some(if id == c { 3 } else { 2 }));
            turns.sit("k", id, None);
        }
        assert!(turns.of("k", a).unwrap().first && !turns.of("k", b).unwrap().first);
        let ear = Ear { turns: turns.clone(), node: 2 };
        ear.changed("other");
        ear.changed("k");
        ear.changed("k");
        assert_eq!(turns.changes("k"), 0b100);
        turns.begin_to_watch("k");
        assert_eq!(turns.changes("k"), 0);
        ear.all_changed();
        assert_eq!(turns.changes("k"), 0b100);
        turns.rise("k", b);
        assert!(turns.of("k", b).is_none());
        turns.rise("k", a);
        assert!(turns.of("k", c).unwrap().first && turns.must_wait("k", c).is_none());
        turns.rise("k", c);
        assert!(ear.is_idle());
    }
}
