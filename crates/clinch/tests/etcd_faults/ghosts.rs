//! Releases that did not come through, or came twice: what is left of a claim, and what is taken from another.

use std::task::{Context, Poll, Waker};

use clinch::backend::{Backend, Freed, Progress, Renewal};
use clinch::{Claim, LockName, Owner};

use super::sieve::{Fate, Sieve};
use super::*;

/// A TTL that etcd keeps to the second, and short enough to see its end.
const SHORT_TTL: Duration = Duration::from_secs(3);

pub(super) fn claim(id: u128, name: &str, ttl: Duration) -> Arc<Claim> {
    Arc::new(Claim {
        id: ClaimId::from_bits(id),
        name: LockName::new(name).unwrap(),
        mode: Mode::Exclusive,
        ttl,
        enqueue: true,
        place: false,
        isolated: false,
        owner: Arc::new(Owner { host: "here".into(), pid: 1, user: "me".into(), label: String::new() }),
    })
}

pub(super) async fn granted(backend: &dyn Backend, claim: &Claim) {
    let progress = backend.claim(claim).await.unwrap();
    assert!(matches!(progress, Progress::Granted(_)), "{progress:?}");
}

/// A store whose steps from this runtime go straight to the server, and from any other through the proxy.
async fn split_backend(etcd: &Etcd) -> (Arc<dyn Backend>, Proxy) {
    let proxy = Proxy::start(etcd.addr());
    let env = silent::split_env(&proxy);
    (clinch::backends::etcd::open(&etcd.url(), env).await.unwrap(), proxy)
}

/// A claim is released twice at once, as a guard's drop and the end of `max_hold` do. One of the two is answered, the
/// lock is claimed again, and the other release arrives.
#[tokio::test]
async fn the_second_of_two_releases_frees_nobody_elses_claim() {
    let etcd = Etcd::start();
    let (backend, proxy) = split_backend(&etcd).await;
    let [first, next] = [1, 2].map(|id| claim(id, "job", LONG_TTL));
    granted(&*backend, &first).await;
    let elsewhere =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (reader, name) = (backend.clone(), first.name.clone());
    // Its connection stands from then on.
    elsewhere.spawn(async move { reader.state(&name).await.unwrap() }).await.unwrap();
    // The server shall not hear that nobody waits any more: it would give up what it has just read.
    proxy.hold_ends(true);
    proxy.black_hole(true);
    let mut late = Box::pin(backend.release(&first, Duration::ZERO));
    {
        let _there = elsewhere.enter();
        let mut context = Context::from_waker(Waker::noop());
        assert!(matches!(late.as_mut().poll(&mut context), Poll::Pending), "it waits for its answer");
    }
    assert_eq!(backend.release(&first, Duration::ZERO).await.unwrap(), Freed::Removed);
    granted(&*backend, &next).await;
    let before = etcd.handled("DeleteRange");
    proxy.black_hole(false);
    let arrived = async || (etcd.handled("DeleteRange") > before).then_some(());
    eventually("the other release arrives", arrived).await;
    let key = backend.key(next.id).unwrap();
    assert_eq!(keys(&etcd, "job"), [key], "a late release freed another claim");
    drop(late);
    assert_eq!(backend.release(&next, Duration::ZERO).await.unwrap(), Freed::Removed);
    assert_eq!(keys(&etcd, "job"), [""; 0]);
    elsewhere.shutdown_background();
}

/// The claims of one client share a lease. Whoever could not be released before everybody gave up would stand in the queue
/// for as long as any other is kept.
#[tokio::test]
async fn a_release_that_was_given_up_is_made_good_while_others_are_kept() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let env = Env::host(Lane::thread());
    let backend = clinch::backends::etcd::open(&format!("etcd://{}", proxy.addr()), env).await.unwrap();
    let [left, kept, next] =
        [(1, "job"), (2, "other"), (3, "job")].map(|(id, name)| claim(id, name, SHORT_TTL));
    granted(&*backend, &left).await;
    granted(&*backend, &kept).await;
    proxy.refuse(true);
    proxy.cut_all();
    backend.release(&left, Duration::ZERO).await.unwrap_err();
    proxy.refuse(false);
    made_good(&etcd, &*backend, &kept).await;
    // Whoever asks again hears that it was released, once.
    assert_eq!(backend.release(&left, Duration::ZERO).await.unwrap(), Freed::Removed);
    assert_eq!(backend.release(&left, Duration::ZERO).await.unwrap(), Freed::Absent);
    granted(&*backend, &next).await;
    for claim in [&next, &kept] {
        assert_eq!(backend.release(claim, Duration::ZERO).await.unwrap(), Freed::Removed);
    }
}

/// Keeps another claim of the same lease until nothing is left of the released one.
async fn made_good(etcd: &Etcd, backend: &dyn Backend, kept: &Arc<Claim>) {
    eventually("nothing is left of it", async || {
        let renewals = backend.renew(std::slice::from_ref(kept)).await;
        assert!(!matches!(renewals[..], [Renewal::Lost(_)]), "{renewals:?}");
        keys(etcd, "job").is_empty().then_some(())
    })
    .await;
}

/// The same where the server answers, and refuses: whoever asked gives up at once.
#[tokio::test]
async fn a_release_that_was_refused_is_made_good_while_others_are_kept() {
    let etcd = Etcd::builder().root_password("root").start();
    let may = |right| etcd.ctl(&["role", "grant-permission", "locks", "--prefix=true", right, "/clinch/"]);
    etcd.ctl(&["role", "add", "locks"]);
    may("readwrite");
    etcd.ctl(&["user", "add", "locker:word"]);
    etcd.ctl(&["user", "grant-role", "locker", "locks"]);
    let backend = open(&etcd.url_as("locker", "word")).await;
    let [left, kept, next] =
        [(1, "job"), (2, "other"), (3, "job")].map(|(id, name)| claim(id, name, LONG_TTL));
    granted(&*backend, &left).await;
    granted(&*backend, &kept).await;
    may("read");
    let refused = backend.release(&left, Duration::ZERO).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Refused, "{refused:?}");
    assert_eq!(keys(&etcd, "job").len(), 1, "it was freed without the right to do so");
    may("readwrite");
    made_good(&etcd, &*backend, &kept).await;
    assert_eq!(backend.release(&left, Duration::ZERO).await.unwrap(), Freed::Removed);
    granted(&*backend, &next).await;
}

/// A step that comes late makes a claim's key anew, at another revision than the one that was heard of. That is to go, too.
#[tokio::test]
async fn a_release_that_was_given_up_is_made_good_for_a_key_that_was_made_twice() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let backend = open(&format!("etcd://{}", proxy.addr())).await;
    let [left, kept] = [(1, "job"), (2, "other")].map(|(id, name)| claim(id, name, SHORT_TTL));
    granted(&*backend, &left).await;
    granted(&*backend, &kept).await;
    proxy.refuse(true);
    proxy.cut_all();
    backend.release(&left, Duration::ZERO).await.unwrap_err();
    let [key] = &keys(&etcd, "job")[..] else { panic!("its key is not there") };
    let (lease, _) = carrier(&etcd, key);
    let value = etcd.ctl(&["get", "--print-value-only", key]);
    etcd.ctl(&["del", key]);
    etcd.ctl(&["put", "--lease", &lease, key, value.trim_end()]);
    proxy.refuse(false);
    made_good(&etcd, &*backend, &kept).await;
}

/// A restored backup has claims that were released since. Nobody may keep them alive, nor believe in what was there later.
#[tokio::test]
async fn claims_of_a_restored_backup_end_with_their_lease() {
    let etcd = Etcd::start();
    let near = clinch::connect(&etcd.url()).await.unwrap().ttl(Duration::from_secs(6)).unwrap();
    let far = connect(&etcd.url()).await;
    let (job, other) = (lock(&near, "job").await, lock(&near, "other").await);
    let copy = |from: &str, to: &str| {
        let (from, to) = (etcd.dir().join(from), etcd.dir().join(to));
        let _ = std::fs::remove_dir_all(&to);
        let copied = Command::new("cp").arg("-r").args([from, to]).status().unwrap();
        assert!(copied.success());
    };
    // As complete as after a power failure.
    etcd.pause();
    copy("data", "backup");
    etcd.resume();
    release(job).await;
    release(lock(&near, "later").await).await;
    etcd.kill();
    copy("backup", "data");
    etcd.restart();
    within("whoever holds is told", other.lost()).await;
    // The client goes on to use its lease, as far as it knows of one.
    let busy = tokio::spawn(async move {
        loop {
            release(lock(&near, "later").await).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    release(join("a ghost stands in the queue", queue(&far, "job")).await).await;
    busy.abort();
}

/// One URL, one cluster: a member of another would grant what is held.
#[tokio::test]
async fn a_member_of_another_cluster_is_refused_in_words() {
    let [own, foreign] = [Etcd::start(), Etcd::start()];
    let network = Arc::new(partition::Narrow::only(&own));
    let env = Env::new(Clock::host(), Random::system(), Lane::thread(), network.clone());
    let url = format!("etcd://{},{}", own.addr(), foreign.addr());
    let locks = Locks::connect(&url, env).await.unwrap().ttl(LONG_TTL).unwrap();
    let guard = lock(&locks, "job").await;
    network.open();
    own.kill();
    let refused = async || {
        let error = locks.mutex("job").unwrap().try_lock().await.err()?.to_string();
        error.contains("another cluster").then_some(())
    };
    eventually("it is refused", refused).await;
    assert_eq!(foreign.keys("/clinch/job"), [""; 0]);
    own.start_again();
    own.becomes_ready();
    drop(guard);
    let freed = async || keys(&own, "job").is_empty().then_some(());
    eventually("the right one is used again", freed).await;
}

/// Leads whoever asks for one server to another, once that is told.
#[derive(Debug)]
struct Replaced {
    by: SocketAddr,
    is_so: AtomicBool,
}

#[async_trait]
impl Connector for Replaced {
    async fn connect(&self, host: &str, port: u16) -> std::io::Result<Box<dyn Stream>> {
        match self.is_so.load(Ordering::Acquire) {
            true => Ok(Box::new(TcpStream::connect(self.by).await?)),
            false => Ok(Box::new(TcpStream::connect((host, port)).await?)),
        }
    }
}

/// An etcd that was built anew at the same address knows nothing of what was granted. Whoever waits there waits for nothing, and is told
/// what helps; what is held is left to its deadline, for the one before may be back until then.
#[tokio::test]
async fn who_waits_at_an_etcd_that_was_built_anew_is_told_to_connect_again() {
    let [old, new] = [Etcd::start(), Etcd::start()];
    let network = Arc::new(Replaced { by: new.addr(), is_so: AtomicBool::new(false) });
    let env = Env::new(Clock::host(), Random::system(), Lane::thread(), network.clone());
    let locks = Locks::connect(&old.url(), env).await.unwrap().ttl(LONG_TTL).unwrap();
    let held = lock(&locks, "job").await;
    let (far, waited) = (locks.clone(), lock(&locks, "waited-for").await);
    let waiter = tokio::spawn(async move { far.mutex("waited-for").unwrap().lock().timeout(LONG_TTL).await });
    sees_claims(&locks, "waited-for", 2).await;
    network.is_so.store(true, Ordering::Release);
    old.kill();
    let error = join("who waits is told", waiter).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(error.to_string().contains("built anew"), "{error}");
    assert_eq!(locks.mutex("other").unwrap().try_lock().await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(new.keys("/clinch/"), [""; 0], "it locks where nothing is known of what is held");
    assert!(held.is_held() && waited.is_held());
    network.is_so.store(false, Ordering::Release);
    old.start_again();
    old.becomes_ready();
    new.kill();
    eventually("it is itself again", async || held.verify().await.ok()).await;
}

/// A step whose answer was lost arrives when its claim, which got the lock by another, was moved to a longer lease and
/// released since. Others keep the lease that it stands on.
#[tokio::test]
async fn a_step_that_arrives_after_its_claim_was_moved_and_released_leaves_no_ghost() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let backend = open(&sieve.url()).await;
    let (kept, job) = (claim(1, "other", LONG_TTL), claim(2, "job", LONG_TTL));
    granted(&*backend, &kept).await;
    sieve.catch(Fate::Late, |request| request.windows(12).any(|part| part == b"/clinch/job/"));
    tokio::select! {
        early = backend.claim(&job) => panic!("answered: {early:?}"),
        () = sieve.caught() => {}
    }
    let again =
        async || backend.claim(&job).await.ok().filter(|progress| matches!(progress, Progress::Granted(_)));
    eventually("it is granted by another step", again).await;
    let longer = Arc::new(Claim { ttl: LONG_TTL * 2, ..(*job).clone() });
    let renewals = backend.renew(std::slice::from_ref(&longer)).await;
    assert!(matches!(renewals[..], [Renewal::Renewed(_)]), "{renewals:?}");
    assert_eq!(carrier(&etcd, &backend.key(job.id).unwrap()).1, LONG_TTL.as_secs() * 2);
    assert_eq!(backend.release(&longer, Duration::ZERO).await.unwrap(), Freed::Removed);
    let before = etcd.handled("Txn");
    sieve.let_go().await;
    eventually("it arrives", async || (etcd.handled("Txn") > before).then_some(())).await;
    assert_eq!(keys(&etcd, "job"), [""; 0], "a ghost holds the lock");
    granted(&*backend, &claim(3, "job", LONG_TTL)).await;
}

/// A release that was begun and is not polled any more, as in a `select!` whose other branch is at work, frees the lock though
/// others keep its lease.
#[tokio::test]
async fn a_release_that_nobody_polls_frees_the_lock() {
    let etcd = Etcd::start();
    let backend = open(&etcd.url()).await;
    let [left, kept, next] =
        [(1, "job"), (2, "other"), (3, "job")].map(|(id, name)| claim(id, name, SHORT_TTL * 2));
    granted(&*backend, &left).await;
    granted(&*backend, &kept).await;
    // It has more to ask than one thing.
    let mut release = Box::pin(backend.release(&left, Duration::from_millis(10)));
    let mut context = Context::from_waker(Waker::noop());
    assert!(release.as_mut().poll(&mut context).is_pending());
    eventually("nothing is left of it", async || {
        let renewals = backend.renew(std::slice::from_ref(&kept)).await;
        assert!(matches!(renewals[..], [Renewal::Renewed(_)]), "{renewals:?}");
        keys(&etcd, "job").is_empty().then_some(())
    })
    .await;
    granted(&*backend, &next).await;
    release.await.unwrap();
    assert_eq!(keys(&etcd, "job"), [backend.key(next.id).unwrap()], "it frees another's lock");
}

/// The first key that claims on the lease of this one have for lock `job`. Something else stands there, as what was detached from them may.
fn meet(etcd: &Etcd, backend: &dyn Backend, claim: &Claim) -> String {
    let key = format!("/clinch/job/{}-0", moves::lease_of(backend, claim));
    etcd.ctl(&["put", &key, "theirs"]);
    key
}

/// A claim that never came to a key of its own is given up beside one that did: what is made good of both releases takes nothing
/// from whoever else has such a key.
#[tokio::test]
async fn a_release_that_is_made_good_frees_no_other_claim() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let backend = open(&format!("etcd://{}", proxy.addr())).await;
    let [late, left, kept] =
        [(1, "job"), (2, "left"), (3, "kept")].map(|(id, name)| claim(id, name, LONG_TTL));
    for claim in [&left, &kept] {
        granted(&*backend, claim).await;
    }
    let key = meet(&etcd, &*backend, &kept);
    proxy.refuse(true);
    proxy.cut_all();
    backend.claim(&late).await.unwrap_err();
    for claim in [&late, &left] {
        backend.release(claim, Duration::ZERO).await.unwrap_err();
    }
    proxy.refuse(false);
    eventually("the releases are made good", async || {
        let renewals = backend.renew(std::slice::from_ref(&kept)).await;
        assert!(!matches!(renewals[..], [Renewal::Lost(_)]), "{renewals:?}");
        keys(&etcd, "left").is_empty().then_some(())
    })
    .await;
    assert_eq!(keys(&etcd, "job"), [key], "a claim that never was freed another's lock");
}

/// A step whose answer was lost arrives when its claim has taken another key, since something else stood under the first, and was
/// released since.
#[tokio::test]
async fn a_step_that_arrives_after_its_claim_took_another_key_leaves_no_ghost() {
    let etcd = Etcd::start();
    let sieve = Sieve::start(etcd.addr()).await;
    let (env, far) = (silent::split_env_by(sieve.addr()), open(&etcd.url()).await);
    let backend = clinch::backends::etcd::open(&etcd.url(), env).await.unwrap();
    let [other, waiting, kept, job] =
        [(50, "other"), (1, "other"), (2, "kept"), (3, "job")].map(|(id, name)| claim(id, name, LONG_TTL));
    // Somebody waits elsewhere, so that there is a lease of places, which is kept.
    granted(&*far, &other).await;
    assert!(matches!(backend.claim(&waiting).await.unwrap(), Progress::Queued(_)));
    let place = Arc::new(Claim { place: true, ..(*waiting).clone() });
    let keep = async || moves::renewed(&*backend, &place).await;
    granted(&*backend, &kept).await;
    let theirs = meet(&etcd, &*backend, &kept);
    let elsewhere = moves::elsewhere();
    let (reader, name) = (backend.clone(), job.name.clone());
    // Its connection stands from then on.
    elsewhere.spawn(async move { reader.state(&name).await.unwrap() }).await.unwrap();
    keep().await;
    sieve.catch(Fate::Late, |request| turns::contains(request, b"/clinch/job/"));
    let (backend_there, claim) = (backend.clone(), job.clone());
    let unheard = elsewhere.spawn(async move { backend_there.claim(&claim).await });
    sieve.caught().await;
    unheard.abort();
    assert!(unheard.await.unwrap_err().is_cancelled());
    let progress = backend.claim(&job).await.unwrap();
    assert!(matches!(progress, Progress::Queued(_)), "{progress:?}");
    etcd.ctl(&["del", &theirs]);
    granted(&*backend, &job).await;
    keep().await;
    sieve.let_go().await;
    assert_eq!(backend.release(&job, Duration::ZERO).await.unwrap(), Freed::Removed);
    assert_eq!(keys(&etcd, "job"), [""; 0], "a ghost holds the lock");
    elsewhere.shutdown_background();
}

/// Each raise of the fence fails all that is under way, which is late then and given up in turn: after one slow spell nobody gets through.
#[tokio::test]
async fn claims_that_are_given_up_together_raise_the_fence_together() {
    const TASKS: usize = 40;
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let far = connect(&format!("etcd://{}", proxy.addr())).await;
    release(lock(&far, "job").await).await;
    let before = etcd.metric("etcd_mvcc_put_total");
    proxy.delay(Duration::from_millis(200));
    let mut given_up = tokio::task::JoinSet::new();
    for number in 0..TASKS {
        let far = far.clone();
        given_up.spawn(async move {
            let mutex = far.mutex(&format!("job {number}")).unwrap();
            mutex.lock().timeout(Duration::from_millis(100)).await.expect_err("granted too soon")
        });
    }
    given_up.join_all().await;
    far.close(PATIENCE).await.unwrap();
    assert_eq!(etcd.keys("/clinch/"), [""; 0], "something is left");
    // Each claim's own, which came late, and what raised the fence.
    let puts = etcd.metric("etcd_mvcc_put_total") - before;
    assert!(puts > 0.0 && puts <= TASKS as f64 + 5.0, "{puts} keys were written for {TASKS} claims");
}

/// One raise is for all that was sent before: else each holder that was in doubt once keeps its lock until the next may be.
#[tokio::test]
async fn claims_that_lost_an_answer_together_are_released_behind_one_fence() {
    const TASKS: usize = 20;
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let (near, far) = (connect(&etcd.url()).await, connect(&format!("etcd://{}", proxy.addr())).await);
    let first = lock(&far, "job").await;
    // Has the lease of places made.
    let mut waiters = vec![queue(&far, "job")];
    sees_claims(&near, "job", 2).await;
    proxy.hold_replies(true);
    waiters.extend((1..TASKS).map(|_| queue(&far, "job")));
    sees_claims(&near, "job", TASKS + 1).await;
    proxy.hold_replies(false);
    proxy.cut_all();
    release(first).await;
    let mut held = tokio::task::JoinSet::new();
    for waiter in waiters {
        held.spawn(async move { release(join("a waiter is granted", waiter).await).await });
    }
    held.join_all().await;
    let sessions = etcd.keys("/clinch/%session/");
    let written = |session: &String| {
        let found: serde_json::Value =
            serde_json::from_str(&etcd.ctl(&["get", session, "--write-out=json"])).unwrap();
        found["kvs"][0]["version"].as_u64().unwrap()
    };
    let written: u64 = sessions.iter().map(written).sum();
    let raised = written - sessions.len() as u64;
    assert!((1..=4).contains(&raised), "raised {raised} times for {TASKS} claims");
}
