//! What this client knows of its claims, and the losses that are still to be told.

mod entries;
mod known;
mod leaving;
#[cfg(test)]
pub(super) mod looks;
mod silent;
mod young;

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::free::Stand;
use super::moves::Moves;
use super::session::Session;
use super::slots::{Deleting, STANDS_FOR, Slots};
use super::step::Step;
use super::view::View;
use crate::claim::{ClaimId, Loss, LossKind};
use crate::clock::Instant;
use crate::sync::{AtWork, lock};

use entries::{Entries, Entry};
pub(super) use known::Known;
pub(super) use leaving::Sweeping;

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
    entries: Entries,
    slots: Slots,
    losses: Vec<(ClaimId, Loss)>,
    /// Claims whose keys were deleted after a release of them had failed, until that is asked for again.
    swept: HashSet<ClaimId>,
    /// Claims whose own key is not watched yet, oldest first.
    young: VecDeque<(Instant, ClaimId)>,
    /// Whether the task runs that watches them.
    watching: AtWork,
    /// Looks at claims whose waiters are silent.
    looks: u64,
}

impl Claims {
    pub(super) fn get(&self, id: ClaimId) -> Option<Known> {
        lock(&self.table).entries.get(id).map(|entry| entry.known.clone())
    }

    /// Reads what is known of a claim, at no cost of a copy.
    pub(super) fn with<T>(&self, id: ClaimId, read: impl FnOnce(&Known) -> T) -> Option<T> {
        lock(&self.table).entries.get(id).map(|entry| read(&entry.known))
    }

    /// Reads which session carries a claim, as far as is known.
    pub(super) fn with_carrier<T>(&self, id: ClaimId, read: impl FnOnce(&Arc<Session>) -> T) -> Option<T> {
        lock(&self.table).entries.carrier(id).map(read)
    }

    /// Whether a claim's key hangs on this lease for sure, and the claim is not lost.
    pub(super) fn rests_on(&self, id: ClaimId, session: &Arc<Session>) -> bool {
        lock(&self.table).entries.rests_on(id, session)
    }

    /// Finds a key for a claim that is about to be made. One that is made anew on the same lease keeps its own, unless a
    /// delete of that is on its way. `None`: its former key may still stand, and has to be ended first.
    pub(super) fn begin(
        &self,
        id: ClaimId,
        session: Arc<Session>,
        queue: &[u8],
        step: &Arc<Step>,
        is_ended: bool,
        now: Instant,
    ) -> Option<Known> {
        let mut table = lock(&self.table);
        let former = table.entries.get(id).map(|old| &old.known);
        let is_settled = |old: &&Known| table.slots.is_settled(&old.key);
        let same = former.filter(|old| old.session.lease == session.lease).filter(is_settled);
        let same = same.map(|old| (old.key.clone(), (old.doubts.clone(), old.doubted), old.moves.clone()));
        if same.is_none() && !is_ended && former.is_some_and(|old| !old.is_over()) {
            return None;
        }
        let old = table.entries.remove(id);
        table.swept.remove(&id);
        let anew = || {
            old.iter().for_each(|old| table.slots.leave(&old.known.key));
            (table.slots.take(queue, &session, now), (Vec::new(), now), Moves::default())
        };
        let (key, (doubts, doubted), moves) = same.unwrap_or_else(anew);
        // Nobody is to hear of what was lost before.
        table.losses.retain(|(lost, _)| *lost != id);
        let known = Known {
            session,
            place: None,
            key,
            created: None,
            doubts,
            doubted,
            moves,
            lost: None,
            given_up: false,
        };
        let entry = Entry {
            known: known.clone(),
            guard: None,
            view: None,
            leaving: None,
            asked: false,
            step: Some(step.clone()),
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

    /// Has a claim of which no step may still come take another key: something that is not its own stands under this one.
    pub(super) fn move_over(&self, id: ClaimId, queue: &[u8], now: Instant) {
        let mut table = lock(&self.table);
        let Some(known) = table.entries.get(id).map(|entry| entry.known.clone()) else { return };
        let key = table.slots.take(queue, &known.session, now);
        table.slots.park(&known.key, now + STANDS_FOR);
        table.entries.change(id, |entry| {
            entry.known.key = key;
            entry.known.doubts.clear();
        });
    }

    /// Whether nothing but places of waiters may hang on a lease.
    pub(super) fn are_places(&self, lease: i64) -> bool {
        let is_place = |entry: &Entry| {
            !entry.taken && entry.known.place.as_ref().is_some_and(|place| place.lease == lease)
        };
        lock(&self.table).entries.on(lease).all(|(_, entry)| is_place(entry))
    }

    /// Notes that the answer did not come of a step behind the fence of this session, which may hang the key on its lease or
    /// on that of the places.
    pub(super) fn doubt(&self, id: ClaimId, session: &Arc<Session>, now: Instant) {
        lock(&self.table).entries.change(id, |Entry { known, .. }| {
            known.doubt(session.clone(), now);
            known.place.clone().into_iter().for_each(|place| known.doubt(place, now));
        });
    }

    /// Notes that a delete of a claim's key goes out, whatever stands there when it arrives. `None`: the claim is gone, and
    /// its key perhaps another's.
    pub(super) fn deleting(self: &Arc<Claims>, id: ClaimId) -> Option<Deleting> {
        lock(&self.table).deleting(self, id)
    }

    /// The leases of all claims.
    pub(super) fn sessions(&self) -> Vec<Arc<Session>> {
        let table = lock(&self.table);
        table.entries.all().flat_map(|entry| entry.known.carriers()).cloned().collect()
    }

    /// Whether any claim hangs on this lease, or is to.
    pub(super) fn hang_on(&self, lease: i64) -> bool {
        lock(&self.table).entries.on(lease).next().is_some()
    }

    /// Notes that a claim's key is there.
    pub(super) fn made(&self, id: ClaimId, created: i64) {
        lock(&self.table).entries.change(id, |entry| {
            entry.known.created = Some(created);
            entry.seen = created;
        });
    }

    /// Notes that a claim's key was seen to stand like that, and gives the leases back that were made for it and that it has left.
    #[must_use]
    pub(super) fn seen_on(&self, id: ClaimId, stand: Stand, revision: i64) -> Vec<Arc<Session>> {
        let left = lock(&self.table).entries.change(id, |Entry { known, .. }| {
            let is_it = known.created == Some(stand.created);
            is_it.then(|| known.seen_on(stand.lease, revision))
        });
        left.flatten().unwrap_or_default()
    }

    /// Notes that a claim's key is about to be moved to this lease if it stands like that; false: it does not any more, it
    /// stands on that lease, or its holder was promised meanwhile what that does not keep.
    pub(super) fn moving(&self, id: ClaimId, stand: Stand, to: &Arc<Session>) -> bool {
        let may_move = lock(&self.table).entries.change(id, |Entry { known, taken, .. }| {
            let is_as_seen = known.stand() == Some(stand) && known.lost.is_none();
            let is_late = *taken && to.confirmed() < known.carrier().confirmed();
            let may_move = is_as_seen && stand.lease != to.lease && !is_late;
            if may_move {
                known.moves.begin(stand.lease, to);
            }
            may_move
        });
        may_move.unwrap_or(false)
    }

    /// Notes that a move of a claim's key has come to nothing, and gives its lease back if it was made for this claim alone.
    #[must_use]
    pub(super) fn not_moved(&self, id: ClaimId, from: i64, to: &Arc<Session>) -> Option<Arc<Session>> {
        let unused = lock(&self.table).entries.change(id, |Entry { known, .. }| {
            known.moves.fail(from, to);
            to.isolated && !known.may_hang_on(to.lease)
        });
        unused?.then(|| to.clone())
    }

    /// Notes that a claim waits on a lease of places.
    pub(super) fn placed(&self, id: ClaimId, place: Arc<Session>) {
        lock(&self.table).entries.change(id, |Entry { known, .. }| {
            known.place = (!Arc::ptr_eq(&place, &known.session)).then_some(place);
        });
    }

    /// What a waiting claim has ahead of it.
    pub(super) fn view(&self, id: ClaimId) -> Option<Arc<View>> {
        lock(&self.table).entries.get(id)?.view.clone()
    }

    pub(super) fn set_view(&self, id: ClaimId, mut view: Option<Arc<View>>) {
        lock(&self.table).entries.change(id, |entry| std::mem::swap(&mut entry.view, &mut view));
        // Ends a watch, which takes other locks.
        drop(view);
    }

    /// Forgets a claim that will take no more steps here, if its lease ends by itself. One on a lease that others keep is still
    /// to be swept.
    pub(super) fn forget_isolated(&self, id: ClaimId, now: Instant) {
        if self.get(id).is_some_and(|known| known.carrier().isolated) {
            self.forget_standing(id, now + STANDS_FOR);
        }
    }

    /// Forgets a claim whose key stands for longer, and is not to be met before then.
    pub(super) fn forget_standing(&self, id: ClaimId, until: Instant) {
        let mut table = lock(&self.table);
        let entry = table.entries.remove(id);
        if let Some(entry) = &entry {
            table.slots.park(&entry.known.key, until);
        }
        drop(table);
        // Ends watches, which takes other locks.
        drop(entry);
    }

    /// Forgets a claim that is gone.
    pub(super) fn forget(&self, id: ClaimId) {
        let entry = lock(&self.table).take(id);
        drop(entry);
    }

    /// The keys of some claims that hang on a lease: those that follow this one, and then from the first on.
    pub(super) fn some_of(&self, lease: i64, count: usize, after: ClaimId) -> Vec<Made> {
        let table = lock(&self.table);
        let hang = |(_, entry): &(ClaimId, &Entry)| {
            entry.known.carrier().lease == lease && entry.known.lost.is_none()
        };
        table.entries.on_after(lease, after).filter(hang).filter_map(made).take(count).collect()
    }

    /// The claims that may hang on a lease, and whose keys were not seen at this revision or later.
    pub(super) fn unread(&self, lease: i64, revision: i64) -> Vec<Made> {
        let table = lock(&self.table);
        let is_unread = |(_, entry): &(ClaimId, &Entry)| entry.seen < revision && entry.known.lost.is_none();
        table.entries.on(lease).filter(is_unread).filter_map(made).collect()
    }

    /// Notes that a claim's key was as it should be at this revision.
    pub(super) fn was_there(&self, id: ClaimId, created: i64, revision: i64) {
        lock(&self.table).entries.change(id, |entry| {
            if entry.known.created == Some(created) {
                entry.seen = entry.seen.max(revision);
            }
        });
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
        if table.entries.get(id).is_some_and(|entry| entry.known.created == Some(created)) {
            table.lose(id, loss());
            self.told.notify_one();
        }
    }

    /// Notes that a lease is gone, with all claims that hang on it.
    pub(super) fn session_ended(&self, lease: i64) {
        let mut table = lock(&self.table);
        let ids: Vec<ClaimId> = table.entries.on(lease).map(|(id, _)| id).collect();
        let mut gone = Vec::new();
        for id in ids {
            let Some(entry) = table.entries.get(id) else { continue };
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
        let entry = self.entries.remove(id)?;
        self.slots.leave(&entry.known.key);
        Some(entry)
    }

    fn deleting(&mut self, claims: &Arc<Claims>, id: ClaimId) -> Option<Deleting> {
        let key = self.entries.change(id, |Entry { known, .. }| {
            known.given_up = true;
            known.key.clone()
        })?;
        self.slots.delete(&key)?;
        Some(Deleting::new(claims.clone(), key))
    }

    fn lose(&mut self, id: ClaimId, loss: Loss) {
        let is_news = self.entries.change(id, |entry| {
            let is_news = entry.known.lost.is_none();
            if is_news {
                entry.known.lost = Some(loss.clone());
                entry.view.iter().for_each(|view| view.woken.notify_one());
            }
            is_news
        });
        if is_news == Some(true) {
            self.losses.push((id, loss));
        }
    }
}

/// What is known of a claim's key, if that was made.
fn made((id, entry): (ClaimId, &Entry)) -> Option<Made> {
    Some((id, entry.known.key.clone(), entry.known.created?))
}

/// What the end of a lease means for its claims.
pub(super) fn session_ended() -> Loss {
    Loss::new(LossKind::SessionEnded, "the lease of etcd that carried it was revoked or ran out")
}
