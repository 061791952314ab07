//! Connecting, and what the store's URL says to the command line itself: which store it is, whether it holds a secret. The
//! library parses the URL for good; this looks only.

use std::future::Future;
use std::mem::ManuallyDrop;
use std::time::Duration;

use clinch::{Env, Error, ErrorKind, Instant, Lane, Locks};

use crate::args::Store;
use crate::exit::{Failure, Outcome};

/// Keys of a URL whose values are secrets, besides the password before the host.
const SECRET_KEYS: [&str; 4] = ["password", "pass", "token", "secret"];

/// How long the end of a verb waits for releases that are still under way.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// Pause before a store that did not answer is asked again.
pub(crate) const TRY_AGAIN: Duration = Duration::from_millis(250);

/// Runs a verb on the one thread of this process.
pub(crate) fn block_on(verb: impl Future<Output = Outcome>) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::system("cannot start", error))?;
    // Never taken apart: the process ends next, and the kernel is quicker at it.
    ManuallyDrop::new(runtime).block_on(verb)
}

/// The locks of a store, renewed by the runtime that this is called in.
pub(crate) async fn connect(store: &Store) -> Result<Locks, Failure> {
    Ok(connect_within(&store.url, &Env::host(Lane::here()?), None).await?)
}

/// As [`connect`], for somebody who waits until then at most: a store that is down, hangs, or is full just
/// now is tried again.
pub(crate) async fn connect_within(url: &str, env: &Env, until: Option<Instant>) -> clinch::Result<Locks> {
    loop {
        match Locks::connect(url, env.clone()).await {
            Err(error)
                if is_transient(&error)
                    && until.is_some_and(|until| env.clock().now() + TRY_AGAIN < until) =>
            {
                tokio::time::sleep(TRY_AGAIN).await;
            }
            connected => return connected,
        }
    }
}

/// Whether asking again may help: the store did not answer.
pub(crate) fn is_transient(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown)
}

/// Waits, bounded, for the releases in the background.
pub(crate) async fn close(locks: &Locks) -> Result<(), Failure> {
    Ok(locks.close(CLOSE_PATIENCE).await?)
}

impl Store {
    /// What tells this store from others in the environment of a job: no user, no password, no options but the prefix of
    /// the names.
    pub(crate) fn identity(&self) -> String {
        let (scheme, rest) = self.url.split_once("://").unwrap_or(("", &self.url));
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        let hosts = authority.rsplit_once('@').map_or(authority, |(_, hosts)| hosts);
        let scheme = scheme.to_ascii_lowercase();
        let path = match path.trim_end_matches('/') {
            "" if scheme == "file" && path.is_empty() => default_directory(),
            path => path.to_owned(),
        };
        let hosts = if scheme == "file" && hosts == "localhost" { "" } else { hosts };
        let prefix = query.split('&').find(|pair| pair.starts_with("prefix="));
        let prefix = prefix.map(|prefix| format!("?{prefix}")).unwrap_or_default();
        format!("{scheme}://{}{path}{prefix}", hosts.to_ascii_lowercase())
    }
}

/// Whether a URL has something that a job must not see.
pub(crate) fn holds_secret(url: &str) -> bool {
    let (rest, query) = url.split_once('?').unwrap_or((url, ""));
    let rest = rest.split_once("://").map_or(rest, |(_, rest)| rest);
    let user = rest.rsplit_once('@').map(|(user, _)| user);
    let keys = query.split('&').filter_map(|pair| pair.split_once('='));
    user.is_some_and(|user| user.contains(':')) || keys.into_iter().any(|(key, _)| SECRET_KEYS.contains(&key))
}

/// Where `file://` is.
fn default_directory() -> String {
    // A directory that cannot be told is not connected to either.
    clinch::backends::file::default_dir().map(|dir| dir.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(url: &str) -> Store {
        Store { url: url.to_owned() }
    }

    #[test]
    fn an_identity_has_no_secret_and_no_spelling() {
        let identity = |url| store(url).identity();
        assert_eq!(identity("redis://me:hunter2@H1,h2/3?ttl=5s&prefix=a:"), "redis://h1,h2/3?prefix=a:");
        assert_eq!(identity("FILE:///tmp/x/?ttl=1s"), identity("file://localhost/tmp/x"));
        assert_ne!(identity("file:///tmp/x"), identity("file:///tmp/X"));
        assert_eq!(identity("file://"), format!("file://{}", default_directory()));
    }

    #[test]
    fn urls_with_secrets_are_known() {
        for secret in ["redis://u:p@h", "redis://:p@h/0?ttl=1s", "etcd://h?password=x"] {
            assert!(holds_secret(secret), "{secret}");
        }
        for open in ["file://", "redis://u@h", "redis://h:6379/0", "file:///a:b"] {
            assert!(!holds_secret(open), "{open}");
        }
    }
}
