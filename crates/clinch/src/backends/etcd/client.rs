//! Calls on whatever member answers: endpoints in turn, logged in.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt};
use prost::Message;
use tonic::{Status, Streaming};

use super::failure::Failure;
use super::flight::Flights;
use super::history::{History, Origin};
use super::link::{ANSWER_FOR, Link, Next, Token};
use super::settings::Settings;
use super::wire::{
    self, Answer, AuthenticateRequest, AuthenticateResponse, DeleteRangeRequest, DeleteRangeResponse,
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveResponse, LeaseRequest, LeaseRevokeResponse,
    RangeRequest, RangeResponse, TxnRequest, TxnResponse, WatchRequest, WatchResponse,
};
use crate::backends::pool::Pool;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::net::STAGGER;
use crate::sync::lock;

/// A client of one cluster.
pub(super) struct Client {
    pub(super) env: Env,
    pub(super) settings: Settings,
    pool: Pool<Link>,
    next: Arc<Next>,
    token: Mutex<Option<Token>>,
    /// Whether the server said that it keeps no users, so that nobody need log in.
    has_no_users: AtomicBool,
    /// A password's hash is slow on purpose, and once is enough.
    logins: Flights<(), Option<Token>>,
    pub(super) history: History,
}

/// What was read, in the order of the requests.
#[derive(Default)]
pub(super) struct Found {
    /// The store's revision at that moment.
    pub(super) revision: i64,
    pub(super) ranges: Vec<RangeResponse>,
}

impl From<TxnResponse> for Found {
    fn from(answer: TxnResponse) -> Found {
        Found { revision: answer.revision(), ranges: answer.ranges().cloned().collect() }
    }
}

/// How a method is called.
#[derive(Clone, Copy)]
struct How {
    shape: Shape,
    /// Whether it may be sent twice.
    repeatable: bool,
    /// How long one member may take to answer.
    patience: Duration,
    /// Whether a member that takes longer is left, whatever else it answers.
    is_proof: bool,
}

#[derive(Clone, Copy)]
enum Shape {
    /// One request, one answer.
    Unary,
    /// A stream, of which one request and one answer are used.
    Once,
}

/// A write that must not be sent twice.
const WRITE: How = How { shape: Shape::Unary, repeatable: false, patience: ANSWER_FOR, is_proof: false };

impl Client {
    pub(super) fn new(env: Env, settings: Settings) -> Arc<Client> {
        // Clients spread over the members.
        let count = settings.endpoints.len();
        let first = (env.random().jitter() * count as f64) as usize;
        Arc::new(Client {
            env,
            settings,
            pool: Pool::default(),
            next: Arc::new(Next::new(first, count)),
            token: Mutex::default(),
            has_no_users: AtomicBool::new(false),
            logins: Flights::default(),
            history: History::new(count),
        })
    }

    /// A guarded write, or a read of several keys at one revision; `None` when a lease that it names is gone.
    ///
    /// Never sent twice, so that whoever asks knows when a write may still be on its way.
    pub(super) async fn txn(self: &Arc<Client>, txn: TxnRequest) -> Result<Option<TxnResponse>> {
        match self.call_as(WRITE, wire::TXN, &txn).await? {
            Ok(answer) => Ok(Some(answer)),
            Err(failure) if failure.is_lease_gone() => Ok(None),
            Err(failure) => Err(failure.into_error()),
        }
    }

    /// Reads at one revision; may be sent twice.
    pub(super) async fn read(self: &Arc<Client>, ranges: Vec<RangeRequest>) -> Result<Found> {
        self.read_as(How { repeatable: true, ..WRITE }, ranges).await
    }

    /// Reads at one revision what a holder rests on. A member that does not answer within `patience` is left for the next, whatever
    /// else it answers: one whose disk hangs passes keepalives on to the leader, and learns nothing any more.
    pub(super) async fn prove(
        self: &Arc<Client>,
        ranges: Vec<RangeRequest>,
        patience: Duration,
    ) -> Result<Found> {
        let patience = patience.min(ANSWER_FOR);
        self.read_as(How { repeatable: true, patience, is_proof: true, ..WRITE }, ranges).await
    }

    async fn read_as(self: &Arc<Client>, how: How, mut ranges: Vec<RangeRequest>) -> Result<Found> {
        if ranges.len() > 1 {
            let reads = ranges.iter().cloned().map(Into::into).collect();
            let txn = TxnRequest { success: reads, ..TxnRequest::default() };
            match self.call_as::<_, TxnResponse>(how, wire::TXN, &txn).await?.map_err(Failure::into_error) {
                // Versions before 3.4.20 and 3.5.7 refuse even that when they are full, but no plain range.
                Err(error) if error.kind() == ErrorKind::Exhausted => {}
                answer => return answer.map(Found::from),
            }
        }
        let mut found = Found::default();
        for range in &mut ranges {
            range.revision = found.revision;
            let answer: RangeResponse =
                self.call_as(how, wire::RANGE, range).await?.map_err(Failure::into_error)?;
            if found.revision == 0 {
                found.revision = wire::revision(answer.header.as_ref());
            }
            found.ranges.push(answer);
        }
        Ok(found)
    }

    /// Deletes a key, whatever stands there, and says what that was. Never sent twice.
    pub(super) async fn delete(self: &Arc<Client>, key: &[u8]) -> Result<DeleteRangeResponse> {
        let request = DeleteRangeRequest { key: key.to_vec(), prev_kv: true };
        self.call_as(WRITE, wire::DELETE, &request).await?.map_err(Failure::into_error)
    }

    /// A call that may be sent twice.
    pub(super) async fn call<Q, R>(self: &Arc<Client>, method: &'static str, request: &Q) -> Result<R>
    where
        Q: Message + Clone + Send + Sync + 'static,
        R: Answer,
    {
        self.call_as(How { repeatable: true, ..WRITE }, method, request).await?.map_err(Failure::into_error)
    }

    /// Makes a lease, and says for how many seconds it lasts at least. The request names it, so it may be sent twice.
    pub(super) async fn grant(self: &Arc<Client>, request: &LeaseGrantRequest) -> Result<i64> {
        let how = How { repeatable: true, ..WRITE };
        match self.call_as::<_, LeaseGrantResponse>(how, wire::LEASE_GRANT, request).await? {
            Ok(granted) => Ok(granted.ttl),
            // An attempt of before has come through unheard.
            Err(failure) if failure.is_lease_there() => Ok(request.ttl),
            Err(failure) => Err(failure.into_error()),
        }
    }

    /// Ends a lease, and with it all that hangs on it.
    pub(super) async fn revoke(self: &Arc<Client>, lease: i64) -> Result<LeaseRevokeResponse> {
        self.call(wire::LEASE_REVOKE, &LeaseRequest { id: lease }).await
    }

    /// Renews a lease; may be sent twice. A member that does not answer within `patience` is left for the next, unless it
    /// answers others.
    pub(super) async fn keep_alive(
        self: &Arc<Client>,
        request: &LeaseRequest,
        patience: Duration,
    ) -> Result<LeaseKeepAliveResponse> {
        let patience = patience.min(ANSWER_FOR);
        let how = How { shape: Shape::Once, repeatable: true, patience, ..WRITE };
        self.call_as(how, wire::LEASE_KEEP_ALIVE, request).await?.map_err(Failure::into_error)
    }

    /// Whether there is another member to ask.
    pub(super) fn has_others(&self) -> bool {
        self.settings.endpoints.len() > 1
    }

    async fn call_as<Q, R>(
        self: &Arc<Client>,
        how: How,
        method: &'static str,
        request: &Q,
    ) -> Result<Result<R, Failure>>
    where
        Q: Message + Clone + Send + Sync + 'static,
        R: Answer,
    {
        let mut logged_in = false;
        let mut attempt = 0;
        loop {
            let link = self.link().await?;
            let token = self.token().await?;
            let known = self.history.revision();
            let (request, token) = (request.clone(), token.as_ref());
            let answer: Result<R, Status> = match how.shape {
                Shape::Unary => link.unary(method, request, token, how.patience).await,
                Shape::Once => link.once(method, request, token, how.patience).await,
            };
            let failure = match answer {
                Ok(answer) => return self.believe(&link, known, answer).map(Ok),
                Err(status) => Failure::new(status, link.server()),
            };
            if failure.wants_login(self.settings.credentials.is_some()) && !logged_in {
                logged_in = true;
                self.forget(token);
                continue;
            }
            if how.is_proof && failure.is_late() && self.has_others() {
                link.life().leave();
                self.next.leave(link.endpoint);
            }
            let again = self.turn_away(&link, &failure, how.repeatable);
            attempt += 1;
            if !again || attempt > self.settings.endpoints.len() {
                return Ok(Err(failure));
            }
        }
    }

    /// Takes in an answer, unless it belongs to another cluster or to an earlier state of this one.
    fn believe<R: Answer>(&self, link: &Link, known: i64, answer: R) -> Result<R> {
        let origin = Origin { server: link.server(), endpoint: link.endpoint, at: self.env.now() };
        let believed = self.history.take(answer.header(), R::IS_AGREED.then_some(known), origin);
        if let Err(error) = believed {
            self.leave(link);
            return Err(error);
        }
        Ok(answer)
    }

    /// Leaves a member that does not serve; says whether the call may be repeated.
    fn turn_away(&self, link: &Link, failure: &Failure, repeatable: bool) -> bool {
        if failure.is_late() {
            return repeatable;
        }
        if failure.is_cut() {
            // Others may be answered still: perhaps it was this request alone that the server dropped.
            link.life().leave();
            self.next.leave(link.endpoint);
            return repeatable || failure.is_unsent();
        }
        if failure.is_leaderless() || failure.is_learner() {
            // It may be cut off from the others, and they may have a leader. Its address may lead to them, too.
            self.leave(link);
            self.pool.failed(&self.env);
            return self.has_others();
        }
        false
    }

    /// Goes on with another member, where there is one.
    pub(super) fn leave(&self, link: &Link) {
        link.life().close();
        self.next.leave(link.endpoint);
    }

    /// The connection of the current runtime.
    pub(super) async fn link(self: &Arc<Client>) -> Result<Arc<Link>> {
        let client = self.clone();
        self.pool
            .get(&self.env, move || {
                let client = client.clone();
                async move { client.dial().await }
            })
            .await
    }

    /// Connects to the first endpoint that lets us, from the current one on. The next is dialled when one has failed, or
    /// beside it when it keeps us waiting.
    async fn dial(&self) -> Result<Link> {
        let count = self.settings.endpoints.len();
        let first = self.next.get();
        let mut endpoints = (0..count).map(|step| (first + step) % count);
        let mut dialled = FuturesUnordered::new();
        let mut failure: Option<Error> = None;
        loop {
            if let Some(endpoint) = endpoints.next() {
                dialled.push(Link::open(&self.env, &self.settings, endpoint, &self.next));
            }
            let opened = tokio::select! {
                biased;
                opened = dialled.next() => opened,
                () = self.env.sleep_until(self.env.now() + STAGGER), if endpoints.len() > 0 => continue,
            };
            match opened {
                Some(Ok(link)) => {
                    self.next.stay(link.endpoint);
                    return Ok(link);
                }
                // That a server is not to be trusted says more than that another is away.
                Some(Err(error)) => match &failure {
                    Some(known) if known.kind() != ErrorKind::Unavailable => {}
                    _ => failure = Some(error),
                },
                None => break,
            }
        }
        Err(failure.unwrap_or_else(|| Error::invalid("the URL names no server")))
    }

    /// What proves us, once logged in; `None` when the URL has no user or the server keeps none.
    async fn token(self: &Arc<Client>) -> Result<Option<Token>> {
        if self.settings.credentials.is_none() || self.has_no_users.load(Ordering::Acquire) {
            return Ok(None);
        }
        if let Some(token) = lock(&self.token).clone() {
            return Ok(Some(token));
        }
        let client = self.clone();
        self.logins.join(&self.env, (), move || async move { client.log_in().await }).await
    }

    async fn log_in(self: &Arc<Client>) -> Result<Option<Token>> {
        let Some((name, password)) = self.settings.credentials.clone() else { return Ok(None) };
        let link = self.link().await?;
        let request = AuthenticateRequest { name, password };
        match link.unary::<_, AuthenticateResponse>(wire::AUTHENTICATE, request, None, ANSWER_FOR).await {
            Ok(answer) => {
                let token: Token = answer.token.parse().map_err(|error| {
                    Error::new(ErrorKind::Unsupported, "the server gave a token that is no text")
                        .with_source(error)
                })?;
                *lock(&self.token) = Some(token.clone());
                Ok(Some(token))
            }
            Err(status) => {
                let failure = Failure::new(status, link.server());
                if failure.is_auth_disabled() {
                    self.has_no_users.store(true, Ordering::Release);
                    return Ok(None);
                }
                self.turn_away(&link, &failure, false);
                // Logging in changes nothing, so nothing is unknown.
                let unknown = failure.into_error();
                match unknown.kind() {
                    ErrorKind::Unknown => {
                        Err(Error::new(ErrorKind::Unavailable, unknown.to_string()).with_source(unknown))
                    }
                    _ => Err(unknown),
                }
            }
        }
    }

    /// Forgets a token that was refused, unless somebody has got another already.
    fn forget(&self, stale: Option<&Token>) {
        self.has_no_users.store(false, Ordering::Release);
        let mut token = lock(&self.token);
        if token.as_ref() == stale {
            *token = None;
        }
    }

    /// Opens the stream of watches on the current runtime's connection.
    pub(super) async fn watch(
        self: &Arc<Client>,
        requests: impl Stream<Item = WatchRequest> + Send + 'static,
    ) -> Result<(Arc<Link>, Streaming<WatchResponse>)> {
        let link = self.link().await?;
        let token = self.token().await?;
        match link.stream(wire::WATCH, requests, token.as_ref()).await {
            Ok(answers) => Ok((link, answers)),
            Err(status) => Err(self.watch_broke(&link, status)),
        }
    }

    /// Forgets what proves us: the next call logs in anew.
    pub(super) fn log_in_again(&self) {
        self.has_no_users.store(false, Ordering::Release);
        *lock(&self.token) = None;
    }

    /// What the end of the stream of watches means for the connection.
    pub(super) fn watch_broke(&self, link: &Link, status: Status) -> Error {
        let failure = Failure::new(status, link.server());
        if failure.wants_login(self.settings.credentials.is_some()) {
            self.log_in_again();
        }
        self.turn_away(link, &failure, false);
        failure.into_error()
    }
}
