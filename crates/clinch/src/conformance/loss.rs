//! Stalled keepers, cut-off clients, lost answers, releases that come too late.

use std::time::Duration;

use super::Fixture;
use super::client::{Client, PATIENCE, eventually, expect_waiting, join, queue, unique, until_past, within};
use super::faults::Step;
use crate::claim::Mode;
use crate::error::ErrorKind;
use crate::guard::{Guard, Released};
use crate::tenure::Standing;

/// P2: when renewals hang for ever, the loss is signalled at the deadline, without any answer from the store, and before
/// a rival is granted. Where leases have no end, a stalled keeper loses nothing.
pub async fn keeper_stalled(fixture: &dyn Fixture) {
    let (one, rival) = (Client::new(fixture).await, Client::new(fixture).await);
    one.faults.hang(Step::Renew);
    lost_before_a_rival_holds(fixture, &one, &rival, "stalled").await;
}

/// A lease whose renewals do not come through is in jeopardy before it is lost, and out of it when they do again.
pub async fn jeopardy_not_told(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    if !client.capabilities().expiry {
        return;
    }
    let name = unique("jeopardy");
    // What is left of it then is a sixth at least: time for a renewal also where the host is busy.
    let ttl = (fixture.ttl() * 6).max(Duration::from_secs(12));
    let guard = super::client::lock(&client.with_ttl(ttl), &name).await;
    client.faults.hang(Step::Renew);
    let standing = within("the jeopardy is told", guard.changed(&Standing::Held)).await;
    assert_eq!(standing, Standing::Jeopardy);
    assert!(guard.is_held());
    client.faults.heal();
    let standing = within("the jeopardy ends", guard.changed(&Standing::Jeopardy)).await;
    assert_eq!(standing, Standing::Held);
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

/// P2: a holder that is cut off from the store learns of its loss before a rival is granted.
pub async fn severed_holder(fixture: &dyn Fixture) {
    let (one, rival) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("cut-off-now");
    let guard = one.locks.clone().ttl(fixture.ttl()).unwrap();
    let guard = super::client::lock(&guard, &name).await;
    one.faults.sever();
    let error = guard.verify().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(guard.is_held(), "an unreachable store does not take a lease away");
    one.faults.heal();
    drop(guard);
    rival.expect_unused(&name).await;
    if one.capabilities().expiry {
        let name = unique("cut-off");
        let guard = super::client::lock(&one.with_ttl(fixture.ttl()), &name).await;
        one.faults.sever();
        passes_on(&one, guard, &rival, &name).await;
    }
}

async fn lost_before_a_rival_holds(fixture: &dyn Fixture, one: &Client, rival: &Client, hazard: &str) {
    let name = unique(hazard);
    let guard = super::client::lock(&one.with_ttl(fixture.ttl()), &name).await;
    if one.capabilities().expiry {
        return passes_on(one, guard, rival, &name).await;
    }
    assert_eq!(guard.deadline(), None, "a lease without an end has a deadline");
    let waiter = queue(&rival.locks, &name);
    rival.waits(&name, 1).await;
    until_past(one, one.now() + fixture.ttl()).await;
    expect_waiting("the holder lives", &waiter).await;
    assert!(guard.is_held());
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    drop(join("the rival is granted", waiter).await);
    rival.expect_unused(&name).await;
}

/// A guard that nobody renews any more: lost first, granted to the rival then.
async fn passes_on(one: &Client, guard: Guard, rival: &Client, name: &str) {
    let waiter = queue(&rival.locks, name);
    // Somebody waits for the loss from the start, so it must be signalled and not only be found on looking.
    let (loss, (next, granted)) = tokio::join!(within("the loss is signalled", guard.lost()), async {
        let next = join("the lock of a dead holder is granted", waiter).await;
        assert!(!guard.is_held(), "two guards hold at a time");
        (next, rival.now())
    });
    assert!(next.is_held());
    let deadline = guard.deadline().expect("a lease that runs out has a deadline");
    assert!(deadline < granted, "the deadline {deadline:?} is later than the rival's grant at {granted:?}");
    assert_eq!(guard.remaining(), Some(Duration::ZERO));
    assert_eq!(guard.standing(), Standing::Lost(loss), "a loss changed");
    one.faults.heal();
    assert!(!guard.is_held(), "a loss un-happened");
    assert!(matches!(guard.release().await.unwrap(), Released::AlreadyLost(_)));
    one.locks.close(PATIENCE).await.unwrap();
    next.verify().await.expect("the successor's lock was freed by a holder that had lost it");
    assert_eq!(next.release().await.unwrap(), Released::Released);
}

/// P7: whoever lost a lease and releases it, drops it or releases it by hand frees nobody else's.
pub async fn late_release_frees_a_successor(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("late-release");
    let holder =
        super::client::lock(&one.locks.clone().max_hold(Duration::from_millis(20)).unwrap(), &name).await;
    let id = holder.claim_id();
    let successor = other.lock(&name).await;
    assert!(
        matches!(holder.release().await.unwrap(), Released::AlreadyLost(_)),
        "a late release released what was gone"
    );
    let again = one.locks.release_detached(&name, id).await.unwrap();
    assert!(matches!(again, Released::AlreadyLost(_)), "a late release released what was gone");
    one.locks.close(PATIENCE).await.unwrap();
    successor.verify().await.expect("a late release freed the successor's lock");
    assert!(!one_could(fixture, &name).await, "a late release freed the successor's lock");
    assert_eq!(successor.release().await.unwrap(), Released::Released);
    other.sees_claims(&name, 0).await;
}

async fn one_could(fixture: &dyn Fixture, name: &str) -> bool {
    Client::new(fixture).await.could_lock(name).await
}

/// P3: the token after a lost lease is larger than the lost one, so a fenced store can tell them apart.
pub async fn tokens_fall_after_loss(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !one.capabilities().fencing || !one.capabilities().expiry {
        return;
    }
    let name = unique("tokens-loss");
    let guard = super::client::lock(&one.unrenewed(fixture.ttl()), &name).await;
    within("an unrenewed lease is lost", guard.lost()).await;
    let next = other.lock(&name).await;
    assert!(next.token() > guard.token(), "token {} came after {}", next.token(), guard.token());
    drop(guard);
    assert_eq!(next.release().await.unwrap(), Released::Released);
    let cut = super::client::lock(&one.with_ttl(fixture.ttl()), &name).await;
    one.faults.sever();
    let after = other.lock(&name).await;
    assert!(after.token() > cut.token(), "token {} came after {}", after.token(), cut.token());
}

/// P6: a waiter that is cut off loses its place, if it has one, when that runs out, and those behind it get their turn.
pub async fn severed_waiter(fixture: &dyn Fixture) {
    let clients = [Client::new(fixture).await, Client::new(fixture).await, Client::new(fixture).await];
    let [holder, dead, behind] = &clients;
    let name = unique("cut-off-waiter");
    if !holder.capabilities().expiry {
        return;
    }
    let guard = holder.lock(&name).await;
    let abandoned = queue(&dead.with_ttl(fixture.ttl()), &name);
    dead.waits(&name, 1).await;
    let waiter = queue(&behind.locks, &name);
    behind.waits(&name, 1).await;
    dead.faults.sever();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    let guard = join("the waiter behind a dead one is granted", waiter).await;
    abandoned.abort();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    holder.expect_unused(&name).await;
}

/// P4: a waiter that was cut off for longer than its place lives takes another one or asks again, and is granted.
pub async fn severed_waiter_comes_back(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("waiter-back");
    let guard = one.lock(&name).await;
    let waiter = queue(&other.with_ttl(fixture.ttl()), &name);
    other.waits(&name, 1).await;
    other.faults.sever();
    eventually("the waiter is cut off", async || other.faults.waiting(&name).is_empty().then_some(())).await;
    if one.capabilities().expiry {
        one.sees_claims(&name, 1).await;
    }
    other.faults.heal();
    other.waits(&name, 1).await;
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    drop(join("the waiter is granted", waiter).await);
    one.expect_unused(&name).await;
}

/// P4: a claim that did not reach the store is sent again.
pub async fn claim_not_applied(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("claim-unsent");
    one.faults.fail_before(Step::Claim);
    let guard = one.lock(&name).await;
    assert_eq!(one.faults.calls_of(Step::Claim), 2);
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    other.expect_unused(&name).await;
}

/// P4: a claim whose reply is lost is read back, not lost: the lock is neither held twice nor leaked.
pub async fn reply_lost_on_claim(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("claim-reply");
    one.faults.lose_reply_of(Step::Claim);
    let guard = one.lock(&name).await;
    let claims = one.claims(&name).await;
    assert_eq!(claims.len(), 1, "a repeated claim stands in the queue twice: {claims:?}");
    assert_eq!((claims[0].id, claims[0].granted), (guard.claim_id(), true));
    assert!(!other.could_lock(&name).await);
    guard.verify().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    other.expect_unused(&name).await;
}

/// P4: a place in the queue whose reply is lost is kept, not taken twice; where there is none, a waiter goes on asking.
pub async fn reply_lost_on_queueing(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("queue-reply");
    let guard = one.lock(&name).await;
    other.faults.lose_reply_of(Step::Claim);
    let waiter = queue(&other.locks, &name);
    eventually("the claim is repeated", async || (other.faults.calls_of(Step::Claim) >= 2).then_some(()))
        .await;
    other.waits(&name, 1).await;
    one.sees_claims(&name, 1 + usize::from(one.capabilities().queue)).await;
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    let guard = join("the waiter is granted", waiter).await;
    assert_eq!(one.claims(&name).await.len(), 1, "a repeated claim stands in the queue twice");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    one.expect_unused(&name).await;
}

/// P4, P5: a try whose reply is lost either holds or leaves nothing behind.
pub async fn reply_lost_on_try(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("try-reply");
    one.faults.lose_reply_of(Step::Claim);
    match one.locks.mutex(&name).unwrap().try_lock().await {
        Ok(guard) => assert!(guard.expect("the lock is free").is_held()),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unknown),
    }
    other.expect_unused(&name).await;
}

/// P5: an attempt of a try whose answer is lost may arrive after a later one was refused. It does not hold the lock: the try
/// has released its claim.
pub async fn late_attempt_of_a_refused_try_holds(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("late-try");
    let holder = other.lock(&name).await;
    let late = one.faults.send_late();
    assert!(one.locks.mutex(&name).unwrap().try_lock().await.unwrap().is_none(), "two hold one lock");
    one.locks.close(PATIENCE).await.unwrap();
    assert_eq!(holder.release().await.unwrap(), Released::Released);
    assert!(!late.arrive(&one.faults).await, "nobody has released an attempt whose answer was lost");
    other.expect_unused(&name).await;
}

/// P4: a renewal whose reply is lost, or that never reached the store, is repeated before the lease runs out.
pub async fn reply_lost_on_renewal(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("renewal-reply");
    one.faults.lose_reply_of(Step::Renew);
    let ttl = fixture.ttl() * 2;
    let guard = super::client::lock(&one.with_ttl(ttl), &name).await;
    until_past(&one, one.now() + ttl).await;
    one.faults.fail_before(Step::Renew);
    until_past(&one, one.now() + ttl).await;
    assert!(guard.is_held(), "one renewal without a reply lost the lease");
    if one.capabilities().expiry {
        assert!(one.faults.calls_of(Step::Renew) > 2);
    }
    guard.verify().await.unwrap();
    assert!(!other.could_lock(&name).await);
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    other.expect_unused(&name).await;
}

/// P4, P7: a release whose reply is lost has released.
pub async fn reply_lost_on_release(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("release-reply");
    let guard = one.lock(&name).await;
    one.faults.lose_reply_of(Step::Release);
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    one.faults.lose_reply_of(Step::Release);
    drop(other.lock(&name).await);
    other.expect_unused(&name).await;
    drop(one.lock(&name).await);
    one.locks.close(PATIENCE).await.unwrap();
    other.expect_unused(&name).await;
}

/// P4: a release that did not reach the store is sent again.
pub async fn release_not_applied(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("release-unsent");
    for dropped in [false, true] {
        let guard = one.lock(&name).await;
        one.faults.fail_before(Step::Release);
        if dropped {
            drop(guard);
        } else {
            assert_eq!(guard.release().await.unwrap(), Released::Released);
        }
        other.expect_unused(&name).await;
    }
}

/// P4, P5: a downgrade whose reply is lost either shares or leaves nothing behind.
pub async fn reply_lost_on_downgrade(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !one.capabilities().shared {
        return;
    }
    let name = unique("downgrade-reply");
    let lock = one.locks.rwlock(&name).unwrap();
    let writer = lock.write().await.unwrap();
    one.faults.lose_reply_of(Step::Downgrade);
    match writer.downgrade().await {
        Ok(reader) => {
            reader.verify().await.unwrap();
            let claims = other.claims(&name).await;
            assert_eq!(claims[0].mode, Mode::Shared);
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unknown),
    }
    other.expect_unused(&name).await;
}
