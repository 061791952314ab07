//! The inbox: the connection on which the server pushes grants, hints, and changes of keys that foreign clients hold.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use redis::aio::{PubSub, PubSubSink};
use redis::{PushInfo, PushKind, Value};
use tokio::sync::Mutex;

use super::claims::Claims;
use super::dial::{Dialer, Endpoint, text};
use super::failure::Failure;
use super::link::Link;

use crate::backends::life::{Gone, Life};
use crate::backends::pool::Connection;
use crate::error::{Error, ErrorKind, Result};

/// How often an inbox is pinged: a connection that died without a word is otherwise noticed by nobody.
const PING_EVERY: Duration = Duration::from_secs(5);

/// After how many pings with nobody waiting an inbox is closed.
const IDLE_PINGS: u32 = 12;

/// One connection that listens, for one runtime and one server.
pub(super) struct Inbox {
    /// Tells inboxes apart, so that a claim knows when it must ask again.
    pub(super) id: u64,
    kind: Kind,
    channels: Mutex<HashSet<String>>,
    attended: AtomicBool,
}

enum Kind {
    /// Protocol 3: messages come beside answers, and keys can be watched.
    Resp3 { link: Link, tracking: bool },
    /// Protocol 2: a connection for messages alone.
    Resp2 { sink: Mutex<PubSubSink>, life: Arc<Life>, server: String },
}

impl Inbox {
    /// Opens an inbox whose messages go to `claims`.
    pub(super) async fn open(dialer: Arc<Dialer>, endpoint: Endpoint, claims: Arc<Claims>) -> Result<Inbox> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let kind = if dialer.settings.resp2 {
            open_resp2(&dialer, &endpoint, claims).await?
        } else {
            match open_resp3(&dialer, &endpoint, claims.clone()).await {
                // Before version 6 there is no HELLO.
                Err(error) if error.kind() == ErrorKind::Invalid => {
                    open_resp2(&dialer, &endpoint, claims).await?
                }
                opened => opened?,
            }
        };
        Ok(Inbox { id, kind, channels: Mutex::default(), attended: AtomicBool::new(false) })
    }

    /// What keeps an eye on this inbox for as long as it is used; `None` when something does already.
    pub(super) fn attendance(
        self: &Arc<Inbox>,
        dialer: &Arc<Dialer>,
        claims: &Arc<Claims>,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        let first = !self.attended.swap(true, Ordering::AcqRel);
        first.then(|| attend(Arc::downgrade(self), dialer.clone(), claims.clone()))
    }

    pub(super) fn life(&self) -> &Life {
        match &self.kind {
            Kind::Resp3 { link, .. } => link.life(),
            Kind::Resp2 { life, .. } => life,
        }
    }

    /// Whether this inbox already listens to a channel.
    pub(super) fn listens(&self, channel: &str) -> bool {
        self.is_open() && self.channels.try_lock().is_ok_and(|channels| channels.contains(channel))
    }

    /// Listens to a channel, once; returns when the server has confirmed it.
    pub(super) async fn listen(&self, channel: &str, sharded: bool) -> Result<()> {
        let mut channels = self.channels.lock().await;
        if channels.contains(channel) {
            return Ok(());
        }
        match &self.kind {
            Kind::Resp3 { link, .. } => {
                let mut command = redis::cmd(if sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" });
                command.arg(channel);
                link.call(&command).await.map_err(|failure| failure.into_error(link.server()))?;
            }
            Kind::Resp2 { sink, server, .. } => {
                let subscribed = sink.lock().await.subscribe(channel).await;
                subscribed.map_err(|error| {
                    let failure = Failure::check(Err(error)).err();
                    failure.map_or_else(|| no_answer(server), |failure| failure.into_error(server))
                })?;
            }
        }
        channels.insert(channel.to_owned());
        Ok(())
    }

    /// Has the server tell when a key changes. `Some(false)`: the key is not there; `None`: the server cannot tell.
    pub(super) async fn watch(&self, key: &str) -> Result<Option<bool>> {
        let Kind::Resp3 { link, tracking: true } = &self.kind else { return Ok(None) };
        let mut commands = redis::pipe();
        commands.cmd("CLIENT").arg("CACHING").arg("YES").cmd("EXISTS").arg(key);
        match link.call_together(&commands, 1).await {
            Ok(answers) => Ok(Some(!matches!(answers[..], [Value::Int(0)]))),
            Err(failure) => Err(failure.into_error(link.server())),
        }
    }

    async fn answers(&self, dialer: &Dialer) -> bool {
        match &self.kind {
            Kind::Resp3 { link, .. } => link.call(&redis::cmd("PING")).await.is_ok(),
            Kind::Resp2 { sink, .. } => {
                let ping = async { sink.lock().await.ping::<Value>().await.is_ok() };
                tokio::select! {
                    answered = ping => answered,
                    () = dialer.env.sleep_until(dialer.env.now() + PING_EVERY / 2) => false,
                }
            }
        }
    }
}

async fn attend(inbox: Weak<Inbox>, dialer: Arc<Dialer>, claims: Arc<Claims>) {
    let mut idle = 0;
    loop {
        dialer.env.sleep_until(dialer.env.now() + PING_EVERY).await;
        let Some(inbox) = inbox.upgrade().filter(|inbox| inbox.is_open()) else { return };
        idle = if claims.is_empty() { idle + 1 } else { 0 };
        if idle > IDLE_PINGS || !inbox.answers(&dialer).await {
            inbox.life().close();
            return;
        }
    }
}

impl Connection for Inbox {
    fn is_open(&self) -> bool {
        self.life().is_open()
    }
}

fn no_answer(server: &str) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{server} did not let us listen"))
}

async fn open_resp3(dialer: &Dialer, endpoint: &Endpoint, claims: Arc<Claims>) -> Result<Kind> {
    let over = Arc::new(Life::default());
    let told = over.clone();
    let pushes = Box::new(move |push: PushInfo| {
        if matches!(push.kind, PushKind::SUnsubscribe | PushKind::Unsubscribe) {
            // The slot has moved away. The connection may be out of step now: redis-rs takes this for an answer.
            told.close();
        }
        deliver(&claims, &push);
    });
    let link = dialer.open(endpoint, Some(pushes)).await?;
    let life = link.life().clone();
    tokio::spawn(async move {
        tokio::select! {
            () = over.gone() => life.close(),
            () = life.gone() => {}
        }
    });
    let mut tracking = redis::cmd("CLIENT");
    tracking.arg("TRACKING").arg("ON").arg("OPTIN");
    let tracking = match link.call(&tracking).await {
        Ok(_) => true,
        Err(Failure::Server { .. }) => false,
        Err(cut) => return Err(cut.into_error(link.server())),
    };
    Ok(Kind::Resp3 { link, tracking })
}

async fn open_resp2(dialer: &Dialer, endpoint: &Endpoint, claims: Arc<Claims>) -> Result<Kind> {
    let address = dialer.locate(endpoint).await?;
    let info = dialer.introduction(&dialer.settings.credentials, false, dialer.settings.db);
    let opened = dialer.limited(&address, async {
        let stream = dialer.stream(&address).await?;
        PubSub::new(&info, stream).await.map_err(|error| {
            Error::new(ErrorKind::Unavailable, format!("{address} did not let us listen: {error}"))
                .with_source(error)
        })
    });
    let (sink, mut messages) = opened.await?.split();
    let life = Arc::new(Life::default());
    let gone = Gone(life.clone());
    tokio::spawn(async move {
        loop {
            let message = tokio::select! {
                message = messages.next() => message,
                () = gone.0.closing() => None,
            };
            let Some(message) = message else { return };
            if let Ok(message) = std::str::from_utf8(message.get_payload_bytes()) {
                claims.message(message);
            }
        }
    });
    Ok(Kind::Resp2 { sink: Mutex::new(sink), life, server: address.to_string() })
}

/// Hands a push to the claim that it is for.
fn deliver(claims: &Claims, push: &PushInfo) {
    match (&push.kind, &push.data[..]) {
        (PushKind::Message | PushKind::SMessage, [_, message]) => {
            if let Some(message) = text(message) {
                claims.message(message);
            }
        }
        (PushKind::Invalidate, [Value::Array(keys)]) => {
            keys.iter().filter_map(text).for_each(|key| claims.changed(key))
        }
        (PushKind::Invalidate, [Value::Nil]) => claims.all_changed(),
        _ => {}
    }
}
