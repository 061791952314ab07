//! Real servers for tests: started on free loopback ports in temporary directories, and gone with the test.
//!
//! Every server has a supervisor, a shell that waits for the end of a pipe from the test process. So a server ends
//! when its handle is dropped, and also when the test process panics, is killed, or keeps the handle in a `static`.
//! [`Proxy`] stands between a client and a server and breaks the connection in all the ways a network can.
//!
//! Everything here blocks and panics: what a test needs and cannot get is a failure of the test, never a skip.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

mod clock;
mod cluster;
mod etcd;
mod port;
mod process;
mod proxy;
mod redis;
mod resp;
mod sentinel;
mod tls;
pub mod tools;
mod voucher;
mod wait;

pub use cluster::{Cluster, Migration, slot_of};
pub use etcd::{Etcd, EtcdBuilder, EtcdCluster, etcd_3_5};
pub use port::Port;
pub use process::{Process, temp_dir};
pub use proxy::{Direction, Proxy};
pub use redis::{Redis, RedisBuilder};
pub use resp::{Reply, Resp};
pub use sentinel::Sentinel;
pub use tls::Certificates;
pub use voucher::vouch;
pub use wait::{PATIENCE, until, until_some};
