//! Who of this client waits for one lock, in order, and what each has heard of it.
//!
//! The servers are asked by one at a time; what they say to that one is the word that the others hear.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::Notify;

use crate::backend::Busy;
use crate::claim::{ByClaim, ClaimId};

/// The waiters for one lock, the first before the others.
#[derive(Default)]
pub(super) struct Seats {
    /// By number.
    seats: VecDeque<Seat>,
    numbers: ByClaim<u64>,
    /// How many seats were taken.
    taken: u64,
    word: Word,
}

/// What the servers said last.
#[derive(Default)]
struct Word {
    busy: Busy,
    /// How many there were before.
    number: u64,
}

pub(super) struct Seat {
    id: ClaimId,
    number: u64,
    /// Rings when there is something to do for this waiter.
    pub(super) woken: Arc<Notify>,
    /// The number of the word that it has heard last.
    heard: u64,
    /// Whether that was that nobody could say who has the lock.
    doubts: bool,
}

impl Seat {
    fn hear(&mut self, word: &Word) {
        (self.heard, self.doubts) = (word.number, word.busy.undecided);
    }

    /// Whether it is to hear a word before it waits on. Who follows hears most of them once a turn; who has become the first
    /// would wait for the next with the one that it knows.
    fn is_due(&self, word: &Word, first: bool) -> bool {
        !word.busy.undecided && (self.doubts || first && self.heard != word.number)
    }
}

/// What there is to hear for a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    None,
    /// Something, for once a turn.
    Some,
    /// Something that must not wait.
    Due,
}

impl Seats {
    pub(super) fn is_empty(&self) -> bool {
        self.seats.is_empty()
    }

    pub(super) fn is_first(&self, id: ClaimId) -> bool {
        self.seats.front().is_some_and(|first| first.id == id)
    }

    /// Whether the last word was that nobody could say who has the lock.
    pub(super) fn are_in_doubt(&self) -> bool {
        self.word.busy.undecided
    }

    /// Has the first see what there is to do.
    pub(super) fn call(&self) {
        if let Some(first) = self.seats.front() {
            first.woken.notify_one();
        }
    }

    /// A waiter's seat, how many are before it, and what there is to hear for it.
    pub(super) fn find(&self, id: ClaimId) -> Option<(usize, &Seat, News)> {
        let at = self.position(id)?;
        let seat = self.seats.get(at)?;
        let news = match () {
            () if seat.is_due(&self.word, at == 0) => News::Due,
            () if seat.heard != self.word.number => News::Some,
            () => News::None,
        };
        Some((at, seat, news))
    }

    fn position(&self, id: ClaimId) -> Option<usize> {
        let number = self.numbers.get(&id)?;
        self.seats.binary_search_by_key(number, |seat| seat.number).ok()
    }

    /// Gives a waiter's seat, behind all others if it had none, and how many are before it.
    fn take(&mut self, id: ClaimId) -> Option<(usize, &mut Seat, &Word)> {
        let at = self.position(id).unwrap_or(self.seats.len());
        if at == self.seats.len() {
            let number = self.taken;
            self.taken += 1;
            self.numbers.insert(id, number);
            self.seats.push_back(Seat { id, number, woken: Arc::default(), heard: 0, doubts: false });
        }
        self.seats.get_mut(at).map(|seat| (at, seat, &self.word))
    }

    /// Seats a waiter, and tells it the last word. `None`: it is the first and has heard that.
    pub(super) fn follow(&mut self, id: ClaimId) -> Option<Busy> {
        let (at, seat, word) = self.take(id)?;
        if at == 0 && !seat.is_due(word, true) {
            return None;
        }
        seat.hear(word);
        let ahead = u32::try_from(at).unwrap_or(u32::MAX).saturating_add(1);
        Some(Busy { ahead, ..word.busy.clone() })
    }

    /// Seats a waiter to which the servers have said this.
    pub(super) fn sit(&mut self, id: ClaimId, told: Busy) {
        self.take(id);
        self.say(told, id);
    }

    /// From now on this is the word, which one has heard. Those who were told that nobody could say hear it at once.
    pub(super) fn say(&mut self, busy: Busy, to: ClaimId) {
        self.word = Word { busy, number: self.word.number + 1 };
        for seat in &mut self.seats {
            if seat.id == to {
                seat.hear(&self.word);
            } else if seat.is_due(&self.word, false) {
                seat.woken.notify_one();
            }
        }
    }

    /// Has the first ask: the last word is over.
    pub(super) fn forget(&mut self) {
        if let Some(first) = self.seats.front_mut() {
            first.hear(&self.word);
        }
    }

    /// Gives a seat back: how many were before it.
    pub(super) fn rise(&mut self, id: ClaimId) -> Option<usize> {
        let at = self.position(id)?;
        self.seats.remove(at);
        self.numbers.remove(&id);
        Some(at)
    }
}
