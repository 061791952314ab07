//! What a `redlock` URL says.

use std::collections::HashSet;
use std::time::Duration;

use super::super::settings::{self, Address, Credentials, Fleet, Settings, Topology, choice};
use crate::backends::tls;
use crate::error::{Error, Result};
use crate::url::{StoreUrl, host_and_port};

/// The port of a server whose port is not given.
const PORT: u16 = 6379;

/// How long a restarted server does not vote, and so the longest TTL, unless the URL says another.
const MAX_TTL: Duration = Duration::from_secs(30);

/// What may stand for `max_ttl=`.
const MAX_TTL_RANGE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(24 * 60 * 60));

/// The most servers: every step goes to all of them.
const MAX_NODES: usize = 15;

/// The two ways to speak, as errors name them.
const SCHEMES: tls::Schemes =
    tls::Schemes { plain: "redlock:// without +tls", encrypted: "redlocks:// or a host with +tls" };

/// A parsed URL.
pub(super) struct Plan {
    /// What is known of each server. All have one prefix.
    pub(super) nodes: Vec<Settings>,
    pub(super) rules: Rules,
}

/// What holds for the whole quorum.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    pub(super) prefix: String,
    /// The longest TTL, and for how long a server that may have forgotten locks does not vote.
    pub(super) max_ttl: Duration,
    /// What must be left of a lease when it is granted.
    pub(super) min_validity: Duration,
    pub(super) fencing: bool,
    /// Whether the servers keep what they acknowledged over a restart.
    pub(super) durable: bool,
}

impl Plan {
    pub(super) fn parse(url: &mut StoreUrl) -> Result<Plan> {
        url.expect(&["redlock", "redlocks"])?;
        let all_encrypted = url.scheme == "redlocks";
        let entries = url.take_servers()?;
        if url.hides_credentials() {
            return Err(unescaped());
        }
        if let [_] = entries.as_slice() {
            return Err(Error::invalid(
                "redlock:// takes three servers or more that know nothing of each other; for one, use redis://",
            ));
        }
        if !(3..=MAX_NODES).contains(&entries.len()) {
            return Err(Error::invalid(format!(
                "redlock:// takes 3 to {MAX_NODES} servers, best an odd number; here are {}",
                entries.len()
            )));
        }
        let encrypted = |host: &str| all_encrypted || host.ends_with("+tls");
        let tls = tls::config(url, SCHEMES, entries.iter().any(|(_, host)| encrypted(host)))?;
        let db = match url.path.trim_matches('/') {
            "" => 0,
            db => db.parse().map_err(|error| {
                Error::invalid(format!("a database of Redis is a number; \"{}\" is none", url.shown(db)))
                    .with_source(error)
            })?,
        };
        let prefix = settings::prefix(url)?;
        let resp2 = choice(url, "protocol", &["resp3", "resp2"])? == 1;
        let eviction_allowed = choice(url, "eviction", &["refuse", "allow"])? == 1;
        let mut seen = HashSet::new();
        let mut nodes = Vec::new();
        for (credentials, text) in entries {
            // The text itself may be a part of a password.
            let (host, port) =
                host_and_port(text.strip_suffix("+tls").unwrap_or(&text), PORT).map_err(|_| unescaped())?;
            let address = Address::Tcp(host, port);
            if !seen.insert(address.clone()) {
                return Err(Error::invalid(format!(
                    "{address} stands twice in the URL; each server has one vote"
                )));
            }
            nodes.push(Settings {
                topology: Topology::Single(address),
                credentials: Credentials::new(credentials),
                db,
                tls: tls.clone().filter(|_| encrypted(&text)),
                schemes: SCHEMES,
                prefix: prefix.clone(),
                resp2,
                lean: false,
                eviction_allowed,
                fleet: Fleet::default(),
                durability: settings::Durability::default(),
            });
        }
        Ok(Plan { nodes, rules: Rules::parse(url, prefix)? })
    }
}

fn unescaped() -> Error {
    Error::invalid(
        "the servers of a redlock:// URL are [user[:password]@]host[:port] between commas; in users and passwords, comma, /, \
         ?, #, @ and : are written as %2C, %2F, %3F, %23, %40 and %3A",
    )
}

impl Rules {
    fn parse(url: &mut StoreUrl, prefix: String) -> Result<Rules> {
        let max_ttl = url.take_duration("max_ttl")?.unwrap_or(MAX_TTL);
        let (least, most) = MAX_TTL_RANGE;
        if !(least..=most).contains(&max_ttl) {
            return Err(Error::invalid(format!("max_ttl= is between {least:?} and 24h; {max_ttl:?} is not")));
        }
        let min_validity = url.take_duration("min_validity")?.unwrap_or_default();
        if min_validity >= max_ttl {
            return Err(Error::invalid("min_validity= must be shorter than max_ttl="));
        }
        let fencing = choice(url, "fencing", &["on", "off"])? == 0;
        let durable = choice(url, "durable", &["off", "on"])? == 1;
        Ok(Rules { prefix, max_ttl, min_validity, fencing, durable })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Plan> {
        let mut url = StoreUrl::parse(text)?;
        let plan = Plan::parse(&mut url)?;
        url.finish()?;
        Ok(plan)
    }

    #[test]
    fn no_secret_is_repeated() {
        for rest in crate::url::UNREADABLE {
            for url in [format!("redlock://{rest},b,c"), format!("redlocks://a,b,{rest}")] {
                let error = parse(&url).err().unwrap().to_string();
                assert!(!error.contains("hunter2"), "{url}: {error}");
            }
        }
    }

    #[test]
    fn each_server_has_its_own_port_user_and_encryption() {
        let plan = parse("redlock://a:p%40%2C@h1:1,h2+tls,[::1]:3+tls,:s@h4/2?prefix=p:&max_ttl=1m").unwrap();
        let [one, two, three, four] = plan.nodes.as_slice() else { panic!("not four") };
        assert_eq!(
            (one.credentials.user.as_deref(), one.credentials.password.as_deref()),
            (Some("a"), Some("p@,"))
        );
        assert_eq!(
            (four.credentials.user.as_deref(), four.credentials.password.as_deref()),
            (None, Some("s"))
        );
        assert!(!two.credentials.are_given());
        let tls = [one, two, three, four].map(|node| node.tls.is_some());
        assert_eq!(tls, [false, true, true, false]);
        let names = plan.nodes.iter().map(|node| match &node.topology {
            Topology::Single(address) => address.to_string(),
            _ => "?".into(),
        });
        assert!(names.eq(["h1:1", "h2:6379", "[::1]:3", "h4:6379"]));
        assert!(plan.nodes.iter().all(|node| node.db == 2 && node.prefix == "p:"));
        let Rules { max_ttl, min_validity, fencing, durable, .. } = plan.rules;
        assert_eq!((max_ttl, min_validity), (Duration::from_secs(60), Duration::ZERO));
        assert!(fencing && !durable);
        assert!(parse("redlocks://a,b,c").unwrap().nodes.iter().all(|node| node.tls.is_some()));
        assert!(parse("redlock://a,b,c,d").is_ok(), "an even number");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (bad, word) in [
            ("redlock://a", "redis://"),
            ("redlock://", "redis://"),
            ("redlock://a,b", "3 to 15"),
            ("redlock://a,b,a", "twice"),
            ("redlock://a,b,a:6379", "twice"),
            ("redlock://a,b,a+tls", "twice"),
            ("redlock://a,b,", "between commas"),
            ("redlock://a,b,c/db", "number"),
            ("redlock://a,b,c?ca=/x.pem", "+tls"),
            ("redlock://a,b,c?max_ttl=25h", "24h"),
            ("redlock://a,b,c?min_validity=30s", "shorter"),
            ("redlock://a,b,c?fencing=no", "fencing="),
            ("redlock://a,b,c?maxttl=1s", "max_ttl"),
        ] {
            let error = parse(bad).err().unwrap_or_else(|| panic!("{bad} is understood"));
            assert!(error.to_string().contains(word), "{bad}: {error}");
        }
    }

    #[test]
    fn a_password_that_was_not_escaped_does_not_show() {
        for bad in [
            "redlock://:hun,ter2@a,b,c",
            "redlock://:x@a,:hun/ter2@b,c",
            "redlock://a,b,:hun/ter2@c?x=1",
            "redlock://a,:hun?ter2@b,c",
            "redlock://:hun:ter2@a,b,c/ter2",
            "redlock://a,b,hun:ter2",
        ] {
            let error = parse(bad).err().unwrap_or_else(|| panic!("{bad} is understood"));
            let text = format!("{error:?}");
            assert!(!text.contains("ter2") || bad.ends_with("/ter2"), "{bad}: {text}");
        }
    }
}
