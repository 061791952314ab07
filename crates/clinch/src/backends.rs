//! The stores. Each knows how to take one step at a time; everything above a step is the engine's.

#[cfg(any(feature = "etcd", feature = "redis"))]
mod approach;
#[cfg(any(feature = "etcd", feature = "redis"))]
mod driven;
#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(feature = "file")]
pub mod file;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(any(feature = "etcd", feature = "redis"))]
mod pool;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(any(feature = "etcd", feature = "redis"))]
mod times;
#[cfg(any(feature = "etcd", feature = "redis"))]
mod tls;
