//! `clinch top` on a terminal, under a shell with job control.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod common;

use clinch_testkit::Redis;
use common::pty::Screen;
use common::{Running, World, eventually, kill};
use rustix::process::Signal;

/// A process that holds a lock, or waits for it.
fn claim(world: &World, name: &str, state: &str) -> Running {
    let before = world.claims(name, state).len();
    let running = world.start(["run", name, "sleep", "60"]);
    eventually(&format!("{name} is {state}"), || world.claims(name, state).len() > before);
    running
}

/// The screen of `top`, once there is an answer.
fn top(world: &World, rows: u16, columns: u16) -> Screen {
    let mut screen = Screen::start(world, rows, columns);
    screen.type_in("\"$CLINCH\" top; echo rc=$?.\n");
    screen.shows("hand-offs/min");
    screen
}

/// An operator chooses by keys what he sees, and sees it change hands.
#[test]
fn who_holds_and_who_waits_is_seen_as_it_changes() {
    let world = World::new();
    let holder = claim(&world, "nightly", "held");
    let waiter = claim(&world, "nightly", "waiting");
    let _wide = claim(&world, "日本", "held");
    let _odd = claim(&world, "odd\u{1b}[2J", "held");
    let mut screen = top(&world, 24, 80);
    screen.shows("── nightly: 1 waiting ──");
    screen.shows(&format!("pid {}", holder.pid()));
    screen.shows("odd\\u{1b}[2J");
    eventually("the waiter is in the queue", || {
        screen.line("waiting for").contains(&format!("pid {}", waiter.pid()))
    });
    let column = |screen: &Screen, name: &str, text: &str| {
        let line = screen.line(name);
        line.find(text).map(|at| unicode_width::UnicodeWidthStr::width(&line[..at]))
    };
    assert_eq!(column(&screen, "日本", "held"), column(&screen, "NAME", "STATE"));
    screen.type_in("j");
    screen.shows("── odd\\u{1b}[2J: 0 waiting ──");
    screen.type_in("\x1b[F");
    screen.shows("── 日本: 0 waiting ──");
    screen.type_in("/night");
    screen.shows("locks: 1 of 3");
    screen.type_in("\rq");
    screen.shows("rc=0.");
    assert!(screen.is_as_it_was());
    screen.type_in("\"$CLINCH\" top\n");
    screen.shows("locks: 3");
    holder.signal(Signal::TERM);
    screen.shows("hand-offs/min: 1");
    screen.shows("── nightly: 0 waiting ──");
    screen.shows(&format!("pid {}", waiter.pid()));
    screen.type_in("?");
    screen.shows("take the chosen lock away");
    screen.type_in("\x03");
    eventually("the terminal is given back", || screen.is_as_it_was());
}

/// A lock is taken away unasked, or its holder is never told.
#[test]
fn b_takes_the_chosen_lock_away_after_a_yes() {
    let world = World::new();
    let mut other = claim(&world, "a", "held");
    let mut holder = claim(&world, "b", "held");
    let mut screen = top(&world, 24, 80);
    screen.shows("locks: 2");
    // Where this is pasted, it is no command.
    screen.type_in("\x1b[200~by\x1b[201~");
    screen.type_in("j");
    screen.shows("── b: 0 waiting ──");
    screen.type_in("b");
    screen.shows("break b");
    screen.shows("Its job may still be running.");
    assert!(screen.line("held since").contains(&format!("pid {}", holder.pid())));
    screen.type_in("n");
    screen.shows("nothing was done");
    assert!(world.held("a") && world.held("b"));
    screen.type_in("by");
    screen.shows("evicted: held since");
    assert_eq!(holder.code(), 79);
    assert!(world.held("a"));
    screen.type_in("\x1b");
    screen.shows("rc=0.");
    assert!(other.0.try_wait().unwrap().is_none());
}

/// What a holder has closed behind itself while the question stood there is opened, which nobody was asked about.
#[test]
fn b_opens_nothing_that_was_closed_meanwhile() {
    let world = World::new();
    let job = "while [ ! -e stop ]; do sleep 0.02; done";
    let mut holder = world.start(["run", "--min-hold", "1h", "x", "-c", job]);
    eventually("it is held", || world.held("x"));
    let mut screen = top(&world, 24, 80);
    screen.shows("locks: 1");
    screen.type_in("b");
    screen.shows("Its job may still be running.");
    world.write("stop", "");
    assert_eq!(holder.code(), 0);
    screen.type_in("y");
    screen.shows("gone: held since");
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75, "it is closed");
}

/// Its end by a signal, or a stop, leaves a terminal that shows no cursor and echoes no keys.
#[test]
fn every_way_out_gives_the_terminal_back() {
    let world = World::new();
    for signal in [Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1] {
        let mut screen = top(&world, 24, 80);
        assert!(!screen.is_as_it_was());
        assert!(kill(screen.child(), signal));
        screen.shows(&format!("rc={}.", 128 + signal.as_raw()));
        assert!(screen.is_as_it_was(), "after {signal:?}");
        screen.type_in("exit\n");
        screen.shell.wait();
    }
    let mut screen = top(&world, 24, 80);
    let pid = screen.child();
    for stop in ["\x1a", ""] {
        match stop {
            "" => assert!(kill(pid, Signal::TSTP)),
            keys => screen.type_in(keys),
        }
        eventually("it is stopped", || common::state(pid) == Some('T') && screen.is_as_it_was());
        screen.type_in("echo shell $((40 + 2))\n");
        screen.shows("shell 42");
        screen.type_in("clear; fg\n");
        screen.shows("hand-offs/min");
        screen.shows("q leave");
        eventually("it has the terminal", || !screen.is_as_it_was());
    }
    screen.type_in("q");
    eventually("it has ended", || common::state(pid).is_none() && screen.is_as_it_was());
}

/// It draws over what another job shows, or waits for the terminal without rest and hears no signal.
#[test]
fn in_the_background_it_is_stopped_until_it_has_the_terminal() {
    let world = World::new();
    for (verb, shown) in [("top", "hand-offs/min"), ("ls --watch", "no lock is held")] {
        let mut screen = Screen::start(&world, 24, 80);
        screen.type_in(&format!("\"$CLINCH\" {verb} & echo began=$?.\n"));
        screen.shows("began=0.");
        let pid = screen.child();
        let is_stopped = || common::state(pid) == Some('T');
        eventually("it is stopped", is_stopped);
        assert!(screen.is_as_it_was());
        // The kernel tells the shell after that, which sends nothing that goes on to what it takes for running.
        screen.type_in("until jobs -s | grep Stopped; do sleep 0.02; done; clear; fg\n");
        screen.shows(shown);
        screen.type_in("\x1a");
        eventually("it is stopped by a key", || is_stopped() && screen.is_as_it_was());
        screen.type_in("clear; bg; echo shell $((40 + 2))\n");
        screen.shows("shell 42");
        eventually("it is stopped again", is_stopped);
        assert!(screen.is_as_it_was() && screen.line(shown).is_empty(), "{:?}", screen.lines());
        assert!(kill(pid, Signal::TERM) && kill(pid, Signal::CONT));
        eventually("it has ended", || !common::runs(pid));
    }
}

/// A store that hangs takes the keys with it, and looks as if nothing happened there.
#[test]
fn a_store_that_hangs_is_told_and_keys_are_heard() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let _holder = claim(&world, "x", "held");
    let mut screen = top(&world, 24, 80);
    screen.shows("locks: 1");
    redis.pause();
    screen.shows("no answer since ");
    screen.type_in("?");
    screen.shows("any key closes this");
    screen.type_in("?");
    eventually("the help is closed", || screen.line("any key").is_empty());
    screen.shows("did not answer within");
    redis.resume();
    screen.shows("q leave");
    let _second = claim(&world, "y", "held");
    screen.shows("locks: 2");
    redis.pause();
    screen.shows("no answer since ");
    screen.type_in("q");
    screen.shows("rc=0.");
    redis.resume();
}

/// A screen of another size shows half of what is there, or nothing.
#[test]
fn it_fits_the_terminal() {
    let world = World::new();
    let names: Vec<String> = (10..30).map(|n| format!("a-rather-long-name/of-a-lock/{n}")).collect();
    for name in &names {
        assert_eq!(world.code(["run", "--min-hold", "1h", name, "true"]), 0);
    }
    let _holder = claim(&world, &names[0], "waiting");
    let mut screen = top(&world, 24, 80);
    screen.shows("/22");
    assert_eq!(screen.lines().len(), 24);
    screen.resize(15, 50);
    screen.shows("q leave  ? keys");
    eventually("it has its new size", || screen.lines().len() == 15);
    screen.type_in("\x1b[6~");
    screen.shows("17: 0 waiting");
    assert!(screen.line("/17").contains("closed"), "{:?}", screen.lines());
    screen.type_in("\x1b[5~\x1b[F");
    screen.shows("29: 0 waiting");
    screen.resize(30, 120);
    screen.shows("a-rather-long-name/of-a-lock/29  closed");
    // More than could be kept in memory.
    screen.type_in("\x03");
    eventually("it has ended", || screen.is_as_it_was());
    // Until then what is typed may be read by it.
    screen.shows("rc=0.");
    screen.type_in("clear; stty rows 65535 cols 65535; \"$CLINCH\" top; echo rc=$?.\n");
    eventually("it is shown", || !screen.is_as_it_was());
    screen.resize(24, 80);
    screen.shows("q leave  ? keys");
    for (rows, columns) in [(3, 8), (1, 1), (5, 20)] {
        screen.resize(rows, columns);
        screen.type_in("bb?q");
    }
    screen.resize(24, 80);
    screen.type_in("q");
    screen.shows("rc=0.");
}

/// Where nobody looks, or nobody can type, it draws for nobody and never ends.
#[test]
fn without_a_terminal_it_is_refused() {
    let world = World::new();
    let output = world.output(["top"]);
    assert_eq!(output.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&output.stderr).contains("needs a terminal"), "{output:?}");
    let mut screen = Screen::start(&world, 24, 80);
    screen.type_in(
        "\"$CLINCH\" top < /dev/null; echo in=$?.; \"$CLINCH\" top | cat; echo out=${PIPESTATUS[0]}.\n",
    );
    screen.shows("in=64.");
    screen.shows("out=64.");
}
