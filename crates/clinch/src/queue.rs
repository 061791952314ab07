//! The rule of the queue: a claim is granted when every live claim ahead of it is compatible with it.
//!
//! Nobody overtakes: queued claims ahead count like granted ones. A mutex, a read-write lock and a semaphore are this
//! one rule with different modes. Pure: no store, no clock.

use crate::claim::Mode;
use crate::error::{Error, Result};

/// Whether a claim of this mode is granted with these live claims ahead of it.
pub(crate) fn admits(ahead: impl IntoIterator<Item = Mode>, mode: Mode) -> bool {
    let mut taken: u64 = 0;
    for other in ahead {
        match (mode, other) {
            (Mode::Shared, Mode::Shared) => {}
            (Mode::Permits { .. }, Mode::Permits { count, .. }) => taken += u64::from(count.get()),
            _ => return false,
        }
    }
    match mode {
        Mode::Permits { count, capacity } => taken + u64::from(count.get()) <= u64::from(capacity.get()),
        Mode::Exclusive | Mode::Shared => true,
    }
}

/// Refuses a claim that disagrees with the live ones about the capacity.
///
/// # Errors
///
/// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid), naming both numbers.
pub(crate) fn agree_on_capacity(others: impl IntoIterator<Item = Mode>, mode: Mode) -> Result<()> {
    let Mode::Permits { capacity: ours, .. } = mode else { return Ok(()) };
    for other in others {
        if let Mode::Permits { capacity: theirs, .. } = other
            && theirs != ours
        {
            return Err(Error::invalid(format!(
                "this claim says the semaphore has {ours} permits, but its holders say {theirs}; use one capacity \
                 everywhere"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::*;

    fn permits(count: u32, capacity: u32) -> Mode {
        Mode::Permits { count: NonZeroU32::new(count).unwrap(), capacity: NonZeroU32::new(capacity).unwrap() }
    }

    #[test]
    fn nobody_overtakes_a_queued_claim() {
        // 3 of 5 are held and a claim for 4 waits: one for 1 would fit, but must not pass it.
        assert!(!admits([permits(3, 5), permits(4, 5)], permits(1, 5)));
        // A reader behind a waiting writer waits too.
        assert!(!admits([Mode::Shared, Mode::Exclusive], Mode::Shared));
    }

    #[test]
    fn a_disagreement_names_both_capacities() {
        let error = agree_on_capacity([permits(1, 5)], permits(1, 7)).unwrap_err().to_string();
        assert!(error.contains('5') && error.contains('7'), "{error}");
    }

    fn any_mode() -> impl Strategy<Value = Mode> {
        prop_oneof![Just(Mode::Exclusive), Just(Mode::Shared), (1u32..=5).prop_map(|count| permits(count, 5)),]
    }

    proptest! {
        /// The granted claims of any queue are its head, and never more than the lock has.
        #[test]
        fn the_granted_are_a_prefix_within_bounds(queue in prop::collection::vec(any_mode(), 0..12)) {
            let granted: Vec<bool> =
                (0..queue.len()).map(|i| admits(queue[..i].iter().copied(), queue[i])).collect();
            let head = granted.iter().take_while(|granted| **granted).count();
            prop_assert!(granted.iter().skip(head).all(|granted| !granted));
            let held = &queue[..head];
            if held.contains(&Mode::Exclusive) {
                prop_assert_eq!(held.len(), 1);
            }
            let permits: u32 = held.iter().map(|mode| match mode {
                Mode::Permits { count, .. } => count.get(),
                _ => 0,
            }).sum();
            prop_assert!(permits <= 5);
            prop_assert!(queue.is_empty() || head > 0, "the head of a queue is always granted");
        }
    }
}
