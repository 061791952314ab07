//! What a store URL begins with, and what was meant by one that begins otherwise.
//!
//! What could not be read may hold a password anywhere, so of a text that is refused only that is repeated which is a scheme, a path,
//! or hosts with a port by which a server is known.

use crate::error::{Error, ErrorKind};

/// What URLs of a store begin with.
struct Scheme {
    name: &'static str,
    /// What brings it.
    feature: &'static str,
    is_here: bool,
    example: &'static str,
}

const fn scheme(name: &'static str, feature: &'static str, is_here: bool, example: &'static str) -> Scheme {
    Scheme { name, feature, is_here, example }
}

const REDIS: bool = cfg!(feature = "redis");

const SCHEMES: [Scheme; 13] = [
    scheme("file", "file", cfg!(feature = "file"), "file:///var/lib/clinch"),
    scheme("memory", "memory", cfg!(feature = "memory"), "memory://"),
    scheme("redis", "redis", REDIS, "redis://HOST"),
    scheme("rediss", "redis", REDIS, "rediss://HOST"),
    scheme("redis+unix", "redis", REDIS, "redis+unix:///run/redis.sock"),
    scheme("redis+sentinel", "redis", REDIS, "redis+sentinel://HOST,HOST,HOST/MASTER"),
    scheme("rediss+sentinel", "redis", REDIS, "rediss+sentinel://HOST,HOST,HOST/MASTER"),
    scheme("redis+cluster", "redis", REDIS, "redis+cluster://HOST,HOST,HOST"),
    scheme("rediss+cluster", "redis", REDIS, "rediss+cluster://HOST,HOST,HOST"),
    scheme("redlock", "redis", REDIS, "redlock://HOST,HOST,HOST"),
    scheme("redlocks", "redis", REDIS, "redlocks://HOST,HOST,HOST"),
    scheme("etcd", "etcd", cfg!(feature = "etcd"), "etcd://HOST,HOST,HOST"),
    scheme("etcds", "etcd", cfg!(feature = "etcd"), "etcds://HOST,HOST,HOST"),
];

/// What others call these stores.
const OTHERS: [(&str, &str); 8] = [
    ("valkey", "redis"),
    ("valkeys", "rediss"),
    ("unix", "redis+unix"),
    ("redis-socket", "redis+unix"),
    ("sentinel", "redis+sentinel"),
    ("redis-sentinel", "redis+sentinel"),
    ("cluster", "redis+cluster"),
    ("redis-cluster", "redis+cluster"),
];

/// What `clinch run` puts in place of a URL that may hold a secret. Without one, a run inside would take the default store.
const WITHHELD: &str = "withheld";

/// How many letters may be wrong.
const TYPOS: usize = 2;

/// Why a URL with this scheme cannot be opened, by this build or by who was asked to.
pub(crate) fn no_store(scheme: &str) -> Error {
    let is_one = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    if scheme.is_empty() || !scheme.chars().all(is_one) {
        return missing("");
    }
    let message = match SCHEMES.iter().find(|known| known.name == scheme) {
        Some(Scheme { is_here: true, .. }) => format!("{scheme}:// is another store"),
        Some(Scheme { feature, .. }) => {
            format!("this build has no store for {scheme}://; build it with the feature \"{feature}\"")
        }
        None if scheme == WITHHELD => "the URL of the store may hold a password, which `clinch run` keeps from its job; set CLINCH_URL in the job \
                                       itself, from a file that only it can read"
            .to_owned(),
        None => format!("there is no store \"{scheme}://\"{}", hint(&nearest(scheme))),
    };
    Error::new(ErrorKind::Unsupported, message)
}

/// Why a text that has no scheme is no store URL.
pub(super) fn missing(text: &str) -> Error {
    let is_here =
        |url: &String| SCHEMES.iter().any(|one| one.is_here && url.split(':').next() == Some(one.name));
    let hint = match meant(text).filter(is_here) {
        Some(url) => format!("; did you mean {url}?"),
        None => hint(&[]),
    };
    Error::invalid(format!("a store URL begins with the kind of the store and \"://\"{hint}"))
}

/// Names what may have been meant, or all that there is.
fn hint(near: &[&Scheme]) -> String {
    let name = |scheme: &&Scheme| match scheme.is_here {
        true => format!("{}://", scheme.name),
        false => format!("{}:// (this build lacks the feature \"{}\")", scheme.name, scheme.feature),
    };
    if !near.is_empty() {
        return format!("; did you mean {}?", near.iter().map(name).collect::<Vec<_>>().join(" or "));
    }
    let here: Vec<&str> =
        SCHEMES.iter().filter(|scheme| scheme.is_here).map(|scheme| scheme.example).collect();
    if here.is_empty() { "; this build has no store".to_owned() } else { format!(": {}", here.join(", ")) }
}

/// The URL that was meant by a path, by hosts with a known port, or by the name of a store.
pub(crate) fn meant(text: &str) -> Option<String> {
    let is_plain = |text: &str| text.chars().all(|c| c.is_alphanumeric() || "/._- ".contains(c));
    if text.starts_with("//") {
        // With a host, or without a scheme.
        return None;
    }
    if text.starts_with('/') {
        return is_plain(text).then(|| format!("file://{text}"));
    }
    if let Some(url) = by_port(text) {
        return Some(url);
    }
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let scheme = SCHEMES.iter().find(|scheme| scheme.name.eq_ignore_ascii_case(name))?;
    match (scheme.name, rest) {
        // The default directory.
        ("file", "") => Some("file://".to_owned()),
        (_, "") => Some(scheme.example.to_owned()),
        ("file", path) if path.starts_with('/') && is_plain(path) => Some(format!("file://{path}")),
        _ => None,
    }
}

/// The URL of servers that are known by their port, if that says all.
fn by_port(text: &str) -> Option<String> {
    let (hosts, path) = text.split_once('/').unwrap_or((text, ""));
    let is_name = |text: &str, more: &str| {
        !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
    };
    let ports = hosts.split(',').map(|host| {
        let (host, port) = host.split_once(':')?;
        is_name(host, "._-").then_some(port)
    });
    let ports = ports.collect::<Option<Vec<_>>>()?;
    let port = ports.first().filter(|first| ports.iter().all(|port| port == *first))?;
    let scheme = match (*port, ports.len(), path) {
        ("6379", 1, db) if db.chars().all(|c| c.is_ascii_digit()) => "redis",
        ("26379", _, master) if is_name(master, "_-") => "redis+sentinel",
        ("2379", _, "") => "etcd",
        _ => return None,
    };
    Some(format!("{scheme}://{text}"))
}

/// The schemes that are written nearly like this one, or that others write so.
fn nearest(scheme: &str) -> Vec<&'static Scheme> {
    let same = SCHEMES.iter().map(|known| (known.name, known.name));
    let named = |name| SCHEMES.iter().find(|known| known.name == name);
    // A short word is near to all others.
    let most = TYPOS.min(scheme.len() / 2);
    let mut near: Vec<_> = same
        .chain(OTHERS)
        .filter_map(|(name, meant)| Some((strsim::damerau_levenshtein(name, scheme), named(meant)?)))
        .filter(|(distance, _)| *distance <= most)
        .collect();
    let least = near.iter().map(|(distance, _)| *distance).min();
    near.retain(|(distance, _)| Some(*distance) == least);
    near.sort_by_key(|(_, scheme)| scheme.name);
    near.dedup_by_key(|(_, scheme)| scheme.name);
    near.into_iter().map(|(_, scheme)| scheme).collect()
}

/// What this build has.
#[cfg(test)]
pub(crate) fn here() -> impl Iterator<Item = &'static str> {
    SCHEMES.iter().filter(|scheme| scheme.is_here).map(|scheme| scheme.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_scheme_is_answered_with_the_one_that_was_meant() {
        for (scheme, meant) in [
            ("redsi", "redis://"),
            ("rdeis", "redis://"),
            ("redi", "redis://"),
            ("redis+sentinal", "redis+sentinel://"),
            ("rediss+unix", "redis+unix://"),
            ("valkey", "redis://"),
            ("redis-sentinel", "redis+sentinel://"),
            ("ecd", "etcd://"),
            ("files", "file://"),
            ("redlok", "redlock://"),
        ] {
            let error = no_store(scheme).to_string();
            assert!(error.contains(&format!("did you mean {meant}")), "{scheme}: {error}");
        }
        assert_eq!(no_store("rediscluster").to_string().matches("redis+cluster").count(), 1);
        let tie = no_store("redss").to_string();
        assert!(tie.contains("redis://") && tie.contains("rediss://"), "one of them is not encrypted: {tie}");
        for far in ["s3", "https", "consul", "postgres"] {
            assert!(!no_store(far).to_string().contains("did you mean"), "{far}");
        }
        for Scheme { name, feature, is_here, .. } in SCHEMES {
            let error = no_store(name).to_string();
            assert!(is_here || error.contains(&format!("feature \"{feature}\"")), "{error}");
        }
    }

    #[test]
    fn a_path_or_a_host_is_answered_with_its_url() {
        for (text, url) in [
            ("/tmp/locks", "file:///tmp/locks"),
            ("localhost:6379", "redis://localhost:6379"),
            ("redis:6379", "redis://redis:6379"),
            ("r:6379/2", "redis://r:6379/2"),
            ("etcd1:2379,etcd2:2379", "etcd://etcd1:2379,etcd2:2379"),
            ("s1:26379,s2:26379/main", "redis+sentinel://s1:26379,s2:26379/main"),
            ("redis", "redis://HOST"),
            ("FILE:/var/lib/x", "file:///var/lib/x"),
            ("file", "file://"),
            ("memory", "memory://"),
        ] {
            assert_eq!(meant(text).as_deref(), Some(url), "{text}");
        }
        let error = missing("/tmp/locks").to_string();
        assert_eq!(error.ends_with("did you mean file:///tmp/locks?"), cfg!(feature = "file"), "{error}");
    }

    /// A directory of one host in place of a shared one, or `/`, would be another lock.
    #[test]
    fn what_may_be_another_store_is_not_guessed() {
        for text in [
            "locks",
            "//nfs/vol",
            "//redis.example/0",
            "file:locks",
            "filer:/vol/locks",
            "host:1",
            "a:6379,b:6379",
            "s1:26379",
            "etcd:x",
        ] {
            assert_eq!(meant(text), None, "{text}");
        }
    }

    /// P11: a password may stand anywhere in what could not be read.
    #[test]
    fn no_secret_is_repeated() {
        for text in [
            "redis:me:hunter2@host",
            "redis:me:hunter2%40host",
            "redis%3A%2F%2Fme%3Ahunter2%40host:6379",
            "me:hunter2:localhost:6379",
            "hunter2@localhost:6379",
            "/x?password=hunter2",
            "/x@hunter2:y",
        ] {
            assert!(!missing(text).to_string().contains("hunter2"), "{text}");
        }
        for scheme in ["me:hunter2@redis", "me%3ahunter2", "hunter2@h:6379?prefix=a", "hunter2\u{1b}[2j"] {
            assert!(!no_store(scheme).to_string().contains("hunter2"), "{scheme}");
        }
    }
}
