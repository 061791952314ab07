//! Moves of a holder's key from lease to lease: crossed, late, unheard, or made by somebody else.

use clinch::backend::{Backend, Progress, Renewal};
use clinch::{Claim, Instant};
use tokio::runtime::Runtime;

use super::sieve::{Fate, Sieve};
use super::turns::moves;
use super::*;

const SHORT: Duration = Duration::from_secs(600);

pub(super) fn isolated(name: &str, ttl: Duration) -> Arc<Claim> {
    Arc::new(Claim { isolated: true, ..(*ghosts::claim(1, name, ttl)).clone() })
}

pub(super) fn with_ttl(claim: &Claim, ttl: Duration) -> Arc<Claim> {
    Arc::new(Claim { ttl, ..claim.clone() })
}

pub(super) async fn renew(backend: &dyn Backend, claim: &Claim) -> Renewal {
    backend.renew(&[Arc::new(claim.clone())]).await.pop().unwrap()
}

pub(super) async fn renewed(backend: &dyn Backend, claim: &Claim) {
    let renewal = renew(backend, claim).await;
    assert!(matches!(renewal, Renewal::Renewed(_)), "{renewal:?}");
}

/// Renews a claim as its holder does, until then.
pub(super) async fn kept_until(backend: &dyn Backend, claim: &Claim, clock: Clock, end: Instant) {
    while clock.now() < end {
        renewed(backend, claim).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    renewed(backend, claim).await;
}

/// Another runtime, whose requests take a connection of their own.
pub(super) fn elsewhere() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// A server, a claim with a lease of its own, and its client: what that asks from elsewhere passes the sieve.
async fn holding(ttl: Duration) -> (Etcd, Sieve, Arc<dyn Backend>, Arc<Claim>) {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let env = silent::split_env_by(sieve.addr());
    let backend = clinch::backends::etcd::open(&etcd.url(), env).await.unwrap();
    let claim = isolated("job", ttl);
    ghosts::granted(&*backend, &claim).await;
    (etcd, sieve, backend, claim)
}

/// Two moves of one claim come to the server in one order and are heard of in the other. What its holder was promised last, and
/// what is kept from then on, is the lease that the key hangs on.
#[tokio::test]
async fn two_moves_that_cross_leave_the_key_on_the_lease_that_is_kept() {
    let (etcd, sieve, backend, claim) = holding(SHORT).await;
    let elsewhere = elsewhere();
    let key = backend.key(claim.id).unwrap();
    loop {
        sieve.catch(Fate::Slow, |request| moves(request, "job"));
        let (far, longest) = (backend.clone(), with_ttl(&claim, 3 * SHORT));
        let slow = elsewhere.spawn(async move { renew(&*far, &longest).await });
        // It is done, and was not heard of.
        sieve.caught().await;
        renewed(&*backend, &with_ttl(&claim, 2 * SHORT)).await;
        sieve.let_go().await;
        if let Renewal::Renewed(_) = slow.await.unwrap() {
            break;
        }
        // The host was so busy that the connection counted as dead.
        backend.release(&claim, Duration::ZERO).await.unwrap();
        ghosts::granted(&*backend, &claim).await;
    }
    assert_eq!(carrier(&etcd, &key).1, 3 * SHORT.as_secs(), "promised for longer than it lasts");
    renewed(&*backend, &claim).await;
    let given_back = async || (etcd.leases().len() == 1).then_some(());
    eventually("the leases that it has left are given back", given_back).await;
    assert_eq!(backend.key(claim.id), Some(key));
    elsewhere.shutdown_background();
}

/// A move whose answer was lost is found out, whatever TTL is asked for after it: what is kept is the lease that the key
/// hangs on.
#[tokio::test]
async fn a_lease_that_a_claim_was_moved_to_unheard_is_kept() {
    const TTL: Duration = Duration::from_secs(20);
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let backend = open(&sieve.url()).await;
    let claim = isolated("job", TTL);
    ghosts::granted(&*backend, &claim).await;
    sieve.catch(Fate::Last, |request| moves(request, "job"));
    let unheard = renew(&*backend, &with_ttl(&claim, 2 * TTL)).await;
    assert!(matches!(unheard, Renewal::Failed(_)), "{unheard:?}");
    sieve.let_go().await;
    let key = backend.key(claim.id).unwrap();
    assert_eq!(carrier(&etcd, &key).1, 2 * TTL.as_secs());
    eventually("a part of it has passed", async || (left(&etcd, &key) <= 35).then_some(())).await;
    eventually("it is renewed", async || match renew(&*backend, &claim).await {
        Renewal::Renewed(_) => Some(()),
        Renewal::Failed(_) => None,
        Renewal::Lost(loss) => panic!("{loss}"),
    })
    .await;
    assert!(left(&etcd, &key) > 36, "the lease that it hangs on runs out");
    backend.release(&claim, Duration::ZERO).await.unwrap();
    assert_eq!((keys(&etcd, "job"), etcd.leases()), (Vec::new(), Vec::new()));
}

/// A move that arrives when another has been made leads nowhere, and takes no lease away that the key hangs on.
#[tokio::test]
async fn a_move_that_arrives_late_moves_nothing() {
    let (etcd, sieve, backend, claim) = holding(SHORT).await;
    let elsewhere = elsewhere();
    sieve.catch(Fate::Late, |request| moves(request, "job"));
    let (far, longer) = (backend.clone(), with_ttl(&claim, 2 * SHORT));
    let late = elsewhere.spawn(async move { renew(&*far, &longer).await });
    sieve.caught().await;
    let first = carrier(&etcd, &backend.key(claim.id).unwrap());
    assert_eq!(first.1, SHORT.as_secs());
    // It does not know where the key is going to be, so it sees to that.
    renewed(&*backend, &claim).await;
    let key = backend.key(claim.id).unwrap();
    let moved = carrier(&etcd, &key);
    assert_eq!(moved.1, 2 * SHORT.as_secs());
    eventually("the first is given back", async || (etcd.leases() == [moved.0.clone()]).then_some(())).await;
    sieve.let_go().await;
    let late = late.await.unwrap();
    assert!(!matches!(late, Renewal::Lost(_)), "{late:?}");
    renewed(&*backend, &claim).await;
    assert_eq!((carrier(&etcd, &key), etcd.leases().len()), (moved, 1));
    elsewhere.shutdown_background();
}

/// The lease that a claim was moved away from ends while a renewal of it is on its way: the claim does not.
#[tokio::test]
async fn a_claim_that_is_moved_during_a_slow_renewal_is_not_lost() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let (env, clock) = (silent::split_env(&proxy), Clock::host());
    let backend = clinch::backends::etcd::open(&etcd.url(), env).await.unwrap();
    let claim = isolated("job", SHORT);
    ghosts::granted(&*backend, &claim).await;
    let (elsewhere, granted) = (elsewhere(), clock.now());
    let (reader, name) = (backend.clone(), claim.name.clone());
    // Its connection stands from then on.
    elsewhere.spawn(async move { reader.state(&name).await.unwrap() }).await.unwrap();
    let old = granted + Duration::from_secs(1);
    eventually("a renewal is worth sending", async || (clock.now() > old).then_some(())).await;
    let first = lease_of(&*backend, &claim);
    proxy.black_hole(true);
    let (far, asked) = (backend.clone(), claim.clone());
    let slow = elsewhere.spawn(async move { renew(&*far, &asked).await });
    let accepted = async || (elsewhere.metrics().num_alive_tasks() >= 2).then_some(());
    eventually("it is on its way", accepted).await;
    renewed(&*backend, &with_ttl(&claim, 2 * SHORT)).await;
    etcd.ctl(&["lease", "revoke", &first]);
    proxy.black_hole(false);
    let slow = slow.await.unwrap();
    assert!(!matches!(slow, Renewal::Lost(_)), "{slow:?} though it was moved");
    renewed(&*backend, &claim).await;
    assert_eq!(carrier(&etcd, &backend.key(claim.id).unwrap()).1, 2 * SHORT.as_secs());
    elsewhere.shutdown_background();
}

/// The lease that a claim was made on, in hex.
pub(super) fn lease_of(backend: &dyn Backend, claim: &Claim) -> String {
    let key = backend.key(claim.id).unwrap();
    key.rsplit('/').next().unwrap().split('-').next().unwrap().to_owned()
}

/// Whoever renews a claim by its id, as an operator may, hangs its key on a lease that its holder knows nothing of. The holder
/// goes on as its holder, and so sees to it that the key goes on.
#[tokio::test]
async fn a_claim_that_another_client_has_moved_is_kept_by_its_holder() {
    const TTL: Duration = Duration::from_secs(20);
    let etcd = Etcd::start();
    let (near, far) = (open(&etcd.url()).await, open(&etcd.url()).await);
    let (claim, other) = (ghosts::claim(1, "job", TTL), ghosts::claim(2, "other", TTL));
    for claim in [&claim, &other] {
        ghosts::granted(&*near, claim).await;
    }
    let key = near.key(claim.id).unwrap();
    let first = carrier(&etcd, &key).0;
    renewed(&*far, &with_ttl(&claim, TTL / 4)).await;
    let (lease, ttl) = carrier(&etcd, &key);
    assert!(lease != first && ttl >= TTL.as_secs(), "its holder was promised {TTL:?}, and not {ttl} s");
    eventually("a part of it has passed", async || (left(&etcd, &key) + 3 <= ttl).then_some(())).await;
    renewed(&*near, &claim).await;
    assert!(left(&etcd, &key) + 2 >= ttl, "the lease that it hangs on runs out");
    near.release(&claim, Duration::ZERO).await.unwrap();
    assert_eq!(keys(&etcd, "job"), [""; 0]);
}

/// A waiter's turn is taken unheard, on a lease that took the place of the one that it was queued for; then its place runs out.
/// It does not queue behind its own grant.
#[tokio::test]
async fn a_turn_that_was_taken_unheard_on_another_lease_is_found() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let near = connect(&etcd.url()).await;
    let backend = open(&sieve.url()).await;
    let (guard, kept) = (lock(&near, "job").await, ghosts::claim(2, "kept", LONG_TTL));
    let claim = ghosts::claim(1, "job", LONG_TTL);
    assert!(matches!(backend.claim(&claim).await.unwrap(), Progress::Queued(_)));
    let first = lease_of(&*backend, &claim);
    etcd.ctl(&["lease", "revoke", &first]);
    ghosts::granted(&*backend, &kept).await;
    assert_ne!(lease_of(&*backend, &kept), first);
    release(guard).await;
    sieve.catch(Fate::Last, |request| moves(request, "job"));
    let unheard = async || backend.claim(&claim).await.err();
    eventually("its turn is taken", unheard).await;
    sieve.caught().await;
    // That of the near one and that of the claims are left.
    eventually("its place runs out", async || (etcd.leases().len() == 2).then_some(())).await;
    sieve.let_go().await;
    let granted = async || {
        let progress = backend.claim(&claim).await.ok()?;
        matches!(progress, Progress::Granted(_)).then_some(())
    };
    eventually("it is granted", granted).await;
    for claim in [&claim, &kept] {
        backend.release(claim, Duration::ZERO).await.unwrap();
    }
    expect_unused(&etcd, &near, "job").await;
}

/// The same, where the lease that its grant was to rest on has ended before, and its place lives: what it is granted is
/// renewed.
#[tokio::test]
async fn a_turn_that_was_taken_unheard_after_its_lease_had_ended_is_kept() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let env = silent::split_env_by(sieve.addr());
    let (near, far) =
        (clinch::backends::etcd::open(&etcd.url(), env).await.unwrap(), open(&etcd.url()).await);
    let (holder, waiter) = (ghosts::claim(50, "job", LONG_TTL), ghosts::claim(1, "job", LONG_TTL));
    ghosts::granted(&*far, &holder).await;
    assert!(matches!(near.claim(&waiter).await.unwrap(), Progress::Queued(_)));
    let first = lease_of(&*near, &waiter);
    etcd.ctl(&["lease", "revoke", &first]);
    // It finds that out, and opens another.
    ghosts::granted(&*near, &ghosts::claim(2, "kept", LONG_TTL)).await;
    far.release(&holder, Duration::ZERO).await.unwrap();
    let (elsewhere, place) = (elsewhere(), Arc::new(Claim { place: true, ..(*waiter).clone() }));
    let step = || {
        let (backend, claim) = (near.clone(), waiter.clone());
        elsewhere.spawn(async move { backend.claim(&claim).await })
    };
    sieve.catch(Fate::Last, |request| moves(request, "job"));
    let unheard = step();
    sieve.caught().await;
    // Once, so that it does not read where the key is.
    renewed(&*near, &place).await;
    let unheard = unheard.await.unwrap();
    assert!(unheard.is_err(), "{unheard:?}");
    sieve.let_go().await;
    let granted = step().await.unwrap().unwrap();
    assert!(matches!(granted, Progress::Granted(_)), "{granted:?}");
    renewed(&*near, &waiter).await;
    assert_ne!(carrier(&etcd, &near.key(waiter.id).unwrap()).0, first);
    elsewhere.shutdown_background();
}

/// A move to a lease that is not as its holder wants it any more is on its way: the key goes where that cannot take it from,
/// and not to the lease that it hangs on.
#[tokio::test]
async fn a_claim_is_not_moved_to_the_lease_that_it_hangs_on() {
    let (etcd, sieve, backend, _) = holding(SHORT).await;
    let claim = ghosts::claim(2, "other", SHORT);
    ghosts::granted(&*backend, &claim).await;
    let (elsewhere, first) = (elsewhere(), lease_of(&*backend, &claim));
    sieve.catch(Fate::Late, |request| moves(request, "other"));
    let (far, apart) =
        (backend.clone(), Arc::new(Claim { isolated: true, ttl: SHORT / 2, ..(*claim).clone() }));
    let late = elsewhere.spawn(async move { renew(&*far, &apart).await });
    sieve.caught().await;
    renewed(&*backend, &claim).await;
    let moved = carrier(&etcd, &backend.key(claim.id).unwrap());
    assert!(moved.0 != first && moved.1 == SHORT.as_secs(), "{moved:?}");
    sieve.let_go().await;
    let late = late.await.unwrap();
    assert!(!matches!(late, Renewal::Lost(_)), "{late:?}");
    renewed(&*backend, &claim).await;
    elsewhere.shutdown_background();
}
