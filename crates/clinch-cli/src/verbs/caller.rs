//! Who called us, for whom a lock is taken: who reads our answer.
//!
//! A shell forks processes that are but a part of it, as in `$(... | ...)`, and others that work on their own, as in `( ... ) &`. Both are copies of it.
//! What tells them apart is the way of the answer: the first write it into a pipe that the shell reads, the second read it themselves.

use std::fs;
use std::iter::successors;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::time::Duration;

use rustix::process::{Pid, getppid};

use crate::job::kin::has_own_proc;
use crate::job::stat::Stat;

/// How long one is looked at that reads our answer, and may have the pipe only while it starts another to read it: and how often.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
const LOOKS: usize = 25;

/// A process that called us.
pub(crate) struct Caller {
    pub(crate) pid: i32,
    /// Who reads in turn what it writes, and of which it is a copy: a function may pass our answer on to it.
    pub(crate) passes_on_to: Option<i32>,
}

/// Who called us; `None` where nothing can be seen. Never one further up than is known: a lock that ends too soon is seen to be lost, and one that
/// is another's is not.
pub(crate) async fn caller() -> Option<Caller> {
    for _ in 1..LOOKS {
        match seen() {
            Some(Caller { passes_on_to: Some(_), .. }) => tokio::time::sleep(LOOK_AGAIN).await,
            known => return known,
        }
    }
    seen()
}

/// The same, at first sight.
pub(crate) fn seen() -> Option<Caller> {
    has_own_proc().ok()?;
    let parent = starter()?;
    let answer = Pipe::written_by("self");
    if answer.is_some_and(|answer| answer.is_read_by(parent)) {
        return Some(Caller { pid: parent, passes_on_to: reader(parent) });
    }
    // In `$(function | tee log)` our parent is but a part of the pipeline, and does not see what passes by into that.
    let passes_by = |pid: &i32| answer.is_some() && Pipe::written_by(&pid.to_string()) == answer;
    let mut above = successors(Some(parent), |pid| Some(*pid).filter(passes_by).and_then(original));
    let reader_of_it = above.find_map(reader);
    Some(Caller { pid: reader_of_it.unwrap_or(parent), passes_on_to: reader_of_it.and_then(reader) })
}

/// Our parent, or who started that where it is a command that has nothing to do but to run us, as in `$(timeout 5 clinch ...)`.
fn starter() -> Option<i32> {
    let words = |pid| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let ours = [&b"\0"[..], &words(i32::try_from(std::process::id()).ok()?)].concat();
    let parent = getppid()?.as_raw_nonzero().get();
    let above = successors(Some(parent), |pid| {
        let runs_us = ours.len() > 1 && words(*pid).ends_with(&ours);
        stat(*pid).filter(|_| runs_us).map(|stat| stat.parent).filter(|pid| *pid > 0)
    });
    above.last()
}

/// Who reads what a process writes to its stdout, among those of which it is a copy.
fn reader(of: i32) -> Option<i32> {
    let pipe = Pipe::written_by(&of.to_string())?;
    successors(original(of), |pid| original(*pid)).find(|pid| pipe.is_read_by(*pid))
}

/// Whose copy a process is: its parent's, if it was forked without an exec. So its stack starts where its parent's does; others' are at random
/// places, and nobody is told where a stranger's is.
fn original(of: i32) -> Option<i32> {
    let copy = stat(of)?;
    let parent = stat(copy.parent)?;
    (parent.stack != 0 && parent.stack == copy.stack).then_some(copy.parent)
}

fn stat(pid: i32) -> Option<Stat> {
    Stat::of(Pid::from_raw(pid)?)
}

/// A pipe, by what its two ends have in common.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Pipe {
    device: u64,
    inode: u64,
}

impl Pipe {
    fn at(path: impl AsRef<std::path::Path>) -> Option<Pipe> {
        let open = fs::metadata(path).ok().filter(|open| open.file_type().is_fifo())?;
        Some(Pipe { device: open.dev(), inode: open.ino() })
    }

    fn written_by(process: &str) -> Option<Pipe> {
        Pipe::at(format!("/proc/{process}/fd/1"))
    }

    /// Whether a process has the end open from which is read. Not, where that may not be seen.
    fn is_read_by(self, pid: i32) -> bool {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.map(|entry| entry.path()).any(|path| {
            // The link itself says for what it is open.
            let for_reading =
                fs::symlink_metadata(&path).is_ok_and(|link| link.permissions().mode() & 0o400 != 0);
            for_reading && Pipe::at(&path) == Some(self)
        })
    }
}
