//! As process 1 of a container.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::process::{Command, Stdio};

use clinch_testkit::Redis;
use common::{Running, World, eventually, kill, runs};
use rustix::process::Signal;

/// A process 1 of a pid namespace, with a `/proc` of its own or with that of the host.
fn process_1(world: &World, has_proc: bool, args: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork"]).args(has_proc.then_some("--mount-proc"));
    command.arg(env!("CARGO_BIN_EXE_clinch")).args(args);
    command.current_dir(world.path(".")).env("CLINCH_URL", world.url()).env_remove("CLINCH_HELD");
    command
}

/// As process 1, orphans stay zombies, or a signal that nobody else could send is lost.
#[test]
fn as_process_1_it_reaps_orphans_and_passes_signals_on() {
    let world = World::new();
    let job = r#"
        (sh -c 'echo $$ > orphan.new; mv orphan.new orphan; exec sleep 0.2' &)
        while [ ! -s orphan ]; do sleep 0.02; done
        orphan=$(cat orphan); tries=0
        while kill -0 $orphan 2>/dev/null; do
            sleep 0.02; tries=$((tries + 1)); [ $tries -lt 1000 ] || exit 11
        done
        [ $PPID = 1 ] || exit 12
        trap 'exit 5' TERM
        kill -TERM 1
        while :; do sleep 0.02; done"#;
    for has_proc in [true, false] {
        let output = process_1(&world, has_proc, &["run", "x", "-c", job]).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(5), "needs root for a PID namespace: {message}");
        assert!(!world.held("x"));
        std::fs::remove_file(world.path("orphan")).unwrap();
    }
}

/// A container that shows the host's `/proc` can run no job; or its parts that nobody finds there work on without the lock.
#[test]
fn as_process_1_it_ends_all_of_its_job_whatever_proc_shows() {
    let world = World::new();
    let job = r#"
        setsid sh -c 'trap "" TERM; echo $$ > part; while :; do sleep 0.02; done' &
        (setsid sh -c 'kill -STOP $$' &)
        while [ ! -s part ]; do sleep 0.02; done
        trap "" TERM
        while :; do sleep 0.02; done"#;
    for has_proc in [true, false] {
        let run = ["run", "--max-hold", "2s", "--grace", "0.3s", "x", "-c", job];
        let output = process_1(&world, has_proc, &run).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(79), "{message}");
        assert!(message.contains("--max-hold"), "{message}");
        assert!(!world.read("part").is_empty() && !world.held("x"));
        std::fs::remove_file(world.path("part")).unwrap();
    }
}

/// What a stopped process 1 cannot end works on without the lock.
#[test]
fn the_job_of_a_stopped_process_1_ends_with_its_lease() {
    let redis = Redis::start();
    let world = World::on(redis.url());
    let job = r#"setsid sh -c 'while :; do echo >> beats; sleep 0.02; done' & while :; do sleep 0.02; done"#;
    for has_proc in [true, false] {
        let run = ["run", "--ttl", "2s", "x", "-c", job];
        let mut run = Running(process_1(&world, has_proc, &run).stderr(Stdio::null()).spawn().unwrap());
        eventually("the job works", || world.lines("beats") > 5);
        let children = format!("/proc/{0}/task/{0}/children", run.pid());
        let process_1 = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
        assert!(kill(process_1, Signal::STOP));
        // It is woken when all others have ended. `unshare` is stopped with it, and woken by nobody.
        eventually("it ends", || !runs(process_1));
        run.signal(Signal::CONT);
        assert_eq!(run.code(), 79);
        std::fs::remove_file(world.path("beats")).unwrap();
    }
}

/// Where nothing shows who runs inside the job, none is let in, and none waits for itself.
#[test]
fn without_a_proc_of_its_own_nobody_enters_the_lock_of_process_1() {
    let world = World::new();
    let inner = format!("{} run x true", env!("CARGO_BIN_EXE_clinch"));
    let output = process_1(&world, false, &["run", "x", "-c", &inner]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(70..=79)) && message.contains("/proc"), "{message}");
}

/// The ids in the `/proc` of another namespace are those of strangers, who would be taken for the caller, or be killed in place of the job.
#[test]
fn ids_of_another_namespace_are_not_believed() {
    let world = World::new();
    for (umount, args, code) in [
        (":", "run x true", 70),
        ("umount -l /proc", "run x true", 70),
        (":", "acquire x", 64),
        (":", "acquire --for 1 x", 0),
    ] {
        let script = format!("{umount}; \"$CLINCH\" {args}");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "sh", "-c", &script]);
        command.env("CLINCH", env!("CARGO_BIN_EXE_clinch"));
        command.env("CLINCH_URL", world.url()).env_remove("CLINCH_HELD");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args}: {said}");
        assert!(code != 70 || said.contains("mount -t proc"), "{said}");
    }
}
