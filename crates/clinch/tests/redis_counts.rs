//! `redis://`: how many commands each thing costs, as the server sees it.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::time::Duration;

use clinch::{Guard, Locks};
use clinch_testkit::{Redis, Reply, Resp};

mod common;

use common::{PATIENCE, lock, queue};

/// A TTL that nobody lives to see the end of, nor a renewal.
const LONG_TTL: Duration = Duration::from_secs(120);

/// A command that a client sent.
#[derive(Debug)]
struct Sent {
    /// When the server read it, in seconds.
    at: f64,
    /// The address of the connection that it came on.
    by: String,
    words: Vec<String>,
}

impl Sent {
    /// How many claims it renews, if that is what it does.
    fn renewed(&self) -> Option<usize> {
        let keys: usize = self.words.get(2)?.parse().ok()?;
        let arguments = self.words.get(3 + keys..)?;
        // Of many locks, or of one lock: then the first argument is that of every script.
        let pairs = if arguments.len() == 2 * keys { arguments } else { arguments.get(1..)? };
        let is_pair =
            |pair: &[String]| pair.len() == 2 && pair[0].len() == 32 && pair[1].parse::<u64>().is_ok();
        (!pairs.is_empty() && pairs.chunks(2).all(is_pair)).then_some(pairs.len() / 2)
    }

    /// At how many held locks it looks, if that is what it does.
    fn watched(&self) -> Option<usize> {
        let (command, keys) = self.words.split_first()?;
        (command == "MGET").then_some(keys.len())
    }
}

/// Reads what clients send, but for the calls of scripts and for those of this test, which come by the Unix socket.
struct Monitor {
    tap: Resp,
    marker: Resp,
    marks: u32,
}

impl Monitor {
    fn start(redis: &Redis) -> Monitor {
        let mut tap = redis.client();
        tap.call(&["MONITOR"]);
        Monitor { tap, marker: redis.client(), marks: 0 }
    }

    /// What was sent since the last look.
    fn take(&mut self) -> Vec<Sent> {
        self.marks += 1;
        let mark = format!("mark-{}", self.marks);
        self.marker.call(&["ECHO", &mark]);
        let mut all = Vec::new();
        loop {
            let line = self.tap.receive().unwrap().text();
            if line.ends_with(&format!("\"{mark}\"")) {
                return all;
            }
            let (at, rest) = line.split_once(" [").unwrap();
            let (by, words) = rest.split_once("] ").unwrap();
            let by = by.split_once(' ').unwrap().1;
            if by.starts_with("127.0.0.1:") {
                let words = words.trim_matches('"').split("\" \"").map(str::to_owned).collect();
                all.push(Sent { at: at.parse().unwrap(), by: by.to_owned(), words });
            }
        }
    }
}

fn names(sent: &[Sent]) -> Vec<String> {
    sent.iter().map(|sent| sent.words[0].to_lowercase()).collect()
}

async fn connect(redis: &Redis) -> Locks {
    clinch::connect(&redis.url()).await.unwrap().ttl(LONG_TTL).unwrap()
}

/// Waits until a number that the server tells is so large.
async fn sees(redis: &Redis, what: &str, script: &str, count: i64) {
    let mut client = redis.client();
    let end = tokio::time::Instant::now() + PATIENCE;
    while client.call(&["EVAL", script, "0"]).int() < count {
        assert!(tokio::time::Instant::now() < end, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until so many waiters, over all locks, are queued.
async fn sees_waiters(redis: &Redis, count: usize) {
    let script = "local all = 0
        for _, key in ipairs(redis.call('KEYS', '*queue:*')) do all = all + redis.call('LLEN', key) end
        return all";
    sees(redis, "the waiters wait", script, i64::try_from(count).unwrap()).await;
}

#[tokio::test]
async fn an_uncontended_lock_and_its_release_are_two_commands() {
    let redis = Redis::start();
    let locks = connect(&redis).await;
    let pairs = async || {
        lock(&locks, "job").await.release().await.unwrap();
        locks.mutex("job").unwrap().try_lock().await.unwrap().unwrap().release().await.unwrap();
        locks.rwlock("index").unwrap().read().await.unwrap().release().await.unwrap();
        locks.semaphore("gpu", 2).unwrap().acquire(1).unwrap().await.unwrap().release().await.unwrap();
    };
    // Loads the scripts.
    pairs().await;
    redis.call(&["CONFIG", "RESETSTAT"]);
    let mut monitor = Monitor::start(&redis);
    pairs().await;
    assert_eq!(names(&monitor.take()), ["evalsha"; 8]);
    let stats = redis.client().commandstats();
    assert_eq!(stats["evalsha"], 8);
    for other in ["script|load", "eval", "ping", "subscribe", "wait", "role", "get"] {
        assert!(!stats.contains_key(other), "{other} was sent");
    }
}

#[tokio::test]
async fn a_step_of_a_holder_is_one_command() {
    let redis = Redis::start();
    let locks = connect(&redis).await;
    let steps = async || {
        let guard = locks.rwlock("job").unwrap().write().await.unwrap();
        guard.verify().await.unwrap();
        guard.extend(LONG_TTL).await.unwrap();
        assert!(locks.mutex("job").unwrap().try_lock().await.unwrap().is_none());
        guard.downgrade().await.unwrap().release().await.unwrap();
    };
    steps().await;
    let mut monitor = Monitor::start(&redis);
    steps().await;
    assert_eq!(names(&monitor.take()), ["evalsha"; 6]);
}

/// A client whose inbox is open, for it has waited before.
async fn connect_and_wait(redis: &Redis) -> Locks {
    let locks = connect(redis).await;
    let holder = lock(&locks, "before").await;
    let waiter = queue(&locks, "before");
    let listens = "local key = redis.call('KEYS', '*claims:clinch:before')[1]
        for _, record in ipairs(key and redis.call('HVALS', key) or {}) do
          if string.find(record, '^w x %d+ %d+ %d+ %x') then return 1 end
        end
        return 0";
    sees(redis, "the waiter listens", listens, 1).await;
    holder.release().await.unwrap();
    waiter.await.unwrap().release().await.unwrap();
    locks
}

#[tokio::test]
async fn waiting_for_a_hand_over_and_releasing_are_two_commands() {
    let redis = Redis::start();
    let (near, far) = (connect_and_wait(&redis).await, connect_and_wait(&redis).await);
    let holder = lock(&near, "job").await;
    let mut monitor = Monitor::start(&redis);
    let waiter = queue(&far, "job");
    sees_waiters(&redis, 1).await;
    // It has had the time for more, if more is what it does.
    far.mutex("other").unwrap().try_lock().await.unwrap().unwrap().release().await.unwrap();
    holder.release().await.unwrap();
    waiter.await.unwrap().release().await.unwrap();
    assert_eq!(
        names(&monitor.take()),
        ["evalsha"; 5],
        "one of the holder, two of the waiter, two in between"
    );
}

/// Lets so many tasks of so many clients take one lock so many times each; answers the commands per acquisition.
async fn commands_per_acquisition(clients: usize, tasks: usize, turns: usize) -> f64 {
    let redis = Redis::start();
    let mut all = Vec::new();
    for _ in 0..clients {
        all.push(connect_and_wait(&redis).await);
    }
    let first = lock(&all[0], "job").await;
    let mut monitor = Monitor::start(&redis);
    let mut load = tokio::task::JoinSet::new();
    for task in 0..tasks {
        let locks = all[task % clients].clone();
        load.spawn(async move {
            for _ in 0..turns {
                assert!(lock(&locks, "job").await.release().await.is_ok());
            }
        });
    }
    sees_waiters(&redis, tasks).await;
    first.release().await.unwrap();
    while let Some(done) = load.join_next().await {
        done.unwrap();
    }
    // All but the first one's release.
    let commands = monitor.take().iter().filter(|sent| sent.words[0] != "PING").count() - 1;
    commands as f64 / (tasks * turns) as f64
}

#[tokio::test]
async fn a_hand_over_between_many_waiters_costs_three_commands_at_most() {
    for (clients, tasks, turns) in [(1, 64, 8), (8, 64, 8)] {
        let commands = commands_per_acquisition(clients, tasks, turns).await;
        assert!(commands <= 3.0, "{commands} with {clients} clients and {tasks} waiters");
    }
}

#[tokio::test]
async fn a_thousand_waiters_cost_three_commands_each_at_most() {
    let commands = commands_per_acquisition(1, 1000, 1).await;
    assert!(commands <= 3.0, "{commands}");
}

/// Nobody would be let in for ages after the death of a holder whose lease is longer than it asked for.
#[tokio::test]
async fn a_try_is_granted_for_its_ttl_and_no_longer() {
    let redis = Redis::start();
    let locks = connect(&redis).await;
    let limit = i64::try_from(LONG_TTL.as_millis()).unwrap();
    let is_bounded = || (1..=limit).contains(&redis.call(&["PTTL", "clinch:job"]).int());
    let lock = locks.rwlock("job").unwrap();
    let reader = lock.try_read().await.unwrap().unwrap();
    assert!(is_bounded(), "a reader");
    reader.release().await.unwrap();
    // As a claim that was released in doubt leaves behind.
    let home = redis.call(&["KEYS", "*fence"]).array().remove(0).text().replace("fence", "claims:clinch:job");
    redis.call(&["HSET", &home, "00", "x 9999999999999"]);
    redis.call(&["PEXPIRE", &home, "60000"]);
    let writer = lock.try_write().await.unwrap().unwrap();
    assert!(is_bounded(), "a writer");
    writer.release().await.unwrap();
}

/// Waits until so many renewals were sent; all that was sent until then.
async fn renewals(monitor: &mut Monitor, count: usize) -> Vec<Sent> {
    let mut all: Vec<Sent> = Vec::new();
    let end = tokio::time::Instant::now() + PATIENCE;
    while sizes(&all).iter().sum::<usize>() < count {
        assert!(
            tokio::time::Instant::now() < end,
            "not within {PATIENCE:?}: {count} renewals, only {:?}",
            sizes(&all)
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
        all.extend(monitor.take());
    }
    all
}

/// How many claims each command renews.
fn sizes(sent: &[Sent]) -> Vec<usize> {
    sent.iter().filter_map(Sent::renewed).collect()
}

#[tokio::test]
async fn renewals_of_many_locks_share_commands_and_are_not_told_back() {
    const LOCKS: usize = 500;
    let redis = Redis::start();
    let locks = connect(&redis).await.ttl(Duration::from_secs(9)).unwrap();
    let mut taking = tokio::task::JoinSet::new();
    for number in 0..LOCKS {
        let locks = locks.clone();
        taking.spawn(async move { lock(&locks, &format!("job {number}")).await });
    }
    let guards = taking.join_all().await;
    // Loads the script.
    guards[0].extend(Duration::from_secs(9)).await.unwrap();
    let watched = "return tonumber(string.match(redis.call('INFO', 'stats'), 'tracking_total_keys:(%d+)'))";
    sees(&redis, "all are watched", watched, i64::try_from(LOCKS).unwrap()).await;
    let mut monitor = Monitor::start(&redis);
    let mut sent = renewals(&mut monitor, 2 * LOCKS).await;
    // The last of the first looks, perhaps.
    sent.drain(..sent.iter().position(|sent| sent.renewed().is_some()).unwrap());
    let sizes = sizes(&sent);
    let renewed: usize = sizes.iter().sum();
    assert!(renewed >= 50 * sizes.len(), "{sizes:?}");
    // Each is followed on its connection by what has the server tell of the next change, and by one look.
    let watch = sent.iter().find(|sent| sent.words[0] == "CLIENT").map(|sent| sent.by.clone());
    let mut watching = sent.iter().filter(|sent| Some(&sent.by) == watch.as_ref());
    let mut followed = 0;
    while let Some(renewed) = watching.next() {
        let Some(count) = renewed.renewed() else { continue };
        let (Some(opt_in), Some(look)) = (watching.next(), watching.next()) else { break };
        assert_eq!(opt_in.words[..2], ["CLIENT", "CACHING"]);
        assert_eq!(look.watched(), Some(count));
        followed += count;
    }
    // But for one that a busy host kept waiting, and what it looked at again for that.
    let looked: usize = sent.iter().filter_map(Sent::watched).sum();
    assert!(followed + LOCKS / 2 >= renewed, "{followed} of {renewed}");
    assert!(looked <= followed + LOCKS / 2, "{looked} looks for {followed} renewals");
    assert!(guards.iter().all(Guard::is_held));
}

#[tokio::test]
async fn places_of_many_waiters_of_one_lock_share_commands() {
    const WAITERS: usize = 200;
    let redis = Redis::start();
    let holder = lock(&connect(&redis).await, "job").await;
    let locks = connect(&redis).await.ttl(Duration::from_secs(6)).unwrap();
    let waiters: Vec<_> = (0..WAITERS).map(|_| queue(&locks, "job")).collect();
    sees_waiters(&redis, WAITERS).await;
    let mut monitor = Monitor::start(&redis);
    let sizes = sizes(&renewals(&mut monitor, 3 * WAITERS).await);
    let renewed: usize = sizes.iter().sum();
    assert!(renewed >= 50 * sizes.len() && *sizes.iter().max().unwrap() > WAITERS / 2, "{sizes:?}");
    assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
    holder.release().await.unwrap();
    for waiter in waiters {
        waiter.await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn a_waiter_on_a_lock_that_is_held_for_long_does_not_poll() {
    let redis = Redis::start();
    let holder = lock(&connect(&redis).await.ttl(Duration::from_secs(6)).unwrap(), "job").await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(clinch::connect(&redis.url()).await.unwrap());
    }
    let waiters: Vec<_> = clients.iter().map(|locks| queue(locks, "job")).collect();
    sees_waiters(&redis, clients.len()).await;
    let mut monitor = Monitor::start(&redis);
    // The holder's renewals are the clock: no speed of this host is judged.
    renewals(&mut monitor, 1).await;
    let is_holders = |sent: &Sent| sent.renewed().is_some() && sent.words[2] == "1";
    let mut sent: Vec<Sent> = Vec::new();
    let end = tokio::time::Instant::now() + PATIENCE;
    while sent.iter().filter(|sent| is_holders(sent)).count() < 5 {
        assert!(tokio::time::Instant::now() < end, "not within {PATIENCE:?}: the holder's renewals");
        tokio::time::sleep(Duration::from_millis(20)).await;
        sent.extend(monitor.take());
    }
    let holders: Vec<f64> = sent.iter().filter(|sent| is_holders(sent)).map(|sent| sent.at).collect();
    let seconds = holders.last().unwrap() - holders.first().unwrap();
    // The holder renews its lock on the connection that watches it, and looks at it with each renewal.
    let watch = sent.iter().find(|sent| sent.words[0] == "CLIENT").map(|sent| sent.by.clone());
    let (watching, others): (Vec<&Sent>, Vec<&Sent>) =
        sent.iter().filter(|sent| !is_holders(sent)).partition(|sent| Some(&sent.by) == watch.as_ref());
    let reads = watching.iter().filter(|sent| sent.watched().is_some()).count();
    assert!((holders.len() - 1..=holders.len() + 1).contains(&reads), "{reads} reads: {watching:?}");
    let others: Vec<_> = others.iter().map(|sent| &sent.words[..1]).collect();
    // The keeper of each client opens a connection of its own, once, and asks who the server is.
    let (greetings, others): (Vec<_>, Vec<_>) =
        others.into_iter().partition(|words| matches!(words[0].as_str(), "HELLO" | "INFO"));
    assert!(greetings.len() <= 2 * clients.len(), "{greetings:?}");
    let bound = seconds * clients.len() as f64;
    assert!(others.len() as f64 <= bound, "{} in {seconds} s: {others:?}", others.len());
    assert!(others.iter().any(|words| words[0] == "PING"), "also pings were counted");
    assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
    drop((holder, waiters));
}

/// The keys without an expiry, at one moment.
const ETERNAL: &str = "local all = {}
    for _, key in ipairs(redis.call('KEYS', '*')) do
      if redis.call('PTTL', key) == -1 and string.sub(key, -6) ~= ':fence' then all[#all + 1] = key end
    end
    return all";

/// Uses locks of all kinds from many clients, and checks all the time that nothing is made to last.
async fn load(redis: &Redis, hasty: bool) {
    let mut load = tokio::task::JoinSet::new();
    for task in 0..24 {
        let locks = connect(redis).await;
        load.spawn(async move {
            for turn in 0..10 {
                let name = format!("job {}", turn % 3);
                let (mutex, both) = (locks.mutex(&name).unwrap(), locks.rwlock(&name).unwrap());
                let guard = match task % 4 {
                    0 => lock(&locks, &name).await,
                    1 => both.read().timeout(PATIENCE).await.unwrap(),
                    2 => both.write().timeout(PATIENCE).await.unwrap().downgrade().await.unwrap(),
                    _ => {
                        let permits = locks.semaphore("gpu", 3).unwrap();
                        permits.acquire(1 + turn % 3).unwrap().timeout(PATIENCE).await.unwrap()
                    }
                };
                match turn % 3 {
                    0 => drop(guard),
                    1 if hasty => drop(guard.release_closed(Duration::from_millis(20)).await.unwrap()),
                    _ => drop(guard.release().await.unwrap()),
                }
                drop(mutex.try_lock().await.unwrap());
                if hasty {
                    drop(mutex.lock().timeout(Duration::from_millis(1)).await);
                }
            }
            locks.close(PATIENCE).await.unwrap();
        });
    }
    let mut client = redis.client();
    let mut looks = 0;
    while !load.is_empty() {
        assert_eq!(client.call(&["EVAL", ETERNAL, "0"]).array(), []);
        looks += 1;
        tokio::select! {
            done = load.join_next() => done.unwrap().unwrap(),
            () = tokio::time::sleep(Duration::from_millis(1)) => {}
        }
    }
    assert!(looks > 24, "there were more looks than ends");
    assert_eq!(client.call(&["EVAL", ETERNAL, "0"]).array(), []);
}

#[tokio::test]
async fn every_key_but_the_fence_has_an_expiry_and_goes_with_its_last_user() {
    let redis = Redis::start();
    load(&redis, false).await;
    let keys = redis.call(&["KEYS", "*"]).array().into_iter().map(Reply::text);
    let others: Vec<_> = keys.filter(|key| !key.ends_with(":fence")).collect();
    assert_eq!(others, [""; 0]);
}

#[tokio::test]
async fn every_key_but_the_fence_has_an_expiry_though_users_give_up_in_the_middle() {
    let redis = Redis::start();
    load(&redis, true).await;
}

/// With an empty prefix all texts of the database are names that a lock could have. What each begins with is asked for by the page, and
/// no more of those that are no locks.
#[tokio::test]
async fn a_list_without_a_prefix_looks_at_nothing_closely_but_locks() {
    const FOREIGN: usize = 3000;
    let redis = Redis::start();
    let fill = "for i = 1, tonumber(ARGV[1]) do redis.call('SET', 'page:' .. i, string.rep('x', 40)) end";
    redis.call(&["EVAL", fill, "0", &FOREIGN.to_string()]);
    // What looks like a claim's, and what does not quite.
    redis.call(&["SET", "of another", &format!("{} of another", "0123456789abcdef".repeat(2))]);
    redis.call(&["SET", "other/text", "clinch"]);
    let locks = clinch::connect(&format!("{}?prefix=", redis.url())).await.unwrap().ttl(LONG_TTL).unwrap();
    let held = lock(&locks, "held").await;
    let reader = locks.rwlock("read").unwrap().read().await.unwrap();
    // Held by a program that polls, and waited for by one of ours.
    redis.call(&["SET", "foreign", "of redis-py", "PX", "600000"]);
    let waiters = [queue(&locks, "held"), queue(&locks, "foreign")];
    sees_waiters(&redis, 2).await;
    redis.call(&["SET", "closed", "clinch closed", "PX", "600000"]);
    // Loads the script.
    locks.list("").await.unwrap();
    let mut monitor = Monitor::start(&redis);
    let reads = || redis.client().info("stats")["total_reads_processed"].parse::<usize>().unwrap();
    let before = reads();
    let listed = locks.list("").await.unwrap();
    let reads = reads() - before;
    let names: Vec<&str> = listed.iter().map(|state| state.name.as_str()).collect();
    assert_eq!(names, ["foreign", "held", "read"]);
    let sent = monitor.take();
    let count = |name: &str| sent.iter().filter(|sent| sent.words[0].eq_ignore_ascii_case(name)).count();
    // A script that is told nothing but what all are.
    let looks = sent.iter().filter(|sent| sent.words.len() == 9 && sent.words[8].starts_with("- - - "));
    let mut closely: Vec<&str> = looks.map(|sent| sent.words[3].as_str()).collect();
    closely.sort_unstable();
    closely.truncate(9);
    assert_eq!(closely, ["closed", "foreign", "held", "of another", "read"], "looked at closely");
    assert!(count("getrange") >= FOREIGN && count("getrange") < FOREIGN + 20, "{} texts", count("getrange"));
    assert!(reads < FOREIGN / 10, "they came in {reads} writes");
    // Only those are asked for that the caller wants.
    assert_eq!(locks.list("re").await.unwrap().len(), 1);
    assert!(monitor.take().iter().filter(|sent| sent.words[0] == "GETRANGE").count() < 5);
    for waiter in waiters {
        waiter.abort();
    }
    held.release().await.unwrap();
    reader.release().await.unwrap();
}
