//! The stores. Each knows how to take one step at a time; everything above a step is the engine's.

#[cfg(feature = "file")]
pub mod file;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;
