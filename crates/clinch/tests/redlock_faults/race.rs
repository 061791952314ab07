//! Two clients race for one lock while servers hang, one after the other, and a third store judges.

use std::sync::atomic::AtomicBool;

use super::*;

/// How often each client takes the lock.
const ROUNDS: u64 = 5000;

/// Notes in a store of its own who is inside, so that a second holder is seen whatever the clients believe, and that
/// tokens rise.
const ENTER: &str = "
    if redis.call('EXISTS', KEYS[1]) == 1 then return 'two hold it' end
    if tonumber(redis.call('GET', KEYS[2]) or 0) >= tonumber(ARGV[1]) then return 'the token did not rise' end
    redis.call('MSET', KEYS[1], '', KEYS[2], ARGV[1])
    return 'alone'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_clients_racing_ten_thousand_rounds_never_meet() {
    let servers = Arc::new(Servers::durable(3));
    let judge = Arc::new(Redis::start());
    let name = unique("race");
    let done = Arc::new(AtomicBool::new(false));
    let chaos = std::thread::spawn({
        let (servers, done) = (servers.clone(), done.clone());
        move || {
            for server in servers.0.iter().cycle() {
                if done.load(Ordering::Acquire) {
                    return;
                }
                server.pause();
                std::thread::sleep(Duration::from_millis(30));
                server.resume();
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    });
    let client = |_| {
        let (servers, judge, name) = (servers.clone(), judge.clone(), name.clone());
        tokio::spawn(async move {
            let locks = servers.connect().await;
            let mut judge = judge.client();
            for _ in 0..ROUNDS {
                let guard = lock(&locks, &name).await;
                let token = guard.token().to_string();
                assert_eq!(judge.call(&["EVAL", ENTER, "2", "inside", "last", &token]).text(), "alone");
                assert!(guard.is_held());
                assert_eq!(judge.call(&["DEL", "inside"]).int(), 1);
                assert_eq!(guard.release().await.unwrap(), Released::Released);
            }
            locks.close(PATIENCE).await.unwrap();
        })
    };
    let clients: Vec<_> = (0..2).map(client).collect();
    let mut failed = None;
    for client in clients {
        failed = client.await.err().or(failed);
    }
    done.store(true, Ordering::Release);
    chaos.join().unwrap();
    if let Some(failed) = failed {
        std::panic::resume_unwind(failed.into_panic());
    }
    servers.expect_no_key(&name).await;
    let Reply::Text(_) = judge.call(&["GET", "last"]) else { panic!("nobody was inside") };
}
