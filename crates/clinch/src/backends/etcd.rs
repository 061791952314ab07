//! `etcd://`: etcd 3.4 and later.

mod claims;
mod client;
mod cuttable;
mod enter;
mod failure;
mod free;
mod keys;
mod link;
mod list;
mod record;
mod session;
mod settings;
mod store;
mod view;
mod watch;
mod wire;

use std::sync::Arc;

use crate::backend::Backend;
use crate::env::Env;
use crate::error::Result;
use crate::url::StoreUrl;

/// The store of an `etcd` URL, without what every URL may say besides (`ttl=`, `require=`).
///
/// # Errors
///
/// As [`connect`](crate::connect).
pub async fn open(url: &str, env: Env) -> Result<Arc<dyn Backend>> {
    open_url(&mut StoreUrl::parse(url)?, &env).await
}

/// Opens the store of a URL, and refuses a server or user that could not keep its promises.
pub(crate) async fn open_url(url: &mut StoreUrl, env: &Env) -> Result<Arc<dyn Backend>> {
    let settings = settings::Settings::parse(url)?;
    // What the URL says too much is refused before anything is sent.
    url.finish()?;
    let client = client::Client::new(env.clone(), settings);
    let store = store::Store::new(client);
    store.check().await?;
    Ok(Arc::new(store))
}
