//! Distributed locks with one set of promises on every store.
//!
//! (tour follows)

mod acquire;
pub mod backend;
pub mod backends;
mod claim;
mod clock;
mod engine;
mod env;
mod error;
mod guard;
mod keeper;
mod lane;
mod lease;
mod locks;
mod mutex;
mod name;
pub mod net;
mod queue;
mod random;
#[cfg(any(target_os = "linux", target_os = "android"))]
mod readable;
mod release;
mod rwlock;
mod semaphore;
mod sync;
mod timer;
mod token;
mod url;

pub use crate::acquire::Acquire;
pub use crate::backend::Capabilities;
pub use crate::claim::{Claim, ClaimId, Loss, LossKind, Mode, Owner};
pub use crate::clock::{Clock, Instant};
pub use crate::env::Env;
pub use crate::error::{Error, ErrorKind, Result};
pub use crate::guard::{Detached, Guard, Released, WriteGuard};
pub use crate::keeper::Standing;
pub use crate::lane::Lane;
pub use crate::locks::{Locks, Renew, connect};
pub use crate::mutex::Mutex;
pub use crate::name::LockName;
pub use crate::random::Random;
pub use crate::rwlock::RwLock;
pub use crate::semaphore::Semaphore;
pub use crate::token::Token;
