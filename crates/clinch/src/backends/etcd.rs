//! `etcd://` and `etcds://`: etcd 3.4 and later, one server or a cluster.
//!
//! The store whose lock stays right over a failover: a grant is a write that a majority has on disk. Its own recipes are
//! understood and excluded: Go's `concurrency.Mutex`, the server's lock API, and `etcdctl lock`.
//!
//! # URLs
//!
//! `etcd://[user:password@]host[:port][,host[:port]...]`, or `etcds://` for TLS. The port is 2379 unless it is given.
//!
//! | key | meaning |
//! | --- | --- |
//! | `prefix=` | where keys begin, `/clinch/` unless given; may be empty |
//! | `ca=` | a PEM file with the authorities to trust instead of the public ones (`etcds://`) |
//! | `cert=`, `key=` | PEM files with a certificate to show, and its key (`etcds://`) |
//!
//! Members are tried in turn when one does not answer, has no leader, or is cut off. All must belong to one cluster: what a member of
//! another answers is refused, once one of the first has answered. A client that has just started asks one alone, so two of them may lock in
//! two clusters: `clinch doctor` and [`Locks::examine`](crate::Locks::examine) ask all. A load balancer before them will do. etcd's own `grpc-proxy`
//! will not: it gives watches other numbers than they were asked for, so whoever has to wait is refused ([`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported)).
//!
//! An etcd that was built anew, or restored under another cluster id, knows nothing of what is held. A client that was there before
//! believes nothing it says; once most members have said so for 5 s, and none else, it asks to connect again
//! ([`ErrorKind::Closed`](crate::ErrorKind::Closed)). What it holds ends in time, unless the one before is back sooner.
//!
//! # Keys
//!
//! | key | what it is |
//! | --- | --- |
//! | `<prefix><name>/<lease>-<number>` | a claim; its value says in JSON which, who made it, when, and what for |
//! | `<prefix><name>/<anything else>` | a claim of another program's, exclusive; shown as of "another program" |
//! | `<prefix>%session/<lease>` | a client's lease. Whoever deletes it ends all claims that hang on it |
//!
//! `/` and `%` in names are written as `%2F` and `%25`, so that lock `a` and lock `a/b` do not touch. A prefix below another does touch: to
//! clients of `/jobs/`, all below `/jobs/nightly/` is the queue of their lock `nightly`. A claim's place in
//! the queue is the revision that created its key, and that is also its fencing token. To share the lock `/jobs/nightly`
//! with programs that use etcd's own recipes, connect with `prefix=/jobs/` and lock `nightly`.
//!
//! A claim that waited is shown since it holds, but with a TTL of 3 s or less, which takes no write to be granted, since it waits.
//!
//! # Guarantees
//!
//! - Exclusion and rising tokens hold over the loss of any minority of members and over restarts of all. A backup that is
//!   restored turns revisions back: restore with `--bump-revision`, or tokens fall. A client that sees them go back tells
//!   its holders that their leases have ended. Where they do not go back, what was released after the backup was made stands again, on the
//!   leases of those who had it: restart processes that ran then, or it stays taken for as long as they live.
//! - First come, first served, together with foreign clients. A waiter that is let in has first read, linearizably, that
//!   its own place is still there; etcd's own recipes lacked that for long.
//! - A loss is told as soon as etcd tells it, not only at the next renewal: the end of a lease from the first moment on, a
//!   claim's deletion once the claim is a quarter of a second old.
//! - A claim whose step was lost on its way leaves nothing behind once it was released, however late the step arrives.
//!
//! **What a stalled leader may still do.** Before versions 3.4.31 and 3.5.13 (etcd#15247), a leader that stood still, was
//! replaced, and wakes may revoke leases that its successor has renewed. The holder's deadline has then not passed, and no
//! client can prevent it. It is told within the time that an event takes, and a waiter needs one more round trip to be
//! let in, but both are races with the network: give [`Guard::token`](crate::Guard::token) to what you guard, or make your
//! own writes in etcd conditional on the claim ([`fence`](crate::fence#etcd)).
//!
//! # Leases
//!
//! The claims of one client with the same TTL share one lease, so that one keepalive serves any number of locks, and are
//! lost together if it ends. [`Locks::isolated`](crate::Locks::isolated) gives each lock one of its own, which costs
//! three more requests for each. A lock that nobody renews, and a detached one, always has its own.
//!
//! - etcd counts leases in whole seconds and keeps each for at least 1.5 election time-outs, 2 s unless configured.
//!   A guard with a shorter TTL ends in time all the same; the lock of a holder that died comes free later.
//! - A waiter needs each answer within 0.5 s, or within 1 s where the URL names one server and its client has no TTL of 3 s or less.
//!   A holder needs each within a sixth of its TTL, and within 1 s.
//! - A waiter's place hangs on a lease of 3 s, which all waiters of a client share, so that one that died delays nobody for long;
//!   its grant, on the lease of its TTL. On a server that is full nothing can be moved: a grant then lives for 3 s at a time,
//!   and one with a lease of its own is refused; an [`extend`](crate::Guard::extend) to a longer TTL leaves the lease as long as it was.
//! - What an evicted holder had stays closed until it lets go, until its lease would have run out, or for 15 s at most; up to some two
//!   seconds longer for whoever only tries, and for other programs. If whoever evicts it ends before etcd has answered, or etcd
//!   becomes full meanwhile, for those two it is the holder's TTL longer, and 8 s; an etcd that is full evicts nobody of ours who holds. Another program's holder loses its key at once.
//! - After a lost leader or a restart, etcd keeps every lease for its whole TTL from the election on.
//! - A lock [released closed](crate::Guard::release_closed) opens on the dot for whoever waits next to it, and else with
//!   its lease: up to some two seconds later. Once there was an election, whoever tries, and half a minute later whoever waits, opens it
//!   when its time is over by a minute, by the wall clocks of whoever closed it and of whoever looks: there, one that is more than a minute
//!   off may open it early. What an earlier version closed opens with its lease alone.
//! - [`Guard::extend`](crate::Guard::extend) with the TTL that the lease has may count from a renewal that is younger than
//!   a sixteenth of it, and than a second.
//!
//! # The least role
//!
//! ```text
//! etcdctl role add clinch
//! etcdctl role grant-permission clinch --prefix=true readwrite /clinch/
//! etcdctl user grant-role USER clinch
//! ```

mod claims;
mod client;
mod closing;
mod cuttable;
mod enter;
mod examine;
mod failure;
mod flight;
mod free;
mod grant;
mod history;
mod keys;
mod life;
mod link;
mod list;
mod moves;
mod quiet;
mod record;
mod session;
mod settings;
mod slots;
mod step;
mod store;
mod ticket;
mod turn;
mod view;
mod watch;
mod wire;

use std::sync::Arc;

use crate::backend::Backend;
use crate::check::Check;
use crate::env::Env;
use crate::error::Result;
use crate::url::StoreUrl;

/// The store of an `etcd` URL, without what every URL may say besides (`ttl=`, `require=`).
///
/// # Errors
///
/// As [`connect`](crate::connect).
pub async fn open(url: &str, env: Env) -> Result<Arc<dyn Backend>> {
    let mut url = StoreUrl::parse(url)?;
    env.here(open_url(&mut url, &env)).await
}

/// Opens the store of a URL, and refuses a server or user that could not keep its promises.
pub(crate) async fn open_url(url: &mut StoreUrl, env: &Env) -> Result<Arc<dyn Backend>> {
    let settings = settings::Settings::parse(url)?;
    // What the URL says too much is refused before anything is sent.
    url.finish()?;
    let client = client::Client::new(env.clone(), settings);
    let store = store::Store::new(client);
    store.check().await?;
    Ok(Arc::new(store))
}

/// Looks at the members of a URL, also at such as are refused.
pub(crate) async fn examine_url(url: &mut StoreUrl, env: &Env) -> Result<Vec<Check>> {
    let settings = settings::Settings::parse(url)?;
    url.finish()?;
    Ok(store::Store::new(client::Client::new(env.clone(), settings)).examine().await)
}
