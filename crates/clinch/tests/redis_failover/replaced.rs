//! A master that was replaced while a client was about to use it.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;

use clinch_testkit::{Proxy, Redis};

use super::*;

/// Something that talks like a sentinel, and says what it is told to.
#[derive(Clone)]
struct Said(Arc<Mutex<(u64, u16, Vec<TcpStream>)>>);

impl Said {
    /// A sentinel that names the master at a port since this epoch, and where it is.
    fn start(epoch: u64, port: u16) -> (Said, u16) {
        let said = Said(Arc::new(Mutex::new((epoch, port, Vec::new()))));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap().port();
        let serves = said.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (said, client) = (serves.clone(), client.unwrap());
                std::thread::spawn(move || said.serve(client));
            }
        });
        (said, at)
    }

    fn listeners(&self) -> usize {
        self.0.lock().unwrap().2.len()
    }

    fn switch(&self, epoch: u64, port: u16) {
        let mut said = self.0.lock().unwrap();
        (said.0, said.1) = (epoch, port);
        let news = list(&["message", "+switch-master", "main 127.0.0.1 1 127.0.0.1 2"]);
        said.2.iter_mut().for_each(|client| client.write_all(news.as_bytes()).unwrap());
    }

    /// Answers until the client is gone.
    fn serve(&self, client: TcpStream) -> Option<()> {
        let mut from = BufReader::new(client.try_clone().unwrap());
        let mut listens = false;
        loop {
            let words: Vec<String> = (0..number(&mut from)?).map_while(|_| word(&mut from)).collect();
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let mut said = self.0.lock().unwrap();
            let answer = match words[..] {
                ["SENTINEL", "MASTER", _] => list(&["name", "main", "config-epoch", &said.0.to_string()]),
                ["SENTINEL", ..] => list(&["127.0.0.1", &said.1.to_string()]),
                ["SUBSCRIBE", channel] => {
                    listens = true;
                    said.2.push(client.try_clone().unwrap());
                    format!("*3\r\n$9\r\nsubscribe\r\n${}\r\n{channel}\r\n:1\r\n", channel.len())
                }
                _ if listens => list(&["pong", ""]),
                _ => "+PONG\r\n".into(),
            };
            (&client).write_all(answer.as_bytes()).ok()?;
        }
    }
}

fn list(words: &[&str]) -> String {
    let words = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
    format!("*{}\r\n{}", words.len(), words.collect::<String>())
}

fn number(from: &mut impl BufRead) -> Option<usize> {
    let mut line = String::new();
    from.read_line(&mut line).ok()?;
    line.get(1..)?.trim().parse().ok()
}

fn word(from: &mut impl BufRead) -> Option<String> {
    let mut word = vec![0; number(from)? + 2];
    from.read_exact(&mut word).ok()?;
    word.truncate(word.len() - 2);
    String::from_utf8(word).ok()
}

/// Two masters, of which the old one is cut off and knows nothing. The news comes while a connection to the old one is
/// being opened: by who connects, or later by who locks.
async fn expect_left(options: &str, later: bool) {
    let (old, new) = (Redis::start(), Redis::start());
    let copies = [&old, &new].map(|master| Redis::builder().replica_of(master).start());
    [&old, &new].into_iter().for_each(|master| replicate(master, 1));
    let slow = Proxy::start(old.addr());
    let (sentinel, port) = Said::start(1, slow.port());
    let url = format!("redis+sentinel://127.0.0.1:{port}/main{options}");
    let known = if later { Some(connect(&url, LONG).await) } else { None };
    slow.hold_replies(true);
    let before = slow.accepted();
    let opening = tokio::spawn(async move {
        let locks = match known {
            Some(locks) => locks,
            None => loop {
                match clinch::connect(&url).await {
                    Ok(locks) => break locks,
                    Err(error) => assert_eq!(error.kind(), clinch::ErrorKind::Unavailable, "{error}"),
                }
            },
        };
        // What was granted before the news were heard may end as it likes.
        let _ = lock(&locks, "job").await.release().await;
        locks
    });
    eventually("it opens a connection to the old one", async || {
        (slow.accepted() > before && sentinel.listeners() > 0).then_some(())
    })
    .await;
    sentinel.switch(2, new.port());
    // Until it has asked what the news mean.
    tokio::time::sleep(Duration::from_millis(100)).await;
    slow.hold_replies(false);
    let locks = opening.await.unwrap();
    eventually("it has left the old one", async || {
        let guard = lock(&locks, "job").await;
        let there = new.call(&["EXISTS", "clinch:job"]).int() == 1;
        let _ = guard.release().await;
        there.then_some(())
    })
    .await;
    drop(copies);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_is_replaced_while_it_is_dialled_is_left() {
    expect_left("", false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_is_replaced_while_it_is_dialled_for_confirmed_steps_is_left() {
    expect_left("?wait_replicas=1", true).await;
}
