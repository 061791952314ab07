//! To which process the lock of an `acquire` is bound on `file://`, and what ends its holder.

#![allow(clippy::indexing_slicing, clippy::expect_used, clippy::unwrap_used, reason = "test code")]

mod common;

use std::process::{Command, Stdio};

use common::{Running, World, eventually, program, python_named, runs, shells};
use rustix::process::Signal;

/// The process that keeps a lock for another.
fn holder(of: i32) -> Option<i32> {
    let words = format!("\0--for-pid\0{of}\0");
    let mut pids = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.windows(words.len()).any(|part| part == words.as_bytes())
    })
}

/// The script ends, and the lock is another's while its background task works under it; or that is killed, and its lock stays.
#[test]
fn a_lock_of_a_background_task_is_that_tasks() {
    let script = r#"( lock=$("$CLINCH" acquire x --ttl 1h) || exit; eval "$lock"; echo "$for_pid" > task.pid
        while [ ! -e stop ]; do sleep 0.02; done ) > /dev/null 2>&1 &
        while [ ! -s task.pid ]; do sleep 0.02; done; echo $! > job"#;
    for shell in shells() {
        let world = World::new();
        assert!(program(&world, &[shell, "-c", script]).status().unwrap().success(), "{shell}");
        let task = world.pid("task.pid");
        assert_eq!(world.read("job"), world.read("task.pid"), "{shell}: it is bound to another");
        assert!(runs(task) && world.held("x"), "{shell}");
        common::kill(task, Signal::KILL);
        eventually("it is free", || !world.held("x"));
    }
}

/// As above, for a worker of a Python program, which may have a pipe to its master.
#[test]
fn a_lock_of_a_forked_worker_is_that_workers() {
    let script = r#"
import os, subprocess, time
read, write = os.pipe()
if os.fork() == 0:
    EARLY
    said = subprocess.run([os.environ["CLINCH"], "acquire", "x", "--ttl", "1h"], stdout=subprocess.PIPE).stdout
    open("said", "wb").write(said)
    open("worker.pid", "w").write(f"{os.getpid()}\n")
    time.sleep(60)
    os._exit(0)
while not os.path.exists("worker.pid"): time.sleep(0.02)
"#;
    for early in ["pass", "os.close(read)"] {
        let world = World::new();
        let mut master = program(&world, &["python3", "-c", &script.replace("EARLY", early)]);
        assert!(master.stdout(Stdio::null()).status().unwrap().success());
        let worker = world.pid("worker.pid");
        assert!(world.read("said").ends_with(&format!(" for_pid={worker}\n")), "{}", world.read("said"));
        assert!(world.held("x"));
        common::kill(worker, Signal::KILL);
        eventually("it is free", || !world.held("x"));
    }
}

/// The lock is bound to a part of `$( )`, and is lost when that ends: at once.
#[test]
fn a_lock_whose_answer_a_shell_reads_is_that_shells() {
    let forms = [
        r#"$("$CLINCH" acquire x)"#,
        r#"`"$CLINCH" acquire x`"#,
        r#"$("$CLINCH" acquire x; :)"#,
        r#"$( ("$CLINCH" acquire x) )"#,
        r#"$( ( ("$CLINCH" acquire x; :); :); : )"#,
        r#"$("$CLINCH" acquire x | tee log)"#,
        r#"$(echo a | { read a; "$CLINCH" acquire x || exit 1; })"#,
        r#"$(timeout 60 nice env A=b "$CLINCH" acquire x)"#,
        r#"$(take)"#,
        r#"$(take | tee log)"#,
    ];
    for shell in shells() {
        for form in forms {
            let world = World::new();
            let script = format!(
                r#"take() {{ echo > /dev/null; "$CLINCH" acquire x || return; :; }}
                lock={form} || exit; eval "$lock"; [ "$for_pid" = $$ ] || exit 11; "$CLINCH" show x > show || exit 12"#
            );
            let output = program(&world, &[shell, "-c", &script]).output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{shell}: {form}: {output:?}");
        }
    }
}

/// A function takes it apart first, and passes it on; a part of `$( )` works under it itself: which of them is nowhere to be seen.
#[test]
fn whose_lock_it_is_has_to_be_said_where_that_cannot_be_seen() {
    for shell in shells() {
        let world = World::new();
        let script = |more: &str| {
            format!(
                r#"lock=$(own=$("$CLINCH" acquire x {more}) || exit; echo "$own") || exit; eval "$lock"
                "$CLINCH" show x > show || exit 12"#
            )
        };
        let output = program(&world, &[shell, "-c", &script("")]).output().unwrap();
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(64) && why.contains("--for"), "{shell}: {output:?}");
        assert!(!world.held("x"));
        assert_eq!(program(&world, &[shell, "-c", &script("--for $$")]).status().unwrap().code(), Some(0));
    }
}

/// Python, Node and a shell that read what a line of a shell says, and then look at the lock.
const READERS: [&[&str]; 4] = [
    &[
        "python3",
        "-c",
        "import os, subprocess; os.environ['READER'] = str(os.getpid())
said = subprocess.run(os.environ['LINE'], shell=True, stdout=subprocess.PIPE).stdout
open('said', 'wb').write(said); os.system('\"$CLINCH\" show x > show')",
    ],
    &[
        "python3",
        "-c",
        "import os, socket, subprocess; os.environ['READER'] = str(os.getpid())
ours, theirs = socket.socketpair(); subprocess.run(os.environ['LINE'], shell=True, stdout=theirs)
open('said', 'wb').write(ours.recv(1000)); os.system('\"$CLINCH\" show x > show')",
    ],
    &[
        "node",
        "-e",
        "process.env.READER = process.pid; const run = require('child_process').spawnSync
require('fs').writeFileSync('said', run('sh', ['-c', process.env.LINE]).stdout)
run('sh', ['-c', '\"$CLINCH\" show x > show'])",
    ],
    &["sh", "-c", r#"export READER=$$; said=$(sh -c "$LINE"); echo "$said" > said; "$CLINCH" show x > show"#],
];

/// Who reads the answer is neither the process that called nor one of which that is a copy: that process ends next, and its lock is free under the
/// other. Or it goes on, as a script that cron has started.
#[test]
fn whose_lock_it_is_has_to_be_said_where_a_helper_is_captured() {
    let lines = [
        r#""$CLINCH" acquire x MORE 2> why; exit $?"#,
        r#"("$CLINCH" acquire x MORE 2> why; :); :"#,
        r#"timeout 60 sh -c '"$CLINCH" acquire x MORE 2> why; exit $?'"#,
        r#""$CLINCH" acquire x MORE 2> why | tee log | cat"#,
    ];
    let is_there = |reader: &&&[&str]| Command::new(reader[0]).arg("-c").output().is_ok();
    for reader in READERS.iter().filter(is_there) {
        for line in lines {
            for (more, is_held) in [("", false), (r#"--for "$READER""#, true)] {
                let world = World::new();
                let output =
                    program(&world, reader).env("LINE", line.replace("MORE", more)).output().unwrap();
                let [said, why, show] = ["said", "why", "show"].map(|name| world.read(name));
                let told = format!("{reader:?}: {line} {more}: {said:?} {why:?} {output:?}");
                assert_eq!([said.contains("claim="), show.contains("held")], [is_held; 2], "{told}");
                assert!(is_held || said.contains("(exit 64)") && why.contains("--for "), "{told}");
            }
        }
    }
}

/// `ssh host clinch acquire x` says that it holds a lock that ends with the connection.
#[test]
fn whose_lock_it_is_has_to_be_said_where_the_answer_goes_to_another_host() {
    // Stands for the server's process of a connection, which reads by a pipe, a pair of sockets, or a terminal.
    let serve = "import os,pty,socket,sys
if sys.argv[1]=='terminal': pid,ours=pty.fork()
else:
    if sys.argv[1]=='pipe': ours,theirs=os.pipe()
    else: ours,theirs=(end.detach() for end in socket.socketpair())
    pid=os.fork()
    if pid: os.close(theirs)
    else: os.dup2(theirs,1)
if pid==0: os.execvp(sys.argv[2],sys.argv[2:])
try:
    while (part:=os.read(ours,4096)): os.write(1,part)
except OSError: pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid,0)[1]))";
    let acquire = r#""$CLINCH" acquire x"#;
    // Whether it is refused, and whether that holds for a terminal.
    let cases = [
        (format!("exec {acquire}"), true, true),
        (format!("exec {acquire} > lockfile"), true, true),
        (format!("timeout 60 {acquire} | cat; exit"), true, false),
        (format!("{acquire}; exit"), true, true),
        (format!("exec > >(cat); {acquire}; exit"), true, true),
        (format!("({acquire} || exit; :); exit"), true, false),
        (format!("{acquire} --json | cat; exit"), true, false),
        (format!("{acquire} | sed 's/ .*//' | cut -c 1-9; exit"), true, false),
        // Who reads it is a part of a part.
        (format!("({acquire} | cat); exit"), true, false),
        (format!("{acquire} --for $$; exit"), false, true),
        (format!("{acquire} > lockfile; exit"), false, true),
        (format!("lock=$({acquire}); exit"), false, true),
        (format!("{acquire} | cat > lockfile; exit"), false, true),
        (format!("exec > >(cat > lockfile); {acquire}; exit"), false, true),
    ];
    for (name, by) in ["sshd", "sshd-session"]
        .into_iter()
        .flat_map(|name| ["pipe", "sockets", "terminal"].map(|by| (name, by)))
    {
        let world = World::new();
        for (script, is_refused, is_of_terminals) in &cases {
            if by == "terminal" && !is_of_terminals {
                continue;
            }
            let mut server = python_named(&world, name, serve);
            // Their status is the last part's.
            let script = format!("unset PYTHONHOME; exec 2> why; {script}");
            let output = server.args([by, "bash", "-c", &script]).output().unwrap();
            let why = world.read("why");
            let told = format!("{name} {by}: {script}: {why} {output:?}");
            assert_eq!(why.contains("--for"), *is_refused, "{told}");
            assert!(
                script.contains('|') || output.status.code() == Some(if *is_refused { 64 } else { 0 }),
                "{told}"
            );
            eventually("it is free", || !world.held("x"));
        }
    }
}

/// An init script of a server has its name.
#[test]
fn a_script_that_has_the_name_of_a_server_is_none() {
    for name in ["sshd", "dropbear"] {
        let world = World::new();
        world.write(
            "script",
            "#!/bin/sh\nlock=$(\"$CLINCH\" acquire x) || exit; \"$CLINCH\" show x > show; exit\n",
        );
        world.install(world.path("script"), name);
        let output = program(&world, &[world.path(name).to_str().unwrap()]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(world.read("show").contains("held"), "{output:?}");
    }
}

/// What cron starts, and all that it says is read by cron: what it has acquired it holds.
#[test]
fn a_lock_whose_answer_goes_elsewhere_is_the_scripts() {
    for to in ["> said", "> /dev/null", "| sed p > said"] {
        let world = World::new();
        let script = format!(r#""$CLINCH" acquire x {to} || exit; "$CLINCH" show x > show; exit"#);
        let output = program(&world, &["sh", "-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{to}: {output:?}");
        assert!(world.read("show").contains("held"), "{to}: {output:?}");
    }
}

/// A service manager asks all of a service to end, and the next has the lock while its script cleans up.
#[test]
fn a_holder_is_deaf_to_what_asks_its_shell_to_end() {
    let world = World::new();
    let script =
        r#"lock=$("$CLINCH" acquire x --ttl 1h) || exit; eval "$lock"; echo $$ > shell.pid; exec sleep 60"#;
    let mut shell = Running(program(&world, &["sh", "-c", script]).spawn().unwrap());
    let holder = holder(world.pid("shell.pid")).unwrap();
    for signal in
        [Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR1, Signal::ALARM, Signal::TSTP]
    {
        assert!(common::kill(holder, signal));
    }
    // It has heard of all that, since it lives and answers.
    let claims = world.claims("x", "held");
    let claim = claims.first().expect("it was ended")["claim"].as_str().unwrap();
    assert_eq!(world.code(["renew", "x", claim, "--ttl", "2h"]), 0, "it was ended");
    assert_eq!(world.code(["run", "-n", "x", "true"]), 75, "it was ended");
    assert!(runs(holder), "it was ended");
    shell.signal(Signal::KILL);
    shell.wait();
    eventually("it ends with its shell", || !runs(holder) && !world.held("x"));
}
