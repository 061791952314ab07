//! `redlock://`: a lock on a quorum of Redis or Valkey servers that know nothing of each other.
//!
//! Three servers or more, each a master of its own, without replication between them. A claim asks all of them at once for
//! their vote, and holds the lock when more than half have given it (antirez, "Distributed Locks with Redis"). A minority of
//! the servers may hang, be slow, be gone, or come back empty, and nobody waits for it; but who closes a client does for up to a second,
//! until all servers know of its releases, and of what it saw of them.
//!
//! On each server the lock is the same plain string key that `redis://`, redsync, redlock for Node and rslock use, so that
//! they exclude us and we them.
//!
//! | URL | is |
//! | --- | --- |
//! | `redlock://h1,h2,h3` | three servers; from 3 to 15, best an odd number: of four, three are needed |
//! | `redlock://user:password@h1:6379,:secret@h2,h3+tls/0` | each with its own user, password, port and encryption; database 0 |
//! | `redlocks://h1,h2,h3` | all with TLS |
//!
//! | key of the URL | means | default |
//! | --- | --- | --- |
//! | `max_ttl=` | 100 ms to 24 h: the longest TTL, and for how long (and `drift=` longer) a server that may have forgotten locks does not vote; the same for all clients | 30 s |
//! | `durable=on` | the servers keep what they acknowledged over a restart (`appendonly yes`, `appendfsync always`, `no-appendfsync-on-rewrite no`), so after a restart they vote at once, unless a clock was set; not on their first use | `off` |
//! | `fencing=off` | no tokens; where servers disagree on one, that saves a round trip | `on` |
//! | `min_validity=` | what must be left of a lease when it is granted | 0 |
//! | `prefix=`, `eviction=`, `protocol=`, `ca=`, `cert=`, `key=` | as for [`redis://`](super) | |
//!
//! # Guarantees
//!
//! Two never hold the lock at a time, as long as no more than a minority of the servers forgets or miscounts within one TTL. The
//! deadline counts from before the first request was sent, less `drift=` and a margin; a hold is renewed only by a quorum,
//! and a renewal that fails leaves the old deadline. A claim that does not win is removed from every server that it may have
//! reached, also when its caller is gone or an answer was lost; one that a server finds more than 3 s after it was sent, by its own
//! clock, gets no vote.
//!
//! What Redlock rests on, which a store with consensus does not (Kleppmann, "How to do distributed locking", 2016): clocks
//! that run evenly, and servers that remember. Both are looked after. Clients leave on each server which run of it they met, and
//! how its clock compared with the other servers' clocks. A server's vote counts where that is still so, and has been for
//! `max_ttl=`: it has not restarted, and its clock has run evenly with so many others that one of them is right. So **the
//! first lock on servers that no client of the same group has used yet is granted after `max_ttl=`**, and `drift=` percent more,
//! also with `durable=on`: clients believe only those that
//! have the same servers, as they stand in the URL, and the same `prefix=`, `max_ttl=`, `drift=`, `durable=` and `fencing=`. Until then requests wait, within their
//! deadline, and say why and for how long. A client that has just started need not wait, however long nobody has used the servers; nor do those
//! that live for shorter than `max_ttl=`, since time counts from when the first of them came. A server that restarts or was a replica meanwhile (unless `durable=on`), or whose
//! clock is seen to jump, does not vote for as long; on Redis 6 and KeyDB, which do not tell the difference, the same goes for one whose first replica or
//! backup over the network (`redis-cli --rdb`) comes, or whose replication backlog is freed an hour after the last, and on the others for one
//! that was a replica before and whose counts are set back (`CONFIG RESETSTAT`).
//!
//! What is left: clocks of a majority that are set together; a clock that jumps ahead and back while nobody looks, or of which
//! a client that was there told nobody else; an address that goes on to another server and back within the 30 days for which
//! servers keep what was seen of them; steps of a clock by less than `drift=` percent of `max_ttl=`, which
//! a client that has just come does not see, and which end shorter leases early; `FLUSHALL` or a `DEL` by an operator; a server
//! that was made a replica and a master again while a client did not use its own connection to it, which outlives that: this client learns of it only
//! from what others leave there, after `max_ttl=`; one of which `CONFIG RESETSTAT` has erased that, once it has freed its replication backlog,
//! or was given just as many bytes again; and a client that
//! cannot read `INFO` of servers that are called durable and are not. Where a server is so far away that
//! `drift=` percent of `max_ttl=` are shorter than four round trips, each client watches it for itself: one that has just started
//! gets no lock within `max_ttl=`, so a process that tries once never does; take a longer `max_ttl=`. A client whose
//! host stood still while it compared clocks may take them for set, and then the others wait for `max_ttl=` once more.
//!
//! Tokens are those of the servers, `max(last + 1, time in microseconds)`, and the largest of a quorum's counts. It is on a
//! quorum, together with the vote, before it is given out, so a later holder meets it on at least one server and gets a larger one.
//! Claims ask for a token slightly ahead of the clocks of a quorum; servers mostly agree on it, so that the write-back is not needed,
//! and one whose clock is ahead does not pull the tokens along. A server that restarts is given the last tokens of
//! the others, by every client that meets one whose token it was not given yet, until it has those of so many that one of each
//! quorum is among them; one that has yet to be told itself does not count, as long as a majority need not. Where some are away for good it votes all the same after `max_ttl=`. So tokens can fall by a double fault: a
//! server restarts empty while another, the only one left that knows the last token, is away until the first votes again, and the clocks
//! of the others are behind the one that the token came from.
//!
//! # Waiting
//!
//! There is no queue across servers: whoever asks first when the lock is free may get it. Servers tell of a change of the
//! key (client tracking, protocol 3), also of one by a foreign client; where too few can, waiters ask ten times a second. Of
//! the waiters of one client only the first asks, so that they do not split the votes among themselves; the others follow in
//! their order. For as long as a claim of the same client has the lock, its release is what they wait for (for a second; then
//! they have the servers tell, too). A hand-over costs each client that waits one round of requests, and a second one if it loses,
//! to be told again. Where no claim is seen to have a quorum, each withdraws, and asks again after a random pause; one that does not
//! wait, a few times. Of several that try at the same moment it may be that none gets the lock, and is told so (`Unavailable`): where one
//! of them must, have them wait for some seconds. The same is told of a lock that is held by a bare quorum of which a server hangs, while
//! the holder's next renewal has yet to bring its vote to the others: what can be seen of it could as well be left of a claim that lost. Who
//! looks ([`Locks::state`](crate::Locks::state)) gets the same answer, and not that it is free.
//!
//! # Rights
//!
//! The least that a user needs on each server, for the default prefix; `+select` for databases other than 0. With another
//! `prefix=` its keys come in addition: `~clinch:~*` is needed under any.
//!
//! ```text
//! user clinch on >PASSWORD ~clinch:* resetchannels -@all +evalsha +script|load +time +set +get +getset +getrange +setrange
//!   +pttl +pexpire +del +scan +info +ping +client|id +client|kill +client|tracking +client|caching
//! ```
//!
//! A server that refuses the password, or is a replica, has no vote, and is named where a quorum is missing. Where so many do that
//! there can be none, a client that has just started fails at once.
//!
//! `durable=on` looks at `*appendfsync*` where the user may (`+config|get`), and is believed where not, nor needs `+info`.
//!
//! `client|kill` ends connections of ours alone: it makes sure that a claim on its way over one that broke does not arrive
//! after its own release. Without that right the release is repeated for 7 s; should one of these be on its way for longer than that, it takes
//! along what the same claim has got from that server meanwhile.
//!
//! # In the store
//!
//! | key | type | holds |
//! | --- | --- | --- |
//! | `clinch:NAME` | string | `<claim id> <token> <since, µs> <owner, JSON>` and the lease as its expiry; `<claim id>!<token> ...` of one that was evicted and has not let go |
//! | `clinch:~{fence}` | string | the last token of the server; without an expiry |
//! | `clinch:~{voucher}:<hash>` | string | what clients of one group saw of the server: `<servers>?prefix=..&max_ttl=..&drift=..&durable=..&fencing=..`, what they have in common; `<run>`, the server's `run_id`, and how many bytes it was given as a replica in this run, where these are 0 with what it was promoted from (`master_replid2`); where it does not count them, its `master_replid`; a hexadecimal number, with one bit for each server, in the order of their addresses, whose last token it was given; and for each other server `<its run_id>=<since>,<compared>,<ahead at least>,<ahead at most>` in µs, with its address in place of that where `durable=on`; gone 30 days after its last use |

mod claims;
mod examine;
mod free;
mod group;
mod meeting;
mod node;
mod reading;
mod renewal;
mod round;
mod seats;
mod settings;
mod store;
mod strangers;
mod timing;
mod trust;
mod turns;
mod vote;
mod votes;
mod voucher;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use self::group::Group;
use self::node::Node;
use self::settings::{Plan, Rules};
use self::store::Quorum;
use super::dial::Dialer;
use super::settings::Topology;
use crate::backend::Backend;
use crate::check::Check;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::url::StoreUrl;

/// For how long servers that a quorum does not need are waited for when a client connects.
const MOMENT: Duration = Duration::from_millis(100);

/// The store of a `redlock` URL, without what every URL may say besides (`ttl=`, `require=`).
///
/// # Errors
///
/// As [`connect`](crate::connect).
pub async fn open(url: &str, env: Env) -> Result<Arc<dyn Backend>> {
    let mut url = StoreUrl::parse(url)?;
    env.here(open_url(&mut url, &env)).await
}

/// The servers of a URL, which nobody has met yet.
struct Servers {
    nodes: Vec<Arc<Node>>,
    rules: Rules,
}

impl Servers {
    fn parse(url: &mut StoreUrl, env: &Env) -> Result<Servers> {
        let Plan { nodes: settings, rules } = Plan::parse(url)?;
        // What the URL says too much is refused before anything is sent.
        url.finish()?;
        let addresses = settings.iter().filter_map(|settings| match &settings.topology {
            Topology::Single(address) => Some(address),
            _ => None,
        });
        let group = Arc::new(Group::of(addresses, &rules, env.drift()));
        let runs = Arc::default();
        let mut nodes = Vec::new();
        for settings in settings {
            let Topology::Single(address) = &settings.topology else { continue };
            let address = address.clone();
            let dialer = Arc::new(Dialer { env: env.clone(), settings });
            nodes.push(Node::new(address, dialer, rules.clone(), group.clone(), Arc::clone(&runs)));
        }
        Ok(Servers { nodes, rules })
    }
}

/// Looks at the servers of a URL, also at such as are refused.
pub(crate) async fn examine_url(url: &mut StoreUrl, env: &Env) -> Result<Vec<Check>> {
    let Servers { nodes, rules } = Servers::parse(url, env)?;
    Ok(Quorum::new(env.clone(), nodes, rules).examine().await)
}

/// Opens the store of a URL, as soon as a quorum lets us in; what the other servers have to say is waited for a moment.
pub(crate) async fn open_url(url: &mut StoreUrl, env: &Env) -> Result<Arc<dyn Backend>> {
    let Servers { nodes, rules } = Servers::parse(url, env)?;
    let needed = votes::quorum(nodes.len());
    let meet = |node: &Arc<Node>| {
        let node = node.clone();
        async move { (node.address.to_string(), node.line().await.map(drop)) }
    };
    let mut meeting: FuturesUnordered<_> = nodes.iter().map(meet).collect();
    let (mut met, mut refusals, mut failures) = (0, 0, Vec::new());
    let mut others = None;
    loop {
        let overdue = async {
            match others {
                Some(until) => env.sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        let answer = tokio::select! {
            biased;
            answer = meeting.next() => answer,
            () = overdue => None,
        };
        match answer {
            Some((_, Ok(()))) => met += 1,
            Some((name, Err(error))) => {
                failures.push(votes::named(&name, &error));
                refusals += usize::from(!error.is_transient());
                // A URL that makes no sense, or too many that will not let us in however long we wait.
                if error.kind() == ErrorKind::Invalid || refusals > nodes.len() - needed {
                    return Err(Error::new(error.kind(), failures.join("; ")));
                }
            }
            None => break,
        }
        if met == needed {
            others = Some(env.now() + MOMENT);
        }
    }
    if met < needed {
        let (all, why) = (nodes.len(), failures.join("; "));
        return Err(Error::new(
            ErrorKind::Unavailable,
            format!("only {met} of {all} servers can be reached, {needed} are needed: {why}"),
        ));
    }
    let quorum = Quorum::new(env.clone(), nodes, rules);
    if let Some(rest) = quorum.trust.begin().await {
        quorum.background.take_over(rest);
    }
    if quorum.nodes.iter().any(|node| node.acquaintance().is_none()) {
        quorum.background.take_over(quorum.trust.clone().begin_late());
    }
    Ok(Arc::new(quorum))
}
