//! What this client knows of its claims, and the losses that are still to be told.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::free::Stand;
use super::moves::Moves;
use super::session::Session;
use super::slots::{Deleting, Slots};
use super::view::View;
use super::watch::{Subscription, Watcher};
use crate::claim::{ClaimId, Loss, LossKind};
use crate::clock::Instant;
use crate::drift::Drift;
use crate::env::Env;
use crate::error::Result;
use crate::sync::lock;

/// How old a claim is before its own key is watched. Most are gone by then, and cost nothing; the end of a lease is told
/// from the first moment on, by the session's key.
const WATCHED_AFTER: Duration = Duration::from_millis(250);

/// A claim whose key was made: its id, the key, and at which revision that was created.
pub(super) type Made = (ClaimId, Arc<[u8]>, i64);

/// The claims of one client, and their losses.
#[derive(Default)]
pub(super) struct Claims {
    table: Mutex<Table>,
    told: Notify,
}

#[derive(Default)]
struct Table {
    entries: HashMap<ClaimId, Entry>,
    slots: Slots,
    losses: Vec<(ClaimId, Loss)>,
    /// Claims whose own key is not watched yet, oldest first.
    young: VecDeque<(Instant, ClaimId)>,
    /// Whether the task runs that watches them.
    watching: bool,
    /// Looks at claims whose waiters are silent.
    looks: u64,
}

/// One claim.
struct Entry {
    known: Known,
    /// Tells of the key's end.
    guard: Option<Subscription>,
    view: Option<Arc<View>>,
    /// A release of it failed: from when on its key shall be gone, whoever sees to that.
    leaving: Option<Instant>,
    /// Since when its waiter is at steps of which none has ended well.
    stepping: Option<Instant>,
    /// Whether its waiter was given the lock.
    taken: bool,
    /// The last revision at which its key was read and was as it should be.
    seen: i64,
    /// Which of the looks at claims whose waiters are silent was the last at this one.
    looked_at: u64,
}

/// What is known of a claim.
#[derive(Clone)]
pub(super) struct Known {
    /// The session whose lease carries it once it is granted, and whose fence its steps stand behind.
    pub(super) session: Arc<Session>,
    /// The session whose lease carries it while it waits, if that is another.
    pub(super) place: Option<Arc<Session>>,
    pub(super) key: Arc<[u8]>,
    /// At which revision its key was created: its place in the queue, and its token.
    pub(super) created: Option<i64>,
    /// The sessions of steps that were sent and whose answers did not come: such a step may still reach the server, as long
    /// as the lease lives that it hangs the key on, and the one whose fence it stands behind, and that is not raised.
    pub(super) doubts: Vec<Arc<Session>>,
    pub(super) moves: Moves,
    pub(super) lost: Option<Loss>,
    /// Whether a delete of its key was sent: its turn goes on to the next, and its next step makes it anew.
    pub(super) given_up: bool,
}

impl Known {
    /// Whether it can still be granted. What has no key yet cannot get one without the lease that it is named after.
    pub(super) fn is_good(&self) -> bool {
        let can_be_made = self.created.is_some() || !self.session.is_over();
        self.lost.is_none() && !self.given_up && !self.carrier().is_over() && can_be_made
    }

    /// The session whose lease its key hangs on, as far as is known.
    pub(super) fn carrier(&self) -> &Arc<Session> {
        self.place.as_ref().unwrap_or(&self.session)
    }

    /// The sessions whose leases its key is to hang on, or may have been moved to.
    fn carriers(&self) -> impl Iterator<Item = &Arc<Session>> {
        [&self.session, self.carrier()].into_iter().chain(self.moves.targets())
    }

    /// How its key was last seen to stand.
    pub(super) fn stand(&self) -> Option<Stand> {
        let lease = self.moves.astray().unwrap_or(self.carrier().lease);
        self.created.map(|created| Stand { created, lease })
    }

    /// How much is surely left of the lease that its key hangs on, whichever of those it may hang on that is.
    pub(super) fn left(&self, now: Instant, drift: Drift) -> Duration {
        let left = self.moves.targets().map(|to| to.left(now, drift));
        left.fold(self.carrier().left(now, drift), Duration::min)
    }

    /// The leases that were made for this claim alone.
    pub(super) fn own_leases(&self) -> impl Iterator<Item = &Arc<Session>> {
        [&self.session].into_iter().chain(self.moves.targets()).filter(|session| session.isolated)
    }

    /// Takes in on which lease its key was seen; gives those that it has left.
    fn seen_on(&mut self, lease: i64, revision: i64) -> Vec<Arc<Session>> {
        let ours = self.carriers().find(|session| session.lease == lease).cloned();
        let Some(mut left) = self.moves.see(lease, revision, ours.is_some()) else { return Vec::new() };
        if let Some(ours) = ours.filter(|ours| ours.lease != self.carrier().lease) {
            left.push(std::mem::replace(&mut self.session, ours));
            self.place = None;
        }
        left.retain(|session| session.isolated && !self.may_hang_on(session.lease));
        left
    }

    /// Whether a step of it may still reach the server.
    pub(super) fn in_doubt(&self) -> bool {
        !self.doubts.iter().all(|session| session.is_over())
    }

    /// Notes that a step may still come that rests on this session.
    fn doubt(&mut self, session: Arc<Session>) {
        if !self.doubts.iter().any(|known| Arc::ptr_eq(known, &session)) {
            self.doubts.push(session);
        }
    }

    /// Whether its key may hang on this lease: a step whose answer did not come may have moved it.
    fn may_hang_on(&self, lease: i64) -> bool {
        self.carriers().chain(&self.doubts).any(|session| session.lease == lease)
    }

    /// Whether no lease is left that its key could hang on.
    fn is_over(&self) -> bool {
        let is_over = self.session.is_over() && self.carrier().is_over() && !self.in_doubt();
        is_over && self.moves.targets().next().is_none()
    }
}

impl Claims {
    pub(super) fn get(&self, id: ClaimId) -> Option<Known> {
        lock(&self.table).entries.get(&id).map(|entry| entry.known.clone())
    }

    /// Finds a key for a claim that is about to be made. One that is made anew on the same lease keeps its own, unless a
    /// delete of that is on its way. `None`: its former key may still stand, and has to be ended first.
    pub(super) fn begin(
        &self,
        id: ClaimId,
        session: Arc<Session>,
        queue: &[u8],
        now: Instant,
        is_ended: bool,
    ) -> Option<Known> {
        let mut table = lock(&self.table);
        let former = table.entries.get(&id).map(|old| &old.known);
        let is_settled = |old: &&Known| table.slots.is_settled(&old.key);
        let same = former.filter(|old| old.session.lease == session.lease).filter(is_settled);
        let same = same.map(|old| (old.key.clone(), old.doubts.clone(), old.moves.clone()));
        if same.is_none() && !is_ended && former.is_some_and(|old| !old.is_over()) {
            return None;
        }
        let old = table.entries.remove(&id);
        let anew = || {
            old.iter().for_each(|old| table.slots.leave(&old.known.key));
            (table.slots.take(queue, &session), Vec::new(), Moves::default())
        };
        let (key, doubts, moves) = same.unwrap_or_else(anew);
        // Nobody is to hear of what was lost before.
        table.losses.retain(|(lost, _)| *lost != id);
        let known =
            Known { session, place: None, key, created: None, doubts, moves, lost: None, given_up: false };
        let stepping = old.as_ref().and_then(|old| old.stepping).or(Some(now));
        let entry = Entry {
            known: known.clone(),
            guard: None,
            view: None,
            leaving: None,
            stepping,
            taken: false,
            seen: 0,
            looked_at: 0,
        };
        table.entries.insert(id, entry);
        drop(table);
        // Ends watches, which takes other locks.
        drop(old);
        Some(known)
    }

    /// Has a claim take another key: something that is not ours stands under this one.
    pub(super) fn move_over(&self, id: ClaimId, queue: &[u8]) {
        let mut table = lock(&self.table);
        let Some(known) = table.entries.get(&id).map(|entry| entry.known.clone()) else { return };
        let key = table.slots.take(queue, &known.session);
        table.slots.spend(&known.key);
        if let Some(entry) = table.entries.get_mut(&id) {
            entry.known.key = key;
        }
    }

    /// Notes that the answer did not come of a step behind the fence of this session, which may hang the key on its lease or
    /// on that of the places.
    pub(super) fn doubt(&self, id: ClaimId, session: &Arc<Session>) {
        if let Some(Entry { known, .. }) = lock(&self.table).entries.get_mut(&id) {
            known.doubt(session.clone());
            known.place.clone().into_iter().for_each(|place| known.doubt(place));
        }
    }

    /// Notes that a delete of a claim's key goes out, whatever stands there when it arrives. `None`: the claim is gone, and
    /// its key perhaps another's.
    pub(super) fn deleting(self: &Arc<Claims>, id: ClaimId) -> Option<Deleting> {
        lock(&self.table).deleting(self, id)
    }

    /// Notes that a release has begun, and that the claim's key shall be gone from this moment on, if that release does not end.
    pub(super) fn leaves(&self, id: ClaimId, from: Instant) {
        if let Some(entry) = lock(&self.table).entries.get_mut(&id) {
            entry.leaving = Some(from);
        }
    }

    /// Notes that a release failed, and that the claim's key shall be gone from this moment on.
    pub(super) fn leave(&self, id: ClaimId, from: Instant) {
        let mut table = lock(&self.table);
        let gone = match table.entries.get_mut(&id) {
            Some(entry) if !entry.known.is_over() => {
                entry.leaving = Some(from);
                None
            }
            // It is gone with its lease.
            _ => table.take(id),
        };
        drop(table);
        drop(gone);
    }

    /// Claims on a lease whose release failed and that shall be gone by now.
    pub(super) fn leaving(&self, lease: i64, now: Instant, count: usize) -> Vec<(ClaimId, Known)> {
        lock(&self.table).leaving(lease, now, count)
    }

    /// The same, of which deletes go out now.
    pub(super) fn sweeping(
        self: &Arc<Claims>,
        lease: i64,
        now: Instant,
        count: usize,
    ) -> Vec<(ClaimId, Deleting)> {
        let mut table = lock(&self.table);
        let leaving = table.leaving(lease, now, count);
        leaving.into_iter().filter_map(|(id, _)| Some((id, table.deleting(self, id)?))).collect()
    }

    /// Forgets claims whose keys were deleted, unless a step of them may still come.
    pub(super) fn swept(&self, ids: impl Iterator<Item = ClaimId>) {
        let mut table = lock(&self.table);
        let mut gone = Vec::new();
        for id in ids {
            if table.entries.get(&id).is_some_and(|entry| !entry.known.in_doubt()) {
                gone.extend(table.take(id));
            }
        }
        drop(table);
        // Ends watches, which takes other locks.
        drop(gone);
    }

    /// Notes that no step of these claims can come any more that rests on this session.
    pub(super) fn fenced(&self, ids: impl Iterator<Item = ClaimId>, session: &Arc<Session>) {
        let mut table = lock(&self.table);
        for id in ids {
            if let Some(entry) = table.entries.get_mut(&id) {
                entry.known.doubts.retain(|doubted| !Arc::ptr_eq(doubted, session));
            }
        }
    }

    /// The leases of all claims.
    pub(super) fn sessions(&self) -> Vec<Arc<Session>> {
        let table = lock(&self.table);
        table.entries.values().flat_map(|entry| entry.known.carriers()).cloned().collect()
    }

    /// Whether any claim hangs on this lease, or is to.
    pub(super) fn hang_on(&self, lease: i64) -> bool {
        lock(&self.table).entries.values().any(|entry| entry.known.may_hang_on(lease))
    }

    /// Notes that a claim's key is there.
    pub(super) fn made(&self, id: ClaimId, created: i64) {
        if let Some(entry) = lock(&self.table).entries.get_mut(&id) {
            entry.known.created = Some(created);
            entry.seen = created;
        }
    }

    /// Has the key of a claim watched, if that lives for long enough.
    pub(super) fn watch_later(
        self: &Arc<Claims>,
        id: ClaimId,
        env: &Env,
        watcher: &Arc<Watcher>,
    ) -> Result<()> {
        let mut table = lock(&self.table);
        table.young.push_back((env.now() + WATCHED_AFTER, id));
        if !table.watching {
            let (claims, world, watcher) = (self.clone(), env.clone(), watcher.clone());
            env.lane().run(move || watch_young(claims.clone(), world.clone(), watcher.clone()))?;
            table.watching = true;
        }
        Ok(())
    }

    /// Notes that a claim's key was seen to stand like that, and gives the leases back that were made for it and that it has left.
    #[must_use]
    pub(super) fn seen_on(&self, id: ClaimId, stand: Stand, revision: i64) -> Vec<Arc<Session>> {
        let mut table = lock(&self.table);
        let known = table.entries.get_mut(&id).map(|entry| &mut entry.known);
        let known = known.filter(|known| known.created == Some(stand.created));
        known.map(|known| known.seen_on(stand.lease, revision)).unwrap_or_default()
    }

    /// Notes that a claim's key is about to be moved to this lease if it stands like that; false: it does not any more.
    pub(super) fn moving(&self, id: ClaimId, stand: Stand, to: &Arc<Session>) -> bool {
        let mut table = lock(&self.table);
        let known = table.entries.get_mut(&id).map(|entry| &mut entry.known);
        let known = known.filter(|known| known.stand() == Some(stand) && known.lost.is_none());
        known.map(|known| known.moves.begin(stand.lease, to)).is_some()
    }

    /// Notes that a move of a claim's key has come to nothing, and gives its lease back if it was made for this claim alone.
    #[must_use]
    pub(super) fn not_moved(&self, id: ClaimId, from: i64, to: &Arc<Session>) -> Option<Arc<Session>> {
        let mut table = lock(&self.table);
        let known = &mut table.entries.get_mut(&id)?.known;
        known.moves.fail(from, to);
        (to.isolated && !known.may_hang_on(to.lease)).then(|| to.clone())
    }

    /// Notes that a claim waits on a lease of places.
    pub(super) fn placed(&self, id: ClaimId, place: Arc<Session>) {
        if let Some(entry) = lock(&self.table).entries.get_mut(&id) {
            entry.known.place = (!Arc::ptr_eq(&place, &entry.known.session)).then_some(place);
        }
    }

    /// Notes that a claim's waiter begins a step at this moment, or is done with it.
    pub(super) fn steps(&self, id: ClaimId, since: Option<Instant>) {
        if let Some(entry) = lock(&self.table).entries.get_mut(&id) {
            entry.stepping = since.map(|since| entry.stepping.unwrap_or(since));
            // One that is asked for again was not used.
            entry.taken &= since.is_none();
        }
    }

    /// Claims on this lease that have not taken in since `before` what they were told, as far as that can be seen: their
    /// steps do not end, or events wait for them. Others each time, if there are more; those first that came first.
    pub(super) fn unheard(&self, lease: i64, before: Instant, count: usize) -> Vec<ClaimId> {
        let mut table = lock(&self.table);
        let is_unheard = |entry: &Entry| {
            let unread = entry.view.as_ref().and_then(|view| view.unread_since());
            let since = entry.stepping.into_iter().chain(unread).min();
            // The answer that tells on which it hangs may be the one that was not heard.
            entry.known.may_hang_on(lease) && !entry.taken && since.is_some_and(|since| since <= before)
        };
        let unheard = table.entries.iter().filter(|(_, entry)| is_unheard(entry));
        let mut unheard: Vec<_> =
            unheard.map(|(id, entry)| (entry.looked_at, entry.known.created, *id)).collect();
        unheard.sort_unstable();
        unheard.truncate(count);
        table.looks += 1;
        let looked_at = table.looks;
        for (.., id) in &unheard {
            table.entries.entry(*id).and_modify(|entry| entry.looked_at = looked_at);
        }
        unheard.into_iter().map(|(.., id)| id).collect()
    }

    /// Gives the lock to a claim's waiter, unless the claim is lost, or its turn went on to the next.
    pub(super) fn take_grant(&self, id: ClaimId) -> bool {
        let mut table = lock(&self.table);
        let entry = table.entries.get_mut(&id).filter(|entry| entry.known.is_good());
        entry.map(|entry| entry.taken = true).is_some()
    }

    /// Has the turn of a claim go on to the next by a delete of this key of it, unless its waiter has taken it.
    pub(super) fn pass_on(self: &Arc<Claims>, id: ClaimId, key: &[u8]) -> Option<Deleting> {
        let mut table = lock(&self.table);
        table.entries.get(&id).filter(|entry| !entry.taken && entry.known.key[..] == *key)?;
        table.deleting(self, id)
    }

    /// What a waiting claim has ahead of it.
    pub(super) fn view(&self, id: ClaimId) -> Option<Arc<View>> {
        lock(&self.table).entries.get(&id)?.view.clone()
    }

    pub(super) fn set_view(&self, id: ClaimId, view: Option<Arc<View>>) {
        let old = match lock(&self.table).entries.get_mut(&id) {
            Some(entry) => std::mem::replace(&mut entry.view, view),
            None => view,
        };
        // Ends a watch, which takes other locks.
        drop(old);
    }

    /// Forgets a claim that will take no more steps here, if its lease ends by itself. One on a lease that others keep is still
    /// to be swept.
    pub(super) fn forget_isolated(&self, id: ClaimId) {
        if self.get(id).is_some_and(|known| known.carrier().isolated) {
            self.forget(id);
        }
    }

    /// Forgets a claim that is gone.
    pub(super) fn forget(&self, id: ClaimId) {
        let entry = lock(&self.table).take(id);
        drop(entry);
    }

    /// The keys of some claims that hang on a lease, others each round.
    pub(super) fn some_of(&self, lease: i64, count: usize, round: usize) -> Vec<Made> {
        let table = lock(&self.table);
        let all = table.entries.len().max(1);
        let of_lease = table.entries.iter().cycle().skip(round.wrapping_mul(count) % all).take(all);
        let made =
            of_lease.filter(|(_, entry)| entry.known.carrier().lease == lease && entry.known.lost.is_none());
        let made = made.filter_map(|(id, entry)| Some((*id, entry.known.key.clone(), entry.known.created?)));
        made.take(count).collect()
    }

    /// The claims that may hang on a lease, and whose keys were not seen at this revision or later.
    pub(super) fn unread(&self, lease: i64, revision: i64) -> Vec<Made> {
        let table = lock(&self.table);
        let is_unread = |entry: &Entry| {
            entry.seen < revision && entry.known.lost.is_none() && entry.known.may_hang_on(lease)
        };
        let unread = table.entries.iter().filter(|(_, entry)| is_unread(entry));
        unread.filter_map(|(id, entry)| Some((*id, entry.known.key.clone(), entry.known.created?))).collect()
    }

    /// Notes that a claim's key was as it should be at this revision.
    pub(super) fn was_there(&self, id: ClaimId, created: i64, revision: i64) {
        if let Some(entry) = lock(&self.table).entries.get_mut(&id)
            && entry.known.created == Some(created)
        {
            entry.seen = entry.seen.max(revision);
        }
    }

    /// Notes that a delete of a key was answered, or will never be.
    pub(super) fn key_deleted(&self, key: &[u8], is_answered: bool) {
        lock(&self.table).slots.deleted(key, is_answered);
    }

    /// Notes that a claim's key is gone, unless it was made anew since. It may be gone with its lease: etcd tells of what
    /// was deleted at once in any order, and nobody waits here to learn which it was.
    pub(super) fn deleted(&self, id: ClaimId, created: i64) {
        let mut table = lock(&self.table);
        let loss =
            || Loss::new(LossKind::Deleted, "the claim's key is gone from etcd, alone or with its lease");
        if table.entries.get(&id).is_some_and(|entry| entry.known.created == Some(created)) {
            table.lose(id, loss());
            self.told.notify_one();
        }
    }

    /// Notes that a lease is gone, with all claims that hang on it.
    pub(super) fn session_ended(&self, lease: i64) {
        let mut table = lock(&self.table);
        let hang = |entry: &Entry| entry.known.may_hang_on(lease);
        let ids: Vec<ClaimId> =
            table.entries.iter().filter(|(_, entry)| hang(entry)).map(|(id, _)| *id).collect();
        let mut gone = Vec::new();
        for id in ids {
            let Some(entry) = table.entries.get(&id) else { continue };
            let known = &entry.known;
            // A move may have taken it elsewhere: then the watch on its key tells if not, or its next renewal.
            let is_lost = known.carrier().is_over() && known.moves.targets().next().is_none();
            // Its release was given up: nobody comes for it any more.
            let is_gone = entry.leaving.is_some() && known.is_over();
            if is_lost {
                table.lose(id, session_ended());
            }
            if is_gone {
                gone.extend(table.take(id));
            }
        }
        table.slots.forget_spent(lease);
        drop(table);
        self.told.notify_one();
        // Ends watches, which takes other locks.
        drop(gone);
    }

    /// Waits for losses, and takes them.
    pub(super) async fn losses(&self) -> Vec<(ClaimId, Loss)> {
        loop {
            let losses = std::mem::take(&mut lock(&self.table).losses);
            if !losses.is_empty() {
                return losses;
            }
            self.told.notified().await;
        }
    }
}

impl Table {
    fn take(&mut self, id: ClaimId) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        self.slots.leave(&entry.known.key);
        Some(entry)
    }

    fn leaving(&self, lease: i64, now: Instant, count: usize) -> Vec<(ClaimId, Known)> {
        let due =
            |entry: &Entry| entry.known.may_hang_on(lease) && entry.leaving.is_some_and(|from| from <= now);
        let leaving = self.entries.iter().filter(|(_, entry)| due(entry));
        leaving.map(|(id, entry)| (*id, entry.known.clone())).take(count).collect()
    }

    fn deleting(&mut self, claims: &Arc<Claims>, id: ClaimId) -> Option<Deleting> {
        let known = &mut self.entries.get_mut(&id)?.known;
        known.given_up = true;
        let key = known.key.clone();
        self.slots.delete(&key)?;
        Some(Deleting::new(claims.clone(), key))
    }

    fn lose(&mut self, id: ClaimId, loss: Loss) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        if entry.known.lost.is_none() {
            entry.known.lost = Some(loss.clone());
            entry.view.iter().for_each(|view| view.woken.notify_one());
            self.losses.push((id, loss));
        }
    }
}

/// What the end of a lease means for its claims.
pub(super) fn session_ended() -> Loss {
    Loss::new(LossKind::SessionEnded, "the lease of etcd that carried it was revoked or ran out")
}

/// Watches the keys of claims that have become old enough, until there are no more young ones.
async fn watch_young(claims: Arc<Claims>, env: Env, watcher: Arc<Watcher>) {
    loop {
        let due = {
            let mut table = lock(&claims.table);
            let Some((due, _)) = table.young.front() else {
                table.watching = false;
                return;
            };
            *due
        };
        env.sleep_until(due).await;
        let now = env.now();
        loop {
            let mut table = lock(&claims.table);
            // Those that are gone already go along, so that they need no wake of their own.
            let over = |(due, id): &&(Instant, ClaimId)| *due <= now || !table.entries.contains_key(id);
            let Some(id) = table.young.front().filter(over).map(|(_, id)| *id) else {
                break;
            };
            table.young.pop_front();
            let Some(entry) = table.entries.get(&id) else { continue };
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
            let unused = match table.entries.get_mut(&id) {
                Some(entry) => entry.guard.replace(guard),
                None => Some(guard),
            };
            drop(table);
            drop(unused);
        }
    }
}
