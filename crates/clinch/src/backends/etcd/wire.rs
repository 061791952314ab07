//! The messages of etcd's gRPC services that a lock needs, written by hand: no protoc, no generated code.
//!
//! Field numbers are those of etcd's `rpc.proto`, `kv.proto` and `auth.proto`; they are the wire, names are ours. Fields
//! that nobody here reads or sets are left out, which protobuf allows.

use prost::{Message, Oneof};

pub(super) const TXN: &str = "/etcdserverpb.KV/Txn";
pub(super) const DELETE: &str = "/etcdserverpb.KV/DeleteRange";
pub(super) const RANGE: &str = "/etcdserverpb.KV/Range";
pub(super) const LEASE_GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
pub(super) const LEASE_REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
pub(super) const LEASE_KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
pub(super) const LEASE_TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";
pub(super) const WATCH: &str = "/etcdserverpb.Watch/Watch";
pub(super) const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
pub(super) const STATUS: &str = "/etcdserverpb.Maintenance/Status";

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(uint64, tag = "1")]
    pub(super) cluster: u64,
    #[prost(uint64, tag = "2")]
    pub(super) member: u64,
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
    /// Rises with each election.
    #[prost(uint64, tag = "4")]
    pub(super) term: u64,
}

/// An answer that says where it comes from.
pub(super) trait Answer: Message + Default + Send + Sync + 'static {
    /// Whether the members agree on its revision: it is no less than what anybody has read before it was asked for.
    /// A keepalive is answered with what one member knows.
    const IS_AGREED: bool;

    fn header(&self) -> Option<&Header>;
}

macro_rules! answers {
    ($($answer:ty: $is_agreed:literal,)*) => {
        $(impl Answer for $answer {
            const IS_AGREED: bool = $is_agreed;

            fn header(&self) -> Option<&Header> {
                self.header.as_ref()
            }
        })*
    };
}

answers! {
    RangeResponse: true,
    DeleteRangeResponse: true,
    TxnResponse: true,
    LeaseGrantResponse: false,
    LeaseRevokeResponse: false,
    LeaseKeepAliveResponse: false,
    LeaseTimeToLiveResponse: false,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub(super) create_revision: i64,
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(super) value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub(super) lease: i64,
}

/// Sort orders and targets of a range.
pub(super) const ASCEND: i32 = 1;
pub(super) const DESCEND: i32 = 2;
pub(super) const BY_CREATION: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) limit: i64,
    #[prost(int64, tag = "4")]
    pub(super) revision: i64,
    #[prost(int32, tag = "5")]
    pub(super) sort_order: i32,
    #[prost(int32, tag = "6")]
    pub(super) sort_target: i32,
    #[prost(bool, tag = "8")]
    pub(super) keys_only: bool,
    #[prost(int64, tag = "13")]
    pub(super) max_create_revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub(super) more: bool,
    #[prost(int64, tag = "4")]
    pub(super) count: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
    /// Keeps the key's value.
    #[prost(bool, tag = "5")]
    pub(super) ignore_value: bool,
    /// Keeps the key's lease.
    #[prost(bool, tag = "6")]
    pub(super) ignore_lease: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PutResponse {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    /// Says what stood there.
    #[prost(bool, tag = "3")]
    pub(super) prev_kv: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRangeResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(int64, tag = "2")]
    pub(super) deleted: i64,
    #[prost(message, repeated, tag = "3")]
    pub(super) prev_kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RequestOp {
    #[prost(oneof = "Op", tags = "1, 2, 3, 4")]
    pub(super) op: Option<Op>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Op {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
    #[prost(message, tag = "4")]
    Txn(TxnRequest),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseOp {
    #[prost(oneof = "Reply", tags = "1, 2, 3, 4")]
    pub(super) reply: Option<Reply>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Reply {
    #[prost(message, tag = "1")]
    Range(RangeResponse),
    #[prost(message, tag = "2")]
    Put(PutResponse),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeResponse),
    #[prost(message, tag = "4")]
    Txn(TxnResponse),
}

/// How a comparison compares, where not for being equal.
pub(super) const GREATER: i32 = 1;
pub(super) const LESS: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Compare {
    #[prost(int32, tag = "1")]
    pub(super) result: i32,
    #[prost(int32, tag = "2")]
    pub(super) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) key: Vec<u8>,
    #[prost(oneof = "Operand", tags = "5, 6, 8")]
    pub(super) operand: Option<Operand>,
    /// With it the comparison must hold for every key of the range, and holds for an empty one.
    #[prost(bytes = "vec", tag = "64")]
    pub(super) range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Operand {
    #[prost(int64, tag = "5")]
    Created(i64),
    #[prost(int64, tag = "6")]
    Modified(i64),
    #[prost(int64, tag = "8")]
    Lease(i64),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub(super) failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) responses: Vec<ResponseOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    pub(super) ttl: i64,
    #[prost(int64, tag = "2")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    /// What was granted, which may be more than was asked for.
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseRequest {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseRevokeResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseKeepAliveResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    /// What is left; zero when there is no such lease.
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseTimeToLiveResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    /// What is left; -1 when there is no such lease.
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
    /// What every renewal makes it.
    #[prost(int64, tag = "4")]
    pub(super) granted: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusRequest {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(string, tag = "2")]
    pub(super) version: String,
    #[prost(int64, tag = "3")]
    pub(super) size: i64,
    /// The member that leads; zero when there is none.
    #[prost(uint64, tag = "4")]
    pub(super) leader: u64,
    /// Alarms, and that there is no leader.
    #[prost(string, repeated, tag = "8")]
    pub(super) errors: Vec<String>,
    #[prost(bool, tag = "10")]
    pub(super) is_learner: bool,
    /// The largest size; zero before version 3.6, which does not tell.
    #[prost(int64, tag = "12")]
    pub(super) quota: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchRequest {
    #[prost(oneof = "WatchOrder", tags = "1, 2")]
    pub(super) order: Option<WatchOrder>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum WatchOrder {
    #[prost(message, tag = "1")]
    Create(WatchCreate),
    #[prost(message, tag = "2")]
    Cancel(WatchCancel),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchCreate {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) start_revision: i64,
    #[prost(int64, tag = "7")]
    pub(super) watch_id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchCancel {
    #[prost(int64, tag = "1")]
    pub(super) watch_id: i64,
}

/// An event's kind: something was deleted. Everything else is a put.
pub(super) const DELETED: i32 = 1;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) kv: Option<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(int64, tag = "2")]
    pub(super) watch_id: i64,
    #[prost(bool, tag = "3")]
    pub(super) created: bool,
    #[prost(bool, tag = "4")]
    pub(super) canceled: bool,
    #[prost(string, tag = "6")]
    pub(super) cancel_reason: String,
    #[prost(message, repeated, tag = "11")]
    pub(super) events: Vec<Event>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) password: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    pub(super) token: String,
}

/// The store's revision that an answer was read at; 0 when it does not say.
pub(super) fn revision(header: Option<&Header>) -> i64 {
    header.map_or(0, |header| header.revision)
}

impl From<RangeRequest> for RequestOp {
    fn from(range: RangeRequest) -> RequestOp {
        RequestOp { op: Some(Op::Range(range)) }
    }
}

impl From<PutRequest> for RequestOp {
    fn from(put: PutRequest) -> RequestOp {
        RequestOp { op: Some(Op::Put(put)) }
    }
}

impl From<TxnRequest> for RequestOp {
    fn from(txn: TxnRequest) -> RequestOp {
        RequestOp { op: Some(Op::Txn(txn)) }
    }
}

/// Deletes one key.
pub(super) fn delete(key: &[u8]) -> RequestOp {
    RequestOp { op: Some(Op::Delete(DeleteRangeRequest { key: key.to_vec(), prev_kv: false })) }
}

/// Reads one key.
pub(super) fn get(key: &[u8]) -> RangeRequest {
    RangeRequest { key: key.to_vec(), ..RangeRequest::default() }
}

/// The first key that begins with `prefix`. No key is empty, and etcd refuses one that is.
pub(super) fn start_of(prefix: &[u8]) -> Vec<u8> {
    if prefix.is_empty() { vec![0] } else { prefix.to_vec() }
}

/// Reads the keys that begin with `prefix`, first created first.
pub(super) fn scan(prefix: &[u8]) -> RangeRequest {
    RangeRequest {
        key: start_of(prefix),
        range_end: end_of(prefix),
        sort_order: ASCEND,
        sort_target: BY_CREATION,
        ..RangeRequest::default()
    }
}

impl Compare {
    /// The key, or 0 for one that is not there, was created at this revision.
    pub(super) fn created(key: &[u8], revision: i64) -> Compare {
        Compare {
            target: 1,
            key: key.to_vec(),
            operand: Some(Operand::Created(revision)),
            ..Compare::default()
        }
    }

    /// The key, or 0 for one that is not there, was last written at this revision.
    pub(super) fn modified(key: &[u8], revision: i64) -> Compare {
        Compare {
            target: 2,
            key: key.to_vec(),
            operand: Some(Operand::Modified(revision)),
            ..Compare::default()
        }
    }

    /// The key hangs on this lease.
    pub(super) fn lease(key: &[u8], lease: i64) -> Compare {
        Compare { target: 4, key: key.to_vec(), operand: Some(Operand::Lease(lease)), ..Compare::default() }
    }

    /// No key begins with this prefix.
    pub(super) fn empty(prefix: &[u8]) -> Compare {
        Compare { range_end: end_of(prefix), ..Compare::created(prefix, 0) }
    }

    /// No key that begins with this prefix was created before this revision.
    pub(super) fn none_before(prefix: &[u8], revision: i64) -> Compare {
        Compare {
            result: GREATER,
            range_end: end_of(prefix),
            ..Compare::created(prefix, revision.saturating_sub(1))
        }
    }

    /// No key that begins with this prefix was written after this revision.
    pub(super) fn unchanged_since(prefix: &[u8], revision: i64) -> Compare {
        Compare {
            result: LESS,
            range_end: end_of(prefix),
            ..Compare::modified(prefix, revision.saturating_add(1))
        }
    }
}

impl TxnResponse {
    /// What the range operations found, in their order.
    pub(super) fn ranges(&self) -> impl Iterator<Item = &RangeResponse> {
        self.responses.iter().filter_map(|response| match &response.reply {
            Some(Reply::Range(range)) => Some(range),
            _ => None,
        })
    }

    /// What came of the transaction inside it, if that was its turn.
    pub(super) fn inner(&self) -> Option<&TxnResponse> {
        self.responses.iter().find_map(|response| match &response.reply {
            Some(Reply::Txn(txn)) => Some(txn),
            _ => None,
        })
    }

    /// The store's revision after it.
    pub(super) fn revision(&self) -> i64 {
        revision(self.header.as_ref())
    }
}

/// The first key after all that begin with `prefix`.
pub(super) fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // Every key, in etcd's words.
    vec![0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes are the contract: field numbers as in etcd's `rpc.proto`.
    #[test]
    fn messages_look_like_etcds_on_the_wire() {
        let range = RangeRequest { max_create_revision: 5, ..scan(b"a/") };
        assert_eq!(range.encode_to_vec(), b"\x0a\x02a/\x12\x02a0\x28\x01\x30\x02\x68\x05");
        let put = PutRequest { key: b"k".into(), lease: 7, ignore_value: true, ..PutRequest::default() };
        assert_eq!(put.encode_to_vec(), b"\x0a\x01k\x18\x07\x28\x01");
        // Zero is a value of its own in a oneof: it is written.
        assert_eq!(Compare::created(b"k", 0).encode_to_vec(), b"\x10\x01\x1a\x01k\x28\x00");
        assert_eq!(Compare::lease(b"k", 3).encode_to_vec(), b"\x10\x04\x1a\x01k\x40\x03");
        assert_eq!(
            Compare::unchanged_since(b"a/", 4).encode_to_vec(),
            b"\x08\x02\x10\x02\x1a\x02a/\x30\x05\x82\x04\x02a0"
        );
        let watch = WatchCreate { key: b"k".into(), start_revision: 9, watch_id: 2, range_end: vec![] };
        let order = WatchRequest { order: Some(WatchOrder::Create(watch)) };
        assert_eq!(order.encode_to_vec(), b"\x0a\x07\x0a\x01k\x18\x09\x38\x02");
        let header = Header::decode(&b"\x08\x01\x10\x02\x18\x2a\x20\x03"[..]).unwrap();
        assert_eq!(header.revision, 42);
    }

    #[test]
    fn a_prefix_ends_where_the_next_begins() {
        assert_eq!(end_of(b"a/"), b"a0");
        assert_eq!(end_of(b"a\xff"), b"b");
        assert_eq!(end_of(b""), b"\0");
        assert_eq!(end_of(b"\xff\xff"), b"\0");
        assert_eq!((start_of(b"a/"), start_of(b"")), (b"a/".to_vec(), b"\0".to_vec()));
    }
}
