//! Eviction, closed locks, detached leases, closing.

use std::time::Duration;

use super::Fixture;
use super::client::{
    Client, LONG_TTL, PATIENCE, answered, eventually, expect_waiting, join, queue, unique, until_past, within,
};
use super::faults::Step;
use super::steps::expect_unsupported;
use crate::backend::{Backend, Freed, NOTICE, Renewal};
use crate::claim::{ClaimId, LossKind, Mode};
use crate::error::ErrorKind;
use crate::guard::Released;

/// P2: a holder whose claim an operator took away learns of it, its release says so, and the next token is larger.
pub async fn evicted_holder_goes_on(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("evict");
    // Long enough not to run out on a busy host before it is told.
    let guard = super::client::lock(&one.with_ttl(fixture.ttl() * 4), &name).await;
    let token = guard.token();
    assert_eq!(other.locks.evict(&name, guard.claim_id()).await.unwrap(), Freed::Removed);
    let loss = within("an evicted holder is told", guard.lost()).await;
    assert_eq!(loss.kind, LossKind::Deleted, "{loss}");
    assert!(!guard.is_held());
    assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost(loss));
    let next = other.lock(&name).await;
    if one.capabilities().fencing {
        assert!(next.token() > token, "token {} came after {token}", next.token());
    }
    one.locks.close(PATIENCE).await.unwrap();
    next.verify().await.expect("the evicted holder's release freed its successor's lock");
    assert_eq!(next.release().await.unwrap(), Released::Released);
    other.sees_claims(&name, 0).await;
}

/// A look at the store finds an eviction that no renewal has noticed yet.
pub async fn eviction_seen_by_verify(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("evict-verify");
    let guard = one.lock(&name).await;
    guard.verify().await.unwrap();
    assert_eq!(other.locks.evict(&name, guard.claim_id()).await.unwrap(), Freed::Removed);
    let error = guard.verify().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
    assert!(error.loss().is_some() && error.to_string().contains(&name), "{error}");
    assert!(!guard.is_held(), "verify said lost, the guard says held");
    assert_eq!(guard.extend(LONG_TTL).await.unwrap_err().kind(), ErrorKind::Lost);
    drop(guard);
    other.expect_unused(&name).await;
}

/// P7: a release after an eviction that no renewal has noticed yet says that nothing was held.
pub async fn eviction_seen_by_release(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("evict-release");
    let guard = one.lock(&name).await;
    assert_eq!(other.locks.evict(&name, guard.claim_id()).await.unwrap(), Freed::Removed);
    let Released::AlreadyLost(loss) = guard.release().await.unwrap() else {
        panic!("an evicted lease was released");
    };
    assert_eq!(loss.kind, LossKind::Deleted);
    other.expect_unused(&name).await;
}

/// P1: what an evicted holder had is granted to nobody while its guard lives, and at once when it is dropped, long before
/// the notice that it has is over. Those who hold beside it stay.
pub async fn eviction_lets_two_hold(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !one.capabilities().queue {
        return;
    }
    let name = unique("evict-overlap");
    let guard = one.lock(&name).await;
    let waiter = queue(&other.locks, &name);
    other.waits(&name, 1).await;
    let evicted = one.now();
    assert_eq!(other.locks.evict(&name, guard.claim_id()).await.unwrap(), Freed::Removed);
    expect_waiting("an evicted holder has not let go", &waiter).await;
    drop(guard);
    let next = join("an evicted holder's drop opens the lock", waiter).await;
    assert!(one.now() < evicted + NOTICE, "it took the whole notice");
    assert_eq!(next.release().await.unwrap(), Released::Released);
    one.expect_unused(&name).await;
    if one.capabilities().shared {
        evicted_reader_meets_a_writer(&one, &other).await;
    }
}

async fn evicted_reader_meets_a_writer(one: &Client, other: &Client) {
    let name = unique("evict-reader");
    let lock = one.locks.rwlock(&name).unwrap();
    let [first, second] = [(); 2].map(|()| within("a reader is granted", lock.read()));
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    let waiter = queue(&other.locks, &name);
    other.waits(&name, 1).await;
    let evicted = one.now();
    assert_eq!(other.locks.evict(&name, first.claim_id()).await.unwrap(), Freed::Removed);
    second.verify().await.expect("an eviction took another reader's lock");
    assert_eq!(second.release().await.unwrap(), Released::Released);
    expect_waiting("an evicted reader has not let go", &waiter).await;
    drop(first);
    let next = join("an evicted reader's drop opens the lock", waiter).await;
    assert!(one.now() < evicted + NOTICE, "it took the whole notice");
    assert_eq!(next.release().await.unwrap(), Released::Released);
    one.expect_unused(&name).await;
}

/// Evicting a claim that is not there does nothing, also to others on the same lock.
pub async fn eviction_of_nobody(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("evict-nobody");
    let stranger = ClaimId::from_bits(77);
    assert_eq!(other.locks.evict(&name, stranger).await.unwrap(), Freed::Absent);
    let guard = one.lock(&name).await;
    assert_eq!(other.locks.evict(&name, stranger).await.unwrap(), Freed::Absent);
    guard.verify().await.unwrap();
    assert_eq!(other.locks.evict(&name, guard.claim_id()).await.unwrap(), Freed::Removed);
    assert_eq!(other.locks.evict(&name, guard.claim_id()).await.unwrap(), Freed::Absent);
    drop(guard);
    other.expect_unused(&name).await;
}

/// An evicted waiter's place is gone at once. It lives, and so takes another one, at the end, and is granted in its turn. Where waiters
/// have no place, there is nothing to evict, and trying it does nothing to those who hold.
pub async fn evicted_waiter_blocks(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("evict-waiter");
    let guard = one.lock(&name).await;
    let evicted = queue(&other.locks, &name);
    let place = other.waits(&name, 1).await[0];
    let behind = queue(&one.locks, &name);
    let next = one.waits(&name, 1).await[0];
    let freed = one.locks.evict(&name, place).await.unwrap();
    guard.verify().await.expect("the eviction of a waiter took the holder's lock");
    if one.capabilities().queue {
        assert_eq!(freed, Freed::Removed);
        let line = [guard.claim_id(), next, place];
        eventually("the evicted waiter stands at the end", async || {
            one.claims(&name).await.iter().map(|claim| claim.id).eq(line).then_some(())
        })
        .await;
        expect_waiting("the lock is held", &evicted).await;
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        let guard = join("the waiter behind is granted", behind).await;
        expect_waiting("an evicted waiter behind who waits", &evicted).await;
        assert_eq!(guard.release().await.unwrap(), Released::Released);
        drop(join("the evicted waiter is granted in the end", evicted).await);
    } else {
        assert_eq!(freed, Freed::Absent);
        drop((guard, evicted, behind));
    }
    one.expect_unused(&name).await;
}

/// A lock that was released closed is granted to nobody before its time, says until when, and is granted then. A store
/// that cannot close locks says so.
pub async fn lingering_lock_is_granted(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("linger-for-ever");
    let error = one.lock(&name).await.release_closed(Duration::MAX).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    other.expect_unused(&name).await;
    if !one.capabilities().linger {
        return refuses_to_linger(&one, &other).await;
    }
    let name = unique("linger");
    let linger = Duration::from_millis(400);
    let guard = one.lock(&name).await;
    let waiter = queue(&other.locks, &name);
    other.waits(&name, 1).await;
    let released = one.now();
    assert_eq!(guard.release_closed(linger).await.unwrap(), Released::Released);
    let open = released + linger;
    let tried = one.locks.mutex(&name).unwrap().try_lock().await.unwrap();
    let state = one.locks.state(&name).await.unwrap();
    if one.now() < open {
        assert!(tried.is_none(), "a closed lock was granted to a try");
        let state = state.expect("a closed lock is listed");
        assert!(state.closed_until.is_some(), "{state:?}");
        assert!(state.claims.iter().all(|claim| !claim.granted), "{state:?}");
    }
    let guard = join("the lock opens again", waiter).await;
    let granted = one.now();
    // Less what the store's clock may run apart from ours in that time.
    let open = open - linger / 100;
    assert!(granted >= open, "granted at {granted:?}, closed until {open:?}");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    one.expect_unused(&name).await;
    eventually("an open lock is not listed", async || {
        one.locks.state(&name).await.unwrap().is_none().then_some(())
    })
    .await;
}

/// An operator opens a lock that lingers closed: by evicting a claim that waits for it, after which those behind get it, or one
/// that is gone.
pub async fn closed_lock_stays_closed(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    if !one.capabilities().linger {
        return;
    }
    let name = unique("linger-open");
    let guard = one.lock(&name).await;
    let evicted = queue(&other.locks, &name);
    let place = other.waits(&name, 1).await[0];
    let behind = queue(&one.locks, &name);
    one.waits(&name, 1).await;
    assert_eq!(guard.release_closed(LONG_TTL).await.unwrap(), Released::Released);
    expect_waiting("the lock is closed", &evicted).await;
    let evicted = tokio::spawn(async move { drop(evicted.await) });
    // Where it is opened before that one is gone, it may have been granted and released, or is evicted as a holder.
    one.locks.evict(&name, place).await.unwrap();
    let guard = join("the one behind is granted", behind).await;
    let id = guard.claim_id();
    guard.verify().await.expect("the eviction of another took the lock");
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    join("the evicted waiter is granted in the end", evicted).await;
    assert_eq!(one.lock(&name).await.release_closed(LONG_TTL).await.unwrap(), Released::Released);
    assert!(!other.could_lock(&name).await);
    assert_eq!(other.locks.evict(&name, id).await.unwrap(), Freed::Absent);
    one.expect_unused(&name).await;
}

/// The refused step does nothing; the guard that asked for it is gone, and its lock with it, but not closed.
async fn refuses_to_linger(one: &Client, other: &Client) {
    let name = unique("no-linger");
    let claim = one.claim(&name, Mode::Exclusive, LONG_TTL, false);
    answered(async || one.faults.claim(&claim).await).await.unwrap();
    expect_unsupported(one.faults.release(&claim, PATIENCE).await);
    assert!(matches!(other.faults.verify(&claim).await.unwrap(), Renewal::Renewed(_)));
    assert_eq!(one.faults.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
    let guard = one.lock(&name).await;
    let waiter = queue(&other.locks, &name);
    other.waits(&name, 1).await;
    expect_unsupported(guard.release_closed(LONG_TTL).await);
    drop(join("the lock is not closed", waiter).await);
    one.expect_unused(&name).await;
}

/// A detached lease is nobody's but its id's: it outlives its client, and is renewed and released from elsewhere.
pub async fn detached_lease_ends_with_its_client(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("detach");
    let guard = one.lock(&name).await;
    let (id, token) = (guard.claim_id(), guard.token());
    if !one.capabilities().detached {
        assert_eq!(guard.detach().await.unwrap_err().kind(), ErrorKind::Unsupported);
        return other.expect_unused(&name).await;
    }
    one.faults.lose_reply_of(Step::Renew);
    let detached = guard.detach().await.expect("a lost answer is asked for again");
    assert!(one.faults.calls_of(Step::Renew) >= 2, "its whole TTL was not asked for");
    assert_eq!((detached.claim, detached.token, detached.name.as_str()), (id, token, name.as_str()));
    let (asked, left) = (one.faults.calls_of(Step::Renew), unique("detach-new"));
    let new = super::client::lock(&one.unrenewed(LONG_TTL), &left).await;
    let new = new.detach().await.unwrap();
    assert_eq!(
        one.faults.calls_of(Step::Renew),
        asked,
        "a lease of its own that was granted just now is renewed"
    );
    assert_eq!(other.locks.release_detached(&left, new.claim).await.unwrap(), Released::Released);
    one.locks.close(PATIENCE).await.unwrap();
    drop(one);
    assert!(!other.could_lock(&name).await, "a detached lease ended with its client");
    for odd in [Duration::ZERO, Duration::from_micros(500), Duration::MAX] {
        let error = other.locks.renew_detached(&name, id, odd).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    assert_eq!(other.faults.calls_of(Step::Renew), 0, "an odd TTL was sent");
    other.locks.renew_detached(&name, id, LONG_TTL).await.unwrap();
    assert!(!other.could_lock(&name).await);
    other.faults.lose_reply_of(Step::Release);
    let error = other.locks.release_detached(&name, id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "it may have been lost before: {error}");
    assert!(matches!(other.locks.release_detached(&name, id).await.unwrap(), Released::AlreadyLost(_)));
    let error = other.locks.renew_detached(&name, id, LONG_TTL).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    other.expect_unused(&name).await;
}

/// A lease that is known by its id ends no sooner than its longest renewal said: an older one may arrive late, or a helper ask for less.
pub async fn renewal_by_id_shortens_a_lease(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("shorten-detached");
    let guard = one.lock(&name).await;
    let id = guard.claim_id();
    // Else it lives as long as its guard.
    let mut kept = Some(guard);
    if one.capabilities().detached {
        kept.take().expect("a guard").detach().await.unwrap();
    }
    for ttl in [LONG_TTL, LONG_TTL / 4] {
        other.locks.renew_detached(&name, id, ttl).await.unwrap();
        let left = other.claims(&name).await[0].expires_in.expect("it was given an end");
        assert!(left > LONG_TTL / 2, "a lease of {LONG_TTL:?} was shortened to {left:?}");
    }
    assert_eq!(other.locks.release_detached(&name, id).await.unwrap(), Released::Released);
    drop(kept);
    other.expect_unused(&name).await;
}

/// P7: closing waits for the releases under way, says when they take too long, and leaves held guards alone.
pub async fn close_abandons_releases(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let (name, held) = (unique("close"), unique("close-held"));
    let (guard, kept) = (one.lock(&name).await, one.lock(&held).await);
    let gate = one.faults.hold_reply_of(Step::Release);
    drop(guard);
    within("the release is under way", gate.reached()).await;
    let error = one.locks.close(Duration::from_millis(20)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert_eq!(one.locks.close(Duration::ZERO).await.unwrap_err().kind(), ErrorKind::Unavailable);
    gate.open();
    one.locks.close(PATIENCE).await.unwrap();
    one.locks.close(Duration::MAX).await.unwrap();
    other.expect_unused(&name).await;
    assert!(kept.is_held());
    kept.verify().await.unwrap();
    assert!(!other.could_lock(&held).await);
    drop(kept);
    other.expect_unused(&held).await;
}

/// P7: a closed client sends no more claims, and its last guards still renew.
pub async fn closed_client_claims(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let (name, held) = (unique("closed"), unique("closed-held"));
    let ttl = fixture.ttl() * 2;
    let kept = super::client::lock(&client.with_ttl(ttl), &held).await;
    client.locks.close(PATIENCE).await.unwrap();
    let claims = client.faults.calls_of(Step::Claim);
    let mutex = client.locks.mutex(&name).unwrap();
    assert_eq!(mutex.lock().await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(mutex.try_lock().await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(client.faults.calls_of(Step::Claim), claims, "a closed client sent a claim");
    until_past(&client, client.now() + ttl).await;
    assert!(kept.is_held(), "closing ended a lease that is held");
    assert_eq!(kept.release().await.unwrap(), Released::Released);
}

/// P12: the store says who holds and, if it has a queue, who waits, how, since when, and with which label.
pub async fn owner_record_is_unreadable(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("owner");
    let before = one.env.clock().wall();
    let labelled = one.locks.clone().label("nightly \u{2192} \"report\"").unwrap();
    for bad in ["a\nb".to_owned(), "l".repeat(129)] {
        assert_eq!(one.locks.clone().label(&bad).unwrap_err().kind(), ErrorKind::Invalid);
    }
    let guard = super::client::lock(&labelled, &name).await;
    let waiter = queue(&other.locks, &name);
    other.waits(&name, 1).await;
    let claims = other.claims(&name).await;
    let (holder, waiting) = claims.split_first().expect("a held lock is listed");
    let own = guard.state().await.unwrap().expect("what is held is shown to its holder");
    assert_eq!(
        (own.id, own.mode, own.token, &own.owner),
        (holder.id, holder.mode, holder.token, &holder.owner)
    );
    assert_eq!((holder.id, holder.granted, holder.mode), (guard.claim_id(), true, Mode::Exclusive));
    assert_eq!(holder.token.unwrap_or(guard.token()), guard.token());
    assert_eq!(holder.owner.label, "nightly \u{2192} \"report\"");
    assert_eq!(holder.owner.pid, std::process::id());
    assert!(!holder.owner.host.is_empty() && !holder.owner.user.is_empty());
    assert!(waiting.iter().all(|claim| !claim.granted && claim.owner.label.is_empty()));
    assert_eq!(waiting.len(), usize::from(one.capabilities().queue), "{waiting:?}");
    // Stores keep time in steps of a second at worst, and their clock may differ from ours.
    let slack = Duration::from_secs(300);
    assert!(holder.since + slack > before && holder.since < one.env.clock().wall() + slack);
    assert_eq!(holder.expires_in.is_some(), one.capabilities().expiry);
    let queued = waiting.first().map(|claim| claim.since);
    // A store's clock may be as coarse as that.
    until_past(&one, one.now() + Duration::from_millis(20)).await;
    assert_eq!(guard.release().await.unwrap(), Released::Released);
    let next = join("the waiter is granted", waiter).await;
    let held = next.state().await.unwrap().expect("what is held is shown to its holder").since;
    assert!(queued.is_none_or(|queued| held > queued), "since it waited, and not since it holds");
    drop(next);
    other.expect_unused(&name).await;
}
