//! Random schedules: a lock that works is always acquitted, and a fault put into one is always found.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test may fail")]

mod support;

use clinch_verify::{Event, History, Kind, Mode, Op, Property, Recorder, Verdict, check};
use proptest::prelude::*;
use support::{assert_violated, rules};

const MS: u64 = 1_000_000;
const TTL_MS: u64 = 1_000;

/// How a hold ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Release,
    Expiry,
    Crash,
}

/// One turn of the lock: exclusive for one client, or shared by several.
#[derive(Debug, Clone)]
struct Turn {
    /// How long the client waits and holds, in ms.
    waits: u64,
    holds: u64,
    end: End,
    readers: u64,
    renewals: u64,
    writes: bool,
    /// How far the token rises.
    step: u64,
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let end = prop_oneof![3 => Just(End::Release), 1 => Just(End::Expiry), 1 => Just(End::Crash)];
    let turn = (0..400u64, 2..600u64, end, 0..4u64, 0..3u64, any::<bool>(), 1..9u64);
    let turn = turn.prop_map(|(waits, holds, end, readers, renewals, writes, step)| Turn {
        waits,
        holds,
        end,
        readers,
        renewals,
        writes,
        step,
    });
    prop::collection::vec(turn, 2..40)
}

/// An exclusive hold of the schedule.
struct Held {
    /// In ms: surely held from the one to the other.
    from: u64,
    until: u64,
    token: u64,
    /// The place of the grant in the history.
    granted: usize,
}

/// Plays the turns on a lock that works: the history and its exclusive holds.
fn play(turns: &[Turn]) -> (Vec<Event>, Vec<Held>) {
    let recorder = Recorder::memory();
    let (mut now, mut token, mut asked) = (10u64, 0u64, 0u64);
    let mut shared = false;
    let mut held = Vec::new();
    for (number, turn) in turns.iter().enumerate() {
        // Who holds next may have asked while another one held, but not before those ahead of it.
        // Readers do not wait for readers.
        let waits = if shared && turn.readers > 1 { 0 } else { turn.waits };
        shared = turn.readers > 1;
        asked = (asked + 3).max(now.saturating_sub(waits));
        now = now.max(asked + 3);
        let readers = turn.readers.max(1);
        let mode = if turn.readers > 1 { Mode::Shared } else { Mode::Exclusive };
        let mut free = now;
        for reader in 0..readers {
            token += turn.step;
            let process = format!("c{number}-{reader}");
            let claim = recorder.claim(&process, "lock", &format!("{process}-claim"), mode).ttl_ms(TTL_MS);
            claim.enqueue(asked * MS).ok((asked + 1) * MS);
            let call = claim.acquire((asked + 1) * MS);
            let granted = recorder.history().events().len();
            let mut deadline = now + TTL_MS - 50;
            call.granted(now * MS, Some(token), Some(deadline * MS));
            let mut ends = now;
            for _ in 0..turn.renewals {
                ends += turn.holds;
                claim.renew((ends - 1) * MS).renewed(ends * MS, Some((ends + TTL_MS - 51) * MS));
                deadline = ends + TTL_MS - 51;
            }
            ends += turn.holds;
            if turn.writes && mode == Mode::Exclusive {
                recorder.store_write("lock", Some(&format!("{process}-claim")), token, true, (now + 1) * MS);
            }
            let gone = match turn.end {
                End::Release => {
                    claim.release(ends * MS).ok((ends + 1) * MS);
                    ends + 1
                }
                End::Expiry => {
                    claim.lost(deadline * MS);
                    ends = deadline;
                    deadline + 50
                }
                End::Crash => {
                    recorder.crash(&process, ends * MS, ends * MS);
                    ends + TTL_MS
                }
            };
            if mode == Mode::Exclusive {
                held.push(Held { from: now, until: ends, token, granted });
            }
            free = free.max(gone);
        }
        now = free + 1;
    }
    (recorder.history().events().to_vec(), held)
}

proptest! {
    #[test]
    fn a_lock_that_works_is_acquitted(turns in turns()) {
        let (events, _) = play(&turns);
        let report = check(&events.into(), &rules());
        prop_assert_eq!(report.verdict, Verdict::Valid, "{:#?}", report);
    }

    #[test]
    fn the_order_of_recording_does_not_matter(turns in turns(), at in any::<prop::sample::Index>()) {
        let (mut events, _) = play(&turns);
        // Events of one instant keep their order: those of a call and its outcome differ in time here.
        let middle = at.index(events.len());
        events.rotate_left(middle);
        prop_assert_eq!(check(&events.into(), &rules()).verdict, Verdict::Valid);
    }

    #[test]
    fn an_intruder_is_found(turns in turns(), which in any::<prop::sample::Index>(), at in 0.0..1.0f64) {
        let (events, held) = play(&turns);
        prop_assume!(!held.is_empty());
        let victim = &held[which.index(held.len())];
        let start = victim.from * MS + ((victim.until - victim.from) as f64 * at * 0.9 * MS as f64) as u64;
        let intruder = Recorder::memory();
        let claim = intruder.claim("intruder", "lock", "intruder", Mode::Exclusive);
        claim.acquire(start - 1).granted(start, None, Some(start + MS));
        let mut history = History::from(events);
        history.append(intruder.history());
        assert_violated(&history, &rules(), Property::Exclusion);
    }

    #[test]
    fn a_token_that_falls_is_found(turns in turns(), one in any::<prop::sample::Index>(), other in any::<prop::sample::Index>()) {
        let (mut events, held) = play(&turns);
        prop_assume!(held.len() > 1);
        let (one, other) = (&held[one.index(held.len())], &held[other.index(held.len())]);
        prop_assume!(one.granted != other.granted);
        events[one.granted].token = Some(other.token);
        events[other.granted].token = Some(one.token);
        assert_violated(&events.clone().into(), &rules(), Property::Tokens);
        // Half a swap: the same token twice.
        events[other.granted].token = Some(other.token);
        assert_violated(&events.into(), &rules(), Property::Tokens);
    }

    #[test]
    fn a_stale_write_is_found(turns in turns(), which in any::<prop::sample::Index>()) {
        let (events, held) = play(&turns);
        prop_assume!(held.len() > 1);
        let (last, stale) = (&held[held.len() - 1], &held[which.index(held.len() - 1)]);
        let mut history = History::from(events);
        let late = Recorder::memory();
        late.store_write("lock", None, last.token, true, last.until * MS);
        late.store_write("lock", None, stale.token, true, last.until * MS + 1);
        history.append(late.history());
        assert_violated(&history, &rules(), Property::Fence);
    }

    #[test]
    fn a_lock_that_stays_stuck_is_found(turns in turns(), which in any::<prop::sample::Index>()) {
        let (mut events, held) = play(&turns);
        prop_assume!(!held.is_empty());
        // The grant of one turn is put off by 10 s, as is all that comes after it; those who wait have asked.
        let from = held[which.index(held.len())].from * MS;
        let asks = |event: &Event| {
            event.op == Some(Op::Enqueue) || (event.op, event.kind) == (Some(Op::Acquire), Kind::Invoke)
        };
        for event in events.iter_mut().filter(|event| event.time >= from && !asks(event)) {
            event.time += 10_000 * MS;
            event.from = event.from.map(|from| from + 10_000 * MS);
            event.deadline = event.deadline.map(|deadline| deadline + 10_000 * MS);
        }
        assert_violated(&events.into(), &rules(), Property::Leak);
    }

    #[test]
    fn nonsense_is_judged_without_fuss(events in prop::collection::vec(nonsense(), 0..60)) {
        let history = History::from(events);
        let report = check(&history, &rules());
        prop_assert!(report.verdict != Verdict::Valid || report.counts.grants > 0);
        // Whatever was found, its witness stands.
        for property in Property::ALL {
            if report.of(property).next().is_some() {
                assert_violated(&history, &rules(), property);
            }
        }
    }
}

fn nonsense() -> impl Strategy<Value = Event> {
    let kind = prop::sample::select(vec![
        Kind::Invoke,
        Kind::Invoke,
        Kind::Ok,
        Kind::Ok,
        Kind::Ok,
        Kind::Fail,
        Kind::Unknown,
        Kind::Lost,
        Kind::Crash,
        Kind::Store,
    ]);
    let op = prop::sample::select(vec![Op::Acquire, Op::Acquire, Op::Enqueue, Op::Renew, Op::Release]);
    let mode = prop::sample::select(vec![
        Mode::Exclusive,
        Mode::Shared,
        Mode::Permits { n: 2, of: 3 },
        Mode::Permits { n: 1, of: 3 },
    ]);
    let numbers = (0..5u64, 0..300u64, prop::option::of(0..400u64), 0..4u64, any::<bool>());
    (kind, op, mode, numbers).prop_map(|(kind, op, mode, (who, time, deadline, token, accepted))| {
        let op = if kind == Kind::Store { Op::Write } else { op };
        Event {
            id: Some(who),
            process: Some(format!("c{}", who / 2)),
            lock: Some("lock".to_owned()),
            op: Some(op),
            mode: Some(mode),
            claim: Some(format!("claim{who}")),
            // Only grants and writes carry tokens.
            token: Some(token).filter(|_| op == Op::Acquire || op == Op::Write),
            deadline: deadline.map(|deadline| deadline * MS),
            accepted: (kind == Kind::Store).then_some(accepted),
            ttl_ms: Some(20),
            ..Event::new(kind, if kind == Kind::Crash { 300 } else { time } * MS)
        }
    })
}
