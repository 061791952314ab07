//! Steps that are to have copies before they count.

use super::queues::{backend, claim};
use super::*;
use crate::common::release;
use clinch::backend::{Backend, Progress, Renewal};
use clinch::{Claim, Mode};

/// A master and its replica, which follows.
async fn servers() -> (Redis, Redis) {
    let master = Redis::start();
    let replica = Redis::builder().replica_of(&master).start();
    eventually("the replica follows", async || (master.call(&["WAIT", "1", "100"]).int() == 1).then_some(()))
        .await;
    (master, replica)
}

/// Waits until somebody waits for copies of what the server has done, and cuts the connection.
async fn cut_while_it_waits(master: &Redis, proxy: &Proxy, name: &str) {
    eventually("it waits for a copy", async || {
        (master.client().info("clients")["blocked_clients"] == "1").then_some(())
    })
    .await;
    assert!(holder(master, name).is_some(), "the claim was done before");
    proxy.cut_all();
}

/// P4, P7: what was done and not confirmed is not undone. A step of it that arrives after its release is none.
#[tokio::test]
async fn a_claim_whose_confirmation_was_cut_is_in_doubt() {
    let (master, replica) = servers().await;
    let (near, late) = (connect(&master.url()).await, backend(&master).await);
    let expect_buried = async |step: &Claim| {
        let progress = late.claim(step).await.unwrap();
        assert!(matches!(progress, Progress::Busy(_)), "the claim came back: {progress:?}");
        expect_unused(&master, &near, step.name.as_str()).await;
    };
    let proxy = Proxy::start(master.addr());
    let url = format!("redis://{}?wait_replicas=1", proxy.addr());

    // Given up then.
    let far = clinch::backends::redis::open(&url, Env::host(Lane::thread())).await.unwrap();
    let first = Claim { enqueue: false, ..claim("given-up", Mode::Exclusive, 1) };
    replica.pause();
    let (answer, ()) = tokio::join!(far.claim(&first), cut_while_it_waits(&master, &proxy, "given-up"));
    let error = answer.expect_err("it was not confirmed");
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}");
    assert_eq!(far.release(&first, Duration::ZERO).await.unwrap(), Freed::Removed);
    expect_buried(&first).await;

    // Asked for again.
    let far = connect(&url).await;
    let waiter = queue(&far, "again");
    cut_while_it_waits(&master, &proxy, "again").await;
    replica.resume();
    let guard = waiter.await.unwrap();
    let second = Claim { id: guard.claim_id(), enqueue: false, ..claim("again", Mode::Exclusive, 0) };
    release(guard).await;
    expect_buried(&second).await;
}

/// Callers who wait for copies share one connection for each runtime, and with a replica that is silent their questions.
#[tokio::test]
async fn callers_who_wait_for_copies_make_no_storm() {
    const CALLERS: usize = 100;
    let (master, replica) = servers().await;
    let locks = connect(&format!("{}?wait_replicas=1", master.url())).await;
    release(lock(&locks, "warm").await).await;
    let connections = || master.client().info("stats")["total_connections_received"].parse::<u64>().unwrap();
    let waits = || master.client().commandstats()["wait"];
    let before = connections();
    let all = async |expected: bool| {
        let mut callers = tokio::task::JoinSet::new();
        for caller in 0..CALLERS {
            let mutex = locks.mutex(&format!("job {caller}")).unwrap();
            callers.spawn(async move {
                let granted = mutex.try_lock().await;
                assert_eq!(granted.as_ref().is_ok_and(Option::is_some), expected, "{granted:?}");
            });
        }
        while let Some(done) = callers.join_next().await {
            done.unwrap();
        }
    };
    all(true).await;
    eventually("all are free", async || {
        (master.call(&["KEYS", "clinch:job*"]).array().is_empty()).then_some(())
    })
    .await;
    replica.pause();
    let asked = waits();
    all(false).await;
    assert!(waits() - asked < CALLERS as u64, "{} questions for a silent replica", waits() - asked);
    replica.resume();
    // Of the background, which may open its own meanwhile, and of this test.
    let opened = connections() - before;
    assert!(opened < 20, "{opened} connections");
}

/// What grants nothing has nothing to confirm: that a lock is taken, and who has it, is known also where no copy can be had.
#[tokio::test]
async fn a_refusal_and_a_look_wait_for_no_copies() {
    let master = Redis::start();
    let holder = lock(&connect(&master.url()).await, "job").await;
    for url in ["wait_replicas=1", "wait_replicas=1&lean=on"].map(|wait| format!("{}?{wait}", master.url())) {
        let locks = connect(&url).await;
        let refused = locks.mutex("job").unwrap().try_lock().await;
        assert!(refused.as_ref().is_ok_and(Option::is_none), "{url}: {refused:?}");
        let seen = locks.state("job").await.unwrap().unwrap();
        assert_eq!(seen.claims[0].id, holder.claim_id(), "{url}");
        assert_eq!(locks.list("").await.unwrap().len(), 1, "{url}");
        assert!(!master.client().commandstats().contains_key("wait"), "{url}: it asked for copies");
        let asks = clinch::backends::redis::open(&url, Env::host(Lane::thread())).await.unwrap();
        let step = Claim { enqueue: false, ..claim("free", Mode::Exclusive, 1) };
        let granted = asks.claim(&step).await;
        assert_eq!(granted.unwrap_err().kind(), ErrorKind::Unknown, "{url}");
        assert!(master.client().commandstats().contains_key("wait"), "{url}: a grant has copies");
        master.call(&["CONFIG", "RESETSTAT"]);
        assert_eq!(asks.release(&step, Duration::ZERO).await.unwrap(), Freed::Removed, "{url}");
    }
    release(holder).await;
}

/// A client's store that waits for copies on one replica.
async fn durable(url: &str, options: &str) -> Arc<dyn Backend> {
    let url = format!("{url}?wait_replicas=1{options}");
    clinch::backends::redis::open(&url, Env::host(Lane::thread())).await.unwrap()
}

/// Takes a claim; a replica that has just begun to follow may need more than one question.
async fn granted(store: &dyn Backend, claim: &Claim) {
    eventually("it is granted, with a copy", async || match store.claim(claim).await {
        Ok(Progress::Granted(_)) => Some(()),
        Err(error) if error.kind() == ErrorKind::Unknown => None,
        other => panic!("{other:?}"),
    })
    .await;
}

/// P2: who is told nothing goes on beside the next holder. That a claim is gone has no copies and needs none; what stands beside it
/// is not renewed without.
#[tokio::test]
async fn what_is_gone_is_told_though_no_copy_can_be_had() {
    let (master, replica) = servers().await;
    let exclusive = ["broken", "deleted", "kept"].map(|name| claim(name, Mode::Exclusive, 1));
    let readers = [1, 2].map(|bits| claim("read", Mode::Shared, bits));
    let permits = [1, 2].map(|bits| claim("permits", "1 of 2".parse().unwrap(), bits));
    let (full, lean) =
        (durable(&master.url(), "").await, durable(&master.url(), "&lean=on&prefix=lean:").await);
    let full_claims: Vec<_> = exclusive.iter().cloned().chain(readers).chain(permits).map(Arc::new).collect();
    let lean_claims: Vec<_> = exclusive.into_iter().map(Arc::new).collect();
    for (store, claims) in [(&full, &full_claims), (&lean, &lean_claims)] {
        for claim in claims {
            granted(&**store, claim).await;
        }
    }
    replica.pause();
    let mut gone = vec![0, 1, 3, 5];
    for (store, prefix, claims) in [(&full, "clinch:", &full_claims), (&lean, "lean:", &lean_claims)] {
        assert_eq!(master.call(&["DEL", &format!("{prefix}deleted")]).int(), 1);
        gone.retain(|at| *at < claims.len());
        for claim in gone.iter().filter(|at| **at != 1).map(|at| &claims[*at]) {
            assert_eq!(store.evict(&claim.name, claim.id).await.unwrap(), Freed::Removed);
        }
        let renewed = store.renew(claims).await;
        for (at, renewal) in renewed.iter().enumerate() {
            match renewal {
                Renewal::Lost(_) => assert!(gone.contains(&at), "{:?} is there", claims[at]),
                Renewal::Failed(error) => {
                    assert!(!gone.contains(&at), "{:?} is told nothing: {error}", claims[at]);
                    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
                }
                Renewal::Renewed(_) => panic!("{:?} was renewed without a copy", claims[at]),
            }
        }
    }
    let error = full.downgrade(&full_claims[1]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    // Who has nothing left asks for no copies.
    master.call(&["CONFIG", "RESETSTAT"]);
    let renewed = full.renew(&full_claims[..2]).await;
    assert!(matches!(renewed[..], [Renewal::Lost(_), Renewal::Lost(_)]), "{renewed:?}");
    assert!(!master.client().commandstats().contains_key("wait"), "it asked for copies of nothing");
}

/// A master that became a replica between a step and the question for its copies refuses the question, in words of no code.
#[tokio::test]
async fn a_master_that_became_a_replica_leaves_a_claim_in_doubt() {
    let (master, _replica) = servers().await;
    let other = Redis::start();
    let proxy = Proxy::start(master.addr());
    let store = durable(&format!("redis://{}", proxy.addr()), "").await;
    granted(&*store, &claim("warm", Mode::Exclusive, 1)).await;
    proxy.hold_replies(true);
    let step = claim("job", Mode::Exclusive, 2);
    let demote = async {
        eventually("it is done", async || holder(&master, "job")).await;
        master.call(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
        proxy.hold_replies(false);
    };
    let (answer, ()) = tokio::join!(store.claim(&step), demote);
    let error = answer.expect_err("it was not confirmed");
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}");
}
