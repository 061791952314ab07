//! Tickets: what keeps a write from being done long after whoever sent it has given it up.
//!
//! Whoever hangs another client's claim on a new lease does not know what its holder is promised until that is done. So the lease is
//! longer than it need be, by as much as the write may be late; and the write rests on a key that is gone after that.

use std::time::Duration;

use super::keys;
use super::link::ANSWER_FOR;
use super::record::Place;
use super::store::Store;
use super::wire::{self, Compare, PutRequest, TxnRequest};
use crate::error::{Error, ErrorKind, Result};

/// How late a write may be, where the server is not so slow that all are.
const WRITTEN_WITHIN: Duration = ANSWER_FOR;

/// How long a lease may outlive its time: etcd looks twice a second which are over.
const OVER_WITHIN: Duration = Duration::from_secs(2);

/// What one write rests on. It is over soon, and nobody keeps it.
pub(super) struct Ticket {
    lease: i64,
    key: Vec<u8>,
    made: i64,
    ttl: Duration,
}

impl Ticket {
    /// A lease that is granted after the ticket, and is longer than it need be by this, is long enough when the write is done.
    pub(super) fn slack(&self) -> Duration {
        self.ttl + OVER_WITHIN
    }
}

impl Store {
    /// A ticket for a write that is tried for this time: where others came too late, it lasts longer.
    pub(super) async fn ticket(&self, turn: u32) -> Result<Ticket> {
        let mut granted = self.sessions.grant(WRITTEN_WITHIN * turn).await?;
        let (lease, ttl) = (granted.id, granted.ttl);
        let key = keys::session(self.prefix(), lease);
        let put = PutRequest { key: key.clone(), lease, ..PutRequest::default() };
        let made = self.client.txn(TxnRequest { success: vec![put.into()], ..TxnRequest::default() }).await?;
        let made = made
            .ok_or_else(|| Error::new(ErrorKind::Unavailable, "a lease ended as soon as it was granted"))?;
        granted.keep();
        Ok(Ticket { lease, key, made: made.revision(), ttl })
    }

    /// Does a write as long as its ticket lasts; says whether it was done.
    pub(super) async fn write_in_time(&self, ticket: &Ticket, mut txn: TxnRequest) -> Result<bool> {
        txn.compare.push(Compare::created(&ticket.key, ticket.made));
        // Where that is unknown, the ticket runs out.
        let answer = self.client.txn(txn).await?;
        self.sessions.revoke_lease(ticket.lease).await;
        Ok(answer.is_some_and(|answer| answer.succeeded))
    }

    /// What stands in a key once a ticket is over: what rests on it is done by then, or never.
    pub(super) async fn settled(&self, ticket: &Ticket, key: &[u8]) -> Result<Option<Place>> {
        self.sessions.revoke_lease(ticket.lease).await;
        let found = self.client.read(vec![wire::get(&ticket.key), wire::get(key)]).await?;
        let mut found = found.ranges.iter().map(|range| range.kvs.first());
        if found.next().flatten().is_some() {
            return Err(Error::new(ErrorKind::Unavailable, "a write may still be done"));
        }
        Ok(found.next().flatten().map(Place::read))
    }
}
