//! Watching what is held: a lock that is taken away by force is told at once, not at its next renewal.
//!
//! The server tells of the next change of a key that was read (client tracking). What was told of is read again, many keys at a time,
//! and what such a read misses is asked for with the strongest read before its holder is told. Locks that are held shortly are
//! never watched and cost nothing.
//!
//! A renewal is a change, too. So what is watched is renewed on the connection that watches it, which is not told of what it does itself;
//! the server forgets the key all the same, so each renewal is followed by a read.
//!
//! Exclusive locks only: the key of a lock that has readers or permits changes with each of them.

mod held;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use self::held::{AGAIN, BATCH};
pub(super) use self::held::{Held, Watch};
use super::claims::Claims;
use super::dial::Dialer;
use super::keys::{Home, lock_key, slot_of};
use super::reply;
use super::resp::{Command, Value};
use super::route::Route;
use super::script;
use super::store::Store;
use crate::claim::{Claim, ClaimId, Loss, LossKind};
use crate::error::Result;
use crate::lane::caught;
use crate::name::LockName;

/// After how long the next look need not wait for one.
const LONG: Duration = Duration::from_millis(100);

impl Store {
    /// Waits until the server tells that locks were taken away, and keeps those watched that are held.
    pub(super) async fn lost_leases(&self) -> Vec<(ClaimId, Loss)> {
        let held = &self.claims.held;
        loop {
            self.look_if_due();
            let gone = held.gone();
            if !gone.is_empty() {
                return gone.into_iter().map(|id| (id, taken_away())).collect();
            }
            let next = async {
                match held.next() {
                    Some(next) => self.dialer.env.sleep_until(next).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = held.news.notified() => {}
                () = next => {}
            }
        }
    }

    /// Has what is due be read in the background.
    fn look_if_due(&self) {
        let (held, env) = (&self.claims.held, &self.dialer.env);
        let Some(due) = held.begin(env.now()) else { return };
        let (route, claims, dialer) = (self.route.clone(), self.claims.clone(), self.dialer.clone());
        let watches: Arc<[Watch]> = due.into();
        let due = watches.clone();
        let looks = env.lane().run(move || look(route.clone(), claims.clone(), dialer.clone(), due.clone()));
        if looks.is_err() {
            held.unread(each(&watches), env.now() + AGAIN);
            held.done();
        }
    }

    /// Renews locks by this command on the inbox that tells of them, which has them told of on. `None`: not there, so they are to be renewed
    /// where all other steps go.
    pub(super) async fn renew_watched(
        &self,
        slot: u16,
        claims: &[&Claim],
        renewal: &Command,
    ) -> Option<Value> {
        if self.settings().durability.asks_for_more() {
            // What has to have copies has a connection of its own.
            return None;
        }
        let inbox = self.claims.held.watched_on(claims)?;
        let inbox = self.route.inbox_of_steps(slot, inbox).await?;
        let unanswered = self.claims.held.renewing(claims);
        let (renewed, read) = inbox.renew(renewal, &self.settings().prefix, claims).await.ok()?;
        if let Some(held) = read.ok().flatten() {
            unanswered.read(&held);
        }
        Some(renewed)
    }
}

/// In words of its own: that it was told, and not found by a renewal, is what tests look for.
fn taken_away() -> Loss {
    Loss::new(LossKind::Deleted, "the server told that the claim was taken away")
}

fn each(watches: &[Watch]) -> impl Iterator<Item = (ClaimId, &LockName)> {
    watches.iter().map(|(id, name)| (*id, name))
}

/// Reads these, and sees to it that the server tells of their next change.
async fn look(route: Arc<Route>, claims: Arc<Claims>, dialer: Arc<Dialer>, due: Arc<[Watch]>) {
    let (held, prefix) = (&claims.held, &dialer.settings.prefix);
    let mut slots: BTreeMap<u16, Vec<Watch>> = BTreeMap::new();
    for watch in &*due {
        // Keys of several slots go into one command only where there are no slots.
        let slot = if route.has_slots() { slot_of(&lock_key(prefix, &watch.1)) } else { 0 };
        slots.entry(slot).or_default().push(watch.clone());
    }
    let batches = slots.iter().flat_map(|(slot, watches)| watches.chunks(BATCH).map(|batch| (*slot, batch)));
    let reads = batches.map(async |(slot, batch)| {
        let missed = match caught(read(&route, held, slot, prefix, batch)).await {
            Some(Ok(Some((inbox, answers)))) => held.read(batch, inbox, &answers),
            Some(Ok(None)) => held.untold(batch),
            Some(Err(_)) | None => return held.unread(each(batch), dialer.env.now() + AGAIN),
        };
        if missed.is_empty() {
            return;
        }
        match caught(ask(&route, slot, prefix, &missed)).await {
            Some(Ok(answers)) => held.answered(&missed, &answers, dialer.env.now()),
            // The next renewal will tell.
            Some(Err(_)) | None => held.unread(each(&missed), dialer.env.now() + AGAIN),
        }
    });
    let mut reads = pin!(join_all(reads));
    tokio::select! {
        biased;
        _ = &mut reads => held.done(),
        // One server that hangs keeps back no look at another.
        () = dialer.env.sleep_until(dialer.env.now() + LONG) => {
            held.done();
            reads.await;
        }
    }
}

async fn read(
    route: &Route,
    held: &Held,
    slot: u16,
    prefix: &str,
    batch: &[Watch],
) -> Result<Option<(u64, Vec<bool>)>> {
    let mut moved = false;
    loop {
        let (inbox, node) = route.watcher(slot).await?;
        held.reading(batch, inbox.id);
        let failure = match inbox.read(prefix, batch).await {
            Ok(held) => return Ok(held.map(|held| (inbox.id, held))),
            Err(failure) => failure,
        };
        // The server that has the slot now is asked at once, unless the two point at each other.
        if moved || !route.has_moved(&failure, &node) {
            return Err(failure.into_error(inbox.link.server()));
        }
        moved = true;
    }
}

/// Asks the server that has the locks now whether they are their claims'.
async fn ask(route: &Route, slot: u16, prefix: &str, missed: &[Watch]) -> Result<Vec<bool>> {
    let home = Home::of(slot);
    let locks = missed.iter().map(|(_, name)| [prefix, name.as_str(), ""]);
    let keys: Vec<_> = std::iter::once(home.nobodys()).chain(locks).collect();
    let mut command = script::READ_HELD.on(keys);
    for (id, _) in missed {
        command.arg(*id);
    }
    let answer = route.run(slot, &script::READ_HELD, &command).await?;
    let held = reply::list(&answer)?.iter().map(|held| Ok(reply::number(held)? == 1));
    held.collect()
}
