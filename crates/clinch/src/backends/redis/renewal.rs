//! Renewing many claims with few commands.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};

use super::dating::millis;
use super::keys::{lock_key, slot_of};
use super::reply;
use super::resp::Value;
use super::route::Done;
use super::script;
use super::store::{NO_STEP, Store, deleted};
use crate::backend::Renewal;
use crate::claim::{Claim, Mode};
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;

impl Store {
    /// Renews claims: the exclusive locks of a server that are held by one command, all others by one for each lock.
    pub(super) async fn renew_all(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        let mut answers: Vec<Option<Renewal>> = claims.iter().map(|_| None).collect();
        let pick = |group: &[usize]| -> Vec<&Claim> {
            group.iter().filter_map(|at| claims.get(*at)).map(|claim| &**claim).collect()
        };
        let (mut held, mut others) = (BTreeMap::<u16, Vec<usize>>::new(), Vec::new());
        for (at, claim) in claims.iter().enumerate() {
            if claim.mode == Mode::Exclusive && !claim.place {
                let prefix = &self.settings().prefix;
                let slot = if self.route.has_slots() { slot_of(&lock_key(prefix, &claim.name)) } else { 0 };
                held.entry(slot).or_default().push(at);
            } else {
                others.push(at);
            }
        }
        let by_lock = |others: Vec<usize>| {
            let mut locks: HashMap<(&LockName, bool), Vec<usize>> = HashMap::new();
            for (at, claim) in others.into_iter().filter_map(|at| Some((at, claims.get(at)?))) {
                locks.entry((&claim.name, claim.place)).or_default().push(at);
            }
            join_all(locks.into_values().map(|group| async move {
                let renewals = self.renew_lock(&pick(&group), true).await;
                (group, renewals.map(|renewals| renewals.into_iter().map(Some).collect()))
            }))
        };
        // Groups go out together: one that waits delays no other.
        let held = join_all(held.into_iter().map(|(slot, group)| async move {
            let renewals = self.renew_held(slot, &pick(&group)).await;
            (group, renewals)
        }));
        let (held, others) = join(held, by_lock(others)).await;
        held.into_iter().chain(others).for_each(|(group, renewals)| note(&mut answers, group, renewals));
        // Those that are not the sole holder may hold a part.
        let others = (0..claims.len()).filter(|at| matches!(answers.get(*at), Some(None))).collect();
        for (group, renewals) in by_lock(others).await {
            note(&mut answers, group, renewals);
        }
        let unanswered = || Renewal::Failed(Error::new(ErrorKind::Unknown, "the server left a renewal out"));
        for (claim, answer) in claims.iter().zip(&answers) {
            // Not before all have come: who gives up on the others has heard of none.
            if !claim.place && matches!(answer, Some(Renewal::Lost(_))) {
                self.claims.held.let_go(claim.id, &claim.name);
            }
        }
        answers.into_iter().map(|answer| answer.unwrap_or_else(unanswered)).collect()
    }

    /// Renews claims of one lock, all held ones or all places, or only reads them.
    pub(super) async fn renew_lock(&self, claims: &[&Claim], write: bool) -> Result<Vec<Renewal>> {
        let Some(first) = claims.first() else { return Ok(Vec::new()) };
        let keys = self.keys(&first.name);
        let step = if first.place { ["place", "-", "-"] } else { NO_STEP };
        let mut command = self.command(&script::RENEW, &keys, step);
        for claim in claims {
            command.arg(claim.id).arg(if write { millis(claim.ttl) } else { 0 });
        }
        let Done { answer, copied } = match write {
            true => {
                let renewed = |answer: &Value| reply::has(answer, |left| left != -1);
                self.route.run_durably(keys.slot, &script::RENEW, &command, renewed).await?
            }
            false => {
                let answer = self.route.run(keys.slot, &script::RENEW, &command).await?;
                Done { answer, copied: Ok(()) }
            }
        };
        let renewal = |(claim, left): (&&Claim, &Value)| {
            Ok(match u64::try_from(reply::number(left)?) {
                Ok(_) if write => renewed(claim.ttl, &copied),
                Ok(left) => Renewal::Renewed(Some(Duration::from_millis(left))),
                // Without an end, so at least for as long as a renewal would make it.
                Err(_) if reply::number(left)? == -2 => renewed(claim.ttl, &copied),
                Err(_) => {
                    self.claims.misses_its_place(claim.id);
                    Renewal::Lost(deleted())
                }
            })
        };
        claims.iter().zip(reply::list(&answer)?).map(renewal).collect()
    }

    /// Renews exclusive locks that are held, of one slot or, where there are no slots, of any, on the inbox that tells of them, if there is
    /// one. `None`: not held.
    async fn renew_held(&self, slot: u16, claims: &[&Claim]) -> Result<Vec<Option<Renewal>>> {
        let prefix = &self.settings().prefix;
        let mut command = script::RENEW_HELD.on(claims.iter().map(|claim| [prefix, claim.name.as_str()]));
        for claim in claims {
            command.arg(claim.id).arg(millis(claim.ttl));
        }
        let renewed_some = |answer: &Value| reply::has(answer, |held| held == 1);
        let done = match self.renew_watched(slot, claims, &command).await {
            Some(answer) => Ok(Done { answer, copied: Ok(()) }),
            None => self.route.run_durably(slot, &script::RENEW_HELD, &command, renewed_some).await,
        };
        let Done { answer, copied } = match done {
            // While a slot moves, its servers refuse all that takes several keys.
            Err(error)
                if error.kind() == ErrorKind::Unavailable && self.route.is_cluster() && claims.len() > 1 =>
            {
                let alone = claims.chunks(1).map(|claim| Box::pin(self.renew_held(slot, claim)));
                let failed = |error| vec![Some(Renewal::Failed(error))];
                let renewals = join_all(alone).await.into_iter();
                return Ok(renewals.flat_map(|renewal| renewal.unwrap_or_else(failed)).collect());
            }
            done => done?,
        };
        let mut renewals = Vec::with_capacity(claims.len());
        for (claim, held) in claims.iter().zip(reply::list(&answer)?) {
            renewals.push(match reply::number(held)? {
                1 => Some(renewed(claim.ttl, &copied)),
                // Evicted, which its own key tells: while a slot moves, the others cannot be asked.
                -1 => Some(Renewal::Lost(deleted())),
                _ => None,
            });
        }
        Ok(renewals)
    }
}

/// A renewal that was done, and counts only if it has its copies.
fn renewed(ttl: Duration, copied: &Result<()>) -> Renewal {
    match copied {
        Ok(()) => Renewal::Renewed(Some(ttl)),
        Err(error) => Renewal::Failed(error.again()),
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
