//! Jobs inside jobs: what the outer ones hold stands in the environment, so that the inner ones need not wait for it.
//!
//! `CLINCH_HELD` is a list of `name,claim,door`, the name percent-encoded, separated by blanks. It is a hint only, and says nothing of
//! stores, which have many spellings: a claim's id is nowhere else, so a store that says it is granted is the outer job's store.

use clinch::backend::ClaimState;
use clinch::{ClaimId, Mode};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::args::Share;

/// The environment variable.
pub(crate) const HELD: &str = "CLINCH_HELD";

/// An outer job that may hold a lock.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outer {
    pub(crate) claim: ClaimId,
    /// Where runs inside it are let in.
    pub(crate) door: String,
}

/// The outer jobs that may hold this lock, and whether one of them has its very name. The names of others end like it or are what it
/// ends with, as names do whose stores have another prefix.
pub(crate) fn find(held: &str, name: &str) -> (Vec<Outer>, bool) {
    let mut outer = Vec::new();
    let mut same = false;
    for entry in held.split(' ') {
        let mut fields = entry.split(',');
        let (Some(of), Some(claim), Some(door)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let Ok(of) = percent_decode_str(of).decode_utf8() else { continue };
        if let Ok(claim) = claim.parse()
            && (of.ends_with(name) || name.ends_with(&*of))
        {
            outer.push(Outer { claim, door: door.to_owned() });
            same |= of == name;
        }
    }
    (outer, same)
}

/// The list with one more.
pub(crate) fn with(held: &str, name: &str, claim: ClaimId, door: &str) -> String {
    let entry = format!("{},{claim},{door}", utf8_percent_encode(name, NON_ALPHANUMERIC));
    if held.is_empty() { entry } else { format!("{held} {entry}") }
}

/// Whether what the outer job holds includes what the inner one asks for.
pub(crate) fn covers(outer: &ClaimState, asked: &Share) -> bool {
    match outer.mode {
        Mode::Exclusive => true,
        Mode::Shared => asked.shared,
        Mode::Permits { count, capacity } => {
            asked.of == Some(capacity.get()) && asked.permits.is_some_and(|permits| permits <= count.get())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outer(id: u128, door: &str) -> Outer {
        Outer { claim: ClaimId::from_bits(id), door: door.to_owned() }
    }

    #[test]
    fn entries_read_back_whatever_they_hold() {
        let (one, two) = (ClaimId::from_bits(1), ClaimId::from_bits(2));
        let held = with(&with("", "n,1 %", one, "a"), "é", two, "b");
        assert_eq!(find(&held, "n,1 %"), (vec![outer(1, "a")], true));
        assert_eq!(find(&held, "é"), (vec![outer(2, "b")], true));
        assert_eq!(find(&held, "1"), (vec![], false));
    }

    #[test]
    fn what_may_be_the_same_under_another_prefix_is_asked_for() {
        let one = ClaimId::from_bits(1);
        assert_eq!(find(&with("", "jobs:a", one, "d"), "a"), (vec![outer(1, "d")], false));
        assert_eq!(find(&with("", "a", one, "d"), "jobs:a"), (vec![outer(1, "d")], false));
    }

    #[test]
    fn garbage_holds_nothing() {
        for garbage in ["", " ", ",", "a,b", "a,b,c", "%ff,00000000000000000000000000000001,d", "b"] {
            assert_eq!(find(garbage, "a"), (vec![], false), "{garbage}");
        }
    }
}
