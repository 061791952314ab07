//! What is known of a lease at each moment, and what that means.

use super::*;
use crate::claim::{ClaimId, Mode, Owner};
use crate::error::ErrorKind;
use crate::name::LockName;

const TTL: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);
const SENT: Instant = Instant::from_nanos(1_000_000_000_000);

fn claim(ttl: Duration) -> Claim {
    Claim {
        id: ClaimId::from_bits(1),
        name: LockName::new("job").unwrap(),
        mode: Mode::Exclusive,
        ttl,
        enqueue: true,
        place: false,
        isolated: false,
        owner: Arc::new(Owner { host: "h".into(), pid: 1, user: "u".into(), label: String::new() }),
    }
}

fn policy() -> Policy {
    Policy { drift: Drift::DEFAULT, manual: false, hold_until: None }
}

/// A lease, or with no token a place, of which the store said that it lives for `ttl` from [`SENT`] on.
fn with(claim: Claim, token: Option<Token>, ttl: Option<Duration>, policy: Policy) -> Tenure {
    let tenure = Tenure::new(0, Arc::new(claim), token, SENT, ttl, policy, Process::this());
    tenure.begin(0.0);
    tenure
}

fn lease(policy: Policy) -> Tenure {
    with(claim(TTL), Token::new(1), Some(TTL), policy)
}

fn manual() -> Policy {
    Policy { manual: true, ..policy() }
}

fn until(hold: Duration) -> Policy {
    Policy { hold_until: Some(SENT + hold), ..policy() }
}

fn renewed(tenure: &Tenure, ttl: Option<Duration>, sent: Instant) {
    tenure.answer(Renewal::Renewed(ttl), sent, sent, 0.0).unwrap();
}

fn failed(tenure: &Tenure, sent: Instant, now: Instant, jitter: f64) {
    let error = Error::new(ErrorKind::Unavailable, "no answer");
    tenure.answer(Renewal::Failed(error), sent, now, jitter).unwrap_err();
}

fn kind(standing: Standing) -> Option<LossKind> {
    match standing {
        Standing::Lost(loss) => Some(loss.kind),
        Standing::Held | Standing::Jeopardy => None,
    }
}

#[test]
fn an_answer_to_an_earlier_request_moves_nothing() {
    let tenure = lease(policy());
    renewed(&tenure, Some(TTL), SENT + 10 * SECOND);
    let deadline = tenure.deadline();
    assert_eq!(deadline, Some(lease::deadline(SENT + 10 * SECOND, TTL, Drift::DEFAULT)));
    renewed(&tenure, Some(100 * TTL), SENT + 9 * SECOND);
    assert_eq!(tenure.deadline(), deadline);
    // Of two at one moment, the later answer counts.
    renewed(&tenure, Some(TTL / 2), SENT + 10 * SECOND);
    assert!(tenure.deadline() < deadline);
}

#[test]
fn what_has_no_end_in_the_store_has_one_where_nobody_renews() {
    let (kept, unkept) = (with(claim(TTL), Token::new(1), None, policy()), lease(manual()));
    renewed(&kept, None, SENT + SECOND);
    renewed(&unkept, None, SENT + SECOND);
    assert_eq!((kept.deadline(), kept.runs_out()), (None, None));
    assert_eq!(unkept.deadline(), Some(lease::deadline(SENT + SECOND, TTL, Drift::DEFAULT)));
}

#[test]
fn a_shorter_lease_counts_from_its_request_and_a_longer_one_from_its_answer() {
    let tenure = lease(policy());
    let (asked, deadline) = (SENT + SECOND, tenure.deadline());
    tenure.ask(asked, 2 * TTL, 0.0);
    assert_eq!(tenure.deadline(), deadline);
    assert_eq!(tenure.asking().ttl, 2 * TTL);
    tenure.ask(asked, SECOND, 0.0);
    assert_eq!(tenure.deadline(), Some(lease::deadline(asked, SECOND, Drift::DEFAULT)));
    // It is due before its end, though the longer one was due later.
    assert_eq!(tenure.next_look(asked), Some(lease::renewal(asked, SECOND, 0.0)));
    // The store may keep it for as long as it was ever asked to.
    assert_eq!(tenure.leaving().ttl, 2 * TTL);
    assert_eq!(tenure.runs_out(), Some(lease::deadline(asked, 2 * TTL, Drift::DEFAULT)));
}

#[test]
fn a_passed_deadline_is_a_loss_whoever_looks_first() {
    for look in [0, 1, 2] {
        let tenure = lease(policy());
        let deadline = tenure.deadline().unwrap();
        assert_eq!(tenure.standing(deadline - Duration::from_nanos(1)), Standing::Held);
        match look {
            0 => assert_eq!(kind(tenure.standing(deadline)), Some(LossKind::Expired)),
            1 => assert!(tenure.review(deadline).next.is_none()),
            _ => drop(tenure.answer(Renewal::Renewed(Some(TTL)), SENT + SECOND, deadline, 0.0).unwrap_err()),
        }
        assert!(tenure.is_lost());
        // It never comes back, and the first reason stays.
        let late = tenure.answer(Renewal::Lost(left()), deadline, deadline, 0.0).unwrap_err();
        assert_eq!(late.loss().map(|loss| loss.kind), Some(LossKind::Expired));
        tenure.abandon();
        assert_eq!(kind(tenure.standing(SENT)), Some(LossKind::Expired));
        assert_eq!(tenure.next_look(SENT), None);
    }
}

#[test]
fn a_longest_hold_ends_a_lease_unless_that_is_over_before() {
    let (capped, longer) = (lease(until(TTL / 2)), lease(until(2 * TTL)));
    assert_eq!(capped.deadline(), Some(SENT + TTL / 2));
    assert_eq!(longer.deadline(), lease(policy()).deadline());
    assert_eq!(kind(capped.standing(SENT + TTL)), Some(LossKind::HeldTooLong));
    assert_eq!(kind(longer.standing(SENT + TTL)), Some(LossKind::Expired));
    let endless = with(claim(TTL), Token::new(1), None, until(TTL));
    assert_eq!(endless.deadline(), Some(SENT + TTL));
}

#[test]
fn what_is_over_for_its_holder_is_freed_when_the_store_has_ended_it_too() {
    let tenure = lease(policy());
    assert_eq!(tenure.outlived(true), None, "it is not over");
    let told = SENT + TTL - SECOND / 100;
    tenure.standing(told);
    let stopped = told + lease::stop_within(TTL);
    assert_eq!(tenure.outlived(true), Some(stopped.max(SENT + TTL)));
    assert_eq!(tenure.outlived(false), Some(stopped));
    // Told early, it waits for the store's end; a longest hold waits for nothing.
    let (early, capped) = (lease(policy()), lease(until(TTL / 2)));
    let deadline = early.deadline().unwrap();
    early.standing(deadline);
    assert_eq!(early.outlived(true), Some(SENT + TTL));
    capped.standing(SENT + TTL / 2);
    assert_eq!(capped.outlived(true), Some(SENT + TTL / 2 + lease::stop_within(TTL)));
    // What the store or an operator took is not freed by the keeper.
    let taken = lease(policy());
    taken.answer(Renewal::Lost(left()), SENT, SENT, 0.0).unwrap_err();
    assert_eq!(taken.outlived(true), None);
}

#[test]
fn a_renewal_is_due_a_little_early_and_then_not_before_it_has_failed() {
    let tenure = lease(policy());
    let due = lease::renewal(SENT, TTL, 0.0);
    let early = due - lease::coalesce(TTL);
    assert!(tenure.review(early - Duration::from_nanos(1)).renew.is_none());
    let review = tenure.review(early);
    let asking = review.renew.unwrap();
    assert!(Arc::ptr_eq(&asking.claim, &tenure.claim) && !review.news);
    assert_eq!(review.next, Some(early + asking.patience.mul_f64(1.5)));
    assert!(tenure.review(due).renew.is_none());
    // Where nobody renews it is looked at, less often than an attempt of a short lease would take.
    let unkept = lease(manual());
    let look = SENT + CHECK_EVERY;
    assert_eq!(unkept.next_look(SENT), Some(look));
    assert_eq!(unkept.review(look).next, Some(look + CHECK_EVERY));
}

#[test]
fn a_failed_renewal_is_sent_again_after_a_pause_from_when_it_was_sent() {
    let (sent, attempt) = (SENT + 5 * SECOND, backend::attempt(TTL));
    for (jitter, part) in [(0.0, 0.25), (1.0, 0.5)] {
        let tenure = lease(policy());
        failed(&tenure, sent, sent, jitter);
        assert_eq!(tenure.next_look(sent), Some(sent + attempt.mul_f64(part)));
        // One that hung for longer is sent at once.
        failed(&tenure, sent, sent + attempt, jitter);
        assert_eq!(tenure.next_look(sent), Some(sent + attempt));
    }
    let unkept = lease(manual());
    failed(&unkept, sent, sent, 0.0);
    assert_eq!(unkept.next_look(SENT), Some(SENT + CHECK_EVERY), "nobody renews it");
}

#[test]
fn jeopardy_is_told_and_ends_with_a_renewal() {
    let tenure = lease(policy());
    let worry = lease::jeopardy(SENT, TTL);
    assert!(!tenure.review(worry - Duration::from_nanos(1)).news);
    let review = tenure.review(worry);
    assert!(review.news && tenure.standing(worry) == Standing::Jeopardy);
    renewed(&tenure, Some(TTL), worry);
    assert_eq!(tenure.standing(worry), Standing::Held);
    // Where nobody renews, none is overdue; nor is that of a place, which has no deadline either.
    let (unkept, place) = (lease(manual()), with(claim(TTL), None, Some(TTL), policy()));
    for tenure in [&unkept, &place] {
        assert!(!tenure.review(worry).news);
        assert_eq!(tenure.standing(worry), Standing::Held);
    }
    assert_eq!(place.standing(SENT + 10 * TTL), Standing::Held);
}

#[test]
fn one_attempt_takes_a_part_of_the_lease_but_all_of_one_that_was_handed_over_short() {
    let (short, whole) = (SECOND, Duration::from_secs(12));
    let patience_of = |tenure: &Tenure| patience(&lock(&tenure.state));
    let patience = |token, ttl| patience_of(&with(claim(whole), token, Some(ttl), policy()));
    assert_eq!(patience(Token::new(1), whole), whole / 6);
    assert_eq!(patience(Token::new(1), 2 * whole), whole / 6);
    assert_eq!(patience(Token::new(1), short), short);
    assert_eq!(patience(Token::new(1), whole / 2), MAX_ATTEMPT);
    assert_eq!(patience(Token::new(1), Duration::ZERO), MIN_ATTEMPT);
    assert_eq!(patience(None, short), short / 6, "a place is not handed over");
    assert_eq!(patience(None, Duration::ZERO), MIN_ATTEMPT);
    let tenure = with(claim(whole), Token::new(1), Some(short), policy());
    renewed(&tenure, Some(short), SENT);
    assert_eq!(patience_of(&tenure), short / 6, "it was renewed since");
}

#[test]
fn only_a_whole_lease_of_its_own_is_new() {
    let isolated = || Claim { isolated: true, ..claim(TTL) };
    let new = |claim: Claim, ttl| {
        let tenure = with(claim, Token::new(1), ttl, policy());
        [SENT, SENT + TTL / 10, SENT + TTL / 10 + Duration::from_nanos(1)].map(|now| tenure.is_new(now))
    };
    assert_eq!(new(isolated(), Some(TTL)), [true, true, false]);
    for other in [new(claim(TTL), Some(TTL)), new(isolated(), Some(TTL - SECOND)), new(isolated(), None)] {
        assert_eq!(other, [false; 3]);
    }
}

#[test]
fn what_is_isolated_asks_for_that_from_then_on() {
    let tenure = lease(policy());
    assert!(Arc::ptr_eq(&tenure.asking(), &tenure.claim), "nothing is copied");
    tenure.isolate();
    assert!(tenure.asking().isolated && !tenure.leaving().isolated);
    assert_eq!(tenure.asking().ttl, TTL);
}

#[test]
fn what_nobody_looks_after_any_more_cannot_be_verified() {
    let tenure = lease(policy());
    tenure.abandon();
    assert_eq!(kind(tenure.standing(SENT)), Some(LossKind::Unverifiable));
}

#[test]
fn a_place_without_time_left_is_renewed_after_a_pause() {
    let place = with(claim(TTL), None, Some(Duration::ZERO), policy());
    assert_eq!(place.next_look(SENT), Some(SENT + MIN_ATTEMPT));
}
