//! A byte stream that ends when somebody says so.
//!
//! Hyper drives an HTTP/2 connection in a task of its own that nobody can end; only the end of its stream does, and with
//! it every call that waits for an answer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::life::Life;
use crate::net::Stream;

/// How much may wait to be sent, in bytes.
const MAX_UNSENT: usize = 64 << 10;

pub(super) struct Cuttable {
    stream: Box<dyn Stream>,
    gone: Pin<Box<dyn Future<Output = ()> + Send>>,
    is_cut: bool,
    /// What was written and not yet sent.
    unsent: BytesMut,
    /// Whether others had a turn since the first of that was written.
    has_waited: bool,
}

impl Cuttable {
    /// The stream, until the life is over.
    pub(super) fn new(stream: Box<dyn Stream>, life: Arc<Life>) -> Cuttable {
        Cuttable {
            stream,
            gone: Box::pin(async move { life.gone().await }),
            is_cut: false,
            unsent: BytesMut::new(),
            has_waited: false,
        }
    }

    /// Sends what is kept.
    fn send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unsent.is_empty() {
            let sent = ready!(Pin::new(&mut self.stream).poll_write(context, &self.unsent))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unsent.advance(sent);
        }
        self.has_waited = false;
        Poll::Ready(Ok(()))
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
///
/// They are kept until everybody else on the runtime had a turn: hyper sends the head, the body and the end of a request
/// one after the other, from two tasks, and would make a system call for each, and the server as many.
impl AsyncWrite for Cuttable {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.unsent.len() >= MAX_UNSENT {
            ready!(self.send(context))?;
        }
        self.unsent.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.unsent.is_empty() && !std::mem::replace(&mut self.has_waited, true) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        ready!(self.send(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.send(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::io::AsyncReadExt;

    use super::*;

    /// Polls a write and a flush, as hyper does for each part of a request.
    fn send(stream: &mut Cuttable, part: &[u8]) -> Poll<io::Result<()>> {
        let mut context = Context::from_waker(Waker::noop());
        let written = Pin::new(&mut *stream).poll_write(&mut context, part);
        assert!(matches!(written, Poll::Ready(Ok(count)) if count == part.len()));
        Pin::new(stream).poll_flush(&mut context)
    }

    #[tokio::test]
    async fn what_is_written_before_others_had_a_turn_is_sent_together() {
        let (near, mut far) = tokio::io::duplex(1024);
        let mut stream = Cuttable::new(Box::new(near), Arc::default());
        assert!(send(&mut stream, b"head").is_pending());
        assert!(send(&mut stream, b" body").is_ready());
        assert!(send(&mut stream, b"next").is_pending(), "each request waits once");
        let mut got = [0; 64];
        assert_eq!(far.read(&mut got).await.unwrap(), 9);
        assert_eq!(&got[..9], b"head body");
    }

    #[tokio::test]
    async fn more_than_is_kept_goes_on_when_there_is_room() {
        let (near, mut far) = tokio::io::duplex(100);
        let mut stream = Cuttable::new(Box::new(near), Arc::default());
        let part = vec![7; MAX_UNSENT - 1];
        assert!(send(&mut stream, &part).is_pending());
        assert!(send(&mut stream, b"").is_pending(), "the other side reads nothing");
        let reader = tokio::spawn(async move {
            let mut all = Vec::new();
            far.read_to_end(&mut all).await.unwrap();
            all
        });
        std::future::poll_fn(|context| Pin::new(&mut stream).poll_flush(context)).await.unwrap();
        drop(stream);
        assert_eq!(reader.await.unwrap(), part);
    }
}
