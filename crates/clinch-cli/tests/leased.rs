//! Stores whose leases outlive a process: what the command leaves there when it ends.

mod common;

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use clinch_testkit::{Direction, Etcd, Proxy, Redis, Reply};
use common::{Running, World, eventually, runs, state};
use rustix::process::Signal;

/// Whoever gave up waiting stands in the way of others, or gets the lock after its end.
fn who_gave_up_leaves_the_queue(world: &World) {
    let holder = world.start(["run", "--ttl", "60s", "x", "sleep", "60"]);
    eventually("the lock is held", || world.held("x"));
    for verb in [
        &["run", "-w", "300ms", "--ttl", "60s", "x", "true"][..],
        &["acquire", "-w", "300ms", "--ttl", "60s", "x"],
    ] {
        assert_eq!(world.code(verb.iter().copied()), 75, "{verb:?}");
        assert_eq!(world.claims("x", "waiting").len(), 0, "{verb:?}");
    }
    holder.kill();
}

#[test]
fn who_gave_up_leaves_the_queue_on_redis() {
    let redis = Redis::start();
    who_gave_up_leaves_the_queue(&World::on(redis.url()));
}

#[test]
fn who_gave_up_leaves_the_queue_on_etcd() {
    let etcd = Etcd::start();
    who_gave_up_leaves_the_queue(&World::on(etcd.url()));
}

/// A server that is down when a command starts, or has no connection left, is not waited for.
#[test]
fn a_server_that_comes_late_is_waited_for() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    redis.kill();
    assert_eq!(world.code(["run", "-w", "300ms", "x", "true"]), 69);
    let mut run = world.start(["run", "-w", "60s", "x", "touch", "ran"]);
    redis.restart();
    eventually("the job runs", || world.path("ran").exists());
    assert_eq!(run.code(), 0);
}

/// A server that hangs when a command starts is not waited for.
#[test]
fn a_server_that_hangs_at_first_is_waited_for() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.addr());
    let world = World::on(format!("etcd://{}", proxy.addr()));
    proxy.black_hole(true);
    let mut run = world.start(["run", "-w", "60s", "x", "true"]);
    let mut ended = false;
    eventually("it connects again", || {
        ended = run.0.try_wait().unwrap().is_some();
        ended || proxy.accepted() > 2
    });
    proxy.black_hole(false);
    assert_eq!(run.code(), 0);
}

/// A lease that nobody knows of blocks all others for its TTL.
#[test]
fn an_acquire_that_fails_leaves_nothing() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    let acquire = |name: &str| {
        let mut command = world.clinch(["acquire", "-n", "--ttl", "24h", name]);
        command.env("CLINCH_URL", format!("redis://{}", proxy.addr())).output().unwrap().status.code()
    };
    assert_eq!(acquire("loads"), Some(0), "what is sent once is not sent again");
    let before = proxy.forwarded(Direction::Requests);
    assert_eq!(acquire("first"), Some(0));
    let sent = proxy.forwarded(Direction::Requests) - before;
    for (name, unsent) in [("other", 0), ("third", 1), ("forth", sent / 4)] {
        proxy.cut_after(Direction::Requests, sent - unsent);
        let taken = acquire(name) == Some(0);
        eventually("nothing is left but what was taken", || world.held(name) == taken);
    }
}

/// A server hangs: the job is stopped in time, and then nobody waits for the answer to the release of a lease that has run out.
fn a_run_ends_with_its_lease(world: &World, hang: impl FnOnce()) {
    let mut run = world.start(["run", "--ttl", "4s", "x", "-c", "echo $$ > job.pid; exec sleep 60"]);
    let job = world.pid("job.pid");
    hang();
    eventually("the job is stopped", || !runs(job));
    let stopped = Instant::now();
    assert_eq!(run.code(), 79);
    let took = stopped.elapsed();
    // Without a word to it: a TTL for the caller's release, and five seconds for those in the background.
    assert!(took < Duration::from_secs(6), "it ended {took:?} after its job");
}

#[test]
fn a_run_ends_with_its_lease_on_redis() {
    let redis = Redis::start();
    a_run_ends_with_its_lease(&World::on(redis.url()), || redis.pause());
}

#[test]
fn a_run_ends_with_its_lease_on_etcd() {
    let etcd = Etcd::start();
    a_run_ends_with_its_lease(&World::on(etcd.url()), || etcd.pause());
}

/// Those that a job leaves behind are looked at for so long that its lease runs out meanwhile.
#[test]
fn a_lease_is_kept_while_many_are_looked_at_that_have_no_environment() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let script = "for i in $(seq 400); do env -i sleep 60 > /dev/null 2>&1 & echo $! >> pids; done";
    let code = world.code(["run", "--ttl", "3s", "x", "-c", script]);
    for pid in world.read("pids").lines() {
        assert!(common::kill(pid.parse().unwrap(), Signal::KILL));
    }
    assert_eq!(code, 0);
}

/// What is left of the lease, as the store says.
fn left(world: &World) -> Option<u64> {
    world.claims("x", "held").first()?["expires_in_ms"].as_u64()
}

/// A wrapper that is stopped just after a renewal has told nobody of that: its job is ended, and it says that this was the job's own end.
#[test]
fn a_job_that_its_watch_has_ended_did_not_end_by_itself() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let job = "echo $$ > job.pid; exec sleep 60";
    let mut run = world.start(["run", "--ttl", "4s", "--events", "events", "x", "-c", job]);
    let job = world.pid("job.pid");
    let mut before = left(&world);
    eventually("the lease is renewed", || {
        let now = left(&world);
        let is_renewed = now.is_none() || now > before;
        before = now;
        is_renewed
    });
    run.signal(Signal::STOP);
    eventually("the job is dead", || !runs(job));
    assert_eq!(run.code(), 79);
    let events = world.events("events");
    assert!(events.iter().any(|event| ["stopping", "lost"].iter().any(|name| event["event"] == *name)));
}

/// What was about to be lost and was not ends a job as if it had been: it is taken for one that was lost, does not stop its wrapper any more, and is
/// killed unasked when its lock is in danger again.
#[test]
fn a_job_that_outlives_a_danger_to_its_lock_is_a_job_as_before() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let job = "trap 'echo >> told' TERM; echo $$ > job.pid; while [ ! -e stop ]; do sleep 0.02; done; exit 5";
    let mut command =
        world.clinch(["run", "--ttl", "12s", "--grace", "3s", "--events", "events", "x", "bash", "-c", job]);
    // A group of its own, since only such a one is stopped; and not by dash, which is stuck if it is stopped in the middle of a vfork.
    let mut run = Running(command.process_group(0).spawn().unwrap());
    let job = world.pid("job.pid");
    let signals = || {
        let events = world.events("events").into_iter();
        events.filter_map(|event| Some(event["signal"].as_str()?.to_owned())).collect::<Vec<_>>()
    };
    for danger in 1..=2 {
        redis.pause();
        eventually("it is asked to end", || world.lines("told") == danger || !runs(job));
        redis.resume();
        eventually("the lease is renewed", || {
            let is_held = world.events("events").last().is_some_and(|event| event["event"] == "held");
            is_held && signals().len() >= danger || !runs(job)
        });
        assert_eq!((signals(), runs(job)), (vec!["term".to_owned(); danger], true), "it is killed unasked");
        run.signal(Signal::TSTP);
        eventually("the wrapper is stopped with it", || state(run.pid()) == Some('T'));
        run.signal(Signal::CONT);
    }
    eventually("the job goes on", || state(job) != Some('T'));
    world.write("stop", "");
    assert_eq!(run.code(), 5);
    assert!(!world.read("events").contains("lost"));
}

/// A lock that was handed over has a lease of three seconds until somebody makes it longer: too little for a job.
#[test]
fn a_lock_that_is_handed_over_has_its_whole_lease() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    world.write("wait", "");
    let mut holder = world.start(["run", "x", "-c", "while [ -e wait ]; do sleep 0.02; done"]);
    eventually("it is held", || world.held("x"));
    let look = r#""$CLINCH" show --json x > show"#;
    let mut next = world.start(["run", "--ttl", "60s", "x", "-c", look]);
    eventually("it waits", || world.claims("x", "waiting").len() == 1);
    std::fs::remove_file(world.path("wait")).unwrap();
    assert_eq!((holder.code(), next.code()), (0, 0), "the job was stopped at once for want of a lease");
    let show: serde_json::Value = serde_json::from_str(&world.read("show")).unwrap();
    let left = show["claims"][0]["expires_in_ms"].as_u64().unwrap();
    assert!(left > 30_000, "the job began with a lease of {left} ms");
}

/// The lock is handed over, and the store cannot be reached before that is confirmed. Whoever waits for as long as it takes
/// is told that it lost what it never used.
#[test]
fn a_grant_that_runs_out_before_it_is_confirmed_is_waited_for_again() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    world.write("wait", "");
    let mut holder = world.start(["run", "x", "-c", "while [ -e wait ]; do sleep 0.02; done"]);
    eventually("it is held", || world.held("x"));
    let mut command = world.clinch(["run", "x", "touch", "ran"]);
    command.env("CLINCH_URL", format!("redis://{}", proxy.addr()));
    let mut waiter = Running(command.spawn().unwrap());
    eventually("it waits, and can be told", || {
        let mut client = redis.client();
        let channels = client.call(&["PUBSUB", "CHANNELS", "*inbox*"]).array();
        let inbox = channels.into_iter().next().map(Reply::text);
        let places = client.call(&["KEYS", "*:claims:*"]).array().into_iter().map(Reply::text);
        let known: Vec<String> =
            places.flat_map(|key| client.call(&["HVALS", &key]).array()).map(Reply::text).collect();
        inbox.and_then(|inbox| {
            inbox.rsplit_once(':').map(|(_, id)| known.iter().any(|known| known.contains(id)))
        }) == Some(true)
    });
    // It has been told when it is looked at again, and can say nothing.
    waiter.signal(Signal::STOP);
    let told = proxy.forwarded(Direction::Replies);
    std::fs::remove_file(world.path("wait")).unwrap();
    eventually("it is granted", || world.held("x") && proxy.forwarded(Direction::Replies) > told);
    assert_eq!(holder.code(), 0);
    proxy.black_hole(true);
    waiter.signal(Signal::CONT);
    eventually("the grant has run out", || !world.held("x"));
    let asked = proxy.accepted();
    let mut ended = None;
    eventually("it asks again", || {
        ended = waiter.0.try_wait().unwrap();
        ended.is_some() || proxy.accepted() > asked + 1
    });
    assert_eq!(ended, None, "it was told to wait for as long as it takes");
    proxy.black_hole(false);
    assert_eq!(waiter.code(), 0);
    assert!(world.path("ran").exists());
}

/// A lock is thought to end with a process that it does not end with.
#[test]
fn a_lease_is_bound_to_no_process() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let noted = || world.claims("x", "held")[0]["pid"].clone();
    // A script is the same on all stores.
    let mut other = Running(Command::new("sleep").arg("60").spawn().unwrap());
    let output = world.output(["acquire", "--for", &other.pid().to_string(), "x"]);
    assert!(output.status.success() && output.stdout.ends_with(b" for_pid=\n"), "{output:?}");
    assert_eq!(noted(), other.pid());
    other.signal(Signal::KILL);
    other.wait();
    assert!(world.held("x"));
    assert_eq!(world.code(["break", "--yes", "x"]), 0);
    // Of who is not named the one that called is known, whoever reads the answer.
    let output = world.output(["acquire", "--json", "x"]);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["for_pid"], noted()), (&serde_json::Value::Null, std::process::id().into()));
}
