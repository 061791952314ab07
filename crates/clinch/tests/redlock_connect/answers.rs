//! What an error says of each server: who has its vote and for how long, that it did not answer, or until when it does
//! not vote.

use clinch_testkit::{Cluster, Proxy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

/// All that an error says, with its causes.
fn chain(error: &Error) -> String {
    format!("{error:?}")
}

/// How many of the servers say that they have run for so long.
fn ran_for(servers: &[Redis], seconds: u64) -> usize {
    let uptime = |server: &Redis| server.client().info("server")["uptime_in_seconds"].parse::<u64>().unwrap();
    servers.iter().filter(|server| uptime(server) >= seconds).count()
}

#[tokio::test]
async fn fresh_servers_say_until_when_they_do_not_vote_and_then_do() {
    let servers: Vec<Redis> = (0..3).map(|_| Redis::start()).collect();
    let locks = connect(&url(&servers, "max_ttl=5s&ttl=1s")).await;
    let mutex = locks.mutex("job").unwrap();

    let error = mutex.try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    for host in hosts(&servers) {
        assert!(chain(&error).contains(&format!("{host} does not vote for another ")), "{error:?}");
    }
    assert!(error.to_string().contains("ago and may have forgotten locks"), "{error}");

    let error = mutex.lock().timeout(Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "nobody has it: {error:?}");
    for host in hosts(&servers) {
        assert!(chain(&error).contains(&format!("{host} does not vote for another ")), "{error:?}");
    }

    let guard = mutex.lock().await.unwrap();
    assert!(ran_for(&servers, 4) >= 2, "a server voted that may have forgotten locks");
    release(guard).await;
}

#[tokio::test]
async fn who_has_the_votes_and_for_how_long_is_told() {
    let name = unique("taken");
    let locks = connect(&url(&SERVERS, DURABLE)).await;
    let holder = lock(&locks, &name).await;
    let error = locks.mutex(&name).unwrap().lock().timeout(Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    let pid = std::process::id();
    assert!(error.to_string().contains(&format!("(pid {pid}, for ")), "{error}");
    let told =
        hosts(&SERVERS).iter().filter(|host| chain(&error).contains(&format!("{host} is taken by "))).count();
    assert!(told >= 2 && chain(&error).contains(&format!("(pid {pid}) for another ")), "{error:?}");
    release(holder).await;
}

#[tokio::test]
async fn each_server_answers_for_itself() {
    let servers = three();
    let other = voting().start();
    let proxies = [Proxy::start(servers[1].addr()), Proxy::start(servers[2].addr())];
    let [taken, silent, swapped] =
        [servers[0].addr(), proxies[0].addr(), proxies[1].addr()].map(|addr| addr.to_string());
    let url = format!("redlock://{taken},{silent},{swapped}?{DURABLE}");
    vouch(&url, &servers);
    let locks = connect(&url).await;
    let mutex = locks.mutex("job").unwrap();
    // One that ran all the time, while it was another that answered.
    eventually("the other has run for some time", async || {
        release(lock(&locks, "before").await).await;
        (ran_for(std::slice::from_ref(&other), 4) == 1).then_some(())
    })
    .await;
    let record = "000102030405060708090a0b0c0d0e0f 1700000000000001 1700000000000000 \
         {\"host\":\"web-3\",\"pid\":4121,\"user\":\"me\",\"label\":\"\"}";
    servers[0].call(&["SET", "clinch:job", record, "PX", "3600000"]);
    proxies[1].set_upstream(other.addr());
    proxies[1].cut_all();
    let error = eventually("the other is found out", async || {
        let error = mutex.lock().timeout(Duration::from_millis(100)).await.unwrap_err();
        chain(&error).contains("does not vote").then_some(error)
    })
    .await;
    assert!(
        chain(&error).contains(&format!("{taken} is taken by web-3 (pid 4121) for another ")),
        "{error:?}"
    );
    assert!(chain(&error).contains(&format!("{swapped} does not vote for another ")), "{error:?}");
    assert!(chain(&error).contains("it is another server than before"), "{error:?}");

    proxies[0].black_hole(true);
    let words = [
        "2 of 3 servers are needed".to_owned(),
        format!("{taken} is taken by web-3 (pid 4121) for another "),
        format!("{silent} did not answer within "),
        format!("{swapped} does not vote for another "),
    ];
    // The first may be slow, too.
    eventually("each is heard", async || {
        let error = mutex.try_lock().await.map(drop).unwrap_err();
        assert!([ErrorKind::Unavailable, ErrorKind::Unknown].contains(&error.kind()), "{error:?}");
        words.iter().all(|words| error.to_string().contains(words)).then_some(())
    })
    .await;
}

/// The address of a server that still reads its data: it greets, says who it is, and answers so to all that asks for data.
async fn loading() -> String {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = server.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = server.accept().await {
            tokio::spawn(async move {
                let (mut said, mut answered) = (String::new(), 0);
                let mut bytes = vec![0; 1 << 16];
                while let Ok(count @ 1..) = client.read(&mut bytes).await {
                    said.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
                    // Each command begins with the number of its words.
                    let is_head = |line: &&str| {
                        line.strip_prefix('*').is_some_and(|count| count.parse::<u32>().is_ok())
                    };
                    let commands = said.split_inclusive("\r\n").filter_map(|line| line.strip_suffix("\r\n"));
                    let heads = commands.filter(is_head).count();
                    while answered < heads {
                        // HELLO, CLIENT ID and INFO come first.
                        let answer = match answered {
                            0..3 => "+OK\r\n",
                            _ => "-LOADING Redis is loading the dataset in memory\r\n",
                        };
                        answered += 1;
                        if client.write_all(answer.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                }
            });
        }
    });
    addr
}

/// Whatever a server answers in the place of what was left there, its user is said to lack a right only where it does.
#[tokio::test]
async fn a_server_that_cannot_answer_yet_and_one_of_a_cluster_deny_no_right() {
    let servers = [loading().await, loading().await, loading().await];
    let error = clinch::connect(&format!("redlock://{}", servers.join(","))).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Unavailable && chain(&error).contains("LOADING"), "{error:?}");
    assert!(!chain(&error).contains("right"), "{error:?}");

    let cluster = Cluster::start();
    let masters: Vec<String> = cluster.masters().iter().map(|master| master.addr().to_string()).collect();
    let error = clinch::connect(&format!("redlock://{}", masters.join(","))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    assert!(
        chain(&error).contains("redis+cluster://") && !chain(&error).contains("the right to"),
        "{error:?}"
    );
}
