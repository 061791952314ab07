//! Holds of other processes, as `clinch acquire` leaves them, that are renewed here: votes that a server has lost are set anew, as for
//! one's own. Nothing is known of them here but what the servers say, and who knows more may release them at any time.

use std::sync::Arc;

use super::super::reply;
use super::super::resp::Command;
use super::super::script;
use super::node::{Line, Node};
use super::renewal::{Held, Told};
use super::vote::Request;
use crate::claim::Claim;
use crate::error::Result;

/// How long a claim's id is in a lock's key.
const ID: usize = 32;

/// A hold of another process that a quorum has just confirmed.
pub(super) struct Stranger {
    claim: Arc<Claim>,
    key: String,
    /// Its place among the claims that were renewed.
    at: usize,
    /// Who has confirmed it.
    confirmed: Vec<(Arc<Node>, Arc<Line>)>,
    fencing: bool,
}

/// Claims the votes that a server has lost or never gave. It has tried what can be tried.
pub(super) async fn set_anew(strangers: &[Stranger], told: &Told) {
    for stranger in strangers {
        let _ = stranger.set_anew(told).await;
    }
}

impl Stranger {
    pub(super) fn new<'a>(
        claim: Arc<Claim>,
        key: String,
        at: usize,
        heard: impl Iterator<Item = &'a Told>,
        fencing: bool,
    ) -> Stranger {
        let confirmed = heard.filter(|told| told.held.get(at) == Some(&Held::Ours));
        let confirmed = confirmed.map(|told| (told.node.clone(), told.line.clone())).collect();
        Stranger { claim, key, at, confirmed, fencing }
    }

    async fn set_anew(&self, told: &Told) -> Result<()> {
        if told.held.get(self.at) != Some(&Held::Missing) {
            return Ok(());
        }
        let Some((node, line)) = self.confirmed.first() else { return Ok(()) };
        let Some((token, owner)) = parts(&self.value(node, line).await?, &self.claim.id.to_string()) else {
            return Ok(());
        };
        let request = Request::new(&self.claim, &self.key, token, &owner, self.fencing);
        let Told { node, line, .. } = told;
        // Where its answer is lost, it may have come to stand there as well.
        let _ = node.run_on(line, &script::REDLOCK_CLAIM, &request.to(node, node.dialer.env.now())).await;
        // Who released it meanwhile has found nothing here. That it goes elsewhere is a sign of that.
        for (other, to) in &self.confirmed {
            let Ok(value) = self.value(other, to).await else { continue };
            if parts(&value, &self.claim.id.to_string()).is_none() {
                let mut release = script::RELEASE_LEAN.on([self.key.as_str()]);
                release.arg(self.claim.id);
                node.run_on(line, &script::RELEASE_LEAN, &release).await?;
                break;
            }
        }
        Ok(())
    }

    /// What a server has in the lock's key.
    async fn value(&self, node: &Node, line: &Line) -> Result<String> {
        let mut get = Command::new("GET");
        get.arg(&self.key);
        let values = node.call_on(line, [&get]).await?;
        Ok(values.first().map(reply::lossy).unwrap_or_default())
    }
}

/// The token and what follows the time, in the value of a claim that holds the lock.
fn parts(value: &str, id: &str) -> Option<(u64, String)> {
    // A star: a client of that server alone waits for it.
    let rest = value.get(ID..)?.strip_prefix([' ', '*']).filter(|_| value.starts_with(id))?;
    let mut words = rest.splitn(3, ' ');
    let (token, _since, owner) = (words.next()?.parse().ok()?, words.next()?, words.next()?);
    Some((token, owner.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_anew_is_what_stands_elsewhere() {
        const ID: &str = "000102030405060708090a0b0c0d0e0f";
        let value = |mark| format!(r#"{ID}{mark}1700000000000007 1700000000000000  {{"host":"a b"}}"#);
        let whole = Some((1_700_000_000_000_007, r#" {"host":"a b"}"#.to_owned()));
        assert_eq!(parts(&value(' '), ID), whole);
        assert_eq!(parts(&value('*'), ID), whole);
        assert_eq!(parts(&value('!'), ID), None, "one that was evicted");
        assert_eq!(parts(&value(' '), &ID.replace('f', "e")), None);
        assert_eq!(parts("", ID), None);
    }
}
