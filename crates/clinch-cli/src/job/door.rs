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

use super::kin::Stat;
use super::reentry::is_below;

/// What who knocks is told: it was let in, or never will be. Who is told nothing may knock again.
const ENTER: u8 = b'1';
const NEVER: u8 = b'0';

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
    /// Opens one, if this system lets us. Must be called inside a tokio runtime.
    pub(crate) fn open() -> Door {
        let address = format!("clinch-{:016x}", RandomState::new().hash_one(getpid().as_raw_nonzero()));
        // By such a descriptor it is kept who comes in. A kernel before 5.3 has none.
        let own = pidfd_open(getpid(), PidfdFlags::empty());
        let listener = own.ok().and_then(|_| UnixListener::bind(path(&address)).ok());
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
        let peer = stream.peer_cred()?;
        let pid = peer.pid().and_then(Pid::from_raw).ok_or(ErrorKind::NotFound)?;
        // First, for their descriptors.
        self.inner.retain(Inner::runs);
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let mut stream = stream.into_std()?;
        // While it has not hung up, that id is still its own.
        let is_there = matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        // Root may be hidden from us, and is nobody to guard a lock against.
        let is_hidden_root = || peer.uid() == 0 && Stat::of(pid).is_none();
        if !is_there {
            return Ok(());
        }
        if !is_below(pid) && !is_hidden_root() {
            return stream.write_all(&[NEVER]);
        }
        // One process may enter again and again, each time as another program.
        if self.inner.iter().any(|inner| inner.pid == pid) {
            return stream.write_all(&[ENTER]);
        }
        if !leaves_room(&process) {
            return Ok(());
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
        Some((self.pid, Pid::from_raw(Stat::of(self.pid)?.parent)?)).filter(|_| self.runs())
    }
}

/// Whether half of the descriptors that we may have are free after this one, of which the kernel gives the lowest first: who has to end a job needs
/// some, and who has to reach its store.
fn leaves_room(descriptor: &OwnedFd) -> bool {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    u64::try_from(descriptor.as_raw_fd()).is_ok_and(|number| number < most / 2)
}

/// Knocks at the door of the process with this id, and tells whether we were let in. It may wait for as long as that process is stopped. Fails
/// where nobody can knock.
pub(crate) async fn knock(address: &str, pid: u32) -> io::Result<bool> {
    if address.is_empty() {
        return Err(io::Error::new(ErrorKind::Unsupported, "its system lacks AF_UNIX sockets or pidfd_open"));
    }
    let stream = match UnixStream::connect(path(address)).await {
        Err(error) if [ErrorKind::ConnectionRefused, ErrorKind::WouldBlock].contains(&error.kind()) => {
            return Ok(false);
        }
        stream => stream?,
    };
    if stream.peer_cred()?.pid().is_none_or(|peer| u32::try_from(peer) != Ok(pid)) {
        return Ok(false);
    }
    let mut word = [0];
    loop {
        stream.readable().await?;
        match stream.try_read(&mut word) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Ok(1) if word == [NEVER] => {
                return Err(io::Error::new(
                    ErrorKind::PermissionDenied,
                    "it does not see this run in its /proc",
                ));
            }
            read => return Ok(matches!(read, Ok(1)) && word == [ENTER]),
        }
    }
}

/// As tokio spells what is in no directory.
fn path(address: &str) -> String {
    format!("\0{address}")
}
