//! The inbox: the connection on which the server pushes grants, hints, and changes of keys that foreign clients hold.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Mutex;

use super::claims::Claims;
use super::dial::{Dialer, Endpoint, Protocol};
use super::failure::Failure;
use super::link::Link;
use super::resp::{Command, Value};
use crate::backends::pool::Connection;
use crate::error::Result;

/// How often an inbox is pinged: a connection that died without a word is otherwise noticed by nobody.
const PING_EVERY: Duration = Duration::from_secs(5);

/// After how many pings with nobody waiting an inbox is closed.
const IDLE_PINGS: u32 = 12;

/// One connection that listens, for one runtime and one server. A connection of its own: in protocol 2 one that listens
/// can do nothing else, and what is pushed must not wait behind long answers.
pub(super) struct Inbox {
    /// Tells inboxes apart, so that a claim knows when it must ask again.
    pub(super) id: u64,
    pub(super) link: Link,
    /// Whether the server tells of changed keys.
    tracking: bool,
    channels: Mutex<HashSet<String>>,
    attended: AtomicBool,
}

impl Inbox {
    /// Opens an inbox whose messages go to `claims`.
    pub(super) async fn open(dialer: Arc<Dialer>, endpoint: Endpoint, claims: Arc<Claims>) -> Result<Inbox> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let pushes = Box::new(move |message: &[Value]| deliver(&claims, message));
        let (link, protocol) = dialer.open(&endpoint, Some(pushes)).await?;
        let mut tracking = Command::new("CLIENT");
        tracking.arg("TRACKING").arg("ON").arg("OPTIN");
        let tracking = protocol == Protocol::Three
            && match link.call(&tracking).await {
                Ok(_) => true,
                Err(Failure::Server { .. }) => false,
                Err(cut) => return Err(cut.into_error(link.server())),
            };
        Ok(Inbox {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            link,
            tracking,
            channels: Mutex::default(),
            attended: AtomicBool::new(false),
        })
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
        let mut command = Command::new(if sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" });
        command.arg(channel);
        self.link.call(&command).await.map_err(|failure| failure.into_error(self.link.server()))?;
        channels.insert(channel.to_owned());
        Ok(())
    }

    /// Has the server tell when a key changes. `Some(false)`: the key is not there; `None`: the server cannot tell.
    pub(super) async fn watch(&self, key: &str) -> Result<Option<bool>> {
        if !self.tracking {
            return Ok(None);
        }
        let (mut opt_in, mut exists) = (Command::new("CLIENT"), Command::new("EXISTS"));
        opt_in.arg("CACHING").arg("YES");
        exists.arg(key);
        match self.link.call_together([&opt_in, &exists]).await {
            Ok(answers) => Ok(match answers[..] {
                // Who may not opt in is not told.
                [Value::Error(_), _] => None,
                [_, Value::Int(0)] => Some(false),
                _ => Some(true),
            }),
            Err(failure) => Err(failure.into_error(self.link.server())),
        }
    }
}

async fn attend(inbox: Weak<Inbox>, dialer: Arc<Dialer>, claims: Arc<Claims>) {
    let mut idle = 0;
    loop {
        dialer.env.sleep_until(dialer.env.now() + PING_EVERY).await;
        let Some(inbox) = inbox.upgrade().filter(|inbox| inbox.is_open()) else { return };
        idle = if claims.is_empty() { idle + 1 } else { 0 };
        // A refusal is an answer too.
        let cut = matches!(inbox.link.call(&Command::new("PING")).await, Err(Failure::Cut { .. }));
        if cut || idle > IDLE_PINGS {
            inbox.link.close();
            return;
        }
    }
}

impl Connection for Inbox {
    fn is_open(&self) -> bool {
        self.link.is_open()
    }
}

/// Hands a message to the claim that it is for. False: nothing will come from here any more.
fn deliver(claims: &Claims, message: &[Value]) -> bool {
    let [kind, rest @ ..] = message else { return true };
    match (kind.text().unwrap_or_default(), rest) {
        ("message" | "smessage", [_, message]) => {
            if let Some(message) = message.text() {
                claims.message(message);
            }
        }
        ("invalidate", [Value::List(keys)]) => {
            keys.iter().filter_map(Value::text).for_each(|key| claims.changed(key))
        }
        ("invalidate", [Value::Nil]) => claims.all_changed(),
        // The slot has moved away, and the messages for it with it.
        ("unsubscribe" | "sunsubscribe", _) => return false,
        _ => {}
    }
    true
}
