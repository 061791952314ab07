//! `redis://` and its relatives: Redis 6 or later, Valkey, KeyDB: one server, behind Sentinel, or as a Cluster.
//!
//! The exclusive lock is one plain string key, so that it excludes and is excluded by every client that locks with
//! `SET key value NX PX`. What a queue, readers, permits and tokens need lives in side keys of the same hash slot.

mod check;
mod claims;
mod dial;
mod failure;
mod inbox;
mod keys;
mod lean;
mod link;
mod reply;
mod route;
mod script;
mod settings;
mod store;

use std::sync::Arc;

use crate::backend::Backend;
use crate::env::Env;
use crate::error::Result;
use crate::url::StoreUrl;

/// The store of a `redis` URL, without what every URL may say besides (`ttl=`, `require=`).
///
/// # Errors
///
/// As [`connect`](crate::connect).
pub async fn open(url: &str, env: Env) -> Result<Arc<dyn Backend>> {
    open_url(&mut StoreUrl::parse(url)?, &env).await
}

/// Opens the store of a URL, and refuses a server that could not keep its promises.
pub(crate) async fn open_url(url: &mut StoreUrl, env: &Env) -> Result<Arc<dyn Backend>> {
    let settings = settings::Settings::parse(url)?;
    // What the URL says too much is refused before anything is sent.
    url.finish()?;
    check::open(settings, env.clone()).await
}
