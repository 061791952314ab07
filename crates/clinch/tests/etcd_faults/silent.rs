//! Watches that say nothing, while requests are answered: what the events would have told has to be found by reading.

use clinch::Claim;
use clinch::backend::{Freed, Progress, Renewal};

use super::*;

/// A network on which only the first connection leads straight to the server: that of the test, for steps and for the
/// renewals that it asks for. The background lane's, with the watches, lead through a proxy.
#[derive(Debug)]
struct Split {
    proxy: SocketAddr,
    is_first: AtomicBool,
}

#[async_trait]
impl Connector for Split {
    async fn connect(&self, host: &str, port: u16) -> std::io::Result<Box<dyn Stream>> {
        let stream = match self.is_first.swap(false, Ordering::AcqRel) {
            true => TcpStream::connect((host, port)).await,
            false => TcpStream::connect(self.proxy).await,
        };
        Ok(Box::new(stream?))
    }
}

/// A world with such a network.
pub(super) fn split_env(proxy: &Proxy) -> Env {
    split_env_by(proxy.addr())
}

/// The same, where another proxy than ours listens.
pub(super) fn split_env_by(proxy: SocketAddr) -> Env {
    let network = Split { proxy, is_first: AtomicBool::new(true) };
    Env::new(Clock::host(), Random::system(), Lane::thread(), Arc::new(network))
}

/// A client, and the proxy that its watches go through.
pub(super) async fn split(etcd: &Etcd) -> (Locks, Proxy) {
    let proxy = Proxy::start(etcd.addr());
    let locks = Locks::connect(&etcd.url(), split_env(&proxy)).await.unwrap().ttl(LONG_TTL).unwrap();
    (locks, proxy)
}

/// The claim behind the holder of "job", and its key. Its client cannot renew its place, so that it may have to queue again:
/// with the same id and the same key.
async fn second_key(etcd: &Etcd, locks: &Locks) -> (ClaimId, String) {
    eventually("the second claim", async || {
        let id = locks.state("job").await.unwrap()?.claims.get(1)?.id;
        let printed = etcd.ctl(&["get", "--prefix", "/clinch/job/"]);
        let lines: Vec<&str> = printed.lines().collect();
        let pair = lines.chunks(2).find(|pair| pair[1].contains(&id.to_string()))?;
        Some((id, pair[0].to_owned()))
    })
    .await
}

/// That a keepalive was answered proves little (etcd#15247): the keys themselves are read with every third.
#[tokio::test]
async fn a_loss_that_no_event_tells_is_told_by_the_third_renewal() {
    const TTL: Duration = Duration::from_secs(10);
    let etcd = Etcd::start();
    for (at, kind) in [LossKind::Deleted, LossKind::SessionEnded].into_iter().enumerate() {
        let (locks, proxy) = split(&etcd).await;
        let locks = locks.ttl(TTL).unwrap().renew(Renew::Never);
        let guard = lock(&locks, "job").await;
        let watchers = || etcd.metric("etcd_debugging_mvcc_watcher_total");
        // The lease's own key, and the claim's.
        eventually("both keys are watched", async || (watchers() >= 2.0).then_some(())).await;
        proxy.black_hole(true);
        let gone = [guard.store_key().unwrap(), format!("/clinch/%session/{}", lease(&guard))];
        etcd.ctl(&["del", &gone[at]]);
        let before = etcd.handled("LeaseKeepAlive");
        let error = eventually("a renewal is refused", async || {
            let refused = guard.extend(TTL).await.err();
            let renewals = etcd.handled("LeaseKeepAlive") - before;
            assert!(refused.is_some() || renewals < 3, "{renewals} renewals and nobody looked");
            refused
        })
        .await;
        assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}");
        let loss = within("the loss is told", guard.lost()).await;
        assert_eq!(loss.kind, kind, "{loss}");
        assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost(loss));
        proxy.black_hole(false);
        locks.close(PATIENCE).await.unwrap();
        let unwatched = async || (watchers() == 0.0).then_some(());
        eventually("nobody watches any more", unwatched).await;
    }
}

/// Whatever finds out that a lease has ended, all its claims are told: that of each costs no request of its own.
#[tokio::test]
async fn the_end_of_a_lease_that_one_step_finds_is_told_to_all_its_claims() {
    /// What one task has told for one claim, it has told for all; a renewal would tell after 4.5 s and more.
    const SOON: Duration = Duration::from_secs(3);
    let etcd = Etcd::start();
    let far = connect(&etcd.url()).await;
    let (locks, proxy) = split(&etcd).await;
    proxy.black_hole(true);
    let busy = lock(&far, "busy").await;
    let waiter = queue(&locks, "busy");
    sees_claims(&far, "busy", 2).await;
    let behind = queue(&far, "busy");
    sees_claims(&far, "busy", 3).await;
    let mutex = lock(&locks, "job").await;
    let reader = locks.rwlock("index").unwrap().read().await.unwrap();
    let permits = locks.semaphore("gpu", 3).unwrap().acquire(2).unwrap().await.unwrap();
    etcd.ctl(&["lease", "revoke", &lease(&mutex)]);
    let next = lock(&locks, "next").await;
    assert_ne!(lease(&next), lease(&mutex));
    for guard in [&mutex, &reader, &permits] {
        let told = tokio::time::timeout(SOON, guard.lost()).await;
        let loss = told.expect("a claim on the same lease was not told");
        assert_eq!(loss.kind, LossKind::SessionEnded, "{loss}");
    }
    // The waiter's place is on another lease, which nobody keeps here; so it may have to queue again.
    release(busy).await;
    let (mut waiter, mut behind) = (waiter, behind);
    let (first, other) = within("one of them is granted", async {
        tokio::select! {
            guard = &mut waiter => (guard.unwrap(), behind),
            guard = &mut behind => (guard.unwrap(), waiter),
        }
    })
    .await;
    assert!(!other.is_finished());
    release(first).await;
    release(join("the other is granted", other).await).await;
    release(next).await;
    proxy.black_hole(false);
    expect_unused(&etcd, &far, "busy").await;
}

/// The same where nobody renews anything: what tells one claim of it tells all, at once. The step that finds out goes on with
/// another lease, although that of the places goes on.
#[tokio::test]
async fn the_end_of_a_lease_is_told_to_all_its_claims_at_once() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let (far, busy) = (open(&etcd.url()).await, ghosts::claim(5, "busy", LONG_TTL));
    ghosts::granted(&*far, &busy).await;
    let backend = clinch::backends::etcd::open(&etcd.url(), split_env(&proxy)).await.unwrap();
    proxy.black_hole(true);
    let waiter = Claim { id: ClaimId::from_bits(6), place: true, ..(*busy).clone() };
    assert!(matches!(backend.claim(&waiter).await.unwrap(), Progress::Queued(_)));
    let claims = [1, 2, 3].map(|id| ghosts::claim(id, &format!("job-{id}"), LONG_TTL));
    for claim in &claims {
        ghosts::granted(&*backend, claim).await;
    }
    let key = backend.key(claims[0].id).unwrap();
    etcd.ctl(&["lease", "revoke", &carrier(&etcd, &key).0]);
    ghosts::granted(&*backend, &ghosts::claim(4, "next", LONG_TTL)).await;
    let told = within("somebody is told", backend.lost()).await;
    for claim in claims {
        let told = told.iter().find(|(id, _)| *id == claim.id);
        let (_, loss) = told.expect("a claim on the same lease was not told");
        assert_eq!(loss.kind, LossKind::SessionEnded, "{loss}");
    }
}

/// The place of a waiter goes in the moment in which its turn comes, and nobody tells it (etcd#11456).
#[tokio::test]
async fn a_waiter_that_hears_nothing_is_not_let_in_without_its_place() {
    let etcd = Etcd::start();
    let (near, behind) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    let (unlucky, proxy) = split(&etcd).await;
    proxy.black_hole(true);
    let guard = lock(&near, "job").await;
    let first = queue(&unlucky, "job");
    let waiter = second_key(&etcd, &near).await.1;
    let second = queue(&behind, "job");
    sees_claims(&near, "job", 3).await;
    etcd.txn(&format!("\ndel {}\ndel {waiter}\n\n\n", guard.store_key().unwrap()));
    let second = join("the one behind is granted", second).await;
    assert_eq!(within("the holder is told", guard.lost()).await.kind, LossKind::Deleted);
    let requeued = async || {
        assert!(!first.is_finished(), "let in without a place, beside another");
        (near.state("job").await.unwrap()?.claims.len() == 2).then_some(())
    };
    eventually("the unlucky one queues again", requeued).await;
    proxy.black_hole(false);
    let token = second.token();
    release(second).await;
    let first = join("the unlucky one is granted", first).await;
    assert!(first.token() > token);
    first.verify().await.unwrap();
    release(first).await;
    expect_unused(&etcd, &near, "job").await;
}

/// The same name does not make it the same place: whoever deleted a waiter's key and put it back has put it at the end.
#[tokio::test]
async fn a_waiter_whose_key_was_deleted_and_put_back_stands_at_the_end() {
    let etcd = Etcd::start();
    let (near, behind) = (connect(&etcd.url()).await, connect(&etcd.url()).await);
    let (unlucky, proxy) = split(&etcd).await;
    proxy.black_hole(true);
    let guard = lock(&near, "job").await;
    let first = queue(&unlucky, "job");
    let (place, key) = second_key(&etcd, &near).await;
    let second = queue(&behind, "job");
    sees_claims(&near, "job", 3).await;
    let value = etcd.ctl(&["get", "--print-value-only", &key]);
    let lease = key.rsplit('/').next().unwrap().split('-').next().unwrap();
    etcd.ctl(&["del", &key]);
    etcd.ctl(&["put", "--lease", lease, &key, value.trim_end()]);
    let claims = near.state("job").await.unwrap().unwrap().claims;
    assert_eq!(claims[2].id, place, "it has the same name and another place");
    release(guard).await;
    let second = join("the one that came before it is granted", second).await;
    assert!(!first.is_finished());
    let token = second.token();
    release(second).await;
    let first = join("the other is granted", first).await;
    assert!(first.token() > token, "token {} came after {token}", first.token());
    first.verify().await.unwrap();
    release(first).await;
    proxy.black_hole(false);
    expect_unused(&etcd, &near, "job").await;
}

/// One read with a renewal tells that none of a lease's claims was evicted, or that all have to be looked at.
#[tokio::test]
async fn an_eviction_that_no_event_tells_is_told_by_the_next_renewal_whichever_claim_it_is() {
    const CLAIMS: u128 = 250;
    /// A renewal may rest on one that is younger.
    const YOUNG: Duration = Duration::from_secs(1);
    let (etcd, clock) = (Etcd::start(), Clock::host());
    let proxy = Proxy::start(etcd.addr());
    let operator = open(&etcd.url()).await;
    let backend = clinch::backends::etcd::open(&etcd.url(), split_env(&proxy)).await.unwrap();
    let claims: Vec<_> =
        (0..CLAIMS).map(|id| ghosts::claim(id, &format!("job-{id}"), Duration::from_secs(600))).collect();
    for claim in &claims {
        ghosts::granted(&*backend, claim).await;
    }
    proxy.black_hole(true);
    for victim in [0, 101, 249] {
        let victim = &claims[victim];
        assert_eq!(operator.evict(&victim.name, victim.id).await.unwrap(), Freed::Removed);
        let evicted = clock.now();
        eventually("a renewal is due", async || (clock.now() > evicted + YOUNG).then_some(())).await;
        let before = etcd.handled("LeaseKeepAlive");
        let renewals = backend.renew(&claims).await;
        assert!(etcd.handled("LeaseKeepAlive") <= before + 1, "one keepalive renews them all");
        for (claim, renewal) in claims.iter().zip(renewals) {
            match (claim.id == victim.id, renewal) {
                (true, Renewal::Lost(loss)) => assert_eq!(loss.kind, LossKind::Deleted, "{loss}"),
                (false, Renewal::Renewed(_)) => {}
                (false, Renewal::Lost(_)) if claim.id < victim.id => {}
                (_, renewal) => panic!("{} of {:?} evicted: {renewal:?}", claim.name, victim.name),
            }
        }
    }
    proxy.black_hole(false);
}
