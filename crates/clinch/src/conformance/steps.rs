//! Steps of a backend that are not idempotent, capabilities that are not true.
//!
//! These take the bare backend, without the engine above it.

use std::fmt::Debug;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::Fixture;
use super::client::{Client, LONG_TTL, answered, eventually, unique, until_past};
use crate::backend::{Backend, Freed, Progress, Renewal};
use crate::check::Verdict;
use crate::claim::{Claim, Mode};
use crate::error::{ErrorKind, Result};
use crate::token::Token;

/// Checks that a store says that it cannot do something.
pub(super) fn expect_unsupported<T: Debug>(answer: Result<T>) {
    let error = answer.expect_err("a store did what its capabilities deny");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
}

/// P4: the second step of a granted claim is the same grant, with the same token, and one release frees it.
pub async fn claim_applied_twice(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let name = unique("claim-twice");
    for enqueue in [false, true] {
        let claim = client.claim(&name, Mode::Exclusive, LONG_TTL, enqueue);
        let mut tokens = Vec::new();
        for _ in 0..3 {
            match answered(async || client.faults.claim(&claim).await).await.unwrap() {
                Progress::Granted(grant) => tokens.push(grant.token),
                other => panic!("a free lock was not granted: {other:?}"),
            }
        }
        assert!(tokens.iter().all(|token| *token == tokens[0]), "the token changed: {tokens:?}");
        assert_eq!(client.claims(&name).await.len(), 1);
        assert!(matches!(client.faults.verify(&claim).await.unwrap(), Renewal::Renewed(_)));
        assert_eq!(client.faults.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
        client.sees_claims(&name, 0).await;
    }
}

/// A store says how it is, beginning with what its URL means, and what to do about all that could be better.
pub async fn fit_store_is_called_unfit(fixture: &dyn Fixture) {
    let checks = Client::new(fixture).await.faults.examine().await;
    assert_eq!(checks.first().map(|check| check.what), Some("url"), "{checks:?}");
    for check in &checks {
        assert_ne!(check.verdict, Verdict::Fail, "{check:?}");
        assert_eq!(check.verdict == Verdict::Pass, check.remedy.is_none(), "{check:?}");
        assert!(!check.seen.is_empty() && check.remedy.as_deref() != Some(""), "{check:?}");
    }
}

/// P4: a queued claim that asks again keeps its place. Where there is no queue, a claim that asks in vain leaves nothing.
pub async fn place_lost_by_asking_again(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("place");
    let holder = one.lock(&name).await;
    let first = one.claim(&name, Mode::Exclusive, LONG_TTL, true);
    let second = other.claim(&name, Mode::Exclusive, LONG_TTL, true);
    let store = one.capabilities();
    let places = if store.queue { 2 } else { 0 };
    for _ in 0..3 {
        for (client, claim) in [(&one, &first), (&other, &second)] {
            match answered(async || client.faults.claim(claim).await).await.unwrap() {
                Progress::Queued(_) => assert!(store.queue, "a place on a store without a queue"),
                Progress::Busy(busy) => {
                    assert!(!store.queue && busy.place_ttl.is_none() && busy.ahead > 0, "{busy:?}");
                }
                Progress::Granted(_) => panic!("two claims hold one lock"),
            }
        }
        assert_eq!(one.claims(&name).await.len(), 1 + places, "a repeated claim stands in the queue twice");
    }
    let impatient = other.claim(&name, Mode::Exclusive, LONG_TTL, false);
    assert!(matches!(
        answered(async || other.faults.claim(&impatient).await).await.unwrap(),
        Progress::Busy(_)
    ));
    assert_eq!(one.claims(&name).await.len(), 1 + places, "a claim that does not queue left something");
    drop(holder);
    one.sees_claims(&name, places).await;
    if store.fifo {
        let early = answered(async || other.faults.claim(&second).await).await.unwrap();
        assert!(matches!(early, Progress::Queued(_)), "the second in line was granted: {early:?}");
    }
    let left = if store.queue { Freed::Removed } else { Freed::Absent };
    for (client, claim) in [(&one, &first), (&other, &second)] {
        assert_eq!(client.faults.release(claim, Duration::ZERO).await.unwrap(), left);
    }
    one.expect_unused(&name).await;
}

/// P4: a release that is repeated says that there was nothing, and frees nobody else's.
pub async fn release_applied_twice(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("release-twice");
    let claim = one.claim(&name, Mode::Exclusive, LONG_TTL, false);
    assert!(matches!(answered(async || one.faults.claim(&claim).await).await.unwrap(), Progress::Granted(_)));
    assert_eq!(one.faults.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
    let guard = other.lock(&name).await;
    assert_eq!(one.faults.release(&claim, Duration::ZERO).await.unwrap(), Freed::Absent);
    guard.verify().await.expect("a repeated release freed another's lock");
    assert!(matches!(one.faults.verify(&claim).await.unwrap(), Renewal::Lost(_)));
}

/// P7: a release of a claim that never was, on a lock that is held, free or unknown, does nothing.
pub async fn release_of_a_stranger(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("stranger");
    let stranger = other.claim(&name, Mode::Exclusive, LONG_TTL, true);
    assert_eq!(other.faults.release(&stranger, Duration::ZERO).await.unwrap(), Freed::Absent);
    let guard = one.lock(&name).await;
    let linger = if one.capabilities().linger { Duration::from_secs(60) } else { Duration::ZERO };
    assert_eq!(other.faults.release(&stranger, linger).await.unwrap(), Freed::Absent);
    guard.verify().await.expect("a stranger's release freed the lock");
    assert!(matches!(other.faults.verify(&stranger).await.unwrap(), Renewal::Lost(_)));
    let renewals = other.faults.renew(&[stranger.into()]).await;
    assert!(matches!(renewals[..], [Renewal::Lost(_)]), "a claim that never was is renewed: {renewals:?}");
    drop(guard);
    // A stranger's linger must not have closed the lock either.
    one.expect_unused(&name).await;
}

/// P5: a claim that is released before its dropped step has come to an end leaves nothing behind.
pub async fn release_overtakes_the_claim(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("overtaken-claim");
    for polls in 0..4 {
        let claim = one.claim(&name, Mode::Exclusive, LONG_TTL, true);
        drop(super::client::poll_then_drop(one.faults.claim(&claim), polls).await);
        one.faults.release(&claim, Duration::ZERO).await.unwrap();
        other.expect_unused(&name).await;
    }
}

/// A renewal never shortens a lease. Requests overtake each other: an older one with a shorter TTL that arrives after an
/// extension would end the lease before the deadline that the extension's answer has set (P2).
pub async fn renewal_shortens_a_lease(fixture: &dyn Fixture) {
    let one = Client::new(fixture).await;
    if !one.capabilities().expiry {
        return;
    }
    let name = unique("shorten");
    let extended = one.claim(&name, Mode::Exclusive, LONG_TTL, true);
    let progress = answered(async || one.faults.claim(&extended).await).await.unwrap();
    assert!(matches!(progress, Progress::Granted(_)), "a free lock was not granted");
    let overtaken = Arc::new(Claim { ttl: fixture.ttl(), ..extended.clone() });
    eventually("the claim is renewed", async || {
        match &one.faults.renew(std::slice::from_ref(&overtaken)).await[..] {
            [Renewal::Renewed(_)] => Some(()),
            [Renewal::Failed(error)] if error.is_transient() => None,
            answers => panic!("{answers:?}"),
        }
    })
    .await;
    let states = one.faults.list(&name).await.unwrap();
    let left = states[0].claims[0].expires_in.expect("a lease that expires");
    assert!(left > fixture.ttl(), "a lease of {LONG_TTL:?} was shortened to {left:?}");
    one.faults.release(&extended, Duration::ZERO).await.unwrap();
}

/// The capability `expiry` is true: a claim that nobody renews is gone, but not before its TTL; or it never goes.
pub async fn lease_outlives_its_ttl(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let name = unique("expiry");
    let (claim, sent, grant) = eventually("a free lock is granted", async || {
        let claim = one.claim(&name, Mode::Exclusive, fixture.ttl(), true);
        let sent = one.now();
        match one.faults.claim(&claim).await {
            Ok(Progress::Granted(grant)) => Some((claim, sent, grant)),
            Err(error) if error.is_transient() => {
                answered(async || one.faults.release(&claim, Duration::ZERO).await).await.unwrap();
                None
            }
            answer => panic!("a free lock was not granted: {answer:?}"),
        }
    })
    .await;
    let expiry = one.capabilities().expiry;
    assert_eq!(grant.ttl.is_some(), expiry, "{grant:?} contradicts the capability");
    if let Some(ttl) = grant.ttl {
        eventually("an unrenewed claim is gone", async || other.could_lock(&name).await.then_some(())).await;
        let gone = other.now();
        // Less what the store's clock may run apart from ours in that time.
        assert!(gone >= sent + (ttl - ttl / 100), "a lease of {ttl:?} ran out after {:?}", gone.since(sent));
        let verified = answered(async || one.faults.verify(&claim).await).await.unwrap();
        assert!(matches!(verified, Renewal::Lost(_)), "{verified:?}");
    } else {
        until_past(&one, sent + fixture.ttl()).await;
        assert!(!other.could_lock(&name).await, "a lease without an end ran out");
    }
    one.faults.release(&claim, Duration::ZERO).await.unwrap();
    other.expect_unused(&name).await;
}

/// The capabilities `shared` and `permits` are true: such claims are granted, or refused as unsupported.
pub async fn modes_that_are_not_there(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let permits = Mode::Permits { count: NonZeroU32::MIN, capacity: NonZeroU32::new(2).unwrap() };
    let store = client.capabilities();
    for (mode, there) in [(Mode::Shared, store.shared), (permits, store.permits)] {
        let claim = client.claim(&unique("modes"), mode, LONG_TTL, false);
        let answer = client.faults.claim(&claim).await;
        if there {
            assert!(matches!(answer, Ok(Progress::Granted(_))), "{answer:?}");
            assert_eq!(client.claims(claim.name.as_str()).await[0].mode, mode);
            assert_eq!(client.faults.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
        } else {
            expect_unsupported(answer);
        }
    }
    assert!(!store.hosts || store.processes, "what excludes hosts excludes processes");
    assert!(!store.fifo || store.queue, "what grants in order has a queue");
    assert_eq!(store.processes, fixture.url().is_some(), "the fixture's url() does not fit the capability");
}

/// P3: tokens start above zero, fit a double, and stand in the list as they were granted. A store without tokens grants
/// none that could be taken for one.
pub async fn token_does_not_fit(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let name = unique("token-size");
    let guard = client.lock(&name).await;
    if !client.capabilities().fencing {
        assert_eq!((guard.token().get(), client.claims(&name).await[0].token), (0, None));
        return;
    }
    assert!(guard.token().get() > 0 && guard.token() <= Token::MAX);
    assert_eq!(client.claims(&name).await[0].token, Some(guard.token()));
}
