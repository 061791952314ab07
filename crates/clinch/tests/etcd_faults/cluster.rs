//! Members that die or stand still while others go on.

use super::*;

/// Long enough for an election and a new connection in between.
const TTL: Duration = Duration::from_secs(15);

/// A holder and a waiter ride out what happens to the cluster; then the lock is handed over.
async fn rides_out(url: &str, happens: impl AsyncFnOnce()) {
    let (near, far) = (connect(url).await.ttl(TTL).unwrap(), connect(url).await.ttl(TTL).unwrap());
    let guard = lock(&near, "job").await;
    let waiter = queue(&far, "job");
    sees_claims(&near, "job", 2).await;
    let before = guard.deadline().unwrap();
    happens().await;
    let renewed = async || (!guard.is_held() || guard.deadline().unwrap() > before).then_some(());
    eventually("the lease is renewed", renewed).await;
    assert!(guard.is_held() && !waiter.is_finished());
    let token = guard.token();
    release(guard).await;
    let next = join("the waiter is granted", waiter).await;
    assert!(next.token() > token);
    next.verify().await.unwrap();
    release(next).await;
}

#[tokio::test]
async fn a_leader_that_is_killed_costs_nobody_a_lock() {
    let cluster = EtcdCluster::start();
    rides_out(&cluster.url(), async || cluster.leader().kill()).await;
}

#[tokio::test]
async fn a_follower_that_is_killed_costs_nobody_a_lock() {
    let cluster = EtcdCluster::start();
    rides_out(&cluster.url(), async || cluster.follower().kill()).await;
}

#[tokio::test]
async fn a_leader_that_stands_still_costs_nobody_a_lock() {
    let cluster = EtcdCluster::start();
    rides_out(&cluster.url(), async || cluster.leader().pause()).await;
}

/// Whoever a follower serves that stands still is served by the others, in time for the shortest lease.
#[tokio::test]
async fn a_follower_that_stands_still_costs_nobody_a_lock() {
    let (cluster, clock) = (EtcdCluster::start(), Clock::host());
    let [short, longer] = [2, 7].map(Duration::from_secs);
    let follower = cluster.follower();
    let network = Arc::new(partition::Narrow::only(follower));
    let (mut held, far) = (Vec::new(), connect(&cluster.url_without(follower)).await);
    for ttl in [short, longer] {
        let env = Env::new(Clock::host(), Random::system(), Lane::thread(), network.clone());
        let locks = Locks::connect(&cluster.url(), env).await.unwrap().ttl(ttl).unwrap();
        held.push(lock(&locks, &format!("{ttl:?}")).await);
    }
    network.open();
    follower.pause();
    let paused = clock.now();
    let are_held = || held.iter().all(Guard::is_held);
    let over = async || (!are_held() || clock.now() > paused + 2 * longer).then_some(());
    eventually("two leases would have run out", over).await;
    for guard in &held {
        assert!(guard.is_held(), "{} was lost: {:?}", guard.name(), guard.standing());
        let rival = far.mutex(guard.name().as_str()).unwrap();
        assert!(rival.try_lock().await.unwrap().is_none(), "{} has two holders", guard.name());
    }
}

#[tokio::test]
async fn members_that_restart_one_after_the_other_cost_nobody_a_lock() {
    let cluster = EtcdCluster::start();
    rides_out(&cluster.url(), async || {
        for member in cluster.members() {
            member.restart();
        }
    })
    .await;
}

/// A member that only learns as yet serves nobody. Whoever comes to it is served by another, and goes back to that when it was
/// away for a while.
#[tokio::test]
async fn a_learner_in_the_url_costs_nobody_a_lock() {
    let etcd = Etcd::start();
    let learner = etcd.start_learner();
    let way = Proxy::start(learner.addr());
    let url = format!("etcd://{},{}", way.addr(), etcd.addr());
    // Which one is dialled first is chance.
    while way.accepted() == 0 {
        release(lock(&connect(&url).await, "job").await).await;
    }
    rides_out(&url, async || {
        let asked = way.accepted();
        etcd.kill();
        eventually("nobody but the learner answers", async || (way.accepted() > asked).then_some(())).await;
        etcd.restart();
    })
    .await;
}

/// The cluster is down for a moment as a whole; leases then live for their whole TTL again.
#[tokio::test]
async fn a_cluster_that_restarts_keeps_locks_and_queues() {
    let cluster = EtcdCluster::start();
    rides_out(&cluster.url(), async || {
        cluster.members().iter().for_each(Etcd::kill);
        cluster.members().iter().for_each(Etcd::start_again);
        cluster.members().iter().for_each(Etcd::becomes_ready);
    })
    .await;
}

/// Where only a minority is left, nobody is granted anything, and a holder is told of its loss by its deadline.
#[tokio::test]
async fn a_minority_grants_nothing_and_its_holder_is_told_in_time() {
    let cluster = EtcdCluster::start();
    let near = connect(&cluster.url()).await.ttl(Duration::from_secs(4)).unwrap();
    let far = connect(&cluster.url()).await.ttl(Duration::from_secs(4)).unwrap();
    let guard = lock(&near, "job").await;
    let waiter = queue(&far, "job");
    sees_claims(&near, "job", 2).await;
    let minority = cluster.leader();
    let others = || cluster.members().iter().filter(|member| member.addr() != minority.addr());
    others().for_each(Etcd::pause);
    let clock = Clock::host();
    let loss = within("the loss is told", guard.lost()).await;
    let told = clock.now();
    assert_eq!(loss.kind, LossKind::Expired, "{loss}");
    assert!(!waiter.is_finished());
    others().for_each(Etcd::resume);
    let next = join("the waiter is granted", waiter).await;
    assert!(clock.now() > told && next.token() > guard.token());
    assert_eq!(guard.release().await.unwrap(), Released::AlreadyLost(loss));
    next.verify().await.unwrap();
    release(next).await;
}

/// A leader that stood still for longer than a lease may revoke it when it wakes, although another leader has renewed it
/// (etcd#15247). Then the holder is told at once, whose next renewal is far away.
#[tokio::test]
async fn whoever_loses_a_lease_to_a_woken_leader_is_told() {
    let cluster = EtcdCluster::start();
    let near = connect(&cluster.url()).await.ttl(Duration::from_secs(6)).unwrap();
    let far = connect(&cluster.url()).await;
    let guard = lock(&near, "job").await;
    let first = guard.deadline().unwrap();
    let leader = cluster.leader();
    leader.pause();
    // By then the old leader takes the lease for expired, had it not slept.
    let clock = Clock::host();
    let slept = async || (!guard.is_held() || clock.now() > first + Duration::from_secs(2)).then_some(());
    eventually("the lease has outlived its first end", slept).await;
    assert!(guard.is_held(), "it was renewed at the new leader");
    leader.resume();
    let followed = async || leader.has_leader().then_some(());
    eventually("the old leader follows the new one", followed).await;
    agree(guard, &far).await;
}

/// The same with a leader whose disk stands still instead: it takes part in nothing while it waits for its disk.
#[tokio::test]
async fn whoever_loses_a_lease_to_a_leader_with_a_stalled_disk_is_told() {
    let cluster = EtcdCluster::start();
    let near = connect(&cluster.url()).await.ttl(Duration::from_secs(5)).unwrap();
    let far = connect(&cluster.url()).await;
    let guard = lock(&near, "job").await;
    let leader = cluster.leader();
    let mut strace = Command::new("strace")
        .args(["-f", "-e", "trace=fdatasync", "-e", "inject=fdatasync:delay_enter=8000000:when=1"])
        .args(["-p", &leader.pid().to_string()])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(strace.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains("attached")));
    let other = cluster.follower();
    let deposed = async || {
        // Whatever is written makes the leader wait for its disk.
        let _ = other.try_ctl(&["put", "unrelated", "x"]);
        cluster
            .members()
            .iter()
            .any(|member| member.addr() != leader.addr() && member.is_leader())
            .then_some(())
    };
    eventually("another leads", deposed).await;
    // Ends once the disk has moved again, and lets the leader wake.
    let woken = said.find(|line| line.contains("fdatasync") && line.contains("DELAYED"));
    assert!(woken.is_some());
    let _ = strace.kill();
    let _ = strace.wait();
    let followed = async || (leader.has_leader() && !leader.is_leader()).then_some(());
    eventually("the old leader follows the new one", followed).await;
    agree(guard, &far).await;
}

/// Whatever became of a lease, holder and store agree about it; and the lock can be had again.
async fn agree(guard: Guard, far: &Locks) {
    let waiter = queue(far, "job");
    let decided = async || {
        let claims = far.state("job").await.ok()??.claims;
        let held = claims.len() == 2 && claims[0].id == guard.claim_id();
        (held || !guard.is_held()).then_some(held)
    };
    if eventually("the lease is held, or its loss is told", decided).await {
        match guard.release().await.unwrap() {
            Released::Released => {}
            // Of the lease's own key and the claim's, etcd may tell in any order.
            Released::AlreadyLost(loss) => {
                assert!(matches!(loss.kind, LossKind::SessionEnded | LossKind::Deleted), "{loss}");
            }
        }
    }
    release(join("the waiter is granted", waiter).await).await;
}
