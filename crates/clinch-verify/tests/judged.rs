//! Whole histories, each with the verdict that it deserves; see the files for their events.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod support;

use std::path::Path;

use clinch_verify::{Event, History, Kind, Op, Property, Report, Rules, Verdict, check};
use support::assert_violated;

fn history(name: &str) -> History {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/histories/{name}.jsonl"));
    History::read(std::fs::File::open(path).unwrap()).unwrap()
}

fn fifo() -> Rules {
    Rules { fifo: true, ..Rules::default() }
}

#[track_caller]
fn valid(name: &str) {
    let report = check(&history(name), &fifo());
    assert_eq!(report.verdict, Verdict::Valid, "{name}: {report:#?}");
}

#[track_caller]
fn violated(property: Property, name: &str) -> Report {
    assert_violated(&history(name), &fifo(), property)
}

/// Asserts that a history is left open, for a reason.
#[track_caller]
fn unknown(property: Property, name: &str, rules: &Rules, reason: &str) {
    let report = check(&history(name), rules);
    assert_eq!(report.verdict, Verdict::Unknown, "{name}: {report:#?}");
    let told = report.doubts.iter().any(|doubt| doubt.property == property && doubt.reason.contains(reason));
    assert!(told, "{name}: {report:#?}");
}

/// The history with some of its events left out.
fn without(name: &str, left_out: impl Fn(&Event) -> bool) -> History {
    let events: Vec<_> = history(name).events().iter().filter(|event| !left_out(event)).cloned().collect();
    events.into()
}

#[test]
fn a_holder_that_is_not_told_of_its_loss_is_a_second_holder() {
    // The deadline is 50 ms, the rival is granted at 62 ms, the holder lets go at 80 ms.
    violated(Property::Loss, "stopped-holder-goes-on");
    // Its release frees the rival's lock.
    violated(Property::Loss, "stopped-holder-frees-anothers-lock");
    // The answer of the acquire came when its deadline had passed, and was used.
    violated(Property::Loss, "grant-used-too-late");
    violated(Property::Loss, "write-past-the-deadline");
}

#[test]
fn lateness_does_not_excuse_a_rival() {
    let lenient = Rules { lateness: 2_000_000_000, ..fifo() };
    for name in ["told-after-the-rival", "stopped-holder-goes-on", "grant-used-too-late"] {
        assert_violated(&history(name), &lenient, Property::Loss);
    }
    // Without the rival, the lateness covers it.
    let alone = without("told-after-the-rival", |event| event.process.as_deref() == Some("b"));
    assert_eq!(check(&alone, &lenient).verdict, Verdict::Valid);
}

#[test]
fn what_is_lost_stays_lost() {
    violated(Property::Loss, "renewed-after-the-loss");
    violated(Property::Loss, "write-after-the-loss");
}

#[test]
fn a_holder_that_falls_silent_is_left_open() {
    unknown(Property::Loss, "silent-past-its-deadline", &fifo(), "recorded nothing");
}

#[test]
fn a_release_says_what_happened() {
    violated(Property::Phantom, "stopped-holder-goes-on");
    violated(Property::Phantom, "stopped-holder-frees-anothers-lock");
    violated(Property::Phantom, "lost-unsaid");
}

#[test]
fn tokens_are_neither_missing_nor_changed() {
    for name in ["token-missing", "granted-twice", "renewal-tells-another-token"] {
        violated(Property::Tokens, name);
    }
}

#[test]
fn a_grant_is_of_the_mode_that_was_asked_for() {
    violated(Property::Exclusion, "granted-in-another-mode");
    let alone = without("granted-in-another-mode", |event| event.process.as_deref() == Some("b"));
    assert_violated(&alone, &fifo(), Property::Exclusion);
}

#[test]
fn the_second_hold_of_a_claim_that_is_used_again_counts() {
    violated(Property::Exclusion, "claim-used-twice");
}

#[test]
fn who_waits_longer_is_served_first_whatever_the_tokens() {
    for name in ["overtaken", "reader-passes-a-writer", "small-claim-passes-a-big-one"] {
        violated(Property::Overtaking, name);
    }
}

#[test]
fn newcomers_do_not_starve_a_waiter() {
    for name in ["starved-by-newcomers", "starved-until-it-gave-up"] {
        let report = violated(Property::Overtaking, name);
        assert!(report.counts.violations > 5, "{name}: {:?}", report.counts);
    }
}

#[test]
fn a_place_that_may_have_run_out_is_not_overtaken() {
    valid("stopped-waiter-lost-its-place");
}

#[test]
fn a_queue_that_was_not_recorded_is_left_open() {
    unknown(Property::Overtaking, "overtaken-but-never-said-to-be-queued", &fifo(), "is not recorded");
}

#[test]
fn a_free_lock_does_not_stay_idle() {
    for name in ["idle-after-a-release", "idle-for-longer-than-the-ttl", "idle-behind-an-abandoned-place"] {
        violated(Property::Leak, name);
    }
    // What others hold together is free for whoever can join them.
    violated(Property::Leak, "permit-left-free");
    violated(Property::Leak, "reader-waits-behind-a-reader");
}

#[test]
fn cancelled_tries_do_not_hide_an_idle_lock() {
    violated(Property::Leak, "idle-behind-cancelled-tries");
    // Where no order is promised, each of them may have been granted.
    unknown(Property::Leak, "idle-behind-cancelled-tries", &Rules::default(), "asked later");
}

#[test]
fn a_refusal_by_a_free_lock_is_left_open() {
    unknown(Property::Leak, "refused-though-free", &fifo(), "is not recorded");
}

#[test]
fn a_waiter_that_keeps_its_place_while_it_is_stopped_is_right() {
    valid("stopped-waiter-kept-its-place");
}

#[test]
fn a_killed_process_may_be_freed_before_its_death_is_seen() {
    valid("kernel-frees-before-the-crash-is-seen");
    // It was alive when the kill was about to be sent.
    let mut events = history("kernel-frees-before-the-crash-is-seen").events().to_vec();
    let crash = events.iter_mut().find(|event| event.kind == Kind::Crash).unwrap();
    crash.from = Some(10_000_000);
    assert_eq!(check(&events.clone().into(), &fifo()).verdict, Verdict::Valid);
    let crash = events.iter_mut().find(|event| event.kind == Kind::Crash).unwrap();
    crash.from = Some(11_500_000);
    assert_violated(&events.into(), &fifo(), Property::Exclusion);
}

#[test]
fn a_claim_that_goes_on_was_not_ended_by_a_crash() {
    violated(Property::Exclusion, "acts-after-its-crash");
}

#[test]
fn clock_errors_that_swallow_a_hold_leave_it_open() {
    unknown(Property::Exclusion, "clock-error-hides-an-overlap", &fifo(), "clocks");
}

#[test]
fn a_downgraded_holder_shares() {
    valid("downgrade");
    let untold = without("downgrade", |event| event.op == Some(Op::Downgrade));
    assert_violated(&untold, &fifo(), Property::Exclusion);
    // Asked for is not enough for a reader who comes before; and a refusal changes nothing.
    let mut refused = history("downgrade").events().to_vec();
    let answer = refused.iter_mut().find(|event| event.op == Some(Op::Downgrade) && event.kind == Kind::Ok);
    answer.unwrap().kind = Kind::Fail;
    assert_violated(&refused.into(), &fifo(), Property::Exclusion);
}

#[test]
fn a_lock_stays_closed_for_as_long_as_its_release_asked_for() {
    valid("cooldown");
    let mut events = history("cooldown").events().to_vec();
    // The next one is granted a second too early.
    for event in events.iter_mut().filter(|event| event.time > 10_000_000_000) {
        event.time -= 1_100_000_000;
    }
    assert_violated(&events.clone().into(), &fifo(), Property::Exclusion);
    // Nothing was asked for.
    for event in &mut events {
        event.linger_ms = None;
    }
    assert_violated(&events.into(), &fifo(), Property::Leak);
}
