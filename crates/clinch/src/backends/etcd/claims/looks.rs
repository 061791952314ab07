//! How much the table of claims looks at: each keepalive and each end of a lease concerns the claims on that lease alone.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use super::Claims;
use crate::backends::etcd::free::Stand;
use crate::backends::etcd::session::Session;
use crate::backends::etcd::step::Step;
use crate::claim::ClaimId;
use crate::clock::{Clock, Instant};
use crate::sync::lock;

thread_local! {
    static LOOKS: Cell<usize> = const { Cell::new(0) };
}

/// Notes that a claim, or a key, was looked at.
pub(in crate::backends::etcd) fn count() {
    LOOKS.set(LOOKS.get() + 1);
}

/// What the keepalives and ends of this many leases look at, of which each carries one claim.
fn looks(leases: i64) -> usize {
    let (claims, now) = (Arc::<Claims>::default(), Instant::from_nanos(0));
    for lease in 1..=leases {
        let (id, session) =
            (ClaimId::from_bits(lease as u128), Session::of_lease(lease, Duration::from_secs(9), true));
        claims.begin(id, session, b"q/", &Step::new(Clock::host()), false, now).unwrap();
        claims.made(id, lease);
        claims.leave(id, now);
    }
    LOOKS.set(0);
    for lease in 1..=leases {
        assert_eq!(claims.leaving(lease, now, 9).len(), 1);
        assert_eq!(claims.unread(lease, i64::MAX).len(), 1);
        assert_eq!(claims.some_of(lease, 9, ClaimId::from_bits(9)).len(), 1);
        assert!(claims.hang_on(lease) && claims.unheard(lease, now, 9).is_empty());
        claims.session_ended(lease);
    }
    LOOKS.get()
}

#[test]
fn a_claim_is_found_by_each_lease_that_it_may_hang_on_and_by_no_other() {
    let (claims, id) = (Arc::<Claims>::default(), ClaimId::from_bits(1));
    let [one, two, three] =
        [1, 2, 3].map(|lease| Session::of_lease(lease, Duration::from_secs(9), lease != 2));
    let hangs_on = || [1, 2, 3].map(|lease| claims.hang_on(lease));
    let now = Instant::from_nanos(0);
    claims.begin(id, one.clone(), b"q/", &Step::new(Clock::host()), false, now).unwrap();
    assert_eq!(hangs_on(), [true, false, false]);
    claims.placed(id, two);
    claims.made(id, 5);
    assert!(claims.moving(id, Stand { created: 5, lease: 2 }, &three));
    assert_eq!(hangs_on(), [true; 3]);
    assert!(claims.not_moved(id, 2, &three).is_some_and(|unused| Arc::ptr_eq(&unused, &three)));
    assert_eq!(hangs_on(), [true, true, false]);
    assert!(claims.moving(id, Stand { created: 5, lease: 2 }, &three));
    let left = claims.seen_on(id, Stand { created: 5, lease: 3 }, 6);
    assert!(left.iter().all(|left| Arc::ptr_eq(left, &one)) && left.len() == 1);
    assert_eq!(hangs_on(), [false, false, true]);
    claims.doubt(id, &one, Instant::from_nanos(0));
    assert_eq!(hangs_on(), [true, false, true]);
    claims.fenced([id].into_iter(), &one);
    assert_eq!(hangs_on(), [false, false, true]);
    claims.forget(id);
    assert!(lock(&claims.table).entries.is_empty());
}

#[test]
fn a_lease_costs_what_hangs_on_it_however_many_others_there_are() {
    assert_eq!(looks(400), 2 * looks(200));
}

/// So many claims that are held on one lease.
fn held(count: u128) -> Arc<Claims> {
    let (claims, now) = (Arc::<Claims>::default(), Instant::from_nanos(0));
    let session = Session::of_lease(1, Duration::from_secs(9), false);
    for bits in 1..=count {
        let id = ClaimId::from_bits(bits);
        claims.begin(id, session.clone(), b"q/", &Step::new(Clock::host()), false, now).unwrap();
        claims.made(id, 1);
        assert!(claims.take_grant(id));
        claims.steps(id, None);
    }
    claims
}

#[test]
fn a_renewal_looks_at_no_claim_that_is_held_but_at_some_keys() {
    let (claims, now) = (held(400), Instant::from_nanos(0));
    claims.leave(ClaimId::from_bits(7), now);
    LOOKS.set(0);
    assert_eq!(claims.leaving(1, now, 9).len(), 1);
    assert!(claims.unheard(1, now, 9).is_empty());
    assert_eq!(claims.some_of(1, 9, ClaimId::from_bits(300)).len(), 9);
    assert!(LOOKS.get() <= 40, "{} looks", LOOKS.get());
}

#[test]
fn the_key_of_each_claim_is_read_in_turn() {
    let claims = held(250);
    let (mut read, mut last) = (Vec::new(), ClaimId::from_bits(0));
    for _ in 0..5 {
        let some = claims.some_of(1, 100, last);
        last = some.last().unwrap().0;
        read.extend(some.into_iter().map(|(id, ..)| id.bits()));
    }
    let in_turn: Vec<u128> = (1..=250).cycle().take(500).collect();
    assert_eq!(read, in_turn);
}
