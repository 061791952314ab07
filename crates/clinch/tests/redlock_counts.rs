//! `redlock://`: how many commands each thing costs on each server, as the servers count them.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::time::Duration;

use clinch::{Guard, Locks};
use clinch_testkit::{Proxy, Redis, vouch};
use tokio::task::JoinHandle;

mod common;

use common::{PATIENCE, lock, queue, release};

/// A TTL that nobody lives to see the end of, nor a renewal.
const LONG_TTL: Duration = Duration::from_secs(120);

/// Commands that one server has got, since the counts were reset.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    /// Claims, releases, renewals, and tokens that are written back.
    scripts: u64,
    /// Requests to be told of a key's next change.
    watches: u64,
    /// Leases that scripts have made longer: one for each claim that a command renews.
    renewed: u64,
}

impl Sent {
    fn of(server: &Redis) -> Sent {
        let stats = server.client().commandstats();
        let count = |command: &str| stats.get(command).copied().unwrap_or(0);
        Sent { scripts: count("evalsha"), watches: count("client|caching"), renewed: count("pexpire") }
    }

    fn requests(self) -> u64 {
        self.scripts + self.watches
    }
}

/// Three servers that vote at once. None restarts, so none need sync what it appends.
struct Servers(Vec<Redis>);

impl Servers {
    fn start() -> Servers {
        Servers(
            (0..3)
                .map(|_| Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always").start())
                .collect(),
        )
    }

    /// A client; `options` go into the URL.
    async fn connect(&self, options: &str) -> Locks {
        let hosts: Vec<String> = self.0.iter().map(|server| server.addr().to_string()).collect();
        let url = format!("redlock://{}?durable=on&max_ttl=24h{options}", hosts.join(","));
        vouch(&url, &self.0);
        clinch::connect(&url).await.unwrap().ttl(LONG_TTL).unwrap()
    }

    /// A client that has all its connections, for it has waited before.
    async fn connect_and_wait(&self) -> Locks {
        let locks = self.connect("").await;
        self.reset();
        let holder = lock(&locks, "before").await;
        let waiter = queue(&locks, "before");
        self.until("the waiter watches", |sent| sent.watches > 0).await;
        release(holder).await;
        release(waiter.await.unwrap()).await;
        self.until_quiet().await;
        locks
    }

    fn reset(&self) {
        for server in &self.0 {
            server.call(&["CONFIG", "RESETSTAT"]);
        }
    }

    fn sent(&self) -> Vec<Sent> {
        self.0.iter().map(Sent::of).collect()
    }

    /// The requests to all servers.
    fn requests(&self) -> u64 {
        self.sent().into_iter().map(Sent::requests).sum()
    }

    /// Waits until each server has got so much.
    async fn until(&self, what: &str, enough: impl Fn(Sent) -> bool) {
        let end = tokio::time::Instant::now() + PATIENCE;
        while !self.0.iter().all(|server| enough(Sent::of(server))) {
            assert!(tokio::time::Instant::now() < end, "not within {PATIENCE:?}: {what}: {:?}", self.sent());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until nothing is held, on none of the servers: nobody waits for the last answers to a release.
    async fn until_quiet(&self) {
        let end = tokio::time::Instant::now() + PATIENCE;
        let held = "local held = redis.call('KEYS', '*')
            return #held - #redis.call('KEYS', 'clinch:~*')";
        while self.0.iter().any(|server| server.call(&["EVAL", held, "0"]).int() > 0) {
            assert!(tokio::time::Instant::now() < end, "not within {PATIENCE:?}: all is released");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        // What looks counts too.
        self.reset();
    }
}

/// How many of the pairs of a claim and its release cost two commands on each server.
async fn lean_pairs(options: &str, pairs: usize) -> usize {
    let servers = Servers::start();
    let locks = servers.connect(options).await;
    // Whoever connects goes on once most servers are there: a slow one loads its scripts meanwhile.
    servers.reset();
    release(lock(&locks, "before").await).await;
    servers.until("all are connected", |sent| sent.scripts >= 2).await;
    let mut lean = 0;
    for turn in 0..pairs {
        servers.reset();
        let mutex = locks.mutex("job").unwrap();
        let guard = if turn % 2 == 0 {
            mutex.lock().await.unwrap()
        } else {
            mutex.try_lock().await.unwrap().unwrap()
        };
        release(guard).await;
        servers.until("a claim and its release", |sent| sent.scripts >= 2).await;
        let sent = servers.sent();
        assert!(sent.iter().all(|sent| sent.watches == 0 && sent.renewed == 0), "{sent:?}");
        for server in &servers.0 {
            let stats = server.client().commandstats();
            for other in ["eval", "script|load", "hello", "ping", "client|id", "client|kill"] {
                assert!(!stats.contains_key(other), "{other} was sent");
            }
        }
        lean += usize::from(sent.iter().all(|sent| sent.scripts == 2));
    }
    lean
}

/// A host that stands still for some milliseconds makes the servers disagree on a token, which is then written back; so a
/// part may cost more.
#[tokio::test]
async fn an_uncontended_lock_and_its_release_are_two_commands_on_each_server() {
    const PAIRS: usize = 60;
    for options in ["", "&fencing=off"] {
        let lean = lean_pairs(options, PAIRS).await;
        println!("{lean} of {PAIRS} pairs{options}");
        assert!(lean > PAIRS / 2, "only {lean} of {PAIRS} pairs{options}");
    }
}

#[tokio::test]
async fn renewals_of_many_locks_share_commands() {
    const LOCKS: u64 = 100;
    let servers = Servers::start();
    let locks = servers.connect("").await.ttl(Duration::from_secs(3)).unwrap();
    let mut taking = tokio::task::JoinSet::new();
    for number in 0..LOCKS {
        let locks = locks.clone();
        taking.spawn(async move { lock(&locks, &format!("job {number}")).await });
    }
    let guards = taking.join_all().await;
    servers.reset();
    servers.until("renewals", |sent| sent.renewed >= 5 * LOCKS).await;
    let sent = servers.sent();
    // They fall due over a tenth of the time between two renewals.
    assert!(sent.iter().all(|sent| sent.renewed >= 20 * sent.scripts), "{sent:?}");
    assert!(guards.iter().all(Guard::is_held));
}

/// Waiters on a lock that another holds and that does not change ask nothing; `far` is how they reach the servers. The renewals
/// of another lock are the clock: no speed of this host is judged.
async fn waiters_ask_nothing(servers: &Servers, far: &Locks) {
    for server in &servers.0 {
        server.call(&["SET", "clinch:job", "of another", "PX", "600000"]);
    }
    let waiters: Vec<_> = (0..8).map(|_| queue(far, "job")).collect();
    servers.until("the first watches", |sent| sent.watches > 0).await;
    let clock = servers.connect("").await.ttl(Duration::from_secs(1)).unwrap();
    let other = lock(&clock, "other").await;
    servers.until("the other is renewed", |sent| sent.renewed >= 3).await;
    servers.reset();
    servers.until("renewals", |sent| sent.renewed >= 9).await;
    let sent = servers.sent();
    assert!(sent.iter().all(|sent| sent.scripts == sent.renewed && sent.watches == 0), "{sent:?}");
    assert!(!waiters.iter().any(JoinHandle::is_finished) && other.is_held());
    waiters.iter().for_each(JoinHandle::abort);
}

#[tokio::test]
async fn waiters_on_a_lock_that_does_not_change_ask_nothing() {
    let servers = Servers::start();
    let far = servers.connect("").await;
    waiters_ask_nothing(&servers, &far).await;
}

#[tokio::test]
async fn nor_do_those_who_are_far_away() {
    let servers = Servers::start();
    let proxies: Vec<Proxy> = servers.0.iter().map(|server| Proxy::start(server.addr())).collect();
    proxies.iter().for_each(|proxy| proxy.delay(Duration::from_millis(35)));
    let hosts: Vec<String> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
    let url = format!("redlock://{}?durable=on&max_ttl=24h", hosts.join(","));
    vouch(&url, &servers.0);
    let far = clinch::connect(&url).await.unwrap().ttl(LONG_TTL).unwrap();
    waiters_ask_nothing(&servers, &far).await;
}

/// Two servers that may have forgotten locks are asked for no vote: the scripts that they run are words that are left there. Then
/// comes the third, with news for both.
#[tokio::test]
async fn tasks_that_come_together_leave_what_they_saw_once() {
    const WITNESSES: &str = "local key = redis.call('KEYS', 'clinch:~{voucher}:*')[1]
        return select(2, string.gsub(key and redis.call('GET', key) or '', '=%d+,', ''))";
    let servers = Servers((0..3).map(|_| Redis::start()).collect());
    servers.0[2].pause();
    let hosts: Vec<String> = servers.0.iter().map(|server| server.addr().to_string()).collect();
    let url = format!("redlock://{}?max_ttl=1h", hosts.join(","));
    let locks = clinch::connect(&url).await.unwrap();
    // What runs in the background looks for more from now on, once in a while: what tasks hand over comes at once.
    locks.mutex("job").unwrap().try_lock().await.expect_err("nobody has watched the servers");
    servers.0[2].resume();
    servers.reset();
    let known = || servers.0.iter().all(|server| server.call(&["EVAL", WITNESSES, "0"]).int() == 2);
    let end = tokio::time::Instant::now() + PATIENCE;
    while !known() {
        assert!(tokio::time::Instant::now() < end, "each has met the two others");
        let mut asking = tokio::task::JoinSet::new();
        for number in 0..64 {
            let mutex = locks.mutex(&number.to_string()).unwrap();
            asking.spawn(async move { mutex.try_lock().await.expect_err("nobody has watched the servers") });
        }
        asking.join_all().await;
    }
    let sent = servers.sent();
    // The third was met while it was asked.
    assert!(sent[..2].iter().all(|sent| sent.scripts <= 4), "{sent:?}");
}

/// A claim and a watch on each server.
#[tokio::test]
async fn a_renewal_costs_a_waiter_a_claim_and_a_watch() {
    const RENEWALS: u64 = 12;
    let servers = Servers::start();
    let near = servers.connect("").await.ttl(Duration::from_secs(1)).unwrap();
    let far = servers.connect_and_wait().await;
    let holder = lock(&near, "job").await;
    let waiter = queue(&far, "job");
    servers.until("the waiter watches", |sent| sent.watches > 0).await;
    servers.reset();
    servers.until("renewals", |sent| sent.renewed >= RENEWALS).await;
    let sent = servers.sent();
    let renewed: u64 = sent.iter().map(|sent| sent.renewed).sum();
    let asked = sent.iter().map(|sent| sent.requests()).sum::<u64>() - renewed;
    println!("{asked} requests for {renewed} renewals");
    // A renewal that reaches the servers one after the other may be told twice.
    assert!(2 * asked <= 5 * renewed, "{asked} requests for {renewed} renewals: {sent:?}");
    assert!(!waiter.is_finished() && holder.is_held());
    waiter.abort();
}

/// A claim of the waiter that is woken, and nothing else.
#[tokio::test]
async fn a_hand_over_to_the_only_waiter_costs_one_round() {
    const TURNS: usize = 15;
    let servers = Servers::start();
    let mut ours = (servers.connect_and_wait().await, servers.connect_and_wait().await);
    let mut holder = lock(&ours.0, "job").await;
    let mut requests = Vec::new();
    for _ in 0..TURNS {
        servers.until("it is held", |sent| sent.scripts > 0).await;
        servers.reset();
        let waiter = queue(&ours.1, "job");
        servers.until("the waiter watches", |sent| sent.watches > 0).await;
        servers.reset();
        release(holder).await;
        holder = waiter.await.unwrap();
        servers.until("a release and a claim", |sent| sent.scripts > 1).await;
        requests.push(servers.requests());
        std::mem::swap(&mut ours.0, &mut ours.1);
    }
    // A host that stands still for some milliseconds can have a message come twice.
    requests.sort_unstable();
    // A release and a claim on each.
    assert!(requests[TURNS / 2] <= 6, "requests for each of the hand-overs: {requests:?}");
    release(holder).await;
}

/// Requests to each server, on average, for each of so many hand-overs to waiters of one client: from their arrival to
/// their releases.
async fn cost(waiters: usize) -> f64 {
    const TURNS: usize = 64;
    let servers = Servers::start();
    let (near, far) = (servers.connect_and_wait().await, servers.connect_and_wait().await);
    let mut requests = 0;
    for _ in 0..TURNS / waiters {
        let holder = lock(&near, "job").await;
        servers.until("it is held", |sent| sent.scripts > 0).await;
        servers.reset();
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..waiters {
            let far = far.clone();
            waiting.spawn(async move { release(lock(&far, "job").await).await });
        }
        servers.until("the first watches", |sent| sent.watches > 0).await;
        release(holder).await;
        waiting.join_all().await;
        requests += servers.requests();
        servers.until_quiet().await;
    }
    requests as f64 / 3.0 / TURNS as f64
}

#[tokio::test]
async fn a_hand_over_in_a_crowd_of_one_client_costs_less_than_to_one_waiter() {
    let (alone, crowd) = (cost(1).await, cost(16).await);
    println!("{alone} requests to each server for one waiter, {crowd} for each of 16");
    // Who waits for a holder of the same client needs no server to tell it.
    assert!(crowd <= alone - 1.0, "{crowd} requests to each server for each of 16, {alone} for one");
}

/// A claim, and a watch of each that was refused, which leaves room for the votes that are split: who splits them tries
/// again.
#[tokio::test]
async fn a_release_costs_each_waiting_client_two_rounds() {
    const CLIENTS: u64 = 4;
    const TURNS: u64 = 20;
    let servers = Servers::start();
    let near = servers.connect_and_wait().await;
    let mut far = Vec::new();
    for _ in 0..CLIENTS {
        far.push(servers.connect_and_wait().await);
    }
    let mut requests = 0;
    for _ in 0..TURNS {
        let holder = lock(&near, "job").await;
        servers.reset();
        let waiters: Vec<_> = far.iter().map(|locks| queue(locks, "job")).collect();
        servers.until("all watch", |sent| sent.watches >= CLIENTS).await;
        servers.reset();
        release(holder).await;
        servers.until("the others watch again", |sent| sent.watches >= CLIENTS - 1).await;
        requests += servers.requests();
        // With its handle, the guard of the one that has it goes.
        waiters.into_iter().for_each(|waiter| waiter.abort());
        servers.until_quiet().await;
    }
    let releases = 3 * TURNS;
    let rounds = (requests - releases) as f64 / (releases * CLIENTS) as f64;
    println!("{rounds} rounds");
    // Two for each that loses, one for the winner: 1.75. With a release to whoever had not answered yet it was 2.
    assert!(rounds <= 1.9, "{rounds} rounds for each waiter that was woken");
}

/// One server has no vote for the holder, as one that came back empty. That is nothing to ask about again and again, nor is
/// that another waiter asks there.
#[tokio::test]
async fn waiters_on_a_lock_that_a_bare_majority_holds_do_not_poll() {
    let servers = Servers::start();
    for server in &servers.0[..2] {
        server.call(&["SET", "clinch:job", "of another", "PX", "600000"]);
    }
    let far = [servers.connect("").await, servers.connect("").await];
    let waiters = far.each_ref().map(|locks| queue(locks, "job"));
    servers.until("the waiters watch", |sent| sent.watches > 1).await;
    let clock = servers.connect("").await.ttl(Duration::from_secs(1)).unwrap();
    let other = lock(&clock, "other").await;
    servers.until("the other is renewed", |sent| sent.renewed >= 1).await;
    servers.reset();
    servers.until("renewals", |sent| sent.renewed >= 9).await;
    let sent = servers.sent();
    assert!(sent.iter().all(|sent| sent.requests() <= sent.renewed + 10), "{sent:?}");
    assert!(other.is_held());
    // It comes free on one of the two: a vote more is a quorum.
    servers.0[0].call(&["DEL", "clinch:job"]);
    let [one, two] = waiters;
    tokio::select! {
        guard = one => release(guard.unwrap()).await,
        guard = two => release(guard.unwrap()).await,
    }
}

/// One server has a vote to give, another a foreign holder, and the third no key and no vote: it is full. That is nothing to ask
/// about without a pause.
#[tokio::test]
async fn a_server_that_has_no_vote_to_give_does_not_have_a_waiter_poll() {
    let servers = Servers::start();
    let far = servers.connect_and_wait().await;
    let clock = servers.connect("").await.ttl(Duration::from_secs(1)).unwrap();
    let other = lock(&clock, "other").await;
    servers.until("the other is renewed", |sent| sent.renewed >= 1).await;
    servers.0[0].call(&["CONFIG", "SET", "maxmemory", "1"]);
    servers.0[1].call(&["SET", "clinch:job", "of another", "PX", "600000"]);
    servers.reset();
    let waiter = queue(&far, "job");
    servers.until("the waiter watches", |sent| sent.watches > 0).await;
    servers.reset();
    servers.until("renewals", |sent| sent.renewed >= 9).await;
    let sent = servers.sent();
    // A claim, its release and a watch, once a second.
    assert!(sent.iter().all(|sent| sent.requests() <= 4 * sent.renewed + 10), "{sent:?}");
    assert!(other.is_held() && !waiter.is_finished());
    servers.0[0].call(&["CONFIG", "SET", "maxmemory", "0"]);
    release(waiter.await.unwrap()).await;
}

/// Servers that give no vote tell nothing by it: who waits for them reads their clocks, without which nobody could say for how
/// long they go on so.
#[tokio::test]
async fn who_waits_for_servers_that_do_not_vote_goes_on_reading_their_clocks() {
    let servers = Servers((0..3).map(|_| Redis::start()).collect());
    let hosts: Vec<String> = servers.0.iter().map(|server| server.addr().to_string()).collect();
    let locks = clinch::connect(&format!("redlock://{}?max_ttl=1h", hosts.join(","))).await.unwrap();
    let waiter = queue(&locks, "job");
    let reads = |server: &Redis| server.client().commandstats().get("time").copied().unwrap_or(0);
    let end = tokio::time::Instant::now() + PATIENCE;
    servers.reset();
    while servers.0.iter().any(|server| reads(server) < 3) {
        assert!(tokio::time::Instant::now() < end, "nobody reads the clocks");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let sent = servers.sent();
    assert!(sent.iter().all(|sent| sent.requests() < 10) && !waiter.is_finished(), "{sent:?}");
    waiter.abort();
}

/// With an empty prefix all texts of the database are names that a lock could have.
#[tokio::test]
async fn a_list_without_a_prefix_looks_at_nothing_closely_but_locks() {
    const FOREIGN: usize = 2000;
    let servers = Servers::start();
    let locks = servers.connect("&prefix=").await;
    let guard = lock(&locks, "job").await;
    let fill = "for i = 1, tonumber(ARGV[1]) do redis.call('SET', 'page:' .. i, string.rep('x', 40)) end";
    for server in &servers.0 {
        server.call(&["EVAL", fill, "0", &FOREIGN.to_string()]);
        server.call(&["SET", "foreign", "of redis-py", "PX", "600000"]);
    }
    servers.reset();
    let listed = locks.list("").await.unwrap();
    assert!(listed.len() == 1 && listed[0].name.as_str() == "job", "{listed:?}");
    for server in &servers.0 {
        let stats = server.client().commandstats();
        assert!(stats["getrange"] >= FOREIGN as u64, "{stats:?}");
        assert!(stats.get("pttl").is_none_or(|looks| *looks < 5), "{stats:?}");
    }
    // One that hangs is not waited for until all its keys could have been gone through.
    servers.0[2].pause();
    let listed = tokio::time::timeout(PATIENCE / 2, locks.list("")).await.expect("a minority hangs").unwrap();
    assert_eq!(listed.len(), 1);
    servers.0[2].resume();
    release(guard).await;
}
