//! What is known of the locks that are held: which are watched, which are to be read, and which were not found.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use crate::claim::{Claim, ClaimId, Mode};
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
    /// What was granted last, by the lock, for the server tells of locks.
    leases: HashMap<LockName, Lease>,
    /// Those that are to be read, by when. So no step looks through all.
    due: BTreeSet<(Instant, LockName)>,
    /// How many are watched.
    watched: usize,
    /// Claims that were not found, or whose lock was granted again.
    missed: BTreeSet<Watch>,
    /// When to look for leases that are not watched; `None`: when there is one again.
    next: Option<Instant>,
    looking: bool,
}

struct Lease {
    id: ClaimId,
    sight: Sight,
}

#[derive(Clone, Copy)]
enum Sight {
    /// To be read from then on.
    Due(Instant),
    /// About to be read.
    Looked,
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
    /// Notes that a claim was granted. Another of ours that had the lock before is gone, though its holder may not know it yet.
    pub(in super::super) fn hold(&self, claim: &Claim, now: Instant) {
        if claim.mode != Mode::Exclusive {
            return;
        }
        let at = now + YOUNG;
        let mut state = lock(&self.state);
        let before = state.put(claim.id, &claim.name, at).filter(|before| *before != claim.id);
        state.missed.extend(before.map(|before| (before, claim.name.clone())));
        if state.arm(at) || before.is_some() {
            self.news.notify_one();
        }
    }

    /// Notes that a claim is released, or no longer the sole holder's.
    pub(in super::super) fn let_go(&self, id: ClaimId, name: &LockName) {
        lock(&self.state).remove(id, name);
    }

    /// Whether nothing is watched.
    pub(in super::super) fn is_idle(&self) -> bool {
        lock(&self.state).watched == 0
    }

    /// The server told of this lock.
    pub(in super::super) fn changed(&self, name: &str, now: Instant) {
        let mut state = lock(&self.state);
        let Some((name, Lease { id, sight: Sight::Watched { .. } })) = state.leases.get_key_value(name)
        else {
            return;
        };
        let (id, name) = (*id, name.clone());
        state.set(id, &name, Sight::Due(now + GATHER));
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
        while let Some(watch) = state.take_due(now + YOUNG / 4) {
            due.push(watch);
        }
        state.looking = !due.is_empty();
        // One look for all that grow up meanwhile.
        state.next = state.earliest().map(|at| at.max(now + YOUNG));
        state.looking.then_some(due)
    }

    /// Notes that these are read on an inbox from now on: what it tells from here on counts.
    pub(super) fn reading(&self, watches: &[Watch], inbox: u64) {
        let mut state = lock(&self.state);
        for (id, name) in watches {
            state.set(*id, name, Sight::Watched { inbox, sure: false });
        }
    }

    /// A read that comes with the renewal of locks that are watched. It says nothing of those that are still held: that they are watched
    /// is known, and a change that was told meanwhile stays. What was not [read](Unanswered::read), since the renewal was given up, is
    /// read at once: the server may have forgotten whom to tell.
    pub(super) fn renewing<'a>(&'a self, claims: &'a [&'a Claim]) -> Unanswered<'a> {
        Unanswered { claims, held: self }
    }

    /// Of each of these claims the inbox that is known to tell of its key.
    pub(super) fn watched_on(&self, claims: &[Arc<Claim>]) -> Vec<Option<u64>> {
        let state = lock(&self.state);
        let inbox = |claim: &Arc<Claim>| match state.leases.get(&claim.name)? {
            Lease { id, sight: Sight::Watched { inbox, sure: true } } if *id == claim.id => Some(*inbox),
            _ => None,
        };
        claims.iter().map(inbox).collect()
    }

    /// Notes which of those that were read on an inbox were still held. What was told meanwhile stays.
    pub(super) fn read(&self, watches: &[Watch], on: u64, held: &[bool]) {
        let mut state = lock(&self.state);
        for ((id, name), held) in watches.iter().zip(held) {
            if !held {
                state.miss(*id, name);
                self.news.notify_one();
            } else if let Some(lease) = state.leases.get_mut(name)
                && let Lease { id: known, sight: Sight::Watched { inbox, sure } } = lease
                && (*known, *inbox) == (*id, on)
            {
                *sure = true;
            }
        }
    }

    /// Notes that these could not be read.
    pub(super) fn unread<'a>(&self, claims: impl Iterator<Item = (ClaimId, &'a LockName)>, again: Instant) {
        let mut state = lock(&self.state);
        for (id, name) in claims {
            // Of one whose lock was granted again the next renewal tells.
            if state.missed.remove(&(id, name.clone())) && !state.leases.contains_key(name) {
                state.put(id, name, again);
            } else {
                state.set(id, name, Sight::Due(again));
            }
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
        for (id, name) in watches {
            state.remove(*id, name);
        }
    }

    /// Some that were not found, and which are wanted.
    pub(super) fn missed(&self, mut wanted: impl FnMut(ClaimId) -> bool) -> Vec<Watch> {
        lock(&self.state).missed.iter().filter(|(id, _)| wanted(*id)).take(BATCH).cloned().collect()
    }

    pub(super) fn next(&self) -> Option<Instant> {
        let state = lock(&self.state);
        state.next.filter(|_| !state.looking)
    }
}

/// A read whose answer has not come.
pub(super) struct Unanswered<'a> {
    claims: &'a [&'a Claim],
    held: &'a Held,
}

impl Unanswered<'_> {
    /// Notes which of them were still held.
    pub(super) fn read(mut self, held: &[bool]) {
        let claims = std::mem::take(&mut self.claims);
        if held.contains(&false) {
            let mut state = lock(&self.held.state);
            let gone = claims.iter().zip(held).filter(|(_, held)| !**held);
            gone.for_each(|(claim, _)| state.miss(claim.id, &claim.name));
            self.held.news.notify_one();
        }
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if !self.claims.is_empty() {
            self.held.unread(self.claims.iter().map(|claim| (claim.id, &claim.name)), AT_ONCE);
        }
    }
}

impl State {
    /// Has the lock of a claim be read at this time; says which claim had it before.
    fn put(&mut self, id: ClaimId, name: &LockName, at: Instant) -> Option<ClaimId> {
        let before = self.leases.insert(name.clone(), Lease { id, sight: Sight::Due(at) });
        if let Some(before) = &before {
            self.out_of_sight(name, &before.sight);
        }
        self.due.insert((at, name.clone()));
        before.map(|before| before.id)
    }

    /// Takes a claim out; says whether it had its lock.
    fn take(&mut self, id: ClaimId, name: &LockName) -> bool {
        let Entry::Occupied(lease) = self.leases.entry(name.clone()) else { return false };
        if lease.get().id != id {
            return false;
        }
        let was = lease.remove().sight;
        self.out_of_sight(name, &was);
        true
    }

    fn remove(&mut self, id: ClaimId, name: &LockName) {
        if !self.take(id, name) && !self.missed.is_empty() {
            self.missed.remove(&(id, name.clone()));
        }
    }

    /// Notes that a claim was not found.
    fn miss(&mut self, id: ClaimId, name: &LockName) {
        if self.take(id, name) {
            self.missed.insert((id, name.clone()));
        }
    }

    fn set(&mut self, id: ClaimId, name: &LockName, sight: Sight) {
        let Some(lease) = self.leases.get_mut(name).filter(|lease| lease.id == id) else { return };
        let before = std::mem::replace(&mut lease.sight, sight);
        self.out_of_sight(name, &before);
        match sight {
            Sight::Due(at) => drop(self.due.insert((at, name.clone()))),
            Sight::Watched { .. } => self.watched += 1,
            Sight::Looked => {}
        }
    }

    /// Takes a claim from where it stood by what was known of it.
    fn out_of_sight(&mut self, name: &LockName, was: &Sight) {
        match was.look() {
            Sight::Due(at) => drop(self.due.remove(&(*at, name.clone()))),
            Sight::Watched { .. } => self.watched -= 1,
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
        let leases = self.leases.iter().filter(|(_, lease)| which(lease.sight.look()));
        let watches: Vec<Watch> = leases.map(|(name, lease)| (lease.id, name.clone())).collect();
        for (id, name) in watches {
            self.set(id, &name, Sight::Due(AT_ONCE));
            self.next = Some(AT_ONCE);
        }
    }

    /// The first, if it is due by then.
    fn take_due(&mut self, by: Instant) -> Option<Watch> {
        let first = self.due.first().filter(|(at, _)| *at <= by)?.1.clone();
        let id = self.leases.get(&first)?.id;
        self.set(id, &first, Sight::Looked);
        Some((id, first))
    }

    fn earliest(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

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

    fn watched_on(held: &Held, claim: &Claim) -> Option<u64> {
        held.watched_on(&[Arc::new(claim.clone())])[0]
    }

    #[test]
    fn what_is_held_shortly_is_never_looked_at() {
        let held = Held::default();
        held.hold(&claim(1), START);
        assert!(held.begin(START).is_none() && held.next() == Some(START + YOUNG));
        held.let_go(claim(1).id, &claim(1).name);
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
        held.unread(watches.iter().map(|(id, name)| (*id, name)), START + PAUSE);
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
        let (held, one, two) = (Held::default(), claim(1), claim(2));
        let both = [&one, &two];
        let watches = watched(&held, &[claim(1), claim(2)]);
        assert_eq!(watched_on(&held, &claim(1)), None, "no answer has come");
        held.read(&watches, 1, &[true, true]);
        held.done();
        assert_eq!(watched_on(&held, &claim(1)), Some(1));
        held.renewing(&both).read(&[true, false]);
        assert_eq!(watched_on(&held, &claim(1)), Some(1));
        assert_eq!(held.missed(|_| true), [(claim(2).id, claim(2).name)]);
        held.let_go(claim(2).id, &claim(2).name);
        drop(held.renewing(&both));
        assert_eq!(watched_on(&held, &claim(1)), None);
        assert_eq!(held.begin(START + YOUNG).unwrap(), [(claim(1).id, claim(1).name)]);
    }

    #[test]
    fn a_change_during_a_renewal_outlives_its_answer() {
        let (held, one, two) = (Held::default(), claim(1), claim(2));
        let both = [&one, &two];
        let watches = watched(&held, &[claim(1), claim(2)]);
        held.read(&watches, 1, &[true, true]);
        held.done();
        let renewal = held.renewing(&both);
        held.changed("job/1", START);
        held.closed(2);
        renewal.read(&[true, true]);
        let due = held.begin(START + YOUNG).unwrap();
        assert_eq!(due, [(claim(1).id, claim(1).name)]);
        held.reading(&due, 1);
        held.read(&due, 1, &[true]);
        held.done();
        let renewal = held.renewing(&both);
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
            let only = [&old];
            let renewal = held.renewing(&only);
            held.let_go(old.id, &old.name);
            let next = watched(&held, std::slice::from_ref(&new));
            held.read(&next, 1, &[true]);
            held.done();
            if answered {
                renewal.read(&[false])
            } else {
                drop(renewal)
            }
            assert_eq!((watched_on(&held, &new), held.missed(|_| true)), (Some(1), Vec::new()));
            held.changed("job/1", START);
            assert_eq!(watched_on(&held, &new), None, "a change was not heard");
            held.let_go(new.id, &new.name);
        }
    }

    /// A guard whose claim is gone may be there still when its lock is taken again.
    #[test]
    fn one_that_is_gone_takes_the_news_from_nobody_and_is_asked_for() {
        let held = Held::default();
        let (old, new) = (claim(1), Claim { name: claim(1).name, ..claim(2) });
        let watches = watched(&held, std::slice::from_ref(&old));
        held.read(&watches, 1, &[true]);
        held.done();
        let next = watched(&held, std::slice::from_ref(&new));
        assert_eq!(held.missed(|_| true), [(old.id, old.name.clone())]);
        held.reading(&watches, 1);
        held.read(&watches, 1, &[false]);
        held.read(&next, 1, &[true]);
        held.done();
        assert_eq!((watched_on(&held, &old), watched_on(&held, &new)), (None, Some(1)));
        // Nobody could say whether it is there.
        held.unread([(old.id, &old.name)].into_iter(), START + PAUSE);
        assert_eq!((watched_on(&held, &new), held.missed(|_| true)), (Some(1), Vec::new()));
        held.changed("job/1", START + YOUNG);
        assert_eq!(watched_on(&held, &new), None, "a change was not heard");
        held.let_go(old.id, &old.name);
        assert_eq!(held.begin(START + YOUNG + GATHER).unwrap(), next);
        held.let_go(new.id, &new.name);
        assert!(held.is_idle() && lock(&held.state).leases.is_empty());
    }

    /// One of them for each lock that is held.
    #[test]
    fn what_is_known_of_a_lease_takes_little_room() {
        assert!(size_of::<(LockName, Lease)>() <= 48);
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
        held.let_go(claim(1).id, &claim(1).name);
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
