//! Asking the servers for their votes, and for the one token.

use std::sync::Arc;
use std::time::Duration;

use super::super::dating::millis;
use super::super::keys::FENCE;
use super::super::reply;
use super::super::resp::{Command, Sixteen, Value};
use super::super::script;
use super::claims::{Entry, Mark};
use super::node::Node;
use super::round::Round;
use super::store::Quorum;
use super::timing;
use super::votes::{Tally, Vote};
use crate::backend::ClaimState;
use crate::claim::Claim;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::token::Token;

/// A vote whose end is known.
pub(super) struct Ballot<'a> {
    pub(super) tally: Tally,
    /// Tells what it has left on the servers from what was sent later.
    pub(super) ticket: u64,
    /// The requests whose answers were not waited for.
    pub(super) late: Round<'a, Vote>,
}

/// A claim to a server's vote.
pub(super) struct Request(Command);

impl Request {
    /// `owner`: what is to stand there after the token and the time; `fencing`: with a token.
    pub(super) fn new(claim: &Claim, key: &str, least: u64, owner: &str, fencing: bool) -> Request {
        let keys = [key, FENCE];
        let keys = if fencing { &keys[..] } else { &keys[..1] };
        let mut command = script::REDLOCK_CLAIM.on(keys.iter().copied());
        command.arg(claim.id).arg(millis(claim.ttl)).arg(Sixteen(least.min(Token::MAX.get() - 1))).arg(owner);
        Request(command)
    }

    /// The command for one server, sent now.
    pub(super) fn to(&self, node: &Node, now: Instant) -> Command {
        self.0.and(node.end_of_use(now))
    }
}

impl Quorum {
    /// What claims a server's vote, with a token of at least `least`.
    pub(super) fn request(&self, claim: &Claim, key: &str, least: u64) -> Result<Arc<Request>> {
        let owner = self.owner.of(&claim.owner)?;
        let owner = [reply::TELLS_NOBODY, &*owner].concat();
        Ok(Arc::new(Request::new(claim, key, least, &owner, self.rules.fencing)))
    }

    /// Asks all servers that may vote for their votes, until it is known how that ends.
    pub(super) async fn vote(
        &self,
        claim: &Claim,
        key: &str,
        entry: &Arc<Entry>,
        sent: Instant,
    ) -> Result<Ballot<'_>> {
        // First of all, since only the clocks of those count that vote.
        let abstentions: Vec<_> = (0..self.nodes.len()).map(|at| self.trust.abstention(at, sent)).collect();
        let clocks = self.nodes.iter().filter_map(|node| node.clock(sent));
        let least = timing::least_token(clocks, sent, self.quorum(), self.trust.terms.evenness);
        let request = self.request(claim, key, least)?;
        let mut tally = Tally::new(self.nodes.len(), entry.token());
        let ticket = entry.begin_vote();
        let silence = timing::silence(claim.ttl);
        let mut round = Round::new(&self.env, self.nodes.len()).lenient(silence, self.quorum());
        for ((at, node), abstention) in self.nodes.iter().enumerate().zip(abstentions) {
            if let Some(abstention) = abstention {
                let left = abstention.until.since(sent);
                tally.note(at, Vote::Abstains { left, why: abstention.why });
            } else if entry.mark(at).is_unsettled() {
                tally.note(at, Vote::None(unsettled()));
            } else {
                let asking = ask_for_vote(at, ticket, node.clone(), entry.clone(), request.clone());
                round.ask(at, node.patience_for_vote(claim.ttl), asking);
            }
        }
        round
            .answers(|at, answer| {
                let node = self.nodes.get(at);
                let vote = match answer {
                    Ok(Vote::Ours(_)) | Err(_) if let Some(abstention) = self.trust.abstention(at, sent) => {
                        // It was met only now, or its clock has jumped, as this very answer shows.
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
        entry.end_vote();
        if self.trust.is_due(sent) {
            self.background.take_over(self.trust.clone().vouch());
        }
        Ok(Ballot { tally, ticket, late: round })
    }

    /// Has the servers agree on the token of a claim that has won, unless they do.
    pub(super) async fn agree(
        &self,
        claim: &Claim,
        key: &str,
        entry: &Entry,
        tally: &Tally,
    ) -> Result<Token> {
        let (largest, same) = tally.token();
        let token = Token::new(largest)
            .ok_or_else(|| Error::new(ErrorKind::Unknown, "the servers' tokens are none"))?;
        if !self.rules.fencing || same >= self.quorum() {
            return Ok(token);
        }
        let mut command = script::REDLOCK_AGREE.on([key, FENCE]);
        command.arg(claim.id).arg(Sixteen(largest));
        let command = Arc::new(command);
        let silence = timing::silence(claim.ttl);
        let mut round = Round::new(&self.env, self.nodes.len()).lenient(silence, self.quorum());
        for (at, (node, mark)) in self.nodes.iter().zip(entry.marks()).enumerate() {
            // Also to those that have not answered yet: on their connection, it comes after the claim.
            if !mark.is_clear() {
                let (node, command) = (node.clone(), command.clone());
                round.ask(at, node.patience(claim.ttl), async move {
                    // What may still arrive is the same claim: it has this token by then.
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
}

fn unsettled() -> Error {
    Error::new(ErrorKind::Unavailable, "has not yet confirmed the end of an earlier attempt")
}

/// One server's vote.
async fn ask_for_vote(
    at: usize,
    ticket: u64,
    node: Arc<Node>,
    entry: Arc<Entry>,
    request: Arc<Request>,
) -> Result<Vote> {
    let before = entry.mark(at);
    let (line, surely_after) = node.line_after(before.line()).await?;
    let now = || node.dialer.env.now();
    // If an earlier request may still arrive, one release would not be enough for both.
    let sending = |sent| surely_after && entry.sending(at, &line, ticket, sent);
    let mut tries = 0;
    let vote = loop {
        let sent = now();
        if !sending(sent) {
            return Err(unsettled());
        }
        let command = request.to(&node, sent);
        // What is sent after the claim's release would have no end.
        let answer = node.run_while(&line, &script::REDLOCK_CLAIM, &command, || sending(now())).await;
        let received = now();
        let vote = match answer {
            Ok(answer) => {
                node.answered(Some(received.since(sent)));
                let (us, vote) = read_vote(&answer)?;
                if node.is_met_by(&line) {
                    node.clock_read(us, sent, received);
                }
                vote
            }
            Err(error) => Err(error),
        };
        tries += 1;
        match vote {
            Ok(Some(vote)) => break vote,
            // Not the request was late, but the last reading of that clock old.
            Ok(None) if tries == 1 && received.since(sent) < timing::USEFUL => {}
            Ok(None) => return Err(Error::new(ErrorKind::Unknown, "was reached too late")),
            Err(error) => {
                // What surely did not arrive leaves things as they were, unless there was a doubt about them. A refusal may have
                // come in the middle of the script.
                if error.kind() == ErrorKind::Unavailable && before.line().is_none() {
                    entry.answered(at, ticket, before);
                }
                return Err(error);
            }
        }
    };
    let is_ours = matches!(vote, Vote::Ours(_));
    entry.answered(at, ticket, if is_ours { Mark::Held } else { Mark::Clear });
    if is_ours && !node.is_met_by(&line) {
        // Of that run it is not known any more whether its vote counts.
        return Err(Error::new(ErrorKind::Unavailable, "is another server than the one that gave its vote"));
    }
    Ok(vote)
}

/// What is the same in the values that one holder has on several servers, of which each has a time of its own; all of a value that is not
/// ours.
pub(super) fn who(value: &str, holder: Option<&ClaimState>) -> String {
    match holder {
        Some(holder) if holder.owner.pid != 0 => holder.id.to_string(),
        _ => value.to_owned(),
    }
}

/// Reads the answer of `redlock_claim.lua`: the server's time, and what that says of the vote; none: the claim came too late.
fn read_vote(answer: &Value) -> Result<(u64, Result<Option<Vote>>)> {
    let nonsense = || {
        Error::new(ErrorKind::Unknown, "the server's answer to a lock script made no sense; is it a Redis?")
    };
    let count = |value: &Value| u64::try_from(reply::number(value)?).map_err(|_| nonsense());
    match reply::list(answer)? {
        [Value::Int(1), us, token] => Ok((count(us)?, Ok(Some(Vote::Ours(count(token)?))))),
        [Value::Int(0), us, left, value] => {
            let left = u64::try_from(reply::number(left)?).ok().map(Duration::from_millis);
            let value = reply::lossy(value);
            let holder = reply::holder(&value, left);
            let who = who(&value, holder.as_ref());
            Ok((count(us)?, Ok(Some(Vote::Taken { who, holder: holder.map(Box::new), left }))))
        }
        [Value::Int(2), us] => Ok((count(us)?, Ok(None))),
        [Value::Int(3), us] => {
            let why = "its clock is not set, or beyond the year 2255";
            Ok((count(us)?, Err(Error::new(ErrorKind::Unavailable, why))))
        }
        _ => Err(nonsense()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::votes::quorum;
    use super::*;

    /// One that holds all votes would be taken for many, and be asked for ten times a second.
    #[test]
    fn a_holder_is_one_on_servers_with_times_of_their_own() {
        let id = "000102030405060708090a0b0c0d0e0f";
        let owner = r#"{"host":"h","pid":7,"user":"me","label":""}"#;
        let mut tally = Tally::new(3, None);
        for (at, (mark, us)) in
            [(' ', 1_700_000_000_000_001_u64), ('*', 1_700_000_000_000_009)].into_iter().enumerate()
        {
            let value = Value::Text(format!("{id}{mark}1700000000000000 {us} {owner}").into());
            let answer = Value::List([Value::Int(0), Value::Int(1), Value::Int(500), value].into());
            let (_, vote) = read_vote(&answer).unwrap();
            tally.note(at, vote.unwrap().unwrap());
        }
        tally.note(2, Vote::Ours(1));
        assert!(tally.is_busy() && !tally.is_split(), "two of {} are more than half", quorum(3));
        assert_eq!(tally.holder().unwrap().id.to_string(), id);
    }
}
