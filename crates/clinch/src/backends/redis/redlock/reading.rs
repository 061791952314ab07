//! Looking at locks without changing them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::super::keys::is_reserved;
use super::super::listing::{lock_pattern, scan};
use super::super::reply;
use super::super::resp::Command;
use super::node::Node;
use super::round::Round;
use super::store::Quorum;
use super::vote::who;
use crate::backend::{ClaimState, LockState};
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::token::Token;

/// For how long a server is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// Who holds a lock, as some of the servers say.
struct Holding {
    who: String,
    /// It was evicted, and has not let go yet.
    evicted: bool,
    holder: Option<ClaimState>,
    /// For how long each of them still has it, if it says.
    lefts: Vec<Option<Duration>>,
    /// The token that each of them has: they may differ where one was not needed to agree, or was set anew.
    tokens: Vec<Option<Token>>,
}

impl Holding {
    fn note(&mut self, left: Option<Duration>, token: Option<Token>) {
        self.lefts.push(left);
        self.tokens.push(token);
    }

    /// The token that a quorum agrees on.
    fn token(&self, quorum: usize) -> Option<Token> {
        let votes =
            |wanted: &Token| self.tokens.iter().filter(|token| token.as_ref() == Some(wanted)).count();
        self.tokens.iter().flatten().copied().find(|token| votes(token) >= quorum)
    }

    /// What a quorum holds; `None`: these are too few.
    fn into_state(mut self, quorum: usize) -> Option<ClaimState> {
        let token = self.token(quorum);
        // It is held until the last of a quorum ends; what has no end is the longest.
        self.lefts.sort_unstable_by_key(|left| left.unwrap_or(Duration::MAX));
        let expires_in = self.lefts.get(self.lefts.len().checked_sub(quorum)?).copied().flatten();
        Some(ClaimState { expires_in, token, ..self.holder? })
    }
}

impl Quorum {
    /// Gives for how long a lock's key lives on each server, and then what it holds, to `take`, until that is enough.
    pub(super) async fn read(
        &self,
        name: &LockName,
        mut take: impl FnMut(Option<Duration>, &str) -> bool,
        mut failed: impl FnMut(Error),
    ) {
        let key = self.key(name);
        let mut left = Command::new("PTTL");
        left.arg(&key);
        let mut get = Command::new("GETRANGE");
        get.arg(&key).arg(0).arg(1023);
        let commands = Arc::new((left, get));
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, node) in self.nodes.iter().enumerate() {
            round.ask(at, PATIENCE, read_on(node.clone(), commands.clone()));
        }
        round
            .answers(|_, answer| match answer {
                Ok((left, value)) => take(left, &value),
                Err(error) => {
                    failed(error);
                    false
                }
            })
            .await;
    }

    /// One lock, if a quorum says that somebody holds it.
    pub(super) async fn state_of(&self, name: &LockName) -> Result<Option<LockState>> {
        let mut holdings: Vec<Holding> = Vec::new();
        let (mut answers, mut failure) = (0, None);
        let quorum = self.quorum();
        self.read(
            name,
            |left, value| {
                answers += 1;
                if value.is_empty() {
                    return false;
                }
                let holder = reply::holder(value, left);
                let evicted = reply::is_evicted(value);
                let who = who(value, holder.as_ref());
                let token = holder.as_ref().and_then(|holder| holder.token).filter(|_| self.rules.fencing);
                match holdings.iter_mut().find(|holding| holding.who == who) {
                    Some(known) => known.note(left, token),
                    None => {
                        holdings.push(Holding {
                            who,
                            evicted,
                            holder,
                            lefts: vec![left],
                            tokens: vec![token],
                        });
                    }
                }
                holdings.iter().any(|holding| match token {
                    Some(_) => holding.token(quorum).is_some(),
                    None => holding.lefts.len() >= quorum,
                })
            },
            |error| failure = Some(error),
        )
        .await;
        if let Some(error) = failure.filter(|_| answers < quorum) {
            return Err(self.too_few(answers, error));
        }
        let held = holdings.into_iter().find_map(|holding| {
            let evicted = holding.evicted;
            Some((holding.into_state(quorum)?, evicted))
        });
        Ok(held.map(|(claim, evicted)| {
            let name = name.clone();
            // It is shown no more, but the lock is not free yet.
            match claim.expires_in.filter(|_| evicted) {
                Some(left) => {
                    LockState { name, claims: vec![], closed_until: Some(self.env.clock().wall() + left) }
                }
                None => LockState { name, claims: vec![claim], closed_until: None },
            }
        }))
    }

    /// The names under which a server has something that may be a lock, in order.
    pub(super) async fn locks_named(&self, prefix: &str) -> Result<BTreeSet<LockName>> {
        let ours = &self.rules.prefix;
        let pattern: Arc<str> = lock_pattern(ours, prefix).into();
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, node) in self.nodes.iter().enumerate() {
            let (node, pattern) = (node.clone(), pattern.clone());
            round.ask(at, PATIENCE, async move { scan(&node.line().await?.link, &pattern, "string").await });
        }
        let mut names = BTreeSet::new();
        let (mut answers, mut failure) = (0, None);
        round
            .answers(|_, answer| {
                match answer {
                    Ok(keys) => {
                        answers += 1;
                        let keys = keys.iter().filter(|key| !is_reserved(key));
                        let keys = keys.filter_map(|key| key.strip_prefix(ours.as_str()));
                        names.extend(keys.filter_map(|name| LockName::new(name).ok()));
                    }
                    Err(error) => failure = Some(error),
                }
                false
            })
            .await;
        match failure {
            Some(error) if answers < self.quorum() => Err(self.too_few(answers, error)),
            _ => Ok(names),
        }
    }

    fn too_few(&self, answers: usize, error: Error) -> Error {
        let message =
            format!("only {answers} of {} servers answered, {} are needed", self.nodes.len(), self.quorum());
        let kind = if error.is_transient() { ErrorKind::Unavailable } else { error.kind() };
        Error::new(kind, message).with_source(error)
    }
}

async fn read_on(node: Arc<Node>, commands: Arc<(Command, Command)>) -> Result<(Option<Duration>, String)> {
    let line = node.line().await?;
    let answers = node.call_on(&line, [&commands.0, &commands.1]).await?;
    let [left, value] = answers.as_slice() else {
        return Err(Error::new(ErrorKind::Unknown, "the server left an answer out"));
    };
    let left = u64::try_from(reply::number(left)?).ok().map(Duration::from_millis);
    Ok((left, reply::lossy(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_of_a_holder_is_the_one_that_a_quorum_has() {
        let token = Token::new;
        let holding = |tokens: &[Option<Token>]| Holding {
            who: "a".into(),
            evicted: false,
            holder: None,
            lefts: vec![None; tokens.len()],
            tokens: tokens.to_vec(),
        };
        assert_eq!(holding(&[token(5), token(7)]).token(2), None, "one of two is none of a quorum");
        assert_eq!(holding(&[token(5), token(7), token(7)]).token(2), token(7));
        assert_eq!(holding(&[token(9), token(7), token(7)]).token(2), token(7), "one that was set anew");
        assert_eq!(holding(&[None, None]).token(2), None);
    }
}
