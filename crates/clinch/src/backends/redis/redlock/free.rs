//! Leaving the servers: withdrawing a claim that lost its vote, and releasing one that won.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};

use super::super::dating::millis;
use super::super::failure::of_release;
use super::super::reply;
use super::super::resp::Command;
use super::super::script;
use super::claims::{Entry, Mark};
use super::node::{Line, Node};
use super::round::Round;
use super::store::Quorum;
use super::timing;
use super::votes::Vote;
use crate::backend::{Freed, NOTICE};
use crate::claim::{Claim, ClaimId};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;

/// The pauses between two attempts to reach a server that may still have something of a claim.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// After how long an attempt counts as failed: a server that hangs has lost its connection by then.
pub(super) const STANDSTILL: Duration = Duration::from_secs(3);

impl Quorum {
    /// Removes a claim from all servers on which something of it may stand. Waits for those that have said so, for a short
    /// time; the others are reached in the background, and take no part in a later step until they were.
    ///
    /// A waiter that was refused because another has the lock lets servers answer that are not late: they will most likely
    /// say the same, and need no release. It stays to see to it, so `late` is there for nobody else.
    pub(super) async fn withdraw(
        &self,
        claim: &Claim,
        key: &str,
        entry: &Arc<Entry>,
        late: Option<(u64, Round<'_, Vote>)>,
    ) {
        let leaving = self.leaving(key, claim.id, entry, claim.ttl);
        let asking = |at: usize| late.as_ref().is_some_and(|(_, votes)| votes.is_asking(at));
        let answers: Vec<bool> = (0..self.nodes.len()).map(asking).collect();
        if let Some((ticket, votes)) = late {
            self.background.take_over(leaving.clone().heed(
                ticket,
                votes.late().map(|(at, _)| at),
                self.nodes.clone(),
            ));
        }
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, ((node, mark), answers)) in self.nodes.iter().zip(entry.marks()).zip(answers).enumerate() {
            let patience = match mark {
                // What leaves already is on its way.
                Mark::Clear | Mark::Leaving { .. } => continue,
                Mark::Held => node.patience(claim.ttl),
                Mark::Sent(_) if answers => continue,
                Mark::Sent(_) => Duration::ZERO,
            };
            round.ask(at, patience, leaving.clone().leave(at, node.clone(), &mark));
        }
        round.answers(|_, _| false).await;
        if let Some(rest) = round.rest() {
            self.background.take_over(rest);
        }
    }

    /// Releases a claim: done when a quorum has confirmed it.
    pub(super) async fn free(&self, name: &LockName, id: ClaimId, ttl: Duration) -> Result<Freed> {
        let key = self.key(name);
        let known = self.claims.get(id);
        // Of a claim of another process nothing is known.
        let stranger = known.is_none();
        let entry = known.unwrap_or_else(|| self.entry(id));
        let marks = entry.close();
        let marks = if stranger { vec![Mark::Held; self.nodes.len()] } else { marks };
        self.turns.rise(&key, id);
        let leaving = self.leaving(&key, id, &entry, ttl);
        let mut round = Round::new(&self.env, self.nodes.len());
        let mut clear = 0;
        for (at, (node, mark)) in self.nodes.iter().zip(&marks).enumerate() {
            match mark {
                Mark::Clear => clear += 1,
                _ => round.ask(at, confirming(node, ttl), leaving.clone().leave(at, node.clone(), mark)),
            }
        }
        let freed = self.confirmed(&mut round, clear, false, &format!("the release of \"{name}\"")).await;
        let (rest, claims) = (round.rest(), self.claims.clone());
        match (&freed, rest) {
            // A repetition is to know where something may stand, and after what it has to come there.
            (Err(_), Some(rest)) => self.background.take_over(async move {
                rest.await;
                if entry.marks().iter().all(Mark::is_clear) {
                    claims.forget(id);
                }
            }),
            (_, rest) => {
                claims.forget(id);
                rest.into_iter().for_each(|rest| self.background.take_over(rest));
            }
        }
        self.turns.freed(&key, id);
        freed
    }

    /// Takes a claim's votes, but keeps the lock closed until its holder has heard of that and let go: done when a quorum has
    /// confirmed it.
    pub(super) async fn take_away(&self, name: &LockName, id: ClaimId) -> Result<Freed> {
        let mut command = script::REDLOCK_EVICT.on([self.key(name).as_str()]);
        command.arg(id).arg(millis(NOTICE));
        let command = Arc::new(command);
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, node) in self.nodes.iter().enumerate() {
            let (node, command) = (node.clone(), command.clone());
            round.ask(at, confirming(&node, NOTICE), async move {
                let line = node.line().await?;
                Ok(reply::number(&node.run_on(&line, &script::REDLOCK_EVICT, &command).await?)? == 1)
            });
        }
        let closed = self.confirmed(&mut round, 0, true, &format!("the eviction from \"{name}\"")).await;
        if let Some(rest) = round.rest() {
            self.background.take_over(rest);
        }
        closed
    }

    /// What servers say of a claim that they are to give up, each whether it had that: known when a quorum has confirmed it, or
    /// `all` have. So many as are `clear` need not be asked.
    async fn confirmed(
        &self,
        round: &mut Round<'_, bool>,
        clear: usize,
        all: bool,
        what: &str,
    ) -> Result<Freed> {
        let (nodes, quorum) = (self.nodes.len(), self.quorum());
        let (mut removed, mut confirmed, mut failed) = (0, clear, None);
        // A claim that too few servers still had was no hold any more.
        let absent = |removed, confirmed| confirmed - removed > nodes - quorum;
        round
            .answers(|_, answer| {
                match answer {
                    Ok(was_there) => {
                        confirmed += 1;
                        removed += usize::from(was_there);
                    }
                    Err(error) => failed = Some(error),
                }
                !all && (removed >= quorum || absent(removed, confirmed))
            })
            .await;
        match failed {
            Some(error) if confirmed < quorum => {
                let message = format!("only {confirmed} of {nodes} servers have confirmed {what}");
                Err(Error::new(error.kind(), message).with_source(error))
            }
            _ if removed == 0 || absent(removed, confirmed) => Ok(Freed::Absent),
            _ => Ok(Freed::Removed),
        }
    }

    fn leaving(&self, key: &str, id: ClaimId, entry: &Arc<Entry>, ttl: Duration) -> Leaving {
        let mut command = script::RELEASE_LEAN.on([key]);
        command.arg(id);
        let (env, entry) = (self.env.clone(), entry.clone());
        let evenness = self.trust.terms.evenness;
        let arrived = entry.sent() + timing::on_its_way(evenness);
        let until = env.now() + timing::haunts(ttl, evenness);
        Leaving { arrived, until, env, entry, command: Arc::new(command) }
    }
}

/// For how long it is waited for that a server confirms the end of a claim.
fn confirming(node: &Node, ttl: Duration) -> Duration {
    node.patience(ttl).max(timing::silence(ttl))
}

/// What takes a claim off the servers.
#[derive(Clone)]
struct Leaving {
    env: Env,
    entry: Arc<Entry>,
    command: Arc<Command>,
    /// When all has arrived that was sent for it, or will be refused.
    arrived: Instant,
    /// From when on nothing of it can stand anywhere.
    until: Instant,
}

impl Leaving {
    /// Removes a claim from one server. From this call on, what is sent there on the same connection comes after that.
    fn leave(
        self,
        at: usize,
        node: Arc<Node>,
        mark: &Mark,
    ) -> impl Future<Output = Result<bool>> + Send + use<> {
        let before = mark.line();
        let ticket = self.entry.leave(at, before.clone());
        self.insist(at, ticket, node, before)
    }

    /// Removes a claim for sure: repeats that until the server has confirmed it, or nothing of the claim can stand there any
    /// more, or somebody else sees to it.
    async fn insist(
        self,
        at: usize,
        ticket: u64,
        node: Arc<Node>,
        before: Option<Arc<Line>>,
    ) -> Result<bool> {
        let mut last = before;
        let Leaving { env, entry, command, arrived, until } = self;
        let (mut pause, longest) = PAUSE;
        let mut removed = false;
        loop {
            let begun = env.now();
            let attempt = tokio::select! {
                biased;
                attempt = leave_once(&node, &mut last, &command, || entry.insists(at, ticket)) => attempt,
                () = env.sleep_until(begun + STANDSTILL) => {
                    // Perhaps not the server stands still, but the runtime that drives this connection.
                    if let Some(line) = &last {
                        line.link.close();
                    }
                    Err(Error::new(ErrorKind::Unknown, "did not answer"))
                }
            };
            let error = match attempt {
                Ok((was_there, surely_last)) => {
                    removed |= was_there;
                    if surely_last || begun >= arrived {
                        entry.answered(at, ticket, Mark::Clear);
                        return Ok(removed);
                    }
                    Error::new(ErrorKind::Unknown, "may yet receive the claim, over a connection that broke")
                }
                Err(error) => {
                    // One whose answer was lost may have been the one that removed it.
                    removed |= error.kind() == ErrorKind::Unknown;
                    error
                }
            };
            let next = env.now() + pause.mul_f64(0.5 + 0.5 * env.random().jitter());
            if !error.is_transient() || next >= until || !entry.insists(at, ticket) {
                entry.answered(at, ticket, Mark::Clear);
                return Err(error);
            }
            env.sleep_until(next).await;
            pause = (pause * 2).min(longest);
        }
    }

    /// Takes the answers to a lost vote that come late, and gives back the votes that are ours after all, or may be.
    async fn heed(self, vote: u64, late: impl Stream<Item = usize>, nodes: Vec<Arc<Node>>) {
        let heed = async |at| {
            if let Some(node) = nodes.get(at)
                && let Some((ticket, before)) = self.entry.leave_late(at, vote)
            {
                // It has tried what can be tried.
                let _ = self.clone().insist(at, ticket, node.clone(), before).await;
            }
        };
        // Where no answer comes, perhaps the runtime that drives the connection stands still.
        let overdue = self.env.sleep_until(self.env.now() + STANDSTILL);
        late.take_until(Box::pin(overdue)).for_each_concurrent(None, heed).await;
        stream::iter(0..nodes.len()).for_each_concurrent(None, heed).await;
    }
}

/// Whether the claim was there, and whether it surely does not come again. A server that does not know the script any more gets
/// it with the command, unless a step was sent after that: it would take that one's vote along.
async fn leave_once(
    node: &Arc<Node>,
    last: &mut Option<Arc<Line>>,
    command: &Command,
    still_wanted: impl FnOnce() -> bool,
) -> Result<(bool, bool)> {
    let (line, surely_after) = node.line_after(last.clone()).await?;
    if surely_after {
        // What comes next comes after this, too.
        *last = Some(line.clone());
    }
    let answer = node.run_while(&line, &script::RELEASE_LEAN, command, still_wanted).await;
    let answer = answer.map_err(|error| of_release(error, false))?;
    Ok((reply::number(&answer)? == 1, surely_after))
}
