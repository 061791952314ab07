//! Connections by runtime: each runtime that calls has its own, opened once for all who wait for it.
//!
//! A connection is driven by the runtime it was opened on, so a caller's steps need no other thread, and the keeper's
//! steps do not depend on the caller's. When a runtime ends, so do its connections; the next one opens its own.

use std::sync::{Arc, Mutex};

use tokio::runtime::{Handle, Id};
use tokio::sync::watch;

use crate::error::{Error, ErrorKind, Result};
use crate::lane::Lane;
use crate::sync::lock;

/// Something that can end.
pub(super) trait Connection: Send + Sync + 'static {
    /// Whether it can still be used.
    fn is_open(&self) -> bool;
}

/// One connection per runtime. There are hardly ever more than two.
pub(super) struct Pool<C>(Mutex<Vec<(Id, Opening<C>)>>);

/// What came of opening a connection, once it is known.
type Opening<C> = watch::Receiver<Option<Result<Arc<C>>>>;

impl<C> Default for Pool<C> {
    fn default() -> Pool<C> {
        Pool(Mutex::default())
    }
}

impl<C: Connection> Pool<C> {
    /// The connection of the current runtime, or outside of any, of the background lane's; opened by `open` when there
    /// is none.
    ///
    /// # Cancel safety
    ///
    /// Opening goes on for others, and for the next call.
    pub(super) async fn get<F>(&self, lane: &Lane, open: impl Fn() -> F) -> Result<Arc<C>>
    where
        F: Future<Output = Result<C>> + Send + 'static,
    {
        let runtime = match Handle::try_current() {
            Ok(runtime) => runtime,
            Err(_) => lane.handle()?,
        };
        let mut tried = false;
        loop {
            let (mut opening, ours) = self.opening(&runtime, &open);
            // An opening that ended before we came, or whose runtime did, tells nothing about now.
            let fresh = ours || tried;
            tried = true;
            let ended = opening.wait_for(Option::is_some).await.ok().and_then(|ended| match &*ended {
                Some(Ok(connection)) if connection.is_open() => Some(Ok(connection.clone())),
                Some(Err(error)) if fresh => Some(Err(error.again())),
                _ => None,
            });
            match ended {
                Some(Ok(connection)) => return Ok(connection),
                Some(Err(error)) => {
                    self.forget(&runtime, &opening);
                    return Err(error);
                }
                None if ours => {
                    self.forget(&runtime, &opening);
                    return Err(Error::new(
                        ErrorKind::Unavailable,
                        "the connection broke as soon as it was open",
                    ));
                }
                None => self.forget(&runtime, &opening),
            }
        }
    }

    /// The open connection of the current runtime, if there is one.
    #[cfg(feature = "redis")]
    pub(super) fn peek(&self) -> Option<Arc<C>> {
        let runtime = Handle::try_current().ok()?.id();
        let cells = lock(&self.0);
        let (_, opening) = cells.iter().find(|(owner, _)| *owner == runtime)?;
        let connection = opening.borrow().as_ref()?.as_ref().ok()?.clone();
        connection.is_open().then_some(connection)
    }

    /// Those connections that are open.
    #[cfg(feature = "redis")]
    pub(super) fn all(&self) -> Vec<Arc<C>> {
        let connection = |opening: &Opening<C>| opening.borrow().as_ref()?.as_ref().ok().cloned();
        lock(&self.0).iter().filter_map(|(_, opening)| connection(opening)).collect()
    }

    fn opening<F>(&self, runtime: &Handle, open: impl Fn() -> F) -> (Opening<C>, bool)
    where
        F: Future<Output = Result<C>> + Send + 'static,
    {
        let mut cells = lock(&self.0);
        if let Some((_, opening)) = cells.iter().find(|(owner, _)| *owner == runtime.id()) {
            return (opening.clone(), false);
        }
        // Runtimes come and go in tests and in programs that block on futures; what they left is forgotten here.
        cells.retain(|(_, opening)| opening.has_changed().is_ok());
        let (report, opening) = watch::channel(None);
        let future = open();
        runtime.spawn(async move {
            let opened = future.await;
            report.send_replace(Some(opened.map(Arc::new)));
            // Kept until nobody knows of the connection any more, so that a closed channel means a dead runtime.
            report.closed().await;
        });
        cells.push((runtime.id(), opening.clone()));
        (opening, true)
    }

    /// Forgets a connection that is of no use, unless somebody has replaced it already.
    fn forget(&self, runtime: &Handle, opening: &Opening<C>) {
        lock(&self.0).retain(|(owner, current)| *owner != runtime.id() || !current.same_channel(opening));
    }
}
