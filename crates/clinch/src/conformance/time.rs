//! Odd time-outs and TTLs, deadlines that come too late, blocked runtimes.

use std::time::Duration;

use super::Fixture;
use super::client::{
    Client, LONG_TTL, eventually, expect_waiting, join, lock, lock_in_vain, queue, unique, until_past, within,
};
use super::faults::Step;
use crate::clock::Instant;
use crate::drift::Drift;
use crate::env::Env;
use crate::error::{Error, ErrorKind};
use crate::guard::Released;
use crate::lane::Lane;
use crate::locks::Locks;

/// How long an answer is held back where a deadline must not depend on it.
const ANSWER_HELD_BACK: Duration = Duration::from_millis(250);

/// A TTL whose margins are far below [`ANSWER_HELD_BACK`], so that a deadline counted from the answer stands out.
const JUDGED_TTL: Duration = Duration::from_secs(5);

/// P9: zero asks once, a tiny time-out is not for ever, a huge one does not overflow, and none leaves anything behind.
pub async fn odd_timeouts(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("timeouts");
    let mutex = one.locks.mutex(&name).unwrap();
    let tiny = [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(500)];
    let huge = [Duration::MAX, Duration::from_secs(u64::MAX / 1_000_000_000), Duration::from_secs(1 << 40)];
    for time in tiny.into_iter().chain(huge) {
        let answer = within("a request for a free lock ends", mutex.lock().timeout(time)).await;
        match answer {
            Ok(guard) => assert_eq!(guard.release().await.unwrap(), Released::Released),
            Err(error) => {
                assert!(!time.is_zero() && time < Duration::from_secs(1), "{time:?}: {error:?}");
                assert!(too_late(&one, &error), "{time:?}: {error:?}");
            }
        }
        other.expect_unused(&name).await;
    }
    let past = within("a deadline in the past ends", mutex.lock().deadline(Instant::from_nanos(0))).await;
    assert_eq!(past.unwrap().release().await.unwrap(), Released::Released);

    let guard = other.lock(&name).await;
    for time in tiny {
        let error = within("a short wait ends", mutex.lock().timeout(time)).await.unwrap_err();
        let asked_once = time.is_zero();
        assert!(
            error.kind() == ErrorKind::TimedOut || !asked_once && too_late(&one, &error),
            "{time:?}: {error:?}"
        );
        other.sees_claims(&name, 1).await;
    }
    let calls = one.faults.calls_of(Step::Claim);
    mutex.lock().timeout(Duration::ZERO).await.unwrap_err();
    assert_eq!(one.faults.calls_of(Step::Claim), calls + 1, "zero asks once");
    let waiters = huge.map(|time| {
        let mutex = mutex.clone();
        tokio::spawn(async move { mutex.lock().timeout(time).await.unwrap().release().await.unwrap() })
    });
    one.waits(&name, waiters.len()).await;
    for waiter in &waiters {
        expect_waiting("a huge time-out", waiter).await;
    }
    drop(guard);
    for waiter in waiters {
        assert_eq!(join("a wait with a huge time-out is granted", waiter).await, Released::Released);
    }
    other.expect_unused(&name).await;
}

/// Whether an error says that time ran out: before the lock was free or, across a network, before the store had answered.
fn too_late(client: &Client, error: &Error) -> bool {
    let unanswered = error.kind() == ErrorKind::Unavailable && !client.capabilities().inline;
    error.kind() == ErrorKind::TimedOut || unanswered
}

/// P5, P6: a waiter whose time is up leaves the queue, if there is one; those behind it move up.
pub async fn timed_out_waiter_stays(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("timed-out");
    let guard = one.lock(&name).await;
    let error = within("the wait ends", lock_in_vain(&other.locks, &name)).await;
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    one.sees_claims(&name, 1).await;
    let waiter = queue(&other.locks, &name);
    other.waits(&name, 1).await;
    drop(guard);
    drop(join("the waiter behind is granted", waiter).await);
    one.expect_unused(&name).await;
}

/// P9: a wait ends at its deadline although the store does not answer, and does not blame a holder that nobody saw.
pub async fn unanswered_wait(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("no-store");
    let mutex = one.locks.mutex(&name).unwrap();
    let wait = || mutex.lock().timeout(Duration::from_millis(50));
    one.faults.sever();
    let error = within("a wait without a store ends", wait()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    one.faults.heal();
    one.faults.hang(Step::Claim);
    let error = within("a wait for a hanging store ends", wait()).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Unavailable), "{error:?}");
    assert!(error.to_string().contains("answer"), "does not say that the store did not answer: {error}");
    one.faults.heal();
    other.expect_unused(&name).await;
}

/// P10: TTLs that are none are refused before anything is sent.
pub async fn odd_ttls(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let guard = client.lock(&unique("ttls")).await;
    let odd = [0, 1, 500_000, 99_999_999].map(Duration::from_nanos);
    let huge = [Duration::from_secs(86_401), Duration::from_secs(u64::MAX), Duration::MAX];
    for ttl in odd.into_iter().chain(huge) {
        assert_eq!(client.locks.clone().ttl(ttl).unwrap_err().kind(), ErrorKind::Invalid, "{ttl:?}");
        assert_eq!(guard.extend(ttl).await.unwrap_err().kind(), ErrorKind::Invalid, "{ttl:?}");
    }
    assert_eq!(client.locks.clone().max_hold(Duration::ZERO).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(client.faults.calls_of(Step::Renew), 0, "an odd TTL was sent");
    assert!(guard.is_held());
    for ttl in [Duration::from_millis(100), Duration::from_secs(86_400)] {
        assert!(client.locks.clone().ttl(ttl).is_ok(), "{ttl:?}");
    }
    let forever = client.locks.clone().max_hold(Duration::MAX).unwrap();
    let guard = lock(&forever, &unique("ttls")).await;
    assert!(guard.is_held());
}

/// P2: the deadline is counted from before the claim was sent, however late the answer comes.
pub async fn deadline_counts_from_the_reply(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let name = unique("deadline");
    let gate = client.faults.hold_reply_of(Step::Claim);
    let request = queue(&client.unrenewed(JUDGED_TTL), &name);
    within("the claim is applied", gate.reached()).await;
    let reached = client.faults.last_call_of(Step::Claim).unwrap();
    until_past(&client, client.now() + ANSWER_HELD_BACK).await;
    gate.open();
    let guard = join("the claim is granted", request).await;
    // Where a lease has no end, this one has: nobody renews it.
    let deadline = guard.deadline().expect("an unrenewed lease has a deadline");
    // The drift that is taken off must not make up for the time that the answer took.
    let latest = reached + (JUDGED_TTL - client.env.drift().over(JUDGED_TTL));
    assert!(deadline < latest, "the deadline is {:?} after the claim", deadline.since(reached));
    drop(guard);
    client.expect_unused(&name).await;
}

/// P2: after an extension, the deadline is counted from before that was sent.
pub async fn deadline_counts_from_the_extensions_reply(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    if !client.capabilities().expiry {
        return;
    }
    let guard = lock(&client.unrenewed(JUDGED_TTL), &unique("deadline-extension")).await;
    let gate = client.faults.hold_reply_of(Step::Renew);
    let before = guard.deadline().unwrap();
    let (extended, reached) = tokio::join!(guard.extend(JUDGED_TTL * 2), async {
        within("the renewal is applied", gate.reached()).await;
        assert_eq!(guard.deadline().unwrap(), before, "the deadline moved before the store confirmed it");
        let reached = client.faults.last_call_of(Step::Renew).unwrap();
        until_past(&client, client.now() + ANSWER_HELD_BACK).await;
        gate.open();
        reached
    });
    extended.unwrap();
    let deadline = guard.deadline().unwrap();
    let latest = reached + (JUDGED_TTL - client.env.drift().over(JUDGED_TTL)) * 2;
    assert!(deadline < latest, "the deadline is {:?} after the renewal", deadline.since(reached));
    assert!(deadline > before);
}

/// A grant whose answer comes when its lease has nearly run out, or has, is asked for again: this process may have been
/// stopped meanwhile. Who waits without a deadline gets the lock in the end.
pub async fn grant_comes_too_late(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("late-grant");
    for wait in [false, true] {
        let gate = one.faults.hold_reply_of(Step::Claim);
        let mutex = one.with_ttl(fixture.ttl()).mutex(&name).unwrap();
        let request =
            tokio::spawn(
                async move { if wait { mutex.lock().await.map(Some) } else { mutex.try_lock().await } },
            );
        within("the claim reaches the store", gate.reached()).await;
        until_past(&one, one.now() + fixture.ttl() * 5 / 4).await;
        gate.open();
        let guard = join("the request ends", request).await.expect("a late grant is no failure");
        let guard = guard.expect("nobody else asked for the lock");
        guard.verify().await.unwrap();
        assert!(guard.remaining().is_none_or(|left| left > fixture.ttl() / 4), "{:?}", guard.remaining());
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        other.expect_unused(&name).await;
    }
}

/// P1: a deadline leaves room for as much drift as the URL states, also after a renewal.
pub async fn stated_drift_is_ignored(fixture: &dyn Fixture) {
    let env = Env::host(Lane::thread()).with_drift(Drift::percent(25).unwrap());
    let locks = match fixture.url() {
        Some(url) => {
            let with =
                |drift: &str| format!("{url}{}drift={drift}", if url.contains('?') { '&' } else { '?' });
            for odd in ["0", "26", "x"] {
                let refused = Locks::connect(&with(odd), env.clone()).await.unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused:?}");
            }
            Locks::connect(&with("25"), Env::host(Lane::thread())).await.unwrap()
        }
        None => Locks::new(fixture.connect(&env).await, env.clone()),
    };
    let guard = lock(&locks, &unique("drift")).await;
    let ttl = locks.lease_ttl();
    for _ in 0..2 {
        let Some(deadline) = guard.deadline() else { return assert!(!locks.capabilities().expiry) };
        assert!(deadline < env.now() + ttl * 3 / 4, "{:?} from now", deadline.since(env.now()));
        guard.extend(ttl).await.unwrap();
    }
}

/// A lease that nobody renews is lost one TTL after it was asked for, and then somebody else's.
pub async fn unrenewed_lease(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("unrenewed");
    let guard = lock(&one.unrenewed(fixture.ttl()), &name).await;
    let end = one.now() + fixture.ttl();
    let deadline = guard.deadline().expect("an unrenewed lease has a deadline");
    assert!(deadline < end);
    let waiter = queue(&other.locks, &name);
    within("the loss is signalled", guard.lost()).await;
    assert!(one.now() >= deadline, "lost before the deadline");
    let next = join("the lock of an expired holder is granted", waiter).await;
    assert!(!guard.is_held());
    drop((guard, next));
    other.expect_unused(&name).await;
}

/// `Renew::Never` sends no renewals, not even late ones.
pub async fn renewed_although_never(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let guard = lock(&client.unrenewed(fixture.ttl()), &unique("never")).await;
    within("the loss is signalled", guard.lost()).await;
    assert_eq!(client.faults.calls_of(Step::Renew), 0);
    assert_eq!(guard.extend(fixture.ttl()).await.unwrap_err().kind(), ErrorKind::Lost);
}

/// An extension moves the deadline, and the lease then lasts that long.
pub async fn extension_does_not_extend(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !one.capabilities().expiry {
        return;
    }
    let name = unique("extend");
    let guard = lock(&one.unrenewed(fixture.ttl()), &name).await;
    let old = guard.deadline().unwrap();
    guard.extend(LONG_TTL).await.unwrap();
    assert!(guard.deadline().unwrap() > old + LONG_TTL / 2);
    until_past(&one, old + fixture.ttl()).await;
    assert!(guard.is_held(), "an extended lease was lost at its old deadline");
    guard.verify().await.unwrap();
    assert!(!other.could_lock(&name).await, "the store did not extend the lease");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    other.expect_unused(&name).await;
}

/// P9: a lease with a longest hold is lost by then although renewals go well, and the lock is freed without its TTL.
pub async fn held_for_ever(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("max-hold");
    let hold = Duration::from_millis(300);
    let guard = lock(&one.locks.clone().max_hold(hold).unwrap(), &name).await;
    let end = one.now() + hold;
    assert!(guard.deadline().expect("a longest hold is a deadline") <= end);
    let waiter = queue(&other.locks, &name);
    let next = join("the lock is freed after the longest hold", waiter).await;
    assert!(!guard.is_held(), "two guards hold at a time");
    within("the loss is signalled", guard.lost()).await;
    assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
    next.verify().await.unwrap();
    drop(next);
    other.expect_unused(&name).await;
}

/// P8: a caller that blocks the only thread of its runtime for longer than the TTL still holds its lock.
pub async fn runtime_blocked(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("blocked");
    let ttl = fixture.ttl() * 2;
    let guard = lock(&one.with_ttl(ttl), &name).await;
    let first = guard.deadline();
    std::thread::sleep(ttl + ttl / 4);
    assert!(guard.is_held(), "a blocked caller lost its lock");
    guard.verify().await.unwrap();
    assert!(!other.could_lock(&name).await);
    if one.capabilities().expiry {
        assert!(guard.deadline() > first);
    }
    drop(guard);
    eventually("the lock is free", async || other.could_lock(&name).await.then_some(())).await;
}
