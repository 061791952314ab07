//! Steps that are to have copies before they count.

use super::queues::{backend, claim};
use super::*;
use crate::common::release;
use clinch::backend::Progress;
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
