//! Jobs inside jobs: what the outer ones hold stands in the environment, so that the inner ones need not wait for it.
//!
//! `CLINCH_HELD` is a list of `store,name,claim`, each percent-encoded, separated by blanks. It is a hint only: the store
//! is asked whether the claim still holds.

use clinch::backend::ClaimState;
use clinch::{ClaimId, Mode};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::args::Share;

/// The environment variable.
pub(crate) const HELD: &str = "CLINCH_HELD";

/// The claim that an outer job has on this lock, if any; the innermost one.
pub(crate) fn find(held: &str, store: &str, name: &str) -> Option<ClaimId> {
    held.split(' ').rev().find_map(|entry| {
        let mut parts = entry.split(',').map(|part| percent_decode_str(part).decode_utf8().ok());
        let (at, of, claim) = (parts.next()??, parts.next()??, parts.next()??);
        if at == store && of == name { claim.parse().ok() } else { None }
    })
}

/// The list with one more.
pub(crate) fn with(held: &str, store: &str, name: &str, claim: ClaimId) -> String {
    let encoded = |text| utf8_percent_encode(text, NON_ALPHANUMERIC);
    let entry = format!("{},{},{claim}", encoded(store), encoded(name));
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

    #[test]
    fn entries_read_back_whatever_they_hold() {
        let (one, two) = (ClaimId::from_bits(1), ClaimId::from_bits(2));
        let held = with("", "file:///a b", "n,1 %", one);
        let held = with(&held, "redis://h", "é", two);
        assert_eq!(find(&held, "file:///a b", "n,1 %"), Some(one));
        assert_eq!(find(&held, "redis://h", "é"), Some(two));
        assert_eq!(find(&held, "file:///a b", "é"), None);
    }

    #[test]
    fn garbage_holds_nothing() {
        for garbage in ["", " ", ",", "a,b", "a,b,c", "%ff,b,00000000000000000000000000000001"] {
            assert_eq!(find(garbage, "a", "b"), None, "{garbage}");
        }
    }
}
