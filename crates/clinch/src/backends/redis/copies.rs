//! Steps that are confirmed: the connection for what has to have copies before it counts.
//!
//! WAIT speaks of what its own connection wrote, and holds up what comes behind it there. So these steps have a connection
//! beside the one of all others, and one question there speaks for all who have come until it is sent: however many they are
//! and however slow a replica is, there is one connection, and nobody waits for more than two questions.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use super::dial::{Dialer, Endpoint};
use super::failure::Failure;
use super::link::Link;
use super::reply::number;
use super::resp::{Command, Value};
use super::settings::Durability;
use crate::backends::pool::Connection;
use crate::error::{Error, ErrorKind, Result};

/// How long a server may take to confirm that a grant is on its replicas or on disk: less than after how long its
/// connection may be given up as silent.
const CONFIRM_MS: u32 = 800;

/// What a server says that was asked for copies on its own disk and writes none.
const NO_LOG: &str = "appendonly is disabled";

/// A connection whose writes can be confirmed.
pub(super) struct Copies {
    pub(super) link: Arc<Link>,
    wanted: Durability,
    asks: mpsc::UnboundedSender<Ask>,
}

/// Where somebody waits for the answer to a question.
type Ask = oneshot::Sender<Result<Value, Failure>>;

impl Copies {
    /// Opens one. Must run inside a tokio runtime, which then drives it.
    pub(super) async fn open(dialer: Arc<Dialer>, endpoint: Endpoint) -> Result<Copies> {
        let link = Arc::new(dialer.open_for_steps(&endpoint).await?);
        let (wanted, (asks, asked)) = (dialer.settings.durability, mpsc::unbounded_channel());
        dialer.env.process().spawn(ask(link.clone(), wanted, asked));
        Ok(Copies { link, wanted, asks })
    }

    /// Waits until what was written here has the copies that the URL asks for; an error says that it may not have them.
    pub(super) async fn confirm(&self) -> Result<()> {
        let server = self.link.server();
        let (tell, told) = oneshot::channel();
        // Where nobody asks any more, nobody tells either.
        let _ = self.asks.send(tell);
        let cut = |why: &str| Err(Failure::Cut { sent: true, why: why.to_owned() });
        let told = tokio::select! {
            biased;
            told = told => told.unwrap_or_else(|_| cut("its runtime ended")),
            // The runtime that would tell may stand still.
            () = self.link.gone() => cut("the connection ended"),
        };
        let confirmed = told.map_err(|failure| {
            // The command itself was done. Of all that may be amiss, only this stays as it is: the user has no right to ask, or the
            // server does not know how.
            let lasts =
                failure.code() == "NOPERM" || failure.detail().contains(NO_LOG) || failure.is_no_command();
            let error = failure.into_error(server);
            let kind = if lasts { error.kind() } else { ErrorKind::Unknown };
            Error::new(kind, format!("{server} did it, but whether it is copied is not known: {error}"))
        })?;
        let (disks, replicas) = match &confirmed {
            Value::List(both) => match both.as_slice() {
                [disks, replicas] => (number(disks)?, number(replicas)?),
                _ => (0, 0),
            },
            one => (0, number(one)?),
        };
        let Durability { replicas: on_replicas, aof } = self.wanted;
        let on_disks = aof.unwrap_or(0);
        if replicas >= i64::from(on_replicas) && disks >= i64::from(on_disks) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unknown,
            format!(
                "{server} did it, but within {CONFIRM_MS} ms only {replicas} of {on_replicas} replicas and {disks} of \
                 {on_disks} disks had confirmed it"
            ),
        ))
    }
}

impl Connection for Copies {
    fn is_open(&self) -> bool {
        self.link.is_open() && !self.asks.is_closed()
    }
}

/// Asks for all who have come since the last question, for as long as the connection is used. A task of its own: a caller
/// that is not polled holds nobody up.
async fn ask(link: Arc<Link>, wanted: Durability, mut asked: mpsc::UnboundedReceiver<Ask>) {
    let mut wait = Command::new(if wanted.aof.is_some() { "WAITAOF" } else { "WAIT" });
    if let Some(local) = wanted.aof {
        wait.arg(u64::from(local));
    }
    wait.arg(u64::from(wanted.replicas)).arg(u64::from(CONFIRM_MS));
    let mut all = Vec::new();
    while asked.recv_many(&mut all, usize::MAX).await > 0 {
        let confirmed = link.call(&wait).await;
        for tell in all.drain(..) {
            // Whoever asked may have left.
            let _ = tell.send(confirmed.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::link::tests::link;
    use super::*;

    /// It may stand still, and tells nobody then.
    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_the_runtime_of_a_connection_that_is_gone() {
        let (ours, _server) = tokio::io::duplex(1 << 16);
        let (asks, _asked) = mpsc::unbounded_channel();
        let copies =
            Copies { link: Arc::new(link(ours)), wanted: Durability { replicas: 1, aof: None }, asks };
        let confirmed = tokio::time::timeout(Duration::from_secs(60), async {
            let close = async { copies.link.close() };
            tokio::join!(copies.confirm(), close).0
        });
        let error = confirmed.await.expect("it hangs").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}");
    }
}
