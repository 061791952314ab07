//! One live HTTP/2 connection to one member, and gRPC calls on it.
//!
//! Tonic's own channel is left out on purpose: its balancer goes on choosing dead endpoints, and its worker task costs
//! every call two hops. What is left of it are framing, codec and status.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::Stream;
use http::Uri;
use http::uri::PathAndQuery;
use hyper::body::{Bytes, Frame, Incoming, SizeHint};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use prost::Message;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::cuttable::Cuttable;
use super::life::{Gone, Life, Traffic, drive};
use super::quiet::Spawner;
use super::settings::{Address, SCHEMES, Settings};
use super::wire::{self, RangeRequest, RangeResponse};
use crate::backends::pool::Connection;
use crate::backends::tls;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::net;

/// How long opening a connection may take.
const DIAL_FOR: Duration = Duration::from_secs(2);

/// How often a silent connection with an open watch is asked whether it lives. Servers take more than one ping in 5 s
/// for an attack and hang up (`--grpc-keepalive-min-time`).
const PING_EVERY: Duration = Duration::from_secs(6);

/// How long the answer to a ping may take.
const PING_FOR: Duration = Duration::from_secs(2);

/// How long a server works on a call before it gives up on it by itself.
const CALL_FOR: Duration = Duration::from_secs(5);

/// How long the answer to a call may take, unless its caller has less time.
pub(super) const ANSWER_FOR: Duration = Duration::from_secs(6);

/// The largest answer. A thousand waiters of one semaphore are 300 KB.
const MAX_ANSWER: usize = 64 << 20;

/// What a client proves itself with.
pub(super) type Token = MetadataValue<Ascii>;

/// The endpoint that is dialled next.
pub(super) struct Next {
    at: AtomicUsize,
    count: usize,
}

impl Next {
    /// Of so many endpoints, this one first.
    pub(super) fn new(first: usize, count: usize) -> Next {
        Next { at: AtomicUsize::new(first), count: count.max(1) }
    }

    pub(super) fn get(&self) -> usize {
        self.at.load(Ordering::Acquire) % self.count
    }

    /// Stays with one that let us in.
    pub(super) fn stay(&self, endpoint: usize) {
        self.at.store(endpoint, Ordering::Release);
    }

    /// Goes on to the one after this, unless somebody has done so.
    pub(super) fn leave(&self, endpoint: usize) {
        let next = (endpoint + 1) % self.count;
        let _ = self.at.compare_exchange(endpoint, next, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// A connection to one member, shared by everybody on one runtime.
pub(super) struct Link {
    sender: SendRequest<Body>,
    origin: Uri,
    server: String,
    /// Which of the endpoints it leads to.
    pub(super) endpoint: usize,
    env: Env,
    next: Arc<Next>,
    traffic: Arc<Traffic>,
    life: Arc<Life>,
}

impl Link {
    /// Connects to a member. Must run inside a tokio runtime, which then drives the connection. When the member turns out to
    /// hang, `next` leaves it.
    pub(super) async fn open(
        env: &Env,
        settings: &Settings,
        endpoint: usize,
        next: &Arc<Next>,
    ) -> Result<Link> {
        let Some(address) = settings.endpoints.get(endpoint) else {
            return Err(Error::invalid("the URL names no server"));
        };
        let open = async {
            let stream = reach(env, address).await?;
            Link::over(encrypted(settings, address, stream).await?, env, settings, endpoint, next).await
        };
        limited(env, address, open).await
    }

    /// Speaks HTTP/2 over a stream to an endpoint.
    pub(super) async fn over(
        stream: Box<dyn net::Stream>,
        env: &Env,
        settings: &Settings,
        endpoint: usize,
        next: &Arc<Next>,
    ) -> Result<Link> {
        let Some(address) = settings.endpoints.get(endpoint) else {
            return Err(Error::invalid("the URL names no server"));
        };
        let scheme = if settings.tls.is_some() { "https" } else { "http" };
        let (traffic, life) = (Arc::new(Traffic::default()), Arc::new(Life::default()));
        let stream = Cuttable::new(stream, life.clone());
        let mut builder = http2::Builder::new(Spawner(env.process()));
        builder.timer(TokioTimer::new()).keep_alive_interval(PING_EVERY).keep_alive_timeout(PING_FOR);
        let (sender, connection) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| unreachable(address, &error).with_source(error))?;
        let origin = Uri::builder()
            .scheme(scheme)
            .authority(address.to_string())
            .path_and_query("/")
            .build()
            .map_err(|error| Error::invalid(format!("\"{address}\" is no host")).with_source(error))?;
        let driver = async {
            // Whoever waits for an answer is told that the connection broke, and why.
            let _ = connection.await;
        };
        let link = Link {
            sender,
            origin,
            server: address.to_string(),
            endpoint,
            env: env.clone(),
            next: next.clone(),
            traffic: traffic.clone(),
            life: life.clone(),
        };
        let probe = Probe { grpc: link.grpc(), traffic: traffic.clone() };
        let (probe, next) = (move || probe.clone().ask(), next.clone());
        let silent = move || next.leave(endpoint);
        let driving = drive(driver, probe, silent, env.clone(), traffic, Gone(life));
        env.process().spawn(driving);
        Ok(link)
    }

    /// The server's address, for people.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    pub(super) fn life(&self) -> &Arc<Life> {
        &self.life
    }

    /// One request, one answer, if that comes within `patience`.
    ///
    /// # Cancel safety
    ///
    /// The server may go on with the request.
    pub(super) async fn unary<Q, R>(
        &self,
        method: &'static str,
        request: Q,
        token: Option<&Token>,
        patience: Duration,
    ) -> Result<R, Status>
    where
        Q: Message + Send + Sync + 'static,
        R: Message + Default + Send + Sync + 'static,
    {
        let mut request = prepared(request, token);
        request.set_timeout(CALL_FOR);
        let (mut grpc, codec) = (self.grpc(), ProstCodec::<Q, R>::default());
        let answer = grpc.unary(request, PathAndQuery::from_static(method), codec);
        Ok(self.answer(patience, answer).await?.into_inner())
    }

    /// A stream of requests and one of answers.
    pub(super) async fn stream<Q, R>(
        &self,
        method: &'static str,
        requests: impl Stream<Item = Q> + Send + 'static,
        token: Option<&Token>,
    ) -> Result<Streaming<R>, Status>
    where
        Q: Message + Send + Sync + 'static,
        R: Message + Default + Send + Sync + 'static,
    {
        let (mut grpc, codec) = (self.grpc(), ProstCodec::<Q, R>::default());
        let answer = grpc.streaming(prepared(requests, token), PathAndQuery::from_static(method), codec);
        Ok(self.answer(ANSWER_FOR, answer).await?.into_inner())
    }

    /// One request on a stream of its own, and the first answer, if that comes within `patience`.
    pub(super) async fn once<Q, R>(
        &self,
        method: &'static str,
        request: Q,
        token: Option<&Token>,
        patience: Duration,
    ) -> Result<R, Status>
    where
        Q: Message + Send + Sync + 'static,
        R: Message + Default + Send + Sync + 'static,
    {
        let (mut grpc, codec) = (self.grpc(), ProstCodec::<Q, R>::default());
        let request = prepared(futures_util::stream::iter([request]), token);
        let first = async {
            let stream = grpc.streaming(request, PathAndQuery::from_static(method), codec).await?;
            stream.into_inner().message().await
        };
        let answer = self.answer(patience, first).await?;
        answer.ok_or_else(|| Status::unavailable("the stream ended without an answer"))
    }

    /// What the server answers, if it does within `patience`. A connection on which nothing at all came meanwhile takes no
    /// more requests; others may have the time to be answered there still.
    async fn answer<R>(
        &self,
        patience: Duration,
        call: impl Future<Output = Result<R, Status>>,
    ) -> Result<R, Status> {
        let waiting = self.traffic.waiting();
        let heard = self.traffic.heard();
        tokio::select! {
            biased;
            answer = call => {
                waiting.answered();
                answer
            }
            () = self.env.sleep_until(self.env.now() + patience) => {
                if self.traffic.heard() == heard && self.life.is_open() {
                    self.next.leave(self.endpoint);
                    self.life.leave();
                }
                Err(Status::deadline_exceeded(format!("nothing within {patience:?}")))
            }
        }
    }

    fn grpc(&self) -> Grpc<Http> {
        let http = Http { sender: self.sender.clone(), traffic: self.traffic.clone() };
        Grpc::with_origin(http, self.origin.clone()).max_decoding_message_size(MAX_ANSWER)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.life.close();
    }
}

impl Connection for Link {
    fn is_open(&self) -> bool {
        self.life.is_open()
    }
}

/// A request that says who we are, and that a member without a leader shall refuse it instead of letting it hang.
fn prepared<T>(message: T, token: Option<&Token>) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    if let Some(token) = token {
        request.metadata_mut().insert("token", token.clone());
    }
    request
}

/// Gives up on a step of opening that takes too long.
pub(super) async fn limited<T>(
    env: &Env,
    address: &Address,
    step: impl Future<Output = Result<T>>,
) -> Result<T> {
    tokio::select! {
        biased;
        done = step => done,
        () = env.sleep_until(env.now() + DIAL_FOR) => Err(Error::new(
            ErrorKind::Unavailable,
            format!("{address} did not answer within {DIAL_FOR:?}"),
        )),
    }
}

/// A stream to a member, as it is.
pub(super) async fn reach(env: &Env, address: &Address) -> Result<Box<dyn net::Stream>> {
    let connected = env.connector().connect(&address.host, address.port).await;
    connected.map_err(|error| unreachable(address, &error).with_source(error))
}

fn unreachable(address: &Address, error: &dyn std::error::Error) -> Error {
    Error::new(ErrorKind::Unavailable, format!("no connection to {address}: {error}"))
}

/// The same stream with TLS, where that is asked for.
pub(super) async fn encrypted(
    settings: &Settings,
    address: &Address,
    stream: Box<dyn net::Stream>,
) -> Result<Box<dyn net::Stream>> {
    match &settings.tls {
        Some(config) => tls::over(stream, config, &address.host, SCHEMES.plain).await,
        None => Ok(stream),
    }
}

/// Asks a member whether it serves. Any answer will do, also that we may not read that key.
#[derive(Clone)]
struct Probe {
    grpc: Grpc<Http>,
    traffic: Arc<Traffic>,
}

impl Probe {
    async fn ask(mut self) {
        let waiting = self.traffic.waiting();
        let codec = ProstCodec::<RangeRequest, RangeResponse>::default();
        let request = prepared(wire::get(b"clinch"), None);
        let _ = self.grpc.unary(request, PathAndQuery::from_static(wire::RANGE), codec).await;
        waiting.answered();
    }
}

/// Hyper's connection in the words of tower.
#[derive(Clone)]
struct Http {
    sender: SendRequest<Body>,
    traffic: Arc<Traffic>,
}

impl tower_service::Service<http::Request<Body>> for Http {
    type Response = http::Response<Heard>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.sender.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (answer, traffic) = (self.sender.send_request(request), self.traffic.clone());
        Box::pin(async move { Ok(answer.await?.map(|body| Heard { body, traffic })) })
    }
}

/// An answer of which each part is noted: a large one over a slow network takes longer than a server may be silent.
struct Heard {
    body: Incoming,
    traffic: Arc<Traffic>,
}

impl hyper::body::Body for Heard {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        self.traffic.hear();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
