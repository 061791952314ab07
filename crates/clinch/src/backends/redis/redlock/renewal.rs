//! Renewing many claims with one command for each server, and setting anew what a server has lost.

use std::sync::Arc;
use std::time::Duration;

use super::super::dating::millis;
use super::super::reply;
use super::super::resp::{Command, Value};
use super::super::script;
use super::super::store::deleted;
use super::node::{Line, Node};
use super::round::Round;
use super::store::Quorum;
use super::timing;
use crate::backend::Renewal;
use crate::claim::{Claim, Loss, LossKind};
use crate::error::{Error, ErrorKind, Result};
use crate::token::Token;

/// For how long the answers to a renewal are waited for: a part of the TTL, between these. A quorum that has answered is
/// not kept waiting by the others.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// What the servers said of one claim.
#[derive(Clone, Default)]
struct Count {
    held: usize,
    missing: Vec<usize>,
    /// On so many servers an operator has taken it away.
    evicted: usize,
}

impl Count {
    fn note(&mut self, at: usize, held: Held) {
        match held {
            Held::Ours => self.held += 1,
            Held::Missing => self.missing.push(at),
            Held::Evicted => self.evicted += 1,
        }
    }

    fn gone(&self) -> usize {
        self.missing.len() + self.evicted
    }
}

/// What one server said of one claim.
#[derive(Clone, Copy)]
enum Held {
    Ours,
    Missing,
    Evicted,
}

impl Quorum {
    pub(super) async fn renew_all(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        let keys: Vec<String> = claims.iter().map(|claim| self.key(&claim.name)).collect();
        let mut command = script::RENEW_HELD.on(keys.iter().map(String::as_str));
        for claim in claims {
            command.arg(claim.id).arg(millis(claim.ttl));
        }
        let command = Arc::new(command);
        let (least, most) = PATIENCE;
        let patience = claims.iter().map(|claim| claim.ttl / 10).min().unwrap_or(most).clamp(least, most);
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, node) in self.nodes.iter().enumerate() {
            round.ask(at, patience, renew_on(node.clone(), command.clone()));
        }
        let quorum = self.quorum();
        let mut counts = vec![Count::default(); claims.len()];
        let mut lines: Vec<Option<Arc<Line>>> = vec![None; self.nodes.len()];
        let mut failure = None;
        let decided = |count: &Count| count.held >= quorum || count.gone() > self.nodes.len() - quorum;
        round
            .answers(|at, answer| {
                match answer {
                    Ok((line, held)) => {
                        for (count, held) in counts.iter_mut().zip(held) {
                            count.note(at, held);
                        }
                        if let Some(place) = lines.get_mut(at) {
                            *place = Some(line);
                        }
                    }
                    Err(error) => failure = Some(error),
                }
                counts.iter().all(decided)
            })
            .await;
        let failed = |count: &Count| {
            let mut message =
                format!("{} of {} servers have renewed, {quorum} are needed", count.held, self.nodes.len());
            if let Some(failure) = &failure {
                message = format!("{message}: {failure}");
            }
            Renewal::Failed(Error::new(ErrorKind::Unknown, message))
        };
        let lives = timing::haunts(self.rules.max_ttl, self.trust.terms.evenness);
        let renewal = |(claim, count): (&Arc<Claim>, Count)| {
            if count.held >= quorum {
                if let Some(entry) = self.claims.get(claim.id) {
                    entry.lives_until(self.env.now() + lives);
                }
                self.set_anew(claim, &count.missing, &lines);
                return Renewal::Renewed(Some(claim.ttl));
            }
            match () {
                // Where it was evicted it lives no longer than the notice, however few have said so.
                () if count.evicted > 0 => Renewal::Lost(evicted()),
                () if count.gone() > self.nodes.len() - quorum => Renewal::Lost(deleted()),
                // The earlier deadline stands.
                () => failed(&count),
            }
        };
        claims.iter().zip(counts).map(renewal).collect()
    }

    /// Claims the votes of servers that have lost theirs, which strengthens a hold that a quorum has just confirmed. Nobody
    /// waits for it.
    fn set_anew(&self, claim: &Claim, missing: &[usize], lines: &[Option<Arc<Line>>]) {
        // A claim of another process, or one that was released meanwhile.
        let Some(entry) = self.claims.get(claim.id).filter(|_| !missing.is_empty()) else { return };
        // With no smaller a token: the server may have forgotten the last that it gave.
        let least = entry.token().map_or(0, Token::get);
        let Ok(request) = self.request(claim, &self.key(&claim.name), least) else { return };
        for at in missing {
            if let (Some(Some(line)), Some(node)) = (lines.get(*at), self.nodes.get(*at)) {
                let command = request.to(node);
                entry.send_unless_released(*at, line, self.env.now(), || line.link.post(&command));
            }
        }
    }
}

async fn renew_on(node: Arc<Node>, command: Arc<Command>) -> Result<(Arc<Line>, Vec<Held>)> {
    let line = node.line().await?;
    let answer = node.run_on(&line, &script::RENEW_HELD, &command).await?;
    if !node.is_met_by(&line) {
        return Err(Error::new(ErrorKind::Unavailable, "is another server than the one that has renewed"));
    }
    let held = |held: &Value| match held {
        Value::Int(1) => Held::Ours,
        Value::Int(-1) => Held::Evicted,
        _ => Held::Missing,
    };
    Ok((line, reply::list(&answer)?.iter().map(held).collect()))
}

pub(super) fn evicted() -> Loss {
    Loss::new(LossKind::Deleted, "the claim was evicted")
}
