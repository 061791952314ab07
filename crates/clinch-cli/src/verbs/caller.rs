//! Who called us, for whom a lock is taken: who reads our answer.
//!
//! A shell forks processes that are but a part of it, as in `$(... | ...)`, and others that work on their own, as in `( ... ) &`. Both are copies of it.
//! What tells them apart is the way of the answer: the first write it into a pipe that the shell reads, the second read it themselves. Where who reads it is
//! no copy's original, as with a helper that is captured, nothing tells whether the caller ends next or goes on.

mod output;
mod way;

use std::ffi::{CStr, OsStr};
use std::fs;
use std::iter::successors;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rustix::process::{Pid, getppid};

use self::output::Output;
use self::way::End;
use crate::job::kin::{has_own_proc, is_clinch, is_named};
use crate::job::stat::Stat;

/// How long one is looked at that reads our answer, and may have the pipe only while it starts another to read it: and how often.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
const LOOKS: usize = 25;

/// A process that called us.
pub(crate) struct Caller {
    pub(crate) pid: i32,
    /// Who else may be about to use the lock.
    pub(crate) or: Option<Other>,
}

/// Why nobody can tell.
pub(crate) enum Other {
    /// Of which that is a copy, and reads our answer: a function may pass it on.
    Original(i32),
    /// Who reads what that writes, which may be a helper's answer, or but noted.
    Reader(i32),
    /// Who sends it to another host, and ends with that connection.
    Elsewhere(i32),
    /// Nobody is seen who reads it, and somebody does.
    Unread,
    /// The terminal that it goes to ends with us.
    Alone,
    /// That only runs other commands.
    Runner,
}

impl Other {
    /// Why this process may not be meant, and what to do.
    pub(crate) fn of(&self, pid: i32, name: &str) -> String {
        match self {
            Other::Original(reader) => format!(
                "the answer is read by process {pid}, a part of process {reader}, which reads what that writes: either may be about to \
                 use the lock; {name}, such as `--for $$` for the shell itself"
            ),
            Other::Reader(reader) => format!(
                "process {pid} called, and what it writes is read by process {reader}: either may be about to use the lock; {name}, such as \
                 `--for {reader}` where process {pid} only passes the answer on, or `--for $$` in a script that goes on"
            ),
            Other::Elsewhere(server) => format!(
                "process {server} sends the answer to another host, and ends with the connection, as does what it has started; {name}, on this host"
            ),
            Other::Unread => format!(
                "process {pid} called, and it is not seen who reads what that passes on, perhaps another user's process: either may be about to use the \
                 lock; {name}, such as `--for $$` in the script that uses it"
            ),
            Other::Alone => format!(
                "nothing but this command runs on its terminal, which ends with it, and it is not known who reads what is seen there; {name}"
            ),
            Other::Runner => format!(
                "process {pid} only runs other commands, and works under no lock; {name}, such as `--for $$` in the script that uses it"
            ),
        }
    }
}

/// Who called us; `None` where nothing can be seen. Never one further up than is known: a lock that ends too soon is seen to be lost, and one that
/// is another's is not.
pub(crate) async fn caller() -> Option<Caller> {
    for _ in 1..LOOKS {
        match seen() {
            // A part of a pipeline writes where the shell does until it has opened what it is to write to.
            Some(Caller { or: Some(_), .. }) => tokio::time::sleep(LOOK_AGAIN).await,
            known => return known,
        }
    }
    seen()
}

/// Completes when it is time to look a second time whether this is who called, and tells what is amiss: between its two forks the shell of
/// `clinch ... | other` has the end of the pipe that the other reads next. To be asked from the first look on.
pub(crate) fn second_look(first: i32) -> impl Future<Output = Result<(), Option<Caller>>> {
    let is_needed = Output::own().is_pipe();
    let settled = tokio::time::sleep(LOOK_AGAIN);
    async move {
        if !is_needed {
            return Ok(());
        }
        settled.await;
        match caller().await {
            Some(Caller { pid, or: None }) if pid == first => Ok(()),
            other => Err(other),
        }
    }
}

/// The same, at first sight.
fn seen() -> Option<Caller> {
    has_own_proc().ok()?;
    let parent = starter()?;
    // Of one that is hidden not even the name is told.
    stat(parent)?;
    if is_server(parent) {
        return Some(Caller { pid: parent, or: Some(Other::Elsewhere(parent)) });
    }
    if is_runner(parent) {
        return Some(Caller { pid: parent, or: Some(Other::Runner) });
    }
    let answer = Output::own();
    if answer.is_pipe() && answer.is_read_by(parent) {
        let passed_on = || Some(parent).filter(|pid| is_given(*pid, answer)).map(|pid| way::of(pid, pid));
        let or = reader(parent).map(Other::Original).or_else(|| doubt(parent, passed_on()?));
        return Some(Caller { pid: parent, or });
    }
    if let Some(pid) = reader_of_part(parent, answer) {
        return Some(Caller { pid, or: reader(pid).map(Other::Original) });
    }
    Some(Caller { pid: parent, or: doubt(parent, way::of_answer(parent)) })
}

/// As far as is known without a look at others: whose name a lock bears that is bound to no process.
pub(crate) fn nearest() -> Option<i32> {
    has_own_proc().ok()?;
    let (parent, answer) = (starter()?, Output::own());
    let reads = answer.is_pipe() && answer.is_read_by(parent);
    reads.then_some(parent).or_else(|| reader_of_part(parent, answer)).or(Some(parent))
}

fn doubt(caller: i32, end: End) -> Option<Other> {
    match end {
        End::Kept => None,
        End::Read(reader) if is_server(reader) => Some(Other::Elsewhere(reader)),
        End::Read(reader) => Some(Other::Reader(reader)),
        // What a server has open nobody may see.
        End::Unread => {
            let shell = successors(Some(caller), |pid| original(*pid)).last();
            let server = shell.and_then(parent).filter(|pid| is_server(*pid));
            Some(server.map_or(Other::Unread, Other::Elsewhere))
        }
        End::Alone => Some(Other::Alone),
    }
}

/// Servers of connections from other hosts.
const SERVERS: [&CStr; 3] = [c"sshd", c"sshd-session", c"dropbear"];

/// What starts other programs and works under no lock itself. Where its command line ends with ours, we are not for it, but for who has started it.
const RUNNERS: [&CStr; 28] = [
    c"su",
    c"sudo",
    c"doas",
    c"runuser",
    c"pkexec",
    c"unshare",
    c"nsenter",
    c"bwrap",
    c"script",
    c"timeout",
    c"time",
    c"flock",
    c"strace",
    c"ltrace",
    c"xargs",
    c"find",
    c"systemd",
    c"init",
    c"tini",
    c"dumb-init",
    c"docker-init",
    c"containerd-shim",
    c"conmon",
    c"cron",
    c"crond",
    c"atd",
    c"setsid",
    c"systemd-inhibit",
];

/// What only shows a terminal of which it has the other end, on the one where it writes itself.
const SHOWERS: [&CStr; 6] = [c"script", c"tmux", c"tmux: server", c"screen", c"sudo", c"su"];

const SHELLS: [&str; 10] = ["sh", "dash", "bash", "zsh", "ksh", "ksh93", "mksh", "lksh", "yash", "fish"];

/// Programs that are many, by the name with which they are called; and those of them that are a shell, too.
const BOXES: [&str; 3] = ["busybox", "toybox", "coreutils"];
const SHELL_BOXES: [&str; 2] = ["busybox", "toybox"];

/// Whether a process serves a connection from another host.
fn is_server(pid: i32) -> bool {
    is_any(pid, &SERVERS, |program| ["sshd", "dropbear"].iter().any(|name| program.starts_with(name)))
}

fn is_runner(pid: i32) -> bool {
    is_one_of(pid, &RUNNERS) || is_wrapper(pid)
}

/// Whether it is a `clinch run`, which makes no process group.
fn is_wrapper(pid: i32) -> bool {
    is_one_of(pid, &[c"clinch"]) || is_clinch(pid)
}

/// Whether a process only passes on what is written on its terminal.
fn shows(pid: i32) -> bool {
    is_one_of(pid, &SHOWERS)
}

fn is_one_of(pid: i32, names: &[&CStr]) -> bool {
    is_any(pid, names, |program| {
        let is_box = BOXES.contains(&program) && (!SHELL_BOXES.contains(&program) || is_called(pid, names));
        is_box || names.iter().any(|name| name.to_str().is_ok_and(|name| program.starts_with(name)))
    })
}

/// Whether a process was called by one of these names: the shell of a script is called by its own.
fn is_called(pid: i32, names: &[&CStr]) -> bool {
    let words = words(pid);
    let called = words.split(|byte| *byte == 0).next().unwrap_or_default();
    let called = called.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    names.iter().any(|name| name.to_bytes() == called)
}

/// Whether a process has one of these names, and such a program: a script may have that name, too, whose program is a shell. But others' programs nobody may see.
fn is_any(pid: i32, names: &[&CStr], is_program: impl FnOnce(&str) -> bool) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| names.iter().any(|name| is_named(pid, name)))
        && fs::read_link(format!("/proc/{pid}/exe"))
            .ok()
            .is_none_or(|program| program.file_name().and_then(OsStr::to_str).is_some_and(is_program))
}

/// Who reads what a part of a shell writes, to where our answer goes or not. In `$(function | tee log)` our parent is but a part of the pipeline, and does
/// not see what passes by into that.
fn reader_of_part(caller: i32, answer: Output) -> Option<i32> {
    let passes_by = |pid: &i32| answer.is_pipe() && answer.is_written_by(*pid);
    let mut above = successors(Some(caller), |pid| Some(*pid).filter(passes_by).and_then(original));
    above.find_map(reader)
}

/// Whether a process was given the pipe to read when it was started, as its stdin or by a word of its command line. It has not called us then: a part of a
/// shell has, which it has become since, as in `$(cat <(...))`. A shell itself may have it as stdin for a command of its own, as `read`.
fn is_given(pid: i32, answer: Output) -> bool {
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    if program.file_name().and_then(OsStr::to_str).is_some_and(|name| SHELLS.contains(&name)) {
        return false;
    }
    let words = words(pid);
    answer.read_at(pid).filter_map(|path| Some(path.file_name()?.as_bytes().to_vec())).any(|at| {
        let is_named = |place: &[u8]| {
            let name = [place, &at, b"\0"].concat();
            words.windows(name.len()).any(|part| part == name)
        };
        at == b"0" || is_named(b"/dev/fd/") || is_named(b"/proc/self/fd/")
    })
}

/// Our parent, or who started that where it is a command that has nothing to do but to run us, as in `$(timeout 5 clinch ...)`.
fn starter() -> Option<i32> {
    let ours = [&b"\0"[..], &words(i32::try_from(std::process::id()).ok()?)].concat();
    let above = successors(Some(getppid()?.as_raw_nonzero().get()), |pid| {
        let runs_us = ours.len() > 1 && words(*pid).ends_with(&ours);
        parent(*pid).filter(|_| runs_us)
    });
    above.last()
}

/// The words of a process' command line, each with its end.
fn words(pid: i32) -> Vec<u8> {
    fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

/// Who reads what a process writes to its stdout, among those of which it is a copy.
fn reader(of: i32) -> Option<i32> {
    let pipe = Output::of(of).filter(|output| output.is_pipe())?;
    successors(original(of), |pid| original(*pid)).find(|pid| pipe.is_read_by(*pid))
}

/// Whose copy a process is: its parent's, if it was forked without an exec. So its stack starts where its parent's does; others' are at random
/// places, and nobody is told where a stranger's is.
fn original(of: i32) -> Option<i32> {
    let copy = stat(of)?;
    let parent = stat(copy.parent)?;
    (parent.stack != 0 && parent.stack == copy.stack).then_some(copy.parent)
}

fn parent(pid: i32) -> Option<i32> {
    stat(pid).map(|stat| stat.parent).filter(|pid| *pid > 0)
}

fn stat(pid: i32) -> Option<Stat> {
    Stat::of(Pid::from_raw(pid)?)
}
