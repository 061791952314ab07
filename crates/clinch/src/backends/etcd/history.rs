//! What is known of the cluster's history: which cluster it is, and how far it had come.
//!
//! Three things turn it back or fork it without a sign on the wire: a backup that was restored under a running client, an etcd that was built
//! anew, and a URL that names members of two clusters. None may be believed: what was granted before is unknown there. The second is not told from
//! the third by one answer, but by what most members say, for a while.

use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::wire::Header;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;

/// For how long nothing but another cluster answers before this one is given up: a way may lead astray for a moment.
const ASTRAY_FOR: Duration = Duration::from_secs(5);

/// Which member gave an answer, and when.
#[derive(Clone, Copy)]
pub(super) struct Origin<'a> {
    pub(super) server: &'a str,
    /// Which of the endpoints that is.
    pub(super) endpoint: usize,
    pub(super) at: Instant,
}

/// What the answers have told so far.
pub(super) struct History {
    /// How many endpoints there are.
    endpoints: usize,
    known: Mutex<Known>,
    turned_back: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct Known {
    /// 0 until a member has said it.
    cluster: u64,
    revision: i64,
    term: u64,
    /// Which other has answered since this one did last.
    other: Option<Other>,
}

/// Another cluster than the one that is known.
struct Other {
    cluster: u64,
    since: Instant,
    /// Those that belong to it.
    endpoints: Vec<usize>,
}

impl Known {
    /// Notes an answer of another cluster; says whether most endpoints belong to that, and nobody to the one that is known, for a while.
    fn met_other(&mut self, cluster: u64, origin: Origin<'_>, endpoints: usize) -> bool {
        if self.other.as_ref().is_none_or(|other| other.cluster != cluster) {
            self.other = Some(Other { cluster, since: origin.at, endpoints: Vec::new() });
        }
        let Some(other) = &mut self.other else { return false };
        if !other.endpoints.contains(&origin.endpoint) {
            other.endpoints.push(origin.endpoint);
        }
        other.endpoints.len() > endpoints / 2 && origin.at.since(other.since) >= ASTRAY_FOR
    }
}

impl History {
    /// One of which nothing is known, of a cluster with so many endpoints.
    pub(super) fn new(endpoints: usize) -> History {
        History { endpoints, known: Mutex::default(), turned_back: OnceLock::new() }
    }

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
    pub(super) fn take(&self, header: Option<&Header>, least: Option<i64>, origin: Origin<'_>) -> Result<()> {
        let Some(header) = header else { return Ok(()) };
        let server = origin.server;
        let mut known = lock(&self.known);
        if known.cluster == 0 {
            known.cluster = header.cluster;
        }
        if header.cluster != known.cluster && header.cluster != 0 {
            let met = format!(
                "{server} belongs to another cluster of etcd than what answered before ({:x}, not {:x})",
                header.cluster, known.cluster
            );
            // What was asked of it was not done where it counts.
            return Err(match known.met_other(header.cluster, origin, self.endpoints) {
                true => Error::new(
                    ErrorKind::Closed,
                    format!("{met}: etcd was built anew, or restored as another; connect again"),
                ),
                false => Error::new(
                    ErrorKind::Unavailable,
                    format!("{met}: the URL names members of two clusters, or etcd was built anew"),
                ),
            });
        }
        if header.cluster == known.cluster {
            known.other = None;
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

    fn origin(endpoint: usize, seconds: u64) -> Origin<'static> {
        Origin { server: "h:1", endpoint, at: Instant::from_nanos(seconds * 1_000_000_000) }
    }

    /// Connecting again would lead to the other cluster, so nobody is told to who may have named members of both.
    #[test]
    fn a_cluster_is_given_up_when_most_members_belong_to_another_for_a_while() {
        let history = History::new(3);
        let meets = |cluster, endpoint, seconds| {
            let header = Header { cluster, ..Header::default() };
            history.take(Some(&header), None, origin(endpoint, seconds)).map_err(|error| error.kind())
        };
        meets(7, 0, 0).unwrap();
        for seconds in [1, 60] {
            assert_eq!(meets(8, 1, seconds), Err(ErrorKind::Unavailable), "it is one of three");
        }
        meets(7, 0, 61).unwrap();
        assert_eq!(meets(8, 1, 62), Err(ErrorKind::Unavailable));
        assert_eq!(meets(8, 2, 66), Err(ErrorKind::Unavailable), "the first has just answered");
        assert_eq!(meets(8, 1, 67), Err(ErrorKind::Closed));
        assert_eq!(meets(9, 1, 68), Err(ErrorKind::Unavailable), "they are of two");
        meets(7, 0, 90).unwrap();
        assert_eq!(meets(8, 2, 91), Err(ErrorKind::Unavailable), "it is back");
    }

    #[test]
    fn an_earlier_state_and_another_cluster_are_not_believed() {
        let (history, turns) = (History::new(1), Arc::new(AtomicUsize::new(0)));
        let count = turns.clone();
        history.when_turned_back(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let take = |cluster, revision, least| {
            let header = Header { cluster, revision, ..Header::default() };
            let taken = history.take(Some(&header), least, origin(0, 0));
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
