//! Renewing many claims with few commands.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::dating::millis;
use super::keys::{lock_key, slot_of};
use super::reply;
use super::resp::Value;
use super::script;
use super::store::{NO_STEP, Store, deleted};
use crate::backend::Renewal;
use crate::claim::{Claim, ClaimId, Mode};
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;

impl Store {
    /// Renews claims: the exclusive locks of a server that are held by one command, all others by one for each lock.
    pub(super) async fn renew_all(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        let mut answers: Vec<Option<Renewal>> = claims.iter().map(|_| None).collect();
        let pick = |group: &[usize]| -> Vec<&Claim> {
            group.iter().filter_map(|at| claims.get(*at)).map(|claim| &**claim).collect()
        };
        let mut held: BTreeMap<u16, Vec<usize>> = BTreeMap::new();
        for (at, claim) in claims.iter().enumerate() {
            if claim.mode == Mode::Exclusive && !claim.place {
                let prefix = &self.settings().prefix;
                let slot = if self.route.is_cluster() { slot_of(&lock_key(prefix, &claim.name)) } else { 0 };
                held.entry(slot).or_default().push(at);
            }
        }
        // Groups go out together: one that waits delays no other.
        let held = held.into_iter().map(|(slot, group)| async move {
            let renewals = self.renew_held(slot, &pick(&group)).await;
            (group, renewals)
        });
        for (group, renewals) in join_all(held).await {
            note(&mut answers, group, renewals);
        }
        // Those that are not the sole holder may hold a part, or wait.
        let mut others: HashMap<(&LockName, bool), Vec<usize>> = HashMap::new();
        for (at, (claim, answer)) in claims.iter().zip(&answers).enumerate() {
            if answer.is_none() {
                others.entry((&claim.name, claim.place)).or_default().push(at);
            }
        }
        let others = others.into_values().map(|group| async move {
            let renewals = self.renew_lock(&pick(&group), true).await;
            (group, renewals.map(|renewals| renewals.into_iter().map(Some).collect()))
        });
        for (group, renewals) in join_all(others).await {
            note(&mut answers, group, renewals);
        }
        let unanswered = || Renewal::Failed(Error::new(ErrorKind::Unknown, "the server left a renewal out"));
        answers.into_iter().map(|answer| answer.unwrap_or_else(unanswered)).collect()
    }

    /// Renews claims of one lock, all held ones or all places, or only reads them.
    pub(super) async fn renew_lock(&self, claims: &[&Claim], write: bool) -> Result<Vec<Renewal>> {
        let Some(first) = claims.first() else { return Ok(Vec::new()) };
        let asks = claims.iter().map(|claim| (claim.id, if write { millis(claim.ttl) } else { 0 }));
        let answer = self.ask_to_renew(&first.name, first.place, write, asks).await?;
        let renewal = |(claim, left): (&&Claim, &Value)| {
            Ok(match u64::try_from(reply::number(left)?) {
                Ok(_) if write => Renewal::Renewed(Some(claim.ttl)),
                Ok(left) => Renewal::Renewed(Some(Duration::from_millis(left))),
                // Without an end, so at least for as long as a renewal would make it.
                Err(_) if reply::number(left)? == -2 => Renewal::Renewed(Some(claim.ttl)),
                Err(_) => {
                    // Whoever lost its place asks for another at once.
                    self.claims.ask(claim.id);
                    Renewal::Lost(deleted())
                }
            })
        };
        claims.iter().zip(reply::list(&answer)?).map(renewal).collect()
    }

    /// Reads whether a claim is there.
    pub(super) async fn is_there(&self, name: &LockName, id: ClaimId) -> Result<bool> {
        let answer = self.ask_to_renew(name, false, false, [(id, 0)]).await?;
        // Less than nothing is also what is left of a lease without an end.
        reply::list(&answer)?.iter().try_fold(true, |there, left| Ok(there && reply::number(left)? != -1))
    }

    async fn ask_to_renew(
        &self,
        name: &LockName,
        place: bool,
        write: bool,
        claims: impl IntoIterator<Item = (ClaimId, u64)>,
    ) -> Result<Value> {
        let keys = self.keys(name);
        let step = if place { ["place", "-", "-"] } else { NO_STEP };
        let mut command = self.command(&script::RENEW, &keys, step);
        for (id, ttl) in claims {
            command.arg(id).arg(ttl);
        }
        match write {
            true => self.route.run_durably(keys.slot, &script::RENEW, &command, |_| true).await,
            false => self.route.run(keys.slot, &script::RENEW, &command).await,
        }
    }

    /// Renews exclusive locks that are held, of one slot or, where there are no slots, of any. `None`: not held.
    async fn renew_held(&self, slot: u16, claims: &[&Claim]) -> Result<Vec<Option<Renewal>>> {
        let prefix = &self.settings().prefix;
        let mut command = script::RENEW_HELD.on(claims.iter().map(|claim| [prefix, claim.name.as_str()]));
        for claim in claims {
            command.arg(claim.id).arg(millis(claim.ttl));
        }
        let answer = match self.route.run_durably(slot, &script::RENEW_HELD, &command, |_| true).await {
            // While a slot moves, its servers refuse all that takes several keys.
            Err(error)
                if error.kind() == ErrorKind::Unavailable && self.route.is_cluster() && claims.len() > 1 =>
            {
                let alone = claims.chunks(1).map(|claim| Box::pin(self.renew_held(slot, claim)));
                let failed = |error| vec![Some(Renewal::Failed(error))];
                let renewals = join_all(alone).await.into_iter();
                return Ok(renewals.flat_map(|renewal| renewal.unwrap_or_else(failed)).collect());
            }
            answer => answer?,
        };
        let renewal = |(claim, held): (&&Claim, &Value)| {
            Ok((reply::number(held)? == 1).then_some(Renewal::Renewed(Some(claim.ttl))))
        };
        claims.iter().zip(reply::list(&answer)?).map(renewal).collect()
    }
}

/// Puts what came for a group of claims to where each of them stands.
fn note(answers: &mut [Option<Renewal>], group: Vec<usize>, renewals: Result<Vec<Option<Renewal>>>) {
    let renewals =
        renewals.unwrap_or_else(|error| group.iter().map(|_| Some(Renewal::Failed(error.again()))).collect());
    for (at, renewal) in group.into_iter().zip(renewals) {
        if let Some(answer) = answers.get_mut(at) {
            *answer = renewal;
        }
    }
}
