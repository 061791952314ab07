//! Where randomness comes from: the operating system, or a seed in a simulation.

use std::fmt;
use std::sync::Mutex;

use crate::claim::ClaimId;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;

/// Claim ids fetched from the operating system at a time; a system call for each would be a tenth of a file lock.
const BUFFERED_IDS: usize = 32;

/// A source of random numbers.
pub struct Random(Mutex<Source>);

enum Source {
    /// Unused ids. A forked child, which would hand out its parent's and move in step with it, is refused before it asks:
    /// randomness belongs to an [`Env`](crate::Env).
    System {
        ids: Vec<ClaimId>,
        jitter: Option<u64>,
    },
    Seeded(u64),
}

impl Random {
    /// The operating system's generator.
    pub fn system() -> Random {
        Random(Mutex::new(Source::System { ids: Vec::new(), jitter: None }))
    }

    /// The same numbers for the same seed, for simulations. Never for claims that others could guess.
    pub fn seeded(seed: u64) -> Random {
        Random(Mutex::new(Source::Seeded(seed)))
    }

    /// A fresh claim id.
    pub(crate) fn claim_id(&self) -> Result<ClaimId> {
        match &mut *lock(&self.0) {
            Source::Seeded(state) => {
                Ok(ClaimId::from_bits(u128::from(split_mix(state)) << 64 | u128::from(split_mix(state))))
            }
            Source::System { ids, .. } => {
                if ids.is_empty() {
                    refill(ids)?;
                }
                ids.pop().ok_or_else(|| Error::new(ErrorKind::Unavailable, "no random numbers"))
            }
        }
    }

    /// A number from 0 to 1 to spread instants by; not for secrets.
    pub(crate) fn jitter(&self) -> f64 {
        let state = &mut *lock(&self.0);
        let bits = match state {
            Source::Seeded(state) => split_mix(state),
            Source::System { jitter, .. } => split_mix(jitter.get_or_insert_with(seed)),
        };
        (bits >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl fmt::Debug for Random {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Random")
    }
}

fn refill(ids: &mut Vec<ClaimId>) -> Result<()> {
    let mut bytes = [0u8; 16 * BUFFERED_IDS];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(ErrorKind::Unavailable, "the operating system gave no random numbers for a claim id")
            .with_source(error)
    })?;
    ids.extend(bytes.as_chunks::<16>().0.iter().map(|chunk| ClaimId::from_bits(u128::from_ne_bytes(*chunk))));
    Ok(())
}

/// What sets this process's instants apart from those of all others, which were perhaps started at the same time.
fn seed() -> u64 {
    let mut bytes = [0; 8];
    match getrandom::fill(&mut bytes) {
        Ok(()) => u64::from_ne_bytes(bytes),
        // Claims will say that the system gives no random numbers.
        Err(_) => u64::from(std::process::id()),
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): small, fast, good enough to spread instants and to replay a simulation.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn system_ids_do_not_repeat() {
        let random = Random::system();
        let ids: HashSet<_> = (0..1000).map(|_| random.claim_id().unwrap()).collect();
        assert_eq!(ids.len(), 1000);
    }

    /// Clients that were started together would dial the same server first and retry in step.
    #[test]
    fn every_client_spreads_its_instants_otherwise() {
        let first = |_| Random::system().jitter().to_bits();
        let firsts: HashSet<u64> = (0..100).map(first).collect();
        assert!(firsts.len() > 90, "{} of 100", firsts.len());
    }

    #[test]
    fn a_seed_replays() {
        let ids = |seed| (0..4).map(|_| Random::seeded(seed).claim_id().unwrap()).collect::<Vec<_>>();
        assert_eq!(ids(7), ids(7));
        assert_ne!(ids(7), ids(8));
        let random = Random::seeded(1);
        assert!((0..1000).all(|_| (0.0..1.0).contains(&random.jitter())));
    }
}
