//! `redis://` and its relatives: Redis 6 or later, Valkey, KeyDB: one server, behind Sentinel, or as a Cluster.
//!
//! The exclusive lock is one plain string key, so that it excludes and is excluded by every client that locks with
//! `SET key value NX PX`. What a queue, readers, permits and tokens need lives in side keys of the same hash slot.
//!
//! | URL | is |
//! | --- | --- |
//! | `redis://user:password@host:6379/0` | one server, database 0 |
//! | `rediss://...` | the same, with TLS; also `rediss+sentinel://`, `rediss+cluster://` |
//! | `redis+unix:///run/redis.sock?db=0` | one server, by its socket |
//! | `redis+sentinel://s1,s2,s3/mymaster/0` | whatever server the sentinels call the master |
//! | `redis+cluster://h1,h2` | a Cluster, found through any of its servers |
//! | `redlock://h1,h2,h3` | a quorum of servers that know nothing of each other: see [`redlock`] |
//!
//! | key of the URL | means | default |
//! | --- | --- | --- |
//! | `prefix=` | what the lock's key begins with, at most 128 bytes; empty makes the lock's name the key | `clinch:` |
//! | `gap=` | 0 to 10 s: for how long a lock that was handed over for a second without a break is left free, so that clients that poll see it free | 150 ms; where `prefix=` is not empty, only for ten minutes after another program was seen to hold the lock |
//! | `wait_replicas=`, `wait_aof=` | grant and renew only when `WAIT` / `WAITAOF` has confirmed so many copies; where they cannot be had for longer than a TTL, every held lock is lost | none |
//! | `lean=on` | one key per lock and nothing else: no queue, no tokens | `off` |
//! | `eviction=allow` | use a server that may drop locks when its memory is full | `refuse` |
//! | `protocol=resp2` | do not ask for protocol 3 | `resp3`, and 2 where the server has no other |
//! | `ca=`, `cert=`, `key=` | PEM files: the authority to trust, and a certificate of ours | the public authorities |
//! | `sentinel_user=`, `sentinel_password=` | for the sentinels; those before the host are for the servers | none |
//!
//! # Guarantees
//!
//! On a server that keeps what it acknowledged all promises hold: over release, expiry, `kill -9`, pauses and cut
//! connections. A waiter that dies while it is first in line delays the queue by at most 3 s; each more that is dead right behind it by 3 s
//! and, before that, until somebody in the queue renews its place, a third of its TTL at most. Time is the server's own; a
//! client's wall clock plays no part.
//!
//! A step whose answer was lost may arrive late. Its claim's release leaves a grave for it, for 60 s of the server's time; one that
//! arrives later than that, or of which no release was ever answered, holds the lock for one TTL. A step that was given up lies in
//! this process for 5 s and in its kernel for 20 s at most. An error that no server is known to give, a proxy's own perhaps, counts as
//! an answer that was lost.
//!
//! A lock that is taken away by force, by an operator's eviction, `DEL` or `FLUSHALL`, is told to its holder within milliseconds
//! when it has held it for half a second, through client tracking (protocol 3). Otherwise, for readers and permits, and of what
//! is too much for the server's `tracking-table-max-keys` (a million), the next renewal tells. After a `DEL` nothing in the store says that somebody held the lock, so until its holder has heard of it a newcomer
//! may hold it, too; who waited for a database that was emptied waits for half a second more. Evict claims instead: then the lock
//! stays closed until its holder has let go, for 15 s at most.
//!
//! Tokens are `max(last + 1, server time in microseconds)`, with one fence per hash slot: they rise over `FLUSHALL` and over
//! a failover that lost writes, unless the new master's clock is behind by more than the failover took.
//!
//! Leases end by the wall clock of the server, as all expiry does in Redis: whoever sets that clock forward by an hour ends them an
//! hour early. From version 7 on replicas are told the moment and not the time left, so a failover to a server whose clock is ahead does the
//! same, and so do the ends of readers, of permits and of lingering locks on every version. Keep the servers' clocks together. A server
//! whose clock nobody has set, so that it reads a time before 2001, grants nothing until it is set, except in the lean mode.
//!
//! What a failover may lose: replication is asynchronous, so the new master may not know of a lock that the old one had
//! granted, and for as long as two masters answer, two may hold. [`survives-failover`](crate::Capabilities::failover) is
//! therefore off. `wait_replicas=` makes that rarer and slower, not impossible. A release may be lost, too: the lock then stays
//! taken until its lease ends. Clients hear of a new master from every sentinel, and leave the old one. To be sure, give the token to the store that you guard
//! ([`fence`](crate::fence)), or use a store with consensus.
//!
//! While a slot of a Cluster moves, its servers refuse commands on several keys until all have moved. Exclusive locks in it are renewed
//! and released meanwhile, by their own key alone; nothing is acquired. Who holds a part of a lock, as a reader or with permits, is not
//! renewed, and loses it if the slot takes longer than the TTL. Their releases, those that linger or of which a step may still
//! arrive, and evictions are done when the slot has moved, by when whoever waits looks, too, within seconds.
//!
//! # Other programs' locks
//!
//! With `prefix=` empty, and the same key, we and redis-py, redlock, rslock, redsync or `SET key value NX PX` exclude each
//! other; readers and permits leave a marker in the key, so that they exclude those programs too. Such programs tell
//! nobody when they release: their release is noticed through client tracking (protocol 3), else by looking ten times a
//! second, and only by the next in line.
//!
//! # What is refused
//!
//! When it connects: a replica, a user without the rights below, `require=` of what is not there. Whenever a connection is
//! opened, to each server: a KeyDB active replica, and a `maxmemory-policy` that evicts. Where scripts are missing or forbidden, a server with `SET ... IFEQ` and a conditional
//! delete (Valkey 9.0, Redis 8.4) is used in the lean mode; [`Capabilities`](crate::Capabilities) tell. A server of a Cluster, by a URL
//! that does not say so, has the locks of its own slots; to ask for another is an error ([`Unsupported`](crate::ErrorKind::Unsupported)).
//!
//! A full server (`maxmemory`) takes no new lock; what is held is renewed and released. In the lean mode without scripts it refuses renewals,
//! too, since they are a `SET`: held locks are lost after their TTL.
//!
//! # Rights
//!
//! The least that a user needs, for the default prefix; for another one, say `jobs:`, with `~jobs:* ~clinch:~{???}:*:jobs:*
//! ~clinch:~{???}:fence` for the keys and `&clinch:~{*` for the channels:
//!
//! ```text
//! user clinch on >PASSWORD ~clinch:* resetchannels &clinch:* -@all +evalsha +script|load +time +exists +set +getset
//!   +getrange +setrange +pttl +pexpire +del +hget +hmget +hgetall +hlen +hscan +hdel +hset +hsetnx +rpush +lpush
//!   +lrange +llen +lindex +lrem +lpop +zadd +zcard +zscore +zrange +zrevrange +zrangebyscore +zrem +publish +subscribe +ping +client|tracking +client|caching +mget +scan +info
//! ```
//!
//! A Cluster also needs `+cluster|slots +asking`, and from version 7 on `+spublish +ssubscribe`; databases other than 0 `+select`; Sentinel `+role`; `wait_replicas=` `+wait`, `wait_aof=` `+waitaof`. Without
//! channels, or the right to publish, waiters ask ten times a second instead of being told; without `+info` they ask once more for
//! what they were told. Without `+mget`, `+client|tracking` or `+client|caching`, that a held lock was taken away is told by its next renewal
//! only. In the lean mode on Valkey: `~clinch:* -@all +set +delifeq
//! +getrange +pttl +scan +info`.
//!
//! # In the store
//!
//! | key | type | holds |
//! | --- | --- | --- |
//! | `clinch:NAME` | string | `<claim id> <token> <since, µs> <owner, JSON>` and the lease as its expiry, with `*` for the first space where its release looks for waiters, and `!` when it was evicted and its holder has not let go; `clinch parts` while readers or permits hold, `clinch closed` while it lingers |
//! | `clinch:~{tag}:claims:KEY` | hash | waiters, and holders of parts |
//! | `clinch:~{tag}:queue:KEY` | list | waiters in their order |
//! | `clinch:~{tag}:holders:KEY` | sorted set | holders of parts by the end of their lease |
//! | `clinch:~{tag}:fence` | string | the last token of the hash slot: the only key without an expiry |
//!
//! `KEY` is the lock's whole key, `clinch:NAME`: whoever spells it with another `prefix=` asks for the same lock. The tag is made of
//! three letters that hash to its slot. Keys that begin with `clinch:~{` are no locks; a lock that would have such a key is refused.
//!
//! A key that is deleted by hand, or that an operator takes the expiry from (`PERSIST`), costs nobody the exclusion that the lock's own
//! key shows: that one is held until it expires, and for as long as it has no expiry. The holder's next renewal gives it one again.

mod check;
mod claims;
mod cluster;
mod copies;
mod dating;
mod dial;
mod examine;
mod failure;
mod inbox;
mod keys;
mod lean;
mod link;
mod listing;
pub mod redlock;
mod renewal;
mod reply;
mod resp;
mod route;
mod script;
mod sentinel;
mod settings;
mod slots;
mod store;
mod waiting;
mod watch;
mod wire;

use std::sync::Arc;

use crate::backend::Backend;
use crate::check::Check;
use crate::env::Env;
use crate::error::Result;
use crate::url::StoreUrl;

/// The store of a `redis` URL, without what every URL may say besides (`ttl=`, `require=`).
///
/// # Errors
///
/// As [`connect`](crate::connect).
pub async fn open(url: &str, env: Env) -> Result<Arc<dyn Backend>> {
    let mut url = StoreUrl::parse(url)?;
    env.here(open_url(&mut url, &env)).await
}

/// Opens the store of a URL, and refuses a server that could not keep its promises.
pub(crate) async fn open_url(url: &mut StoreUrl, env: &Env) -> Result<Arc<dyn Backend>> {
    let settings = settings::Settings::parse(url)?;
    // What the URL says too much is refused before anything is sent.
    url.finish()?;
    check::open(settings, env.clone()).await
}

/// Looks at the servers of a URL, also at such as are refused.
pub(crate) async fn examine_url(url: &mut StoreUrl, env: &Env) -> Result<Vec<Check>> {
    let settings = settings::Settings::parse(url)?;
    url.finish()?;
    Ok(store::Store::new(settings, env.clone())?.examine().await)
}
