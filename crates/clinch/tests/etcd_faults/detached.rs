//! Leases of one claim alone: renewed and released by other clients, and given back.

use clinch::Claim;
use clinch::backend::{Freed, Progress, Renewal};

use super::moves::{isolated, kept_until};
use super::sieve::{Fate, Sieve};
use super::turns::{contains, moves};
use super::*;

/// Another client renews what hangs on a lease that carries more than that: it lasts, and the rest is its owner's business.
#[tokio::test]
async fn a_renewal_by_another_client_lengthens_one_claim_alone() {
    const TTL: Duration = Duration::from_secs(8);
    let etcd = Etcd::start();
    let (near, far) = (open(&etcd.url()).await, open(&etcd.url()).await);
    let [job, other] = [(1, "job"), (2, "other")].map(|(id, name)| ghosts::claim(id, name, TTL));
    for claim in [&job, &other] {
        ghosts::granted(&*near, claim).await;
    }
    let [key, others] = [&job, &other].map(|claim| near.key(claim.id).unwrap());
    eventually("half of their lease has passed", async || (left(&etcd, &others) <= 4).then_some(())).await;
    let asked = [Arc::new(Claim { isolated: true, enqueue: false, ..(*job).clone() })];
    for _ in 0..3 {
        let renewals = far.renew(&asked).await;
        assert!(matches!(renewals[..], [Renewal::Renewed(_)]), "{renewals:?}");
    }
    assert!(left(&etcd, &others) <= 4, "what nobody renewed lasts longer");
    assert!(left(&etcd, &key) >= 6, "it was not renewed");
    assert_eq!(etcd.leases().len(), 2, "each renewal took another lease");
    assert_eq!(far.release(&asked[0], Duration::ZERO).await.unwrap(), Freed::Removed);
    assert_eq!(etcd.leases().len(), 1, "its lease stays behind");
    near.release(&other, Duration::ZERO).await.unwrap();
    assert_eq!(keys(&etcd, "other"), [""; 0]);
}

/// Whoever takes and releases a detached lease of a day a thousand times leaves nothing of that for a day.
#[tokio::test]
async fn what_ends_gives_back_the_lease_that_it_had_for_itself() {
    let etcd = Etcd::start();
    let (near, far) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    for _ in 0..3 {
        let detached = lock(&near, "job").await.detach().await.unwrap();
        far.renew_detached("job", detached.claim, LONG_TTL * 2).await.unwrap();
        let released = far.release_detached("job", detached.claim).await.unwrap();
        assert_eq!(released, Released::Released);
    }
    // Locks are taken on one that is shared.
    assert_eq!(etcd.leases().len(), 1);
    let isolated = lock(&near.clone().isolated(), "apart").await;
    isolated.extend(LONG_TTL * 2).await.unwrap();
    eventually("the one that it had before is given back", async || (etcd.leases().len() == 2).then_some(()))
        .await;
    release(isolated).await;
    assert_eq!(etcd.leases().len(), 1);
}

/// A living holder keeps what another client renews, on a lease that lasts no shorter than that other was promised, and gives back
/// the one that it had.
#[tokio::test]
async fn a_holder_with_a_lease_of_its_own_outlives_its_renewal_by_another() {
    const TTL: Duration = Duration::from_secs(600);
    let etcd = Etcd::start();
    let near = connect(&etcd.url()).await.ttl(TTL).unwrap().isolated();
    let far = connect(&etcd.url()).await;
    let (guard, other) = (lock(&near, "job").await, lock(&near, "other").await);
    let key = guard.store_key().unwrap();
    let first = carrier(&etcd, &key).0;
    far.renew_detached("job", guard.claim_id(), LONG_TTL).await.unwrap();
    // What became of the first is told before what comes after it.
    etcd.ctl(&["del", &other.store_key().unwrap()]);
    within("the other is told", other.lost()).await;
    assert!(guard.is_held(), "{:?}", guard.standing());
    eventually("its holder has it where it keeps it", async || {
        guard.extend(TTL).await.unwrap();
        etcd.ctl(&["lease", "list"]).lines().all(|lease| lease.trim() != first).then_some(())
    })
    .await;
    assert!(
        guard.is_held() && carrier(&etcd, &key).1 >= LONG_TTL.as_secs(),
        "not what the other was promised"
    );
    assert_eq!(guard.release().await.unwrap(), Released::Released);
}

/// A living holder's key never comes to hang on a lease that ends before what the holder was promised, also where the move to it
/// arrives late, when the holder has renewed its own meanwhile.
#[tokio::test]
async fn a_renewal_by_another_client_that_arrives_late_shortens_nothing() {
    const TTL: Duration = Duration::from_secs(8);
    const LATE: Duration = Duration::from_secs(3);
    let (etcd, clock) = (Etcd::start(), Clock::host());
    let sieve = Sieve::start(etcd.addr()).await;
    let (near, far) = (open(&etcd.url()).await, open(&sieve.url()).await);
    let job = ghosts::claim(1, "job", TTL);
    ghosts::granted(&*near, &job).await;
    sieve.catch(Fate::Late, |request| moves(request, "job"));
    let (asked, sent) = ([job.clone()], clock.now());
    let moving = tokio::spawn(async move { far.renew(&asked).await });
    sieve.caught().await;
    eventually("it is late", async || (clock.now() > sent + LATE).then_some(())).await;
    let promised = match near.renew(std::slice::from_ref(&job)).await.pop() {
        Some(Renewal::Renewed(left)) => left.unwrap_or(TTL).as_secs(),
        renewal => panic!("{renewal:?}"),
    };
    let key = near.key(job.id).unwrap();
    let first = carrier(&etcd, &key).0;
    sieve.let_go().await;
    eventually("it is moved", async || {
        let hang_on_it = etcd.ctl(&["lease", "timetolive", &first, "--keys"]);
        (!hang_on_it.contains(&key)).then_some(())
    })
    .await;
    let left = left(&etcd, &key);
    assert!(left >= promised, "promised for {promised} s, and {left} s are left");
    drop(moving.await.unwrap());
}

/// One that the network keeps for so long that the lease that it is to move to is nearly over moves nothing.
#[tokio::test]
async fn a_renewal_by_another_client_that_arrives_very_late_moves_nothing() {
    const TTL: Duration = Duration::from_secs(4);
    const LATE: Duration = Duration::from_millis(8500);
    let (etcd, clock) = (Etcd::start(), Clock::host());
    let sieve = Sieve::start(etcd.addr()).await;
    let (near, far) = (open(&etcd.url()).await, open(&sieve.url()).await);
    let job = ghosts::claim(1, "job", TTL);
    ghosts::granted(&*near, &job).await;
    let key = near.key(job.id).unwrap();
    sieve.catch(Fate::Late, |request| moves(request, "job"));
    let (asked, sent) = ([job.clone()], clock.now());
    let moving = tokio::spawn(async move { far.renew(&asked).await });
    sieve.caught().await;
    kept_until(&*near, &job, clock, sent + LATE).await;
    sieve.let_go().await;
    let left = left(&etcd, &key);
    assert!(left >= TTL.as_secs() - 1, "promised for {TTL:?}, and {left} s are left");
    assert!(matches!(moving.await.unwrap()[..], [Renewal::Failed(_)]));
}

/// Of a lease that nobody else has.
pub(super) const OWN_TTL: Duration = Duration::from_secs(3601);

/// Whether a request asks for such a lease.
fn asks_for_own(request: &[u8]) -> bool {
    contains(request, &[0x08, 0x91, 0x1c])
}

/// A step that is dropped while its claim's own lease is made leaves nothing of that for a day: not while the lease is asked for, though that may
/// be done later still, nor while its key is made.
#[tokio::test]
async fn a_step_that_is_dropped_leaves_no_lease_of_its_own() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let backend = open(&sieve.url()).await;
    let is_caught: [fn(&[u8]) -> bool; 2] = [asks_for_own, |request| contains(request, b"/clinch/%session/")];
    for (id, is_caught) in (1..).zip(is_caught) {
        let claim = Claim { isolated: true, ..(*ghosts::claim(id, "job", OWN_TTL)).clone() };
        sieve.catch(Fate::Late, is_caught);
        tokio::select! {
            early = backend.claim(&claim) => panic!("answered: {early:?}"),
            () = sieve.caught() => {}
        }
        sieve.let_go().await;
        eventually("its lease is given back", async || etcd.leases().is_empty().then_some(())).await;
    }
    assert_eq!(etcd.keys("/clinch/"), [""; 0]);
}

/// A lease that was granted unheard is the one that is asked for again, and no second one.
#[tokio::test]
async fn a_lease_whose_grant_was_not_heard_of_is_no_second_one() {
    for fate in [Fate::Late, Fate::Last] {
        let etcd = Etcd::start();
        let sieve = Sieve::start(etcd.addr()).await;
        let backend = open(&sieve.url()).await;
        let claim = isolated("job", OWN_TTL);
        sieve.catch(fate, asks_for_own);
        let (far, asked) = (backend.clone(), claim.clone());
        let claiming = tokio::spawn(async move {
            while !matches!(far.claim(&asked).await, Ok(Progress::Granted(_))) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        sieve.caught().await;
        if fate == Fate::Last {
            eventually("it was granted unheard", async || (etcd.leases().len() == 1).then_some(())).await;
            sieve.let_go().await;
        }
        join("it is granted", claiming).await;
        sieve.let_go().await;
        assert_eq!(etcd.leases().len(), 1);
        assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
        eventually("nothing is left", async || etcd.leases().is_empty().then_some(())).await;
    }
}

/// What was to keep a lock closed that its claim had no more is given back: it would last as long as that was to be closed.
#[tokio::test]
async fn a_lock_that_could_not_be_closed_leaves_no_lease() {
    let etcd = Etcd::start();
    let backend = open(&etcd.url()).await;
    let claim = ghosts::claim(1, "job", LONG_TTL);
    ghosts::granted(&*backend, &claim).await;
    etcd.ctl(&["del", &backend.key(claim.id).unwrap()]);
    assert_eq!(backend.release(&claim, OWN_TTL).await.unwrap(), Freed::Absent);
    eventually("its lease is given back", async || (etcd.leases().len() == 1).then_some(())).await;
}
