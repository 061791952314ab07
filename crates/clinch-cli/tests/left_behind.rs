//! Runs inside a job that enter its lock, and outlive it: nothing runs on under a lock that is free.

mod common;

use clinch_testkit::{Proxy, Redis};
use common::{CLOSE, Running, World, eventually, kill, program, runs};
use rustix::process::Signal;

/// A job that ends when an inner run of its lock works, which it leaves behind. `$INNER` starts that.
const JOB: &str = "while [ ! -s inner.pid ]; do sleep 0.02; done; exit 6";
const INNER: &str = r#""$CLINCH" run x sh ./inner > /dev/null 2>&1 &"#;

/// What the inner run runs, until there is `stop`.
const WORK: &str = "echo $$ > inner.pid; while [ ! -e stop ]; do sleep 0.02; done";

/// Starts such a job, and waits until it has ended.
fn leave_behind(world: &World, inner: &str, work: &str) -> Running {
    world.write("inner", work);
    let run = world.start(["run", "--events", "events", "x", "-c", &format!("{inner} {JOB}")]);
    eventually("the job has ended", || world.read("events").contains("exited"));
    run
}

/// An inner run goes on without the lock, beside the next holder: one that has left the job, whose parent goes on, or that nobody can tell by
/// its environment.
#[test]
fn a_lock_is_not_released_under_an_inner_run() {
    let unknown = INNER.replace(" sh ", " env -i sh ");
    for inner in [INNER, &unknown, &format!("(setsid {INNER}) &"), &format!("({INNER} sleep 60) &")] {
        let world = World::new();
        let mut run = leave_behind(&world, inner, WORK);
        assert_eq!(world.code(["run", "-n", "x", "true"]), 75, "{inner}");
        assert!(runs(world.pid("inner.pid")));
        world.write("stop", "");
        assert_eq!(run.code(), 6, "{inner}");
        assert_eq!(world.code(["run", "-n", "x", "true"]), 0);
    }
}

/// Nobody can end what is waited for, or its lock cannot be taken away.
#[test]
fn an_inner_run_that_is_left_behind_ends_on_a_signal_and_with_the_lock() {
    let world = World::new();
    let mut run = leave_behind(&world, INNER, WORK);
    run.signal(Signal::TERM);
    assert_eq!(run.code(), 6);
    assert!(!runs(world.pid("inner.pid")));
    let world = World::new();
    let work = "trap '' TERM; (echo $(exec sh -c 'echo $PPID') > part.pid; while :; do sleep 0.02; done) & sh -c 'exit'; ";
    let mut run = leave_behind(&world, INNER, &format!("{work}{WORK}"));
    let parts = [world.pid("inner.pid"), world.pid("part.pid")];
    assert_eq!(world.code(["break", "--yes", "x"]), 0);
    assert_eq!(run.code(), 79);
    assert!(!parts.into_iter().any(runs), "they work on without the lock");
}

/// A stop reaches an inner run that is left behind, which then hears nothing and keeps the lock for ever.
#[test]
fn an_inner_run_that_is_left_behind_is_not_stopped() {
    let world = World::new();
    let mut run = leave_behind(&world, INNER, WORK);
    run.signal(Signal::TSTP);
    // Another's stop does not help either.
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(world.pid("inner.pid")).unwrap(),
        Signal::STOP,
    )
    .unwrap();
    run.signal(Signal::TERM);
    assert_eq!(run.code(), 6);
    assert!(!runs(world.pid("inner.pid")));
}

/// Starts a part beside it, and ends before that when both are asked to end.
const PARENT: &str = "START & while [ ! -s part.pid ]; do sleep 0.02; done; echo $$ > inner.pid; wait; exit";

/// A signal ends the first process of an inner run that is left behind, and nothing else of it.
#[test]
fn a_signal_reaches_all_of_an_inner_run_that_is_left_behind() {
    for part in ["sh ./part", "timeout 60 sh ./part"] {
        let world = World::new();
        world.write("part", &WORK.replace("inner", "part"));
        let mut run = leave_behind(&world, INNER, &PARENT.replace("START", part));
        run.signal(Signal::TERM);
        assert_eq!(run.code(), 6);
        eventually("it does not work on without the lock", || !runs(world.pid("part.pid")));
    }
}

/// A process that enters two locks is known to one of the two jobs only, whose ends then free the other under it.
#[test]
fn a_run_that_enters_two_locks_keeps_both() {
    let inner = INNER.replace("run x", r#"run x "$CLINCH" run y"#);
    for (outer, middle) in [("x", "y"), ("y", "x")] {
        let world = World::new();
        world.write("inner", WORK);
        world.write("job", &format!("{inner} {JOB}"));
        let job = format!(r#""$CLINCH" run --events events {middle} sh ./job"#);
        let mut run = world.start(["run", outer, "-c", &job]);
        eventually("the job has ended", || world.read("events").contains("exited"));
        for name in ["x", "y"] {
            assert_eq!(world.code(["run", "-n", name, "true"]), 75, "{name} is free under it");
        }
        world.write("stop", "");
        assert_eq!(run.code(), 6);
    }
}

/// What an inner run has started and left behind, or a daemon, keeps the lock for ever.
#[test]
fn what_an_inner_run_leaves_behind_does_not_keep_the_lock() {
    let world = World::new();
    let inner = r#""$CLINCH" run x -c 'setsid sleep 60 > /dev/null 2>&1 & echo $! > inner.pid'; "#;
    let mut run = leave_behind(&world, inner, "");
    assert_eq!(run.code(), 6);
    assert!(runs(world.pid("inner.pid")));
}

/// The wrapper is killed, and an inner run that has left the job goes on without the lock.
#[test]
fn an_inner_run_ends_with_a_killed_wrapper_where_it_cannot_keep_the_lock() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let run = leave_behind(&world, &format!("(setsid {INNER}) &"), WORK);
    run.signal(Signal::KILL);
    eventually("the inner run has ended", || !runs(world.pid("inner.pid")));
}

/// The wrapper is killed, and an inner run that has left the job, and keeps nothing open, goes on beside the next holder.
#[test]
fn an_inner_run_keeps_the_lock_of_a_killed_wrapper_where_that_can_be() {
    let world = World::new();
    let inner = INNER.replace(" sh ", " bash ");
    let run = leave_behind(&world, &format!("(setsid {inner}) &"), &format!("{CLOSE} {WORK}"));
    run.signal(Signal::KILL);
    run.kill();
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75);
    let mut next = world.start(["run", "x", "true"]);
    eventually("the next one waits", || world.claims("x", "waiting").len() == 1);
    assert!(runs(world.pid("inner.pid")));
    world.write("stop", "");
    assert_eq!(next.code(), 0);
    assert!(!runs(world.pid("inner.pid")));
}

/// As above, when the lock is taken away.
#[test]
fn an_inner_run_that_keeps_the_lock_of_a_killed_wrapper_ends_with_it() {
    let world = World::new();
    let inner = INNER.replace(" sh ", " bash ");
    let run = leave_behind(&world, &format!("(setsid {inner}) &"), &format!("trap '' TERM; {CLOSE} {WORK}"));
    run.signal(Signal::KILL);
    run.kill();
    let is_there = "grep -q '^State:.[^ZX]' /proc/$(cat inner.pid)/status && echo > two; :";
    let mut next = world.start(["run", "x", "sh", "-c", is_there]);
    eventually("the next one waits", || world.claims("x", "waiting").len() == 1);
    assert!(runs(world.pid("inner.pid")));
    assert_eq!(world.code(["break", "--yes", "x"]), 0);
    assert_eq!((next.code(), world.read("two")), (0, String::new()), "two at once");
}

/// The watch waits for what was told of its lock, and that for the watch: without end, and all who come later with them.
#[test]
fn who_was_told_of_the_lock_of_a_killed_wrapper_does_not_wait_for_it_any_more() {
    for waiter in ["run x touch ran", "acquire --for $$ x"] {
        let world = World::new();
        let job = "echo $CLINCH_HELD > held; echo $$ > job.pid; exec sleep 600";
        let run = world.start(["run", "--orphans", "wait", "x", "-c", job]);
        let job = world.pid("job.pid");
        // Not of the job, as one of `at`, nor is the shell around it.
        let script = format!("\"$CLINCH\" {waiter} 2> said; echo $? > code; exit 7");
        let mut spooled = program(&world, &["sh", "-c", &script]);
        let mut spooled = Running(spooled.env("CLINCH_HELD", world.read("held").trim()).spawn().unwrap());
        eventually("it waits", || world.claims("x", "waiting").len() == 1);
        let mut next = world.start(["run", "x", "true"]);
        eventually("the next one waits", || world.claims("x", "waiting").len() == 2);
        run.signal(Signal::KILL);
        run.kill();
        assert!(kill(job, Signal::KILL));
        assert_eq!((spooled.code(), next.code()), (7, 0), "{waiter}");
        assert_eq!(world.read("code"), "75\n", "{waiter}");
        assert!(world.read("said").contains("would never end"), "{}", world.read("said"));
        assert!(!world.path("ran").exists());
    }
}

/// Runs a job on a store with a TTL by a wrapper with few descriptors.
fn start_with_few_descriptors(world: &World, job: &str) -> Running {
    let few = format!(
        r#"echo $$ > wrapper.pid; ulimit -n 64; exec "$CLINCH" run -q --events events x sh -c '{job}'"#
    );
    world.start(["run", "other", "sh", "-c", &few])
}

/// The wrapper keeps so many that it has no descriptor left to end any.
#[test]
fn many_inner_runs_are_ended_with_few_descriptors() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let inner = r#"setsid "$CLINCH" run x sh ./inner 2>> refused &"#;
    world.write("inner", "trap \"\" TERM; echo $$ >> pids; while :; do sleep 0.02; done");
    let job = format!("i=0; while [ $i -lt 80 ]; do i=$((i+1)); {inner} done; wait");
    let mut run = start_with_few_descriptors(&world, &job);
    eventually("no more can enter", || world.lines("pids") + world.lines("refused") >= 80);
    let wrapper = format!("/proc/{}/fd", world.pid("wrapper.pid"));
    assert!(std::fs::read_dir(wrapper).unwrap().count() < 48, "none is left to look for them");
    assert_eq!(world.code(["break", "--yes", "x"]), 0);
    assert_eq!(run.code(), 79);
    for pid in world.read("pids").lines() {
        assert!(!runs(pid.parse().unwrap()), "it works on without the lock");
    }
}

/// A process that enters again and again, each time as another program, fills the wrapper, and then waits for itself.
#[test]
fn one_process_may_enter_again_and_again() {
    let world = World::new();
    world.write("inner", r#"i=$(($1 - 1)); [ $i -eq 0 ] || exec "$CLINCH" run -w 20 x sh ./inner $i"#);
    let mut run = start_with_few_descriptors(&world, "sh ./inner 80");
    assert_eq!(run.code(), 0);
}

/// A run that enters the lock of a job that is just ending works beside the next holder.
#[test]
fn an_inner_run_that_begins_as_the_job_ends_excludes_others() {
    const ROUNDS: usize = 20;
    let world = World::new();
    world.write("inner", "mkdir alone || echo >> two; sleep 0.01; rmdir alone; echo >> done");
    let outer =
        r#"(sleep 0.0$((CLINCH_TOKEN % 3)); "$CLINCH" run x sh ./inner > /dev/null 2>&1) & sleep 0.01"#;
    let others = |_| world.start(["run", "x", "-c", &format!("sh ./inner; {outer}")]);
    for _ in 0..ROUNDS / 4 {
        (0..4).map(others).collect::<Vec<_>>().iter_mut().for_each(|run| assert_eq!(run.code(), 0));
    }
    eventually("all inner runs are done", || world.lines("done") == 2 * ROUNDS);
    assert_eq!(world.lines("two"), 0, "two at once");
}

/// A run that begins as the job is killed for its lock's sake enters under that lock, and goes on beside the next holder.
#[test]
fn an_inner_run_does_not_enter_a_lock_whose_job_was_stopped() {
    let redis = Redis::start();
    let (world, proxy) = (World::on(redis.url()), Proxy::start(redis.addr()));
    // Again and again, since a run that asks while the job is being killed is killed with it.
    let daemon = r#"echo $$ > daemon.pid; until grep -q exited events; do sleep 0.02; done
        while [ ! -e done ]; do "$CLINCH" -u URL run --events inner x touch done; done"#;
    world.write("daemon", &daemon.replace("URL", &world.url()));
    let job = "(setsid sh ./daemon > /dev/null 2>&1 &); trap 'exit 0' TERM; while :; do sleep 0.02; done";
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let args = ["-u", &url, "run", "--ttl", "3s", "--grace", "750ms", "--events", "events", "x", "-c", job];
    let mut run = world.start(args);
    world.pid("daemon.pid");
    // It cannot release its lock any more, and is as long about to end.
    proxy.black_hole(true);
    eventually("the inner run has ended", || world.path("done").exists());
    let is = |event| move |line: &serde_json::Value| line["event"] == event;
    let events = world.events("inner");
    assert!(events.iter().any(is("acquired")) && !events.iter().any(is("reentered")), "{events:?}");
    assert_eq!(run.code(), 79);
}
