//! Finding the locks that there are, by looking at keys.

use futures_util::{StreamExt, TryStreamExt, stream};

use super::keys::{claims_pattern, is_reserved, lock_of_claims_key};
use super::link::Link;
use super::reply;
use super::resp::{Command, Value};
use super::store::Store;
use crate::backend::LockState;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;

impl Store {
    /// The names under which there is something that may be a lock, in order.
    pub(super) async fn locks_named(&self, prefix: &str) -> Result<Vec<LockName>> {
        let ours = &self.settings().prefix;
        let mut names = std::collections::BTreeSet::new();
        for link in self.route.masters().await? {
            let pattern = lock_pattern(ours, prefix);
            let locks = scan(&link, &pattern, "string").await?;
            let claims = scan(&link, &claims_pattern(&pattern), "hash").await?;
            let queued = claims.iter().filter_map(|key| lock_of_claims_key(key));
            let all = locks.iter().map(String::as_str).filter(|key| !is_reserved(key)).chain(queued);
            names.extend(all.filter_map(|key| key.strip_prefix(ours.as_str())).map(str::to_owned));
        }
        Ok(names.iter().filter_map(|name| LockName::new(name).ok()).collect())
    }
}

/// How many locks are looked at at a time: one by one, ten thousand take a minute where an answer takes 6 ms.
const LOOKS_AT_ONCE: usize = 32;

/// What there is to say of these locks, in their order.
pub(super) async fn states<F>(
    names: impl IntoIterator<Item = LockName>,
    look: impl FnMut(LockName) -> F,
) -> Result<Vec<LockState>>
where
    F: Future<Output = Result<Option<LockState>>>,
{
    let states: Vec<_> = stream::iter(names).map(look).buffered(LOOKS_AT_ONCE).try_collect().await?;
    Ok(states.into_iter().flatten().collect())
}

/// What keys of locks of this prefix whose name starts with `wanted` look like.
pub(super) fn lock_pattern(prefix: &str, wanted: &str) -> String {
    format!("{}{}*", escaped(prefix), escaped(wanted))
}

/// The keys on one server that match.
pub(super) async fn scan(link: &Link, pattern: &str, kind: &str) -> Result<Vec<String>> {
    let mut cursor = "0".to_owned();
    let mut keys = Vec::new();
    loop {
        let mut command = Command::new("SCAN");
        command.arg(&cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(1000).arg("TYPE").arg(kind);
        let answer = link.call(&command).await.map_err(|failure| failure.into_error(link.server()))?;
        let [next, found] = reply::list(&answer)? else {
            return Err(Error::new(ErrorKind::Unknown, "SCAN gave no answer that makes sense"));
        };
        keys.extend(reply::list(found)?.iter().filter_map(Value::text).map(str::to_owned));
        cursor = next.text().unwrap_or("0").to_owned();
        if cursor == "0" {
            return Ok(keys);
        }
    }
}

/// Makes a text stand for itself in a pattern.
fn escaped(text: &str) -> String {
    let special = |c| matches!(c, '*' | '?' | '[' | ']' | '\\' | '^' | '-');
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn many_locks_are_looked_at_at_a_time_and_told_in_their_order() {
        let (asked, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let look = async |name: LockName| {
            most.fetch_max(asked.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            // The later, the sooner.
            let turns: usize = 100 - name.as_str().parse::<usize>().unwrap();
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
            asked.fetch_sub(1, Ordering::Relaxed);
            Ok((turns.is_multiple_of(2)).then(|| LockState { name, claims: Vec::new(), closed_until: None }))
        };
        let names: Vec<LockName> = (0..100).map(|name| LockName::new(name.to_string()).unwrap()).collect();
        let told = states(names.clone(), look).await.unwrap();
        assert!(told.iter().map(|state| &state.name).eq(names.iter().step_by(2)));
        assert_eq!(most.into_inner(), LOOKS_AT_ONCE);
    }

    #[test]
    fn patterns_stand_for_themselves() {
        assert_eq!(escaped("a*[b]\\"), "a\\*\\[b\\]\\\\");
    }
}
