//! A byte stream that ends when somebody says so.
//!
//! Hyper drives an HTTP/2 connection in a task of its own that nobody can end; only the end of its stream does, and with
//! it every call that waits for an answer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::life::Life;
use crate::net::Stream;

pub(super) struct Cuttable {
    stream: Box<dyn Stream>,
    gone: Pin<Box<dyn Future<Output = ()> + Send>>,
    is_cut: bool,
}

impl Cuttable {
    /// The stream, until the life is over.
    pub(super) fn new(stream: Box<dyn Stream>, life: Arc<Life>) -> Cuttable {
        Cuttable { stream, gone: Box::pin(async move { life.gone().await }), is_cut: false }
    }

    /// The stream as long as it may be used; wakes the reader when it is cut.
    fn whole(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut Box<dyn Stream>>> {
        self.is_cut = self.is_cut || self.gone.as_mut().poll(context).is_ready();
        match self.is_cut {
            true => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the server did not answer")),
            false => Ok(Pin::new(&mut self.stream)),
        }
    }
}

impl AsyncRead for Cuttable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.whole(context)?.poll_read(context, buffer)
    }
}

/// Writes do not ask, since a reader is always there and only one of the two can be woken.
impl AsyncWrite for Cuttable {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
