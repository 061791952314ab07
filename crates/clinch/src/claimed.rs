//! What sees to it that a claim is freed, whatever becomes of whoever asked for it.

use std::sync::Arc;

use crate::claim::Claim;
use crate::engine::Engine;
use crate::release::UnderWay;
use crate::tenure::Tenure;

/// A claim that may be in the store. Dropping it frees the claim in the background.
pub(crate) struct Claimed {
    pub(crate) engine: Arc<Engine>,
    pub(crate) claim: Arc<Claim>,
    /// What is known of its lease, once it was granted.
    pub(crate) tenure: Option<Arc<Tenure>>,
    /// The mark of its release, where a caller has begun that: should it not come to its end, the one in the background goes on with it,
    /// so that whoever closes the client never misses it.
    pub(crate) under_way: Option<UnderWay>,
    /// Whether somebody else has taken over freeing it.
    settled: bool,
}

impl Claimed {
    pub(crate) fn new(engine: Arc<Engine>, claim: Arc<Claim>) -> Claimed {
        Claimed { engine, claim, tenure: None, under_way: None, settled: false }
    }

    /// The claim as it is to be freed.
    pub(crate) fn leaving(&self) -> Arc<Claim> {
        self.tenure.as_ref().map_or_else(|| self.claim.clone(), |tenure| tenure.leaving())
    }

    /// Nothing of the claim is in the store, or it shall stay there.
    pub(crate) fn settle(mut self) {
        self.settled = true;
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        // A forked child's copy is not its own to free.
        if !self.settled && self.engine.check_process().is_ok() {
            let ends = self.tenure.as_ref().and_then(|tenure| tenure.runs_out());
            let releases = &self.engine.releases;
            match self.under_way.take() {
                Some(under_way) => releases.go_on_in_background(under_way, self.leaving(), ends),
                None => releases.free_in_background(self.leaving(), ends),
            }
        }
    }
}
