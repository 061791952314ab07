//! What is known of held locks, and whom it makes look.

use std::cell::Cell;
use std::sync::Arc;

use super::*;
use crate::claim::Owner;

fn claim(bits: u128) -> Claim {
    Claim {
        id: ClaimId::from_bits(bits),
        name: LockName::new(format!("job/{bits}")).unwrap(),
        mode: Mode::Exclusive,
        ttl: PAUSE,
        enqueue: true,
        place: false,
        isolated: false,
        owner: Arc::new(Owner { host: "h".into(), pid: 1, user: "u".into(), label: String::new() }),
    }
}

const START: Instant = Instant::from_nanos(1 << 40);

thread_local! {
    /// How often it was looked what is to be done about a lease.
    pub(super) static LOOKED: Cell<usize> = const { Cell::new(0) };
}

/// A renewal is a change, too, and all that this costs is paid by who renews.
#[test]
fn a_change_costs_the_same_however_many_are_held() {
    let cost = |count: usize| {
        let held = Held::default();
        let claims: Vec<Claim> = (1..=count as u128).map(claim).collect();
        let watches = watched(&held, &claims);
        held.read(&watches, 1, &vec![true; count]);
        held.done();
        let before = LOOKED.get();
        for (_, name) in &watches[..100] {
            held.changed(name.as_str(), START + YOUNG);
        }
        let due = held.begin(START + YOUNG + GATHER).unwrap();
        assert_eq!(due.len(), 100);
        held.reading(&due, 1);
        assert_eq!(held.read(&due, 1, &[true; 100]), []);
        held.done();
        LOOKED.get() - before
    };
    let (few, many) = (cost(100), cost(1000));
    assert_eq!(few, many);
}

fn watched(held: &Held, claims: &[Claim]) -> Vec<Watch> {
    for claim in claims {
        held.hold(claim, START);
    }
    let mut due = held.begin(START + YOUNG).unwrap();
    assert_eq!(due.len(), claims.len());
    due.sort();
    held.reading(&due, 1);
    due
}

fn watched_on(held: &Held, claim: &Claim) -> Option<u64> {
    held.watched_on(&[claim])
}

#[test]
fn what_is_held_shortly_is_never_looked_at() {
    let held = Held::default();
    held.hold(&claim(1), START);
    assert!(held.begin(START).is_none() && held.next() == Some(START + YOUNG));
    held.let_go(claim(1).id, &claim(1).name);
    assert!(held.begin(START + YOUNG).is_none());
    assert_eq!(held.next(), None, "nothing is held, and still it looks");
    assert!(lock(&held.state).leases.is_empty());
}

/// Also of what was looked at for nobody else, and of what grows up until the server is asked again.
#[test]
fn what_could_not_be_read_is_read_again() {
    let held = Held::default();
    let watches = watched(&held, &[claim(1)]);
    assert_eq!(held.read(&watches, 1, &[false]), watches);
    held.done();
    assert_eq!(held.next(), None);
    held.unread(each(&watches), START + PAUSE);
    assert_eq!(held.next(), Some(START + PAUSE), "nobody looks again");
    held.hold(&claim(2), START + YOUNG);
    assert_eq!(held.next(), Some(START + YOUNG * 2), "what is young waits for what could not be read");
}

#[test]
fn a_change_between_the_read_and_its_answer_is_not_missed() {
    let held = Held::default();
    let watches = watched(&held, &[claim(1), claim(2)]);
    held.changed("job/1", START + YOUNG);
    held.read(&watches, 1, &[true, true]);
    held.done();
    assert_eq!(held.next(), Some(START + YOUNG + GATHER));
    assert!(held.begin(START + YOUNG).is_none(), "others that change with it are not waited for");
    let due = held.begin(START + YOUNG + GATHER).unwrap();
    assert_eq!(due, [(claim(1).id, claim(1).name)], "what was told while it was read is read again");
}

/// The read that was to see to it has failed.
#[test]
fn a_change_that_was_told_is_not_put_off_by_a_read_that_failed() {
    let held = Held::default();
    let watches = watched(&held, &[claim(1), claim(2)]);
    held.changed("job/1", START + YOUNG);
    held.unread(each(&watches), START + PAUSE);
    held.done();
    assert_eq!(held.next(), Some(START + YOUNG + GATHER));
    let due = held.begin(START + YOUNG + GATHER).unwrap();
    assert_eq!(due, watches[..1]);
}

/// In a busy client there is always one that grows up, and is gone.
#[test]
fn a_look_that_finds_nobody_puts_off_none() {
    let held = Held::default();
    held.hold(&claim(1), START);
    held.hold(&claim(2), START + YOUNG / 2);
    held.let_go(claim(1).id, &claim(1).name);
    assert!(held.begin(START + YOUNG).is_none());
    assert_eq!(held.next(), Some(START + YOUNG * 3 / 2));
}

#[test]
fn what_a_renewal_did_not_read_since_it_was_given_up_is_read_at_once() {
    let (held, one, two) = (Held::default(), claim(1), claim(2));
    let both = [&one, &two];
    let watches = watched(&held, &[claim(1), claim(2)]);
    assert_eq!(watched_on(&held, &claim(1)), None, "no answer has come");
    held.read(&watches, 1, &[true, true]);
    held.done();
    assert_eq!(watched_on(&held, &claim(1)), Some(1));
    assert_eq!(held.watched_on(&[&claim(3), &two]), Some(1), "the first is not watched, and the second is");
    held.renewing(&both).read(&[true, false]);
    assert_eq!(watched_on(&held, &claim(1)), Some(1));
    assert_eq!(held.begin(START + YOUNG).unwrap(), [(claim(2).id, claim(2).name)]);
    held.done();
    held.let_go(claim(2).id, &claim(2).name);
    drop(held.renewing(&both));
    assert_eq!(watched_on(&held, &claim(1)), None);
    assert_eq!(held.begin(START + YOUNG).unwrap(), [(claim(1).id, claim(1).name)]);
}

#[test]
fn a_change_during_a_renewal_outlives_its_answer() {
    let (held, one, two) = (Held::default(), claim(1), claim(2));
    let both = [&one, &two];
    let watches = watched(&held, &[claim(1), claim(2)]);
    held.read(&watches, 1, &[true, true]);
    held.done();
    let renewal = held.renewing(&both);
    held.changed("job/1", START);
    held.closed(2);
    renewal.read(&[true, true]);
    let due = held.begin(START + YOUNG).unwrap();
    assert_eq!(due, [(claim(1).id, claim(1).name)]);
    held.reading(&due, 1);
    held.read(&due, 1, &[true]);
    held.done();
    let renewal = held.renewing(&both);
    held.closed(1);
    renewal.read(&[true, true]);
    assert_eq!(held.begin(START + YOUNG).unwrap().len(), 2, "it ended");
}

#[test]
fn the_renewal_of_a_claim_that_was_released_says_nothing_of_the_next_one() {
    let held = Held::default();
    let (old, new) = (claim(1), Claim { name: claim(1).name, ..claim(2) });
    for answered in [true, false] {
        watched(&held, std::slice::from_ref(&old));
        held.done();
        let only = [&old];
        let renewal = held.renewing(&only);
        held.let_go(old.id, &old.name);
        let next = watched(&held, std::slice::from_ref(&new));
        held.read(&next, 1, &[true]);
        held.done();
        if answered {
            renewal.read(&[false])
        } else {
            drop(renewal)
        }
        assert_eq!((watched_on(&held, &new), held.next()), (Some(1), None));
        held.changed("job/1", START);
        assert_eq!(watched_on(&held, &new), None, "a change was not heard");
        held.let_go(new.id, &new.name);
    }
}

/// A guard whose claim is gone may be there still when its lock is taken again.
#[test]
fn one_that_is_gone_takes_the_news_from_nobody_and_is_asked_for() {
    let held = Held::default();
    let (old, new) = (claim(1), Claim { name: claim(1).name, ..claim(2) });
    let watches = watched(&held, std::slice::from_ref(&old));
    held.read(&watches, 1, &[true]);
    held.done();
    held.hold(&new, START);
    let both = held.begin(START + YOUNG).unwrap();
    assert_eq!(both, [(new.id, new.name.clone()), watches[0].clone()]);
    held.reading(&both, 1);
    assert_eq!(held.read(&both, 1, &[true, false]), watches);
    held.done();
    assert_eq!((watched_on(&held, &old), watched_on(&held, &new)), (None, Some(1)));
    // Nobody could say whether it is there.
    held.unread(each(&watches), START + PAUSE);
    assert_eq!((watched_on(&held, &new), held.next()), (Some(1), Some(START + PAUSE)));
    let again = held.begin(START + PAUSE).unwrap();
    assert_eq!(again, watches);
    held.reading(&again, 1);
    assert_eq!(held.read(&again, 1, &[false]), watches);
    held.answered(&watches, &[false], START + PAUSE);
    held.done();
    assert_eq!((held.gone(), held.gone(), held.next()), (vec![old.id], vec![], None));
    held.changed("job/1", START + PAUSE);
    assert_eq!(watched_on(&held, &new), None, "a change was not heard");
    held.let_go(new.id, &new.name);
    expect_nothing(&held);
}

/// The answer to a step may come when the lock has long been granted to another.
#[test]
fn a_grant_that_is_heard_late_takes_the_watch_from_nobody() {
    let held = Held::default();
    let (real, late) = (claim(1), Claim { name: claim(1).name, ..claim(2) });
    let watches = watched(&held, std::slice::from_ref(&real));
    held.read(&watches, 1, &[true]);
    held.done();
    held.hold(&late, START);
    let mut now = START;
    for _ in 0..3 {
        while let Some(due) = held.begin(now) {
            held.reading(&due, 1);
            let found: Vec<bool> = due.iter().map(|(id, _)| *id == real.id).collect();
            let asked = held.read(&due, 1, &found);
            let found: Vec<bool> = asked.iter().map(|(id, _)| *id == real.id).collect();
            held.answered(&asked, &found, now);
            held.done();
        }
        now = now + YOUNG;
    }
    assert_eq!((held.gone(), watched_on(&held, &real)), (vec![late.id], Some(1)));
    held.let_go(real.id, &real.name);
    expect_nothing(&held);
}

/// An answer is of the time before: it says nothing of what came since.
#[test]
fn an_answer_counts_only_where_nothing_came_meanwhile() {
    let held = Held::default();
    let watches = watched(&held, &[claim(1), claim(2), claim(3), claim(4)]);
    assert_eq!(held.read(&watches, 1, &[false; 4]), watches);
    held.let_go(claim(1).id, &claim(1).name);
    held.hold(&claim(2), START);
    held.all_changed();
    held.answered(&watches, &[true, false, true, false], START);
    held.done();
    assert_eq!(held.gone(), [claim(4).id]);
    let mut due = held.begin(START + PAUSE).unwrap();
    due.sort();
    assert_eq!(due, [&watches[1], &watches[2]].map(Clone::clone));
    for bits in [2, 3] {
        held.let_go(claim(bits).id, &claim(bits).name);
    }
    held.done();
    expect_nothing(&held);
}

/// Released, granted again, and where the server cannot tell.
#[test]
fn a_claim_whose_lock_was_granted_again_is_forgotten_when_it_is_let_go() {
    let (old, new) = (claim(1), Claim { name: claim(1).name, ..claim(2) });
    for granted_again in [false, true] {
        let held = Held::default();
        held.hold(&old, START);
        held.hold(&new, START);
        let due = held.begin(START + YOUNG).unwrap();
        assert_eq!(held.untold(&due), [(old.id, old.name.clone())], "it is asked for all the same");
        held.done();
        if granted_again {
            held.hold(&old, START);
        }
        held.let_go(old.id, &old.name);
        held.answered(&due, &[false, false], START);
        assert_eq!(held.gone(), []);
        expect_nothing(&held);
    }
}

fn expect_nothing(held: &Held) {
    assert!(held.is_idle());
    let state = lock(&held.state);
    assert!(state.young.is_empty() && state.leases.is_empty());
    assert!(state.due.is_empty() && state.displaced.is_empty());
}

fn each(watches: &[Watch]) -> impl Iterator<Item = (ClaimId, &LockName)> {
    watches.iter().map(|(id, name)| (*id, name))
}

/// One of them for each lock that is held.
#[test]
fn what_is_known_of_a_lease_takes_little_room() {
    assert!(size_of::<(LockName, Lease)>() <= 48);
}

#[test]
fn what_one_server_cannot_tell_of_keeps_nothing_else_from_being_watched() {
    let held = Held::default();
    let watches = watched(&held, &[claim(1), claim(2)]);
    held.untold(&watches[..1]);
    held.done();
    assert!(!held.is_idle(), "the other is watched no more");
    held.closed(1);
    assert_eq!(held.begin(START + YOUNG).unwrap().len(), 1);
    held.untold(&watches);
    held.done();
    watched(&held, &[claim(3)]);
}

#[test]
fn what_is_missed_closed_or_emptied_is_looked_at() {
    let held = Held::default();
    let watches = watched(&held, &[claim(1)]);
    assert_eq!(held.read(&watches, 1, &[false]), watches);
    held.done();
    held.let_go(claim(1).id, &claim(1).name);
    assert!(held.is_idle());
    watched(&held, &[claim(2)]);
    held.done();
    assert!(held.begin(START + YOUNG).is_none() && !held.is_idle());
    held.closed(2);
    assert!(held.begin(START + YOUNG).is_none(), "another inbox");
    for tell in [|held: &Held| held.closed(1), Held::all_changed] {
        tell(&held);
        let due = held.begin(START + YOUNG).unwrap();
        held.reading(&due, 1);
        held.done();
    }
}
