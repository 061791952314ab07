//! On a terminal, under a shell with job control.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod common;

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use clinch_testkit::Redis;
use common::terminal::{self, Terminal};
use common::{World, eventually, pty, runs, state};
use rustix::process::Signal;

/// A job that says where it is, counts interrupts, and ticks while it runs.
const JOB: &str = r#"
trap 'echo INT >> log' INT
echo $$ > job.pid
while [ ! -e stop ]; do
    read -r pid name state parent group session tty foreground rest < /proc/$$/stat
    echo "$group $foreground" > groups
    echo tick >> ticks
    if [ -e ask ]; then rm ask; read -r line; echo "$line" > line; fi
    sleep 0.02
done
exit 3"#;

fn job_script(world: &World) {
    world.write("job.sh", JOB);
}

/// The job's process group and the terminal's foreground group, as the job saw them last; `None` while it writes.
fn groups(world: &World) -> Option<(String, String)> {
    let groups = world.read("groups");
    let (job, foreground) = groups.strip_suffix('\n')?.split_once(' ')?;
    Some((job.to_owned(), foreground.to_owned()))
}

fn in_foreground(world: &World) -> bool {
    groups(world).is_some_and(|(job, foreground)| job == foreground)
}

fn holder(world: &World) -> i32 {
    world.claims("x", "held")[0]["pid"].as_i64().unwrap() as i32
}

/// Ctrl-C reaches the job twice or not at all, or the job cannot read from the terminal.
#[test]
fn the_job_has_the_terminal_and_ctrl_c_reaches_it_once() {
    let world = World::new();
    job_script(&world);
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x -- sh job.sh; echo rc=$?.\n");
    world.pid("job.pid");
    eventually("the job has the foreground", || in_foreground(&world));
    terminal.type_in("\x03");
    eventually("the job is interrupted", || world.lines("log") == 1);
    terminal.type_in("\x03");
    eventually("the job is interrupted again", || world.lines("log") == 2);
    world.write("stop", "");
    terminal.shows("rc=3.");
    assert_eq!(world.lines("log"), 2);
    terminal.type_in("echo back $((40 + 2))\n");
    terminal.shows("back 42");
}

/// Ctrl-Z stops the job but not its wrapper, and the shell waits for ever; or `fg` does not bring it back.
#[test]
fn ctrl_z_and_fg_work_as_without_a_lock() {
    let world = World::new();
    job_script(&world);
    let mut terminal = Terminal::new(&world);
    // Not dash, which starts its commands by vfork: stopped in the middle of that it is stuck, with a lock or without.
    terminal.type_in("\"$CLINCH\" run x -- bash job.sh; echo rc=$?.\n");
    let job = world.pid("job.pid");
    eventually("the job has the foreground", || in_foreground(&world));
    let wrapper = holder(&world);
    for round in 1..=2 {
        terminal.type_in("\x1a");
        eventually("both are stopped", || state(job) == Some('T') && state(wrapper) == Some('T'));
        terminal.shows("Stopped");
        assert!(world.held("x"), "a stopped job keeps its lock");
        terminal.type_in(&format!("echo shell{round}$((1 + 1))\n"));
        terminal.shows(&format!("shell{round}2"));
        let ticks = world.lines("ticks");
        terminal.type_in("fg\n");
        eventually("the job goes on in the foreground", || {
            world.lines("ticks") > ticks && in_foreground(&world)
        });
    }
    world.write("stop", "");
    eventually("both are gone", || state(job).is_none() && !world.held("x"));
    terminal.type_in("echo end $((40 + 2))\n");
    terminal.shows("end 42");
}

/// The shell takes the job for one that went on, and begins the next round.
#[test]
fn one_ctrl_c_ends_a_loop_and_a_script() {
    let rounds = "for i in 1 2 3; do echo $i >> rounds; \"$CLINCH\" run x sleep 60; done";
    for typed in [rounds, "bash ./script"] {
        let world = World::new();
        world.write("script", rounds);
        let mut terminal = Terminal::new(&world);
        terminal.type_in(&format!("{typed}\n"));
        eventually("the job is there", || world.held("x") && world.lines("rounds") == 1);
        terminal.type_in("\x03");
        terminal.type_in("echo back $((40 + 2))\n");
        terminal.shows("back 42");
        assert_eq!((world.lines("rounds"), world.held("x")), (1, false), "{typed}");
    }
}

/// Who sent the signal is not the terminal: a script shall see an exit code.
#[test]
fn a_job_that_was_interrupted_by_a_process_is_no_end_of_the_script() {
    let world = World::new();
    let mut terminal = Terminal::new(&world);
    terminal.type_in("bash -c '\"$CLINCH\" run x sleep 60; echo rc=$?.'\n");
    eventually("the lock is held", || world.held("x"));
    common::kill(holder(&world), Signal::INT);
    terminal.shows("rc=130.");
}

/// The job finds itself in the background, and is stopped for ever when it asks for a password; or Ctrl-C reaches nobody.
#[test]
fn a_job_whose_stdin_is_no_terminal_may_ask_on_the_terminal() {
    let world = World::new();
    let mut terminal = Terminal::new(&world);
    terminal.type_in("echo | \"$CLINCH\" run x sh -c 'touch asks; read a < /dev/tty; echo \"got=$a.\"'\n");
    eventually("it asks", || world.path("asks").exists());
    terminal.type_in("secret\n");
    terminal.shows("got=secret.");
}

/// The wrapper is stopped with the pager, and its lock runs out under a running job.
#[test]
fn a_pager_beside_it_has_the_terminal_and_the_wrapper_goes_on() {
    let world = World::new();
    // What a pager does first: it sets the terminal, for which who is in the background is stopped.
    let pager = "import os,termios\ntty = os.open('/dev/tty', os.O_RDWR)\n\
        termios.tcsetattr(tty, termios.TCSANOW, termios.tcgetattr(tty))\nopen('paged', 'w').close()\nos.read(tty, 1)\n";
    world.write("pager.py", pager);
    job_script(&world);
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x sh job.sh | python3 pager.py\n");
    eventually("the pager has set the terminal", || world.path("paged").exists());
    let ticks = world.lines("ticks");
    eventually("the job goes on", || world.lines("ticks") > ticks + 5);
    assert_ne!(state(holder(&world)), Some('T'));
    world.write("stop", "");
    terminal.type_in("\n");
    eventually("it is over", || !world.held("x"));
}

/// The shell waits for ever, since the wrapper looks for its terminal on stdin.
#[test]
fn ctrl_z_works_where_stdin_is_no_terminal() {
    let world = World::new();
    job_script(&world);
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x -- bash job.sh < /dev/null\n");
    let job = world.pid("job.pid");
    let wrapper = holder(&world);
    terminal.type_in("\x1a");
    eventually("both are stopped", || state(job) == Some('T') && state(wrapper) == Some('T'));
    terminal.type_in("echo back $((40 + 2)); fg\n");
    terminal.shows("back 42");
    eventually("the job goes on", || state(job) != Some('T') && in_foreground(&world));
    world.write("stop", "");
    eventually("it is over", || !world.held("x"));
}

/// A job that goes on although its user pressed Ctrl-Z needs its lock: were the wrapper stopped, nobody would renew it.
#[test]
fn a_job_that_ignores_ctrl_z_keeps_its_wrapper() {
    let world = World::new();
    world.write("job.sh", &format!("trap '' TSTP\n{JOB}"));
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x -- bash job.sh\n");
    world.pid("job.pid");
    let wrapper = holder(&world);
    terminal.type_in("\x1a\x03");
    // What was typed first has come first.
    eventually("the job is interrupted", || world.lines("log") == 1);
    let ticks = world.lines("ticks");
    eventually("the job goes on", || world.lines("ticks") > ticks + 5);
    assert_ne!(state(wrapper), Some('T'));
    world.write("stop", "");
    eventually("it is over", || !world.held("x"));
}

/// A part of the job that has a group of its own hears no Ctrl-Z: it goes on while the wrapper is stopped, and nobody renews its lock.
#[test]
fn ctrl_z_stops_all_of_the_job_and_fg_has_all_go_on() {
    let world = World::new();
    world.write("part", "echo $$ > part.pid; while [ ! -e stop ]; do echo tick >> ticks; sleep 0.02; done");
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x bash -c 'timeout 60 bash ./part; echo over.'\n");
    let part = world.pid("part.pid");
    let wrapper = holder(&world);
    terminal.type_in("\x1a");
    eventually("both are stopped", || state(part) == Some('T') && state(wrapper) == Some('T'));
    let ticks = world.lines("ticks");
    terminal.type_in("echo back $((40 + 2)); fg\n");
    terminal.shows("back 42");
    eventually("the part goes on", || world.lines("ticks") > ticks);
    world.write("stop", "");
    terminal.shows("over.");
}

/// It is pressed just when the wrapper looks whether the job has to be woken after `fg`: the job is, and the wrapper is never stopped.
#[test]
fn ctrl_z_works_whenever_it_is_pressed_after_fg() {
    let world = World::new();
    job_script(&world);
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x -- bash job.sh\n");
    let job = world.pid("job.pid");
    let wrapper = holder(&world);
    for after in (25..58).cycle().take(100) {
        terminal.type_in("\x1a");
        eventually("both are stopped", || state(job) == Some('T') && state(wrapper) == Some('T'));
        terminal.type_in("fg\n");
        eventually("it has the foreground", || in_foreground(&world));
        // Each time at another moment.
        std::thread::sleep(std::time::Duration::from_millis(after));
    }
    world.write("stop", "");
    eventually("it is over", || !world.held("x"));
}

/// The second one is heard of after `fg`, and stops the job again.
#[test]
fn ctrl_z_while_all_is_being_stopped_counts_once() {
    let world = World::new();
    world.write("part", "for i in $(seq 150); do sleep 600 & done; while [ ! -e stop ]; do echo tick >> ticks; sleep 0.02; done; kill $(jobs -p)");
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x timeout 600 bash ./part\n");
    eventually("it runs", || world.lines("ticks") > 0);
    let wrapper = holder(&world);
    for after in [20, 40, 60] {
        terminal.type_in("\x1a");
        std::thread::sleep(std::time::Duration::from_millis(after));
        terminal.type_in("\x1a");
        eventually("it is stopped", || state(wrapper) == Some('T'));
        let ticks = world.lines("ticks");
        terminal.type_in("fg\n");
        eventually("the job goes on", || world.lines("ticks") > ticks + 10);
    }
    world.write("stop", "");
    eventually("it is over", || !world.held("x"));
}

/// Who stops a job and has it go on knows nothing of its wrapper: were that stopped, too, nobody would renew its lock any more.
#[test]
fn a_job_that_is_stopped_by_a_process_does_not_stop_its_wrapper() {
    let world = World::new();
    job_script(&world);
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x sh job.sh; echo rc=$?.\n");
    let job = world.pid("job.pid");
    let wrapper = holder(&world);
    for signal in [Signal::STOP, Signal::TSTP] {
        common::kill(job, signal);
        eventually("the job is stopped", || state(job) == Some('T'));
        common::kill(job, Signal::CONT);
        let ticks = world.lines("ticks");
        eventually("it goes on", || world.lines("ticks") > ticks + 3);
        assert_ne!(state(wrapper), Some('T'));
    }
    world.write("stop", "");
    terminal.shows("rc=3.");
}

/// Who suspends and resumes a group in no time: a CONT that comes while the wrapper is about to stop is lost, and it stays stopped while its job runs.
#[test]
fn a_wrapper_is_not_left_stopped_by_a_group_that_goes_on_at_once() {
    let world = World::new();
    world.write("job.sh", &format!("for i in $(seq 60); do sleep 60 & done\n{JOB}"));
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x bash job.sh\n");
    world.pid("job.pid");
    let wrapper = holder(&world);
    let group = rustix::process::Pid::from_raw(wrapper).unwrap();
    for round in 0..20_u64 {
        rustix::process::kill_process_group(group, Signal::TSTP).unwrap();
        // Not to wait for anything: the moment is what varies.
        std::thread::sleep(std::time::Duration::from_millis(round * 3));
        rustix::process::kill_process_group(group, Signal::CONT).unwrap();
        let ticks = world.lines("ticks");
        eventually("the job goes on", || world.lines("ticks") > ticks + 2);
        eventually("so does the wrapper", || state(wrapper) != Some('T'));
    }
    rustix::process::kill_process_group(group, Signal::KILL).unwrap();
}

/// Who has the job alone go on knows nothing of its wrapper.
#[test]
fn a_wrapper_that_is_stopped_goes_on_with_its_job() {
    let world = World::new();
    job_script(&world);
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x bash job.sh\n");
    let job = world.pid("job.pid");
    let wrapper = holder(&world);
    terminal.type_in("\x1a");
    eventually("both are stopped", || state(job) == Some('T') && state(wrapper) == Some('T'));
    common::kill(job, Signal::CONT);
    eventually("the wrapper goes on, too", || state(wrapper) != Some('T'));
    world.write("stop", "");
    // What it waits for is stopped yet.
    rustix::process::kill_process_group(rustix::process::Pid::from_raw(wrapper).unwrap(), Signal::CONT)
        .unwrap();
    eventually("it is over", || !world.held("x"));
}

/// As above, where it is another part of the job that goes on, in a session of its own.
#[test]
fn a_wrapper_that_is_stopped_goes_on_with_any_part_of_its_job() {
    let world = World::new();
    let mut terminal = Terminal::new(&world);
    let job = "setsid sleep 60 & echo $! > part.pid; sleep 60";
    terminal.type_in(&format!("\"$CLINCH\" run x bash -c '{job}'\n"));
    let part = world.pid("part.pid");
    let wrapper = holder(&world);
    terminal.type_in("\x1a");
    eventually("both are stopped", || state(part) == Some('T') && state(wrapper) == Some('T'));
    common::kill(part, Signal::CONT);
    eventually("the wrapper goes on, too", || state(wrapper) != Some('T'));
    rustix::process::kill_process_group(rustix::process::Pid::from_raw(wrapper).unwrap(), Signal::KILL)
        .unwrap();
}

/// A job that is stopped with its wrapper stays stopped for ever after its lease has run out, or runs on without one if it is continued.
#[test]
fn a_job_that_is_stopped_ends_with_its_lease() {
    let redis = Redis::start();
    let world = World::new();
    let mut terminal = Terminal::new(&world);
    terminal.type_in(&"\"$CLINCH\" run -u LEASED --ttl 3s x sh -c 'echo $PPID > run.pid; echo $$ > job.pid; exec sleep 60'\n".replace("LEASED", &redis.url()));
    let (job, wrapper) = (world.pid("job.pid"), world.pid("run.pid"));
    terminal.type_in("\x1a");
    terminal.shows("Stopped");
    eventually("the job is dead, and its wrapper gone", || !common::runs(job) && !common::runs(wrapper));
}

/// As above, of a run inside a job, whose watch is stopped with all of that.
#[test]
fn an_inner_job_that_is_stopped_ends_with_its_lease() {
    let redis = Redis::start();
    let world = World::new();
    let mut terminal = Terminal::new(&world);
    world.write(
        "inner",
        &r#""$CLINCH" run -u LEASED --ttl 3s y sh -c 'echo $$ > job.pid; exec sleep 60'"#
            .replace("LEASED", &redis.url()),
    );
    terminal.type_in("\"$CLINCH\" run x sh ./inner\n");
    let job = world.pid("job.pid");
    terminal.type_in("\x1a");
    terminal.shows("Stopped");
    eventually("the inner job is dead", || !runs(job));
}

/// A process counts as stopped by its first thread, which may have ended: the shell waits for ever.
#[test]
fn ctrl_z_works_where_the_first_thread_of_the_job_has_ended() {
    let world = World::new();
    let job = "import ctypes, threading, time\n\
        def run():\n    open('begun', 'w').close()\n    time.sleep(60)\n\
        threading.Thread(target=run).start()\nctypes.CDLL(None).pthread_exit(None)\n";
    world.write("job.py", job);
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x python3 job.py\n");
    eventually("it has begun", || world.path("begun").exists());
    terminal.type_in("\x1a");
    terminal.type_in("echo back $((40 + 2)); kill -9 %1; fg\n");
    terminal.shows("back 42");
    eventually("it is over", || !world.held("x"));
}

/// A key that comes while the job is being started reaches nobody, and the job runs on.
#[test]
fn ctrl_c_ends_a_run_whenever_it_comes() {
    let world = World::new();
    for round in 0..20_u64 {
        let (mut keys, open) = common::pty::open();
        let mut command = Command::new("env");
        command.args([
            "--default-signal",
            "setsid",
            "--ctty",
            env!("CARGO_BIN_EXE_clinch"),
            "run",
            "x",
            "sleep",
            "60",
        ]);
        command.env("CLINCH_URL", world.url()).env_remove("CLINCH_HELD");
        command.stdin(Stdio::from(open())).stdout(Stdio::from(open())).stderr(Stdio::from(open()));
        let mut run = common::Running(command.spawn().unwrap());
        let program = format!("/proc/{}/exe", run.pid());
        // Only then is it sure to have the terminal.
        eventually("it is clinch", || {
            std::fs::read_link(&program).is_ok_and(|program| program.ends_with("clinch"))
        });
        // Not to wait for anything: the moment is what varies.
        std::thread::sleep(std::time::Duration::from_millis(round));
        keys.write_all(b"\x03").unwrap();
        assert_eq!(run.wait().signal(), Some(Signal::INT.as_raw()), "after {round} ms");
    }
}

/// A job that has a group of its own hears no key, and neither does anybody else.
#[test]
fn keys_reach_a_job_that_has_left_our_group() {
    let world = World::new();
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x -- timeout 60 sh -c 'echo $$ > job.pid; exec sleep 60'\n");
    let job = world.pid("job.pid");
    let wrapper = holder(&world);
    terminal.type_in("\x1a");
    eventually("both are stopped", || state(job) == Some('T') && state(wrapper) == Some('T'));
    terminal.type_in("fg\n");
    eventually("both go on", || state(job) == Some('S') && state(wrapper) == Some('S'));
    terminal.type_in("\x03");
    terminal.type_in("echo back $((40 + 2))\n");
    terminal.shows("back 42");
    assert!(!world.held("x") && !runs(job));
}

/// The wrapper hears of a stop that is over, and stops the job again.
#[test]
fn a_job_that_stops_its_group_goes_on_after_fg() {
    let world = World::new();
    world.write(
        "job.py",
        "import os, signal\nfor n in range(6):\n    os.kill(0, signal.SIGTSTP)\n    print(f'round {n}.', flush=True)\n",
    );
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x -- python3 job.py; echo rc=$?.\n");
    for round in 0..6 {
        eventually("it is stopped", || terminal.seen.lock().unwrap().matches("Stopped").count() > round);
        terminal.type_in("fg\n");
        terminal.shows(&format!("round {round}."));
    }
    eventually("it is over", || !world.held("x"));
}

/// What is left behind is stopped by the key, and waited for by who is not.
#[test]
fn ctrl_z_gives_the_prompt_back_while_something_left_behind_is_waited_for() {
    let inner = "\"$CLINCH\" run x bash ./left & while [ ! -s left.pid ]; do sleep 0.02; done";
    for job in [&format!("run x bash -c '{inner}'"), "run --orphans wait x bash -c 'bash ./left &'"] {
        let world = World::new();
        world.write("left", "echo $$ > left.pid; while [ ! -e stop ]; do sleep 0.02; done");
        let mut terminal = Terminal::new(&world);
        terminal.type_in(&format!("\"$CLINCH\" --url \"$CLINCH_URL\" {job}\n"));
        let left = world.pid("left.pid");
        let wrapper = holder(&world);
        terminal.type_in("\x1a");
        eventually("both are stopped", || state(left) == Some('T') && state(wrapper) == Some('T'));
        terminal.type_in("echo back $((40 + 2)); fg\n");
        terminal.shows("back 42");
        world.write("stop", "");
        eventually("it is over", || !world.held("x"));
    }
}

/// In the background, the wrapper takes the terminal away from the shell.
#[test]
fn a_background_job_leaves_the_terminal_alone_until_fg() {
    let world = World::new();
    job_script(&world);
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" run x -- sh job.sh &\n");
    world.pid("job.pid");
    eventually("it runs", || world.lines("ticks") > 3);
    let mut seen = None;
    eventually("it looks about", || {
        seen = groups(&world);
        seen.is_some()
    });
    let (job, shell) = seen.unwrap();
    assert_ne!(job, shell, "the job is in the foreground");
    terminal.type_in("echo shell $((40 + 2))\n");
    terminal.shows("shell 42");
    terminal.type_in("fg\n");
    // The shell names the job first and gives it the terminal then; keys that come before that are the shell's own.
    eventually("the shell has left the foreground", || {
        groups(&world).is_some_and(|(_, foreground)| foreground != shell)
    });
    terminal.type_in("\x03");
    eventually("the job is interrupted", || world.lines("log") == 1);
    world.write("ask", "");
    eventually("it reads from the terminal", || !world.path("ask").exists());
    terminal.type_in("an answer\n");
    eventually("the answer reaches it", || world.read("line") == "an answer\n");
    eventually("the job has the foreground", || in_foreground(&world));
    assert_eq!(world.lines("log"), 1);
    world.write("stop", "");
    eventually("it is over", || !world.held("x"));
    terminal.type_in("exit\n");
    terminal.shell.wait();
}

/// Nobody is asked before a lock is taken away, or the answer is not heard.
#[test]
fn break_asks_on_a_terminal() {
    let world = World::new();
    let mut run =
        world.start(["run", "--label", "the victim", "x", "-c", "echo $$ > job.pid; exec sleep 60"]);
    eventually("the lock is held", || world.held("x"));
    let mut terminal = Terminal::new(&world);
    terminal.type_in("\"$CLINCH\" break x; echo rc=$?.\n");
    terminal.shows("the victim");
    terminal.shows("[y/N]");
    terminal.type_in("n\n");
    terminal.shows("rc=1.");
    assert!(world.held("x"));
    terminal.type_in("\"$CLINCH\" break x; echo code=$?.\n");
    eventually("it asks again", || terminal.seen.lock().unwrap().matches("[y/N]").count() == 2);
    terminal.type_in("y\n");
    terminal.shows("code=0.");
    assert_eq!(run.code(), 79);
}

/// The wrapper leads a session, as under `ssh -t`, and is killed: the kernel hangs the job up, and its parts have no parent to be found by.
#[test]
fn a_killed_wrapper_that_leads_a_session_takes_all_of_its_job_along() {
    let redis = Redis::start();
    let world = World::new();
    world.write("part", "echo $$ > part.pid; while :; do sleep 0.02; done");
    let mut terminal = Terminal::new(&world);
    terminal.type_in(
        &"exec \"$CLINCH\" run -u LEASED x -c 'timeout 60 sh ./part; true'\n".replace("LEASED", &redis.url()),
    );
    let part = world.pid("part.pid");
    terminal.shell.signal(Signal::KILL);
    eventually("the part is dead", || !runs(part));
}

/// As `ssh -t host clinch run ...` does: the kernel tells the leader of the session alone, and has it go on.
#[test]
fn a_hang_up_ends_a_stopped_job_whose_wrapper_leads_the_session() {
    let world = World::new();
    let (keys, open) = pty::open();
    let job = "echo $$ > job.pid; kill -STOP $$";
    let mut run = terminal::start(&world, &open, &[env!("CARGO_BIN_EXE_clinch"), "run", "x", "-c", job]);
    let job = world.pid("job.pid");
    eventually("the job is stopped", || state(job) == Some('T'));
    drop(keys);
    eventually("the wrapper has ended", || !runs(run.pid()));
    assert!(!run.wait().success());
    assert!(!runs(job) && !world.held("x"));
}
