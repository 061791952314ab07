//! Fenced writes: how the data that a lock guards refuses a holder who is not the last one any more.
//!
//! A lock ends by time, and a process can stop for longer than that between its last look at the guard and its write.
//! No lock service can see that; the store of the data can, if every write carries the [`Token`](crate::Token) and the
//! store remembers the largest (Kleppmann, "How to do distributed locking", 2016).
//!
//! What is here is text to run with your own client of the store that holds your data, which need not be the store
//! that holds the locks.
//!
//! # Examples
//!
//! With any Redis client, from the text in [`REDIS_SET`]:
//!
//! ```text
//! EVAL <REDIS_SET> 2 report:{7} report:{7}:fence <guard.token()> <value>   -> 1: written, 0: refused
//! ```
//!
//! # etcd
//!
//! Where locks and data are in the same etcd, nothing has to be remembered: the token is the revision that created the
//! claim's key, [`Guard::store_key`](crate::Guard::store_key). Put this comparison into the transaction that writes, and it
//! is refused as soon as the claim is gone:
//!
//! ```text
//! Compare { key: guard.store_key(), target: CREATE, result: EQUAL, create_revision: guard.token() }
//!
//! etcdctl txn:   create("<guard.store_key()>") = "<guard.token()>"
//! ```

/// A Redis script that sets a key only if no newer holder has written: `KEYS[1]` the data, `KEYS[2]` the largest token
/// seen (in a Cluster, of the same slot), `ARGV[1]` the token, `ARGV[2]` the value. Answers 1 when it was written, 0 when
/// it was refused.
///
/// # Guarantees
///
/// After a write with a token was accepted, none with a smaller one is, for as long as `KEYS[2]` is kept: give it no
/// expiry, and do not let the server evict it. A write of the same token may be repeated.
pub const REDIS_SET: &str =
    concat!(include_str!("fence/redis_guard.lua"), include_str!("fence/redis_set.lua"));

/// The Lua function `clinch_fence(key, token)` to put in front of your own script. It answers whether the write may go
/// through; if not, write nothing. The guarantees are those of [`REDIS_SET`].
///
/// # Examples
///
/// ```
/// let script = [
///     clinch::fence::REDIS_GUARD,
///     "if not clinch_fence(KEYS[2], ARGV[1]) then return redis.error_reply('STALE an older holder') end
///      return redis.call('HSET', KEYS[1], 'total', ARGV[2])",
/// ]
/// .concat();
/// # assert!(script.contains("STALE"));
/// ```
pub const REDIS_GUARD: &str = include_str!("fence/redis_guard.lua");
