//! Where the parts of an HTTP/2 connection run: h2 wakes whoever waits for an answer while it has its streams locked.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::rt::Executor;

use crate::process::Process;
use crate::sync::Holding;

/// Runs on the current runtime, and calls no caller's waker before the end of a turn.
#[derive(Clone)]
pub(super) struct Spawner(pub(super) Process);

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for Spawner {
    fn execute(&self, future: F) {
        let Spawner(process) = self;
        process.spawn(Quiet(Some(Box::pin(future))));
    }
}

/// `None` when it is dropped, which tells those that wait that the connection is gone.
struct Quiet<F>(Option<Pin<Box<F>>>);

impl<F: Future> Future for Quiet<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let _holding = Holding::begin();
        match &mut self.0 {
            Some(future) => future.as_mut().poll(context).map(drop),
            None => Poll::Pending,
        }
    }
}

impl<F> Drop for Quiet<F> {
    fn drop(&mut self) {
        let _holding = Holding::begin();
        self.0 = None;
    }
}
