//! The door of a job: a run inside it that wants the same lock knocks here and is let in, and the lock is not released under it.
//!
//! Who was let in is kept by a descriptor of its process. So nothing that becomes of it later matters: another program, another user, another
//! parent, a cleared environment, memory that is stuck.

use std::collections::hash_map::RandomState;
use std::future::pending;
use std::hash::BuildHasher;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Resource, getpid, getrlimit, pidfd_open};
use tokio::net::{UnixListener, UnixStream};

use super::namespace;
use super::reentry::is_below;
use super::stat::Stat;

/// What who knocks is told: it was let in, or never will be. Who is told nothing may knock again.
const ENTER: u8 = b'1';
const NEVER: u8 = b'0';

/// Descriptors that are kept free for what ends a job, or half of them where there are few.
const ROOM: u64 = 64;

/// Descriptors without which nobody can look for the parts of a job.
const LOOKING: u64 = 4;

/// The pause after somebody could not be let in, as nothing is left to keep it by.
const REST: Duration = Duration::from_millis(50);

/// Open until dropped or closed.
#[derive(Debug)]
pub(crate) struct Door {
    /// Empty: it was never open.
    address: String,
    listener: Option<UnixListener>,
    inner: Vec<Inner>,
}

/// A run that was let in.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) pid: Pid,
    process: OwnedFd,
}

impl Door {
    /// Opens one, if this system lets us and shows who is of the job. Must be called inside a tokio runtime.
    pub(crate) fn open() -> Door {
        if namespace::is_the_job() {
            // Nobody could tell where who knocks stands in it.
            return Door { address: String::new(), listener: None, inner: Vec::new() };
        }
        let address = format!("clinch-{:016x}", RandomState::new().hash_one(getpid().as_raw_nonzero()));
        let listener = UnixListener::bind(path(&address)).ok();
        let address = if listener.is_some() { address } else { String::new() };
        Door { address, listener, inner: Vec::new() }
    }

    /// Where to knock: in the abstract namespace of sockets, which is of this host and network namespace. Empty: there is nowhere.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Waits for the next that knocks, and lets it in if it is of the job. Never completes once the door is closed.
    ///
    /// # Cancel safety
    ///
    /// Safe: whoever knocked meanwhile is let in by the next call.
    pub(crate) async fn let_in(&mut self) {
        let Some(listener) = &self.listener else { return pending().await };
        match listener.accept().await {
            // Who hears nothing knocks again.
            Ok((stream, _)) => self.meet(stream).unwrap_or_default(),
            Err(_) => {
                self.inner.retain(Inner::runs);
                tokio::time::sleep(REST).await;
            }
        }
    }

    fn meet(&mut self, stream: UnixStream) -> io::Result<()> {
        let pid = stream.peer_cred()?.pid().and_then(Pid::from_raw).ok_or(ErrorKind::NotFound)?;
        // First, for their descriptors.
        self.inner.retain(Inner::runs);
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let mut stream = stream.into_std()?;
        // While it has not hung up, that id is still its own.
        let is_there = matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        if !is_there {
            return Ok(());
        }
        if !is_below(pid) {
            return stream.write_all(&[NEVER]);
        }
        // One process may enter again and again, each time as another program.
        if self.inner.iter().any(|inner| inner.pid == pid) {
            return stream.write_all(&[ENTER]);
        }
        match room(&process) {
            Room::Plenty => {}
            Room::Little if self.inner.is_empty() => {}
            Room::None if self.inner.is_empty() => return stream.write_all(&[NEVER]),
            Room::Little | Room::None => return Ok(()),
        }
        self.inner.push(Inner { pid, process });
        // From then on it counts on us.
        stream.write_all(&[ENTER]).inspect_err(|_| drop(self.inner.pop()))
    }

    /// Those that were let in and run.
    pub(crate) fn inner(&mut self) -> &[Inner] {
        self.inner.retain(Inner::runs);
        &self.inner
    }

    /// Lets nobody in any more.
    pub(crate) fn close(&mut self) {
        self.listener = None;
    }
}

impl Inner {
    fn runs(&self) -> bool {
        let mut ends = [PollFd::new(&self.process, PollFlags::IN)];
        // It is better to wait in vain than to release a lock under it.
        !matches!(poll(&mut ends, Some(&Timespec::default())), Ok(ended) if ended > 0)
    }

    /// It, and its parent.
    pub(crate) fn root(&self) -> Option<(Pid, Pid)> {
        // One that is hidden since may have fallen to us.
        let parent = Stat::of(self.pid).map_or(Some(getpid()), |stat| Pid::from_raw(stat.parent));
        Some((self.pid, parent?)).filter(|_| self.runs())
    }
}

/// How many descriptors are left beside one: who has to end a job needs some, and who has to reach its store.
enum Room {
    Plenty,
    /// For a look.
    Little,
    None,
}

fn room(beside: &OwnedFd) -> Room {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // The kernel gives the lowest first.
    let left = most.saturating_sub(u64::try_from(beside.as_raw_fd()).unwrap_or(0));
    match left {
        0..=LOOKING => Room::None,
        left if left > ROOM.min(most / 2) => Room::Plenty,
        _ => Room::Little,
    }
}

/// Knocks at the door of the process with this id, and tells whether we were let in. It may wait for as long as that process is stopped. Fails
/// where nobody can knock.
pub(crate) async fn knock(address: &str, pid: u32) -> io::Result<bool> {
    if address.is_empty() {
        return Err(io::Error::new(
            ErrorKind::Unsupported,
            "it runs in place of its clinch (-F), may open no AF_UNIX socket, or has no /proc of its own",
        ));
    }
    match ask(address, pid).await {
        // Its door was closed, before or meanwhile, or there are too many at it.
        Err(error) if TRANSIENT.contains(&error.kind()) => Ok(false),
        answer => answer,
    }
}

/// How it fails that one may be let in by the next knock.
const TRANSIENT: [ErrorKind; 4] = [
    ErrorKind::ConnectionRefused,
    ErrorKind::ConnectionReset,
    ErrorKind::ConnectionAborted,
    ErrorKind::WouldBlock,
];

async fn ask(address: &str, pid: u32) -> io::Result<bool> {
    let stream = UnixStream::connect(path(address)).await?;
    if stream.peer_cred()?.pid().is_none_or(|peer| u32::try_from(peer) != Ok(pid)) {
        return Ok(false);
    }
    let mut word = [0];
    loop {
        stream.readable().await?;
        match stream.try_read(&mut word) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Ok(1) if word == [NEVER] => {
                let why = "it does not see this run in its /proc, or has no descriptors left";
                return Err(io::Error::new(ErrorKind::PermissionDenied, why));
            }
            read => return Ok(read? == 1 && word == [ENTER]),
        }
    }
}

/// As tokio spells what is in no directory.
fn path(address: &str) -> String {
    format!("\0{address}")
}
