//! Renewals that are answered late, for another, or not at all; leases that they keep too long, or too short.

use std::time::Duration;

use futures_util::future::{join_all, select_all};

use super::Fixture;
use super::client::{
    Client, LONG_TTL, PATIENCE, eventually, join, lock, poll_then_drop, queue, unique, until_past, within,
};
use super::faults::Step;
use crate::backend::Freed;
use crate::claim::{ClaimId, LossKind};
use crate::clock::Instant;
use crate::guard::{Guard, Released};

/// How long an answer is held back where a deadline must not depend on it.
const ANSWER_HELD_BACK: Duration = Duration::from_millis(250);

/// A TTL whose margins are far below [`ANSWER_HELD_BACK`], so that a deadline counted from the answer stands out; and long enough for a
/// renewal not to be given up before.
const JUDGED_TTL: Duration = Duration::from_secs(6);

/// P2: the deadline after an automatic renewal is counted from before that was sent, however late the answer comes.
pub async fn deadline_counts_from_the_renewals_reply(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    if !client.capabilities().expiry {
        return;
    }
    let gate = client.faults.hold_reply_of(Step::Renew);
    let guard = lock(&client.with_ttl(JUDGED_TTL), &unique("deadline-renewal")).await;
    let before = guard.deadline();
    within("the renewal is applied", gate.reached()).await;
    until_past(&client, client.now() + ANSWER_HELD_BACK).await;
    gate.open();
    let deadline = eventually("a renewal moves the deadline", async || {
        guard.deadline().filter(|deadline| Some(*deadline) > before)
    })
    .await;
    // A host that is too busy to be told in time asks again.
    let reached = client.faults.last_call_of(Step::Renew).unwrap();
    let latest = reached + (JUDGED_TTL - client.env.drift().over(JUDGED_TTL));
    assert!(deadline < latest, "the deadline is {:?} after the renewal", deadline.since(reached));
}

/// P2: of hundreds of claims that are renewed together, some more often than others, the evicted one is told its loss and no other,
/// also where its renewal alone tells.
pub async fn eviction_told_to_another_holder(fixture: &dyn Fixture) {
    /// More than go into one batch.
    const HOLDERS: usize = 300;
    const EVICTED: usize = 41;
    const AT_A_TIME: usize = 50;
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    one.faults.hang(Step::Lost);
    let name = unique("batches");
    let [longer, long, short] = [LONG_TTL, LONG_TTL / 2, LONG_TTL / 10].map(|ttl| one.with_ttl(ttl));
    let take = |number: usize| {
        let locks = match number % 15 {
            0 => &short,
            odd if odd % 2 == 1 => &long,
            _ => &longer,
        };
        let name = format!("{name}/{number}");
        async move { lock(locks, &name).await }
    };
    let mut guards: Vec<Guard> = Vec::new();
    while guards.len() < HOLDERS {
        let next = guards.len();
        let more = join_all((next..next + AT_A_TIME).map(take)).await;
        guards.extend(more);
    }
    let evicted = &guards[EVICTED];
    let freed = other.locks.evict(evicted.name().as_str(), evicted.claim_id()).await.unwrap();
    assert_eq!(freed, Freed::Removed);
    let told = select_all(guards.iter().map(|guard| Box::pin(guard.lost())));
    let (loss, first, others) = within("the evicted holder is told", told).await;
    drop(others);
    assert_eq!((loss.kind, first), (LossKind::Deleted, EVICTED), "another was told, or something else");
    let lost: Vec<usize> = (0..HOLDERS).filter(|number| !guards[*number].is_held()).collect();
    assert_eq!(lost, [EVICTED], "more were told than were evicted");
    drop(guards);
    one.locks.close(PATIENCE).await.unwrap();
    let left = other.locks.list(&name).await.unwrap();
    assert!(left.is_empty(), "{left:?}");
}

/// P6: whoever waits keeps its place beyond its own TTL, however long the holder's is, and has its turn in the order of the
/// places.
pub async fn living_waiter_loses_its_place(fixture: &dyn Fixture) {
    /// A host that stands still for too long may cost a place, and then proves nothing.
    const SCENES: usize = 5;
    let clients = [Client::new(fixture).await, Client::new(fixture).await];
    if !clients[0].capabilities().queue {
        return;
    }
    for scene in 1..=SCENES {
        if wait_beyond_the_ttl(&clients, fixture.ttl(), scene == SCENES).await {
            return;
        }
    }
}

/// Whether it was seen that places outlast their TTL. Where the host stood still meanwhile, that is judged in the last scene only.
async fn wait_beyond_the_ttl(clients: &[Client; 2], ttl: Duration, judged: bool) -> bool {
    const WAITERS: usize = 4;
    let name = unique("outwait");
    let holder = lock(&clients[0].with_ttl(Duration::from_secs(600)), &name).await;
    let mut waiters = Vec::new();
    for number in 0..WAITERS {
        let client = &clients[number % 2];
        let (mutex, env) = (client.with_ttl(ttl).mutex(&name).unwrap(), client.env.clone());
        waiters.push(tokio::spawn(async move {
            loop {
                match mutex.lock().await {
                    Ok(_held) => return env.now(),
                    Err(error) => assert!(error.is_transient(), "{error:?}"),
                }
            }
        }));
        client.waits(&name, number / 2 + 1).await;
    }
    let order = places(&clients[0], &name).await;
    assert_eq!(order.len(), WAITERS, "{order:?}");
    let (mut looked, end) = (clients[0].now(), clients[0].now() + ttl * 5);
    while looked < end {
        let now = places(&clients[0], &name).await;
        let stood_still = clients[0].now().since(looked) > ttl / 3;
        looked = clients[0].now();
        if stood_still && !judged {
            waiters.iter().for_each(tokio::task::JoinHandle::abort);
            drop(holder);
            return false;
        }
        assert_eq!(now, order, "a waiter that lives has lost its place");
        until_past(&clients[0], looked + ttl / 20).await;
    }
    assert_eq!(holder.release().await.unwrap(), Released::Released);
    let mut last = Instant::from_nanos(0);
    for waiter in waiters {
        let granted = join("a waiter is granted after a long wait", waiter).await;
        assert!(granted > last || !clients[0].capabilities().fifo, "a waiter was passed");
        last = granted;
    }
    clients[0].expect_unused(&name).await;
    true
}

/// The claims that wait, first in the queue first.
async fn places(client: &Client, name: &str) -> Vec<ClaimId> {
    let claims = client.claims(name).await.into_iter();
    claims.filter(|claim| !claim.granted).map(|claim| claim.id).collect()
}

/// P2: a lease that is asked to be shorter is over in time for its holder, also if the answer is lost; nobody else's lock is the
/// worse for it.
pub async fn shorter_lease_lives_on(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !one.capabilities().expiry {
        return;
    }
    let short = fixture.ttl() * 2;
    for lost in [false, true] {
        let name = unique("shorter");
        let guard = lock(&one.unrenewed(LONG_TTL), &name).await;
        if lost {
            one.faults.lose_reply_of(Step::Renew);
        }
        assert_eq!(guard.extend(short).await.is_err(), lost);
        assert!(guard.deadline().unwrap() < one.now() + short, "its deadline is the longer lease's");
        let waiter = queue(&other.locks, &name);
        other.waits(&name, 1).await;
        let loss = within("the end of a shorter lease is told", guard.lost()).await;
        assert_eq!(loss.kind, LossKind::Expired);
        assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost(loss));
        drop(join("what is over is freed", waiter).await);
        other.expect_unused(&name).await;
    }
}

/// P4: a lease that is asked to be shorter than the time to its next renewal is renewed before its end, also if the answer is lost, or
/// nobody waits for it.
pub async fn shorter_lease_is_not_renewed(fixture: &dyn Fixture) {
    let one = Client::new(fixture).await;
    if !one.capabilities().expiry {
        return;
    }
    let short = fixture.ttl() * 2;
    for answer in ["heard", "lost", "not waited for"] {
        let guard = one.lock(&unique("below-a-third")).await;
        match answer {
            "heard" => guard.extend(short).await.unwrap(),
            "lost" => {
                one.faults.lose_reply_of(Step::Renew);
                guard.extend(short).await.unwrap_err();
            }
            _ => {
                one.faults.hang(Step::Renew);
                assert!(poll_then_drop(guard.extend(short), 1).await.is_none());
                one.faults.heal();
            }
        }
        until_past(&one, one.now() + short + short / 2).await;
        assert!(guard.is_held(), "nobody renewed it in time, with an answer that was {answer}");
        guard.verify().await.unwrap();
        assert_eq!(guard.release().await.unwrap(), Released::Released);
    }
}

/// P2: a renewal that was sent for a longer lease and is answered after a shorter one was asked for does not make it longer
/// again, whoever sent it.
pub async fn overtaken_renewal_lengthens_a_lease(fixture: &dyn Fixture) {
    let one = Client::new(fixture).await;
    if !one.capabilities().expiry {
        return;
    }
    let short = fixture.ttl() * 2;
    for automatic in [false, true] {
        let ttl = if automatic { JUDGED_TTL } else { LONG_TTL };
        let gate = one.faults.hold_reply_of(Step::Renew);
        let guard = lock(&one.with_ttl(ttl), &unique("overtaken")).await;
        let longer = async {
            if !automatic {
                guard.extend(ttl).await.unwrap();
            }
        };
        let shorter = async {
            within("the renewal is applied", gate.reached()).await;
            guard.extend(short).await.unwrap();
            gate.open();
        };
        tokio::join!(longer, shorter);
        let calls = one.faults.calls_of(Step::Renew);
        eventually("it is renewed twice more", async || {
            let deadline = guard.deadline().unwrap();
            assert!(deadline <= one.now() + short, "an answer from before made it longer again");
            (one.faults.calls_of(Step::Renew) >= calls + 2).then_some(())
        })
        .await;
        assert_eq!(guard.release().await.unwrap(), Released::Released);
    }
}
