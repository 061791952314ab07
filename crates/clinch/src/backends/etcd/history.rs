//! What is known of the cluster's history: which cluster it is, and how far it had come.
//!
//! Two things turn it back or fork it without a sign on the wire: a backup that was restored under a running client, and a
//! URL that names members of two clusters. Neither may be believed: what was granted before is unknown there.

use std::sync::{Mutex, OnceLock};

use super::wire::Header;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;

/// What the answers have told so far.
#[derive(Default)]
pub(super) struct History {
    known: Mutex<Known>,
    turned_back: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct Known {
    /// 0 until a member has said it.
    cluster: u64,
    revision: i64,
    term: u64,
}

impl History {
    /// Sets what is called when the cluster turns out to be at an earlier state than it was.
    pub(super) fn when_turned_back(&self, call: impl Fn() + Send + Sync + 'static) {
        let _ = self.turned_back.set(Box::new(call));
    }

    /// The highest revision that was seen.
    pub(super) fn revision(&self) -> i64 {
        lock(&self.known).revision
    }

    /// The latest term that was seen: another than before says that a leader was elected, who began all leases anew.
    pub(super) fn term(&self) -> u64 {
        lock(&self.known).term
    }

    /// Takes in an answer's header. `least` is the highest revision that was known before the request went out, if the
    /// answer can be no older.
    pub(super) fn take(&self, header: Option<&Header>, least: Option<i64>, server: &str) -> Result<()> {
        let Some(header) = header else { return Ok(()) };
        let mut known = lock(&self.known);
        if known.cluster == 0 {
            known.cluster = header.cluster;
        }
        if header.cluster != known.cluster && header.cluster != 0 {
            // What was asked of it was not done where it counts.
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "{server} belongs to another cluster of etcd than what answered before ({:x}, not {:x}); \
                 a URL names members of one cluster",
                    header.cluster, known.cluster
                ),
            ));
        }
        if least.is_some_and(|least| header.revision < least) {
            let before = std::mem::replace(&mut known.revision, header.revision);
            known.term = header.term;
            drop(known);
            self.turned_back.get().into_iter().for_each(|call| call());
            return Err(Error::new(
                ErrorKind::Unknown,
                format!(
                    "{server} is at revision {}, etcd was at {before} before: a backup was restored, \
                     and nothing that was granted since holds",
                    header.revision
                ),
            ));
        }
        known.term = known.term.max(header.term);
        if least.is_some() {
            known.revision = known.revision.max(header.revision);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn an_earlier_state_and_another_cluster_are_not_believed() {
        let (history, turns) = (History::default(), Arc::new(AtomicUsize::new(0)));
        let count = turns.clone();
        history.when_turned_back(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let take = |cluster, revision, least| {
            let taken = history.take(Some(&Header { cluster, revision, ..Header::default() }), least, "h:1");
            taken.map_err(|error| (error.kind(), turns.load(Ordering::Relaxed)))
        };
        take(7, 10, Some(0)).unwrap();
        // Asked for before the other was known, or of one member alone.
        take(7, 9, Some(8)).unwrap();
        take(7, 3, None).unwrap();
        assert_eq!(take(8, 11, Some(10)), Err((ErrorKind::Unavailable, 0)));
        assert_eq!(take(7, 9, Some(10)), Err((ErrorKind::Unknown, 1)));
        take(7, 9, Some(9)).unwrap();
    }
}
