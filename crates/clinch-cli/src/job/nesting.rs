//! Jobs inside jobs: what the outer ones hold stands in the environment, so that the inner ones need not wait for it.
//!
//! `CLINCH_HELD` is a list of `name,claim,door`, the name percent-encoded, separated by blanks. It is a hint only, and says nothing of
//! stores, which have many spellings: a claim's id is nowhere else, so a store that says it is granted is the outer job's store.

use std::collections::HashSet;

use clinch::backend::ClaimState;
use clinch::{ClaimId, Mode};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::args::Share;

/// How many entries the list has at most. It is handed on, also from one job to the next that is not inside it, and no program can be started with one that is too long.
const MOST: usize = 64;

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

/// The list with one more. Where it gets too long, the last ones stay, and of each name the last one: others are likely of jobs that have ended.
pub(crate) fn with(held: &str, name: &str, claim: ClaimId, door: &str) -> String {
    let entry = format!("{},{claim},{door}", utf8_percent_encode(name, NON_ALPHANUMERIC));
    let mut entries: Vec<&str> = held.split(' ').filter(|entry| !entry.is_empty()).chain([&*entry]).collect();
    if entries.len() > MOST {
        let mut names = HashSet::new();
        entries.reverse();
        entries.retain(|entry| names.insert(entry.split(',').next()));
        entries.truncate(MOST);
        entries.reverse();
    }
    entries.join(" ")
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
    fn a_list_that_gets_too_long_keeps_the_last_ones_of_each_name() {
        let one = |id| ClaimId::from_bits(id);
        let outermost = with("", "a", one(1), "d");
        let chain = (2..=200).fold(outermost, |held, id| with(&held, "b", one(id), "d"));
        assert_eq!(find(&chain, "a"), (vec![outer(1, "d")], true));
        assert!(find(&chain, "b").0.contains(&outer(200, "d")));
        assert!(chain.split(' ').count() <= MOST);
        let names = (2..=200).fold(chain, |held, id| with(&held, &id.to_string(), one(id), "d"));
        assert_eq!(names.split(' ').count(), MOST);
        assert_eq!(find(&names, "200"), (vec![outer(200, "d")], true));
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
