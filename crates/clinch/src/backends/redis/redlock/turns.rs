//! The waiters of this client, lock by lock: the first looks after the lock, and the others wait for their turn.
//!
//! Servers that know nothing of each other have no queue. If all waiters of a program asked whenever the lock came free,
//! they would split the votes among themselves. Waiters of different programs do compete. Nor need the servers tell of a
//! lock that this client holds itself: its release does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::super::inbox::Listener;
use super::seats::{News, Seats};
use crate::backend::{Busy, ClaimState, Grant};
use crate::claim::{Claim, ClaimId};
use crate::clock::Instant;
use crate::env::Env;
use crate::sync::lock;

/// For how long a waiter leaves it to others of the same client to look after the lock. One that is first, but whose
/// caller does not poll it, delays the others by little more, and so does a holder that has lost the lock unnoticed.
pub(super) const TURN: Duration = Duration::from_secs(1);

/// All that wait.
pub(super) struct Turns {
    env: Env,
    queues: Mutex<HashMap<String, Queue>>,
}

/// Who waits for one lock.
struct Queue {
    seats: Seats,
    /// The servers on which the lock's key has changed since the first began to watch, one bit for each.
    changed: u64,
    hold: Hold,
    /// When the first has something to do, or since when.
    due: Instant,
}

/// Where the lock is, as far as is known.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hold {
    Elsewhere,
    /// A claim of this client has it, and tells when it goes.
    Here(ClaimId),
    /// It has gone, or nobody could say: the first asks, once.
    Gone,
}

/// What a waiter has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Duty {
    /// Nothing for now: another of this client is first, or has the lock.
    Stay,
    /// See to it that the servers tell when the lock comes free.
    Watch,
    /// Take a step: ask, or hear what was said to another.
    Step,
}

/// A waiter's place.
pub(super) struct Turn {
    /// Whether it is the first.
    pub(super) first: bool,
    pub(super) duty: Duty,
    pub(super) news: News,
    /// Whether the first has had something to do for a turn, and has not done it.
    pub(super) neglected: bool,
    /// Rings when that changes, and for the first when a key changes.
    pub(super) woken: Arc<Notify>,
}

impl Turns {
    pub(super) fn new(env: Env) -> Turns {
        Turns { env, queues: Mutex::default() }
    }

    /// What to answer a claim without asking the servers: another waiter of this client is first, and it takes a seat behind;
    /// or it is first, and has not heard what was said to another. `None`: ask them.
    pub(super) fn follow(&self, key: &str, id: ClaimId) -> Option<Busy> {
        lock(&self.queues).get_mut(key)?.seats.follow(id)
    }

    /// Takes a seat, once, for a claim to which the servers have said this.
    pub(super) fn sit(&self, key: &str, id: ClaimId, told: Busy) {
        let mut queues = lock(&self.queues);
        let queue = queues.entry(key.to_owned()).or_insert_with(|| Queue {
            seats: Seats::default(),
            changed: 0,
            hold: Hold::Elsewhere,
            due: self.env.now(),
        });
        queue.seats.sit(id, told);
    }

    /// Gives a seat back; who is first then is told.
    pub(super) fn rise(&self, key: &str, id: ClaimId) {
        let mut queues = lock(&self.queues);
        let Some(queue) = queues.get_mut(key) else { return };
        let Some(at) = queue.seats.rise(id) else { return };
        if queue.seats.is_empty() {
            queues.remove(key);
        } else if at == 0 {
            // Whoever is first now has a turn of its own.
            queue.due = self.env.now();
            if queue.seats.are_in_doubt() {
                // It has not asked, so it would not know when to ask again.
                queue.hold = Hold::Gone;
            }
            queue.call(queue.due);
        }
    }

    /// Notes that a claim of this client has the lock now, which the others are told until the servers are asked again.
    pub(super) fn granted(&self, key: &str, claim: &Claim, grant: Grant) {
        if let Some(queue) = lock(&self.queues).get_mut(key) {
            queue.hold = Hold::Here(claim.id);
            let holder = ClaimState {
                id: claim.id,
                mode: claim.mode,
                granted: true,
                token: Some(grant.token),
                owner: (*claim.owner).clone(),
                since: self.env.clock().wall(),
                expires_in: grant.ttl,
            };
            queue.seats.say(Busy { ahead: 1, holder: Some(holder), ..Busy::default() }, claim.id);
        }
    }

    /// Notes that another claim has the lock: `here`, one of this client, or one from elsewhere.
    pub(super) fn held(&self, key: &str, here: Option<ClaimId>) {
        if let Some(queue) = lock(&self.queues).get_mut(key) {
            queue.hold = here.map_or(Hold::Elsewhere, Hold::Here);
        }
    }

    /// Notes that a claim of this client has left the lock.
    pub(super) fn freed(&self, key: &str, id: ClaimId) {
        if let Some(queue) = lock(&self.queues).get_mut(key)
            && queue.hold == Hold::Here(id)
        {
            queue.hold = Hold::Gone;
            queue.call(self.env.now());
        }
    }

    /// What a waiter has to do; `None` for one that has no seat.
    pub(super) fn of(&self, key: &str, id: ClaimId) -> Option<Turn> {
        let mut queues = lock(&self.queues);
        let queue = queues.get_mut(key)?;
        let neglected = queue.due + TURN <= self.env.now();
        let (at, seat, news) = queue.seats.find(id)?;
        let (first, woken) = (at == 0, seat.woken.clone());
        let duty = match queue.hold {
            Hold::Gone if first => Duty::Step,
            _ if news == News::Due => Duty::Step,
            Hold::Elsewhere if first => Duty::Watch,
            _ => Duty::Stay,
        };
        if first && queue.hold == Hold::Gone {
            queue.hold = Hold::Elsewhere;
            queue.seats.forget();
        }
        Some(Turn { first, duty, news, neglected, woken })
    }

    /// Notes that a waiter, if it is the first, has nothing to do before a moment, unless something changes.
    pub(super) fn rests(&self, key: &str, id: ClaimId, until: Instant) {
        if let Some(queue) = lock(&self.queues).get_mut(key)
            && queue.seats.is_first(id)
        {
            queue.due = until;
        }
    }

    /// Forgets what has changed so far.
    pub(super) fn begin_to_watch(&self, key: &str) {
        if let Some(queue) = lock(&self.queues).get_mut(key) {
            queue.changed = 0;
        }
    }

    /// On which servers the key has changed since, one bit for each.
    pub(super) fn changes(&self, key: &str) -> u64 {
        lock(&self.queues).get(key).map_or(0, |queue| queue.changed)
    }

    /// Notes that the key has changed, or is not there, on a server.
    pub(super) fn changed(&self, key: &str, node: usize) {
        if let Some(queue) = lock(&self.queues).get_mut(key) {
            queue.tell(node, self.env.now());
        }
    }
}

impl Queue {
    fn tell(&mut self, node: usize, now: Instant) {
        self.changed |= 1 << (node % 64);
        self.call(now);
    }

    /// Has the first see what there is to do.
    fn call(&mut self, now: Instant) {
        self.due = self.due.min(now);
        self.seats.call();
    }
}

/// What listens to one server.
pub(super) struct Ear {
    pub(super) turns: Arc<Turns>,
    /// Which server.
    pub(super) node: usize,
}

impl Listener for Ear {
    fn message(&self, _text: &str, _inbox: u64) {}

    fn changed(&self, key: &str) {
        self.turns.changed(key, self.node);
    }

    fn all_changed(&self) {
        let now = self.turns.env.now();
        lock(&self.turns.queues).values_mut().for_each(|queue| queue.tell(self.node, now));
    }

    fn is_idle(&self) -> bool {
        lock(&self.turns.queues).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::claim::{Mode, Owner};
    use crate::lane::Lane;
    use crate::name::LockName;
    use crate::token::Token;

    #[test]
    fn the_first_looks_after_the_lock_and_the_next_follows() {
        let turns = Arc::new(Turns::new(Env::host(Lane::thread())));
        let [a, b, c] = [1, 2, 3].map(ClaimId::from_bits);
        assert!(turns.follow("k", a).is_none());
        turns.sit("k", a, Busy { ahead: 1, ..Busy::default() });
        assert!(turns.follow("k", a).is_none(), "the first asks again");
        for id in [b, c, b] {
            assert_eq!(turns.follow("k", id).map(|busy| busy.ahead), Some(if id == c { 3 } else { 2 }));
        }
        let duty = |id| turns.of("k", id).map(|turn| turn.duty);
        assert_eq!((duty(a), duty(b)), (Some(Duty::Watch), Some(Duty::Stay)));
        let ear = Ear { turns: turns.clone(), node: 2 };
        ear.changed("other");
        ear.changed("k");
        ear.changed("k");
        assert_eq!(turns.changes("k"), 0b100);
        turns.begin_to_watch("k");
        assert_eq!(turns.changes("k"), 0);
        ear.all_changed();
        assert_eq!(turns.changes("k"), 0b100);
        turns.rise("k", b);
        assert_eq!(duty(b), None);
        turns.rise("k", a);
        assert_eq!(duty(c), Some(Duty::Watch));
        assert!(turns.follow("k", c).is_none());
        turns.rise("k", c);
        assert!(ear.is_idle());
    }

    #[test]
    fn a_holder_of_this_client_tells_when_it_goes() {
        let turns = Turns::new(Env::host(Lane::thread()));
        let [a, b, c] = [1, 2, 3].map(ClaimId::from_bits);
        let duty = |id| turns.of("k", id).map(|turn| turn.duty);
        turns.sit("k", b, Busy::default());
        assert!(turns.follow("k", c).is_some());
        turns.held("k", Some(a));
        assert_eq!((duty(b), duty(c)), (Some(Duty::Stay), Some(Duty::Stay)));
        turns.freed("k", c);
        assert_eq!(duty(b), Some(Duty::Stay), "another than the holder has gone");
        turns.freed("k", a);
        assert_eq!(duty(c), Some(Duty::Stay), "it is the turn of the first");
        assert_eq!((duty(b), duty(b)), (Some(Duty::Step), Some(Duty::Watch)), "it asks once");
        turns.held("k", Some(b));
        turns.rise("k", b);
        assert_eq!(duty(c), Some(Duty::Stay));
        turns.held("k", None);
        assert_eq!(duty(c), Some(Duty::Watch));
    }

    const DOUBT: Busy = Busy { ahead: 1, holder: None, place_ttl: None, undecided: true, detail: None };

    fn claim(id: ClaimId) -> Claim {
        let owner = Owner { host: "h".into(), pid: 1, user: "u".into(), label: String::new() };
        Claim {
            id,
            name: LockName::new("k").unwrap(),
            mode: Mode::Exclusive,
            ttl: TURN,
            enqueue: true,
            place: false,
            isolated: false,
            owner: Arc::new(owner),
        }
    }

    /// Whether a waiter was woken since the last look.
    fn is_woken(turns: &Turns, id: ClaimId) -> bool {
        turns.of("k", id).unwrap().woken.notified().now_or_never().is_some()
    }

    #[test]
    fn who_was_left_in_doubt_hears_the_end_of_it_at_once_and_others_once_a_turn() {
        let turns = Turns::new(Env::host(Lane::thread()));
        let [a, b, c] = [1, 2, 3].map(ClaimId::from_bits);
        let duty = |id| turns.of("k", id).map(|turn| turn.duty);
        let news = |id| turns.of("k", id).map(|turn| turn.news);
        turns.sit("k", a, DOUBT);
        assert!(turns.follow("k", b).unwrap().undecided && !is_woken(&turns, b));
        turns.sit("k", a, Busy::default());
        assert!(is_woken(&turns, b) && !is_woken(&turns, a), "it was told itself");
        assert_eq!((duty(a), duty(b)), (Some(Duty::Watch), Some(Duty::Step)));
        assert!(!turns.follow("k", b).unwrap().undecided);
        assert!(turns.follow("k", c).is_some());
        assert_eq!((duty(b), news(b)), (Some(Duty::Stay), Some(News::None)), "it has heard all");
        turns.sit("k", a, Busy::default());
        assert_eq!((duty(b), news(b)), (Some(Duty::Stay), Some(News::Some)));
        assert!(!is_woken(&turns, b) && !is_woken(&turns, c));
    }

    #[test]
    fn who_becomes_the_first_hears_what_was_said_to_the_one_before() {
        let turns = Turns::new(Env::host(Lane::thread()));
        let [a, b, c] = [1, 2, 3].map(ClaimId::from_bits);
        let duty = |id| turns.of("k", id).map(|turn| turn.duty);
        for last in [DOUBT, Busy::default()] {
            turns.sit("k", a, last);
            assert!(turns.follow("k", b).is_some());
            let token = Token::new(7).unwrap();
            turns.granted("k", &claim(a), Grant { token, ttl: None, from: None });
            turns.rise("k", a);
            assert!(is_woken(&turns, b));
            assert_eq!(duty(b), Some(Duty::Step));
            assert_eq!(turns.follow("k", b).unwrap().holder.unwrap().id, a);
            assert_eq!(duty(b), Some(Duty::Stay), "the holder's release is told");
            turns.freed("k", a);
            assert_eq!(duty(b), Some(Duty::Step));
            assert!(turns.follow("k", b).is_none(), "it asks the servers");
            turns.rise("k", b);
        }
        turns.sit("k", a, DOUBT);
        assert!(turns.follow("k", b).is_some());
        turns.held("k", Some(c));
        turns.sit("k", a, Busy::default());
        turns.rise("k", a);
        turns.freed("k", c);
        assert_eq!(duty(b), Some(Duty::Step));
        assert!(turns.follow("k", b).is_none(), "what was said is over");
        turns.rise("k", b);
        turns.sit("k", a, DOUBT);
        assert!(turns.follow("k", c).is_some());
        turns.rise("k", a);
        assert_eq!((duty(c), duty(c)), (Some(Duty::Step), Some(Duty::Watch)), "nobody else would ask for it");
        assert!(turns.follow("k", c).is_none());
    }
}
