//! What `/proc/PID/stat` says.

use std::ffi::CStr;
use std::fs;
use std::io::Write;
use std::ops::Range;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, getpid};

/// In how many parts times are told of a second: the same on all kernels, whatever they count by themselves.
const TICKS: u64 = 100;

/// So exactly is told when a process began.
pub(super) const TICK: Duration = Duration::from_millis(1000 / TICKS);

/// What `/proc/PID/stat` says of a process.
pub(crate) struct Stat {
    pub(crate) parent: i32,
    /// Zero where its first process is in another PID namespace.
    pub(crate) group: i32,
    pub(crate) leads_session: bool,
    pub(crate) threads: u32,
    /// Whether it has ended, and nobody has asked how.
    pub(crate) is_over: bool,
    /// Whether a signal has stopped it.
    pub(crate) is_stopped: bool,
    /// When it began, after boot.
    pub(crate) begun: Duration,
    /// Whether it has an environment, in which nothing is.
    pub(crate) has_empty_environment: bool,
    /// Where the words of its command line are.
    pub(crate) words: Range<usize>,
}

impl Stat {
    pub(crate) fn of(pid: Pid) -> Option<Stat> {
        Stat::read(pid, &pid.to_string())
    }

    /// Of this process, also in the `/proc` of another namespace.
    pub(crate) fn own() -> Option<Stat> {
        Stat::read(getpid(), "self")
    }

    fn read(pid: Pid, name: &str) -> Option<Stat> {
        let text = fs::read(format!("/proc/{name}/stat")).ok()?;
        let fields: Vec<&str> =
            std::str::from_utf8(after_name(&text)?).ok()?.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        let (code, from, to) = (number(23)?, number(47)?, number(48)?);
        Some(Stat {
            // The kernel tells last where the program is.
            has_empty_environment: from == to && to > 0 && code > 0,
            // Its first thread may have ended before others.
            is_over: matches!(*fields.first()?, "Z" | "X") && number(17)? <= 1,
            is_stopped: *fields.first()? == "T",
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            leads_session: fields.get(3)?.parse() == Ok(pid.as_raw_nonzero().get()),
            threads: fields.get(17)?.parse().ok()?,
            words: fields.get(45)?.parse().ok()?..fields.get(46)?.parse().ok()?,
            begun: Duration::from_millis(number(19)?.saturating_mul(1000 / TICKS)),
        })
    }
}

/// The letter for what a process does. Allocates nothing: for a copy of this process.
pub(super) fn letter(of: Pid) -> Option<u8> {
    let (mut path, mut text) = ([0_u8; 32], [0_u8; 512]);
    write!(&mut path[..], "/proc/{}/stat\0", of.as_raw_nonzero()).ok()?;
    let file = open(CStr::from_bytes_until_nul(&path).ok()?, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let length = rustix::io::read(file.ok()?, &mut text).ok()?;
    after_name(text.get(..length)?)?.get(1).copied()
}

/// The third field and all behind it: the second is in parentheses, and may hold anything.
fn after_name(stat: &[u8]) -> Option<&[u8]> {
    stat.rsplit(|byte| *byte == b')').next().filter(|rest| rest.len() < stat.len())
}
