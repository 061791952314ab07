//! What is told of a wait: on a terminal, with `-v`, and in events.

#![allow(clippy::indexing_slicing, clippy::unwrap_used, reason = "test code")]

mod common;

use std::io::Read;
use std::time::Instant;

use clinch_testkit::Redis;
use common::terminal::Terminal;
use common::{Running, World, eventually};
use serde_json::Value;

const JOB: &str = "while [ ! -e stop ]; do sleep 0.02; done";

/// One that holds the lock until `stop` is there.
fn hold(world: &World, name: &str) -> Running {
    let holder = world.start(["run", "--label", "backup.sh", name, "-c", JOB]);
    eventually("the lock is held", || world.held(name));
    holder
}

fn stderr(mut run: Running) -> String {
    let mut said = String::new();
    run.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    said
}

/// The events of this kind in a file, of which the last line may not be whole yet.
fn waits(world: &World, file: &str) -> Vec<Value> {
    let text = world.read(file);
    let whole = text.rsplit_once('\n').map(|(whole, _)| whole).unwrap_or_default();
    let events = whole.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == "waiting").collect()
}

/// Who waits at a terminal sees nothing, or what it sees stays there when the job begins.
#[test]
fn a_wait_is_shown_on_a_terminal_and_taken_away_before_the_job() {
    let redis = Redis::start();
    for (world, name, verb) in [
        (World::new(), "a", "run a echo it''runs"),
        (World::on(redis.url()), "b", "run b echo it''runs"),
        (World::new(), "c", "acquire c --for $$ > lease; echo it''runs"),
        (World::on(redis.url()), "d", "acquire d --for $$ > lease; echo it''runs"),
    ] {
        let mut holder = hold(&world, name);
        let user = world.claims(name, "held")[0]["user"].as_str().unwrap().to_owned();
        let mut terminal = Terminal::new(&world);
        terminal.type_in(&format!("\"$CLINCH\" {verb}\n"));
        terminal.shows(&format!("\r\x1b[Kwaiting for \"{name}\": held by {user}@"));
        terminal.shows(" (backup.sh) for ");
        terminal.shows("s, 1 ahead, 0:02");
        world.write("stop", "");
        assert_eq!(holder.code(), 0);
        terminal.shows("itruns");
        let text = terminal.text();
        let (before, _) = text.split_once("itruns").unwrap();
        assert!(before.ends_with("\r\x1b[K"), "the line stands there yet: {before:?}");
    }
}

/// A line that is wider than the terminal is left behind at every rewrite.
#[test]
fn a_wait_is_shown_in_one_line_of_the_terminal() {
    let world = World::new();
    let _holder = hold(&world, "x");
    let mut terminal = Terminal::new(&world);
    terminal.type_in("stty cols 30; \"$CLINCH\" run x true\n");
    terminal.shows("0:02");
    let text = terminal.text();
    let shown = text.split("\r\x1b[K").find(|shown| shown.ends_with("0:02")).unwrap();
    assert!(shown.starts_with("waiting for \"x") && shown.chars().count() == 29, "{shown:?}");
}

/// A wrapper in the background writes over the shell's line, or is stopped for it.
#[test]
fn a_wait_in_the_background_writes_nothing_and_is_not_stopped() {
    let world = World::new();
    let mut holder = hold(&world, "x");
    let mut terminal = Terminal::new(&world);
    terminal
        .type_in("stty tostop; \"$CLINCH\" run x -c 'echo > ran' & \"$CLINCH\" run --events events y true\n");
    // The background one waits for longer than that.
    let other = hold(&world, "y2");
    eventually("the shell is ready", || world.lines("events") > 0);
    terminal.type_in("\"$CLINCH\" run y2 true\n");
    terminal.shows("waiting for \"y2\"");
    terminal.shows("0:02");
    assert!(!terminal.text().contains("waiting for \"x\""));
    world.write("stop", "");
    assert_eq!(holder.code(), 0);
    eventually("the background one gets the lock", || world.lines("ran") == 1);
    drop(other);
}

/// Messages are told off a terminal that nobody asked for, or none is told with -v.
#[test]
fn off_a_terminal_changes_are_told_to_who_asked() {
    let world = World::new();
    let mut holder = hold(&world, "x");
    let mut silent = world.start(["run", "x", "true"]);
    eventually("it waits", || world.claims("x", "waiting").len() == 1);
    let mut verbose = world.start(["run", "-v", "--events", "events", "x", "true"]);
    eventually("it tells", || waits(&world, "events").last().is_some_and(|event| event["ahead"] == 2));
    // Time enough for one who tells the same again.
    let since = Instant::now();
    let mut other = world.start(["run", "--events", "other", "x", "true"]);
    eventually("time passes", || since.elapsed().as_millis() > 2500);
    assert_eq!(waits(&world, "events").len(), 1, "nothing has changed");
    world.write("stop", "");
    assert_eq!((holder.code(), silent.code(), verbose.code(), other.code()), (0, 0, 0, 0));
    assert_eq!(stderr(silent), "");
    let said = stderr(verbose);
    assert!(
        said.contains("waiting, held by ")
            && said.contains(" (backup.sh) for ")
            && said.contains(", 2 ahead"),
        "{said}"
    );
}

/// In containers every waiter has the same process id, and takes another's place for its own.
#[test]
fn claims_ahead_are_counted_by_their_ids() {
    let redis = Redis::start();
    let etcd = clinch_testkit::Etcd::start();
    for world in [World::new(), World::on(redis.url()), World::on(etcd.url())] {
        let _holder = hold(&world, "x");
        let clinch = env!("CARGO_BIN_EXE_clinch");
        let _waiters = [1, 2, 3].map(|ahead| {
            let file = format!("events{ahead}");
            let mut unshare = std::process::Command::new("unshare");
            unshare.args([
                "-pf",
                "--mount-proc",
                "--kill-child",
                clinch,
                "run",
                "--events",
                &file,
                "x",
                "true",
            ]);
            unshare.current_dir(world.path(".")).env("CLINCH_URL", world.url()).env_remove("CLINCH_HELD");
            let waiter = Running(unshare.stdin(std::process::Stdio::null()).spawn().unwrap());
            eventually("it tells", || {
                waits(&world, &file).last().is_some_and(|event| event["ahead"] == ahead)
            });
            waiter
        });
        let pids: Vec<Value> =
            world.claims("x", "waiting").iter().map(|claim| claim["pid"].clone()).collect();
        assert_eq!(pids, [1, 1, 1], "they are told apart by their ids alone");
    }
}

/// Who waits does not hear that another has the lock now, or that the store is gone.
#[test]
fn a_new_holder_and_an_outage_are_told() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let mut first = hold(&world, "x");
    let second = world.start(["run", "--label", "second", "x", "sleep", "60"]);
    eventually("it waits", || world.claims("x", "waiting").len() == 1);
    let _waiter = world.start(["run", "--events", "events", "x", "true"]);
    eventually("it tells", || waits(&world, "events").last().is_some_and(|event| event["ahead"] == 2));
    world.write("stop", "");
    assert_eq!(first.code(), 0);
    let last = || waits(&world, "events").pop().unwrap();
    eventually("the second holder is told", || last()["holder"]["label"] == "second");
    assert_eq!(last()["ahead"], 1);
    drop(redis);
    eventually("the outage is told", || last()["error"].is_string());
    assert_eq!((&last()["holder"], &last()["ahead"]), (&Value::Null, &Value::Null));
    drop(second);
}

/// Waiters ask the store all the time.
#[test]
fn a_store_is_asked_once_a_second_and_only_if_somebody_looks() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let _holder = world.start(["run", "--ttl", "60s", "x", "sleep", "600"]);
    eventually("it is held", || world.held("x"));
    // All that is evaluated by name: renewals are, too, one each 5 s and process.
    let asked = || {
        let stats = redis.call(&["INFO", "commandstats"]).text();
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap().to_owned();
        line.split(['=', ',']).nth(1).unwrap().parse::<u64>().unwrap()
    };
    let asked_in = |seconds: u64| {
        let (since, before) = (Instant::now(), asked());
        eventually("time passes", || since.elapsed().as_secs() >= seconds);
        (asked() - before, since.elapsed().as_secs() + 1)
    };
    let _silent = [(); 4].map(|()| {
        let before = world.claims("x", "waiting").len();
        let waiter = world.start(["run", "--ttl", "60s", "x", "true"]);
        eventually("it waits", || world.claims("x", "waiting").len() > before);
        waiter
    });
    // Once those have come to rest that have just begun to wait.
    eventually("nobody asks but to renew where nobody looks", || {
        let (quiet, seconds) = asked_in(4);
        quiet <= 5 * (seconds / 4 + 1)
    });
    let _looker = world.start(["run", "--ttl", "60s", "--events", "events", "x", "true"]);
    eventually("it tells", || !waits(&world, "events").is_empty());
    let (loud, seconds) = asked_in(4);
    assert!(loud >= 3, "{loud} in {seconds} s");
    assert!(loud <= seconds + 1 + 6 * (seconds / 4 + 1), "{loud} questions in {seconds} s where one looks");
}
