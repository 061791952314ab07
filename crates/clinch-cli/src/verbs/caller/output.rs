//! What a process writes to, and who reads that.

use std::fs::{self, Metadata};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::job::stat::Stat;
use crate::job::sys;

/// The devices of which programs have the other end, and the one by which they have it.
const PTS: std::ops::RangeInclusive<u32> = 136..=143;
const PTMX: (u32, u32) = (5, 2);
/// Whatever terminal a process has.
const TTY: (u32, u32) = (5, 0);

/// What a process writes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Output {
    /// A file, a service's socket, a console: what is there is kept, or seen by people.
    Kept,
    Pipe(Pipe),
    /// A terminal of which a program has the other end.
    Terminal(u64),
    /// A file that has no name, or none any more: it is read by who has it open.
    Nameless {
        device: u64,
        inode: u64,
    },
}

/// A pipe, by what its two ends have in common; or a socket that is used as one, by the end that is written to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pipe {
    device: u64,
    inode: u64,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Fifo,
    /// Who made the pair, and has the other end; nobody knows of others' sockets.
    Socket(Option<i32>),
}

impl Output {
    /// What our answer goes into.
    pub(super) fn own() -> Output {
        Output::at("/proc/self/fd/1").unwrap_or(Output::Kept)
    }

    /// What a process writes to; `None` where that may not be seen.
    pub(super) fn of(pid: i32) -> Option<Output> {
        Output::at(format!("/proc/{pid}/fd/1"))
    }

    fn at(path: impl AsRef<Path>) -> Option<Output> {
        let open = fs::metadata(path).ok()?;
        let kind = open.file_type();
        Some(if kind.is_fifo() {
            Output::Pipe(Pipe { device: open.dev(), inode: open.ino(), kind: Kind::Fifo })
        } else if kind.is_socket() {
            socket(&open)
        } else if kind.is_char_device() {
            let is_own = numbers(open.rdev()) == TTY;
            let device = if is_own { Stat::own()?.terminal } else { open.rdev() };
            if PTS.contains(&numbers(device).0) { Output::Terminal(device) } else { Output::Kept }
        } else if kind.is_file() && open.nlink() == 0 {
            Output::Nameless { device: open.dev(), inode: open.ino() }
        } else {
            Output::Kept
        })
    }

    pub(super) fn is_pipe(self) -> bool {
        matches!(self, Output::Pipe(_))
    }

    pub(super) fn is_written_by(self, pid: i32) -> bool {
        Output::of(pid) == Some(self)
    }

    /// Whether a process has the end open from which is read. Not, where that may not be seen.
    pub(super) fn is_read_by(self, pid: i32) -> bool {
        match self {
            Output::Pipe(Pipe { kind: Kind::Socket(maker), .. }) => maker == Some(pid),
            _ => self.read_at(pid).next().is_some(),
        }
    }

    /// By which descriptors a process reads it.
    pub(super) fn read_at(self, pid: i32) -> impl Iterator<Item = PathBuf> {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.map(|entry| entry.path()).filter(move |path| match self {
            // The link itself says for what it is open.
            Output::Pipe(Pipe { kind: Kind::Fifo, .. }) => {
                let for_reading =
                    fs::symlink_metadata(path).is_ok_and(|link| link.permissions().mode() & 0o400 != 0);
                for_reading && Output::at(path) == Some(self)
            }
            Output::Terminal(device) => is_other_end(path, device),
            // However it is open: who has it can open it anew.
            Output::Nameless { .. } => Output::at(path) == Some(self),
            _ => false,
        })
    }

    /// All who are seen to read it, but us.
    pub(super) fn readers(self) -> Vec<i32> {
        if let Output::Pipe(Pipe { kind: Kind::Socket(maker), .. }) = self {
            return maker.into_iter().collect();
        }
        let us = i32::try_from(std::process::id()).ok();
        let all = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(|pid| Some(*pid) != us && self.is_read_by(*pid)).collect()
    }
}

fn numbers(device: u64) -> (u32, u32) {
    (rustix::fs::major(device), rustix::fs::minor(device))
}

/// Whether what is open at this path is the end of a terminal that its program has.
fn is_other_end(path: &Path, terminal: u64) -> bool {
    if !fs::metadata(path).is_ok_and(|open| numbers(open.rdev()) == PTMX) {
        return false;
    }
    let (major, minor) = numbers(terminal);
    let index = (major.saturating_sub(*PTS.start()) << 8) | minor;
    let told = fs::read_to_string(path.to_string_lossy().replacen("/fd/", "/fdinfo/", 1));
    let told = told.unwrap_or_default();
    told.lines().any(|line| line.strip_prefix("tty-index:").is_some_and(|at| at.trim().parse() == Ok(index)))
}

type Open = fn() -> BorrowedFd<'static>;

/// A socket that is open here, too, tells of its other end: one with a name is a service's, as the journal's; one without is of a pair, as Node makes them.
fn socket(open: &Metadata) -> Output {
    let is_it = |path: &str| {
        fs::metadata(path).is_ok_and(|ours| (ours.dev(), ours.ino()) == (open.dev(), open.ino()))
    };
    let ours: [(&str, Open); 3] = [
        ("/proc/self/fd/1", rustix::stdio::stdout),
        ("/proc/self/fd/2", rustix::stdio::stderr),
        ("/proc/self/fd/0", rustix::stdio::stdin),
    ];
    let of = |maker| Output::Pipe(Pipe { device: open.dev(), inode: open.ino(), kind: Kind::Socket(maker) });
    let Some((_, own)) = ours.into_iter().find(|(path, _)| is_it(path)) else { return of(None) };
    let Ok(own) = own().try_clone_to_owned().map(UnixStream::from) else { return of(None) };
    match own.peer_addr() {
        Ok(peer) if !peer.is_unnamed() => Output::Kept,
        Ok(_) => of(sys::peer(&own).map(|maker| maker.as_raw_nonzero().get())),
        Err(_) => of(None),
    }
}
