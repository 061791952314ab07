//! Fence: a fenced store takes no write that is older than one it took, and refuses no other.
//!
//! The store's own clock and order of recording say which write came first, so clock errors play no part among its
//! writes.

use std::collections::HashMap;

use super::model::{At, Lock, Model};
use super::report::{Findings, Property};

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    for (name, lock) in &model.locks {
        let mut store = Store { name, newest: None, claims: HashMap::new(), in_doubt: false };
        let mut granted = Granted::of(lock);
        for write in &lock.writes {
            let Some(token) = write.event.token else { continue };
            granted.advance(write);
            match write.event.accepted {
                Some(true) => store.accepted(*write, token, findings),
                _ => store.refused(*write, token, &granted, findings),
            }
        }
    }
}

struct Store<'a, 'h> {
    name: &'a str,
    /// The accepted write with the largest token.
    newest: Option<(u64, At<'h>)>,
    /// The first claim that wrote under each token.
    claims: HashMap<u64, At<'h>>,
    /// A refusal that cannot be judged was noted already.
    in_doubt: bool,
}

impl<'h> Store<'_, 'h> {
    fn accepted(&mut self, write: At<'h>, token: u64, findings: &mut Findings<'_>) {
        if let Some((newest, earlier)) = self.newest.filter(|(newest, _)| token < *newest) {
            findings.add(Property::Fence, || {
                let text = format!(
                    "lock \"{}\": the store accepted a write with token {token} at t={} although it had accepted \
                     token {newest} at t={}",
                    self.name, write.event.time, earlier.event.time
                );
                (text, vec![Some(earlier), Some(write)])
            });
        } else if let Some(first) = self.other_claim(&write, token) {
            findings.add(Property::Fence, || {
                let text = format!(
                    "lock \"{}\": the store accepted writes of two claims, {} and {}, under one token, {token}",
                    self.name,
                    first.event.claim.as_deref().unwrap_or_default(),
                    write.event.claim.as_deref().unwrap_or_default()
                );
                (text, vec![Some(first), Some(write)])
            });
        }
        if write.event.claim.is_some() {
            self.claims.entry(token).or_insert(write);
        }
        if self.newest.is_none_or(|(newest, _)| token > newest) {
            self.newest = Some((token, write));
        }
    }

    fn refused(&mut self, write: At<'h>, token: u64, granted: &Granted<'h>, findings: &mut Findings<'_>) {
        let newest = self.newest.map_or(0, |(newest, _)| newest);
        // A store that keeps its fence with the lock has seen what was granted, whether or not it was used.
        let rightly = token < newest || granted.newest > token || self.other_claim(&write, token).is_some();
        if rightly {
            return;
        }
        if let Some(open) = granted.open {
            if std::mem::replace(&mut self.in_doubt, true) {
                return;
            }
            findings.note(format!(
                "lock \"{}\": event {} may be a wrong refusal of token {token}, or the acquire of event {}, whose \
                 outcome is unknown, got a larger token",
                self.name, write.index, open.index
            ));
            return;
        }
        findings.add(Property::Fence, || {
            let text = format!(
                "lock \"{}\": the store refused a write with token {token} at t={} although it had accepted no \
                 larger one and none was granted",
                self.name, write.event.time
            );
            (text, vec![Some(write)])
        });
    }

    fn other_claim(&self, write: &At<'h>, token: u64) -> Option<At<'h>> {
        let first = self.claims.get(&token)?;
        (write.event.claim.is_some() && write.event.claim != first.event.claim).then_some(*first)
    }
}

/// The tokens that the lock may have granted by the time of a write.
struct Granted<'h> {
    /// When a grant was asked for and its token, latest first; no token: the outcome is unknown.
    asked: Vec<(u64, Option<u64>, At<'h>)>,
    newest: u64,
    /// An acquire that was never answered.
    open: Option<At<'h>>,
}

impl<'h> Granted<'h> {
    fn of(lock: &Lock<'h>) -> Self {
        let claims = lock.claims().into_iter().filter(|claim| claim.failed.is_none());
        let mut asked: Vec<_> = claims
            .filter_map(|claim| {
                let asked = claim.asked().or(claim.granted)?;
                (claim.granted.is_none() || claim.token().is_some()).then_some((
                    asked.earliest(),
                    claim.token(),
                    asked,
                ))
            })
            .collect();
        asked.sort_by_key(|(time, _, at)| std::cmp::Reverse((*time, at.index)));
        Granted { asked, newest: 0, open: None }
    }

    fn advance(&mut self, write: &At<'h>) {
        while let Some((_, token, at)) = self.asked.pop_if(|(time, ..)| *time <= write.latest()) {
            match token {
                Some(token) => self.newest = self.newest.max(token),
                None => self.open = Some(at),
            }
        }
    }
}
