//! The fence of a session: the revision at which its key was last written, on condition of which each claim is made.
//!
//! To raise it fails every step that is under way, whoever's it is, and that is taken again. With one for each claim that is given up, clients whose
//! steps take about as long as their callers wait would get nowhere: what fails is late, and is given up in turn. So it is raised for all together
//! that were given up so far, and not at once again.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::Session;
use crate::clock::Instant;
use crate::env::Env;
use crate::sync::lock;

/// How long it stays as it is after each time: a step of a round trip less finds it so.
const APART: Duration = Duration::from_millis(250);

/// How long others wait for one who raises it, and whose future may be kept and not polled.
const RAISED_WITHIN: Duration = Duration::from_secs(1);

pub(in crate::backends::etcd) struct Fence {
    state: Mutex<State>,
    raised: Notify,
}

struct State {
    revision: i64,
    /// When the last write of it that was answered was sent.
    sent: Option<Instant>,
    /// From when on it may be raised again.
    from: Instant,
}

impl Fence {
    /// Of a session whose key is not made yet.
    pub(super) fn new() -> Fence {
        let state = State { revision: 0, sent: None, from: Instant::from_nanos(0) };
        Fence { state: Mutex::new(state), raised: Notify::new() }
    }

    pub(in crate::backends::etcd) fn revision(&self) -> i64 {
        lock(&self.state).revision
    }

    /// Notes at which revision it was found.
    pub(in crate::backends::etcd) fn seen(&self, revision: i64) {
        let mut state = lock(&self.state);
        state.revision = state.revision.max(revision);
    }

    /// Waits until it is this caller's turn to raise it, and says until when that is; `None`: another has, for steps that had been sent by
    /// this time.
    async fn turn(&self, env: &Env, since: Instant) -> Option<Instant> {
        loop {
            let mut raised = pin!(self.raised.notified());
            raised.as_mut().enable();
            let from = {
                let (mut state, now) = (lock(&self.state), env.now());
                if state.sent.is_some_and(|sent| sent >= since) {
                    return None;
                }
                if state.from <= now {
                    state.from = now + RAISED_WITHIN;
                    return Some(state.from);
                }
                state.from
            };
            tokio::select! {
                () = raised => {}
                () = env.sleep_until(from) => {}
            }
        }
    }

    /// Notes that it was raised, by a write that was sent at this time.
    pub(in crate::backends::etcd) fn raised(&self, revision: i64, sent: Instant, now: Instant) {
        {
            let mut state = lock(&self.state);
            state.revision = state.revision.max(revision);
            state.sent = state.sent.max(Some(sent));
            state.from = now + APART;
        }
        self.raised.notify_waiters();
    }

    /// Gives a turn back, unless it is another's by now.
    fn give_back(&self, turn: Instant) {
        {
            let mut state = lock(&self.state);
            if state.from != turn {
                return;
            }
            state.from = Instant::from_nanos(0);
        }
        self.raised.notify_waiters();
    }
}

/// A fence that is to be raised by whoever has this; dropped, it is another's turn.
pub(in crate::backends::etcd) struct Raise {
    session: Arc<Session>,
    turn: Option<Instant>,
}

impl Raise {
    /// The turn to raise a session's fence, for steps that had been sent by this time; `None`: no such step can come any more.
    pub(in crate::backends::etcd) async fn of(
        session: &Arc<Session>,
        env: &Env,
        since: Instant,
    ) -> Option<Raise> {
        let turn = if session.is_over() { None } else { session.fence.turn(env, since).await };
        turn.map(|turn| Raise { session: session.clone(), turn: Some(turn) })
    }

    pub(in crate::backends::etcd) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Notes that it was raised, as [`Fence::raised`].
    pub(in crate::backends::etcd) fn raised(mut self, revision: i64, sent: Instant, now: Instant) {
        self.turn = None;
        self.session.fence.raised(revision, sent, now);
    }

    /// Leaves it to another: it cannot be raised now.
    pub(in crate::backends::etcd) fn let_go(&mut self) {
        if let Some(turn) = self.turn.take() {
            self.session.fence.give_back(turn);
        }
    }
}

impl Drop for Raise {
    fn drop(&mut self) {
        self.let_go();
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::clock::Clock;
    use crate::lane::Lane;
    use crate::net::Tcp;
    use crate::random::Random;

    fn env() -> Env {
        let (clock, lane) = (Clock::simulated(SystemTime::UNIX_EPOCH), Lane::here().unwrap());
        Env::new(clock, Random::seeded(1), lane.clone(), Arc::new(Tcp::new(clock, lane)))
    }

    /// In simulated time.
    #[tokio::test(start_paused = true)]
    async fn what_is_given_up_meanwhile_shares_the_next_raise() {
        let (env, fence) = (env(), Fence::new());
        let first = env.now();
        assert!(fence.turn(&env, first).await.is_some(), "nobody has raised it");
        let sent = env.now();
        // Given up after that was sent, so one more is needed, by one of them.
        env.sleep_until(sent + Duration::from_millis(1)).await;
        let later = env.now();
        let (fence, env) = (&fence, &env);
        let raise = async || {
            let is_raised = fence.turn(env, later).await.is_none();
            if !is_raised {
                fence.raised(8, env.now(), env.now());
            }
            (is_raised, env.now())
        };
        let answered = async {
            env.sleep_until(sent + APART / 2).await;
            fence.raised(7, sent, env.now());
            assert!(fence.turn(env, first).await.is_none());
            env.now()
        };
        let (answered, one, other) = tokio::join!(answered, raise(), raise());
        assert_eq!([one.0, other.0].iter().filter(|is_raised| **is_raised).count(), 1);
        assert!(one.1 >= answered + APART && other.1 >= answered + APART);
        assert_eq!(fence.revision(), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn one_who_does_not_come_to_raise_it_keeps_the_others_for_a_second() {
        let (env, fence) = (env(), Fence::new());
        let begun = env.now();
        let first = fence.turn(&env, begun).await.unwrap();
        let second = fence.turn(&env, begun).await.unwrap();
        assert!(env.now() >= begun + RAISED_WITHIN && env.now() < begun + RAISED_WITHIN * 2);
        // The first comes back late, and has nothing to give.
        fence.give_back(first);
        let begun = env.now();
        fence.give_back(second);
        assert!(fence.turn(&env, begun).await.is_some() && env.now() < begun + APART);
    }
}
