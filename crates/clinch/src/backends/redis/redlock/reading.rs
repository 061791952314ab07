//! Looking at locks without changing them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use super::super::listing::{lock_pattern, locks_on, states};
use super::super::reply;
use super::super::resp::Command;
use super::node::Node;
use super::round::Round;
use super::store::Quorum;
use super::vote::who;
use crate::backend::{ClaimState, LockState, Survey};
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::sync::lock;
use crate::token::Token;

/// How long a release or a claim may be on its way to some servers when others have it.
const CHANGES_HANDS: Duration = Duration::from_millis(100);

/// For how long a server is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// For how long a server is waited for that goes through all its keys. One that hangs is left sooner: its connection ends.
const LISTING: Duration = Duration::from_secs(60);

/// Who holds a lock, as some of the servers say.
struct Holding {
    who: String,
    holder: Option<ClaimState>,
    /// For how long each of them still has it, if it says.
    lefts: Vec<Option<Duration>>,
    /// The same, of those that were told that it was evicted: it has their votes no more, and has not let go yet.
    evicted: Vec<Option<Duration>>,
    /// The token that each of them has: they may differ where one was not needed to agree, or was set anew.
    tokens: Vec<Option<Token>>,
}

impl Holding {
    fn of(who: String, holder: Option<ClaimState>) -> Holding {
        Holding { who, holder, lefts: Vec::new(), evicted: Vec::new(), tokens: Vec::new() }
    }

    fn note(&mut self, left: Option<Duration>, token: Option<Token>) {
        self.lefts.push(left);
        self.tokens.push(token);
    }

    /// How many servers keep the lock closed for it, be it held or evicted.
    fn votes(&self) -> usize {
        self.lefts.len() + self.evicted.len()
    }

    /// The token that a quorum agrees on.
    fn token(&self, quorum: usize) -> Option<Token> {
        let votes =
            |wanted: &Token| self.tokens.iter().filter(|token| token.as_ref() == Some(wanted)).count();
        self.tokens.iter().flatten().copied().find(|token| votes(token) >= quorum)
    }

    /// Whether the answers of so many more servers would change nothing.
    fn is_known(&self, quorum: usize, pending: usize) -> bool {
        let votes = self.lefts.len();
        if votes >= quorum {
            return self.tokens.iter().all(Option::is_none) || self.token(quorum).is_some();
        }
        self.votes() >= quorum && votes + pending < quorum
    }

    /// What a quorum holds, or keeps closed; `None`: these are too few.
    fn into_state(self, name: &LockName, quorum: usize, now: SystemTime) -> Option<LockState> {
        let token = self.token(quorum);
        let is_held = self.lefts.len() >= quorum;
        let mut lefts = self.lefts;
        lefts.extend(self.evicted.into_iter().filter(|_| !is_held));
        // It is held until the last of a quorum ends; what has no end is the longest.
        lefts.sort_unstable_by_key(|left| left.unwrap_or(Duration::MAX));
        let expires_in = lefts.get(lefts.len().checked_sub(quorum)?).copied().flatten();
        let name = name.clone();
        match expires_in.filter(|_| !is_held) {
            // It is shown no more, but the lock is not free yet.
            Some(left) => Some(LockState { name, claims: vec![], closed_until: Some(now + left) }),
            None => {
                let claims = vec![ClaimState { expires_in, token, ..self.holder? }];
                Some(LockState { name, claims, closed_until: None })
            }
        }
    }
}

impl Quorum {
    /// Gives what each server says to `take`, until that is enough: for how long a lock's key lives there, and what it holds.
    pub(super) async fn read(
        &self,
        name: &LockName,
        mut take: impl FnMut(Result<(Option<Duration>, String)>) -> bool,
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
        round.answers(|_, answer| take(answer)).await;
    }

    /// The locks of which a quorum says that somebody holds them, and why these are not all.
    pub(super) async fn survey_of(&self, prefix: &str) -> Result<Survey> {
        // Without a prefix of ours, any text in the database would look like a foreign holder.
        let listed = |state: &LockState| {
            !self.rules.prefix.is_empty() || state.claims.iter().any(|claim| claim.owner.pid != 0)
        };
        let unsure = Mutex::default();
        let look = async |name: LockName| match self.look_at(&name).await? {
            Ok(state) => Ok(state.filter(listed)),
            Err(error) => {
                lock::<Vec<Error>>(&unsure).push(error);
                Ok(None)
            }
        };
        let locks = states(self.locks_named(prefix).await?, look).await?;
        let unsure = std::mem::take(&mut *lock(&unsure));
        let more = unsure.len().saturating_sub(1);
        let unread = unsure.into_iter().next().map(|error| match more {
            0 => error,
            _ => Error::new(error.kind(), format!("{error}; the same goes for {more} more")),
        });
        Ok(Survey { locks, unread })
    }

    /// One lock, if a quorum says that somebody holds it; an error if it could.
    pub(super) async fn state_of(&self, name: &LockName) -> Result<Option<LockState>> {
        self.look_at(name).await?
    }

    /// One lock; the inner error is that nobody can say whether it is held. Then it is looked at again: it may just change hands.
    async fn look_at(&self, name: &LockName) -> Result<Result<Option<LockState>>> {
        let first = self.look_once(name).await?;
        if first.is_ok() {
            return Ok(first);
        }
        self.env.sleep_until(self.env.now() + CHANGES_HANDS).await;
        self.look_once(name).await
    }

    async fn look_once(&self, name: &LockName) -> Result<Result<Option<LockState>>> {
        let mut holdings: Vec<Holding> = Vec::new();
        let (mut answers, mut pending, mut failure) = (0, self.nodes.len(), None);
        let quorum = self.quorum();
        self.read(name, |answer| {
            pending -= 1;
            match answer {
                Ok((left, value)) => {
                    answers += 1;
                    if !value.is_empty() {
                        self.note(&mut holdings, left, &value);
                    }
                }
                Err(error) => failure = Some(error),
            }
            holdings.iter().any(|holding| holding.is_known(quorum, pending))
        })
        .await;
        if let Some(error) = failure.take_if(|_| answers < quorum) {
            return Err(self.too_few(answers, error));
        }
        let now = self.env.clock().wall();
        let silent = self.nodes.len() - answers;
        let most = holdings.iter().map(Holding::votes).max().unwrap_or(0);
        let state = holdings.into_iter().find_map(|holding| holding.into_state(name, quorum, now));
        Ok(match failure {
            Some(error) if state.is_none() && most > 0 && most + silent >= quorum => {
                Err(self.unsure(name, most, silent, error))
            }
            _ => Ok(state),
        })
    }

    /// Counts what one server has for its holder.
    fn note(&self, holdings: &mut Vec<Holding>, left: Option<Duration>, value: &str) {
        let holder = reply::holder(value, left);
        let who = who(value, holder.as_ref());
        let token = holder.as_ref().and_then(|holder| holder.token).filter(|_| self.rules.fencing);
        let at = holdings.iter().position(|holding| holding.who == who).unwrap_or(holdings.len());
        if at == holdings.len() {
            holdings.push(Holding::of(who, holder));
        }
        match holdings.get_mut(at) {
            Some(holding) if reply::is_evicted(value) => holding.evicted.push(left),
            Some(holding) => holding.note(left, token),
            None => {}
        }
    }

    /// The names under which a server has something that may be a lock, in order.
    async fn locks_named(&self, prefix: &str) -> Result<BTreeSet<LockName>> {
        let ours: Arc<str> = self.rules.prefix.as_str().into();
        let pattern: Arc<str> = lock_pattern(&ours, prefix).into();
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, node) in self.nodes.iter().enumerate() {
            let (node, ours, pattern) = (node.clone(), ours.clone(), pattern.clone());
            round.ask(at, LISTING, async move { locks_on(&node.line().await?.link, &ours, &pattern).await });
        }
        let mut names = BTreeSet::new();
        let (mut answers, mut failure) = (0, None);
        round
            .answers(|_, answer| {
                match answer {
                    Ok(found) => {
                        answers += 1;
                        names.extend(found);
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

    /// That those who did not answer would decide.
    fn unsure(&self, name: &LockName, votes: usize, silent: usize, error: Error) -> Error {
        let (all, quorum) = (self.nodes.len(), self.quorum());
        let message = format!(
            "whether \"{name}\" is held is not known: {votes} of {all} servers say so, {quorum} are needed, and {silent} did not answer"
        );
        Error::new(ErrorKind::Unavailable, message).with_source(error)
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

    fn holding(tokens: &[Option<Token>]) -> Holding {
        let mut holding = Holding::of("a".into(), None);
        tokens.iter().for_each(|token| holding.note(None, *token));
        holding
    }

    #[test]
    fn the_token_of_a_holder_is_the_one_that_a_quorum_has() {
        let token = Token::new;
        assert_eq!(holding(&[token(5), token(7)]).token(2), None, "one of two is none of a quorum");
        assert_eq!(holding(&[token(5), token(7), token(7)]).token(2), token(7));
        assert_eq!(holding(&[token(9), token(7), token(7)]).token(2), token(7), "one that was set anew");
        assert_eq!(holding(&[None, None]).token(2), None);
    }

    #[test]
    fn what_is_held_and_what_is_closed_is_told_apart_as_soon_as_it_can_be() {
        let seconds = |time: u64| Some(Duration::from_secs(time));
        let with = |lefts: &[u64], evicted: &[u64]| Holding {
            lefts: lefts.iter().map(|left| seconds(*left)).collect(),
            evicted: evicted.iter().map(|left| seconds(*left)).collect(),
            ..holding(&[])
        };
        let known = |lefts: &[u64], evicted: &[u64], pending| with(lefts, evicted).is_known(2, pending);
        assert!(!known(&[9], &[], 2) && !known(&[], &[9], 2), "neither has a quorum");
        assert!(!known(&[9], &[9], 1), "the third may have it still");
        assert!(known(&[9], &[9], 0) && known(&[], &[9, 9], 1) && known(&[9, 9], &[], 1));
        let name = LockName::new("k").unwrap();
        let closed = |lefts: &[u64], evicted: &[u64]| {
            let state = with(lefts, evicted).into_state(&name, 2, SystemTime::UNIX_EPOCH)?;
            state.closed_until?.duration_since(SystemTime::UNIX_EPOCH).ok()
        };
        assert_eq!(closed(&[99], &[15, 14]), seconds(15), "two of three are closed until then");
        assert_eq!(closed(&[99, 98], &[15]), None);
        assert_eq!(closed(&[99], &[]), None);
        let value = r#"000102030405060708090a0b0c0d0e0f 1700000000000000 1700000000000000 {"host":"h","pid":7,"user":"me","label":""}"#;
        let held = Holding { holder: reply::holder(value, None), ..with(&[9, 8], &[15]) };
        let state = held.into_state(&name, 2, SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!((state.claims[0].expires_in, state.closed_until), (seconds(8), None));
    }
}
