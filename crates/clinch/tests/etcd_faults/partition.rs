//! A member that is parted from the others, in both directions, while clients reach it as before.

use super::*;

/// Long enough for an election and a new connection in between.
const TTL: Duration = Duration::from_secs(15);

/// The end of a holder who can reach the minority alone.
const SHORT_TTL: Duration = Duration::from_secs(4);

/// Whether the lock's earlier holder believed to hold it when this one was granted.
struct Next {
    guard: Guard,
    met: bool,
}

/// Waits for the lock, and looks at its earlier holder in the moment of the grant.
fn succeed(locks: &Locks, name: &str, before: &Arc<Guard>) -> JoinHandle<Next> {
    let (mutex, before) = (locks.mutex(name).unwrap(), before.clone());
    tokio::spawn(async move {
        let guard = mutex.lock().timeout(PATIENCE).await.unwrap();
        Next { guard, met: before.is_held() }
    })
}

/// Waits until the others have a leader, and the parted member knows of none.
async fn parts(cluster: &EtcdCluster, parted: &Etcd) {
    cluster.cut_off(parted);
    let others = || cluster.members().iter().filter(|member| member.addr() != parted.addr());
    let others_lead = async || others().any(Etcd::is_leader).then_some(());
    eventually("the others have a leader", others_lead).await;
    eventually("the parted one has none", async || (!parted.has_leader()).then_some(())).await;
}

async fn heals(cluster: &EtcdCluster) {
    cluster.heal();
    let all_follow = async || cluster.members().iter().all(Etcd::has_leader).then_some(());
    eventually("all have a leader", all_follow).await;
}

/// Waits until nothing is left of any claim.
async fn expect_clean(cluster: &EtcdCluster, locks: &Locks, name: &str) {
    for member in cluster.members() {
        expect_unused(member, locks, name).await;
    }
}

/// Clients who can reach the minority alone: the holder is told of its loss before the majority grants the lock, and who
/// waits there waits until all is whole again.
async fn those_on_the_minority_side_lose_in_time(cluster: &EtcdCluster, parted: &Etcd) {
    let near = connect(&parted.url()).await.ttl(SHORT_TTL).unwrap();
    let beside = connect(&parted.url()).await.ttl(SHORT_TTL).unwrap();
    let far = connect(&cluster.url_without(parted)).await;
    let guard = Arc::new(lock(&near, "job").await);
    let waiter = succeed(&beside, "job", &guard);
    sees_claims(&far, "job", 2).await;
    let rival = succeed(&far, "job", &guard);
    sees_claims(&far, "job", 3).await;

    parts(cluster, parted).await;
    let Next { guard: next, met } = join("the majority grants the lock", rival).await;
    assert!(!met, "granted while the holder on the other side believed to hold");
    assert!(next.token() > guard.token());
    let loss = within("the holder is told", guard.lost()).await;
    assert_eq!(loss.kind, LossKind::Expired, "{loss}");
    assert!(near.mutex("job").unwrap().try_lock().await.is_err(), "a minority knows nothing");
    assert!(!waiter.is_finished(), "a minority let a waiter in");

    heals(cluster).await;
    sees_claims(&far, "job", 2).await;
    next.verify().await.unwrap();
    assert!(!waiter.is_finished() && next.is_held());
    let token = next.token();
    release(next).await;
    let Next { guard: last, .. } = join("the waiter is granted", waiter).await;
    assert!(last.token() > token);
    last.verify().await.unwrap();
    release(last).await;
    let guard = Arc::into_inner(guard).expect("the tasks are over");
    assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost(loss));
    release(lock(&near, "job").await).await;
    expect_clean(cluster, &near, "job").await;
}

#[tokio::test]
async fn those_on_the_side_of_a_parted_leader_lose_in_time() {
    let cluster = Etcd::builder().partitions().start_cluster(3);
    those_on_the_minority_side_lose_in_time(&cluster, cluster.leader()).await;
}

#[tokio::test]
async fn those_on_the_side_of_a_parted_follower_lose_in_time() {
    let cluster = Etcd::builder().partitions().start_cluster(3);
    those_on_the_minority_side_lose_in_time(&cluster, cluster.follower()).await;
}

/// A network that reaches one member alone until it is opened.
#[derive(Debug)]
pub(super) struct Narrow {
    member: u16,
    is_open: AtomicBool,
}

impl Narrow {
    pub(super) fn only(member: &Etcd) -> Narrow {
        Narrow { member: member.addr().port(), is_open: AtomicBool::new(false) }
    }

    pub(super) fn open(&self) {
        self.is_open.store(true, Ordering::Release);
    }
}

#[async_trait]
impl Connector for Narrow {
    async fn connect(&self, host: &str, port: u16) -> std::io::Result<Box<dyn Stream>> {
        match port == self.member || self.is_open.load(Ordering::Acquire) {
            true => Ok(Box::new(TcpStream::connect((host, port)).await?)),
            false => Err(std::io::ErrorKind::ConnectionRefused.into()),
        }
    }
}

/// Clients who can reach all members, and whom the parted one serves: they leave it, and lose nothing.
async fn those_who_reach_all_leave_the_minority(cluster: &EtcdCluster, parted: &Etcd) {
    let network = Arc::new(Narrow::only(parted));
    let env = || Env::new(Clock::host(), Random::system(), Lane::thread(), network.clone());
    let here = async || Locks::connect(&cluster.url(), env()).await.unwrap();
    let (near, beside) = (here().await.ttl(TTL).unwrap(), here().await.ttl(LONG_TTL).unwrap());
    // Nothing but its watches can tell this one that it is on the wrong side.
    let aside = unrenewed(&cluster.url(), env()).await;
    let far = connect(&cluster.url_without(parted)).await;
    let kept = lock(&near, "kept").await;
    let guard = lock(&far, "job").await;
    let waiter = queue(&beside, "job");
    sees_claims(&far, "job", 2).await;
    let doomed = lock(&aside, "doomed").await;
    // Three leases' keys, those of three claims, and the predecessor.
    let watched = async || (parted.metric("etcd_debugging_mvcc_watcher_total") >= 7.0).then_some(());
    eventually("they watch at that member", watched).await;
    network.open();

    let before = kept.deadline().unwrap();
    parts(cluster, parted).await;
    sees_claims(&far, "job", 2).await;
    assert!(!waiter.is_finished() && guard.is_held() && doomed.is_held());
    let other = cluster.members().iter().find(|member| member.addr() != parted.addr()).unwrap();
    other.ctl(&["del", &doomed.store_key().unwrap()]);
    let token = guard.token();
    release(guard).await;
    let next = join("the waiter hears of it on the other side", waiter).await;
    assert!(next.token() > token);
    next.verify().await.unwrap();
    let loss = within("the holder hears of it on the other side", doomed.lost()).await;
    assert_eq!(loss.kind, LossKind::Deleted, "{loss}");
    let renewed = async || (!kept.is_held() || kept.deadline().unwrap() > before).then_some(());
    eventually("the other lease is renewed", renewed).await;
    kept.verify().await.unwrap();

    heals(cluster).await;
    next.verify().await.unwrap();
    assert!(kept.is_held() && next.is_held());
    release(next).await;
    release(kept).await;
    expect_clean(cluster, &near, "job").await;
    expect_clean(cluster, &far, "kept").await;
    expect_clean(cluster, &aside, "doomed").await;
}

#[tokio::test]
async fn those_who_reach_all_members_leave_a_parted_leader() {
    let cluster = Etcd::builder().partitions().start_cluster(3);
    those_who_reach_all_leave_the_minority(&cluster, cluster.leader()).await;
}

#[tokio::test]
async fn those_who_reach_all_members_leave_a_parted_follower() {
    let cluster = Etcd::builder().partitions().start_cluster(3);
    those_who_reach_all_leave_the_minority(&cluster, cluster.follower()).await;
}

/// A load balancer, or a name with several addresses: the URL names one server, and connecting again leads to another.
#[tokio::test]
async fn those_whose_only_address_leads_to_all_members_leave_the_minority() {
    let cluster = Etcd::builder().partitions().start_cluster(3);
    let parted = cluster.follower();
    let other = cluster.members().iter().find(|member| member.addr() != parted.addr()).unwrap();
    let way = Proxy::start(parted.addr());
    let near = connect(&format!("etcd://{}", way.addr())).await.ttl(TTL).unwrap();
    let kept = lock(&near, "kept").await;
    parts(&cluster, parted).await;
    way.set_upstream(other.addr());
    let before = kept.deadline().unwrap();
    let renewed = async || (!kept.is_held() || kept.deadline().unwrap() > before).then_some(());
    eventually("the lease is renewed", renewed).await;
    assert!(kept.is_held(), "{:?}", kept.standing());
    release(kept).await;
    heals(&cluster).await;
    expect_clean(&cluster, &near, "kept").await;
}
