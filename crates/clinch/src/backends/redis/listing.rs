//! Finding the locks that there are, by looking at keys.

use std::collections::BTreeSet;

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
        let pattern = lock_pattern(ours, prefix);
        let mut names = BTreeSet::new();
        for link in self.route.masters().await? {
            names.extend(locks_on(&link, ours, &pattern).await?);
            let claims = claims_pattern(&pattern);
            let mut pages = Pages::of(&link, &claims, "hash");
            while let Some(claims) = pages.next().await? {
                let queued =
                    claims.iter().filter_map(|key| lock_of_claims_key(key)?.strip_prefix(ours.as_str()));
                names.extend(queued.filter_map(|name| LockName::new(name).ok()));
            }
        }
        Ok(names.into_iter().collect())
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

/// The names of what may be locks on one server, by the locks' own keys. Without a prefix of ours most texts of a database are none, so it
/// is looked first how each begins.
pub(super) async fn locks_on(link: &Link, prefix: &str, pattern: &str) -> Result<Vec<LockName>> {
    let mut pages = Pages::of(link, pattern, "string");
    let mut names = Vec::new();
    while let Some(mut keys) = pages.next().await? {
        keys.retain(|key| !is_reserved(key));
        if prefix.is_empty() {
            keys = those_of_ours(link, keys).await?;
        }
        let found = keys.iter().filter_map(|key| key.strip_prefix(prefix));
        names.extend(found.filter_map(|name| LockName::new(name).ok()));
    }
    Ok(names)
}

/// Those of some keys that may be locks of ours, by one write.
async fn those_of_ours(link: &Link, mut keys: Vec<String>) -> Result<Vec<String>> {
    let look = |key: &String| {
        let mut look = Command::new("GETRANGE");
        look.arg(key).arg(0).arg(63);
        look
    };
    let looks: Vec<Command> = keys.iter().map(look).collect();
    let starts = link.call_all(&looks).await.map_err(|failure| failure.into_error(link.server()))?;
    let mut starts = starts.iter();
    keys.retain(|_| match starts.next() {
        // What cannot be read here, whoever looks closely is told why. What is no text any more is no lock.
        Some(Value::Error(error)) => !error.starts_with("WRONGTYPE"),
        start => start.is_some_and(|start| reply::may_be_ours(&reply::lossy(start))),
    });
    Ok(keys)
}

/// About how many keys a server looks at for a page.
const PAGE: u64 = 1000;

/// The keys on one server that match, page by page: of a large database not all are here at a time.
struct Pages<'a> {
    link: &'a Link,
    pattern: &'a str,
    kind: &'a str,
    /// Where to go on; none, when there are no more.
    cursor: Option<String>,
}

impl<'a> Pages<'a> {
    fn of(link: &'a Link, pattern: &'a str, kind: &'a str) -> Pages<'a> {
        Pages { link, pattern, kind, cursor: Some("0".to_owned()) }
    }

    async fn next(&mut self) -> Result<Option<Vec<String>>> {
        let Some(cursor) = self.cursor.take() else { return Ok(None) };
        let mut command = Command::new("SCAN");
        command.arg(&cursor).arg("MATCH").arg(self.pattern).arg("COUNT").arg(PAGE).arg("TYPE").arg(self.kind);
        let answer =
            self.link.call(&command).await.map_err(|failure| failure.into_error(self.link.server()))?;
        let [next, found] = reply::list(&answer)? else {
            return Err(Error::new(ErrorKind::Unknown, "SCAN gave no answer that makes sense"));
        };
        self.cursor = next.text().filter(|next| *next != "0").map(str::to_owned);
        Ok(Some(reply::list(found)?.iter().filter_map(Value::text).map(str::to_owned).collect()))
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
