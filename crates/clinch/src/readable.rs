//! A kernel object that becomes readable - a timer, a watch - awaited without a thread.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A non-blocking descriptor whose bytes can be awaited. Must be made inside a tokio runtime with I/O.
#[derive(Debug)]
pub(crate) struct Readable(AsyncFd<OwnedFd>);

impl Readable {
    pub(crate) fn new(descriptor: OwnedFd) -> io::Result<Readable> {
        // SAFETY: an `OwnedFd` is open and names the same file for as long as it lives. It lives in the private field
        // of this type, which hands out borrows of the descriptor only, so nothing can replace or close it before
        // the registration ends with the `AsyncFd`.
        let registered = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
        Ok(Readable(registered.map_err(io::Error::from)?))
    }

    /// Waits for bytes and reads them.
    ///
    /// # Cancel safety
    ///
    /// Safe: bytes are read only by the poll that returns them.
    pub(crate) async fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            match rustix::io::read(self.0.get_ref(), &mut *bytes) {
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }
}

impl AsFd for Readable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}
