//! Counting votes: who won, what to tell about it, and when to ask again. Pure.

use std::fmt::Write as _;
use std::time::Duration;

use super::node::in_millis;
use crate::backend::ClaimState;
use crate::error::{Error, ErrorKind};
use crate::token::Token;

/// What a server's error says, with its name if that is not in it.
pub(super) fn named(name: &str, error: &Error) -> String {
    let text = error.to_string();
    if text.contains(name) { text } else { format!("{name} {text}") }
}

/// How many of `nodes` are more than half.
pub(super) fn quorum(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// What one server answered to a claim.
#[derive(Debug)]
pub(super) enum Vote {
    /// It is ours, with this token.
    Ours(u64),
    /// Another has it, whose name is in `who`, for this long; `None`: without an end.
    Taken { who: String, holder: Option<Box<ClaimState>>, left: Option<Duration> },
    /// It does not count for this long.
    Abstains { left: Duration, why: String },
    /// It did not answer, or not with a vote.
    None(Error),
}

/// How a vote ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Won,
    /// It cannot be won any more.
    Lost,
}

/// The votes of one claim so far; one place for each server.
pub(super) struct Tally {
    votes: Vec<Option<Vote>>,
    /// The token that the claim was granted with, if its step is repeated. As long as a quorum has it, nobody else held the
    /// lock since.
    granted: Option<Token>,
}

impl Tally {
    pub(super) fn new(nodes: usize, granted: Option<Token>) -> Tally {
        Tally { votes: (0..nodes).map(|_| None).collect(), granted }
    }

    pub(super) fn quorum(&self) -> usize {
        quorum(self.votes.len())
    }

    pub(super) fn note(&mut self, node: usize, vote: Vote) {
        if let Some(place) = self.votes.get_mut(node) {
            *place = Some(vote);
        }
    }

    fn cast(&self) -> impl Iterator<Item = &Vote> {
        self.votes.iter().flatten()
    }

    fn count(&self, which: impl Fn(&Vote) -> bool) -> usize {
        self.cast().filter(|vote| which(vote)).count()
    }

    fn ours(&self) -> usize {
        self.count(|vote| matches!(vote, Vote::Ours(_)))
    }

    /// What is known of the end as soon as it is; a vote that is split evenly is lost.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        let pending = self.votes.iter().filter(|place| place.is_none()).count();
        match self.ours() {
            ours if ours >= self.quorum() => Some(Verdict::Won),
            ours if ours + pending < self.quorum() => Some(Verdict::Lost),
            _ => None,
        }
    }

    /// Whether more answers would change nothing: it is won, another has won, or nobody can have.
    pub(super) fn is_decided(&self) -> bool {
        match self.verdict() {
            Some(Verdict::Won) => {
                self.granted.is_none() || self.has_granted() || self.votes.iter().all(Option::is_some)
            }
            Some(Verdict::Lost) => {
                self.has_winner()
                    || self.is_busy() && self.is_split()
                    || self.votes.iter().all(Option::is_some)
            }
            None => false,
        }
    }

    /// How many of our votes have this token.
    fn with(&self, token: u64) -> usize {
        self.count(|vote| matches!(vote, Vote::Ours(theirs) if *theirs == token))
    }

    /// Whether a quorum has the token that the claim was granted with.
    fn has_granted(&self) -> bool {
        self.granted.is_some_and(|token| self.with(token.get()) >= self.quorum())
    }

    /// The token of a claim that has won, and how many have it: the one that it was granted with, if that still counts, or
    /// the largest.
    pub(super) fn token(&self) -> (u64, usize) {
        if let Some(token) = self.granted.filter(|_| self.has_granted()) {
            return (token.get(), self.with(token.get()));
        }
        let tokens =
            || self.cast().filter_map(|vote| if let Vote::Ours(token) = vote { Some(*token) } else { None });
        let largest = tokens().max().unwrap_or(0);
        (largest, self.with(largest))
    }

    /// How many servers another has.
    fn votes_of(&self, wanted: &str) -> usize {
        self.count(|vote| matches!(vote, Vote::Taken { who, .. } if who == wanted))
    }

    /// The most votes that one other has.
    fn most(&self) -> usize {
        let votes = |vote: &Vote| if let Vote::Taken { who, .. } = vote { self.votes_of(who) } else { 0 };
        self.cast().map(votes).max().unwrap_or(0)
    }

    /// Who holds the lock: another that has won.
    pub(super) fn holder(&self) -> Option<&ClaimState> {
        self.cast().find_map(|vote| match vote {
            Vote::Taken { who, holder, .. } if self.votes_of(who) >= self.quorum() => holder.as_deref(),
            _ => None,
        })
    }

    /// Whether another has won.
    pub(super) fn has_winner(&self) -> bool {
        self.most() >= self.quorum()
    }

    /// Whether nobody can have won: claims met, and each took a part of the votes.
    pub(super) fn is_split(&self) -> bool {
        let taken = self.count(|vote| matches!(vote, Vote::Taken { .. }));
        let unknown = self.votes.len() - self.ours() - taken;
        taken > 0 && self.most() + unknown < self.quorum()
    }

    /// Whether enough servers told about the lock for it to be busy, and not out of reach.
    pub(super) fn is_busy(&self) -> bool {
        self.count(|vote| matches!(vote, Vote::Ours(_) | Vote::Taken { .. })) >= self.quorum()
    }

    /// The servers that had no vote to give to anybody, as one bit each.
    pub(super) fn mute(&self) -> u64 {
        let mute = |vote: &Option<Vote>| matches!(vote, Some(Vote::Abstains { .. } | Vote::None(_)));
        let votes = self.votes.iter().enumerate();
        votes.filter(|(_, vote)| mute(vote)).fold(0, |all, (at, _)| all | 1 << (at % 64))
    }

    /// For how long too many servers abstain for a quorum, where that alone is in the way.
    pub(super) fn abstention(&self) -> Option<Duration> {
        let told = self.count(|vote| matches!(vote, Vote::Ours(_) | Vote::Taken { .. }));
        let mut left: Vec<Duration> = self
            .cast()
            .filter_map(|vote| if let Vote::Abstains { left, .. } = vote { Some(*left) } else { None })
            .collect();
        left.sort_unstable();
        left.get(self.quorum().checked_sub(told + 1)?).copied()
    }

    /// What each server answered.
    pub(super) fn detail<'a>(&self, names: impl Iterator<Item = &'a str>) -> String {
        let mut text = String::new();
        for (name, vote) in names.zip(&self.votes) {
            let separator = if text.is_empty() { "" } else { "; " };
            // Writing to a string does not fail.
            let _ = match vote {
                None => write!(text, "{separator}{name} was still being asked"),
                Some(Vote::Ours(_)) => write!(text, "{separator}{name} granted it"),
                Some(Vote::Taken { holder, left, .. }) => {
                    let by = holder.as_ref().map_or("another".to_owned(), |holder| match holder.owner.pid {
                        0 => holder.owner.host.clone(),
                        pid => format!("{} (pid {pid})", holder.owner.host),
                    });
                    let left = left.map_or("without an end".to_owned(), |left| {
                        format!("for another {}", humantime::format_duration(in_millis(left)))
                    });
                    write!(text, "{separator}{name} is taken by {by} {left}")
                }
                Some(Vote::Abstains { left, why }) => {
                    let left = humantime::format_duration(Duration::from_secs(left.as_secs() + 1));
                    write!(text, "{separator}{name} does not vote for another {left}: {why}")
                }
                Some(Vote::None(error)) => write!(text, "{separator}{}", named(name, error)),
            };
        }
        text
    }

    /// Why there can be no quorum. If the servers that failed are alone in the way, and none of them would do otherwise the
    /// next time, of their kind; `sent`: whether the claim may have reached one of which that is not known.
    pub(super) fn error(&self, detail: &str, sent: bool) -> Error {
        let failures =
            || self.cast().filter_map(|vote| if let Vote::None(error) = vote { Some(error) } else { None });
        let for_good = |error: &&Error| !error.is_transient();
        let hopeless = failures().filter(for_good).count() > self.votes.len() - self.quorum();
        let kind = match failures().find(for_good) {
            Some(error) if hopeless => error.kind(),
            _ if sent => ErrorKind::Unknown,
            _ => ErrorKind::Unavailable,
        };
        Error::new(kind, format!("{} of {} servers are needed: {detail}", self.quorum(), self.votes.len()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::claim::{ClaimId, Mode, Owner};

    const SECOND: Duration = Duration::from_secs(1);

    fn taken(by: &str, left: u64) -> Vote {
        let owner = Owner { host: by.into(), pid: 7, user: String::new(), label: String::new() };
        let holder = ClaimState {
            id: ClaimId::from_bits(1),
            mode: Mode::Exclusive,
            granted: true,
            token: None,
            owner,
            since: SystemTime::UNIX_EPOCH,
            expires_in: None,
        };
        Vote::Taken { who: by.into(), holder: Some(Box::new(holder)), left: Some(SECOND * left as u32) }
    }

    fn silent() -> Vote {
        Vote::None(Error::new(ErrorKind::Unavailable, "no route"))
    }

    fn tally(votes: impl IntoIterator<Item = Option<Vote>>) -> Tally {
        Tally { votes: votes.into_iter().collect(), granted: None }
    }

    #[test]
    fn a_vote_ends_as_soon_as_its_end_is_known() {
        let ours = || Some(Vote::Ours(1));
        assert_eq!(tally([ours(), ours(), ours(), None, None]).verdict(), Some(Verdict::Won));
        assert_eq!(tally([ours(), ours(), None, None, None]).verdict(), None);
        assert_eq!(
            tally([ours(), Some(silent()), Some(silent()), Some(silent()), None]).verdict(),
            Some(Verdict::Lost)
        );
        let tie = tally([ours(), ours(), Some(taken("a", 1)), Some(taken("a", 1))]);
        assert_eq!(tie.verdict(), Some(Verdict::Lost), "a tie must not hang");
        assert!(tie.is_split() && tie.is_decided());
        let unclear = tally([Some(taken("a", 1)), Some(silent()), None]);
        assert!(unclear.verdict() == Some(Verdict::Lost) && !unclear.is_decided(), "busy, or out of reach?");
    }

    #[test]
    fn a_split_is_told_from_a_holder() {
        let split = tally([Some(Vote::Ours(1)), Some(taken("a", 9)), Some(taken("b", 9))]);
        assert!(split.is_split() && split.is_busy());
        let held = tally([Some(Vote::Ours(1)), Some(taken("a", 9)), Some(taken("a", 8))]);
        assert!(!held.is_split() && held.is_busy());
        assert!(held.has_winner() && !split.has_winner());
        assert_eq!(held.holder().unwrap().owner.host, "a");
        let away = tally([Some(Vote::Ours(1)), Some(taken("a", 9)), Some(silent())]);
        assert!(away.is_busy() && !away.is_split() && !away.has_winner(), "the silent one may be of a");
        assert!(away.holder().is_none() && away.is_decided());
        let dark = tally([Some(taken("a", 9)), Some(silent()), Some(silent())]);
        assert!(!dark.is_split() && !dark.is_busy(), "the silent ones may have the other votes");
    }

    #[test]
    fn who_abstains_is_waited_for_when_nothing_else_is_in_the_way() {
        let abstains = |left: u64| Some(Vote::Abstains { left: SECOND * left as u32, why: "w".into() });
        let fresh = tally([abstains(30), abstains(20), abstains(25)]);
        assert_eq!((fresh.abstention(), fresh.is_busy()), (Some(SECOND * 25), false));
        let one = tally([Some(Vote::Ours(1)), abstains(20), abstains(25)]);
        assert_eq!(one.abstention(), Some(SECOND * 20));
        assert_eq!(tally([abstains(20), Some(silent()), Some(silent())]).abstention(), None);
    }

    #[test]
    fn the_largest_token_and_its_votes_are_counted() {
        let votes =
            [Some(Vote::Ours(5)), Some(Vote::Ours(7)), None, Some(Vote::Ours(7)), Some(taken("a", 1))];
        assert_eq!(tally(votes).token(), (7, 2));
    }

    #[test]
    fn a_step_that_is_repeated_gives_the_token_that_a_quorum_still_has() {
        let ours = |token| Some(Vote::Ours(token));
        let again = |votes: Vec<Option<Vote>>| Tally { votes, granted: Token::new(5) };
        let early = again(vec![ours(5), ours(7), None, None, ours(5)]);
        assert!(early.verdict() == Some(Verdict::Won) && !early.is_decided(), "a third may have it");
        let same = again(vec![ours(5), ours(7), ours(5), None, ours(5)]);
        assert!(same.is_decided() && same.token() == (5, 3));
        let anew = again(vec![ours(5), ours(7), ours(8), Some(silent()), ours(5)]);
        assert!(anew.is_decided() && anew.token() == (8, 1), "another may have held it since");
    }

    #[test]
    fn the_error_names_every_answer_and_says_whether_to_try_again() {
        let refused = || Some(Vote::None(Error::new(ErrorKind::Refused, "h2: wrong password")));
        let names = ["h1", "h2", "h3"];
        let one = tally([Some(silent()), refused(), Some(taken("a", 3))]);
        let detail = one.detail(names.into_iter());
        for part in ["h1 no route", "h2: wrong password", "h3 is taken by a (pid 7) for another 3s"] {
            assert!(detail.contains(part), "{detail}");
        }
        assert!(!detail.contains("h2: h2"), "{detail}");
        assert_eq!(one.error(&detail, false).kind(), ErrorKind::Unavailable);
        assert_eq!(one.error(&detail, true).kind(), ErrorKind::Unknown);
        assert_eq!(tally([None, refused(), refused()]).error("", true).kind(), ErrorKind::Refused);
    }
}
