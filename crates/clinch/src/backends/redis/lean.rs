//! The lean mode: one key per lock and nothing else, where the server has no scripts or the user asks for the least.
//!
//! No queue, so waiters poll; no token, since nothing counts; no readers or permits, and no lock that stays closed.
//!
//! Nothing is left of a claim by which a step of it that arrives after its release could be known. Such a step takes the
//! lock for one TTL, unless it arrives [soon](OVERTAKEN).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use futures_util::future::join_all;

use super::dating::millis;
use super::failure;
use super::keys::{lock_key, refuse_reserved, slot_of};
use super::listing::states;
use super::reply;
use super::resp::{self, Command, Value};
use super::script;
use super::store::{Store, deleted};
use super::waiting::POLL;
use crate::backend::{
    Backend, Busy, Capabilities, ClaimState, Freed, Grant, LockState, NOTICE, Progress, Renewal, Wake,
};
use crate::check::Check;
use crate::claim::{Claim, ClaimId, Mode};
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::token::Token;

/// After how long a release that found nothing looks again. A claim that was dropped has its step on the way on its
/// caller's connection, and is released on another, where the release may be faster.
const OVERTAKEN: Duration = Duration::from_millis(250);

/// How often a key is changed that a renewal of the same claim has changed meanwhile; there are hardly ever two.
const CHANGES: u32 = 4;

/// How a key is changed only by its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compare {
    /// Small scripts.
    Script,
    /// `SET ... IFEQ` (Valkey 8.1, Redis 8.4) and Valkey's `DELIFEQ`.
    Valkey,
    /// `SET ... IFEQ` and Redis' `DELEX`.
    Redis,
}

/// A store of plain keys.
pub(super) struct Lean {
    pub(super) store: Store,
    pub(super) compare: Compare,
}

impl Lean {
    /// The command that takes a free key. What the key then holds is like the record of the full store, with the number of renewals
    /// where that has the token, and the time by our clock, since no script reads the server's.
    fn take(&self, key: &str, claim: &Claim) -> Result<Command> {
        let since = self.store.dialer.env.clock().wall().duration_since(SystemTime::UNIX_EPOCH);
        let since = since.unwrap_or_default().as_micros() as u64;
        let owner = self.store.owner.of(&claim.owner)?;
        let (id, mut room) = (resp::hex_digits(claim.id), [0; 20]);
        let tells = reply::TELLS_NOBODY.as_bytes();
        let value = [&id, b" 0 ".as_slice(), resp::digits(since, &mut room), b" ", tells, owner.as_bytes()];
        let mut set = Command::new("SET");
        set.arg(key).arg(value).arg("NX").arg("PX").arg(millis(claim.ttl));
        Ok(set)
    }

    fn key(&self, name: &LockName) -> (u16, String) {
        let key = lock_key(&self.store.dialer.settings.prefix, name);
        (slot_of(&key), key)
    }

    /// For how long the key lives, and then what it holds: whoever holds at the end and held at the start does so for
    /// that long.
    async fn read(&self, slot: u16, key: &str) -> Result<(Option<Duration>, String)> {
        let mut left = Command::new("PTTL");
        left.arg(key);
        let mut get = Command::new("GETRANGE");
        get.arg(key).arg(0).arg(1023);
        let left = reply::number(&self.store.route.call(slot, &left).await?)?;
        let value = reply::lossy(&self.store.route.call(slot, &get).await?);
        Ok((u64::try_from(left).ok().map(Duration::from_millis), value))
    }

    /// Changes a key without scripts, by a command that compares the value, if the key is this claim's; `durably`, with the copies
    /// that the URL asks for. False: it is not the claim's, or not in what `is_of` says.
    async fn change(
        &self,
        name: &LockName,
        id: ClaimId,
        durably: bool,
        is_of: impl Fn(&str, ClaimId) -> bool,
        command: impl Fn(&str, &str, Option<Duration>) -> Command,
    ) -> Result<bool> {
        let (slot, key) = self.key(name);
        for _ in 0..CHANGES {
            let (left, value) = self.read(slot, &key).await?;
            if !is_of(&value, id) {
                return Ok(false);
            }
            let command = command(&key, &value, left);
            let answer = match durably {
                true => self.store.route.call_durably(slot, &command).await?,
                false => self.store.route.call(slot, &command).await?,
            };
            if !matches!(answer, Value::Nil | Value::Int(0)) {
                return Ok(true);
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "the lease was renewed by others all the while"))
    }

    /// Renews a claim; false: it does not hold.
    async fn extend(&self, claim: &Claim) -> Result<bool> {
        if self.compare != Compare::Script {
            return self
                .change(&claim.name, claim.id, true, is_of, |key, value, left| {
                    extend(key, value, left, claim.ttl)
                })
                .await;
        }
        let (slot, key) = self.key(&claim.name);
        let mut command = script::RENEW_HELD.on([key.as_str()]);
        command.arg(claim.id).arg(millis(claim.ttl));
        let did = |answer: &Value| reply::has(answer, |held| held == 1);
        let done = self.store.route.run_durably(slot, &script::RENEW_HELD, &command, did).await?;
        Ok(matches!(reply::list(&done.if_copied()?)?, [Value::Int(1)]))
    }

    async fn remove(&self, name: &LockName, id: ClaimId) -> Result<Freed> {
        let removed = if self.compare == Compare::Script {
            let (slot, key) = self.key(name);
            let mut command = script::RELEASE_LEAN.on([key.as_str()]);
            command.arg(id);
            reply::number(&self.store.route.run(slot, &script::RELEASE_LEAN, &command).await?)? == 1
        } else {
            let delete = |key: &str, value: &str, _| delete(self.compare, key, value);
            let removed = Box::pin(self.change(name, id, false, is_of, delete)).await?;
            if !removed {
                // What was evicted is kept closed until now, and the claim was gone before.
                Box::pin(self.change(name, id, false, was_of, delete)).await?;
            }
            removed
        };
        Ok(if removed { Freed::Removed } else { Freed::Absent })
    }

    async fn sleep(&self, time: Duration) {
        let env = &self.store.dialer.env;
        env.sleep_until(env.now() + time).await;
    }
}

/// The command that makes a lease as long as asked for, or as it is if that is more: what is written can have copies. The number of
/// renewals goes up, so that a request that this one has overtaken compares with an old value, and does not make the lease shorter.
fn extend(key: &str, value: &str, left: Option<Duration>, ttl: Duration) -> Command {
    let ttl = left.map_or(ttl, |left| left.max(ttl));
    let (id, rest) = value.split_once(' ').unwrap_or_default();
    let (renewals, rest) = rest.split_once(' ').unwrap_or_default();
    let next = format!("{id} {} {rest}", renewals.parse::<u32>().unwrap_or(0).wrapping_add(1));
    Command::new("SET").arg(key).arg(next).arg("IFEQ").arg(value).arg("PX").arg(millis(ttl)).clone()
}

/// The command that deletes a key if it still has this value.
fn delete(compare: Compare, key: &str, value: &str) -> Command {
    match compare {
        Compare::Valkey => Command::new("DELIFEQ").arg(key).arg(value).clone(),
        _ => Command::new("DELEX").arg(key).arg("IFEQ").arg(value).clone(),
    }
}

fn is_of(value: &str, id: ClaimId) -> bool {
    value.strip_prefix(&id.to_string()).is_some_and(|rest| rest.starts_with(' '))
}

/// The command that takes a lock away from its holder, and keeps it closed until that one lets go or the notice is over.
fn close(key: &str, value: &str, left: Option<Duration>) -> Command {
    let left = left.map_or(NOTICE, |left| left.min(NOTICE));
    let closed = value.replacen(' ', "!", 1);
    Command::new("SET").arg(key).arg(closed).arg("IFEQ").arg(value).arg("PX").arg(millis(left).max(1)).clone()
}

/// Whether the claim had the lock until it was evicted.
fn was_of(value: &str, id: ClaimId) -> bool {
    value.strip_prefix(&id.to_string()).is_some_and(|rest| rest.starts_with('!'))
}

/// The holder that a value tells of, who has no token.
fn holder(value: &str, left: Option<Duration>) -> Option<ClaimState> {
    reply::holder(value, left).map(|holder| ClaimState { token: None, ..holder })
}

fn renewal(held: bool, left: Option<Duration>) -> Renewal {
    if held { Renewal::Renewed(left) } else { Renewal::Lost(deleted()) }
}

#[async_trait]
impl Backend for Lean {
    fn capabilities(&self) -> Capabilities {
        Capabilities { expiry: true, detached: true, processes: true, hosts: true, ..Capabilities::default() }
    }

    async fn examine(&self) -> Vec<Check> {
        self.store.examine().await
    }

    async fn claim(&self, claim: &Claim) -> Result<Progress> {
        if claim.mode != Mode::Exclusive {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the lean mode of Redis has no \"{}\" claims; it needs a server with scripts",
                    claim.mode
                ),
            ));
        }
        let (slot, key) = self.key(&claim.name);
        refuse_reserved(&key)?;
        let set = self.take(&key, claim)?;
        let grant = Token::new(0).map(|token| Grant { token, ttl: Some(claim.ttl), from: None });
        let grant = grant.ok_or_else(|| Error::invalid("0 is no token"))?;
        if self.store.route.call_durably(slot, &set).await? != Value::Nil {
            return Ok(Progress::Granted(grant));
        }
        // Boxed as in `Route::send`: a step that takes the lock does none of this.
        let (left, value) = Box::pin(self.read(slot, &key)).await?;
        let ours = is_of(&value, claim.id);
        // An earlier step's answer was lost.
        if ours && Box::pin(self.extend(claim)).await? {
            return Ok(Progress::Granted(grant));
        }
        let holder = holder(&value, left).filter(|_| !ours);
        Ok(Progress::Busy(Busy { ahead: 1, holder, ..Busy::default() }))
    }

    async fn wait(&self, _claim: &Claim) -> Result<Wake> {
        self.sleep(POLL.mul_f64(0.5 + 0.5 * self.store.dialer.env.random().jitter())).await;
        Ok(Wake::Step)
    }

    fn shard(&self, name: &LockName) -> u64 {
        self.store.shard(name)
    }

    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        let renew = |claim: &Arc<Claim>| {
            let claim = claim.clone();
            async move {
                let held = self.extend(&claim).await;
                held.map_or_else(Renewal::Failed, |held| renewal(held, Some(claim.ttl)))
            }
        };
        join_all(claims.iter().map(renew)).await
    }

    async fn verify(&self, claim: &Claim) -> Result<Renewal> {
        let (slot, key) = self.key(&claim.name);
        let (left, value) = self.read(slot, &key).await?;
        Ok(renewal(is_of(&value, claim.id), left))
    }

    async fn downgrade(&self, _claim: &Claim) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "the lean mode of Redis has no readers"))
    }

    async fn release(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        if !linger.is_zero() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the lean mode of Redis cannot keep a lock closed",
            ));
        }
        let remove = async || {
            self.remove(&claim.name, claim.id).await.map_err(|error| failure::of_release(error, false))
        };
        match remove().await? {
            Freed::Absent => {
                self.sleep(OVERTAKEN).await;
                Box::pin(remove()).await
            }
            removed => Ok(removed),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        let ours = &self.store.dialer.settings.prefix;
        // Without a prefix of ours, any text in the database would look like a foreign holder.
        let listed =
            |state: &LockState| !ours.is_empty() || state.claims.iter().any(|claim| claim.owner.pid != 0);
        let names = self.store.locks_named(prefix).await?;
        states(names, |name| async move { Ok(self.state(&name).await?.filter(listed)) }).await
    }

    async fn state(&self, name: &LockName) -> Result<Option<LockState>> {
        let (slot, key) = self.key(name);
        refuse_reserved(&key)?;
        let (left, value) = self.read(slot, &key).await?;
        let evicted = reply::is_evicted(&value);
        let claims: Vec<_> = holder(&value, left).filter(|_| !evicted).into_iter().collect();
        let wall = self.store.dialer.env.clock().wall();
        let closed_until = left.filter(|_| evicted).map(|left| wall + left);
        let state = LockState { name: name.clone(), claims, closed_until };
        Ok((!state.claims.is_empty() || closed_until.is_some()).then_some(state))
    }

    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed> {
        if self.compare == Compare::Script {
            return self.store.evict(name, claim).await;
        }
        let evicted = self.change(name, claim, false, is_of, close).await?;
        Ok(if evicted { Freed::Removed } else { Freed::Absent })
    }
}

impl fmt::Debug for Lean {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("lean", &self.compare).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::store::tests::{claim, server_that_answers, store};
    use super::*;
    use crate::claim::Owner;

    const VALUE: &str =
        r#"000102030405060708090a0b0c0d0e0f 7 1700000000 {"host":"h","pid":7,"user":"me","label":"a b"}"#;
    const TTL: Duration = Duration::from_secs(30);

    fn words(command: &Command) -> Vec<String> {
        let mut bytes = Vec::new();
        command.write_to(&mut bytes);
        let read = resp::Reader::default().read(&mut &bytes[..]);
        let Ok(Some(Value::List(words))) = read else { panic!("no command") };
        words.iter().map(|word| word.text().unwrap().to_owned()).collect()
    }

    #[test]
    fn a_renewal_changes_the_value_and_not_what_it_says() {
        let [next, ..] =
            [(Some(TTL / 2), "30000"), (Some(2 * TTL), "60000"), (None, "30000")].map(|(has, gets)| {
                let words = words(&extend("k", VALUE, has, TTL));
                let [_, _, next, _, compared, _, left] = &words[..] else { panic!("{words:?}") };
                assert_eq!((compared.as_str(), left.as_str()), (VALUE, gets));
                assert_ne!(next, VALUE, "a renewal that was overtaken would not be known");
                next.clone()
            });
        let told = |value: &str| format!("{:?}", holder(value, None).unwrap());
        assert_eq!(told(&next), told(VALUE));
        assert!(told(&next).contains("token: None") && told(&next).contains("a b"));
    }

    /// P4: a proxy's own words, while the request is still on its way.
    #[tokio::test]
    async fn an_error_that_no_server_is_known_to_give_answers_no_claim() {
        for (answer, kind) in [
            ("-ERR upstream failure\r\n", ErrorKind::Unknown),
            ("-ERR unknown command 'SET'\r\n", ErrorKind::Unsupported),
            ("-OOM command not allowed\r\n", ErrorKind::Unavailable),
        ] {
            let url = server_that_answers("SET", answer).await;
            let lean = Lean { store: store(&url), compare: Compare::Script };
            let error = lean.claim(&claim(1)).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
        }
    }

    #[test]
    fn what_is_written_says_whose_it_is() {
        let lean = Lean { store: store("redis://127.0.0.1:1"), compare: Compare::Script };
        for label in ["one", "another"] {
            let owner = Owner { host: "h".into(), pid: 1, user: "u".into(), label: label.into() };
            let claim = Claim { owner: Arc::new(owner), ..claim(1) };
            let words = words(&lean.take("k", &claim).unwrap());
            let [_, key, value, rest @ ..] = &words[..] else { panic!("{words:?}") };
            assert_eq!(key, "k");
            assert_eq!(rest, ["NX", "PX", &millis(claim.ttl).to_string()]);
            let parts: Vec<&str> = value.splitn(5, ' ').collect();
            let [id, renewals, since, "", owner] = parts[..] else { panic!("{value}") };
            assert_eq!((id, renewals), (claim.id.to_string().as_str(), "0"));
            let since = SystemTime::UNIX_EPOCH + Duration::from_micros(since.parse().unwrap());
            let apart = since.elapsed().unwrap_or_else(|ahead| ahead.duration());
            assert!(apart < Duration::from_secs(300), "{value}");
            assert_eq!(serde_json::from_str::<Owner>(owner).unwrap(), *claim.owner);
        }
    }

    #[test]
    fn a_value_is_its_claims_alone() {
        let id: ClaimId = "000102030405060708090a0b0c0d0e0f".parse().unwrap();
        assert!(is_of(VALUE, id));
        for other in ["", "000102030405060708090a0b0c0d0e0f", "000102030405060708090a0b0c0d0e0f0 1 2 {}"] {
            assert!(!is_of(other, id), "{other}");
        }
        assert!(!is_of(VALUE, ClaimId::from_bits(1)));
    }
}
