//! What this client knows of its claims: on which servers something of each may stand.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::node::Line;
use crate::backends::pool::Connection;
use crate::claim::{ByClaim, ClaimId};
use crate::clock::Instant;
use crate::sync::lock;
use crate::token::Token;

/// From how many claims on it is looked whether some are forgotten.
const MANY: usize = 64;

/// The claims of one client, by id.
#[derive(Default)]
pub(super) struct Claims(Mutex<Known>);

#[derive(Default)]
struct Known {
    entries: ByClaim<Arc<Entry>>,
    /// From how many on it is looked again whether some are forgotten: nobody says that a claim was left to others.
    many: usize,
}

/// One claim.
pub(super) struct Entry(Mutex<State>);

struct State {
    places: Vec<Place>,
    tickets: u64,
    /// The ticket of the vote for which requests may be sent.
    voting: Option<u64>,
    /// When something was sent for it last, except its release.
    sent: Instant,
    /// The token that it was granted with.
    token: Option<Token>,
    /// Nothing may be sent for it any more but its release.
    released: bool,
    /// For how long its waiter should pause, where no change of a key would tell, and whether it should then watch for one.
    again: Option<(Instant, bool)>,
    /// How often in a row nobody was seen to have won.
    splits: u32,
    /// The servers that had no vote to give then, as one bit each.
    mute: u64,
    /// Its waiter has waited for its turn for too long.
    impatient: bool,
    /// From when on nothing of it can stand anywhere, unless it is asked for again.
    forgotten: Instant,
}

/// One server: what may stand there, and the ticket of who has seen to it last. The answer to an earlier one tells nothing.
struct Place {
    mark: Mark,
    ticket: u64,
}

/// What may stand on one server.
#[derive(Clone)]
pub(super) enum Mark {
    /// Nothing.
    Clear,
    /// A step was sent on this connection and not answered.
    Sent(Arc<Line>),
    /// The server has said that it is there.
    Held,
    /// It is being removed, after what was sent on this connection. `barred`: nothing else may be sent before that is done;
    /// if not, what is sent on this connection comes after it.
    Leaving { line: Option<Arc<Line>>, barred: bool },
}

impl Mark {
    pub(super) fn is_clear(&self) -> bool {
        matches!(self, Mark::Clear)
    }

    /// The connection after whose commands another must come.
    pub(super) fn line(&self) -> Option<Arc<Line>> {
        match self {
            Mark::Sent(line) | Mark::Leaving { line: Some(line), .. } => Some(line.clone()),
            _ => None,
        }
    }

    /// Whether nothing may be sent to this server before what stands there has been removed.
    pub(super) fn is_unsettled(&self) -> bool {
        match self {
            Mark::Leaving { line, barred } => *barred || line.as_ref().is_none_or(|line| !line.is_open()),
            _ => false,
        }
    }
}

impl State {
    fn place(&mut self, node: usize, ticket: u64) -> Option<&mut Place> {
        self.places.get_mut(node).filter(|place| place.ticket == ticket)
    }

    fn draw(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }
}

impl Claims {
    /// What is known of a claim; from now on something is, for as long as it is asked for once in a while: it may be forgotten
    /// after `lives`.
    pub(super) fn begin(&self, id: ClaimId, nodes: usize, now: Instant, lives: Duration) -> Arc<Entry> {
        let mut known = lock(&self.0);
        if known.entries.len() >= known.many.max(MANY) {
            known.entries.retain(|_, entry| lock(&entry.0).forgotten > now);
            known.many = known.entries.len() * 2;
        }
        let new = || {
            Arc::new(Entry(Mutex::new(State {
                places: (0..nodes).map(|_| Place { mark: Mark::Clear, ticket: 0 }).collect(),
                tickets: 0,
                voting: None,
                sent: now,
                token: None,
                released: false,
                again: None,
                splits: 0,
                mute: 0,
                impatient: false,
                forgotten: now,
            })))
        };
        let entry = known.entries.entry(id).or_insert_with(new).clone();
        entry.lives_until(now + lives);
        entry
    }

    pub(super) fn get(&self, id: ClaimId) -> Option<Arc<Entry>> {
        lock(&self.0).entries.get(&id).cloned()
    }

    /// Whether it is a claim of this client that has not been released.
    pub(super) fn is_live(&self, id: ClaimId) -> bool {
        self.get(id).is_some_and(|entry| !lock(&entry.0).released)
    }

    /// Forgets a claim of which nothing is left, or nothing that could be known.
    pub(super) fn forget(&self, id: ClaimId) {
        lock(&self.0).entries.remove(&id);
    }
}

impl Entry {
    /// It may still stand somewhere until then.
    pub(super) fn lives_until(&self, end: Instant) {
        let mut state = lock(&self.0);
        state.forgotten = state.forgotten.max(end);
    }

    pub(super) fn mark(&self, node: usize) -> Mark {
        lock(&self.0).places.get(node).map_or(Mark::Clear, |place| place.mark.clone())
    }

    pub(super) fn marks(&self) -> Vec<Mark> {
        lock(&self.0).places.iter().map(|place| place.mark.clone()).collect()
    }

    /// Begins a vote, of which this is the ticket.
    pub(super) fn begin_vote(&self) -> u64 {
        let mut state = lock(&self.0);
        let ticket = state.draw();
        state.voting = Some(ticket);
        ticket
    }

    /// The token that it was granted with.
    pub(super) fn token(&self) -> Option<Token> {
        lock(&self.0).token
    }

    pub(super) fn granted(&self, token: Token) {
        lock(&self.0).token = Some(token);
    }

    /// From now on no request of the last vote is sent, if it was not.
    pub(super) fn end_vote(&self) {
        lock(&self.0).voting = None;
    }

    /// Notes that a step of a vote is about to be sent on a connection. False: it must not be, for nobody waits for it any
    /// more, or what stands there is being removed in a way that could take the new one along.
    pub(super) fn sending(&self, node: usize, on: &Arc<Line>, ticket: u64, now: Instant) -> bool {
        let mut state = lock(&self.0);
        let votes = state.voting == Some(ticket);
        let Some(place) = state.places.get_mut(node).filter(|_| votes) else { return false };
        if let Mark::Leaving { line, barred } = &place.mark
            && (*barred || line.as_ref().is_none_or(|line| !Arc::ptr_eq(line, on)))
        {
            return false;
        }
        *place = Place { mark: Mark::Sent(on.clone()), ticket };
        state.sent = now;
        true
    }

    /// When something was sent for it last, except its release.
    pub(super) fn sent(&self) -> Instant {
        lock(&self.0).sent
    }

    /// Notes what a step has left on a server, unless something was sent there after it.
    pub(super) fn answered(&self, node: usize, ticket: u64, mark: Mark) {
        if let Some(place) = lock(&self.0).place(node, ticket) {
            place.mark = mark;
        }
    }

    /// Notes that what stands on a server is being removed, after what was sent on `line`. The ticket tells this removal
    /// from an earlier one.
    pub(super) fn leave(&self, node: usize, line: Option<Arc<Line>>) -> u64 {
        let mut state = lock(&self.0);
        let ticket = state.draw();
        if let Some(place) = state.places.get_mut(node) {
            *place = Place { mark: Mark::Leaving { line, barred: false }, ticket };
        }
        ticket
    }

    /// Notes that what a vote has left on a server is being removed; `None`: nothing was left, or something was sent there
    /// after it. Nothing is sent there before that is done. The connection is the one after whose commands it must come.
    pub(super) fn leave_late(&self, node: usize, vote: u64) -> Option<(u64, Option<Arc<Line>>)> {
        let mut state = lock(&self.0);
        let ticket = state.draw();
        let place = state.place(node, vote).filter(|place| !place.mark.is_clear())?;
        let line = place.mark.line();
        *place = Place { mark: Mark::Leaving { line: line.clone(), barred: true }, ticket };
        Some((ticket, line))
    }

    /// Whether a removal that failed may be repeated: nobody has sent a new step or taken over the removal. From then on
    /// nobody sends one before it is done.
    pub(super) fn insists(&self, node: usize, ticket: u64) -> bool {
        let mut state = lock(&self.0);
        let Some(place) = state.place(node, ticket) else { return false };
        place.mark = Mark::Leaving { line: place.mark.line(), barred: true };
        true
    }

    /// Has `send` send a step that nobody waits for, unless the claim is released: what is sent after a release could
    /// outlive it. Nor does it where an earlier step may still arrive on another connection, which takes no longer than `on_its_way`:
    /// the release could then not know of both.
    pub(super) fn send_unless_released(
        &self,
        node: usize,
        line: &Arc<Line>,
        now: Instant,
        on_its_way: Duration,
        send: impl FnOnce(),
    ) {
        let mut state = lock(&self.0);
        let released = state.released;
        let arrived = state.sent + on_its_way <= now;
        let ticket = state.draw();
        let Some(place) = state.places.get_mut(node).filter(|_| !released) else { return };
        let in_order = match &place.mark {
            Mark::Clear | Mark::Held => true,
            // What was sent to another process of the server has ended with it.
            Mark::Sent(earlier) => Arc::ptr_eq(earlier, line) || !earlier.is_to_process_of(line) || arrived,
            Mark::Leaving { .. } => false,
        };
        if in_order {
            *place = Place { mark: Mark::Sent(line.clone()), ticket };
            state.sent = now;
            send();
        }
    }

    /// From now on nothing is sent for the claim but its release. What may stand on each server then.
    pub(super) fn close(&self) -> Vec<Mark> {
        let mut state = lock(&self.0);
        (state.released, state.voting) = (true, None);
        state.places.iter().map(|place| place.mark.clone()).collect()
    }

    /// Notes that the last vote was in vain: until when to pause, where no change of a key would tell, and whether to watch for one then.
    pub(super) fn refused(&self, again: Option<(Instant, bool)>, decided: bool, mute: u64) {
        let mut state = lock(&self.0);
        (state.again, state.mute) = (again, mute);
        state.splits = if decided { 0 } else { state.splits + 1 };
    }

    /// Until when to pause, and whether to watch then; once.
    pub(super) fn take_again(&self) -> Option<(Instant, bool)> {
        lock(&self.0).again.take()
    }

    pub(super) fn splits(&self) -> u32 {
        lock(&self.0).splits
    }

    /// The servers that had no vote to give when it was refused last.
    pub(super) fn mute(&self) -> u64 {
        lock(&self.0).mute
    }

    /// Has the next step ask the servers although it is another's turn.
    pub(super) fn lose_patience(&self) {
        lock(&self.0).impatient = true;
    }

    pub(super) fn take_impatience(&self) -> bool {
        std::mem::take(&mut lock(&self.0).impatient)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_that_were_left_to_others_are_forgotten() {
        let (claims, second) = (Claims::default(), Duration::from_secs(1));
        let at = |seconds: u64| Instant::from_nanos(seconds * 1_000_000_000);
        let held = ClaimId::from_bits(u128::MAX);
        claims.begin(held, 3, at(0), second);
        for number in 0..10_000 {
            // One that is renewed lives on.
            claims.get(held).unwrap().lives_until(at(number + 2));
            claims.begin(ClaimId::from_bits(u128::from(number)), 3, at(number), second);
        }
        assert!(claims.get(held).is_some() && claims.get(ClaimId::from_bits(9_999)).is_some());
        assert!(lock(&claims.0).entries.len() <= MANY, "{}", lock(&claims.0).entries.len());
    }

    #[test]
    fn what_is_closed_says_what_may_stand_where() {
        let entry = Claims::default().begin(ClaimId::from_bits(1), 3, Instant::from_nanos(0), Duration::ZERO);
        entry.leave(1, None);
        assert!(matches!(entry.close()[..], [Mark::Clear, Mark::Leaving { .. }, Mark::Clear]));
    }
}
