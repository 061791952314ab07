//! What this client knows of its claims that wait or are in doubt, and the messages that came for them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::inbox::Listener;
use super::watch::Held;
use crate::claim::{ByClaim, Claim, ClaimId};
use crate::clock::{Clock, Instant};
use crate::process::Process;
use crate::sync::lock;
use crate::token::Token;

/// How long a waiter leaves a database alone that was emptied: those who held locks there are told first.
const EMPTIED: Duration = Duration::from_millis(500);

/// The claims of one client.
pub(super) struct Claims {
    known: Mutex<Known>,
    pub(super) held: Held,
    /// What the keys of locks begin with.
    prefix: String,
    clock: Clock,
    process: Process,
}

#[derive(Default)]
struct Known {
    /// Those that are not plainly held or gone.
    pending: ByClaim<Pending>,
    /// Those that are to see when a foreign client leaves, by the lock's key.
    foreign: HashMap<String, Vec<ClaimId>>,
}

#[derive(Default)]
struct Pending {
    /// A step was sent whose answer did not come, so it may still reach the server.
    in_doubt: bool,
    /// The inbox that listened when the last step was sent; 0: none.
    inbox: u64,
    /// When the claim was first known to be queued.
    since: Option<Instant>,
    asked: Option<Asked>,
    /// Until when the claim does not ask.
    rests: Option<Instant>,
    note: Option<Note>,
    woken: Arc<Notify>,
}

/// What the last answer to a waiting claim said.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    /// The lock's key.
    pub(super) key: String,
    /// When the step was sent.
    pub(super) sent: Instant,
    /// The server's clock when it answered, in milliseconds.
    pub(super) server: u64,
    /// When to take another step if no message comes.
    pub(super) look: Instant,
    /// Whether a foreign client holds the lock and this claim is to see when it leaves.
    pub(super) foreign: bool,
    /// The inbox that listened when the step was sent.
    pub(super) inbox: u64,
}

/// What a message said, and when it was heard by our clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// The claim was granted at `at` of the server's clock (ms), for `lease`, as an inbox has told, perhaps that of another runtime.
    Granted { token: Token, at: u64, lease: Duration, heard: Instant, inbox: u64 },
    /// The claim is next; at `at` something began that ends by itself after `time`.
    Next { at: u64, time: Duration, heard: Instant },
    /// Something changed; ask.
    Ask,
}

impl Claims {
    pub(super) fn new(clock: Clock, prefix: &str) -> Claims {
        let (prefix, process) = (prefix.to_owned(), Process::this());
        Claims { known: Mutex::default(), held: Held::default(), prefix, clock, process }
    }

    /// Notes that a step of this claim goes out that may queue it; says which inbox listens for it. `listening` knows
    /// for a claim that is new.
    pub(super) fn asking(&self, id: ClaimId, listening: impl FnOnce() -> u64) -> u64 {
        let pending = &mut lock(&self.known).pending;
        pending.entry(id).or_insert_with(|| Pending { inbox: listening(), ..Pending::default() }).inbox
    }

    /// Notes that a step of a try on a lease of its own goes out, so that its release knows it from one that was detached.
    pub(super) fn trying(&self, id: ClaimId) {
        lock(&self.known).pending.entry(id).or_default();
    }

    /// Notes that a step's answer did not come.
    pub(super) fn doubt(&self, id: ClaimId) {
        lock(&self.known).pending.entry(id).or_default().in_doubt = true;
    }

    /// When the claim was first known to be queued: now, if it was not before.
    pub(super) fn place_since(&self, id: ClaimId, now: Instant) -> Instant {
        *lock(&self.known).pending.entry(id).or_default().since.get_or_insert(now)
    }

    /// Notes that the claim is queued. Messages that came meanwhile stay.
    pub(super) fn queued(&self, id: ClaimId, asked: Asked) {
        let mut known = lock(&self.known);
        known.pending.entry(id).or_default();
        known.set_asked(id, Some(asked));
    }

    /// Notes that the claim waits no more, for it is granted or was refused.
    pub(super) fn settled(&self, id: ClaimId) {
        let mut known = lock(&self.known);
        known.set_asked(id, None);
        match known.pending.get_mut(&id) {
            Some(pending) if pending.in_doubt => pending.note = None,
            Some(_) => drop(known.pending.remove(&id)),
            None => {}
        }
    }

    /// Notes which inbox listens from now on. False: another one than when the last step was sent, so that a message
    /// may have been missed.
    pub(super) fn listening(&self, id: ClaimId, inbox: u64) -> bool {
        let mut known = lock(&self.known);
        let Some(pending) = known.pending.get_mut(&id) else { return false };
        pending.inbox = inbox;
        pending.asked.as_ref().is_some_and(|asked| asked.inbox == inbox)
    }

    /// What the last answer to a waiting claim said, and what wakes it.
    pub(super) fn waiting(&self, id: ClaimId) -> Option<(Asked, Arc<Notify>)> {
        let known = lock(&self.known);
        let pending = known.pending.get(&id)?;
        Some((pending.asked.clone()?, pending.woken.clone()))
    }

    /// Whether a step of the claim is known that may still reach the server.
    pub(super) fn is_in_doubt(&self, id: ClaimId) -> bool {
        lock(&self.known).pending.get(&id).is_some_and(|pending| pending.in_doubt)
    }

    /// Whether it is noted here what became of the claim's steps.
    pub(super) fn knows(&self, id: ClaimId) -> bool {
        lock(&self.known).pending.contains_key(&id)
    }

    pub(super) fn take_note(&self, id: ClaimId) -> Option<Note> {
        lock(&self.known).pending.get_mut(&id)?.note.take()
    }

    /// Has a claim ask again that waits and whose place is not there: the database was emptied, perhaps.
    pub(super) fn misses_its_place(&self, id: ClaimId) {
        let until = self.clock.now() + EMPTIED;
        if let Some(pending) = lock(&self.known).pending.get_mut(&id) {
            pending.rest(until);
        }
    }

    /// Until when a claim does not ask.
    pub(super) fn rests(&self, id: ClaimId) -> Option<Instant> {
        lock(&self.known).pending.get_mut(&id)?.rests.take()
    }

    /// Forgets a claim that was released.
    pub(super) fn forget(&self, id: ClaimId) {
        let mut known = lock(&self.known);
        known.set_asked(id, None);
        known.pending.remove(&id);
    }

    /// How many claims something is known of.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        lock(&self.known).pending.len()
    }

    fn note(&self, id: &str, note: Note) {
        let Ok(id) = id.parse::<ClaimId>() else { return };
        if let Some(pending) = lock(&self.known).pending.get_mut(&id) {
            pending.tell(note);
        }
    }
}

impl Known {
    /// Takes in what the last answer to a claim said, while it waits.
    fn set_asked(&mut self, id: ClaimId, asked: Option<Asked>) {
        let Some(pending) = self.pending.get_mut(&id) else { return };
        let is_foreign = |asked: &&Asked| asked.foreign;
        if let Some(Asked { key, .. }) = pending.asked.as_ref().filter(is_foreign)
            && let Some(ids) = self.foreign.get_mut(key)
        {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.foreign.remove(key);
            }
        }
        if let Some(Asked { key, .. }) = asked.as_ref().filter(is_foreign) {
            self.foreign.entry(key.clone()).or_default().push(id);
        }
        pending.asked = asked;
    }
}

impl Listener for Claims {
    /// Takes in a message from an inbox channel. What is none, or for nobody, is ignored: state decides.
    fn message(&self, text: &str, inbox: u64) {
        let heard = self.clock.now();
        let words: Vec<&str> = text.split(' ').collect();
        match words[..] {
            ["g", id, token, at, lease, ref next @ ..] => {
                let token = token.parse().ok().and_then(Token::new);
                let (Some(token), Ok(at), Ok(lease)) = (token, at.parse(), lease.parse()) else { return };
                let lease = Duration::from_millis(lease);
                self.note(id, Note::Granted { token, at, lease, heard, inbox });
                if let [next] = next {
                    self.note(next, Note::Next { at, time: lease, heard });
                }
            }
            ["n", id, at, time] => {
                let (Ok(at), Ok(time)) = (at.parse(), time.parse()) else { return };
                self.note(id, Note::Next { at, time: Duration::from_millis(time), heard });
            }
            _ => {}
        }
    }

    /// A key changed that a foreign client holds, or that is held here.
    fn changed(&self, key: &str) {
        if let Some(name) = key.strip_prefix(&*self.prefix) {
            self.held.changed(name, self.clock.now());
        }
        let Known { pending, foreign } = &mut *lock(&self.known);
        for id in foreign.get(key).into_iter().flatten() {
            if let Some(pending) = pending.get_mut(id) {
                pending.tell(Note::Ask);
            }
        }
    }

    /// The database was emptied, places included.
    fn all_changed(&self) {
        let until = self.clock.now() + EMPTIED;
        lock(&self.known).pending.values_mut().for_each(|pending| pending.rest(until));
        self.held.all_changed();
    }

    fn closed(&self, inbox: u64) {
        // A forked child drops its copy of an inbox; what it has of this may be locked for ever.
        if !self.process.is_left() {
            self.held.closed(inbox);
        }
    }

    /// What is in doubt waits for no message.
    fn is_idle(&self) -> bool {
        self.held.is_idle() && lock(&self.known).pending.values().all(|pending| pending.asked.is_none())
    }
}

/// Whether a claim takes no place and has a lease of its own, as those have that may be detached.
pub(super) fn is_lone_try(claim: &Claim) -> bool {
    claim.isolated && !claim.enqueue
}

impl Pending {
    /// Asks again, but not before `until`.
    fn rest(&mut self, until: Instant) {
        if self.asked.is_some() {
            self.rests = self.rests.max(Some(until));
            self.tell(Note::Ask);
        }
    }

    fn tell(&mut self, note: Note) {
        // A grant is not forgotten for a hint that came after it.
        if !matches!(self.note, Some(Note::Granted { .. })) || matches!(note, Note::Granted { .. }) {
            self.note = Some(note);
        }
        self.woken.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_reaches_its_claim_and_nonsense_nobody() {
        let claims = Claims::new(Clock::host(), "");
        let (one, two) = (ClaimId::from_bits(1), ClaimId::from_bits(2));
        claims.asking(one, || 0);
        claims.asking(two, || 0);
        for bad in [
            "",
            "g",
            "g x 1 2 3",
            "g 1 2 3",
            "n",
            &format!("g {one} 99999999999999999 5 6"),
            &format!("n {one} a 1"),
        ] {
            claims.message(bad, 1);
        }
        assert_eq!((claims.take_note(one), claims.take_note(two)), (None, None));
        claims.message(&format!("g {one} 7 1000 3000 {two}"), 1);
        let lease = Duration::from_secs(3);
        claims.message(&format!("n {one} 1000 20"), 1);
        let Some(Note::Granted { token, at, lease: granted, heard, inbox: 1 }) = claims.take_note(one) else {
            panic!("a hint hid a grant")
        };
        assert_eq!((token, at, granted), (Token::new(7).unwrap(), 1000, lease));
        assert_eq!(claims.take_note(two), Some(Note::Next { at: 1000, time: lease, heard }));
        assert_eq!(claims.take_note(two), None);
    }

    #[test]
    fn what_is_in_doubt_is_remembered_until_it_is_forgotten() {
        let claims = Claims::new(Clock::host(), "");
        let id = ClaimId::from_bits(3);
        claims.doubt(id);
        claims.settled(id);
        assert!(claims.is_in_doubt(id) && claims.waiting(id).is_none());
        assert!(claims.is_idle(), "nothing is told to what is in doubt");
        claims.forget(id);
        assert!(lock(&claims.known).pending.is_empty());
    }

    #[test]
    fn a_change_is_told_to_who_waits_for_a_foreign_client_to_leave() {
        let claims = Claims::new(Clock::host(), "");
        let now = Instant::from_nanos(1);
        let asked = |key: &str, foreign| Asked {
            key: key.into(),
            sent: now,
            server: 1,
            look: now,
            foreign,
            inbox: 1,
        };
        let ids = [1, 2, 3, 4].map(ClaimId::from_bits);
        for (id, key, foreign) in
            [(ids[0], "a", true), (ids[1], "a", false), (ids[2], "b", true), (ids[3], "a", true)]
        {
            claims.queued(id, asked(key, true));
            claims.queued(id, asked(key, foreign));
        }
        claims.changed("a");
        let told = |id: &ClaimId| claims.take_note(*id).is_some();
        assert_eq!(ids.each_ref().map(told), [true, false, false, true]);
        claims.doubt(ids[0]);
        claims.settled(ids[0]);
        claims.forget(ids[3]);
        claims.changed("a");
        assert_eq!(ids.each_ref().map(told), [false; 4]);
        claims.settled(ids[2]);
        assert!(lock(&claims.known).foreign.is_empty());
    }
}
