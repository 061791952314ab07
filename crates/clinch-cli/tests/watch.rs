//! `clinch ls --watch`, in a pipe and on a terminal.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod common;

use std::io::{BufRead as _, BufReader, Lines};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ChildStdout;

use clinch_testkit::{Redis, Resp};
use common::pty::Screen;
use common::{Running, World, eventually};
use rustix::process::Signal;
use serde_json::Value;

/// What a process prints, line by line, as it comes.
fn printed(process: &mut Running) -> Lines<BufReader<ChildStdout>> {
    BufReader::new(process.0.stdout.take().unwrap()).lines()
}

fn document(lines: &mut Lines<BufReader<ChildStdout>>) -> Vec<Value> {
    let document: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    document["locks"].as_array().unwrap().clone()
}

/// Waits until a store was asked so often.
fn look_thirty_times(redis: &mut Resp) {
    let mut commands = || {
        redis
            .commandstats()
            .into_iter()
            .filter(|(name, _)| name != "info")
            .map(|(_, calls)| calls)
            .sum::<u64>()
    };
    let before = commands();
    eventually("it has looked thirty times", || commands() >= before + 30);
}

fn connections(redis: &mut Resp) -> String {
    redis.info("stats").remove("total_connections_received").unwrap()
}

/// Who follows the locks of a fleet connects again for each look, or is told at each of them what he knows.
#[test]
fn a_look_costs_no_connection_and_only_changes_are_printed() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let mut watch = world.start(["ls", "--json", "--watch=0.1"]);
    let mut lines = printed(&mut watch);
    assert_eq!(document(&mut lines), Vec::<Value>::new());
    let mut server = redis.client();
    // What is connected beside the first look is there by then.
    look_thirty_times(&mut server);
    let before = connections(&mut server);
    look_thirty_times(&mut server);
    assert_eq!(connections(&mut server), before);
    let _holder = world.start(["run", "x", "sleep", "60"]);
    let locks = document(&mut lines);
    assert_eq!((&locks[0]["name"], &locks[0]["claims"][0]["state"]), (&"x".into(), &"held".into()));
    look_thirty_times(&mut server);
    let mut waiter = world.start(["run", "x", "true"]);
    let locks = document(&mut lines);
    assert_eq!(locks[0]["claims"].as_array().unwrap().len(), 2, "all that was printed since: {locks:?}");
    waiter.signal(Signal::TERM);
    waiter.wait();
    assert_eq!(document(&mut lines)[0]["claims"].as_array().unwrap().len(), 1);
}

/// A table that is piped to a file is drawn over itself, or grows with each second that a lock is held.
#[test]
fn in_a_pipe_each_change_is_a_table_of_its_own() {
    let world = World::new();
    let mut watch = world.start(["ls", "--watch=0.1", "a*"]);
    let mut lines = printed(&mut watch);
    let mut table = || {
        let lines: Vec<String> =
            lines.by_ref().map(Result::unwrap).take_while(|line| !line.is_empty()).collect();
        assert!(!lines.join("").contains('\x1b'), "{lines:?}");
        lines
    };
    assert_eq!(table(), ["no lock whose name matches \"a*\" is held, waited for or kept closed"]);
    let mut other = world.start(["run", "b", "sleep", "60"]);
    eventually("another is held", || world.held("b"));
    let mut first = world.start(["run", "a1", "sleep", "1.2"]);
    let held = table();
    assert!(held.len() == 2 && held[1].contains(&format!("pid {}", first.pid())), "{held:?}");
    let _second = world.start(["run", "a2", "sleep", "60"]);
    assert_eq!(table().len(), 3);
    assert_eq!(first.code(), 0);
    let held = table();
    assert!(held.len() == 2 && held[1].starts_with("a2"), "{held:?}");
    other.signal(Signal::TERM);
    other.wait();
}

/// It goes on for ever after its reader has gone, and looks at the store for nobody.
#[test]
fn it_ends_with_its_reader() {
    let world = World::new();
    let mut watch = world.start(["ls", "--watch=0.1"]);
    let mut lines = printed(&mut watch);
    lines.next().unwrap().unwrap();
    drop(lines);
    assert_eq!(watch.code(), 0);
}

/// A server that is restarted ends it, or fills the screen with the same line.
#[test]
fn a_store_out_of_reach_is_told_in_one_line_and_waited_for() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    redis.pause();
    let mut watch = world.start(["ls", "--json", "--watch=0.1"]);
    let mut errors = BufReader::new(watch.0.stderr.take().unwrap()).lines();
    let mut said = || {
        let said: Value = serde_json::from_str(&errors.next().unwrap().unwrap()).unwrap();
        said["message"].as_str().unwrap().to_owned()
    };
    assert!(said().starts_with("no answer yet"));
    redis.resume();
    assert_eq!(said(), "the store answers again");
    let mut lines = printed(&mut watch);
    assert_eq!(document(&mut lines), Vec::<Value>::new());
    redis.kill();
    let line = said();
    assert!(line.starts_with("no answer since "), "{line}");
    watch.signal(Signal::INT);
    assert_eq!(watch.wait().signal(), Some(2));
}

/// What is wrong for good is waited for in silence.
#[test]
fn what_was_never_right_is_refused() {
    let world = World::new();
    assert_eq!(world.code(["-u", "redis://localhost?what=1", "ls", "--watch"]), 64);
    for pause in ["--watch=0", "--watch=0.01", "--watch=soon"] {
        assert_eq!(world.code(["ls", pause]), 64, "{pause}");
    }
}

/// The table scrolls away, is longer than the terminal, or the terminal stays as no shell can use it.
#[test]
fn on_a_terminal_the_table_stays_in_place_and_ctrl_c_gives_the_terminal_back() {
    let world = World::new();
    let names = ["a", "b", "c", "d", "e", "f", "日本", "g\u{1b}[2J"];
    let mut holders = names.map(|name| {
        let holder = world.start(["run", name, "sleep", "60"]);
        eventually("the lock is held", || world.held(name));
        holder
    });
    let mut screen = Screen::start(&world, 20, 80);
    screen.type_in("echo before $((40 + 2))\n");
    screen.shows("before 42");
    screen.type_in("\"$CLINCH\" ls --watch=0.1\n");
    screen.shows("NAME");
    screen.shows("g\\u{1b}[2J");
    assert!(screen.look(|screen| screen.alternate_screen()));
    let lines = screen.lines();
    assert_eq!(lines.len(), 2 + names.len(), "{lines:?}");
    let at = |name: &str, text: &str| {
        let line = screen.line(name);
        line.find(text).map(|at| unicode_width::UnicodeWidthStr::width(&line[..at]))
    };
    assert_eq!(at("日本", "held"), at("NAME", "STATE"), "{lines:?}");
    assert!(screen.bytes().contains("\x1b[32m") || screen.bytes().contains("38;5;2"), "held is green");
    screen.resize(6, 40);
    screen.shows("… 5 more");
    assert!(screen.lines().len() == 6 && screen.line("NAME").contains("STATE"), "{:?}", screen.lines());
    for holder in &mut holders[..6] {
        holder.signal(Signal::TERM);
        holder.wait();
    }
    eventually("all have room", || screen.lines().len() == 4);
    screen.type_in("\x03");
    eventually("the terminal is given back", || screen.is_as_it_was());
    screen.type_in("echo rc=$?.\n");
    screen.shows("rc=130.");
    screen.shows("before 42");
}

/// What is typed scrolls the table away, so that changes are drawn in wrong places, or is run by the shell after it.
#[test]
fn what_is_typed_moves_nothing() {
    let world = World::new();
    let hold = |name: &str| {
        let holder = world.start(["run", name, "sleep", "60"]);
        eventually("the lock is held", || world.held(name));
        holder
    };
    let mut holders = ["a", "b", "c", "d"].map(hold);
    let mut screen = Screen::start(&world, 6, 80);
    screen.type_in("\"$CLINCH\" ls --watch=0.1; echo rc=$?.\n");
    screen.shows("NAME");
    screen.type_in("touch ran\n\n\n");
    holders[1].signal(Signal::TERM);
    holders[1].wait();
    let firsts = |screen: &Screen| {
        let lines = screen.lines().into_iter().skip(1);
        lines.map(|line| line.chars().next().unwrap_or(' ')).collect::<String>()
    };
    eventually("the table is in its place", || firsts(&screen) == "Nacd");
    for (rows, columns) in [(1, 1), (5, 20), (2, 3), (6, 80)] {
        screen.resize(rows, columns);
        eventually("it fits", || screen.lines().len() == usize::from(rows.min(5)));
    }
    eventually("the table is in its place", || firsts(&screen) == "Nacd");
    let pid = screen.child();
    assert!(common::kill(pid, Signal::TERM));
    screen.shows("rc=143.");
    assert!(screen.is_as_it_was() && !world.path("ran").exists());
}

/// Colour is sent to who refuses it.
#[test]
fn no_color_is_heeded() {
    let world = World::new();
    let _holder = world.start(["run", "x", "sleep", "60"]);
    eventually("the lock is held", || world.held("x"));
    let mut screen = Screen::start(&world, 20, 80);
    screen.type_in("NO_COLOR=1 \"$CLINCH\" ls --watch\n");
    screen.shows("held for");
    screen.type_in("\x03");
    eventually("it has ended", || screen.is_as_it_was());
    screen.type_in("NO_COLOR=1 \"$CLINCH\" top; echo code=$?.\n");
    screen.shows("hand-offs/min");
    screen.shows("held for");
    screen.type_in("q");
    screen.shows("code=0.");
    for colour in ["\x1b[31m", "\x1b[32m", "\x1b[33m", "38;5;"] {
        assert!(!screen.bytes().contains(colour), "{:?}", screen.bytes());
    }
}

/// A terminal that knows no codes is drawn on with them.
#[test]
fn a_dumb_terminal_is_printed_on() {
    let world = World::new();
    let mut screen = Screen::start(&world, 20, 80);
    screen.type_in("TERM=dumb \"$CLINCH\" ls --watch\n");
    screen.shows("no lock is held");
    assert!(!screen.look(|screen| screen.alternate_screen()));
    screen.type_in("\x03");
    screen.type_in("TERM=dumb \"$CLINCH\" top; echo code=$?.\n");
    screen.shows("code=64.");
}

/// Whoever follows the locks of a directory that was moved, or is not there yet, sees none for ever, or makes it.
#[test]
fn a_directory_that_comes_or_was_made_anew_is_followed() {
    let world = World::new();
    let mut watch = world.clinch(["ls", "--json", "--watch=0.1"]);
    let to = |name| std::fs::File::create(world.path(name)).unwrap();
    let _watch = Running(watch.stdout(to("watched")).stderr(to("said")).spawn().unwrap());
    eventually("it has looked", || world.lines("watched") == 1);
    assert!(!world.path("store").exists(), "a look makes nothing");
    for at in ["once", "moved"] {
        let holder = world.start(["run", at, "sleep", "60"]);
        let name = format!("\"name\":\"{at}\"");
        eventually("it is seen", || world.read("watched").lines().last().unwrap().contains(&name));
        std::fs::rename(world.path("store"), world.path(at)).unwrap();
        drop(holder);
    }
}
