//! Where an answer goes that the process that called us does not read: through what that has started, to a file, a person, or another program.

use std::iter::successors;

use super::output::Output;
use super::{is_runner, is_server, is_wrapper, parent, shows, stat};
use crate::job::stat::Stat;
use crate::output::is_read;

/// How many parts of a pipeline are looked at.
const PARTS: usize = 16;

/// Where it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// Where the one that called finds it, if anybody.
    Kept,
    /// With another, who may use the lock.
    Read(i32),
    /// Nobody is seen who reads it: not yet, or another user's process.
    Unread,
    /// On a terminal that ends with us.
    Alone,
}

/// Where our answer ends, of which the one that called does not read the pipe.
pub(super) fn of_answer(caller: i32) -> End {
    // What nobody can read is not written, and nothing is held then.
    if !is_read() { End::Kept } else { end(Output::own(), None, caller, PARTS) }
}

/// Where that ends which a process writes, as does who reads it and is a part of what the one that called has started.
pub(super) fn of(writer: i32, caller: i32) -> End {
    Output::of(writer).map_or(End::Unread, |output| end(output, Some(writer), caller, PARTS))
}

/// The writer is us where it is `None`.
fn end(output: Output, writer: Option<i32>, caller: i32, left: usize) -> End {
    let Some(left) = left.checked_sub(1) else { return End::Unread };
    let is_terminal = matches!(output, Output::Terminal(_));
    if output == Output::Kept {
        return End::Kept;
    }
    if let Output::Terminal(terminal) = output {
        let Some(own) = writer.map_or_else(Stat::own, stat) else { return End::Unread };
        if writer.is_none() && own.leads_session && own.terminal == terminal {
            return End::Alone;
        }
        if is_of_prompt(&own, terminal) {
            return End::Kept;
        }
    }
    let readers = output.readers();
    let ends = readers.iter().map(|reader| match Output::of(*reader) {
        _ if *reader == caller => End::Kept,
        _ if is_server(*reader) => End::Read(*reader),
        // Some are known to only pass on what is written on a terminal: any other program may use it, as one that expects it does. So does a part of
        // what the caller has started.
        Some(next)
            if next != output && if is_terminal { shows(*reader) } else { is_part(*reader, caller) } =>
        {
            end(next, Some(*reader), caller, left)
        }
        _ => End::Read(*reader),
    });
    // One that may use it is enough.
    ends.max_by_key(|end| *end != End::Kept).unwrap_or(End::Unread)
}

/// Whether a process descends from the one that called.
fn is_part(pid: i32, caller: i32) -> bool {
    successors(parent(pid), |pid| parent(*pid)).any(|above| above == caller)
}

/// Whether a process runs on a terminal as a job of a shell at whose prompt somebody types.
fn is_of_prompt(of: &Stat, terminal: u64) -> bool {
    let above = successors(Some(of.parent), |pid| parent(*pid)).filter_map(stat);
    let mut here = above.filter(|above| above.terminal == terminal);
    let first = if of.terminal == terminal { None } else { here.next() };
    let job = first.as_ref().unwrap_or(of);
    let Some(leader) = stat(job.session).filter(|_| job.terminal == terminal) else { return false };
    // What only runs others gives its command a group and the terminal, too, as sudo does: that is no job, but may be a shell that has some.
    let group = if is_runner(job.session) { group_below(job, job.session) } else { Some(leader.group) };
    let Some(not) = group else { return false };
    let is_job = |group: i32| group != 0 && group != not;
    // A command like `timeout` makes a group, too, but only such a shell gives it the terminal.
    is_job(job.group) && (is_job(job.foreground) || !is_runner(job.group) || is_wrapper(job.group))
}

/// The group of the child of the one that leads a session from which this process descends, or which it is.
fn group_below(of: &Stat, leader: i32) -> Option<i32> {
    if of.parent == leader {
        return Some(of.group);
    }
    let above = successors(Some(of.parent), |pid| parent(*pid));
    above.filter_map(stat).find(|above| above.parent == leader).map(|child| child.group)
}
