//! Leaving the servers: withdrawing a claim that lost its vote, and releasing one that won.

use std::sync::Arc;
use std::time::Duration;

use super::super::reply;
use super::super::resp::Command;
use super::super::script;
use super::claims::{Entry, Mark};
use super::node::{Line, Node};
use super::round::Round;
use super::store::Quorum;
use super::timing;
use crate::backend::Freed;
use crate::claim::{Claim, ClaimId};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;

/// The pauses between two attempts to reach a server that may still have something of a claim.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// After how long a release is repeated that may have overtaken the claim, where that cannot be made sure.
const OVERTAKEN: Duration = Duration::from_millis(250);

/// After how long an attempt counts as failed: a server that hangs has lost its connection by then.
const STANDSTILL: Duration = Duration::from_secs(3);

impl Quorum {
    /// Removes a claim from all servers on which something of it may stand. Waits for those that have said so, for a short
    /// time; the others are reached in the background, and take no part in a later step until they were.
    pub(super) async fn withdraw(&self, claim: &Claim, key: &str, entry: &Arc<Entry>) {
        let command = release_command(key, claim.id);
        let until = self.env.now() + claim.ttl;
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, (node, mark)) in self.nodes.iter().zip(entry.marks()).enumerate() {
            let patience = match mark {
                // What leaves already is on its way.
                Mark::Clear | Mark::Leaving { .. } => continue,
                Mark::Held => node.patience(claim.ttl),
                Mark::Sent(_) => Duration::ZERO,
            };
            round.ask(at, patience, self.leave(at, node, entry, &mark, &command, until));
        }
        round.answers(|_, _| false).await;
        if let Some(rest) = round.rest() {
            self.background.take_over(rest);
        }
    }

    /// Releases or evicts a claim: done when a quorum has confirmed it.
    pub(super) async fn free(&self, name: &LockName, id: ClaimId, ttl: Duration) -> Result<Freed> {
        let key = self.key(name);
        let known = self.claims.get(id);
        // Of a claim of another process nothing is known.
        let marks = known.as_ref().map_or_else(|| vec![Mark::Held; self.nodes.len()], |entry| entry.marks());
        let entry = known.unwrap_or_else(|| self.claims.begin(id, self.nodes.len()));
        entry.close();
        self.turns.rise(&key, id);
        let command = release_command(&key, id);
        let until = self.env.now() + ttl;
        let mut round = Round::new(&self.env, self.nodes.len());
        let mut asked = 0;
        for (at, (node, mark)) in self.nodes.iter().zip(&marks).enumerate() {
            if !mark.is_clear() {
                asked += 1;
                round.ask(at, timing::silence(ttl), self.leave(at, node, &entry, mark, &command, until));
            }
        }
        let quorum = self.quorum();
        let (mut removed, mut confirmed, mut failed) = (0, self.nodes.len() - asked, None);
        round
            .answers(|_, answer| {
                match answer {
                    Ok(was_there) => {
                        confirmed += 1;
                        removed += usize::from(was_there);
                    }
                    Err(error) => failed = Some(error),
                }
                removed >= quorum || confirmed - removed > self.nodes.len() - quorum
            })
            .await;
        let rest = round.rest();
        match failed {
            Some(error) if confirmed < quorum => {
                // Until all has been tried, a repetition is to know where something may stand.
                let claims = self.claims.clone();
                self.background.take_over(async move {
                    if let Some(rest) = rest {
                        rest.await;
                    }
                    claims.forget(id);
                });
                let message = format!(
                    "only {confirmed} of {} servers have confirmed the release of \"{name}\"",
                    self.nodes.len()
                );
                Err(Error::new(error.kind(), message).with_source(error))
            }
            _ => {
                self.claims.forget(id);
                if let Some(rest) = rest {
                    self.background.take_over(rest);
                }
                // A claim that too few servers still had was no hold any more.
                let gone = removed == 0 || confirmed - removed > self.nodes.len() - quorum;
                Ok(if gone { Freed::Absent } else { Freed::Removed })
            }
        }
    }

    /// Removes a claim from one server, for sure: repeats that until the server has confirmed it, or the claim's lease would
    /// have run out there, or somebody else sees to it.
    fn leave(
        &self,
        at: usize,
        node: &Arc<Node>,
        entry: &Arc<Entry>,
        mark: &Mark,
        command: &Arc<Command>,
        until: Instant,
    ) -> impl Future<Output = Result<bool>> + Send + use<> {
        let ticket = entry.leave(at, mark.line());
        let (node, entry, before, command) = (node.clone(), entry.clone(), mark.line(), command.clone());
        let env = self.env.clone();
        async move {
            let (mut pause, longest) = PAUSE;
            let mut maybe_removed = false;
            loop {
                let attempt = tokio::select! {
                    biased;
                    attempt = leave_once(&node, before.clone(), &command) => attempt,
                    () = env.sleep_until(env.now() + STANDSTILL) => {
                        // Perhaps not the server stands still, but the runtime that drives this connection.
                        if let Some(line) = &before {
                            line.link.close();
                        }
                        Err(Error::new(ErrorKind::Unknown, "did not answer"))
                    }
                };
                let error = match attempt {
                    Ok(was_there) => {
                        entry.left(at, ticket);
                        return Ok(was_there || maybe_removed);
                    }
                    Err(error) => error,
                };
                // One whose answer was lost may have been the one that removed it.
                maybe_removed |= error.kind() == ErrorKind::Unknown;
                let next = env.now() + pause.mul_f64(0.5 + 0.5 * env.random().jitter());
                if !error.is_transient() || next >= until || !entry.insists(at, ticket) {
                    entry.left(at, ticket);
                    return Err(error);
                }
                env.sleep_until(next).await;
                pause = (pause * 2).min(longest);
            }
        }
    }
}

fn release_command(key: &str, id: ClaimId) -> Arc<Command> {
    let mut command = script::RELEASE_LEAN.on([key]);
    command.arg(id);
    Arc::new(command)
}

async fn leave_once(node: &Arc<Node>, before: Option<Arc<Line>>, command: &Command) -> Result<bool> {
    let env = &node.dialer.env;
    let (line, surely_after) = node.line_after(before).await?;
    let mut was_there = reply::number(&node.run_on(&line, &script::RELEASE_LEAN, command).await?)? == 1;
    if !surely_after && !was_there {
        env.sleep_until(env.now() + OVERTAKEN).await;
        was_there = reply::number(&node.run_on(&line, &script::RELEASE_LEAN, command).await?)? == 1;
    }
    Ok(was_there)
}
