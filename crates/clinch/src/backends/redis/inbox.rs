//! The inbox: the connection on which the server pushes grants, hints, and changes of keys that foreign clients hold.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::check::Server;
use super::dial::{Dialer, Endpoint, Protocol};
use super::failure::Failure;
use super::link::Link;
use super::resp::{Command, Value, hex_digits};
use super::watch::Watch;
use crate::backends::driven::watch_over;
use crate::backends::pool::Connection;
use crate::claim::{Claim, ClaimId};
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::sync::lock;

/// How often an inbox is pinged: a connection that died without a word is otherwise noticed by nobody.
const PING_EVERY: Duration = Duration::from_secs(5);

/// How old an inbox is at least when it is said that it has ended: a server that opens connections and cuts them makes no storm.
const REST: Duration = Duration::from_secs(1);

/// After how many pings with nobody waiting an inbox is closed.
const IDLE_PINGS: u32 = 12;

/// Who hears what an inbox is told.
pub(super) trait Listener: Send + Sync + 'static {
    /// A message on a channel of ours, from this inbox.
    fn message(&self, text: &str, inbox: u64);

    /// A watched key has changed.
    fn changed(&self, key: &str);

    /// The database was emptied.
    fn all_changed(&self);

    /// An inbox has ended, and tells nothing any more.
    fn closed(&self, _inbox: u64) {}

    /// Whether nobody waits for anything.
    fn is_idle(&self) -> bool;
}

/// What is known of a key that shall be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watched {
    /// The server cannot tell of changes.
    Never,
    /// The key is not there.
    Absent,
    /// The key is there, for this long unless it is renewed; `None`: without an end. Its next change is told.
    There(Option<Duration>),
}

/// One connection that listens, for one runtime and one server. A connection of its own: in protocol 2 one that listens
/// can do nothing else, and what is pushed must not wait behind long answers.
pub(super) struct Inbox {
    /// Tells inboxes apart, so that a claim knows when it must ask again.
    pub(super) id: u64,
    pub(super) link: Arc<Link>,
    /// Whether the server tells of changed keys.
    tracking: bool,
    /// Names the run of the server; empty when that is not known.
    run: String,
    /// What drives it.
    runtime: Handle,
    env: Env,
    channels: Mutex<HashMap<String, Listening>>,
}

/// What came of listening to a channel, once it is known.
type Listening = watch::Receiver<Option<Result<()>>>;

impl Inbox {
    /// Opens an inbox whose messages go to `listener`, and keeps an eye on it for as long as it is used: on the runtime
    /// that drives it, which may not be its users'.
    pub(super) async fn open(
        dialer: Arc<Dialer>,
        endpoint: Endpoint,
        listener: Arc<impl Listener>,
    ) -> Result<Inbox> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (ear, id) = (listener.clone(), NEXT.fetch_add(1, Ordering::Relaxed));
        let pushes = Box::new(move |message: &[Value]| deliver(&*ear, message, id));
        let (link, protocol) = dialer.open(&endpoint, Some(pushes)).await?;
        let (mut tracking, mut about) = (Command::new("CLIENT"), Command::new("INFO"));
        // What is changed on this connection is renewed, and read again by the same write.
        tracking.arg("TRACKING").arg("ON").arg("OPTIN").arg("NOLOOP");
        about.arg("server");
        let tracking = protocol == Protocol::Three && granted(&link, &tracking).await?.is_some();
        let about = granted(&link, &about).await?;
        let run = about.map(|info| Server::read(info.text().unwrap_or_default()).run).unwrap_or_default();
        let (link, runtime) = (Arc::new(link), Handle::current());
        let env = dialer.env.clone();
        env.process().spawn_on(&runtime, attend(id, Arc::downgrade(&link), dialer.env.clone(), listener));
        Ok(Inbox { id, link, tracking, run, runtime, env, channels: Mutex::default() })
    }

    /// Whether this inbox already listens to a channel.
    pub(super) fn listens(&self, channel: &str) -> bool {
        let listens = |listening: &Listening| matches!(*listening.borrow(), Some(Ok(())));
        self.is_open() && lock(&self.channels).get(channel).is_some_and(listens)
    }

    /// Whether this run of a server, which may not be known, is another than the one that tells here.
    pub(super) fn is_elsewhere(&self, run: &str) -> bool {
        self.run != run && !self.run.is_empty() && !run.is_empty()
    }

    /// Whether it is known that this run of a server tells here.
    pub(super) fn is_of(&self, run: &str) -> bool {
        self.run == run && !run.is_empty()
    }

    /// Listens to a channel, once for all who wait for it; returns when the server has confirmed it. It depends on none of
    /// them: one that is not polled keeps nobody waiting.
    pub(super) async fn listen(&self, channel: &str, sharded: bool) -> Result<()> {
        let ended =
            self.listening(channel, sharded)?.wait_for(Option::is_some).await.map(|ended| match &*ended {
                Some(Err(error)) => Err(error.again()),
                _ => Ok(()),
            });
        ended
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Unavailable, "the runtime of the inbox has ended")))
    }

    fn listening(&self, channel: &str, sharded: bool) -> Result<Listening> {
        let mut channels = lock(&self.channels);
        let failed = |listening: &Listening| match &*listening.borrow() {
            Some(told) => told.is_err(),
            // Whoever should tell is gone.
            None => listening.has_changed().is_err(),
        };
        if let Some(listening) = channels.get(channel).filter(|listening| !failed(listening)) {
            return Ok(listening.clone());
        }
        let (tell, listening) = watch::channel(None);
        let tell = Arc::new(tell);
        watch_over(&self.runtime, &self.env, &tell)?;
        channels.insert(channel.to_owned(), listening.clone());
        let mut command = Command::new(if sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" });
        command.arg(channel);
        let link = self.link.clone();
        self.env.process().spawn_on(&self.runtime, async move {
            let answer = link.call(&command).await.map(drop);
            tell.send_replace(Some(answer.map_err(|failure| match failure.redirect() {
                // Its channels have moved along, and whoever asks again is told where to.
                Some(_) => Error::new(ErrorKind::Unavailable, "the slot has moved to another server"),
                None => failure.into_error(link.server()),
            })));
        });
        Ok(listening)
    }

    /// Has the server tell when a key changes.
    pub(super) async fn watch(&self, key: &str) -> Result<Watched> {
        if !self.tracking {
            return Ok(Watched::Never);
        }
        let (mut opt_in, mut left) = (Command::new("CLIENT"), Command::new("PTTL"));
        opt_in.arg("CACHING").arg("YES");
        left.arg(key);
        match self.link.call_together([&opt_in, &left]).await {
            Ok(answers) => Ok(match answers[..] {
                // Who may not opt in is not told.
                [Value::Error(_), _] => Watched::Never,
                [_, Value::Int(-2)] => Watched::Absent,
                [_, Value::Int(left)] => Watched::There(u64::try_from(left).ok().map(Duration::from_millis)),
                _ => Watched::Never,
            }),
            Err(failure) => Err(failure.into_error(self.link.server())),
        }
    }

    /// Reads which of these locks are their claims', and has the server tell when one of them changes. `None`: it cannot.
    pub(super) async fn read(&self, prefix: &str, watches: &[Watch]) -> Result<Option<Vec<bool>>, Failure> {
        if !self.tracking {
            return Ok(None);
        }
        let [opt_in, read] = &note_and_read(prefix, watches.iter().map(|(_, name)| name));
        what_was_read(watches.iter().map(|(id, _)| *id), self.link.call_together([opt_in, read]).await?)
    }

    /// Renews locks by this command and then reads them, as [`Inbox::read`] does: of the renewal the server says nothing here, and it
    /// forgets for it whom it was to tell.
    pub(super) async fn renew(
        &self,
        renewal: &Command,
        prefix: &str,
        claims: &[&Claim],
    ) -> Result<(Value, Result<Option<Vec<bool>>, Failure>), Failure> {
        let [opt_in, read] = &note_and_read(prefix, claims.iter().map(|claim| &claim.name));
        let mut answers = self.link.call_together([renewal, opt_in, read]).await?;
        let rest = answers.split_off(1);
        let renewed = answers.pop().map_or(Ok(Value::Nil), Failure::check)?;
        Ok((renewed, what_was_read(claims.iter().map(|claim| claim.id), rest)))
    }
}

/// The commands that read whose these locks are, and have the server tell when one of them changes. No script: Redis before 7.2 notes all keys
/// of a script at each of its reads. With 256 keys that takes twenty times as long.
fn note_and_read<'a>(prefix: &str, names: impl ExactSizeIterator<Item = &'a LockName>) -> [Command; 2] {
    let (mut opt_in, mut read) = (Command::new("CLIENT"), Command::of_keys("MGET", names.len()));
    opt_in.arg("CACHING").arg("YES");
    for name in names {
        read.arg([prefix, name.as_str()]);
    }
    [opt_in, read]
}

/// Which of them are their claims', if the keys were noted; `None`: they never will be. A key that holds no text is nobody's.
fn what_was_read(
    claims: impl Iterator<Item = ClaimId>,
    answers: Vec<Value>,
) -> Result<Option<Vec<bool>>, Failure> {
    let mut answers = answers.into_iter().map(Failure::check);
    match answers.next().transpose() {
        Err(failure) if failure.passes() => return Err(failure),
        // Who may not opt in is not told.
        Err(_) => return Ok(None),
        Ok(_) => {}
    }
    let values = match answers.next().transpose() {
        Err(failure) if failure.code() != "NOPERM" => return Err(failure),
        Ok(Some(Value::List(values))) => values,
        _ => return Ok(None),
    };
    Ok(Some(claims.zip(&values).map(|(id, value)| is_held_by(id, value)).collect()))
}

/// Whether this is the value of a lock's key that this claim alone holds.
fn is_held_by(id: ClaimId, value: &Value) -> bool {
    let Value::Text(value) = value else { return false };
    value.split_at_checked(32).is_some_and(|(holder, rest)| {
        holder == hex_digits(id) && rest.first().is_some_and(|mark| matches!(mark, b' ' | b'*'))
    })
}

/// What a server answers to a command that an inbox can do without; `None`: it refuses. One that is busy can answer, in a while.
async fn granted(link: &Link, command: &Command) -> Result<Option<Value>> {
    match link.call(command).await {
        Ok(answer) => Ok(Some(answer)),
        Err(failure) if failure.passes() => Err(failure.into_error(link.server())),
        Err(_) => Ok(None),
    }
}

/// Pings the inbox for as long as it is used, and says when it has ended, also with its runtime.
async fn attend(inbox: u64, link: Weak<Link>, env: Env, listener: Arc<impl Listener>) {
    let ended = Ended(inbox, listener);
    let (listener, opened, mut idle) = (&ended.1, env.now(), 0);
    let gone = link.upgrade().map(|link| link.gone());
    let mut gone = std::pin::pin!(OptionFuture::from(gone));
    loop {
        tokio::select! {
            _ = &mut gone => break,
            () = env.sleep_until(env.now() + PING_EVERY) => {}
        }
        let Some(link) = link.upgrade().filter(|link| link.is_open()) else { break };
        idle = if listener.is_idle() { idle + 1 } else { 0 };
        // A refusal is an answer too.
        let cut = matches!(link.call(&Command::new("PING")).await, Err(Failure::Cut { .. }));
        if cut || idle > IDLE_PINGS {
            link.close();
            break;
        }
    }
    env.sleep_until(opened + REST).await;
}

struct Ended<L: Listener>(u64, Arc<L>);

impl<L: Listener> Drop for Ended<L> {
    fn drop(&mut self) {
        self.1.closed(self.0);
    }
}

impl Connection for Inbox {
    fn is_open(&self) -> bool {
        self.link.is_open()
    }
}

/// Hands a message on. False: nothing will come from here any more.
fn deliver(listener: &impl Listener, message: &[Value], inbox: u64) -> bool {
    let [kind, rest @ ..] = message else { return true };
    match (kind.text().unwrap_or_default(), rest) {
        ("message" | "smessage", [_, message]) => {
            if let Some(message) = message.text() {
                listener.message(message, inbox);
            }
        }
        ("invalidate", [Value::List(keys)]) => {
            keys.iter().filter_map(Value::text).for_each(|key| listener.changed(key))
        }
        ("invalidate", [Value::Nil]) => listener.all_changed(),
        // The slot has moved away, and the messages for it with it.
        ("unsubscribe" | "sunsubscribe", _) => return false,
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::super::link::tests::{env, link};
    use super::*;
    use crate::clock::Instant;

    struct Ear(Env, OnceLock<Instant>);

    impl Listener for Ear {
        fn message(&self, _: &str, _: u64) {}
        fn changed(&self, _: &str) {}
        fn all_changed(&self) {}
        fn is_idle(&self) -> bool {
            false
        }
        fn closed(&self, _: u64) {
            self.1.set(self.0.now()).expect("it ended twice");
        }
    }

    /// In simulated time.
    #[tokio::test(start_paused = true)]
    async fn the_end_of_an_inbox_is_told_at_once_and_makes_no_storm() {
        for (cut_after, told_after) in [(REST * 2, REST * 2), (REST / 2, REST), (Duration::ZERO, REST)] {
            let (env, (ours, theirs)) = (env(), tokio::io::duplex(1 << 16));
            let (link, opened) = (Arc::new(link(ours)), env.now());
            let ear = Arc::new(Ear(env.clone(), OnceLock::new()));
            let attended = tokio::spawn(attend(1, Arc::downgrade(&link), env.clone(), ear.clone()));
            env.sleep_until(opened + cut_after).await;
            drop(theirs);
            attended.await.unwrap();
            let told = ear.1.get().expect("nobody was told").since(opened);
            let soon = told_after..told_after + Duration::from_millis(10);
            assert!(soon.contains(&told), "cut after {cut_after:?}, told after {told:?}");
        }
    }
}
