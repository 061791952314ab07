//! What this client knows of its claims: on which servers something of each may stand.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::node::Line;
use crate::backends::pool::Connection;
use crate::claim::ClaimId;
use crate::clock::Instant;
use crate::sync::lock;

/// The claims of one client, by id.
#[derive(Default)]
pub(super) struct Claims(Mutex<HashMap<ClaimId, Arc<Entry>>>);

/// One claim.
pub(super) struct Entry(Mutex<State>);

struct State {
    marks: Vec<Mark>,
    tickets: u64,
    /// Nothing may be sent for it any more but its release.
    released: bool,
    /// When its waiter should ask again, where no change of a key would tell.
    again: Option<Instant>,
    /// How often in a row its votes were split.
    splits: u32,
    /// Its waiter has waited for its turn for too long.
    impatient: bool,
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
    /// It is being removed, by whoever has the ticket. On this connection, what is sent comes after that.
    Leaving { line: Option<Arc<Line>>, ticket: u64 },
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

    fn has(&self, wanted: u64) -> bool {
        matches!(self, Mark::Leaving { ticket, .. } if *ticket == wanted)
    }

    /// Whether nothing may be sent to this server before what stands there has been removed.
    pub(super) fn is_unsettled(&self) -> bool {
        match self {
            Mark::Leaving { line, .. } => line.as_ref().is_none_or(|line| !line.is_open()),
            _ => false,
        }
    }
}

impl Claims {
    /// What is known of a claim; from now on something is.
    pub(super) fn begin(&self, id: ClaimId, nodes: usize) -> Arc<Entry> {
        let new = || {
            Arc::new(Entry(Mutex::new(State {
                marks: vec![Mark::Clear; nodes],
                tickets: 0,
                released: false,
                again: None,
                splits: 0,
                impatient: false,
            })))
        };
        lock(&self.0).entry(id).or_insert_with(new).clone()
    }

    pub(super) fn get(&self, id: ClaimId) -> Option<Arc<Entry>> {
        lock(&self.0).get(&id).cloned()
    }

    /// Forgets a claim of which nothing is left, or nothing that could be known.
    pub(super) fn forget(&self, id: ClaimId) {
        lock(&self.0).remove(&id);
    }
}

impl Entry {
    pub(super) fn mark(&self, node: usize) -> Mark {
        lock(&self.0).marks.get(node).cloned().unwrap_or(Mark::Clear)
    }

    pub(super) fn marks(&self) -> Vec<Mark> {
        lock(&self.0).marks.clone()
    }

    /// Sets what may stand on a server.
    pub(super) fn set(&self, node: usize, mark: Mark) {
        if let Some(place) = lock(&self.0).marks.get_mut(node) {
            *place = mark;
        }
    }

    /// Notes that a step is about to be sent on a connection. False: it must not be, for what stands there is being removed
    /// in a way that could take the new one along.
    pub(super) fn sending(&self, node: usize, on: &Arc<Line>) -> bool {
        let mut state = lock(&self.0);
        let Some(place) = state.marks.get_mut(node) else { return false };
        if let Mark::Leaving { line, .. } = place
            && line.as_ref().is_none_or(|line| !Arc::ptr_eq(line, on))
        {
            return false;
        }
        *place = Mark::Sent(on.clone());
        true
    }

    /// Notes that what stands on a server is being removed, after what was sent on `line`. The ticket tells this removal
    /// from an earlier one.
    pub(super) fn leave(&self, node: usize, line: Option<Arc<Line>>) -> u64 {
        let mut state = lock(&self.0);
        state.tickets += 1;
        let ticket = state.tickets;
        if let Some(place) = state.marks.get_mut(node) {
            *place = Mark::Leaving { line, ticket };
        }
        ticket
    }

    /// A removal is done, or given up.
    pub(super) fn left(&self, node: usize, ticket: u64) {
        let mut state = lock(&self.0);
        if let Some(place) = state.marks.get_mut(node).filter(|place| place.has(ticket)) {
            *place = Mark::Clear;
        }
    }

    /// Whether a removal that failed may be repeated: nobody has sent a new step or taken over the removal. From then on
    /// nobody sends one before it is done.
    pub(super) fn insists(&self, node: usize, ticket: u64) -> bool {
        let mut state = lock(&self.0);
        let Some(place) = state.marks.get_mut(node).filter(|place| place.has(ticket)) else { return false };
        *place = Mark::Leaving { line: None, ticket };
        true
    }

    /// Has `send` send a step that nobody waits for, unless the claim is released: what is sent after a release could
    /// outlive it. Nor does it where an earlier step may still arrive on another connection, of which the release could
    /// then not know both.
    pub(super) fn send_unless_released(&self, node: usize, line: &Arc<Line>, send: impl FnOnce()) {
        let mut state = lock(&self.0);
        let released = state.released;
        let Some(place) = state.marks.get_mut(node).filter(|_| !released) else { return };
        let in_order = match place {
            Mark::Clear | Mark::Held => true,
            // What was sent to another run of the server has ended with it.
            Mark::Sent(earlier) => Arc::ptr_eq(earlier, line) || earlier.run() != line.run(),
            Mark::Leaving { .. } => false,
        };
        if in_order {
            *place = Mark::Sent(line.clone());
            send();
        }
    }

    /// From now on nothing is sent for the claim but its release.
    pub(super) fn close(&self) {
        lock(&self.0).released = true;
    }

    /// Notes that the last vote was in vain: when to ask again, where no change of a key would tell.
    pub(super) fn refused(&self, again: Option<Instant>, split: bool) {
        let mut state = lock(&self.0);
        state.again = again;
        state.splits = if split { state.splits + 1 } else { 0 };
    }

    /// When to ask again, once.
    pub(super) fn take_again(&self) -> Option<Instant> {
        lock(&self.0).again.take()
    }

    pub(super) fn splits(&self) -> u32 {
        lock(&self.0).splits
    }

    /// Has the next step ask the servers although it is another's turn.
    pub(super) fn lose_patience(&self) {
        lock(&self.0).impatient = true;
    }

    pub(super) fn take_impatience(&self) -> bool {
        std::mem::take(&mut lock(&self.0).impatient)
    }
}
