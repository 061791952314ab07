//! The backend: each step is one round of requests, and what a quorum says counts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::super::keys::lock_key;
use super::super::reply;
use super::super::resp::{Command, Value};
use super::super::script;
use super::super::store::{OwnerText, deleted, millis};
use super::claims::{Claims, Entry, Mark};
use super::node::Node;
use super::round::{Background, Round};
use super::settings::Rules;
use super::timing;
use super::turns::{Ear, Turns};
use super::votes::{Tally, Verdict, Vote, quorum};
use crate::backend::{Backend, Busy, Capabilities, Freed, Grant, LockState, Progress, Renewal, Wake};
use crate::claim::{Claim, ClaimId, Mode};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::token::Token;

/// How far ahead of the servers' clocks the least token lies that a claim asks for, in microseconds: if it reaches all of
/// them before that, they give the same one, and none needs to be written back.
const AHEAD_US: u64 = 5000;

/// For how long the answer to a release is waited for, at most. It goes on in the background.
pub(super) const RELEASE_PATIENCE: Duration = Duration::from_millis(50);

/// A lock on several servers that know nothing of each other.
pub(super) struct Quorum {
    pub(super) env: Env,
    pub(super) nodes: Vec<Arc<Node>>,
    pub(super) ears: Vec<Arc<Ear>>,
    pub(super) rules: Rules,
    pub(super) claims: Arc<Claims>,
    pub(super) turns: Arc<Turns>,
    pub(super) background: Arc<Background>,
    owner: OwnerText,
}

impl Quorum {
    pub(super) fn new(env: Env, nodes: Vec<Arc<Node>>, rules: Rules) -> Quorum {
        let turns = Arc::new(Turns::default());
        let ears = (0..nodes.len()).map(|node| Arc::new(Ear { turns: turns.clone(), node })).collect();
        Quorum {
            background: Background::new(env.clone()),
            env,
            nodes,
            ears,
            rules,
            claims: Arc::default(),
            turns,
            owner: OwnerText::default(),
        }
    }

    pub(super) fn quorum(&self) -> usize {
        quorum(self.nodes.len())
    }

    pub(super) fn key(&self, name: &LockName) -> String {
        lock_key(&self.rules.prefix, name)
    }

    /// The one key that keeps the last token of a server.
    fn fence(&self) -> String {
        format!("{}\0fence", self.rules.prefix)
    }

    /// The command that claims a server's vote, with a token of at least `least`.
    pub(super) fn claim_command(&self, claim: &Claim, key: &str, least: u64) -> Result<Arc<Command>> {
        let fence = self.fence();
        let keys = [key, &fence];
        let keys = if self.rules.fencing { &keys[..] } else { &keys[..1] };
        let mut command = script::REDLOCK_CLAIM.on(keys.iter().copied());
        command
            .arg(claim.id)
            .arg(millis(claim.ttl))
            .arg(format!("{:016}", least.min(Token::MAX.get() - 1)))
            .arg(&*self.owner.of(&claim.owner)?);
        Ok(Arc::new(command))
    }

    /// Asks all servers that may vote for their votes, until it is known how that ends.
    async fn vote(&self, claim: &Claim, key: &str, entry: &Arc<Entry>, sent: Instant) -> Result<Tally> {
        let latest = self.nodes.iter().filter_map(|node| node.latest_us(sent)).max();
        let command = self.claim_command(claim, key, latest.map_or(0, |us| us.saturating_add(AHEAD_US)))?;
        let mut tally = Tally::new(self.nodes.len());
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, node) in self.nodes.iter().enumerate() {
            if let Some(abstention) = node.abstains(sent) {
                let left = abstention.until.since(sent);
                tally.note(at, Vote::Abstains { left, why: abstention.why });
            } else if entry.mark(at).is_unsettled() {
                tally.note(at, Vote::None(unsettled()));
            } else {
                let request = ask_for_vote(at, node.clone(), entry.clone(), command.clone());
                round.ask(at, node.patience(claim.ttl), request);
            }
        }
        round
            .answers(|at, answer| {
                let node = self.nodes.get(at);
                let vote = match answer {
                    Ok(Vote::Ours(_)) if let Some(abstention) = node.and_then(|node| node.abstains(sent)) => {
                        // Its clock has jumped, as this very answer shows.
                        Vote::Abstains { left: abstention.until.since(sent), why: abstention.why }
                    }
                    Ok(vote) => vote,
                    Err(error) => {
                        if let (Some(node), ErrorKind::Unknown) = (node, error.kind()) {
                            node.answered(None);
                        }
                        Vote::None(error)
                    }
                };
                tally.note(at, vote);
                tally.is_decided()
            })
            .await;
        Ok(tally)
    }

    /// Has the servers agree on the token of a claim that has won, unless they do.
    async fn agree(&self, claim: &Claim, key: &str, entry: &Entry, tally: &Tally) -> Result<Token> {
        let (largest, same) = tally.token();
        let token = Token::new(largest)
            .ok_or_else(|| Error::new(ErrorKind::Unknown, "the servers' tokens are none"))?;
        if !self.rules.fencing || same >= self.quorum() {
            return Ok(token);
        }
        let mut command = script::REDLOCK_AGREE.on([key, &self.fence()]);
        command.arg(claim.id).arg(format!("{largest:016}"));
        let command = Arc::new(command);
        let mut round = Round::new(&self.env, self.nodes.len());
        for (at, (node, mark)) in self.nodes.iter().zip(entry.marks()).enumerate() {
            // Also to those that have not answered yet: on their connection, it comes after the claim.
            if !mark.is_clear() {
                let (node, command) = (node.clone(), command.clone());
                round.ask(at, node.patience(claim.ttl), async move {
                    let (line, _) = node.line_after(mark.line()).await?;
                    reply::number(&node.run_on(&line, &script::REDLOCK_AGREE, &command).await?)
                });
            }
        }
        let mut agreed = 0;
        round
            .answers(|_, answer| {
                agreed += usize::from(matches!(answer, Ok(1)));
                agreed >= self.quorum()
            })
            .await;
        match agreed >= self.quorum() {
            true => Ok(token),
            false => Err(Error::new(
                ErrorKind::Unknown,
                format!(
                    "only {agreed} of {} servers agreed on the token of \"{}\"",
                    self.nodes.len(),
                    claim.name
                ),
            )),
        }
    }

    /// The grant of a claim that has won, if enough is left of its lease.
    fn grant(&self, claim: &Claim, token: Token, sent: Instant) -> Result<Grant> {
        let ttl = self.rules.usable(claim.ttl);
        let left = ttl.saturating_sub(self.env.now().since(sent));
        if left <= self.rules.min_validity {
            return Err(Error::new(
                ErrorKind::Unknown,
                format!(
                    "lock \"{}\" was granted so late that too little of its lease was left: {left:?} of {:?}",
                    claim.name, claim.ttl
                ),
            ));
        }
        Ok(Grant { token, ttl: Some(ttl), from: None })
    }

    /// Why a claim was refused, and when to try again.
    fn refusal(&self, claim: &Claim, key: &str, entry: &Entry, tally: &Tally) -> Result<Busy> {
        let names: Vec<String> = self.nodes.iter().map(|node| node.address.to_string()).collect();
        let detail = tally.detail(names.iter().map(String::as_str));
        let unsettled = entry.marks().iter().any(|mark| !mark.is_clear());
        let abstention = tally.abstention();
        if !tally.is_busy() && (abstention.is_none() || !claim.enqueue) {
            return Err(tally.error(&detail, unsettled));
        }
        let now = self.env.now();
        let split = tally.is_split();
        let again = match abstention {
            _ if split => {
                let trip =
                    self.nodes.iter().map(|node| node.patience(claim.ttl)).min().unwrap_or_default() / 5;
                Some(now + timing::split_pause(trip, entry.splits(), self.env.random().jitter()))
            }
            Some(left) => Some(now + left + Duration::from_millis(1)),
            None => None,
        };
        entry.refused(again, split);
        let busy = Busy { ahead: 1, holder: tally.holder(), place_ttl: None, detail: Some(detail.into()) };
        if claim.enqueue {
            self.turns.sit(key, claim.id, Some(&busy));
        }
        Ok(busy)
    }

    async fn take_step(&self, claim: &Claim, key: &str, entry: &Arc<Entry>) -> Result<Progress> {
        let sent = self.env.now();
        let tally = self.vote(claim, key, entry, sent).await?;
        let why = match tally.verdict() {
            Some(Verdict::Won) => {
                let granted = self.agree(claim, key, entry, &tally).await;
                match granted.and_then(|token| self.grant(claim, token, sent)) {
                    Ok(grant) => {
                        self.turns.rise(key, claim.id);
                        return Ok(Progress::Granted(grant));
                    }
                    Err(error) => Some(error),
                }
            }
            _ => None,
        };
        self.withdraw(claim, key, entry).await;
        match why {
            Some(error) => Err(error),
            None => self.refusal(claim, key, entry, &tally).map(Progress::Busy),
        }
    }
}

fn unsettled() -> Error {
    Error::new(ErrorKind::Unavailable, "has not yet confirmed the end of an earlier attempt")
}

/// One server's vote.
async fn ask_for_vote(at: usize, node: Arc<Node>, entry: Arc<Entry>, command: Arc<Command>) -> Result<Vote> {
    let before = entry.mark(at);
    let (line, _) = node.line_after(before.line()).await?;
    if !entry.sending(at, &line) {
        return Err(unsettled());
    }
    let sent = node.dialer.env.now();
    let answer = node.run_on(&line, &script::REDLOCK_CLAIM, &command).await;
    let received = node.dialer.env.now();
    match answer {
        Ok(answer) => {
            node.answered(Some(received.since(sent)));
            let (us, vote) = read_vote(&answer)?;
            node.clock_read(us, sent, received);
            entry.set(at, if let Vote::Ours(_) = vote { Mark::Held } else { Mark::Clear });
            Ok(vote)
        }
        Err(error) => {
            // What surely did not arrive leaves things as they were, unless there was a doubt about them.
            if error.kind() != ErrorKind::Unknown && before.line().is_none() {
                entry.set(at, before);
            }
            Err(error)
        }
    }
}

/// Reads the answer of `redlock_claim.lua`.
fn read_vote(answer: &Value) -> Result<(u64, Vote)> {
    let nonsense = || {
        Error::new(ErrorKind::Unknown, "the server's answer to a lock script made no sense; is it a Redis?")
    };
    let count = |value: &Value| u64::try_from(reply::number(value)?).map_err(|_| nonsense());
    match reply::list(answer)? {
        [Value::Int(1), us, token] => Ok((count(us)?, Vote::Ours(count(token)?))),
        [Value::Int(0), us, left, value] => {
            let left = u64::try_from(reply::number(left)?).ok().map(Duration::from_millis);
            let value = reply::lossy(value);
            let holder = reply::holder(&value, left).map(Box::new);
            Ok((count(us)?, Vote::Taken { value, holder, left }))
        }
        _ => Err(nonsense()),
    }
}

#[async_trait]
impl Backend for Quorum {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fencing: self.rules.fencing,
            push: true,
            expiry: true,
            detached: true,
            processes: true,
            hosts: true,
            restart: self.rules.fencing,
            failover: true,
            ..Capabilities::default()
        }
    }

    fn longest_ttl(&self) -> Duration {
        self.rules.max_ttl
    }

    async fn claim(&self, claim: &Claim) -> Result<Progress> {
        if claim.mode != Mode::Exclusive {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("Redlock has no \"{}\" claims: its servers have no queue in common", claim.mode),
            ));
        }
        if claim.ttl > self.rules.max_ttl {
            return Err(Error::invalid(format!("a TTL of {:?} is longer than max_ttl=", claim.ttl)));
        }
        let key = self.key(&claim.name);
        let entry = self.claims.begin(claim.id, self.nodes.len());
        if claim.enqueue
            && !entry.take_impatience()
            && let Some(busy) = self.turns.must_wait(&key, claim.id)
        {
            self.turns.sit(&key, claim.id, None);
            return Ok(Progress::Busy(busy));
        }
        let progress = self.take_step(claim, &key, &entry).await;
        if progress.is_err() {
            // Whoever asked in vain goes on asking for itself, so that it gives up in its own time.
            entry.lose_patience();
        }
        if !claim.enqueue && matches!(progress, Ok(Progress::Busy(_))) {
            // It has been withdrawn, and nobody will release it.
            entry.close();
            self.claims.forget(claim.id);
        }
        progress
    }

    async fn wait(&self, claim: &Claim) -> Result<Wake> {
        self.wait_for_change(claim).await;
        Ok(Wake::Step)
    }

    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        self.renew_all(claims).await
    }

    async fn verify(&self, claim: &Claim) -> Result<Renewal> {
        let mut ours = Vec::new();
        let (mut gone, mut silent) = (0, None);
        let id = claim.id.to_string();
        self.read(
            &claim.name,
            |left, value| {
                match (value.split_once(' '), left) {
                    (Some((holder, _)), Some(left)) if holder == id => ours.push(left),
                    _ => gone += 1,
                }
                ours.len() >= self.quorum() || gone > self.nodes.len() - self.quorum()
            },
            |error| silent = Some(error),
        )
        .await;
        if let Some(at) = ours.len().checked_sub(self.quorum()) {
            ours.sort_unstable();
            return Ok(Renewal::Renewed(ours.get(at).map(|left| self.rules.usable(*left))));
        }
        match silent {
            _ if gone > self.nodes.len() - self.quorum() => Ok(Renewal::Lost(deleted())),
            Some(error) => Err(error),
            None => Err(Error::new(ErrorKind::Unknown, "too few servers answered")),
        }
    }

    async fn downgrade(&self, _claim: &Claim) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "Redlock has no readers"))
    }

    async fn release(&self, claim: &Claim, linger: Duration) -> Result<Freed> {
        if !linger.is_zero() {
            return Err(Error::new(ErrorKind::Unsupported, "Redlock cannot keep a lock closed"));
        }
        self.free(&claim.name, claim.id, claim.ttl).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        let mut states = Vec::new();
        for name in self.locks_named(prefix).await? {
            // Without a prefix of ours, any text in the database would look like a foreign holder.
            let listed = |state: &LockState| {
                !self.rules.prefix.is_empty() || state.claims.iter().any(|claim| claim.owner.pid != 0)
            };
            states.extend(self.state(&name).await?.filter(listed));
        }
        Ok(states)
    }

    async fn state(&self, name: &LockName) -> Result<Option<LockState>> {
        self.state_of(name).await
    }

    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed> {
        self.free(name, claim, self.rules.max_ttl).await
    }
}

impl fmt::Debug for Quorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<String> = self.nodes.iter().map(|node| node.address.to_string()).collect();
        f.debug_struct("Redlock").field("nodes", &nodes).finish_non_exhaustive()
    }
}
