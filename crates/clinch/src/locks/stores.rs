//! What a URL says and which store it names. The one file that names backends, as `url/scheme.rs` alone names what their URLs begin
//! with.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::Backend;
use crate::check::Check;
use crate::drift::Drift;
use crate::env::Env;
use crate::error::Result;
use crate::url::{StoreUrl, no_store};

/// What every URL may say, and the rest of it.
pub(super) struct Asked {
    pub(super) url: StoreUrl,
    pub(super) env: Env,
    pub(super) ttl: Option<Duration>,
    pub(super) require: String,
}

impl Asked {
    pub(super) fn parse(url: &str, env: Env) -> Result<Asked> {
        let mut url = StoreUrl::parse(url)?;
        let ttl = url.take_duration("ttl")?;
        let require = url.take("require")?.unwrap_or_default();
        let env = match url.take_number("drift")? {
            Some(percent) => env.with_drift(Drift::percent(percent)?),
            None => env,
        };
        Ok(Asked { url, env, ttl, require })
    }
}

/// Opens the store of a URL.
pub(super) async fn open(url: &mut StoreUrl, env: &Env) -> Result<Arc<dyn Backend>> {
    match url.scheme.as_str() {
        #[cfg(feature = "memory")]
        "memory" => crate::backends::memory::open_url(url, env),
        #[cfg(feature = "file")]
        "file" => crate::backends::file::open_url(url, env),
        #[cfg(feature = "etcd")]
        "etcd" | "etcds" => crate::backends::etcd::open_url(url, env).await,
        #[cfg(feature = "redis")]
        scheme if matches!(scheme.split('+').next(), Some("redis" | "rediss")) => {
            crate::backends::redis::open_url(url, env).await
        }
        #[cfg(feature = "redis")]
        "redlock" | "redlocks" => crate::backends::redis::redlock::open_url(url, env).await,
        other => Err(no_store(other)),
    }
}

/// Whether to open the store of a URL would make it.
pub(super) fn is_unmade(url: &mut StoreUrl) -> Result<bool> {
    match url.scheme.as_str() {
        #[cfg(feature = "file")]
        "file" => crate::backends::file::is_unmade(url),
        _ => Ok(false),
    }
}

/// Looks at the store of a URL without opening it: what it is refused for is what is to be told.
pub(super) async fn examine(url: &mut StoreUrl, env: &Env) -> Result<Vec<Check>> {
    match url.scheme.as_str() {
        #[cfg(feature = "memory")]
        "memory" => {
            let memory = crate::backends::memory::open_url(url, env)?;
            url.finish()?;
            Ok(memory.examine().await)
        }
        #[cfg(feature = "file")]
        "file" => crate::backends::file::examine_url(url, env),
        #[cfg(feature = "etcd")]
        "etcd" | "etcds" => crate::backends::etcd::examine_url(url, env).await,
        #[cfg(feature = "redis")]
        scheme if matches!(scheme.split('+').next(), Some("redis" | "rediss")) => {
            crate::backends::redis::examine_url(url, env).await
        }
        #[cfg(feature = "redis")]
        "redlock" | "redlocks" => crate::backends::redis::redlock::examine_url(url, env).await,
        other => Err(no_store(other)),
    }
}
