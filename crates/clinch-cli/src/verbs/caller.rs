//! Who called us, for whom a lock is taken: who reads our answer.
//!
//! A shell forks processes that are but a part of it, as in `$(... | ...)`, and others that work on their own, as in `( ... ) &`. Both are copies of it.
//! What tells them apart is the way of the answer: the first write it into a pipe that the shell reads, the second read it themselves. Where who reads it is
//! no copy's original, as with a helper that is captured, nothing tells whether the caller ends next or goes on.

use std::fs;
use std::iter::successors;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, getppid};

use crate::job::kin::{children, has_own_proc, is_named};
use crate::job::stat::Stat;
use crate::job::sys;

/// How long one is looked at that reads our answer, and may have the pipe only while it starts another to read it: and how often.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
const LOOKS: usize = 25;

/// A process that called us.
pub(crate) struct Caller {
    pub(crate) pid: i32,
    /// Who else may be about to use the lock.
    pub(crate) or: Option<Other>,
}

/// A process that reads what the one that called us writes.
pub(crate) enum Other {
    /// Of which that is a copy, and reads our answer: a function may pass it on.
    Original(i32),
    /// Of which it is none: what it writes may be a helper's answer, or but noted.
    Above(i32),
    /// Which sends it to another host, and ends with that connection.
    Elsewhere(i32),
    /// Which is yet to be started, where it may be a part of what is sent there.
    Unread,
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

/// The same, at first sight.
pub(crate) fn seen() -> Option<Caller> {
    has_own_proc().ok()?;
    let parent = starter()?;
    let answer = Pipe::answer();
    if is_server(&parent) {
        return Some(Caller { pid: parent, or: Some(Other::Elsewhere(parent)) });
    }
    if answer.is_some_and(|answer| answer.is_read_by(parent)) {
        return Some(Caller { pid: parent, or: reader(parent).map(Other::Original) });
    }
    // In `$(function | tee log)` our parent is but a part of the pipeline, and does not see what passes by into that.
    let passes_by = |pid: &i32| answer.is_some_and(|answer| answer.is_written_by(*pid));
    let mut above = successors(Some(parent), |pid| Some(*pid).filter(passes_by).and_then(original));
    if let Some(pid) = above.find_map(reader) {
        return Some(Caller { pid, or: reader(pid).map(Other::Original) });
    }
    let or = answer.and_then(|answer| {
        sent_elsewhere(parent, answer).or_else(|| reader_above(parent, answer).map(Other::Above))
    });
    Some(Caller { pid: parent, or })
}

/// Whether a process serves a connection from another host. A script may have the name of a server, whose program is a shell; but others' programs
/// nobody may see.
fn is_server(pid: &i32) -> bool {
    let names = [c"sshd", c"sshd-session", c"dropbear"];
    let is_named = Pid::from_raw(*pid).is_some_and(|pid| names.into_iter().any(|name| is_named(pid, name)));
    is_named
        && fs::read_link(format!("/proc/{pid}/exe")).ok().is_none_or(|program| {
            let name = program.file_name().unwrap_or_default().as_bytes();
            [&b"sshd"[..], b"dropbear"].iter().any(|server| name.starts_with(server))
        })
}

/// Whether our answer goes where the shell writes that a server has started, as in `ssh host 'clinch acquire x | cat'`: that ends next, and the
/// server with the connection. What it has open nobody may see.
fn sent_elsewhere(caller: i32, answer: Pipe) -> Option<Other> {
    let shell = successors(Some(caller), |pid| original(*pid)).last()?;
    let server = parent(shell).filter(is_server)?;
    if answer.is_written_by(shell) {
        return Some(Other::Elsewhere(server));
    }
    match flow(answer, Pipe::written_by(shell)?, shell) {
        Flow::Into => Some(Other::Elsewhere(server)),
        Flow::Unread => Some(Other::Unread),
        Flow::Elsewhere => None,
    }
}

/// Who above our caller reads our answer, which went there with what that writes.
fn reader_above(caller: i32, answer: Pipe) -> Option<i32> {
    let pipe = if answer.is_written_by(caller) { answer } else { Pipe::written_by(caller)? };
    successors(parent(caller), |pid| parent(*pid))
        .find(|pid| pipe.is_read_by(*pid))
        .filter(|_| flow(answer, pipe, caller) == Flow::Into)
}

/// Where what is written into a pipe goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Into,
    /// Nobody is there who reads it, or not yet.
    Unread,
    Elsewhere,
}

/// Whether what is written into a pipe comes out of another: by the parts of a pipeline, children of this process.
fn flow(mut answer: Pipe, pipe: Pipe, of: i32) -> Flow {
    let children = Pid::from_raw(of).into_iter().flat_map(|of| children(of, true));
    let parts: Vec<i32> = children.map(|pid| pid.as_raw_nonzero().get()).collect();
    // Each part but once.
    for _ in 0..=parts.len() {
        if answer == pipe {
            return Flow::Into;
        }
        let Some(part) = parts.iter().find(|part| answer.is_read_by(**part)) else { return Flow::Unread };
        let Some(next) = Pipe::written_by(*part) else { return Flow::Elsewhere };
        answer = next;
    }
    Flow::Elsewhere
}

/// Our parent, or who started that where it is a command that has nothing to do but to run us, as in `$(timeout 5 clinch ...)`.
fn starter() -> Option<i32> {
    let words = |pid| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let ours = [&b"\0"[..], &words(i32::try_from(std::process::id()).ok()?)].concat();
    let above = successors(Some(getppid()?.as_raw_nonzero().get()), |pid| {
        let runs_us = ours.len() > 1 && words(*pid).ends_with(&ours);
        parent(*pid).filter(|_| runs_us)
    });
    above.last()
}

/// Who reads what a process writes to its stdout, among those of which it is a copy.
fn reader(of: i32) -> Option<i32> {
    let pipe = Pipe::written_by(of)?;
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

/// A pipe, by what its two ends have in common; or a socket that is used as one, by the end that is written to.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Pipe {
    device: u64,
    inode: u64,
    /// Who made the pair of sockets, and has the other end.
    maker: Option<i32>,
}

impl Pipe {
    /// What our answer goes into.
    fn answer() -> Option<Pipe> {
        let Some(maker) = maker_of_stdout() else { return Pipe::at("/proc/self/fd/1") };
        let open = fs::metadata("/proc/self/fd/1").ok()?;
        Some(Pipe { device: open.dev(), inode: open.ino(), maker: Some(maker) })
    }

    fn at(path: impl AsRef<Path>) -> Option<Pipe> {
        let open = fs::metadata(path).ok().filter(|open| open.file_type().is_fifo())?;
        Some(Pipe { device: open.dev(), inode: open.ino(), maker: None })
    }

    /// Who reads it cannot be seen of a socket.
    fn written_by(pid: i32) -> Option<Pipe> {
        let open = fs::metadata(format!("/proc/{pid}/fd/1")).ok()?;
        let is_one = open.file_type().is_fifo() || open.file_type().is_socket();
        is_one.then(|| Pipe { device: open.dev(), inode: open.ino(), maker: None })
    }

    fn is_written_by(self, pid: i32) -> bool {
        let open = fs::metadata(format!("/proc/{pid}/fd/1"));
        open.is_ok_and(|open| (open.dev(), open.ino()) == (self.device, self.inode))
    }

    /// Whether a process has the end open from which is read. Not, where that may not be seen.
    fn is_read_by(self, pid: i32) -> bool {
        if let Some(maker) = self.maker {
            return maker == pid;
        }
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.map(|entry| entry.path()).any(|path| {
            // The link itself says for what it is open.
            let for_reading =
                fs::symlink_metadata(&path).is_ok_and(|link| link.permissions().mode() & 0o400 != 0);
            for_reading && Pipe::at(&path) == Some(self)
        })
    }
}

/// Who made the pair of sockets of which one is our stdout, as Node does for its children. A socket with a name is a service's, as the journal's.
fn maker_of_stdout() -> Option<i32> {
    let socket = UnixStream::from(rustix::stdio::stdout().try_clone_to_owned().ok()?);
    let is_pair = socket.peer_addr().is_ok_and(|peer| peer.is_unnamed());
    is_pair.then(|| sys::peer(&socket)).flatten().map(|maker| maker.as_raw_nonzero().get())
}
