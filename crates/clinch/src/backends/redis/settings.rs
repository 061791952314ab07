//! What a `redis` URL says.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::sentinel::Sentinel;
use crate::backends::tls;
use crate::error::{Error, Result};
use crate::url::{StoreUrl, host_and_port, no_store};

/// After how long of being handed over without a break a lock is left free for foreign clients, in a mixed fleet.
pub(super) const RUN: Duration = Duration::from_secs(1);

/// For how long it is then left free, unless the URL says another: longer than the 100 ms for which redis-py sleeps.
const GAP: Duration = Duration::from_millis(150);

/// The longest gap: a lock that nobody may take for longer is an outage.
const MAX_GAP: Duration = Duration::from_secs(10);

/// The two ways to speak, as errors name them.
const SCHEMES: tls::Schemes = tls::Schemes { plain: "redis://", encrypted: "rediss://" };

/// A parsed URL.
pub(super) struct Settings {
    pub(super) topology: Topology,
    pub(super) credentials: Credentials,
    pub(super) db: u64,
    pub(super) tls: Option<Arc<rustls::ClientConfig>>,
    /// The two ways to speak, as errors name them.
    pub(super) schemes: tls::Schemes,
    pub(super) prefix: String,
    pub(super) resp2: bool,
    pub(super) lean: bool,
    pub(super) eviction_allowed: bool,
    pub(super) fleet: Fleet,
    pub(super) durability: Durability,
}

/// Which servers there are.
pub(super) enum Topology {
    Single(Address),
    Sentinel(Arc<Sentinel>),
    Cluster(Vec<Address>),
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Address {
    Tcp(String, u16),
    Unix(String),
}

/// Who we are to a server. `Debug` is left out on purpose.
#[derive(Clone, Default)]
pub(super) struct Credentials {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
}

/// What is done for clients that poll: after `run` of handing a lock over, it is left free for `gap`. A `run` of zero: only
/// where such a client was seen lately, after [`RUN`]. A `gap` of zero: never.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fleet {
    pub(super) run: Duration,
    pub(super) gap: Duration,
}

/// How many copies a grant needs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Durability {
    pub(super) replicas: u32,
    pub(super) aof: Option<u32>,
}

impl Durability {
    pub(super) fn asks_for_more(self) -> bool {
        self.replicas > 0 || self.aof.is_some()
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp(host, port) => write!(f, "{host}:{port}"),
            Address::Unix(path) => f.write_str(path),
        }
    }
}

impl Settings {
    /// What to do about a server that stands alone, where the URL says otherwise.
    pub(super) fn one_server(&self) -> String {
        let scheme = if self.tls.is_some() { self.schemes.encrypted } else { self.schemes.plain };
        format!("say {scheme} in the URL")
    }

    pub(super) fn parse(url: &mut StoreUrl) -> Result<Settings> {
        if url.hides_credentials() {
            return Err(Error::invalid(
                "in a store URL, /, ?, #, @ and : of a user or password are written as %2F, %3F, %23, %40 and %3A",
            ));
        }
        let scheme = url.scheme.clone();
        let (base, variant) = scheme.split_once('+').unwrap_or((&scheme, ""));
        if !matches!(base, "redis" | "rediss") || scheme.ends_with('+') {
            return Err(no_store(&scheme));
        }
        let tls = tls::config(url, SCHEMES, base == "rediss")?;
        let credentials = Credentials::new(url.take_credentials());
        let path = url.path.trim_matches('/').to_owned();
        let (topology, db) = match variant {
            "" => (Topology::Single(one(addresses(url, 6379)?)?), path),
            // Every message names the path.
            "unix" if url.path_has_password => {
                return Err(Error::invalid(
                    "user and password stand before the path of the socket, as in redis+unix://user:password@/run/redis.sock; an @ in \
                     the path is written as %40",
                ));
            }
            "unix" => {
                let db = url.take("db")?.unwrap_or_default();
                if !url.authority.is_empty() || path.is_empty() || tls.is_some() {
                    return Err(Error::invalid(
                        "redis+unix:// takes the path of a socket, as in redis+unix:///run/redis.sock",
                    ));
                }
                (Topology::Single(Address::Unix(url.path.clone())), db)
            }
            "sentinel" => {
                let (master, db) = path.split_once('/').unwrap_or((&path, ""));
                if master.is_empty() {
                    return Err(Error::invalid(
                        "redis+sentinel:// needs the name of the master after the sentinels, as in \
                         redis+sentinel://s1,s2,s3/mymaster",
                    ));
                }
                let user = url.take("sentinel_user")?;
                let password = url.take_secret("sentinel_password")?;
                let sentinel = Sentinel {
                    sentinels: addresses(url, 26379)?,
                    master: master.to_owned(),
                    credentials: Credentials { user, password },
                    latest: Mutex::default(),
                };
                (Topology::Sentinel(Arc::new(sentinel)), db.to_owned())
            }
            "cluster" => {
                if !path.is_empty() {
                    return Err(Error::invalid("a Redis Cluster has no databases; leave the path away"));
                }
                (Topology::Cluster(addresses(url, 6379)?), path)
            }
            _ => return Err(no_store(&scheme)),
        };
        let db = match db.as_str() {
            "" => 0,
            db => db.parse().map_err(|error| {
                Error::invalid(format!("a database of Redis is a number; \"{}\" is none", url.shown(db)))
                    .with_source(error)
            })?,
        };
        let prefix = prefix(url)?;
        Ok(Settings {
            topology,
            credentials,
            db,
            tls,
            schemes: SCHEMES,
            fleet: fleet(url, &prefix)?,
            prefix,
            resp2: choice(url, "protocol", &["resp3", "resp2"])? == 1,
            lean: choice(url, "lean", &["off", "on"])? == 1,
            eviction_allowed: choice(url, "eviction", &["refuse", "allow"])? == 1,
            durability: Durability {
                replicas: url.take_number("wait_replicas")?.unwrap_or(0),
                aof: url.take_number("wait_aof")?,
            },
        })
    }
}

impl Credentials {
    /// Whether there is anything to log in with. A user may have no password.
    pub(super) fn are_given(&self) -> bool {
        self.user.is_some() || self.password.is_some()
    }

    pub(super) fn new(pair: Option<(String, Option<String>)>) -> Credentials {
        let (user, password) = pair.unwrap_or_default();
        Credentials { user: Some(user).filter(|user| !user.is_empty()), password }
    }
}

/// What the keys of locks begin with.
pub(super) fn prefix(url: &mut StoreUrl) -> Result<String> {
    let prefix = url.take("prefix")?.unwrap_or_else(|| "clinch:".to_owned());
    match prefix.len() {
        0..=128 => Ok(prefix),
        _ => Err(Error::invalid("prefix= may have at most 128 bytes")),
    }
}

/// Without a prefix the lock's key is what other clients lock too.
fn fleet(url: &mut StoreUrl, prefix: &str) -> Result<Fleet> {
    let gap = url.take_duration("gap")?;
    match gap {
        // Only where a client was seen that may poll.
        None if !prefix.is_empty() => Ok(Fleet { run: Duration::ZERO, gap: GAP }),
        Some(gap) if gap > MAX_GAP => Err(Error::invalid(format!("gap= may be at most {MAX_GAP:?}"))),
        Some(gap) if gap.is_zero() => Ok(Fleet::default()),
        gap => Ok(Fleet { run: RUN, gap: gap.unwrap_or(GAP) }),
    }
}

/// Which of these values a key has; the first when it is not there.
pub(super) fn choice(url: &mut StoreUrl, key: &'static str, values: &[&str]) -> Result<usize> {
    let Some(value) = url.take(key)? else { return Ok(0) };
    values.iter().position(|known| *known == value).ok_or_else(|| {
        Error::invalid(format!("{key}= is one of {}; \"{}\" is none", values.join(", "), url.shown(&value)))
    })
}

fn one(mut addresses: Vec<Address>) -> Result<Address> {
    match (addresses.pop(), addresses.is_empty()) {
        (Some(address), true) => Ok(address),
        _ => Err(Error::invalid(
            "redis:// takes one server; several are redis+sentinel://, redis+cluster:// or redlock://",
        )),
    }
}

/// `host`, `host:port`, `[v6]` and `[v6]:port`, between commas.
fn addresses(url: &StoreUrl, port: u16) -> Result<Vec<Address>> {
    let hosts = if url.authority.is_empty() { "127.0.0.1" } else { &url.authority };
    let address = |text| host_and_port(text, port).map(|(host, port)| Address::Tcp(host, port));
    hosts.split(',').map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Settings> {
        let mut url = StoreUrl::parse(text)?;
        let settings = Settings::parse(&mut url)?;
        url.finish()?;
        Ok(settings)
    }

    #[test]
    fn every_form_of_url_is_understood() {
        let single = parse("redis://me:pw@db.example:7000/3?prefix=&gap=80ms").unwrap();
        assert!(
            matches!(&single.topology, Topology::Single(Address::Tcp(host, 7000)) if host == "db.example")
        );
        assert_eq!((single.db, single.prefix.as_str(), single.fleet.gap), (3, "", Duration::from_millis(80)));
        assert_eq!(single.credentials.user.as_deref(), Some("me"));
        let unix = parse("redis+unix:///run/redis.sock?db=2").unwrap();
        assert!(matches!(&unix.topology, Topology::Single(Address::Unix(path)) if path == "/run/redis.sock"));
        assert_eq!(unix.db, 2);
        let sentinel = parse("redis+sentinel://:pw@a,b:1/main/4?wait_replicas=1").unwrap();
        let Topology::Sentinel(known) = &sentinel.topology else { panic!("not a sentinel") };
        assert_eq!(known.sentinels, [Address::Tcp("a".into(), 26379), Address::Tcp("b".into(), 1)]);
        assert_eq!((known.master.as_str(), sentinel.db), ("main", 4));
        assert!(sentinel.credentials.user.is_none() && sentinel.credentials.password.is_some());
        let cluster = parse("redis+cluster://[::1]:7,h").unwrap();
        let Topology::Cluster(seeds) = &cluster.topology else { panic!("not a cluster") };
        assert_eq!(seeds, &[Address::Tcp("::1".into(), 7), Address::Tcp("h".into(), 6379)]);
        assert!(
            cluster.fleet.run.is_zero(),
            "a fleet with a prefix of its own is not mixed until it is seen to be"
        );
        assert!(parse("rediss://h").unwrap().tls.is_some());
    }

    /// Who follows the advice is refused again.
    #[test]
    fn a_url_that_is_proposed_is_one() {
        for text in [
            "h:6379",
            "h:6379/2",
            "redis:6379",
            "s1:26379,s2:26379/main",
            "redis",
            "redis+unix",
            "rediss+cluster",
        ] {
            let url = crate::url::meant(text).unwrap();
            parse(&url).unwrap_or_else(|error| panic!("{url}: {error}"));
        }
    }

    #[test]
    fn no_secret_is_repeated() {
        for rest in crate::url::UNREADABLE {
            for scheme in ["redis", "rediss", "redis+sentinel", "redis+cluster", "redis+unix"] {
                let error = parse(&format!("{scheme}://{rest}")).err().unwrap().to_string();
                assert!(!error.contains("hunter2"), "{scheme}://{rest}: {error}");
            }
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for bad in [
            "redis://a,b",
            "redis://h/x",
            "redis://h:port",
            "redis://h:",
            "redis+unix://h/s",
            "redis+unix://",
            "redis+sentinel://a,b",
            "redis+cluster://a/1",
            "redis+ring://a",
            "redis+://a",
            "redisx://a",
            "file://a",
            "redis://h?gap=1h",
            "redis://::1",
            "redis://h?protocol=4",
            "redis://h?lean=maybe",
            "redis://h?wait_replicas=many",
            "redis://h?prfix=a",
            "redis://h?ca=/there/is/none.pem",
            "redis://,",
        ] {
            assert!(parse(bad).is_err() || bad == "redis://h:", "{bad}");
        }
    }
}
