//! Evictions: what an operator takes from a holder, and from a waiter.

use clinch::Claim;
use clinch::backend::{Freed, NOTICE, Progress, Renewal};

use super::frames::Frames;
use super::moves::{kept_until, renewed};
use super::sieve::{Fate, Sieve};
use super::turns::{contains, deletes, moves};
use super::*;

async fn queued(backend: &dyn Backend, claim: &Claim) {
    let progress = backend.claim(claim).await.unwrap();
    assert!(matches!(progress, Progress::Queued(_)), "{progress:?}");
}

/// What was left of a holder's lease when an operator looked says nothing of what is left when the eviction arrives.
#[tokio::test]
async fn an_eviction_closes_the_lock_for_as_long_as_a_holder_may_have_that_renews_meanwhile() {
    const TTL: Duration = Duration::from_secs(6);
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (backend, operator) = (open(&etcd.url()).await, open(&sieve.url()).await);
    let claim = ghosts::claim(1, "job", TTL);
    ghosts::granted(&*backend, &claim).await;
    let key = backend.key(claim.id).unwrap();
    eventually("most of its lease has passed", async || (left(&etcd, &key) <= 2).then_some(())).await;
    sieve.catch(Fate::Late, |request| contains(request, b"\"evicted\":true"));
    let evicting = claim.clone();
    let evicted = tokio::spawn(async move { operator.evict(&evicting.name, evicting.id).await });
    sieve.caught().await;
    let renewals = backend.renew(std::slice::from_ref(&claim)).await;
    assert!(matches!(renewals[..], [Renewal::Renewed(_)]), "{renewals:?}");
    evicted.abort();
    assert!(evicted.await.is_err(), "the evictor has ended");
    sieve.let_go().await;
    let closed = eventually("it is closed", async || {
        let value = etcd.ctl(&["get", "--print-value-only", &key]);
        let closed = value.split("closed_ms\":").nth(1)?.split([',', '}']).next()?;
        Some(Duration::from_millis(closed.parse().unwrap()))
    })
    .await;
    assert!(closed >= TTL, "opened {closed:?} after the holder had renewed for {TTL:?}");
    assert!(carrier(&etcd, &key).1 > TTL.as_secs(), "its lease may end before that of the holder");
    assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Absent);
    assert_eq!(keys(&etcd, "job"), [""; 0]);
}

/// A server that stood still does what it finds in its sockets before it looks which leases are over. So the lease of an eviction
/// lasts for the notice from whenever the holder's may end; and if the eviction was answered, for the notice from then on.
#[tokio::test]
async fn an_eviction_hangs_on_no_lease_that_may_be_over_when_it_is_done() {
    const TTL: Duration = Duration::from_secs(60);
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (backend, operator) = (open(&etcd.url()).await, open(&sieve.url()).await);
    let [unheard, heard] = [(1, "unheard"), (2, "heard")].map(|(id, name)| ghosts::claim(id, name, TTL));
    let mut closed = Vec::new();
    for claim in [&unheard, &heard] {
        ghosts::granted(&*backend, claim).await;
        closed.push(backend.key(claim.id).unwrap());
    }
    sieve.catch(Fate::Late, |request| contains(request, b"\"evicted\":true"));
    let (evicting, far) = (unheard.clone(), operator.clone());
    let evicted = tokio::spawn(async move { far.evict(&evicting.name, evicting.id).await });
    sieve.caught().await;
    evicted.abort();
    assert!(evicted.await.is_err(), "the evictor has ended");
    sieve.let_go().await;
    let lasts = Duration::from_secs(carrier(&etcd, &closed[0]).1);
    assert!(lasts >= TTL + NOTICE, "over after {lasts:?}");
    let leases = etcd.leases().len();
    assert_eq!(operator.evict(&heard.name, heard.id).await.unwrap(), Freed::Removed);
    assert_eq!(Duration::from_secs(carrier(&etcd, &closed[1]).1), NOTICE);
    assert_eq!(etcd.leases().len(), leases + 1, "the longer one is given back");
    // Who evicts it again ends what the first had no time for.
    for _ in 0..2 {
        assert_eq!(operator.evict(&unheard.name, unheard.id).await.unwrap(), Freed::Absent);
        assert_eq!(Duration::from_secs(carrier(&etcd, &closed[0]).1), NOTICE);
        assert_eq!(etcd.leases().len(), leases + 1, "what is not needed is given back");
    }
    for claim in [&unheard, &heard] {
        assert_eq!(backend.release(claim, Duration::ZERO).await.unwrap(), Freed::Absent);
        assert_eq!(keys(&etcd, claim.name.as_str()), [""; 0]);
    }
}

/// Whatever is lost on the way, the request or its answer, an evicted lock opens with the notice, and not with the TTL of its holder.
#[tokio::test]
async fn an_eviction_opens_the_lock_in_time_whichever_answer_is_lost() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (backend, operator) = (open(&etcd.url()).await, open(&sieve.url()).await);
    let cases = [("job-1", true, Fate::Late), ("job-2", true, Fate::Lost), ("job-3", false, Fate::Late)];
    for (id, (name, is_last, fate)) in (1..).zip(cases) {
        let claim = ghosts::claim(id, name, LONG_TTL);
        ghosts::granted(&*backend, &claim).await;
        let key = backend.key(claim.id).unwrap();
        sieve.catch(fate, move |request| match is_last {
            true => moves(request, name),
            false => contains(request, b"\"evicted\":true"),
        });
        let (evicting, far) = (claim.clone(), operator.clone());
        let evicted = tokio::spawn(async move { far.evict(&evicting.name, evicting.id).await });
        sieve.caught().await;
        sieve.let_go().await;
        assert_eq!(join("it is evicted", evicted).await.unwrap(), Freed::Removed);
        assert_eq!(Duration::from_secs(carrier(&etcd, &key).1), NOTICE, "{name}: it opens too late");
        assert_eq!(backend.release(&claim, Duration::ZERO).await.unwrap(), Freed::Absent);
    }
}

/// An eviction that is lost is no eviction, and says so once it is sure.
#[tokio::test]
async fn an_eviction_that_never_arrives_evicts_nobody() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (backend, operator) = (open(&etcd.url()).await, open(&sieve.url()).await);
    let claim = ghosts::claim(1, "job", LONG_TTL);
    ghosts::granted(&*backend, &claim).await;
    let leases = etcd.leases().len();
    sieve.catch(Fate::Lost, |request| contains(request, b"\"evicted\":true"));
    assert!(operator.evict(&claim.name, claim.id).await.is_err());
    renewed(&*backend, &claim).await;
    assert_eq!(etcd.leases().len(), leases, "what it was to hang on is given back");
    assert_eq!(operator.evict(&claim.name, claim.id).await.unwrap(), Freed::Removed);
}

/// A full server may refuse an eviction that it has done.
#[tokio::test]
async fn an_eviction_that_is_refused_after_it_was_made_says_that_it_evicted() {
    let etcd = Etcd::start();
    let frames = Frames::start(etcd.addr()).await;
    let (backend, operator) = (open(&etcd.url()).await, open(&frames.url()).await);
    let claim = ghosts::claim(1, "job", LONG_TTL);
    ghosts::granted(&*backend, &claim).await;
    frames.refuse(|request| contains(request, b"\"evicted\":true"));
    assert_eq!(operator.evict(&claim.name, claim.id).await.unwrap(), Freed::Removed);
    assert!(frames.has_refused());
}

/// Whoever evicts the first waiter of a lock that lingers closed opens it, and not to that waiter.
#[tokio::test]
async fn the_evicted_first_waiter_of_a_closed_lock_is_gone_when_it_opens() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (backend, operator) = (open(&etcd.url()).await, open(&sieve.url()).await);
    let [holder, waiter] = [1, 2].map(|id| ghosts::claim(id, "job", LONG_TTL));
    ghosts::granted(&*backend, &holder).await;
    queued(&*backend, &waiter).await;
    assert_eq!(backend.release(&holder, LONG_TTL).await.unwrap(), Freed::Removed);
    sieve.catch(Fate::Late, |request| deletes(request, "job"));
    let victim = waiter.clone();
    let evicted = tokio::spawn(async move { operator.evict(&victim.name, victim.id).await });
    sieve.caught().await;
    sieve.let_go().await;
    evicted.abort();
    assert_eq!(keys(&etcd, "job"), [""; 0]);
}

/// An eviction that the network keeps for so long that its lease is nearly over changes nothing: its holder, which renews, would have less
/// than its notice. So it is where its evictor has ended meanwhile.
#[tokio::test]
async fn an_eviction_that_arrives_very_late_evicts_nobody() {
    const TTL: Duration = Duration::from_secs(4);
    const LATE: Duration = Duration::from_millis(8500);
    let (etcd, clock) = (Etcd::start(), Clock::host());
    let backend = open(&etcd.url()).await;
    let [unheard, heard] = [(1, "unheard"), (2, "heard")].map(|(id, name)| ghosts::claim(id, name, TTL));
    let mut evicting = Vec::new();
    for claim in [&unheard, &heard] {
        ghosts::granted(&*backend, claim).await;
        let sieve = Sieve::start(etcd.addr()).await;
        let operator = open(&sieve.url()).await;
        sieve.catch(Fate::Late, |request| contains(request, b"\"evicted\":true"));
        let victim = claim.clone();
        let evicted = tokio::spawn(async move { operator.evict(&victim.name, victim.id).await });
        sieve.caught().await;
        evicting.push((sieve, evicted));
    }
    evicting[0].1.abort();
    // Both hang on one lease.
    kept_until(&*backend, &heard, clock, clock.now() + LATE).await;
    for (sieve, _) in &evicting {
        sieve.let_go().await;
    }
    let (_, evicted) = evicting.pop().unwrap();
    assert!(evicted.await.unwrap().is_err());
    for claim in [&unheard, &heard] {
        let key = backend.key(claim.id).unwrap();
        assert!(!etcd.ctl(&["get", &key]).contains("evicted"), "{} was evicted", claim.name);
        renewed(&*backend, claim).await;
        let left = left(&etcd, &key);
        assert!(left >= TTL.as_secs() - 1, "{left} s are left");
    }
}

/// Whose key begins with that of the one in the way is not in the way.
#[tokio::test]
async fn a_waiter_is_evicted_whatever_becomes_of_keys_that_look_alike() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (backend, operator) = (open(&etcd.url()).await, open(&sieve.url()).await);
    let claims: Vec<_> = (0..11).map(|id| ghosts::claim(id, "job", LONG_TTL)).collect();
    ghosts::granted(&*backend, &claims[0]).await;
    for claim in &claims[1..] {
        queued(&*backend, claim).await;
    }
    let key = |at: usize| backend.key(claims[at].id).unwrap();
    assert!(key(10).starts_with(&key(1)), "{} and {}", key(1), key(10));
    backend.release(&claims[0], Duration::ZERO).await.unwrap();
    ghosts::granted(&*backend, &claims[1]).await;
    sieve.catch(Fate::Late, |request| deletes(request, "job"));
    let victim = claims[2].clone();
    let evicted = tokio::spawn(async move { operator.evict(&victim.name, victim.id).await });
    sieve.caught().await;
    let (like, gone) = (key(10), key(2));
    backend.release(&claims[10], Duration::ZERO).await.unwrap();
    etcd.ctl(&["put", &like, "changed"]);
    sieve.let_go().await;
    evicted.abort();
    assert!(!keys(&etcd, "job").contains(&gone), "it was refused for the sake of {like}");
}

/// However many hold parts of what it waits for, a waiter has nothing to be told of, and is gone at once.
#[tokio::test]
async fn a_waiter_behind_very_many_holders_is_evicted_as_a_waiter() {
    const HOLDERS: u128 = 140;
    let etcd = Etcd::start();
    let backend = open(&etcd.url()).await;
    let mode: Mode = format!("1 of {HOLDERS}").parse().unwrap();
    let claim = |id| Claim { mode, ..(*ghosts::claim(id, "gpu", LONG_TTL)).clone() };
    for id in 0..HOLDERS {
        ghosts::granted(&*backend, &claim(id)).await;
    }
    let (waiter, behind) = (claim(HOLDERS), claim(HOLDERS + 1));
    queued(&*backend, &waiter).await;
    queued(&*backend, &behind).await;
    assert_eq!(backend.evict(&waiter.name, waiter.id).await.unwrap(), Freed::Removed);
    let state = backend.state(&waiter.name).await.unwrap().unwrap();
    assert_eq!((state.claims.len(), state.closed_until), (HOLDERS as usize + 1, None));
    backend.release(&claim(0), Duration::ZERO).await.unwrap();
    ghosts::granted(&*backend, &behind).await;
}

/// An evicted claim hangs on the notice's lease; one that it had for itself is nobody's from then on, for up to a day. A holder that
/// lives is told why as ever, and gives its own back.
#[tokio::test]
async fn an_eviction_gives_back_the_lease_that_its_claim_had_for_itself() {
    let etcd = Etcd::start();
    let (near, far, operator) =
        (connect(&etcd.url()).await, connect(&etcd.url()).await, open(&etcd.url()).await);
    let detached = lock(&near, "shell").await.detach().await.unwrap();
    far.renew_detached("shell", detached.claim, LONG_TTL * 2).await.unwrap();
    let [key] = &keys(&etcd, "shell")[..] else { panic!("it has no key") };
    let is_old = async || (left(&etcd, key) + NOTICE.as_secs() < LONG_TTL.as_secs() * 2).then_some(());
    eventually("nobody has renewed it for long", is_old).await;
    let before = etcd.leases().len();
    assert_eq!(operator.evict(&detached.name, detached.claim).await.unwrap(), Freed::Removed);
    // That which it was detached to, and that which it was renewed on, for the notice's.
    let given_back = async || (etcd.leases().len() == before - 1).then_some(());
    eventually("its leases are given back", given_back).await;
    let held = lock(&far.clone().isolated(), "job").await;
    let waiter = queue(&near, "job");
    sees_claims(&near, "job", 2).await;
    assert_eq!(operator.evict(held.name(), held.claim_id()).await.unwrap(), Freed::Removed);
    let loss = within("its holder is told", held.lost()).await;
    assert_eq!(loss.kind, LossKind::Deleted, "{loss}");
    assert!(!waiter.is_finished(), "the lock is open under its holder");
    held.release().await.unwrap();
    release(join("its release opens the lock", waiter).await).await;
}
