//! The lock service that every etcd serves (`v3lockpb.Lock`), called as programs without a client library call it: by
//! JSON over HTTP.

use std::net::SocketAddr;

use clinch_testkit::etcd_3_5;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;

/// [`KEY`] in Base64, in which JSON carries bytes here.
const NAME_IN_JSON: &str = "L2NsaW5jaC9qb2I=";

/// Seconds that nobody lives to see the end of.
const LEASE: u64 = 3600;

/// A caller of the service; its claims hang on a lease of its own.
#[derive(Clone)]
struct Caller {
    server: SocketAddr,
    lease: Value,
}

impl Caller {
    async fn new(etcd: &Etcd) -> Caller {
        let server = etcd.addr();
        let granted = call(server, "lease/grant", &json!({ "TTL": LEASE })).await;
        Caller { server, lease: granted["ID"].clone() }
    }

    /// Waits for the lock; gives what names it.
    async fn lock(&self) -> Value {
        let answer =
            call(self.server, "lock/lock", &json!({ "name": NAME_IN_JSON, "lease": self.lease })).await;
        answer["key"].clone()
    }

    async fn unlock(&self, key: Value) {
        call(self.server, "lock/unlock", &json!({ "key": key })).await;
    }

    /// Waits for the lock in a task of its own.
    fn queue(&self) -> JoinHandle<Value> {
        let caller = self.clone();
        tokio::spawn(async move { caller.lock().await })
    }
}

/// One request and its answer, on a connection of its own.
async fn call(server: SocketAddr, method: &str, request: &Value) -> Value {
    let (mut stream, body) = (TcpStream::connect(server).await.unwrap(), request.to_string());
    let head = format!("POST /v3/{method} HTTP/1.0\r\nHost: etcd\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.lines().next().unwrap().ends_with("200 OK"), "{method}: {answer}");
    serde_json::from_str(body).unwrap()
}

async fn exclude_each_other(etcd: &Etcd) {
    let locks = connect(etcd).await;
    let callers = [Caller::new(etcd).await, Caller::new(etcd).await, Caller::new(etcd).await];
    let guard = lock(&locks).await;
    let first = callers[0].queue();
    sees_claims(&locks, 2).await;
    let ours = queue(&locks);
    sees_claims(&locks, 3).await;
    let last = callers[1].queue();
    sees_claims(&locks, 4).await;
    let given_up = callers[2].queue();
    sees_claims(&locks, 5).await;
    // Its connection ends with it.
    given_up.abort();
    sees_claims(&locks, 4).await;
    assert!(!first.is_finished() && !last.is_finished());
    release(guard).await;
    let key = within("the first call is granted", first).await.unwrap();
    assert_eq!(sees_claims(&locks, 3).await, "another program");
    assert!(locks.mutex(NAME).unwrap().try_lock().await.unwrap().is_none());
    assert!(!ours.is_finished() && !last.is_finished());
    callers[0].unlock(key).await;
    let guard = within("ours is granted", ours).await.unwrap();
    guard.verify().await.unwrap();
    assert!(!last.is_finished());
    release(guard).await;
    let key = within("the last call is granted", last).await.unwrap();
    callers[1].unlock(key).await;
    sees_claims(&locks, 0).await;
    let guard = locks.mutex(NAME).unwrap().try_lock().await.unwrap().expect("a free lock");
    release(guard).await;
}

#[tokio::test]
async fn the_lock_service_and_we_exclude_each_other_and_share_a_queue() {
    exclude_each_other(&Etcd::start()).await;
}

#[tokio::test]
async fn the_lock_service_of_3_5_and_we_exclude_each_other_and_share_a_queue() {
    exclude_each_other(&Etcd::builder().binary(etcd_3_5()).start()).await;
}

/// A lease that ends takes the claim of its caller with it, in the queue and at its head.
#[tokio::test]
async fn a_caller_whose_lease_ends_holds_us_up_no_more() {
    let etcd = Etcd::start();
    let locks = connect(&etcd).await;
    let caller = Caller::new(&etcd).await;
    caller.lock().await;
    let ours = queue(&locks);
    sees_claims(&locks, 2).await;
    let lease: i64 = caller.lease.as_str().unwrap().parse().unwrap();
    etcd.ctl(&["lease", "revoke", &format!("{lease:x}")]);
    release(within("ours is granted", ours).await.unwrap()).await;
    sees_claims(&locks, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_of_the_lock_service_and_we_never_overlap() {
    const OURS: u64 = 400;
    /// Fewer: the service's own hand-over takes up to 100 ms.
    const THEIRS: u64 = 120;
    let (etcd, ledger) = (Etcd::start(), Ledger::new());
    let mut tasks = ledger.ours(&etcd, OURS).await;
    for _ in 0..2 {
        let (caller, path) = (Caller::new(&etcd).await, ledger.path().to_owned());
        tasks.push(tokio::spawn(async move {
            for _ in 0..THEIRS {
                let key = caller.lock().await;
                Ledger::section(&path).await;
                caller.unlock(key).await;
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(ledger.count(), 2 * (OURS + THEIRS));
}
