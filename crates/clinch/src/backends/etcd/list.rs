//! Looking at locks: one, or all.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use futures_util::StreamExt;

use super::keys;
use super::record::{Place, Standing};
use super::store::Store;
use super::wire::{
    self, Compare, LeaseRequest, LeaseTimeToLiveResponse, PutRequest, RangeRequest, RangeResponse,
    TxnRequest, TxnResponse,
};
use crate::backend::LockState;
use crate::error::{ErrorKind, Result};
use crate::name::LockName;
use crate::queue::admits;

/// Keys per request.
const PAGE: i64 = 1000;

/// Leases asked for at a time.
const LEASES_AT_ONCE: usize = 16;

impl Store {
    /// Finds out whether the cluster answers and this user may do what locks need, without writing anything.
    pub(super) async fn check(&self) -> Result<()> {
        let key = keys::session(self.prefix(), 0);
        let probe = TxnRequest {
            // Never true; permissions are checked nevertheless.
            compare: vec![Compare::created(&key, -1)],
            success: vec![PutRequest { key, ..PutRequest::default() }.into()],
            failure: vec![
                RangeRequest { limit: 1, keys_only: true, ..wire::scan(self.prefix().as_bytes()) }.into(),
            ],
        };
        // It may be asked twice, for it never writes.
        match self.client.call::<_, TxnResponse>(wire::TXN, &probe).await {
            Ok(_) => Ok(()),
            // Whoever only looks or releases can do so on a cluster that is full.
            Err(error) if error.kind() == ErrorKind::Exhausted => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The claims on a lock, first created first.
    pub(super) async fn places(&self, name: &LockName) -> Result<Vec<Place>> {
        let found: RangeResponse = self.client.call(wire::RANGE, &wire::scan(&self.queue(name))).await?;
        Ok(found.kvs.iter().map(Place::read).collect())
    }

    pub(super) async fn state_of(&self, name: &LockName) -> Result<Option<LockState>> {
        let places = self.places(name).await?;
        let left = self.all_left(&places).await?;
        Ok(self.state_as_seen(name, &places, &left))
    }

    pub(super) async fn list_all(&self, prefix: &str) -> Result<Vec<LockState>> {
        let ours = self.prefix();
        let start = keys::names(ours, prefix);
        let mut from = wire::start_of(&start);
        let mut revision = 0;
        let mut locks: BTreeMap<LockName, Vec<Place>> = BTreeMap::new();
        loop {
            let page = RangeRequest {
                key: from.clone(),
                range_end: wire::end_of(&start),
                limit: PAGE,
                revision,
                ..RangeRequest::default()
            };
            let found: RangeResponse = self.client.call(wire::RANGE, &page).await?;
            // One state of the store, however many pages it has.
            revision = if revision == 0 { wire::revision(found.header.as_ref()) } else { revision };
            for kv in &found.kvs {
                if let Some(name) = keys::name_of(ours, &kv.key) {
                    locks.entry(name).or_default().push(Place::read(kv));
                }
            }
            match found.kvs.last() {
                Some(last) if found.more => from = [&last.key[..], b"\0"].concat(),
                _ => break,
            }
        }
        // Without a prefix of ours, any data in etcd would look like a foreign holder.
        if ours.is_empty() {
            locks.retain(|_, places| places.iter().any(|place| !matches!(place.standing, Standing::Foreign)));
        }
        for places in locks.values_mut() {
            places.sort_unstable_by_key(|place| place.created);
        }
        let left = self.all_left(locks.values().flatten()).await?;
        Ok(locks.iter().filter_map(|(name, places)| self.state_as_seen(name, places, &left)).collect())
    }

    /// What is left of a lease; `None` when there is none.
    pub(super) async fn left(&self, lease: i64) -> Result<Option<Duration>> {
        Ok(self.time_to_live(lease).await?.map(|answer| whole_seconds(answer.ttl)))
    }

    /// How long a lease is, that is how much of it can be left, and how much is not; `None` when there is none.
    pub(super) async fn granted_for(&self, lease: i64) -> Result<Option<(Duration, Duration)>> {
        let answer = self.time_to_live(lease).await?;
        let passed = |answer: &LeaseTimeToLiveResponse| whole_seconds(answer.granted - answer.ttl);
        Ok(answer.map(|answer| (whole_seconds(answer.granted), passed(&answer))))
    }

    async fn time_to_live(&self, lease: i64) -> Result<Option<LeaseTimeToLiveResponse>> {
        if lease == 0 {
            return Ok(None);
        }
        self.client.call(wire::LEASE_TIME_TO_LIVE, &LeaseRequest { id: lease }).await.map(Some)
    }

    /// What is left of the leases of all these claims.
    async fn all_left<'a>(
        &self,
        places: impl IntoIterator<Item = &'a Place>,
    ) -> Result<HashMap<i64, Option<Duration>>> {
        let mut leases: Vec<i64> = places.into_iter().map(|place| place.lease).collect();
        leases.sort_unstable();
        leases.dedup();
        let asked = leases.into_iter().map(|lease| async move { Ok((lease, self.left(lease).await?)) });
        let answers: Vec<Result<_>> =
            futures_util::stream::iter(asked).buffer_unordered(LEASES_AT_ONCE).collect().await;
        answers.into_iter().collect()
    }

    /// A lock as its queue shows it; `None` when there is nobody and it is open.
    fn state_as_seen(
        &self,
        name: &LockName,
        places: &[Place],
        left: &HashMap<i64, Option<Duration>>,
    ) -> Option<LockState> {
        let granted =
            |at: usize, place: &Place| admits(places.iter().take(at).map(Place::mode), place.mode());
        let left = |place: &Place| left.get(&place.lease).copied().flatten();
        let claims = places.iter().enumerate();
        let claims = claims.filter_map(|(at, place)| place.state(granted(at, place), left(place)));
        let (term, wall) = (self.client.history.term(), self.client.env.clock().wall());
        let closed = places.iter().filter_map(|place| place.closed_until(left(place), term, wall));
        let state = LockState { name: name.clone(), claims: claims.collect(), closed_until: closed.max() };
        (!state.claims.is_empty() || state.closed_until.is_some()).then_some(state)
    }
}

fn whole_seconds(seconds: i64) -> Duration {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}
