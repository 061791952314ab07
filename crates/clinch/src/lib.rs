//! Distributed locks with one set of promises on every store.
//!
//! Clinch makes sure that one of many processes does a thing at a time: a nightly job on several hosts, a cache that is
//! rebuilt, a device that is driven. It is right where lock libraries usually are not:
//!
//! - **Loss is signalled before anybody else can hold the lock.** A guard's [`deadline`](Guard::deadline) is counted from
//!   before the request was sent, on a clock that goes on in suspend, and [`Guard::lost`] fires by then even if the store
//!   never answers again.
//! - **Tokens always rise.** Every grant carries a fencing [`Token`] that is larger than all before it, over crashes and
//!   restarts; give it to the store that you guard, and it can refuse a writer that was paused too long.
//! - **Cancelled waiters leak nothing.** Every future may be dropped at any poll; its claim is withdrawn.
//! - **Crashed waiters block nobody.** A place in the queue has a lease too, or dies with its process.
//! - **First come, first served**, where the store can order claims; nobody overtakes, and one release wakes one waiter.
//!
//! # A tour
//!
//! [`connect`] takes a URL and gives [`Locks`]; names become a [`Mutex`], an [`RwLock`] or a [`Semaphore`]; awaiting
//! their requests gives a [`Guard`]:
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let locks = clinch::connect("memory://").await?;
//!
//! // Hold it for as long as the guard lives.
//! let guard = locks.mutex("reports/daily")?.lock().await?;
//! println!("token {}", guard.token());
//! guard.release().await?;
//!
//! // Or for as long as a body runs, which is dropped if the lease is lost.
//! let rows = locks.mutex("reports/daily")?.lock().run(async |guard| { guard.token(); 42 }).await?;
//! assert_eq!(rows, 42);
//!
//! // Readers share; three of five permits.
//! let reader = locks.rwlock("index")?.read().await?;
//! let permits = locks.semaphore("gpu", 5)?.acquire(3)?.await?;
//! # drop((reader, permits));
//! # Ok::<_, clinch::Error>(()) }).unwrap();
//! ```
//!
//! # Stores
//!
//! | URL | feature | freed when the holder dies | order | tokens rise over |
//! | --- | --- | --- | --- | --- |
//! | `etcd://host` | `etcd` | after the TTL | FIFO, with etcd's own recipes | failover, restart |
//! | `file:///dir` | `file` (default) | at once, by the kernel | FIFO | kill -9, reboot, removal of the directory |
//! | `memory://` | `memory` (default) | after the TTL | FIFO | everything within the process |
//! | `redis://host` | `redis` | after the TTL | FIFO | restart, `FLUSHALL`, failover |
//! | `redlock://a,b,c` | `redis` | after the TTL | none, whoever asks first | restarts, loss of a minority |
//!
//! What a store can promise is in [`Capabilities`], and `?require=fencing,fifo` makes [`connect`] refuse one that lacks
//! something. Stores of your own implement [`backend::Backend`] and are judged by the `conformance` suite.
//!
//! # What no lock service can promise
//!
//! A process can be stopped between its last look at [`Guard::is_held`] and its write, for longer than any lease. Only the
//! guarded store can catch that write, by its token. Where that store cannot compare tokens, a lock is a way to save work,
//! not a way to prove that two writes never meet.
//!
//! # Runtimes
//!
//! Acquiring and releasing run on the caller's own executor. Renewals, time-outs and background releases run on one
//! background thread per [`connect`], so a blocked caller cannot lose a lock, and a guard may be dropped anywhere, also
//! outside a runtime. See [`Lane`] and [`Env`] to change that.
//!
//! Steps on a server use a connection that the current tokio runtime drives, or else that thread. A runtime that does not begin within
//! a second what is asked of it, since it was only entered around another executor, or its one thread is blocked, is left for that
//! thread from then on; a connection that it drove before is given up after a few seconds more. Leases are renewed all the same.
//!
//! A waker that polls its task right where it is called has that task run on that thread: a task that blocks there stops renewals.

// Without any store of this crate's, for users who bring their own, what only stores use is unused.
#![cfg_attr(
    not(any(feature = "etcd", feature = "memory", feature = "file", feature = "redis")),
    allow(dead_code, unused_variables)
)]

mod acquire;
pub mod backend;
pub mod backends;
mod calm;
mod check;
mod claim;
mod claimed;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod drift;
mod engine;
mod env;
mod error;
pub mod fence;
mod guard;
mod keeper;
mod lane;
mod lease;
mod locks;
mod mutex;
mod name;
pub mod net;
mod process;
#[cfg(any(feature = "etcd", feature = "memory", feature = "file"))]
mod queue;
mod random;
#[cfg(any(target_os = "linux", target_os = "android"))]
mod readable;
mod release;
mod rwlock;
mod semaphore;
mod sync;
mod tenure;
mod timer;
mod token;
mod url;

pub use crate::acquire::Acquire;
pub use crate::backend::Capabilities;
pub use crate::check::{Check, Verdict};
pub use crate::claim::{Claim, ClaimId, Loss, LossKind, Mode, Owner};
pub use crate::clock::{Clock, Instant};
pub use crate::drift::Drift;
pub use crate::env::Env;
pub use crate::error::{Error, ErrorKind, Result};
pub use crate::guard::{Detached, Guard, Released, WriteGuard};
pub use crate::lane::Lane;
pub use crate::locks::{Locks, Renew, connect};
pub use crate::mutex::Mutex;
pub use crate::name::LockName;
pub use crate::random::Random;
pub use crate::rwlock::RwLock;
pub use crate::semaphore::Semaphore;
pub use crate::tenure::Standing;
pub use crate::token::Token;
pub use crate::url::holds_secret;
