//! Signals to the wrapper.

mod common;

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{MANY, Running, World, end_large_job, eventually, kill, large_job, runs};
use rustix::process::Signal;

/// In Python: a shell forks, and what it has forked may run its traps as well until it is another program.
const LOGGING_JOB: &str = "import os,signal,sys,time
def log(number,_): os.write(to,signal.Signals(number).name[3:].encode()+b'\\n')
to=os.open('log',os.O_WRONLY|os.O_APPEND|os.O_CREAT,0o666)
for name in 'INT TERM HUP QUIT USR1 USR2 WINCH TSTP CONT'.split(): signal.signal(getattr(signal,'SIG'+name),log)
open('job.pid','w').write(str(os.getpid())+'\\n')
while not os.path.exists('stop'): time.sleep(0.02)
sys.exit(3)";

/// A job gets a signal twice, or not at all.
#[test]
fn each_signal_reaches_the_job_once() {
    let world = World::new();
    let mut run = world.start(["run", "x", "python3", "-c", LOGGING_JOB]);
    world.pid("job.pid");
    let signals = [
        (Signal::INT, "INT"),
        (Signal::TERM, "TERM"),
        (Signal::HUP, "HUP"),
        (Signal::QUIT, "QUIT"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
        (Signal::WINCH, "WINCH"),
        (Signal::TSTP, "TSTP"),
        (Signal::CONT, "CONT"),
        (Signal::TERM, "TERM"),
    ];
    for (sent, (signal, name)) in signals.into_iter().enumerate() {
        run.signal(signal);
        eventually(&format!("{name} reaches the job"), || world.lines("log") > sent);
    }
    world.write("stop", "");
    assert_eq!(run.code(), 3);
    let names: Vec<&str> = signals.iter().map(|(_, name)| *name).collect();
    assert_eq!(world.read("log").lines().collect::<Vec<_>>(), names);
}

/// A signal reaches the job's first process only, and its children go on.
#[test]
fn the_jobs_whole_group_is_told() {
    let world = World::new();
    let mut run = world.start(["run", "x", "-c", "sleep 60 & echo $! > sleep.pid; echo $$ > job.pid; wait"]);
    let (job, sleep) = (world.pid("job.pid"), world.pid("sleep.pid"));
    run.signal(Signal::TERM);
    assert_eq!(run.code(), 128 + 15);
    eventually("both are gone", || !runs(job) && !runs(sleep));
}

/// A run inside the job passes on what it gets, and its job gets it from the run around that, too.
#[test]
fn a_signal_reaches_the_job_of_a_run_inside_once() {
    let world = World::new();
    world.write("job", LOGGING_JOB);
    let clinch = env!("CARGO_BIN_EXE_clinch");
    // As where an upgrade has replaced it under the run, or two are installed.
    world.install(clinch, "clinch");
    let (below_a_shell, another) =
        (format!("trap : USR1 USR2; '{clinch}' run y python3 ./job; exit $?"), world.path("clinch"));
    for job in [
        &["-c", &below_a_shell][..],
        &["--", clinch, "run", "y", "python3", "./job"],
        &["--", another.to_str().unwrap(), "run", "y", "python3", "./job"],
    ] {
        let mut run = world.start(["run", "x"].iter().chain(job).copied());
        world.pid("job.pid");
        for (sent, signal) in [Signal::USR1, Signal::USR2, Signal::USR1].into_iter().enumerate() {
            run.signal(signal);
            eventually("it reaches the job", || world.lines("log") > sent);
        }
        world.write("stop", "");
        assert_eq!(run.code(), 3);
        assert_eq!(world.read("log"), "USR1\nUSR2\nUSR1\n");
        for file in ["stop", "log", "job.pid"] {
            std::fs::remove_file(world.path(file)).unwrap();
        }
    }
}

/// Some hear of it, the first process among them; the others work on when the lock is free.
#[test]
fn a_large_job_is_told_as_a_whole() {
    let world = World::new();
    let job = large_job("signal.signal(signal.SIGTERM,signal.SIG_DFL)");
    let mut run = world.start(["run", "-q", "x", "python3", "-c", &job]);
    world.pid("job.pid");
    eventually("all run", || world.lines("begun") == MANY);
    run.signal(Signal::TERM);
    assert_eq!(run.code(), 128 + 15);
    // Who was told before may say so a little later.
    let began = Instant::now();
    while world.lines("told") < MANY && began.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let told = world.lines("told");
    end_large_job(&world);
    assert_eq!(told, MANY, "others run on without the lock");
}

/// A part whose parent dies of the same signal falls to a reaper in the job, is found nowhere any more, and runs on without the lock.
#[test]
fn a_part_that_falls_to_a_reaper_in_the_job_is_told() {
    const PARTS: usize = 60;
    let world = World::new();
    // The first process is as `tini -s`. It stays until it is killed.
    let job = "import ctypes,os,signal
def say(to): os.write(os.open(to,os.O_WRONLY|os.O_APPEND|os.O_CREAT,0o666),b'%d\\n'%os.getpid())
def told(*_): say('told'); os._exit(0)
ctypes.CDLL(None).prctl(36,1,0,0,0)
for i in range(20):
    if os.fork()==0:
        for j in range(3):
            if os.fork()==0:
                signal.signal(signal.SIGTERM,told); say('begun')
                while True: signal.pause()
        while True: signal.pause()
signal.signal(signal.SIGTERM,lambda *_: None)
open('job.pid','w').write(str(os.getpid())+'\\n')
while True:
    try: os.waitpid(-1,0)
    except ChildProcessError: signal.pause()";
    let mut run = world.start(["run", "-q", "x", "python3", "-c", job]);
    let first = world.pid("job.pid");
    eventually("all run", || world.lines("begun") == PARTS);
    run.signal(Signal::TERM);
    let began = Instant::now();
    while world.lines("told") < PARTS && began.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let told = world.lines("told");
    end_large_job(&world);
    common::kill(first, Signal::KILL);
    assert_eq!((told, run.code()), (PARTS, 128 + 9), "others run on without the lock");
}

/// A trap's cleanup dies of the very signal by which it was begun.
#[test]
fn what_a_handler_starts_does_not_hear_the_signal() {
    let world = World::new();
    let cleaned_up = |end: &dyn Fn(&Running), signal: &str, turns: usize| {
        let job = format!(
            "trap 'sleep 0.1; echo $? >> cleaned; exit 0' {signal}; echo $$ > job.pid; sleep 100 & wait"
        );
        for _ in 0..turns {
            let mut run = world.start(["run", "-q", "x", "sh", "-c", &job]);
            world.pid("job.pid");
            end(&run);
            run.wait();
            std::fs::remove_file(world.path("job.pid")).unwrap();
        }
        assert_eq!(world.read("cleaned"), "0\n".repeat(turns), "{signal}");
        std::fs::remove_file(world.path("cleaned")).unwrap();
    };
    for (name, signal) in [("TERM", Signal::TERM), ("HUP", Signal::HUP), ("USR1", Signal::USR1)] {
        cleaned_up(&|run| run.signal(signal), name, 10);
    }
    cleaned_up(&|_| assert_eq!(world.code(["break", "--yes", "x"]), 0), "TERM", 4);
}

/// All who have said that they had begun are.
fn are_gone(world: &World) {
    let begun = world.read("begun");
    let begun = begun.lines().filter_map(|pid| pid.parse().ok());
    eventually("all of it are gone", || !begun.clone().any(runs));
    world.write("begun", "");
}

/// What is forked right then runs on without the lock, as soon as its parent has ended: it falls to whoever has heard the signal before, or to us.
#[test]
fn what_is_forked_meanwhile_is_told() {
    let world = World::new();
    let job = "import ctypes,os,signal,sys,time
if sys.argv[1]=='reaper': ctypes.CDLL(None).prctl(36,1,0,0,0)
forker=os.fork()
if not forker:
    to=os.open('begun',os.O_WRONLY|os.O_APPEND|os.O_CREAT,0o666)
    while os.getppid()!=1:
        between=os.fork()
        if not between:
            if not os.fork():
                os.write(to,b'%d\\n'%os.getpid()); time.sleep(60)
            os._exit(0)
        os.waitpid(between,0)
signal.signal(signal.SIGTERM,lambda *_: os.kill(forker,signal.SIGTERM))
while os.waitpid(-1,0)[0]!=forker: pass";
    for who in ["reaper", "us"] {
        for turn in 1..=8 {
            let mut run = world.start(["run", "-q", "x", "python3", "-c", job, who]);
            eventually("some are forked", || world.lines("begun") > 2 * turn);
            run.signal(Signal::TERM);
            run.wait();
            are_gone(&world);
        }
    }
}

/// A shell between two that were told is gone before anybody has met it: what it leaves behind falls to us when all have been looked at.
#[test]
fn what_a_shell_has_just_left_behind_is_told() {
    let world = World::new();
    world.write("part", "echo $$ >> begun; exec sleep 60");
    for turn in 1..=30 {
        let job = "while :; do (sh ./part & sleep 0.002); done";
        let mut run = world.start(["run", "-q", "x", "sh", "-c", job]);
        eventually("some are left behind", || world.lines("begun") > turn % 10);
        run.signal(Signal::TERM);
        assert_eq!(run.code(), 128 + 15);
        are_gone(&world);
    }
}

/// What a run inside the job has told, and leaves behind, hears it again from us: to be asked twice may mean to end at once.
#[test]
fn what_a_run_inside_a_large_job_leaves_behind_is_told_once() {
    let world = World::new();
    world.write(
        "part",
        "trap 'echo TERM >> log' TERM; echo $$ > part.pid; while [ ! -e stop ]; do sleep 0.02; done",
    );
    let inner = "import subprocess
subprocess.Popen([os.environ['CLINCH'],'run','y','-c','sh ./part & exec sleep 100'])
signal.signal(signal.SIGTERM,lambda *_: None)";
    let mut run = world.start(["run", "-q", "x", "python3", "-c", &large_job(inner)]);
    let (first, part) = (world.pid("job.pid"), world.pid("part.pid"));
    eventually("all run", || world.lines("begun") == MANY);
    run.signal(Signal::TERM);
    eventually("all are told", || world.lines("told") == MANY && world.lines("log") > 0);
    // It ends when nobody is left to be told.
    common::kill(first, Signal::KILL);
    assert_eq!(run.code(), 128 + 9);
    world.write("stop", "");
    eventually("the part has ended", || !runs(part));
    assert_eq!(world.read("log"), "TERM\n");
}

/// The wrapper is stopped for a job that has ended, and its lock is taken for as long.
#[test]
fn a_stop_that_ends_a_large_job_does_not_stop_the_wrapper() {
    let world = World::new();
    // More than are told in one turn in any case.
    const PARTS: usize = 1500;
    let job = large_job("signal.signal(signal.SIGTSTP,lambda *_: os._exit(3))")
        .replace(&format!("range({MANY})"), &format!("range({PARTS})"));
    let mut run = world.start(["run", "-q", "x", "python3", "-c", &job]);
    world.pid("job.pid");
    eventually("all run", || world.lines("begun") == PARTS);
    run.signal(Signal::TSTP);
    eventually("it ends or is stopped", || {
        run.0.try_wait().unwrap().is_some() || common::state(run.pid()) == Some('T')
    });
    let is_stopped = common::state(run.pid()) == Some('T');
    end_large_job(&world);
    assert!(!is_stopped, "the lock is kept");
    assert_eq!(run.code(), 3);
}

/// Nobody learns why the job goes on: what runs as another user, by sudo, hears no signal of ours.
#[test]
fn a_job_that_hears_no_signal_is_named() {
    let world = World::new();
    world.install("/usr/bin/setpriv", "as-root");
    set_permissions(world.path("as-root"), Permissions::from_mode(0o4755)).unwrap();
    world.install(env!("CARGO_BIN_EXE_clinch"), "clinch");
    chown(world.path("."), Some(65_534), Some(65_534)).unwrap();
    let url = format!("file://{}", world.path("theirs").display());
    // Also what is left behind, where that is waited for.
    for (round, job) in
        ["exec ./part", "./part & while [ ! -s part.pid ]; do sleep 0.02; done"].iter().enumerate()
    {
        let _ = std::fs::remove_file(world.path("part.pid"));
        world.write("work", "echo $$ > part.pid; exec sleep 600");
        let job = job.replace("./part", "./as-root --reuid=0 sh ./work");
        let events = format!("events{round}");
        let mut run = Command::new("setpriv");
        run.args(["--reuid=65534", "--regid=65534", "--clear-groups", "./clinch", "run"]);
        run.args(["--orphans", "wait", "--events", &events, "x", "sh", "-c", &job]);
        let said = format!("said{round}");
        run.current_dir(world.path(".")).stderr(std::fs::File::create(world.path(&said)).unwrap());
        let mut run = Running(run.env("CLINCH_URL", &url).env_remove("CLINCH_HELD").spawn().unwrap());
        let part = world.pid("part.pid");
        if round == 1 {
            eventually("the first process has ended", || world.read(&events).contains("exited"));
        }
        for _ in 0..2 {
            run.signal(Signal::TERM);
            let is_told =
                || world.read(&said).contains(&format!("process {part} of the job is another user's"));
            eventually("it is named", is_told);
        }
        assert!(runs(part));
        // After it, so that it has been told twice.
        run.signal(Signal::USR1);
        kill(part, Signal::KILL);
        run.wait();
        let said = world.read(&said);
        assert_eq!(said.matches("another user's").count(), 1, "{said}");
        assert!(said.contains("hears no signal") && !said.contains("without the lock"), "{said}");
    }
}

/// A job that leads a session of its own hears nothing; its children there, neither.
#[test]
fn a_job_that_has_left_our_group_is_told() {
    let world = World::new();
    let script = "sleep 60 & echo $! > sleep.pid; echo $$ > job.pid; wait";
    let mut run = world.start(["run", "x", "setsid", "sh", "-c", script]);
    let (job, sleep) = (world.pid("job.pid"), world.pid("sleep.pid"));
    run.signal(Signal::TERM);
    assert_eq!(run.code(), 128 + 15);
    eventually("both are gone", || !runs(job) && !runs(sleep));
}

/// Who sends to the job also reaches its caller: a script ends that only its job was to end for.
#[test]
fn what_stands_beside_the_wrapper_in_its_group_is_left_alone() {
    let world = World::new();
    let script =
        "sleep 60 & echo $! > beside.pid; exec \"$CLINCH\" run x -c 'echo $$ > job.pid; exec sleep 60'";
    let mut command = std::process::Command::new("setsid");
    command.args(["sh", "-c", script]).current_dir(world.path("."));
    command
        .env("CLINCH", env!("CARGO_BIN_EXE_clinch"))
        .env("CLINCH_URL", world.url())
        .env_remove("CLINCH_HELD");
    let mut run = Running(command.spawn().unwrap());
    let (beside, job) = (world.pid("beside.pid"), world.pid("job.pid"));
    run.signal(Signal::TERM);
    assert_eq!(run.code(), 128 + 15);
    assert!(!runs(job) && runs(beside));
    common::kill(beside, Signal::KILL);
}

/// A waiter that is told to end stays in the queue, or ends as if nothing had happened.
#[test]
fn a_waiter_that_is_told_to_end_withdraws() {
    let world = World::new();
    let _holder = world.start(["run", "x", "-c", "echo $$ > job.pid; exec sleep 60"]);
    eventually("the lock is held", || world.held("x"));
    for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT] {
        let mut waiter = world.start(["run", "x", "-c", "touch ran"]);
        eventually("it waits", || world.claims("x", "waiting").len() == 1);
        waiter.signal(signal);
        assert_eq!(waiter.wait().signal(), Some(signal.as_raw()));
        assert!(world.claims("x", "waiting").is_empty());
    }
    assert!(!world.path("ran").exists());
}

/// The job starts with signals ignored or blocked that its author counts on.
#[test]
fn the_job_starts_with_default_signals() {
    let world = World::new();
    let output = world.output(["run", "x", "grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]);
    // glibc ignores its two internal signals, 32 and 33, in what it spawns.
    let internal = 0b11 << 31;
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let mask = u64::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap();
        assert_eq!(mask & !internal, 0, "{line}");
    }
}

/// `nohup clinch run` dies of the hang-up, or its job does.
#[test]
fn what_nohup_ignores_stays_ignored() {
    let world = World::new();
    let mut command = world.clinch([]);
    command.args(["run", "x", "-c", "echo $$ > job.pid; while [ ! -e stop ]; do sleep 0.02; done; exit 5"]);
    let program = command.get_args().nth(1).unwrap().to_owned();
    let rest: Vec<_> = command.get_args().skip(2).map(ToOwned::to_owned).collect();
    let mut nohup = std::process::Command::new("env");
    nohup.arg("--ignore-signal=HUP").arg(program).args(rest).current_dir(world.path("."));
    nohup.env("CLINCH_URL", world.url());
    let mut run = common::Running(nohup.spawn().unwrap());
    let job = world.pid("job.pid");
    run.signal(Signal::HUP);
    common::kill(job, Signal::HUP);
    world.write("stop", "");
    assert_eq!(run.code(), 5);
}

/// A job that counts on a closed pipe, or a full file, being no more than an error is killed by it; or one that counts on the signal goes on.
#[test]
fn a_job_ignores_what_the_caller_ignores_and_nothing_else() {
    let world = World::new();
    let clinch = env!("CARGO_BIN_EXE_clinch");
    for signal in [Signal::PIPE, Signal::XFSZ] {
        for ignores in [true, false] {
            for words in [&["x"][..], &["-F", "x"], &["x", clinch, "run", "x"]] {
                let mut command = std::process::Command::new("env");
                let change = if ignores { "ignore" } else { "default" };
                command.arg(format!("--{change}-signal={}", signal.as_raw()));
                command.args([clinch, "run"]).args(words).env("CLINCH_URL", world.url());
                command.args(["grep", "SigIgn", "/proc/self/status"]).env_remove("CLINCH_HELD");
                let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
                let mask = u64::from_str_radix(said.split_whitespace().nth(1).unwrap(), 16).unwrap();
                let is_ignored = mask >> (signal.as_raw() - 1) & 1 == 1;
                assert_eq!(is_ignored, ignores, "{signal:?} {words:?}: {said}");
            }
        }
    }
}

/// The end of the job is never heard of.
#[test]
fn a_caller_that_blocks_the_signal_of_a_childs_end_gets_its_exit_code() {
    let world = World::new();
    let mut command = std::process::Command::new("env");
    command.args(["--block-signal=CHLD", env!("CARGO_BIN_EXE_clinch"), "run", "-u", &world.url()]);
    command.args(["x", "-c", "sleep 0.1; exit 7"]).env_remove("CLINCH_HELD");
    assert_eq!(Running(command.spawn().unwrap()).code(), 7);
}
