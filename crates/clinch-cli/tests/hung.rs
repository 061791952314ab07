//! Servers that hang: nobody waits for them for longer than was asked for, or than the help says.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used, reason = "test code")]

mod common;

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use clinch_testkit::{Etcd, Proxy, Redis, vouch};
use common::{Running, World, eventually};
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
    let ask = |options: &[&str]| {
        let (events, name) = (format!("events{}", options.len()), format!("x{}", options.len()));
        let mut holder = world.start(["run", &name, "-c", "while [ ! -e stop ]; do sleep 0.02; done"]);
        eventually("the lock is held", || world.held(&name));
        let words = [&["run", "--once-per", "1h", "--events", &events], options, &[&name, "true"]].concat();
        let mut command = world.clinch(words);
        command.env("CLINCH_URL", format!("redis://{}", proxy.addr())).stderr(Stdio::piped());
        let waiter = Running(command.spawn().unwrap());
        eventually("it waits", || world.claims(&name, "waiting").len() == 1);
        // So that there is time to keep the answer back.
        proxy.delay(Duration::from_millis(300));
        world.write("stop", "");
        eventually("it is granted", || world.read(&events).contains("acquired"));
        proxy.hold_replies(true);
        assert_eq!(holder.code(), 0);
        waiter
    };
    let mut waiter = ask(&[]);
    waiter.signal(Signal::TERM);
    assert_eq!(waiter.wait().signal(), Some(15));
    proxy.hold_replies(false);
    proxy.delay(Duration::ZERO);
    std::fs::remove_file(world.path("stop")).unwrap();
    let mut waiter = ask(&["-w", "3s"]);
    assert_eq!(waiter.code(), 69);
    let mut said = String::new();
    waiter.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("did not answer within 3s"), "{said}");
}
