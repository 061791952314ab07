//! What the promises of a quorum rest on: what each server is like, whether its vote counts or when it will, and whether there are enough.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::super::examine::{Part, has_failed, keys, server};
use super::node::{Abstention, Node};
use super::store::Quorum;
use crate::check::{Check, Verdict};

impl Quorum {
    /// Looks at all servers.
    pub(super) async fn examine_all(&self) -> Vec<Check> {
        let part = Part::Voter { durable: self.rules.durable };
        let looked = self.nodes.iter().map(|node| async move {
            let checks = server(&node.dialer, &node.address, part).await;
            // Its clock and what was left on it, which its vote hangs on; by the clocks of the others, too.
            let met = node.line().await.map(drop);
            (checks, met)
        });
        let looked = join_all(looked).await;
        let mut checks = vec![Check::pass("url", self.meaning())];
        let mut votes = Vec::new();
        for (at, (node, (server, met))) in self.nodes.iter().zip(looked).enumerate() {
            let vote = match met {
                Ok(()) => self.vote_of(at),
                Err(error) => Check::failed("vote", &error, "see what else is said of this server"),
            };
            votes.push(vote.verdict);
            let is_told = vote.verdict == Verdict::Fail && has_failed(&server);
            checks.extend(server);
            checks.extend(Some(vote.at(&node.address)).filter(|_| !is_told));
        }
        let enough = self.enough(&votes);
        if enough.verdict != Verdict::Fail {
            checks = checks.into_iter().map(Check::spared).collect();
        }
        checks.push(enough);
        checks
    }

    fn meaning(&self) -> String {
        let names: Vec<String> = self.nodes.iter().map(|node| node.address.to_string()).collect();
        let keys = self.nodes.first().map(|node: &Arc<Node>| keys(&node.dialer.settings)).unwrap_or_default();
        format!(
            "a quorum of {} servers, {}; {keys}, max_ttl={}",
            names.len(),
            names.join(", "),
            humantime::format_duration(self.rules.max_ttl)
        )
    }

    /// Whether the vote of a server counts, or when it will.
    fn vote_of(&self, at: usize) -> Check {
        let now = self.env.now();
        match self.trust.abstention(at, now) {
            None => Check::pass("vote", "its vote counts"),
            Some(Abstention { until, why }) => {
                // Up, so that nobody comes too early.
                let left = until.since(now).as_millis().div_ceil(1000);
                let left = Duration::from_secs(u64::try_from(left).unwrap_or(u64::MAX));
                let left = humantime::format_duration(left);
                Check::warn(
                    "vote",
                    format!("its vote counts in {left} at most: {why}"),
                    format!("wait for {left}, in which clients may come and go"),
                )
            }
        }
    }

    /// Whether so many vote that a lock can be had.
    fn enough(&self, votes: &[Verdict]) -> Check {
        let of = |verdict| votes.iter().filter(|vote| **vote == verdict).count();
        let (counts, later, needed, all) =
            (of(Verdict::Pass), of(Verdict::Warn), self.quorum(), self.nodes.len());
        let seen = format!("{counts} of {all} servers vote, {needed} are needed");
        match (counts >= needed, counts + later >= needed) {
            (true, _) if counts == all => Check::pass("quorum", seen),
            (true, _) => {
                Check::warn("quorum", seen, "mend the others: a lock must outlive the loss of a server")
            }
            (false, true) => Check::warn("quorum", seen, "wait: until then nobody gets a lock"),
            (false, false) => Check::fail("quorum", seen, "mend the servers that fail"),
        }
    }
}
