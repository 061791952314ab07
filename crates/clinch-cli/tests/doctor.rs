//! `clinch doctor`: what it says of stores that are well, that are not, and that are not there.

#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::Read as _;
use std::process::Command;
use std::time::Duration;

use clinch_testkit::{Cluster, Etcd, EtcdCluster, Proxy, Redis, RedisBuilder, Sentinel, vouch};
use common::{World, eventually};
use serde_json::Value;

/// A password that must not show anywhere.
const SECRET: &str = "hunter2";

/// What was said, and the exit code.
struct Said(i32, Value);

impl Said {
    fn by(mut command: Command) -> Said {
        let output = command.output().unwrap();
        let text = format!("{output:?}");
        assert!(!text.contains(SECRET), "{text}");
        let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {text}"));
        Said(output.status.code().unwrap(), report)
    }

    fn of(url: impl Into<String>) -> Said {
        Said::by(World::on(url.into()).clinch(["doctor", "--json"]))
    }

    /// The checks of this name, as `verdict: seen; remedy`.
    fn all(&self, what: &str) -> Vec<String> {
        let checks = self.1["checks"].as_array().unwrap().iter().filter(|check| check["what"] == what);
        let text = |check: &Value, field: &str| check[field].as_str().unwrap_or_default().to_owned();
        checks.map(|check| ["verdict", "seen", "remedy"].map(|field| text(check, field)).join(": ")).collect()
    }

    /// The check of this name.
    fn one(&self, what: &str) -> String {
        let [one] = self.all(what).try_into().unwrap_or_else(|all| panic!("{what}: {all:?} in {}", self.1));
        one
    }

    /// Checks the exit code, and that what does not pass is this, and has a remedy.
    #[track_caller]
    fn ends(&self, code: i32, not_well: &[&str]) {
        let checks = self.1["checks"].as_array().unwrap();
        let mut not = checks.iter().filter(|check| check["verdict"] != "pass").collect::<Vec<_>>();
        assert!(
            not.iter().all(|check| check["remedy"].as_str().is_some_and(|text| !text.is_empty())),
            "{not:?}"
        );
        not.dedup_by_key(|check| check["what"].clone());
        let named: Vec<&str> = not.iter().map(|check| check["what"].as_str().unwrap()).collect();
        assert_eq!((self.0, named), (code, not_well.to_vec()), "{:#}", self.1);
        assert_eq!(self.1["v"], 1);
        assert_eq!(self.1["verdict"], ["pass", "warn", "fail"][usize::try_from(code).unwrap()]);
    }
}

/// A server that keeps what it acknowledged.
fn durable() -> RedisBuilder {
    Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always")
}

#[test]
fn a_directory_that_is_well_is_told_in_one_line_for_each_check() {
    let world = World::on_disk();
    let said = Said::by(world.clinch(["doctor", "--json"]));
    said.ends(0, &[]);
    assert!(said.one("url").contains(world.path("store").to_str().unwrap()), "{}", said.1);
    assert!(said.one("directory").contains("mode 0700") && said.one("users").contains("are refused"));
    let positive = |part: &str, field: &str| assert!(said.1[part][field].as_u64().unwrap() > 0, "{field}");
    for field in ["acquire_us", "renew_us", "release_us"] {
        positive("lock", field);
    }
    assert_eq!((&said.1["round_trip"]["calls"], &said.1["capabilities"]["fifo"]), (&50.into(), &true.into()));
    assert!(said.1["round_trip"]["p50_us"].as_u64() <= said.1["round_trip"]["p99_us"].as_u64());
    let lines = String::from_utf8(world.output(["doctor"]).stdout).unwrap();
    assert_eq!(lines.lines().count(), said.1["checks"].as_array().unwrap().len(), "{lines}");
    assert!(lines.lines().all(|line| line.starts_with("pass  ")), "{lines}");
    assert_eq!(world.list(), Vec::<Value>::new(), "nothing is left");
}

/// Tokens and `--once-per` must outlast a reboot.
#[test]
fn a_directory_that_a_reboot_empties_is_told() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let said = Said::of(format!("file://{}", dir.path().display()));
    said.ends(1, &["file-system"]);
    assert!(said.one("file-system").contains("tmpfs, which a reboot empties"), "{}", said.1);
}

/// A store that the command line names is looked at, and not that of the environment.
#[test]
fn a_url_on_the_command_line_counts() {
    let (world, other) = (World::new(), World::new());
    let said = Said::by(world.clinch(["doctor", "--json", &other.url()]));
    assert!(said.one("url").contains(other.path("store").to_str().unwrap()), "{}", said.1);
    for url in
        ["redis", "nosuch://h", "redis://h?nonsense=1", "file:///tmp?ttl=1ns", "memory://?require=wings"]
    {
        assert_eq!(world.code(["doctor", url]), 64, "{url}");
    }
}

/// Where earlier versions went by XDG_STATE_HOME, jobs of both would run side by side, and no lock ever tells.
#[test]
fn a_default_directory_is_told_and_so_is_an_earlier_one_in_use() {
    let world = World::new();
    let doctor = |xdg: Option<&str>| {
        // As a user who is not root, and of whom the host knows no home.
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-user=54321", "--map-group=54321", env!("CARGO_BIN_EXE_clinch")]);
        command.args(["doctor", "--json"]).env("HOME", world.path("home")).env_remove("XDG_STATE_HOME");
        command.env_remove("CLINCH_URL").envs(xdg.map(|dir| ("XDG_STATE_HOME", world.path(dir))));
        Said::by(command)
    };
    let of_cron = doctor(None);
    assert!(of_cron.one("url").contains("home/.local/state/clinch (the default"), "{}", of_cron.1);
    assert!(of_cron.one("users").contains("other users have other directories"), "{}", of_cron.1);
    assert!(
        of_cron.one("others").contains("other default director")
            || of_cron.one("others").contains("also in use")
    );
    std::fs::create_dir_all(world.path("xdg/clinch")).unwrap();
    world.write("xdg/clinch/x.lock", "");
    let ours = doctor(Some("xdg"));
    ours.ends(2, &["directory"]);
    assert!(
        ours.one("directory").contains("xdg/clinch") && ours.one("directory").contains("CLINCH_URL="),
        "{}",
        ours.1
    );
}

/// A server that stops in the middle passes what it answered some of.
#[test]
fn a_server_that_stops_between_two_answers_is_told() {
    let redis = durable().start();
    let proxy = Proxy::start(redis.addr());
    // So that there is time to stop it between them.
    proxy.delay(Duration::from_millis(30));
    let world = World::on(format!("redis://{}", proxy.addr()));
    let mut doctor = world.start(["doctor", "--json"]);
    let mut server = redis.client();
    let mut reads = || server.commandstats().get("evalsha").copied().unwrap_or_default();
    eventually("it reads", || reads() >= 15);
    redis.pause();
    let code = doctor.code();
    redis.resume();
    let mut text = String::new();
    doctor.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let said = Said(code, serde_json::from_str(&text).unwrap());
    said.ends(2, &["round-trip", "lock"]);
    assert_eq!(said.1["round_trip"], Value::Null);
}

/// A slash too many before the password, and it is taken for a part of the path that every message names.
#[test]
fn a_password_in_the_path_of_a_socket_is_not_shown() {
    for rest in [
        format!("/:{SECRET}@/run/redis.sock"),
        format!("/me:{SECRET}@/run/redis.sock"),
        format!("//me:{SECRET}@localhost/run/redis.sock"),
        format!("me@/:{SECRET}@/run/redis.sock"),
    ] {
        let world = World::on(format!("redis+unix://{rest}"));
        for verb in [&["ls"][..], &["run", "x", "true"], &["doctor"], &["doctor", "--json"]] {
            let output = world.output(verb.iter().copied());
            let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
            assert!(!said.contains(SECRET) && said.contains("before the path"), "{rest}: {said}");
            assert_eq!(output.status.code(), Some(64), "{rest}: {said}");
        }
    }
    // One that is meant.
    let world = World::on("redis+unix:///nowhere/a:b%40c.sock".to_owned());
    let output = world.output(["ls"]);
    assert_eq!(output.status.code(), Some(69), "{output:?}");
}

/// Two jobs with a store of their own each run side by side, and nothing tells.
#[test]
fn a_store_that_no_other_process_sees_is_refused() {
    let world = World::on("memory://".to_owned());
    for verb in ["run", "acquire"] {
        let output =
            world.output([verb, "x", "touch", "ran"].into_iter().take(if verb == "run" { 4 } else { 2 }));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains("exclude nobody") && said.contains("file://"), "{said}");
    }
    assert!(!world.path("ran").exists());
    let said = Said::of("memory://");
    said.ends(2, &["connect"]);
    assert!(said.one("connect").contains("exclude nobody"), "{}", said.1);
}

/// Where a user has no home, nothing is told of the store.
#[test]
fn a_user_without_a_home_gets_a_report() {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-user=54321", "--map-group=54321", env!("CARGO_BIN_EXE_clinch")]);
    command
        .args(["doctor", "--json"])
        .env_remove("HOME")
        .env_remove("XDG_STATE_HOME")
        .env_remove("CLINCH_URL");
    let said = Said::by(command);
    said.ends(2, &["directory"]);
    assert!(said.one("directory").contains("name the lock directory"), "{}", said.1);
}

#[test]
fn a_directory_that_is_refused_says_what_to_do() {
    use std::os::unix::fs::PermissionsExt as _;
    let world = World::new();
    std::fs::create_dir(world.path("store")).unwrap();
    std::fs::set_permissions(world.path("store"), std::fs::Permissions::from_mode(0o777)).unwrap();
    let said = Said::by(world.clinch(["doctor", "--json"]));
    said.ends(2, &["directory"]);
    assert!(said.one("directory").contains("run chmod go-w on it"), "{}", said.1);
}

#[test]
fn a_server_that_is_well_is_told_so_and_nothing_is_left_there() {
    let redis = durable().password(SECRET).start();
    let said = Said::of(redis.url());
    said.ends(0, &[]);
    for what in ["reach", "version", "role", "eviction", "persistence", "replicas", "clock", "rights", "lock"]
    {
        said.one(what);
    }
    assert!(said.1["checks"].as_array().unwrap().iter().any(|check| check["at"] == redis.addr().to_string()));
    // What a lock leaves: its token.
    let keys: Vec<String> = redis.call(&["KEYS", "*"]).array().into_iter().map(|key| key.text()).collect();
    assert!(keys.iter().all(|key| key.ends_with(":fence")), "{keys:?}");
}

#[test]
fn what_a_server_may_lose_is_told() {
    let forgetful = Redis::start();
    Said::of(forgetful.url()).ends(1, &["persistence"]);
    let rewriting = durable().arg("--no-appendfsync-on-rewrite", "yes").start();
    let persistence = Said::of(rewriting.url()).one("persistence");
    assert!(persistence.contains("appendfsync always, but not while"), "{persistence}");
    let evicting = durable().arg("--maxmemory", "100mb").arg("--maxmemory-policy", "allkeys-lru").start();
    let said = Said::of(evicting.url());
    said.ends(2, &["eviction"]);
    let eviction = said.one("eviction");
    assert!(eviction.contains("allkeys-lru") && eviction.contains("noeviction"), "{eviction}");
    Said::of(format!("{}?eviction=allow", evicting.url())).ends(1, &["eviction"]);
    let replica = durable().replica_of(&evicting).start();
    let said = Said::of(replica.url());
    assert!(said.one("role").starts_with("fail: this server is a replica") && said.0 == 2, "{}", said.1);
    Said::of(format!("{}?wait_replicas=2&eviction=allow", evicting.url()))
        .ends(2, &["eviction", "replicas", "lock"]);
}

/// The rules of the user in the documentation.
fn rules() -> Vec<&'static str> {
    let docs = include_str!("../../clinch/src/backends/redis.rs");
    let (_, line) = docs.split_once("//! user clinch on >PASSWORD").expect("it has an ACL line");
    let (line, _) = line.split_once("//! ```").unwrap();
    line.split_whitespace().filter(|word| *word != "//!").collect()
}

/// The URL of a user with these rules.
fn user(redis: &Redis, rules: &[&str]) -> String {
    let password = format!(">{SECRET}");
    redis.call(&[&["ACL", "SETUSER", "clinch", "reset", "on", &password], rules].concat());
    redis.url_as("clinch", SECRET)
}

/// An operator who has forgotten one right hears which.
#[test]
fn each_right_that_is_lacking_is_named() {
    let redis = durable().start();
    let rules = rules();
    Said::of(user(&redis, &rules)).ends(0, &[]);
    let worse = ["publish", "subscribe", "client|tracking", "client|caching", "mget", "scan", "ping", "info"];
    for without in rules.iter().filter_map(|rule| rule.strip_prefix('+')) {
        let fewer: Vec<&str> =
            rules.iter().copied().filter(|rule| rule.strip_prefix('+') != Some(without)).collect();
        let said = Said::of(user(&redis, &fewer));
        let rights = said.one("rights");
        let (verdict, code) = if worse.contains(&without) { ("warn", 1) } else { ("fail", 2) };
        assert!(rights.starts_with(&format!("{verdict}: this user lacks +{without}")), "{without}: {rights}");
        assert!(
            rights.ends_with(": give this user these rights by ACL SETUSER") && said.0 == code,
            "{without}: {rights}"
        );
    }
    let replaced = |rule: &str, by: &str| {
        let rules = rules.iter().map(|known| if *known == rule { by } else { known }).collect::<Vec<_>>();
        Said::of(user(&redis, &rules)).one("rights")
    };
    let keys = replaced("~clinch:*", "~clinch:~*");
    assert!(keys.starts_with("fail: this user lacks ~clinch:*: "), "{keys}");
    let keys = replaced("~clinch:*", "~clinch:n*");
    assert!(
        ["~clinch:*", "~clinch:~{???}:*:clinch:*", "~clinch:~{???}:fence"]
            .iter()
            .all(|key| keys.contains(key)),
        "{keys}"
    );
    let channels = replaced("&clinch:*", "&other:*");
    assert!(channels.starts_with("warn: this user lacks &clinch:~{*: waiters ask"), "{channels}");
}

/// What cannot be reached is told with the step that failed.
#[test]
fn the_step_that_fails_is_named() {
    let (plain, locked) = (Redis::start(), durable().password(SECRET).start());
    let tls = Redis::builder().tls().start();
    let web = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let web_at = web.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in web.incoming().flatten() {
            use std::io::{Read as _, Write as _};
            let _ = (&stream).read(&mut [0; 1024]);
            let _ = (&stream).write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
        }
    });
    let down = Redis::start();
    down.kill();
    for (url, step, words) in [
        (down.url(), "tcp", "nothing listens there"),
        ("redis://no.such.host.invalid".into(), "name", "mend the host"),
        (format!("redis+unix://{}/none", down.dir().display()), "socket", "name the socket"),
        (locked.url_as("clinch", &format!("{SECRET}x")), "auth", "look at user and password in the URL"),
        (format!("redis://{}", locked.addr()), "auth", "user and password in the URL"),
        (format!("rediss://{}", plain.addr()), "tls", "TLS"),
        (format!("rediss://{}", tls.addr()), "tls", "ca= names the authority"),
        (format!("redis://{}", tls.addr()), "server", "rediss://"),
        (format!("redis://{web_at}"), "server", "is that a Redis"),
        (format!("etcd://{web_at}"), "server", "is that an etcd"),
        (format!("etcd://{}", plain.addr()), "server", "is that an etcd"),
        (format!("etcd://{}", down.addr()), "tcp", "nothing listens there"),
    ] {
        let said = Said::of(&url);
        said.ends(2, &[step]);
        assert!(said.one(step).contains(words), "{url}: {}", said.one(step));
        assert_eq!((&said.1["lock"], &said.1["round_trip"]), (&Value::Null, &Value::Null), "{url}");
    }
    assert!(Said::of(tls.url()).one("reach").starts_with("pass"));
}

#[test]
fn a_server_whose_clock_is_off_is_told() {
    let redis = durable().stepped_clock().start();
    redis.step_clock(-7200);
    let said = Said::of(redis.url());
    said.ends(1, &["clock"]);
    assert!(
        said.one("clock").starts_with("warn: 1h 59m 59s behind ours")
            || said.one("clock").starts_with("warn: 2h "),
        "{}",
        said.1
    );
}

fn redlock(servers: &[Redis], query: &str) -> String {
    let hosts: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
    format!("redlock://{}?{query}", hosts.join(","))
}

#[test]
fn a_server_that_does_not_vote_yet_says_when_it_will() {
    let servers: Vec<Redis> = (0..3).map(|_| durable().start()).collect();
    let said = Said::of(redlock(&servers, ""));
    said.ends(2, &["vote", "quorum", "lock"]);
    let votes = said.all("vote");
    let soon = |vote: &String| vote.starts_with("warn: its vote counts in 3") && vote.contains("wait for 3");
    assert!(votes.len() == 3 && votes.iter().all(soon), "{votes:?}");
    assert!(said.one("quorum").starts_with("warn: 0 of 3 servers vote, 2 are needed"), "{}", said.1);
    assert!(said.1["lock"].is_null());

    let url = redlock(&servers, "durable=on&max_ttl=24h");
    vouch(&url, &servers);
    Said::of(&url).ends(0, &[]);
    servers[0].kill();
    let said = Said::of(&url);
    said.ends(1, &["tcp", "quorum"]);
    servers[1].kill();
    let said = Said::of(&url);
    assert!(said.0 == 2 && said.one("quorum").starts_with("fail: "), "{}", said.1);
}

#[test]
fn what_a_quorum_cannot_rest_on_is_told() {
    let rewriting = durable().arg("--no-appendfsync-on-rewrite", "yes").start();
    let servers = [durable().start(), durable().start(), rewriting];
    let said = Said::of(redlock(&servers, "durable=on&max_ttl=24h"));
    let told = |one: &String| !one.starts_with("pass: ") && one.contains("no-appendfsync-on-rewrite no");
    assert!(said.all("persistence").iter().any(told), "{}", said.1);
    let [one, other, _] = servers;
    let servers = [one, other, Redis::start()];
    let url = redlock(&servers, "durable=on&max_ttl=24h");
    vouch(&url, &servers);
    let said = Said::of(&url);
    assert!(said.all("persistence").iter().any(|one| one.contains("set appendonly yes")), "{}", said.1);
    assert_eq!(said.0, 1, "two are enough: {}", said.1);
    let rules = rules();
    for server in &servers[..2] {
        user(server, &rules.iter().copied().filter(|rule| *rule != "+getset").collect::<Vec<_>>());
    }
    let said = Said::of(
        url.replace("127.", &format!("clinch:{SECRET}@127."))
            .replace("max_ttl=24h", "max_ttl=24h&prefix=clinch:"),
    );
    assert!(
        said.all("rights").iter().any(|rights| rights.starts_with("fail: this user lacks +getset +get: ")),
        "{}",
        said.1
    );
}

#[test]
fn the_members_of_an_etcd_are_told_apart() {
    let etcd = EtcdCluster::start();
    let said = Said::of(etcd.url());
    // Debian's has a leader that may wake.
    said.ends(1, &["version"]);
    let mut roles = said.all("role");
    roles.sort();
    assert_eq!(roles, ["pass: follower: ", "pass: follower: ", "pass: leader: "]);
    assert!(said.one("rights").starts_with("pass: read and write on"), "{}", said.1);
    etcd.follower().kill();
    let said = Said::of(etcd.url());
    assert!(said.one("tcp").starts_with("warn: ") && said.0 == 1, "others serve: {}", said.1);
    let left: Vec<_> =
        etcd.members().iter().filter(|member| !member.url().is_empty() && member.is_leader()).collect();
    let last = left[0].url();
    for member in etcd.members().iter().filter(|member| member.url() != last) {
        member.kill();
    }
    eventually("it has no leader", || {
        Said::of(&last).all("role").iter().any(|role| role.starts_with("fail: "))
    });
}

#[test]
fn an_etcd_that_is_full_or_refuses_us_is_told() {
    let full = Etcd::builder().arg("--quota-backend-bytes", "200000").start();
    let big = "x".repeat(100_000);
    eventually("it is full", || full.try_ctl(&["put", "big", &big]).is_err());
    let said = Said::of(full.url());
    assert!(
        said.one("alarm").starts_with("fail: ") && said.one("alarm").contains("NOSPACE") && said.0 == 2,
        "{}",
        said.1
    );
    let guarded = Etcd::builder().root_password(SECRET).start();
    let said = Said::of(guarded.url_as("nobody", SECRET));
    assert!(
        said.one("rights").starts_with("fail: ") && said.one("rights").contains("user and password"),
        "{}",
        said.1
    );
    assert!(Said::of(guarded.url()).one("rights").starts_with("pass"));
}

#[test]
fn all_servers_of_a_sentinel_and_of_a_cluster_are_looked_at() {
    let sentinel = Sentinel::start();
    let said = Said::of(sentinel.url());
    said.ends(1, &["persistence"]);
    assert!(said.all("sentinel").len() > 1 && said.one("role").contains("master"), "{}", said.1);
    let cluster = Cluster::start();
    let said = Said::of(cluster.url());
    said.ends(1, &["persistence"]);
    // Without the rights to the channels of slots all waiters ask again and again.
    let login = cluster.url().replace("://", &format!("://clinch:{SECRET}@"));
    let more = ["+cluster|slots", "+asking", "+spublish", "+ssubscribe"];
    for lacking in ["", "+spublish", "+ssubscribe"] {
        let rules: Vec<&str> = rules().into_iter().chain(more).filter(|rule| *rule != lacking).collect();
        cluster.nodes().iter().for_each(|node| drop(user(node, &rules)));
        let rights = Said::of(login.as_str()).all("rights");
        let as_it_is = |right: &String| match lacking {
            "" => right.starts_with("pass: "),
            lacking => right.starts_with("warn: ") && right.contains(&format!("lacks {lacking}:")),
        };
        assert!(!rights.is_empty() && rights.iter().all(as_it_is), "{lacking}: {rights:?}");
    }
    let masters = said.all("role").iter().filter(|role| role.contains("master")).count();
    assert_eq!(masters, cluster.masters().len(), "{}", said.1);
}
