//! The fencing token: a plain value that rises with every grant of one lock name.

use std::fmt;

/// A fencing token: strictly rising over the grants of one lock name.
///
/// Pass it to the store that the lock guards, and let that store refuse a write whose token is older than one that it
/// has already seen. That is the one protection that still holds when a holder is paused past its deadline between its
/// last check and its write (Kleppmann, "How to do distributed locking", 2016).
///
/// Always at most 2^53, so that any language can carry it in a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(u64);

impl Token {
    /// The largest token: 2^53, the last integer that every IEEE double holds exactly.
    pub const MAX: Token = Token(1 << 53);

    /// The token with this value, or `None` above [`Token::MAX`].
    pub const fn new(value: u64) -> Option<Token> {
        if value <= Token::MAX.0 { Some(Token(value)) } else { None }
    }

    /// The plain number, to store beside the data that the lock guards.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_fits_a_double() {
        assert_eq!(Token::new(1 << 53).map(Token::get), Some(1 << 53));
        assert_eq!(Token::new((1 << 53) + 1), None);
    }
}
