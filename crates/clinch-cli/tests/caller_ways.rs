//! By whatever way the answer of an `acquire` goes: its lock on `file://` is bound to who uses it, or nothing is taken, and `--for` is asked for.

#![allow(clippy::indexing_slicing, clippy::expect_used, clippy::unwrap_used, reason = "test code")]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

use common::pty::Screen;
use common::{World, eventually, program, python_named, shells};

/// What a script calls for its lock, as people write it.
const HELPER: &str = "#!/bin/sh\n\"$CLINCH\" acquire x 2> why\nexit\n";

/// What is told of a lock that is bound to the shell that has it.
const ITS_OWN: &str = "(it is the shell's own)";

/// A directory with the helper, where all users may write.
fn world() -> World {
    let world = World::new();
    world.write("script", HELPER);
    world.install(world.path("script"), "helper.sh");
    std::fs::create_dir(world.path("store")).unwrap();
    for (name, mode) in [("why", 0o666), ("f", 0o666), ("store", 0o1777), (".", 0o1777)] {
        if name != "store" && name != "." {
            world.write(name, "");
        }
        std::fs::set_permissions(world.path(name), PermissionsExt::from_mode(mode)).unwrap();
    }
    world
}

/// Whether a shell can run this here.
fn can(shell: &str, script: &str) -> bool {
    let tried = Command::new(shell).args(["-c", script]).stdin(Stdio::null()).output();
    tried.is_ok_and(|output| output.status.success())
}

/// A script that takes the lock by this line, and then looks at it. It exits with what the line says; `shell` and `for_pid` are written by it.
fn take(world: &World, shell: &str, line: &str) -> Output {
    let script = format!(
        r#"export PATH="$PATH:/usr/sbin:/sbin"; helper="$PWD/helper.sh"
        {line}
        code=$?; [ "$code" = 0 ] || exit "$code"; eval "$lock"; echo "$for_pid" > for; echo $$ > shell; "$CLINCH" show x > show"#
    );
    program(world, &[shell, "-c", &script]).output().unwrap()
}

/// Of each of these nothing is taken, and `--for` is asked for. A line may have another's exit code.
fn are_refused(shell: &str, lines: impl IntoIterator<Item = impl AsRef<str>>) {
    let wrong = lines.into_iter().filter_map(|line| taken(shell, line.as_ref()));
    assert_eq!(wrong.collect::<Vec<_>>(), Vec::<String>::new());
}

fn taken(shell: &str, line: &str) -> Option<String> {
    let world = world();
    let output = take(&world, shell, line);
    let why = world.read("why") + &String::from_utf8_lossy(&output.stderr);
    let told = format!("{shell}: {line}: {why:?} for {:?}: {output:?}", world.read("for"));
    if world.read("show").contains("held") && world.read("for") == world.read("shell") {
        return Some(format!("{told} {ITS_OWN}"));
    }
    let is_free = !world.read("show").contains("held") && !world.held("x");
    (!why.contains("--for") || !is_free).then_some(told)
}

/// It is the lock of the script, and held there.
fn is_the_scripts(shell: &str, line: &str) {
    let world = world();
    let output = take(&world, shell, line);
    let told = format!("{shell}: {line}: {:?} {output:?}", world.read("why"));
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert_eq!(world.read("for"), world.read("shell"), "{told}");
    assert!(world.read("show").contains("held"), "{told}");
}

/// A script reads what another user's process passes on, into which that user may not look: the lock was bound to that process, which ends next.
#[test]
fn nothing_is_taken_where_who_reads_is_another_users() {
    let own = "setpriv --reuid=65534 --regid=65534 --clear-groups --";
    if !can("sh", &format!("{own} true")) {
        return;
    }
    let mut lines = vec![
        format!(r#"lock=$({own} "$helper")"#),
        format!(r#"lock=$({own} sh -c '"$CLINCH" acquire x 2> why; exit')"#),
        format!(r#"lock=$({own} sh -c '"$CLINCH" acquire x 2> why | cat')"#),
        format!(r#"lock=$({own} timeout 60 "$CLINCH" acquire x 2> why)"#),
        // A command of the helper's, whose end is the lock's.
        format!(r#"lock=$(sh -c '{own} "$CLINCH" acquire x 2> why; exit')"#),
    ];
    for other in ["runuser -u nobody --", "sudo -u nobody", "su -s /bin/sh nobody -c"] {
        if !can("sh", &format!("PATH=$PATH:/usr/sbin; {other} true")) {
            continue;
        }
        let quote = if other.starts_with("su ") { "'" } else { "" };
        lines.push(format!(r#"lock=$({other} ./helper.sh)"#));
        lines.push(format!(r#"lock=$({other} {quote}"$CLINCH" acquire x{quote} 2> why)"#));
        let shell = if other.starts_with("su ") { "" } else { "sh -c" };
        lines.push(format!(r#"lock=$({other} {shell} '"$CLINCH" acquire x 2> why; exit')"#));
    }
    are_refused("sh", lines);
    is_the_scripts("sh", &format!(r#"lock=$({own} "$CLINCH" acquire --for $$ x)"#));
}

/// As above, where those of another user are hidden, or those outside of a namespace.
#[test]
fn nothing_is_taken_where_who_reads_cannot_be_seen() {
    let own = "setpriv --reuid=65534 --regid=65534 --clear-groups --";
    let hide = "mount -t proc -o hidepid=2 proc /proc";
    if can("sh", &format!("unshare --mount sh -c '{hide} && {own} true'")) {
        let lines = [format!(r#"{own} "$helper""#), format!(r#"{own} "$CLINCH" acquire x 2> why"#)];
        let hidden = |line| format!(r#"export helper; lock=$(unshare --mount sh -c '{hide}; {line}; exit')"#);
        are_refused("sh", lines.map(hidden));
        // Of its own it sees enough.
        let script =
            r#"lock=$("$CLINCH" acquire x) || exit; eval "$lock"; [ "$for_pid" = $$ ] && "$CLINCH" show x"#;
        let script = script.replace('"', "\\\"").replace('$', "\\$");
        assert!(is_done(&format!(r#"unshare --mount sh -c '{hide}; {own} sh -c "{script}"'"#)));
    }
    let pids = "unshare --pid --fork --mount-proc";
    if can("sh", &format!("{pids} true")) {
        let lines = [r#""$helper""#, r#"sh -c '"$CLINCH" acquire x 2> why | cat; exit'"#];
        are_refused("sh", lines.map(|line| format!("lock=$({pids} {line})")));
        assert!(is_done(&format!(
            r#"{pids} sh -c 'lock=$("$CLINCH" acquire x) || exit; eval "$lock"; [ "$for_pid" = 1 ] && "$CLINCH" show x'"#
        )));
    }
}

/// Whether a script ends well.
fn is_done(script: &str) -> bool {
    program(&world(), &["sh", "-c", script]).output().unwrap().status.success()
}

/// Who called only runs another command, and ends with it.
#[test]
fn nothing_is_taken_for_who_only_runs_another_command() {
    let mut lines = vec![
        r#"timeout 60 sh -c 'exec "$CLINCH" acquire x > f 2> why'"#,
        r#"echo x | xargs "$CLINCH" acquire > f 2> why"#,
        r#"find . -maxdepth 0 -exec "$CLINCH" acquire x --label {} \; > f 2> why"#,
        r#"flock own -c 'exec "$CLINCH" acquire x > f 2> why'"#,
        r#""$CLINCH" run outer -c 'exec "$CLINCH" acquire x > f 2> why'"#,
        r#"setsid --wait --fork sh -c 'exec "$CLINCH" acquire x > f 2> why'"#,
    ];
    let others = [
        ("su nobody -s /bin/sh -c true", r#"su -s /bin/sh nobody -c 'exec "$CLINCH" acquire x > f 2> why'"#),
        ("runuser -u nobody -- true", r#"runuser -u nobody -- sh -c 'exec "$CLINCH" acquire x > f 2> why'"#),
        ("unshare --pid true", r#"unshare --fork sh -c 'exec "$CLINCH" acquire x > f 2> why'"#),
        // What has lost its parent falls to such a process 1.
        (
            "unshare --pid --fork --mount-proc true",
            r#"cp "$(command -v sh)" tini; unshare --pid --fork --mount-proc ./tini -c '"$CLINCH" acquire x > f 2> why; exit'"#,
        ),
    ];
    lines.extend(others.iter().filter(|(tried, _)| can("sh", tried)).map(|(_, line)| line));
    are_refused("sh", lines);
    // A script of such a name is none.
    let world = world();
    let script = "#!/bin/sh\n\"$CLINCH\" acquire x > f || exit; \"$CLINCH\" show x > show; exit\n";
    world.write("script", script);
    world.install(world.path("script"), "timeout");
    let output = program(&world, &[world.path("timeout").to_str().unwrap()]).output().unwrap();
    assert!(output.status.success() && world.read("show").contains("held"), "{output:?}");
}

/// Who reads what a terminal shows is a program, not a person.
#[test]
fn nothing_is_taken_where_a_terminal_is_captured() {
    if !can("sh", "script -qec true /dev/null") {
        return;
    }
    let lines = [
        r#"lock=$(script -qec '"$CLINCH" acquire x 2> why' /dev/null)"#,
        r#"lock=$(script -qec '"$CLINCH" acquire x 2> why; exit' /dev/null)"#,
        r#"lock=$(script -qec ./helper.sh /dev/null)"#,
        r#"lock=$(script -qec 'timeout 60 ./helper.sh; exit' /dev/null)"#,
        r#"lock=$(script -qec '"$CLINCH" acquire x 2> why | cat; exit' /dev/null)"#,
        r#"lock=$(script -qec 'script -qec ./helper.sh /dev/null; exit' /dev/null)"#,
        r#"lock=$(script -qec ./helper.sh /dev/null | tee log)"#,
        // Nobody is left on a terminal that ends with the command.
        r#"script -qec 'exec "$CLINCH" acquire x 2> why' log > /dev/null"#,
    ];
    are_refused("sh", lines);
    if can("sh", "setpriv --reuid=65534 --regid=65534 --clear-groups true") {
        let own = "setpriv --reuid=65534 --regid=65534 --clear-groups --";
        are_refused("sh", [format!(r#"lock=$(script -qec "{own} ./helper.sh" /dev/null)"#)]);
    }
    // It goes on there, and its answer is but shown.
    let world = world();
    let script =
        r#"script -qec '"$CLINCH" acquire x || exit; "$CLINCH" show x > show; exit' log > /dev/null"#;
    let output = program(&world, &["sh", "-c", script]).output().unwrap();
    assert!(output.status.success() && world.read("show").contains("held"), "{output:?}");
}

/// Who reads it is another part of a pipeline or of a shell.
#[test]
fn nothing_is_taken_where_another_part_reads() {
    let lines = [
        // The helper ends next, and what passes by tells nothing of who reads it then.
        "lock=$(./helper.sh | tee log)",
        "./helper.sh | tee log",
        r#"./helper.sh | { read -r lock; eval "$lock"; "$CLINCH" show x > show; }"#,
        r#"mkfifo pipe; ./helper.sh > pipe & read -r lock < pipe"#,
        r#"printf 'x:\n\t./helper.sh\n' > rule; lock=$(make -s -f rule)"#,
        r#"python3 -c 'import socket, subprocess; listens = socket.create_server(("127.0.0.1", 0))
subprocess.run("./helper.sh", stdout=socket.create_connection(listens.getsockname()))'"#,
    ];
    for shell in shells() {
        are_refused(shell, lines);
    }
    // In some shells it is the main one that reads, or that calls.
    let lines = [
        r#"{ "$CLINCH" acquire x 2> why; :; } | { read -r lock; eval "$lock"; "$CLINCH" show x > show; }"#,
        r#"mkfifo pipe; ("$CLINCH" acquire x > pipe 2> why; :) & read -r lock < pipe"#,
    ];
    // A command that a part of a shell has become has not called us.
    let of_some =
        [r#"lock=$(cat <("$CLINCH" acquire x 2> why))"#, r#"lock=$(cat < <("$CLINCH" acquire x 2> why))"#];
    for shell in shells() {
        let some = of_some.iter().filter(|_| ["bash", "zsh"].contains(&shell));
        let taken = lines.iter().chain(some).filter_map(|line| taken(shell, line));
        let wrong: Vec<_> = taken.filter(|told| !told.contains(ITS_OWN)).collect();
        assert_eq!(wrong, Vec::<String>::new());
    }
}

/// All the ways that are sure.
#[test]
fn the_lock_is_the_scripts_by_whatever_way_it_reads_the_answer() {
    let lines = [
        r#"lock=$("$CLINCH" acquire x)"#,
        r#"lock=$(timeout 60 "$CLINCH" acquire x)"#,
        r#"lock=$(sh -c 'exec "$CLINCH" acquire x')"#,
        r#"lock=$(xargs -n1 "$CLINCH" acquire --for $$ < name)"#,
        r#"lock=$(setsid "$CLINCH" acquire x)"#,
        r#""$CLINCH" acquire x > f && lock=$(cat f)"#,
        r#""$CLINCH" acquire x > f & wait $!; lock=$(cat f)"#,
        r#""$CLINCH" acquire x | cat > f; lock=$(cat f)"#,
        r#""$CLINCH" acquire x | sed p | tee log > f; read -r lock < f"#,
        r#"mkfifo pipe; "$CLINCH" acquire x > pipe & read -r lock < pipe"#,
        "read -r lock <<END\n$(\"$CLINCH\" acquire x)\nEND\n",
    ];
    let of_some = [
        r#"read -r lock < <("$CLINCH" acquire x)"#,
        r#". <("$CLINCH" acquire x)"#,
        r#"exec 8>&1 > >(cat > log); "$CLINCH" acquire x; code=$?; exec >&8; until [ -s log ]; do sleep 0.02; done; lock=$(cat log)"#,
    ];
    let of_bash = [
        r#"coproc "$CLINCH" acquire x; read -r lock <&"${COPROC[0]}""#,
        r#"coproc { "$CLINCH" acquire x; :; }; read -r lock <&"${COPROC[0]}""#,
        r#"read -r lock <<< "$("$CLINCH" acquire x)""#,
    ];
    for shell in shells() {
        let some = of_some.iter().filter(|_| ["bash", "zsh"].contains(&shell));
        let bash = of_bash.iter().filter(|_| shell == "bash");
        for line in lines.iter().chain(some).chain(bash) {
            is_the_scripts(shell, &format!("echo x > name; {line}"));
        }
    }
    // As the journal's, which is no program's that waits for the answer.
    let script = r#"import os, socket, subprocess; listens = socket.socket(socket.AF_UNIX); listens.bind("journal"); listens.listen()
ours = socket.socket(socket.AF_UNIX); ours.connect("journal")
line = '"$CLINCH" acquire x || exit; "$CLINCH" show x; exit'
os._exit(subprocess.run(line, shell=True, stdout=ours).returncode)"#;
    let output = program(&world(), &["python3", "-c", script]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    if can("fish", ":") {
        let script = r#"set lock ($CLINCH acquire x); or exit; string match -q "* for_pid=$fish_pid" $lock; or exit 11; $CLINCH show x"#;
        let output = program(&world(), &["fish", "-c", script]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

/// A person types it at a prompt, or in a script that is called there.
#[test]
fn a_lock_that_is_taken_at_a_prompt_is_the_shells() {
    let world = world();
    let mut screen = Screen::start(&world, 24, 200);
    let lines = [
        ("typed", r#""$CLINCH" acquire typed; "$CLINCH" show typed > typed"#),
        ("job", r#""$CLINCH" acquire job & wait; "$CLINCH" show job > job"#),
        ("timed", r#"timeout 60 "$CLINCH" acquire timed; "$CLINCH" show timed > timed"#),
        ("called", r#"sh -c '"$CLINCH" acquire called; "$CLINCH" show called > called; exit'"#),
        ("piped", r#""$CLINCH" acquire piped | cat; "$CLINCH" show piped > piped"#),
        ("read", r#"eval "$("$CLINCH" acquire read)"; "$CLINCH" show read > read"#),
    ];
    for (name, line) in lines {
        screen.type_in(&format!("{line}\n"));
        eventually(&format!("{name} is shown"), || world.read(name).ends_with('\n'));
        assert!(world.read(name).contains("held"), "{line}: {}", world.read(name));
    }
}

/// As pexpect and its like do: a program opens a terminal, starts a command on it, and reads that.
const ON_TERMINAL: &str = r#"import os, pty, sys
pid, ours = pty.fork()
if pid == 0: os.execvp(sys.argv[1], sys.argv[1:])
said = b""
try:
    while (part := os.read(ours, 4096)): said += part
except OSError: pass
open("said", "wb").write(said)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"#;

/// As sudo does where it is told to `use_pty`: what leads the session on its terminal runs the command as a group that has the terminal.
const AS_SUDO: &str = r#"import fcntl, os, pty, signal, sys, termios
ours, theirs = pty.openpty()
monitor = os.fork()
if monitor == 0:
    os.setsid(); fcntl.ioctl(theirs, termios.TIOCSCTTY, 0); os.close(ours)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    command = os.fork()
    if command == 0:
        os.setpgid(0, 0); os.tcsetpgrp(theirs, os.getpid()); signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        for at in range(3): os.dup2(theirs, at)
        os.execvp(sys.argv[1], sys.argv[1:])
    os._exit(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]))
os.close(theirs)
try:
    while (part := os.read(ours, 4096)): os.write(1, part)
except OSError: pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(monitor, 0)[1]))"#;

/// It keeps to itself what it reads, and its own output goes to a file.
#[test]
fn nothing_is_taken_where_a_program_reads_a_terminal() {
    let world = world();
    world.write("expect", ON_TERMINAL);
    let output = program(&world, &["sh", "-c", "exec python3 expect ./helper.sh > log"]).output().unwrap();
    let told = format!("{:?} {:?} {output:?}", world.read("said"), world.read("why"));
    assert!(output.status.code() == Some(64) && world.read("why").contains("--for"), "{told}");
    assert!(!world.read("said").contains("claim=") && !world.held("x"), "{told}");
}

/// Its terminal is no prompt at which somebody types; a shell with job control that it runs has one.
#[test]
fn nothing_is_taken_where_sudo_has_a_terminal_of_its_own() {
    let world = world();
    let output = python_named(&world, "sudo", AS_SUDO).arg("./helper.sh").output().unwrap();
    let told = format!("{:?} {output:?}", world.read("why"));
    assert!(output.status.code() == Some(64) && world.read("why").contains("--for"), "{told}");
    assert!(!world.held("x"), "{told}");
    let line = r#"unset PYTHONHOME; "$CLINCH" acquire x && "$CLINCH" show x > show; exit"#;
    let output = python_named(&world, "sudo", AS_SUDO).args(["bash", "-ic", line]).output().unwrap();
    assert!(output.status.success() && world.read("show").contains("held"), "{output:?}");
}

/// BusyBox is the shell of a script, also of one that has the name of what only runs others.
#[test]
fn a_script_of_busybox_is_told_from_what_that_is_itself() {
    let world = world();
    let shell = String::from_utf8(Command::new("sh").args(["-c", "command -v sh"]).output().unwrap().stdout);
    world.install(shell.unwrap().trim(), "busybox");
    for name in ["init", "cron", "find"] {
        let busybox = world.path("busybox");
        let line = r#""$CLINCH" acquire x > f || exit; "$CLINCH" show x > show; exit"#;
        world.write("script", &format!("#!{}\n{line}\n", busybox.display()));
        world.install(world.path("script"), name);
        let output = program(&world, &[world.path(name).to_str().unwrap()]).output().unwrap();
        assert!(output.status.success() && world.read("show").contains("held"), "{name}: {output:?}");
        eventually("it is free", || !world.held("x"));
    }
    are_refused(
        "sh",
        [
            r#"cp "$(command -v sh)" busybox; ln -s busybox timeout; ./timeout -c '"$CLINCH" acquire x > f 2> why; exit'"#,
        ],
    );
}

/// ksh93 captures by a file that has no name, as does who gives a command such a file in Python.
#[test]
fn nothing_is_taken_where_a_file_without_a_name_is_read() {
    let script = r#"import os, subprocess, sys, tempfile
file = tempfile.TemporaryFile() if sys.argv[1] == "file" else os.fdopen(os.memfd_create("x"), "w+b")
code = subprocess.run(sys.argv[2:], stdout=file).returncode
file.seek(0); open("said", "wb").write(file.read()); os.system('"$CLINCH" show x > show')
os._exit(code)"#;
    for kind in ["file", "memory"] {
        let world = world();
        let output = program(&world, &["python3", "-c", script, kind, "./helper.sh"]).output().unwrap();
        let told = format!("{kind}: {:?} {:?} {output:?}", world.read("said"), world.read("why"));
        assert!(output.status.code() == Some(64) && world.read("why").contains("--for"), "{told}");
        assert!(!world.read("said").contains("claim=") && !world.held("x"), "{told}");
        let clinch = env!("CARGO_BIN_EXE_clinch");
        let output =
            program(&world, &["python3", "-c", script, kind, clinch, "acquire", "x"]).output().unwrap();
        assert!(output.status.success() && world.read("show").contains("held"), "{kind}: {output:?}");
    }
}

/// Between its two forks the shell of a helper has the end of the pipe from which another part reads next.
#[test]
fn nothing_is_taken_where_another_reads_by_the_time_of_the_answer() {
    let script = r#"import os, subprocess, sys, time
def waits(pid):
    words = b"\0--for-pid\0%d\0" % pid
    for other in filter(str.isdigit, os.listdir("/proc")):
        try:
            if words in open(f"/proc/{other}/cmdline", "rb").read(): return True
        except OSError: pass
    return False
held = subprocess.Popen([os.environ["CLINCH"], "run", "x", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
while subprocess.run([os.environ["CLINCH"], "run", "-n", "x", "true"], stderr=subprocess.DEVNULL).returncode != 75: time.sleep(0.02)
read, write = os.pipe()
taken = subprocess.Popen([os.environ["CLINCH"], "acquire", "x"], stdout=write, stderr=open("why", "w"))
while not waits(os.getpid()) and taken.poll() is None: time.sleep(0.02)
reader = subprocess.Popen(["cat"], stdin=read); os.close(read); os.close(write)
held.stdin.close(); held.wait()
code = taken.wait(); reader.wait(); os._exit(code)"#;
    let world = world();
    let output = program(&world, &["python3", "-c", script]).output().unwrap();
    let told = format!("{:?} {output:?}", world.read("why"));
    assert!(output.status.code() == Some(64) && world.read("why").contains("--for"), "{told}");
    assert!(!told.contains("claim=") && !world.held("x"), "{told}");
}
