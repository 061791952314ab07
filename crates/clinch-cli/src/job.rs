//! One child under a lock: what `clinch run` is made of.
//!
//! | file | is for |
//! | --- | --- |
//! | `spawn.rs` | the command, its environment, and starting it |
//! | `fork.rs` | the child that becomes the command, for which nobody waits |
//! | `in_place.rs` | the command in our place, with nobody beside it |
//! | `signals.rs` | which signals are caught, and when |
//! | `children.rs` | reaping: the child, and orphans |
//! | `kin.rs` | what a job has started in other process groups |
//! | `search.rs` | finding that, also where it is hidden |
//! | `ask.rs` | telling all of it a signal, a while at a time |
//! | `namespace.rs` | the job of a process 1, where nothing shows it |
//! | `stat.rs` | what the kernel says of a process |
//! | `watch.rs` | sees to the job where we cannot: killed, stopped, hanging |
//! | `watcher.rs` | the copy of us that does |
//! | `end.rs`, `keep.rs` | how that ends the job, or keeps its lock |
//! | `parts.rs` | the parts of a job whose wrapper was killed |
//! | `loss.rs` | when to stop a child whose lock is about to be lost: pure |
//! | `supervise.rs` | the loop that holds these together |
//! | `nesting.rs` | jobs inside jobs that hold the same lock |
//! | `door.rs` | where those enter, so that the lock is not released under them |
//! | `reentry.rs` | who may enter, and who has, seen from outside |
//! | `environment.rs` | how their environments are read |
//! | `events.rs` | the JSON lines of `--events` |
//! | `sys.rs` | the few unsafe system calls |

mod ask;
pub(crate) mod children;
pub(crate) mod door;
pub(crate) mod end;
mod environment;
pub(crate) mod events;
pub(crate) mod fork;
pub(crate) mod in_place;
mod keep;
pub(crate) mod kin;
pub(crate) mod loss;
pub(crate) mod namespace;
pub(crate) mod nesting;
mod parts;
pub(crate) mod reentry;
mod search;
pub(crate) mod signals;
pub(crate) mod spawn;
mod stat;
pub(crate) mod supervise;
pub(crate) mod sys;
pub(crate) mod watch;
mod watcher;
