//! Each property: histories that keep it and histories that break it, as small as they get.
//!
//! Events are written as `CLIENT TIME WHAT`, with times in milliseconds; see [`story`].

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test may fail")]

mod support;

use clinch_verify::{Call, ClaimRecorder, History, Mode, Property, Recorder, Verdict, check};
use std::collections::HashMap;
use support::{assert_violated, rules};

const MS: u64 = 1_000_000;

/// Records a story: one step per line, `CLIENT TIME STEP [key=value...]`.
///
/// Steps: `acquire`, `enqueue`, `renew`, `release` and their outcomes `granted`, `ok`, `fail`, `unknown` (of the
/// latest call); `lost`, `crash`; `write` and `refused` at the store. Keys: `token`, `dl`, `te`, `mode`, `claim`.
fn story(text: &str) -> History {
    let recorder = Recorder::memory();
    let mut claims: HashMap<String, ClaimRecorder> = HashMap::new();
    let mut calls: HashMap<String, Call> = HashMap::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let mut words = line.split_whitespace();
        let client = words.next().unwrap().to_owned();
        let at = words.next().unwrap().parse::<u64>().unwrap() * MS;
        let step = words.next().unwrap();
        let keys: HashMap<&str, &str> = words.map(|word| word.split_once('=').unwrap()).collect();
        let number = |key: &str| keys.get(key).map(|value| value.parse::<u64>().unwrap());
        let recorder = recorder.clone().clock_error(number("te").unwrap_or(0) * MS);
        let id = keys.get("claim").map_or(format!("of-{client}"), |id| (*id).to_owned());
        let mode = match keys.get("mode").copied() {
            Some("shared") => Mode::Shared,
            Some(permits) => {
                let (n, of) = permits.split_once('/').unwrap();
                Mode::Permits { n: n.parse().unwrap(), of: of.parse().unwrap() }
            }
            None => Mode::Exclusive,
        };
        if !claims.contains_key(&client) || keys.contains_key("claim") || keys.contains_key("te") {
            claims.insert(client.clone(), recorder.claim(&client, "lock", &id, mode).ttl_ms(100));
        }
        let claim = &claims[&client];
        let deadline = number("dl").map(|ms| ms * MS);
        let call = match step {
            "acquire" => Some(claim.acquire(at)),
            "enqueue" => Some(claim.enqueue(at)),
            "renew" => Some(claim.renew(at)),
            "release" => Some(claim.release(at)),
            _ => None,
        };
        if let Some(call) = call {
            calls.insert(client, call);
            continue;
        }
        match step {
            "granted" => calls[&client].granted(at, number("token"), deadline),
            "renewed" => calls[&client].renewed(at, deadline),
            "ok" => calls[&client].ok(at),
            "fail" => calls[&client].fail(at),
            "unknown" => calls[&client].unknown(at),
            "lost" => claim.lost(at),
            "crash" => recorder.crash(&client, at, at),
            "write" => recorder.store_write("lock", Some(&id), number("token").unwrap(), true, at),
            "refused" => recorder.store_write("lock", Some(&id), number("token").unwrap(), false, at),
            other => panic!("no step is called {other}"),
        }
    }
    recorder.history()
}

#[track_caller]
fn valid(text: &str) {
    let report = check(&story(text), &rules());
    assert_eq!(report.verdict, Verdict::Valid, "{report:#?}");
}

#[track_caller]
fn violated(property: Property, text: &str) {
    assert_violated(&story(text), &rules(), property);
}

/// Asserts that one property is not violated, whatever others are.
#[track_caller]
fn kept(property: Property, text: &str) {
    let report = check(&story(text), &rules());
    assert!(report.of(property).next().is_none(), "{report:#?}");
}

#[test]
fn holds_one_after_the_other_are_fine() {
    valid(
        "a 1 acquire\n a 2 granted token=1 dl=90\n a 5 release\n a 6 ok\n b 3 acquire\n b 7 granted token=2 dl=99",
    );
    // The first holder was killed and its deadline, though later, counts no more.
    valid("a 1 acquire\n a 2 granted token=1 dl=90\n a 5 crash\n b 5 acquire\n b 6 granted token=2 dl=99");
    // Told of the loss at the very instant of the next grant.
    valid("a 1 acquire\n a 2 granted token=1 dl=90\n a 5 lost\n b 4 acquire\n b 5 granted token=2 dl=99");
}

#[test]
fn two_exclusive_holders() {
    violated(
        Property::Exclusion,
        "a 1 acquire\n a 2 granted dl=90\n b 3 acquire\n b 5 granted dl=99\n a 6 release",
    );
    violated(Property::Exclusion, "a 1 acquire\n a 2 granted\n b 3 acquire\n b 5 granted");
    // A process that adopts another's claim is a second holder.
    violated(
        Property::Exclusion,
        "a 1 acquire claim=x\n a 2 granted dl=90\n b 3 acquire claim=x\n b 5 granted dl=99",
    );
}

#[test]
fn an_overlap_within_the_clock_error_proves_nothing() {
    let story =
        "a 1 acquire te=3\n a 2 granted dl=90\n a 9 release\n a 12 ok\n b 1 acquire te=3\n b 8 granted dl=99";
    kept(Property::Exclusion, story);
    violated(Property::Exclusion, &story.replace("te=3", "te=0"));
}

#[test]
fn a_renewal_extends_the_hold() {
    let renewed =
        "a 1 acquire\n a 2 granted dl=10\n a 5 renew\n a 6 renewed dl=20\n a 15 renew\n a 16 renewed dl=30";
    violated(Property::Exclusion, &format!("{renewed}\n b 3 acquire\n b 25 granted dl=90"));
    kept(Property::Exclusion, &format!("{renewed}\n b 3 acquire\n b 30 granted dl=90"));
}

#[test]
fn a_writer_among_readers() {
    let readers = "a 1 acquire mode=shared\n a 2 granted dl=90\n b 1 acquire mode=shared\n b 3 granted dl=80";
    valid(readers);
    violated(Property::Exclusion, &format!("{readers}\n c 4 acquire\n c 5 granted dl=90"));
    violated(Property::Exclusion, &format!("{readers}\n c 4 acquire mode=1/5\n c 5 granted dl=90"));
    violated(
        Property::Exclusion,
        "c 4 acquire\n c 5 granted dl=90\n a 1 acquire mode=shared\n a 6 granted dl=90",
    );
}

#[test]
fn more_permits_than_there_are() {
    let three = "a 1 acquire mode=1/3\n a 2 granted dl=90\n b 1 acquire mode=2/3\n b 3 granted dl=90";
    valid(three);
    violated(Property::Exclusion, &format!("{three}\n c 1 acquire mode=1/3\n c 4 granted dl=90"));
    kept(
        Property::Exclusion,
        &format!("{three}\n a 3 release\n a 4 ok\n c 1 acquire mode=1/3\n c 4 granted dl=90"),
    );
    violated(Property::Exclusion, "a 1 acquire mode=4/3\n a 2 granted dl=90");
    // They disagree about how many there are.
    violated(
        Property::Exclusion,
        "a 1 acquire mode=1/3\n a 2 granted dl=90\n b 1 acquire mode=1/5\n b 3 granted dl=90",
    );
}

#[test]
fn the_witness_of_too_many_permits_names_the_fewest_holders() {
    let mut text = String::new();
    for (client, n) in [("a", 1), ("b", 1), ("c", 6), ("d", 3)] {
        text += &format!("{client} 1 acquire mode={n}/8\n {client} 2 granted dl=90\n");
    }
    let report = check(&story(&text), &rules());
    let violation = report.of(Property::Exclusion).next().unwrap();
    assert_eq!(violation.witness.len(), 4, "{violation:#?}");
}

const GRANT: &str = "a 1 acquire\n a 2 granted token=5 dl=900\n";

#[test]
fn a_fenced_store_that_does_its_work() {
    valid(&format!("{GRANT} a 3 write token=5\n a 4 write token=5"));
    // The old holder wakes up, writes, and is refused.
    valid(&format!(
        "{GRANT} a 3 write token=5\n a 4 lost\n b 5 acquire\n b 6 granted token=6 dl=900\n b 7 write token=6\n \
         a 8 refused token=5"
    ));
    // The store keeps its fence with the lock: the new holder need not have written.
    valid(&format!("{GRANT} a 4 lost\n b 5 acquire\n b 6 granted token=6 dl=900\n a 8 refused token=5"));
}

#[test]
fn a_stale_write_is_accepted() {
    violated(Property::Fence, "b 7 write token=6\n a 8 write token=5");
}

#[test]
fn two_claims_write_under_one_token() {
    violated(Property::Fence, "a 7 write token=5\n b 8 write token=5");
}

#[test]
fn a_good_write_is_refused() {
    violated(Property::Fence, &format!("{GRANT} a 3 refused token=5"));
    violated(Property::Fence, &format!("{GRANT} a 3 write token=5\n a 4 refused token=5"));
}

#[test]
fn a_refusal_that_an_unanswered_acquire_may_explain_is_noted() {
    let history = story(&format!("{GRANT} b 3 acquire\n a 4 refused token=5\n b 5 unknown"));
    let report = check(&history, &rules());
    assert!(report.of(Property::Fence).next().is_none());
    assert!(report.notes.iter().any(|note| note.contains("refusal")), "{:?}", report.notes);
}

#[test]
fn a_later_grant_has_a_smaller_token() {
    violated(Property::Tokens, "a 1 acquire\n a 2 granted token=9\n b 3 acquire\n b 4 granted token=8");
    // Holders who share are ordered by who asked after whose answer.
    let shared =
        "a 1 acquire mode=shared\n a 2 granted token=9\n b 3 acquire mode=shared\n b 4 granted token=8";
    violated(Property::Tokens, shared);
    kept(Property::Tokens, &shared.replace("b 3", "b 2"));
}

#[test]
fn exclusive_grants_are_ordered_even_when_both_had_asked() {
    let waiting =
        "a 1 acquire\n b 1 acquire\n a 2 granted token=9\n a 3 release\n a 4 ok\n b 5 granted token=8";
    violated(Property::Tokens, waiting);
    kept(Property::Tokens, &waiting.replace("token=8", "token=10"));
}

#[test]
fn two_claims_get_one_token() {
    violated(
        Property::Tokens,
        "a 1 acquire mode=shared\n b 1 acquire mode=shared\n a 2 granted token=9\n b 3 granted token=9",
    );
}

#[test]
fn a_crashed_holder_blocks_a_waiter() {
    let crashed = "a 1 acquire\n a 2 granted token=1\n a 5 crash\n b 3 acquire\n";
    // Within TTL (100) and slack (10).
    valid(&format!("{crashed} b 115 granted token=2"));
    violated(Property::Leak, &format!("{crashed} b 116 granted token=2"));
    violated(Property::Leak, &format!("{crashed} b 300 fail"));
    violated(Property::Leak, &format!("{crashed} c 300 acquire"));
    // Nobody waited.
    valid("a 1 acquire\n a 2 granted token=1\n a 5 crash\n b 500 acquire\n b 505 granted token=2");
}

#[test]
fn a_released_lock_is_not_granted() {
    let released = "a 1 acquire\n a 2 granted token=1\n b 3 acquire\n a 4 release\n a 5 ok\n";
    valid(&format!("{released} b 6 granted token=2"));
    violated(Property::Leak, &format!("{released} b 116 granted token=2"));
}

#[test]
fn an_acquire_in_doubt_blocks_for_its_ttl_and_no_longer() {
    let doubt = "a 1 acquire\n a 2 granted token=1\n a 3 release\n a 4 ok\n b 5 acquire\n c 6 acquire\n b 50 unknown\n";
    kept(Property::Leak, &format!("{doubt} c 160 granted token=3"));
    violated(Property::Leak, &format!("{doubt} c 161 granted token=3"));
}

#[test]
fn a_queued_client_may_block_until_it_asks_or_its_lease_ends() {
    let queued = "a 1 enqueue\n a 2 ok\n b 3 acquire\n";
    kept(Property::Leak, &format!("{queued} a 200 acquire\n b 210 granted token=2"));
    violated(Property::Leak, &format!("{queued} a 200 acquire\n b 211 granted token=2"));
    kept(Property::Leak, &format!("{queued} a 5 crash\n b 115 granted token=2"));
    violated(Property::Leak, &format!("{queued} a 5 crash\n b 116 granted token=2"));
}

#[test]
fn an_acquire_on_a_free_lock_is_never_answered() {
    violated(Property::Leak, "a 1 acquire\n b 20 enqueue");
    kept(Property::Leak, "a 1 acquire\n b 11 enqueue");
    // The caller gave up and withdrew in time.
    kept(Property::Leak, "a 1 acquire\n a 5 release\n a 6 ok\n c 900 crash");
}

#[test]
fn a_waiter_behind_a_live_holder_is_not_starved() {
    kept(Property::Leak, "a 1 acquire\n a 2 granted token=1\n b 3 acquire\n c 90000 crash");
}

#[test]
fn an_overtaken_waiter() {
    let queued = "h 1 acquire\n h 2 granted token=1\n a 3 enqueue\n a 4 ok\n a 4 acquire\n b 5 enqueue\n b 6 ok\n \
                  b 6 acquire\n h 7 release\n h 8 ok\n";
    let ends = "X 9 granted token=2\n X 10 release\n X 11 ok\n Y 12 granted token=3";
    let fair = format!("{queued} {}", ends.replace('X', "a").replace('Y', "b"));
    let unfair = format!("{queued} {}", ends.replace('X', "b").replace('Y', "a"));
    valid(&fair);
    violated(Property::Overtaking, &unfair);
    // Without tokens, the time of the grants tells.
    let untold = |text: &str| text.replace("token=1", "").replace("token=2", "").replace("token=3", "");
    valid(&untold(&fair));
    violated(Property::Overtaking, &untold(&unfair));
    // Nor do tokens excuse it, which may be the tickets of the queue.
    violated(Property::Overtaking, &unfair.replace("token=2", "token=4"));
    // Not promised, not judged.
    let rules = clinch_verify::Rules { fifo: false, ..rules() };
    assert_eq!(check(&story(&unfair), &rules).verdict, Verdict::Valid);
}

#[test]
fn permits_overtake_only_where_they_do_not_fit_together() {
    let story = |n: u64| {
        format!(
            "a 1 enqueue mode={n}/3\n a 2 ok\n a 2 acquire\n b 3 acquire mode=2/3\n b 4 granted\n b 5 release\n \
             b 6 ok\n a 7 granted"
        )
    };
    kept(Property::Overtaking, &story(1));
    violated(Property::Overtaking, &story(2));
}

#[test]
fn a_release_of_what_was_not_held() {
    let held = "a 1 acquire\n a 2 granted dl=90\n";
    valid(&format!("{held} a 3 release\n a 4 ok"));
    valid(&format!("{held} a 3 lost\n a 4 release\n a 5 fail"));
    violated(Property::Phantom, &format!("{held} a 3 lost\n a 4 release\n a 5 ok"));
    violated(Property::Phantom, &format!("{held} a 3 release\n a 4 ok\n a 5 release\n a 6 ok"));
    violated(Property::Phantom, "a 3 release\n a 4 ok");
    violated(Property::Phantom, "a 1 acquire\n a 2 fail\n a 3 release\n a 4 ok");
    // Who does not know may release to make sure.
    kept(Property::Phantom, "a 1 acquire\n a 2 unknown\n a 3 release\n a 4 ok");
}

#[test]
fn a_failed_claim_holds() {
    violated(Property::Phantom, "a 1 acquire\n a 2 fail\n a 3 renew\n a 4 renewed dl=90");
    violated(Property::Phantom, "a 1 acquire\n a 2 fail\n a 4 granted");
    violated(Property::Phantom, "a 1 acquire\n a 2 fail\n a 4 write token=3");
    kept(Property::Phantom, "a 1 acquire\n a 2 fail\n a 4 refused token=3");
}

#[test]
fn a_loss_is_told_by_the_deadline() {
    let held = "a 1 acquire\n a 2 granted dl=50\n";
    valid(&format!("{held} a 50 lost"));
    violated(Property::Loss, &format!("{held} a 51 lost"));
    let lenient = clinch_verify::Rules { lateness: 5 * MS, ..rules() };
    assert_eq!(check(&story(&format!("{held} a 55 lost")), &lenient).verdict, Verdict::Valid);
    // Renewed, then late.
    violated(Property::Loss, &format!("{held} a 10 renew\n a 11 renewed dl=60\n a 61 lost"));
    kept(Property::Loss, &format!("{held} a 10 renew\n a 11 renewed dl=60\n a 60 lost"));
}

#[test]
fn a_loss_is_never_told() {
    let held = "a 1 acquire\n a 2 granted dl=50\n";
    violated(Property::Loss, &format!("{held} a 51 acquire claim=other"));
    kept(Property::Loss, &format!("{held} a 50 acquire claim=other"));
    kept(Property::Loss, &format!("{held} b 99 acquire"));
    kept(Property::Loss, &format!("{held} a 40 crash\n b 99 acquire"));
}

#[test]
fn what_was_lost_comes_back() {
    violated(
        Property::Loss,
        "a 1 acquire\n a 2 granted dl=50\n a 3 renew\n a 60 renewed dl=99\n a 70 release",
    );
    violated(Property::Loss, "a 1 acquire\n a 2 granted dl=50\n a 3 renew\n a 4 lost\n a 6 renewed dl=99");
}

#[test]
fn nothing_granted_is_not_valid() {
    assert_eq!(check(&History::new(), &rules()).verdict, Verdict::Unknown);
    assert_eq!(check(&story("a 1 acquire\n a 2 fail"), &rules()).verdict, Verdict::Unknown);
    let nothing = rules().only(&[]);
    assert_eq!(check(&story(GRANT), &nothing).verdict, Verdict::Unknown);
}

#[test]
fn a_claim_granted_by_two_calls_is_not_valid() {
    let report = check(&story(&format!("{GRANT} a 3 acquire\n a 4 granted token=5 dl=900")), &rules());
    assert_eq!(report.verdict, Verdict::Unknown, "{report:#?}");
    assert!(report.notes[0].contains("asked for again"));
}

#[test]
fn a_process_that_acts_after_it_was_killed_makes_the_history_unusable() {
    let report = check(&story(&format!("{GRANT} a 3 crash\n a 4 release")), &rules());
    assert_eq!(report.verdict, Verdict::Unknown, "{report:#?}");
    assert!(report.notes[0].contains("after it was killed"), "{:?}", report.notes);
}

#[test]
fn violations_beyond_the_first_hundred_are_counted() {
    let recorder = Recorder::memory();
    recorder.store_write("lock", None, 1, true, 1000);
    for time in 0..300 {
        recorder.store_write("lock", None, 0, true, 2000 + time);
    }
    let report = check(&recorder.history(), &rules());
    assert_eq!((report.violations.len(), report.counts.violations), (100, 300));
    assert!(report.notes[0].contains("300 violations"));
}

/// Who looks at a deadline now and then sees a renewal late; it came in time all the same, and the hold went on.
#[test]
fn a_new_deadline_that_is_noticed_late_was_taken_since_the_last_look() {
    let recorder = Recorder::memory();
    let holder = recorder.claim("c1", "l", "one", Mode::Exclusive).ttl_ms(1000);
    holder.acquire(0).granted(MS, Some(1), Some(900 * MS));
    holder.renewed_since(800 * MS, 1000 * MS, Some(1700 * MS));
    holder.release(1500 * MS).ok(1501 * MS);
    assert_eq!(check(&recorder.history(), &rules()).verdict, Verdict::Valid);
    let rival = recorder.claim("c2", "l", "two", Mode::Exclusive).ttl_ms(1000);
    rival.acquire(1100 * MS).granted(1200 * MS, Some(2), Some(2000 * MS));
    rival.release(1300 * MS).ok(1301 * MS);
    assert_violated(&recorder.history(), &rules(), Property::Exclusion);
}
