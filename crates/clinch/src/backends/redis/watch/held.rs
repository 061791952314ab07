//! What is known of the locks that are held: which are watched, which are to be read, and which were not found.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::Notify;

use crate::claim::{ByClaim, Claim, ClaimId, Mode};
use crate::clock::Instant;
use crate::name::LockName;
use crate::sync::lock;

/// How long a lock is held before it is watched.
const YOUNG: Duration = Duration::from_millis(500);

/// For how long changes are gathered: the server tells of each key by itself, also where one command has renewed many.
const GATHER: Duration = Duration::from_millis(5);

/// How long a server that could not tell is left alone.
pub(super) const PAUSE: Duration = Duration::from_secs(5);

/// When to read what may have changed.
const AT_ONCE: Instant = Instant::from_nanos(0);

/// Keys per command; as many as a batch of renewals has at most.
pub(super) const BATCH: usize = 256;

/// A claim and its lock.
pub(in super::super) type Watch = (ClaimId, LockName);

/// The exclusive locks that this client holds.
#[derive(Default)]
pub(in super::super) struct Held {
    state: Mutex<State>,
    /// Something is to be looked at earlier than was known, or was missed.
    pub(super) news: Notify,
}

#[derive(Default)]
struct State {
    leases: ByClaim<Lease>,
    /// The claims of whose locks the server tells. One that is gone and not yet let go of may be beside the one that has the lock now.
    told: HashMap<LockName, Vec<ClaimId>>,
    /// Those that are to be read, by when; and those that were not found. So no step looks through all.
    due: BTreeSet<(Instant, ClaimId)>,
    missed: BTreeSet<ClaimId>,
    /// When to look for leases that are not watched; `None`: when there is one again.
    next: Option<Instant>,
    looking: bool,
}

struct Lease {
    name: LockName,
    sight: Sight,
}

#[derive(Clone, Copy)]
enum Sight {
    /// To be read from then on.
    Due(Instant),
    /// About to be read.
    Looked,
    /// Not found when it was read.
    Missed,
    /// Read on this inbox, and not changed since; `sure` once the answer has come.
    Watched { inbox: u64, sure: bool },
}

impl Sight {
    fn look(&self) -> &Sight {
        #[cfg(test)]
        tests::LOOKED.set(tests::LOOKED.get() + 1);
        self
    }
}

impl Held {
    /// Notes that a claim was granted.
    pub(in super::super) fn hold(&self, claim: &Claim, now: Instant) {
        if claim.mode != Mode::Exclusive {
            return;
        }
        let at = now + YOUNG;
        let mut state = lock(&self.state);
        let lease = Lease { name: claim.name.clone(), sight: Sight::Due(at) };
        if let Some(before) = state.leases.insert(claim.id, lease) {
            state.out_of_sight(claim.id, &before.name, &before.sight);
        }
        state.due.insert((at, claim.id));
        if state.arm(at) {
            self.news.notify_one();
        }
    }

    /// Notes that a claim is released, or no longer the sole holder's.
    pub(in super::super) fn let_go(&self, id: ClaimId) {
        lock(&self.state).remove(id);
    }

    /// Whether nothing is watched.
    pub(in super::super) fn is_idle(&self) -> bool {
        lock(&self.state).told.is_empty()
    }

    /// The server told of this lock.
    pub(in super::super) fn changed(&self, name: &str, now: Instant) {
        let mut state = lock(&self.state);
        let Some(told) = state.told.remove(name) else { return };
        for id in told {
            state.set(id, Sight::Due(now + GATHER));
        }
        if state.arm(now + GATHER) {
            self.news.notify_one();
        }
    }

    /// The database was emptied.
    pub(in super::super) fn all_changed(&self) {
        lock(&self.state).look_again(|_| true);
        self.news.notify_one();
    }

    /// This inbox tells nothing any more.
    pub(in super::super) fn closed(&self, gone: u64) {
        lock(&self.state).look_again(|sight| matches!(sight, Sight::Watched { inbox, .. } if *inbox == gone));
        self.news.notify_one();
    }

    /// What is to be read at this moment, by whoever gets it; nothing while somebody is at it.
    pub(super) fn begin(&self, now: Instant) -> Option<Vec<Watch>> {
        let mut state = lock(&self.state);
        if state.looking || state.next.is_none_or(|next| next > now) {
            return None;
        }
        let mut due = Vec::new();
        // What is due soon comes along.
        while let Some(id) = state.take_due(now + YOUNG / 4) {
            due.extend(state.leases.get(&id).map(|lease| (id, lease.name.clone())));
        }
        state.looking = !due.is_empty();
        // One look for all that grow up meanwhile.
        state.next = state.earliest().map(|at| at.max(now + YOUNG));
        state.looking.then_some(due)
    }

    /// Notes that these are read on an inbox from now on: what it tells from here on counts.
    pub(super) fn reading(&self, watches: &[Watch], inbox: u64) {
        let mut state = lock(&self.state);
        for (id, _) in watches {
            state.set(*id, Sight::Watched { inbox, sure: false });
        }
    }

    /// As [`Held::reading`], by whoever may be given up: what was not [read](Unanswered::read) by then is read at once.
    pub(super) fn renewing(&self, claims: &[&Claim], inbox: u64) -> Unanswered<'_> {
        let mut state = lock(&self.state);
        let watches = claims.iter().map(|claim| {
            state.watch(claim.id, inbox);
            (claim.id, claim.name.clone())
        });
        Unanswered { watches: watches.collect(), held: self, inbox }
    }

    /// The inbox that is known to tell of a claim's key.
    pub(in super::super) fn watched_on(&self, id: ClaimId) -> Option<u64> {
        match lock(&self.state).leases.get(&id)?.sight {
            Sight::Watched { inbox, sure: true, .. } => Some(inbox),
            _ => None,
        }
    }

    /// Notes which of those that were read on an inbox were still held. What was told meanwhile stays.
    pub(super) fn read(&self, watches: &[Watch], on: u64, held: &[bool]) {
        let mut state = lock(&self.state);
        if held.contains(&false) {
            self.news.notify_one();
        }
        for ((id, _), held) in watches.iter().zip(held) {
            if !held {
                state.set(*id, Sight::Missed);
            } else if let Some(Lease { sight: Sight::Watched { inbox, sure, .. }, .. }) =
                state.leases.get_mut(id)
                && *inbox == on
            {
                *sure = true;
            }
        }
    }

    /// Notes that these could not be read.
    pub(super) fn unread(&self, ids: impl Iterator<Item = ClaimId>, again: Instant) {
        let mut state = lock(&self.state);
        for id in ids {
            state.set(id, Sight::Due(again));
        }
        if state.arm(again) {
            self.news.notify_one();
        }
    }

    pub(super) fn done(&self) {
        let mut state = lock(&self.state);
        state.looking = false;
        state.next = state.earliest();
        self.news.notify_one();
    }

    /// The server cannot tell of these. Another may: the next that is held is looked at again.
    pub(super) fn untold(&self, watches: &[Watch]) {
        let mut state = lock(&self.state);
        for (id, _) in watches {
            state.remove(*id);
        }
    }

    /// Some that were not found, and which are wanted.
    pub(super) fn missed(&self, mut wanted: impl FnMut(ClaimId) -> bool) -> Vec<Watch> {
        let state = lock(&self.state);
        let name = |id: &ClaimId| state.leases.get(id).map(|lease| (*id, lease.name.clone()));
        state.missed.iter().filter(|id| wanted(**id)).take(BATCH).filter_map(name).collect()
    }

    pub(super) fn next(&self) -> Option<Instant> {
        let state = lock(&self.state);
        state.next.filter(|_| !state.looking)
    }
}

/// A read whose answer has not come.
pub(super) struct Unanswered<'a> {
    pub(super) watches: Vec<Watch>,
    held: &'a Held,
    inbox: u64,
}

impl Unanswered<'_> {
    pub(super) fn read(mut self, held: &[bool]) {
        self.held.read(&self.watches, self.inbox, held);
        self.watches.clear();
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if !self.watches.is_empty() {
            self.held.unread(self.watches.iter().map(|(id, _)| *id), AT_ONCE);
        }
    }
}

impl State {
    fn remove(&mut self, id: ClaimId) {
        if let Some(lease) = self.leases.remove(&id) {
            self.out_of_sight(id, &lease.name, &lease.sight);
        }
    }

    fn set(&mut self, id: ClaimId, sight: Sight) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let name = lease.name.clone();
        let before = std::mem::replace(&mut lease.sight, sight);
        self.out_of_sight(id, &name, &before);
        match sight {
            Sight::Due(at) => drop(self.due.insert((at, id))),
            Sight::Missed => drop(self.missed.insert(id)),
            // With room for one: there all but never is another.
            Sight::Watched { .. } => self.told.entry(name).or_insert_with(|| Vec::with_capacity(1)).push(id),
            Sight::Looked => {}
        }
    }

    /// Notes that a claim's lock is read on an inbox from now on.
    fn watch(&mut self, id: ClaimId, inbox: u64) {
        let sight = self.leases.get_mut(&id).map(|lease| &mut lease.sight);
        if let Some(Sight::Watched { inbox: on, sure }) = sight
            && *on == inbox
        {
            // As is all but always so where a lease is renewed: nothing else is known of it anew.
            *sure = false;
            return;
        }
        self.set(id, Sight::Watched { inbox, sure: false });
    }

    /// Takes a claim from where it stood by what was known of it.
    fn out_of_sight(&mut self, id: ClaimId, name: &LockName, was: &Sight) {
        match was.look() {
            Sight::Due(at) => drop(self.due.remove(&(*at, id))),
            Sight::Missed => drop(self.missed.remove(&id)),
            Sight::Watched { .. } => {
                let Some(told) = self.told.get_mut(name) else { return };
                told.retain(|other| *other != id);
                if told.is_empty() {
                    self.told.remove(name);
                }
            }
            Sight::Looked => {}
        }
    }

    /// Has somebody look at this moment; says whether that is sooner than was known.
    fn arm(&mut self, at: Instant) -> bool {
        let sooner = self.next.is_none_or(|next| at < next);
        if sooner {
            self.next = Some(at);
        }
        sooner
    }

    /// Has leases be read at once.
    fn look_again(&mut self, which: impl Fn(&Sight) -> bool) {
        let ids: Vec<_> =
            self.leases.iter().filter(|(_, lease)| which(lease.sight.look())).map(|(id, _)| *id).collect();
        for id in ids {
            self.set(id, Sight::Due(AT_ONCE));
            self.next = Some(AT_ONCE);
        }
    }

    /// The first, if it is due by then.
    fn take_due(&mut self, by: Instant) -> Option<ClaimId> {
        let (_, id) = self.due.first().copied().filter(|(at, _)| *at <= by)?;
        self.set(id, Sight::Looked);
        Some(id)
    }

    fn earliest(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use super::*;
    use crate::claim::Owner;

    fn claim(bits: u128) -> Claim {
        Claim {
            id: ClaimId::from_bits(bits),
            name: LockName::new(format!("job/{bits}")).unwrap(),
            mode: Mode::Exclusive,
            ttl: PAUSE,
            enqueue: true,
            place: false,
            isolated: false,
            owner: Arc::new(Owner { host: "h".into(), pid: 1, user: "u".into(), label: String::new() }),
        }
    }

    const START: Instant = Instant::from_nanos(1 << 40);

    thread_local! {
        /// How often it was looked what is to be done about a lease.
        pub(super) static LOOKED: Cell<usize> = const { Cell::new(0) };
    }

    /// A renewal is a change, too, and all that this costs is paid by who renews.
    #[test]
    fn a_change_costs_the_same_however_many_are_held() {
        let cost = |count: usize| {
            let held = Held::default();
            let claims: Vec<Claim> = (1..=count as u128).map(claim).collect();
            let watches = watched(&held, &claims);
            held.read(&watches, 1, &vec![true; count]);
            held.done();
            let before = LOOKED.get();
            for (_, name) in &watches[..100] {
                held.changed(name.as_str(), START + YOUNG);
            }
            let due = held.begin(START + YOUNG + GATHER).unwrap();
            assert_eq!(due.len(), 100);
            held.reading(&due, 1);
            held.read(&due, 1, &[true; 100]);
            held.done();
            assert_eq!(held.missed(|_| true), []);
            LOOKED.get() - before
        };
        let (few, many) = (cost(100), cost(1000));
        assert_eq!(few, many);
    }

    fn watched(held: &Held, claims: &[Claim]) -> Vec<Watch> {
        for claim in claims {
            held.hold(claim, START);
        }
        let due = held.begin(START + YOUNG).unwrap();
        assert_eq!(due.len(), claims.len());
        held.reading(&due, 1);
        due
    }

    fn renewing<'a>(held: &'a Held, claims: &[Claim]) -> Unanswered<'a> {
        held.renewing(&claims.iter().collect::<Vec<_>>(), 1)
    }

    #[test]
    fn what_is_held_shortly_is_never_looked_at() {
        let held = Held::default();
        held.hold(&claim(1), START);
        assert!(held.begin(START).is_none() && held.next() == Some(START + YOUNG));
        held.let_go(claim(1).id);
        assert!(held.begin(START + YOUNG).is_none());
        assert_eq!(held.next(), None, "nothing is held, and still it looks");
        assert!(lock(&held.state).leases.is_empty());
    }

    /// Also of what was looked at for nobody else, and of what grows up until the server is asked again.
    #[test]
    fn what_could_not_be_read_is_read_again() {
        let held = Held::default();
        let watches = watched(&held, &[claim(1)]);
        held.read(&watches, 1, &[false]);
        held.done();
        assert_eq!((held.missed(|_| true).len(), held.next()), (1, None));
        held.unread(watches.iter().map(|(id, _)| *id), START + PAUSE);
        assert_eq!(held.next(), Some(START + PAUSE), "nobody looks again");
        held.hold(&claim(2), START + YOUNG);
        assert_eq!(held.next(), Some(START + YOUNG * 2), "what is young waits for what could not be read");
    }

    #[test]
    fn a_change_between_the_read_and_its_answer_is_not_missed() {
        let held = Held::default();
        let watches = watched(&held, &[claim(1), claim(2)]);
        held.changed("job/1", START + YOUNG);
        held.read(&watches, 1, &[true, true]);
        held.done();
        assert_eq!(held.next(), Some(START + YOUNG + GATHER));
        assert!(held.begin(START + YOUNG).is_none(), "others that change with it are not waited for");
        let due = held.begin(START + YOUNG + GATHER).unwrap();
        assert_eq!(due, [(claim(1).id, claim(1).name)], "what was told while it was read is read again");
        assert_eq!(held.missed(|_| true), []);
    }

    #[test]
    fn what_a_renewal_did_not_read_since_it_was_given_up_is_read_at_once() {
        let held = Held::default();
        let watches = watched(&held, &[claim(1), claim(2)]);
        assert_eq!(held.watched_on(claim(1).id), None, "no answer has come");
        held.read(&watches, 1, &[true, true]);
        held.done();
        assert_eq!(held.watched_on(claim(1).id), Some(1));
        renewing(&held, &[claim(1), claim(2)]).read(&[true, false]);
        assert_eq!(held.watched_on(claim(1).id), Some(1));
        assert_eq!(held.missed(|_| true), [(claim(2).id, claim(2).name)]);
        held.let_go(claim(2).id);
        drop(renewing(&held, &[claim(1), claim(2)]));
        assert_eq!(held.watched_on(claim(1).id), None);
        assert_eq!(held.begin(START + YOUNG).unwrap(), [(claim(1).id, claim(1).name)]);
    }

    #[test]
    fn a_change_during_a_renewal_outlives_its_answer() {
        let held = Held::default();
        let watches = watched(&held, &[claim(1), claim(2)]);
        held.read(&watches, 1, &[true, true]);
        held.done();
        let renewal = renewing(&held, &[claim(1), claim(2)]);
        held.changed("job/1", START);
        held.closed(2);
        renewal.read(&[true, true]);
        let due = held.begin(START + YOUNG).unwrap();
        assert_eq!(due, [(claim(1).id, claim(1).name)]);
        held.done();
        let renewal = renewing(&held, &[claim(1), claim(2)]);
        held.closed(1);
        renewal.read(&[true, true]);
        assert_eq!(held.begin(START + YOUNG).unwrap().len(), 2, "it ended");
    }

    #[test]
    fn the_renewal_of_a_claim_that_was_released_says_nothing_of_the_next_one() {
        let held = Held::default();
        let (old, new) = (claim(1), Claim { name: claim(1).name, ..claim(2) });
        for answered in [true, false] {
            watched(&held, std::slice::from_ref(&old));
            held.done();
            let renewal = renewing(&held, std::slice::from_ref(&old));
            held.let_go(old.id);
            let next = watched(&held, std::slice::from_ref(&new));
            held.read(&next, 1, &[true]);
            held.done();
            if answered {
                renewal.read(&[false])
            } else {
                drop(renewal)
            }
            assert_eq!((held.watched_on(new.id), held.missed(|_| true)), (Some(1), Vec::new()));
            held.changed("job/1", START);
            assert_eq!(held.watched_on(new.id), None, "a change was not heard");
            held.let_go(new.id);
        }
    }

    /// A guard whose claim is gone may be there still when its lock is taken again.
    #[test]
    fn one_that_is_gone_takes_the_news_from_nobody() {
        let held = Held::default();
        let (old, new) = (claim(1), Claim { name: claim(1).name, ..claim(2) });
        let watches = watched(&held, &[old.clone(), new.clone()]);
        let watches: Vec<Watch> = [new.id, old.id]
            .into_iter()
            .filter_map(|id| watches.iter().find(|(watched, _)| *watched == id).cloned())
            .collect();
        held.reading(&watches, 1);
        held.read(&watches, 1, &[true, false]);
        held.done();
        assert_eq!(held.missed(|_| true), [(old.id, old.name)]);
        held.changed("job/1", START + YOUNG);
        assert_eq!(held.watched_on(new.id), None, "a change was not heard");
        held.let_go(old.id);
        held.let_go(new.id);
        assert!(held.is_idle());
    }

    #[test]
    fn what_one_server_cannot_tell_of_keeps_nothing_else_from_being_watched() {
        let held = Held::default();
        let watches = watched(&held, &[claim(1), claim(2)]);
        held.untold(&watches[..1]);
        held.done();
        assert!(!held.is_idle(), "the other is watched no more");
        held.closed(1);
        assert_eq!(held.begin(START + YOUNG).unwrap().len(), 1);
        held.untold(&watches);
        held.done();
        watched(&held, &[claim(3)]);
    }

    #[test]
    fn what_is_missed_closed_or_emptied_is_looked_at() {
        let held = Held::default();
        let watches = watched(&held, &[claim(1)]);
        held.read(&watches, 1, &[false]);
        held.done();
        assert_eq!(held.missed(|_| true), [(claim(1).id, claim(1).name)]);
        held.let_go(claim(1).id);
        assert!(held.is_idle());
        watched(&held, &[claim(2)]);
        held.done();
        assert!(held.begin(START + YOUNG).is_none() && !held.is_idle());
        held.closed(2);
        assert!(held.begin(START + YOUNG).is_none(), "another inbox");
        for tell in [|held: &Held| held.closed(1), Held::all_changed] {
            tell(&held);
            let due = held.begin(START + YOUNG).unwrap();
            held.reading(&due, 1);
            held.done();
        }
    }
}
