//! What is found out about servers: at the start, which of their ways are there; of each that is connected to, whether it can
//! keep locks.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use super::failure::Failure;
use super::keys::{Home, slot_of};
use super::lean::{Compare, Lean};
use super::link::Link;
use super::reply;
use super::resp::{Command, Value};
use super::script;
use super::settings::Settings;
use super::store::Store;
use crate::backend::Backend;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};

/// What the keys end in that the rights of a user are tried on.
const PROBE: &str = "~probe";

/// Opens a store on a server that was found fit.
pub(super) async fn open(settings: Settings, env: Env) -> Result<Arc<dyn Backend>> {
    let mut store = Store::new(settings, env)?;
    let settings = &store.dialer.settings;
    let lock = [&settings.prefix, PROBE].concat();
    let slot = slot_of(&lock);
    let key = Home::of(slot).key(":probe:", &lock).concat();
    let (lean, wants_more) = (settings.lean, settings.durability.asks_for_more());
    let server = store.route.about(slot).await?;
    server.refuse_replica()?;
    if store.route.is_cluster() && server.major >= 7 {
        store.shard_channels();
    }

    let mut probe = script::PROBE.on([key.as_str(), lock.as_str()]);
    probe.arg(store.channels(slot)).arg(if store.sharded { "SPUBLISH" } else { "PUBLISH" });
    match store.route.run(slot, &script::PROBE, &probe).await {
        Ok(denied) => {
            let denied: Vec<&str> = reply::list(&denied)?.iter().filter_map(Value::text).collect();
            // Without messages waiters ask from time to time.
            let (messages, missing): (Vec<&str>, Vec<&str>) =
                denied.into_iter().partition(|name| name.ends_with("PUBLISH"));
            store.tells = messages.is_empty();
            match missing.is_empty() {
                true if lean => Ok(Arc::new(Lean { store, compare: Compare::Script })),
                true => Ok(Arc::new(store)),
                false => Err(Error::new(
                    ErrorKind::Refused,
                    format!(
                        "this user may not run {}; the documentation of the Redis store has an ACL line with all that \
                         is needed",
                        missing.join(", ")
                    ),
                )),
            }
        }
        Err(error) if is_no_scripting(&error) => {
            let compare = compare_without_scripts(&store, slot, &key).await?;
            match compare {
                Some(compare) if !wants_more => Ok(Arc::new(Lean { store, compare })),
                _ => Err(Error::new(
                    if error.kind() == ErrorKind::Unknown { ErrorKind::Unsupported } else { error.kind() },
                    "the server runs no scripts for this user, and has neither SET with IFEQ nor a conditional delete: \
                     allow EVALSHA and SCRIPT LOAD, or use Valkey 9.0 or Redis 8.4 or later",
                )
                .with_source(error)),
            }
        }
        Err(error) => Err(error),
    }
}

fn is_no_scripting(error: &Error) -> bool {
    let text = error.to_string().to_ascii_lowercase();
    let Some((_, text)) = text.split_once(" answered ") else { return false };
    matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Refused | ErrorKind::Unknown)
        && !text.contains("executing the script")
        && (text.contains("eval") || text.contains("script"))
}

/// How a server without scripts changes a key only for its owner, if it can.
async fn compare_without_scripts(store: &Store, slot: u16, key: &str) -> Result<Option<Compare>> {
    let mut set = Command::new("SET");
    set.arg(key).arg("").arg("IFEQ").arg("-").arg("PX").arg(1);
    if !is_there(store.route.probe(slot, &set).await)? {
        return Ok(None);
    }
    if is_there(store.route.probe(slot, Command::new("DELIFEQ").arg(key).arg("-")).await)? {
        return Ok(Some(Compare::Valkey));
    }
    let delex = store.route.probe(slot, Command::new("DELEX").arg(key).arg("IFEQ").arg("-")).await;
    Ok(is_there(delex)?.then_some(Compare::Redis))
}

fn is_there(answer: Result<Value>) -> Result<bool> {
    match answer {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Refused) => Ok(false),
        Err(error) => Err(error),
    }
}

/// What a server says of itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Server {
    pub(super) major: u32,
    pub(super) role: String,
    pub(super) maxmemory: u64,
    pub(super) policy: String,
    /// Names this run of the server; empty when it does not say.
    pub(super) run: String,
    /// Names the history of its data in this run: another one, where it was a replica meanwhile.
    pub(super) history: String,
    /// For how many whole seconds it has run.
    pub(super) uptime: u64,
    /// Whether it writes what it does to a file.
    pub(super) logs_writes: bool,
    /// Whether it is one of a Cluster, and refuses commands on keys of several slots.
    pub(super) has_slots: bool,
    /// Whether it keeps nothing, and only knows who does.
    is_sentinel: bool,
}

/// What INFO tells, by name.
pub(super) fn fields(info: &str) -> HashMap<&str, &str> {
    info.lines().filter_map(|line| line.trim_end().split_once(':')).collect()
}

impl Server {
    pub(super) fn read(info: &str) -> Server {
        let fields = fields(info);
        let field = |name: &str| fields.get(name).copied().unwrap_or_default();
        let version = field("redis_version").split('.').next().unwrap_or_default();
        Server {
            major: version.parse().unwrap_or(0),
            role: field("role").to_owned(),
            maxmemory: field("maxmemory").parse().unwrap_or(0),
            policy: field("maxmemory_policy").to_owned(),
            run: field("run_id").to_owned(),
            history: match field("total_net_repl_input_bytes") {
                // Redis 6 and KeyDB do not tell a replica from a backup, for which they take a new id, too.
                "" => field("master_replid").to_owned(),
                // What it was given as a replica. An operator can set that back; for a time, the other tells even so.
                "0" => format!("0-{}", field("master_replid2").trim_start_matches('0')),
                bytes => bytes.to_owned(),
            },
            uptime: field("uptime_in_seconds").parse().unwrap_or(0),
            logs_writes: field("aof_enabled") == "1",
            has_slots: field("cluster_enabled") == "1",
            is_sentinel: field("redis_mode") == "sentinel",
        }
    }

    /// Refuses a replica at the start. Later it is a master that was replaced, and the next one is waited for.
    pub(super) fn refuse_replica(&self) -> Result<()> {
        match self.role.as_str() {
            "slave" => unfit(
                "this server is a replica, which grants nothing",
                "give the address of its master, or redis+sentinel://",
            ),
            _ => Ok(()),
        }
    }

    /// Refuses servers on which a lock is no lock.
    pub(super) fn refuse_unfit(&self, eviction_allowed: bool) -> Result<()> {
        self.refuse_sentinel()?;
        self.refuse_active()?;
        self.refuse_evicting(eviction_allowed)
    }

    /// Refuses a Sentinel, which was taken for the server that it names.
    pub(super) fn refuse_sentinel(&self) -> Result<()> {
        match self.is_sentinel {
            true => Err(Error::new(ErrorKind::Unsupported, "this is a Sentinel")
                .with_remedy("say redis+sentinel://HOST/MASTER in the URL")),
            false => Ok(()),
        }
    }

    /// Refuses a server that grants what another grants, too.
    pub(super) fn refuse_active(&self) -> Result<()> {
        match self.role.as_str() {
            "active-replica" => unfit(
                "this KeyDB is an active replica: two of them grant the same lock to two holders",
                "use a server without active-replica",
            ),
            _ => Ok(()),
        }
    }

    /// Refuses a server that may drop locks, unless the URL takes that risk.
    pub(super) fn refuse_evicting(&self, allowed: bool) -> Result<()> {
        if allowed || !self.evicts() {
            return Ok(());
        }
        unfit(
            format!(
                "with maxmemory-policy {} this server drops locks when its memory is full, and then two hold one",
                self.policy
            ),
            "set maxmemory-policy noeviction, or say eviction=allow in the URL to take the risk",
        )
    }

    /// Whether it may drop locks: every lock has an expiry, so both families of policies may.
    pub(super) fn evicts(&self) -> bool {
        self.maxmemory > 0 && (self.policy.starts_with("allkeys") || self.policy.starts_with("volatile"))
    }
}

impl Server {
    /// Refuses a server that does not keep what it acknowledged over a restart, as far as it may be asked.
    pub(super) async fn refuse_forgetful(&self, link: &Link) -> Result<()> {
        let syncs = Syncs::of(link).await.map_err(|cut| cut.into_error(link.server()))?;
        let forgets = match syncs.policy.as_deref() {
            _ if !self.run.is_empty() && !self.logs_writes => "it has no append-only file",
            Some("always") if syncs.pauses => {
                "it may lose what it acknowledged while it rewrites its append-only file"
            }
            // Who may not ask is believed to know.
            Some("always") | None => return Ok(()),
            Some(_) => "it may lose the last second of its append-only file",
        };
        unfit(
            format!("durable=on says that this server keeps what it acknowledged, but {forgets}"),
            "set appendonly yes, appendfsync always and no-appendfsync-on-rewrite no, or leave durable=on away",
        )
    }
}

/// When a server has the disk take what it has written to its append-only file, as far as that may be asked.
#[derive(Default)]
pub(super) struct Syncs {
    pub(super) policy: Option<String>,
    /// Not while it rewrites that file, or saves a copy of its data.
    pub(super) pauses: bool,
}

impl Syncs {
    pub(super) async fn of(link: &Link) -> Result<Syncs, Failure> {
        let mut options = Command::new("CONFIG");
        // One pattern: Redis 6 takes no more.
        options.arg("GET").arg("*appendfsync*");
        let pairs = match link.call(&options).await {
            Ok(Value::List(pairs)) => pairs,
            Err(cut @ Failure::Cut { .. }) => return Err(cut),
            Ok(_) | Err(_) => return Ok(Syncs::default()),
        };
        let value = |name: &str| {
            pairs.chunks_exact(2).find_map(|pair| match pair {
                [key, value] if key.text() == Some(name) => value.text(),
                _ => None,
            })
        };
        Ok(Syncs {
            policy: value("appendfsync").map(str::to_owned),
            pauses: value("no-appendfsync-on-rewrite") == Some("yes"),
        })
    }
}

fn unfit(why: impl Into<Cow<'static, str>>, remedy: &'static str) -> Result<()> {
    Err(Error::new(ErrorKind::Refused, why).with_remedy(remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_that_lose_locks_are_refused() {
        let info = |role: &str, maxmemory: u32, policy: &str| {
            format!(
                "# Server\r\nredis_version:7.0.15\r\nrole:{role}\r\nmaxmemory:{maxmemory}\r\nmaxmemory_policy:{policy}\r\n"
            )
        };
        let fit = |info: &str| {
            let server = Server::read(info);
            server.refuse_replica().and_then(|()| server.refuse_unfit(false))
        };
        assert_eq!(Server::read(&info("master", 0, "")).major, 7);
        for good in [info("master", 0, "allkeys-lru"), info("master", 100, "noeviction"), String::new()] {
            fit(&good).unwrap();
        }
        for (role, policy, word) in [
            ("slave", "noeviction", "replica"),
            ("active-replica", "noeviction", "KeyDB"),
            ("master", "volatile-ttl", "volatile-ttl"),
        ] {
            let error = fit(&info(role, 1, policy)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused);
            assert!(error.to_string().contains(word), "{error}");
        }
        Server::read(&info("master", 1, "allkeys-lfu")).refuse_unfit(true).unwrap();
    }

    #[test]
    fn a_replica_gets_another_history_and_a_backup_leaves_it_alone() {
        const NONE: &str = "0000000000000000000000000000000000000000";
        let of = |id: &str, second: &str, bytes: &str| {
            Server::read(&format!("master_replid:{id}\r\nmaster_replid2:{second}\r\n{bytes}")).history
        };
        let bytes = |count: u32| format!("total_net_repl_input_bytes:{count}\r\n");
        let never = of("a", NONE, &bytes(0));
        assert_eq!(of("b", NONE, &bytes(0)), never, "a backup");
        let promoted = of("c", "b", &bytes(274));
        let (forgot, set_back) = (of("d", NONE, &bytes(274)), of("c", "b", &bytes(0)));
        assert!([&promoted, &set_back].iter().all(|history| **history != never));
        assert_eq!(forgot, promoted, "the backlog is freed an hour after the last replica");
        assert_eq!(of("e", NONE, &bytes(274)), forgot, "a backup");
        assert_ne!(of("f", NONE, &bytes(560)), forgot, "a replica once more");
        assert_ne!(of("a", NONE, ""), of("b", NONE, ""), "it may have been a replica");
    }
}
