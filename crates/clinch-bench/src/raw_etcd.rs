//! The floor on etcd: gRPC calls on one connection, with messages written by hand that have only the fields used here.
//!
//! Field numbers are those of etcd's `rpc.proto` and `v3lock.proto`. [`Raw`] speaks over hyper's connection itself, or
//! over tonic's channel, on which the crate `etcd-client` is built; that crate cannot be a part of this program, since it
//! does not compile without protoc.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Uri;
use http::uri::PathAndQuery;
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tonic::Request;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::transport::channel::Change;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use crate::contend::NAME;
use crate::raw_redis::OWNER;
use crate::{Error, Result};

/// Requests that may wait for the balanced channel: as many as `etcd-client` lets wait.
const WAITING: usize = 64;

/// A client on one connection.
#[derive(Clone, Debug)]
pub(crate) struct Raw<T> {
    grpc: Grpc<T>,
}

impl Raw<Http> {
    /// Connects to what a URL names. Must run inside a runtime, which then drives the connection.
    pub(crate) async fn connect(url: &str) -> Result<Raw<Http>> {
        let address = address(url)?;
        let stream = tokio::net::TcpStream::connect(address).await;
        let stream = stream.map_err(|error| format!("{address}: {error}"))?;
        stream.set_nodelay(true)?;
        let (sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.map_err(Error::from)?;
        tokio::spawn(async {
            // Whoever waits for an answer is told that the connection broke.
            let _ = connection.await;
        });
        Ok(Raw { grpc: Grpc::with_origin(Http(sender), origin(address)?) })
    }
}

impl Raw<Channel> {
    /// Connects as `etcd-client` does: through a balancer, with one endpoint.
    pub(crate) async fn balanced(url: &str) -> Result<Raw<Channel>> {
        let origin = origin(address(url)?)?;
        let (channel, endpoints) = Channel::balance_channel(WAITING);
        let endpoint = Endpoint::from(origin.clone());
        endpoints.send(Change::Insert(origin.clone(), endpoint)).await?;
        Ok(Raw { grpc: Grpc::with_origin(channel, origin) })
    }
}

impl<T> Raw<T>
where
    T: GrpcService<Body>,
    T::ResponseBody: Send + 'static,
    <T::ResponseBody as hyper::body::Body>::Error: Into<Error>,
{
    /// A lease of so many seconds.
    pub(crate) async fn grant(&mut self, seconds: i64) -> Result<i64> {
        let request = LeaseGrantRequest { ttl: seconds };
        let granted: LeaseGrantResponse = self.call("/etcdserverpb.Lease/LeaseGrant", request).await?;
        Ok(granted.id)
    }

    /// Renews a lease, and says how many seconds it has from now; none when it is gone.
    pub(crate) async fn keep_alive(&mut self, lease: i64) -> Result<i64> {
        let requests = Request::new(futures_util::stream::iter([LeaseKeepAliveRequest { id: lease }]));
        let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseKeepAlive");
        self.ready().await?;
        let codec = ProstCodec::<LeaseKeepAliveRequest, LeaseKeepAliveResponse>::default();
        let mut answers = self.grpc.streaming(requests, path, codec).await?.into_inner();
        let answer = answers.message().await?.ok_or("a keepalive without an answer")?;
        Ok(answer.ttl)
    }

    /// Takes a lock that is a plain key: makes it unless it is there.
    pub(crate) async fn take(&mut self, key: &str, lease: i64) -> Result<()> {
        /// In a comparison: when the key was created. Revision 0 is that of a key that is not there.
        const CREATED: i32 = 1;
        let compare = vec![Compare { target: CREATED, key: key.into(), created: Some(0) }];
        let put = Some(PutRequest { key: key.into(), value: OWNER.into(), lease });
        let txn = TxnRequest { compare, success: vec![RequestOp { put }] };
        let answer: TxnResponse = self.call("/etcdserverpb.KV/Txn", txn).await?;
        if answer.succeeded { Ok(()) } else { Err(format!("{key} is taken").into()) }
    }

    /// Frees a lock that is a plain key.
    pub(crate) async fn free(&mut self, key: &str) -> Result<()> {
        let request = DeleteRangeRequest { key: key.into() };
        let answer: DeleteRangeResponse = self.call("/etcdserverpb.KV/DeleteRange", request).await?;
        if answer.deleted == 1 { Ok(()) } else { Err(format!("{key} was not taken").into()) }
    }

    /// How many keys begin like that.
    pub(crate) async fn count(&mut self, prefix: &str) -> Result<i64> {
        let (key, mut range_end) = (prefix.as_bytes().to_vec(), prefix.as_bytes().to_vec());
        // Names here end in ASCII.
        *range_end.last_mut().ok_or("a prefix that is empty")? += 1;
        let request = RangeRequest { key, range_end, count_only: true };
        Ok(self.call::<_, RangeResponse>("/etcdserverpb.KV/Range", request).await?.count)
    }

    /// Waits for a lock by the server's own recipe, and returns its key.
    pub(crate) async fn lock(&mut self, name: &str, lease: i64) -> Result<Vec<u8>> {
        let request = LockRequest { name: name.into(), lease };
        Ok(self.call::<_, LockResponse>("/v3lockpb.Lock/Lock", request).await?.key)
    }

    /// Releases a lock of the server's recipe.
    pub(crate) async fn unlock(&mut self, key: Vec<u8>) -> Result<()> {
        self.call::<_, UnlockResponse>("/v3lockpb.Lock/Unlock", UnlockRequest { key }).await.map(drop)
    }

    async fn call<Q, R>(&mut self, method: &'static str, request: Q) -> Result<R>
    where
        Q: Message + Send + Sync + 'static,
        R: Message + Default + Send + Sync + 'static,
    {
        self.ready().await?;
        let codec = ProstCodec::<Q, R>::default();
        let answer = self.grpc.unary(Request::new(request), PathAndQuery::from_static(method), codec).await?;
        Ok(answer.into_inner())
    }

    async fn ready(&mut self) -> Result<()> {
        self.grpc.ready().await.map_err(|error| Error::from(error.into()))
    }
}

/// Hyper's connection in the words of tower.
#[derive(Clone, Debug)]
pub(crate) struct Http(SendRequest<Body>);

impl tower_service::Service<http::Request<Body>> for Http {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = hyper::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// The server in a URL.
pub(crate) fn address(url: &str) -> Result<&str> {
    let rest = url.strip_prefix("etcd://").ok_or_else(|| format!("{url} is no etcd:// URL"))?;
    Ok(rest.split(['/', '?']).next().unwrap_or_default())
}

/// The key of the contested lock, under which waiters queue: where our library keeps it too.
pub(crate) fn lock_key(url: &str) -> String {
    format!("{}{NAME}", parameter(url, "prefix").unwrap_or("/clinch/"))
}

/// A parameter of a URL, as it stands there.
pub(crate) fn parameter<'a>(url: &'a str, name: &str) -> Option<&'a str> {
    let pairs = url.split_once('?')?.1.split('&');
    pairs.filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
}

fn origin(address: &str) -> Result<Uri> {
    Ok(Uri::builder().scheme("http").authority(address).path_and_query("/").build()?)
}

#[derive(Clone, PartialEq, Message)]
struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseKeepAliveRequest {
    #[prost(int64, tag = "1")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseKeepAliveResponse {
    #[prost(int64, tag = "3")]
    ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Compare {
    #[prost(int32, tag = "2")]
    target: i32,
    #[prost(bytes = "vec", tag = "3")]
    key: Vec<u8>,
    /// Zero is written too, as in a `oneof`.
    #[prost(int64, optional, tag = "5")]
    created: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
    #[prost(int64, tag = "3")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct RequestOp {
    #[prost(message, optional, tag = "2")]
    put: Option<PutRequest>,
}

#[derive(Clone, PartialEq, Message)]
struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
struct TxnResponse {
    #[prost(bool, tag = "2")]
    succeeded: bool,
}

#[derive(Clone, PartialEq, Message)]
struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct DeleteRangeResponse {
    #[prost(int64, tag = "2")]
    deleted: i64,
}

#[derive(Clone, PartialEq, Message)]
struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    range_end: Vec<u8>,
    #[prost(bool, tag = "9")]
    count_only: bool,
}

#[derive(Clone, PartialEq, Message)]
struct RangeResponse {
    #[prost(int64, tag = "4")]
    count: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LockRequest {
    #[prost(bytes = "vec", tag = "1")]
    name: Vec<u8>,
    #[prost(int64, tag = "2")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LockResponse {
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct UnlockRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct UnlockResponse {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_tells_the_server_and_the_key() {
        let url = "etcd://h:1?prefix=/a/&ttl=4s";
        assert_eq!((address(url).unwrap(), lock_key(url).as_str()), ("h:1", "/a/contest"));
        assert_eq!((parameter(url, "ttl"), parameter(url, "tt")), (Some("4s"), None));
        assert_eq!((lock_key("etcd://h").as_str(), address("redis://h").is_err()), ("/clinch/contest", true));
    }

    /// The bytes are the contract: field numbers as in etcd's `rpc.proto`.
    #[test]
    fn messages_look_like_etcds_on_the_wire() {
        let compare = Compare { target: 1, key: "k".into(), created: Some(0) };
        let put = Some(PutRequest { key: "k".into(), value: "v".into(), lease: 7 });
        let txn = TxnRequest { compare: vec![compare], success: vec![RequestOp { put }] };
        let bytes = b"\x0a\x07\x10\x01\x1a\x01k\x28\x00\x12\x0a\x12\x08\x0a\x01k\x12\x01v\x18\x07";
        assert_eq!(txn.encode_to_vec(), bytes);
    }
}
