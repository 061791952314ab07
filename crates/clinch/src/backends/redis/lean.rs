//! The lean mode: one key per lock and nothing else, where the server has no scripts or the user asks for the least.
//!
//! No queue, so waiters poll; no token, since nothing counts; no readers or permits.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;

use super::keys::{lock_key, slot_of};
use super::reply;
use super::resp::{Command, Value};
use super::script;
use super::store::{Store, deleted, millis};
use crate::backend::{Backend, Busy, Capabilities, Freed, Grant, LockState, Progress, Renewal, Wake};
use crate::claim::{Claim, ClaimId, Mode};
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::token::Token;

/// How long a waiter sleeps between two tries, at most; half of it at least.
const POLL: Duration = Duration::from_millis(100);

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
    /// What the key holds: like the record of the full store, with a token of 0 and the time left out, so that owner and
    /// claim tell it in full.
    fn value(claim: &Claim) -> Result<String> {
        let owner = serde_json::to_string(&*claim.owner)
            .map_err(|error| Error::invalid("the owner cannot be written as text").with_source(error))?;
        Ok(format!("{} 0 0 {owner}", claim.id))
    }

    fn key(&self, name: &LockName) -> (u16, String) {
        let key = lock_key(&self.store.dialer.settings.prefix, name);
        (slot_of(&key), key)
    }

    /// What the key holds at this moment, and for how long.
    async fn read(&self, slot: u16, key: &str) -> Result<(String, Option<Duration>)> {
        let mut get = Command::new("GETRANGE");
        get.arg(key).arg(0).arg(1023);
        let mut left = Command::new("PTTL");
        left.arg(key);
        let (value, left) =
            (self.store.route.call(slot, &get).await?, self.store.route.call(slot, &left).await?);
        let left = u64::try_from(reply::number(&left)?).ok().map(Duration::from_millis);
        Ok((reply::lossy(&value), left))
    }

    async fn extend(&self, claim: &Claim) -> Result<Renewal> {
        let (slot, key) = self.key(&claim.name);
        let held = if self.compare == Compare::Script {
            let mut command = script::RENEW_HELD.on([key.as_str()]);
            command.arg(claim.id).arg(millis(claim.ttl));
            let answer = self.store.route.run_durably(slot, &script::RENEW_HELD, &command).await?;
            matches!(reply::list(&answer)?, [Value::Int(1)])
        } else {
            let (value, left) = self.read(slot, &key).await?;
            let ours = value.starts_with(&claim.id.to_string());
            if !ours || left.is_some_and(|left| left >= claim.ttl) {
                ours
            } else {
                let mut set = Command::new("SET");
                set.arg(&key).arg(&value).arg("IFEQ").arg(&value).arg("PX").arg(millis(claim.ttl));
                self.store.route.call(slot, &set).await? != Value::Nil
            }
        };
        Ok(if held { Renewal::Renewed(Some(claim.ttl)) } else { Renewal::Lost(deleted()) })
    }

    async fn remove(&self, name: &LockName, id: ClaimId) -> Result<Freed> {
        let (slot, key) = self.key(name);
        let answer = match self.compare {
            Compare::Script => {
                let mut command = script::RELEASE_LEAN.on([key.as_str()]);
                command.arg(id);
                self.store.route.run(slot, &script::RELEASE_LEAN, &command).await?
            }
            compare => {
                let (value, _) = self.read(slot, &key).await?;
                if !value.starts_with(&id.to_string()) {
                    return Ok(Freed::Absent);
                }
                let command: Command = match compare {
                    Compare::Valkey => Command::new("DELIFEQ").arg(&key).arg(&value).clone(),
                    _ => Command::new("DELEX").arg(&key).arg("IFEQ").arg(&value).clone(),
                };
                self.store.route.call(slot, &command).await?
            }
        };
        Ok(if reply::number(&answer)? == 1 { Freed::Removed } else { Freed::Absent })
    }
}

#[async_trait]
impl Backend for Lean {
    fn capabilities(&self) -> Capabilities {
        Capabilities { expiry: true, detached: true, processes: true, hosts: true, ..Capabilities::default() }
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
        let mut set = Command::new("SET");
        set.arg(&key).arg(Self::value(claim)?).arg("NX").arg("PX").arg(millis(claim.ttl));
        let grant = Token::new(0).map(|token| Grant { token, ttl: Some(claim.ttl), from: None });
        let grant = grant.ok_or_else(|| Error::invalid("0 is no token"))?;
        if self.store.route.call(slot, &set).await? != Value::Nil {
            return Ok(Progress::Granted(grant));
        }
        let (value, left) = self.read(slot, &key).await?;
        if value.starts_with(&claim.id.to_string()) {
            // An earlier step's answer was lost.
            return Ok(match self.extend(claim).await? {
                Renewal::Renewed(_) => Progress::Granted(grant),
                _ => Progress::Busy(Busy::default()),
            });
        }
        Ok(Progress::Busy(Busy { ahead: 1, holder: reply::holder(&value, left), place_ttl: None }))
    }

    async fn wait(&self, _claim: &Claim) -> Result<Wake> {
        let env = &self.store.dialer.env;
        env.sleep_until(env.now() + POLL.mul_f64(0.5 + 0.5 * env.random().jitter())).await;
        Ok(Wake::Step)
    }

    fn shard(&self, name: &LockName) -> u64 {
        self.store.shard(name)
    }

    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        let renew = |claim: &Arc<Claim>| {
            let claim = claim.clone();
            async move { self.extend(&claim).await.unwrap_or_else(Renewal::Failed) }
        };
        join_all(claims.iter().map(renew)).await
    }

    async fn verify(&self, claim: &Claim) -> Result<Renewal> {
        let (slot, key) = self.key(&claim.name);
        let (value, left) = self.read(slot, &key).await?;
        let ours = value.starts_with(&claim.id.to_string());
        Ok(if ours { Renewal::Renewed(left) } else { Renewal::Lost(deleted()) })
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
        self.remove(&claim.name, claim.id).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        let mut states = Vec::new();
        for name in self.store.locks_named(prefix).await? {
            states.extend(self.state(&name).await?);
        }
        Ok(states)
    }

    async fn state(&self, name: &LockName) -> Result<Option<LockState>> {
        let (slot, key) = self.key(name);
        let (value, left) = self.read(slot, &key).await?;
        let claims: Vec<_> = reply::holder(&value, left).into_iter().collect();
        let state = LockState { name: name.clone(), claims, closed_until: None };
        Ok((!state.claims.is_empty()).then_some(state))
    }

    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed> {
        self.remove(name, claim).await
    }
}

impl fmt::Debug for Lean {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("lean", &self.compare).finish_non_exhaustive()
    }
}
