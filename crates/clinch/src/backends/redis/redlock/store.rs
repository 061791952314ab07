//! The backend: each step is one round of requests, and what a quorum says counts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::super::keys::{lock_key, refuse_reserved};
use super::super::store::{OwnerText, deleted};
use super::claims::{Claims, Entry};
use super::meeting;
use super::node::Node;
use super::renewal::evicted;
use super::round::Background;
use super::settings::Rules;
use super::timing;
use super::trust::Trust;
use super::turns::{Ear, Turns};
use super::vote::Ballot;
use super::votes::{Tally, Verdict, quorum};
use crate::backend::{Backend, Busy, Capabilities, Freed, Grant, LockState, Progress, Renewal, Survey, Wake};
use crate::check::Check;
use crate::claim::{Claim, ClaimId, Mode};
use crate::clock::Instant;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::token::Token;

/// How often a waiter asks that waits for servers that do not vote.
pub(super) const ASK_AGAIN: Duration = Duration::from_secs(1);

/// For how long what goes on in the background is waited for when a client closes. Of a process that ends then, nobody would tell a far
/// server; one that hangs keeps nobody for longer.
const FINISH_FOR: Duration = Duration::from_secs(1);

/// A lock on several servers that know nothing of each other.
pub(super) struct Quorum {
    pub(super) env: Env,
    pub(super) nodes: Vec<Arc<Node>>,
    pub(super) ears: Vec<Arc<Ear>>,
    pub(super) rules: Rules,
    pub(super) claims: Arc<Claims>,
    pub(super) turns: Arc<Turns>,
    pub(super) background: Arc<Background>,
    pub(super) trust: Arc<Trust>,
    pub(super) owner: OwnerText,
}

impl Quorum {
    pub(super) fn new(env: Env, nodes: Vec<Arc<Node>>, rules: Rules) -> Quorum {
        let turns = Arc::new(Turns::new(env.clone()));
        let ears = (0..nodes.len()).map(|node| Arc::new(Ear { turns: turns.clone(), node })).collect();
        Quorum {
            background: Background::new(env.clone()),
            trust: Arc::new(Trust::new(env.clone(), nodes.clone(), rules.clone())),
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

    /// What is known of a claim, for as long as something of it may stand somewhere.
    pub(super) fn entry(&self, id: ClaimId) -> Arc<Entry> {
        let lives = timing::haunts(self.rules.max_ttl, self.trust.terms.evenness);
        self.claims.begin(id, self.nodes.len(), self.env.now(), lives)
    }

    /// The grant of a claim that has won, if enough is left of its lease.
    fn grant(&self, claim: &Claim, token: Token, sent: Instant) -> Result<Grant> {
        let ttl = claim.ttl;
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
        let decided = tally.has_winner();
        let again = match abstention {
            // Others that said nothing, or that the lock was taken, may say something else much sooner.
            Some(left) => Some((now + (left + Duration::from_millis(1)).min(ASK_AGAIN), false)),
            // Claims met, and would meet again if all of them asked when all have withdrawn. Where that goes on, it is no meeting: one has
            // a server that says nothing, or others have one server each and keep it.
            None if !decided => {
                let trip = meeting::trip_to(self.quorum(), self.nodes.iter().filter_map(|node| node.trip()));
                let pause = meeting::split_pause(trip, entry.splits(), self.env.random().jitter());
                Some((now + pause, entry.splits() >= meeting::MEETINGS))
            }
            None => None,
        };
        entry.refused(again, decided, tally.mute());
        let holder = tally.holder().cloned();
        let busy =
            Busy { ahead: 1, holder, undecided: !decided, detail: Some(detail.into()), ..Busy::default() };
        if claim.enqueue {
            self.turns.sit(key, claim.id, busy.clone());
        }
        if claim.enqueue && decided {
            let holder = busy.holder.as_ref().map(|holder| holder.id);
            let here = holder.filter(|id| self.claims.is_live(*id));
            self.turns.held(key, here);
            if let Some(id) = here.filter(|id| !self.claims.is_live(*id)) {
                // It has gone before that was noted.
                self.turns.freed(key, id);
            }
        }
        Ok(busy)
    }

    async fn take_step(&self, claim: &Claim, key: &str, entry: &Arc<Entry>) -> Result<Progress> {
        self.trust.refresh().await;
        let sent = self.env.now();
        let Ballot { tally, ticket, late } = self.vote(claim, key, entry, sent).await?;
        let why = match tally.verdict() {
            Some(Verdict::Won) => {
                let granted = self.agree(claim, key, entry, &tally).await;
                match granted.and_then(|token| self.grant(claim, token, sent)) {
                    Ok(grant) => {
                        entry.granted(grant.token);
                        self.turns.granted(key, claim, grant);
                        self.turns.rise(key, claim.id);
                        return Ok(Progress::Granted(grant));
                    }
                    Err(error) => Some(error),
                }
            }
            _ => None,
        };
        let another_has_it = why.is_none() && tally.has_winner();
        let late = (claim.enqueue && another_has_it).then_some((ticket, late));
        self.withdraw(claim, key, entry, late).await;
        match why {
            Some(error) => Err(error),
            None => self.refusal(claim, key, entry, &tally).map(Progress::Busy),
        }
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

    async fn examine(&self) -> Vec<Check> {
        self.examine_all().await
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
        if self.rules.min_validity >= claim.ttl {
            return Err(Error::invalid(format!(
                "of a TTL of {:?} never as much is left as min_validity= asks for, {:?}",
                claim.ttl, self.rules.min_validity
            )));
        }
        let key = self.key(&claim.name);
        refuse_reserved(&key)?;
        let entry = self.entry(claim.id);
        if claim.enqueue
            && !entry.take_impatience()
            && let Some(busy) = self.turns.follow(&key, claim.id)
        {
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
        let (mut gone, mut is_evicted, mut silent) = (0, false, None);
        let id = claim.id.to_string();
        self.read(&claim.name, |answer| {
            match answer {
                Ok((left, value)) => {
                    let rest = value.strip_prefix(&id);
                    // A star: a client of one of the servers waits for it.
                    match rest.is_some_and(|rest| rest.starts_with([' ', '*'])) {
                        // Without an end, so at least for as long as a renewal would make it.
                        true => ours.push(left.unwrap_or(claim.ttl)),
                        false => gone += 1,
                    }
                    is_evicted |= rest.is_some_and(|rest| rest.starts_with('!'));
                }
                Err(error) => silent = Some(error),
            }
            ours.len() >= self.quorum() || gone > self.nodes.len() - self.quorum()
        })
        .await;
        if let Some(at) = ours.len().checked_sub(self.quorum()) {
            ours.sort_unstable();
            return Ok(Renewal::Renewed(ours.get(at).copied()));
        }
        match silent {
            _ if is_evicted => Ok(Renewal::Lost(evicted())),
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
        let Survey { locks, unread } = self.survey(prefix).await?;
        unread.map_or(Ok(locks), Err)
    }

    async fn survey(&self, prefix: &str) -> Result<Survey> {
        self.survey_of(prefix).await
    }

    async fn state(&self, name: &LockName) -> Result<Option<LockState>> {
        refuse_reserved(&self.key(name))?;
        self.state_of(name).await
    }

    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed> {
        self.take_away(name, claim).await
    }

    async fn close(&self) {
        tokio::select! {
            biased;
            () = self.background.finish() => {}
            () = self.env.sleep_until(self.env.now() + FINISH_FOR) => {}
        }
    }
}

impl fmt::Debug for Quorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<String> = self.nodes.iter().map(|node| node.address.to_string()).collect();
        f.debug_struct("Redlock").field("nodes", &nodes).finish_non_exhaustive()
    }
}
