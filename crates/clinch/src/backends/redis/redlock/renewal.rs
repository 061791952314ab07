//! Renewing many claims with one command for each server, and setting anew what a server has lost.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;

use super::super::dating::millis;
use super::super::reply;
use super::super::resp::{Command, Value};
use super::super::script;
use super::super::store::deleted;
use super::claims::Entry;
use super::free::STANDSTILL;
use super::node::{Line, Node};
use super::round::Round;
use super::store::Quorum;
use super::strangers::{self, Stranger};
use super::timing;
use super::vote::Request;
use crate::backend::Renewal;
use crate::claim::{Claim, Loss, LossKind};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::token::Token;

/// For how long the answers to a renewal are waited for: a part of the TTL, between these. A quorum that has answered is
/// not kept waiting by the others.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// What the servers said of one claim.
#[derive(Clone, Copy, Default)]
struct Count {
    held: usize,
    missing: usize,
    /// On so many servers an operator has taken it away.
    evicted: usize,
}

impl Count {
    fn note(&mut self, held: Held) {
        match held {
            Held::Ours => self.held += 1,
            Held::Missing => self.missing += 1,
            Held::Evicted => self.evicted += 1,
        }
    }

    fn gone(&self) -> usize {
        self.missing + self.evicted
    }
}

/// What one server said of one claim.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    Ours,
    Missing,
    Evicted,
}

/// What one server said of all claims, and on which connection.
pub(super) struct Told {
    pub(super) node: Arc<Node>,
    pub(super) line: Arc<Line>,
    pub(super) held: Vec<Held>,
}

/// A hold that a quorum has confirmed, and what claims a vote for it.
struct Hold {
    entry: Arc<Entry>,
    request: Arc<Request>,
}

impl Quorum {
    pub(super) async fn renew_all(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        let keys: Vec<String> = claims.iter().map(|claim| self.key(&claim.name)).collect();
        let mut command = script::RENEW_HELD.on(keys.iter().map(String::as_str));
        for claim in claims {
            command.arg(claim.id).arg(millis(claim.ttl));
        }
        let command = Arc::new(command);
        // Before the round: one of ours that was released meanwhile is no stranger.
        let strange: Vec<bool> = claims.iter().map(|claim| self.claims.get(claim.id).is_none()).collect();
        let (least, most) = PATIENCE;
        let patience = claims.iter().map(|claim| claim.ttl / 10).min().unwrap_or(most).clamp(least, most);
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, node) in self.nodes.iter().enumerate() {
            round.ask(at, patience, renew_on(node.clone(), command.clone()));
        }
        let quorum = self.quorum();
        let mut counts = vec![Count::default(); claims.len()];
        let mut heard = Vec::new();
        let mut failure = None;
        let decided = |count: &Count| count.held >= quorum || count.gone() > self.nodes.len() - quorum;
        round
            .answers(|at, answer| {
                match answer {
                    Ok(told) => {
                        for (count, held) in counts.iter_mut().zip(&told.held) {
                            count.note(*held);
                        }
                        heard.push((at, told));
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
        let confirmed = |((claim, key), count): ((&Arc<Claim>, &String), &Count)| {
            (count.held >= quorum).then(|| self.hold(claim, key)).flatten()
        };
        let holds: Vec<_> = claims.iter().zip(&keys).zip(&counts).map(confirmed).collect();
        heard.iter().for_each(|(at, told)| set_anew(&holds, *at, told, self.env.now()));
        let of_another = counts.iter().zip(&strange).enumerate();
        let of_another = of_another.filter(|(_, (count, strange))| **strange && count.held >= quorum);
        let strangers: Vec<Stranger> = of_another
            .filter_map(|(at, _)| {
                let (claim, key) = (claims.get(at)?.clone(), keys.get(at)?.clone());
                let told = heard.iter().map(|(_, told)| told);
                Some(Stranger::new(claim, key, at, told, self.rules.fencing))
            })
            .collect();
        if !strangers.is_empty() || holds.iter().any(Option::is_some) {
            // Who answers last may be the one that has lost its vote.
            let (env, overdue) = (self.env.clone(), self.env.sleep_until(self.env.now() + STANDSTILL));
            let late = round.late().take_until(Box::pin(overdue));
            self.background.take_over(async move {
                for (_, told) in &heard {
                    strangers::set_anew(&strangers, told).await;
                }
                let mut late = pin!(late);
                while let Some((at, told)) = late.next().await {
                    let Ok(told) = told else { continue };
                    set_anew(&holds, at, &told, env.now());
                    strangers::set_anew(&strangers, &told).await;
                }
            });
        }
        // Who holds for long asks for no votes, and may be the only one who meets a server that has restarted.
        if self.trust.is_due(self.env.now()) {
            self.background.take_over(self.trust.clone().vouch());
        }
        let renewal = |(claim, count): (&Arc<Claim>, Count)| {
            if count.held >= quorum {
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

    /// A hold that a quorum has just confirmed; none, where the claim is another process's, or was released meanwhile.
    fn hold(&self, claim: &Claim, key: &str) -> Option<Hold> {
        let entry = self.claims.get(claim.id)?;
        entry.lives_until(self.env.now() + timing::haunts(self.rules.max_ttl, self.trust.terms.evenness));
        // With no smaller a token: a server may have forgotten the last that it gave.
        let least = entry.token().map_or(0, Token::get);
        let request = self.request(claim, key, least).ok()?;
        Some(Hold { entry, request })
    }
}

/// Claims the votes that a server has lost or never gave, which strengthens holds that a quorum has confirmed. Nobody waits for
/// it.
fn set_anew(holds: &[Option<Hold>], at: usize, told: &Told, now: Instant) {
    let Told { node, line, held } = told;
    let lost = holds.iter().zip(held).filter(|(_, held)| matches!(held, Held::Missing));
    let missing: Vec<&Hold> = lost.filter_map(|(hold, _)| hold.as_ref()).collect();
    if !missing.is_empty() {
        // It may have lost its scripts as well, and nobody reads what it answers.
        line.link.post(&script::REDLOCK_CLAIM.load());
    }
    for Hold { entry, request } in missing {
        let on_its_way = timing::on_its_way(node.evenness());
        entry.send_unless_released(at, line, now, on_its_way, || line.link.post(&request.to(node, now)));
    }
}

async fn renew_on(node: Arc<Node>, command: Arc<Command>) -> Result<Told> {
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
    let held = reply::list(&answer)?.iter().map(held).collect();
    Ok(Told { node, line, held })
}

pub(super) fn evicted() -> Loss {
    Loss::new(LossKind::Deleted, "the claim was evicted")
}
