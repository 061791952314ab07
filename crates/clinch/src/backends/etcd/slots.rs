//! The keys of a client's claims: which of them are used, and which can be given to another claim.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::claims::Claims;
use super::keys;
use super::session::Session;
use crate::clock::Instant;
use crate::error::{ErrorKind, Result};

/// How long a key is let alone under which something stands of which nobody knows when it goes. Whoever meets that once more takes
/// another.
pub(super) const STANDS_FOR: Duration = Duration::from_secs(60);

/// The keys of all claims, and those that something on its way may still delete.
#[derive(Default)]
pub(super) struct Slots {
    slots: HashMap<Arc<[u8]>, Slot>,
    /// Those that are spent, by the lease that they are named after, until that is over.
    spent: HashMap<i64, Vec<Arc<[u8]>>>,
    /// Those under which something was left to stand, by when they are worth another try.
    parked: BTreeSet<(Instant, Arc<[u8]>)>,
    /// By what keys of one lock on one lease begin with, where the first of them is not enough.
    numbers: HashMap<Vec<u8>, Numbers>,
}

/// Whether a key can be given to another claim.
struct Slot {
    /// Whose lease it is named after.
    session: Arc<Session>,
    is_used: bool,
    /// Deletes of it that are under way. There may be two: a guard's drop does not wait for the end of `max_hold`.
    deletes: u32,
    /// A delete of it was never answered: it may come at any time.
    is_spent: bool,
    /// Something was left to stand there, which the next claim would meet.
    is_parked: bool,
}

impl Slot {
    /// Whether nothing can delete it any more behind the back of its next owner. No key is named after a lease that is over.
    fn is_free(&self) -> bool {
        #[cfg(test)]
        super::claims::looks::count();
        let is_let_alone = self.is_spent || self.is_parked;
        !self.is_used && self.deletes == 0 && (!is_let_alone || self.session.is_over())
    }
}

/// Which numbers are taken, so that the least that is free need not be looked for.
struct Numbers {
    /// All from this on are free,
    next: usize,
    /// and of those before it, these.
    free: BTreeSet<usize>,
}

impl Slots {
    /// Takes a key on this lease that no claim has, and that nothing may still delete: the first of them.
    pub(super) fn take(&mut self, queue: &[u8], session: &Arc<Session>, now: Instant) -> Arc<[u8]> {
        while self.parked.first().is_some_and(|(until, _)| *until <= now) {
            let Some((_, key)) = self.parked.pop_first() else { break };
            self.slots.get_mut(&key).into_iter().for_each(|slot| slot.is_parked = false);
            self.forget(&key);
        }
        let key = self.free_key(keys::claims(queue, session.lease));
        let slot =
            Slot { session: session.clone(), is_used: true, deletes: 0, is_spent: false, is_parked: false };
        self.slots.insert(key.clone(), slot);
        key
    }

    /// The first key that is free of those that begin like that.
    fn free_key(&mut self, start: Vec<u8>) -> Arc<[u8]> {
        let numbers = match self.numbers.get_mut(&start) {
            Some(numbers) => numbers,
            None => {
                let first: Arc<[u8]> = keys::claim(start.clone(), 0).into();
                if !self.slots.contains_key(&first) {
                    return first;
                }
                self.numbers.entry(start.clone()).or_insert(Numbers { next: 1, free: BTreeSet::new() })
            }
        };
        let number = numbers.free.pop_first().unwrap_or_else(|| {
            numbers.next += 1;
            numbers.next - 1
        });
        keys::claim(start, number).into()
    }

    /// Whether no delete of a key is on its way.
    pub(super) fn is_settled(&self, key: &[u8]) -> bool {
        self.slots.get(key).is_none_or(|slot| slot.deletes == 0 && !slot.is_spent)
    }

    /// Notes that a claim does not need its key any more.
    pub(super) fn leave(&mut self, key: &[u8]) {
        if let Some(slot) = self.slots.get_mut(key) {
            slot.is_used = false;
        }
        self.forget(key);
    }

    /// Notes that a claim does not need its key any more, but that something stands under it, perhaps until then.
    pub(super) fn park(&mut self, key: &[u8], until: Instant) {
        if let Some(slot) = self.slots.get_mut(key).filter(|slot| !slot.is_parked) {
            slot.is_parked = true;
            self.parked.insert((until, key.into()));
        }
        self.leave(key);
    }

    /// Notes that a delete of a key goes out.
    pub(super) fn delete(&mut self, key: &[u8]) -> Option<()> {
        self.slots.get_mut(key)?.deletes += 1;
        Some(())
    }

    /// Notes that a delete of a key was answered, or will never be.
    pub(super) fn deleted(&mut self, key: &[u8], is_answered: bool) {
        if let Some(slot) = self.slots.get_mut(key) {
            slot.deletes = slot.deletes.saturating_sub(1);
        }
        if !is_answered {
            self.set_spent(key);
        }
        self.forget(key);
    }

    /// Forgets the keys that are free for good because their lease is over.
    pub(super) fn forget_spent(&mut self, lease: i64) {
        let spent = self.spent.remove(&lease).unwrap_or_default();
        spent.into_iter().for_each(|key| self.forget(&key));
    }

    /// Notes that a key may be deleted at any time, as long as its lease lives.
    fn set_spent(&mut self, key: &[u8]) {
        let Some(slot) = self.slots.get_mut(key).filter(|slot| !slot.is_spent) else { return };
        slot.is_spent = true;
        // Nobody would take it out any more.
        if !slot.session.is_over() {
            self.spent.entry(slot.session.lease).or_default().push(key.into());
        }
    }

    /// Forgets a key that is free to be used again.
    fn forget(&mut self, key: &[u8]) {
        if !self.slots.get(key).is_some_and(Slot::is_free) {
            return;
        }
        self.slots.remove(key);
        let Some((start, number)) = keys::slot(key) else { return };
        let Some(numbers) = self.numbers.get_mut(start) else { return };
        numbers.free.insert(number);
        if numbers.free.len() == numbers.next {
            self.numbers.remove(start);
        }
    }
}

/// A delete of a key whose answer has not come. Dropped before it does, or after it failed to: it may still reach the server,
/// and the key is never used again on that lease.
pub(super) struct Deleting {
    claims: Arc<Claims>,
    key: Arc<[u8]>,
    is_answered: bool,
}

impl Deleting {
    pub(super) fn new(claims: Arc<Claims>, key: Arc<[u8]>) -> Deleting {
        Deleting { claims, key, is_answered: false }
    }

    pub(super) fn key(&self) -> &[u8] {
        &self.key
    }

    /// The answer came, or it was surely not applied.
    pub(super) fn answered(mut self) {
        self.is_answered = true;
    }

    /// Takes in what came of it.
    pub(super) fn came_to<T>(self, answer: &Result<T>) {
        if !matches!(answer, Err(error) if error.kind() == ErrorKind::Unknown) {
            self.answered();
        }
    }
}

impl Drop for Deleting {
    fn drop(&mut self) {
        self.claims.key_deleted(&self.key, self.is_answered);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant::from_nanos(0);

    #[test]
    fn the_first_free_key_is_taken_and_none_that_may_still_be_deleted() {
        let session = Session::of_lease(0x1f, Duration::from_secs(9), false);
        let mut slots = Slots::default();
        let keys: Vec<_> = (0..4).map(|_| slots.take(b"q/", &session, NOW)).collect();
        assert_eq!(&keys[3][..], b"q/1f-3");
        assert_eq!(&slots.take(b"p/", &session, NOW)[..], b"p/1f-0");
        slots.leave(&keys[2]);
        slots.delete(&keys[1]).unwrap();
        slots.leave(&keys[1]);
        assert_eq!(slots.take(b"q/", &session, NOW), keys[2], "a delete of the one before is on its way");
        slots.deleted(&keys[1], true);
        assert_eq!(slots.take(b"q/", &session, NOW), keys[1]);
        slots.delete(&keys[0]).unwrap();
        slots.leave(&keys[0]);
        slots.deleted(&keys[0], false);
        assert_eq!(&slots.take(b"q/", &session, NOW)[..], b"q/1f-4", "the first may be deleted at any time");
    }

    #[test]
    fn nothing_is_kept_of_keys_that_nobody_has() {
        let session = Session::of_lease(0x1f, Duration::from_secs(9), false);
        let mut slots = Slots::default();
        let keys: Vec<_> = (0..9).map(|_| slots.take(b"q/", &session, NOW)).collect();
        keys.iter().for_each(|key| slots.leave(key));
        assert!(slots.slots.is_empty() && slots.numbers.is_empty());
    }

    #[test]
    fn nothing_is_kept_of_keys_that_may_be_deleted_when_their_lease_is_over() {
        let session = Session::of_lease(0x1f, Duration::from_secs(9), false);
        let mut slots = Slots::default();
        let keys: Vec<_> = (0..4).map(|_| slots.take(b"q/", &session, NOW)).collect();
        keys[1..3].iter().for_each(|key| slots.delete(key).unwrap());
        slots.park(&keys[0], NOW);
        slots.leave(&keys[1]);
        slots.deleted(&keys[1], false);
        session.run_out();
        slots.forget_spent(0x1f);
        assert_eq!(slots.slots.len(), 3, "one is used, one is being deleted, and one was left to stand");
        slots.leave(&keys[2]);
        slots.deleted(&keys[2], false);
        slots.park(&keys[3], NOW);
        // Whoever takes the next, of whichever lease, forgets the rest.
        let other = Session::of_lease(0x2f, Duration::from_secs(9), false);
        let key = slots.take(b"q/", &other, NOW);
        slots.leave(&key);
        assert!(slots.parked.is_empty());
        assert!(slots.slots.is_empty() && slots.spent.is_empty() && slots.numbers.is_empty());
    }

    #[test]
    fn a_key_under_which_something_stands_is_let_alone_and_then_used_again() {
        let session = Session::of_lease(0x1f, Duration::from_secs(9), false);
        let (mut slots, until) = (Slots::default(), NOW + STANDS_FOR);
        let first = slots.take(b"q/", &session, NOW);
        slots.park(&first, until);
        slots.park(&first, until + STANDS_FOR);
        let second = slots.take(b"q/", &session, NOW);
        assert_eq!(&second[..], b"q/1f-1");
        slots.leave(&second);
        assert_eq!(slots.take(b"q/", &session, NOW), second);
        assert_eq!(slots.take(b"q/", &session, until), first, "a turn for each key, for ever");
    }
}
