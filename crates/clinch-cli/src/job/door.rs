//! The door of a job: a run inside it that wants the same lock knocks here and is let in, and the lock is not released under it.
//!
//! Who was let in is kept by a descriptor of its process. So nothing that becomes of it later matters: another program, another user, another
//! parent, a cleared environment, memory that is stuck.

use std::collections::hash_map::RandomState;
use std::future::pending;
use std::hash::BuildHasher;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use tokio::net::{UnixListener, UnixStream};

use super::kin::Stat;
use super::reentry::is_below;

/// The pause after somebody could not be let in, as nothing is left to keep it by.
const REST: Duration = Duration::from_millis(50);

/// Open until dropped or closed.
#[derive(Debug)]
pub(crate) struct Door {
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
    /// Opens one. Must be called inside a tokio runtime.
    pub(crate) fn open() -> io::Result<Door> {
        let address = format!("clinch-{:016x}", RandomState::new().hash_one(getpid().as_raw_nonzero()));
        let listener = Some(UnixListener::bind(path(&address))?);
        Ok(Door { address, listener, inner: Vec::new() })
    }

    /// Where to knock: in the abstract namespace of sockets, which is of this host and network namespace.
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
        // First, for their descriptors.
        self.inner.retain(Inner::runs);
        let pid = stream.peer_cred()?.pid().and_then(Pid::from_raw).ok_or(ErrorKind::NotFound)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let mut stream = stream.into_std()?;
        // While it has not hung up, that id is still its own.
        let is_there = matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        if !is_there || !is_below(pid) {
            return Ok(());
        }
        self.inner.push(Inner { pid, process });
        // From then on it counts on us.
        stream.write_all(b"1").inspect_err(|_| drop(self.inner.pop()))
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

/// Knocks at the door of the process with this id, and tells whether we were let in. It may wait for as long as that process is stopped.
pub(crate) async fn knock(address: &str, pid: u32) -> bool {
    let Ok(stream) = UnixStream::connect(path(address)).await else { return false };
    let is_its =
        stream.peer_cred().is_ok_and(|peer| peer.pid().is_some_and(|peer| u32::try_from(peer) == Ok(pid)));
    let mut word = [0];
    while is_its && stream.readable().await.is_ok() {
        match stream.try_read(&mut word) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            read => return matches!(read, Ok(1)),
        }
    }
    false
}

/// As tokio spells what is in no directory.
fn path(address: &str) -> String {
    format!("\0{address}")
}
