//! Leases that carry nothing any more. One that keeps a lock closed lasts for years, perhaps, and elections begin it anew: whoever leaves one
//! behind with each turn of a job fills the server.

use clinch::Claim;
use clinch::backend::{Freed, Progress, Renewal};

use super::closed::{CLOSED, LATE, backdate};
use super::detached::OWN_TTL;
use super::moves::isolated;
use super::sieve::{Fate, Sieve};
use super::turns::{contains, deletes};
use super::*;

/// Closes a lock, and says by which lease.
async fn closed(etcd: &Etcd, backend: &dyn Backend, claim: &Claim, linger: Duration) -> String {
    let key = backend.key(claim.id).unwrap();
    assert_eq!(backend.release(claim, linger).await.unwrap(), Freed::Removed);
    carrier(etcd, &key).0
}

async fn queued(backend: &dyn Backend, claim: &Claim) {
    let progress = backend.claim(claim).await.unwrap();
    assert!(matches!(progress, Progress::Queued(_)), "{progress:?}");
}

async fn has_so_many_leases(etcd: &Etcd, count: usize, what: &str) {
    eventually(what, async || (etcd.leases().len() == count).then_some(())).await;
}

/// Waits until there are so many leases of that TTL, which nobody shares.
async fn has_so_many_own(etcd: &Etcd, count: usize, what: &str) {
    let granted = format!("TTL({}s)", OWN_TTL.as_secs());
    let is_own = |lease: &String| etcd.ctl(&["lease", "timetolive", lease]).contains(&granted);
    let own = async || (etcd.leases().iter().filter(|lease| is_own(lease)).count() == count).then_some(());
    eventually(what, own).await;
}

#[tokio::test]
async fn a_closed_lock_that_is_opened_leaves_no_lease() {
    let etcd = Etcd::start();
    let (locks, backend) = (connect(&etcd.url()).await, open(&etcd.url()).await);
    let mut left = Vec::new();

    let claim = ghosts::claim(1, "opened", LONG_TTL);
    ghosts::granted(&*backend, &claim).await;
    left.push(("opened", closed(&etcd, &*backend, &claim, CLOSED).await));
    locks.open("opened").await.unwrap();

    let [claim, waiter] = [2, 3].map(|id| ghosts::claim(id, "waiter-evicted", LONG_TTL));
    ghosts::granted(&*backend, &claim).await;
    queued(&*backend, &waiter).await;
    left.push(("waiter-evicted", closed(&etcd, &*backend, &claim, CLOSED).await));
    assert_eq!(backend.evict(&waiter.name, waiter.id).await.unwrap(), Freed::Removed);

    let reader =
        |id| Claim { mode: Mode::Shared, ..(*ghosts::claim(id, "holder-evicted", LONG_TTL)).clone() };
    let (first, second) = (reader(4), reader(5));
    ghosts::granted(&*backend, &first).await;
    ghosts::granted(&*backend, &second).await;
    left.push(("holder-evicted", closed(&etcd, &*backend, &first, CLOSED).await));
    assert_eq!(backend.evict(&second.name, second.id).await.unwrap(), Freed::Removed);

    // Its lease lasts for a second more, at least.
    let claim = ghosts::claim(6, "waited-for", LONG_TTL);
    ghosts::granted(&*backend, &claim).await;
    left.push(("waited-for", closed(&etcd, &*backend, &claim, Duration::from_millis(10)).await));
    drop(within("it opens", lock(&locks, "waited-for")).await);

    let claim = ghosts::claim(7, "overdue", LONG_TTL);
    ghosts::granted(&*backend, &claim).await;
    left.push(("overdue", closed(&etcd, &*backend, &claim, CLOSED).await));
    backdate(&etcd, "overdue", CLOSED + LATE);
    etcd.restart();
    let locks = connect(&etcd.url()).await;
    assert!(locks.mutex("overdue").unwrap().try_lock().await.unwrap().is_some(), "its time is up");

    let leases = etcd.leases();
    let left: Vec<&str> =
        left.iter().filter(|(_, lease)| leases.contains(lease)).map(|(name, _)| *name).collect();
    assert_eq!(left, [""; 0], "opened, but their leases are there");
}

/// The key is gone then, and nobody would find its lease any more.
#[tokio::test]
async fn a_closed_lock_whose_opening_goes_unheard_is_open_and_leaves_no_lease() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (backend, operator) = (open(&etcd.url()).await, connect(&sieve.url()).await);
    let claim = ghosts::claim(1, "job", LONG_TTL);
    ghosts::granted(&*backend, &claim).await;
    closed(&etcd, &*backend, &claim, CLOSED).await;
    sieve.catch(Fate::Late, |request| deletes(request, "job"));
    let opened = tokio::spawn(async move { operator.open("job").await });
    sieve.caught().await;
    sieve.let_go().await;
    join("it is opened", opened).await.unwrap();
    assert_eq!(keys(&etcd, "job"), [""; 0], "it is open");
    has_so_many_leases(&etcd, 1, "the one that its claims share is left").await;
}

/// A renewal that is under way when its claim is released would move the key that keeps the lock closed, and open it.
#[tokio::test]
async fn a_claim_that_was_released_closed_elsewhere_is_lost_and_its_lock_stays_closed() {
    let etcd = Etcd::start();
    let (near, far) = (open(&etcd.url()).await, open(&etcd.url()).await);
    for (id, asks) in [(1, true), (2, false)] {
        let name = format!("job-{id}");
        let claim = ghosts::claim(id, &name, LONG_TTL);
        ghosts::granted(&*near, &claim).await;
        let key = near.key(claim.id).unwrap();
        assert_eq!(far.release(&claim, CLOSED).await.unwrap(), Freed::Removed);
        let closes = carrier(&etcd, &key);
        let is_lost = async || {
            let renewal = match asks {
                true => near.verify(&claim).await.unwrap(),
                false => near.renew(std::slice::from_ref(&claim)).await.remove(0),
            };
            matches!(renewal, Renewal::Lost(_)).then_some(())
        };
        eventually("it hears of that", is_lost).await;
        assert_eq!(carrier(&etcd, &key).0, closes.0, "it is closed by another lease");
    }
}

/// Has a release that closes the lock go unheard.
async fn release_unheard(sieve: &Sieve, fate: Fate, backend: &Arc<dyn Backend>, claim: &Arc<Claim>) {
    sieve.catch(fate, |request| contains(request, b"\"closed_ms\":"));
    let (far, closing) = (backend.clone(), claim.clone());
    let released = tokio::spawn(async move { far.release(&closing, OWN_TTL).await });
    sieve.caught().await;
    sieve.let_go().await;
    let error = join("it is not answered", released).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}");
}

/// Each try has a lease of its own, which lasts as long as the lock is to be closed.
#[tokio::test]
async fn a_lock_that_is_closed_at_the_second_try_has_one_lease() {
    for fate in [Fate::Lost, Fate::Late] {
        let etcd = Etcd::start();
        let sieve = Sieve::start(etcd.addr()).await;
        let (near, backend) = (open(&etcd.url()).await, open(&sieve.url()).await);
        // Its own, and one that another client has taken.
        let (own, theirs) = (isolated("own", LONG_TTL), ghosts::claim(2, "theirs", LONG_TTL));
        ghosts::granted(&*backend, &own).await;
        ghosts::granted(&*near, &theirs).await;
        for (claim, key) in [(&own, backend.key(own.id)), (&theirs, near.key(theirs.id))] {
            release_unheard(&sieve, fate, &backend, claim).await;
            let freed = if fate == Fate::Lost { Freed::Removed } else { Freed::Absent };
            assert_eq!(backend.release(claim, OWN_TTL).await.unwrap(), freed);
            assert_eq!(carrier(&etcd, &key.unwrap()).1, OWN_TTL.as_secs(), "it is closed");
        }
        // And the one that the other client shares.
        has_so_many_leases(&etcd, 3, "one lease for each closed lock").await;
    }
}

/// So it is where it is not to be closed any more, and where who keeps its lease sees to it.
#[tokio::test]
async fn a_lock_that_could_not_be_closed_and_is_freed_leaves_no_lease() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let backend = open(&sieve.url()).await;
    for fate in [Fate::Lost, Fate::Late] {
        let claim = isolated("job", LONG_TTL);
        ghosts::granted(&*backend, &claim).await;
        release_unheard(&sieve, fate, &backend, &claim).await;
        assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Removed);
        has_so_many_leases(&etcd, 0, "nothing is left").await;
    }
}

/// An evictor that has ended could not shorten what it closed: that would last for as long as the holder's TTL, and longer.
#[tokio::test]
async fn a_holder_that_opens_what_its_evictor_closed_leaves_no_lease() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (backend, operator) = (open(&etcd.url()).await, open(&sieve.url()).await);
    let claim = ghosts::claim(1, "job", LONG_TTL);
    ghosts::granted(&*backend, &claim).await;
    sieve.catch(Fate::Late, |request| contains(request, b"\"evicted\":true"));
    let evicting = claim.clone();
    let evicted = tokio::spawn(async move { operator.evict(&evicting.name, evicting.id).await });
    sieve.caught().await;
    evicted.abort();
    assert!(evicted.await.is_err(), "the evictor has ended");
    sieve.let_go().await;
    assert!(carrier(&etcd, &backend.key(claim.id).unwrap()).1 > LONG_TTL.as_secs(), "it is evicted");
    assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Absent);
    has_so_many_leases(&etcd, 1, "the one that its claims share is left").await;
}

/// The lease of its TTL is made when a waiter begins, and goes with it into its next place.
#[tokio::test]
async fn a_waiter_that_queues_again_leaves_no_lease_of_its_own() {
    let etcd = Etcd::start();
    let (near, far) = (open(&etcd.url()).await, open(&etcd.url()).await);
    let (holder, waiter) = (
        ghosts::claim(1, "job", LONG_TTL),
        Claim { id: ClaimId::from_bits(2), ..(*isolated("job", OWN_TTL)).clone() },
    );
    ghosts::granted(&*near, &holder).await;
    queued(&*far, &waiter).await;
    // Before the key is watched, which it is when it is old.
    etcd.ctl(&["del", &far.key(waiter.id).unwrap()]);
    queued(&*far, &waiter).await;
    assert_eq!(keys(&etcd, "job").len(), 2, "it stands in the queue");
    has_so_many_own(&etcd, 1, "it has one lease of its own").await;
    far.release(&waiter, Duration::ZERO).await.unwrap();
    has_so_many_own(&etcd, 0, "it gives that back").await;
}

/// Who waits beside one that could not withdraw keeps the lease of its place, and deletes that; what it had for itself goes as well.
#[tokio::test]
async fn a_waiter_whose_end_is_made_good_leaves_no_lease_of_its_own() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let (near, far) = (open(&etcd.url()).await, open(&format!("etcd://{}", proxy.addr())).await);
    let waiter = |id| {
        Arc::new(Claim { id: ClaimId::from_bits(id), place: true, ..(*isolated("job", OWN_TTL)).clone() })
    };
    let (holder, left, kept) = (ghosts::claim(1, "job", LONG_TTL), waiter(2), waiter(3));
    ghosts::granted(&*near, &holder).await;
    queued(&*far, &left).await;
    queued(&*far, &kept).await;
    proxy.refuse(true);
    proxy.cut_all();
    far.release(&left, Duration::ZERO).await.unwrap_err();
    proxy.refuse(false);
    eventually("its place is gone", async || {
        let renewals = far.renew(std::slice::from_ref(&kept)).await;
        assert!(!matches!(renewals[..], [Renewal::Lost(_)]), "{renewals:?}");
        (keys(&etcd, "job").len() == 2).then_some(())
    })
    .await;
    has_so_many_own(&etcd, 1, "its lease is given back").await;
    assert_eq!(far.release(&left, Duration::ZERO).await.unwrap(), Freed::Removed);
}
