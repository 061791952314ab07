//! A server that is full. It refuses what it is asked for from then on, and what was under way when it became full, though it applies
//! that: with the same words.

use clinch::Claim;
use clinch::backend::{Backend, Freed, Progress, Renewal};

use super::frames::Frames;
use super::moves::{elsewhere, isolated, renew, renewed, with_ttl};
use super::sieve::{Fate, Sieve};
use super::turns::{contains, moves};
use super::*;

const TTL: Duration = Duration::from_secs(600);

/// A server, and a client that it can be made to refuse once.
async fn refusing() -> (Etcd, Frames, Arc<dyn Backend>) {
    let etcd = Etcd::start();
    let frames = Frames::start(etcd.addr()).await;
    let backend = open(&frames.url()).await;
    (etcd, frames, backend)
}

/// A server that is soon full.
fn small() -> Etcd {
    Etcd::builder().arg("--quota-backend-bytes", "200000").start()
}

async fn fill(etcd: &Etcd) {
    let filled = async || etcd.try_ctl(&["put", "ballast", &"x".repeat(20_000)]).is_err().then_some(());
    eventually("the server is full", filled).await;
}

/// Checks that a claim's key hangs on a lease of so many seconds, and that no other lease is left.
async fn hangs_on(etcd: &Etcd, name: &str, seconds: u64) {
    let only = async || (etcd.leases().len() == 1).then_some(());
    eventually("the lease that it has left is given back, and no other", only).await;
    let [key] = &keys(etcd, name)[..] else { panic!("{:?} stands", keys(etcd, name)) };
    assert_eq!(carrier(etcd, key).1, seconds);
}

/// The lease of a move that was refused and made carries the lock.
#[tokio::test]
async fn a_move_that_is_refused_after_it_was_made_takes_no_lock_along() {
    let (etcd, frames, backend) = refusing().await;
    let claim = isolated("job", TTL);
    ghosts::granted(&*backend, &claim).await;
    frames.refuse(|request| moves(request, "job"));
    renewed(&*backend, &with_ttl(&claim, 2 * TTL)).await;
    assert!(frames.has_refused());
    hangs_on(&etcd, "job", 2 * TTL.as_secs()).await;
    assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
}

/// And if the claim is gone by then, that is told.
#[tokio::test]
async fn a_move_that_is_refused_for_a_claim_that_is_gone_tells_so() {
    let (etcd, frames, backend) = refusing().await;
    let claim = isolated("job", TTL);
    ghosts::granted(&*backend, &claim).await;
    frames.refuse(|request| moves(request, "job"));
    etcd.ctl(&["del", &backend.key(claim.id).unwrap()]);
    let renewal = renew(&*backend, &with_ttl(&claim, 2 * TTL)).await;
    assert!(matches!(renewal, Renewal::Lost(_)), "{renewal:?}");
}

/// The same of a move by another client, as an operator's.
#[tokio::test]
async fn a_move_by_another_that_is_refused_after_it_was_made_takes_no_lock_along() {
    let (etcd, frames, far) = refusing().await;
    let near = open(&etcd.url()).await;
    let claim = isolated("job", TTL);
    ghosts::granted(&*near, &claim).await;
    frames.refuse(|request| moves(request, "job"));
    renewed(&*far, &with_ttl(&claim, 2 * TTL)).await;
    assert!(frames.has_refused());
    let key = near.key(claim.id).unwrap();
    assert!(carrier(&etcd, &key).1 >= 2 * TTL.as_secs());
    renewed(&*near, &claim).await;
    assert_eq!(near.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
}

/// A turn, too, and a claim that is new: the first is taken, the second is withdrawn.
#[tokio::test]
async fn a_claim_that_is_refused_after_it_was_made_is_no_ghost() {
    let (etcd, frames, backend) = refusing().await;
    let near = connect(&etcd.url()).await;
    let (guard, claim) = (lock(&near, "job").await, isolated("job", TTL));
    assert!(matches!(backend.claim(&claim).await.unwrap(), Progress::Queued(_)));
    release(guard).await;
    frames.refuse(|request| moves(request, "job"));
    ghosts::granted(&*backend, &claim).await;
    assert!(frames.has_refused());
    assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
    for enqueue in [false, true] {
        let claim = Claim { id: ClaimId::from_bits(5), enqueue, ..(*claim).clone() };
        frames.refuse(|request| contains(request, b"/clinch/job/"));
        let refused = backend.claim(&claim).await.unwrap_err();
        assert_eq!((refused.kind(), keys(&etcd, "job").len()), (ErrorKind::Exhausted, 1));
        assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
    }
    expect_unused(&etcd, &near, "job").await;
}

/// Whoever releases a claim of which a step may still come also sees to that, which a full server has no room for. That it released it is
/// true all the same.
#[tokio::test]
async fn a_release_that_is_refused_after_it_was_made_says_that_it_released() {
    let (etcd, frames, backend) = refusing().await;
    let [kept, claim] = [(1, "kept"), (2, "job")].map(|(id, name)| ghosts::claim(id, name, TTL));
    ghosts::granted(&*backend, &kept).await;
    let before = etcd.handled("Txn");
    frames.hold(true);
    tokio::select! {
        early = backend.claim(&claim) => panic!("answered: {early:?}"),
        () = eventually("it is done", async || (etcd.handled("Txn") > before).then_some(())) => {}
    }
    frames.hold(false);
    ghosts::granted(&*backend, &claim).await;
    frames.refuse(|request| contains(request, b"/clinch/job/"));
    assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
    assert!(frames.has_refused() && keys(&etcd, "job").is_empty());
}

/// A lease of its own that cannot be made longer is kept as long as it was.
#[tokio::test]
async fn a_lock_with_its_own_lease_outlives_an_extension_that_there_is_no_room_for() {
    let etcd = small();
    let backend = open(&etcd.url()).await;
    let claim = isolated("job", TTL);
    ghosts::granted(&*backend, &claim).await;
    fill(&etcd).await;
    let renewal = renew(&*backend, &with_ttl(&claim, 2 * TTL)).await;
    assert!(matches!(renewal, Renewal::Renewed(Some(left)) if left <= TTL), "{renewal:?}");
    assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
}

/// So is one of which an earlier extension may still come: on each lease that it may hang on.
#[tokio::test]
async fn a_lock_in_doubt_outlives_an_extension_that_there_is_no_room_for() {
    let etcd = small();
    let sieve = Sieve::start(etcd.addr()).await;
    let env = silent::split_env_by(sieve.addr());
    let backend = clinch::backends::etcd::open(&etcd.url(), env).await.unwrap();
    let claim = isolated("job", TTL);
    ghosts::granted(&*backend, &claim).await;
    sieve.catch(Fate::Late, |request| moves(request, "job"));
    let elsewhere = elsewhere();
    let (far, longer) = (backend.clone(), with_ttl(&claim, 2 * TTL));
    elsewhere.spawn(async move { renew(&*far, &longer).await });
    sieve.caught().await;
    fill(&etcd).await;
    for ttl in [TTL, 2 * TTL] {
        let renewal = renew(&*backend, &with_ttl(&claim, ttl)).await;
        assert!(matches!(renewal, Renewal::Renewed(Some(left)) if left <= TTL), "{renewal:?}");
    }
    elsewhere.shutdown_background();
    assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
}
