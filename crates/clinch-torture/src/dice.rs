//! Random choices, the same for the same seed.

use std::time::Duration;

/// A generator of random choices: SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    /// The dice of one of many who each have their own.
    pub(crate) fn of(seed: u64, number: u64) -> Dice {
        let mut dice = Dice(seed ^ number.wrapping_mul(0xd134_2543_de82_ef95));
        dice.next();
        dice
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below another, which must not be 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A time between two, in milliseconds.
    pub(crate) fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from))
    }

    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.index(of.len())]
    }

    /// An index below a length.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("an index")
    }

    /// Puts these in another order.
    pub(crate) fn shuffle<T>(&mut self, of: &mut [T]) {
        for end in (1..of.len()).rev() {
            of.swap(end, self.index(end + 1));
        }
    }
}

/// Deals all cards of a deck before it shuffles them again, so that none is missing for long.
#[derive(Debug)]
pub(crate) struct Deck<T> {
    cards: Vec<T>,
    left: Vec<T>,
}

impl<T: Copy> Deck<T> {
    /// The deck must not be empty.
    pub(crate) fn new(cards: Vec<T>) -> Deck<T> {
        Deck { left: Vec::new(), cards }
    }

    pub(crate) fn deal(&mut self, dice: &mut Dice) -> T {
        if self.left.is_empty() {
            self.left.clone_from(&self.cards);
            dice.shuffle(&mut self.left);
        }
        self.left.pop().expect("a card")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_replays() {
        let rolls = |mut dice: Dice| (0..9).map(|_| dice.below(1000)).collect::<Vec<_>>();
        assert_eq!(rolls(Dice::of(7, 1)), rolls(Dice::of(7, 1)));
        assert_ne!(rolls(Dice::of(7, 1)), rolls(Dice::of(7, 2)));
        assert_ne!(rolls(Dice::of(7, 1)), rolls(Dice::of(8, 1)));
    }

    #[test]
    fn a_deck_deals_every_card() {
        let (mut deck, mut dice) = (Deck::new((0..20).collect()), Dice::of(1, 0));
        let mut dealt: Vec<i32> = (0..20).map(|_| deck.deal(&mut dice)).collect();
        dealt.sort_unstable();
        assert_eq!(dealt, (0..20).collect::<Vec<_>>());
    }
}
