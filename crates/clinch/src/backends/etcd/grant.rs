//! Leases that are being made: until something hangs on them they are nobody's, and go with whoever asked for them.
//!
//! Their ids are picked here. So a request whose answer was lost is repeated without making a second lease, and one that was dropped can be
//! given back.

use std::sync::Arc;
use std::time::Duration;

use super::client::Client;
use super::session::Sessions;
use super::wire::LeaseGrantRequest;
use crate::error::Result;

/// Pauses before what was dropped is given back: the request for it may be on its way still.
const PAUSES: [Duration; 3] = [Duration::ZERO, Duration::from_secs(1), Duration::from_secs(5)];

/// A lease that was asked for. Dropped before it is kept, it is given back in the background.
pub(super) struct Granted {
    pub(super) id: i64,
    /// How long the server keeps it, at least.
    pub(super) ttl: Duration,
    is_kept: bool,
    sessions: Arc<Sessions>,
}

impl Granted {
    /// Leaves it to what hangs on it, or may come to.
    pub(super) fn keep(&mut self) -> i64 {
        self.is_kept = true;
        self.id
    }

    /// What was to hang on it surely never will.
    pub(super) fn let_go(&mut self) {
        self.is_kept = false;
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let (sessions, id) = (self.sessions.clone(), self.id);
        let _ = self.sessions.client.env.lane().spawn(async move { sessions.client.give_back(id).await });
    }
}

impl Sessions {
    /// A lease that nobody keeps.
    pub(super) async fn grant(self: &Arc<Sessions>, time: Duration) -> Result<Granted> {
        let ttl = i64::try_from(time.as_nanos().div_ceil(1_000_000_000)).unwrap_or(i64::MAX);
        // Any positive number; etcd takes 0 for one of its own choice.
        let id = self.client.env.random().claim_id()?.bits() as i64 & i64::MAX | 1;
        let mut granted = Granted { id, ttl: Duration::ZERO, is_kept: false, sessions: self.clone() };
        let ttl = self.client.grant(&LeaseGrantRequest { ttl, id }).await?;
        granted.ttl = Duration::from_secs(u64::try_from(ttl).unwrap_or(0));
        Ok(granted)
    }
}

impl Client {
    /// Gives back a lease that is perhaps only about to be granted. If that fails, it runs out.
    async fn give_back(self: &Arc<Client>, lease: i64) {
        for pause in PAUSES {
            self.env.sleep_until(self.env.now() + pause).await;
            if self.revoke(lease).await.is_ok() {
                return;
            }
        }
    }
}
