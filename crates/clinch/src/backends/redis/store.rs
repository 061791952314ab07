//! The backend: each step is one script on the server that has the lock's slot.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;

use super::claims::{Asked, Claims, is_lone_try};
use super::dating::millis;
use super::dial::Dialer;
use super::examine;
use super::failure;
use super::keys::{Home, INBOXES, Keys, lock_key, refuse_reserved, slot_of};
use super::listing::states;
use super::reply::{self, Claimed};
use super::resp::{Command, Value};
use super::route::{Done, Route};
use super::script;
use super::settings::{Fleet, Settings};
use crate::backend::{
    Backend, Busy, Capabilities, Freed, LockState, NOTICE, Progress, Renewal, TAKE_WITHIN, Wake,
};
use crate::check::Check;
use crate::claim::{Claim, ClaimId, Loss, LossKind, Owner};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::sync::lock;

/// How many scripts a release spends on a queue at most.
const SETTLES: u32 = 1000;

/// What scripts are told whose step has no words of its own.
pub(super) const NO_STEP: [&str; 3] = ["-"; 3];

/// A store on Redis or Valkey, with a queue and tokens.
pub(super) struct Store {
    pub(super) dialer: Arc<Dialer>,
    pub(super) route: Arc<Route>,
    pub(super) claims: Arc<Claims>,
    /// Names this client's inbox; of one in channels that belong to slots it begins with an `s`.
    inbox: String,
    /// What all scripts are told alike; see `queue.lua`.
    setting: String,
    /// Whether this client listens to channels that belong to slots. Others may listen otherwise.
    pub(super) sharded: bool,
    /// Whether this user may tell waiters; who may not is, most likely, told by nobody either.
    pub(super) tells: bool,
    pub(super) owner: OwnerText,
}

impl Store {
    pub(super) fn new(settings: Settings, env: Env) -> Result<Store> {
        let claims = Arc::new(Claims::new(env.clock(), &settings.prefix));
        let inbox = format!("{:016x}", env.random().claim_id()?.bits() as u64);
        let dialer = Arc::new(Dialer { env, settings });
        let route = Arc::new(Route::new(dialer.clone(), claims.clone()));
        // In a cluster, PUBLISH tells only of the receivers on one server.
        let counts = if route.is_cluster() { "0" } else { "1" };
        let Fleet { run, gap } = dialer.settings.fleet;
        let setting = format!("{counts} {} {}", millis(run), millis(gap));
        Ok(Store {
            dialer,
            route,
            claims,
            inbox,
            setting,
            sharded: false,
            tells: true,
            owner: OwnerText::default(),
        })
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.dialer.settings
    }

    pub(super) fn env(&self) -> &Env {
        &self.dialer.env
    }

    pub(super) fn keys(&self, name: &LockName) -> Keys {
        Keys::of(&self.settings().prefix, name)
    }

    /// Listens to channels that belong to slots from now on.
    pub(super) fn shard_channels(&mut self) {
        self.sharded = true;
        self.inbox.insert(0, 's');
    }

    /// What this client's channels of a slot begin with.
    pub(super) fn channels(&self, slot: u16) -> String {
        match self.sharded {
            true => Home::of(slot).key(":inbox:", "").concat(),
            false => INBOXES.to_owned(),
        }
    }

    /// This client's channel in a slot.
    pub(super) fn channel(&self, slot: u16) -> String {
        [&self.channels(slot), self.inbox.as_str()].concat()
    }

    /// A script's command on all keys of a lock, with three words of the step's own before what all of them share.
    pub(super) fn command(&self, script: &script::Script, keys: &Keys, step: [&str; 3]) -> Command {
        let mut command = script.on(keys.all());
        let [one, two, three] = step;
        command.arg([one, " ", two, " ", three, " ", &self.setting]);
        command
    }

    /// Takes a claim's step and notes what is known of it meanwhile.
    async fn ask(&self, claim: &Claim, keys: &Keys) -> Result<(Instant, u64, Claimed)> {
        let inbox = match claim.enqueue {
            true => self.claims.asking(claim.id, || {
                self.route.listening(keys.slot, || self.channel(keys.slot)).map_or(0, |inbox| inbox.id)
            }),
            false if is_lone_try(claim) => {
                self.claims.trying(claim.id);
                0
            }
            false => 0,
        };
        // Until somebody listens, the claim asks by itself; to the script, an inbox without a listener is a dead one.
        let listens = if inbox == 0 { "-" } else { &self.inbox };
        let mode = reply::mode_text(claim.mode);
        let step = [&*mode, if claim.enqueue { "1" } else { "0" }, listens];
        let mut command = self.command(&script::ACQUIRE, keys, step);
        command.arg(claim.id).arg(millis(claim.ttl)).arg(&*self.owner.of(&claim.owner)?);
        let sent = self.env().now();
        let doubt = Doubt { claims: &self.claims, id: claim.id };
        let done = self.route.run_durably(keys.slot, &script::ACQUIRE, &command, reply::is_granted).await;
        let answer = done.and_then(Done::if_copied);
        if !matches!(&answer, Err(error) if error.kind() == ErrorKind::Unknown) {
            std::mem::forget(doubt);
        }
        Ok((sent, inbox, reply::claimed(&answer?, claim.ttl)?))
    }

    /// Releases or withdraws a claim.
    async fn free(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        let (keys, id) = (self.keys(&claim.name), claim.id);
        let in_doubt = self.claims.is_in_doubt(id);
        // Nobody here knows the steps of a claim that was detached, perhaps elsewhere.
        let buries = in_doubt || is_lone_try(claim) && !self.claims.knows(id);
        let linger = match millis(linger) {
            0 => Cow::from("0"),
            ms => ms.to_string().into(),
        };
        let step = [&*linger, if buries { "1" } else { "0" }, "0"];
        let mut command = self.command(&script::RELEASE, &keys, step);
        command.arg(id);
        let answer = match self.route.run(keys.slot, &script::RELEASE, &command).await {
            Err(error)
                // What is in doubt is buried first, which only the whole script does.
                if error.kind() == ErrorKind::Unavailable
                    && self.route.is_cluster()
                    && step[..2] == ["0"; 2] =>
            {
                return match Box::pin(self.free_alone(&keys, id)).await {
                    Ok(true) => Ok(Freed::Removed),
                    // Perhaps it did.
                    Err(alone) if alone.kind() == ErrorKind::Unknown => Err(alone),
                    _ => Err(error),
                };
            }
            answer => answer.map_err(|error| failure::of_release(error, in_doubt))?,
        };
        let (removed, rest) = reply::released(&answer)?;
        if let Some(at) = rest {
            Box::pin(self.settle(&keys, at)).await;
        }
        Ok(if removed { Freed::Removed } else { Freed::Absent })
    }

    /// Frees an exclusive lock without a look at its queue, whose waiters look by themselves: while a slot moves, its servers
    /// refuse all that takes several keys. False: that did not do it.
    async fn free_alone(&self, keys: &Keys, id: ClaimId) -> Result<bool> {
        let mut command = script::RELEASE_LEAN.on([keys.lock.as_str()]);
        command.arg(id);
        Ok(reply::number(&self.route.run(keys.slot, &script::RELEASE_LEAN, &command).await?)? == 1)
    }

    /// Goes on with a queue that was too long for one script. If this is given up, its waiters look by themselves.
    async fn settle(&self, keys: &Keys, mut at: i64) {
        for _ in 0..SETTLES {
            let from = at.to_string();
            let command = self.command(&script::SETTLE, keys, [&from, "-", "-"]);
            let answer = self.route.run(keys.slot, &script::SETTLE, &command).await;
            match answer.and_then(|answer| reply::number(&answer)) {
                Ok(next) if next >= 0 => at = next,
                _ => return,
            }
        }
    }
}

/// A step whose answer has not come. Dropped before it does, or after it failed to: the step may still reach the server.
struct Doubt<'a> {
    claims: &'a Claims,
    id: ClaimId,
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        self.claims.doubt(self.id);
    }
}

#[async_trait]
impl Backend for Store {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fencing: true,
            fifo: true,
            queue: true,
            shared: true,
            permits: true,
            linger: true,
            push: true,
            expiry: true,
            detached: true,
            processes: true,
            hosts: true,
            restart: true,
            ..Capabilities::default()
        }
    }

    async fn examine(&self) -> Vec<Check> {
        examine::examine(&self.dialer, &self.route).await
    }

    async fn claim(&self, claim: &Claim) -> Result<Progress> {
        let keys = self.keys(&claim.name);
        refuse_reserved(&keys.lock)?;
        if let Some(until) = self.claims.rests(claim.id) {
            // Whatever woke it: what is granted here was held by others until now, who have yet to hear that it was taken away.
            self.env().sleep_until(until).await;
        }
        let (sent, inbox, answer) = self.ask(claim, &keys).await?;
        let progress = match answer {
            Claimed::Queued(place) => {
                let now = self.env().now();
                // Who has come lately is not told that it is next: see `hand_over.lua`.
                let first = self.claims.place_since(claim.id, now) + TAKE_WITHIN;
                let look = self.look(&place, now);
                let asked = Asked {
                    look: if now < first { look.min(first) } else { look },
                    key: keys.lock,
                    sent,
                    server: place.server,
                    // The next in line, and one more, should that one be dead.
                    foreign: place.foreign && place.waiters < 2,
                    inbox,
                };
                self.claims.queued(claim.id, asked);
                return Ok(Progress::Queued(place.busy));
            }
            Claimed::Granted(token) => {
                self.claims.held.hold(claim, sent);
                let granted = reply::answered(token, claim.ttl);
                if is_lone_try(claim) {
                    // Its release has to know that all its steps were answered.
                    return Ok(Progress::Granted(granted));
                }
                Ok(Progress::Granted(granted))
            }
            Claimed::Busy(busy) => Ok(Progress::Busy(busy)),
            // Evicted, though nobody knew yet that it was granted: it may ask again when that is over.
            Claimed::Buried if claim.enqueue => {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "the claim was taken away before its answer came",
                ));
            }
            // Only a step that was given up comes after its own release.
            Claimed::Buried => Ok(Progress::Busy(Busy::default())),
            Claimed::OtherCapacity(theirs) => Err(Error::invalid(format!(
                "this claim says \"{}\", but others say that the semaphore has {theirs} permits; use one capacity \
                 everywhere",
                claim.mode
            ))),
        };
        self.claims.settled(claim.id);
        progress
    }

    async fn wait(&self, claim: &Claim) -> Result<Wake> {
        self.wait_for_grant(claim).await
    }

    fn shard(&self, name: &LockName) -> u64 {
        self.route.shard(|| slot_of(&lock_key(&self.settings().prefix, name)))
    }

    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        self.renew_all(claims).await
    }

    async fn lost(&self) -> Vec<(ClaimId, Loss)> {
        self.lost_leases().await
    }

    async fn verify(&self, claim: &Claim) -> Result<Renewal> {
        let renewal = self.renew_lock(&[claim], false).await?.pop();
        renewal.ok_or_else(|| Error::new(ErrorKind::Unknown, "the server left the claim out"))
    }

    async fn downgrade(&self, claim: &Claim) -> Result<()> {
        self.claims.held.let_go(claim.id, &claim.name);
        let keys = self.keys(&claim.name);
        let mut command = self.command(&script::DOWNGRADE, &keys, NO_STEP);
        command.arg(claim.id).arg(millis(claim.ttl));
        let did = |answer: &Value| *answer == Value::Int(1);
        let done = self.route.run_durably(keys.slot, &script::DOWNGRADE, &command, did).await?;
        match reply::number(&done.if_copied()?)? {
            1 => Ok(()),
            _ => Err(Error::lost(&claim.name, deleted())),
        }
    }

    async fn release(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        self.claims.held.let_go(claim.id, &claim.name);
        let freed = self.free(claim, linger).await?;
        self.claims.forget(claim.id);
        Ok(freed)
    }

    fn forget(&self, claim: &Claim) {
        self.claims.held.let_go(claim.id, &claim.name);
        self.claims.forget(claim.id);
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        let ours = &self.settings().prefix;
        // Without a prefix of ours, any text in the database would look like a foreign holder.
        let listed =
            |state: &LockState| !ours.is_empty() || state.claims.iter().any(|claim| claim.owner.pid != 0);
        states(
            self.locks_named(prefix).await?,
            |name| async move { Ok(self.state(&name).await?.filter(listed)) },
        )
        .await
    }

    async fn state(&self, name: &LockName) -> Result<Option<LockState>> {
        let keys = self.keys(name);
        refuse_reserved(&keys.lock)?;
        let command = self.command(&script::STATE, &keys, NO_STEP);
        match self.route.run(keys.slot, &script::STATE, &command).await {
            Ok(answer) => reply::lock_state(name, &answer),
            // Some other data under a name that a lock could have.
            Err(error) if error.kind() == ErrorKind::Invalid => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed> {
        let keys = self.keys(name);
        let mut command = self.command(&script::EVICT, &keys, NO_STEP);
        command.arg(claim).arg(millis(NOTICE));
        let answer = self.route.run(keys.slot, &script::EVICT, &command).await?;
        Ok(if reply::number(&answer)? == 1 { Freed::Removed } else { Freed::Absent })
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("prefix", &self.settings().prefix).finish_non_exhaustive()
    }
}

/// The text of an owner, made once for the many claims of one.
#[derive(Default)]
pub(super) struct OwnerText(Mutex<Option<(Arc<Owner>, Arc<str>)>>);

impl OwnerText {
    pub(super) fn of(&self, owner: &Arc<Owner>) -> Result<Arc<str>> {
        let mut last = lock(&self.0);
        if let Some((known, text)) = &*last
            && Arc::ptr_eq(known, owner)
        {
            return Ok(text.clone());
        }
        let text: Arc<str> = serde_json::to_string(&**owner)
            .map_err(|error| Error::invalid("the owner cannot be written as text").with_source(error))?
            .into();
        *last = Some((owner.clone(), text.clone()));
        Ok(text)
    }
}

pub(super) fn deleted() -> Loss {
    Loss::new(LossKind::Deleted, "the store no longer has the claim")
}

#[cfg(test)]
pub(super) mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::super::resp::Reader;
    use super::*;
    use crate::claim::Mode;
    use crate::lane::Lane;
    use crate::url::StoreUrl;

    pub(in super::super) fn store(url: &str) -> Store {
        let url = &mut StoreUrl::parse(url).unwrap();
        Store::new(Settings::parse(url).unwrap(), Env::host(Lane::thread())).unwrap()
    }

    pub(in super::super) fn claim(bits: u128) -> Claim {
        Claim {
            id: ClaimId::from_bits(bits),
            name: LockName::new("job").unwrap(),
            mode: Mode::Exclusive,
            ttl: TAKE_WITHIN,
            enqueue: true,
            place: false,
            isolated: false,
            owner: Arc::new(Owner { host: "h".into(), pid: 1, user: "u".into(), label: String::new() }),
        }
    }

    /// The address of a server that greets one client, and answers to this command with this.
    pub(in super::super) async fn server_that_answers(command: &'static str, answer: &'static str) -> String {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", server.local_addr().unwrap());
        tokio::spawn(async move {
            let (mut client, _) = server.accept().await.unwrap();
            let (mut reader, mut bytes) = (Reader::default(), vec![0; 1 << 16]);
            while let Ok(count @ 1..) = client.read(&mut bytes).await {
                let mut rest = &bytes[..count];
                while let Ok(Some(Value::List(words))) = reader.read(&mut rest) {
                    let answer = if words[0].text() == Some(command) { answer } else { "+OK\r\n" };
                    client.write_all(answer.as_bytes()).await.unwrap();
                }
            }
        });
        url
    }

    /// P7: a proxy's own words, while the request is still on its way; or a script that broke off in the middle.
    #[tokio::test]
    async fn no_error_ends_a_claim_or_its_release_but_those_that_are_known_to() {
        use ErrorKind::{Invalid, Unknown, Unsupported};
        for (answer, asked, in_doubt, kind) in [
            ("-ERR upstream failure\r\n", Unknown, true, Unknown),
            ("-NEWCODE of tomorrow\r\n", Unknown, true, Unknown),
            ("-ERR user_script:1: no number\r\n", Unsupported, false, Unknown),
            ("-ERR user_script:1: no number\r\n", Unsupported, true, Unknown),
            ("-WRONGTYPE it is a list\r\n", Invalid, false, Invalid),
            ("-WRONGTYPE it is a list\r\n", Invalid, true, Unknown),
        ] {
            let (store, claim) = (store(&server_that_answers("EVALSHA", answer).await), claim(1));
            let error = store.claim(&claim).await.unwrap_err();
            assert_eq!(error.kind(), asked, "{error:?}");
            let text = answer[1..].trim_end().rsplit(": ").next().unwrap();
            assert!(error.to_string().contains(text), "{error}");
            let in_doubt_already = asked == Unknown;
            assert_eq!(store.claims.is_in_doubt(claim.id), in_doubt_already, "{text}: what may yet arrive");
            if in_doubt {
                store.claims.doubt(claim.id);
            }
            let error = store.release(&claim, Duration::ZERO).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(text), "{error}");
            assert_eq!(store.claims.is_in_doubt(claim.id), in_doubt);
        }
    }

    /// P7: what answers in the place of a server that is away, before anything was sent, ends no claim, wait or release: the server
    /// may be back. Who connects for the first time is told as it is.
    #[tokio::test]
    async fn what_goes_wrong_with_a_connection_ends_no_step() {
        for (command, answer) in
            [("HELLO", "-ERR upstream failure\r\n"), ("INFO", "-ERR unknown command 'INFO'\r\n")]
        {
            let url = server_that_answers(command, answer).await;
            let error = store(&url).route.about(0).await.unwrap_err();
            assert!(!error.is_transient(), "{error:?}");
            for step in 0..3 {
                let (store, claim) = (store(&server_that_answers(command, answer).await), claim(1));
                let error = match step {
                    0 => store.claim(&claim).await.unwrap_err(),
                    1 => store.release(&claim, Duration::ZERO).await.unwrap_err(),
                    _ if command == "INFO" => continue,
                    _ => store.route.inbox(0, "", false).await.map(drop).unwrap_err(),
                };
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
                assert!(error.to_string().contains(answer[5..].trim_end()), "{error}");
            }
        }
    }

    /// P7: while a slot of a Cluster moves, its lock is freed by its own key alone, which may have been done though nobody heard.
    #[tokio::test]
    async fn a_lone_release_that_was_not_answered_may_have_been_done() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = server.local_addr().unwrap().port();
        let slots = format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:{port}\r\n");
        tokio::spawn(async move {
            loop {
                let (mut client, _) = server.accept().await.unwrap();
                let (mut reader, mut bytes, slots) = (Reader::default(), vec![0; 1 << 16], slots.clone());
                tokio::spawn(async move {
                    while let Ok(count @ 1..) = client.read(&mut bytes).await {
                        let mut rest = &bytes[..count];
                        while let Ok(Some(Value::List(words))) = reader.read(&mut rest) {
                            let answer = match words[0].text() {
                                Some("CLUSTER") => &slots,
                                Some("EVALSHA") if words[2].text() == Some("1") => return,
                                Some("EVALSHA") => {
                                    "-TRYAGAIN Multiple keys request during rehashing of slot\r\n"
                                }
                                _ => "+OK\r\n",
                            };
                            client.write_all(answer.as_bytes()).await.unwrap();
                        }
                    }
                });
            }
        });
        let store = store(&format!("redis+cluster://127.0.0.1:{port}"));
        let error = store.release(&claim(1), Duration::ZERO).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    }

    /// Whoever releases what was detached elsewhere buries it, but does not wait for what stays as it is.
    #[tokio::test]
    async fn a_detached_release_is_told_at_once_that_the_key_is_no_lock() {
        let store = store(&server_that_answers("EVALSHA", "-WRONGTYPE it is a list\r\n").await);
        let detached = Claim { enqueue: false, isolated: true, ..claim(1) };
        let error = store.release(&detached, Duration::ZERO).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }

    /// While a server is down, whoever gives up leaves nothing here for good.
    #[tokio::test]
    async fn nothing_is_kept_of_a_claim_that_was_given_up() {
        let store = store("redis://127.0.0.1:1");
        for bits in 0..20 {
            let claim = Claim { enqueue: bits % 2 == 0, isolated: true, ..claim(bits) };
            store.claim(&claim).await.unwrap_err();
            store.claims.doubt(claim.id);
            store.release(&claim, Duration::ZERO).await.unwrap_err();
            assert!(store.claims.is_in_doubt(claim.id), "its release must still bury it");
            store.forget(&claim);
        }
        assert_eq!(store.claims.count(), 0);
    }
}
