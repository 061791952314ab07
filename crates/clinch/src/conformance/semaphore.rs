//! Too many permits, disagreement about the capacity, permits beside readers and writers.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use clinch_verify::{Property, Rules};

use super::Fixture;
use super::client::{Client, LONG_TTL, eventually, expect_waiting, join, unique, within};
use super::history::{Ask, Record, contend, judge, leave, take, token};
use crate::claim::ClaimId;
use crate::error::ErrorKind;
use crate::guard::{Guard, Released};
use crate::locks::Locks;

/// Whether the store has permits; one that has not must say so instead of granting something else.
async fn has_permits(client: &Client) -> bool {
    if client.capabilities().permits {
        return true;
    }
    let semaphore = client.locks.semaphore(&unique("no-permits"), 2).unwrap();
    super::steps::expect_unsupported(semaphore.try_acquire(1).await);
    false
}

async fn acquire(locks: &Locks, name: &str, count: u32, capacity: u32) -> Guard {
    let semaphore = locks.semaphore(name, capacity).unwrap();
    within("permits are granted", semaphore.acquire(count).unwrap()).await.unwrap()
}

fn queue(locks: &Locks, name: &str, count: u32, capacity: u32) -> tokio::task::JoinHandle<Guard> {
    let (locks, name) = (locks.clone(), name.to_owned());
    tokio::spawn(async move { acquire(&locks, &name, count, capacity).await })
}

/// P1: under contention, no more permits are held at a time than there are.
pub async fn too_many_permits(fixture: &dyn Fixture) {
    if has_permits(&Client::new(fixture).await).await {
        let asks = [Ask::Permits(1, 3), Ask::Permits(2, 3), Ask::Permits(1, 3), Ask::Permits(3, 3)];
        contend(fixture, LONG_TTL, &asks, false);
    }
}

/// Permits that are free are given out beside those that are held, up to the capacity and no further.
pub async fn one_holder_at_a_time(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !has_permits(&one).await {
        return;
    }
    let name = unique("permits");
    let three = acquire(&one.locks, &name, 3, 5).await;
    let two = acquire(&other.locks, &name, 2, 5).await;
    let semaphore = other.locks.semaphore(&name, 5).unwrap();
    assert!(semaphore.try_acquire(1).await.unwrap().is_none(), "a sixth permit of five");
    assert!(!one.could_lock(&name).await, "a mutex got in beside permits");
    let waiter = queue(&other.locks, &name, 1, 5);
    other.waits(&name, 1).await;
    expect_waiting("a sixth permit of five", &waiter).await;
    assert_eq!(two.release().await.unwrap(), Released::Released);
    let one_more = join("a permit that became free is granted", waiter).await;
    assert!(three.is_held() && one_more.is_held());
    drop((three, one_more));
    one.expect_unused(&name).await;
}

/// P6: a claim for many permits is not passed by claims for few, or it would wait for ever.
pub async fn big_claim_starves(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !has_permits(&one).await || !one.capabilities().fifo {
        return;
    }
    let name = unique("big-claim");
    let (held, kept) = (acquire(&one.locks, &name, 2, 5).await, acquire(&one.locks, &name, 1, 5).await);
    let big = queue(&other.locks, &name, 4, 5);
    other.waits(&name, 1).await;
    let small = one.locks.semaphore(&name, 5).unwrap();
    assert!(small.try_acquire(1).await.unwrap().is_none(), "a small claim passed a big one by trying");
    let small = queue(&one.locks, &name, 1, 5);
    one.waits(&name, 1).await;
    expect_waiting("a small claim behind a big one", &small).await;
    assert_eq!(held.release().await.unwrap(), Released::Released);
    let big = join("the big claim is granted", big).await;
    expect_waiting("a small claim beside all permits", &small).await;
    assert_eq!(kept.release().await.unwrap(), Released::Released);
    let small = join("the small claim is granted", small).await;
    assert!(big.is_held() && small.is_held(), "four and one of five fit");
    drop((big, small));
    other.expect_unused(&name).await;
}

/// P10: clients that disagree about the capacity are told both numbers, and the holder is not disturbed.
pub async fn capacities_disagree(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !has_permits(&one).await {
        return;
    }
    let name = unique("capacity");
    let guard = acquire(&one.locks, &name, 1, 41).await;
    let semaphore = other.locks.semaphore(&name, 67).unwrap();
    let tried = semaphore.try_acquire(1).await.unwrap_err();
    let waited = within("a claim is refused", semaphore.acquire(1).unwrap()).await.unwrap_err();
    for error in [tried, waited] {
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let text = error.to_string();
        assert!(text.contains("41") && text.contains("67"), "does not name both capacities: {text}");
    }
    assert!(guard.is_held());
    guard.verify().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    other.sees_claims(&name, 0).await;
    // With nobody left who says otherwise, the other capacity is as good.
    assert_eq!(acquire(&other.locks, &name, 50, 67).await.release().await.unwrap(), Released::Released);
}

/// P10: counts and capacities that could never be granted are refused before anything is sent.
pub async fn impossible_counts(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let name = unique("counts");
    assert_eq!(client.locks.semaphore(&name, 0).unwrap_err().kind(), ErrorKind::Invalid);
    let semaphore = client.locks.semaphore(&name, 3).unwrap();
    for count in [0, 4, u32::MAX] {
        assert_eq!(semaphore.acquire(count).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(semaphore.try_acquire(count).await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(client.faults.calls_of(super::faults::Step::Claim), 0, "a wrong count was sent");
    if has_permits(&client).await {
        let all = acquire(&client.locks, &name, u32::MAX, u32::MAX).await;
        assert_eq!(all.release().await.unwrap(), Released::Released);
    }
}

/// P1, P6: readers, writers and permits that wait for one name are let in in their order, those together that can be, also out of a time
/// in which the lock is kept closed. Who disagrees about the capacity is refused, or waits like the others, but holds beside nobody.
pub async fn mixed_modes_overtake(fixture: &dyn Fixture) {
    let store = Client::new(fixture).await.capabilities();
    if !store.permits || !store.shared || !store.fifo {
        return;
    }
    mixed(fixture, None).await;
    if store.linger {
        mixed(fixture, Some(Duration::from_millis(600))).await;
    }
}

/// Who waits for a name in which order; with a cooldown, the later half comes while the lock is closed.
const MIXED: [Ask; 14] = [
    Ask::Shared,
    Ask::Permits(2, 3),
    Ask::Permits(2, 5),
    Ask::Permits(1, 3),
    Ask::Exclusive,
    Ask::Shared,
    Ask::Shared,
    Ask::Permits(3, 3),
    Ask::Permits(1, 3),
    Ask::Permits(5, 5),
    Ask::Permits(2, 3),
    Ask::Shared,
    Ask::Exclusive,
    Ask::Permits(1, 3),
];

async fn mixed(fixture: &dyn Fixture, cooldown: Option<Duration>) {
    let clients = [Client::new(fixture).await, Client::new(fixture).await];
    let name = unique("mixed");
    let record = Arc::new(Record::memory(clients[0].env.clock()));
    let mut held = Some(take(&record, &clients[0].locks, "first", &name, Ask::Exclusive).await);
    let (mut line, mut queued) = (Vec::new(), HashSet::new());
    for (number, ask) in MIXED.into_iter().enumerate() {
        if let Some(time) = cooldown.filter(|_| number == MIXED.len() / 2)
            && let Some((guard, claim)) = held.take()
        {
            // Less what the store's clock may run apart from ours in that time.
            let told = (time - time / 100).as_millis();
            let end = claim.release_and_linger(record.now(), u64::try_from(told).unwrap());
            assert_eq!(guard.release_closed(time).await.unwrap(), Released::Released);
            end.ok(record.now());
        }
        line.push(line_up(&clients[number % 2], &record, &name, number, ask, &mut queued).await);
    }
    if let Some((guard, claim)) = held {
        leave(&record, guard, &claim).await;
    }
    for one in line {
        join("whoever waits has had its turn, or was refused", one).await;
    }
    clients[0].expect_unused(&name).await;
    let judged = [Property::Exclusion, Property::Tokens, Property::Overtaking, Property::Phantom];
    judge(&record.recorder.history(), Rules { fifo: true, ..Rules::default() }.only(&judged));
}

/// Has one wait, or be refused, in a task of its own; returns once it stands in the line, or is through. `queued`: those that stand there already,
/// some of which may just be taking a step.
async fn line_up(
    client: &Client,
    record: &Arc<Record>,
    name: &str,
    number: usize,
    ask: Ask,
    queued: &mut HashSet<ClaimId>,
) -> tokio::task::JoinHandle<()> {
    let process = format!("{number}");
    let claim = record.recorder.claim(&process, name, &process, ask.mode());
    let (place, call) = (claim.enqueue(record.now()), claim.acquire(record.now()));
    let one = tokio::spawn({
        let (record, locks, name) = (record.clone(), client.locks.clone(), name.to_owned());
        async move {
            match within("a claim is granted or refused", ask.acquire(&locks, &name)).await {
                Ok(guard) => {
                    call.granted(record.now(), token(&locks, &guard), None);
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    leave(&record, guard, &claim).await;
                }
                Err(error) => {
                    assert!(matches!(ask, Ask::Permits(..)), "{error:?}");
                    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
                    call.fail(record.now());
                }
            }
        }
    });
    let new = eventually("a claim stands in the line, or is through", async || {
        let new = client.faults.waiting(name).into_iter().find(|id| !queued.contains(id));
        (new.is_some() || one.is_finished()).then_some(new)
    })
    .await;
    match new {
        Some(id) => {
            queued.insert(id);
            place.ok(record.now());
        }
        None => place.fail(record.now()),
    }
    one
}
