//! Servers and storage that hang: nobody waits for them for longer than was asked for, or than the help says.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used, reason = "test code")]

mod common;

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clinch_testkit::{Etcd, Proxy, Redis, vouch};
use common::{Running, World, eventually, runs};
use rustix::process::Signal;

/// Several times what each of these commands takes. Without a bound of their own they take as long as a lease.
const LONG: Duration = Duration::from_secs(20);

/// All at once, and each in time, with 69.
fn end_in_time(world: &World, commands: &[&[&str]]) {
    let since = Instant::now();
    let mut running: Vec<Running> =
        commands.iter().map(|command| world.start(command.iter().copied())).collect();
    for (running, command) in running.iter_mut().zip(commands) {
        let mut ended = None;
        eventually(&format!("{command:?} ends"), || {
            ended = running.0.try_wait().unwrap();
            ended.is_some() || since.elapsed() > LONG
        });
        let code = ended.map(|ended| ended.code());
        assert_eq!(code, Some(Some(69)), "{command:?} after {:?}", since.elapsed());
    }
}

/// A server is stopped that was well when the lease was taken.
fn a_stopped_server_keeps_nobody(world: &World, stop: impl FnOnce(), go_on: impl FnOnce()) {
    let taken = world.output(["acquire", "--json", "x"]);
    let lease: serde_json::Value =
        serde_json::from_slice(&taken.stdout).unwrap_or_else(|_| panic!("{taken:?}"));
    let claim = lease["claim"].as_str().unwrap();
    stop();
    let commands: [&[&str]; 8] = [
        &["run", "-n", "y", "true"],
        &["run", "-w", "1s", "y", "true"],
        &["acquire", "-n", "y"],
        &["acquire", "-w", "1s", "y"],
        &["release", "x", claim],
        &["renew", "x", claim],
        &["show", "x"],
        &["break", "--yes", "x"],
    ];
    end_in_time(world, &commands);
    go_on();
    eventually("nobody has what nobody waits for", || {
        world.claims("y", "held").is_empty() && world.claims("y", "waiting").is_empty()
    });
}

#[test]
fn a_stopped_server_keeps_nobody_on_redis() {
    let redis = Redis::start();
    let world = World::on(format!("{}?ttl=10m", redis.url()));
    a_stopped_server_keeps_nobody(&world, || redis.pause(), || redis.resume());
}

#[test]
fn a_stopped_server_keeps_nobody_on_etcd() {
    let etcd = Etcd::start();
    let world = World::on(format!("{}?ttl=10m", etcd.url()));
    a_stopped_server_keeps_nobody(&world, || etcd.pause(), || etcd.resume());
}

#[test]
fn a_stopped_quorum_keeps_nobody_on_redlock() {
    let start = |_| Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always").start();
    let servers: Vec<Redis> = (0..3).map(start).collect();
    let hosts: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
    let url = format!("redlock://{}?durable=on&max_ttl=10m&ttl=10m", hosts.join(","));
    vouch(&url, &servers);
    let world = World::on(url);
    let stop = || servers[1..].iter().for_each(Redis::pause);
    a_stopped_server_keeps_nobody(&world, stop, || servers[1..].iter().for_each(Redis::resume));
}

/// Three servers that vote, of which the last is far away.
fn far() -> (Vec<Redis>, Proxy, World) {
    let start = |_| Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always").start();
    let servers: Vec<Redis> = (0..3).map(start).collect();
    let far = Proxy::start(servers[2].addr());
    let hosts = [servers[0].addr(), servers[1].addr(), far.addr()].map(|addr| addr.to_string());
    let url = format!("redlock://{}?durable=on&max_ttl=10m&ttl=10m", hosts.join(","));
    vouch(&url, &servers);
    (servers, far, World::on(url))
}

/// Of a process that ends nobody else would tell it: its vote would stand for the rest of the lease.
#[test]
fn a_release_reaches_a_far_server_before_the_process_ends() {
    let (servers, far, world) = far();
    let taken = world.output(["acquire", "--json", "x"]);
    let lease: serde_json::Value =
        serde_json::from_slice(&taken.stdout).unwrap_or_else(|_| panic!("{taken:?}"));
    let has = |at: usize| servers[at].call(&["EXISTS", "clinch:x"]).int() == 1;
    // Should it have been too slow to be asked.
    let held = servers[(0..3).find(|at| has(*at)).unwrap()].call(&["GET", "clinch:x"]).text();
    servers[2].call(&["SET", "clinch:x", &held, "NX", "PX", "600000"]);
    far.delay(Duration::from_millis(60));
    assert_eq!(world.code(["release", "x", lease["claim"].as_str().unwrap()]), 0);
    assert!(!(0..3).any(has), "its vote stays");
}

/// What the servers are told, without which they vote for nobody, is told to all of them.
#[test]
fn word_is_left_on_a_far_server_before_the_process_ends() {
    for command in [&["acquire", "x"][..], &["run", "x", "true"]] {
        let (servers, far, world) = far();
        far.delay(Duration::from_millis(60));
        assert_eq!(world.code(command.iter().copied()), 0, "{command:?}");
        let left = "return redis.call('GET', redis.call('KEYS', 'clinch:~{voucher}:*')[1])";
        let left = servers[2].call(&["EVAL", left, "0"]).text();
        // It names the run that was met.
        assert_ne!(left.split(' ').nth(1), Some("-"), "{command:?}: {left}");
    }
}

/// Servers that accept and never answer, one after another: connecting is part of what was given a time.
#[test]
fn connecting_is_part_of_the_time() {
    let hung: Vec<TcpListener> = (0..20).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let hosts: Vec<String> = hung.iter().map(|hung| hung.local_addr().unwrap().to_string()).collect();
    for scheme in ["redis+cluster", "etcd"] {
        let world = World::on(format!("{scheme}://{}", hosts.join(",")));
        end_in_time(&world, &[&["run", "-n", "x", "true"], &["run", "-w", "1s", "x", "true"], &["ls"]]);
    }
}

/// The job is done, and its release is not answered: whoever asks the wrapper to end has to wait for the lease.
#[test]
fn a_release_that_is_not_answered_heeds_a_signal() {
    let redis = Redis::start();
    let world = World::on(format!("{}?ttl=10m", redis.url()));
    let job = format!("kill -STOP {}; exit 3", redis.pid());
    let mut run = world.start(["run", "--events", "events", "x", "-c", &job]);
    eventually("the job is done", || world.read("events").contains("exited"));
    run.signal(Signal::TERM);
    assert_eq!(run.code(), 3, "what the job ended with");
}

/// A waiter asks who is before it, which is not answered, and hears neither signals nor its grant.
#[test]
fn a_question_that_is_not_answered_makes_no_waiter_deaf() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    let _holder = world.start(["run", "x", "sleep", "60"]);
    eventually("the lock is held", || world.held("x"));
    // So that there is time to keep the answer back.
    proxy.delay(Duration::from_millis(100));
    let mut command = world.clinch(["run", "--events", "events", "x", "true"]);
    command.env("CLINCH_URL", format!("redis://{}", proxy.addr()));
    let mut waiter = Running(command.spawn().unwrap());
    eventually("it waits", || world.claims("x", "waiting").len() == 1);
    proxy.hold_replies(true);
    let told = world.read("events").contains("waiting");
    waiter.signal(Signal::TERM);
    assert_eq!(waiter.wait().signal(), Some(15));
    assert_eq!(world.read("events").contains("waiting"), told, "it ended when it was answered");
}

/// The lock is granted, and whether it is its turn is not answered: nothing but the connection's own patience ends that.
#[test]
fn a_turn_that_is_not_answered_heeds_a_signal_and_the_time() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    // None: its time was over before it was granted, on a busy host.
    let ask = |number: usize, options: &[&str]| {
        let (events, name) = (format!("events{number}"), format!("x{number}"));
        proxy.hold_replies(false);
        proxy.delay(Duration::ZERO);
        let _ = std::fs::remove_file(world.path("stop"));
        let mut holder = world.start(["run", &name, "-c", "while [ ! -e stop ]; do sleep 0.02; done"]);
        eventually("the lock is held", || world.held(&name));
        let words = [&["run", "--once-per", "1h", "--events", &events], options, &[&name, "true"]].concat();
        let mut command = world.clinch(words);
        command.env("CLINCH_URL", format!("redis://{}", proxy.addr())).stderr(Stdio::piped());
        let mut waiter = Running(command.spawn().unwrap());
        let mut has_ended = || waiter.0.try_wait().unwrap().is_some();
        eventually("it waits", || world.claims(&name, "waiting").len() == 1 || has_ended());
        // So that there is time to keep the answer back.
        proxy.delay(Duration::from_millis(300));
        world.write("stop", "");
        let granted = || world.read(&events).contains("acquired");
        eventually("it is granted", || granted() || has_ended());
        proxy.hold_replies(true);
        assert_eq!(holder.code(), 0);
        granted().then_some(waiter)
    };
    let mut waiter = ask(0, &[]).expect("without a limit it is granted");
    waiter.signal(Signal::TERM);
    assert_eq!(waiter.wait().signal(), Some(15));
    // Not much longer: after some seconds of silence the connection is given up.
    let mut waiter =
        (1..=5).find_map(|number| ask(number, &["-w", "3s"])).expect("granted within 3s once of five");
    assert_eq!(waiter.code(), 69);
    let mut said = String::new();
    waiter.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("did not answer within 3s"), "{said}");
}

/// Makes a program of which nothing can be read while what this returns lives: who opens a file that another has leased waits until that one
/// gives it back.
fn unreadable(world: &World) -> Running {
    world.write("job", "#!/bin/sh\necho ran > ran\n");
    world.install(world.path("job"), "job");
    // F_SETLEASE, F_WRLCK; it is told by IO that somebody waits.
    let lease = r#"$SIG{IO} = "IGNORE"; open(F, "<", "job") && fcntl(F, 1024, 1) or die "no lease: $!"; open(G, ">", "leased"); sleep"#;
    let mut holder = Command::new("perl");
    let holder = Running(holder.args(["-e", lease]).current_dir(world.path(".")).spawn().unwrap());
    eventually("the program is leased", || world.path("leased").exists());
    holder
}

/// The child of a run that asks for the program.
fn asking(run: &Running) -> i32 {
    let mut asking = None;
    eventually("the child asks for the program", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", run.pid())).unwrap();
        let children = tasks.flatten().flat_map(|task| std::fs::read_to_string(task.path().join("children")));
        let children: String = children.collect();
        // The watch leads a session.
        let is_watch = |pid: &&str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(')').next().unwrap().split_whitespace().nth(3) == Some(*pid)
        };
        let (watch, others): (Vec<&str>, Vec<&str>) = children.split_whitespace().partition(is_watch);
        asking = others.first().filter(|_| !watch.is_empty()).map(|pid| pid.parse().unwrap());
        asking.is_some()
    });
    asking.unwrap()
}

/// The program lies on storage that hangs, and its run hears nothing meanwhile: the job begins when another has the lock.
#[test]
fn a_job_that_loses_its_lock_before_its_program_is_read_never_begins() {
    for is_broken in [true, false] {
        let world = World::new();
        let storage = unreadable(&world);
        let max_hold = if is_broken { "10m" } else { "2s" };
        let mut run = world.start(["run", "--max-hold", max_hold, "--events", "events", "x", "./job"]);
        asking(&run);
        if is_broken {
            assert_eq!(world.code(["break", "--yes", "x"]), 0);
        }
        assert_eq!(run.code(), 79);
        assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
        drop(storage);
        assert!(!world.path("ran").exists(), "it began without its lock");
    }
}

/// It is given time to end before it has begun, and begins in that time.
#[test]
fn a_job_that_ignores_signals_does_not_begin_after_its_loss() {
    let world = World::new();
    let storage = unreadable(&world);
    let ignoring = r#"trap '' TERM; exec "$CLINCH" run --max-hold 1h --grace 20s --events events x ./job"#;
    let mut run = Command::new("sh");
    run.args(["-c", ignoring]).current_dir(world.path("."));
    run.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).env("CLINCH_URL", world.url());
    let mut run = Running(run.spawn().unwrap());
    asking(&run);
    assert_eq!(world.code(["break", "--yes", "x"]), 0);
    eventually("it is stopped", || world.read("events").contains("stopping"));
    drop(storage);
    assert_eq!(run.code(), 79);
    assert!(!world.path("ran").exists(), "it began without its lock");
}

/// Nobody can end it, or it begins although it was ended.
#[test]
fn a_run_whose_program_is_not_read_heeds_a_signal() {
    for signal in [Signal::TERM, Signal::INT] {
        let world = World::new();
        let storage = unreadable(&world);
        let mut run = world.start(["run", "x", "./job"]);
        asking(&run);
        run.signal(signal);
        assert_eq!(run.code(), 128 + signal.as_raw());
        drop(storage);
        assert!(!world.path("ran").exists(), "it began");
    }
}

/// Its lease runs out unseen.
#[test]
fn a_lock_is_renewed_while_its_program_is_not_read() {
    let (redis, world) = (Redis::start(), World::new());
    let (storage, url) = (unreadable(&world), format!("{}?ttl=2s", redis.url()));
    let mut run = world.start(["run", "-u", &url, "x", "./job"]);
    asking(&run);
    let since = Instant::now();
    eventually("its lease would have run out", || since.elapsed() > Duration::from_secs(3));
    assert_eq!(world.code(["run", "-u", &url, "-n", "x", "true"]), 75, "another has its lock");
    drop(storage);
    assert_eq!((run.code(), world.read("ran").as_str()), (0, "ran\n"));
}

/// The wrapper is killed, and where its lock goes with it, the job begins when its program is read at last.
#[test]
fn a_killed_wrapper_takes_a_job_along_whose_program_is_not_read() {
    let world = World::new();
    let storage = unreadable(&world);
    let redis = Redis::start();
    let run = world.start(["run", "-u", &redis.url(), "x", "./job"]);
    let job = asking(&run);
    run.signal(Signal::KILL);
    eventually("the job is dead", || !runs(job));
    drop(storage);
    assert!(!world.path("ran").exists(), "it began");
}

/// A server is started again within the time that it has, and nobody asks it.
#[test]
fn a_server_that_comes_back_is_asked_again() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let claim = world.output(["acquire", "--json", "x"]).stdout;
    let claim: serde_json::Value = serde_json::from_slice(&claim).unwrap();
    let claim = claim["claim"].as_str().unwrap();
    redis.kill();
    let verbs: [&[&str]; 5] =
        [&["renew", "x", claim], &["release", "x", claim], &["show", "x"], &["break", "--yes", "x"], &["ls"]];
    let mut insist = verbs.map(|verb| world.start(verb.iter().copied()));
    // What does not insist has its answer.
    assert_eq!(world.code(["run", "x", "true"]), 69);
    for (insists, verb) in insist.iter_mut().zip(verbs) {
        assert_eq!(insists.0.try_wait().unwrap(), None, "{verb:?} insists");
    }
    redis.restart();
    // What the server kept is another matter.
    for (insists, verb) in insist.iter_mut().zip(verbs) {
        let code = insists.code();
        assert!([0, 1, 79].contains(&code), "{verb:?}: {code}");
    }
}
