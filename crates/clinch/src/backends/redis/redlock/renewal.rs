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
use crate::claim::Claim;
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
        let decided = |count: &Count| count.held >= quorum || count.missing.len() > self.nodes.len() - quorum;
        round
            .answers(|at, answer| {
                match answer {
                    Ok((line, held)) => {
                        for (count, held) in counts.iter_mut().zip(held) {
                            match held {
                                true => count.held += 1,
                                false => count.missing.push(at),
                            }
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
            match count.missing.len() > self.nodes.len() - quorum {
                true => Renewal::Lost(deleted()),
                // The earlier deadline stands.
                false => failed(&count),
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

async fn renew_on(node: Arc<Node>, command: Arc<Command>) -> Result<(Arc<Line>, Vec<bool>)> {
    let line = node.line().await?;
    let answer = node.run_on(&line, &script::RENEW_HELD, &command).await?;
    let held = reply::list(&answer)?.iter().map(|held| *held == Value::Int(1)).collect();
    Ok((line, held))
}
