//! Two holders, overtaking, leaked locks.

use std::sync::Arc;

use clinch_verify::{Property, Rules};

use super::client::{
    Client, LONG_TTL, PATIENCE, Polled, answered, eventually, expect_waiting, join, lock_in_vain, queue,
    runtime, unique, within,
};
use super::history::{Ask, contend};
use super::{Fixture, history};
use crate::error::ErrorKind;
use crate::guard::Released;

/// P1, P3: under contention of clients and tasks, with holders that release, drop, give up and overstay, no two hold at
/// a time, tokens rise if there are any, a fenced store gets no write that it would have to regret, and nothing leaks.
pub async fn holders_overlap(fixture: &dyn Fixture) {
    let expiry = Client::new(fixture).await.capabilities().expiry;
    contend(fixture, LONG_TTL, &[Ask::Exclusive], false);
    if expiry {
        contend(fixture, fixture.ttl(), &[Ask::Exclusive], true);
    }
}

/// P1: a client of the same process and the same store is somebody else.
pub async fn second_client_shares_a_hold(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("second-client");
    let guard = one.lock(&name).await;
    assert!(!other.could_lock(&name).await, "another client got a lock that is held");
    assert!(!one.could_lock(&name).await, "the same client got a lock that it holds");
    let error = within("a wait ends", lock_in_vain(&other.locks, &name)).await;
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let holder = format!("pid {}", std::process::id());
    assert!(error.to_string().contains(&holder), "the error does not name the holder: {error}");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    other.expect_unused(&name).await;
}

/// P6: waiters are granted in the order in which the store got their claims, whoever's clients they are; where the store
/// promises no order, one at a time, and all of them.
pub async fn waiters_overtake(fixture: &dyn Fixture) {
    const WAITERS: usize = 6;
    let clients = [Client::new(fixture).await, Client::new(fixture).await, Client::new(fixture).await];
    let name = unique("fifo");
    let record = Arc::new(history::Record::memory(clients[0].env.clock()));
    let first = clients[0].lock(&name).await;
    let mut waiters = Vec::new();
    for number in 0..WAITERS {
        let process = format!("waiter-{number}");
        let claim = record.recorder.claim(&process, &name, &process, clinch_verify::Mode::Exclusive);
        let (place, call) = (claim.enqueue(record.now()), claim.acquire(record.now()));
        let client = &clients[number % 3];
        let waiter = queue(&client.locks, &name);
        let (record, locks) = (record.clone(), client.locks.clone());
        waiters.push(tokio::spawn(async move {
            let guard = join("a waiter is granted", waiter).await;
            call.granted(record.now(), history::token(&locks, &guard), None);
            let end = claim.release(record.now());
            assert_eq!(guard.release().await.unwrap(), Released::Released);
            end.ok(record.now());
        }));
        client.waits(&name, number / 3 + 1).await;
        place.ok(clients[0].now().as_nanos());
    }
    assert_eq!(first.release().await.unwrap(), Released::Released);
    for waiter in waiters {
        join("a waiter is done", waiter).await;
    }
    let fifo = clients[0].capabilities().fifo;
    let rules = Rules { fifo, ..Rules::default() };
    let judged = [Property::Exclusion, Property::Tokens, Property::Overtaking];
    history::judge(&record.recorder.history(), rules.only(&judged));
}

/// P6: a waiter whose future is kept but not polled, as in a `select!` whose other branch is at work, does not keep the lock
/// from those behind it. Polled again, it gets its turn.
pub async fn unpolled_waiter_blocks(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("unpolled");
    let guard = one.lock(&name).await;
    let mutex = other.locks.mutex(&name).unwrap();
    let mut unpolled = Polled::new(mutex.lock());
    eventually("the waiter waits", async || {
        assert!(unpolled.once().await.is_none(), "two hold one lock");
        (!other.faults.waiting(&name).is_empty()).then_some(())
    })
    .await;
    // Behind it wait one of its own client and one of another.
    // Which of the two comes first is left open, so each lets go for the other.
    let behind = [&other, &one].map(|client| {
        let waiter = queue(&client.locks, &name);
        tokio::spawn(async move {
            let guard = join("a waiter behind one that is not polled is granted", waiter).await;
            guard.verify().await.unwrap();
            assert_eq!(guard.release().await.unwrap(), Released::Released);
        })
    });
    other.waits(&name, 2).await;
    one.waits(&name, 1).await;
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    for waiter in behind {
        join("a waiter behind one that is not polled has had its turn", waiter).await;
    }
    let guard = eventually("a waiter that is polled again is granted", async || unpolled.once().await).await;
    let guard = guard.unwrap();
    guard.verify().await.unwrap();
    assert!(!one.could_lock(&name).await, "two hold one lock");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    one.expect_unused(&name).await;
}

/// P6: who asks without waiting does not pass those who wait, or, where the store promises no order, does not keep them
/// from their turn.
pub async fn barging_try(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("barging");
    let guard = one.lock(&name).await;
    let waiter = queue(&other.locks, &name);
    other.waits(&name, 1).await;
    drop(guard);
    let passed = one.could_lock(&name).await;
    assert!(!passed || !one.capabilities().fifo, "a try passed a waiter");
    drop(join("the waiter is granted", waiter).await);
    one.expect_unused(&name).await;
}

/// P6: a release reaches the waiter; it does not sit until the lease would have run out.
pub async fn permanent_wait_after_release(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("handoff");
    for _ in 0..20 {
        let guard = one.lock(&name).await;
        let waiter = queue(&other.locks, &name);
        other.waits(&name, 1).await;
        expect_waiting("the lock is held", &waiter).await;
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        let guard = join("the waiter is granted", waiter).await;
        assert_eq!(guard.release().await.unwrap(), Released::Released);
    }
    one.expect_unused(&name).await;
}

/// P7: dropping a guard inside a runtime releases the lock.
pub async fn dropped_guard_leaks(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("drop");
    drop(one.lock(&name).await);
    other.expect_unused(&name).await;
}

/// P7: dropping a guard on a thread without any runtime, after the runtime that it was made in is gone, releases too.
pub async fn dropped_guard_leaks_outside_a_runtime(fixture: &dyn Fixture) {
    let other = Client::new(fixture).await;
    let name = unique("drop-outside");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let runtime = runtime();
            let (one, guard) = runtime.block_on(async {
                let one = Client::new(fixture).await;
                let guard = one.lock(&name).await;
                (one, guard)
            });
            drop(runtime);
            drop(guard);
            // The client goes last: its background lane may still be at the release.
            let patience = one.locks.close(PATIENCE);
            self::runtime().block_on(patience).unwrap();
        });
    });
    other.expect_unused(&name).await;
}

/// P7: a guard that is dropped by a panic releases too.
pub async fn dropped_guard_leaks_in_a_panic(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("drop-panic");
    let guard = one.lock(&name).await;
    let panicking = std::thread::spawn(move || {
        let _guard = guard;
        // A panic without the hook's message, which would only alarm whoever reads the test's output.
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    assert!(panicking.join().is_err());
    other.expect_unused(&name).await;
}

/// P3: tokens rise over releases and drops, whoever holds.
pub async fn tokens_fall(fixture: &dyn Fixture) {
    let clients = [Client::new(fixture).await, Client::new(fixture).await];
    if !clients[0].capabilities().fencing {
        return;
    }
    let name = unique("tokens");
    let mut last = None;
    for turn in 0..12 {
        let guard = clients[turn % 2].lock(&name).await;
        assert!(Some(guard.token()) > last, "token {} came after {last:?}", guard.token());
        last = Some(guard.token());
        if turn % 3 == 0 {
            drop(guard);
        } else {
            assert_eq!(guard.release().await.unwrap(), Released::Released);
        }
    }
}

/// P3: tokens rise although every holder's client is new and all earlier ones are gone.
pub async fn tokens_fall_after_reconnecting(fixture: &dyn Fixture) {
    let name = unique("tokens-reconnect");
    let mut last = None;
    for _ in 0..4 {
        let client = Client::new(fixture).await;
        if !client.capabilities().fencing {
            return;
        }
        let guard = client.lock(&name).await;
        assert!(Some(guard.token()) > last, "token {} came after {last:?}", guard.token());
        last = Some(guard.token());
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        client.locks.close(PATIENCE).await.unwrap();
    }
}

/// P2: a body whose lock is lost is stopped, and one whose lock is held runs to its end.
pub async fn run_without_the_lock(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("run");
    let mutex = one.locks.mutex(&name).unwrap();
    let token = within("a body runs", mutex.lock().run(async |guard| guard.token())).await.unwrap();
    assert_eq!(token.get() > 0, one.capabilities().fencing);
    other.expect_unused(&name).await;

    let locks = one.with_ttl(fixture.ttl());
    let endless = tokio::spawn({
        let name = name.clone();
        async move {
            let mutex = locks.mutex(&name).unwrap();
            mutex.lock().run(async |_| std::future::pending::<()>().await).await
        }
    });
    let claim = eventually("the body holds the lock", async || {
        other.claims(&name).await.first().filter(|claim| claim.granted).map(|claim| claim.id)
    })
    .await;
    answered(async || other.locks.evict(&name, claim).await).await.unwrap();
    let error = join("the body is stopped", endless).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
    other.expect_unused(&name).await;
}
