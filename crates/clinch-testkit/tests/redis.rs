//! One server: what it can be, and that it ends in every case.

#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::unwrap_used, reason = "test code")]

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use clinch_testkit::{Port, Redis, Reply, Resp, until};

/// Set for a process that starts servers and then waits to be killed, exits or panics.
const OWNER: &str = "CLINCH_TESTKIT_OWNER";

fn is_gone(pid: u32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn a_server_starts_and_ends_with_its_handle() {
    let redis = Redis::start();
    assert_eq!(redis.url(), format!("redis://127.0.0.1:{}", redis.port()));
    let mut client = Resp::connect(redis.addr()).unwrap();
    assert_eq!(client.call(&["SET", "a", "1"]), Reply::Text("OK".to_owned()));
    assert_eq!(client.call(&["INCR", "a"]).int(), 2);
    assert_eq!(client.call(&["GET", "none"]), Reply::Nil);
    assert_eq!(client.call(&["MGET", "a", "none"]).array(), [Reply::Text("2".to_owned()), Reply::Nil]);
    assert!(
        matches!(client.try_call(&["NONSENSE"]).unwrap(), Reply::Error(error) if error.starts_with("ERR "))
    );
    assert_eq!(client.commandstats()["incr"], 1);
    assert_eq!(client.info("server")["process_id"], redis.pid().to_string());
    let (pid, dir) = (redis.pid(), redis.dir().to_owned());
    drop(redis);
    assert!(is_gone(pid));
    assert!(!dir.exists());
}

#[test]
fn a_killed_server_starts_again_on_its_port() {
    let redis = Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always").start();
    redis.call(&["SET", "a", "1"]);
    let (addr, pid) = (redis.addr(), redis.pid());
    redis.kill();
    assert!(is_gone(pid));
    assert!(!redis.is_up());
    assert!(TcpStream::connect(addr).is_err());
    redis.restart();
    assert_eq!(redis.addr(), addr);
    assert_eq!(Resp::connect(addr).unwrap().call(&["GET", "a"]).int(), 1);
}

#[test]
fn a_paused_server_stands_still() {
    let redis = Redis::start();
    redis.pause();
    assert!(!redis.is_up());
    let waiter = std::thread::spawn({
        let addr = redis.addr();
        move || Resp::connect(addr).unwrap().call(&["PING"])
    });
    std::thread::yield_now();
    assert!(!waiter.is_finished());
    redis.resume();
    assert_eq!(waiter.join().unwrap().text(), "PONG");
    redis.pause();
    // Dropping it ends it also while it stands still.
}

#[test]
fn tls_has_the_names_and_asks_for_certificates_if_told() {
    let redis = Redis::builder().tls().arg("--tls-auth-clients", "yes").start();
    let tls = redis.certificates();
    let ping = |host: &str, with_certificate: bool| {
        let mut cli = Command::new("redis-cli");
        cli.args(["-h", host, "-p", &redis.port().to_string(), "--tls", "--cacert"]).arg(tls.ca());
        if with_certificate {
            cli.arg("--cert").arg(tls.client_cert()).arg("--key").arg(tls.client_key());
        }
        cli.arg("PING").output().unwrap().stdout
    };
    assert_eq!(ping("127.0.0.1", true), b"PONG\n");
    assert_eq!(ping("localhost", true), b"PONG\n");
    assert_ne!(ping("127.0.0.1", false), b"PONG\n");
    assert!(redis.url().starts_with("rediss://127.0.0.1:"), "{}", redis.url());
    assert_eq!(redis.client().call(&["PING"]).text(), "PONG");
}

#[test]
fn users_and_passwords() {
    let redis = Redis::builder().password("secret").acl_user("ann", "on >pw ~ann:* +@all -flushall").start();
    assert_eq!(redis.url(), format!("redis://:secret@127.0.0.1:{}", redis.port()));
    let mut client = Resp::connect(redis.addr()).unwrap();
    assert!(
        matches!(client.try_call(&["PING"]).unwrap(), Reply::Error(error) if error.starts_with("NOAUTH"))
    );
    client.call(&["AUTH", "ann", "pw"]);
    client.call(&["SET", "ann:x", "1"]);
    assert!(
        matches!(client.try_call(&["GET", "x"]).unwrap(), Reply::Error(error) if error.starts_with("NOPERM"))
    );
    assert_eq!(redis.client().call(&["GET", "ann:x"]).int(), 1);

    let replica = Redis::builder().replica_of(&redis).start();
    until("the replica has the key", || replica.call(&["GET", "ann:x"]) != Reply::Nil);
}

#[test]
fn a_unix_socket_is_the_only_way_in() {
    let redis = Redis::builder().unix_socket().start();
    assert_eq!(redis.url(), format!("redis+unix://{}", redis.socket().display()));
    assert_eq!(redis.call(&["CONFIG", "GET", "port"]).table()["port"].clone().int(), 0);
}

#[test]
#[should_panic(expected = "Bad directive or wrong number of arguments")]
fn a_server_that_does_not_start_shows_its_log() {
    Redis::builder().arg("--nonsense", "1").start();
}

#[test]
#[should_panic(expected = "no port stays free")]
fn another_port_is_tried_when_one_is_taken() {
    let taken = Redis::start();
    Redis::builder().arg("--port", &taken.port().to_string()).start();
}

#[test]
fn a_port_is_ours_while_its_server_is_down() {
    let port = Port::free_for_cluster();
    for number in [port.number(), port.number() + 10_000] {
        let server = TcpListener::bind(("127.0.0.1", number)).unwrap();
        drop(server);
        let others: Vec<Port> = (0..100).map(|_| Port::free()).collect();
        assert!(others.iter().all(|other| other.number() != number));
    }
}

/// Not a test by itself: the owner of the servers of the next one.
#[test]
fn owner() {
    static SERVER: OnceLock<Redis> = OnceLock::new();
    let Some(how) = std::env::var_os(OWNER) else { return };
    let redis = SERVER.get_or_init(Redis::start);
    let other = Redis::start();
    other.pause();
    for redis in [redis, &other] {
        println!("\nserver {} {}", redis.pid(), redis.dir().display());
    }
    match how.to_str().unwrap() {
        "exit" => std::process::exit(0),
        "abort" => std::process::abort(),
        _ => std::thread::sleep(std::time::Duration::from_secs(600)),
    }
}

#[test]
fn servers_die_with_their_owner_however_it_dies() {
    for how in ["exit", "abort", "kill"] {
        let mut owner = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "owner", "--nocapture"])
            .env(OWNER, how)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(owner.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut servers = lines.filter_map(|line| {
            let (pid, dir) = line.strip_prefix("server ")?.split_once(' ')?;
            Some((pid.parse().unwrap(), dir.to_owned()))
        });
        let servers: [(u32, String); 2] = [servers.next().unwrap(), servers.next().unwrap()];
        owner.kill().unwrap();
        owner.wait().unwrap();
        for (pid, dir) in servers {
            until("the server and its directory are gone", || is_gone(pid) && !Path::new(&dir).exists());
        }
    }
}

#[test]
fn a_clock_is_stepped_and_keys_expire_by_it() {
    let redis = Redis::builder().stepped_clock().start();
    let seconds = || redis.call(&["TIME"]).array()[0].clone().int();
    let before = seconds();
    redis.call(&["SET", "x", "1", "EX", "60"]);
    redis.step_clock(3600);
    assert!((3600..3660).contains(&(seconds() - before)));
    until("the key has expired", || redis.call(&["GET", "x"]) == Reply::Nil);
    redis.step_clock(-3600);
    assert!(seconds() < before);
    redis.shift_clock(90_500_000_000);
    assert!((90..150).contains(&(seconds() - before)));
}
