//! The watches of claims' own keys, once these are old enough.

use std::sync::Arc;
use std::time::Duration;

use super::Claims;
use crate::backends::etcd::watch::Watcher;
use crate::claim::ClaimId;
use crate::clock::Instant;
use crate::env::Env;
use crate::error::Result;
use crate::sync::lock;

/// How old a claim is before its own key is watched. Most are gone by then, and cost nothing; the end of a lease is told
/// from the first moment on, by the session's key.
const WATCHED_AFTER: Duration = Duration::from_millis(250);

impl Claims {
    /// Has the key of a claim watched, if that lives for long enough.
    pub(in crate::backends::etcd) fn watch_later(
        self: &Arc<Claims>,
        id: ClaimId,
        env: &Env,
        watcher: &Arc<Watcher>,
    ) -> Result<()> {
        let mut table = lock(&self.table);
        table.young.push_back((env.now() + WATCHED_AFTER, id));
        if let Some(watching) = table.watching.begin() {
            let (claims, world, watcher) = (self.clone(), env.clone(), watcher.clone());
            env.lane()
                .run(move || watch_young(claims.clone(), world.clone(), watcher.clone(), watching.clone()))?;
        }
        Ok(())
    }
}

/// Watches the keys of claims that have become old enough, until there are no more young ones.
async fn watch_young(claims: Arc<Claims>, env: Env, watcher: Arc<Watcher>, _watching: Arc<()>) {
    loop {
        let due = {
            let mut table = lock(&claims.table);
            let Some((due, _)) = table.young.front() else {
                table.watching.end();
                return;
            };
            *due
        };
        env.sleep_until(due).await;
        let now = env.now();
        loop {
            let mut table = lock(&claims.table);
            // Those that are gone already go along, so that they need no wake of their own.
            let over = |(due, id): &&(Instant, ClaimId)| *due <= now || table.entries.get(*id).is_none();
            let Some(id) = table.young.front().filter(over).map(|(_, id)| *id) else {
                break;
            };
            table.young.pop_front();
            let Some(entry) = table.entries.get(id) else { continue };
            let (Some(created), None, None) = (entry.known.created, &entry.guard, &entry.known.lost) else {
                continue;
            };
            let key = entry.known.key.clone();
            drop(table);
            let known = Arc::downgrade(&claims);
            let gone = move || {
                if let Some(claims) = known.upgrade() {
                    claims.deleted(id, created);
                }
            };
            // Without a background thread, renewals find out.
            let Ok(guard) = watcher.guard(key, created, gone) else { continue };
            let mut table = lock(&claims.table);
            let mut guard = Some(guard);
            table.entries.change(id, |entry| std::mem::swap(&mut entry.guard, &mut guard));
            drop(table);
            // Ends a watch, which takes other locks.
            drop(guard);
        }
    }
}
